"""Convolutions: the gradient of the kernel is a contraction over output positions, one for each kernel offset.

JAX writes the kernel's gradient as a convolution again, of the input with the cotangents as its kernel:

    g[i, o, k] = Σ_{c, p} lhs[i, c, k·stride + p·dilation] rhs[o, c, p],

with k the offsets within the kernel, p the output positions and c the images of one example (mostly 1). With the
patches x[(c, p), (i, k)] = lhs[i, c, k·stride + p·dilation] this is the contraction of a dense layer, and all that
`dense` says holds. Patches are many times larger than the input, so they are made for a few examples at a time, by
strided slices along one axis after the other: never for the batch, and never a convolution with B groups.
"""

from __future__ import annotations

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

    def prepare(lhs, rhs):
        # lhs -> [i, c, *space], rhs -> [o, c', *positions], in canonical order
        lhs, rhs = jnp.transpose(lhs, d.lhs_spec), jnp.transpose(rhs, d.rhs_spec)
        zero = jnp.zeros((), lhs.dtype)
        padding = [(low, high, dilation - 1) for (low, high), dilation in zip(p["padding"], p["lhs_dilation"], strict=True)]
        lhs = jax.lax.pad(lhs, zero, [(0, 0, 0), (0, 0, 0), *padding])
        for axis in range(len(offsets)):
            lhs = _patches(lhs, 2 + 2 * axis, offsets[axis], positions[axis], p["window_strides"][axis], p["rhs_dilation"][axis])
        # lhs is [i, c, k1, p1, k2, p2, ...]: bring it to [group, (c, p), (i, k)], and rhs to [group, (c, p), o]
        n = len(offsets)
        ks, ps = [2 + 2 * a for a in range(n)], [3 + 2 * a for a in range(n)]
        i, c = lhs.shape[:2]
        k, q = size_of(offsets), size_of(positions)
        x = jnp.transpose(lhs, (0, 1, *ps, *ks)).reshape(i, c, q, k)
        delta = rhs.reshape(rhs.shape[0], rhs.shape[1], q)
        o = delta.shape[0] // groups
        delta = delta.reshape(groups, o, delta.shape[1], q)
        # Groups split i and o (batch groups) or c and o (feature groups); each pairs with its own.
        if batch_groups > 1:
            x = x.reshape(groups, i // groups, c, q, k)
        else:
            x = jnp.moveaxis(x.reshape(i, groups, c // groups, q, k), 1, 0)
        x = jnp.transpose(x, (0, 2, 3, 1, 4)).reshape(groups, x.shape[2] * q, x.shape[1] * k)
        delta = jnp.transpose(delta, (0, 2, 3, 1)).reshape(groups, delta.shape[2] * q, o)
        return x, delta

    i = lhs.aval.shape[d.lhs_spec[0]] // batch_groups
    o = rhs.aval.shape[d.rhs_spec[0]] // groups
    # g comes as [group, (i, k), o]; the output wants [i, (group, o), k] on the axes of out_spec.
    order = (2 - 1, 0, 2 + len(offsets), *range(2, 2 + len(offsets)))
    inverse = tuple(int(a) for a in np.argsort(d.out_spec))
    spec = [out.shape[a] for a in d.out_spec]
    moves = (
        reshaped((groups, i, *offsets, o)),
        Move("transpose", lambda g: jnp.transpose(g, order), (order,)),
        reshaped(spec),
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
        back = (1, 0, *range(3, 3 + len(offsets)), 2)
        return jnp.transpose(g, back).reshape(groups, i * size_of(offsets), o)

    return Contraction(
        operands=(lhs, rhs),
        prepare=prepare,
        moves=moves,
        shapes=shape_of(prepare, [lhs.aval, rhs.aval]),
        rule="conv",
        source=scope.source(eqn),
        precision=p["precision"],
        patches=True,
        total=total,
    )


def _patches(x, axis, offsets, positions, stride, dilation):
    """out[..., k, p, ...] = x[..., k·stride + p·dilation, ...] on one axis."""
    reach = (positions - 1) * dilation + 1
    return jnp.stack(
        [
            jax.lax.slice_in_dim(x, k * stride, k * stride + reach, dilation, axis) if positions else
            jax.lax.slice_in_dim(x, 0, 0, 1, axis)
            for k in range(offsets)
        ],
        axis,
    )


def _merge(x, axis, groups):
    """[b, ..., c, ...] -> [..., (group, b, c/group), ...]: the batch joins the axis c within each group."""
    axis += 1
    shape = x.shape
    x = x.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    x = jnp.moveaxis(x, 0, axis)  # the batch axis, just after the groups
    return x.reshape(*shape[1:axis], shape[0] * shape[axis], *shape[axis + 1 :])
