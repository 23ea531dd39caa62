"""Operations that a coordinatewise statistic passes through: they move coordinates and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .base import Move, reshaped

# primitive -> function(equation) -> the move of its first operand, or None
STRUCTURAL: dict[str, Callable[[Any], Move | None]] = {}


def structural(*names: str):
    def add(rule):
        for name in names:
            STRUCTURAL[name] = rule
        return rule

    return add


@structural("reshape", "squeeze", "expand_dims")
def _reshape(eqn):
    # `reshape` can permute first (`dimensions`); JAX no longer writes that, and we do not guess.
    return reshaped(eqn.outvars[0].aval.shape) if eqn.params.get("dimensions") in (None, *_squeezed(eqn)) else None


def _squeezed(eqn):
    return [eqn.params["dimensions"]] if eqn.primitive.name != "reshape" else []


@structural("reduce_sum")
def _sum_of_one(eqn):
    """A sum over axes of size 1 (of a bias that was broadcast to [1, 1, n]) is a reshape; others are a rule's."""
    given, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return reshaped(out.shape) if given.size == out.size else None


@structural("transpose")
def _transpose(eqn):
    perm = tuple(eqn.params["permutation"])
    return Move("transpose", lambda g: jnp.transpose(g, perm), (perm,))


@structural("convert_element_type", "reduce_precision", "copy", "copy_p", "sharding_constraint", "optimization_barrier")
def _same(eqn):
    # Sums are kept in float32 or wider, so a cast of the gradient is left out, not repeated: casting to float32
    # changes nothing, and casting to bfloat16 would only round.
    if len(eqn.invars) > 1 or not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
        return None
    return Move("same", lambda g: g) if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None


@structural("rev")
def _rev(eqn):
    dims = tuple(eqn.params["dimensions"])
    return Move("rev", lambda g: jnp.flip(g, dims), (dims,))


@structural("slice")
def _slice(eqn):
    start, limit = tuple(eqn.params["start_indices"]), tuple(eqn.params["limit_indices"])
    strides = tuple(eqn.params["strides"] or (1,) * len(start))
    return Move("slice", lambda g: jax.lax.slice(g, start, limit, strides), (start, limit, strides), isometric=False)


@structural("broadcast_in_dim")
def _broadcast(eqn):
    shape, dims = tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    return Move("broadcast", lambda g: jax.lax.broadcast_in_dim(g, shape, dims), (shape, dims), isometric=False)


def pad_move(config) -> Move | None:
    """Padding with zeros."""
    config = tuple((int(low), int(high), int(inner)) for low, high, inner in config)

    def apply(g):
        return jax.lax.pad(g, jnp.zeros((), g.dtype), config)

    return Move("pad", apply, (config,), fills=True, isometric=all(low >= 0 and high >= 0 for low, high, _ in config))
