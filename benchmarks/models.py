"""The rows: plain-JAX models, each a loss, its parameters and a batch.

A loss is written once, for a batch of any size, and is the mean of the losses of its examples: no batch norm,
and every example has the same number of tokens.

A new row is a builder that returns `(loss, params, batch)`, or one more `row(...)` line below a builder.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .blocks import (
    Init,
    block,
    convolution,
    cross_entropy,
    dense,
    group_norm,
    layer_norm,
    stack,
)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    size: str  # "small" or "large"
    family: str  # name of the builder: peers build the same model from it and the settings
    build: Callable[[], tuple[Callable, Any, Any]]  # -> loss, params, batch
    settings: dict[str, Any]
    bars: dict[str, float]  # the most allowed, × plain: see `record.bars`
    steps: bool  # whether full training steps are measured too
    batch_size: int


ROWS: list[Row] = []


def row(name, size, bars, build, steps=False, **settings):
    """Register `build(**settings)` as a row; `settings` go to the record as they are."""
    built = functools.partial(build, **settings)
    ROWS.append(Row(name, size, build.__name__, built, settings, bars, steps, settings["batch"]))


def select(size: str, only: list[str] | None) -> list[Row]:
    """The rows of one size; `only` names rows, or families: "cnn" stands for "cnn" and "cnn-…"."""
    rows = [r for r in ROWS if r.size == size]
    for wanted in only or ():
        if not any(_matches(r.name, wanted) for r in rows):
            raise ValueError(f"no row {wanted!r} of size {size}; there are {', '.join(r.name for r in rows)}")
    return [r for r in rows if not only or any(_matches(r.name, wanted) for wanted in only)]


def _matches(name, wanted):
    return name == wanted or name.startswith(wanted + "-")


_CPU = {"dtype": "float32", "attention": "xla"}
_GPU = {"dtype": "bfloat16", "attention": "cudnn"}


# ---------------------------------------------------------------------------------- transformers


def gpt(*, vocab, width, layers, heads, length, batch, dtype, attention, remat):
    """Decoder-only, pre-norm, layers in a scan, learned positions, head not tied to the embedding."""
    init = Init()
    params = {
        "tokens": init.weight(vocab, width, fan_in=2500),
        "positions": init.weight(length, width, fan_in=2500),
        "layers": init.block(width, layers),
        "norm": init.norm(width),
        "head": init.weight(width, vocab),
    }
    tokens = init.integers(vocab, batch, length + 1)

    def loss(params, tokens):
        h = (params["tokens"][tokens[:, :-1]] + params["positions"]).astype(dtype)
        h = stack(params["layers"], h, lambda p, h: block(p, h, heads, attention, causal=True), remat)
        return cross_entropy(layer_norm(params["norm"], h) @ params["head"].astype(dtype), tokens[:, 1:])

    return loss, params, tokens


_bars = {"time": 1.5, "memory": 1.1, "compile": 1.5}
_tiny = {"vocab": 512, "width": 128, "layers": 3, "heads": 4, **_CPU, "remat": False}
row("gpt-t128", "small", _bars, gpt, steps=True, **_tiny, length=128, batch=8)
_demo = {"vocab": 64, "width": 64, "layers": 3, "heads": 4, **_CPU, "remat": True}
row("gpt-demo", "small", _bars, gpt, **_demo, length=64, batch=32)

_bars = {"time": 1.05, "memory": 1.02, "compile": 1.5}
_short = {"time": 1.08, "memory": 1.02, "compile": 1.5}
_124m = {"vocab": 50304, "width": 768, "layers": 12, "heads": 12, **_GPU, "remat": False}
_d512 = {"vocab": 50304, "width": 512, "layers": 8, "heads": 8, **_GPU, "remat": False}
_350m = {"vocab": 50304, "width": 1024, "layers": 24, "heads": 16, **_GPU, "remat": False}
row("gpt-124m-t256", "large", _bars, gpt, steps=True, **_124m, length=256, batch=64)
row("gpt-124m-t1024", "large", _bars, gpt, **_124m, length=1024, batch=16)
row("gpt-d512-t64", "large", _short, gpt, **_d512, length=64, batch=256)
row("gpt-350m-t512", "large", {"memory": 1.02, "compile": 1.5}, gpt, **_350m, length=512, batch=16)


def translation(*, vocab, width, layers, heads, length, batch, dtype, attention):
    """Encoder and decoder of as many layers; one table embeds source and target, and is the head."""
    init = Init()
    params = {
        "tokens": init.weight(vocab, width, fan_in=width),
        "positions": init.weight(length, width, fan_in=2500),
        "encoder": {"layers": init.block(width, layers), "norm": init.norm(width)},
        "decoder": {"layers": init.block(width, layers, cross=True), "norm": init.norm(width)},
    }
    data = {"source": init.integers(vocab, batch, length), "target": init.integers(vocab, batch, length + 1)}

    def loss(params, batch):
        def run(p, tokens, **options):
            h = (params["tokens"][tokens] + params["positions"]).astype(dtype)
            return layer_norm(p["norm"], stack(p["layers"], h, lambda p, h: block(p, h, heads, attention, **options)))

        memory = run(params["encoder"], batch["source"])
        h = run(params["decoder"], batch["target"][:, :-1], causal=True, memory=memory)
        return cross_entropy(h @ params["tokens"].astype(dtype).T, batch["target"][:, 1:])

    return loss, params, data


_bars = {"time": 1.5, "memory": 1.3, "compile": 1.5, "eve": 1.29}
_tiny = {"vocab": 512, "width": 128, "layers": 2, "heads": 4, "length": 32}
_base = {"vocab": 32768, "width": 512, "layers": 6, "heads": 8, "length": 64}
row("translation", "small", _bars, translation, steps=True, **_tiny, **_CPU, batch=16)
row("translation", "large", {"eve": 1.29}, translation, steps=True, **_base, **_GPU, batch=128)


def vit(*, image, patch, width, layers, heads, classes, batch, dtype, attention):
    """Patches through transformer layers, the mean over positions, the classes."""
    init = Init()
    side = image // patch
    params = {
        "patches": init.dense(3 * patch**2, width),
        "positions": init.weight(side**2, width, fan_in=2500),
        "layers": init.block(width, layers),
        "norm": init.norm(width),
        "classes": init.dense(width, classes),
    }
    data = {"image": init.normal(batch, image, image, 3), "label": init.integers(classes, batch)}

    def loss(params, batch):
        x = batch["image"].astype(dtype).reshape(-1, side, patch, side, patch, 3)
        x = jnp.swapaxes(x, 2, 3).reshape(-1, side**2, 3 * patch**2)
        h = dense(params["patches"], x) + params["positions"].astype(dtype)
        h = stack(params["layers"], h, lambda p, h: block(p, h, heads, attention))
        return cross_entropy(dense(params["classes"], layer_norm(params["norm"], h).mean(1)), batch["label"])

    return loss, params, data


_bars = {"time": 1.5, "memory": 1.1, "compile": 1.5}
_tiny = {"image": 32, "patch": 4, "width": 96, "layers": 4, "heads": 3, "classes": 10}
_s16 = {"image": 224, "patch": 16, "width": 384, "layers": 12, "heads": 6, "classes": 1000}
row("vit", "small", _bars, vit, **_tiny, **_CPU, batch=16)
row("vit-s", "large", {}, vit, **_s16, **_GPU, batch=128)


# ----------------------------------------------------------------------------------- convolutions


def cnn(*, image, channels, hidden, classes, batch, dtype):
    """3×3 convolutions, each with a bias, relu and a 2×2 maximum, then a hidden layer and the classes."""
    init = Init()
    flat = (image[0] // 2 ** len(channels)) ** 2 * channels[-1]
    params = {
        "convolutions": [
            {"kernel": init.weight(3, 3, m, n, fan_in=4.5 * m), "bias": jnp.zeros(n)}
            for m, n in itertools.pairwise((image[2], *channels))
        ],
        "hidden": init.dense(flat, hidden),
        "classes": init.dense(hidden, classes),
    }
    data = {"image": init.normal(batch, *image), "label": init.integers(classes, batch)}

    def halve(h):
        b, height, width, c = h.shape
        return h.reshape(b, height // 2, 2, width // 2, 2, c).max((2, 4))

    def loss(params, batch):
        h = batch["image"].astype(dtype)
        for p in params["convolutions"]:
            h = halve(jax.nn.relu(convolution(p["kernel"], h) + p["bias"].astype(dtype)))
        h = jax.nn.relu(dense(params["hidden"], h.reshape(len(h), -1)))
        return cross_entropy(dense(params["classes"], h), batch["label"])

    return loss, params, data


_net = {"image": (32, 32, 3), "channels": (32, 64, 128), "hidden": 256, "classes": 10}
_bars = {"time": 2.5, "memory": 1.3, "compile": 1.5, "eve": 1.2}
row("cnn", "small", _bars, cnn, steps=True, **_net, batch=32, dtype="float32")
_bars = {"time": 1.5, "memory": 1.2, "compile": 1.5, "eve": 1.2}
row("cnn", "large", _bars, cnn, steps=True, **_net, batch=128, dtype="bfloat16")


def resnet(*, image, width, depths, groups, classes, batch, dtype):
    """Blocks of two 3×3 convolutions, `depths` of them at each resolution; group norm in the place of batch norm."""
    init = Init()

    def unit(m, n, size):
        return {"kernel": init.weight(size, size, m, n, fan_in=size**2 * m / 2), "norm": init.norm(n)}

    stem, blocks, m = unit(3, width, 7), [], width
    for n in (width * 2**k for k, depth in enumerate(depths) for _ in range(depth)):
        p = {"first": unit(m, n, 3), "second": unit(n, n, 3)}
        blocks.append(p if m == n else p | {"shortcut": unit(m, n, 1)})
        m = n
    params = {"stem": stem, "blocks": blocks, "classes": init.dense(m, classes)}
    data = {"image": init.normal(batch, image, image, 3), "label": init.integers(classes, batch)}

    def apply(p, h, stride=1):
        return group_norm(p["norm"], convolution(p["kernel"], h, stride), groups)

    def loss(params, batch):
        h = jax.nn.relu(apply(params["stem"], batch["image"].astype(dtype), 2))
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for p in params["blocks"]:
            stride = 2 if "shortcut" in p else 1
            short = apply(p["shortcut"], h, stride) if "shortcut" in p else h
            h = jax.nn.relu(short + apply(p["second"], jax.nn.relu(apply(p["first"], h, stride))))
        return cross_entropy(dense(params["classes"], h.mean((1, 2))), batch["label"])

    return loss, params, data


_tiny = {"image": 64, "width": 16, "depths": (1, 1), "groups": 4, "classes": 10, "batch": 8, "dtype": "float32"}
_18 = {"image": 224, "width": 64, "depths": (2, 2, 2, 2), "groups": 32, "classes": 1000, "dtype": "bfloat16"}
row("resnet", "small", {"time": 2.5, "memory": 1.3, "compile": 1.5}, resnet, **_tiny)
row("resnet18", "large", {}, resnet, **_18, batch=128)


def pixelcnn(*, image, width, scales, resnets, mixtures, batch, dtype):
    """PixelCNN++: two streams of causal, weight-normalised, gated convolutions at several scales; a mixture of logistics.

    The stream u has seen all rows above, and ul the pixels to the left as well. The way down (of resolution: up again)
    has shortcuts from every layer of the way up. Layers of equal shape are in a scan.
    """
    init = Init()
    above, left = (2, 3), (2, 2)  # kernels of the two streams

    def conv(size, m, n, *lead):
        direction = init.weight(*lead, *size, m, n, fan_in=1)
        return {"direction": direction, "scale": jnp.full((*lead, n), 0.7), "bias": jnp.zeros((*lead, n))}

    def gate(size, n, extra):
        """A gated layer; `extra` inputs of width `n` come from elsewhere."""
        p = {"first": conv(size, 2 * width, width, n), "second": conv(size, 2 * width, 2 * width, n)}
        return p | {"extra": conv((1, 1), 2 * extra * width, width, n)} if extra else p

    params = {
        "u": conv(above, 4, width),
        "ul_above": conv((1, 3), 4, width),
        "ul_left": conv((2, 1), 4, width),
        "up": [{"u": gate(above, resnets, 0), "ul": gate(left, resnets, 1)} for _ in range(scales)],
        "halve": [{"u": conv(above, width, width), "ul": conv(left, width, width)} for _ in range(scales - 1)],
        "down": [{"u": gate(above, n, 1), "ul": gate(left, n, 2)} for n in (resnets, *[resnets + 1] * (scales - 1))],
        "double": [{"u": conv(above, width, width), "ul": conv(left, width, width)} for _ in range(scales - 1)],
        "out": conv((1, 1), width, 10 * mixtures),
    }
    data = init.integers(256, batch, image, image, 3) / 127.5 - 1

    def kernel(p):
        norms = jnp.sqrt(jnp.sum(p["direction"] ** 2, axis=(0, 1, 2)))
        return p["direction"] * (p["scale"] / norms)

    def apply(p, h, stride=1):
        """A convolution that sees no row below and, when its kernel is of even width, no column to the right."""
        rows, columns = p["direction"].shape[:2]
        sides = (columns // 2, columns // 2) if columns % 2 else (columns - 1, 0)
        return convolution(kernel(p), h, stride, ((rows - 1, 0), sides)) + p["bias"].astype(h.dtype)

    def transposed(p, h):
        """Twice the resolution; what lies beyond the image on the right and below is cut off."""
        rows, columns = p["direction"].shape[:2]
        padding = ((rows - 1, 1), (columns - 1 - (columns - 1) // 2, 1 + (columns - 1) // 2))
        dims = ("NHWC", "HWIO", "NHWC")
        w = kernel(p).astype(h.dtype)
        h = jax.lax.conv_general_dilated(h, w, (1, 1), padding, lhs_dilation=(2, 2), dimension_numbers=dims)
        return h + p["bias"].astype(h.dtype)

    def elu(h):
        return jax.nn.elu(jnp.concatenate([h, -h], -1))

    def gated(p, h, extra=None):
        c = apply(p["first"], elu(h))
        if extra is not None:
            c = c + apply(p["extra"], elu(extra))
        a, g = jnp.split(apply(p["second"], elu(c)), 2, -1)
        return h + a * jax.nn.sigmoid(g)

    def shifted(h, axis):
        return jnp.roll(h, 1, axis) * (jnp.arange(h.shape[axis]) > 0).astype(h.dtype).reshape(
            [-1 if k == axis else 1 for k in range(4)]
        )

    def up(p, state):
        def layer(state, p):
            u = gated(p["u"], state[0])
            state = u, gated(p["ul"], state[1], u)
            return state, state

        last, seen = jax.lax.scan(layer, state, p)
        return last, jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state, seen)

    def down(p, state, seen):
        def layer(state, inputs):
            p, (u_seen, ul_seen) = inputs
            u = gated(p["u"], state[0], u_seen)
            return (u, gated(p["ul"], state[1], jnp.concatenate([u, ul_seen], -1))), None

        return jax.lax.scan(layer, state, (p, seen), reverse=True)[0]

    def loss(params, images):
        x = images.astype(dtype)
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
        u = shifted(apply(params["u"], x), 1)
        ul = shifted(apply(params["ul_above"], x), 1) + shifted(apply(params["ul_left"], x), 2)
        state, seen = (u, ul), []
        for k in range(scales):
            state, layers = up(params["up"][k], state)
            seen.append(layers)
            if k < scales - 1:
                state = tuple(apply(params["halve"][k][s], h, 2) for s, h in zip(("u", "ul"), state))
        # The last layer of the way up is where the way down begins, not a shortcut.
        seen[-1] = jax.tree.map(lambda a: a[:-1], seen[-1])
        for k in range(scales):
            state = down(params["down"][k], state, seen[-1 - k])
            if k < scales - 1:
                state = tuple(transposed(params["double"][k][s], h) for s, h in zip(("u", "ul"), state))
        return logistic_mixture(images, apply(params["out"], jax.nn.elu(state[1])).astype(jnp.float32), mixtures)

    return loss, params, data


def logistic_mixture(x, out, mixtures):
    """−log p of 8-bit pixels, in nats per channel; green is conditioned on red, and blue on both."""
    b, height, width, _ = x.shape
    weights = jax.nn.log_softmax(out[..., :mixtures])
    out = out[..., mixtures:].reshape(b, height, width, 3, 3, mixtures)
    mean, log_scale, c = out[..., 0, :], jnp.maximum(out[..., 1, :], -7), jnp.tanh(out[..., 2, :])
    red, green = x[..., 0, None], x[..., 1, None]
    mean = mean + jnp.stack(
        [jnp.zeros_like(c[..., 0, :]), c[..., 0, :] * red, c[..., 1, :] * red + c[..., 2, :] * green], -2
    )
    x = x[..., None]
    steep, gap = jnp.exp(-log_scale), x - mean
    high, low, middle = steep * (gap + 1 / 255), steep * (gap - 1 / 255), steep * gap
    inside = jax.nn.sigmoid(high) - jax.nn.sigmoid(low)
    density = middle - log_scale - 2 * jax.nn.softplus(middle) - np.log(127.5)  # where the bin is too small to see
    inside = jnp.where(inside > 1e-5, jnp.log(jnp.maximum(inside, 1e-12)), density)
    edges = jnp.where(x < -0.999, jax.nn.log_sigmoid(high), jnp.where(x > 0.999, -jax.nn.softplus(low), inside))
    return -jnp.mean(jax.nn.logsumexp(jnp.sum(edges, -2) + weights, axis=-1)) / 3


_bars = {"time": 2.5, "memory": 1.3, "compile": 1.5, "eve": 4.54}
_tiny = {"image": 8, "width": 16, "scales": 1, "resnets": 1, "mixtures": 2}
_full = {"image": 32, "width": 160, "scales": 3, "resnets": 5, "mixtures": 10}
row("pixelcnn", "small", _bars, pixelcnn, steps=True, **_tiny, batch=8, dtype="float32")
row("pixelcnn", "large", {"eve": 4.54}, pixelcnn, steps=True, **_full, batch=32, dtype="bfloat16")


# ------------------------------------------------------------------------------------------ lstm


def lstm(*, vocab, width, length, batch, dtype):
    """Sequence to sequence: one LSTM reads the source, another goes on from its state through the target."""
    init = Init()

    def cell():
        return {"input": init.dense(width, 4 * width), "recurrent": init.weight(width, 4 * width)}

    params = {
        "source": {"embedding": init.normal(vocab, width), "cell": cell()},
        "target": {"embedding": init.normal(vocab, width), "cell": cell()},
        "head": init.dense(width, vocab),
    }
    data = {"source": init.integers(vocab, batch, length), "target": init.integers(vocab, batch, length + 1)}

    def run(p, tokens, state):
        # The input's share of the gates is one matmul over all steps; only the recurrent one is in the loop.
        gates = dense(p["cell"]["input"], p["embedding"].astype(dtype)[tokens])
        recurrent = p["cell"]["recurrent"].astype(dtype)

        def step(state, gates):
            h, c = state
            i, f, g, o = jnp.split(gates + h @ recurrent, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        state, h = jax.lax.scan(step, state, jnp.swapaxes(gates, 0, 1))
        return state, jnp.swapaxes(h, 0, 1)

    def loss(params, batch):
        zero = jnp.zeros((len(batch["source"]), width), dtype)
        state, _ = run(params["source"], batch["source"], (zero, zero))
        _, h = run(params["target"], batch["target"][:, :-1], state)
        return cross_entropy(dense(params["head"], h), batch["target"][:, 1:])

    return loss, params, data


_bars = {"time": 1.5, "memory": 1.3, "compile": 1.5, "eve": 1.0}
row("lstm", "small", _bars, lstm, steps=True, vocab=512, width=128, length=16, batch=16, dtype="float32")
_bars = {"eve": 1.0}
row("lstm", "large", _bars, lstm, steps=True, vocab=32768, width=1024, length=64, batch=128, dtype="bfloat16")


# ------------------------------------------------------------------------------------------ mlp


def mlp(*, sizes, batch, dtype):
    """Dense layers with relu."""
    init = Init()
    params = [init.dense(m, n, fan_in=m / 2) for m, n in itertools.pairwise(sizes)]
    data = {"x": init.normal(batch, sizes[0]), "label": init.integers(sizes[-1], batch)}

    def loss(params, batch):
        h = batch["x"].astype(dtype)
        for i, p in enumerate(params):
            h = dense(p, jax.nn.relu(h) if i else h)
        return cross_entropy(h, batch["label"])

    return loss, params, data


_bars = {"time": 1.5, "compile": 1.5}
row("mlp", "small", _bars, mlp, steps=True, sizes=(3072, 512, 512, 10), batch=64, dtype="float32")
_bars = {"time": 1.35, "memory": 1.05, "compile": 1.5}
row("mlp", "large", _bars, mlp, steps=True, sizes=(3072, 2048, 2048, 10), batch=512, dtype="bfloat16")
