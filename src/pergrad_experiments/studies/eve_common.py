"""What the studies of Eve share: two optimizers with the same settings, run over tasks, compared seed by seed."""

from __future__ import annotations

from typing import Any

from .common import JUDGED_BY, Results, Train, metrics_table, paired, train, with_interval

#: The five tasks of the paper.
FIVE = ("cifar10", "seq2seq", "translation", "pong", "pixelcnn")
#: Fewer steps than the task's own preset has, so that a study takes minutes.
CPU_STEPS = {"quadratic": 1000, "cifar10": 300, "seq2seq": 400, "translation": 150, "pong": 64, "pixelcnn": 60}


def settings(task: str, preset: str) -> dict[str, Any]:
    """A run of a study: the task's preset, shorter on a CPU."""
    if preset == "smoke":
        return {"steps": 4, "eval_every": 4, "stats_every": 4, "checkpoint_every": 4}
    if preset != "cpu":
        return {}
    steps = CPU_STEPS[task]
    return {
        "steps": steps,
        "eval_every": max(1, steps // 5),
        "stats_every": max(1, steps // 8),
        "checkpoint_every": steps,
    }


def grid(
    preset: str, seeds: int, tasks: tuple[str, ...], optimizers: dict[str, tuple[str, dict[str, Any]]], **more: Any
) -> list[Train]:
    """Each task with each optimizer, by label, at the same learning rate: the task's for Adam, as in the paper."""
    out = []
    for task in tasks:
        for label, (optimizer, options) in optimizers.items():
            place = {"task": task, "label": label, "optimizer": optimizer}
            place |= {k: v for k, v in more.items() if k == "batch_size"}
            for seed in range(seeds):
                given = {**settings(task, preset), **more, "optimizer_options": options}
                out.append(train(place, preset, seed, **given))
    return out


def compared(of: Results, a: str, b: str) -> tuple[str, tuple[float, float, float, int]]:
    """The judged metric of ``a`` beside that of ``b``, in words and as a ratio (returns: a difference; less is better)."""
    task = of.each("task")[0]
    metric, less = JUDGED_BY[task]
    first, second = of.at(label=a).by_seed(), of.at(label=b).by_seed()
    if less:
        found = paired(first, second)
        return f"{metric.replace('_', ' ')} of {a} over {b}: {with_interval(found)}", found
    found = paired(first, second, log=False)
    said = (-found[0], -found[2], -found[1], found[3])
    return f"{metric} of {a} less that of {b}: {with_interval(said)}", found


def line(task: str) -> float:
    """Where ratio or difference says that both are equal."""
    return 1.0 if JUDGED_BY[task][1] else 0.0


def table(of: Results, title: str):
    return metrics_table(
        title,
        [(label, of.at(label=label)) for label in of.each("label")],
        "Means over seeds, ± half the 95 % interval.",
    )
