"""Should mean or variance dominate Adam's preconditioner?

ν = EMA of a μ̂² + c σ̂²: Adam is (1, 1/B), MicroAdam (1, 1), MicroAdamVar (0, 1), MicroAdamMSQ (1, 0), and there are
two more points of the plane, with and without clipping of the mean gradient to norm 1. For each, learning rate and ε
(which μ̂² needs, where noise hides the signal) are chosen by the final held-out loss, for all from the same grid.
"""

from __future__ import annotations

from typing import Any

from ..report.charts import Dots
from .common import (
    ROULET,
    UNAVAILABLE,
    Claim,
    Findings,
    Result,
    Results,
    Train,
    against,
    best,
    judge,
    means,
    metrics_table,
    paired,
    scale_of,
    train,
    with_interval,
)

# name, (a, c): in the order of how much of σ² there is.
POINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "MicroAdamMSQ (1, 0)": ("micro_adam_msq", {}),
    "Adam (1, 1/B)": ("adam", {}),
    "(1, 0.2)": ("moments", {"a": 1.0, "c": 0.2}),
    "MicroAdam (1, 1)": ("micro_adam", {}),
    "(0.2, 1)": ("moments", {"a": 0.2, "c": 1.0}),
    "MicroAdamVar (0, 1)": ("micro_adam_var", {}),
}
FOUR = tuple(name for name in POINTS if not name.startswith("("))
# Learning rates, ε, clipping, points; and what the preset has otherwise.
GRIDS: dict[str, dict[str, tuple]] = {
    "smoke": {"quadratic": ((0.01, 0.1), (1e-3,), (None,), FOUR[:2] + FOUR[-1:], {"steps": 20})},
    "cpu": {
        "quadratic": (
            (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
            (1e-8, 1e-3),
            (None, 1.0),
            tuple(POINTS),
            {"steps": 600, "task_options": {"dimension": 200}, "stats_every": 100},
        ),
        "cifar10": ((1e-3, 4e-3, 1.6e-2), (1e-3,), (None,), FOUR, {"steps": 200, "eval_every": 100, "stats_every": 25}),
    },
    "gpu": {
        "quadratic": (
            (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
            (1e-8, 1e-3, 1e-2),
            (None, 1.0),
            tuple(POINTS),
            {"steps": 4000},
        ),
        "cifar10": ((3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (1e-8, 1e-4, 1e-3), (None, 1.0), tuple(POINTS), {"steps": 4000}),
        "lm": ((1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (1e-8, 1e-5), (None, 1.0), tuple(POINTS), {"steps": 4000}),
    },
}
GRIDS["paper"] = GRIDS["gpu"]


def tasks(preset: str) -> tuple[str, ...]:
    return tuple(GRIDS[preset])


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Train]:
    out = []
    for task in tasks:
        rates, epsilons, clips, points, settings = GRIDS[preset][task]
        for label in points:
            optimizer, options = POINTS[label]
            for clip in clips:
                for eps in epsilons:
                    for rate in rates:
                        clipping = "none" if clip is None else f"norm {clip:g}"
                        place = {
                            "task": task,
                            "point": label,
                            "clip": clipping,
                            "eps": eps,
                            "learning_rate": rate,
                            "optimizer": optimizer,
                        }
                        for seed in range(seeds):
                            given = {
                                **settings,
                                "optimizer_options": {**options, "eps": eps},
                                "learning_rate": rate,
                                "clip_norm": clip,
                            }
                            out.append(train(place, preset, seed, **given))
    return out


def findings(results: Results) -> Findings:
    blocks: list[Any] = []
    claims, show = [], []
    for task in results.each("task"):
        of_task = results.at(task=task)
        for clip in of_task.each("clip"):
            of = of_task.at(clip=clip)
            named = f"{task}" + (f", clipping to {clip}" if clip != "none" else "")
            chosen = {point: best(of.at(point=point), "learning_rate", "eps") for point in of.each("point")}
            rows, remarks = [], []
            for point, (place, runs, remark) in chosen.items():
                if runs.items:
                    rows.append((f"{point}: η {place['learning_rate']:g}, ε {place['eps']:g}", runs))
                if remark:
                    remarks.append(f"{point}: {remark}.")
            blocks.append(metrics_table(f"{named}: each at its best learning rate", rows, " ".join(remarks)))
            names = [point for point in chosen if chosen[point][1].items]
            values = [[abs(r.final()) for r in chosen[point][1].items] for point in names]
            dots = means("at its best", range(len(names)), values)
            blocks.append(
                Dots(
                    f"{named}: final held-out loss", names, "loss", [dots], "From μ² alone (top) to σ² alone (bottom)."
                )
            )
            eps = of.each("eps")[-1]
            title = f"{named}: over learning rates, ε {eps:g}"
            blocks.append(
                against(
                    of.at(eps=eps),
                    "learning_rate",
                    "point",
                    title,
                    "learning rate",
                    Result.final,
                    "final loss",
                    log_x=True,
                    log_y=True,
                )
            )
            if clip == "none":
                show += [r.name for point in FOUR if point in chosen for r in chosen[point][1].items]
            msq, var = (
                chosen[p][1].by_seed() if p in chosen else {} for p in ("MicroAdamMSQ (1, 0)", "MicroAdamVar (0, 1)")
            )
            ratio = paired(msq, var)
            claims.append(
                Claim(
                    ROULET,
                    f"Optimization is best served when mean, not variance, dominates the preconditioner ({named})",
                    f"so in the abstract; numbers {UNAVAILABLE}",
                    f"final held-out loss of MicroAdamMSQ over MicroAdamVar: {with_interval(ratio)}",
                    judge(ratio, 1.0, above=False),
                    scale_of(of),
                    "the ratio is below 1",
                )
            )
    return Findings(claims, blocks, show)
