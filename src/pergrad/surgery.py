"""Surgery on the gradient of one example: find where each parameter's gradient ends, and cut there.

The jaxpr of one example's gradient is read from its outputs backwards. `resolve` follows a gradient through the
operations that only move coordinates, through sums, and through calls, loops and branches, down to the equations
that a rule knows (`rules/`); the result is a list of terms, each with *operands*: variables of the jaxpr, or of a
jaxpr inside it, that are activations, cotangents or indices. The gradients themselves are then never asked for.

`Scope.evaluate` runs a jaxpr for whatever atoms are wanted, and nothing else. It is a plain interpreter, except
that it can be asked for what is inside an equation (`Inner`): it then evaluates the call, loop or branch itself and
brings the inner value out; from a scan, stacked over the steps. `jax.vmap` of it over the examples is the whole
engine: JAX's own batching does everything but the cut.

Where the gradient of a layer is one slice of a stacked parameter (a scan over layers), the statistic is taken inside
the loop (`Reduced`), layer by layer, by a `custom_vmap` function whose batching rule sees the operands of all examples
and returns the statistic unbatched. Where a loop accumulates the gradient of a weight that all steps share (a scan
over time), the accumulation is taken out of the loop: operands of all steps are brought out, and contracted once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import compat
from .rules import RULES
from .rules.base import Term, size_of
from .rules.generic import generic
from .rules.reduction import Formed, as_one_use
from .rules.shared import common_moves, groups, share
from .rules.structural import STRUCTURAL, pad_move

# ---------------------------------------------------------------------------------------- atoms


@dataclasses.dataclass(frozen=True)
class Inner:
    """What an atom inside equation ``index`` of a scope amounts to outside; of a scan's body, stacked over its steps."""

    index: int
    branch: int
    atom: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    value: Any
    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """The reductions of a leaf, taken where the leaf's operands are."""

    leaf: Leaf

    def reads(self):
        return [a for piece in self.leaf.pieces for a in piece.operands]


@dataclasses.dataclass(frozen=True)
class Layers(Term):
    """A leaf of stacked layers, reduced layer by layer inside the scan that computes them.

    The operand is the `Reduced` leaf of the body, seen from outside; ``outside`` are equivalent terms with all
    operands brought out of the loop, for when the layers must meet other terms before φ.
    """

    length: int = 0
    body: Leaf | None = None
    outside: tuple[Term, ...] = ()

    def move(self, move):
        return dataclasses.replace(self, moves=(*self.moves, move), outside=tuple(t.move(move) for t in self.outside))

    def tokens(self):
        return self.body.tokens if self.body is not None else 1

    def shapes_before_moves(self):
        given = self.outside[0].shapes_before_moves()
        return given[len(given) - len(self.moves) :]


# ---------------------------------------------------------------------------------------- scopes


@dataclasses.dataclass
class Settings:
    """What the whole analysis shares."""

    tokens: bool
    batch_size: int
    chunk_bytes: int
    tails: bool = False  # second pass: cut before big per-example matrices


class Scope:
    """One jaxpr, with what the analysis must know of it."""

    def __init__(self, called: compat.Called, varying: Sequence[bool], settings: Settings):
        self.jaxpr, self.consts, self.settings = called.jaxpr, called.consts, settings
        self.equations = list(self.jaxpr.eqns)
        self.producer = {v: i for i, e in enumerate(self.equations) for v in e.outvars}
        self.inner: dict[tuple[int, int], Scope] = {}
        self._varying = {v for v, b in zip(self.jaxpr.invars, varying, strict=True) if b}
        self._zeros = set()
        for i, eqn in enumerate(self.equations):
            self._look_at(i, eqn)
        self.gradients: set[Any] = set()  # outputs that are gradients, found on the first pass
        self.needed: set[Any] = set()  # operands of terms, found on the first pass
        self._public: set[int] | None = None  # the equations that these and the other outputs need

    def _look_at(self, i, eqn):
        """Which results differ between examples, and which are zeros; opens the jaxprs inside."""
        varies = [self.varies(v) for v in eqn.invars]
        out = [any(varies)] * len(eqn.outvars)
        if (call := compat.called(eqn)) is not None:
            scope = self.inner[i, 0] = Scope(call, varies, self.settings)
            out = [scope.varies(v) for v in call.jaxpr.outvars]
            self._zeros.update(o for o, v in zip(eqn.outvars, call.jaxpr.outvars, strict=True) if scope.is_zero(v))
        elif (scan := compat.scan(eqn)) is not None:
            while True:  # a carry varies as soon as one step makes it so
                scope = Scope(scan.body, varies, self.settings)
                out = [scope.varies(v) for v in scan.body.jaxpr.outvars]
                carry = [a or b for a, b in zip(varies[scan.num_consts :], out[: scan.num_carry], strict=False)]
                if carry == varies[scan.num_consts :][: scan.num_carry]:
                    break
                varies[scan.num_consts : scan.num_consts + scan.num_carry] = carry
            self.inner[i, 0] = scope
            out[: scan.num_carry] = carry
        elif (branches := compat.branches(eqn)) is not None:
            for k, branch in enumerate(branches):
                self.inner[i, k] = Scope(branch, varies[1:], self.settings)
        elif eqn.primitive.name == "broadcast_in_dim" and self.is_zero(eqn.invars[0]):
            self._zeros.add(eqn.outvars[0])
        self._varying.update(v for v, b in zip(eqn.outvars, out, strict=True) if b)

    # What rules ask: ------------------------------------------------------------------------

    tokens = property(lambda self: self.settings.tokens)
    batch_size = property(lambda self: self.settings.batch_size)
    chunk_bytes = property(lambda self: self.settings.chunk_bytes)
    source = staticmethod(compat.source)
    bind = staticmethod(compat.bind)

    def varies(self, atom) -> bool:
        """Does the value differ between examples? (It may be said to when it does not.)"""
        if isinstance(atom, Inner):
            eqn = self.equations[atom.index]
            chosen = compat.branches(eqn) is not None and self.varies(eqn.invars[0])  # it is zero in the other branches
            return chosen or self.inner[atom.index, atom.branch].varies(atom.atom)
        return not isinstance(atom, compat.Literal | Constant) and atom in self._varying

    def is_zero(self, atom) -> bool:
        if isinstance(atom, compat.Literal):
            return jnp.ndim(atom.val) == 0 and bool(atom.val == 0)
        return not isinstance(atom, Inner | Constant) and atom in self._zeros

    def is_variable(self, atom) -> bool:
        return not isinstance(atom, compat.Literal)

    def literal(self, atom):
        return atom.val

    def aval(self, atom) -> jax.ShapeDtypeStruct:
        if isinstance(atom, Inner):
            inner = self.inner[atom.index, atom.branch].aval(atom.atom)
            scan = compat.scan(self.equations[atom.index])
            return jax.ShapeDtypeStruct((*([scan.length] if scan else []), *inner.shape), inner.dtype)
        return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)

    def producer_of(self, atom):
        i = self.producer.get(atom) if isinstance(atom, compat.Var) else None
        return None if i is None else self.equations[i]

    def is_weight_gradient(self, atom, again: bool = False) -> bool:
        """Does ``atom`` look like the gradient of a weight: a contraction of two things that both differ between
        examples, or computed from one coordinate by coordinate, or by one product with something shared?"""
        eqn = self.producer_of(atom)
        while eqn is not None and eqn.primitive.name in COORDINATEWISE | STRUCTURAL.keys():
            atom = max(eqn.invars, key=lambda v: self.varies(v) * size_of(v.aval.shape))
            eqn = self.producer_of(atom) if self.varies(atom) else None
        if eqn is None or eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            return False
        varying = [v for v in eqn.invars if self.varies(v)]
        return len(varying) > 1 or (not again and self.is_weight_gradient(varying[0], again=True))

    def private_cone(self, atom):
        """The equations that ``atom`` needs and nothing but gradients does, in order."""
        if not self.settings.tails:
            return []
        if self._public is None:
            outputs = [v for v in self.jaxpr.outvars if isinstance(v, compat.Var) and v not in self.gradients]
            self._public = set(self.demand([*outputs, *self.needed]))
        return [self.equations[i] for i in sorted(self.demand([atom])) if i not in self._public]

    # Running it: ----------------------------------------------------------------------------

    def demand(self, wanted: Sequence[Any]) -> dict[int, list[Any]]:
        """Equation -> the atoms it must deliver so that all of ``wanted`` can be read."""
        return self._demand(wanted)[0]

    def _demand(self, wanted):
        deliver: dict[int, list[Any]] = {}
        inputs = set()

        def want(atom):
            if isinstance(atom, Reduced):
                for operand in atom.reads():
                    want(operand)
            elif not isinstance(atom, compat.Literal | Constant):
                i = atom.index if isinstance(atom, Inner) else self.producer.get(atom)
                if i is None:
                    inputs.add(atom)
                elif atom not in deliver.setdefault(i, []):
                    deliver[i].append(atom)

        for atom in wanted:
            want(atom)
        for i in reversed(range(len(self.equations))):
            if i in deliver:
                for atom in self._reads(i, deliver[i]):
                    want(atom)
        return deliver, inputs

    def _reads(self, i, delivered):
        """The inputs of equation ``i`` that are read to deliver these atoms."""
        eqn = self.equations[i]
        if (scan := compat.scan(eqn)) is not None and (_opened(delivered) or len(delivered) < len(eqn.outvars)):
            plan = self._scan_plan(i, scan, delivered)
            return [v for v, used in zip(eqn.invars, plan.used, strict=True) if used]
        if compat.called(eqn) is not None and _opened(delivered):
            inner = self.inner[i, 0]
            inputs = inner._demand(self._inside(i, 0, delivered))[1]
            return [v for v, w in zip(eqn.invars, inner.jaxpr.invars, strict=True) if w in inputs]
        return eqn.invars

    def _inside(self, i, branch, delivered):
        """The atoms of the jaxpr inside equation ``i`` that the delivered ones stand for."""
        eqn, outvars = self.equations[i], self.inner[i, branch].jaxpr.outvars
        place = {v: k for k, v in enumerate(eqn.outvars)}
        return [a.atom if isinstance(a, Inner) else outvars[place[a]] for a in delivered]

    def _scan_plan(self, i, scan, delivered) -> _ScanPlan:
        """Which carries and stacked outputs a scan must still compute."""
        eqn, inner = self.equations[i], self.inner[i, 0]
        invars, outvars = inner.jaxpr.invars, inner.jaxpr.outvars
        c, n = scan.num_consts, scan.num_carry
        place = {v: k for k, v in enumerate(eqn.outvars)}
        stacked = [a for a in delivered if isinstance(a, Inner) or place[a] >= n]
        ys = self._inside(i, 0, stacked)
        carries = {place[a] for a in delivered if not isinstance(a, Inner) and place[a] < n}
        while True:
            inputs = inner._demand([*(outvars[k] for k in sorted(carries)), *ys])[1]
            more = {k for k in range(n) if invars[c + k] in inputs} | carries
            if more == carries:
                break
            carries = more
        used = [v in inputs for v in invars]
        for k in range(n):
            used[c + k] = k in carries
        return _ScanPlan(sorted(carries), stacked, ys, used)

    def evaluate(self, wanted: Sequence[Any], inputs: Sequence[Any], reduce: Callable) -> list[Any]:
        """The values of ``wanted``. Inputs that they do not need may be None; `reduce` computes `Reduced` leaves."""
        deliver, _ = self._demand(wanted)
        env: dict[Any, Any] = dict(zip(compat.constvars(self.jaxpr), self.consts, strict=True))
        env.update(zip(self.jaxpr.invars, inputs, strict=True))

        def read(atom):
            if isinstance(atom, compat.Literal):
                return atom.val
            if isinstance(atom, Constant):
                return atom.value
            if isinstance(atom, Reduced):
                return reduce(atom.leaf, read)
            return env.get(atom) if atom not in env else env[atom]

        for i, eqn in enumerate(self.equations):
            if i in deliver:
                env.update(self._run(i, eqn, deliver[i], read, reduce))
        return [read(a) for a in wanted]

    def _run(self, i, eqn, delivered, read, reduce) -> dict[Any, Any]:
        opened = _opened(delivered)
        if (scan := compat.scan(eqn)) is not None and (opened or len(delivered) < len(eqn.outvars)):
            return self._run_scan(i, eqn, scan, delivered, read, reduce)
        if not opened:
            return dict(zip(eqn.outvars, compat.bind(eqn, [read(v) for v in eqn.invars]), strict=True))
        if compat.called(eqn) is not None:
            values = [read(v) for v in eqn.invars]
            values = _behind_barrier(compat.remat_barrier(eqn), values)
            out = self.inner[i, 0].evaluate(self._inside(i, 0, delivered), values, reduce)
            return dict(zip(delivered, out, strict=True))
        return self._run_cond(i, eqn, delivered, read, reduce)

    def _run_scan(self, i, eqn, scan, delivered, read, reduce):
        plan, inner = self._scan_plan(i, scan, delivered), self.inner[i, 0]
        c, n = scan.num_consts, scan.num_carry
        values = [read(v) if used else None for v, used in zip(eqn.invars, plan.used, strict=True)]
        wanted = [*(inner.jaxpr.outvars[k] for k in plan.carries), *plan.ys]

        def body(carry, xs):
            full = dict(zip(plan.carries, carry, strict=True))
            inputs = [*values[:c], *(full.get(k) for k in range(n)), *xs]
            out = inner.evaluate(wanted, inputs, reduce)
            return tuple(out[: len(carry)]), out[len(carry) :]

        init = tuple(values[c + k] for k in plan.carries)
        carry, ys = jax.lax.scan(
            body, init, values[c + n :], length=scan.length, reverse=scan.reverse, unroll=scan.unroll
        )
        return {
            **{eqn.outvars[k]: v for k, v in zip(plan.carries, carry, strict=True)},
            **dict(zip(plan.stacked, ys, strict=True)),
        }

    def _run_cond(self, i, eqn, delivered, read, reduce):
        index, *operands = [read(v) for v in eqn.invars]

        def branch(k):
            mine = [a for a in delivered if not isinstance(a, Inner) or a.branch == k]

            def run(*values):
                scope = self.inner[i, k]
                out = dict(zip(mine, scope.evaluate(self._inside(i, k, mine), values, reduce), strict=True))
                zeros = {a: self.aval(a) for a in delivered if a not in out}
                return [out[a] if a in out else jnp.zeros(zeros[a].shape, zeros[a].dtype) for a in delivered]

            return run

        count = _count(eqn)
        out = jax.lax.switch(index, [branch(k) for k in range(count)], *operands)
        return dict(zip(delivered, out, strict=True))


@dataclasses.dataclass
class _ScanPlan:
    carries: list[int]
    stacked: list[Any]
    ys: list[Any]
    used: list[bool]


def _opened(delivered) -> bool:
    """Must the equation be evaluated from within, because something inside it is asked for?"""
    return any(isinstance(a, Inner) for a in delivered)


def _behind_barrier(barrier, values):
    if not barrier or not any(barrier):
        return values
    chosen = [v for v, b in zip(values, barrier, strict=True) if b and v is not None]
    opaque = iter(jax.lax.optimization_barrier(chosen))
    return [next(opaque) if b and v is not None else v for v, b in zip(values, barrier, strict=True)]


# ---------------------------------------------------------------------------------------- finding the cut


def resolve(scope: Scope, atom) -> list[Term]:
    """The per-example gradient ``atom`` as a sum of terms; no terms: it is zero."""
    if scope.is_zero(atom):
        return []
    eqn = scope.producer_of(atom)
    if eqn is None or not scope.varies(atom):
        return [generic(scope, atom)]
    found = _resolve(scope, atom, eqn, scope.producer[atom])
    if found is None:
        return [generic(scope, atom)]
    for term in found:
        if not isinstance(term, Formed):
            scope.needed.update(a for a in term.operands if isinstance(a, compat.Var | Inner))
    return found


def _resolve(scope: Scope, atom, eqn, i) -> list[Term] | None:
    name = eqn.primitive.name
    move = STRUCTURAL[name](eqn) if name in STRUCTURAL else None
    if move is not None:
        return [t.move(move) for t in resolve(scope, eqn.invars[0])]
    if name in RULES:
        term = RULES[name](scope, eqn)
        return None if term is None else [term]
    if name in COMBINING:
        return COMBINING[name](scope, eqn)
    position = list(eqn.outvars).index(atom)
    if compat.called(eqn) is not None:
        inner = scope.inner[i, 0]
        inner.gradients.add(inner.jaxpr.outvars[position])
        return [_out_of_call(scope, i, t) for t in resolve(inner, inner.jaxpr.outvars[position])]
    if (scan := compat.scan(eqn)) is not None:
        if position < scan.num_carry:
            return _out_of_carry(scope, i, eqn, scan, position)
        return _out_of_layers(scope, i, eqn, scan, position)
    if compat.branches(eqn) is not None:
        return _out_of_branches(scope, i, eqn, position)
    return None


COORDINATEWISE = {"mul", "div", "select_n", "neg", "add", "add_any", "sub"}

COMBINING: dict[str, Callable[[Scope, Any], list[Term] | None]] = {}


def combining(*names: str):
    def add(rule):
        for name in names:
            COMBINING[name] = rule
        return rule

    return add


@combining("add", "add_any")
def _add(scope, eqn):
    a, b = eqn.invars
    if a.aval.shape != b.aval.shape:
        return None
    terms = resolve(scope, a) + resolve(scope, b)
    if len(terms) > 1 and not scope.tokens and all(isinstance(t, Formed) and not t.bytes_each for t in terms):
        return None  # the backward pass forms both, and their sum
    return terms


@combining("sub")
def _sub(scope, eqn):
    a, b = eqn.invars
    subtracted = _scaled(resolve(scope, b), lambda: jnp.float32(-1), ())
    if a.aval.shape != b.aval.shape or subtracted is None:
        return None
    return resolve(scope, a) + subtracted


@combining("neg")
def _neg(scope, eqn):
    return _scaled(resolve(scope, eqn.invars[0]), lambda: jnp.float32(-1), ())


@combining("mul")
def _mul(scope, eqn):
    for g, factor in (eqn.invars, eqn.invars[::-1]):
        scalar = _scalar(scope, factor)
        if scalar is not None:
            return _scaled(resolve(scope, g), lambda c: c.reshape(()), (scalar,))
    return None


@combining("div")
def _div(scope, eqn):
    g, factor = eqn.invars
    scalar = _scalar(scope, factor)
    if scalar is None:
        return None
    return _scaled(resolve(scope, g), lambda c: 1 / c.reshape(()), (scalar,))


def _scalar(scope, atom):
    """The one number that ``atom`` holds, if it holds one and it is the same for all examples."""
    if scope.varies(atom):
        return None
    eqn = scope.producer_of(atom)
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
        return _scalar(scope, eqn.invars[0])
    if isinstance(atom, compat.Literal):
        return Constant(jnp.asarray(atom.val), atom.aval) if jnp.size(atom.val) == 1 else None
    return atom if size_of(atom.aval.shape) == 1 else None


def _scaled(terms: list[Term], factor: Callable, extra: tuple[Any, ...]) -> list[Term] | None:
    if any(isinstance(t, Formed | Layers) for t in terms):
        return None  # the product is formed anyway
    return [t.scaled(factor, extra) for t in terms]


@combining("pad")
def _pad(scope, eqn):
    g, value = eqn.invars
    if not scope.is_zero(value):
        return None
    return _placed(
        resolve(scope, g), pad_move(eqn.params["padding_config"]), g.aval.shape, eqn.params["padding_config"]
    )


@combining("concatenate")
def _concatenate(scope, eqn):
    """Each part is padded to its place: parts are disjoint, and keep their own routes."""
    axis, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    terms, start = [], 0
    for part in eqn.invars:
        size = part.aval.shape[axis]
        config = [(0, 0, 0)] * len(shape)
        config[axis] = (start, shape[axis] - start - size, 0)
        terms += _placed(resolve(scope, part), pad_move(config), part.aval.shape, config)
        start += size
    return terms


def _placed(terms, move, shape, config):
    box = tuple(
        (int(low), int(low) + max(n - 1, 0) * (int(inner) + 1) + 1)
        for n, (low, _, inner) in zip(shape, config, strict=True)
    )
    return [t.move(dataclasses.replace(move, box=box)) for t in terms]


def _lift(scope: Scope, i: int, branch: int, atom):
    """What ``atom`` of the jaxpr inside equation ``i`` is outside."""
    if isinstance(atom, compat.Literal | Constant):
        return atom
    eqn, inner = scope.equations[i], scope.inner[i, branch]
    if isinstance(atom, compat.Var):
        if atom in inner.jaxpr.invars and compat.scan(eqn) is None:
            skip = 1 if compat.branches(eqn) is not None else 0
            return eqn.invars[skip + list(inner.jaxpr.invars).index(atom)]
        consts = dict(zip(compat.constvars(inner.jaxpr), inner.consts, strict=True))
        if atom in consts:
            return Constant(consts[atom], atom.aval)
    return Inner(i, branch, atom)


def _lift_from_scan(scope: Scope, i: int, scan, atom) -> tuple[Any, int | None]:
    """The same for a scan's body: the outer atom, and the axis on which it is stacked over the steps."""
    eqn, inner = scope.equations[i], scope.inner[i, 0]
    if isinstance(atom, compat.Var) and atom in inner.jaxpr.invars:
        k = list(inner.jaxpr.invars).index(atom)
        if k < scan.num_consts:
            return eqn.invars[k], None
        if k >= scan.num_consts + scan.num_carry:
            return eqn.invars[k], 0
        return Inner(i, 0, atom), 0
    lifted = _lift(scope, i, 0, atom)
    return lifted, 0 if isinstance(lifted, Inner) else None


def _out_of_call(scope, i, term: Term) -> Term:
    lifted = term.with_operands(_lift(scope, i, 0, a) for a in term.operands)
    if isinstance(term, Layers):
        return dataclasses.replace(lifted, outside=tuple(_out_of_call(scope, i, t) for t in term.outside))
    return lifted


def _outside(terms: Sequence[Term]) -> list[Term]:
    return [t for term in terms for t in (term.outside if isinstance(term, Layers) else [term])]


def _out_of_layers(scope, i, eqn, scan, position) -> list[Term] | None:
    """A stacked output: every step gives one layer's gradient. Reduce it there."""
    inner = scope.inner[i, 0]
    out = inner.jaxpr.outvars[position]
    inner.gradients.add(out)
    terms = resolve(inner, out)
    if not terms:
        return []
    body = make_leaf(inner, terms, out.aval.shape, out.aval.dtype)
    outside = []
    for term in _outside(terms):
        operands, axes = zip(*[_lift_from_scan(scope, i, scan, a) for a in term.operands], strict=True)
        outside.append(term.stack(operands, axes, scan.length))
    first = terms[0]
    return [
        Layers(
            operands=(Inner(i, 0, Reduced(body)),),
            prepare=_never,
            moves=(),
            shapes=first.shapes,
            rule=first.rule if len(terms) == 1 else "shared",
            source=first.source,
            why=first.why,
            length=scan.length,
            body=body,
            outside=tuple(outside),
        )
    ]


def _never(*_):
    raise AssertionError("a leaf that is reduced inside a loop has no operands outside")


def _out_of_carry(scope, i, eqn, scan, position) -> list[Term] | None:
    """An accumulated output: carry + Σ over the steps of what each step adds. Take the sum out of the loop.

    If one step's result is its carry plus terms, the loop's result is the initial value plus the sum of the terms
    over all steps, whatever else happens in the loop.
    """
    inner = scope.inner[i, 0]
    carry, out = inner.jaxpr.invars[scan.num_consts + position], inner.jaxpr.outvars[position]
    if out is carry:
        return resolve(scope, eqn.invars[scan.num_consts + position])
    inner.gradients.add(out)
    added = _outside(resolve(inner, out))
    kept = [t for t in added if t.operands == (carry,) and isinstance(t, Formed) and not _moves(t)]
    added = [t for t in added if t not in kept]
    if len(kept) != 1:
        return None
    summed = []
    for term in as_one_use(added) if scope.tokens else added:
        if isinstance(term, Formed) and not term.bytes_each and not scope.tokens:
            return None  # accumulated where it is: the sum is smaller than its summands
        operands, axes = zip(*[_lift_from_scan(scope, i, scan, a) for a in term.operands], strict=True)
        whole = term.sum_over(operands, axes, scan.length)
        if whole is None:
            return None
        summed.append(whole)
    return resolve(scope, eqn.invars[scan.num_consts + position]) + summed


def _moves(term: Term) -> bool:
    return any(m.name != "same" for m in term.moves)


def _out_of_branches(scope, i, eqn, position) -> list[Term] | None:
    """One term for every branch, whose operands are zero where another branch was taken."""
    terms = []
    for k in range(_count(eqn)):
        inner = scope.inner[i, k]
        out = inner.jaxpr.outvars[position]
        inner.gradients.add(out)
        found = _outside(resolve(inner, out))
        if any(isinstance(t, Formed) for t in found):
            return None
        terms += [_guarded(t, scope, i, k, eqn) for t in found]
    return terms


def _count(eqn) -> int:
    return len(compat.branches(eqn) or ())


def _guarded(term: Term, scope, i, k, eqn) -> Term:
    """An operand from inside the branch is zero when another is taken; one from outside is not, so the term is scaled."""
    lifted = term.with_operands(_lift(scope, i, k, a) for a in term.operands)
    count = _count(eqn)
    return lifted.scaled(lambda index: jnp.clip(index, 0, count - 1) == k, (eqn.invars[0],))


# ---------------------------------------------------------------------------------------- leaves


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The gradient of one example with respect to one parameter leaf: pieces on disjoint coordinates.

    ``terms`` are the same without groups and with all operands outside of loops: what is linear in the gradient can be
    taken from each by itself, at any time. ``tokens`` is at how many positions an example uses the leaf (1 unless
    statistics are over tokens).
    """

    pieces: tuple[Term, ...]
    shape: tuple[int, ...]
    dtype: Any
    terms: tuple[Term, ...] = ()
    tokens: int = 1


def open_scope(jaxpr, consts, varying: Sequence[bool], settings: Settings) -> Scope:
    return Scope(compat.Called(jaxpr, consts), varying, settings)


def make_leaf(scope: Scope, terms: Sequence[Term], shape, dtype) -> Leaf:
    if size_of(shape) == 0:
        terms = []
    # A layer's number (its norm) cannot be taken inside the loop if coordinates are repeated or dropped after it.
    terms = [t for term in terms for t in ([term] if term.isometric else _outside([term]))]
    grouped = [group if len(group) == 1 else _outside(group) for group in groups(terms)]
    if not scope.tokens:
        return Leaf(tuple(share(group) for group in grouped), shape, dtype, tuple(_outside(terms)))
    pieces = tuple(group[0] if isinstance(group[0], Layers) else Tokens.of(group) for group in grouped)
    counts = {p.tokens() for p in pieces} or {1}
    if len(counts) > 1:
        raise ValueError(
            f'granularity="token": slices of one parameter (shape {shape}, first used at {pieces[0].source}) are used '
            f"at different numbers of positions ({sorted(counts)}), so it has no one set of tokens; expected one "
            'number. Write granularity="example", or make the slices parameters of their own.'
        )
    return Leaf(pieces, shape, dtype, tokens=counts.pop())


@dataclasses.dataclass(frozen=True)
class Tokens(Term):
    """Terms on the same coordinates, every position of every term an example of its own."""

    terms: tuple[Term, ...] = ()

    @staticmethod
    def of(terms: Sequence[Term]) -> Tokens:
        for term in terms:
            if isinstance(term, Formed) and term.accumulated:
                raise ValueError(
                    f'granularity="token" has no meaning for a gradient that a loop accumulates by other operations than '
                    f'dense layers, convolutions and lookups ({term.source}). Write granularity="example".'
                )
        terms, moves = common_moves(as_one_use(terms))
        first = terms[0]
        return Tokens(
            operands=sum((t.operands for t in terms), ()),
            prepare=_never,
            moves=moves,
            shapes=(),
            rule=first.rule if len(terms) == 1 else "shared",
            source=first.source,
            why=first.why,
            terms=tuple(terms),
        )

    def tokens(self):
        return sum(t.tokens() for t in self.terms)
