"""PixelCNN++: images pixel by pixel, each a mixture of discretised logistics given those above and to the left.

Two streams at three resolutions (``levels``): one sees the rows above, the other also the pixels to the left in the
same row. Gated residual blocks, ``blocks`` at each resolution on the way down, and one more on the way up at all but the
first, with short cuts from the one to the other. At width 160 with 5 blocks: 49M parameters, if a block that has nothing
beside it is without a nonlinearity between its convolutions, as in Flax's example; with it, as in the original, there are
53.7M. Weight norm as in the original, though initialised from the weights alone and not from a batch of data; without it
(``weight_norm=false``) gradients end in convolutions, and statistics of them are cheaper. An example is an image, and its
loss in bits per dimension.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..data import images, loader
from ..errors import BadInput
from .common import Model, Preset, Task, dropout, jitted, positive, totals


@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 160
    blocks: int = 5
    mixtures: int = 10
    levels: int = 3
    dropout: float = 0.5
    weight_norm: bool = True
    eval_examples: int = 1000
    sample: bool = False


PRESETS = {
    "smoke": Preset(
        Options(4, 1, 2, 1, 0.5, True, 8, True), 8, 4, 1e-3, eval_every=4, stats_every=4, checkpoint_every=4
    ),
    "cpu": Preset(
        Options(24, 1, 5, 3, 0.0, False, 100), 400, 16, 2e-3, eval_every=100, stats_every=100, checkpoint_every=100
    ),
    "gpu": Preset(
        Options(96, 3, 10, 3, 0.5, False, 1000),
        40_000,
        64,
        1e-3,
        eval_every=2000,
        stats_every=1000,
        checkpoint_every=2000,
    ),
    "paper": Preset(
        Options(eval_examples=10_000), 150_000, 64, 1e-3, eval_every=5000, stats_every=1000, checkpoint_every=5000
    ),
}


class Conv(nnx.Module):
    """A convolution that sees nothing below, nor to the right if ``right``.

    ``stride=-2`` goes back up, by a transposed convolution cut to the same end. ``scale`` is the output's deviation at first.
    """

    def __init__(self, size, inside, outside, options: Options, rngs, stride=1, right=False, scale=1.0):
        self.size, self.stride, self.right = size, stride, right
        shape = (*size, inside, outside)
        kernel = jax.random.normal(rngs.params(), shape) / np.sqrt(np.prod(shape[:-1]))
        self.kernel = nnx.Param(kernel if options.weight_norm else scale * kernel)
        self.norm = nnx.Param(jnp.full(outside, scale)) if options.weight_norm else None
        self.bias = nnx.Param(jnp.zeros(outside))

    def __call__(self, x):
        kernel = self.kernel[...]
        if self.norm is not None:
            kernel = self.norm[...] * kernel / jnp.sqrt(jnp.sum(kernel**2, axis=(0, 1, 2)) + 1e-12)
        (high, wide), (rows, columns) = self.size, x.shape[1:3]
        left = wide - 1 if self.right else (wide - 1) // 2
        if self.stride > 0:
            around = [(high - 1, 0), (left, wide - 1 - left)]
            strides = (self.stride, self.stride)
            out = jax.lax.conv_general_dilated(x, kernel, strides, around, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        else:
            out = jax.lax.conv_transpose(x, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            start = 0 if self.right else (wide - 1) // 2
            out = out[:, : 2 * rows, start : start + 2 * columns]
        return out + self.bias[...]


def down(x):
    """Shifted by a row: what a pixel sees is above it."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]


def to_the_right(x):
    return jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]


def concat_elu(x):
    return nnx.elu(jnp.concatenate([x, -x], axis=-1))


class Gated(nnx.Module):
    """x + a σ(b), with a and b from x and from ``beside``, of so many channels."""

    def __init__(self, size, right: bool, beside: int, options: Options, rngs):
        c = options.width
        self.rate = options.dropout
        self.first = Conv(size, 2 * c, c, options, rngs, right=right)
        self.beside = Conv((1, 1), 2 * beside, c, options, rngs) if beside else None
        self.second = Conv(size, 2 * c if beside else c, 2 * c, options, rngs, right=right, scale=0.1)

    def __call__(self, x, key, beside=None):
        h = self.first(concat_elu(x))
        if self.beside is not None:
            h = concat_elu(h + self.beside(concat_elu(beside)))
        a, b = jnp.split(self.second(dropout(h, self.rate, key)), 2, axis=-1)
        return x + a * nnx.sigmoid(b)


ABOVE, LEFT = (2, 3), (2, 2)  # what the two streams see


class PixelCNN(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs):
        c, n = options.width, options.blocks
        conv = lambda size, inside, outside, **more: Conv(size, inside, outside, options, rngs, **more)
        gated = lambda size, right, beside: Gated(size, right, beside, options, rngs)
        # Three colours and a one, which tells the image from its margin.
        self.first_above = conv(ABOVE, 4, c)
        self.first_row, self.first_left = conv((1, 3), 4, c), conv((2, 1), 4, c, right=True)
        levels = options.levels
        self.down_blocks = nnx.List(
            [nnx.List([gated(ABOVE, False, 0), gated(LEFT, True, c)]) for _ in range(levels * n)]
        )
        self.down_convs = nnx.List(
            [nnx.List([conv(ABOVE, c, c, stride=2), conv(LEFT, c, c, stride=2, right=True)]) for _ in range(levels - 1)]
        )
        self.up_blocks = nnx.List(
            [nnx.List([gated(ABOVE, False, c), gated(LEFT, True, 2 * c)]) for _ in range(levels * n + levels - 1)]
        )
        self.up_convs = nnx.List(
            [
                nnx.List([conv(ABOVE, c, c, stride=-2), conv(LEFT, c, c, stride=-2, right=True)])
                for _ in range(levels - 1)
            ]
        )
        self.out = conv((1, 1), c, 10 * options.mixtures, scale=0.1)
        self.blocks, self.levels = n, levels

    def __call__(self, x, key=None):
        """x in [−1, 1]. What comes out for a pixel depends on those above it and to its left."""
        count = itertools.count()
        next_key = lambda: None if key is None else jax.random.fold_in(key, next(count))
        n, levels = self.blocks, self.levels
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
        above = [down(self.first_above(x))]
        left = [down(self.first_row(x)) + to_the_right(self.first_left(x))]
        for level in range(levels):
            for of_above, of_left in self.down_blocks[level * n : (level + 1) * n]:
                above.append(of_above(above[-1], next_key()))
                left.append(of_left(left[-1], next_key(), above[-1]))
            if level < levels - 1:
                of_above, of_left = self.down_convs[level]
                above.append(of_above(above[-1]))
                left.append(of_left(left[-1]))
        u, l = above.pop(), left.pop()
        blocks = iter(self.up_blocks)
        for level, number in enumerate([n] + [n + 1] * (levels - 1)):
            for of_above, of_left in itertools.islice(blocks, number):
                u = of_above(u, next_key(), above.pop())
                l = of_left(l, next_key(), jnp.concatenate([u, left.pop()], axis=-1))
            if level < levels - 1:
                of_above, of_left = self.up_convs[level]
                u, l = of_above(u), of_left(l)
        return self.out(nnx.elu(l))


def bits_per_dim(x, out):
    """−log₂ of the probability of images x (uint8), per dimension, for each image.

    A pixel is a mixture over k of products over colours of logistics, whose density is summed over the bin of its value, the
    outermost bins being open. The means of green and blue are moved by the colours before them.
    """
    k = out.shape[-1] // 10
    x = scaled(x)[..., None, :]  # beside the mixtures
    mixing, rest = out[..., :k], out[..., k:].reshape(*out.shape[:-1], k, 9)
    means, scales, moves = rest[..., :3], jnp.maximum(rest[..., 3:6], -7.0), jnp.tanh(rest[..., 6:])
    red, green = x[..., 0], x[..., 1]
    means = jnp.stack(
        [
            means[..., 0],
            means[..., 1] + moves[..., 0] * red,
            means[..., 2] + moves[..., 1] * red + moves[..., 2] * green,
        ],
        axis=-1,
    )
    inverse, centred = jnp.exp(-scales), x - means
    upper, lower = inverse * (centred + 1 / 255), inverse * (centred - 1 / 255)
    inside = jax.nn.sigmoid(upper) - jax.nn.sigmoid(lower)
    middle = inverse * centred  # where a bin has next to no mass, its density times its width
    thin = middle - scales - 2 * jax.nn.softplus(middle) - np.log(127.5)
    inner = jnp.where(inside > 1e-5, jnp.log(jnp.maximum(inside, 1e-12)), thin)
    log = jnp.where(x < -0.999, jax.nn.log_sigmoid(upper), jnp.where(x > 0.999, jax.nn.log_sigmoid(-lower), inner))
    pixels = jax.nn.logsumexp(jnp.sum(log, axis=-1) + jax.nn.log_softmax(mixing), axis=-1)
    return -jnp.mean(pixels, axis=(1, 2)) / (3 * np.log(2))


def scaled(image):
    return image.astype(jnp.float32) / 127.5 - 1


def network(options: Options) -> Model:
    positive(options, "width", "blocks", "mixtures", "levels", "eval_examples")
    if options.levels > 3:
        raise BadInput(f"levels is {options.levels}: expected at most 3.")
    if not 0 <= options.dropout < 1:
        raise BadInput(f"dropout is {options.dropout}: expected a number from 0 up to, but not including, 1.")
    return Model(lambda rngs: PixelCNN(options, rngs))


def init(options: Options):
    return network(options).init


def make(options: Options, config) -> Task:
    model = network(options)
    train, test, about = images.load(options.sample)
    source = loader.Source({"image": train["image"]})
    test = {"image": test["image"][: options.eval_examples]}

    def bits(params, batch, key=None):
        return bits_per_dim(batch["image"], model(params)(scaled(batch["image"]), key))

    @partial(jitted, config)
    def measure(params, batch):
        return {"bits_per_dim": bits(params, batch)}

    def evaluate(params):
        size = len(test["image"])
        return {name: total / size for name, total in totals(measure, params, test, min(25, size)).items()}

    return Task(
        init=model.init,
        loss=lambda params, batch, key: jnp.mean(bits(params, batch, key)),
        batches=loader.batches(source, config.batch_size, config.seed),
        evaluate=evaluate,
        show=lambda batch, i: np.asarray(batch["image"][i]),
        data=about,
        size=len(source),
    )
