"""How well Adam and Eve know what they divide by: standard errors of their estimators, by formula and by simulation.

With m an EMA (β₁) of ḡ and, with β₂, v an EMA of ḡ² (Adam) or of s = mean gᵢ² (Eve), both bias-corrected, the estimators are

    quantity                                        Adam             Eve
    "noise"               σ²/B, of the mean ḡ       v − m²           (v − m²)/B
    "relative_deviation"  σ/(√B |μ|), of ḡ          √(v/m² − 1)      √((v/m² − 1)/B)
    "preconditioner"      ν = μ² + σ²/B             v                v/B + (1 − 1/B) m²

The relative deviation δ decides the step: both divide m by √ν = |m| √(1 + δ²). Adam sees one sample of ḡ per step, Eve B
samples of g, so its estimate of the noise has B times the degrees of freedom: a standard error lower by √B.

Let g ~ N(μ, σ²), the same in all steps; ε̄ = ḡ − μ has the variance τ² = σ²/B. With normalised weights wₖ of v (β₂) and uₖ of m
(β₁), v and m² have a linear and a quadratic part in the noise, and Gaussian noise leaves the two uncorrelated:

    v = μ² + 2μ Σ wₖ ε̄ₖ + q    with q = Σ wₖ ε̄ₖ² (Adam) or Σ wₖ · mean εₖᵢ² (Eve),
    m² = μ² + 2μ M + M²        with M = Σ uₖ ε̄ₖ.

With W = Σ wₖ², U = Σ uₖ², C = Σ wₖuₖ and D = Σ wₖuₖ², and Cov(x², y²) = 2 Cov(x, y)² for the quadratic parts,

    Var q = 2τ⁴ W (Adam) or 2σ⁴ W/B (Eve),    Cov(q, M²) = 2τ⁴ D (both),    Var M² = 2τ⁴ U²,
    Var(α v + γ m²) = 4μ²τ² (α² W + 2αγ C + γ² U) + α² Var q + 2αγ · 2τ⁴ D + γ² · 2τ⁴ U².

"noise" and "preconditioner" are such sums: exact for every signal-to-noise ratio. "relative_deviation" is not; to first
order in the errors, from δ² = κ (v/m² − 1) with κ = 1 or 1/B, at v = μ² (1 + a) with a = δ²/κ,

    δ dδ = κ/(2μ²) · (2μ (Σ wₖ ε̄ₖ − (1 + a) M) + q − E q),

and (Var dδ)/δ² follows as above. That asks for an m that is known well, r √(B/U) ≫ 1, and for few v < m².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..optim.arguments import check_decay
from .moments import ema_overlap

QUANTITIES = ("noise", "relative_deviation", "preconditioner")


class EstimatorErrors(NamedTuple):
    """Standard errors, each divided by the true value."""

    adam: Any
    eve: Any

    @property
    def ratio(self) -> Any:
        """How many times larger Adam's is."""
        return self.adam / self.eve


def estimator_errors(
    snr: Any,
    batch_size: int,
    b1: float = 0.9,
    b2: float = 0.999,
    quantity: str = "relative_deviation",
    steps: int | None = None,
) -> EstimatorErrors:
    """Relative standard errors of what Adam and Eve know about their gradients' noise, for Gaussian gradients.

    ``quantity`` is one of

    * "noise": the variance σ²/B of the mean gradient. Adam has v − m², Eve (v − m²)/B.
    * "relative_deviation": δ = σ/(√B |μ|). Adam has √(v/m² − 1), Eve √((v/m² − 1)/B); both step by m/(|m| √(1 + δ²)).
    * "preconditioner": ν = μ² + σ²/B. Adam has v, Eve v/B + (1 − 1/B) m².

    Here v is the EMA of ḡ² for Adam and of s, the second moment, for Eve. When both EMAs have the same length, the
    ratio for "noise" is √B; for "relative_deviation" it is √((B + 2/r²)/(1 + 2/r²)), which is about √B where the
    signal-to-noise ratio r is well above 1, and falls towards 1 where both suffer from the same error of m. For
    "preconditioner" it is the other way round: √B where r is small (and B below the EMA's length, or the error of m² is what
    remains), 1 where it is large. "relative_deviation" is to first order in the errors.

    Args:
      snr: r = |μ|/σ of one example's gradient: a number or an array.
      batch_size: B.
      b1, b2: decays of the EMAs; equal ones are the comparison of estimators as such.
      quantity: see above.
      steps: after so many steps, with bias correction; not given: after very many.

    Returns:
      `EstimatorErrors(adam, eve)`, with a property ``ratio``. Standard errors only: m² also has a bias, Uτ² (see the top
      of this module), which both share; it is small if B is large or b1 is near 1.

    >>> from pergrad import analysis
    >>> for quantity in ("noise", "relative_deviation", "preconditioner"):
    ...     errors = analysis.estimator_errors(3.0, batch_size=64, b1=0.99, b2=0.99, quantity=quantity)
    ...     print(f"{quantity:19} Adam {errors.adam:.4f}  Eve {errors.eve:.4f}  ratio {errors.ratio:.2f}")
    noise               Adam 0.0998  Eve 0.0125  ratio 7.97
    relative_deviation  Adam 0.0502  Eve 0.0069  ratio 7.25
    preconditioner      Adam 0.0059  Eve 0.0059  ratio 1.00
    """
    _check(quantity, batch_size, b1, b2)
    # σ = 1, so μ = r, σ⁴ = 1 and τ² = 1/B. Differences of W, U and C are taken before they meet μ², which may be large.
    mu2, t2 = jnp.square(jnp.asarray(snr, jnp.float32)), 1 / batch_size
    w, u, c, d = (ema_overlap(*decays, steps=steps) for decays in ((b2, b2), (b1, b1), (b1, b2), (b1, b1, b2)))

    def of_sum(alpha, gamma, var_q, true):
        linear = 4 * mu2 * t2 * (alpha**2 * w + 2 * alpha * gamma * c + gamma**2 * u)
        quadratic = alpha**2 * var_q + 4 * alpha * gamma * t2**2 * d + 2 * gamma**2 * t2**2 * u**2
        return jnp.sqrt(linear + quadratic) / true

    def of_relative_deviation(kappa, var_q):
        a = t2 / mu2 / kappa
        linear = 4 * mu2 * t2 * ((w - 2 * c + u) + 2 * a * (u - c) + a**2 * u)
        return kappa / (2 * t2) * jnp.sqrt(linear + var_q)

    adam, eve = 2 * t2**2 * w, 2 * t2 * w  # Var q
    if quantity == "noise":
        return EstimatorErrors(of_sum(1, -1, adam, t2), of_sum(t2, -t2, eve, t2))
    if quantity == "preconditioner":
        return EstimatorErrors(of_sum(1, 0, adam, mu2 + t2), of_sum(t2, 1 - t2, eve, mu2 + t2))
    return EstimatorErrors(of_relative_deviation(1, adam), of_relative_deviation(t2, eve))


def simulate_estimator_errors(
    key: jax.Array,
    snr: float,
    batch_size: int,
    b1: float = 0.9,
    b2: float = 0.999,
    quantity: str = "relative_deviation",
    steps: int = 1000,
    trials: int = 1000,
    noise: Callable[..., jax.Array] = jax.random.normal,
) -> EstimatorErrors:
    """`estimator_errors` by simulation: ``trials`` runs of ``steps`` steps on batches of gradients r + noise.

    Args:
      key: a random key.
      snr, batch_size, b1, b2, quantity: as for `estimator_errors`.
      steps, trials: the standard deviation of t trials is itself known to about 1 in √(2t).
      noise: ``noise(key, shape)`` of mean 0 and variance 1, to see what becomes of the formula where gradients are not
        Gaussian.

    Returns:
      `EstimatorErrors(adam, eve)`: standard deviations over the trials, over the true value. v < m² counts as no noise.

    >>> import jax
    >>> from pergrad import analysis
    >>> options = dict(snr=3.0, batch_size=16, b1=0.95, b2=0.95, steps=100, quantity="noise")
    >>> by_simulation = analysis.simulate_estimator_errors(jax.random.key(0), **options)
    >>> by_formula = analysis.estimator_errors(**options)
    >>> print(f"{by_simulation.ratio:.1f} {by_formula.ratio:.1f}")
    4.0 3.9
    """
    _check(quantity, batch_size, b1, b2)

    def step(state, key):
        g = snr + noise(key, (trials, batch_size))
        mean, second = jnp.mean(g, axis=1), jnp.mean(g**2, axis=1)
        m, v_adam, v_eve = state
        return (b1 * m + (1 - b1) * mean, b2 * v_adam + (1 - b2) * mean**2, b2 * v_eve + (1 - b2) * second), None

    (m, v_adam, v_eve), _ = jax.lax.scan(step, (jnp.zeros(trials),) * 3, jax.random.split(key, steps))
    m2, v_adam, v_eve = (m / (1 - b1**steps)) ** 2, v_adam / (1 - b2**steps), v_eve / (1 - b2**steps)
    b = batch_size
    estimates, true = {
        "noise": ((v_adam - m2, (v_eve - m2) / b), 1 / b),
        "relative_deviation": (
            (jnp.sqrt(jnp.maximum(v_adam / m2 - 1, 0)), jnp.sqrt(jnp.maximum(v_eve / m2 - 1, 0) / b)),
            1 / (b**0.5 * abs(snr)),
        ),
        "preconditioner": ((v_adam, v_eve / b + (1 - 1 / b) * m2), snr**2 + 1 / b),
    }[quantity]
    return EstimatorErrors(*(jnp.std(x) / true for x in estimates))


def _check(quantity, batch_size, b1, b2):
    check_decay(b1=b1, b2=b2)
    if quantity not in QUANTITIES:
        listed = ", ".join(f'"{q}"' for q in QUANTITIES)
        raise ValueError(f'unknown quantity {quantity!r}: expected one of {listed}. Write `quantity="noise"`.')
    if batch_size < 1:
        raise ValueError(f"batch_size was given {batch_size!r}: expected the examples in a batch, at least 1.")
