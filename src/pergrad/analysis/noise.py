"""The gradient noise scale, tracked over training, and a batch size that follows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..optim.arguments import check_decay
from ..optim.averages import average, zeros_real
from ..statistics import NoiseScale
from .moments import Per, has_noise, moments, ratio, total, tracker


def noise_scale(stats: Any, per: Per = "all") -> NoiseScale:
    """The simple noise scale of McCandlish et al., tr Σ / ‖μ‖²: the batch size at which the mean's noise equals the signal.

    Σ is the covariance of one example's gradient, μ its mean: tr Σ = Σ σ̂² and ‖μ‖² = Σ μ̂², unbiased, over a layer or all.

    Args:
      stats: the results of `analysis.STATS`, or anything with the fields ``trace`` and ``squared_norm``.
      per: what is a layer, as for `analysis.signal_to_noise`.

    Returns:
      `NoiseScale(scale, trace, squared_norm)`. Where the batch is small, squared_norm may be negative, and scale with it:
      the signal is lost in noise. A mean of such ratios means nothing; `track_noise_scale` averages the two parts.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> from pergrad import analysis
    >>> loss = lambda w, x: (x @ w).sum()
    >>> stats = pg.grad_stats(loss, analysis.STATS)(jnp.ones(2), jnp.array([[1.0, 0.0], [3.0, 2.0]]))
    >>> print(*analysis.noise_scale(stats))
    1.3333334 4.0 3.0
    """
    squared_norm, trace = (stats.squared_norm, stats.trace) if has_noise(stats) else moments(stats)
    squared_norm, trace = total(squared_norm, per), total(trace, per)
    return NoiseScale(jax.tree.map(ratio, trace, squared_norm), trace, squared_norm)


class NoiseScaleState(NamedTuple):
    """State of `track_noise_scale`; ``state.noise_scale`` is the estimate, NaN before the first step."""

    weight: jax.Array
    trace: Any  # not yet divided by the weight
    squared_norm: Any

    @property
    def noise_scale(self) -> NoiseScale:
        trace, squared_norm = jax.tree.map(lambda x: x / self.weight, (self.trace, self.squared_norm))
        return NoiseScale(jax.tree.map(ratio, trace, squared_norm), trace, squared_norm)


def track_noise_scale(decay: float = 0.99, per: Per = "all") -> optax.GradientTransformationExtraArgs:
    """Tracks the noise scale by one EMA of tr Σ and another of ‖μ‖², whose ratio it is.

    The two parts are unbiased whatever the batch size is, so it may change while this goes on; a ratio of single batches
    would be biased and at times infinite.

    Args:
      decay: of both EMAs.
      per: what is a layer, as for `analysis.signal_to_noise`.

    Returns:
      An optax transformation that passes updates through; give it ``stats=`` (what `analysis.noise_scale` takes), and read
      ``state.noise_scale``.

    >>> import jax.numpy as jnp, optax
    >>> from pergrad import analysis
    >>> optimizer = optax.chain(analysis.track_noise_scale(decay=0.9), optax.sgd(0.1))
    >>> params = jnp.zeros(1)
    >>> state = optimizer.init(params)
    >>> for g in (1.0, 3.0):
    ...     stats = {"mean": jnp.array([g]), "second_moment": jnp.array([g**2 + 8]), "count": 5}
    ...     updates, state = optimizer.update(stats["mean"], state, params, stats=stats)
    >>> print(state[0].noise_scale.trace, state[0].noise_scale.scale.round(2))
    10.0 3.11
    """
    check_decay(decay=decay)

    def init(params):
        return NoiseScaleState(jnp.zeros(()), total(zeros_real(params), per), total(zeros_real(params), per))

    def advance(state, stats):
        seen = noise_scale(stats, per)
        if jax.tree.structure(seen.trace) != jax.tree.structure(state.trace):
            raise ValueError(
                f"the statistics have a trace of the structure {jax.tree.structure(seen.trace)}; expected "
                f"{jax.tree.structure(state.trace)}, for per={per!r}. Give the results of `analysis.STATS`, or traces per leaf."
            )
        return average(NoiseScaleState(jnp.ones(()), seen.trace, seen.squared_norm), state, decay)

    return tracker(init, advance)


class BatchSizeState(NamedTuple):
    """State of `batch_size_schedule`; ``state.batch_size`` is the batch size for the next step."""

    noise: NoiseScaleState
    batch_size: jax.Array
    steps: jax.Array  # since it last changed


def batch_size_schedule(
    initial: int,
    *,
    minimum: int = 1,
    maximum: int,
    multiple: int = 1,
    factor: float = 1.0,
    tolerance: float = 0.5,
    growth: float = 2.0,
    patience: int = 100,
    decay: float = 0.99,
) -> optax.GradientTransformationExtraArgs:
    """A batch size that follows ``factor`` times the tracked noise scale.

    The next batch size is the target rounded to a ``multiple`` and kept from ``minimum`` to ``maximum``. Each change compiles
    the train step anew, so it changes rarely: not before ``patience`` steps, only if the new one differs by a factor of
    1 + ``tolerance`` or more, and by a factor of about ``growth`` at most (a target farther away takes several changes). Where
    the estimate of ‖μ‖² is not positive, the noise scale is beyond what the data can show, and the batch grows.

    Args:
      initial, minimum, maximum: batch sizes, each a multiple of ``multiple``, which may be the number of devices.
      factor: the target in noise scales: below 1 favours fewer examples, above 1 fewer steps.
      tolerance, growth, patience: see above.
      decay: of the EMAs of `track_noise_scale`.

    Returns:
      An optax transformation that passes updates through; give it ``stats=``, and read ``state.batch_size``, on the host,
      to draw the next batch. ``state.noise`` is that of `track_noise_scale`.

    >>> import jax.numpy as jnp
    >>> from pergrad import analysis
    >>> schedule = analysis.batch_size_schedule(8, maximum=64, multiple=8, patience=2)
    >>> state = schedule.init(jnp.zeros(1))
    >>> stats = analysis.NoiseScale(scale=30.0, trace=60.0, squared_norm=2.0)
    >>> for step in range(6):
    ...     print(int(state.batch_size), end=" ")
    ...     _, state = schedule.update(jnp.zeros(1), state, stats=stats)
    8 8 16 16 32 32
    """
    sizes = {"initial": initial, "minimum": max(minimum, multiple), "maximum": maximum}
    for name, size in sizes.items():
        if size < 1 or size % multiple:
            raise ValueError(
                f"{name} was given {size!r}: expected a positive multiple of {multiple}. Write `{name}={multiple}`, or another "
                "`multiple`."
            )
    if not sizes["minimum"] <= initial <= maximum:
        raise ValueError(
            f"given minimum={minimum}, initial={initial}, maximum={maximum}, multiple={multiple}: expected them in this order. "
            "Write, for example, `batch_size_schedule(64, minimum=32, maximum=1024, multiple=32)`."
        )
    if not (tolerance > 0 and growth > 1 and patience >= 1 and factor > 0):
        raise ValueError(
            f"given tolerance={tolerance}, growth={growth}, patience={patience}, factor={factor}: expected tolerance > 0, "
            "growth > 1, patience >= 1 and factor > 0. Leave them out for the defaults."
        )
    track: Any = track_noise_scale(decay)  # optax has no type for its state

    def init(params):
        return BatchSizeState(track.init(params), jnp.asarray(initial, jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, stats=None, **others):
        _, noise = track.update(updates, state.noise, params, stats=stats, **others)
        size = state.batch_size
        _, trace, squared_norm = noise.noise_scale
        target = jnp.where(squared_norm > 0, factor * trace / squared_norm, jnp.inf)
        known = (trace > 0) | (squared_norm > 0)  # else there was no gradient yet (or no step: NaN)
        target = jnp.clip(target, size / growth, size * growth)
        target = jnp.clip(jnp.round(target / multiple) * multiple, sizes["minimum"], maximum)
        far = (target >= size * (1 + tolerance)) | (target <= size / (1 + tolerance))
        change = known & far & (state.steps + 1 >= patience)
        return updates, BatchSizeState(
            noise,
            jnp.where(change, target, size).astype(jnp.int32),
            jnp.where(change, 0, state.steps + 1),
        )

    return optax.GradientTransformationExtraArgs(init, update)
