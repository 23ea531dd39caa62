"""Which placement of the sign trains best, and does the signal-to-noise ratio predict it?

MicroSignSGD averages the signs of examples' gradients, SignSGD takes the sign of their mean, SignEMA that of the EMA of
means. First, training over learning rates and batch sizes. Second, the alignment of the three updates with sign μ,
layer by layer: measured on fresh batches at fixed parameters, at the start and after some training, beside
`pergrad.analysis.predicted_alignment`, which follows from signal-to-noise ratios for Gaussian gradients. μ and σ are
those of many more examples than an update sees.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from pergrad import analysis

from .. import tasks as all_tasks
from .. import train as training
from ..report.charts import Lines, Series, Table, number
from ..report.panels import mean_interval
from .common import (
    ROULET,
    UNAVAILABLE,
    Claim,
    Findings,
    Measure,
    Result,
    Results,
    against,
    best,
    metrics_table,
    paired,
    scale_of,
    train,
    with_interval,
)

OPTIMIZERS = ("micro_sign_sgd", "sign_sgd", "sign_ema")
NAMES = analysis.Placements(*OPTIMIZERS)
B1 = 0.9
# Learning rates, batch sizes, and what the preset has otherwise; for the alignment: batches of the reference, steps of the
# measurement, and steps of training before it.
GRIDS: dict[str, dict[str, tuple]] = {
    "smoke": {"quadratic": ((0.003, 0.01), (8,), {"steps": 20}, (20, 20, (0, 10)))},
    "cpu": {
        "quadratic": (
            (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
            (16, 64, 256),
            {"steps": 1000, "task_options": {"dimension": 200}, "stats_every": 100},
            (2000, 400, (0, 300)),
        ),
        "cifar10": (
            (3e-5, 1e-4, 3e-4),
            (64,),
            {"steps": 200, "eval_every": 100, "stats_every": 25},
            (200, 60, (0, 100)),
        ),
    },
    "gpu": {
        "quadratic": (
            (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
            (16, 64, 256),
            {"steps": 4000},
            (4000, 1000, (0, 1000)),
        ),
        "cifar10": ((3e-5, 1e-4, 3e-4, 1e-3), (16, 64, 256, 1024), {"steps": 4000}, (400, 300, (0, 1000))),
        "lm": ((1e-5, 3e-5, 1e-4, 3e-4), (16, 64), {"steps": 4000}, (400, 100, (0, 1000))),
    },
}
GRIDS["paper"] = GRIDS["gpu"]


def tasks(preset: str) -> tuple[str, ...]:
    return tuple(GRIDS[preset])


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Any]:
    out: list[Any] = []
    for task in tasks:
        rates, batch_sizes, settings, alignment = GRIDS[preset][task]
        for b in batch_sizes:
            for optimizer in OPTIMIZERS:
                for rate in rates:
                    place = {"task": task, "optimizer": optimizer, "batch_size": b, "learning_rate": rate}
                    for seed in range(seeds):
                        out.append(train(place, preset, seed, **settings, batch_size=b, learning_rate=rate))
            for seed in range(seeds):
                place = {"task": task, "what": "alignment", "batch_size": b, "seed": seed}
                options = settings.get("task_options")
                out.append(
                    Measure(place, lambda t=task, b=b, s=seed, o=options, a=alignment: align(t, preset, b, s, o, *a))
                )
    return out


def align(
    task: str, preset: str, b: int, seed: int, options: Any, reference: int, steps: int, after: tuple[int, ...]
) -> dict:
    """Predicted and measured alignment by layer, after so many steps of Adam at the preset's learning rate."""
    config = all_tasks.configure(task, "adam", preset, seed=seed, batch_size=b, task_options=options)
    built = all_tasks.build(config)
    optimizer = optax.adam(config.learning_rate)
    init_key, step_key = training.keys(seed)
    params = jax.jit(built.init)(init_key)
    state = optimizer.init(params)
    update = jax.jit(training.step_function(built, optax.with_extra_args_support(optimizer)))
    batches = built.batches(0, lambda: params)
    sums = jax.jit(pg.grad_stats(built.loss, {**analysis.STATS, "sign_mean": pg.sign_mean()}, prng_argnums=2))
    signs = analysis.sign_placements(B1)

    @jax.jit
    def advance(state, stats, mean):
        directions, state = signs.update(stats, state)
        return state, tuple(analysis.measured_alignment(u, mean, per="leaf") for u in directions)

    predict = jax.jit(lambda stats: analysis.predicted_alignment(stats, b, B1, per="leaf"))
    found: dict[str, Any] = {}
    done = number = 0
    for moment in after:
        for _ in range(moment - done):
            params, state, _ = update(params, state, next(batches), jax.random.fold_in(step_key, number))
            number += 1
        done = moment
        total: Any = None
        for _ in range(reference):
            stats = sums(params, next(batches), jax.random.fold_in(step_key, number))
            number += 1
            moments = {name: stats[name] for name in ("mean", "second_moment")}
            total = moments if total is None else jax.tree.map(jnp.add, total, moments)
        mean = jax.tree.map(lambda x: x / reference, total)
        predicted = predict({**mean, "count": jnp.float32(reference * b)})
        ema = signs.init(params)
        rows = []
        warm_up = round(3 / (1 - B1))
        for k in range(warm_up + steps):
            stats = sums(params, next(batches), jax.random.fold_in(step_key, number))
            number += 1
            ema, aligned = advance(ema, stats, mean["mean"])
            if k >= warm_up:
                rows.append(aligned)
        measured = jax.tree.map(lambda *x: np.mean(x), *jax.device_get(rows))
        snr = analysis.signal_to_noise({**mean, "count": jnp.float32(reference * b)}, per="leaf")
        found[str(moment)] = {
            layer: {
                "snr": float(snr[layer]),
                "predicted": {n: float(p[layer]) for n, p in zip(NAMES, predicted)},
                "measured": {n: float(m[layer]) for n, m in zip(NAMES, measured)},
            }
            for layer in snr
        }
    return found


def findings(results: Results) -> Findings:
    blocks: list[Any] = []
    claims, show = [], []
    for task in results.each("task"):
        trained = results.at(task=task).trained()
        for b in trained.each("batch_size"):
            of = trained.at(batch_size=b)
            chosen = {name: best(of.at(optimizer=name), "learning_rate") for name in OPTIMIZERS}
            rows = [(f"{name}: η {p['learning_rate']:g}", runs) for name, (p, runs, _) in chosen.items() if runs.items]
            remarks = " ".join(f"{name}: {remark}." for name, (_, _, remark) in chosen.items() if remark)
            blocks.append(metrics_table(f"{task}, B {b}: each at its best learning rate", rows, remarks))
            title = f"{task}, B {b}: over learning rates"
            blocks.append(
                against(
                    of,
                    "learning_rate",
                    "optimizer",
                    title,
                    "learning rate",
                    Result.final,
                    "final held-out loss",
                    log_x=True,
                )
            )
            ratio = paired(chosen["micro_sign_sgd"][1].by_seed(), chosen["sign_ema"][1].by_seed())
            mean, low, high, n = ratio
            verdict = "not tested" if n == 0 else "undecided" if n < 2 or low <= 1 <= high else "agrees"
            claims.append(
                Claim(
                    ROULET,
                    f"The placement of the sign is crucial to success ({task}, B {b})",
                    f"so in the abstract; numbers {UNAVAILABLE}",
                    f"final held-out loss of MicroSignSGD over SignEMA: {with_interval(ratio)}",
                    verdict,
                    scale_of(of),
                    "the ratio differs from 1",
                )
            )
            if b == trained.each("batch_size")[0] or b == 64:
                show += [r.name for _, runs, _ in chosen.values() for r in runs.items]
        measured = results.at(task=task, what="alignment").measured()
        if measured.items:
            blocks += alignment_plots(task, measured)
            claims.append(prediction_claim(task, measured, trained))
    return Findings(claims, blocks, list(dict.fromkeys(show)))


def layers_of(result: Result) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (moment, layer, found) for moment, layers in (result.values or {}).items() for layer, found in layers.items()
    ]


def alignment_plots(task: str, measured: Results) -> list[Any]:
    series = []
    for colour, name in enumerate(OPTIMIZERS):
        pairs = [(f["predicted"][name], f["measured"][name]) for r in measured.items for _, _, f in layers_of(r)]
        series.append(Series(name, [p for p, _ in pairs], [m for _, m in pairs], colour=colour, points=True))
    series.append(Series("equal", [0.0, 1.0], [0.0, 1.0], colour=6))
    title = f"{task}: alignment with sign μ"
    about = "A point for each layer, batch size, seed and moment of training."
    rows: list[list[Any]] = []
    for b in measured.each("batch_size"):
        for moment in dict.fromkeys(m for r in measured.at(batch_size=b).items for m, _, _ in layers_of(r)):
            for layer in dict.fromkeys(layer for r in measured.items for _, layer, _ in layers_of(r)):
                found = [
                    f
                    for r in measured.at(batch_size=b).items
                    for m, at, f in layers_of(r)
                    if m == moment and at == layer
                ]
                cells = []
                for name in OPTIMIZERS:
                    both = (float(np.mean([f[kind][name] for f in found])) for kind in ("predicted", "measured"))
                    cells.append(" / ".join(map(number, both)))
                rows.append([f"B {b}, step {moment}, {layer}", float(np.mean([f["snr"] for f in found])), *cells])
    table = Table(f"{title}: predicted / measured", ["", "signal to noise", *OPTIMIZERS], rows, "Means over seeds.")
    return [Lines(title, "predicted", "measured", series, about, log_y=False), table]


def prediction_claim(task: str, measured: Results, trained: Results) -> Claim:
    errors, hits = {}, []
    for seed in measured.each("seed"):
        found = [f for r in measured.at(seed=seed).items for _, _, f in layers_of(r)]
        errors[seed] = float(np.mean([abs(f["predicted"][n] - f["measured"][n]) for f in found for n in OPTIMIZERS]))
        hits += [max(OPTIMIZERS, key=f["predicted"].get) == max(OPTIMIZERS, key=f["measured"].get) for f in found]
    off = mean_interval(list(errors.values()))
    _, low, high, n = off
    verdict = "undecided" if n < 2 or low <= 0.1 <= high else "agrees" if high < 0.1 else "disagrees"
    return Claim(
        ROULET,
        f"A signal-to-noise ratio predicts the best placement ({task})",
        f"so in the abstract; numbers {UNAVAILABLE}",
        f"mean |predicted − measured| cosine: {with_interval(off)}; the predicted best placement is the measured one in "
        f"{sum(hits)} of {len(hits)} layers",
        verdict if not math.isnan(off[0]) else "not tested",
        scale_of(trained) or "alignment only",
        "predicted and measured alignment differ by less than 0.1 on average",
    )
