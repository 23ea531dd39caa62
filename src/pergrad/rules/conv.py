"""Convolutions: the gradient of the kernel is a contraction over output positions, one for each kernel offset.

JAX writes the kernel's gradient as a convolution again, of the input with the cotangents as its kernel:

    g[i, o, k] = Σ_{c, p} lhs[i, c, k·stride + p·dilation] rhs[o, c, p],

with k the offsets within the kernel, p the output positions and c the images of one example (mostly 1). With the
patches x[(c, p), (k, i)] = lhs[i, c, k·stride + p·dilation] this is the contraction of a dense layer, and all that
`dense` says holds. Patches are many times larger than the input, so they are made for a few examples at a time, by
strided slices along one axis after the other: never for the batch, and never a convolution with B groups. A fused kernel
needs no patches: it takes one offset after the other, for the whole batch.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from . import register
from .base import Batch, Move, reshaped, shape_of, size_of
from .dense import Contraction


@register("conv_general_dilated")
def convolution(scope, eqn) -> Contraction | None:
    """`conv_general_dilated(lhs, rhs)` as a contraction of lhs's patches with rhs."""
    lhs, rhs = eqn.invars
    out = eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating) or not all(scope.varies(v) for v in eqn.invars):
        return None
    p = eqn.params
    d = p["dimension_numbers"]
    feature_groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    groups = max(feature_groups, batch_groups)
    offsets = [out.shape[a] for a in d.out_spec[2:]]
    positions = [rhs.aval.shape[a] for a in d.rhs_spec[2:]]
    i, c = lhs.aval.shape[d.lhs_spec[0]] // batch_groups, rhs.aval.shape[d.rhs_spec[1]]
    o = rhs.aval.shape[d.rhs_spec[0]] // groups
    n = len(offsets)

    def prepared(where, lhs, rhs):
        """x and δ at the offsets ``where[a]`` along each axis."""
        # Channels last, so that patches of channels-last images need no transposition: lhs[c, *space, i], rhs[c, *p, o].
        lhs = jnp.transpose(lhs, (d.lhs_spec[1], *d.lhs_spec[2:], d.lhs_spec[0]))
        rhs = jnp.transpose(rhs, (d.rhs_spec[1], *d.rhs_spec[2:], d.rhs_spec[0]))
        padding = [(low, high, gap - 1) for (low, high), gap in zip(p["padding"], p["lhs_dilation"], strict=True)]
        lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *padding, (0, 0, 0)])
        for a in range(n):  # each adds its offsets before i: [c, *p, *k, i] at the end
            lhs = _patches(lhs, 1 + a, where[a], positions[a], p["window_strides"][a], p["rhs_dilation"][a])
        q, k = size_of(positions), size_of([len(ks) for ks in where])
        # Groups split o, and with it i (batch groups) or c (feature groups); each pairs with its own.
        x = lhs.reshape(feature_groups, c, q, k, batch_groups, i)
        x = jnp.transpose(x, (0, 4, 1, 2, 3, 5)).reshape(groups, c * q, k * i)
        delta = jnp.moveaxis(rhs.reshape(c, q, groups, o), 2, 0).reshape(groups, c * q, o)
        return x, delta

    prepare = functools.partial(prepared, [range(k) for k in offsets])
    slices = [functools.partial(prepared, [(k,) for k in at]) for at in itertools.product(*map(range, offsets))]

    # g comes as [group, (*k, i), o]; the output wants [i, (group, o), *k] on the axes of out_spec.
    order = (1 + n, 0, 2 + n, *range(1, 1 + n))
    inverse = tuple(int(a) for a in np.argsort(d.out_spec))
    moves = (
        reshaped((groups, *offsets, i, o)),
        Move("transpose", lambda g: jnp.transpose(g, order), (order,)),
        reshaped([out.shape[a] for a in d.out_spec]),
        Move("transpose", lambda g: jnp.transpose(g, inverse), (inverse,)),
    )

    def total(batch: Batch):
        """The plain gradient: the same convolution, with the batch laid along its contracted axis c."""
        lhs, rhs = batch.prepared(lambda *ops: ops).operands
        lhs = _merge(lhs, d.lhs_spec[1], feature_groups)
        rhs = _merge(rhs, d.rhs_spec[1], 1)
        g = jax.lax.conv_general_dilated(
            lhs,
            rhs,
            p["window_strides"],
            p["padding"],
            p["lhs_dilation"],
            p["rhs_dilation"],
            d,
            feature_groups,
            batch_groups,
            p["precision"],
            p["preferred_element_type"],
        )
        g = jnp.transpose(g, d.out_spec).reshape(i, groups, o, *offsets)
        return jnp.transpose(g, (1, *range(3, 3 + n), 0, 2)).reshape(groups, size_of(offsets) * i, o)

    return Contraction(
        operands=(lhs, rhs),
        prepare=prepare,
        moves=moves,
        shapes=shape_of(prepare, [lhs.aval, rhs.aval]),
        rule="conv",
        source=scope.source(eqn),
        precision=p["precision"],
        patches=True,
        slices=tuple(slices),
        total=total,
    )


def _patches(x, axis, offsets, positions, stride, dilation):
    """out[..., p, ..., k, i] = x[..., k·stride + p·dilation, ..., i], with p in the place of the axis."""
    reach = (positions - 1) * dilation + 1 if positions else 0
    parts = [
        jax.lax.slice_in_dim(x, k * stride, k * stride + reach, dilation if positions else 1, axis) for k in offsets
    ]
    return jnp.stack(parts, axis=-2)


def _merge(x, axis, groups):
    """[b, ..., c, ...] -> [..., (group, b, c/group), ...]: the batch joins the axis c within each group."""
    axis += 1
    shape = x.shape
    x = x.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    x = jnp.moveaxis(x, 0, axis)  # the batch axis, just after the groups
    return x.reshape(*shape[1:axis], shape[0] * shape[axis], *shape[axis + 1 :])
