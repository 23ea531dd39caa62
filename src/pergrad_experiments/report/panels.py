"""From runs to charts and tables: which plots a report of training runs has."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .charts import COLOURS, DASHES, POINTS, Chart, Heatmap, Histogram, Lines, Series, Table, interval, number, thin
from .load import Outlier, Run

DRAWN = 12  # configurations in one plot
DETAILED = 4  # with plots of their own
ROWS, TIMES = 32, 40  # of a heatmap


@dataclasses.dataclass(frozen=True)
class Gallery:
    """Examples that stand out."""

    title: str
    outliers: list[Outlier]
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence or two, and what is below it."""

    title: str
    lead: str
    blocks: list[Chart | Table | Gallery]


@dataclasses.dataclass
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: list[Run]
    colour: int = 0

    def final_loss(self) -> float:
        return float(np.mean([run.final_loss() for run in self.runs]))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float, int]:
    """Mean, the ends of its 95 % confidence interval by Student's t, and of how many; equal ends for fewer than two."""
    from scipy.stats import t

    kept = [v for v in values if math.isfinite(v)]
    n = len(kept)
    if n == 0:
        return math.nan, math.nan, math.nan, 0
    mean, deviation = float(np.mean(kept)), float(np.std(kept, ddof=1)) if n > 1 else 0.0
    if deviation < 1e-12 * abs(mean):  # equal, but for rounding
        deviation = 0.0
    half = float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n) if n > 1 else 0.0
    return mean, mean - half, mean + half, n


# ------------------------------------------------------------------------------------- which runs belong together

# What does not change a curve, but for how often it is looked at.
_APART = ("seed", "format", "eval_every", "stats_every", "checkpoint_every", "microbatch_size", "preset")


def settings(run: Run) -> dict[str, Any]:
    """What a run is, without its seed: one level of names."""
    config = run.config.to_json()
    flat = {k: v for k, v in config.items() if k not in _APART and not isinstance(v, dict)}
    for part in ("task_options", "optimizer_options"):
        flat |= {k if k not in flat else f"{part} {k}": v for k, v in config[part].items()}
    return flat


def groups(runs: Sequence[Run]) -> list[Group]:
    """By configuration; each is called by what it does not share with the others."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(settings(run), sort_keys=True, default=str), []).append(run)
    all_settings = [settings(members[0]) for members in found.values()]
    names = list(dict.fromkeys(k for s in all_settings for k in s))
    differ = [k for k in names if len({json.dumps(s.get(k), default=str) for s in all_settings}) > 1]
    out = []
    for s, members in zip(all_settings, found.values()):
        # The learning rate goes with the optimizer, so it is said only where one optimizer has several.
        others = [o for o in all_settings if o["optimizer"] == s["optimizer"]]
        said = [k for k in differ if k != "optimizer" and k in s]
        said = [k for k in said if k != "learning_rate" or len({o[k] for o in others}) > 1]
        words = [f"{_SAID.get(k, k)} {number(s[k]) if isinstance(s[k], float) else s[k]}" for k in said]
        out.append(Group(", ".join([str(s["optimizer"]), *words])[:80], members))
    return out


_SAID = {"learning_rate": "η", "batch_size": "B", "clip_norm": "clip"}


# ------------------------------------------------------------------------------------- curves over seeds


def curve(group: Group, x: str, y: str, table: Callable[[Run], dict[str, np.ndarray]], points: int = POINTS) -> Series:
    """The mean over seeds, stretch by stretch of training, with its interval."""
    long = max(group.runs, key=lambda run: len(table(run).get(y, ())))
    size = len(table(long).get(y, ()))
    xs, rows = np.zeros(0), []
    for run in group.runs:
        values = table(run).get(y, np.zeros(0))
        padded = np.full(size, np.nan)
        padded[: len(values)] = values
        (row,) = thin(padded, points=points)
        rows.append(row)
        if run is long:
            (xs,) = thin(table(run)[x], points=points) if size else (np.zeros(0),)
    means = [mean_interval([float(row[i]) for row in rows]) for i in range(len(xs))] if len(rows) > 1 else None
    if means is None:
        return Series(group.label, xs.tolist(), rows[0].tolist(), colour=group.colour)
    mean, low, high = ([m[k] for m in means] for k in range(3))
    return Series(group.label, xs.tolist(), mean, low, high, group.colour)


def of_train(run: Run) -> dict[str, np.ndarray]:
    return run.train


def of_evals(run: Run) -> dict[str, np.ndarray]:
    return run.evals


def noise_scale(group: Group, parts: int = 10) -> Series:
    """Σ tr Σ̂ / Σ ‖μ̂‖², each summed over a stretch of training and over seeds: a mean of ratios would be of their outliers."""
    size = max(len(run.stats) for run in group.runs)
    bounds = np.linspace(0, size, min(size, parts) + 1).astype(int)
    x, y = [], []
    for first, end in itertools.pairwise(bounds):
        lines = [line for run in group.runs for line in run.stats[first:end]]
        lines = [line for line in lines if math.isfinite(line["trace"]) and math.isfinite(line["squared_norm"])]
        squared_norm = sum(line["squared_norm"] for line in lines)
        if lines and squared_norm > 0:
            x.append(float(np.mean([line["examples"] for line in lines])))
            y.append(sum(line["trace"] for line in lines) / squared_norm)
    return Series(group.label, x, y, colour=group.colour)


# ------------------------------------------------------------------------------------- a section for each task


def sections(runs: Sequence[Run]) -> list[Section]:
    tasks = list(dict.fromkeys(run.config.task for run in runs))
    return [task_section(task, [run for run in runs if run.config.task == task]) for task in tasks]


def task_section(task: str, runs: Sequence[Run]) -> Section:
    found = sorted(groups(runs), key=lambda g: g.final_loss())
    drawn = found[:DRAWN]
    for place, group in enumerate(drawn):
        group.colour = place % (COLOURS * len(DASHES))
    presets = ", ".join(dict.fromkeys(run.config.preset for run in runs))
    lead = f"{len(runs)} run{'s' * (len(runs) != 1)} of {len(found)} configuration{'s' * (len(found) != 1)}, preset {presets}."
    if len(found) > DRAWN:
        lead += f" The plots show the {DRAWN} with the lowest final loss; the table has all."
    seeds = max(len(g.runs) for g in drawn)
    bands = f"Mean and 95 % interval over {seeds} seeds." if seeds > 1 else "One seed, so no interval."
    blocks: list[Chart | Table | Gallery] = [final_table(found)]
    longest = max((len(run.train["step"]) for run in runs), default=0)
    stretch = f" Each point is the mean of {longest / POINTS:.3g} steps." if longest > POINTS else ""

    def lines(title, name, label, table, caption=bands, points=POINTS):
        series = [curve(g, "examples", name, table, points) for g in drawn]
        return Lines(title, "examples seen", label, [s for s in series if s.finite()], caption)

    charts = [lines("Training loss", "loss", "loss", of_train, bands + stretch)]
    metrics = list(dict.fromkeys(name for run in runs for name in run.evals if name not in ("step", "examples")))
    charts += [lines(f"Held-out {name.replace('_', ' ')}", name, name.replace("_", " "), of_evals) for name in metrics]
    charts.append(lines("Step length", "step_length", "‖update‖", of_train, bands + stretch))
    about = "tr Σ/‖μ‖², numerator and denominator each summed over a stretch of training" + (
        " and over seeds." if seeds > 1 else "."
    )
    scales = [s for g in drawn if (s := noise_scale(g)).x]
    charts.append(Lines("Gradient noise scale", "examples seen", "examples", scales, about))
    charts.append(
        lines("Throughput", "throughput", "examples/s", of_train, "Of training alone, without evaluation.", 60)
    )
    blocks += [c for c in charts if c.series]
    detailed = [g for g in drawn if any(run.stats for run in g.runs)][:DETAILED]
    for group in detailed:
        blocks += details(group, "" if len(detailed) == 1 else f": {group.label}")
    return Section(task, lead, blocks)


def final_table(found: list[Group]) -> Table:
    metrics = list(dict.fromkeys(k for g in found for r in g.runs for k in r.evals if k not in ("step", "examples")))
    rows = []
    for group in found:
        row: list[Any] = [group.label]
        for name in metrics:
            row.append(said([r.evals[name][-1] if len(r.evals.get(name, ())) else math.nan for r in group.runs]))
        row.append(said([loss if math.isfinite(loss := r.final_loss()) else math.nan for r in group.runs]))
        speeds = [float(np.median(r.train["throughput"])) for r in group.runs if len(r.train["throughput"])]
        row += [said(speeds, plain=True), str(len(group.runs))]
        ended = [r.state for r in group.runs if r.state != "done"]
        row.append("done" if not ended else "; ".join(dict.fromkeys(ended))[:80])
        rows.append(row)
    columns = ["", *(name.replace("_", " ") for name in metrics), "training loss", "examples/s", "seeds", "state"]
    caption = (
        "Last evaluation; training loss over the last 5 % of the steps; ± is half the 95 % interval over seeds. "
        "A configuration with a diverged run has no place among the final losses."
    )
    return Table("Final metrics", columns, rows, caption)


def said(values: Sequence[float], plain: bool = False) -> str:
    mean, low, high, n = mean_interval([float(v) for v in values])
    return number(mean) if plain or n < 2 else interval(mean, low, high)


def details(group: Group, of: str) -> list[Chart | Table | Gallery]:
    """What is drawn for one run: of the first seed that has statistics."""
    run = next(run for run in group.runs if run.stats)
    seed = f"Seed {run.config.seed}. "
    out: list[Chart | Table | Gallery] = []
    snr = heat(run, "snr")
    if snr is not None:
        names, times, values, cut = snr
        about = seed + "√(Σμ²/Σσ²) of one example's gradient, by layer; grey: noise hides the signal." + cut
        out.append(Heatmap(f"Signal to noise{of}", names, times, values, "step", "signal to noise", about, log=True))
    shares = heat(run, "share_mean")
    if shares is not None:
        names, times, values, cut = shares
        about = (
            seed + "The share of μ² in Adam's preconditioner ν = μ² + σ²/B, by layer; that of σ²/B is the rest." + cut
        )
        title = f"Share of μ² in the preconditioner{of}"
        out.append(Heatmap(title, names, times, values, "step", "share of μ²", about, low=0.0, high=1.0))
    if run.norms is not None:
        marks = tuple((f"example {o.index:.0f}", o.norm) for o in run.outliers if math.isfinite(o.norm))
        about = (
            seed + f"Of one batch, at step {run.norms_step}" + ("; the marks are the examples shown." if marks else ".")
        )
        edges, counts = run.norms["edges"], run.norms["counts"]
        out.append(Histogram(f"Norms of the examples' gradients{of}", edges, counts, "‖gradient‖", about, marks))
    if run.outliers:
        about = seed + "The examples of this batch whose gradients are the longest."
        out.append(Gallery(f"Examples that stand out{of}", run.outliers, about))
    return out


def heat(run: Run, name: str) -> tuple[list[str], list[float], np.ndarray, str] | None:
    names = list(dict.fromkeys(layer for line in run.stats for layer in line[name]))
    if not names:
        return None
    rows = names[:ROWS]
    every = -(-len(run.stats) // TIMES)
    lines = run.stats[::every]
    values = np.array([[line[name].get(layer, math.nan) for line in lines] for layer in rows], float)
    cut = f" The first {ROWS} of {len(names)} layers." if len(names) > ROWS else ""
    return rows, [line["step"] for line in lines], values, cut
