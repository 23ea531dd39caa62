"""Dense layers: the gradient of one example is a contraction of its activations with its cotangents.

In canonical form, for one example,

    g[s, m, n] = Σ_t x[s, t, m] δ[s, t, n],

with t the positions at which the example uses the weight, m and n the axes that only one side has, and s the
axes that both sides have and the weight keeps (heads, experts, layers). What this buys, over B examples:

* Σ_b g_b is one contraction over (b, t): the plain gradient, at its price.
* With one position, g is an outer product, and a multiplicative φ (square, sign, |·|, powers) commutes with it:
  Σ_b φ(x_b δ_bᵀ) = Σ_b φ(x_b) φ(δ_b)ᵀ is one more contraction.
* ⟨g_b, g_c⟩ = Σ_{t,u} (x_bt·x_cu)(δ_bt·δ_cu), and with it ‖g_b‖², needs no m × n matrix: t²(m + n) operations against t·m·n.
* ⟨g_b, v⟩ = Σ_t (vᵀx_t)·δ_t needs none either.
* Everything else forms g for a few examples at a time, while it is still in cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels.contraction import MOST_OUTPUTS, Operand, batched_contraction, choose
from ..reductions import IDENTITY, Gram, Mean, SquaredNorm, accumulator
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
    shared_out,
    size_of,
    whole_route,
)

# The axes of x and δ, and those of g, of which a device may hold a part.
SIDES = (("s", "", "m"), ("s", "", "n")), ("s", "m", "n")


@dataclasses.dataclass(frozen=True)
class Contraction(Term):
    """g[s, m, n] = Σ_t x[s, t, m] δ[s, t, n]; the prepared operands are x and δ."""

    precision: Any = None
    total: Callable[[Batch], jax.Array] | None = None  # Σ_b g_b from the raw operands, without preparing them
    # What prepares one slice of m after the other, where preparing all of it makes the operands many times larger.
    slices: tuple[Callable[..., tuple[jax.Array, ...]], ...] = ()
    transposed: tuple[bool, bool] = (False, False)  # is x, is δ, the exchange of the last axes of what is in memory?

    @property
    def dims(self) -> tuple[int, int, int, int]:
        (s, t, m), (_, _, n) = self.shapes[0].shape, self.shapes[1].shape
        return s, t, m, n

    @property
    def reason(self):
        what, t = "patches" if self.patches else "activations", self.dims[1]
        return self.why or f"contracts {what} with cotangents at {t} position{'s' * (t != 1)} of each example"

    @property
    def _operand_bytes(self) -> int:
        return sum(size_of(a.shape) * a.dtype.itemsize for a in self.shapes)

    @property
    def form_bytes(self):
        s, _, m, n = self.dims
        return 4 * s * m * n + self.patches * self._operand_bytes

    def einsum(self, spec, x, delta):
        dtype = accumulator(jnp.promote_types(x.dtype, delta.dtype))
        return jnp.einsum(spec, x, delta, precision=self.precision, preferred_element_type=dtype)

    def form(self, x, delta):
        if len(x) == 1:  # written without the axis s: XLA would transpose for it
            return self.einsum("tm,tn->mn", x[0], delta[0])[None]
        return self.einsum("stm,stn->smn", x, delta)

    @property
    def columns(self):
        return self.dims[3]

    def form_columns(self, start, width, x, delta):
        return self.form(x, jax.lax.dynamic_slice_in_dim(delta, start, width, 2))

    def dot(self, v, x, delta):
        return jnp.sum(self.einsum("stm,smn->stn", x.astype(v.dtype), v) * delta)

    @property
    def dot_bytes(self):
        return self.patches * self._operand_bytes

    def batch_sum(self, x, delta):
        """Σ_b x_bᵀδ_b, one contraction over examples and positions."""
        if x.shape[1] == 1:
            return self.einsum("tm,tn->mn", *(a.reshape(-1, a.shape[3]) for a in (x, delta)))[None]
        return self.einsum("bstm,bstn->smn", x, delta)

    def routes(self, reductions: Sequence[Any], budget: Budget) -> list[Route]:
        s, t, m, n = self.dims
        b = budget.size
        operand_bytes = self._operand_bytes
        matmul = self.plain_flops(b)
        whole = budget.chunk(operand_bytes) if self.patches else b
        # Tiles larger than the activations that exist anyway would show in the peak.
        memory = self.form_bytes
        tile = dataclasses.replace(budget, chunk_bytes=min(budget.chunk_bytes, max(b * operand_bytes, 2 * memory)))

        sums = [r for r in reductions if isinstance(r, Mean)]
        outer = [r for r in sums if r.phi.multiplicative] if t == 1 else []
        plain = [r for r in sums if r.phi == IDENTITY] if len(sums) == 1 and (self.total or not self.patches) else []
        norm = [r for r in reductions if isinstance(r, SquaredNorm)]
        formed = [r for r in reductions if r not in (*(outer or plain), *norm)]
        means = [r for r in formed if isinstance(r, Mean)]
        kernel = self._kernel([r.phi for r in means], b) if means else "xla"
        fused, formed = (means, [r for r in formed if r not in means]) if kernel != "xla" else ([], formed)
        if formed or t * (m + n) > m * n:  # the matrices are formed anyway, or are the cheaper side
            formed, norm = formed + norm, []

        routes = []
        if outer:
            routes.append(
                Route(
                    "one outer product per example: φ of the factors",
                    tuple(outer),
                    lambda batch: self._outer_sums([r.phi for r in outer], batch),
                    whole,
                    matmul * len(outer),
                    whole * operand_bytes,
                )
            )
        elif plain:
            routes.append(Route("the plain gradient", tuple(plain), self._plain_sum, b, matmul))
        if norm:
            pairs = 8 * s * t * t
            chunk = min(whole, budget.chunk(pairs))
            cost = 2.0 * b * s * t * t * (m + n)
            name = f"{t} × {t} products of positions" if t > 1 else "products of the factors' norms"
            routes.append(Route(name, tuple(norm), self._squared_norms, chunk, cost, chunk * pairs))
        if fused:
            cost = matmul * -(-len(fused) // MOST_OUTPUTS) + 2.0 * len(fused) * b * s * m * n
            run = lambda batch: self._fused_sums(kernel, fused, budget.chunk(memory), batch)
            routes.append(
                Route(f"one fused kernel ({kernel})", tuple(fused), run, b, cost, self.patches * operand_bytes * b)
            )
        if formed:
            routes.append(self._formed(formed, memory, tile, matmul))
        return routes

    def _kernel(self, phis, size: int) -> str:
        """Which implementation of the contraction serves these φ's; a kernel is never given patches."""
        if self.patches and not self.slices:
            return "xla"
        x, delta = self.shapes
        m = x.shape[2] // max(len(self.slices), 1)
        first = Operand((size, *x.shape[:2], m), x.dtype, self.transposed[0])
        second = Operand((size, *delta.shape), delta.dtype, self.transposed[1])
        return choose(first, second, phis, self.precision)

    def _fused_sums(self, kernel: str, means, chunk: int, batch: Batch):
        def run(batch: Batch):
            x, delta = batch.operands
            return batched_contraction(
                x,
                delta,
                [r.phi for r in means],
                weight=batch.weight,
                mask=batch.mask,
                precision=self.precision,
                transposed=self.transposed,
                chunk=chunk,
                implementation=kernel,
            )

        def parts(batch: Batch):
            found = [run(batch.having(batch.vmap(part), (True, True))) for part in self.slices]
            return [jnp.concatenate(pieces, axis=1) for pieces in zip(*found, strict=True)]

        if self.slices:
            return shared_out(parts, batch, means)
        return shared_out(run, batch.having(batch.vmap(self.prepare), (True, True)), means, *SIDES)

    def _formed(self, reductions, memory, budget: Budget, flops) -> Route:
        if self.patches:
            form = lambda *raw: self.form(*self.prepare(*raw))
            return formed_route(form, reductions, memory, budget, flops)
        route = formed_route(self.form, reductions, memory, budget, flops, *SIDES)
        run = lambda batch: route.run(batch.having(batch.vmap(self.prepare), (True, True)))
        return dataclasses.replace(route, run=run)

    def _plain_sum(self, batch: Batch):
        if self.total is not None:
            return [self.total(batch) * batch.weight]
        x, delta = batch.prepared(self.prepare).operands
        return [self._weighted(x, delta, batch.weight)]

    def _weighted(self, x, delta, weight):
        """weight · Σ_b x_bᵀδ_b: the weight goes into the smaller factor, unless it would be rounded there."""
        if jnp.finfo(delta.dtype).bits < 32:
            return self.batch_sum(x, delta) * weight
        return self.batch_sum(x, delta * jnp.asarray(weight, delta.dtype))

    def _outer_sums(self, phis, batch: Batch):
        x, delta = batch.prepared(self.prepare).operands
        out = []
        for phi in phis:  # φ is taken in float32 or wider: the square of a small float16 would be lost
            factors = (x, delta) if phi == IDENTITY else (phi(x), phi(delta))
            out.append(self._weighted(factors[0], factors[1], batch.weight))
        return out

    def _squared_norms(self, batch: Batch):
        x, delta = batch.prepared(self.prepare).operands
        pairs = self.einsum("bstm,bsum->bstu", x, x) * self.einsum("bstn,bsun->bstu", delta, delta)
        # A sum of positive and negative terms whose total is a square: rounding may leave it below zero.
        return [jnp.maximum(jnp.sum(pairs, axis=(1, 2, 3)), 0)]

    def whole_routes(self, reductions, budget):
        s, t, m, n = self.dims
        b, pairs = budget.size, 8.0 * budget.size * s * t * t
        cost = 2.0 * b * b * s * t * t * (m + n)
        formed = 2.0 * b * s * m * n * (t + b)
        gram = [r for r in reductions if r == Gram()]
        rest = [r for r in reductions if r not in gram]
        if rest or self.patches or cost > formed:
            return [whole_route(self, reductions, budget)]
        chunk = budget.chunk(pairs)
        name = (
            f"{t} × {t} products of positions, of every two examples" if t > 1 else "products of the factors' products"
        )
        return [Route(name, tuple(gram), lambda batch: [self._gram(batch, chunk)], b, cost, chunk * pairs)]

    def _gram(self, batch: Batch, chunk: int):
        x, delta = batch.prepared(self.prepare).operands

        def rows(some: Batch):
            x_c, delta_c, x_b, delta_b = some.operands
            pairs = self.einsum("cstm,bsum->cbstu", x_c, x_b)
            return [jnp.sum(pairs * self.einsum("cstn,bsun->cbstu", delta_c, delta_b), axis=(2, 3, 4))]

        pair = Batch((x, delta, x, delta), (True, True, False, False), batch.size)
        return in_chunks(rows, pair, chunk, [SquaredNorm()])[0]

    def stack(self, operands, axes, length):
        prepare = mapped(self.prepare, axes, length)

        def folded(*ops):  # [L, s, t, m] -> [L·s, t, m]
            return tuple(a.reshape(length * a.shape[1], *a.shape[2:]) for a in prepare(*ops))

        return dataclasses.replace(
            self,
            operands=operands,
            prepare=folded,
            moves=(leading(length, self.moves, split=True),),
            shapes=tuple(_shape(a, (length * a.shape[0], *a.shape[1:])) for a in self.shapes),
            total=None,
            slices=(),
        )

    def sum_over(self, operands, axes, length):
        prepare = mapped(self.prepare, axes, length)

        def joined(*ops):  # [T, s, t, m] -> [s, T·t, m]
            return tuple(
                jnp.moveaxis(a, 0, 1).reshape(a.shape[1], length * a.shape[2], a.shape[3]) for a in prepare(*ops)
            )

        shapes = tuple(_shape(a, (a.shape[0], length * a.shape[1], a.shape[2])) for a in self.shapes)
        return dataclasses.replace(
            self, operands=operands, prepare=joined, shapes=shapes, total=None, slices=(), transposed=(False, False)
        )

    def scaled(self, factor, extra):
        return dataclasses.replace(super().scaled(factor, extra), total=None, slices=())

    def weighted(self):
        total = self.total
        if total is None or any(jnp.finfo(a.dtype).bits < 32 for a in self.shapes):
            return dataclasses.replace(super().weighted(), total=None, slices=())

        def weighted_total(batch: Batch):
            scale = lambda *operands: (*operands[:-2], operands[-2] * operands[-1])
            return total(batch.having(batch.vmap(scale), (True,) * (len(batch.operands) - 1)))

        return dataclasses.replace(super().weighted(), total=weighted_total, slices=())

    def tokens(self):
        return self.dims[1]

    def plain_flops(self, size):
        s, t, m, n = self.dims
        return 2.0 * size * s * t * m * n

    def token_batch(self, prepared, scale):
        x, delta = prepared.operands  # [b, s, t, m] -> [b·t, s, 1, m]
        operands = tuple(jnp.moveaxis(a, 2, 1).reshape(-1, a.shape[1], 1, a.shape[3]) for a in (x, delta * scale))
        t = self.dims[1]
        shapes = tuple(jax.ShapeDtypeStruct((a.shape[0], 1, a.shape[2]), a.dtype) for a in self.shapes)
        term = dataclasses.replace(self, prepare=lambda *ops: ops, shapes=shapes, total=None, slices=())
        return term, prepared.spread(operands, t)

    def move(self, move: Move) -> Term:
        # g[m, n] transposed is the contraction with its sides exchanged: terms of one weight used both ways, or
        # written x @ w in one place and w.T @ x in another, then have one form and can be joined.
        swap = self._swapped(move)
        return swap if swap is not None else super().move(move)

    def _swapped(self, move: Move) -> Term | None:
        s, _, m, n = self.dims
        if move.name != "transpose" or s != 1 or self.patches:
            return None
        shape, after = (m, n), self.moves
        if after and after[0].name == "reshape":
            shape, after = after[0].params[0], after[1:]
        if after:
            return None
        (perm,) = move.params
        prepare = self.prepare
        for k in range(len(shape) + 1):  # the first k axes are m's, the rest n's
            sides = size_of(shape[:k]), size_of(shape[k:])
            if sides == (m, n) and tuple(perm) == (*range(k, len(shape)), *range(k)):
                return dataclasses.replace(
                    self,
                    prepare=lambda *ops: prepare(*ops)[::-1],
                    shapes=self.shapes[::-1],
                    transposed=self.transposed[::-1],
                    moves=(reshaped([shape[p] for p in perm]),),
                )
        return None


def _shape(a, shape):
    return jax.ShapeDtypeStruct(shape, a.dtype)


@register("dot_general")
def dense(scope, eqn) -> Contraction | None:
    """`dot_general(lhs, rhs)` as a contraction: its batch axes are s, its contracted axes t, its free ones m and n."""
    out = eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return None
    varying = [v for v in eqn.invars if scope.varies(v)]
    if len(varying) == 1:
        # Something per example times something shared. That may be the end of a layer (whose cotangents are the same
        # for all examples) or the sequel of one (a weight's gradient, times another weight). Where the product is
        # the smaller, it is as well taken as it is; but the positions of a layer must not be lost.
        larger = size_of(varying[0].aval.shape) >= size_of(out.shape)
        if scope.is_weight_gradient(varying[0]) or (larger and not scope.tokens):
            return None
    contracted, kept = eqn.params["dimension_numbers"]
    orders = []
    for side in (0, 1):
        rest = set(range(eqn.invars[side].aval.ndim)) - {*contracted[side], *kept[side]}
        orders.append((tuple(kept[side]), tuple(contracted[side]), tuple(sorted(rest))))

    def fold(a, order):
        groups = [size_of([a.shape[i] for i in group]) for group in order]
        return jnp.transpose(a, sum(order, ())).reshape(groups)

    def prepare(lhs, rhs):
        return fold(lhs, orders[0]), fold(rhs, orders[1])

    return Contraction(
        operands=tuple(eqn.invars),
        prepare=prepare,
        moves=(reshaped(out.shape),),
        shapes=shape_of(prepare, [v.aval for v in eqn.invars]),
        rule="dense",
        source=scope.source(eqn),
        precision=eqn.params["precision"],
        transposed=(_exchanged(eqn.invars[0].aval.shape, *orders[0]), _exchanged(eqn.invars[1].aval.shape, *orders[1])),
    )


def _exchanged(shape, kept, contracted, free) -> bool:
    """Do the free axes come before the contracted ones in memory, so that only exchanging the two folds would move data?"""
    lies = lambda *axes: (real := [a for a in axes if shape[a] > 1]) == sorted(real)
    return not lies(*kept, *contracted, *free) and lies(*kept, *free, *contracted)


def joined(terms: Sequence[Contraction]) -> Contraction | None:
    """Several uses of one weight as one: contractions of equal form, laid one after the other along t."""
    first = terms[0]
    if not all(t.moves == first.moves and t.precision == first.precision for t in terms):
        return None
    if len({(t.dims[0], *t.dims[2:]) for t in terms}) > 1 or any(t.patches for t in terms):
        return None
    cuts = np.cumsum([0] + [len(t.operands) for t in terms])

    def prepare(*operands):
        parts = [t.prepare(*operands[i:j]) for t, i, j in zip(terms, cuts, cuts[1:], strict=False)]
        return tuple(jnp.concatenate(side, axis=1) for side in zip(*parts, strict=True))

    shapes = tuple(
        jax.ShapeDtypeStruct(
            (sides[0].shape[0], sum(a.shape[1] for a in sides), sides[0].shape[2]),
            jnp.result_type(*[a.dtype for a in sides]),
        )
        for sides in zip(*[t.shapes for t in terms], strict=True)
    )
    return dataclasses.replace(
        first,
        operands=sum((t.operands for t in terms), ()),
        prepare=prepare,
        shapes=shapes,
        rule="shared",
        transposed=(False, False),
    )
