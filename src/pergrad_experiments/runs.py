"""The run folder: what is written where, and how it survives being killed at any moment.

Small files are written beside their place and renamed. Metrics are appended; a checkpoint notes how long the file was, and
resuming cuts it there. A checkpoint is complete when the list of its files, with checksums, stands beside it: the list is
written last and removed first, so what has no list is rubbish, and what has one can be checked.

Reading trusts nothing: JSON and arrays only, checked against what is expected.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config
from .errors import BadInput, disk_full, is_disk_full

KEEP = 2  # checkpoints
STATES = ("running", "done", "diverged", "stopped")
_BEGUN = {"lock", "checkpoints", "outliers", "tensorboard"} | {
    f"{n}.json" for n in ("environment", "data", "status", "config")
}


# ------------------------------------------------------------------------------------- small files


def write_json(path: Path, data: Any) -> None:
    """All of it or nothing, also if the power goes."""
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w") as file:
        json.dump(plain(data), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _sync_folder(path.parent)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"{path.parent} has no {path.name}: it is not a run folder, or it is damaged.") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON ({error}): it is damaged.") from None


def plain(x: Any) -> Any:
    """For JSON: numbers as short as they can be and still be the same float32, and null for what is not finite."""
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    if isinstance(x, np.ndarray | jax.Array):
        return [plain(value) for value in np.asarray(x)] if x.ndim else plain(np.asarray(x)[()])
    if isinstance(x, np.floating):
        x = float(str(x))
    if isinstance(x, np.integer | np.bool_):
        return x.item()
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------- a folder


@dataclasses.dataclass(frozen=True)
class Run:
    """What `read` gives: all of a run folder but its checkpoints."""

    folder: Path
    config: Config
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    data: dict[str, Any]
    status: dict[str, Any]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == kind]


def read(folder: str | Path) -> Run:
    """A run folder, as data. Nothing in it is executed or unpickled."""
    folder = Path(folder)
    config = Config.from_json(read_json(folder / "config.json"), str(folder / "config.json"))
    rest = {name: read_json(folder / f"{name}.json") for name in ("environment", "data", "status")}
    for name, value in rest.items():
        if not isinstance(value, dict):
            raise BadInput(f"{folder / name}.json holds {type(value).__name__}; expected an object. It is damaged.")
    if rest["status"].get("state") not in STATES:
        raise BadInput(
            f"{folder / 'status.json'} has the state {rest['status'].get('state')!r}; expected one of {STATES}."
        )
    return Run(folder, config, read_metrics(folder / "metrics.jsonl"), **rest)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # the last one is empty, or was cut short by a kill
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["kind"], str) or not isinstance(entry["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise BadInput(
                f"{path}, line {number}: expected a JSON object with `kind` and `step`. It is damaged."
            ) from None
        metrics.append(entry)
    return metrics


class Folder:
    """A run folder that is written to, by this process alone."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")

    @classmethod
    def create(cls, path: Path, config: Config, data: dict[str, Any]) -> Folder:
        """A new one. What exists is not touched, unless it was begun by a run that got no further than here."""
        if (path / "config.json").exists():
            raise BadInput(f"{path} exists: write `pergrad resume {path}`, or --folder with another name.")
        if path.exists() and (not path.is_dir() or {p.name.removesuffix(".partial") for p in path.iterdir()} - _BEGUN):
            raise BadInput(f"{path} exists, and is no run folder: write --folder with another name.")
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder._lock()
        for name in ("checkpoints", "outliers", "tensorboard"):
            (path / name).mkdir(exist_ok=True)
        write_json(path / "environment.json", environment())
        write_json(path / "data.json", data)
        folder.set_status("running", step=0)
        write_json(path / "config.json", config.to_json())  # the last: with it, it is a run folder
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[Folder, Config]:
        """One that exists, to go on with."""
        if not path.is_dir():
            raise BadInput(f"{path} is not there: expected a run folder, as `pergrad train` makes them.")
        config = Config.from_json(read_json(path / "config.json"), str(path / "config.json"))
        folder = cls(path)
        folder._lock()
        return folder, config

    def _lock(self):
        # The kernel lets go of it when the process ends, however it ends.
        self._lock_file = (self.path / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"another process is writing to {self.path}: wait for it, or stop it.") from None

    def close(self):
        self._lock_file.close()

    def set_status(self, state: str, **more: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(self.path / "status.json", {"state": state, **more, "time": now})

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Lines of metrics, on the disk when this returns or not at all (a line cut short is ignored, and cut off)."""
        text = "".join(json.dumps(plain(entry)) + "\n" for entry in entries)
        if text:
            with open(self.path / "metrics.jsonl", "ab") as file:
                file.write(text.encode())

    def metrics_bytes(self) -> int:
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def check_metrics(self, size: int) -> None:
        """Whether what a checkpoint saw is still there."""
        there = self.metrics_bytes()
        if there < size:
            raise BadInput(
                f"{self.path / 'metrics.jsonl'} has {there} bytes, and had {size} when the checkpoint was written: it is "
                "damaged. Start a new run."
            )

    def cut_metrics(self, size: int) -> None:
        """Back to what a checkpoint saw."""
        if self.metrics_bytes() > size:
            os.truncate(self.path / "metrics.jsonl", size)

    def note_environment(self, step: int) -> None:
        """If it is not the one that the run began in: from then on, numbers may differ in their last bits."""
        now = environment()
        before = read_json(self.path / "environment.json")
        same = ("device", "processor", "python", "versions", "commit")
        if not isinstance(before, dict) or any(plain(now[key]) != before.get(key) for key in same):
            write_json(self.path / f"environment-{step}.json", now)


# ------------------------------------------------------------------------------------- checkpoints


#: What is noted beside a checkpoint's files.
NOTES = {"step": int, "seconds": int | float, "evaluation": dict, "metrics_bytes": int, "data": dict, "files": dict}


class Checkpoints:
    """Orbax checkpoints by step, each with the list of its files beside it."""

    def __init__(self, path: Path):
        self.path = path

    def steps(self) -> list[int]:
        """The steps of the complete ones."""
        if not self.path.is_dir():
            return []
        found = (re.fullmatch(r"(\d+)\.json", p.name) for p in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, tree: Any, **notes: Any) -> None:
        self._remove_rubbish()
        target = self.path / str(step)
        try:
            save_tree(target, tree)
            write_json(self.path / f"{step}.json", {"step": step, **notes, "files": list_files(target, sync=True)})
        except Exception as error:
            if is_disk_full(error):
                raise disk_full(target, f"and go on with `pergrad resume {self.path.parent}`") from error
            raise
        for old in self.steps()[:-KEEP]:
            (self.path / f"{old}.json").unlink()
            shutil.rmtree(self.path / str(old), ignore_errors=True)

    def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The checkpoint (the last one, if not said otherwise) in the tree of ``like``, and its notes."""
        steps = self.steps()
        step = steps[-1] if step is None else step
        run = self.path.parent
        others = [s for s in steps if s != step]
        instead = (
            f"Write `pergrad resume {run} --from-step {others[-1]}` to go on from there."
            if others
            else "There is no other: start a new run."
        )
        if step not in steps:
            raise BadInput(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps)) or 'none'}.")
        notes = read_json(self.path / f"{step}.json")
        target = self.path / str(step)
        try:
            if not all(isinstance(notes[name], kind) for name, kind in NOTES.items()):
                raise TypeError
            listed, there = notes["files"], list_files(target)
            for name in sorted(listed.keys() | there.keys()):
                if name not in there:
                    raise BadInput(f"the checkpoint {target} has lost its file {name}. {instead}")
                if listed.get(name) != there[name]:
                    raise BadInput(f"the checkpoint {target} has a changed file, {name}. {instead}")
        except (AttributeError, KeyError, TypeError):
            raise BadInput(f"{self.path / f'{step}.json'} is damaged. {instead}") from None
        try:
            return load_tree(target, like), notes
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise BadInput(f"the checkpoint {target} does not fit this run ({reason}). {instead}") from error

    def drop_after(self, step: int) -> None:
        for later in [s for s in self.steps() if s > step]:
            (self.path / f"{later}.json").unlink()
        self._remove_rubbish()

    def _remove_rubbish(self):
        complete = set(map(str, self.steps()))
        for path in self.path.iterdir():
            # What a killed process left: Orbax's temporary folders, and folders without a list.
            if path.is_dir() and path.name not in complete and re.match(r"\d+(\.|$)", path.name):
                shutil.rmtree(path)


def save_tree(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), flat(tree))


def load_tree(path: Path, like: Any) -> Any:
    import orbax.checkpoint as ocp

    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in flat(like).items()}
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.restore(path.absolute(), wanted)
    return unflat(stored, like)


def flat(tree: Any) -> dict[str, jax.Array]:
    """Arrays by path: a checkpoint does not depend on the classes of an optimizer's state. Keys as their bits."""
    leaves = jax.tree.flatten_with_path(tree)[0]
    return {_name(path): jax.random.key_data(x) if _is_key(x) else jnp.asarray(x) for path, x in leaves}


def unflat(stored: dict[str, jax.Array], like: Any) -> Any:
    def one(path, x):
        value = stored[_name(path)]
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(x)) if _is_key(x) else value

    return jax.tree.map_with_path(one, like)


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_key(x) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def list_files(folder: Path, sync: bool = False) -> dict[str, list]:
    """Each file's size and SHA-256."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if sync:
                os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest]
    return files


# ------------------------------------------------------------------------------------- environment


def environment() -> dict[str, Any]:
    """The machine's kind, versions, and the commit, if there is one."""
    device = jax.devices()[0]
    packages = (
        "pergrad",
        "jax",
        "jaxlib",
        "numpy",
        "optax",
        "flax",
        "orbax-checkpoint",
        "grain",
        "tokenizers",
        "ale-py",
    )
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "command": ["pergrad", *sys.argv[1:]] if Path(sys.argv[0]).name == "pergrad" else None,
    }


def _processor() -> str:
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    folder = Path(__file__).parent

    def git(*words):
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        # An installed copy may lie inside somebody else's repository, whose commit says nothing.
        if git("ls-files", "--error-unmatch", "runs.py") is None:
            return None
        commit = git("rev-parse", "HEAD")
        return f"{commit}, changed" if git("status", "--porcelain", "--untracked-files=no", "--", "..") else commit
    except (OSError, subprocess.TimeoutExpired):
        return None
