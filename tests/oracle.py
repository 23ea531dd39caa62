"""The comparison of all tests: statistics by surgery against the vmap twin, leaf by leaf, with an honest tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg

# Every statistic of the catalogue that a float comparison can judge. `cos` does not vanish at zero.
STATISTICS = {
    "mean": pg.mean(),
    "second_moment": pg.second_moment(),
    "third_moment": pg.moment(3),
    "abs_mean": pg.abs_mean(),
    "sign_mean": pg.sign_mean(),
    "variance": pg.variance(ddof=1),
    "std": pg.std(),
    "mean_square": pg.mean_square(),
    "cos": pg.elementwise(jnp.cos),
    "norms": pg.norms(),
    "leaf_norms": pg.norms(per_leaf=True),
    "losses": pg.losses(),
    "per_example": pg.per_example(),
}


def of_all_at_once(built) -> dict[str, Any]:
    """Statistics that look at all examples or all leaves before they are done: one for every kind of route."""
    argnums = built.options.get("argnums", 0)
    params = built.args[argnums] if isinstance(argnums, int) else tuple(built.args[k] for k in argnums)
    tree = jax.tree.map(lambda p: np.cos(np.arange(np.size(p), dtype=np.float64)).reshape(np.shape(p)), params)
    return {
        "clipped": pg.clipped_mean(0.1),
        "dot": pg.dot(tree, per_leaf=True),
        "gram": pg.gram(per_leaf=True),
        "max_abs": pg.max_abs(),
        # Edges that no gradient comes near by rounding, and none at 0.
        "histogram": pg.histogram([-np.inf, -0.0123, 0.00456, 2.0]),
        "reduce": pg.reduce(lambda g: jnp.max(g, axis=0) + jnp.mean(jnp.cos(g), axis=0)),
    }


SCALES = {"per_example": pg.per_example()}  # what every comparison needs, to know the size of the gradients

# Nobody waits for fast code here: compiling is most of the time.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def degree(name: str) -> int:
    """With which power of the gradient a statistic scales."""
    none, twice = ("sign_mean", "cos", "histogram", "reduce"), ("second_moment", "variance", "mean_square", "gram")
    return 0 if name in none else 2 if name in twice else 3 if name == "third_moment" else 1


def disagreements(got: dict[str, Any], want: dict[str, Any], rtol: float, fragile: bool = False) -> list[str]:
    """What differs by more than rounding, in words; empty when the two agree.

    Rounding is relative to the largest per-example gradient of the leaf (``want["per_example"]``), raised to the
    power with which the statistic scales: a coordinate may be a small difference of large terms. ``fragile``:
    whole leaves may be, so that the largest gradient of the tree counts.
    """
    problems = []
    stacks = jax.tree.leaves(want["per_example"])
    for name in want:
        a, ta = jax.tree.flatten(got[name])
        b, tb = jax.tree.flatten(want[name])
        if ta != tb:
            problems.append(f"{name}: tree {ta} instead of {tb}")
            continue
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if x.shape != y.shape or x.dtype != y.dtype:
                problems.append(f"{name}[{k}]: {x.dtype}{x.shape} instead of {y.dtype}{y.shape}")
                continue
            if x.size == 0:
                continue
            scale = _scale(name, k, stacks, 0 if fragile else len(b))
            allowed = rtol * np.maximum(scale, np.abs(np.nan_to_num(np.asarray(y, np.complex128))))
            if name == "std":  # the root of a difference that is rounded relative to the second moment
                allowed = np.maximum(allowed, scale * np.sqrt(4 * rtol))
            if name == "sign_mean":
                allowed = allowed + _undecided(np.asarray(stacks[k]), rtol)
            x, y = np.asarray(x), np.asarray(y)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            with np.errstate(invalid="ignore"):
                wrong = ~same & ~(np.abs(x - y) <= allowed)
            if wrong.any():
                worst = np.nanmax(np.where(wrong, np.abs(x - y) / np.maximum(allowed, 1e-300), 0))
                problems.append(f"{name}[{k}] {x.shape}: {wrong.sum()} of {x.size} off, worst {worst:.3g} × allowed")
    return problems


def _scale(name, k, stacks, leaves) -> float:
    if name == "losses":
        return 1.0
    chosen = [stacks[k]] if leaves == len(stacks) and name != "norms" else stacks
    top = max((float(np.max(np.abs(np.nan_to_num(np.asarray(s))))) for s in chosen if s.size), default=0.0)
    return top ** degree(name) if name != "norms" else top


def _undecided(stack, rtol) -> np.ndarray:
    """For each coordinate, how far the mean sign may be off: examples whose gradient is rounding noise have none."""
    top = np.max(np.abs(stack), initial=0)
    return 2 * np.mean(np.abs(stack) <= 8 * rtol * top, axis=0) * (np.abs(stack) > 0).any(0)


def batch_size(built) -> int:
    """How many examples the arguments hold."""
    argnums = built.options.get("batch_argnums", 1)
    first = argnums[0] if isinstance(argnums, tuple) else argnums
    return len(jax.tree.leaves(built.args[first])[0])


def compare(
    built, rtol: float = 2e-5, statistics: Mapping[str, Any] = STATISTICS, fragile: bool = False, mask=None, **options
) -> list[str]:
    """Run one case of the zoo both ways, under jit, and list the disagreements.

    Statistics that need more examples than there are, and signs where they are ``fragile``, are left out.
    """
    options = {**built.options, **options}
    size = batch_size(built)
    chosen = {
        k: s for k, s in (statistics | SCALES).items() if s.minimum <= size and not (fragile and k == "sign_mean")
    }

    def run(impl):
        def step(*args):
            return pg.value_and_stats(built.loss, chosen, impl=impl, **options)(*args, mask=mask)

        return jax.jit(step, compiler_options=QUICK_TO_COMPILE)(*built.args)

    got, want = run("surgery"), run("vmap")
    problems = disagreements(got[1], want[1], rtol, fragile)
    values = jax.tree.map(
        lambda a, b: np.allclose(a, b, rtol=10 * rtol, atol=10 * rtol, equal_nan=True), got[0], want[0]
    )
    return problems + [f"value {got[0]} instead of {want[0]}"] * (not all(jax.tree.leaves(values)))
