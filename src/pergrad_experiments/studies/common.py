"""What studies share: jobs, their results, and how a claim is judged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .. import tasks
from ..config import Config
from ..report.charts import Chart, Lines, Series, Table, number
from ..report.load import Run
from ..report.panels import Section, mean_interval, said

ROULET = "Roulet & Agarwala (arXiv 2510.00236)"
EVE = "Kunze, Townsend & Barber (arXiv 2112.00174)"
UNAVAILABLE = "not available to us"

#: The metric that a task is judged by, and whether less of it is better.
JUDGED_BY = {
    "quadratic": ("excess_loss", True),
    "cifar10": ("loss", True),
    "seq2seq": ("loss", True),
    "lm": ("loss", True),
    "translation": ("loss", True),
    "pixelcnn": ("bits_per_dim", True),
    "pong": ("return", False),
}


# ------------------------------------------------------------------------------------- jobs


@dataclasses.dataclass(frozen=True)
class Train:
    """A training run, at a place of the grid."""

    place: dict[str, Any]
    config: Config


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measurement: ``call()`` gives what goes into a JSON file."""

    place: dict[str, Any]
    call: Callable[[], dict[str, Any]]


Job = Train | Measure


def train(place: dict[str, Any], preset: str, seed: int, **settings: Any) -> Train:
    """A job whose ``place`` has a task and an optimizer; the seed goes in as well."""
    config = tasks.configure(place["task"], place["optimizer"], preset, seed=seed, **settings)
    return Train({**place, "seed": seed}, config)


# ------------------------------------------------------------------------------------- results


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished job: a ``run``, or the ``values`` of a measurement."""

    name: str
    place: dict[str, Any]
    run: Run | None = None
    values: dict[str, Any] | None = None
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the measurement

    def final(self) -> float:
        """The judged metric after the last step, less being better: infinite if the run diverged, NaN if it is unfinished."""
        if self.run is None:
            return math.nan
        metric, less = JUDGED_BY[self.run.config.task]
        if self.run.status.get("state") == "diverged":
            return math.inf
        values = self.run.evals.get(metric, np.zeros(0))
        if not len(values) or self.run.status.get("state") != "done":
            return math.nan
        return float(values[-1]) if less else -float(values[-1])


class Results:
    """All of a study, to pick from by place."""

    def __init__(self, items: Iterable[Result]):
        self.items = list(items)

    def at(self, **place: Any) -> Results:
        return Results(r for r in self.items if all(r.place.get(k) == v for k, v in place.items()))

    def trained(self) -> Results:
        return Results(r for r in self.items if r.run is not None)

    def measured(self) -> Results:
        return Results(r for r in self.items if r.values is not None)

    def each(self, *names: str) -> list[Any]:
        """The different values (or tuples of values) of these coordinates, in the order of the grid."""
        found = dict.fromkeys(tuple(r.place.get(n) for n in names) for r in self.items)
        return [key[0] if len(names) == 1 else key for key in found if None not in key]

    def by_seed(self, value: Callable[[Result], float] = Result.final) -> dict[int, float]:
        return {r.place["seed"]: value(r) for r in self.items}

    def mean_final(self) -> float:
        finals = [r.final() for r in self.items]
        return float(np.mean(finals)) if finals and not any(map(math.isnan, finals)) else math.nan


def best(results: Results, *over: str) -> tuple[dict[str, Any], Results, str]:
    """The coordinates ``over`` with the least mean of the judged metric; their runs; a remark, if at the end of the grid."""
    choices = results.each(*over)
    keys = [c if isinstance(c, tuple) else (c,) for c in choices]
    scores = [results.at(**dict(zip(over, key))).mean_final() for key in keys]
    order = [s if math.isfinite(s) else math.inf for s in scores]
    place = int(np.argmin(order)) if order else 0
    if not order or math.isinf(order[place]):
        return (
            {},
            Results([]),
            "no run was finished" if not order or any(map(math.isnan, scores)) else "every run diverged",
        )
    chosen = dict(zip(over, keys[place]))
    rates = sorted({dict(zip(over, key)).get("learning_rate", 0) for key in keys})
    at_end = len(rates) > 1 and chosen.get("learning_rate") in (rates[0], rates[-1])
    return chosen, results.at(**chosen), "the best learning rate is at the end of the grid" if at_end else ""


def paired(a: dict[int, float], b: dict[int, float], log: bool = True) -> tuple[float, float, float, int]:
    """Mean over seeds of a/b (its interval on the logarithmic scale), or of a − b; of the seeds that both have."""
    seeds = [
        s for s in a if s in b and math.isfinite(a[s]) and math.isfinite(b[s]) and (not log or min(a[s], b[s]) > 0)
    ]
    values = [math.log(a[s] / b[s]) if log else a[s] - b[s] for s in seeds]
    mean, low, high, n = mean_interval(values)
    return (math.exp(mean), math.exp(low), math.exp(high), n) if log else (mean, low, high, n)


def time_ratio(of: Sequence[float], over: Sequence[float]) -> tuple[float, float, float, int]:
    """Of two programs' times, repetition by repetition; the interval is on the logarithmic scale, and so above 0."""
    return paired(dict(enumerate(of)), dict(enumerate(over)))


# ------------------------------------------------------------------------------------- claims


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper, and what became of it here."""

    paper: str
    claim: str
    published: str
    measured: str
    verdict: str
    scale: str  # at which it was measured
    rule: str  # when it agrees


def judge(found: tuple[float, float, float, int], line: float, above: bool) -> str:
    """Whether the interval lies on the claim's side of the line."""
    mean, low, high, n = found
    if n == 0 or math.isnan(mean):
        return "not tested"
    if n < 2 or low <= line <= high:
        return "undecided"
    return "agrees" if (low > line) == above else "disagrees"


def with_interval(found: tuple[float, float, float, int]) -> str:
    """``0.93 (0.90 … 0.96, 3 seeds)``"""
    mean, low, high, n = found
    if n == 0 or math.isnan(mean):
        return "–"
    return (
        f"{number(mean)} ({number(low)} … {number(high)}, {n} seeds)"
        if n > 1
        else f"{number(mean)} (1 seed, no interval)"
    )


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a study says: its claims, plots and tables of its own, and which runs to draw in full."""

    claims: list[Claim]
    blocks: Sequence[Chart | Table]
    show: list[str]


def scale_of(results: Results) -> str:
    """In words, the size of what was trained."""
    words = []
    for task in results.trained().each("task"):
        runs = [r.run for r in results.trained().at(task=task).items if r.run is not None]
        configs = [run.config for run in runs]
        count = tasks.parameters(configs[0])
        steps = sorted({c.steps for c in configs})
        batches = sorted({c.batch_size for c in configs})
        seeds = len({c.seed for c in configs})
        words.append(
            f"{task} ({configs[0].preset}): {count:,} parameters, {_span(steps)} steps of batch {_span(batches)}, "
            f"{seeds} seed{'s' * (seeds != 1)}"
        )
    return "; ".join(words)


def _span(values: Sequence[float]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


# ------------------------------------------------------------------------------------- plots that several have


def means(label: str, xs: Sequence[float], values: Sequence[Sequence[float]], colour: int = 0) -> Series:
    """A curve of means over seeds: ``values`` has those of each x."""
    found = [mean_interval(each) for each in values]
    mean, low, high = ([f[k] for f in found] for k in range(3))
    return Series(label, list(xs), mean, low, high, colour)


def against(
    results: Results,
    x: str,
    over: str,
    title: str,
    x_label: str,
    value: Callable[[Result], float],
    y_label: str,
    **kwargs: Any,
) -> Lines:
    """The mean over seeds of a value against a coordinate, a curve for each value of another."""
    series = []
    ticks = tuple(sorted(results.each(x)))
    for colour, key in enumerate(results.each(over)):
        mine = results.at(**{over: key})
        xs = sorted(mine.each(x))
        values = [[value(r) for r in mine.at(**{x: place}).items] for place in xs]
        series.append(means(str(key), xs, values, colour))
    return Lines(title, x_label, y_label, series, x_ticks=ticks, **kwargs)


def metrics_table(title: str, rows: Sequence[tuple[str, Results]], caption: str = "") -> Table:
    """Final metrics, a row for each set of runs."""
    names = list(
        dict.fromkeys(
            k for _, rs in rows for r in rs.items if r.run for k in r.run.evals if k not in ("step", "examples")
        )
    )
    body: list[list[Any]] = []
    for label, rs in rows:
        runs = [r.run for r in rs.items if r.run is not None]
        cells: list[Any] = [label]
        for name in names:
            cells.append(
                said([float(run.evals[name][-1]) if len(run.evals.get(name, ())) else math.nan for run in runs])
            )
        body.append([*cells, str(len(runs))])
    return Table(title, ["", *(n.replace("_", " ") for n in names), "seeds"], body, caption)


__all__ = [
    "EVE",
    "JUDGED_BY",
    "ROULET",
    "UNAVAILABLE",
    "Claim",
    "Findings",
    "Job",
    "Measure",
    "Result",
    "Results",
    "Section",
    "Train",
    "against",
    "best",
    "judge",
    "means",
    "metrics_table",
    "paired",
    "scale_of",
    "time_ratio",
    "train",
    "with_interval",
]
