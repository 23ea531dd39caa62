"""`batched_contraction`: Σ_b φ(x_bᵀ δ_b), the heart of every dense layer that an example uses at several positions.

The matrix product inside is that of the plain weight gradient; φ must see it example by example, before it is summed.
There are several ways to compute it, all to the same numbers, and `choose` is the one place that picks:

    xla       a few examples' gradients are formed, reduced and dropped, by XLA. Runs everywhere; it is the reference.
    triton    one fused kernel (`pergrad.kernels.triton`), for GPUs; of the size of a gradient it writes only the results.
    mosaic    the same for Hopper GPUs and operands of 16 bits (`pergrad.kernels.mosaic`).

`MEASURED` says what is taken where; the environment variable ``PERGRAD_KERNEL`` overrides it. What cannot be computed the
way it was asked for is computed by XLA, with a warning.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import compat
from ..reductions import Mean
from .sharding import transformable

VARIABLE = "PERGRAD_KERNEL"
IMPLEMENTATIONS = ("xla", "triton", "mosaic")

# Kind of device -> the kernels that a recorded run of `benchmarks/kernels.py` found right and faster than XLA there, the
# best first. Where there is none, or none applies, it is XLA.
MEASURED: dict[str, tuple[str, ...]] = {}

# Of one pass; a kernel keeps a sum for each in registers.
MOST_OUTPUTS = 4


class Operand(NamedTuple):
    """Shape and dtype of x or δ, and whether its last axes lie in memory the other way round."""

    shape: tuple[int, ...]
    dtype: Any
    transposed: bool = False


def batched_contraction(
    x: jax.Array,
    delta: jax.Array,
    phis: Sequence[Any],
    *,
    weight: Any = 1.0,
    mask: jax.Array | None = None,
    precision: Any = None,
    transposed: tuple[bool, bool] = (False, False),
    chunk: int = 8,
    implementation: str = "xla",
) -> tuple[jax.Array, ...]:
    """weight · Σ_b φ(x_bᵀ δ_b) for each φ, summed in float32 or wider.

    Args:
      x, delta: [b, s, t, m] and [b, s, t, n]: examples, axes that both sides keep, positions, and the sides' own axes.
      phis: functions of one coordinate, `pergrad.reductions.Phi`.
      mask: which examples count.
      precision: as `jax.lax.dot_general` takes it.
      transposed: of x and of δ: is it the result of exchanging the last two axes of what lies in memory? A kernel then
        reads that, and the exchange is never made.
      chunk: how many examples' products XLA forms at one time.
      implementation: one of `IMPLEMENTATIONS`; see `choose`.

    Returns:
      One array [s, m, n] for each φ.

    >>> from pergrad.reductions import IDENTITY, SQUARE
    >>> x, delta = jnp.ones((2, 1, 4, 3)), jnp.ones((2, 1, 4, 5))
    >>> [float(out[0, 0, 0]) for out in batched_contraction(x, delta, (IDENTITY, SQUARE), weight=1 / 2)]
    [4.0, 16.0]
    """
    phis = tuple(phis)
    args = (x, delta) if mask is None else (x, delta, mask)
    plain = functools.partial(_by_xla, phis=phis, precision=precision, chunk=chunk)
    sides = [Operand(a.shape, a.dtype, t) for a, t in zip((x, delta), transposed, strict=True)]
    if obstacle := _obstacle_of_sides(implementation, *sides):  # a device's part of what was chosen for all of it
        warnings.warn(f"{implementation} was chosen, but {obstacle}; XLA computes this part instead.", stacklevel=2)
        implementation = "xla"
    if implementation == "xla":
        out = plain(*args)
    else:

        def fused(x, delta, *mask):
            sides = [a.swapaxes(2, 3) if t else a for a, t in zip((x, delta), transposed, strict=True)]
            passes = [phis[k : k + MOST_OUTPUTS] for k in range(0, len(phis), MOST_OUTPUTS)]
            kernel = functools.partial(_kernel(implementation), *sides, transposed=transposed, precision=precision)
            return [out for some in passes for out in kernel(phis=some, mask=mask[0] if mask else None)]

        def by_platform(*args):  # a program may be compiled for the CPU of a machine that has a GPU
            return jax.lax.platform_dependent(*args, cuda=fused, default=plain)

        out = transformable(plain, by_platform)(*args)
    return tuple(total * weight for total in out)


def _kernel(implementation: str):
    return importlib.import_module(f".{implementation}", __package__).contraction  # Pallas is slow to import


def _by_xla(x, delta, mask=None, *, phis, precision, chunk):
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, delta.dtype), jnp.float32)

    def sums(x, delta, mask):
        spec, sides = "bstm,bstn->bsmn", (x, delta)
        if x.shape[1] == 1:  # written without the axis s: XLA would transpose for it
            spec, sides = "btm,btn->bmn", (x[:, 0], delta[:, 0])
        g = jnp.einsum(spec, *sides, precision=precision, preferred_element_type=dtype)
        g = g.reshape(len(x), x.shape[1], x.shape[3], delta.shape[3])
        return [Mean(phi).of(g, mask) for phi in phis]

    b = len(x)
    cut = b // chunk * chunk
    args = [x, delta] if mask is None else [x, delta, mask]
    part = lambda args: sums(*args, *[None] * (mask is None))
    if cut < chunk:
        return part(args)
    folded = [a[:cut].reshape(-1, chunk, *a.shape[1:]) for a in args]
    total, _ = jax.lax.scan(
        lambda total, some: ([a + b for a, b in zip(total, part(some), strict=True)], None),
        compat.zeros_of(part, [a[0] for a in folded]),
        folded,
    )
    if cut == b:
        return total
    return [a + b for a, b in zip(total, part([a[cut:] for a in args]), strict=True)]


# ---------------------------------------------------------------------------------------- the choice


def choose(x: Operand, delta: Operand, phis: Sequence[Any], precision: Any = None) -> str:
    """Which implementation is taken for these operands, on the devices of this process."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown {VARIABLE}={wanted!r}: expected one of {', '.join(IMPLEMENTATIONS)}. Write `{VARIABLE}=xla`, or leave "
            "it unset."
        )
    if wanted == "xla":
        return wanted
    for name in (wanted,) if wanted else MEASURED.get(jax.devices()[0].device_kind, ()):
        obstacle = _obstacle(name, x, delta, tuple(phis), precision)
        if not obstacle:
            return name
        if wanted:
            warnings.warn(
                f"{VARIABLE}={wanted} was asked for, but {obstacle}; XLA computes this part instead. Write `{VARIABLE}=xla`, "
                "or leave it unset.",
                stacklevel=2,
            )
    return "xla"


def _obstacle(name: str, x: Operand, delta: Operand, phis, precision) -> str:
    """Why a kernel cannot be taken; "" if it can."""
    if jax.default_backend() != "gpu":
        return f"the device is a {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    if name == "mosaic" and capability != "9.0":
        return f"it is for compute capability 9.0, and the device has {capability}"
    return _obstacle_of_sides(name, x, delta) or _cannot_lower(name, phis, jnp.dtype(x.dtype).name, precision)


def _obstacle_of_sides(name: str, x: Operand, delta: Operand) -> str:
    if name == "xla":
        return ""
    kinds = [jnp.dtype(a.dtype).name for a in (x, delta)]
    if kinds[0] != kinds[1] or kinds[0] not in ("float32", "bfloat16", "float16"):
        return f"the operands are {kinds[0]} and {kinds[1]}"
    if not all(0 < math.prod(a.shape) < 2**31 for a in (x, delta)):
        return f"an operand is empty, or has 2³¹ entries or more (x {x.shape}, δ {delta.shape})"
    if name == "mosaic":
        from . import mosaic

        t, m, n = *x.shape[2:], delta.shape[3]
        return mosaic.obstacle(t, m, n, x.dtype, (x.transposed, delta.transposed))
    return ""


@functools.cache
def _cannot_lower(name, phis, dtype, precision) -> str:
    """Why some φ cannot be part of the kernel: a small one is built, and not run."""
    side = jax.ShapeDtypeStruct((1, 1, 64, 64), dtype)
    for phi in phis:
        build = jax.jit(lambda x, delta, phi=phi: _kernel(name)(x, delta, (phi,), precision=precision))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come when it is built in earnest
                build.trace(side, side).lower(lowering_platforms=("cuda",))
        except Exception as error:
            return f"{phi.name} cannot be part of it ({type(error).__name__}: {str(error)[:200]})"
    return ""
