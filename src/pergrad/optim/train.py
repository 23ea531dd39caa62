"""The whole training step in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..api import value_and_stats
from .asking import PRIMITIVES, required_stats


def train_step(
    loss: Callable,
    opt: optax.GradientTransformation,
    *,
    metrics: Any = None,
    has_aux: bool = False,
    donate: bool = True,
    **options: Any,
) -> Callable:
    """The jitted training step: ``params, state, value = step(params, state, batch)``, with ``state = opt.init(params)``.

    The statistics that ``opt`` needs are found by `required_stats`; a plain optax optimizer works too, and gets ``value=``.
    Complex parameters are descended along the conjugate of what `jax.grad` gives, as they must be.

    Args:
      loss: ``loss(params, batch, ...)`` as in `pg.value_and_stats`; the first argument is trained.
      opt: any optax transformation, or composition of them.
      metrics: further statistics (any pytree of them), which the step then returns as a fourth result.
      has_aux: ``value`` is then ``(value, aux)``.
      donate: the buffers of ``params`` and ``state`` are reused for the new ones, so the old arrays are gone. False keeps
        them, for states that hold the parameters themselves (`optax.contrib.mechanize`).
      **options: of `pg.value_and_stats`: ``batch_argnums``, ``prng_argnums``, ``microbatch_size``, … Indices count the
        arguments of the loss.

    Returns:
      ``step(params, state, *args, mask=None, **kwargs)``, where ``args`` and ``kwargs`` are those of the loss after its
      parameters. Under jit, all of them are arrays.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> def loss(w, batch):
    ...     x, y = batch
    ...     return jnp.mean((x @ w - y) ** 2)
    >>> batch = jnp.array([[1.0, 2.0], [3.0, 4.0], [2.0, 0.0]]), jnp.array([0.0, 2.0, 2.0])
    >>> opt = pg.optim.eve(0.1)
    >>> step = pg.optim.train_step(loss, opt, metrics={"norms": pg.norms()})
    >>> params = jnp.zeros(2)
    >>> state = opt.init(params)
    >>> for _ in range(3):
    ...     params, state, value, metrics = step(params, state, batch)
    >>> print(value.round(3), metrics["norms"].shape)
    1.207 (3,)
    """
    if not isinstance(opt, optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(
            f"expected an optax transformation as the second argument, given {type(opt).__name__}. Write, for example, "
            "`pg.train_step(loss, pg.optim.micro_adam(1e-3))`."
        )
    if "argnums" in options:
        raise ValueError(
            f"train_step trains the first argument of the loss, given argnums={options['argnums']!r}. Write a loss that takes "
            "all that is trained as its first argument: `lambda params, batch: loss(*params, batch)`."
        )
    value_and_stats(loss, (PRIMITIVES["mean"], metrics), has_aux=has_aux, **options)  # refuses bad arguments now
    update = optax.with_extra_args_support(opt).update

    def step(params, state, /, *args, mask=None, **kwargs):
        needed = required_stats(opt, params)
        statistics = value_and_stats(loss, (needed, metrics), has_aux=has_aux, **options)
        value, (stats, measured) = statistics(params, *args, mask=mask, **kwargs)
        # For complex parameters jax.grad gives the conjugate of the direction of ascent.
        stats = jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, stats)
        mean_loss = value[0] if has_aux else value
        updates, state = update(stats["mean"], state, params, stats=stats, value=mean_loss)
        params = optax.apply_updates(params, updates)
        return (params, state, value) if metrics is None else (params, state, value, measured)

    return jax.jit(step, donate_argnums=(0, 1) if donate else ())
