"""Everything else, exactly: the tail of the gradient's computation, for a few examples at a time.

Some gradients are not the end of a layer: weight normalisation, masked or generated weights, a weight inside a
matrix inverse. The backward pass first forms a matrix per example (a contraction, bigger than what it was made of)
and goes on computing with it. Vmapped as it stands, that matrix exists for the whole batch. So cut *before* it: the
operations from the first such matrix on, the tail, are evaluated for as many examples at a time as memory allows,
from operands no larger than activations. No forward or backward pass is repeated.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .base import size_of
from .reduction import Formed, formed

# What makes a big array out of small ones; what follows only carries it on.
_EXPANDING = {"dot_general", "conv_general_dilated", "scatter-add", "scatter_add", "dynamic_update_slice"}


def generic(scope, atom) -> Formed:
    """The gradient of one example as the backward pass computes it, in bounded memory."""
    eqn = scope.producer_of(atom)
    name, source = (eqn.primitive.name, scope.source(eqn)) if eqn is not None else ("an input", "")
    if scope.tokens and scope.is_weight_gradient(atom):
        raise ValueError(
            f'granularity="token" has no meaning for a parameter whose gradient goes on from a matrix per example '
            f"(here through `{name}`, {source or 'unknown source'}), such as a masked, normalised or generated weight: its "
            'positions are summed before. Write granularity="example".'
        )
    tail = _tail(scope, atom)
    if tail is None:
        direct = name in _COORDINATE_BY_COORDINATE or eqn is None
        end = f"ends in `{name}`" if eqn is not None else "is an argument of the loss"
        why = f"{end}, no larger than the activations it comes from"
        term = formed(scope, atom, "reduction" if direct else "generic", source, why)
        return dataclasses.replace(term, accumulated=name in ("scan", "while"))
    equations, inputs, bytes_each = tail

    def prepare(*operands):
        env = dict(zip(inputs, operands, strict=True))
        for e in equations:
            values = scope.bind(e, [env[v] if scope.is_variable(v) else scope.literal(v) for v in e.invars])
            env.update(zip(e.outvars, values, strict=True))
        return (env[atom],)

    return Formed(
        operands=tuple(inputs),
        prepare=prepare,
        moves=(),
        shapes=(scope.aval(atom),),
        rule="generic",
        source=source,
        why=f"ends in `{name}` after {len(equations)} operations on a matrix per example",
        bytes_each=bytes_each,
    )


_COORDINATE_BY_COORDINATE = {
    "mul", "add", "add_any", "sub", "neg", "div", "reduce_sum", "select_n", "exp", "tanh", "convert_element_type",
    "broadcast_in_dim", "reshape", "transpose", "integer_pow", "cumsum", "scan",
}  # fmt: skip


def _tail(scope, atom):
    """The equations to evaluate in chunks, what they read, and the bytes they take per example; None: no need."""
    cone = scope.private_cone(atom)
    big = set()
    for e in cone:
        if e.primitive.name in _EXPANDING and scope.varies(e.outvars[0]):
            out, inputs = _bytes(e.outvars[0]), sum(_bytes(v) for v in e.invars if scope.varies(v))
            if out > 2 * inputs and out * scope.batch_size > scope.chunk_bytes:
                big.update(e.outvars)
    if not big:
        return None
    equations, inside = [], set()
    for e in cone:
        if any(v in big for v in e.outvars) or any(scope.is_variable(v) and v in inside for v in e.invars):
            equations.append(e)
            inside.update(e.outvars)
    inputs = []
    for e in equations:
        for v in e.invars:
            if scope.is_variable(v) and v not in inside and v not in inputs:
                inputs.append(v)
    return equations, inputs, sum(_bytes(v) for e in equations for v in e.outvars)


def _bytes(v) -> int:
    dtype = v.aval.dtype
    return size_of(v.aval.shape) * (jnp.dtype(dtype).itemsize if jnp.issubdtype(dtype, jnp.number) else 4)
