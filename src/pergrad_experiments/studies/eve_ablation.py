"""Does Eve need the correction for the mean?

Eve's ν̂ = v̂/B + (1 − 1/B) m̂² has the squared momentum, since v̂ is of examples and v̂/B alone takes the gradient for
noise. Without it, where examples agree, steps are √B times as long. Eve, Eve without the correction, and Adam, on
CIFAR-10 and the noisy quadratic.
"""

from __future__ import annotations

from .common import EVE, UNAVAILABLE, Claim, Findings, Results, Train, judge, scale_of
from .eve_common import compared, grid, line, table

OPTIMIZERS = {"Eve": ("eve", {}), "without correction": ("eve", {"correction": False}), "Adam": ("adam", {})}


def tasks(preset: str) -> tuple[str, ...]:
    return ("quadratic",) if preset == "smoke" else ("quadratic", "cifar10")


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Train]:
    return grid(preset, seeds, tasks, OPTIMIZERS)


def findings(results: Results) -> Findings:
    blocks, claims = [], []
    for task in results.each("task"):
        of = results.at(task=task)
        blocks.append(table(of, f"{task}: final metrics"))
        said, found = compared(of, "Eve", "without correction")
        claims.append(
            Claim(
                EVE,
                f"The correction makes Eve better ({task})",
                f"numbers {UNAVAILABLE}",
                said,
                judge(found, line(task), above=False),
                scale_of(of),
                "Eve's is better with it; it disagrees if it is better without",
            )
        )
    return Findings(claims, blocks, [r.name for r in results.trained().items])
