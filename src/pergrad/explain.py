"""`pg.explain`: which rule serves which parameter, why, and at what cost; nothing is run."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .api import make_request, pure_loss
from .engine import Plan, first_pass
from .reductions import Late, Mean
from .rules.base import Budget, Term, routes_for, size_of
from .surgery import Layers, Leaf, Tokens
from .terms import late_route


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter leaf. FLOPs and bytes are extra, for the whole batch: arithmetic on top of the plain gradient's,
    and memory held at once beyond what the plain gradient holds."""

    leaf: str
    shape: tuple[int, ...]
    rule: str
    route: str
    why: str
    source: str
    plain_flops: float
    extra_flops: float
    vmap_extra_flops: float
    extra_bytes: float
    vmap_extra_bytes: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `pg.explain` found. Prints as a table, renders as one in a notebook, and `to_json` gives it to a program."""

    rows: list[Row]
    examples: int
    statistics: list[str]
    granularity: str

    def __str__(self) -> str:
        head = ["leaf", "shape", "rule", "route", "extra flops", "vmap", "extra bytes", "vmap", "source"]
        cells = [self._cells(r) for r in self.rows] + [self._total()]
        widths = [max(len(line[k]) for line in [head, *cells]) for k in range(len(head))]
        right = {4, 5, 6, 7}
        lines = [
            "  ".join(
                c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in [head, ["─" * w for w in widths], *cells]
        ]
        return "\n".join([self._title(), *(line.rstrip() for line in lines), *self._notes()])

    __repr__ = __str__

    def _title(self) -> str:
        each = "token" if self.granularity == "token" else "example"
        return f"{', '.join(self.statistics) or 'no statistics'} over {self.examples} examples, per {each}"

    def _cells(self, r: Row) -> list[str]:
        return [
            r.leaf,
            "×".join(map(str, r.shape)) or "scalar",
            r.rule,
            r.route,
            _signed(r.extra_flops, r.plain_flops),
            _signed(r.vmap_extra_flops, r.plain_flops),
            _number(r.extra_bytes) + "B",
            _number(r.vmap_extra_bytes) + "B",
            r.source,
        ]

    def _total(self) -> list[str]:
        plain = sum(r.plain_flops for r in self.rows)
        return [
            "all",
            "",
            "",
            "",
            _signed(sum(r.extra_flops for r in self.rows), plain),
            _signed(sum(r.vmap_extra_flops for r in self.rows), plain),
            # Tiles of different leaves are not held at the same time; vmap's stacks are.
            _number(max((r.extra_bytes for r in self.rows), default=0)) + "B",
            _number(sum(r.vmap_extra_bytes for r in self.rows)) + "B",
            "",
        ]

    def _notes(self) -> list[str]:
        leaves: dict[str, list[str]] = {}
        for r in self.rows:
            leaves.setdefault(r.why, []).append(r.leaf)
        return [f"why {', '.join(names[:4])}{', …' * (len(names) > 4)}: {why}" for why, names in leaves.items()]

    def _repr_html_(self) -> str:
        head = ["leaf", "shape", "rule", "route", "extra FLOPs", "by vmap", "extra bytes", "by vmap", "source"]
        rows = "".join(
            f"<tr title='{html.escape(why, quote=True)}'>"
            + "".join(f"<td>{html.escape(c)}</td>" for c in cells)
            + "</tr>"
            for cells, why in [*((self._cells(r), r.why) for r in self.rows), (self._total(), "")]
        )
        heads = "".join(f"<th>{h}</th>" for h in head)
        return f"<table><caption>{html.escape(self._title())}</caption><tr>{heads}</tr>{rows}</table>"

    def to_json(self, **options) -> str:
        return json.dumps(dataclasses.asdict(self), **options)


def explain(
    loss: Callable, stats: Any, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options
) -> Callable:
    """Say, without running anything, how each parameter's statistics would be computed, and what they would cost.

    Takes what `value_and_stats` takes; the result is called with the same arguments, or with
    `jax.ShapeDtypeStruct`s in place of arrays, and returns an `Explanation`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> def loss(params, x):
    ...     return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)
    >>> params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
    >>> found = pg.explain(loss, pg.second_moment())(params, jnp.ones((8, 3)))
    >>> [(r.leaf, r.rule, r.route) for r in found.rows]
    [("['b']", 'reduction', 'reduced directly'), ("['w']", 'dense', 'one outer product per example: φ of the factors')]
    """
    request = make_request(loss, stats, argnums, has_aux, **options)
    request = dataclasses.replace(request, impl="surgery")

    def describe(*args, mask=None, **kwargs) -> Explanation:
        del mask  # which examples count does not change how
        found: list[Explanation] = []
        leaves, tree = jax.tree.flatten(args)
        traced = [k for k, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

        def trace(arrays):
            filled = dict(zip(traced, arrays, strict=True))
            full = jax.tree.unflatten(tree, [filled.get(k, x) for k, x in enumerate(leaves)])
            problem = request.problem(full, kwargs)
            plan = request.plan(problem)
            assert isinstance(plan, Plan)
            budget = dataclasses.replace(plan.budget, size=request.part(problem))
            rows = [
                _row(name, leaf, reductions, budget, problem.size / budget.size)
                for name, leaf, reductions in zip(problem.names, plan.leaves, request.asked(problem), strict=True)
            ]
            names = [repr(s) for s in request.statistics]
            found.append(Explanation(rows, problem.size, names, request.granularity))
            return ()

        with pure_loss():
            jax.eval_shape(trace, [leaves[k] for k in traced])
        return found[0]

    return describe


def _row(name: str, leaf: Leaf, reductions: Sequence[Any], budget: Budget, parts: float) -> Row:
    (first,) = first_pass([tuple(reductions)])
    routes: dict[str, None] = {}
    flops = plain = held = 0.0
    flat = [found for piece in leaf.pieces for found in _flat(piece, 1, "")]
    for term, times, where in flat:
        for route in routes_for(term, first, budget) if first else []:
            routes[route.name + where] = None
            flops += times * route.flops
            held = max(held, route.bytes)
        plain += times * term.plain_flops(budget.size)
    late = [r for r in reductions if isinstance(r, Late)]
    for term in leaf.terms if late else ():
        kept = budget.size * sum(size_of(a.shape) * 4 for a in term.shapes)
        for route in [late_route(term, r, None, budget)[0] for r in late]:
            routes[route.name] = None
            flops += route.flops
            held = max(held, kept + route.bytes)
    size = size_of(leaf.shape)
    sums = sum(isinstance(r, Mean) for r in reductions)
    return Row(
        leaf=name,
        shape=leaf.shape,
        rule=" + ".join(dict.fromkeys(t.rule for t, _, _ in flat)) or "none",
        route="; ".join(routes) or ("zero for every example" if reductions else "not asked for"),
        why="; ".join(dict.fromkeys(t.reason for t, _, _ in flat))
        or ("the loss does not depend on it" if size else "it has no coordinates"),
        source=", ".join(dict.fromkeys(t.source for t, _, _ in flat if t.source)),
        plain_flops=parts * plain,
        extra_flops=parts * (flops - plain if flops else 0.0),
        vmap_extra_flops=parts * 2.0 * max(sums, 1) * budget.size * size if leaf.pieces else 0.0,
        extra_bytes=held,
        vmap_extra_bytes=4.0 * budget.size * size,
    )


def _flat(piece: Term, times: int, where: str):
    """The terms that are reduced, how often, and where."""
    if isinstance(piece, Layers):
        assert piece.body is not None
        for inner in piece.body.pieces:
            yield from _flat(inner, times * piece.length, f", in each of {piece.length} layers")
    elif isinstance(piece, Tokens):
        for term in piece.terms:
            yield term, times, f", for each of {piece.tokens()} tokens{where}"
    else:
        yield piece, times, where


def _number(x: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(x) < 1000 or unit == "T":
            return f"{x:.0f}{unit}" if abs(x) >= 100 or unit == "" else f"{x:.2g}{unit}"
        x /= 1000
    raise AssertionError


def _signed(extra: float, plain: float) -> str:
    share = f" ({extra / plain:+.0%})" if plain else ""
    return ("+" if extra >= 0 else "−") + _number(abs(extra)) + share
