"""What the engine computes of the per-example gradients of one leaf; statistics are finished from these.

A **reduction** is defined by its method `of`, for the gradients g[b, ...] of some examples; rules may have a faster way
to the same numbers. Three questions sort them:

* Is the result of the leaf's shape (`coordinatewise`), or numbers that add over disjoint parts of a leaf?
* Does it have one entry for each example (`per_example`), or is it over all of them?
* How do results for parts of a batch merge? Mostly they add; `whole` reductions cannot be had from parts.

`Late` reductions are linear in the gradients and need to know something of the whole batch first, as clipping needs
the norms: they are taken after the backward pass, from the operands that it leaves behind.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import compat


def accumulator(dtype) -> Any:
    """Sums are kept in float32, or in the wider type where the gradient has one."""
    return jnp.promote_types(dtype, jnp.float32)


# ---------------------------------------------------------------------------------- φ


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


def square(g):
    return jnp.real(g * jnp.conj(g)) if jnp.iscomplexobj(g) else g * g


IDENTITY = Phi("g", lambda g: g, multiplicative=True)
SQUARE = Phi("g²", square, multiplicative=True)
ABS = Phi("|g|", jnp.abs, multiplicative=True)
SIGN = Phi("sign g", jnp.sign, multiplicative=True)


# ---------------------------------------------------------------------------------- in the backward pass


def keep(values, mask):
    """Set to zero what belongs to examples that do not count (whatever they hold, NaN included)."""
    if mask is None:
        return values
    return jnp.where(mask.reshape(mask.shape + (1,) * (values.ndim - 1)), values, 0)


class Reduction:
    """What the engine computes for every leaf; `of` defines it, for the gradients g[b, ...] of some examples.

    `per_example`: the result has the examples on its leading axis, and parts of a batch are laid one after the
    other; otherwise `merge` joins them. `coordinatewise`: the rest of the result has the leaf's shape, behind the
    axes `lead`; otherwise the results of disjoint parts of a leaf add. `whole`: `of` must see all examples at once.
    """

    per_example: bool
    coordinatewise: bool
    whole: bool = False
    lead: tuple[int, ...] = ()

    def of(self, g: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        raise NotImplementedError

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The result for two parts of a batch from theirs."""
        return a + b

    def nothing(self, shape, dtype, size: int) -> jax.Array:
        """Zeros of the shape and dtype that it has, for one example of ``size`` or for all of them."""
        out = jax.eval_shape(self.of, jax.ShapeDtypeStruct((size, 1), dtype))
        others = out.shape[1:] if self.per_example else out.shape
        return jnp.zeros((*self.lead, *shape) if self.coordinatewise else others, out.dtype)

    def of_zeros(self, dtype, size: int, mask: jax.Array | None, share: Any) -> jax.Array | None:
        """For a coordinate in which ``size`` examples have no gradient, [*lead]; None where that is zero.

        ``share`` is what those of them that count amount to in a `Mean`.
        """
        return None


@dataclasses.dataclass(frozen=True)
class Mean(Reduction):
    """E φ(g), one number per coordinate. `of` gives the sum over its examples, for the caller to weight."""

    phi: Phi
    per_example = False
    coordinatewise = True

    def of(self, g, mask=None):
        return add_up(keep(self.phi(g), mask))

    def of_zeros(self, dtype, size, mask, share):
        at_zero = self.phi.at_zero(accumulator(dtype))
        return None if at_zero == 0 else jnp.asarray(at_zero) * share


def add_up(values):
    """The sum over the leading axis."""
    if 0 < len(values) <= 8:
        # The same sum, written so that several φ of one small chunk share a single loop: XLA's CPU
        # reduction over a leading axis is up to 50 times slower (JAX 0.10).
        return functools.reduce(operator.add, [values[b] for b in range(len(values))])
    return jnp.sum(values, axis=0, dtype=values.dtype)


@dataclasses.dataclass(frozen=True)
class MaxAbs(Reduction):
    """max_b |g_b|, one number per coordinate; parts of a batch merge by their maximum."""

    per_example = False
    coordinatewise = True

    def of(self, g, mask=None):
        return jnp.max(keep(ABS(g), mask), axis=0, initial=0)

    def merge(self, a, b):
        return jnp.maximum(a, b)


@dataclasses.dataclass(frozen=True)
class Histogram(Reduction):
    """How many examples have the coordinate between each two edges, [bins, …]; parts of a batch add.

    Counts are integers: a sum of many ones is exact in them, where the mean of many 1/n in float32 is not.
    """

    edges: tuple[float, ...]
    per_example = False
    coordinatewise = True

    @property
    def lead(self):
        return (len(self.edges) - 1,)

    def of(self, g, mask=None):
        refuse_complex("histogram", g)
        bins = [bound.reshape(-1, *(1,) * (g.ndim - 1)) for bound in self.bins(g.dtype)]
        return add_up(keep(in_bin(g[:, None], *bins), mask))

    def bins(self, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of every bin the lower edge, the upper one, and whether it holds that too."""
        low, high = (jnp.asarray(edges, accumulator(dtype)) for edges in (self.edges[:-1], self.edges[1:]))
        return low, high, jnp.arange(len(low)) == len(low) - 1

    def of_zeros(self, dtype, size, mask, share):
        return in_bin(0, *self.bins(dtype)) * jnp.int32(size if mask is None else jnp.sum(mask))


def in_bin(g, low, high, closed) -> jax.Array:
    return ((g >= low) & ((g < high) | (closed & (g == high)))).astype(jnp.int32)


def refuse_complex(name, g):
    if jnp.iscomplexobj(g):
        raise TypeError(
            f"{name} orders the values of a coordinate; given complex gradients, which have no order. Make the parameter's "
            "real and imaginary part two parameters."
        )


@dataclasses.dataclass(frozen=True)
class OverBatch(Reduction):
    """A function of all B values of a coordinate: ``fn(g, mask)`` maps [B, …] to [*lead, …]."""

    fn: Callable[[jax.Array, jax.Array | None], jax.Array]
    lead: tuple[int, ...] = ()
    per_example = False
    coordinatewise = True
    whole = True

    def of(self, g, mask=None):
        out = self.fn(g.astype(accumulator(g.dtype)), mask)
        return out.astype(accumulator(out.dtype))  # as in a φ: predicates and integers count as numbers

    def of_zeros(self, dtype, size, mask, share):
        return self.of(jnp.zeros((size, 1), dtype), mask)[..., 0]


@dataclasses.dataclass(frozen=True)
class SquaredNorm(Reduction):
    """‖g_b‖² of this leaf, one number per example."""

    per_example = True
    coordinatewise = False

    def of(self, g, mask=None):
        squares = SQUARE(g)
        return keep(jnp.sum(squares, axis=tuple(range(1, g.ndim))), mask)


@dataclasses.dataclass(frozen=True)
class Gram(Reduction):
    """⟨g_b, g_c⟩ of this leaf for every two examples, [B, B]; with complex parameters, the real part."""

    per_example = False
    coordinatewise = False
    whole = True

    def of(self, g, mask=None):
        g = keep(g.astype(accumulator(g.dtype)), mask).reshape(len(g), -1)
        return inner(g, g)


def inner(a, b):
    """Re ⟨a_b, b_c⟩ for rows b and c."""
    return jnp.real(jnp.einsum("bi,ci->bc", a, jnp.conj(b)))


@dataclasses.dataclass(frozen=True)
class Stack(Reduction):
    """The per-example gradients themselves."""

    per_example = True
    coordinatewise = True

    def of(self, g, mask=None):
        return keep(g.astype(accumulator(g.dtype)), mask)


# ---------------------------------------------------------------------------------- after the backward pass


class Given:
    """What a user gave to a statistic (a tree, a key), as part of a reduction: equal to itself only."""

    def __init__(self, value: Any):
        self.value = value


class First(NamedTuple):
    """What is known when late reductions begin."""

    leaves: dict[Reduction, list[jax.Array]]  # reduction of the first pass -> one result per parameter leaf
    weight: Any  # what one example counts for in a mean
    problem: Any  # a `trace.Problem`: the parameters, their names and their tree


class Late(Reduction):
    """A reduction that is linear in g, given something about the whole batch: `needs`, from the first pass.

    ``context(first)`` has one entry for each parameter leaf, and ``of(g, mask, context)`` is the definition;
    ``without_gradient`` says what that gives for a leaf of this shape that has none.
    """

    needs: tuple[Reduction, ...] = ()

    def context(self, first: First) -> Sequence[Any]:
        raise NotImplementedError

    def of(self, g, mask=None, context: Any = None):
        raise NotImplementedError

    def without_gradient(self, shape, dtype, size: int, mask, context) -> jax.Array:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class WeightedMean(Late):
    """E w(‖g‖) g, the norm over all parameters. `of` is given the weights, one over the number of examples included."""

    weigh: Callable[[jax.Array], jax.Array]
    needs = (SquaredNorm(),)
    per_example = False
    coordinatewise = True

    def context(self, first):
        squares = first.leaves[SquaredNorm()]
        weights = self.weigh(jnp.sqrt(functools.reduce(operator.add, squares))) * first.weight
        return [weights] * len(squares)

    def of(self, g, mask=None, context: Any = None):
        return jnp.tensordot(keep(context, mask), keep(g, mask).astype(accumulator(g.dtype)), axes=1)

    def without_gradient(self, shape, dtype, size, mask, context):
        # Not always 0: the weight of an example with a NaN is NaN, and spoils every coordinate.
        return jnp.broadcast_to(self.of(jnp.zeros(size, dtype), mask, context), shape)


@dataclasses.dataclass(frozen=True)
class Dot(Late):
    """⟨g_b, v⟩ of this leaf, one number per example: v a tree like the parameters, or (None) the mean gradient."""

    tree: Given | None
    what: str = "dot(tree)"

    per_example = True
    coordinatewise = False

    @property
    def whole(self):
        return self.tree is None

    @property
    def needs(self):
        return (Mean(IDENTITY),) if self.tree is None else ()

    def context(self, first):
        if self.tree is None:
            return first.leaves[Mean(IDENTITY)]
        problem = first.problem
        leaves = problem.leaves_like_params(self.tree.value, self.what)
        for name, leaf, param in zip(problem.names, leaves, problem.params, strict=True):
            if jnp.iscomplexobj(leaf) and not jnp.iscomplexobj(param):
                raise TypeError(
                    f"{self.what} takes a tree like the parameters; at {name} it is {leaf.dtype}, where the parameter is "
                    f"{param.dtype}. Write the products with its real and its imaginary part."
                )
        return [
            leaf.astype(accumulator(jnp.promote_types(leaf.dtype, p.dtype))) for leaf, p in zip(leaves, problem.params)
        ]

    def of(self, g, mask=None, context: Any = None):
        g = keep(g.astype(accumulator(g.dtype)), mask)
        return inner(g.reshape(len(g), -1), jnp.reshape(context, (1, -1)))[:, 0]

    def without_gradient(self, shape, dtype, size, mask, context):
        return jnp.zeros(size, jnp.finfo(context.dtype).dtype)  # the real type of complex ones


@dataclasses.dataclass(frozen=True)
class Projection(Late):
    """P g_b, with P's column for coordinate i of leaf l the signs in ``random.bits(fold_in(fold_in(key, l), i))``, over √dim.

    Entries of one column are independent signs, so E ⟨Pg, Ph⟩ = ⟨g, h⟩. A column takes one word of random bits for 32
    entries, and depends on nothing but the key and its place: P is never stored.
    """

    key: Given
    dim: int

    per_example = True
    coordinatewise = False

    def context(self, first):
        return [jax.random.fold_in(self.key.value, k) for k in range(len(first.problem.params))]

    def of(self, g, mask=None, context: Any = None):
        g = keep(g.astype(accumulator(g.dtype)), mask).reshape(len(g), -1)
        if jnp.iscomplexobj(g):
            raise TypeError(
                "projections takes real parameters, given complex ones. Make the real and imaginary part two parameters."
            )
        words, count = -(-self.dim // 32), g.shape[1]
        if count == 0:
            return jnp.zeros((len(g), self.dim), g.dtype)
        width = max(1, min(count, (4 << 20) // (4 * self.dim)))  # columns of P at once: 4 MiB of them
        steps = -(-count // width)
        g = jnp.pad(g, ((0, 0), (0, steps * width - count)))

        def step(total, start):
            place = start + jnp.arange(width, dtype=jnp.uint32)
            bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(context, i), (words,), jnp.uint32))(place)
            bits = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
            signs = 1 - 2 * bits.reshape(width, -1)[:, : self.dim].astype(g.dtype)
            part = jax.lax.dynamic_slice_in_dim(g, start, width, 1)
            return total + part @ signs, None

        total = compat.zeros_of(lambda g: g[:, :1] @ jnp.zeros((1, self.dim), g.dtype), g)
        total, _ = jax.lax.scan(step, total, width * jnp.arange(steps, dtype=jnp.uint32))
        return total / jnp.sqrt(jnp.asarray(self.dim, g.dtype))

    def without_gradient(self, shape, dtype, size, mask, context):
        return jnp.zeros((size, self.dim), accumulator(dtype))
