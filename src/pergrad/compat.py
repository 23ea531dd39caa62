"""The only file that knows JAX internals and versions (floor 0.10.2, newest tried 0.12.0.1).

Everything else works on the few names defined here: what a jaxpr is made of, which equations merely
call another jaxpr, how a scan lays out its operands, how to run one equation again, and where in the
user's source an equation came from.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend import core as jex_core

Literal = jex_core.Literal
Var = jex_core.Var


def make_jaxpr(fun, *args) -> tuple[Any, Sequence[Any], Any]:
    """Trace ``fun`` and return its open jaxpr, the values of its constants, and its output's shapes."""
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return closed.jaxpr, closed.consts, out_shape


def constvars(jaxpr) -> Sequence[Any]:
    return jaxpr.constvars


class Called(NamedTuple):
    """The jaxpr that an equation calls, with its constants; operands match ``jaxpr.invars`` one to one."""

    jaxpr: Any
    consts: Sequence[Any]


def _open(jaxpr) -> Called:
    # A jaxpr closed over constants was a class of its own (`ClosedJaxpr`) before JAX 0.11.
    return Called(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()))


# Primitives that do nothing but evaluate one jaxpr on their operands.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": None,
}


def called(eqn) -> Called | None:
    """What ``eqn`` calls, when calling is all it does; None for every other equation."""
    key = _CALLS.get(eqn.primitive.name)
    return _open(eqn.params[key]) if key else None


def remat_barrier(eqn) -> Sequence[bool] | None:
    """For each operand of a rematerialised call: must the compiler see it as opaque?

    `jax.checkpoint` lowers to its body behind an optimization barrier on these operands; whoever
    evaluates the body by hand has to put the barrier back, or common-subexpression elimination
    undoes the rematerialisation.
    """
    if eqn.primitive.name not in ("remat2", "checkpoint", "remat") or not eqn.params["differentiated"]:
        return None
    prevent = eqn.params["prevent_cse"]
    return (prevent,) * len(eqn.invars) if isinstance(prevent, bool) else prevent


class Scan(NamedTuple):
    """A scan: operands are consts, initial carry, xs; results are carry, ys."""

    body: Called
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def scan(eqn) -> Scan | None:
    if eqn.primitive.name != "scan":
        return None
    p = eqn.params
    if "num_consts" in p:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:  # since JAX 0.11 the operands are described by flat trees: ((consts, carry, xs), (carry, ys))
        num_consts, num_carry, _ = map(len, p["ft_in"].unpack())
    return Scan(_open(p["jaxpr"]), num_consts, num_carry, p["length"], p["reverse"], p["unroll"])


def branches(eqn) -> Sequence[Called] | None:
    """The branches of a cond or switch; its operands are the index, then the operands of every branch."""
    return [_open(b) for b in eqn.params["branches"]] if eqn.primitive.name == "cond" else None


def bind(eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Run one equation again, unchanged, on ``values``; always a sequence of results."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Until JAX 0.10 `get_bind_params` of some primitives returned the sub-functions apart.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return out if eqn.primitive.multiple_results else [out]


def source(eqn) -> str:
    """`file:line (function)` of the user's code that led to ``eqn``, or "" when JAX does not know."""
    from jax._src import source_info_util

    try:
        frame = source_info_util.user_frame(eqn.source_info.traceback)
    except Exception:  # a convenience for people: never worth a failure
        frame = None
    if frame is None:
        return ""
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


def _mesh_axes(aval) -> set[str]:
    """The axes of a `shard_map`'s mesh over which a value is known to differ."""
    return set(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def vary_like(arrays: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Under `shard_map`, let ``arrays`` count as different on the devices on which ``like`` differ.

    The derivative with respect to a value that all devices share is the sum of theirs: JAX adds a `psum`. Statistics
    of per-example gradients are never meant to be of such sums.
    """
    wanted = set().union(*(_mesh_axes(jax.typeof(x)) for x in like))
    missing = [tuple(sorted(wanted - _mesh_axes(jax.typeof(x)))) for x in arrays]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


def partitions_by_rule() -> bool:
    """Can an operation say, here, how it is shared out over the devices of one program?

    Not inside `shard_map`, where every device has a program of its own; not where XLA's older partitioner was asked for
    (until JAX 0.10); and not with a mesh of explicit axes in context, where JAX 0.12 makes sums over devices that XLA
    refuses.
    """
    from jax._src import mesh as mesh_lib

    kinds = jax.sharding.AxisType
    inside = jax.sharding.get_abstract_mesh().axis_types
    around = mesh_lib.get_concrete_mesh()
    explicit = around is not None and kinds.Explicit in around.axis_types
    return kinds.Manual not in inside and not explicit and bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def evaluate(jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return eval_jaxpr(jaxpr, consts, *args)


def fine_mesh(mesh, sharding) -> Any:
    """The devices of ``mesh``, or of a sharding without one, along axes of prime size: on them every sharding has a name,
    that of a half of an axis too, which a reshape can lead to."""
    devices = np.array(sharding._device_assignment) if mesh.empty else mesh.devices
    sizes = []
    for n in devices.shape:
        while n > 1:
            sizes.append(next(k for k in range(2, n + 1) if n % k == 0))
            n //= sizes[-1]
    return jax.sharding.Mesh(devices.reshape(sizes), tuple(f"pergrad{k}" for k in range(len(sizes))))


def spread_over(sharding, ndim: int, mesh) -> list[tuple[str, ...]]:
    """Over which axes of a fine mesh each axis of an array is spread."""
    from jax._src.sharding_impls import parse_flatten_op_sharding

    try:
        (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)
    except Exception:  # no name for it: whoever asks then wants it whole
        spec = ()
    named = [(over,) if isinstance(over, str) else tuple(over or ()) for over in spec]
    return named + [()] * (ndim - len(named))


def under_these_settings(fun):
    """``fun``, to be traced later as it would be now: with the same precision, 64 bits and promotion; and with no mesh."""
    config: Any = jax.config
    settings = (
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
        (jax.enable_x64, config.jax_enable_x64),
        (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
        (jax.sharding.use_abstract_mesh, jax.sharding.AbstractMesh((), ())),
    )

    def run(*args):
        with contextlib.ExitStack() as stack:
            for setting, value in settings:
                stack.enter_context(setting(value))
            return fun(*args)

    return run


def result_like(shape, dtype, like: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result: under `shard_map` it differs on the devices on which the operands ``like`` differ."""
    axes = frozenset().union(*(_mesh_axes(jax.typeof(x)) for x in like))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))


def zeros_of(fun, *args) -> Any:
    """Zeros like what ``fun(*args)`` returns, to start a loop's carry with.

    Under `shard_map` they must vary over the mesh axes that the results vary over, which `jax.eval_shape` does not tell.
    """
    closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
    flat = []
    for aval in closed.out_avals:
        axes = tuple(sorted(_mesh_axes(aval)))
        array = jnp.zeros(aval.shape, aval.dtype)
        flat.append(jax.lax.pcast(array, axes, to="varying") if axes else array)
    return jax.tree.unflatten(jax.tree.structure(out), flat)


def side_effects(jaxpr) -> list[str]:
    """Names of the effects of a jaxpr, but for the ones that only say which named axes are in scope."""
    return sorted({type(e).__name__ for e in jaxpr.effects} - {"NamedAxisEffect"})
