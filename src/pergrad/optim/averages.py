"""Arithmetic on trees of state: averages over steps, in float32 or wider. `pergrad.analysis` is built on it as well."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..reductions import SQUARE, accumulator
from .arguments import is_concrete


def zeros(params: Any, dtype: Any = None) -> Any:
    """State like the parameters, with their sharding: in ``dtype``, or in float32 (wider where the parameters are)."""

    def one(p):
        p = jnp.asarray(p)
        keep = dtype is None or jnp.iscomplexobj(p)  # a float dtype would lose the imaginary part
        return jnp.zeros_like(p, dtype=accumulator(p.dtype) if keep else dtype)

    return jax.tree.map(one, params)


def zeros_real(params: Any) -> Any:
    """The same for averages of squares, which are real."""
    return jax.tree.map(jnp.real, zeros(params))


def average(new: Any, old: Any, decay: Any) -> Any:
    """The exponential moving average (1 − decay) new + decay old, in float32 or wider."""
    return jax.tree.map(lambda n, o: (1 - decay) * n + decay * o.astype(accumulator(o.dtype)), new, old)


def unbiased(tree: Any, decay: Any, steps: Any) -> Any:
    """An average that began at 0, divided by the weight 1 − decayᵗ that its t terms have."""
    weight = 1 - decay**steps
    return jax.tree.map(lambda x: x / weight.astype(x.dtype), tree)


def square(tree: Any) -> Any:
    return jax.tree.map(SQUARE.fn, tree)


def cast(tree: Any, like: Any) -> Any:
    """To the dtypes of ``like``: state keeps its own from step to step, and updates those that they came with."""
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)


def number(count: Any, like: jax.Array) -> Any:
    """A count, for arithmetic with an array: exact where it is known, else in the array's precision. Of nothing, NaN."""
    if is_concrete(count):
        return float(count) or math.nan
    return count.astype(jnp.real(like).dtype)


def all_finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats]))


def chosen(condition: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where the condition holds, else ``old``, whatever ``new`` is."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
