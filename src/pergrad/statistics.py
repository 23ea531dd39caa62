"""The catalogue of statistics: what each needs from the engine, and how it finishes.

A statistic never knows about rules, and a rule never about statistics: between them are the **reductions**
(`reductions`), what the engine computes leaf by leaf. A **statistic** lists the reductions that it needs and finishes
them: the variance is `Mean(g)` and `Mean(g²)` and then E g² − (E g)². Statistics in one call share reductions, and one
backward pass serves them all.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .reductions import (
    ABS,
    IDENTITY,
    SIGN,
    SQUARE,
    Dot,
    Given,
    Gram,
    Histogram,
    Late,
    MaxAbs,
    Mean,
    OverBatch,
    Phi,
    Projection,
    Reduction,
    SquaredNorm,
    Stack,
    WeightedMean,
    keep,
    refuse_complex,
    square,
)

# ---------------------------------------------------------------------------------- what a statistic is


class Outcome(NamedTuple):
    """What the engine hands to `Statistic.finish`."""

    leaves: dict[Reduction, list[Any]]  # reduction -> one result per parameter leaf (None: not asked of it)
    losses: jax.Array  # [B], zero for an example that the mask leaves out
    count: Any  # how many examples count
    tokens: list[int]  # per leaf: positions per example (1 at granularity "example")
    problem: Any  # a `trace.Problem`: the parameters, their names and their tree

    def tree(self, leaves: Iterable[Any]) -> Any:
        """The leaves as a tree like the parameters."""
        return jax.tree.unflatten(self.problem.treedef, leaves)


class Statistic:
    """Base of all statistics; a new one is a subclass or, mostly, one call of `coordinatewise`.

    `name` is what the user wrote, `reductions` what the engine must compute, and `minimum` the fewest examples
    for which the statistic means something.
    """

    name: str
    reductions: tuple[Any, ...] = ()
    minimum: int = 1
    for_fewer: str = ""  # what to write when there are fewer

    @property
    def tokens(self) -> bool:
        """Has it a meaning at granularity="token"? What is one result per example, or about whole gradients, has none."""
        return all(r.coordinatewise and not r.per_example and not isinstance(r, Late) for r in self.reductions)

    def leaves(self, names: list[str]) -> Sequence[int]:
        """Which parameter leaves it looks at."""
        return range(len(names))

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
        return outcome.tree(leaves)


class _Direct(Statistic):
    """One reduction, as it is."""

    def __init__(self, name, reduction):
        self.name, self.reductions = name, (reduction,)

    def finish(self, outcome):
        return outcome.tree(outcome.leaves[self.reductions[0]])


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

    Cost: none beyond the plain gradient. Parts of a batch merge as a weighted mean, by their counts.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.mean())(2.0, jnp.array([1.0, 3.0]))
    Array(2., dtype=float32)
    """
    return _Coordinatewise("mean()", (IDENTITY,), lambda g, n: g)


def second_moment() -> Statistic:
    """E g² (for complex parameters E |g|²), coordinate by coordinate.

    Cost: one more matmul for a layer used at one position; else a few operations per coordinate and example, on gradients
    formed a few at a time. Parts merge as a weighted mean.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.second_moment())(2.0, jnp.array([1.0, 3.0]))
    Array(5., dtype=float32)
    """
    return _Coordinatewise("second_moment()", (SQUARE,), lambda s, n: s)


@dataclasses.dataclass(frozen=True)
class _Power:
    k: int

    def __call__(self, g):
        return g**self.k


def moment(k: int) -> Statistic:
    """E gᵏ for a positive integer k (not central: `variance` is).

    Cost and merging as for `second_moment`.

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

    Cost and merging as for `second_moment`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.abs_mean())(2.0, jnp.array([1.0, -3.0]))
    Array(2., dtype=float32)
    """
    return _Coordinatewise("abs_mean()", (ABS,), lambda a, n: a)


def sign_mean() -> Statistic:
    """E sign(g): how far the examples agree on the sign, from −1 to 1; sign(0) is 0.

    Cost and merging as for `second_moment`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.sign_mean())(2.0, jnp.array([1.0, 7.0, -3.0, 2.0]))
    Array(0.5, dtype=float32)
    """
    return _Coordinatewise("sign_mean()", (SIGN,), lambda s, n: s)


def _central(g, s):
    # Rounding can leave a difference of two nearly equal numbers slightly below zero.
    return jnp.maximum(s - square(g), 0)


def _bessel(n, ddof):
    # n/(n − ddof); with n = ddof (a mask that leaves too few examples) there is no estimate: NaN, not inf·0.
    return jnp.where(n > ddof, n / jnp.where(n > ddof, n - ddof, 1), jnp.nan)


def _check_ddof(name, ddof):
    if not is_integer(ddof) or ddof < 0:
        raise ValueError(f"{name}(ddof) takes a non-negative integer, given {ddof!r}. Write `pg.{name}(ddof=1)`.")


def variance(ddof: int = 0) -> Statistic:
    """Variance over the examples, (E g² − (E g)²) · n/(n − ddof), never negative.

    It is a difference of two sums in float32: where the mean is k times the standard deviation, its relative
    error is about k² · 10⁻⁷. Cost: that of `mean` and `second_moment`. Parts merge through these two, not by themselves:
    microbatches do, and across devices take `mean` and `second_moment`, merge them, and form the variance afterwards.

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
    """Standard deviation over the examples: the root of `variance`. Cost and merging as there.

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
    and may be negative; without, plain ḡ². Cost and merging as for `variance`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, x = lambda w, x: (x * w).sum(), jnp.array([1.0, 3.0])
    >>> pg.grad_stats(loss, pg.mean_square())(2.0, x)
    Array(3., dtype=float32)
    >>> pg.grad_stats(loss, pg.mean_square(unbiased=False))(2.0, x)
    Array(4., dtype=float32)
    """
    if not unbiased:
        return _Coordinatewise("mean_square(unbiased=False)", (IDENTITY,), lambda g, n: square(g))
    return _Coordinatewise(
        "mean_square()",
        (IDENTITY, SQUARE),
        lambda g, s, n: square(g) - _central(g, s) * _bessel(n, 1) / n,
        2,
        "Write `pg.mean_square(unbiased=False)`, or give a larger batch.",
    )


def snr() -> Statistic:
    """Signal to noise per coordinate: |E g| / σ̂, with the unbiased σ̂ (ddof = 1).

    Where no example has a gradient it is 0; where all agree exactly it is infinite. Cost and merging as for `variance`.

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
    coordinate by coordinate. It need not vanish at 0. Cost: ``fn`` on gradients formed a few at a time. Parts merge as a
    weighted mean.

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


def histogram(edges: Sequence[float]) -> Statistic:
    """How many examples have the coordinate in each bin, as `np.histogram` counts: for a leaf of shape S, [bins, *S].

    ``edges`` are increasing numbers (`±inf` are allowed), rounded to the gradient's type; bins hold their lower edge, the last
    one both. Values outside, and NaN, are in none. Cost: a comparison for each coordinate, example and bin, on gradients
    formed a few at a time. Parts of a batch merge by adding; counts are exact.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([1.0, -3.0, 0.5, 1.0])
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.histogram([-4, 0, 1, 2]))(2.0, x)
    Array([1, 1, 2], dtype=int32)
    """
    try:
        bounds = [float(e) for e in edges]
    except (TypeError, ValueError):
        bounds = []
    if len(bounds) < 2 or not all(a < b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"histogram(edges) takes at least two increasing numbers, known when the step is built; given {edges!r}. "
            "Write, for example, `pg.histogram(np.linspace(-1, 1, 21))`."
        )
    return _Direct(f"histogram({', '.join(f'{e:g}' for e in bounds)})", Histogram(tuple(bounds)))


# ---------------------------------------------------------------------------------- over all values of a coordinate


def max_abs() -> Statistic:
    """max |g| over the examples, coordinate by coordinate.

    Cost: as `abs_mean` where gradients are formed. Parts of a batch merge by their maximum.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.max_abs())(2.0, jnp.array([1.0, -3.0, 2.0]))
    Array(3., dtype=float32)
    """
    return _Direct("max_abs()", MaxAbs())


def median() -> Statistic:
    """The median over the examples, coordinate by coordinate: of an even number, the mean of the middle two.

    NaN in one example makes it NaN. Cost: gradients of all examples are formed for some columns of a leaf at a time (as
    many as `chunk_bytes` allows), and sorted. It cannot be had from parts of a batch: with `microbatch_size` it is an
    error.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.median())(2.0, jnp.array([1.0, 9.0, 2.0]))
    Array(2., dtype=float32)
    """
    return _Direct("median()", OverBatch(_Quantile(0.5)))


def quantile(q: float | Sequence[float]) -> Statistic:
    """The q-quantile over the examples, coordinate by coordinate, interpolated linearly as by `np.quantile`.

    For a sequence of numbers the results are stacked on a new leading axis, from one sort. Cost and merging (none) as for
    `median`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([4.0, 1.0, 3.0, 2.0])
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.quantile([0.0, 0.25, 1.0]))(2.0, x)
    Array([1.  , 1.75, 4.  ], dtype=float32)
    """
    many = isinstance(q, Sequence) or np.ndim(q) == 1
    given = [_number(x) for x in (q if isinstance(q, Iterable) and many else [q])]
    chosen = [x for x in given if x is not None and 0 <= x <= 1]
    if not chosen or len(chosen) < len(given):
        raise ValueError(f"quantile(q) takes numbers from 0 to 1, given {q!r}. Write `pg.quantile(0.9)`.")
    if not many:
        return _Direct(f"quantile({chosen[0]:g})", OverBatch(_Quantile(chosen[0])))
    listed = ", ".join(f"{x:g}" for x in chosen)
    return _Direct(f"quantile([{listed}])", OverBatch(_Quantile(tuple(chosen)), (len(chosen),)))


def mad() -> Statistic:
    """The median absolute deviation over the examples: median |g − median g|, coordinate by coordinate, unscaled.

    1.4826 times it estimates σ where gradients are normal. Cost (two sorts) and merging (none) as for `median`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.mad())(2.0, jnp.array([1.0, 9.0, 2.0]))
    Array(1., dtype=float32)
    """
    return _Direct("mad()", OverBatch(_Mad()))


def trimmed_mean(p: float) -> Statistic:
    """The mean without the ⌊p·n⌋ smallest and the ⌊p·n⌋ largest values, coordinate by coordinate; 0 ≤ p < 1/2.

    Cost and merging (none) as for `median`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.trimmed_mean(0.25))(2.0, jnp.array([1.0, 90.0, 2.0, 4.0]))
    Array(3., dtype=float32)
    """
    share = _number(p)
    if share is None or not 0 <= share < 0.5:
        raise ValueError(
            f"trimmed_mean(p) takes the share to leave out on either side, 0 ≤ p < 0.5; given {p!r}. For all but the middle "
            "write `pg.median()`."
        )
    return _Direct(f"trimmed_mean({share:g})", OverBatch(_TrimmedMean(share)))


def reduce(fn: Callable[..., jax.Array]) -> Statistic:
    """Any function of all values of a coordinate: ``fn`` maps [B, …] to […].

    It is called for some columns of a leaf at a time, in float32 or wider, and must treat coordinates alike. With a mask it
    is called as ``fn(g, where=mask)``, the mask broadcastable to g, as NumPy's reductions understand it, and g zero where
    the mask is False. Cost: gradients of all examples are formed, as for `median`; there is no merging of parts.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> rms = pg.reduce(lambda g, where=None: jnp.sqrt(jnp.mean(g**2, axis=0, where=where)))
    >>> step = pg.grad_stats(lambda w, x: (x * w).sum(), rms)
    >>> print(step(2.0, jnp.array([1.0, 7.0])), step(2.0, jnp.array([1.0, 7.0]), mask=jnp.array([True, False])))
    5.0 1.0
    """
    if not callable(fn):
        raise TypeError(
            f"reduce(fn) takes a function of an array, given {type(fn).__name__}. "
            "Write `pg.reduce(lambda g: jnp.std(g, axis=0))`."
        )
    label = getattr(fn, "__name__", repr(fn))
    return _Direct(f"reduce({label})", OverBatch(_Users(fn, label)))


def _number(x) -> float | None:
    return float(x) if isinstance(x, numbers.Real) and not isinstance(x, bool) else None


def _ordered(g, mask):
    """Sorted values, those that do not count last; how many count; and where the result must be NaN."""
    refuse_complex("median, mad, quantile and trimmed_mean", g)
    if mask is None:
        return jnp.sort(g, axis=0), len(g), jnp.any(jnp.isnan(g), axis=0)
    mask = mask.reshape(-1, *(1,) * (g.ndim - 1))
    count = jnp.sum(mask)
    return jnp.sort(jnp.where(mask, g, jnp.inf), axis=0), count, jnp.any(jnp.isnan(g) & mask, axis=0) | (count == 0)


def _at_count(table: Callable[[np.ndarray], np.ndarray], count, most: int):
    """``table(count)``, worked out in NumPy's full precision also where the count is only known later."""
    if isinstance(count, int):
        return table(np.asarray(count))[()]
    return jnp.asarray(table(np.maximum(np.arange(most + 1), 1)))[count]


def _quantile_of(ordered, count, q: float):
    most = len(ordered)
    low = _at_count(lambda n: np.floor(q * (n - 1)).astype(np.int32), count, most)
    high = _at_count(lambda n: np.ceil(q * (n - 1)).astype(np.int32), count, most)
    share = _at_count(lambda n: (q * (n - 1) % 1).astype(ordered.dtype), count, most)
    a, b = ordered[low], ordered[high]
    return jnp.where((a == b) | (share == 0), a, a + (b - a) * share)


@dataclasses.dataclass(frozen=True)
class _Quantile:
    q: float | tuple[float, ...]

    def __call__(self, g, mask):
        ordered, count, broken = _ordered(g, mask)
        if isinstance(self.q, tuple):
            out = jnp.stack([_quantile_of(ordered, count, q) for q in self.q])
        else:
            out = _quantile_of(ordered, count, self.q)
        return jnp.where(broken, jnp.nan, out)


@dataclasses.dataclass(frozen=True)
class _Mad:
    def __call__(self, g, mask):
        middle = _Quantile(0.5)
        return middle(jnp.abs(g - middle(g, mask)), mask)


@dataclasses.dataclass(frozen=True)
class _TrimmedMean:
    p: float

    def __call__(self, g, mask):
        ordered, count, broken = _ordered(g, mask)
        out = _at_count(lambda n: np.floor(self.p * n).astype(np.int32), count, len(g))
        place = jnp.arange(len(g)).reshape(-1, *(1,) * (g.ndim - 1))
        inside = (place >= out) & (place < count - out)
        return jnp.where(broken, jnp.nan, jnp.sum(jnp.where(inside, ordered, 0), axis=0) / (count - 2 * out))


@dataclasses.dataclass(frozen=True)
class _Users:
    fn: Callable
    label: str

    def __call__(self, g, mask):
        if mask is not None and not _takes(self.fn, "where"):
            raise TypeError(
                f"reduce({self.label}) was given a mask, but {self.label} takes no `where`; expected a function that leaves "
                "out what does not count. Write, for example, `lambda g, where=None: jnp.std(g, axis=0, where=where)`."
            )
        out = self.fn(g) if mask is None else self.fn(keep(g, mask), where=mask.reshape(-1, *(1,) * (g.ndim - 1)))
        if jnp.shape(out) != g.shape[1:]:
            raise ValueError(
                f"reduce({self.label}) must map [B, …] to […]; given {g.shape}, it returned {jnp.shape(out)}. "
                "Write, for example, `lambda g: jnp.std(g, axis=0)`."
            )
        return out


def _takes(fn: Callable, name: str) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == name or p.kind == p.VAR_KEYWORD for p in parameters)


# ---------------------------------------------------------------------------------- one number per example


def _over_leaves(outcome, leaves, per_leaf: bool, finish: Callable = lambda x: x):
    """Results of leaves that add: a tree of them, or their sum."""
    if per_leaf:
        return outcome.tree([finish(x) for x in leaves])
    return finish(sum(leaves, start=jnp.zeros_like(outcome.losses)))


def _named(name: str, given: str, per_leaf: bool) -> str:
    return f"{name}({', '.join([given] * bool(given) + ['per_leaf=True'] * per_leaf)})"


class _Norms(Statistic):
    reductions = (SquaredNorm(),)

    def __init__(self, per_leaf):
        self.per_leaf = per_leaf
        self.name = _named("norms", "", per_leaf)

    def finish(self, outcome):
        return _over_leaves(outcome, outcome.leaves[SquaredNorm()], self.per_leaf, jnp.sqrt)


def norms(per_leaf: bool = False) -> Statistic:
    """‖g_b‖₂ of every example, over all parameters or (``per_leaf``) one per parameter leaf: shape [B].

    An example that the mask leaves out has norm 0. Cost: of a dense layer, what is cheaper of t² products of positions
    and the gradient itself, per leaf; parts of a batch are laid one after the other.

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

    Cost: none; alone, it takes no backward pass. Parts of a batch are laid one after the other.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.losses())(2.0, jnp.array([1.0, 3.0]))
    Array([2., 6.], dtype=float32)
    """
    return _Losses()


class _Count(Statistic):
    name = "count()"

    def finish(self, outcome):
        count = outcome.count
        return count.astype(jnp.float32) if isinstance(count, jax.Array) else np.float32(count)


def count() -> Statistic:
    """How many examples count: the batch's size, less those that the mask leaves out. A float, to weight means with.

    Examples, also at granularity="token". Cost: none. Parts merge by adding. Without a mask it is a NumPy number, known even
    while tracing.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> step = pg.grad_stats(lambda w, x: (x * w).sum(), pg.count())
    >>> print(step(2.0, jnp.ones(3)), step(2.0, jnp.ones(3), mask=jnp.array([True, True, False])))
    3.0 2.0
    """
    return _Count()


class _Dot(Statistic):
    def __init__(self, name, tree, per_leaf, cosine):
        self.name, self.per_leaf, self.cosine = name, per_leaf, cosine
        self.dot = Dot(tree, name)
        self.reductions = (self.dot, *self.dot.needs, SquaredNorm()) if cosine else (self.dot,)

    def finish(self, outcome):
        dots = outcome.leaves[self.dot]
        if not self.cosine:
            return _over_leaves(outcome, dots, self.per_leaf)
        tree = self.dot.tree
        others = outcome.leaves[Mean(IDENTITY)] if tree is None else jax.tree.leaves(tree.value)
        squares = [jnp.sum(SQUARE(jnp.asarray(v))) for v in others]
        parts = list(zip(dots, outcome.leaves[SquaredNorm()], squares, strict=True))
        if self.per_leaf:
            return outcome.tree([_cosine(*part) for part in parts])
        zero = jnp.zeros_like(outcome.losses)
        return _cosine(*(sum(column, start=zero) for column in zip(*parts, strict=True))) if parts else zero


def _cosine(dot, a, b):
    # Roots apart: the product of two squares overflows (or vanishes) long before they do.
    return jnp.where((a == 0) | (b == 0), 0.0, dot / (jnp.sqrt(a) * jnp.sqrt(b)))


def dot(tree: Any, per_leaf: bool = False) -> Statistic:
    """⟨g_b, v⟩ of every example with one tree v like the parameters: shape [B]; the derivative of f_b along v.

    To first order, ε times it is how much a step of −ε v lowers each example's loss. 0 for an example that the mask leaves
    out; with complex parameters, the real part of Σ conj(g) v, of which ‖g‖² is the case v = g. Cost: one product of
    activations with v for each layer, as much as a forward pass, from operands that are kept until the backward pass is
    done; never a gradient per example. Parts of a batch are laid one after the other.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    >>> pg.grad_stats(lambda w, x: (x @ w).sum(), pg.dot(jnp.array([1.0, -1.0])))(jnp.ones(2), x)
    Array([-1., -2.], dtype=float32)
    """
    return _Dot(_named("dot", "tree", per_leaf), Given(tree), per_leaf, cosine=False)


def cosine(tree: Any = None, per_leaf: bool = False) -> Statistic:
    """The cosine of every example's gradient with one tree, or with the batch's mean gradient: shape [B].

    0 where either is zero. Cost: that of `norms`, `dot`, and without a tree `mean`. Parts of a batch are laid one after the
    other with a tree; without, the mean must be that of all examples, and `microbatch_size` is an error.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 4.0], [-4.0, 3.0], [3.0, 4.0]])
    >>> with_mean = pg.grad_stats(lambda w, x: (x @ w).sum(), pg.cosine())(jnp.ones(2), x)
    >>> with_tree = pg.grad_stats(lambda w, x: (x @ w).sum(), pg.cosine(jnp.array([1.0, 0.0])))(jnp.ones(2), x)
    >>> print([f"{c:.2f}" for c in with_mean], [f"{c:.2f}" for c in with_tree])
    ['0.89', '0.45', '0.89'] ['0.60', '-0.80', '0.60']
    """
    given = None if tree is None else Given(tree)
    return _Dot(_named("cosine", "" if tree is None else "tree", per_leaf), given, per_leaf, cosine=True)


# ---------------------------------------------------------------------------------- weighted examples


class _WeightedMean(Statistic):
    def __init__(self, name, weigh):
        self.name, self.reductions = name, (WeightedMean(weigh),)

    def finish(self, outcome):
        return outcome.tree(outcome.leaves[self.reductions[0]])


def clipped_mean(max_norm: Any) -> Statistic:
    """E g · min(1, max_norm / ‖g‖): the mean of the gradients, each clipped to a norm over all parameters.

    For differential privacy add noise of scale σ · max_norm / B to it. ``max_norm`` may be an array of shape (), as adaptive
    clipping has it. Cost: one forward and one backward pass, the norms (as `norms`), and one contraction with weighted
    cotangents, whose operands are kept until all norms are known; no second backward pass. Parts of a batch merge as a
    weighted mean.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])           # norms 5 and 1
    >>> print(pg.grad_stats(lambda w, x: (x @ w).sum(), pg.clipped_mean(2.5))(jnp.ones(2), x))
    [0.75 1.5 ]
    """
    if isinstance(max_norm, jax.Array | np.ndarray) and max_norm.shape == ():
        return _WeightedMean("clipped_mean(max_norm)", _Clip(Given(max_norm)))
    bound = _number(max_norm)
    if bound is None or not bound > 0:
        raise ValueError(
            f"clipped_mean(max_norm) takes a positive number, or an array that holds one, given {max_norm!r}. Write "
            "`pg.clipped_mean(1.0)`."
        )
    return _WeightedMean(f"clipped_mean({bound:g})", _Clip(bound))


@dataclasses.dataclass(frozen=True)
class _Clip:
    max_norm: Any

    def __call__(self, norms):
        bound = jnp.asarray(self.max_norm.value) if isinstance(self.max_norm, Given) else self.max_norm
        return jnp.where(
            norms > bound, bound / jnp.where(norms > bound, norms, 1), jnp.where(jnp.isnan(norms), norms, 1)
        )


def normalized_mean() -> Statistic:
    """E g / ‖g‖: the mean of the gradients' directions, the norm over all parameters; 0/‖0‖ counts as 0.

    Cost and merging as for `clipped_mean`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[0.0, 0.1], [4.0, 0.0]])
    >>> print(pg.grad_stats(lambda w, x: (x @ w).sum(), pg.normalized_mean())(jnp.ones(2), x))
    [0.5 0.5]
    """
    return _WeightedMean("normalized_mean()", _normalize)


def _normalize(norms):
    return jnp.where(norms == 0, 0, 1 / jnp.where(norms == 0, 1, norms))


# ---------------------------------------------------------------------------------- matrices


class _Gram(Statistic):
    reductions = (Gram(),)

    def __init__(self, per_leaf):
        self.per_leaf, self.name = per_leaf, _named("gram", "", per_leaf)

    def finish(self, outcome):
        leaves, size = outcome.leaves[Gram()], len(outcome.losses)
        return (
            outcome.tree(leaves) if self.per_leaf else sum(leaves, start=jnp.zeros((size, size), outcome.losses.dtype))
        )


def gram(per_leaf: bool = False) -> Statistic:
    """⟨g_b, g_c⟩ for every two examples, over all parameters or per leaf: [B, B], the empirical neural tangent kernel.

    Rows and columns of examples that the mask leaves out are 0; with complex parameters, the real part. Cost: per leaf,
    what is cheaper of products of positions of every two examples and gradients formed some columns at a time. It
    cannot be had from parts of a batch: with `microbatch_size` it is an error.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])
    >>> print(pg.grad_stats(lambda w, x: (x @ w).sum(), pg.gram())(jnp.ones(2), x))
    [[25.  4.]
     [ 4.  1.]]
    """
    return _Gram(per_leaf)


class _Projections(Statistic):
    def __init__(self, key, dim):
        self.name, self.reductions = f"projections(key, {dim})", (Projection(Given(key), dim),)

    def finish(self, outcome):
        leaves = outcome.leaves[self.reductions[0]]
        dim = self.reductions[0].dim
        return sum(leaves, start=jnp.zeros((len(outcome.losses), dim), outcome.losses.dtype))


def projections(key: jax.Array, dim: int) -> Statistic:
    """P g_b of every example with one random P of ``dim`` rows of signs over √dim: [B, dim]. E ⟨Pg, Ph⟩ = ⟨g, h⟩.

    The sketch that data attribution stores for each example. P depends on the key alone, the same for every batch, and is
    made a few columns at a time; zeros for an example that the mask leaves out. Cost: gradients of a few examples at a
    time, from kept operands, for each of them 2·dim operations per coordinate, and P's signs anew for each time. Parts of
    a batch are laid one after the other.

    >>> import jax, jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    >>> sketch = pg.grad_stats(lambda w, x: (x @ w).sum(), pg.projections(jax.random.key(0), 64))(jnp.ones(2), x)
    >>> sketch.shape, bool(jnp.allclose(2 * sketch[0], sketch[1]))
    ((2, 64), True)
    """
    if not is_integer(dim) or dim < 1:
        raise ValueError(
            f"projections(key, dim) takes a positive integer dim, given {dim!r}. Write `pg.projections(key, 512)`."
        )
    typed = jnp.issubdtype(getattr(key, "dtype", np.float32), jax.dtypes.prng_key)
    if not (typed and key.shape == ()) and not (getattr(key, "dtype", None) == np.uint32 and key.ndim == 1):
        raise TypeError(
            f"projections(key, dim) takes one random key, given {type(key).__name__} {key!r}. Write "
            "`pg.projections(jax.random.key(0), 512)`."
        )
    return _Projections(key, int(dim))


class _PerExample(Statistic):
    name = "per_example()"
    reductions = (Stack(),)

    def finish(self, outcome):
        return outcome.tree(outcome.leaves[Stack()])


def per_example() -> Statistic:
    """Every per-example gradient: a tree like the parameters with a leading axis B. For small cases: it takes
    B times the parameters' memory. Parts of a batch are laid one after the other.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.per_example())(2.0, jnp.array([1.0, 3.0]))
    Array([1., 3.], dtype=float32)
    """
    return _PerExample()


# ---------------------------------------------------------------------------------- summaries


class NoiseScale(NamedTuple):
    """What `noise_scale` gives. Average `trace` and `squared_norm` over steps, not their ratio, which is heavy-tailed."""

    scale: Any  # trace / squared_norm
    trace: Any  # unbiased tr Σ: the sum of the variances of all coordinates
    squared_norm: Any  # unbiased ‖μ‖²; may be negative where the batch is too small to see the gradient


class _NoiseScale(Statistic):
    reductions = (Mean(IDENTITY), SquaredNorm())
    minimum = 2
    for_fewer = "There is no noise to be seen in one: give a larger batch."

    def __init__(self, per_leaf, only):
        self.per_leaf, self.only = per_leaf, only
        shown = "" if only is None else f"only={only!r}" if isinstance(only, str) else "only=…"
        self.name = _named("noise_scale", shown, per_leaf)

    def leaves(self, names):
        if self.only is None:
            return range(len(names))
        wanted = self.only if callable(self.only) else lambda name: re.search(self.only, name) is not None
        chosen = [k for k, name in enumerate(names) if wanted(name)]
        if not chosen:
            raise ValueError(
                f"{self!r} matches no parameter; there are {', '.join(names[:8])}{', …' if len(names) > 8 else ''}. Write a "
                'regular expression that finds some of these, such as `only="norm|scale"`, or a function of the name.'
            )
        return chosen

    def finish(self, outcome):
        n = outcome.count
        found = []
        for k in self.leaves(outcome.problem.names):
            mean, norms = outcome.leaves[Mean(IDENTITY)][k], outcome.leaves[SquaredNorm()][k]
            found.append((k, jnp.sum(square(mean)), jnp.sum(norms) / n))
        if not self.per_leaf:
            squared, total = (sum((x[i] for x in found), start=jnp.zeros(())) for i in (1, 2))
            return _noise_scale(squared, total, n)
        by_leaf = {k: _noise_scale(squared, total, n) for k, squared, total in found}
        columns = zip(*(by_leaf.get(k, (None,) * 3) for k in range(len(outcome.problem.names))), strict=True)
        return NoiseScale(*(outcome.tree(column) for column in columns))


def _noise_scale(squared, total, n) -> NoiseScale:
    """From ‖ḡ‖² and E ‖g‖²: E ‖ḡ‖² = ‖μ‖² + tr Σ/n and E ‖g‖² = ‖μ‖² + tr Σ, solved for the two unknowns."""
    trace = jnp.maximum(total - squared, 0) * _bessel(n, 1)
    norm = squared - trace / n
    return NoiseScale(trace / norm, trace, norm)


def noise_scale(per_leaf: bool = False, only: str | Callable[[str], bool] | None = None) -> Statistic:
    """The gradient noise scale tr Σ / ‖μ‖², the batch size above which larger batches help little: a `NoiseScale`.

    Both parts are unbiased estimates over the batch's examples (McCandlish et al., arXiv 1812.06162). ``per_leaf``: of each
    parameter leaf by itself. ``only``: of the leaves alone whose name (such as ``['norm']['scale']``) a regular expression
    finds or a function accepts, the rest costing nothing: those of normalisation layers alone track the whole (Gray et
    al., arXiv 2411.00999), and are the cheapest of all. Cost: `mean` and `norms`. Parts of a batch merge through
    these two, as microbatches do.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> x = jnp.array([[3.0, 1.0], [5.0, -1.0]])
    >>> found = pg.grad_stats(lambda w, x: (x @ w).sum(), pg.noise_scale())(jnp.ones(2), x)
    >>> print(found.trace, found.squared_norm, found.scale.round(4))
    4.0 14.0 0.2857
    """
    if not (only is None or isinstance(only, str) or callable(only)):
        raise TypeError(
            f"noise_scale(only=…) takes a regular expression or a function of a leaf's name, given {only!r}. Write, for "
            'example, `pg.noise_scale(only="norm|scale")`.'
        )
    return _NoiseScale(per_leaf, only)
