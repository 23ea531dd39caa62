"""How an optimizer is put together: learning rate, weight decay, and what happens to what is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .arguments import check_rate
from .asking import Optimizer
from .averages import all_finite


class SkipNonfiniteState(NamedTuple):
    """State of an optimizer with ``on_nonfinite="skip"``: how many steps were skipped, and the rest."""

    skipped: jax.Array
    inner_state: Any


def assembled(
    core: Optimizer,
    learning_rate: Any,
    weight_decay: Any = 0.0,
    mask: Any = None,
    after: optax.GradientTransformation | None = None,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """−η (core + λ params), with a learning rate η and decoupled weight decay λ that may be schedules, as in optax."""
    check_rate("learning_rate", learning_rate, "1e-3")
    check_rate("weight_decay", weight_decay, "1e-4")
    parts: list[optax.GradientTransformation] = [core, optax.scale_by_learning_rate(learning_rate)]
    # Without it, update needs no params. An array is not looked at: `optax.inject_hyperparams` calls this with one that is
    # known in init and traced in update, and the parts must be the same.
    decays = not isinstance(weight_decay, (int, float)) or weight_decay != 0
    if after is not None:
        parts.append(after)
        if decays:  # η λ params, and not within what comes after (momentum), to be decoupled from it
            parts.append(optax.add_decayed_weights(_minus_product(learning_rate, weight_decay), mask))
    elif decays:
        parts.insert(1, optax.add_decayed_weights(weight_decay, mask))
    return guarded(Optimizer(*optax.chain(*parts), stats=core.stats), on_nonfinite)


def _minus_product(x: Any, y: Any) -> Any:
    """−x y, of numbers or schedules."""
    if not callable(x) and not callable(y):
        return -x * y
    at: Callable[..., Any] = lambda rate, count: rate(count) if callable(rate) else rate
    return lambda count: -at(x, count) * at(y, count)


def guarded(opt: Optimizer, on_nonfinite: str) -> Optimizer:
    if on_nonfinite == "propagate":
        return opt
    if on_nonfinite != "skip":
        raise ValueError(
            f'on_nonfinite was given {on_nonfinite!r}; expected "propagate" (do what arithmetic does) or "skip" (leave '
            'parameters and moments as they are, and count it). Write `on_nonfinite="skip"`.'
        )

    def init(params):
        return SkipNonfiniteState(jnp.zeros([], jnp.int32), opt.init(params))

    def update(updates, state, params=None, **extra_args):
        step = lambda inner: opt.update(updates, inner, params, **extra_args)
        # What goes in and what would come out. A statistic that is not finite shows in the new state: moments are sums.
        # Only the answer is kept of this; the step is made anew, so that old and new state need not exist side by side.
        tried, _ = attempt = step(state.inner_state)
        finite = all_finite((updates, attempt))
        skip = lambda inner: (jax.tree.map(jnp.zeros_like, tried), inner)
        proposed, inner_state = jax.lax.cond(finite, step, skip, state.inner_state)
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        return proposed, SkipNonfiniteState(skipped, inner_state)

    return Optimizer(init, update, opt.stats)
