"""Signs: of each example, of the mean, of the average over the steps.

With ḡ = μ + noise of size σ/√B, the sign of the mean is nearly certain as soon as |μ| > σ/√B, and then says nothing more.
The mean of the examples' signs says how far they agree: about μ/σ, for noise that is larger than the signal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .arguments import check_decay, check_dtype
from .asking import Optimizer, ask, primitives
from .averages import average, cast, zeros
from .base import assembled


class SignState(NamedTuple):
    """mu: the average over the steps, of signs or (SignEMA) of gradients."""

    mu: Any


def average_with_sign(of: str, b1: Any, mu_dtype: Any = None) -> Optimizer:
    """The average over the steps, with a sign ``of`` each "example", of each "mean" over the examples, or of the "average".

    There is no bias correction: signs have no scale that could be biased away.
    """
    check_decay(b1=b1)
    mu_dtype = check_dtype("mu_dtype", mu_dtype)
    signs = lambda tree: jax.tree.map(jnp.sign, tree)

    def init(params):
        return SignState(zeros(params, mu_dtype))

    def update(updates, state, params=None, *, stats=None, **extra_args):
        del params, extra_args
        seen = updates
        if of == "example":
            seen = ask(stats, "sign_mean", updates)
        elif of == "mean":
            seen = signs(updates)
        mu = average(seen, state.mu, b1)
        out = signs(mu) if of == "average" else mu
        return cast(out, updates), SignState(cast(mu, state.mu))

    return Optimizer(init, update, primitives("sign_mean") if of == "example" else None)


def sign_sgd(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """SignSGD: sign of the mean, then the average: step −η EMA_b1(sign ḡ), without bias correction.

    With b1 = 0 it is `optax.sign_sgd`. It needs no statistic but the mean. sign 0 is 0.

    Args:
      learning_rate: η, a number or a schedule.
      b1: decay of the average.
      mu_dtype: dtype in which the average is kept (if not given, float32, or wider where the parameters are).
      weight_decay, mask, on_nonfinite: as in `adam`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> opt = pg.optim.sign_sgd(0.5, b1=0.8)
    >>> updates, state = opt.update(jnp.array([3.0, -0.1, 0.0]), opt.init(jnp.zeros(3)))
    >>> print(updates.round(6))
    [-0.1  0.1 -0. ]
    """
    return assembled(
        average_with_sign("mean", b1, mu_dtype), learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite
    )


def sign_ema(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """SignEMA: sign of the average: step −η sign(EMA_b1(ḡ)). Arguments as in `sign_sgd`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> opt = pg.optim.sign_ema(0.5)
    >>> updates, state = opt.update(jnp.array([3.0, -0.1, 0.0]), opt.init(jnp.zeros(3)))
    >>> print(updates)
    [-0.5  0.5 -0. ]
    """
    return assembled(
        average_with_sign("average", b1, mu_dtype), learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite
    )


def micro_sign_sgd(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """MicroSignSGD: sign of each example, then the mean, then the average: step −η EMA_b1(E sign g).

    It is made of the statistic alone: the updates that come in give their shape and no more, so that clipping before it has
    no effect. Arguments as in `sign_sgd`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([-1.0, -1.0, -1.0, 7.0])
    >>> opt = pg.optim.micro_sign_sgd(0.1, b1=0.0)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates)                                           # three of four say −1, whatever the fourth's size
    0.05
    """
    return assembled(
        average_with_sign("example", b1, mu_dtype), learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite
    )
