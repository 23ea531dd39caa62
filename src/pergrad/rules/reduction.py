"""Small leaves: the gradient of one example is no larger than the activations it was reduced from.

Biases, scales, gains: JAX's own backward pass sums (or multiplies) activations down to g[b, ...], which is there
already, and small. Apply φ and sum over b. Nothing is left to be clever about.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..reductions import Mean, accumulator
from . import register
from .base import Batch, Budget, Route, Term, formed_route, leading, mapped, moved, reshaped, shape_of, size_of
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

    @property
    def dot_bytes(self):
        return self.bytes_each

    def _constant(self, reductions):
        def run(batch: Batch):
            g = self.form(*self.prepare(*batch.operands))[None]
            every = jnp.broadcast_to(g, (batch.size, *g.shape[1:]))  # never in memory: what reads it is fused
            return [r.of(g) * batch.share if isinstance(r, Mean) else r.of(every, batch.mask) for r in reductions]

        return run

    def weighted(self):
        return dataclasses.replace(super().weighted(), varies=True)

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
        (shape,) = self.shapes
        if self.bytes_each:
            return dataclasses.replace(self, operands=operands, prepare=_summed_over(self.prepare, axes, length, shape))
        # A contraction over the steps with a vector of ones; taken only where each step must be seen by itself
        # (tokens), since the accumulated gradient is smaller than its summands.
        prepare = mapped(self.prepare, axes, length)
        ones = jnp.ones((1, length, 1), shape.dtype)
        size = size_of(shape.shape)
        return Contraction(
            operands=operands,
            prepare=lambda *ops: (ones, prepare(*ops)[0].reshape(1, length, size)),
            moves=(reshaped(shape.shape), *self.moves),
            shapes=(
                jax.ShapeDtypeStruct(ones.shape, shape.dtype),
                jax.ShapeDtypeStruct((1, length, size), shape.dtype),
            ),
            rule=self.rule,
            source=self.source,
        )

    def token_batch(self, prepared, scale):
        term = dataclasses.replace(self, prepare=lambda *ops: ops, bytes_each=0, varies=True)
        return term, prepared.having([g * scale for g in prepared.operands], (True,))


def _summed_over(prepare: Callable, axes, length: int, shape) -> Callable:
    """The sum over the steps of a loop, one step at a time."""

    def run(*operands):
        def step(total, xs):
            rest = iter(xs)
            (g,) = prepare(*(x if a is None else next(rest) for x, a in zip(operands, axes, strict=True)))
            return total + g, None

        stacked = [x for x, a in zip(operands, axes, strict=True) if a is not None]
        total, _ = jax.lax.scan(step, jnp.zeros(shape.shape, shape.dtype), stacked, length=length)
        return (total,)

    return run


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


def as_one_use(terms: Sequence[Term]) -> list[Term]:
    """The same terms, those that the backward pass forms added into one.

    A sum of two such terms may be two uses of a parameter or the two halves of one derivative (of x · sigmoid(x)): they
    cannot be told apart, and count as one use, hence as one token.
    """
    several = [t for t in terms if isinstance(t, Formed)]
    if len(several) < 2:
        return list(terms)
    cuts = np.cumsum([0] + [len(t.operands) for t in several])

    def prepare(*operands):
        parts = [t.example(*operands[i:j]) for t, i, j in zip(several, cuts, cuts[1:], strict=False)]
        return (functools.reduce(operator.add, parts),)

    one = dataclasses.replace(
        several[0],
        operands=sum((t.operands for t in several), ()),
        prepare=prepare,
        moves=(),
        shapes=(jax.eval_shape(lambda *g: moved(several[0].moves, several[0].form(*g)), *several[0].shapes),),
        bytes_each=sum(t.bytes_each for t in several),
        varies=any(t.varies for t in several),
        accumulated=any(t.accumulated for t in several),
    )
    return [one, *(t for t in terms if not isinstance(t, Formed))]


@register("reduce_sum")
def summed(scope, eqn) -> Term | None:
    """A sum over positions: at granularity "token", each position by itself; else its result, which is smaller."""
    (operand,), out = eqn.invars, eqn.outvars[0]
    if not scope.tokens or not jnp.issubdtype(out.aval.dtype, jnp.floating) or not scope.varies(operand):
        return None  # as the backward pass forms it
    chain = [eqn]
    while (above := scope.producer_of(operand)) is not None and above.primitive.name in _SUMS_AND_SHAPES:
        chain.insert(0, above)
        operand = above.invars[0]
    count = operand.aval.size // max(out.aval.size, 1)

    def prepare(a):
        ones = jnp.ones((1, count, 1), accumulator(a.dtype))
        if len(chain) == 1:
            axes = eqn.params["axes"]
            a = jnp.transpose(a, (*axes, *(k for k in range(a.ndim) if k not in axes)))
        else:  # sums of sums: sort the entries by where they end up
            a = a.reshape(-1)[_by_destination(scope, chain)].reshape(out.aval.size, count).T
        return ones, a.reshape(1, count, out.aval.size)

    return Contraction(
        operands=(operand,),
        prepare=prepare,
        moves=(reshaped(out.aval.shape),),
        shapes=shape_of(prepare, [operand.aval]),
        rule="reduction",
        source=scope.source(eqn),
    )


_SUMS_AND_SHAPES = {"reduce_sum", "reshape", "squeeze", "expand_dims", "transpose"}


def _by_destination(scope, chain) -> np.ndarray:
    """The order of the first operand's entries in which those come together that a chain of sums adds up."""

    def run(a):
        for eqn in chain:
            (a,) = scope.bind(eqn, [a])
        return a

    with jax.ensure_compile_time_eval():
        given, out = chain[0].invars[0].aval, chain[-1].outvars[0].aval
        back = jax.linear_transpose(run, jax.ShapeDtypeStruct(given.shape, given.dtype))
        # In two digits, each exact in 16 bits of mantissa or fewer.
        numbers = np.arange(out.size)
        high, low = (back(jnp.asarray(n.reshape(out.shape), out.dtype))[0] for n in np.divmod(numbers, 128))
        return np.argsort(np.asarray(high, np.int64) * 128 + np.asarray(low, np.int64), axis=None, kind="stable")
