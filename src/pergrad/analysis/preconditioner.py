"""Mean against variance in Adam's preconditioner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..optim.arguments import check_decay
from ..optim.averages import average, zeros_real
from .moments import Per, entry, moments, ratio, total, tracker


class PreconditionerShares(NamedTuple):
    """What μ² and σ²/B have in ν; together 1 (both 0 where there is no gradient)."""

    mean: Any
    variance: Any


class PreconditionerState(NamedTuple):
    """State of `track_preconditioner`; ``state.shares`` are the shares, NaN before the first step."""

    weight: jax.Array
    mean_square: Any  # the two parts of ν, not yet divided by the weight
    noise: Any

    @property
    def shares(self) -> PreconditionerShares:
        # The bias correction cancels in a ratio, so NaN before the first step must be asked for.
        return jax.tree.map(lambda x: jnp.where(self.weight > 0, x, jnp.nan), _shares(self.mean_square, self.noise))


def _shares(mean_square, noise) -> PreconditionerShares:
    nu = jax.tree.map(jnp.add, mean_square, noise)
    return PreconditionerShares(jax.tree.map(ratio, mean_square, nu), jax.tree.map(ratio, noise, nu))


def _parts(stats, batch_size, per):
    mean_square, variance = moments(stats)
    return total(mean_square, per), total(jax.tree.map(lambda v: v / batch_size, variance), per)


def preconditioner_shares(
    stats: Mapping[str, Any], batch_size: float | None = None, per: Per = "leaf"
) -> PreconditionerShares:
    """The shares of μ² and of σ²/B in what Adam averages.

    Adam's ν is an EMA of ḡ², and E ḡ² = μ² + σ²/B. With the unbiased estimates the two parts of one batch are exactly its
    ḡ²: μ̂² + σ̂²/B = ḡ². The shares are Σ μ̂² / Σ (μ̂² + σ̂²/B) and Σ (σ̂²/B) / Σ (μ̂² + σ̂²/B), sums over a layer.

    Args:
      stats: the results of `analysis.STATS`.
      batch_size: B; not given: the count of ``stats``. Give it with averaged statistics, or to ask for another B.
      per: what is a layer, as for `analysis.signal_to_noise`.

    Returns:
      `PreconditionerShares(mean, variance)`. The first may be negative, the second then above 1, where noise hides
      the signal; they are not clipped, since clipped estimates do not average out.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> from pergrad import analysis
    >>> loss = lambda w, x: (x * w).sum()
    >>> stats = pg.grad_stats(loss, analysis.STATS)(1.0, jnp.array([1.0, 3.0]))
    >>> print(*analysis.preconditioner_shares(stats))               # of ḡ² = 4: μ̂² = 3, σ̂²/2 = 1
    0.75 0.25
    >>> print(analysis.preconditioner_shares(stats, batch_size=6).mean.round(2))
    0.9
    """
    return _shares(*_parts(stats, entry(stats, "count") if batch_size is None else batch_size, per))


def track_preconditioner(b2: float = 0.999, per: Per = "leaf") -> optax.GradientTransformationExtraArgs:
    """The shares of μ² and σ²/B in Adam's ν itself, over training.

    ν = EMA(ḡ²) = EMA(μ̂²) + EMA(σ̂²/B) holds exactly, step by step. Both EMAs are kept, summed over layers (sums and EMAs
    commute), so a few numbers are all that it costs. Averaging also takes care of single batches with negative μ̂².

    Args:
      b2: Adam's β₂.
      per: what is a layer, as for `analysis.signal_to_noise`; "coordinate" keeps two trees like the parameters, and
        their sum over ``weight`` is Adam's bias-corrected ν.

    Returns:
      An optax transformation that passes updates through; give it ``stats=``, and read ``state.shares``.

    >>> import jax.numpy as jnp, optax, pergrad as pg
    >>> from pergrad import analysis
    >>> optimizer = optax.chain(analysis.track_preconditioner(), optax.adam(1e-3))
    >>> params, x = jnp.array(1.0), jnp.array([1.0, 3.0])
    >>> stats = pg.grad_stats(lambda w, x: (x * w).sum(), analysis.STATS)(params, x)
    >>> updates, state = optimizer.update(stats["mean"], optimizer.init(params), params, stats=stats)
    >>> print(state[0].shares.mean, state[0].shares.variance)
    0.75 0.25
    """
    check_decay(b2=b2)

    def init(params):
        return PreconditionerState(jnp.zeros(()), total(zeros_real(params), per), total(zeros_real(params), per))

    def advance(state, stats):
        return average(PreconditionerState(jnp.ones(()), *_parts(stats, entry(stats, "count"), per)), state, b2)

    return tracker(init, advance)
