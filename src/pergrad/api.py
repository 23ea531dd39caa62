"""The public functions: arguments, errors, pytrees. What is computed is in `statistics`; how, in `engine` and below."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import statistics
from .engine import Plan, Results, Twin, default_budget, run_in_microbatches
from .reductions import Reduction
from .statistics import Outcome, Statistic, is_integer
from .trace import Problem, Signature, leaves_open, make_problem

GRANULARITIES = ("example", "token")
IMPLS = ("auto", "surgery", "vmap")


def value_and_stats(
    loss: Callable,
    stats: Any,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    prng_argnums: int | tuple[int, ...] = (),
    microbatch_size: int | None = None,
    granularity: str = "example",
    impl: str = "auto",
    chunk_bytes: int | None = None,
) -> Callable:
    """Statistics of the per-example gradients of any JAX loss, at close to the cost of the mini-batch gradient.

    With f_i the loss of example i and g_i its gradient, ``step = value_and_stats(loss, stats)`` gives
    ``value, out = step(params, batch)``: the mean of f_i, and every statistic over the g_i, in the tree of ``stats``.

    Args:
      loss: ``loss(params, batch, ...)`` returning a scalar, or ``(scalar, aux)`` with ``has_aux``. Unmodified.
      stats: a statistic such as ``pg.mean()``, or any pytree of them.
      argnums: which arguments to differentiate, as in `jax.grad`; with a tuple, results are tuples too.
      has_aux: ``value`` is then ``(value, aux)``; aux is stacked, with the examples on a new leading axis.
      batch_argnums: the arguments that carry examples on the leading axis of each of their arrays.
      keep_batch_dim: True: the loss sees a batch of one example; False: the bare example, without the axis.
      prng_argnums: arguments that are random keys; each is split into one key per example.
      microbatch_size: at most this many examples at once: the same result in less memory.
      granularity: "example", or "token": statistics over the positions at which a weight is used (see the guide).
      impl: "surgery" ("auto" is the same) or "vmap", the obviously correct twin, which stacks the gradients.
      chunk_bytes: how much memory the gradients that a rule forms for a few examples at a time may take
        (8 MiB on a CPU, 256 MiB elsewhere, when not given).

    Returns:
      A function of the loss's arguments, and of ``mask=``: booleans, one per example; a False counts nowhere.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> def loss(w, batch):
    ...     x, y = batch
    ...     return jnp.mean((x @ w - y) ** 2)
    >>> w, x, y = jnp.array([1.0, -1.0]), jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([0.0, 1.0])
    >>> value, out = pg.value_and_stats(loss, {"g": pg.mean(), "s": pg.sign_mean()})(w, (x, y))
    >>> print(value, out["g"], out["s"])
    2.5 [ -7. -10.] [-1. -1.]
    """
    request = make_request(
        loss,
        stats,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        prng_argnums=prng_argnums,
        microbatch_size=microbatch_size,
        granularity=granularity,
        impl=impl,
        chunk_bytes=chunk_bytes,
    )

    def step(*args, mask=None, **kwargs):
        return request.run(args, kwargs, mask)

    return step


def grad_stats(
    loss: Callable, stats: Any, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options
) -> Callable:
    """`value_and_stats` without the value; with ``has_aux`` it gives (statistics, aux), as `jax.grad` does.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> pg.grad_stats(lambda w, x: (x * w).sum(), pg.variance())(2.0, jnp.array([1.0, 3.0]))
    Array(1., dtype=float32)
    """
    step = value_and_stats(loss, stats, argnums, has_aux, **options)

    def without_value(*args, mask=None, **kwargs):
        value, out = step(*args, mask=mask, **kwargs)
        return (out, value[1]) if has_aux else out

    return without_value


def make_request(
    loss: Callable,
    stats: Any,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    prng_argnums: int | tuple[int, ...] = (),
    microbatch_size: int | None = None,
    granularity: str = "example",
    impl: str = "auto",
    chunk_bytes: int | None = None,
) -> Request:
    """The arguments of `value_and_stats` (and of `explain` and `check`, which take the same), checked."""
    signature = Signature(argnums, batch_argnums, prng_argnums, has_aux, keep_batch_dim)
    return Request(loss, stats, signature, microbatch_size, granularity, impl, chunk_bytes)


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    loss: Callable
    stats: Any
    signature: Signature
    microbatch_size: int | None
    granularity: str
    impl: str
    chunk_bytes: int | None

    def __post_init__(self):
        if not callable(self.loss):
            raise TypeError(
                f"expected a loss function as the first argument, given {type(self.loss).__name__}. Write "
                "`pg.value_and_stats(loss, stats)(params, batch)`."
            )
        for path, leaf in jax.tree.flatten_with_path(self.stats, is_leaf=_is_statistic)[0]:
            where = f"stats{jax.tree_util.keystr(path)}"
            if callable(leaf) and not isinstance(leaf, Statistic):
                name = getattr(leaf, "__name__", "fn")
                ours = getattr(statistics, name, None) is leaf
                given = inspect.signature(leaf).parameters.values() if ours else ()
                needed = ", ".join(p.name for p in given if p.default is p.empty)
                write = f"pg.{name}({needed})" if ours else f"pg.elementwise({name})"
                raise TypeError(f"{where} is the function {name}; expected a statistic. Write `{write}`.")
            if not isinstance(leaf, Statistic):
                raise TypeError(
                    f"{where} is {type(leaf).__name__} {leaf!r}; expected a statistic, or a pytree of statistics. Write, "
                    'for example, `{"g": pg.mean(), "g2": pg.second_moment()}`.'
                )
            if self.granularity == "token" and not leaf.tokens:
                raise ValueError(
                    f'{where}: {leaf!r} is about whole examples and has no meaning at granularity="token". Ask for it '
                    'in a call of its own, with granularity="example".'
                )
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("impl", self.impl, IMPLS)
        _positive("microbatch_size", self.microbatch_size, "the most examples at once", "32")
        _positive("chunk_bytes", self.chunk_bytes, "a number of bytes", "8 << 20")
        if self.granularity == "token" and self.impl == "vmap":
            raise ValueError(
                'impl="vmap" sees whole examples only; given granularity="token". Write impl="surgery", or '
                'granularity="example".'
            )

    @property
    def statistics(self) -> list[Statistic]:
        return jax.tree.leaves(self.stats, is_leaf=_is_statistic)

    def asked(self, problem: Problem) -> list[tuple[Reduction, ...]]:
        """For each parameter leaf, what the statistics need of it."""
        chosen = [(s, s.leaves(problem.names)) for s in self.statistics]
        return [
            tuple(dict.fromkeys(r for s, leaves in chosen if k in leaves for r in s.reductions))
            for k in range(len(problem.params))
        ]

    def problem(self, args, kwargs) -> Problem:
        problem = make_problem(self.loss, self.signature, args, kwargs)
        for s in self.statistics:
            if problem.size < s.minimum and self.granularity == "example":
                raise ValueError(
                    f"{s!r} needs at least {s.minimum} examples, but the batch has {problem.size}. {s.for_fewer}"
                )
            if self.part(problem) < problem.size and any(r.whole for r in s.reductions):
                raise ValueError(
                    f"{s!r} needs all {problem.size} examples at once and cannot be merged from parts of the batch; given "
                    f"microbatch_size={self.microbatch_size}. Ask for it in a call of its own without microbatch_size: what "
                    "it forms at one time is bounded by chunk_bytes."
                )
        return problem

    def plan(self, problem: Problem) -> Plan | Twin:
        if self.impl == "vmap":
            return Twin(problem)
        return Plan(problem, default_budget(self.part(problem), self.chunk_bytes), self.granularity == "token")

    def part(self, problem: Problem) -> int:
        """The most examples at once."""
        return min(problem.size, self.microbatch_size or problem.size)

    def run(self, args, kwargs, mask):
        if mask is not None and leaves_open(self.loss, "mask", args):
            raise ValueError(
                "`mask` was given to the step, where it says which examples count, but the loss has an argument `mask` of "
                "its own. Pass the loss's by position, or rename it."
            )
        problem = self.problem(args, kwargs)
        mask = _checked_mask(mask, problem.size)
        with pure_loss():
            plan = self.plan(problem)
            results = self._results(plan, problem, mask)
        return self._finish(plan, problem, results, mask)

    def _results(self, plan, problem: Problem, mask) -> Results:
        weight = 1 / problem.size if mask is None else 1 / jnp.sum(mask)

        asked = self.asked(problem)

        def run(examples, mask):
            return plan.run(problem.params, examples, mask, weight, asked)

        part = self.part(problem)
        if part == problem.size:
            return run(problem.examples, mask)
        return run_in_microbatches(run, problem.examples, mask, asked, problem.size, part)

    def _finish(self, plan, problem: Problem, results: Results, mask):
        losses = results.losses
        if mask is not None:
            losses = jnp.where(mask, losses, 0)
        count = problem.size if mask is None else jnp.sum(mask)
        asked = self.asked(problem)
        found = [
            dict(zip(reductions, leaf, strict=True)) for reductions, leaf in zip(asked, results.leaves, strict=True)
        ]
        by_reduction = {r: [leaf.get(r) for leaf in found] for r in dict.fromkeys(r for leaf in asked for r in leaf)}
        by_reduction |= {r: [] for s in self.statistics for r in s.reductions if r not in by_reduction}  # no parameters
        outcome = Outcome(by_reduction, losses, count, plan.tokens, problem)
        value = jnp.sum(losses) / count
        out = jax.tree.map(lambda s: s.finish(outcome), self.stats, is_leaf=_is_statistic)
        return ((value, results.aux) if self.signature.has_aux else value), out


@contextlib.contextmanager
def pure_loss():
    """Say what it means when JAX finds the value of another trace within the loss."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "the loss leaks tracers: it stores an intermediate value outside of itself (in a global, a list, or an "
            "attribute) or reads one that an earlier call stored; expected a pure function. Return such values as aux "
            "(`has_aux=True`)."
        ) from error


def _is_statistic(x) -> bool:
    return isinstance(x, Statistic)


def _one_of(name, given, allowed):
    if given not in allowed:
        listed = ", ".join(f'"{a}"' for a in allowed)
        raise ValueError(f'unknown {name} {given!r}: expected one of {listed}. Write `{name}="{allowed[0]}"`.')


def _positive(name, given, meaning, instead):
    if given is not None and (not is_integer(given) or given < 1):
        raise ValueError(
            f"{name} was given {given!r}: expected None or a positive integer, {meaning}. Write, for example, "
            f"`{name}={instead}`."
        )


def _checked_mask(mask, size):
    if mask is None:
        return None
    try:
        mask = jnp.asarray(mask)
    except TypeError as error:
        raise TypeError(
            f"the mask is {type(mask).__name__} {mask!r}; expected booleans, one per example. Write, for example, "
            "`mask=jnp.arange(B) < n`."
        ) from error
    if mask.shape != (size,):
        raise ValueError(
            f"the mask has shape {mask.shape}, but the batch has {size} examples; expected shape ({size},), one boolean "
            "per example. Positions within an example are masked in the loss itself."
        )
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(
            f"the mask has dtype {mask.dtype}; expected booleans (or integers, not zero meaning True). "
            "Write `mask > 0`; weights belong into the loss."
        )
    mask = mask != 0
    if not isinstance(mask, Tracer) and not np.any(np.asarray(mask)):
        raise ValueError(
            "the mask leaves out every example; expected at least one True. Skip the call when there is no data "
            "(under jit, where this cannot be seen, all results are NaN)."
        )
    return mask
