"""Dense layers: the gradient of one example is a contraction of its activations with its cotangents.

In canonical form, for one example,

    g[s, m, n] = Σ_t x[s, t, m] δ[s, t, n],

with t the positions at which the example uses the weight, m and n the axes that only one side has, and s the
axes that both sides have and the weight keeps (heads, experts, layers). What this buys, over B examples:

* Σ_b g_b is one contraction over (b, t): the plain gradient, at its price.
* With one position, g is an outer product, and a multiplicative φ (square, sign, |·|, powers) commutes with it:
  Σ_b φ(x_b δ_bᵀ) = Σ_b φ(x_b) φ(δ_b)ᵀ is one more contraction.
* ‖g_b‖² = Σ_{t,u} (x_t·x_u)(δ_t·δ_u) needs no m × n matrix, at t²(m + n) operations against t·m·n.
* Everything else forms g for a few examples at a time, while it is still in cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..statistics import IDENTITY, Mean, SquaredNorm, accumulator
from . import register
from .base import Batch, Budget, Move, Route, Term, formed_route, leading, mapped, reshaped, shape_of, size_of


@dataclasses.dataclass(frozen=True)
class Contraction(Term):
    """g[s, m, n] = Σ_t x[s, t, m] δ[s, t, n]; the prepared operands are x and δ."""

    precision: Any = None
    total: Callable[[Batch], jax.Array] | None = None  # Σ_b g_b from the raw operands, without preparing them

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
        if formed:
            form = lambda *raw: self.form(*self.prepare(*raw))
            routes.append(formed_route(form, formed, memory, tile, matmul))
        return routes

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
        )

    def sum_over(self, operands, axes, length):
        prepare = mapped(self.prepare, axes, length)

        def joined(*ops):  # [T, s, t, m] -> [s, T·t, m]
            return tuple(
                jnp.moveaxis(a, 0, 1).reshape(a.shape[1], length * a.shape[2], a.shape[3]) for a in prepare(*ops)
            )

        shapes = tuple(_shape(a, (a.shape[0], length * a.shape[1], a.shape[2])) for a in self.shapes)
        return dataclasses.replace(self, operands=operands, prepare=joined, shapes=shapes, total=None)

    def scaled(self, factor, extra):
        return dataclasses.replace(super().scaled(factor, extra), total=None)

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
        term = dataclasses.replace(self, prepare=lambda *ops: ops, shapes=shapes, total=None)
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
    )


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
        first, operands=sum((t.operands for t in terms), ()), prepare=prepare, shapes=shapes, rule="shared"
    )
