"""Reductions of one term for all examples: by the routes of its rule, over tokens, or after the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import compat
from .reductions import IDENTITY, Dot, Late, Mean, Reduction, Stack, WeightedMean, accumulator, keep
from .rules.base import (
    Batch,
    Budget,
    Route,
    Term,
    in_chunks,
    in_tiles,
    moved,
    routes_for,
    size_of,
    tile_width,
    tiles_of,
)
from .rules.embedding import Rows
from .surgery import Tokens


def execute(term: Term, reductions: Sequence[Any], batch: Batch, budget: Budget) -> list[jax.Array]:
    """The reductions of one term, by the routes that it offers."""
    if isinstance(term, Tokens):
        return _execute_tokens(term, reductions, batch, budget)
    done = {}
    for route in routes_for(term, reductions, budget):
        out = in_chunks(route.run, batch, route.chunk, route.serves)
        done.update(zip(route.serves, out, strict=True))
    return [_wide(done[r]) for r in reductions]


def _wide(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(accumulator(x.dtype))


def _execute_tokens(group: Tokens, reductions: Sequence[Any], batch: Batch, budget: Budget) -> list[jax.Array]:
    """Reductions over tokens. A token's gradient is T times what its position contributes, so that the mean over the T
    tokens of an example is the example's gradient.
    """
    # The tokens of several terms are no one batch of operands, and patches are never made for the whole batch.
    apart = len(group.terms) > 1 or any(t.patches for t in group.terms)
    whole = [r for r in reductions if r.whole and apart]
    done: dict[Reduction, jax.Array] = {}
    if rest := [r for r in reductions if r not in whole]:
        found = zip(*(_each_token(group, *part, rest, budget) for part in _parts(group, batch)), strict=True)
        done = {r: functools.reduce(r.merge, parts) for r, parts in zip(rest, found, strict=True)}
    if whole:
        done.update(zip(whole, _every_token(group, whole, batch, budget), strict=True))
    return [done[r] for r in reductions]


def _parts(group: Tokens, batch: Batch):
    """Each term, and the batch of its operands."""
    given = list(zip(batch.operands, batch.batched, strict=True))
    for term in group.terms:
        mine, given = given[: len(term.operands)], given[len(term.operands) :]
        yield term, batch.having(*zip(*mine, strict=True))


def _token_batch(group: Tokens, term: Term, batch: Batch) -> tuple[Term, Batch]:
    tokens = group.tokens()
    one, each = term.token_batch(batch.prepared(term.prepare), tokens)
    return one, dataclasses.replace(each, weight=each.weight / tokens)


def _each_token(group: Tokens, term: Term, batch: Batch, reductions: Sequence[Any], budget: Budget) -> list[jax.Array]:
    """Reductions over the tokens of one term, with its moves made."""

    def run(some: Batch):
        one, each = _token_batch(group, term, some)
        found = execute(one, reductions, each, dataclasses.replace(budget, size=each.size))
        return [placed(term, r, x, each) for r, x in zip(reductions, found, strict=True)]

    prepared_bytes = sum(4 * size_of(a.shape) for a in term.shapes)
    return in_chunks(run, batch, budget.chunk(prepared_bytes) if term.patches else budget.size, reductions)


def _every_token(group: Tokens, reductions: Sequence[Any], batch: Batch, budget: Budget) -> list[jax.Array]:
    """Reductions that need the tokens of all terms at once: form some columns of all their gradients at a time."""
    parts = list(_parts(group, batch))
    tiles = [tiles_of(term, after_moves=True) for term in group.terms]
    columns = not any(t.again for t in tiles) and len({t.count for t in tiles}) == 1

    def form(start, width):
        stacks = []
        for term, mine in parts:

            def of(some: Batch, term=term):
                one, each = _token_batch(group, term, some)
                part = tiles_of(one, after_moves=True, columns=columns)
                g = each.vmap(lambda *raw: part.form(start, width, *raw))
                return [g.reshape(some.size, term.tokens(), *g.shape[1:])]

            (g,) = in_chunks(of, mine, budget.chunk(term.dot_bytes) if term.dot_bytes else budget.size, [Stack()])
            stacks.append(g.reshape(-1, *g.shape[2:]))
        return jnp.concatenate(stacks)

    mask = None
    if batch.mask is not None:
        mask = jnp.concatenate([jnp.repeat(batch.mask, term.tokens()) for term in group.terms])
    first = tiles_of(group.terms[0], after_moves=True, columns=columns)
    return in_tiles(form, first, tile_width(first, batch.size * group.tokens(), budget), reductions, mask)


def placed(term: Term, reduction: Reduction, result: jax.Array, batch: Batch) -> jax.Array:
    """The moves of a term, made on the result over its coordinates; where they fill in zeros, it is that of zeros."""
    out = moved_behind(reduction.lead, term.moves, result)
    if not any(m.fills for m in term.moves):
        return out
    zeros = reduction.of_zeros(term.formed().dtype, batch.size, batch.mask, batch.share)
    return out if zeros is None else jnp.where(covered(reduction.lead, term.moves, result), out, spread(zeros, out))


def moved_behind(lead: tuple[int, ...], moves, result: jax.Array) -> jax.Array:
    """The moves, made on the axes behind the leading ones."""
    fn = functools.partial(moved, moves)
    for _ in lead:
        fn = jax.vmap(fn)
    return fn(result)


def covered(lead: tuple[int, ...], moves, result: jax.Array) -> jax.Array:
    """Which coordinates of the leaf a term's moves put something into."""
    return moved(moves, jnp.ones(result.shape[len(lead) :], jnp.int8)) > 0


def spread(zeros: jax.Array, like: jax.Array) -> jax.Array:
    """[*lead] over [*lead, …]."""
    return zeros.reshape(zeros.shape + (1,) * (like.ndim - zeros.ndim)).astype(like.dtype)


# ---------------------------------------------------------------------------------------- after the backward pass


def take_late(kept, reduction: Late, context, param, batch: Batch, budget: Budget) -> jax.Array:
    """A late reduction of one leaf. It is linear in the gradient, so that every term gives its share by itself."""
    parts = []
    if not kept or any(_skips(term) for term, _ in kept):
        parts.append(reduction.without_gradient(param.shape, param.dtype, batch.size, batch.mask, context))
    for term, operands in kept:
        route, moves, extra = late_route(term, reduction, context, budget)
        arrays, batched = zip(*operands, *extra, strict=True)
        (part,) = in_chunks(route.run, batch.having(arrays, batched), route.chunk, [reduction])
        parts.append(moved(moves, part))
    total = functools.reduce(operator.add, parts)
    return total.astype(accumulator(total.dtype))


def _skips(term: Term) -> bool:
    """Are there coordinates that it does nothing about, because no example has a gradient there?"""
    return isinstance(term, Rows) or any(m.fills for m in term.moves)


def late_route(term: Term, reduction: Late, context, budget: Budget) -> tuple[Route, Sequence[Any], list]:
    """The route to a late reduction, the moves to make on its result, and the operands that it reads besides the term's."""
    size = budget.size
    if isinstance(reduction, WeightedMean):
        (route,) = term.weighted().routes([Mean(IDENTITY)], budget)
        return (
            dataclasses.replace(route, name=f"{route.name}, weighted, from kept operands"),
            term.moves,
            [(context, True)],
        )
    if isinstance(reduction, Dot):

        def dots(some: Batch):
            v = _before(term, context)
            return [keep(some.vmap(lambda *raw: term.dot(v, *term.prepare(*raw))), some.mask)]

        name, bytes_each, flops, run = "products with the tree", term.dot_bytes, 0.0, dots
    else:

        def formed(some: Batch):
            return [reduction.of(some.vmap(term.example), some.mask, context)]

        name, bytes_each, run = "formed a few at a time", max(term.form_bytes, term.dot_bytes), formed
        flops = 2.0 * size * getattr(reduction, "dim", 1) * term.form_bytes / 4
    chunk = budget.chunk(bytes_each) if bytes_each else size
    flops += term.plain_flops(size)
    return Route(f"{name}, from kept operands", (reduction,), run, chunk, flops, chunk * bytes_each), (), []


def _before(term: Term, v: jax.Array) -> jax.Array:
    """u with ⟨moves(g), v⟩ = ⟨g, u⟩."""
    if not term.moves:
        return v
    (given,) = compat.vary_like([jnp.zeros(term.formed().shape, v.dtype)], [v])
    return jax.vjp(lambda g: moved(term.moves, g), given)[1](v)[0]
