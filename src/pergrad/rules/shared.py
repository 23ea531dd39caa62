"""A leaf's terms, grouped: what touches the same coordinates must be summed for each example before φ.

A weight that is used several times has a gradient of several terms. Terms that land on disjoint coordinates (the
slices of a fused projection) are independent and each keeps its own fast routes; terms that overlap (tied
embeddings, siamese towers) form one group. A group of contractions of equal form is one contraction with more
positions; any other group forms the gradients of a few examples at a time, summing term by term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from .base import Budget, Move, Route, Term, formed_route, moved, tiles_of
from .dense import Contraction, joined


@dataclasses.dataclass(frozen=True)
class Shared(Term):
    """Several terms on the same coordinates; operands are all of theirs, one after the other."""

    terms: tuple[Term, ...] = ()

    def form(self, *operands):
        parts = [term.example(*mine) for term, mine in self._shared_out(operands)]
        return sum(parts[1:], parts[0])

    def _shared_out(self, operands):
        rest = list(operands)
        for term in self.terms:
            yield term, rest[: len(term.operands)]
            rest = rest[len(term.operands) :]

    def formed(self):  # `shapes` are of prepared operands; here only the terms prepare them
        first = self.terms[0]
        return jax.eval_shape(lambda g: moved(first.moves, g), first.formed())

    @property
    def _tiles(self):
        return [tiles_of(term, after_moves=True) for term in self.terms]

    @property
    def columns(self):
        """Where all terms can form the same columns by themselves, they can be added there."""
        counts = {0 if tiles.again else tiles.count for tiles in self._tiles}
        return counts.pop() if len(counts) == 1 else 0

    def form_columns(self, start, width, *operands):
        of_terms = zip(self._tiles, self._shared_out(operands), strict=True)
        parts = [tiles.form(start, width, *mine) for tiles, (_, mine) in of_terms]
        return sum(parts[1:], parts[0])

    @property
    def dot_bytes(self):
        return max(t.dot_bytes for t in self.terms) if self.columns else self.form_bytes

    @property
    def form_bytes(self):
        return max(t.form_bytes for t in self.terms)

    def routes(self, reductions, budget: Budget) -> list[Route]:
        return [formed_route(self.form, reductions, self.form_bytes, budget, self.plain_flops(budget.size))]

    def plain_flops(self, size):
        return sum(t.plain_flops(size) for t in self.terms)


def share(terms: Sequence[Term]) -> Term:
    """One term for several that overlap."""
    if len(terms) == 1:
        return terms[0]
    terms, moves = common_moves(terms)
    contractions = [t for t in terms if isinstance(t, Contraction)]
    one = joined(contractions) if len(contractions) == len(terms) else None
    if one is not None:
        return dataclasses.replace(one, moves=(*one.moves, *moves), why=f"used {len(terms)} times, as one contraction")
    kinds = sorted({t.rule for t in terms})
    return Shared(
        operands=sum((t.operands for t in terms), ()),
        prepare=lambda *operands: operands,
        moves=moves,
        shapes=sum((t.shapes for t in terms), ()),
        rule="shared",
        source=terms[0].source,
        why=f"used {len(terms)} times ({' + '.join(kinds)}), summed per example before φ",
        terms=tuple(terms),
    )


def common_moves(terms: Sequence[Term]) -> tuple[list[Term], tuple[Move, ...]]:
    """Split off the moves that all terms end with: they are made once, on the statistic."""
    # Equal moves of differently shaped arrays (two reshapes to one shape) are not the same move.
    steps = [list(zip(t.moves, t.shapes_before_moves(), strict=True)) for t in terms]
    count = 0
    while all(len(s) > count for s in steps) and len({s[-1 - count] for s in steps}) == 1:
        count += 1
    if count == 0:
        return list(terms), ()
    common = terms[0].moves[-count:]
    return [dataclasses.replace(t, moves=t.moves[:-count]) for t in terms], common


def groups(terms: Sequence[Term]) -> list[list[Term]]:
    """Terms that may touch the same coordinates, together; disjoint ones apart."""
    out: list[tuple[list[Term], list]] = []
    if len(terms) > 1:
        stripped, _ = common_moves(terms)
        boxes = [t.moves[-1].box if t.moves else None for t in stripped]
    else:
        boxes = [None] * len(terms)
    for term, box in zip(terms, boxes, strict=True):
        touching = [g for g in out if any(_overlap(box, other) for other in g[1])]
        merged = ([t for g in touching for t in g[0]] + [term], [b for g in touching for b in g[1]] + [box])
        out = [g for g in out if g not in touching] + [merged]
    return [g[0] for g in out]


def _overlap(a, b) -> bool:
    if a is None or b is None:
        return True
    return all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(a, b, strict=True))
