"""Small leaves: the gradient of one example is no larger than the activations it was reduced from.

Biases, scales, gains: JAX's own backward pass sums (or multiplies) activations down to g[b, ...], which is there
already, and small. Apply φ and sum over b. Nothing is left to be clever about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..statistics import Sum, accumulator
from . import register
from .base import Batch, Budget, Route, Term, formed_route, leading, mapped, reshaped, shape_of, size_of
from .dense import Contraction


@dataclasses.dataclass(frozen=True)
class Formed(Term):
    """g is computed by the backward pass itself; the prepared operand is g.

    `bytes_each` is the memory that preparing takes per example beyond the operands: 0 where the operand is g.
    """

    bytes_each: int = 0
    varies: bool = True
    accumulated: bool = False  # by a loop: the summands are not to be had

    def form(self, g):
        return g

    def routes(self, reductions: Sequence[Any], budget: Budget) -> list[Route]:
        if not self.varies:
            return [Route("the same for every example", tuple(reductions), self._constant(reductions), budget.size)]
        chunk = budget.chunk_bytes if self.bytes_each else float("inf")
        roomy = dataclasses.replace(budget, chunk_bytes=chunk, most=budget.size)
        route = formed_route(lambda *raw: self.form(*self.prepare(*raw)), reductions, self.bytes_each, roomy)
        sums = 2.0 * len(reductions) * budget.size * size_of(self.shapes[0].shape)
        name = route.name if self.bytes_each else "reduced directly"
        return [dataclasses.replace(route, name=name, flops=sums + budget.size * self.bytes_each / 4)]

    def _constant(self, reductions):
        def run(batch: Batch):
            count = batch.size if batch.mask is None else jnp.sum(batch.mask)
            g = self.form(*self.prepare(*batch.operands))[None]
            every = jnp.broadcast_to(g, (batch.size, *g.shape[1:]))  # never in memory: what reads it is fused
            return [r.of(g) * count if isinstance(r, Sum) else r.of(every, batch.mask) for r in reductions]

        return run

    def stack(self, operands, axes, length):
        return dataclasses.replace(
            self,
            operands=operands,
            prepare=mapped(self.prepare, axes, length),
            moves=(leading(length, self.moves, split=False),),
            shapes=tuple(jax.ShapeDtypeStruct((length, *a.shape), a.dtype) for a in self.shapes),
            bytes_each=length * self.bytes_each,
        )

    def sum_over(self, operands, axes, length):
        # A contraction over the steps with a vector of ones; taken only where each step must be seen by itself
        # (tokens), since the accumulated gradient is smaller than its summands.
        if self.bytes_each:
            return None
        prepare, (shape,) = mapped(self.prepare, axes, length), self.shapes
        ones = jnp.ones((1, length, 1), shape.dtype)
        size = size_of(shape.shape)
        return Contraction(
            operands=operands,
            prepare=lambda *ops: (ones, prepare(*ops)[0].reshape(1, length, size)),
            moves=(reshaped(shape.shape), *self.moves),
            shapes=(jax.ShapeDtypeStruct(ones.shape, shape.dtype), jax.ShapeDtypeStruct((1, length, size), shape.dtype)),
            rule=self.rule,
            source=self.source,
        )

    def token_batch(self, prepared, scale):
        term = dataclasses.replace(self, prepare=lambda *ops: ops, bytes_each=0, varies=True)
        return term, Batch(tuple(g * scale for g in prepared.operands), (True,), prepared.size, prepared.mask)


def formed(scope, atom, rule: str, source: str, why: str = "") -> Formed:
    """The gradient as the backward pass computes it."""
    return Formed(
        operands=(atom,),
        prepare=lambda g: (g,),
        moves=(),
        shapes=(scope.aval(atom),),
        rule=rule,
        source=source,
        why=why,
        varies=scope.varies(atom),
    )


@register("reduce_sum")
def summed(scope, eqn) -> Term | None:
    """A sum over positions: at granularity "token", each position by itself; else its result, which is smaller."""
    (operand,), out = eqn.invars, eqn.outvars[0]
    if not scope.tokens or not jnp.issubdtype(out.aval.dtype, jnp.floating) or not scope.varies(operand):
        return formed(scope, out, "reduction", scope.source(eqn))
    axes = eqn.params["axes"]
    kept = [a for a in range(operand.aval.ndim) if a not in axes]
    count = size_of([operand.aval.shape[a] for a in axes])

    def prepare(a):
        ones = jnp.ones((1, count, 1), accumulator(a.dtype))
        return ones, jnp.transpose(a, (*axes, *kept)).reshape(1, count, size_of(out.aval.shape))

    return Contraction(
        operands=(operand,),
        prepare=prepare,
        moves=(reshaped(out.aval.shape),),
        shapes=shape_of(prepare, [operand.aval]),
        rule="reduction",
        source=scope.source(eqn),
    )
