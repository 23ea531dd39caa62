"""Embeddings: the gradient of one example touches few rows of a table.

In canonical form, for one example with r lookups,

    g[v, w] = Σ_r [key_r = v] u[r, w],

a table of V rows, of which at most r are touched. Rows that one example touches more than once must be summed
before φ; so sort the keys, sum runs of equal keys, and put φ of the sums in the table of the batch: a scatter of
B·r rows, as the plain gradient does, and never B tables. A key outside 0…V−1 is dropped.

Every scatter that a lookup, an index or a slice at a computed place leaves in a gradient has this form: a key is
the position along the indexed axes, flattened, and windows that span several positions become several rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..reductions import (
    IDENTITY,
    Gram,
    Histogram,
    MaxAbs,
    Mean,
    SquaredNorm,
    accumulator,
    in_bin,
    refuse_complex,
    square,
)
from . import register
from .base import (
    Batch,
    Budget,
    Move,
    Route,
    Term,
    formed_route,
    in_chunks,
    leading,
    mapped,
    reshaped,
    shape_of,
    size_of,
    whole_route,
)


@dataclasses.dataclass(frozen=True)
class Rows(Term):
    """g[v, w] = Σ_r [key_r = v] u[r, w]; the prepared operands are the keys and u."""

    height: int = 0  # V

    @property
    def reason(self):
        r = self.tokens()
        return self.why or f"adds {r} row{'s' * (r != 1)} of each example to a table of {self.height}"

    def form(self, keys, updates):
        table = jnp.zeros((self.height, updates.shape[1]), accumulator(updates.dtype))
        return table.at[self._valid(keys)].add(updates.astype(table.dtype), mode="drop")

    def _valid(self, keys):
        # Negative keys would wrap around: send everything outside the table past its end, where it is dropped.
        return jnp.where((keys >= 0) & (keys < self.height), keys, self.height)

    @property
    def columns(self):
        return self.shapes[1].shape[1]

    def form_columns(self, start, width, keys, updates):
        return self.form(keys, jax.lax.dynamic_slice_in_dim(updates, start, width, 1))

    def dot(self, v, keys, updates):
        found = v.at[self._valid(keys)].get(mode="fill", fill_value=0)
        products = jnp.sum(jnp.real(updates * jnp.conj(found)), axis=1)
        # A row past the table's end counts nowhere, whatever it holds.
        return jnp.sum(jnp.where((keys >= 0) & (keys < self.height), products, 0))

    @property
    def dot_bytes(self):
        return 0.0

    def routes(self, reductions: Sequence[Any], budget: Budget) -> list[Route]:
        (r, width), b = self.shapes[1].shape, budget.size
        by_row = [x for x in reductions if isinstance(x, Mean | MaxAbs | Histogram | SquaredNorm)]
        rest = [x for x in reductions if x not in by_row]
        cost = 1.0 * b * r * width
        routes = []
        if by_row:
            # The mean is linear: equal rows may as well be summed in the table.
            distinct = r > 1 and any(x != Mean(IDENTITY) for x in by_row)
            name = "sums of equal rows, scattered once" if distinct else "rows scattered once"
            run = lambda batch: self._by_row(by_row, batch.prepared(self.prepare), distinct)
            held = 8.0 * b * r * width if distinct else 0.0
            routes.append(Route(name, tuple(by_row), run, b, cost * (distinct + len(by_row)), held))
        if rest:
            form = lambda *raw: self.form(*self.prepare(*raw))
            routes.append(formed_route(form, rest, self.form_bytes, budget, cost))
        return routes

    def whole_routes(self, reductions, budget):
        (r, width), b = self.shapes[1].shape, budget.size
        cost, formed = 2.0 * (b * r) ** 2 * width, 2.0 * b * b * self.height * width
        gram = [x for x in reductions if x == Gram()]
        if len(gram) < len(reductions) or cost > formed:
            return [self._in_blocks(reductions, budget)]
        pairs = 8.0 * b * r * r
        chunk = budget.chunk(pairs)
        name = f"{r} × {r} products of rows, of every two examples"
        return [Route(name, tuple(gram), lambda batch: [self._gram(batch, chunk)], b, cost, chunk * pairs)]

    def _gram(self, batch: Batch, chunk: int):
        """⟨g_b, g_c⟩: the products of rows that have the same key."""
        keys, rows = batch.prepared(self.prepare).operands
        rows = jnp.where(((keys >= 0) & (keys < self.height))[..., None], rows.astype(accumulator(rows.dtype)), 0)

        def lines(some: Batch):
            same = some.operands[0][:, None, :, None] == keys[None, :, None, :]
            products = jnp.real(jnp.einsum("crw,bqw->cbrq", some.operands[1], jnp.conj(rows)))
            return [jnp.sum(jnp.where(same, products, 0), axis=(2, 3))]

        return in_chunks(lines, Batch((keys, rows), (True, True), batch.size), chunk, [SquaredNorm()])[0]

    def _in_blocks(self, reductions, budget: Budget) -> Route:
        """In tiles of columns; and of rows where one column of all examples' tables is too much."""
        count = -(-8 * budget.size * self.height // budget.chunk_bytes)
        if count <= 1:
            return whole_route(self, reductions, budget)
        height = -(-self.height // count)
        count = -(-self.height // height)

        def block(start) -> Route:
            def prepare(*operands):
                keys, updates = self.prepare(*operands)
                return jnp.where(self._valid(keys) < self.height, keys - start, -1), updates

            return whole_route(dataclasses.replace(self, height=height, prepare=prepare), reductions, budget)

        def run(batch: Batch):
            found = jax.lax.map(lambda start: block(start).run(batch), height * jnp.arange(count, dtype=jnp.int32))
            out = []
            for x, r in zip(found, reductions, strict=True):
                if r.coordinatewise:  # [count, *lead, height, w] -> [*lead, V, w]
                    x = jnp.moveaxis(x, 0, -3)
                    x = x.reshape(*x.shape[:-3], count * height, x.shape[-1])[..., : self.height, :]
                out.append(x if r.coordinatewise else jnp.sum(x, axis=0))
            return out

        one = block(0)
        name = f"{one.name}, of {height} row{'s' * (height > 1)} at a time"
        return dataclasses.replace(one, name=name, run=run, flops=count * one.flops)

    def _by_row(self, reductions, batch: Batch, distinct: bool):
        keys, rows = batch.operands
        keys, rows = self._valid(keys), rows.astype(accumulator(rows.dtype))
        if distinct:  # one row per distinct key, the others past the end of the table
            keys, rows = jax.vmap(self._distinct)(keys, rows)
        if batch.mask is not None:
            keys = jnp.where(batch.mask[:, None], keys, self.height)
        out = []
        for reduction in reductions:
            if isinstance(reduction, SquaredNorm):
                squares = jnp.where((keys < self.height)[..., None], square(rows), 0)
                out.append(jnp.sum(squares, axis=(1, 2)))
            elif isinstance(reduction, MaxAbs):
                out.append(self._table(keys, jnp.abs(rows), "max"))
            elif isinstance(reduction, Histogram):
                out.append(self._histogram(reduction, keys, rows, batch))
            else:
                out.append(self._scatter(reduction.phi, keys, rows, batch))
        return out

    def _distinct(self, keys, updates):
        order = jnp.argsort(keys)
        keys, updates = keys[order], updates[order]
        first = jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
        run = jnp.cumsum(first) - 1
        sums = jax.ops.segment_sum(updates, run, len(keys), indices_are_sorted=True)
        heads = jnp.full(len(keys), self.height, keys.dtype).at[run].set(keys)
        return heads, sums

    def _table(self, keys, values, how: str):
        table = jnp.zeros((self.height, values.shape[-1]), values.dtype)
        at = table.at[keys.reshape(-1)]
        return getattr(at, how)(values.reshape(-1, values.shape[-1]), mode="drop")

    def _scatter(self, phi, keys, rows, batch: Batch):
        table = self._table(keys, phi(rows) * batch.weight, "add")
        at_zero = phi.at_zero(rows.dtype)
        if at_zero == 0:
            return table
        # Examples that do not touch a row have the coordinate 0 there, and φ(0) is not 0.
        touched = self._touched(keys)
        absent = batch.share - batch.weight * touched[:, None]
        everywhere = touched == batch.counted
        return table + jnp.where(everywhere[:, None], 0, absent * jnp.asarray(at_zero, table.dtype))

    def _touched(self, keys):
        """By how many examples each row is touched."""
        return jnp.zeros(self.height, jnp.int32).at[keys.reshape(-1)].add(1, mode="drop")

    def _histogram(self, reduction: Histogram, keys, rows, batch: Batch):
        refuse_complex("histogram", rows)
        absent = (batch.counted - self._touched(keys))[:, None]
        return jax.lax.map(
            lambda bounds: self._table(keys, in_bin(rows, *bounds), "add") + absent * in_bin(0, *bounds),
            reduction.bins(rows.dtype),
        )

    def stack(self, operands, axes, length):
        prepare = mapped(self.prepare, axes, length)

        def folded(*ops):
            keys, updates = prepare(*ops)
            keys = self._valid(keys)
            layer = jnp.arange(length, dtype=keys.dtype)[:, None] * self.height
            keys = jnp.where(keys < self.height, keys + layer, length * self.height)
            return keys.reshape(-1), updates.reshape(-1, updates.shape[-1])

        return self._folded(operands, folded, length, length * self.height, (leading(length, self.moves, True),))

    def sum_over(self, operands, axes, length):
        prepare = mapped(self.prepare, axes, length)

        def folded(*ops):
            keys, updates = prepare(*ops)
            return keys.reshape(-1), updates.reshape(-1, updates.shape[-1])

        return self._folded(operands, folded, length, self.height, self.moves)

    def _folded(self, operands, prepare, length, height, moves):
        keys, updates = self.shapes
        shapes = (
            jax.ShapeDtypeStruct((length * keys.shape[0],), keys.dtype),
            jax.ShapeDtypeStruct((length * updates.shape[0], updates.shape[1]), updates.dtype),
        )
        return dataclasses.replace(self, operands=operands, prepare=prepare, shapes=shapes, height=height, moves=moves)

    def tokens(self):
        return self.shapes[0].shape[0]

    def plain_flops(self, size):
        return float(size * size_of(self.shapes[1].shape))

    def token_batch(self, prepared, scale):
        keys, updates = prepared.operands
        r = self.tokens()
        shapes = (
            jax.ShapeDtypeStruct((1,), keys.dtype),
            jax.ShapeDtypeStruct((1, updates.shape[-1]), updates.dtype),
        )
        term = dataclasses.replace(self, prepare=lambda *ops: ops, shapes=shapes)
        operands = (keys.reshape(-1, 1), (updates * scale).reshape(-1, 1, updates.shape[-1]))
        return term, prepared.spread(operands, r)


def _table(shape, indexed: Sequence[int]) -> tuple[int, int, list[int], tuple[Move, ...]]:
    """The array of `shape` as a table of its indexed axes by the others, and the moves back."""
    others = [a for a in range(len(shape)) if a not in indexed]
    order = [*indexed, *others]
    height, width = size_of([shape[a] for a in indexed]), size_of([shape[a] for a in others])
    inverse = tuple(int(i) for i in np.argsort(order))
    moves = (
        reshaped([shape[a] for a in order]),
        Move("transpose", lambda g: jnp.transpose(g, inverse), (inverse,)),
    )
    return height, width, others, moves


def _rows(scope, eqn, indexed, operands, prepare) -> Rows | None:
    out = eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return None
    height, _, _, moves = _table(out.shape, indexed)
    return Rows(
        operands=operands,
        prepare=prepare,
        moves=moves,
        shapes=shape_of(prepare, [v.aval for v in operands]),
        rule="embedding",
        source=scope.source(eqn),
        height=height,
    )


def _flatten_windows(starts, updates, shape, indexed, window, dropped):
    """Rows from windows. starts[r, i]: where window r begins on the i-th indexed axis; updates[r, *window over all axes].

    A window position along indexed axes becomes a row of its own; `dropped[r]`: the window counts nowhere.
    """
    others = [a for a in range(len(shape)) if a not in indexed]
    offsets = np.indices([window[a] for a in indexed]).reshape(len(indexed), -1)  # [i, o]
    position = starts[:, :, None] + offsets[None]  # [r, i, o]
    keys = jnp.zeros(position.shape[::2], starts.dtype)
    for i, axis in enumerate(indexed):
        keys = keys * shape[axis] + position[:, i]
    keys = jnp.where(dropped[:, None], size_of([shape[a] for a in indexed]), keys)
    updates = jnp.transpose(updates, (0, *(1 + a for a in indexed), *(1 + a for a in others)))
    # Windows that do not fill the axes that are not indexed cannot occur: such an axis is indexed (at 0).
    return keys.reshape(-1), updates.reshape(keys.size, -1)


@register("scatter-add", "scatter_add")
def scattered(scope, eqn) -> Rows | None:
    """`scatter-add` into zeros, which is how a lookup transposes."""
    table, indices, updates = eqn.invars
    if not scope.is_zero(table):
        return None
    d, shape, mode = eqn.params["dimension_numbers"], table.aval.shape, eqn.params["mode"]
    kept = [a for a in range(len(shape)) if a not in d.inserted_window_dims and a not in d.operand_batching_dims]
    window = [1] * len(shape)
    for axis, update_axis in zip(kept, d.update_window_dims, strict=True):
        window[axis] = updates.aval.shape[update_axis]
    partial = [a for a in kept if window[a] != shape[a]]
    # Batching axes (a lookup under the loss's own vmap) are indexed too, by the position in the batch.
    indexed = sorted({*d.scatter_dims_to_operand_dims, *d.operand_batching_dims, *partial})
    clip = "CLIP" in str(mode)

    def prepare(indices, updates):
        batch_shape = indices.shape[:-1]
        starts = jnp.zeros((*batch_shape, len(indexed)), jnp.int32)
        for i, axis in enumerate(d.scatter_dims_to_operand_dims):
            starts = starts.at[..., indexed.index(axis)].set(indices[..., i].astype(jnp.int32))
        for axis, batch_axis in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
            iota = jax.lax.broadcasted_iota(jnp.int32, batch_shape, batch_axis)
            starts = starts.at[..., indexed.index(axis)].set(iota)
        starts = starts.reshape(-1, len(indexed))
        scatter_axes = [a for a in range(updates.ndim) if a not in d.update_window_dims]
        updates = jnp.transpose(updates, (*scatter_axes, *d.update_window_dims))
        updates = updates.reshape(len(starts), *window)
        limit = np.array([shape[a] - window[a] for a in indexed], np.int32)
        if clip:
            starts = jnp.clip(starts, 0, limit)
        dropped = jnp.any((starts < 0) | (starts > limit), axis=1)
        return _flatten_windows(starts, updates, shape, indexed, window, dropped)

    return _rows(scope, eqn, indexed, (indices, updates), prepare)


@register("dynamic_update_slice")
def sliced(scope, eqn) -> Rows | None:
    """`dynamic_update_slice` into zeros, which is how a slice at a computed place transposes; starts are clamped."""
    table, update, *starts = eqn.invars
    if not scope.is_zero(table):
        return None
    shape, window = table.aval.shape, update.aval.shape
    indexed = [a for a in range(len(shape)) if window[a] != shape[a]]
    if not indexed:
        return None

    def prepare(update, *starts):
        limit = [shape[a] - window[a] for a in indexed]
        at = [jnp.clip(starts[a].astype(jnp.int32), 0, top) for a, top in zip(indexed, limit, strict=True)]
        return _flatten_windows(jnp.stack(at)[None], update[None], shape, indexed, window, jnp.zeros(1, bool))

    return _rows(scope, eqn, indexed, (update, *starts), prepare)
