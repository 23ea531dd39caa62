"""A noisy quadratic whose gradients have a known mean and variance, for theory.

fᵢ(w) = ½ Σⱼ hⱼ (wⱼ − xᵢⱼ)² with xᵢ ~ N(0, diag(σ²)): gᵢ = h (w − xᵢ) has mean μ = h w and variance h² σ². The excess
loss over the minimum's is ½ Σ hⱼ wⱼ². Curvatures h fall as a power of j; the noise in x is ``noise``, or ``noise``/√h, which
makes the gradients' covariance proportional to the curvature.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .common import Preset, Task, generated, jitted, positive


@dataclasses.dataclass(frozen=True)
class Options:
    dimension: int = 1000
    power: float = 1.0  # hⱼ = j^−power
    noise: float = 1.0
    covariance: Literal["uniform", "curvature"] = "curvature"


PRESETS = {
    "smoke": Preset(Options(dimension=20), 30, 16, 0.05, eval_every=10, stats_every=10, checkpoint_every=10),
    "cpu": Preset(Options(), 2000, 64, 0.01, eval_every=100, stats_every=100, checkpoint_every=500),
    "gpu": Preset(
        Options(dimension=100_000), 20_000, 256, 0.01, eval_every=500, stats_every=500, checkpoint_every=5000
    ),
    "paper": Preset(
        Options(dimension=10_000), 10_000, 128, 0.01, eval_every=250, stats_every=250, checkpoint_every=2500
    ),
}


def curvature(options: Options) -> np.ndarray:
    return (np.arange(1, options.dimension + 1) ** -options.power).astype(np.float32)


def noise(options: Options) -> np.ndarray:
    """σ of x, coordinate by coordinate."""
    h = curvature(options)
    return np.float32(options.noise) * (np.ones_like(h) if options.covariance == "uniform" else h**-0.5)


def init(options: Options):
    return lambda key: {"w": jax.random.normal(key, (options.dimension,))}


def make(options: Options, config) -> Task:
    positive(options, "dimension")
    h, sigma = curvature(options), noise(options)

    def loss(params, batch, key):
        del key
        return 0.5 * jnp.mean(jnp.sum(h * (params["w"] - batch["x"]) ** 2, axis=-1))

    def draw(rng, batch_size):
        return {"x": sigma * rng.standard_normal((batch_size, options.dimension), np.float32)}

    @partial(jitted, config)
    def excess(params):
        return 0.5 * jnp.sum(h * params["w"] ** 2)

    return Task(
        init=init(options),
        loss=loss,
        batches=generated(draw, config.batch_size, config.seed),
        evaluate=lambda params: {"excess_loss": float(excess(params))},
        show=lambda batch, i: "x = " + " ".join(f"{x:.3g}" for x in batch["x"][i][:8]) + " …",
        data={"quadratic": {"source": "generated"}},
    )
