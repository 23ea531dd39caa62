"""What does a training step of Eve cost over one of Adam?

Table 3 of Kunze et al., whose runtimes were measured on a TPU v3-8. Here the whole compiled training step, least time
of interleaved rounds, at the sizes of the preset; intervals are over repetitions.
"""

from __future__ import annotations

from typing import Any

import jax

from .. import optimizers
from .. import tasks as all_tasks
from .. import train as training
from ..report.charts import Dots, Series, Table, number
from .common import EVE, Claim, Findings, Measure, Results, judge, time_ratio, with_interval
from .eve_common import FIVE
from .overhead import compiled, interleaved

PUBLISHED = {"cifar10": 1.20, "seq2seq": 1.00, "translation": 1.29, "pong": 1.18, "pixelcnn": 4.54}
ROUNDS = {"smoke": 2, "cpu": 6, "gpu": 30, "paper": 30}
# The cpu presets' models; sample data where that is enough to measure time.
SAMPLE = {"cifar10": {"sample": True}, "translation": {"sample": True, "vocabulary": 320}, "pixelcnn": {"sample": True}}


def tasks(preset: str) -> tuple[str, ...]:
    return FIVE


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Measure]:
    return [Measure({"task": task}, lambda task=task: measure(task, preset, seeds)) for task in tasks]


def measure(task: str, preset: str, repetitions: int) -> dict[str, Any]:
    options = SAMPLE.get(task, {}) if preset in ("smoke", "cpu") else {}
    config = all_tasks.configure(task, "adam", preset, task_options=options)
    built = all_tasks.build(config)
    params = jax.jit(built.init)(jax.random.key(0))
    batch = next(built.batches(0, lambda: params))
    programs, arguments = {}, {}
    for name in ("adam", "eve"):
        chosen = all_tasks.configure(task, name, preset, task_options=options)
        optimizer = optimizers.make(chosen)
        arguments[name] = params, optimizer.init(params), batch, jax.random.key(1)
        programs[name] = compiled(training.step_function(built, optimizer, config.microbatch_size), arguments[name])
    bound = {name: lambda program=program, given=arguments[name]: program(*given) for name, program in programs.items()}
    times = [interleaved(bound, (), ROUNDS[preset]) for _ in range(repetitions)]
    return {
        "parameters": all_tasks.parameters(config),
        "batch_size": config.batch_size,
        "seconds": {name: [t[name] for t in times] for name in programs},
        "bytes": {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()},
    }


def findings(results: Results) -> Findings:
    names = results.each("task")
    rows: list[list[Any]] = []
    claims, found = [], []
    for task in names:
        (values,) = (r.values for r in results.at(task=task).items if r.values)
        ratio = time_ratio(values["seconds"]["eve"], values["seconds"]["adam"])
        found.append(ratio)
        memory = values["bytes"]["eve"] / max(values["bytes"]["adam"], 1)
        step = 1e3 * min(values["seconds"]["adam"])
        rows.append(
            [
                task,
                values["parameters"],
                values["batch_size"],
                step,
                with_interval(ratio),
                PUBLISHED[task],
                number(memory),
            ]
        )
        claims.append(
            Claim(
                EVE,
                f"A step of Eve costs no more than this over one of Adam ({task}, Table 3)",
                f"{PUBLISHED[task]:.2f} (TPU v3-8)",
                with_interval(ratio).replace("seed", "repetition"),
                judge(ratio, PUBLISHED[task], above=False),
                f"{values['parameters']:,} parameters, batch {values['batch_size']}, {jax.devices()[0].device_kind}",
                "not dearer than published, where the device and the size were others",
            )
        )
    mean, low, high = ([f[k] for f in found] for k in range(3))
    series = [
        Series("published, TPU v3-8", list(range(len(names))), [PUBLISHED[t] for t in names], colour=6),
        Series("measured here", list(range(len(names))), mean, low, high),
    ]
    columns = ["", "parameters", "batch", "step of Adam, ms", "Eve over Adam", "published", "temporary memory"]
    blocks = [
        Dots(
            "Time of a step: Eve over Adam",
            names,
            "ratio",
            series,
            "Another device, and models of another size.",
            reference=1.0,
        ),
        Table("Runtimes", columns, rows, "Temporary memory is Eve's over Adam's."),
    ]
    return Findings(claims, blocks, [])
