"""Hyperparameters, and what is wrong with them."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def is_concrete(x: Any) -> bool:
    """A number that can be looked at: not a schedule, and not traced (`optax.inject_hyperparams` traces them)."""
    return isinstance(x, (numbers.Real, np.ndarray, np.generic, jax.Array)) and not isinstance(x, Tracer)


def check_decay(**decays: Any) -> None:
    for name, value in decays.items():
        _check(name, value, lambda x: 0 <= x < 1, "a number from 0 up to, but not including, 1", "0.9")


def check_not_negative(**values: Any) -> None:
    for name, value in values.items():
        _check(name, value, lambda x: 0 <= x < math.inf, "a number that is not negative", "1e-8")


def check_rate(name: str, value: Any, instead: str) -> None:
    """A number that is not negative, or a schedule."""
    if not callable(value):
        _check(name, value, lambda x: 0 <= x < math.inf, "a number that is not negative, or a schedule", instead)


def check_dtype(name: str, dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        known = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"{name} was given {dtype!r}; expected None or a float dtype. Write `{name}=jnp.bfloat16`.")
    return jax.dtypes.canonicalize_dtype(dtype)


def _check(name, value, holds, expected, instead):
    if isinstance(value, Tracer):
        return
    if callable(value):
        raise TypeError(
            f"{name} was given a function; expected {expected}. For a schedule write "
            f"`optax.inject_hyperparams(optimizer)({name}=schedule, …)`."
        )
    if not is_concrete(value) or isinstance(value, bool) or np.ndim(value) != 0 or not holds(value):
        raise ValueError(f"{name} was given {value!r}; expected {expected}. Write, for example, `{name}={instead}`.")
