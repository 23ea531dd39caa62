"""`pg.check`: is the fast way right on this model, and is "the mean of per-example losses" what the model's loss is?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .api import make_request, pure_loss, value_and_stats
from .statistics import mean, per_example
from .trace import example_jaxpr


@dataclasses.dataclass(frozen=True)
class Finding:
    ok: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `pg.check` found; `ok` when nothing is wrong. Prints as a list."""

    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return all(f.ok for f in self.findings)

    def __str__(self) -> str:
        return "\n".join(f"{'ok  ' if f.ok else 'FAIL'}  {f.text}" for f in self.findings)

    __repr__ = __str__


def check(loss: Callable, stats: Any, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options) -> Callable:
    """Compare every statistic with the vmap twin, and the mean with the plain gradient of the loss on the whole batch.

    The second comparison says in words when a loss *couples* its examples (batch normalisation, division by a
    batch-wide count), so that the mean of per-example losses is not the batch loss. It stacks the per-example
    gradients: use a small batch.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> def summed(w, x):
    ...     return jnp.sum((x @ w) ** 2)
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> print(pg.check(summed, pg.second_moment())(jnp.ones(2), x))
    ok    pg.second_moment() agrees with the vmap twin to 0.0e+00
    FAIL  the loss on the whole batch is a sum over its 2 examples: its gradient is 2 times pg.mean(). Write jnp.mean over the examples in place of jnp.sum, or expect statistics of single-example losses.
    """  # noqa: E501
    request = make_request(loss, stats, argnums, has_aux, **options)

    def run(*args, mask=None, **kwargs) -> Report:
        problem = request.problem(args, kwargs)
        with pure_loss():
            example_jaxpr(problem)
        try:
            with jax.checking_leaks():
                example_jaxpr(request.problem(args, kwargs))  # anew: what has been traced is not looked at again
        except Exception as error:
            if "Leaked" not in str(error):
                raise
            text = "the loss leaks tracers: it stores intermediate values outside of itself. Return them as aux."
            return Report([Finding(False, text)])
        findings = _against_twin(request, args, mask, kwargs)
        findings.append(_against_batch_loss(request, problem, args, kwargs))
        return Report(findings)

    return run


def _against_twin(request, args, mask, kwargs) -> list[Finding]:
    out = []
    token = request.granularity == "token"
    twin = dataclasses.replace(request, impl="vmap", granularity="example")
    fast = dataclasses.replace(request, impl="surgery")
    if token:  # the twin knows no tokens, but the mean over tokens is the mean gradient
        fast, twin = (dataclasses.replace(r, stats=mean()) for r in (fast, twin))
    _, got = fast.run(args, kwargs, mask)
    _, want = twin.run(args, kwargs, mask)
    is_statistic = lambda s: hasattr(s, "reductions")
    statistics, tree = jax.tree.flatten(fast.stats, is_leaf=is_statistic)
    for name, a, b in zip(statistics, tree.flatten_up_to(got), tree.flatten_up_to(want), strict=True):
        error, allowed = _relative_error(a, b)
        text = f"{name!r}{' over tokens' if token else ''} {{}} with the vmap twin to {error:.1e}"
        good = error <= allowed
        out.append(Finding(good, text.format("agrees" if good else "agrees only")))
    return out


def _relative_error(a, b) -> tuple[float, float]:
    """The largest difference, relative to the largest value of its leaf, and what rounding would explain."""
    worst, allowed = 0.0, 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        eps = float(jnp.finfo(y.dtype).eps) if jnp.issubdtype(y.dtype, jnp.inexact) else 0.0  # counts are exact
        allowed = max(allowed, 1000 * eps)
        x, y = np.asarray(x), np.asarray(y)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0, np.abs(x - y))
        top = np.max(np.abs(np.nan_to_num(y)), initial=0) or 1.0
        worst = max(worst, float(np.nan_to_num(np.max(difference, initial=0) / top, nan=np.inf)))
    return worst, allowed


def _against_batch_loss(request, problem, args, kwargs) -> Finding:
    s = request.signature
    if not s.keep_batch_dim:
        return Finding(
            True, "the loss takes one bare example (keep_batch_dim=False): there is no batch loss to compare"
        )
    if s.prng_argnums not in ((), None):
        return Finding(True, "the loss takes random keys: the batch loss draws others, and is not compared")
    options = {"batch_argnums": s.batch_argnums, "impl": "vmap"}
    gradient = jax.grad(request.loss, s.argnums, s.has_aux)(*args, **kwargs)
    gradient = gradient[0] if s.has_aux else gradient
    step = value_and_stats(request.loss, per_example(), s.argnums, s.has_aux, **options)
    stack = _matrix(step(*args, **kwargs)[1], problem.size)
    batch = _matrix(jax.tree.map(lambda g: g[None], gradient), 1)[0]
    return _verdict(batch, stack)


def _matrix(tree, rows) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.complex128).reshape(rows, -1) for x in jax.tree.leaves(tree)], axis=1)


def _verdict(batch: np.ndarray, stack: np.ndarray) -> Finding:
    """What the gradient of the batch loss is, in terms of the per-example gradients."""
    size = len(stack)
    broken = [str(i) for i in range(size) if not np.isfinite(stack[i]).all()]
    if broken:
        return Finding(
            False,
            f"the gradient of one example alone is not finite (examples {', '.join(broken[:8])}), as where a loss divides by a "
            "standard deviation over the batch, which is 0 for one. Use layers that treat examples separately.",
        )
    if not np.isfinite(batch).all():
        return Finding(
            False, "the gradient of the loss on the whole batch is not finite, though each example's alone is"
        )
    top = np.max(np.abs(stack), initial=0) or 1.0

    def close(a, b):
        return bool(np.max(np.abs(a - b), initial=0) <= 1e-3 * top * max(1.0, np.max(np.abs(a), initial=0) / top))

    average = stack.mean(0)
    if close(batch, average):
        return Finding(True, "the mean is the gradient of the loss on the whole batch")
    if close(batch, size * average):
        return Finding(
            False,
            f"the loss on the whole batch is a sum over its {size} examples: its gradient is {size} times pg.mean(). "
            "Write jnp.mean over the examples in place of jnp.sum, or expect statistics of single-example losses.",
        )
    if size >= stack.shape[1]:
        return Finding(
            False,
            "the gradient on the whole batch is not pg.mean(): the loss couples its examples, or weights them unequally. With "
            f"{size} examples and {stack.shape[1]} parameters it cannot be told which: check with a smaller batch.",
        )
    weights = np.linalg.lstsq(stack.T, batch, rcond=None)[0]
    if close(batch, weights @ stack):
        shown = ", ".join(f"{w.real:.3g}" for w in weights[:6]) + (", …" if size > 6 else "")
        return Finding(
            False,
            f"the loss on the whole batch weights its examples unequally ({shown} instead of {1 / size:.3g} each), as a loss "
            "does that divides by a count over the whole batch (of tokens, of unmasked positions). The mean of "
            "per-example losses is another loss: divide within each example, or by a constant.",
        )
    return Finding(
        False,
        "the loss couples its examples: the gradient on the whole batch is no combination of per-example gradients, as with "
        "batch normalisation, contrastive losses or batch-wide statistics. The loss of one example is then not "
        "defined; use layers that treat examples separately (layer or group normalisation).",
    )
