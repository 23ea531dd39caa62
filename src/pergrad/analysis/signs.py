"""Where to put the sign: before the mean over examples, before the EMA over steps, or after both.

Model: coordinate by coordinate, the gradients of examples are independent draws of N(μ, σ²), the same over the EMA's length.
Let r = |μ|/σ, z = sign μ, and L = 1/Σ wₖ² the length of the EMA with normalised weights wₖ; L = (1+β)/(1−β) in the long run.
The sign of N(μ, σ²/n) agrees with z with probability Φ(r√n), so E[sign · z] = 2 Φ(r√n) − 1 = erf(r √(n/2)) =: e(n). Then

    u              E[u z]    E[u²]
    MicroSignSGD   e(1)      e(1)² + (1 − e(1)²)/(B L)    a mean of B signs, averaged over L steps
    SignSGD        e(B)      e(B)² + (1 − e(B)²)/L        one sign per step, averaged over L steps
    SignEMA        e(B L)    1                            a mean over B L examples, then its sign

since a sign has the variance 1 − (E sign)², and an average over independent draws divides it by their number. The alignment of
a layer's update with sign μ is the cosine of the two vectors; with many coordinates, sums over them come close to
their expectations, and the cosine to Σ E[u z] / √(Σ z² · Σ E[u²]).

What follows: e grows with n, so at equal step size a later sign always agrees more. The cosine also asks what the
update spends on coordinates without a signal: the late sign is ±1 there too, an early sign averages out. Coordinates
that are alike favour a late sign; few strong ones among many that only have noise favour an early one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.scipy.special import erf

from ..optim.arguments import check_decay
from ..optim.signs import average_with_sign
from .moments import Per, ema_overlap, entry, ratio, total
from .signal import signal_to_noise

NAMES = {"micro_sign_sgd": "MicroSignSGD", "sign_sgd": "SignSGD", "sign_ema": "SignEMA"}
MEASURES = ("cosine", "agreement")


class Placements(NamedTuple):
    """Something for each of the three placements of the sign."""

    micro_sign_sgd: Any
    sign_sgd: Any
    sign_ema: Any


def predicted_alignment(
    stats: Mapping[str, Any],
    batch_size: float | None = None,
    b1: float = 0.9,
    per: Per = "all",
    measure: str = "cosine",
    steps: int | None = None,
) -> Placements:
    """The expected alignment with sign(μ) of the updates of MicroSignSGD, SignSGD and SignEMA, from signal-to-noise ratios.

    With r = |μ|/σ of a coordinate, L = (1+β₁)/(1−β₁) the EMA's length and e(n) = erf(r √(n/2)), for Gaussian noise

    * MicroSignSGD: E[u sign μ] = e(1),  E u² = e(1)² + (1 − e(1)²)/(B L)
    * SignSGD:      E[u sign μ] = e(B),  E u² = e(B)² + (1 − e(B)²)/L
    * SignEMA:      E[u sign μ] = e(BL), E u² = 1

    and the alignment is the cosine Σ E[u sign μ] / √(d Σ E u²) over the d coordinates of a layer.

    The ratios are estimates, and one batch's are too coarse: coordinates without signal seem to have one of up to about
    1/√count, and SignEMA sees ratios of 1/√(BL). Take statistics over ten times B L examples or more: of a large batch, or from
    `average_stats` at fixed parameters.

    Args:
      stats: the results of `analysis.STATS`. ``count=jnp.inf`` if mean and second moment are exact.
      batch_size: B of the optimizer; not given: the count of ``stats``.
      b1: decay of the EMA.
      per: what is a layer, as for `analysis.signal_to_noise`.
      measure: "cosine", which does not depend on step sizes, or "agreement", the mean of u · sign(μ) over the coordinates.
      steps: how many steps the EMA has seen, if they are few: it starts at zero and is not bias-corrected.

    Returns:
      `Placements` of numbers per layer; 0 where there is no gradient.

    >>> import jax.numpy as jnp
    >>> from pergrad import analysis
    >>> mu = jnp.full(100, 0.1)                                      # alike, σ = 1
    >>> exact = lambda mu: {"mean": mu, "second_moment": mu**2 + 1, "count": jnp.inf}
    >>> print("%.2f %.2f %.2f" % analysis.predicted_alignment(exact(mu), batch_size=16))
    0.81 0.82 0.92
    >>> mu = jnp.where(jnp.arange(100) < 20, 1.0, 1e-3)               # one in five has a signal
    >>> print("%.2f %.2f %.2f" % analysis.predicted_alignment(exact(mu), batch_size=16))
    0.44 0.41 0.21
    """
    check_decay(b1=b1)
    _check_measure(measure)
    ema_length = 1 / ema_overlap(b1, b1, steps=steps)
    weight = 1.0 if steps is None else 1 - b1**steps  # without bias correction, the EMA's weights sum to this
    b = entry(stats, "count") if batch_size is None else batch_size
    if not isinstance(b, Tracer) and not 1 <= b < math.inf:
        raise ValueError(
            f"the batch size is {b}: expected a finite number, at least 1. Write `predicted_alignment(stats, batch_size=B)` "
            "with the optimizer's B."
        )
    # A coordinate that no example touches is not moved, and sign 0 is 0: it must not count as one full of noise.
    z2 = jax.tree.map(lambda g: jnp.sign(g) ** 2, entry(stats, "mean"))
    moved = jax.tree.map(lambda s: s > 0, entry(stats, "second_moment"))
    snr = signal_to_noise(stats)

    def expected(sign_of, averaged, scale):
        """A mean of ``averaged`` independent signs, each of a mean of ``sign_of`` examples, times ``scale``."""
        e = jax.tree.map(lambda r: erf(r * jnp.sqrt(sign_of / 2)), snr)
        dots = jax.tree.map(lambda e, z2: scale * e * z2, e, z2)
        squares = jax.tree.map(
            lambda e, moved: jnp.where(moved, scale**2 * (e**2 + (1 - e**2) / averaged), 0), e, moved
        )
        return _alignment(dots, squares, z2, per, measure)

    return Placements(
        micro_sign_sgd=expected(1.0, b * ema_length, weight),
        sign_sgd=expected(b, ema_length, weight),
        sign_ema=expected(b * ema_length, 1.0, 1.0),
    )


def measured_alignment(updates: Any, mean: Any, per: Per = "all", measure: str = "cosine") -> Any:
    """The alignment of ``updates`` with the sign of ``mean``: Σ u sign(μ) / (‖u‖ ‖sign μ‖) over each layer.

    Args:
      updates: a tree of directions, along the gradient. What optax returns has been multiplied by −η: the
        cosine then has the opposite sign.
      mean: the same tree of mean gradients, of many more examples than made the update, or the two share their noise.
      per: what is a layer, as for `analysis.signal_to_noise`.
      measure: "cosine", or "agreement", the mean of u · sign(μ) over the coordinates with μ ≠ 0.

    Returns:
      A number per layer; 0 where there is no gradient or no update.

    >>> import jax.numpy as jnp
    >>> from pergrad import analysis
    >>> print(analysis.measured_alignment(jnp.array([1.0, 1.0, -1.0, 1.0]), mean=jnp.array([0.1, 2.0, -3.0, -0.2])))
    0.5
    """
    _check_measure(measure)
    z = jax.tree.map(jnp.sign, mean)
    dots = jax.tree.map(lambda u, z: u * z, updates, z)
    return _alignment(dots, jax.tree.map(jnp.square, updates), jax.tree.map(jnp.square, z), per, measure)


def _alignment(dots, squares, z2, per, measure):
    dots, squares, z2 = (total(x, per) for x in (dots, squares, z2))
    if measure == "agreement":
        return jax.tree.map(ratio, dots, z2)
    return jax.tree.map(lambda uz, uu, zz: ratio(uz, jnp.sqrt(uu * zz)), dots, squares, z2)


def _check_measure(measure):
    if measure not in MEASURES:
        raise ValueError(f'unknown measure {measure!r}: expected "cosine" or "agreement". Write `measure="cosine"`.')


def recommend(alignment: Placements) -> Any:
    """The name of the placement with the best alignment: one, or a tree of them, one for each layer.

    Of equals the later sign: it agrees at least as well on every coordinate.

    >>> from pergrad import analysis
    >>> analysis.recommend(analysis.Placements(micro_sign_sgd=0.81, sign_sgd=0.83, sign_ema=0.92))
    'SignEMA'
    >>> analysis.recommend(analysis.Placements({"a": 0.9, "b": 0.1}, {"a": 0.7, "b": 0.2}, {"a": 0.6, "b": 0.2}))
    {'a': 'MicroSignSGD', 'b': 'SignEMA'}
    """

    def best(*values):
        values = [float(v) for v in values]
        if any(math.isnan(v) for v in values):
            raise ValueError(
                "an alignment is NaN; expected numbers. Statistics of fewer than two examples have no estimate of noise: give "
                "`predicted_alignment` a larger batch."
            )
        return NAMES[max(reversed(NAMES), key=dict(zip(NAMES, values)).__getitem__)]

    return jax.tree.map(best, *alignment)


class SignPlacements(NamedTuple):
    """The pair that `sign_placements` returns."""

    init: Callable[[Any], Placements]
    update: Callable[[Mapping[str, Any], Placements], tuple[Placements, Placements]]


def sign_placements(b1: float = 0.9) -> SignPlacements:
    """All three updates from the same gradients, to measure their alignment side by side.

    ``directions, state = sign_placements(b1).update(stats, state)`` with stats that have a "mean" and a "sign_mean". The
    directions are along the gradient; EMAs start at zero, without bias correction:

    * MicroSignSGD: EMA of mean sign gᵢ
    * SignSGD: EMA of sign ḡ
    * SignEMA: sign of the EMA of ḡ

    >>> import jax.numpy as jnp
    >>> from pergrad import analysis
    >>> signs = analysis.sign_placements(b1=0.5)
    >>> stats = {"mean": jnp.array([2.0, -0.1]), "sign_mean": jnp.array([0.5, 0.0])}
    >>> directions, state = signs.update(stats, signs.init(jnp.zeros(2)))
    >>> print(*directions)
    [0.25 0. ] [ 0.5 -0.5] [ 1. -1.]
    """
    transforms = Placements(*(average_with_sign(of, b1) for of in ("example", "mean", "average")))

    def init(params):
        return Placements(*(t.init(params) for t in transforms))

    def update(stats, state):
        mean, signs = entry(stats, "mean"), entry(stats, "sign_mean")
        new = [t.update(mean, s, stats={"sign_mean": signs}) for t, s in zip(transforms, state, strict=True)]
        directions, state = zip(*new, strict=True)
        return Placements(*directions), Placements(*state)

    return SignPlacements(init, update)
