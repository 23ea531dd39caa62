"""Do training curves of different batch sizes fall together if the learning rate grows with √B?

Adam and MicroAdam at several batch sizes and the same number of examples seen. The learning rate is η₀ at the base
batch size, and times √(B/B₀), B/B₀ or 1 at others. The distance of two curves is the root mean square of the difference
of log₁₀ of the held-out loss, over examples seen, from a tenth of the examples on; the table has its mean over batch
sizes other than the base's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pergrad import optim

from ..report.charts import Lines, Series, Table, number
from ..report.panels import curve, groups, mean_interval, of_evals
from .common import (
    JUDGED_BY,
    ROULET,
    UNAVAILABLE,
    Claim,
    Findings,
    Results,
    Train,
    judge,
    paired,
    scale_of,
    train,
    with_interval,
)

WORDS = {"sqrt": "η ∝ √B", "linear": "η ∝ B", "none": "η the same"}
RULES = tuple(WORDS)
OPTIMIZERS = ("adam", "micro_adam")
LOOKS = 16  # evaluations in a run
# Batch sizes, the base's, and examples seen; learning rates at the base batch size.
GRIDS: dict[str, dict[str, tuple[tuple[int, ...], int, int]]] = {
    "smoke": {"quadratic": ((4, 8), 4, 128)},
    "cpu": {"quadratic": ((8, 32, 128, 512, 2048), 128, 1 << 17), "cifar10": ((16, 64, 256), 64, 12_800)},
    "gpu": {
        "quadratic": ((8, 32, 128, 512, 2048), 128, 1 << 20),
        "cifar10": ((8, 32, 128, 512, 2048), 128, 1 << 20),
        "lm": ((8, 32, 128), 32, 1 << 18),
    },
}
GRIDS["paper"] = GRIDS["gpu"]
RATES = {
    "quadratic": {"adam": 0.01, "micro_adam": 0.1},
    "cifar10": {"adam": 1e-3, "micro_adam": 5e-3},
    "lm": {"adam": 1e-3, "micro_adam": 5e-3},
}


def tasks(preset: str) -> tuple[str, ...]:
    return tuple(GRIDS[preset])


def rate(rule: str, base: float, base_batch: int, b: int) -> float:
    if rule == "none":
        return base
    scaled: Any = optim.scale_learning_rate(base, base_batch, b, rule=rule)
    return scaled


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Train]:
    out = []
    for task in tasks:
        batch_sizes, base, examples = GRIDS[preset][task]
        for name in OPTIMIZERS:
            for b in batch_sizes:
                for rule in RULES if b != base else ("sqrt",):  # at the base they are the same
                    place: dict[str, Any] = {
                        "task": task,
                        "optimizer": name,
                        "rule": rule if b != base else "base",
                        "batch_size": b,
                    }
                    steps = examples // b
                    settings: dict[str, Any] = {
                        "steps": steps,
                        "batch_size": b,
                        "learning_rate": rate(rule, RATES[task][name], base, b),
                        "schedule": "constant",
                        "warmup": 0,
                        "eval_every": max(1, steps // LOOKS),
                        "stats_every": steps,
                        "checkpoint_every": steps,
                    }
                    options = {"dimension": 200} if task == "quadratic" else {}
                    for seed in range(seeds):
                        out.append(train(place, preset, seed, task_options=options, **settings))
    return out


def distance(results: Results, base: Results) -> dict[int, float]:
    """For each seed, the mean over batch sizes of the distance to the base batch size's curve; infinite if one diverged."""
    out = {}
    for r in base.items:
        others = [other for other in results.at(seed=r.place["seed"]).items if not math.isnan(other.final())]
        found = []
        for other in others:
            if math.isfinite(r.final() - other.final()) and r.run is not None and other.run is not None:
                found.append(apart(r.run.evals, other.run.evals, JUDGED_BY[r.run.config.task][0]))
            else:
                found.append(math.inf)
        if found and not math.isnan(r.final()):
            out[r.place["seed"]] = float(np.mean(found))
    return out


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray], metric: str) -> float:
    places = np.linspace(0.1, 1.0, 19) * min(a["examples"][-1], b["examples"][-1])
    first, second = (np.interp(places, x["examples"], np.log10(np.maximum(x[metric], 1e-30))) for x in (a, b))
    return float(np.sqrt(np.mean((first - second) ** 2)))


def findings(results: Results) -> Findings:
    blocks: list[Any] = []
    rows: list[list[Any]] = []
    claims = []
    for task in results.each("task"):
        for name in results.at(task=task).each("optimizer"):
            of = results.at(task=task, optimizer=name)
            base = of.at(rule="base")
            if not base.items:
                continue
            metric = JUDGED_BY[task][0]
            for rule in RULES:
                runs = Results([*of.at(rule=rule).items, *base.items])
                series = []
                for colour, b in enumerate(sorted(runs.each("batch_size"))):
                    found = [r.run for r in runs.at(batch_size=b).items if r.run is not None]
                    (group,) = groups(found)
                    group.label, group.colour = f"B {b}", colour
                    drawn: Series = curve(group, "examples", metric, of_evals)
                    series.append(drawn)
                title = f"{task}, {name}: {WORDS[rule]}"
                blocks.append(
                    Lines(
                        title,
                        "examples seen",
                        metric.replace("_", " "),
                        series,
                        f"η₀ = {RATES[task][name]:g} at B {base.each('batch_size')[0]}.",
                    )
                )
            apart_by = {rule: distance(of.at(rule=rule), base) for rule in RULES}
            shown = {rule: mean_interval(list(apart_by[rule].values())) for rule in RULES}
            diverged = {rule: sum(math.isinf(v) for v in apart_by[rule].values()) for rule in RULES}
            rows.append(
                [f"{task}, {name}"]
                + [
                    with_interval(shown[rule]) + (f"; diverged for {diverged[rule]} seeds" if diverged[rule] else "")
                    for rule in RULES
                ]
            )
            for other in ("linear", "none"):
                if name != "adam":
                    continue
                ratio = paired(apart_by["sqrt"], apart_by[other])
                verdict = judge(ratio, 1.0, above=False)
                measured = f"distance under η ∝ √B over that under {WORDS[other]}: {with_interval(ratio)}"
                if diverged[other] and not diverged["sqrt"]:
                    verdict, measured = (
                        "agrees",
                        f"{WORDS[other]}: diverged for {diverged[other]} seeds; η ∝ √B: distance {number(shown['sqrt'][0])}",
                    )
                claims.append(
                    Claim(
                        ROULET,
                        f"Adam's curves over batch sizes fall together under η ∝ √B, better than under {WORDS[other]} ({task})",
                        f"numbers {UNAVAILABLE}",
                        measured,
                        verdict,
                        scale_of(of),
                        "the ratio of the distances is below 1",
                    )
                )
    columns = ["", *WORDS.values()]
    blocks.insert(
        0,
        Table(
            "Mean distance to the curve of the base batch size", columns, rows, "In powers of ten of the held-out loss."
        ),
    )
    return Findings(claims, blocks, [])
