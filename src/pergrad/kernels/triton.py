"""The contraction for GPUs in Pallas's Triton form: one loop over the steps of all examples.

A program of the grid owns a tile of m × n and keeps, in registers, the sum over positions of the example at hand and one
sum of φ's for each output. There is one loop, over (example, step of positions), and not a loop in a loop: Triton pipelines
a loop's loads a few steps ahead, and here these run on from one example into the next, so that the φ's of one example are
taken while the next one's operands are on their way. At an example's last step its sum is handed to the φ's and begins
again at zero.

Positions that do not fill a step, and tiles that reach over the edge, are loaded as zeros and not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .. import compat

Phi = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut: a tile of m × n, the positions of one step, and what the compiler is asked for."""

    m: int
    n: int
    t: int
    warps: int
    stages: int


def blocks_for(t: int, m: int, n: int, dtype, outputs: int) -> Blocks:
    """As large as the registers allow: a tile's sums, one more than there are outputs, must stay in them.

    Of the sizes compiled for compute capability 9.0 these are the largest that spill none (docs/kernels.md says how to see it).
    """
    tile_m = 128 if outputs <= 2 else 64
    step = 64 if jnp.dtype(dtype).itemsize < 4 else 32
    return Blocks(_power(m, 16, tile_m), _power(n, 16, 128), _power(t, 16, step), warps=8, stages=3)


def _power(size: int, least: int, most: int) -> int:
    """The power of two that holds ``size``, within bounds."""
    return min(max(1 << max(size - 1, 0).bit_length(), least), most)


def contraction(
    x: jax.Array,
    delta: jax.Array,
    phis: Sequence[Phi],
    mask: jax.Array | None = None,
    transposed: tuple[bool, bool] = (False, False),
    precision=None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Σ_b φ(x_bᵀ δ_b) for each φ: x [b, s, t, m] and δ [b, s, t, n], their last axes exchanged where ``transposed``."""
    (b, s, t, m), n = _dims(x, transposed[0]), _dims(delta, transposed[1])[-1]
    cut = blocks or blocks_for(t, m, n, jnp.promote_types(x.dtype, delta.dtype), len(phis))
    tiles = pl.cdiv(m, cut.m), pl.cdiv(n, cut.n)
    kernel = functools.partial(
        _kernel,
        dims=(b, t, m, n),
        cut=cut,
        phis=phis,
        masked=mask is not None,
        transposed=transposed,
        precision=precision,
    )
    operands = [x, delta, *([] if mask is None else [mask.astype(jnp.int32)])]
    call = pl.pallas_call(
        kernel,
        grid=(math.prod(tiles), s),
        out_shape=[compat.result_like((s, m, n), jnp.float32, operands) for _ in phis],
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="pergrad_contraction",
    )
    return list(call(*operands))


def _dims(a, transposed):
    b, s, t, m = a.shape
    return (b, s, m, t) if transposed else (b, s, t, m)


def _kernel(x_ref, delta_ref, *refs, dims, cut: Blocks, phis, masked, transposed, precision):
    b, t, m, n = dims
    mask_ref, outs = (refs[0], refs[1:]) if masked else (None, refs)
    tile_m, tile_n = _tile(pl.program_id(0), pl.cdiv(m, cut.m), pl.cdiv(n, cut.n))
    s = pl.program_id(1)
    rows, columns = tile_m * cut.m + jnp.arange(cut.m), tile_n * cut.n + jnp.arange(cut.n)
    steps = pl.cdiv(t, cut.t)

    def read(ref, example, positions, coordinates, size, other_way):
        """[t, m], or [m, t] where that is how it lies in memory."""
        valid = _and(
            None if t % cut.t == 0 else (positions < t)[:, None],
            None if size % len(coordinates) == 0 else (coordinates < size)[None, :],
        )
        first, second = positions[:, None], coordinates[None, :]
        if other_way:
            first, second, valid = coordinates[:, None], positions[None, :], None if valid is None else valid.T
        at = ref.at[example, s, first, second]
        return plt.load(at) if valid is None else plt.load(at, mask=valid, other=0)

    def step(i, sums):
        g, *totals = sums
        example, place = _divmod(i, steps)
        positions = place * cut.t + jnp.arange(cut.t)
        x = read(x_ref, example, positions, rows, m, transposed[0])
        delta = read(delta_ref, example, positions, columns, n, transposed[1])
        dims = (((1 if transposed[0] else 0,), (1 if transposed[1] else 0,)), ((), ()))
        g += jax.lax.dot_general(x, delta, dims, precision=precision, preferred_element_type=jnp.float32)

        def finish(g, *totals):
            counts = True if mask_ref is None else plt.load(mask_ref.at[example]) != 0
            values = [phi(g) for phi in phis]
            new = [total + (v if mask_ref is None else jnp.where(counts, v, 0)) for total, v in zip(totals, values)]
            return jnp.zeros_like(g), *new

        return jax.lax.cond(place == steps - 1, finish, lambda *same: same, g, *totals)

    start = [jnp.zeros((cut.m, cut.n), jnp.float32) for _ in range(1 + len(phis))]
    _, *totals = jax.lax.fori_loop(jnp.int32(0), jnp.int32(b * steps), step, tuple(start))
    inside = _and(None if m % cut.m == 0 else (rows < m)[:, None], None if n % cut.n == 0 else (columns < n)[None, :])
    for out, total in zip(outs, totals):
        plt.store(out.at[s, rows[:, None], columns[None, :]], total, mask=inside)


def _and(a, b):
    return a if b is None else b if a is None else a & b


def _tile(i, tiles_m: int, tiles_n: int, group: int = 8):
    """The i-th tile, in groups of rows: tiles that run at the same time share operands in the cache."""
    which, j = _divmod(i, group * tiles_n)
    height = jnp.minimum(tiles_m - which * group, group)
    column, row = _divmod(j, height)
    return which * group + row, column


def _divmod(i, n):
    n = jnp.asarray(n, jnp.int32)
    return jax.lax.div(i, n), jax.lax.rem(i, n)
