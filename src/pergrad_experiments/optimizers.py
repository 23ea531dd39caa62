"""Every optimizer of `pergrad.optim`, and optax's own, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax

from pergrad import optim

from .config import Config, checked
from .errors import BadInput, unknown


def moments(learning_rate: Any, a: float = 1.0, c: float | str = "1/B", b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0):
    """m̂/(√ν̂ + ε) with ν = EMA of a μ̂² + c σ̂²: (1, 1/B) is Adam, (1, 1) MicroAdam, (0, 1) MicroAdamVar, (1, 0) MicroAdamMSQ."""
    if isinstance(c, str) and c != "1/B":
        raise ValueError(f"c was given {c!r}; expected a number, or 1/B.")
    weight = (lambda count: 1 / count) if isinstance(c, str) else c
    core = optim.scale_by_moments(a, weight, b1, b2, eps, eps_root)
    return optax.chain(core, optax.scale_by_learning_rate(learning_rate))


_OURS: dict[str, Callable] = {
    name: getattr(optim, name)
    for name in (
        "adam",
        "micro_adam",
        "micro_adam_var",
        "micro_adam_msq",
        "eve",
        "micro_rmsprop",
        "micro_adadelta",
        "micro_adagrad",
        "sign_sgd",
        "sign_ema",
        "micro_sign_sgd",
    )
} | {"moments": moments}


def _optaxs() -> dict[str, Callable]:
    # What needs a learning rate at most and makes an optimizer. L-BFGS is none for stochastic gradients: it searches lines.
    found = {}
    for name, function in inspect.getmembers(optax, inspect.isfunction):
        takes = inspect.signature(function).parameters
        needs = {key for key, p in takes.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        if "learning_rate" in takes and needs <= {"learning_rate"} and not name.startswith(("_", "scale_by_", "lbfgs")):
            found[f"optax.{name}"] = function
    return found


OPTIMIZERS: dict[str, Callable] = _OURS | _optaxs()

#: A preset's learning rate is for Adam. Starting points for others; nothing here is tuned.
_RATES: dict[str, float] = {
    **dict.fromkeys(["sign_sgd", "sign_ema", "micro_sign_sgd", "optax.sign_sgd", "optax.signum", "optax.lion"], 0.1),
    **{f"optax.{name}": 10.0 for name in ("sgd", "noisy_sgd", "optimistic_gradient_descent")},
}


def constructor(name: str) -> Callable:
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def default_rate(name: str, rate_of_adam: float) -> float:
    return rate_of_adam * _RATES.get(name, 1.0)


def checked_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of an optimizer, as its arguments: numbers, booleans and words."""
    parameters = inspect.signature(constructor(name)).parameters
    plain = {
        key: p
        for key, p in parameters.items()
        if key != "learning_rate" and isinstance(p.default, float | int | str | None)
    }
    options = {}
    for key, value in given.items():
        if key not in plain:
            raise unknown(f"option of {name}", key, plain)
        default = plain[key].default
        if isinstance(default, bool):
            hint: Any = bool
        elif isinstance(default, str):
            hint = float | str
        elif default is None:
            hint = float | bool | None
        else:
            hint = float
        options[key] = checked(value, hint, f"{key} of {name}")
        if isinstance(default, int) and not isinstance(default, bool):
            options[key] = checked(value, int, f"{key} of {name}")
    return options


def schedule(config: Config) -> optax.Schedule:
    """The learning rate of each step: up from 0 over the warm-up, and then as the schedule says."""
    rate, rest = config.learning_rate, max(config.steps - config.warmup, 1)
    after = {
        "constant": lambda: optax.constant_schedule(rate),
        "cosine": lambda: optax.cosine_decay_schedule(rate, rest),
        "linear": lambda: optax.linear_schedule(rate, 0.0, rest),
    }[config.schedule]()
    if not config.warmup:
        return after
    # The first step is 1/warmup of the way up: a step of length 0 would be a step wasted.
    up = lambda step: rate * (step + 1) / config.warmup
    return optax.join_schedules([up, after], [config.warmup])


def make(config: Config, learning_rate: Any = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run. ``learning_rate``: a number or schedule in place of the configuration's."""
    rate = learning_rate
    if rate is None:  # a few of optax's take numbers only: a schedule where there is one
        constant = config.schedule == "constant" and not config.warmup
        rate = config.learning_rate if constant else schedule(config)
    options = checked_options(config.optimizer, config.optimizer_options)
    try:
        optimizer = constructor(config.optimizer)(learning_rate=rate, **options)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{config.optimizer} refuses its options: {error}") from error
    if config.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    return optax.with_extra_args_support(optimizer)
