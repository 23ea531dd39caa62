"""What do statistics of examples' gradients cost over the mean gradient?

Time and temporary memory of loss, gradient and statistics, compiled, over those of `jax.value_and_grad`, by model and
batch size. "vmap" is the twin: a vmapped gradient, then the mean of its square, which is what one would write without
pergrad. Each number is a ratio of the least times of interleaved rounds; intervals are over repetitions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax

import pergrad as pg

from .. import tasks as all_tasks
from ..report.charts import Lines, Series, Table, number
from .common import ROULET, UNAVAILABLE, Claim, Findings, Measure, Results, time_ratio, with_interval

STATISTICS: dict[str, tuple[dict[str, Any], str]] = {
    "mean": ({"mean": pg.mean()}, "auto"),
    "mean, second moment": ({"mean": pg.mean(), "second_moment": pg.second_moment()}, "auto"),
    "mean, sign mean": ({"mean": pg.mean(), "sign_mean": pg.sign_mean()}, "auto"),
    "mean, norms": ({"mean": pg.mean(), "norms": pg.norms()}, "auto"),
    "mean, second moment by vmap": ({"mean": pg.mean(), "second_moment": pg.second_moment()}, "vmap"),
}
# Each with sample data, which is enough to measure time.
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {"quadratic": {}},
    "cpu": {
        "cifar10": {"width": 16, "units": 128, "depth": 8},
        "seq2seq": {"width": 128},
        "lm": {"vocabulary": 1024, "length": 64, "width": 128, "layers": 4, "heads": 4, "hidden": 512, "dropout": 0.0},
    },
    "gpu": {
        "cifar10": {"width": 32, "units": 256},
        "seq2seq": {"width": 512},
        "lm": {
            "vocabulary": 1024,
            "length": 64,
            "width": 768,
            "layers": 12,
            "heads": 12,
            "hidden": 3072,
            "dropout": 0.0,
        },
    },
}
MODELS["paper"] = MODELS["gpu"]
BATCHES = {"smoke": (8,), "cpu": (16, 64), "gpu": (16, 64, 128), "paper": (16, 64, 128)}
ROUNDS = {"smoke": 2, "cpu": 8, "gpu": 30, "paper": 30}


def tasks(preset: str) -> tuple[str, ...]:
    return tuple(MODELS[preset])


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Measure]:
    out = []
    for task in tasks:
        for b in BATCHES[preset]:
            place = {"task": task, "batch_size": b}
            options = MODELS[preset][task]
            out.append(Measure(place, lambda task=task, b=b, o=options: measure(task, b, o, seeds, ROUNDS[preset])))
    return out


def measure(task: str, batch_size: int, options: dict[str, Any], repetitions: int, rounds: int) -> dict[str, Any]:
    config = all_tasks.configure(task, "adam", "smoke", batch_size=batch_size, task_options=options)
    built = all_tasks.build(config)
    params = jax.jit(built.init)(jax.random.key(0))
    arguments = params, next(built.batches(0, lambda: params)), jax.random.key(1)
    programs = {"gradient": compiled(jax.value_and_grad(built.loss), arguments)}
    for name, (asked, impl) in STATISTICS.items():
        programs[name] = compiled(pg.value_and_stats(built.loss, asked, prng_argnums=2, impl=impl), arguments)
    times = [interleaved(programs, arguments, rounds) for _ in range(repetitions)]
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "seconds": {name: [t[name] for t in times] for name in programs},
        "bytes": {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()},
    }


def compiled(function: Callable, arguments: tuple) -> Any:
    return jax.jit(function).lower(*arguments).compile()


def interleaved(programs: dict[str, Any], arguments: tuple, rounds: int) -> dict[str, float]:
    """The least time of each, in turns: what else the machine does meets all of them."""
    least = dict.fromkeys(programs, math.inf)
    for turn in range(rounds + 1):
        for name, program in programs.items():
            since = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            if turn:  # the first warms up
                least[name] = min(least[name], time.perf_counter() - since)
    return least


def findings(results: Results) -> Findings:
    rows: list[list[Any]] = []
    blocks: list[Any] = []
    claims = []
    for task in results.each("task"):
        of = results.at(task=task)
        batch_sizes = sorted(of.each("batch_size"))
        series = []
        for colour, name in enumerate(STATISTICS):
            found = []
            for b in batch_sizes:
                (values,) = (r.values for r in of.at(batch_size=b).items if r.values)
                mean, low, high, n = time_ratio(values["seconds"][name], values["seconds"]["gradient"])
                memory = (
                    values["bytes"][name] / values["bytes"]["gradient"] if values["bytes"]["gradient"] else math.nan
                )
                found.append((mean, low, high, n, memory))
                least = min(values["seconds"]["gradient"]) * 1e3
                rows.append(
                    [
                        f"{task}, B {b}",
                        name,
                        number(mean),
                        f"{number(low)} … {number(high)}" if n > 1 else "–",
                        number(memory),
                        least,
                    ]
                )
            mean, low, high = ([f[k] for f in found] for k in range(3))
            series.append(Series(name, batch_sizes, mean, low, high, colour))
        values = next(r.values for r in of.items if r.values)
        blocks.append(
            Lines(
                f"Time over the gradient's: {task}",
                "batch size",
                "ratio",
                series,
                f"{values['parameters']:,} parameters.",
                log_x=True,
                log_y=True,
                reference=1.0,
                x_ticks=tuple(batch_sizes),
            )
        )
        claims.append(claim(of, task, batch_sizes[-1], values["parameters"]))
    columns = ["", "statistics", "time", "95 % interval", "temporary memory", "gradient, ms"]
    blocks.append(Table("Time and memory over the gradient's", columns, rows, "Ratios; 1 is the plain gradient."))
    return Findings(claims, blocks, [])


def claim(of: Results, task: str, b: int, parameters: int) -> Claim:
    name, limit = "mean, second moment", 1.5
    (values,) = (r.values for r in of.at(batch_size=b).items if r.values)
    time_found = time_ratio(values["seconds"][name], values["seconds"]["gradient"])
    memory = values["bytes"][name] / max(values["bytes"]["gradient"], 1)
    _, low, high, n = time_found
    verdict = (
        "undecided"
        if n < 2
        else "agrees"
        if high <= limit and memory <= 1.1
        else "disagrees"
        if low > limit or memory > 1.1
        else "undecided"
    )
    return Claim(
        ROULET,
        f"Statistics cost almost no time and memory over the gradient ({task})",
        f"“in some cases … almost no computational and memory overheads” (abstract of version 1); numbers {UNAVAILABLE}",
        f"{name}: time × {with_interval(time_found).replace('seed', 'repetition')}, temporary memory × {number(memory)}",
        verdict,
        f"{task}, {parameters:,} parameters, batch {b}, {jax.devices()[0].device_kind}",
        "time ≤ 1.5 and memory ≤ 1.1 of the gradient's, the targets of this project on a CPU",
    )
