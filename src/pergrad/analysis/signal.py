"""Signal-to-noise ratio, per coordinate and per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .moments import Per, moments, ratio, total


def signal_to_noise(stats: Mapping[str, Any], per: Per = "coordinate", squared: bool = False) -> Any:
    """The signal-to-noise ratio of one example's gradient: |μ|/σ per coordinate, √(Σμ²/Σσ²) per layer.

    With the unbiased estimates of `moments`: √(max(Σ μ̂², 0) / Σ σ̂²), the sums over the coordinates of a layer. That of the
    mean of B examples is √B times as large.

    Where Σ μ̂² is negative, the data show no signal above the noise, and the ratio is 0. (`pg.snr()` is |ḡ|/σ̂, which does not
    subtract the noise of ḡ: without any signal, it is about 1/√B.) A clipped estimate is no longer unbiased: to average
    over coordinates or steps, use ``squared``, or sum first, by a coarser ``per`` or by `average_stats`.

    Args:
      stats: the results of `analysis.STATS`.
      per: "coordinate", "leaf", "all"; a number k, for layers that are leaves with the same first k path entries; or a
        function from the path of a leaf ("encoder/0/kernel") to the name of its layer. The last two give a dict.
      squared: Σ μ̂² / Σ σ̂², which may be negative.

    Returns:
      The ratio: 0 where no example has a gradient, infinite where all examples agree exactly.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> from pergrad import analysis
    >>> loss = lambda w, x: (x * w).sum()
    >>> stats = pg.grad_stats(loss, analysis.STATS)(jnp.ones(3), jnp.array([[1.0, 2.0, -1.0], [3.0, 2.0, 3.0]]))
    >>> print(analysis.signal_to_noise(stats), analysis.signal_to_noise(stats, squared=True))
    [1.2247449       inf 0.       ] [  1.5    inf -0.375]
    >>> print(analysis.signal_to_noise(stats, per="leaf"))
    0.6324555
    """
    signal, noise = (total(x, per) for x in moments(stats))
    if squared:
        return jax.tree.map(ratio, signal, noise)
    return jax.tree.map(lambda m, v: jnp.sqrt(ratio(jnp.maximum(m, 0), v)), signal, noise)
