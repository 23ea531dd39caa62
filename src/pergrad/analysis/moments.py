"""What all analyses share: unbiased moments, sums per layer, and averages over training steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from ..optim.arguments import check_decay
from ..optim.asking import ask, primitives
from ..optim.averages import all_finite, average, chosen, square, zeros, zeros_real
from ..statistics import Statistic

STATS: dict[str, Statistic] = primitives("mean", "second_moment", "count")
"""The statistics that every analysis starts from: ``pg.value_and_stats(loss, analysis.STATS)``."""

Per = str | int | Callable[[str], str]


class Moments(NamedTuple):
    """Unbiased estimates, each a tree like the parameters."""

    mean_square: Any  # μ̂²; may be negative
    variance: Any  # σ̂²


def moments(stats: Mapping[str, Any]) -> Moments:
    """μ̂² and σ̂², the squared mean and the variance of one example's gradient, coordinate by coordinate, without bias.

    With ḡ the mean, s the second moment and n the count: σ̂² = n (s − ḡ²)/(n − 1) and μ̂² = (n ḡ² − s)/(n − 1), which is
    ḡ² − σ̂²/n. Where noise hides the signal, μ̂² is negative about half of the time: that is what makes sums of it right.

    Args:
      stats: the results of `STATS`, from a batch or from `average_stats`. ``count=jnp.inf`` says that mean and
        second moment are those of the whole distribution.

    Returns:
      `Moments(mean_square, variance)`. With fewer than two examples there is no estimate: an error, or NaN where the
      count is only known when the program runs.

    >>> import jax.numpy as jnp
    >>> from pergrad import analysis
    >>> m = analysis.moments({"mean": jnp.array([2.0, 1.0]), "second_moment": jnp.array([5.0, 4.0]), "count": 2})
    >>> print(m.mean_square, m.variance)
    [ 3. -2.] [2. 6.]
    """
    mean, second, n = (entry(stats, key) for key in STATS)
    if not isinstance(n, Tracer) and not n > 1:
        raise ValueError(
            f"the statistics are of {float(n):g} example(s); expected at least 2, without which noise cannot be told from "
            "signal. Give a larger batch, or average over batches with `analysis.average_stats`."
        )
    # In this form n may be infinite, and 1 only while tracing.
    bessel = jnp.where(n > 1, 1 - 1 / jnp.asarray(n, jnp.float32), jnp.nan)
    # Rounding can leave a difference of two nearly equal numbers slightly below zero.
    squared = square(mean)
    variance = jax.tree.map(lambda g2, s: jnp.maximum(s - g2, 0) / bessel, squared, second)
    mean_square = jax.tree.map(lambda g2, v: g2 - v / n, squared, variance)
    return Moments(mean_square, variance)


def entry(stats, key):
    if not isinstance(stats, Mapping):
        raise TypeError(
            f"stats is {type(stats).__name__}; expected a dict with the results of mean, second_moment and count. Write "
            "`value, stats = pg.value_and_stats(loss, analysis.STATS)(params, batch)`."
        )
    if key not in stats:
        raise ValueError(
            f"stats has the entries {sorted(stats)}; expected {key!r} among them. Write `pg.value_and_stats(loss, "
            f'{{**analysis.STATS, "{key}": pg.{key}()}})`.'
        )
    return stats[key]


def ratio(a, b):
    """a/b, and 0 for 0/0: where there is no gradient, there is neither signal nor noise."""
    return a / jnp.where((a == 0) & (b == 0), 1, b)


# ------------------------------------------------------------------------------------- per layer


def total(tree: Any, per: Per) -> Any:
    """Sums over what ``per`` names: "coordinate" (nothing is summed), "leaf", "all", a number of path entries, or a function.

    With a number k, leaves whose paths begin with the same k entries are one layer, and the result is a dict with
    these beginnings ("encoder/0") as its keys; a function maps the whole path ("encoder/0/kernel") to the layer's name.

    >>> from pergrad.analysis.moments import total
    >>> tree = {"a": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "c": {"w": jnp.ones(3)}}
    >>> {layer: float(x) for layer, x in total(tree, 1).items()}
    {'a': 9.0, 'c': 3.0}
    >>> {layer: float(x) for layer, x in total(tree, lambda path: path.split("/")[-1]).items()}
    {'b': 3.0, 'w': 9.0}
    """
    if per == "coordinate":
        return tree
    if per == "leaf":
        return jax.tree.map(jnp.sum, tree)
    if per == "all":
        return sum((jnp.sum(x) for x in jax.tree.leaves(tree)), start=jnp.zeros(()))
    if callable(per):
        name = lambda path: per(_path(path))
    elif isinstance(per, int) and not isinstance(per, bool) and per > 0:
        name = lambda path: _path(path[:per])
    else:
        raise ValueError(
            f'per was given {per!r}: expected "coordinate", "leaf", "all", a positive number of path entries, or a function '
            'from the path of a leaf to a layer. Write, for example, `per="leaf"`.'
        )
    layers: dict[str, Any] = {}
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        layers[name(path)] = layers.get(name(path), 0) + jnp.sum(x)
    return dict(sorted(layers.items()))  # as jit would return it


def _path(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


# --------------------------------------------------------------------- averages over training steps
#
# An EMA x ← β x + (1−β) xₜ that begins at zero is a weighted sum of what it has seen, with weights wₖ = (1−β)βᵏ. The
# state carries the sum of the weights along, as the EMA of ones; dividing by it is the usual bias correction.


def ema_overlap(*decays: float, steps: int | None = None) -> float:
    """Σₖ Πⱼ wⱼₖ over the normalised weights of several EMAs after ``steps`` steps (None: after very many).

    Of one decay twice it is what averaging leaves of a variance, (1−β)/(1+β): one over the EMA's length.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps was given {steps!r}: expected None or at least 1, the steps that the EMA has seen.")
    product = constant = 1.0
    for decay in decays:
        product *= decay
        constant *= (1 - decay) / (1.0 if steps is None else 1 - decay**steps)
    return constant * (1.0 if steps is None else 1 - product**steps) / (1 - product)


def tracker(init: Callable, advance: Callable) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that leaves updates alone and keeps ``state = advance(state, stats)``.

    A step that would make the state NaN or infinite (an overflow, a mask that leaves one example) leaves it as it was:
    an average would never recover from it.
    """

    def update(updates, state, params=None, *, stats=None, **others):
        del params, others
        new = advance(state, _seen(stats, updates))
        return updates, chosen(all_finite(new), new, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _seen(stats, updates):
    """What a tracker looks at: of the parameters that `optax.masked` has left in the updates."""
    if has_noise(stats):
        return stats
    return {"count": ask(stats, "count")} | {key: ask(stats, key, updates) for key in ("mean", "second_moment")}


def has_noise(stats: Any) -> bool:
    """Whether these are the parts of a noise scale, rather than the results of `STATS`."""
    return hasattr(stats, "trace") and hasattr(stats, "squared_norm")


class AverageState(NamedTuple):
    """State of `average_stats`; ``state.stats`` is what every analysis takes, NaN before the first step."""

    weight: jax.Array
    square_weight: jax.Array  # Σ wₖ²/Bₖ
    mean: Any
    second_moment: Any

    @property
    def stats(self) -> dict[str, Any]:
        mean, second = jax.tree.map(lambda x: x / self.weight, (self.mean, self.second_moment))
        return {"mean": mean, "second_moment": second, "count": self.weight**2 / self.square_weight}


def average_stats(decay: float) -> optax.GradientTransformationExtraArgs:
    """Mean and second moment averaged over steps, as if they came from one large batch.

    One batch of B examples cannot show a signal-to-noise ratio far below 1/√B. An EMA of means, Σ wₖ ḡₖ with Σ wₖ = 1, has
    the variance σ² Σ wₖ²/Bₖ: that of a mean over 1/Σ (wₖ²/Bₖ) examples, about B (1+β)/(1−β) of them. So this is the count
    that goes with the averages, and every formula for a batch is then right for them. It takes the gradient's distribution
    to be the same over these steps: hold the parameters still to measure, or choose an EMA short enough.

    Args:
      decay: β. The memory of twice the parameters goes with it.

    Returns:
      An optax transformation that passes updates through; give it ``stats=``, and read ``state.stats``.

    >>> import jax.numpy as jnp
    >>> from pergrad import analysis
    >>> average = analysis.average_stats(0.5)
    >>> state = average.init(jnp.zeros(1))
    >>> for g in (1.0, 4.0):
    ...     stats = {"mean": jnp.array([g]), "second_moment": jnp.array([g**2 + 1]), "count": 10}
    ...     _, state = average.update(stats["mean"], state, stats=stats)
    >>> print(state.stats["mean"], state.stats["second_moment"], state.stats["count"])  # weights 1/3 and 2/3
    [3.] [12.] 18.0
    """
    check_decay(decay=decay)

    def init(params):
        return AverageState(jnp.zeros(()), jnp.zeros(()), zeros(params), zeros_real(params))

    def advance(state, stats):
        mean, second, n = (entry(stats, key) for key in STATS)
        weight, mean, second = average((1.0, mean, second), (state.weight, state.mean, state.second_moment), decay)
        return AverageState(weight, decay**2 * state.square_weight + (1 - decay) ** 2 / n, mean, second)

    return tracker(init, advance)
