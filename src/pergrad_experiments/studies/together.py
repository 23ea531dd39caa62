"""Runs that differ only in seed and learning rate, as one program: the training step vmapped over them.

Worth it where a step is short, so that starting it costs more than running it. A vmapped convolution with a kernel for
each run is a grouped one, which is slow on a CPU: hence `TASKS`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import measure, optimizers, runs, tasks
from .. import train as training
from ..config import Config

TASKS = ("quadratic",)
AT_ONCE = 64  # runs in one program: what bounds its memory


def groups(configs: Sequence[Config]) -> list[list[int]]:
    """Which of the runs can be one program: by place in ``configs``."""
    found: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        alone = dataclasses.asdict(config) | {"seed": 0, "learning_rate": 0.0}
        key = json.dumps(alone, sort_keys=True) if config.task in TASKS else str(place)
        found.setdefault(key, []).append(place)
    return [members[i : i + AT_ONCE] for members in found.values() for i in range(0, len(members), AT_ONCE)]


def run(configs: Sequence[Config], folders: Sequence[Path]) -> None:
    """Trains all of them, and writes their run folders when done: without checkpoints, since it would begin anew anyway.

    A run that diverges ends there; the others go on.
    """
    first = configs[0]
    tasks.check_device(first)
    # Data depend on the seed alone, and runs with the same seed share them.
    seeds = list(dict.fromkeys(config.seed for config in configs))
    built = {seed: tasks.build(dataclasses.replace(first, seed=seed)) for seed in seeds}
    task = built[seeds[0]]
    which = jnp.array([seeds.index(config.seed) for config in configs])
    rates = jnp.array([config.learning_rate for config in configs], jnp.float32)
    unit = optimizers.schedule(dataclasses.replace(first, learning_rate=1.0))

    def optimizer(rate):
        return optimizers.make(first, learning_rate=lambda step: rate * unit(step))

    def start(seed, rate):
        init_key, step_key = training.keys(seed)
        params = task.init(init_key)
        return params, optimizer(rate).init(params), step_key

    def step(rate, params, state, batch, key, number):
        key = jax.random.fold_in(key, number)
        return training.step_function(task, optimizer(rate), first.microbatch_size)(params, state, batch, key)

    @jax.jit
    def step_all(params, state, batches, number):
        mine = jax.tree.map(lambda x: x[which], batches)
        return jax.vmap(step, in_axes=(0, 0, 0, 0, 0, None))(rates, params, state, mine, step_keys, number)

    @jax.jit
    def statistics_all(params, batches, number):
        found = measure.statistics(task.loss, task.stacked, first.microbatch_size)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(step_keys, number)
        return jax.vmap(found)(params, jax.tree.map(lambda x: x[which], batches), keys)

    params, state, step_keys = jax.vmap(start)(jnp.array([c.seed for c in configs]), rates)
    streams = [built[seed].batches(0, lambda: params) for seed in seeds]
    writers = [_fresh(folder, config, built[config.seed].data) for config, folder in zip(configs, folders)]
    lines: list[list[dict[str, Any]]] = [[] for _ in configs]
    ended: dict[int, int] = {}
    seconds = 0.0

    def note(k: int, kind: str, done: int, **numbers: Any) -> None:
        if k not in ended:
            at = {"step": done, "examples": done * first.batch_size, "seconds": round(seconds / len(configs), 3)}
            lines[k].append({**at, "kind": kind, **numbers})

    def evaluate(done: int) -> None:
        for k in range(len(configs)):
            if k not in ended:
                found = task.evaluate(jax.tree.map(lambda x, k=k: x[k], params))
                note(k, "eval", done, **{name: np.float32(value) for name, value in found.items()})

    waiting: list[tuple[int, Any]] = []

    def fetch(passed: float) -> None:
        throughput = round(len(waiting) * first.batch_size * len(configs) / passed, 1) if passed > 0 else 0.0
        for done, report in jax.device_get(waiting):
            finite = np.isfinite(report["loss"]) & np.all(report["finite"], axis=0)
            for k in range(len(configs)):
                if not finite[k]:
                    ended.setdefault(k, done)
                numbers = {name: report[name][k] for name in ("loss", "step_length", "gradient_norm")}
                rate = np.float32(rates[k] * unit(done - 1))
                note(k, "train", done, **numbers, learning_rate=rate, throughput=throughput)
        waiting.clear()

    evaluate(0)
    began = None
    for number in range(first.steps):
        drawn = [next(stream) for stream in streams]
        batches = {name: np.stack([batch[name] for batch in drawn]) for name in drawn[0]}
        if number % first.stats_every == 0 and first.batch_size > 1:
            found = jax.device_get(statistics_all(params, batches, number))
            for k, config in enumerate(configs):
                mine = {name: batches[name][int(which[k])] for name in batches}
                one = jax.tree.map(lambda x, k=k: x[k], found)
                note(k, "stats", number, **measure.entry(one, mine, built[config.seed].show, folders[k], number))
        since = time.perf_counter()
        params, state, report = step_all(params, state, batches, number)
        if number == 0:  # it was compiled
            jax.block_until_ready(report)
            began = since = time.perf_counter()
        waiting.append((number + 1, report))
        last = number + 1 == first.steps
        if last or (number + 1) % first.eval_every == 0 or len(waiting) >= training.WRITE_STEPS:
            jax.block_until_ready(report)
            passed = time.perf_counter() - (began or since)
            seconds += passed
            fetch(passed)
            if last or (number + 1) % first.eval_every == 0:
                evaluate(number + 1)
            began = time.perf_counter()
    for k, writer in enumerate(writers):
        writer.append(lines[k])
        if k in ended:
            writer.set_status("diverged", step=ended[k], what="loss", leaf=None, checkpoint=None)
        else:
            writer.set_status("done", step=first.steps)
        writer.close()


def _fresh(folder: Path, config: Config, data: dict[str, Any]) -> runs.Folder:
    """A new run folder, or one that was begun and not finished, empty again."""
    if (folder / "config.json").exists():
        writer, _ = runs.Folder.open(folder)
        writer.cut_metrics(0)
        writer.set_status("running", step=0)
        return writer
    return runs.Folder.create(folder, config, data)
