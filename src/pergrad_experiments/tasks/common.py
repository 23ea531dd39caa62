"""What tasks share: what a task is, and the few things that several of them do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..config import Config
from ..errors import BadInput

Params = Any
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A size of a task: the options of its model and data, and what `Config` says if the user does not."""

    options: Any
    steps: int
    batch_size: int
    learning_rate: float  # for Adam
    schedule: str = "constant"
    warmup: int = 0
    clip_norm: float | None = None
    microbatch_size: int | None = None
    eval_every: int = 100
    stats_every: int = 50
    checkpoint_every: int = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """What the training loop needs to know."""

    init: Callable[[jax.Array], Params]  # from a key
    loss: Callable[[Params, Batch, jax.Array], jax.Array]  # the mean over examples that do not see each other
    # From a step on, one batch for each step, the same whenever it is asked for; the second argument gives the current
    # parameters, for data that a policy makes. Batches are dicts of arrays, with the examples' "index" in the data.
    batches: Callable[[int, Callable[[], Params]], Iterator[Batch]]
    evaluate: Callable[[Params], dict[str, float]]  # on held-out data
    show: Callable[[Batch, int], str | np.ndarray]  # an example, as text or as an image (uint8)
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # names, sources and checksums
    size: int | None = None  # examples in the training data
    stacked: tuple[str, ...] = ()  # parts of the parameters with a leading axis of layers


# ------------------------------------------------------------------------------------- nnx


class Model:
    """An nnx module as a pure function of its parameters, a plain dict: ``init(key)`` and ``model(params)``, the module."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]):
        self.make = make
        self.graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]

    def init(self, key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))

    def __call__(self, params: Params) -> Any:
        return nnx.merge(self.graph, params)


class Layers(Model):
    """Several alike, with stacked parameters: run by a scan, so that it is compiled once, and rematerialised."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], number: int):
        super().__init__(make)
        self.number = number

    def init(self, key):
        return jax.vmap(super().init)(jax.random.split(key, self.number))

    def run(self, layers: Params, h: jax.Array, call: Callable[[Any, jax.Array, jax.Array], jax.Array], key: jax.Array):
        """h ← call(layer, h, key of the layer), layer after layer."""

        @jax.checkpoint
        def step(h, of_layer):
            params, key = of_layer
            return call(nnx.merge(self.graph, params), h, key), None

        return jax.lax.scan(step, h, (layers, jax.random.split(key, self.number)))[0]


def in_haste(soon: bool) -> dict[str, Any] | None:
    """Compiler options for what is run once, or for seconds: on a CPU, compile quickly rather than well."""
    return {"xla_backend_optimization_level": 0} if soon and jax.default_backend() == "cpu" else None


def jitted(config: Config, function: Callable) -> Callable:
    """Under jit; in haste for the preset `smoke`."""
    return jax.jit(function, compiler_options=in_haste(config.preset == "smoke"))


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Without a key, as in evaluation, x."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


# ------------------------------------------------------------------------------------- losses and metrics


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def totals(
    measure: Callable[[Params, Batch], dict[str, jax.Array]], params: Params, data: Batch, batch_size: int
) -> dict[str, float]:
    """Sums over ``data`` of what ``measure``, jitted, gives for each example, in float64; the last batch is filled up."""
    size = len(next(iter(data.values())))
    sums: dict[str, float] = {}
    for start in range(0, size, batch_size):
        places = np.minimum(np.arange(start, start + batch_size), size - 1)
        found = measure(params, {name: x[places] for name, x in data.items()})
        for name, values in jax.device_get(found).items():
            values = np.asarray(values, np.float64)[: size - start]
            sums[name] = sums.get(name, 0.0) + float(values.sum())
    return sums


def generated(make: Callable[[np.random.Generator, int], Batch], batch_size: int, seed: int) -> Callable:
    """Batches that are drawn: that of a step from its own generator."""

    def batches(start: int, _: Any) -> Iterator[Batch]:
        step = start
        while True:
            batch = make(np.random.default_rng((seed, step)), batch_size)
            yield {"index": np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int32), **batch}
            step += 1

    return batches


def positive(options: Any, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise BadInput(f"{name} is {getattr(options, name)}: expected at least 1.")
