"""The record of a run: where it ran, what the bars say, the JSON file."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import jax
import numpy as np

from .columns import EVE, JUDGED

HERE = Path(__file__).parent


def machine() -> dict:
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else _cpu_model(),
        "devices": jax.device_count(),
        "cpu": _cpu_model(),
        "cores": cores,
    }


def _cpu_model():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict:
    found = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    for name in ("jaxlib", "optax", "pergrad"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> dict:
    """The commit and whether the tree differs from it (its recorded results aside); null outside of git."""

    def git(*args):
        return subprocess.run(("git", *args), cwd=HERE, capture_output=True, text=True, check=True).stdout

    try:
        changes = git("status", "--porcelain", "--", ":/", ":(exclude)results")
        head = git("rev-parse", "--verify", "--quiet", "HEAD")
        return {"commit": head.strip(), "dirty": bool(changes.strip())}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def bars(rows: list[dict]) -> list[dict]:
    """Every bar of every row: what was allowed, what was measured, met or missed.

    They are for mean + second moment, × plain; "eve" is for the time of a training step by Eve, × Adam's.
    """
    out = []
    for entry in rows:
        for quantity, bar in entry["bars"].items():
            if quantity == EVE:
                column, kind = entry.get("steps", {}).get(EVE), "time"
            else:
                column, kind = entry["columns"].get(JUDGED), quantity
            measured = (column or {}).get("ratios", {}).get(kind)
            if isinstance(measured, dict):
                measured = measured["median"]
            if measured is None:
                verdict = "not run" if column is None else "failed"
            else:
                verdict = "met" if measured <= bar else "missed"
            fields = ("row", "quantity", "bar", "measured", "verdict")
            out.append(dict(zip(fields, (entry["row"], quantity, bar, measured, verdict))))
    return out


def new_path(device: str) -> Path:
    """results/<device>-<date>.json, numbered if there is one of today."""
    stem, n = f"{device}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", 1
    while (path := HERE / "results" / (f"{stem}.json" if n == 1 else f"{stem}-{n}.json")).exists():
        n += 1
    return path


def write(path: Path, rows: list[dict], peers: dict, options: dict, machine: dict, tree: dict) -> None:
    """`tree` is what `commit` said before anything was measured."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions(),
        **tree,
        "options": options,
        "bars": bars(rows),
        "rows": rows,
        "peers": peers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
