"""From the cut to numbers: the reductions of every leaf, under one vmap, and how parts of a batch merge."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import compat
from .reductions import First, Late, Mean, Reduction
from .rules.base import Batch, Budget, Term
from .surgery import Layers, Leaf, Reduced, Settings, make_leaf, open_scope, resolve
from .terms import covered, execute, moved_behind, spread, take_late
from .trace import Problem, example_jaxpr

# What is asked of every parameter leaf.
Asked = Sequence[tuple[Reduction, ...]]


class Results(NamedTuple):
    """What a batch, or a part of one, amounts to."""

    losses: jax.Array  # [B]
    aux: Any  # stacked on axis 0
    leaves: list[list[jax.Array]]  # per parameter leaf, one result for each reduction that is asked of it


def default_budget(size: int, chunk_bytes: int | None) -> Budget:
    """How many per-example gradients may exist at once.

    On a CPU a chunk that stays in cache is also the fastest (measured: 4 to 8 MiB, at most 8 examples); on an
    accelerator large chunks keep it busy.
    """
    cpu = jax.default_backend() == "cpu"
    return Budget(size, chunk_bytes or (8 << 20 if cpu else 256 << 20), 8 if cpu else 64)


# ---------------------------------------------------------------------------------------- one leaf, under vmap


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Reduces leaves where `Scope.evaluate` stands: seen from there, for one example; in truth, for the batch."""

    asked: dict[int, tuple[Reduction, ...]]  # id of a leaf, or of one layer of it -> what is asked of it
    budget: Budget
    alive: jax.Array  # does this example count? Batched, so that the batching rule below is always asked for
    mask: jax.Array | None  # which examples count; None: all
    weight: Any  # what one example counts for in a mean; a number, or with a mask an array
    share: Any  # what this part's examples that count amount to, of all

    def __call__(self, leaf: Leaf, read: Callable) -> tuple[jax.Array, ...]:
        reductions = self.asked[id(leaf)]
        results = [self._piece(piece, reductions, read) for piece in leaf.pieces]
        return tuple(self._whole(leaf, r, [part[k] for part in results]) for k, r in enumerate(reductions))

    def _whole(self, leaf: Leaf, reduction: Reduction, parts):
        """The leaf's result from those of its pieces, which lie on disjoint coordinates."""
        nothing = reduction.nothing(leaf.shape, leaf.dtype, self.budget.size)
        if not reduction.coordinatewise:
            return functools.reduce(operator.add, parts) if parts else nothing
        lead = reduction.lead
        placed = [moved_behind(lead, p.moves, part) for p, part in zip(leaf.pieces, parts, strict=True)]
        value = functools.reduce(operator.add, placed) if placed else nothing
        if parts and not any(m.fills for p in leaf.pieces for m in p.moves):
            return value
        mask = self.mask if self.mask is None else jnp.repeat(self.mask, leaf.tokens)
        zeros = reduction.of_zeros(leaf.dtype, self.budget.size * leaf.tokens, mask, self.share)
        if zeros is None:
            return value
        touched = jnp.zeros(leaf.shape, bool)
        for p, part in zip(leaf.pieces, parts, strict=True):
            touched = touched | covered(lead, p.moves, part)
        return jnp.where(touched, value, spread(zeros, value))

    def _piece(self, piece: Term, reductions, read):
        if isinstance(piece, Layers):
            stacked = zip(reductions, read(piece.operands[0]), strict=True)  # layers first
            return [jnp.moveaxis(x, 0, len(r.lead)) if r.coordinatewise else jnp.sum(x, axis=0) for r, x in stacked]
        return self._over_batch(piece, reductions, [read(a) for a in piece.operands])

    def _over_batch(self, term: Term, reductions, operands):
        """One function of one example, for `jax.vmap`; its batching rule is where the batch is reduced."""
        masked = self.mask is not None
        given = (self.weight,) if masked else ()

        def run(size, batched, mask, values):
            weight, values = (values[0], values[1:]) if masked else (self.weight, values)
            batch = Batch(values, batched[len(given) :], size, mask if masked else None, weight)
            return execute(term, reductions, batch, dataclasses.replace(self.budget, size=size))

        @jax.custom_batching.custom_vmap
        def reduce(alive, *values):  # never run, but traced, for what it returns
            size = self.budget.size if any(r.whole for r in reductions) else 1

            def repeated(x):
                return jnp.broadcast_to(x[None], (size, *x.shape))

            values = (*values[: len(given)], *map(repeated, values[len(given) :]))
            out = run(size, (True,) * len(values), repeated(alive), values)
            return [o[0] if r.per_example else o for r, o in zip(reductions, out, strict=True)]

        @reduce.def_vmap
        def _(size, in_batched, alive, *values):
            out = run(size, tuple(in_batched[1:]), alive, values)
            return out, [r.per_example for r in reductions]

        return reduce(self.alive, *given, *operands)


# ---------------------------------------------------------------------------------------- the whole


class Plan:
    """The cut of one problem, ready to run on any batch of examples of the same shapes."""

    def __init__(self, problem: Problem, budget: Budget, tokens: bool):
        jaxpr, consts, (value, aux, _) = example_jaxpr(problem)
        settings = Settings(tokens, budget.size, budget.chunk_bytes)
        inputs = [False] * len(problem.params) + [True] * len(problem.examples)
        self.scope = open_scope(jaxpr, consts, inputs, settings)
        self.problem, self.budget = problem, budget
        self.aux_tree = jax.tree.structure(aux)
        count = 1 + self.aux_tree.num_leaves
        self.outputs, gradients = list(jaxpr.outvars[:count]), list(jaxpr.outvars[count:])
        self.scope.gradients.update(v for v in gradients if not self.scope.is_zero(v))

        def leaves():
            return [
                make_leaf(self.scope, resolve(self.scope, v), p.shape, p.dtype)
                for v, p in zip(gradients, problem.params, strict=True)
            ]

        self.leaves = leaves()
        # The first pass tells which values are needed anyway; the second may cut before them.
        settings.tails = True
        self.leaves = leaves()

    def run(self, params, examples, mask: jax.Array | None, weight: Any, asked: Asked) -> Results:
        """The results of these examples; each counts for ``weight`` in a mean."""
        size = examples[0].shape[0]
        share = weight * (size if mask is None else jnp.sum(mask))
        budget = dataclasses.replace(self.budget, size=size)
        first = first_pass(asked)
        by_leaf = {i: r for leaf, mine in zip(self.leaves, first, strict=True) for i, r in _inside(leaf, mine)}
        reduced = [leaf for leaf, reductions in zip(self.leaves, first, strict=True) if reductions]
        late = [any(isinstance(r, Late) for r in reductions) for reductions in asked]
        kept = [a for leaf, yes in zip(self.leaves, late, strict=True) if yes for t in leaf.terms for a in t.operands]
        # What does not differ between examples is kept once.
        kept_axes = [0 if self.scope.varies(a) else None for a in kept]

        def one(alive, example):
            reducer = Reducer(by_leaf, budget, alive, mask, weight, share)
            wanted = [*self.outputs, *(Reduced(leaf) for leaf in reduced), *kept]
            out = iter(self.scope.evaluate(wanted, [*params, *example], reducer))
            return [next(out) for _ in self.outputs], [next(out) for _ in reduced], list(out)

        axes = [tuple(0 if r.per_example else None for r in reductions) for reductions in first if reductions]
        alive = jnp.ones(size, bool) if mask is None else mask
        (losses, *aux), found, values = jax.vmap(one, out_axes=(0, axes, kept_axes))(alive, examples)
        found = iter(found)
        results: list[dict[Reduction, Any]] = [
            dict(zip(reductions, next(found) if reductions else (), strict=True)) for reductions in first
        ]
        if any(late):
            operands = iter([(x, axis == 0) for x, axis in zip(values, kept_axes, strict=True)])
            terms = [
                [(t, [next(operands) for _ in t.operands]) for t in leaf.terms] if yes else []
                for leaf, yes in zip(self.leaves, late, strict=True)
            ]
            batch = Batch((), (), size, mask)
            take = lambda k, r, context: take_late(terms[k], r, context, self.problem.params[k], batch, budget)
            add_late(results, asked, weight, self.problem, take)
        leaves = [[leaf[r] for r in reductions] for leaf, reductions in zip(results, asked, strict=True)]
        return Results(losses, jax.tree.unflatten(self.aux_tree, aux), leaves)

    @property
    def tokens(self) -> list[int]:
        return [leaf.tokens for leaf in self.leaves]


def _inside(leaf: Leaf, reductions):
    """The leaf and the layers in it, by their ids, with what is asked of them."""
    yield id(leaf), reductions
    for piece in leaf.pieces:
        if isinstance(piece, Layers):
            assert piece.body is not None
            yield from _inside(piece.body, reductions)


def first_pass(asked: Asked) -> list[tuple[Reduction, ...]]:
    """What is asked in the backward pass: all but the late reductions, and what these need."""
    return [tuple(dict.fromkeys(f for r in leaf for f in (r.needs if isinstance(r, Late) else (r,)))) for leaf in asked]


def add_late(results: list[dict], asked: Asked, weight, problem: Problem, take: Callable) -> None:
    """Add the late reductions, which ``take(leaf, reduction, context)`` computes, to those of the first pass."""
    for reduction in dict.fromkeys(r for leaf in asked for r in leaf if isinstance(r, Late)):
        mine = [k for k, leaf in enumerate(asked) if reduction in leaf]
        needed = {n: [results[k][n] for k in mine] for n in reduction.needs}
        context = reduction.context(First(needed, weight, problem))
        for k, given in zip(mine, context, strict=True):
            results[k][reduction] = take(k, reduction, given)


class Twin:
    """The obviously correct way: stack every per-example gradient, then reduce."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.tokens = [1] * len(problem.params)

    def run(self, params, examples, mask, weight, asked: Asked) -> Results:
        losses, aux, gradients = jax.vmap(self.problem.one, in_axes=(None, 0))(list(params), list(examples))
        results = [
            {r: r.of(g, mask) * weight if isinstance(r, Mean) else r.of(g, mask) for r in reductions}
            for g, reductions in zip(gradients, first_pass(asked), strict=True)
        ]
        add_late(results, asked, weight, self.problem, lambda k, r, context: r.of(gradients[k], mask, context))
        return Results(losses, aux, [[x[r] for r in leaf] for x, leaf in zip(results, asked, strict=True)])


def run_in_microbatches(run: Callable, examples, mask, asked: Asked, size: int, most: int) -> Results:
    """``run`` on at most ``most`` examples at a time; results merge, or are laid one after the other."""
    count = -(-size // most)
    each = -(-size // count)  # parts of equal size, filled up with examples that do not count
    missing = count * each - size
    if missing:
        mask = jnp.ones(size, bool) if mask is None else mask
        mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
        examples = [jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)]) for x in examples]

    def fold(x):
        # Every count-th example: where the batch is spread over devices, each device then has some of every part.
        return x.reshape(each, count, *x.shape[1:]).swapaxes(0, 1)

    def unfold(x):
        return x.swapaxes(0, 1).reshape(count * each, *x.shape[2:])[:size]

    folded = ([fold(x) for x in examples], None if mask is None else fold(mask))
    reductions = [r for leaf in asked for r in leaf]
    merging = [r for r in reductions if not r.per_example]

    def part(given) -> tuple[list[jax.Array], Any]:
        """What merges, and what is laid one after the other."""
        out: Results = run(*given)
        flat = list(zip(reductions, (x for leaf in out.leaves for x in leaf), strict=True))
        return [x for r, x in flat if not r.per_example], (out.losses, out.aux, [x for r, x in flat if r.per_example])

    def step(merged, given):
        new, kept = part(given)
        return [r.merge(a, b) for r, a, b in zip(merging, merged, new, strict=True)], kept

    start = compat.zeros_of(lambda xs: part(jax.tree.map(lambda x: x[0], xs))[0], folded)
    merged, stacked = jax.lax.scan(step, start, folded)
    losses, aux, kept = jax.tree.map(unfold, stacked)
    merged, kept = iter(merged), iter(kept)
    leaves = [[next(kept) if r.per_example else next(merged) for r in leaf] for leaf in asked]
    return Results(losses, aux, leaves)
