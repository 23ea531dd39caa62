"""The catalogue of statistics: what each needs from the engine, and how it finishes.

Two layers, so that a statistic never knows about rules and a rule never knows about statistics:

* a **reduction** is what the engine computes leaf by leaf from the per-example gradients g[b, ...]:
  `Mean(φ)` (E φ(g), coordinate by coordinate), `SquaredNorm` (‖g_b‖²), `Stack` (g itself). Its method
  `of` is its definition; rules may have a faster way to the same numbers. Results of parts of a batch
  merge exactly: means of parts, each example weighted by one over the number of all, add; per-example results are laid
  one after the other.
* a **statistic** lists the reductions it needs and finishes them: the variance is `Mean(g)` and `Mean(g²)`
  and then E g² − (E g)². Statistics in one call share reductions, and one backward pass serves them all.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def accumulator(dtype) -> Any:
    """Sums are kept in float32, or in the wider type where the gradient has one."""
    return jnp.promote_types(dtype, jnp.float32)


# ------------------------------------------------------------------------------------------ φ


@dataclasses.dataclass(frozen=True)
class Phi:
    """A function of one coordinate of one per-example gradient.

    `multiplicative` says φ(uv) = φ(u)φ(v) (so φ(0) is 0): such a φ of an outer product is the outer
    product of the φ's, which lets a rule work on the factors.
    """

    name: str
    fn: Callable[[jax.Array], jax.Array]
    multiplicative: bool = False

    def __call__(self, g):
        out = self.fn(g.astype(accumulator(g.dtype)))
        if jnp.shape(out) != g.shape:
            raise ValueError(
                f"elementwise({self.name}) must return an array of the shape it is given; given {g.shape}, "
                f"it returned {jnp.shape(out)}. Write a function that works coordinate by coordinate, "
                "such as `lambda g: jnp.log1p(jnp.abs(g))`."
            )
        # Once, here: predicates (`g > 0`) and integers count as numbers, and sums stay float32 or wider.
        return out.astype(accumulator(out.dtype))

    def at_zero(self, dtype) -> Any:
        """φ(0), as a number: what a coordinate contributes that an example does not touch."""
        if self.multiplicative:
            return 0.0
        with jax.ensure_compile_time_eval():
            return self(jnp.zeros((), dtype)).item()


def _square(g):
    return jnp.real(g * jnp.conj(g)) if jnp.iscomplexobj(g) else g * g


IDENTITY = Phi("g", lambda g: g, multiplicative=True)
SQUARE = Phi("g²", _square, multiplicative=True)
ABS = Phi("|g|", jnp.abs, multiplicative=True)
SIGN = Phi("sign g", jnp.sign, multiplicative=True)


@dataclasses.dataclass(frozen=True)
class _Power:
    k: int

    def __call__(self, g):
        return g**self.k


# ---------------------------------------------------------------------------------- reductions


def _keep(values, mask):
    """Set to zero what belongs to examples that do not count (whatever they hold, NaN included)."""
    if mask is None:
        return values
    return jnp.where(mask.reshape(mask.shape + (1,) * (values.ndim - 1)), values, 0)


class Reduction:
    """What the engine computes for every leaf; `of` defines it, for the gradients g[b, ...] of some examples.

    `per_example`: the result has the examples on its leading axis, and parts of a batch are laid one after the
    other; otherwise they add. `coordinatewise`: the rest of the result has the leaf's shape; otherwise it is a number,
    and the numbers of disjoint parts of a leaf add.
    """

    per_example: bool
    coordinatewise: bool

    def of(self, g: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        raise NotImplementedError

    def dtype(self, gradient) -> Any:
        """Of the result, for gradients of this dtype."""
        return jax.eval_shape(self.of, jax.ShapeDtypeStruct((1,), gradient)).dtype


@dataclasses.dataclass(frozen=True)
class Mean(Reduction):
    """E φ(g), one number per coordinate. `of` gives the sum over its examples, for the caller to weight."""

    phi: Phi
    per_example = False
    coordinatewise = True

    def of(self, g, mask=None):
        values = _keep(self.phi(g), mask)
        if 0 < len(values) <= 8:
            # The same sum, written so that several φ of one small chunk share a single loop: XLA's CPU
            # reduction over a leading axis is up to 50 times slower (JAX 0.10).
            return functools.reduce(operator.add, [values[b] for b in range(len(values))])
        return jnp.sum(values, axis=0)


@dataclasses.dataclass(frozen=True)
class SquaredNorm(Reduction):
    """‖g_b‖² of this leaf, one number per example."""

    per_example = True
    coordinatewise = False

    def of(self, g, mask=None):
        squares = SQUARE(g)
        return _keep(jnp.sum(squares, axis=tuple(range(1, g.ndim))), mask)


@dataclasses.dataclass(frozen=True)
class Stack(Reduction):
    """The per-example gradients themselves."""

    per_example = True
    coordinatewise = True

    def of(self, g, mask=None):
        return _keep(g.astype(accumulator(g.dtype)), mask)


# ---------------------------------------------------------------------------------- statistics


class Outcome(NamedTuple):
    """What the engine hands to `Statistic.finish`."""

    leaves: dict[Any, list[Any]]  # reduction -> one result per parameter leaf
    losses: jax.Array  # [B], zero for an example that the mask leaves out
    count: Any  # how many examples count
    tokens: list[int]  # per leaf: positions per example (1 at granularity "example")
    treedef: Any  # of the differentiated arguments


class Statistic:
    """Base of all statistics; a new one is a subclass or, mostly, one call of `coordinatewise`.

    `name` is what the user wrote, `reductions` what the engine must compute, `minimum` the fewest examples
    for which the statistic means something, and `tokens` whether it has a meaning at granularity="token".
    """

    name: str
    reductions: tuple[Any, ...] = ()
    minimum: int = 1
    for_fewer: str = ""  # what to write when there are fewer
    tokens: bool = True

    def finish(self, outcome: Outcome) -> Any:
        raise NotImplementedError

    def __repr__(self):
        return f"pg.{self.name}"


def is_integer(x: Any) -> bool:
    return hasattr(type(x), "__index__") and not isinstance(x, bool) and not isinstance(x, jax.Array)


class _Coordinatewise(Statistic):
    def __init__(self, name, phis, finish, minimum=1, for_fewer=""):
        self.name, self.phis, self.minimum, self.for_fewer = name, phis, minimum, for_fewer
        self.reductions = tuple(Mean(phi) for phi in phis)
        self._finish = finish

    def finish(self, outcome):
        means = [outcome.leaves[r] for r in self.reductions]
        leaves = [
            self._finish(*leaf, outcome.count * tokens) for *leaf, tokens in zip(*means, outcome.tokens, strict=True)
        ]
        return jax.tree.unflatten(outcome.treedef, leaves)


def coordinatewise(name: str, phis: tuple[Phi, ...], finish: Callable[..., jax.Array], minimum: int = 1) -> Statistic:
    """A statistic from means over the examples: ``finish(E φ₁(g), E φ₂(g), …, n)``, coordinate by coordinate.

    ``n`` is the number of examples (of tokens, at granularity="token").

    >>> import pergrad as pg
    >>> from pergrad.statistics import ABS, SQUARE, coordinatewise
    >>> def sparsity():
    ...     '''(E|g|)² / E g²: near 1 when all examples agree in size, near 0 when few carry the gradient.'''
    ...     return coordinatewise("sparsity()", (ABS, SQUARE), lambda a, s, n: a * a / s)
    >>> loss = lambda w, x: (x @ w).sum()
    >>> x = jnp.array([[1.0, 0.0], [3.0, 4.0]])
    >>> pg.grad_stats(loss, sparsity())(jnp.ones(2), x)
    Array([0.8, 0.5], dtype=float32)
    """
    return _Coordinatewise(name, phis, finish, minimum)


def mean() -> Statistic:
    """E g: the mean of the per-example gradients, which is the plain mini-batch gradient.

    Cost: none beyond the plain gradient. Merges by adding sums and counts.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.mean())(2.0, jnp.array([1.0, 3.0]))
    Array(2., dtype=float32)
    """
    return _Coordinatewise("mean()", (IDENTITY,), lambda g, n: g)


def second_moment() -> Statistic:
    """E g² (for complex parameters E |g|²), coordinate by coordinate.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.second_moment())(2.0, jnp.array([1.0, 3.0]))
    Array(5., dtype=float32)
    """
    return _Coordinatewise("second_moment()", (SQUARE,), lambda s, n: s)


def moment(k: int) -> Statistic:
    """E gᵏ for a positive integer k (not central: `variance` is).

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.moment(3))(2.0, jnp.array([1.0, 3.0]))
    Array(14., dtype=float32)
    """
    if not is_integer(k) or k < 1:
        raise ValueError(
            f"moment(k) takes a positive integer k, given {k!r}. For other powers write "
            "`pg.elementwise(lambda g: jnp.abs(g) ** p)`."
        )
    return _Coordinatewise(f"moment({k})", (Phi(f"g^{k}", _Power(k), multiplicative=True),), lambda m, n: m)


def abs_mean() -> Statistic:
    """E |g|, coordinate by coordinate.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.abs_mean())(2.0, jnp.array([1.0, -3.0]))
    Array(2., dtype=float32)
    """
    return _Coordinatewise("abs_mean()", (ABS,), lambda a, n: a)


def sign_mean() -> Statistic:
    """E sign(g): how far the examples agree on the sign, from −1 to 1; sign(0) is 0.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.sign_mean())(2.0, jnp.array([1.0, 7.0, -3.0, 2.0]))
    Array(0.5, dtype=float32)
    """
    return _Coordinatewise("sign_mean()", (SIGN,), lambda s, n: s)


def _central(g, s):
    # Rounding can leave a difference of two nearly equal numbers slightly below zero.
    return jnp.maximum(s - _square(g), 0)


def _bessel(n, ddof):
    # n/(n − ddof); with n = ddof (a mask that leaves too few examples) there is no estimate: NaN, not inf·0.
    return jnp.where(n > ddof, n / jnp.where(n > ddof, n - ddof, 1), jnp.nan)


def _check_ddof(name, ddof):
    if not is_integer(ddof) or ddof < 0:
        raise ValueError(f"{name}(ddof) takes a non-negative integer, given {ddof!r}. Write `pg.{name}(ddof=1)`.")


def variance(ddof: int = 0) -> Statistic:
    """Variance over the examples, (E g² − (E g)²) · n/(n − ddof), never negative.

    It is a difference of two sums in float32: where the mean is k times the standard deviation, its relative
    error is about k² · 10⁻⁷.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.variance(ddof=1))(2.0, jnp.array([1.0, 3.0]))
    Array(2., dtype=float32)
    """
    _check_ddof("variance", ddof)
    return _Coordinatewise(
        f"variance(ddof={ddof})",
        (IDENTITY, SQUARE),
        lambda g, s, n: _central(g, s) * _bessel(n, ddof),
        ddof + 1,
        "Write `pg.variance(ddof=0)`, or give a larger batch.",
    )


def std(ddof: int = 0) -> Statistic:
    """Standard deviation over the examples: the root of `variance`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.std())(2.0, jnp.array([1.0, 3.0]))
    Array(1., dtype=float32)
    """
    _check_ddof("std", ddof)
    return _Coordinatewise(
        f"std(ddof={ddof})",
        (IDENTITY, SQUARE),
        lambda g, s, n: jnp.sqrt(_central(g, s) * _bessel(n, ddof)),
        ddof + 1,
        "Write `pg.std(ddof=0)`, or give a larger batch.",
    )


def mean_square(unbiased: bool = True) -> Statistic:
    """(E g)², the squared mean gradient.

    With ``unbiased`` the estimate of μ² that does not count the noise: (n ḡ² − E g²)/(n − 1), which is ḡ² − σ̂²/n
    and may be negative; without, plain ḡ².

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, x = lambda w, x: (x * w).sum(), jnp.array([1.0, 3.0])
    >>> pg.grad_stats(loss, pg.mean_square())(2.0, x)
    Array(3., dtype=float32)
    >>> pg.grad_stats(loss, pg.mean_square(unbiased=False))(2.0, x)
    Array(4., dtype=float32)
    """
    if not unbiased:
        return _Coordinatewise("mean_square(unbiased=False)", (IDENTITY,), lambda g, n: _square(g))
    return _Coordinatewise(
        "mean_square()",
        (IDENTITY, SQUARE),
        lambda g, s, n: _square(g) - _central(g, s) * _bessel(n, 1) / n,
        2,
        "Write `pg.mean_square(unbiased=False)`, or give a larger batch.",
    )


def snr() -> Statistic:
    """Signal to noise per coordinate: |E g| / σ̂, with the unbiased σ̂ (ddof = 1).

    Where no example has a gradient it is 0; where all agree exactly it is infinite.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.snr())(2.0, jnp.array([1.0, 3.0]))
    Array(1.4142135, dtype=float32)
    """

    def finish(g, s, n):
        return jnp.where(s == 0, 0.0, jnp.abs(g) / jnp.sqrt(_central(g, s) * _bessel(n, 1)))

    return _Coordinatewise(
        "snr()", (IDENTITY, SQUARE), finish, 2, "There is no noise to be seen in one: give a larger batch."
    )


def elementwise(fn: Callable[[jax.Array], jax.Array], name: str | None = None) -> Statistic:
    """E fn(g) for any function of one coordinate, such as ``lambda g: jnp.log(jnp.abs(g) + 1e-8)`` or ``jnp.tanh``.

    ``fn`` sees arrays of per-example gradient coordinates, of any shape, in float32 or wider, and must work
    coordinate by coordinate. It need not vanish at 0.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> positive = pg.elementwise(lambda g: g > 0)
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), positive)(2.0, jnp.array([1.0, -3.0]))
    Array(0.5, dtype=float32)
    """
    if not callable(fn):
        raise TypeError(
            f"elementwise(fn) takes a function of an array, given {type(fn).__name__}. "
            "Write `pg.elementwise(jnp.tanh)` or `pg.elementwise(lambda g: g > 0)`."
        )
    label = name or getattr(fn, "__name__", repr(fn))
    return _Coordinatewise(f"elementwise({label})", (Phi(label, fn),), lambda m, n: m)


class _Norms(Statistic):
    reductions = (SquaredNorm(),)
    tokens = False

    def __init__(self, per_leaf):
        self.per_leaf = per_leaf
        self.name = "norms(per_leaf=True)" if per_leaf else "norms()"

    def finish(self, outcome):
        squares = outcome.leaves[SquaredNorm()]
        if self.per_leaf:
            return jax.tree.unflatten(outcome.treedef, [jnp.sqrt(s) for s in squares])
        return jnp.sqrt(sum(squares, start=jnp.zeros_like(outcome.losses)))


def norms(per_leaf: bool = False) -> Statistic:
    """‖g_b‖₂ of every example, over all parameters or (``per_leaf``) one per parameter leaf: shape [B].

    An example that the mask leaves out has norm 0.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    >>> pg.grad_stats(lambda w, x: (x @ w).sum(), pg.norms())(jnp.ones(2), x)
    Array([ 5., 10.], dtype=float32)
    """
    return _Norms(per_leaf)


class _Losses(Statistic):
    name = "losses()"

    def finish(self, outcome):
        return outcome.losses


def losses() -> Statistic:
    """f_b, the loss of every example: shape [B]; 0 for an example that the mask leaves out.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.losses())(2.0, jnp.array([1.0, 3.0]))
    Array([2., 6.], dtype=float32)
    """
    return _Losses()


class _PerExample(Statistic):
    name = "per_example()"
    reductions = (Stack(),)
    tokens = False

    def finish(self, outcome):
        return jax.tree.unflatten(outcome.treedef, outcome.leaves[Stack()])


def per_example() -> Statistic:
    """Every per-example gradient: a tree like the parameters with a leading axis B. For small cases: it takes
    B times the parameters' memory.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.per_example())(2.0, jnp.array([1.0, 3.0]))
    Array([1., 3.], dtype=float32)
    """
    return _PerExample()
