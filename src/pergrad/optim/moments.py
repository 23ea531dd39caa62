"""Adam and its relatives: m̂/(√ν̂ + ε), with ν from the statistics of the examples.

Of a batch of B, ḡ = E g and s = E g² are known. With μ and σ the mean and the standard deviation of a single example's
gradient, E ḡ² = μ² + σ²/B and E s = μ² + σ², so that

    σ̂² = B (s − ḡ²)/(B − 1)    and    μ̂² = ḡ² − σ̂²/B = (B ḡ² − s)/(B − 1)

are unbiased. The family is ν = EMA of a μ̂² + c σ̂², which in what is known is

    a μ̂² + c σ̂² = a ḡ² + (c − a/B) σ̂² = a ḡ² + k (s − ḡ²)    with k = (c B − a)/(B − 1).

(a, c) = (1, 1/B) has k = 0 and gives ḡ², Adam; (1, 1) has k = 1 and gives s, MicroAdam. Whenever a = c, k = a without a
division: also at B = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..reductions import SQUARE
from .arguments import check_decay, check_dtype, check_not_negative, is_concrete
from .asking import Optimizer, ask, primitives
from .averages import average, cast, number, square, unbiased, zeros, zeros_real
from .base import assembled


def _scale_by(
    estimate: Callable[[Any, Any], Any],
    finish: Callable[[Any, Any, Any], Any],
    needs: tuple[str, ...],
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_dtype: Any,
    nesterov: bool,
) -> Optimizer:
    """m̂/(√ν̂ + ε) with ν̂ = finish(v̂, m̂, stats), m the average of the updates, and v that of estimate(updates, stats)."""
    check_decay(b1=b1, b2=b2)
    check_not_negative(eps=eps, eps_root=eps_root)
    mu_dtype = check_dtype("mu_dtype", mu_dtype)

    def init(params):
        # Adam's state in optax, by the same names: a checkpoint of one can go on with the other.
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params, mu_dtype), zeros_real(params))

    def update(updates, state, params=None, *, stats=None, **extra_args):
        del params, extra_args
        steps = optax.safe_increment(state.count)
        mu = average(updates, state.mu, b1)
        nu = average(estimate(updates, stats), state.nu, b2)
        m = ahead = unbiased(mu, b1, steps)
        if nesterov:
            following = unbiased(mu, b1, optax.safe_increment(steps))
            ahead = jax.tree.map(lambda f, g: b1 * f + (1 - b1) * g, following, unbiased(updates, b1, steps))
        v = finish(unbiased(nu, b2, steps), m, stats)
        out = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), ahead, v)
        return cast(out, updates), optax.ScaleByAdamState(steps, cast(mu, state.mu), cast(nu, state.nu))

    return Optimizer(init, update, primitives(*needs))


def _not_negative(v, m, stats):
    # μ̂² is negative wherever noise hides the gradient, and σ̂² by rounding: clamped after the average, which
    # would be biased if its terms were.
    return jax.tree.map(lambda v: jnp.maximum(v, 0), v)


def scale_by_moments(
    a: float | Callable[[Any], Any],
    c: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> Optimizer:
    """m̂/(√ν̂ + ε) with ν = EMA_b2 of a μ̂² + c σ̂²: how much of signal and of noise to divide by.

    m is the EMA_b1 of the updates as they come in, and both are bias-corrected. ν̂ is clamped at 0, after the average.
    μ̂² = (B ḡ² − s)/(B − 1) and σ̂² = B (s − ḡ²)/(B − 1) are unbiased, from the mean ḡ and the second moment s of the
    examples as they are: clipping before this transformation acts on m only.

    For a ≠ c it takes two examples: with one you get an error, or NaN where a mask leaves one and nobody can see that.

    Args:
      a, c: the weights: numbers, or functions of B such as ``lambda B: 1 / B``.
      b1, b2: decay of the averages m and ν.
      eps, eps_root: added outside and inside the root.
      mu_dtype: dtype in which m is kept (if not given, float32, or wider where the parameters are; so is ν).
      nesterov: step with the average that the next step would have, as `optax.scale_by_adam`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> s = {"mean": jnp.array(3.0), "second_moment": jnp.array(10.0), "count": 4.0}
    >>> noise = pg.optim.scale_by_moments(a=0, c=1)              # ḡ/σ̂, with σ̂² = 4/3
    >>> print(noise.update(s["mean"], noise.init(0.0), stats=s)[0].round(4))
    2.5981
    """
    for name, weight in (("a", a), ("c", c)):
        if not callable(weight):
            check_not_negative(**{name: weight})
    if is_concrete(a) and is_concrete(c) and a == c:
        return _scale_by(
            lambda updates, stats: jax.tree.map(lambda s: a * s, ask(stats, "second_moment", updates)),
            _not_negative,
            ("second_moment",),
            *(b1, b2, eps, eps_root, mu_dtype, nesterov),
        )

    def estimate(updates, stats):
        count = ask(stats, "count")

        def one(g, s):
            of_mean, k = _weights(a, c, number(count, s))
            return of_mean * SQUARE.fn(g) + k * (s - SQUARE.fn(g))

        return jax.tree.map(one, ask(stats, "mean", updates), ask(stats, "second_moment", updates))

    return _scale_by(estimate, _not_negative, ("second_moment", "count"), b1, b2, eps, eps_root, mu_dtype, nesterov)


def _weights(a: Any, c: Any, count: Any) -> tuple[Any, Any]:
    """Of ḡ² and of s − ḡ² in a μ̂² + c σ̂²."""
    a = a(count) if callable(a) else a
    c = c(count) if callable(c) else c
    same = a == c
    if is_concrete(count) and count < 2 and is_concrete(same) and not same:
        raise ValueError(
            f"mean and variance of the gradient are to be weighted with {a} and {c}, which takes their difference, but "
            f"the batch has {count:g} example{'s' * (count != 1)}; expected two or more. Give a larger batch, or write "
            "`pg.optim.adam` or `pg.optim.micro_adam`, which need no variance."
        )
    divisor = jnp.where(count < 2, jnp.nan, count - 1)  # not 0: an infinite ν might be taken for a very small one
    return a, jnp.where(same, a, (c * count - a) / divisor)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    nesterov: bool = False,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """Adam, (a, c) = (1, 1/B): ν = EMA_b2(ḡ²), m = EMA_b1(ḡ), step −η m̂/(√ν̂ + ε). It equals `optax.adam`.

    It needs no statistic but the mean, and squares the updates as they come in.

    Args:
      learning_rate: η, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, nesterov: see `scale_by_moments`.
      weight_decay: λ, decoupled: the step is −η (… + λ params), as in `optax.adamw`. A number or a schedule.
      mask: which parameters decay: a tree of booleans, or a function of the parameters that gives one.
      on_nonfinite: "propagate" does what arithmetic does. "skip": a step whose updates or new state would hold NaN or inf
        changes neither parameters nor state, but for a counter: ``optax.tree_utils.tree_get(state, "skipped")``.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> opt = pg.optim.adam(0.1)
    >>> updates, state = opt.update(jnp.array([1.0, -3.0]), opt.init(jnp.zeros(2)))
    >>> print(updates.round(3))
    [-0.1  0.1]
    """
    core = _scale_by(
        lambda updates, stats: square(updates),
        lambda v, m, stats: v,
        (),
        *(b1, b2, eps, eps_root, mu_dtype, nesterov),
    )
    return assembled(core, learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite)


def micro_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    nesterov: bool = False,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """MicroAdam, (a, c) = (1, 1): ν = EMA_b2(s), the mean of the examples' squares; step −η m̂/(√ν̂ + ε).

    Its steps are smaller than Adam's, the more so the larger the batch: see `scale_learning_rate`. Arguments as in `adam`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 7.0])
    >>> opt = pg.optim.micro_adam(0.1)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(4))                                         # −0.1 · 4/√25
    -0.08
    """
    core = scale_by_moments(1.0, 1.0, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return assembled(core, learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite)


def micro_adam_var(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    nesterov: bool = False,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """MicroAdamVar, (a, c) = (0, 1): ν = EMA_b2(σ̂²), the variance over the examples; step −η m̂/(√ν̂ + ε).

    Where the examples agree, and go on agreeing, there is no variance, and the step is −η m̂/(√eps_root + ε): with the
    default ε, larger than anything that trains. Choose ``eps`` or ``eps_root`` by the size of your gradients.
    Arguments as in `adam`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 5.0])
    >>> opt = pg.optim.micro_adam_var(0.1)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(4))                                         # −0.1 · 3/√8
    -0.1061
    """
    core = scale_by_moments(0.0, 1.0, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return assembled(core, learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite)


def micro_adam_msq(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    nesterov: bool = False,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """MicroAdamMSQ, (a, c) = (1, 0): ν = EMA_b2(μ̂²), the squared mean without the noise's part; step −η m̂/(√ν̂ + ε).

    μ̂² may be negative; its average is clamped at 0. Where that happens, noise hides the gradient, and the step is
    −η m̂/(√eps_root + ε): choose ``eps`` or ``eps_root`` by the size of your gradients. Arguments as in `adam`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 5.0])
    >>> opt = pg.optim.micro_adam_msq(0.1)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(3))                                         # −0.1 · 3/√5
    -0.134
    """
    core = scale_by_moments(1.0, 0.0, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return assembled(core, learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite)


def eve(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    nesterov: bool = False,
    correction: bool = True,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """Eve: m = EMA_b1(ḡ) and v = EMA_b2(s) kept apart, ν̂ = v̂/B + (1 − 1/B) m̂², step −η m̂/(√ν̂ + ε).

    E ḡ² = μ² + σ²/B, which Adam averages, is E s/B + (1 − 1/B) μ² as well. Eve takes s from the examples, which is B times
    as many samples of a square, and μ² from the momentum, whose noise is averaged out. With B = 1 it is Adam.

    m is the average of the updates as they come in, and s of the examples as they are: clip after Eve rather than before.

    Args:
      correction: False leaves (1 − 1/B) m̂² out: ν̂ = v̂/B. An ablation: it takes the gradient for noise, and where all
        examples agree its steps are √B times Adam's.
      learning_rate, b1, b2, …: as in `adam`. B is the number of examples of the whole step, over all devices.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 7.0])
    >>> opt = pg.optim.eve(0.1)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(4))                                         # −0.1 · 4/√(25/2 + 16/2)
    -0.0883
    """

    def finish(v, m, stats):
        count = ask(stats, "count")

        def one(v, m):
            n = number(count, v)
            return v / n + (1 - 1 / n) * square(m) if correction else v / n

        return jax.tree.map(one, v, m)

    core = _scale_by(
        lambda updates, stats: ask(stats, "second_moment", updates),
        finish,
        ("second_moment", "count"),
        *(b1, b2, eps, eps_root, mu_dtype, nesterov),
    )
    return assembled(core, learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite)
