"""Does Eve gain on Adam as the batch grows?

Table 2 of Kunze et al.: CIFAR-10 with batches of 8, 32, 128 and 512. The two differ in how well they know the noise: by
√B. Here at the same number of steps and the same learning rate for all batch sizes.
"""

from __future__ import annotations

from ..report.charts import Lines, Series
from .common import EVE, UNAVAILABLE, Claim, Findings, Results, Train, judge, paired, scale_of, with_interval
from .eve_common import compared, grid, table
from .eve_vs_adam import OPTIMIZERS

BATCHES = {"smoke": (8, 16), "cpu": (8, 32, 128), "gpu": (8, 32, 128, 512), "paper": (8, 32, 128, 512)}


def tasks(preset: str) -> tuple[str, ...]:
    return ("cifar10",)


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Train]:
    return [job for b in BATCHES[preset] for job in grid(preset, seeds, tasks, OPTIMIZERS, batch_size=b)]


def findings(results: Results) -> Findings:
    batch_sizes = results.each("batch_size")
    found, blocks = [], []
    for b in batch_sizes:
        of = results.at(batch_size=b)
        blocks.append(table(of, f"CIFAR-10, B {b}: final metrics"))
        found.append(compared(of, "Eve", "Adam")[1])
    mean, low, high = ([f[k] for f in found] for k in range(3))
    series = [Series("Eve over Adam", batch_sizes, mean, low, high)]
    ticks = tuple(batch_sizes)
    blocks.insert(
        0,
        Lines(
            "Held-out loss of Eve over Adam",
            "batch size",
            "ratio",
            series,
            log_x=True,
            log_y=False,
            reference=1.0,
            x_ticks=ticks,
        ),
    )
    # For each seed, the ratio at the largest batch over that at the smallest.
    ends = []
    for b in (batch_sizes[0], batch_sizes[-1]):
        eve, adam = (results.at(batch_size=b, label=label).by_seed() for label in ("Eve", "Adam"))
        ends.append({s: eve[s] / adam[s] for s in eve if s in adam})
    change = paired(ends[1], ends[0])
    claim = Claim(
        EVE,
        "Eve gains on Adam with the batch size (Table 2)",
        f"numbers {UNAVAILABLE}",
        f"Eve over Adam at B {batch_sizes[-1]}, over that at B {batch_sizes[0]}: {with_interval(change)}",
        judge(change, 1.0, above=False),
        scale_of(results),
        "the ratio is below 1",
    )
    return Findings([claim], blocks, [r.name for r in results.at(batch_size=batch_sizes[-1]).items])
