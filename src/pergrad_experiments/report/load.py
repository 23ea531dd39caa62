"""Run folders as data, whoever wrote them: bounded in size, inside the folder, and every value of the kind that it should be.

What does not fit is skipped and counted, so that a report can say so. `runs.read` is for one's own folders; this one holds
only what plots need, and reads line by line.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..errors import BadInput

SMALL = 1 << 20  # bytes of config.json and the like
METRICS = 2 << 30
LINE = 4 << 20
IMAGE = 1 << 20
LAYERS, STATS, OUTLIERS, METRIC_NAMES = 400, 240, 8, 12
TEXT = 600  # characters of an example
TRAIN = ("loss", "step_length", "gradient_norm", "learning_rate", "throughput")


@dataclasses.dataclass(frozen=True)
class Outlier:
    """An example with a large gradient, and what it looks like."""

    index: float
    norm: float
    loss: float
    text: str | None = None
    image: bytes | None = None  # a PNG that was made here


@dataclasses.dataclass
class Run:
    """What a report needs of a run."""

    folder: Path
    config: Config
    status: dict[str, Any]
    environment: dict[str, Any]
    train: dict[str, np.ndarray]  # "step", "examples" and `TRAIN`, all of one length
    evals: dict[str, np.ndarray]  # "step", "examples", and the task's metrics
    stats: list[dict[str, Any]]  # "step", "examples", "snr", "share_mean", "trace", "squared_norm"
    norms: dict[str, list[float]] | None  # "edges", "counts": the last
    norms_step: int = 0
    outliers: list[Outlier] = dataclasses.field(default_factory=list)
    skipped: int = 0  # lines that could not be read

    @property
    def ended(self) -> bool:
        """For good: a run that diverged would do so again."""
        return self.status.get("state") in ("done", "diverged")

    @property
    def state(self) -> str:
        """ "done", or how it ended in words."""
        state, step = self.status.get("state"), self.status.get("step")
        last = int(self.train["step"][-1]) if len(self.train["step"]) else 0
        if state == "done":
            return "done"
        if state == "diverged":
            return f"diverged at step {step}" if isinstance(step, int) else "diverged"
        return f"at step {last} of {self.config.steps}"

    def final_loss(self) -> float:
        """Training loss over the last twentieth of the steps; infinite if it diverged."""
        loss = self.train["loss"]
        if self.status.get("state") == "diverged" or not len(loss):
            return math.inf
        value = float(np.mean(loss[-max(1, len(loss) // 20) :]))
        return value if math.isfinite(value) else math.inf


def run(folder: Path) -> Run:
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"{folder} is not there: expected a run folder, as `pergrad train` makes them.")
    config = Config.from_json(small(folder, "config.json"), str(folder / "config.json"))
    status = small(folder, "status.json") if (folder / "status.json").exists() else {}
    environment = small(folder, "environment.json") if (folder / "environment.json").exists() else {}
    found = Run(folder, config, as_dict(status), as_dict(environment), {}, {}, [], None)
    read_metrics(found)
    return found


def as_dict(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else {}


def opened(folder: Path, name: str, limit: int) -> io.BufferedReader:
    """A file of the folder: a plain one, not over the limit, and not one that a link makes out of something else."""
    path = folder / name
    try:
        inside = path.resolve(strict=True)
        state = inside.stat()
    except (OSError, ValueError, RuntimeError):
        raise BadInput(f"{folder} has no {name}: it is not a run folder, or it is damaged.") from None
    if not inside.is_relative_to(folder.resolve()) or not stat.S_ISREG(state.st_mode):
        raise BadInput(
            f"{path} is not a file of its own: expected one in the run folder, not a link that leads out of it."
        )
    if state.st_size > limit:
        raise BadInput(f"{path} has {state.st_size:,} bytes; a report reads at most {limit:,}.")
    return open(inside, "rb")


def small(folder: Path, name: str) -> Any:
    with opened(folder, name, SMALL) as file:
        try:
            return json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{folder / name} cannot be read as JSON ({str(error)[:100]}): it is damaged.") from None


def real(x: Any) -> float:
    """A number, or NaN in place of what is none."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return math.nan
    try:
        return float(x)
    except OverflowError:
        return math.nan


def reals(x: Any, most: int) -> list[float]:
    return [real(v) for v in x[:most]] if isinstance(x, list) else []


def by_layer(x: Any) -> dict[str, float]:
    return {str(name)[:200]: real(value) for name, value in list(x.items())[:LAYERS]} if isinstance(x, dict) else {}


def read_metrics(found: Run) -> None:
    train: dict[str, list[float]] = {name: [] for name in ("step", "examples", *TRAIN)}
    evals: list[dict[str, float]] = []
    last: dict[str, Any] = {}
    every, seen = 1, 0
    for entry in entries(found):
        step, examples, kind = real(entry.get("step")), real(entry.get("examples")), entry.get("kind")
        if not (0 <= step < 1e15) or not (0 <= examples < 1e18):
            found.skipped += 1
        elif kind == "train":
            train["step"].append(step)
            train["examples"].append(examples)
            for name in TRAIN:
                train[name].append(real(entry.get(name)))
        elif kind == "eval":
            evals.append({str(k)[:60]: real(v) for k, v in entry.items() if k not in ("kind", "seconds")})
        elif kind == "stats":
            last = entry
            if seen % every == 0:
                found.stats.append(
                    {
                        "step": step,
                        "examples": examples,
                        "snr": by_layer(entry.get("snr")),
                        "share_mean": by_layer(entry.get("share_mean")),
                        "trace": real(as_dict(entry.get("noise_scale")).get("trace")),
                        "squared_norm": real(as_dict(entry.get("noise_scale")).get("squared_norm")),
                    }
                )
            seen += 1
            if len(found.stats) > STATS:  # half of them will do
                found.stats, every = found.stats[::2], every * 2
        else:
            found.skipped += 1
    found.train = {name: np.array(values, float) for name, values in train.items()}
    names = list(dict.fromkeys(k for e in evals for k in e if k not in ("step", "examples")))[:METRIC_NAMES]
    found.evals = {n: np.array([e.get(n, math.nan) for e in evals], float) for n in ("step", "examples", *names)}
    norms = as_dict(last.get("norms"))
    edges, counts = reals(norms.get("edges"), 201), reals(norms.get("counts"), 200)
    good = len(edges) == len(counts) + 1 > 1 and all(map(math.isfinite, edges + counts))
    if good and min(counts) >= 0 and all(a <= b for a, b in itertools.pairwise(edges)) and edges[0] < edges[-1]:
        found.norms, found.norms_step = {"edges": edges, "counts": counts}, int(real(last["step"]))
    listed = last.get("outliers")
    for one in listed[:OUTLIERS] if isinstance(listed, list) else ():
        found.outliers.append(outlier(found.folder, as_dict(one)))


def entries(found: Run):
    """The lines that are JSON objects; the last may be cut short."""
    if not (found.folder / "metrics.jsonl").exists():
        return
    with opened(found.folder, "metrics.jsonl", METRICS) as file:
        whole = True  # whether this line began where it should
        while line := file.readline(LINE):
            ended = line.endswith(b"\n")
            if not whole or not ended:
                found.skipped += whole and len(line) == LINE
                whole = ended
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if isinstance(entry, dict):
                yield entry
            else:
                found.skipped += 1


def outlier(folder: Path, entry: dict[str, Any]) -> Outlier:
    index, norm, loss = (real(entry.get(name)) for name in ("index", "norm", "loss"))
    text, name = entry.get("text"), entry.get("image")
    if isinstance(text, str):
        return Outlier(index, norm, loss, text=text[:TEXT] + ("…" if len(text) > TEXT else ""))
    return Outlier(index, norm, loss, image=image(folder, name) if isinstance(name, str) else None)


def image(folder: Path, name: str) -> bytes | None:
    """A PNG of the folder, decoded and encoded again, so that nothing but pixels comes through."""
    from PIL import Image

    try:
        with opened(folder, name, IMAGE) as file:
            picture = Image.open(file, formats=["PNG"])
            if max(picture.size) > 1024:
                return None
            picture = picture.convert("RGB")
        picture.thumbnail((160, 160))
        out = io.BytesIO()
        picture.save(out, "PNG")
        return out.getvalue()
    except (BadInput, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


__all__ = ["Outlier", "Run", "run", "small"]
