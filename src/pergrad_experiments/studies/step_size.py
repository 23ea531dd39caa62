"""How much does the length of a step vary, for Eve and for Adam?

Figure 1 of Kunze et al. shows step lengths over time, and Eve's deviating 25 % less. The deviation here: lengths
divided by their running mean over a twentieth of the run, over the second half of the steps; the standard deviation of
that.
"""

from __future__ import annotations

import math

import numpy as np

from ..report.charts import Dots
from .common import EVE, Claim, Findings, Result, Results, Train, judge, means, paired, scale_of, with_interval
from .eve_common import grid
from .eve_vs_adam import OPTIMIZERS


def tasks(preset: str) -> tuple[str, ...]:
    return ("quadratic",) if preset == "smoke" else ("quadratic", "cifar10", "seq2seq")


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Train]:
    return grid(preset, seeds, tasks, OPTIMIZERS)


def deviation(result: Result) -> float:
    """Of step lengths from their running mean, in proportion to it."""
    if result.run is None or result.run.status.get("state") != "done":
        return math.nan
    lengths = result.run.train["step_length"]
    window = max(3, len(lengths) // 20)
    means = np.convolve(lengths, np.ones(window) / window, "valid")
    middle = lengths[window // 2 : window // 2 + len(means)]
    late = slice(len(means) // 2, None)
    return float(np.std(middle[late] / means[late]))


def findings(results: Results) -> Findings:
    names = results.each("task")
    claims, series = [], []
    for colour, label in enumerate(OPTIMIZERS):
        values = [[deviation(r) for r in results.at(task=task, label=label).items] for task in names]
        series.append(means(label, range(len(names)), values, colour))
    for task in names:
        of = results.at(task=task)
        eve, adam = (of.at(label=label).by_seed(deviation) for label in ("Eve", "Adam"))
        ratio = paired(eve, adam)
        claims.append(
            Claim(
                EVE,
                f"The length of Eve's steps deviates less than that of Adam's ({task}, Figure 1)",
                "25 % lower: 0.75",
                f"deviation of Eve over Adam: {with_interval(ratio)}",
                judge(ratio, 1.0, above=False),
                scale_of(of),
                "the ratio is below 1; how far is for the reader to compare",
            )
        )
    blocks = [
        Dots("Deviation of the step length", names, "standard deviation, in proportion to the running mean", series)
    ]
    return Findings(claims, blocks, [r.name for r in results.trained().items])
