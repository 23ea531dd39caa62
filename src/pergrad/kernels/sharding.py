"""One function of the examples' operands, run on every device for the examples that the device holds.

XLA's partitioner shares out single operations. A loop that takes a few examples in each step is opaque to it: to
step through a batch that is spread over devices, it gathers the batch on every one of them, and they all do all the
work. So the loop is made one operation of its own, with a rule for how it is shared out:

* Every device runs it on its own examples (axis "b"), and on its part of the axes that the result keeps ("m", "n", …).
* Results over the examples are joined across devices, one all-reduce; what has an axis stays spread along it.
* An axis that cannot be split (positions, the channels of patches) gives its devices to the examples: XLA moves the
  operand once, and all devices have work.

On one device, inside `shard_map` (where every device runs its own program anyway), and where the batch cannot be
divided, this is a plain call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .. import compat

# What each axis of an array stands for, by the same name in operands and results: "b" are the examples. "" is an axis
# that must be whole on every device, and ... any number of such.
Axes = tuple[Any, ...]


def can_be_shared_out(size: int) -> bool:
    """Could so many examples be spread over devices, in a program that is one for all of them?"""
    return math.gcd(size, jax.device_count()) > 1 and compat.partitions_by_rule()


def on_each_device(
    fn: Callable[..., Sequence[jax.Array]],
    args: Sequence[jax.Array],
    axes: Sequence[Axes],
    results: Sequence[Axes],
    joins: Sequence[Callable[[jax.Array, tuple[str, ...]], jax.Array]],
) -> list[jax.Array]:
    """``fn(*args)``, by every device for its part of the axes.

    ``joins[i]`` makes the i-th result of the parts that lie along some axes of a mesh, each of some examples, as
    `jax.lax.psum` does of a sum. Over every other axis that a result does not have, it must be a sum.
    """
    jaxpr, consts, shapes = compat.make_jaxpr(fn, *args)
    if any(isinstance(c, Tracer) for c in consts):
        return list(fn(*args))  # it reads something of the surrounding program, which a device's own part cannot
    axes = [_expanded(names, x.ndim) for names, x in zip(axes, args, strict=True)]
    results = [_expanded(names, x.ndim) for names, x in zip(results, shapes, strict=True)]

    # Constants of the program, such as an array that a user's φ reads, are operands like others.
    args, axes = [*consts, *args], [*[("",) * jnp.ndim(c) for c in consts], *axes]

    def whole(*args):
        return compat.evaluate(jaxpr, args[: len(consts)], args[len(consts) :])

    part = custom_partitioning(whole)
    later = compat.under_these_settings(fn)

    def share_out(mesh, given, wanted):
        mesh = compat.fine_mesh(mesh, given[0].sharding)
        spread = _spread(mesh, given, axes)

        def place(names):
            return NamedSharding(mesh, PartitionSpec(*(spread.get(name) for name in names)))

        def local(*args):
            out = later(*args[len(consts) :])
            return [_joined(x, names, join, spread) for x, names, join in zip(out, results, joins, strict=True)]

        return mesh, local, [place(names) for names in results], tuple(place(names) for names in axes)

    part.def_partition(share_out, sharding_rule=_rule(axes, results), decode_shardings=False)
    return list(transformable(whole, part)(*args))


def _expanded(names: Axes, ndim: int) -> Axes:
    """With ``ndim`` names."""
    if ... not in names:
        return names
    k = names.index(...)
    return (*names[:k], *("",) * (ndim + 1 - len(names)), *names[k + 1 :])


def _spread(mesh, given, axes: Sequence[Axes]) -> dict[str, tuple[str, ...]]:
    """Over which axes of the mesh each of our axes is spread, judged by how the operands come in."""
    spread: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    idle: list[str] = []
    for a, names in zip(given, axes, strict=True):
        for name, size, over in zip(names, a.shape, compat.spread_over(a.sharding, a.ndim, mesh), strict=True):
            sizes[name] = size
            if name and not spread.get(name):
                spread[name] = over
            elif "b" in names:
                idle.extend(over)
    taken: set[str] = set()
    for name in sorted(spread, key=lambda n: n != "b"):  # the examples first
        spread[name] = _fitting(mesh, sizes[name], (), (w for w in spread[name] if w not in taken))
        taken.update(spread[name])
    spread["b"] = _fitting(mesh, sizes["b"], spread.get("b", ()), (w for w in dict.fromkeys(idle) if w not in taken))
    return spread


def _fitting(mesh, size, over, more):
    """``over``, and as many of ``more`` as divide the axis evenly."""
    for axis in more:
        if size % math.prod(mesh.shape[a] for a in (*over, axis)) == 0:
            over = (*over, axis)
    return over


def _joined(x, names: Axes, join, spread):
    """One result from those of all devices."""
    if "b" not in names and spread["b"]:
        x = join(x, spread["b"])
    others = tuple(a for name, over in spread.items() if name != "b" and name not in names for a in over)
    return jax.lax.psum(x, others) if others else x


def _rule(axes: Sequence[Axes], results: Sequence[Axes]) -> SdyShardingRule:
    count = 0

    def mapping(names):
        nonlocal count
        out = []
        for name in names:
            count += 1
            out.append(name or f"own{count}")
        return ArrayMapping(*out)

    return SdyShardingRule(tuple(map(mapping, axes)), tuple(map(mapping, results)))


def transformable(plain: Callable, special: Callable) -> Callable:
    """``special``, but the equal ``plain`` under vmap and differentiation, which ``special`` does not know."""

    @jax.custom_batching.custom_vmap
    def batchable(*args):
        return special(*args)

    @batchable.def_vmap
    def _(size, batched, *args):
        out = jax.vmap(plain, in_axes=tuple(0 if b else None for b in batched), axis_size=size)(*args)
        return out, [True] * len(out)

    @jax.custom_jvp
    def differentiable(*args):
        return batchable(*args)

    @differentiable.defjvp
    def _(primals, tangents):
        return jax.jvp(plain, primals, tangents)

    return differentiable
