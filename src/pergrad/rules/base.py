"""What a rule works with: terms, moves, batches and routes.

The gradient of one example with respect to one parameter leaf is a sum of *terms*. A term is

    g = moves( form( prepare(*operands) ) ),

where the operands are small (activations, cotangents, indices), `form` makes the gradient out of them and
the moves only put coordinates in their place. Statistics never need g for the whole batch at once: a term
offers *routes*, each a way to some reductions straight from the batched operands, and the last resort,
forming g for a few examples at a time, always exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..statistics import Mean, Stack

# ---------------------------------------------------------------------------------------- moves


@dataclasses.dataclass(frozen=True)
class Move:
    """A step that moves coordinates, repeats or drops them, or fills in zeros, and computes nothing.

    A coordinatewise statistic passes through it: E φ(move(g)) = move(E φ(g)), filled with φ(0).
    """

    name: str
    apply: Callable[[jax.Array], jax.Array] = dataclasses.field(compare=False)
    params: tuple = ()
    fills: bool = False  # does it fill in zeros?
    isometric: bool = True  # does every coordinate come out exactly once, so that norms stay what they are?
    box: tuple[tuple[int, int], ...] | None = None  # where, in its output, the coordinates it was given lie

    def __call__(self, g):
        return self.apply(g)


def moved(moves: Sequence[Move], g):
    for move in moves:
        g = move(g)
    return g


def reshaped(shape) -> Move:
    shape = tuple(shape)
    return Move("reshape", lambda g: g.reshape(shape), (shape,))


def leading(length: int, moves: Sequence[Move], split: bool) -> Move:
    """The same moves for each of ``length`` layers; `split` where the layers are folded into the first axis."""

    def apply(g):
        if split:
            g = g.reshape(length, g.shape[0] // max(length, 1), *g.shape[1:])
        return jax.vmap(lambda layer: moved(moves, layer))(g) if length else _empty(moves, g)

    return Move(
        "leading",
        apply,
        (length, split, tuple(moves)),
        fills=any(m.fills for m in moves),
        isometric=all(m.isometric for m in moves),
    )


def _empty(moves, g):
    shape = jax.eval_shape(lambda layer: moved(moves, layer), jax.ShapeDtypeStruct(g.shape[1:], g.dtype)).shape
    return jnp.zeros((0, *shape), g.dtype)


# ---------------------------------------------------------------------------------------- batches


@dataclasses.dataclass(frozen=True)
class Batch:
    """The operands of a term for all examples: batched ones carry the examples on axis 0, others are shared.

    ``weight`` is what one example counts for in a `Mean`: one over the number of examples that count, in all parts
    of the batch. Rules put it into a small factor, so that no pass over the parameters is spent on it.
    """

    operands: tuple[jax.Array, ...]
    batched: tuple[bool, ...]
    size: int
    mask: jax.Array | None = None
    weight: Any = 1.0

    def vmap(self, fn: Callable) -> Any:
        """``fn`` of each example's operands, results stacked on axis 0."""
        if not any(self.batched):
            one = fn(*self.operands)
            return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.size, *x.shape)), one)
        return jax.vmap(fn, in_axes=tuple(0 if b else None for b in self.batched))(*self.operands)

    def prepared(self, fn: Callable) -> Batch:
        """The batch with its operands prepared, each now batched, and zero in examples that do not count."""
        out = self.vmap(fn)
        if self.mask is not None:
            out = [jnp.where(self.mask.reshape((-1,) + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype)) for x in out]
        return self.having(out, (True,) * len(out))

    def having(self, operands: Sequence[jax.Array], batched: Sequence[bool]) -> Batch:
        """The same examples with other operands."""
        return dataclasses.replace(self, operands=tuple(operands), batched=tuple(batched))

    def spread(self, operands: Sequence[jax.Array], tokens: int) -> Batch:
        """Every token an example of its own; ``operands`` carry [size · tokens] on axis 0."""
        mask = None if self.mask is None else jnp.repeat(self.mask, tokens)
        return Batch(tuple(operands), (True,) * len(operands), self.size * tokens, mask, self.weight)

    @property
    def share(self) -> Any:
        """What the examples of this part that count amount to, of all."""
        return self.weight * (self.size if self.mask is None else jnp.sum(self.mask))


def in_chunks(
    run: Callable[[Batch], Sequence[jax.Array]], batch: Batch, chunk: int, per_example: Sequence[bool]
) -> list[jax.Array]:
    """``run`` on at most ``chunk`` examples at a time: results are summed, or laid one after the other."""
    if chunk >= batch.size:
        return list(run(batch))
    count = batch.size // chunk
    cut = count * chunk
    arrays = [x for x, b in zip(batch.operands, batch.batched, strict=True) if b]
    if batch.mask is not None:
        arrays.append(batch.mask)

    def part(given: Sequence[jax.Array], size: int) -> list[jax.Array]:
        rest = iter(given)
        operands = tuple(next(rest) if b else x for x, b in zip(batch.operands, batch.batched, strict=True))
        return list(run(Batch(operands, batch.batched, size, next(rest, None), batch.weight)))

    folded = [x[:cut].reshape(count, chunk, *x.shape[1:]) for x in arrays]
    first = compat.zeros_of(lambda xs: part([x[0] for x in xs], chunk), folded)
    sums = [s for s, p in zip(first, per_example, strict=True) if not p]

    def step(sums, xs):
        out = part(xs, chunk)
        new = [s for s, p in zip(out, per_example, strict=True) if not p]
        kept = [s for s, p in zip(out, per_example, strict=True) if p]
        return [a + b for a, b in zip(sums, new, strict=True)], kept

    sums, kept = jax.lax.scan(step, sums, folded)
    kept = [k.reshape(cut, *k.shape[2:]) for k in kept]
    sums, kept = iter(sums), iter(kept)
    out = [next(kept) if p else next(sums) for p in per_example]
    if cut < batch.size:
        tail = part([x[cut:] for x in arrays], batch.size - cut)
        out = [jnp.concatenate([a, b]) if p else a + b for a, b, p in zip(out, tail, per_example, strict=True)]
    return out


# ---------------------------------------------------------------------------------------- routes


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to some reductions, from the batched operands.

    ``run`` takes a `Batch` of at most ``chunk`` examples and returns one result per reduction in ``serves``.
    For `explain`: ``flops`` is its arithmetic for the whole batch, what the plain gradient computes included, and
    ``bytes`` the memory that it holds at once beyond its operands and results.
    """

    name: str
    serves: tuple[Any, ...]
    run: Callable[[Batch], Sequence[jax.Array]]
    chunk: int
    flops: float = 0.0
    bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Budget:
    """For how many examples, and in how much memory, routes are to be found."""

    size: int
    chunk_bytes: int
    most: int  # examples in one chunk

    def chunk(self, bytes_per_example: float) -> int:
        """How many examples fit, one at least; a divisor of the batch where one is near."""
        fit = int(max(1, min(self.size, self.most, self.chunk_bytes // max(bytes_per_example, 1))))
        return next((c for c in range(fit, fit // 2, -1) if self.size % c == 0), fit)


# ---------------------------------------------------------------------------------------- terms


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a leaf's per-example gradient; subclasses know how to form and how to reduce it."""

    operands: tuple[Any, ...]  # atoms of the scope
    prepare: Callable[..., tuple[jax.Array, ...]]
    moves: tuple[Move, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the prepared operands, for one example
    rule: str
    source: str
    why: str = ""
    patches: bool = False  # preparing makes the operands many times larger: never for the whole batch

    # What a subclass provides: --------------------------------------------------------------

    def form(self, *prepared: jax.Array) -> jax.Array:
        """The gradient of one example before the moves."""
        raise NotImplementedError

    def routes(self, reductions: Sequence[Any], budget: Budget) -> list[Route]:
        """Ways that are better than forming the gradient; reductions that none serves are formed."""
        return []

    def stack(self, operands, axes, length: int) -> Term:
        """The term of all layers, where the operands on an axis have gained a leading layer axis."""
        raise NotImplementedError

    def sum_over(self, operands, axes, length: int) -> Term | None:
        """The term summed over a loop, its operands on an axis stacked over the steps; None: no better way."""
        return None

    def scaled(self, factor: Callable[..., jax.Array], extra: tuple[Any, ...]) -> Term:
        """The term times ``factor(*extra operands)``, a scalar: into the last prepared operand, by linearity."""
        count = len(self.operands)

        def prepare(*operands):
            *first, last = self.prepare(*operands[:count])
            return (*first, last * factor(*operands[count:]).astype(last.dtype))

        return dataclasses.replace(self, operands=self.operands + extra, prepare=prepare)

    def tokens(self) -> int:
        """At how many positions one example uses the leaf through this term."""
        return 1

    def plain_flops(self, size: int) -> float:
        """The arithmetic by which the plain gradient sums this term over ``size`` examples."""
        return size * self.form_bytes / 4

    def token_batch(self, prepared: Batch, scale: int) -> tuple[Term, Batch]:
        """A term and batch in which every position is an example of its own, its gradient times ``scale``."""
        raise NotImplementedError

    @property
    def reason(self) -> str:
        """Why this rule serves it, for `explain`."""
        return self.why

    # What all share: ------------------------------------------------------------------------

    def example(self, *operands):
        return moved(self.moves, self.form(*self.prepare(*operands)))

    @property
    def isometric(self) -> bool:
        return all(m.isometric for m in self.moves)

    def shapes_before_moves(self) -> list[tuple[int, ...]]:
        """The shape that each move is given."""
        shapes, g = [], jax.eval_shape(self.form, *self.shapes)
        for move in self.moves:
            shapes.append(g.shape)
            g = jax.eval_shape(move, g)
        return shapes

    @property
    def form_bytes(self) -> int:
        """Memory that forming one example's gradient takes."""
        return 4 * size_of(jax.eval_shape(self.form, *self.shapes).shape)

    def move(self, move: Move) -> Term:
        return dataclasses.replace(self, moves=(*self.moves, move))

    def with_operands(self, operands) -> Term:
        return dataclasses.replace(self, operands=tuple(operands))


def mapped(fn: Callable, axes: Sequence[int | None], length: int) -> Callable:
    """``fn`` over a leading axis of the operands that have one; results stacked, ``length`` long."""

    def run(*operands):
        if all(a is None for a in axes):
            return tuple(jnp.broadcast_to(x[None], (length, *x.shape)) for x in fn(*operands))
        return jax.vmap(fn, in_axes=tuple(axes))(*operands)

    return run


def shape_of(prepare: Callable, avals) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.eval_shape(prepare, *avals))


def size_of(shape) -> int:
    return int(np.prod(shape, dtype=np.int64))


def formed_route(form: Callable[..., jax.Array], reductions, bytes_each: float, budget: Budget, flops=0.0) -> Route:
    """The last resort: form the gradients of a few examples, reduce them, drop them. Exact for everything."""

    def run(batch: Batch):
        g = batch.vmap(form)
        return [r.of(g, batch.mask) * batch.weight if isinstance(r, Mean) else r.of(g, batch.mask) for r in reductions]

    chunk = budget.size if any(isinstance(r, Stack) for r in reductions) else budget.chunk(bytes_each)
    sums = sum(isinstance(r, Mean) for r in reductions)
    cost = flops + 2.0 * max(sums, 1) * budget.size * bytes_each / 4
    return Route(_in_chunks_of(chunk, budget.size), tuple(reductions), run, chunk, cost, chunk * bytes_each)


def _in_chunks_of(chunk: int, size: int) -> str:
    if chunk >= size:
        return "formed at once"
    return f"formed {chunk} example{'s' * (chunk > 1)} at a time"
