"""Gradient accumulation that knows about statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..api import grad_stats
from ..statistics import Statistic, is_integer
from .arguments import check_dtype
from .asking import PRIMITIVES, Recorder, ask, asked_by, example_of
from .averages import cast, zeros


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`; the names are those of `optax.MultiStepsState`, where that has one."""

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    acc_stats: dict[str, Any]
    acc_count: jax.Array
    skip_state: Any = ()


class MultiSteps(optax.GradientTransformationExtraArgs):
    """`optax.MultiSteps` for optimizers with statistics: k mini-batches, then one step, as if they were one batch.

    Means are merged by E = Σ nᵢ Eᵢ / Σ nᵢ, and counts n add, so that it is exact for mini-batches of different sizes, masked
    ones included. In between, updates are zero and the inner optimizer's state stays as it is.

    `optax.MultiSteps` does not do that: it merges updates only, each with the same weight, and hands on the statistics of
    the last mini-batch. `required_stats` and `train_step` refuse it for optimizers that need more than the mean.

    It is a transformation itself and goes into `optax.chain` as it is. If all mini-batches are at hand at once,
    ``microbatch_size=`` of `pg.value_and_stats` and `pg.train_step` does the same in one call, for every statistic.

    Args:
      opt: the optimizer, or any composition. Statistics other than means over examples do not merge: an error.
      every_k_schedule: k, or a function of the number of steps so far that gives it.
      should_skip_update_fn: as in optax (`optax.skip_not_finite`): a mini-batch for which it says so counts nowhere.
      accumulator_dtype: if not given, float32, or wider where the parameters are.

    Cost: memory of the gradient, and of each statistic that the optimizer asks for.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params = lambda w, x: (x * w).sum(), jnp.array(0.0)
    >>> opt = pg.optim.MultiSteps(pg.optim.eve(0.1), 2)
    >>> state = opt.init(params)
    >>> for batch in (jnp.array([1.0]), jnp.array([7.0, 7.0, 1.0])):
    ...     value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    ...     updates, state = opt.update(s["mean"], state, params, stats=s)
    ...     print(updates.round(4))                                       # the second: −0.1 · 4/√(25/4 + 16 · 3/4)
    0.0
    -0.0936
    """

    inner_opt: optax.GradientTransformation

    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[Any], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[..., Any] | None = None,
        accumulator_dtype: Any = None,
    ):
        if not isinstance(opt, optax.GradientTransformation):
            raise TypeError(
                f"expected an optax transformation as the first argument, given {type(opt).__name__}. Write, for example, "
                "`pg.optim.MultiSteps(pg.optim.micro_adam(1e-3), 4)`."
            )
        if not callable(every_k_schedule) and (not is_integer(every_k_schedule) or every_k_schedule < 1):
            raise ValueError(
                f"every_k_schedule was given {every_k_schedule!r}; expected a positive integer, how many mini-batches make "
                "a step, or a function of the number of steps. Write, for example, `pg.optim.MultiSteps(opt, 4)`."
            )
        if not use_grad_mean:
            raise ValueError(
                "use_grad_mean=False would set the sum of the mini-batches' gradients beside the mean of their statistics; "
                "expected True. Write a learning rate that is k times as large."
            )
        dtype = check_dtype("accumulator_dtype", accumulator_dtype)
        inner = optax.with_extra_args_support(opt)
        every_k = every_k_schedule if callable(every_k_schedule) else lambda step: every_k_schedule
        should_skip = should_skip_update_fn or (lambda updates, step, params: (jnp.array(False), ()))

        def init(params):
            asked = asked_by(inner, params)
            asked.pop("count", None)
            for name, statistic in asked.items():
                if not merges_as_mean(statistic):
                    raise ValueError(
                        f'{statistic!r}, which the optimizer asks for as "{name}", is no mean over examples: those of two '
                        "mini-batches do not make that of both. Write `microbatch_size=` in place of MultiSteps (in "
                        "`pg.value_and_stats` or `pg.train_step`), or ask for means and finish them in the optimizer."
                    )
            return MultiStepsState(
                mini_step=jnp.zeros([], jnp.int32),
                gradient_step=jnp.zeros([], jnp.int32),
                inner_opt_state=inner.init(params),
                acc_grads=zeros(params, dtype),
                acc_stats={name: _zeros_for(statistic, params, dtype) for name, statistic in asked.items()},
                acc_count=jnp.zeros([]),
                skip_state=should_skip(zeros(params), jnp.zeros([], jnp.int32), params)[1],
            )

        def update(updates, state, params=None, *, stats=None, **extra_args):
            count = ask(stats, "count")
            if isinstance(stats, Recorder):  # let the inner optimizer say what it needs
                inner.update(updates, state.inner_opt_state, params, stats=stats, **extra_args)
                return updates, state

            skip, skip_state = should_skip(updates, state.gradient_step, params)
            count = jnp.where(skip, 0, count)
            total = state.acc_count + count

            def merge(mean, other):
                # Selected, not multiplied by 0: a mini-batch without examples has no mean but NaN.
                share = (count / total).astype(mean.dtype)
                return jnp.where(count > 0, mean + (other - mean) * share, mean).astype(mean.dtype)

            grads = jax.tree.map(merge, state.acc_grads, updates)
            means = {
                name: jax.tree.map(merge, mean, ask(stats, name, updates)) for name, mean in state.acc_stats.items()
            }
            mini_step = state.mini_step + ~skip
            emit = ~skip & (mini_step >= every_k(state.gradient_step))

            def emitted(inner_state, grads, means):
                merged = {**means, "count": total}
                out, new = inner.update(cast(grads, updates), inner_state, params, stats=merged, **extra_args)
                cleared = jax.tree.map(jnp.zeros_like, (grads, means))
                return cast(out, updates), cast(new, inner_state), *cleared

            def held(inner_state, grads, means):
                return jax.tree.map(jnp.zeros_like, updates), inner_state, grads, means

            out, new, grads, means = jax.lax.cond(emit, emitted, held, state.inner_opt_state, grads, means)
            return out, MultiStepsState(
                mini_step=jnp.where(emit, 0, mini_step),
                gradient_step=jnp.where(emit, optax.safe_increment(state.gradient_step), state.gradient_step),
                inner_opt_state=new,
                acc_grads=grads,
                acc_stats=means,
                acc_count=jnp.where(emit, 0, total),
                skip_state=skip_state,
            )

        self = super().__new__(cls, init, update)
        self.inner_opt = opt
        return self

    @property
    def stats(self) -> dict[str, Statistic]:
        inner = getattr(self.inner_opt, "stats", None)
        if inner is None:
            raise AttributeError(
                "MultiSteps of a composition has no `.stats`: what a composition needs may depend on the parameters. Write "
                "`pg.optim.required_stats(opt, params)`."
            )
        return {**inner, "count": PRIMITIVES["count"]}

    @staticmethod
    def has_updated(state: MultiStepsState) -> jax.Array:
        """Whether the last call made a step, rather than waiting for more mini-batches."""
        return (state.mini_step == 0) & (state.gradient_step > 0)

    def gradient_transformation(self) -> MultiSteps:
        """Itself: in optax, what is to be written inside a chain."""
        return self


def merges_as_mean(statistic: Statistic) -> bool:
    """Whether that of two batches is the mean of theirs, weighted by their sizes: seen on a small case."""
    if statistic in PRIMITIVES.values():
        return statistic is not PRIMITIVES["count"]
    if statistic.minimum > 1 or any(r.per_example for r in statistic.reductions):
        return False
    gradients = np.array([[-2.0, 0.5], [5.0, 1.0], [0.7, -4.0], [0.0, 1.0], [3.0, -0.2]], np.float32)
    with jax.ensure_compile_time_eval():
        of = grad_stats(lambda w, g: w @ g, statistic, keep_batch_dim=False, impl="vmap")
        whole, two, three = (of(np.zeros(2, np.float32), g) for g in (gradients, gradients[:2], gradients[2:]))
    shaped = all(isinstance(x, jax.Array) and x.shape == (2,) for x in (whole, two, three))
    return shaped and np.allclose(whole, (2 * two + 3 * three) / 5, rtol=1e-4)


def _zeros_for(statistic, params, dtype):
    """For a mean over examples: like the parameters, but real where it is, as squares of complex gradients are."""
    like = jax.eval_shape(lambda params: example_of(statistic, params), params)
    return jax.tree.map(lambda z, l: z if jnp.iscomplexobj(l) else jnp.real(z), zeros(params, dtype), like)
