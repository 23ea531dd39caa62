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
from .rules.base import Batch, Budget, Term, formed_route, in_chunks, moved, size_of
from .statistics import Mean, accumulator
from .surgery import Layers, Leaf, Reduced, Settings, Tokens, make_leaf, open_scope, resolve
from .trace import Problem, example_jaxpr


class Results(NamedTuple):
    """What a batch, or a part of one, amounts to."""

    losses: jax.Array  # [B]
    aux: Any  # stacked on axis 0
    leaves: list[list[jax.Array]]  # per parameter leaf, one result per reduction


def default_budget(size: int, chunk_bytes: int | None) -> Budget:
    """How many per-example gradients may exist at once.

    On a CPU a chunk that stays in cache is also the fastest (measured: 4 to 8 MiB, at most 8 examples); on an
    accelerator large chunks keep it busy.
    """
    cpu = jax.default_backend() == "cpu"
    return Budget(size, chunk_bytes or (8 << 20 if cpu else 256 << 20), 8 if cpu else 64)


# ---------------------------------------------------------------------------------------- one term, all examples


def execute(term: Term, reductions: Sequence[Any], batch: Batch, budget: Budget) -> list[jax.Array]:
    """The reductions of one term, by the routes that it offers."""
    if isinstance(term, Tokens):
        return _execute_tokens(term, reductions, batch, budget)
    done = {}
    numbers = [] if term.isometric else [r for r in reductions if not r.coordinatewise]
    routes = term.routes([r for r in reductions if r not in numbers], budget)
    if numbers:  # moves that repeat or drop coordinates change a norm: take it after them
        routes = [*routes, formed_route(term.example, numbers, term.form_bytes, budget)]
    for route in routes:
        out = in_chunks(route.run, batch, route.chunk, [r.per_example for r in route.serves])
        done.update(zip(route.serves, out, strict=True))
    return [done[r].astype(accumulator(done[r].dtype)) for r in reductions]


def _execute_tokens(group: Tokens, reductions: Sequence[Any], batch: Batch, budget: Budget) -> list[jax.Array]:
    """Means over tokens. A token's gradient is T times what its position contributes, so that the mean over the T
    tokens of an example is the example's gradient.
    """
    tokens = group.tokens()
    totals = []
    given = list(zip(batch.operands, batch.batched, strict=True))
    for term in group.terms:
        mine, given = given[: len(term.operands)], given[len(term.operands) :]
        operands, batched = zip(*mine, strict=True)

        def run(part: Batch, term=term):
            one, each = term.token_batch(part.prepared(term.prepare), tokens)
            each = dataclasses.replace(each, weight=each.weight / tokens)
            means = execute(one, reductions, each, dataclasses.replace(budget, size=each.size))
            return [placed(term, r, m, each.share) for r, m in zip(reductions, means, strict=True)]

        prepared_bytes = sum(4 * size_of(a.shape) for a in term.shapes)
        chunk = budget.chunk(prepared_bytes) if term.patches else budget.size
        whole = batch.having(operands, batched)
        totals.append(in_chunks(run, whole, chunk, [False] * len(reductions)))
    return [functools.reduce(operator.add, parts) for parts in zip(*totals, strict=True)]


def placed(term: Term, mean: Mean, result: jax.Array, share: Any) -> jax.Array:
    """The moves of a term, made on the mean over its coordinates; where they fill in zeros, φ is φ(0)."""
    out = moved(term.moves, result)
    at_zero = mean.phi.at_zero(out.dtype)
    if at_zero == 0 or not any(m.fills for m in term.moves):
        return out
    return jnp.where(covered(term, result), out, jnp.asarray(at_zero, out.dtype) * share)


def covered(term: Term, result) -> jax.Array:
    """Which coordinates of the leaf a term's moves put something into."""
    return moved(term.moves, jnp.ones(jnp.shape(result), jnp.int8)) > 0


# ---------------------------------------------------------------------------------------- one leaf, under vmap


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Reduces leaves where `Scope.evaluate` stands: seen from there, for one example; in truth, for the batch."""

    reductions: tuple[Any, ...]
    budget: Budget
    alive: jax.Array  # does this example count? Batched, so that the batching rule below is always asked for
    masked: bool  # can it be False?
    weight: Any  # what one example counts for in a mean; a number, or with a mask an array
    share: Any  # what this part's examples that count amount to, of all

    def __call__(self, leaf: Leaf, read: Callable) -> tuple[jax.Array, ...]:
        results = [self._piece(piece, read) for piece in leaf.pieces]
        return tuple(self._whole(leaf, r, [part[k] for part in results]) for k, r in enumerate(self.reductions))

    def _whole(self, leaf: Leaf, reduction, parts):
        """The leaf's result from those of its pieces, which lie on disjoint coordinates."""
        dtype = reduction.dtype(leaf.dtype)
        if not reduction.coordinatewise:
            return functools.reduce(operator.add, parts) if parts else jnp.zeros((), dtype)
        placed = [moved(p.moves, part) for p, part in zip(leaf.pieces, parts, strict=True)]
        value = functools.reduce(operator.add, placed) if placed else jnp.zeros(leaf.shape, dtype)
        at_zero = reduction.phi.at_zero(accumulator(leaf.dtype)) if isinstance(reduction, Mean) else 0.0
        if at_zero == 0 or not (len(parts) == 0 or any(m.fills for p in leaf.pieces for m in p.moves)):
            return value
        touched = jnp.zeros(leaf.shape, bool)
        for p, part in zip(leaf.pieces, parts, strict=True):
            touched = touched | covered(p, part)
        return jnp.where(touched, value, jnp.asarray(at_zero, value.dtype) * self.share)

    def _piece(self, piece: Term, read):
        if isinstance(piece, Layers):
            stacked = read(piece.operands[0])
            return [
                r if red.coordinatewise else jnp.sum(r, axis=0) for red, r in zip(self.reductions, stacked, strict=True)
            ]
        return self._over_batch(piece, [read(a) for a in piece.operands])

    def _over_batch(self, term: Term, operands):
        """One function of one example, for `jax.vmap`; its batching rule is where the batch is reduced."""
        given = (self.weight,) if self.masked else ()

        def run(size, batched, mask, values):
            weight, values = (values[0], values[1:]) if self.masked else (self.weight, values)
            batch = Batch(values, batched[len(given) :], size, mask if self.masked else None, weight)
            return execute(term, self.reductions, batch, dataclasses.replace(self.budget, size=size))

        @jax.custom_batching.custom_vmap
        def reduce(alive, *values):
            values = (*values[: len(given)], *(v[None] for v in values[len(given) :]))
            out = run(1, (True,) * len(values), alive[None], values)
            return [o[0] if r.per_example else o for r, o in zip(self.reductions, out, strict=True)]

        @reduce.def_vmap
        def _(size, in_batched, alive, *values):
            out = run(size, tuple(in_batched[1:]), alive, values)
            return out, [r.per_example for r in self.reductions]

        return reduce(self.alive, *given, *operands)


# ---------------------------------------------------------------------------------------- the whole


class Plan:
    """The cut of one problem, ready to run on any batch of examples of the same shapes."""

    def __init__(self, problem: Problem, budget: Budget, tokens: bool):
        jaxpr, consts, (value, aux, _) = example_jaxpr(problem)
        settings = Settings(tokens, budget.size, budget.chunk_bytes)
        inputs = [False] * len(problem.params) + [True] * len(problem.examples)
        self.scope = open_scope(jaxpr, consts, inputs, settings)
        self.budget = budget
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

    def run(self, params, examples, mask: jax.Array | None, weight: Any, reductions: tuple[Any, ...]) -> Results:
        """The results of these examples; each counts for ``weight`` in a mean."""
        size = examples[0].shape[0]
        share = weight * (size if mask is None else jnp.sum(mask))
        wanted = [*self.outputs, *(Reduced(leaf) for leaf in self.leaves if reductions)]
        budget = dataclasses.replace(self.budget, size=size)

        def one(alive, example):
            reducer = Reducer(reductions, budget, alive, mask is not None, weight, share)
            out = self.scope.evaluate(wanted, [*params, *example], reducer)
            return out[: len(self.outputs)], out[len(self.outputs) :]

        axes = tuple(0 if r.per_example else None for r in reductions)
        alive = jnp.ones(size, bool) if mask is None else mask
        leaves = [axes] * (len(wanted) - len(self.outputs))
        (losses, *aux), leaves = jax.vmap(one, out_axes=(0, leaves))(alive, examples)
        return Results(losses, jax.tree.unflatten(self.aux_tree, aux), [list(leaf) for leaf in leaves])

    @property
    def tokens(self) -> list[int]:
        return [leaf.tokens for leaf in self.leaves]


class Twin:
    """The obviously correct way: stack every per-example gradient, then reduce."""

    def __init__(self, problem: Problem):
        self.one = problem.one
        self.tokens = [1] * len(problem.params)

    def run(self, params, examples, mask, weight, reductions) -> Results:
        losses, aux, gradients = jax.vmap(self.one, in_axes=(None, 0))(list(params), list(examples))
        leaves = [[(r.of(g, mask), isinstance(r, Mean)) for r in reductions] for g in gradients]
        return Results(losses, aux, [[x * weight if is_mean else x for x, is_mean in leaf] for leaf in leaves])


def run_in_microbatches(run: Callable, examples, mask, reductions, size: int, most: int) -> Results:
    """``run`` on at most ``most`` examples at a time; sums add, per-example results are laid one after the other."""
    count = -(-size // most)
    each = -(-size // count)  # parts of equal size, the last filled up with examples that do not count
    missing = count * each - size
    if missing:
        mask = jnp.ones(size, bool) if mask is None else mask
        mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
        examples = [jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)]) for x in examples]

    def fold(x):
        return x.reshape(count, each, *x.shape[1:])

    folded = ([fold(x) for x in examples], None if mask is None else fold(mask))
    first = compat.zeros_of(lambda xs: run([x[0] for x in xs[0]], None if mask is None else xs[1][0]).leaves, folded)
    sums = [[s for s, r in zip(leaf, reductions, strict=True) if not r.per_example] for leaf in first]

    def step(sums, part):
        out: Results = run(*part)
        kept = [[v for v, r in zip(leaf, reductions, strict=True) if r.per_example] for leaf in out.leaves]
        new = [[v for v, r in zip(leaf, reductions, strict=True) if not r.per_example] for leaf in out.leaves]
        return jax.tree.map(jnp.add, sums, new), (out.losses, out.aux, kept)

    sums, stacked = jax.lax.scan(step, sums, folded)
    losses, aux, kept = jax.tree.map(lambda x: x.reshape(count * each, *x.shape[2:])[:size], stacked)
    leaves = []
    for leaf_sums, leaf_kept in zip(sums, kept, strict=True):
        s, k = iter(leaf_sums), iter(leaf_kept)
        leaves.append([next(k) if r.per_example else next(s) for r in reductions])
    return Results(losses, aux, leaves)
