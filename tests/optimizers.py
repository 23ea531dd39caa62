"""What the tests of `pergrad.optim` share: all optimizers, statistics from stacked gradients, and a comparison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pergrad import optim

# Every optimizer, with an ε that is safe where ν may be 0.
ALL = {
    "adam": optim.adam,
    "micro_adam": optim.micro_adam,
    "micro_adam_var": functools.partial(optim.micro_adam_var, eps=1e-3),
    "micro_adam_msq": functools.partial(optim.micro_adam_msq, eps=1e-3),
    "eve": optim.eve,
    "micro_rmsprop": optim.micro_rmsprop,
    "micro_rmsprop with momentum": functools.partial(optim.micro_rmsprop, momentum=0.9, nesterov=True),
    "micro_adadelta": optim.micro_adadelta,
    "micro_adagrad": optim.micro_adagrad,
    "sign_sgd": optim.sign_sgd,
    "sign_ema": optim.sign_ema,
    "micro_sign_sgd": optim.micro_sign_sgd,
}
every_optimizer = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def stats_of(g, mask=None):
    """What `pg.value_and_stats` gives for the per-example gradients [B, …], in the tree of g."""
    size = len(jax.tree.leaves(g)[0])
    weight = jnp.ones(size) if mask is None else mask.astype(float)
    count = size if mask is None else jnp.sum(weight)

    def mean(fn):
        return jax.tree.map(lambda x: jnp.tensordot(weight, fn(x), 1) / count, g)

    square = lambda x: jnp.real(x * jnp.conj(x))
    return {
        "mean": mean(lambda x: x),
        "second_moment": mean(square),
        "sign_mean": mean(jnp.sign),
        "count": jnp.asarray(count, float),
    }


def assert_close(got, expected, rtol=1e-6):
    """Trees of arrays, to rounding: relative to the largest entry of each."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b), initial=0))
