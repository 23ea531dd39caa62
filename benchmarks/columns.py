"""The columns: ways to take a gradient and statistics of one loss, and whole training steps.

A column makes a function `(params, batch) -> (value, results)` out of a loss; what `results` holds under
"g" and "g2" is compared with the twin's. A training step makes `(carry, batch) -> (carry, value)` and the first carry
of some parameters. A new column is one function, registered where it is defined.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import pergrad as pg

COLUMNS: dict[str, Callable] = {}
PLAIN, JUDGED, TWIN, MICROBATCHES = "plain", "mean + second moment", "vmap", "optax microbatches"

STEPS: dict[str, Callable] = {}
ADAM, EVE = "adam", "eve"


def column(name, make=None, among=COLUMNS):
    """Register `make(loss)` under `name`; without `make`, a decorator."""
    if make is None:
        return functools.partial(column, name, among=among)
    among[name] = make
    return make


@column(PLAIN)
def plain(loss):
    value_and_grad = jax.value_and_grad(loss)

    def step(params, batch):
        value, g = value_and_grad(params, batch)
        return value, {"g": g}

    return step


def stats(impl="auto", **statistics):
    return lambda loss: pg.value_and_stats(loss, statistics, impl=impl)


column("mean", stats(g=pg.mean()))
column(JUDGED, stats(g=pg.mean(), g2=pg.second_moment()))
column("mean + second + sign", stats(g=pg.mean(), g2=pg.second_moment(), sign=pg.sign_mean()))
column("norms", stats(norms=pg.norms()))
column("clipped mean", stats(clipped=pg.clipped_mean(1.0)))
column(TWIN, stats(impl="vmap", g=pg.mean(), g2=pg.second_moment()))


@column(MICROBATCHES)
def microbatches(loss, size=8):
    """What optax has for this: the gradients of `size` examples at a time are stacked, transformed and summed."""
    step = optax.microbatching.micro_grad(
        loss,
        microbatch_size=size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
        transform_fn=lambda g: {"g": g, "g2": jax.tree.map(jnp.square, g)},
    )

    def averaged(params, batch):
        results, each = step(params, batch)
        return jnp.mean(each.values), results

    return averaged


# ---------------------------------------------------------------------------------- training steps


def training(gradient, optimizer):
    """A step by `optimizer`, on what `gradient(loss)` gives: value, mean gradient and further arguments of update."""

    def make(loss):
        taken = gradient(loss)

        def step(carry, batch):
            params, state = carry
            value, g, extra = taken(params, batch)
            updates, state = optimizer.update(g, state, params, **extra)
            return (optax.apply_updates(params, updates), state), value

        return step, lambda params: (params, optimizer.init(params))

    return make


def plain_gradient(loss):
    return lambda params, batch: (*jax.value_and_grad(loss)(params, batch), {})


def with_statistics(statistics):
    def make(loss):
        def taken(params, batch):
            value, s = pg.value_and_stats(loss, statistics)(params, batch)
            return value, s["mean"], {"stats": s}

        return taken

    return make


def step(name, gradient, optimizer):
    column(name, training(gradient, optimizer), STEPS)


# The learning rate is too small to matter: all steps are taken near the same point.
step(ADAM, plain_gradient, optax.adam(1e-6))
for _name, _optimizer in ((EVE, pg.optim.eve(1e-6)), ("micro_adam_var", pg.optim.micro_adam_var(1e-6))):
    step(_name, with_statistics(_optimizer.stats), _optimizer)
