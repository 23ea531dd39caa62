"""The tasks, one file each: model, loss, data, metrics.

A task's module has the dataclass ``Options``; ``PRESETS``, by name; ``init(options)``, which gives the function from a key to
parameters; and ``make(options, config)``, which gives the `common.Task`, with its data.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import jax

from .. import optimizers
from ..config import Config, options_from
from ..errors import BadInput, unknown
from .common import Preset, Task

TASKS = ("quadratic", "cifar10", "seq2seq", "lm", "translation", "pixelcnn", "pong")
PRESETS = ("smoke", "cpu", "gpu", "paper")


def module(name: str) -> ModuleType:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return importlib.import_module(f"{__name__}.{name}")


def preset(task: str, name: str) -> Preset:
    presets = module(task).PRESETS
    if name not in presets:
        raise unknown("preset", name, presets)
    return presets[name]


def configure(
    task: str,
    optimizer: str = "adam",
    preset_name: str = "cpu",
    *,
    seed: int = 0,
    task_options: dict[str, Any] | None = None,
    optimizer_options: dict[str, Any] | None = None,
    **given: Any,
) -> Config:
    """A configuration: the preset's values, and what was ``given`` (None: not given) in their place."""
    chosen = preset(task, preset_name)
    options = options_from(module(task).Options, task_options or {}, chosen.options, task)
    values: dict[str, Any] = {
        field.name: getattr(chosen, field.name) for field in dataclasses.fields(Preset) if field.name != "options"
    }
    values["learning_rate"] = optimizers.default_rate(optimizer, chosen.learning_rate)
    hints = {field.name: field.type for field in dataclasses.fields(Config)}
    for name, value in given.items():
        if name not in hints:
            raise unknown("setting", name, hints)
        if value is not None:
            values[name] = value
    config = Config(
        task=task,
        optimizer=optimizer,
        preset=preset_name,
        seed=seed,
        task_options=dataclasses.asdict(options),
        optimizer_options=optimizers.checked_options(optimizer, optimizer_options or {}),
        **values,
    )
    every = checkpoint_multiple(config)
    rounded = max(every, round(config.checkpoint_every / every) * every)
    return dataclasses.replace(config, checkpoint_every=rounded)


def checkpoint_multiple(config: Config) -> int:
    """Between how many steps a run can be resumed: 1, unless the task says otherwise."""
    every = getattr(module(config.task), "checkpoint_multiple", None)
    return 1 if every is None else every(options_of(config), config)


def options_of(config: Config) -> Any:
    cls = module(config.task).Options
    return options_from(cls, config.task_options, cls(), config.task)


def check_device(config: Config) -> None:
    if config.preset == "gpu" and jax.default_backend() == "cpu":
        raise BadInput(
            "the preset gpu needs an accelerator, and JAX sees only a CPU. Write --preset cpu, or install jax[cuda]."
        )


def build(config: Config) -> Task:
    """The task of a configuration, with its data."""
    task = module(config.task).make(options_of(config), config)
    if task.size is not None and config.batch_size > task.size:
        raise BadInput(
            f"the batch is larger than the data: {config.batch_size} examples of {task.size}. Write --batch-size "
            f"{task.size}, or less."
        )
    return task


def parameters(config: Config) -> int:
    """How many there are, from shapes alone."""
    shapes = jax.eval_shape(module(config.task).init(options_of(config)), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


__all__ = [
    "PRESETS",
    "TASKS",
    "Preset",
    "Task",
    "build",
    "check_device",
    "checkpoint_multiple",
    "configure",
    "module",
    "parameters",
]
