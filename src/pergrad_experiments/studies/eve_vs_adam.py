"""Is Eve better than Adam?

Table 1 of Kunze et al.: five tasks, Eve and Adam with the same settings, no tuning. Compared seed by seed: both have
the same parameters at first and see the same batches.
"""

from __future__ import annotations

from .common import EVE, UNAVAILABLE, Claim, Findings, Results, Train, judge, scale_of
from .eve_common import FIVE, compared, grid, line, table

OPTIMIZERS = {"Eve": ("eve", {}), "Adam": ("adam", {})}


def tasks(preset: str) -> tuple[str, ...]:
    return FIVE


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Train]:
    return grid(preset, seeds, tasks, OPTIMIZERS)


def findings(results: Results) -> Findings:
    blocks, claims = [], []
    for task in results.each("task"):
        of = results.at(task=task)
        blocks.append(table(of, f"{task}: final metrics"))
        said, found = compared(of, "Eve", "Adam")
        claims.append(
            Claim(
                EVE,
                f"Eve trains as well as Adam or better ({task}, Table 1)",
                f"numbers {UNAVAILABLE}",
                said,
                judge(found, line(task), above=False),
                scale_of(of),
                "Eve's is better; it disagrees if Adam's is",
            )
        )
    return Findings(claims, blocks, [r.name for r in results.trained().items])
