"""RMSprop, Adadelta and Adagrad by Eve's idea.

Each divides by the root of ν, an average (or a sum) of ḡ² over the steps. Since E ḡ² = E s/B + (1 − 1/B) μ², the same
expectation has

    ν = v/B + (1 − 1/B) m²,    m the average of ḡ and v that of s, with the weights of the rule,

and a smaller variance: v sees B squares a step where ḡ² is one, and in m noise is averaged before the square.

An average that begins at 0 has weights that sum to w = 1 − decayᵗ. ν and v are linear in them, m² is not: with m̂ = m/w and
v̂ = v/w, the classical average is w · E ḡ², and ν = w · (v̂/B + (1 − 1/B) m̂²). For a sum over t steps w = t.
So where all examples and steps agree, and whenever B = 1, each rule is the classical one from its first step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .arguments import check_decay, check_dtype, check_not_negative
from .asking import Optimizer, ask, primitives
from .averages import average, cast, number, square, zeros, zeros_real
from .base import assembled

NEEDS = ("second_moment", "count")


class AveragesState(NamedTuple):
    """Averages over the steps: mu of ḡ and nu of s."""

    count: jax.Array
    mu: Any
    nu: Any


def _averages(params, mu_dtype) -> AveragesState:
    return AveragesState(jnp.zeros([], jnp.int32), zeros(params, mu_dtype), zeros_real(params))


def _averaged(updates, state: AveragesState, stats, decay=None):
    """E ḡ² by Eve's idea, the weight w that the classical average gives it, and the new state.

    Without a decay all steps weigh the same.
    """
    steps: Any = optax.safe_increment(state.count)
    keep, weight = (1 - 1 / steps.astype(float), 1.0) if decay is None else (decay, 1 - decay**steps)
    mu = average(ask(stats, "mean", updates), state.mu, keep)
    nu = average(ask(stats, "second_moment", updates), state.nu, keep)
    count = ask(stats, "count")

    def one(m, v):
        n = number(count, v)
        return v / weight / n + (1 - 1 / n) * square(m / weight)

    expected = cast(jax.tree.map(one, mu, nu), nu)
    return expected, weight, AveragesState(steps, cast(mu, state.mu), cast(nu, state.nu))


def micro_rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """RMSprop by Eve's idea: ν = v/B + (1 − 1/B) m², with averages m of ḡ and v of s; step −η ḡ/√(ν + ε).

    With m̂, v̂ bias-corrected, ν = w (v̂/B + (1 − 1/B) m̂²) + (1 − w) initial_scale and w = 1 − decayᵗ, or w = 1 with
    ``bias_correction``: the weight that the classical average has. With B = 1 it is `optax.rmsprop`.

    Args:
      learning_rate: η, a number or a schedule.
      decay: of the averages.
      eps: added inside the root, or outside without ``eps_in_sqrt``.
      initial_scale, bias_correction, momentum, nesterov: as in `optax.rmsprop`. (Its ``centered`` would subtract m² again.)
      mu_dtype: dtype in which m and the momentum are kept (if not given, float32, or wider where the parameters are; so is v).
      weight_decay, mask, on_nonfinite: as in `adam`. Weight decay is no part of the momentum.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 7.0])
    >>> opt = pg.optim.micro_rmsprop(0.1, bias_correction=True)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(4))                                         # −0.1 · 4/√(25/2 + 16/2)
    -0.0883
    """
    check_decay(decay=decay)
    check_not_negative(eps=eps, initial_scale=initial_scale)
    mu_dtype = check_dtype("mu_dtype", mu_dtype)
    if momentum is not None:
        check_decay(momentum=momentum)

    def update(updates, state, params=None, *, stats=None, **extra_args):
        del params, extra_args
        expected, weight, state = _averaged(updates, state, stats, decay)

        def one(g, v):
            # What is not weight belongs to the initial value. Bias correction divides both by the weight.
            v = v + (1 / weight - 1) * initial_scale if bias_correction else weight * v + (1 - weight) * initial_scale
            return g * jax.lax.rsqrt(v + eps) if eps_in_sqrt else g / (jnp.sqrt(v) + eps)

        return cast(jax.tree.map(one, updates, expected), updates), state

    core = Optimizer(lambda params: _averages(params, mu_dtype), update, primitives(*NEEDS))
    after = None if momentum is None else _trace(momentum, nesterov, mu_dtype)
    return assembled(core, learning_rate, weight_decay, mask, after, on_nonfinite)


def _trace(decay, nesterov, dtype) -> optax.GradientTransformation:
    """`optax.trace`, but for its state's dtype, which there is that of the parameters until the first step."""

    def init(params):
        return optax.TraceState(zeros(params, dtype))

    def update(updates, state, params=None):
        del params
        add = lambda u, t: u + decay * t.astype(u.dtype)
        trace = jax.tree.map(add, updates, state.trace)
        out = jax.tree.map(add, updates, trace) if nesterov else trace
        return out, optax.TraceState(cast(trace, state.trace))

    return optax.GradientTransformation(init, update)


class AdadeltaState(NamedTuple):
    """Averages over the steps: mu of ḡ, nu of s, and steps of the squared steps."""

    count: jax.Array
    mu: Any
    nu: Any
    steps: Any


def micro_adadelta(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    mu_dtype: Any = None,
    *,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """Adadelta by Eve's idea: ν = v/B + (1 − 1/B) m², with averages m of ḡ and v of s; step −η u, u = ḡ √(x + ε)/√(ν + ε).

    x is the average of u² up to the step before. ν has the weight of the classical average, as in `micro_rmsprop`. With
    B = 1 it is `optax.adadelta`, but for the weight decay, which is decoupled here and there is not.

    Args:
      learning_rate: η, a number or a schedule.
      rho: decay of the averages.
      eps: added inside both roots; also what the first steps are made of.
      mu_dtype, weight_decay, mask, on_nonfinite: as in `micro_rmsprop`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 7.0])
    >>> opt = pg.optim.micro_adadelta()
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(4))                                         # −4 · √10⁻⁶/√(0.1 · (25/2 + 16/2))
    -0.0028
    """
    check_decay(rho=rho)
    check_not_negative(eps=eps)
    mu_dtype = check_dtype("mu_dtype", mu_dtype)

    def init(params):
        return AdadeltaState(*_averages(params, mu_dtype), zeros_real(params))

    def update(updates, state, params=None, *, stats=None, **extra_args):
        del params, extra_args
        expected, weight, averages = _averaged(updates, AveragesState(*state[:3]), stats, rho)
        out = jax.tree.map(
            lambda g, v, x: g * (jnp.sqrt(x + eps) / jnp.sqrt(weight * v + eps)), updates, expected, state.steps
        )
        steps = cast(average(square(out), state.steps, rho), state.steps)
        return cast(out, updates), AdadeltaState(*averages, steps)

    return assembled(
        Optimizer(init, update, primitives(*NEEDS)), learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite
    )


def micro_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    on_nonfinite: str = "propagate",
) -> Optimizer:
    """Adagrad by Eve's idea: ν = ν₀ + t (v/B + (1 − 1/B) m²), with means m of ḡ and v of s over t steps; step −η ḡ/√(ν + ε).

    With B = 1, where t v is the sum of ḡ², it is `optax.adagrad`. Where ν = 0 (no gradient yet, and ν₀ = 0) there is no step.

    Args:
      learning_rate: η, a number or a schedule.
      initial_accumulator_value: ν₀.
      eps: added inside the root.
      mu_dtype, weight_decay, mask, on_nonfinite: as in `micro_rmsprop`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> loss, params, batch = lambda w, x: (x * w).sum(), jnp.array(0.0), jnp.array([1.0, 7.0])
    >>> opt = pg.optim.micro_adagrad(0.1, initial_accumulator_value=0.0)
    >>> value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
    >>> updates, state = opt.update(s["mean"], opt.init(params), params, stats=s)
    >>> print(updates.round(4))                                         # −0.1 · 4/√(25/2 + 16/2)
    -0.0883
    """
    check_not_negative(initial_accumulator_value=initial_accumulator_value, eps=eps)
    mu_dtype = check_dtype("mu_dtype", mu_dtype)

    def update(updates, state, params=None, *, stats=None, **extra_args):
        del params, extra_args
        expected, _, state = _averaged(updates, state, stats)

        def one(g, v):
            v = initial_accumulator_value + state.count * v
            return g * jnp.where(v > 0, jax.lax.rsqrt(v + eps), 0)

        return cast(jax.tree.map(one, updates, expected), updates), state

    core = Optimizer(lambda params: _averages(params, mu_dtype), update, primitives(*NEEDS))
    return assembled(core, learning_rate, weight_decay, mask, on_nonfinite=on_nonfinite)
