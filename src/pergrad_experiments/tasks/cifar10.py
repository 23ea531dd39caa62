"""Classification of CIFAR-10.

``model=cnn``: two 3×3 convolutions (32 and 64 channels), each with ReLU and 2×2 average pooling, and two dense layers,
of 256 units and of 10: four matmuls deep, 1.1M parameters. ``model=resnet``: a residual net for CIFAR of 6n+2 layers,
with group norm where the original has batch norm, which would couple the examples.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..data import images, loader
from ..errors import BadInput
from .common import Model, Preset, Task, cross_entropy, jitted, positive, totals

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Options:
    model: Literal["cnn", "resnet"] = "cnn"
    width: int = 32  # channels of the first convolution (a residual net usually has 16)
    units: int = 256  # of the dense layer
    depth: int = 20  # of the residual net
    augment: bool = False  # shifts by up to 4 pixels, and reflections
    eval_examples: int = 10_000
    sample: bool = False  # the data that comes with the package


PRESETS = {
    "smoke": Preset(
        Options(width=4, units=16, depth=8, eval_examples=32, sample=True),
        *(12, 16, 1e-3),
        eval_every=6,
        stats_every=6,
        checkpoint_every=6,
    ),
    "cpu": Preset(
        Options(width=16, units=128, eval_examples=2000),
        1000,
        64,
        1e-3,
        eval_every=200,
        stats_every=100,
        checkpoint_every=200,
    ),
    "gpu": Preset(Options(), 20_000, 128, 1e-3, eval_every=400, stats_every=400, checkpoint_every=2000),
    "paper": Preset(Options(), 40_000, 128, 1e-3, eval_every=400, stats_every=400, checkpoint_every=2000),
}


class CNN(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs):
        c = options.width
        self.first = nnx.Conv(3, c, (3, 3), rngs=rngs)
        self.second = nnx.Conv(c, 2 * c, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(8 * 8 * 2 * c, options.units, rngs=rngs)
        self.out = nnx.Linear(options.units, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in (self.first, self.second):
            x = nnx.avg_pool(nnx.relu(layer(x)), (2, 2), (2, 2))
        return self.out(nnx.relu(self.dense(x.reshape(len(x), -1))))


class Block(nnx.Module):
    def __init__(self, inside: int, outside: int, stride: int, rngs: nnx.Rngs):
        groups = min(8, outside)
        self.first = nnx.Conv(inside, outside, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.GroupNorm(outside, groups, rngs=rngs)
        self.second = nnx.Conv(outside, outside, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outside, groups, rngs=rngs)
        if inside != outside:
            self.shortcut = nnx.Conv(inside, outside, (1, 1), strides=stride, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.norm2(self.second(nnx.relu(self.norm1(self.first(x)))))
        return nnx.relu(h + (self.shortcut(x) if hasattr(self, "shortcut") else x))


class ResNet(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs):
        c, n = options.width, (options.depth - 2) // 6
        widths = [c] + [c * 2**stage for stage in range(3) for _ in range(n)]
        self.first = nnx.Conv(3, c, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.GroupNorm(c, min(8, c), rngs=rngs)
        blocks = [Block(a, b, 1 if a == b else 2, rngs) for a, b in pairwise(widths)]
        self.blocks = nnx.List(blocks)
        self.out = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((1, 2)))


def network(options: Options) -> Model:
    positive(options, "width", "units", "eval_examples")
    if options.model == "resnet" and (options.depth < 8 or options.depth % 6 != 2):
        raise BadInput(f"depth is {options.depth}: expected 6n+2 layers, such as 8, 20, 32, 44, 56.")
    if options.model == "resnet" and options.width > 8 and options.width % 8:
        raise BadInput(f"width is {options.width}: expected a multiple of 8, which are the groups of the norm.")
    return Model(lambda rngs: (ResNet if options.model == "resnet" else CNN)(options, rngs))


def init(options: Options):
    return network(options).init


def scaled(images):
    """About mean 0 and deviation 1; one number for all images, or an example would see the others."""
    return (images.astype(jnp.float32) - 120.0) / 64.0


def augment(example, rng: np.random.Generator):
    image = np.pad(example["image"], ((4, 4), (4, 4), (0, 0)))
    top, left = rng.integers(9, size=2)
    image = image[top : top + 32, left : left + 32]
    return example | {"image": image[:, ::-1] if rng.integers(2) else image}


def make(options: Options, config) -> Task:
    model = network(options)
    train, test, about = images.load(options.sample)
    test = {name: x[: options.eval_examples] for name, x in test.items()}
    source = loader.Source(train)

    def loss(params, batch, key):
        del key
        return jnp.mean(cross_entropy(model(params)(scaled(batch["image"])), batch["label"]))

    @partial(jitted, config)
    def measure(params, batch):
        logits = model(params)(scaled(batch["image"]))
        return {"loss": cross_entropy(logits, batch["label"]), "accuracy": jnp.argmax(logits, -1) == batch["label"]}

    def evaluate(params):
        size = len(test["label"])
        return {name: total / size for name, total in totals(measure, params, test, min(500, size)).items()}

    return Task(
        init=model.init,
        loss=loss,
        batches=loader.batches(source, config.batch_size, config.seed, augment if options.augment else None),
        evaluate=evaluate,
        show=lambda batch, i: np.asarray(batch["image"][i]),
        data=about,
        size=len(source),
    )
