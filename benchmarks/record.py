"""The record of a run: where it ran, what the bars say, the JSON file and the table on the screen."""

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
from pathlib import Path

import jax
import numpy as np

from .columns import JUDGED, PLAIN

HERE = Path(__file__).parent
MIB = 2**20
WIDTH = 132  # of the table at least: a narrow terminal wraps it, nothing is cut


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
    """Every bar of every row for mean + second moment: what was allowed, what was measured, met or missed."""
    out = []
    for entry in rows:
        column = entry["columns"].get(JUDGED)
        for quantity, bar in entry["bars"].items():
            measured = (column or {}).get("ratios", {}).get(quantity)
            if isinstance(measured, dict):
                measured = measured["median"]
            if measured is None:
                verdict = "not run" if column is None else "failed"
            else:
                verdict = "met" if measured <= bar else "missed"
            fields = ("row", "quantity", "bar", "measured", "verdict")
            out.append(dict(zip(fields, (entry["row"], quantity, bar, measured, verdict))))
    return out


def write(rows: list[dict], options: dict, machine: dict, path: Path | None) -> Path:
    now = datetime.datetime.now(datetime.UTC)
    if path is None:
        stem, n = f"{jax.default_backend()}-{now:%Y-%m-%d}", 1
        while (path := HERE / "results" / (f"{stem}.json" if n == 1 else f"{stem}-{n}.json")).exists():
            n += 1
    record = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions(),
        **commit(),
        "options": options,
        "bars": bars(rows),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


# ------------------------------------------------------------------------------------ on the screen


def _cell(column, plain):
    if "ratios" not in column:
        return "failed"
    time, ratios = column["seconds"], column["ratios"]
    if plain:
        temp, build = column["memory"]["temporary"] / MIB, column["build_seconds"]["median"]
        median, q1, q3 = (time[k] * 1e3 for k in ("median", "q1", "q3"))
        return f"{median:.1f} ms\n{q1:.1f}–{q3:.1f}\n{temp:.1f} MiB\n{build:.2f} s"
    time = ratios["time"]
    spread = f"{time['q1']:.2f}–{time['q3']:.2f}"
    return f"{time['median']:.2f}\n{spread}\n{ratios['memory']:.2f}\n{ratios['compile']['median']:.2f}"


def _number(measured):
    return "" if measured is None else f"{measured:.3f}"


def _agreement(check):
    if "error" in check:
        return "not compared"
    lines = [f"{what} {error:.0e}" for what, error in check["errors"].items()]
    return "\n".join(lines if check["agrees"] else [*lines, f"WRONG: over {check['limit']:.0e}"])


def show(rows: list[dict]) -> None:
    """A table of the ratios to plain (time and quartiles, temporary memory, trace + compile); the bars."""
    names = list(rows[0]["columns"])
    head = ["", *(n.replace(" + ", "\n+ ") for n in names), "relative error\nagainst the twin"]
    body = [
        [
            f"{r['row']}\nbatch of {r['batch_size']}",
            *(_cell(r["columns"][n], n == PLAIN) for n in names),
            _agreement(r["agreement"]),
        ]
        for r in rows
    ]
    title = "time, its quartiles, temporary memory, trace + compile: × the plain gradient of the same run"
    _print_table(title, head, body)
    failures = [(r["row"], n, c["error"]) for r in rows for n, c in r["columns"].items() if "error" in c]
    failures += [(r["row"], "agreement", r["agreement"]["error"]) for r in rows if "error" in r["agreement"]]
    if failures:
        _print_table("what failed", ["row", "column", "error"], [list(f) for f in failures])
    verdicts = [[b["row"], b["quantity"], f"≤ {b['bar']}", _number(b["measured"]), b["verdict"]] for b in bars(rows)]
    _print_table(f"bars of {JUDGED}", ["row", "quantity", "bar", "measured", ""], verdicts)


def _print_table(title, head, body):
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n{_plain_table(head, body)}")
        return
    several_lines = any("\n" in cell for line in body for cell in line)
    table = Table(title=title, title_justify="left", show_lines=several_lines)
    for name in head:
        table.add_column(name, no_wrap=name != "error")
    for line in body:
        table.add_row(*line)
    Console(width=max(Console().width, WIDTH)).print(table)


def _plain_table(head, body):
    lines = [[cell.split("\n") for cell in line] for line in [head, *body]]
    widths = [max(len(part) for line in lines for part in line[i]) for i in range(len(head))]
    out = []
    for line in lines:
        for parts in itertools.zip_longest(*line, fillvalue=""):
            out.append("  ".join(part.ljust(w) for part, w in zip(parts, widths)).rstrip())
        out.append("")
    return "\n".join(out)
