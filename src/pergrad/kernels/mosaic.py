"""The contraction for Hopper GPUs in Pallas's Mosaic form: copies, products and φ's in warpgroups of their own.

A block of threads stays on its multiprocessor and takes one tile of m × n after another. It has three warpgroups. One
does nothing but ask the copy engine for operands, step after step through the positions of all examples, as far ahead as
there are slots in shared memory. The other two own half a tile each: they multiply what has arrived into an
accumulator, and at the end of an example hand it to the φ's and add these to sums, one for each output, that stay in
registers. The two are not in step: while one is busy with its φ's the other has the tensor cores.

The copy engine fills what lies past an edge with zeros and does not store there; it works in units of 8 × 64 entries, so
that the sides must be multiples of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat

Phi = Callable[[jax.Array], jax.Array]

WORKERS = 2  # warpgroups that multiply; one more copies
UNIT = (
    8,
    64,
)  # entries of 16 bits: one atom of the layout in shared memory that the tensor cores read (128 bytes wide)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut: a tile of m × n, the positions of one step, and how many steps' operands are held."""

    m: int
    n: int
    t: int
    stages: int


def blocks_for(outputs: int) -> Blocks:
    """A worker's half of a tile, times one more than there are outputs, is at most 192 of a thread's 232 registers."""
    return Blocks(128, 128, 64, 4) if outputs <= 2 else Blocks(128, 64, 64, 6)


def obstacle(t: int, m: int, n: int, dtype, transposed: tuple[bool, bool]) -> str:
    """Why operands of these sides cannot be copied; "" if they can."""
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"it takes bfloat16 or float16 operands, given {jnp.dtype(dtype).name}"
    for side, other_way in ((m, transposed[0]), (n, transposed[1])):
        rows, columns = (side, t) if other_way else (t, side)
        if rows % UNIT[0] or columns % UNIT[1]:
            return (
                f"it takes operands whose last axes are multiples of {UNIT[0]} and {UNIT[1]}, given {rows} × {columns}"
            )
    if n % (UNIT[1] // 2):
        return f"it makes results whose last axis is a multiple of {UNIT[1] // 2}, wanted {n}"
    return ""


def contraction(
    x: jax.Array,
    delta: jax.Array,
    phis: Sequence[Phi],
    mask: jax.Array | None = None,
    transposed: tuple[bool, bool] = (False, False),
    precision=None,
    blocks: Blocks | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> list[jax.Array]:
    """Σ_b φ(x_bᵀ δ_b) for each φ: x [b, s, t, m] and δ [b, s, t, n], their last axes exchanged where ``transposed``."""
    del precision  # operands of 16 bits have one
    b, s, t, m = x.swapaxes(2, 3).shape if transposed[0] else x.shape
    n = delta.shape[2 if transposed[1] else 3]
    cut = blocks or blocks_for(len(phis))
    tiles = pl.cdiv(m, cut.m), pl.cdiv(n, cut.n)
    steps, rows = pl.cdiv(t, cut.t), cut.m // WORKERS
    jobs = s * math.prod(tiles)
    grid = min(multiprocessors or getattr(jax.devices()[0], "core_count", 132), jobs)

    def tile_of(job):
        page, i = lax.div(job, math.prod(tiles)), lax.rem(job, math.prod(tiles))
        return page, lax.rem(i, tiles[0]), lax.div(i, tiles[0])

    def slot_of(step):
        return lax.rem(step, cut.stages)

    def body(x_gmem, delta_gmem, *refs):
        mask_gmem, outs = (None, refs) if mask is None else (refs[0], refs[1:])

        def work(x_smem, delta_smem, out_smem, arrived, used):
            me = lax.axis_index("warpgroup")

            @pl.when(me == WORKERS)
            def copies():
                plgpu.set_max_registers(40, action="decrease")

                @plgpu.nd_loop((jobs,), collective_axes="multiprocessor")
                def each_tile(info):
                    page, tile_m, tile_n = tile_of(*info.index)
                    before = info.local_index * (b * steps)

                    def step(i, _):
                        slot = slot_of(before + i)
                        pl.when(before + i >= cut.stages)(lambda: plgpu.barrier_wait(used.at[slot]))
                        example, positions = lax.div(i, steps), pl.ds(lax.rem(i, steps) * cut.t, cut.t)
                        for side, at, width, held, other_way in (
                            (x_gmem, tile_m, cut.m, x_smem, transposed[0]),
                            (delta_gmem, tile_n, cut.n, delta_smem, transposed[1]),
                        ):
                            columns = pl.ds(at * width, width)
                            part = (columns, positions) if other_way else (positions, columns)
                            plgpu.copy_gmem_to_smem(side.at[(example, page, *part)], held.at[slot], arrived.at[slot])

                    lax.fori_loop(0, b * steps, step, None)

            @pl.when(me < WORKERS)
            def products():
                plgpu.set_max_registers(232, action="increase")

                @plgpu.nd_loop((jobs,), collective_axes="multiprocessor")
                def each_tile(info):
                    page, tile_m, tile_n = tile_of(*info.index)
                    before = info.local_index * (b * steps)

                    def gradient(example):
                        """x_bᵀ δ_b, of this worker's rows."""
                        first = before + example * steps

                        def accumulate(g):
                            def step(k, _):
                                slot = slot_of(first + k)
                                plgpu.barrier_wait(arrived.at[slot])
                                mine = pl.ds(me * rows, rows)
                                if transposed[0]:
                                    x = x_smem.at[slot, mine, :]
                                else:
                                    x = plgpu.transpose_ref(x_smem.at[slot, :, mine], (1, 0))
                                delta = delta_smem.at[slot]
                                plgpu.wgmma(g, x, plgpu.transpose_ref(delta, (1, 0)) if transposed[1] else delta)

                                @pl.when(k > 0)
                                def _():
                                    plgpu.wgmma_wait(1)  # the product before this one is done with its operands
                                    plgpu.barrier_arrive(used.at[slot_of(first + k - 1)])

                            lax.fori_loop(0, steps, step, None)
                            total = g[...]
                            plgpu.barrier_arrive(used.at[slot_of(first + steps - 1)])
                            return total

                        return pl.run_scoped(accumulate, plgpu.ACC((rows, cut.n), jnp.float32))

                    def values(example):
                        g = gradient(example)
                        out = [phi(g) for phi in phis]
                        if mask_gmem is None:
                            return out
                        counts = jnp.broadcast_to(mask_gmem[example], g.shape) > 0
                        return [jnp.where(counts, v, jnp.zeros_like(v)) for v in out]

                    def add(example, totals):
                        return [total + v for total, v in zip(totals, values(example), strict=True)]

                    totals = lax.fori_loop(1, b, add, values(0))
                    place = pl.ds(tile_m * cut.m + me * rows, rows), pl.ds(tile_n * cut.n, cut.n)
                    for out, total in zip(outs, totals, strict=True):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output before this one has left
                        out_smem[me] = total
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out_smem.at[me], out.at[(page, *place)])

                plgpu.wait_smem_to_gmem(0)

        def held(width, other_way):
            shape = (cut.stages, width, cut.t) if other_way else (cut.stages, cut.t, width)
            return plgpu.SMEM(shape, x.dtype, transforms=_layout(UNIT))

        pl.run_scoped(
            work,
            held(cut.m, transposed[0]),
            held(cut.n, transposed[1]),
            plgpu.SMEM((WORKERS, rows, cut.n), jnp.float32, transforms=_layout((UNIT[0], UNIT[1] // 2))),
            plgpu.Barrier(num_arrivals=2, num_barriers=cut.stages),  # both copies of a step
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=cut.stages),
            collective_axes="warpgroup",
        )

    operands = [x, delta, *([] if mask is None else [mask.astype(jnp.float32)])]
    call = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((s, m, n), jnp.float32) for _ in phis],
        grid=(grid,),
        grid_names=("multiprocessor",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return compat.vary_like(call(*operands), operands)


def _layout(unit):
    return plgpu.TilingTransform(unit), plgpu.SwizzleTransform(128)
