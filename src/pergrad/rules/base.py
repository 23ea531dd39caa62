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
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..kernels.sharding import Axes, can_be_shared_out, on_each_device
from ..reductions import MaxAbs, Mean, Reduction, Stack, accumulator

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
    def counted(self) -> Any:
        """How many examples of this part count."""
        return self.size if self.mask is None else jnp.sum(self.mask)

    @property
    def share(self) -> Any:
        """What they amount to, of all."""
        return self.weight * self.counted


def in_chunks(
    run: Callable[[Batch], Sequence[jax.Array]], batch: Batch, chunk: int, reductions: Sequence[Reduction]
) -> list[jax.Array]:
    """``run`` on at most ``chunk`` examples at a time: results merge, or are laid one after the other."""
    if chunk >= batch.size:
        return list(run(batch))
    return shared_out(lambda some: _loop(run, some, chunk, reductions), batch, reductions)


def shared_out(
    run: Callable[[Batch], Sequence[jax.Array]],
    batch: Batch,
    reductions: Sequence[Reduction],
    operands: Sequence[Axes] | None = None,
    form: Axes = (...,),
) -> list[jax.Array]:
    """``run``, by every device for the examples that it holds.

    ``operands`` may name those axes of one example's operands of which a device may hold a part, and ``form`` the same
    axes of the gradient; what is not coordinatewise must add over such parts.
    """
    if not (any(batch.batched) and can_be_shared_out(batch.size)):
        return list(run(batch))
    batched, masked, weight = batch.batched, batch.mask is not None, batch.weight
    weighted = not isinstance(weight, float | int)
    named = operands or [(...,)] * len(batched)
    args = [*batch.operands, *[batch.mask] * masked, *[weight] * weighted]
    axes = (
        [("b", *own) if b else own for own, b in zip(named, batched, strict=True)] + [("b",)] * masked + [()] * weighted
    )

    def local(*args):
        given = iter(args)
        mine = tuple(next(given) for _ in batched)
        size = mine[batched.index(True)].shape[0]
        mask = next(given) if masked else None
        return run(Batch(mine, batched, size, mask, next(given) if weighted else weight))

    results = [
        ("b",) * r.per_example + ("",) * len(r.lead) + (form if r.coordinatewise else (...,)) for r in reductions
    ]
    return on_each_device(local, args, axes, results, [_across_devices(r) for r in reductions])


def _across_devices(reduction: Reduction) -> Callable[[jax.Array, tuple[str, ...]], jax.Array]:
    """`Reduction.merge`, for the parts that lie along axes of a mesh."""
    if type(reduction).merge is Reduction.merge:
        return jax.lax.psum
    if isinstance(reduction, MaxAbs):
        return jax.lax.pmax
    return lambda part, axes: functools.reduce(reduction.merge, jax.lax.all_gather(part, axes))


def _loop(
    run: Callable[[Batch], Sequence[jax.Array]], batch: Batch, chunk: int, reductions: Sequence[Reduction]
) -> list[jax.Array]:
    chunk = near_divisor(batch.size, min(chunk, batch.size))
    if chunk == batch.size:
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
    start = [s for s, r in zip(first, reductions, strict=True) if not r.per_example]

    def step(merged, xs):
        out = list(zip(part(xs, chunk), reductions, strict=True))
        new = [(x, r) for x, r in out if not r.per_example]
        return [r.merge(a, b) for a, (b, r) in zip(merged, new, strict=True)], [x for x, r in out if r.per_example]

    merged, kept = jax.lax.scan(step, start, folded)
    kept = [k.reshape(cut, *k.shape[2:]) for k in kept]
    merged, kept = iter(merged), iter(kept)
    out = [next(kept) if r.per_example else next(merged) for r in reductions]
    if cut < batch.size:
        tail = part([x[cut:] for x in arrays], batch.size - cut)
        out = [
            jnp.concatenate([a, b]) if r.per_example else r.merge(a, b)
            for a, b, r in zip(out, tail, reductions, strict=True)
        ]
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
        return near_divisor(
            self.size, int(max(1, min(self.size, self.most, self.chunk_bytes // max(bytes_per_example, 1))))
        )


def near_divisor(size: int, most: int) -> int:
    """A divisor of ``size`` not much below ``most``, or ``most``."""
    return next((c for c in range(most, most // 2, -1) if size % c == 0), most)


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
        """Ways to all of these reductions; the last of them mostly forms the gradient of a few examples at a time."""
        raise NotImplementedError

    def whole_routes(self, reductions: Sequence[Any], budget: Budget) -> list[Route]:
        """The same for reductions that need all examples at once."""
        return [whole_route(self, reductions, budget)]

    columns: ClassVar[int] = 0  # on the last axis of `form`, if some of them can be formed alone

    def form_columns(self, start, width: int, *prepared: jax.Array) -> jax.Array:
        """The ``width`` columns of `form` from ``start`` on."""
        raise NotImplementedError

    def dot(self, v: jax.Array, *prepared: jax.Array) -> jax.Array:
        """⟨g, v⟩ of one example, before the moves."""
        g = self.form(*prepared)
        return jnp.sum(jnp.real(g.astype(accumulator(g.dtype)) * jnp.conj(v)))

    @property
    def dot_bytes(self) -> float:
        """Memory that `dot` takes for one example, or `form_columns` beyond the columns."""
        return self.form_bytes

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

    def weighted(self) -> Term:
        """The term times one more operand, a number for each example, without rounding it."""

        def prepare(*operands):
            *first, last = self.prepare(*operands[:-1])
            return (*first, last.astype(accumulator(last.dtype)) * operands[-1])

        *first, last = self.shapes
        shapes = (*first, jax.ShapeDtypeStruct(last.shape, accumulator(last.dtype)))
        return dataclasses.replace(self, operands=(*self.operands, None), prepare=prepare, shapes=shapes)

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

    def formed(self) -> jax.ShapeDtypeStruct:
        """What `form` returns, abstractly."""
        return jax.eval_shape(self.form, *self.shapes)

    def shapes_before_moves(self) -> list[tuple[int, ...]]:
        """The shape that each move is given."""
        shapes, g = [], self.formed()
        for move in self.moves:
            shapes.append(g.shape)
            g = jax.eval_shape(move, g)
        return shapes

    @property
    def form_bytes(self) -> int:
        """Memory that forming one example's gradient takes."""
        return 4 * size_of(self.formed().shape)

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


def formed_route(
    form: Callable[..., jax.Array],
    reductions,
    bytes_each: float,
    budget: Budget,
    flops=0.0,
    operands: Sequence[Axes] | None = None,
    axes: Axes = (...,),
) -> Route:
    """The last resort: form the gradients of a few examples, reduce them, drop them. Exact for everything.

    ``operands`` and ``axes`` may name axes along which devices can share the gradient, as in `shared_out`.
    """
    chunk = budget.size if any(isinstance(r, Stack) for r in reductions) else budget.chunk(bytes_each)

    def some(batch: Batch):
        g = batch.vmap(form)
        return [r.of(g, batch.mask) * batch.weight if isinstance(r, Mean) else r.of(g, batch.mask) for r in reductions]

    def run(batch: Batch):
        return shared_out(lambda mine: _loop(some, mine, chunk, reductions), batch, reductions, operands, axes)

    sums = sum(isinstance(r, Mean) for r in reductions)
    cost = flops + 2.0 * max(sums, 1) * budget.size * bytes_each / 4
    return Route(_in_chunks_of(chunk, budget.size), tuple(reductions), run, budget.size, cost, chunk * bytes_each)


def _in_chunks_of(chunk: int, size: int) -> str:
    if chunk >= size:
        return "formed at once"
    return f"formed {chunk} example{'s' * (chunk > 1)} at a time"


# ---------------------------------------------------------------------------------------- all examples, in tiles


class Tiles(NamedTuple):
    """How to form a part of a gradient: some columns of its last axis, or else some of its coordinates in line."""

    count: int  # of columns or coordinates
    shape: tuple[int, ...]  # of the gradient
    form: Callable[..., jax.Array]  # (start, width, *operands) -> the part of one example's gradient
    bytes_each: float  # memory that takes for one example, beyond the part
    again: bool  # is the whole gradient formed for each part?


def tiles_of(term: Term, after_moves: bool, columns: bool = True) -> Tiles:
    """``columns`` may be False where several terms agree on coordinates only."""
    whole = term.example if after_moves else (lambda *raw: term.form(*term.prepare(*raw)))
    g = term.formed()
    shape = (jax.eval_shape(lambda g: moved(term.moves, g), g) if after_moves else g).shape
    if columns and term.columns and (not after_moves or _moves_of_columns(term, 1) is not None):

        def some(start, width, *raw):
            g = term.form_columns(start, width, *term.prepare(*raw))
            return moved(_moves_of_columns(term, width) or (), g) if after_moves else g

        return Tiles(shape[-1], shape, some, term.dot_bytes, False)

    def cut(start, width, *raw):
        g = whole(*raw).reshape(-1)
        return g if width == g.size else jax.lax.dynamic_slice_in_dim(g, start, width, 0)

    return Tiles(size_of(shape), shape, cut, term.form_bytes if after_moves else term.dot_bytes, True)


def _moves_of_columns(term: Term, width: int) -> list[Move] | None:
    """The moves of a term as they are for some columns of its last axis; None: they do not leave that axis alone."""
    out = []
    for move, shape in zip(term.moves, term.shapes_before_moves(), strict=True):
        if move.name == "reshape" and shape and move.params[0] and move.params[0][-1] == shape[-1]:
            out.append(reshaped((*move.params[0][:-1], width)))
        elif move.name == "transpose" and move.params[0][-1] == len(shape) - 1:
            out.append(move)
        elif move.name != "same":
            return None
    return out


def in_tiles(form: Callable, tiles: Tiles, width: int, reductions: Sequence[Any], mask) -> list[jax.Array]:
    """Reductions of ``form(start, width)``, the gradients of all examples in a tile; results are laid side by side, or add."""

    def tile(start, width):
        g = form(start, width)
        return [r.of(g, mask) for r in reductions]

    if width >= tiles.count:
        out = tile(0, tiles.count)
    else:
        full = tiles.count // width
        added = [r for r in reductions if not r.coordinatewise]
        start = compat.zeros_of(lambda: [r.of(form(0, width), mask) for r in added]) if added else []

        def step(sums, start):
            out = list(zip(tile(start, width), reductions, strict=True))
            new = [x for x, r in out if not r.coordinatewise]
            return [a + b for a, b in zip(sums, new, strict=True)], [x for x, r in out if r.coordinatewise]

        sums, laid = jax.lax.scan(step, start, width * jnp.arange(full))
        laid = [jnp.moveaxis(x, 0, -2) for x in laid]
        laid = iter([x.reshape(*x.shape[:-2], full * width) for x in laid])
        sums = iter(sums)
        out = [next(laid) if r.coordinatewise else next(sums) for r in reductions]
        if rest := tiles.count - full * width:
            out = [
                jnp.concatenate([a, b], axis=-1) if r.coordinatewise else a + b
                for a, b, r in zip(out, tile(full * width, rest), reductions, strict=True)
            ]
    return [x.reshape(*r.lead, *tiles.shape) if r.coordinatewise else x for x, r in zip(out, reductions, strict=True)]


def tile_width(tiles: Tiles, examples: int, budget: Budget) -> int:
    """How many columns of all examples fit, with a sorted copy; one at least."""
    column_bytes = 8.0 * examples * size_of(tiles.shape) / max(tiles.count, 1)
    return int(max(1, min(tiles.count, budget.chunk_bytes // max(column_bytes, 1))))


def whole_route(term: Term, reductions: Sequence[Any], budget: Budget, after_moves: bool = False) -> Route:
    """Reductions that need all examples: form a few columns of all their gradients, reduce them, drop them."""
    b, tiles = budget.size, tiles_of(term, after_moves)
    width = tile_width(tiles, b, budget)
    examples = budget.chunk(tiles.bytes_each) if tiles.bytes_each else b

    def run(batch: Batch):
        def form(start, width):
            part = lambda some: [some.vmap(lambda *raw: tiles.form(start, width, *raw))]
            return in_chunks(part, batch, examples, [Stack()])[0]

        return in_tiles(form, tiles, width, reductions, batch.mask)

    parts = -(-tiles.count // width)
    name = f"formed {width} column{'s' * (width > 1)} at a time"
    if parts <= 1:
        name = _in_chunks_of(b, b)
    elif tiles.again:
        name = f"formed {parts} times, reduced in {parts} parts"
    size = b * size_of(tiles.shape)
    flops = term.plain_flops(b) * (parts if tiles.again else 1) + 2.0 * len(reductions) * size
    held = 8.0 * size * width / max(tiles.count, 1) + examples * tiles.bytes_each
    return Route(name, tuple(reductions), run, b, flops, held)


def routes_for(term: Term, reductions: Sequence[Any], budget: Budget) -> list[Route]:
    """The routes to all of these reductions."""
    # Moves that repeat or drop coordinates change what is summed over them: take that after the moves.
    after = [] if term.isometric else [r for r in reductions if not r.coordinatewise]
    before = [r for r in reductions if r not in after]
    parts = [r for r in before if not r.whole]
    routes = term.routes(parts, budget) if parts else []
    if whole := [r for r in before if r.whole]:
        routes = [*routes, *term.whole_routes(whole, budget)]
    if parts := [r for r in after if not r.whole]:
        routes = [*routes, formed_route(term.example, parts, term.form_bytes, budget)]
    if whole := [r for r in after if r.whole]:
        routes = [*routes, whole_route(term, whole, budget, after_moves=True)]
    return routes
