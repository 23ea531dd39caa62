"""The rows: plain-JAX models, each a loss, its parameters and a batch.

A loss is written once, for a batch of any size, and is the mean of the losses of its examples: no batch norm,
and every example has the same number of tokens. Parameters are float32 and are cast to `dtype` where they
are used; logits and losses are float32.

A new row is a builder that returns `(loss, params, batch)`, or one more `row(...)` line below a builder.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    size: str  # "small" or "large"
    build: Callable[[], tuple[Callable, Any, Any]]  # -> loss, params, batch
    settings: dict[str, Any]
    bars: dict[str, float]  # time, memory, compile: the most allowed of mean + second moment, × plain
    batch_size: int


ROWS: list[Row] = []


def row(name, size, bars, build, **settings):
    """Register `build(**settings)` as a row; `settings` go to the record as they are."""
    ROWS.append(Row(name, size, functools.partial(build, **settings), settings, bars, settings["batch"]))


def select(size: str, only: list[str] | None) -> list[Row]:
    """The rows of one size; `only` names rows, or families: "cnn" stands for "cnn" and "cnn-…"."""
    rows = [r for r in ROWS if r.size == size]
    for wanted in only or ():
        if not any(_matches(r.name, wanted) for r in rows):
            raise ValueError(f"no row {wanted!r} of size {size}; there are {', '.join(r.name for r in rows)}")
    return [r for r in rows if not only or any(_matches(r.name, wanted) for wanted in only)]


def _matches(name, wanted):
    return name == wanted or name.startswith(wanted + "-")


class Init:
    """Arrays from one NumPy generator, so that a row is the same on every version and device."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def weight(self, *shape, fan_in=None):
        scale = 1 / math.sqrt(fan_in or shape[-2])
        return jnp.asarray(self.rng.standard_normal(shape, np.float32) * np.float32(scale))

    def normal(self, *shape):
        return jnp.asarray(self.rng.standard_normal(shape, np.float32))

    def integers(self, high, *shape):
        return jnp.asarray(self.rng.integers(high, size=shape, dtype=np.int32))


def cross_entropy(logits, labels):
    """Mean of −log p(label). The label is picked by comparison: the gradient fuses, a gather's does not."""
    logits = logits.astype(jnp.float32)
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hit, logits, 0), axis=-1))


# ---------------------------------------------------------------------------------- transformer


def transformer(*, vocab, width, layers, heads, length, batch, dtype, attention, remat):
    """Decoder-only, pre-norm, layers in a scan, learned positions, head not tied to the embedding."""
    init = Init()
    params = {
        "tokens": init.weight(vocab, width, fan_in=2500),
        "positions": init.weight(length, width, fan_in=2500),
        "layers": {
            "norm1": {"scale": jnp.ones((layers, width)), "bias": jnp.zeros((layers, width))},
            "qkv": {"kernel": init.weight(layers, width, 3 * width), "bias": jnp.zeros((layers, 3 * width))},
            "out": {"kernel": init.weight(layers, width, width), "bias": jnp.zeros((layers, width))},
            "norm2": {"scale": jnp.ones((layers, width)), "bias": jnp.zeros((layers, width))},
            "up": {"kernel": init.weight(layers, width, 4 * width), "bias": jnp.zeros((layers, 4 * width))},
            "down": {"kernel": init.weight(layers, 4 * width, width), "bias": jnp.zeros((layers, width))},
        },
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "head": init.weight(width, vocab),
    }
    tokens = init.integers(vocab, batch, length + 1)

    def norm(p, h):
        h = h.astype(jnp.float32)
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-5)
        return (h * p["scale"] + p["bias"]).astype(dtype)

    def dense(p, h):
        return h @ p["kernel"].astype(dtype) + p["bias"].astype(dtype)

    def layer(h, p):
        b, t, _ = h.shape
        q, k, v = jnp.moveaxis(dense(p["qkv"], norm(p["norm1"], h)).reshape(b, t, 3, heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        h = h + dense(p["out"], mixed.reshape(b, t, width))
        return h + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm2"], h)))), None

    if remat:
        layer = jax.checkpoint(layer)

    def loss(params, tokens):
        h = params["tokens"][tokens[:, :-1]] + params["positions"]
        h, _ = jax.lax.scan(layer, h.astype(dtype), params["layers"])
        return cross_entropy(norm(params["norm"], h) @ params["head"].astype(dtype), tokens[:, 1:])

    return loss, params, tokens


_cpu = {"dtype": "float32", "attention": "xla"}
_bars = {"time": 1.5, "memory": 1.1, "compile": 1.5}
_small = {"vocab": 512, "width": 256, "layers": 4, "heads": 4, "length": 64, "batch": 32}
row("transformer", "small", _bars, transformer, **_small, **_cpu, remat=False)
row("transformer-remat", "small", _bars, transformer, **_small, **_cpu, remat=True)
_demo = {"vocab": 64, "width": 64, "layers": 3, "heads": 4, "length": 64, "batch": 32}
row("transformer-demo", "small", _bars, transformer, **_demo, **_cpu, remat=True)

_gpu = {"dtype": "bfloat16", "attention": "cudnn", "remat": False}
_gpt124m = {"vocab": 50304, "width": 768, "layers": 12, "heads": 12}
_d512 = {"vocab": 50304, "width": 512, "layers": 8, "heads": 8}
_bars = {"time": 1.05, "memory": 1.02, "compile": 1.5}
_bars64 = {"time": 1.08, "memory": 1.02, "compile": 1.5}
row("transformer-124m-t256", "large", _bars, transformer, **_gpt124m, length=256, batch=64, **_gpu)
row("transformer-124m-t1024", "large", _bars, transformer, **_gpt124m, length=1024, batch=16, **_gpu)
row("transformer-d512-t64", "large", _bars64, transformer, **_d512, length=64, batch=256, **_gpu)


# ------------------------------------------------------------------------------------------ cnn


def cnn(*, image, channels, hidden, classes, batch, dtype):
    """3×3 convolutions, each with a bias, relu and a 2×2 maximum, then a hidden layer and the classes."""
    init = Init()
    sides = [image[0] // 2**i for i in range(len(channels) + 1)]
    flat = sides[-1] ** 2 * channels[-1]
    params = {
        "convolutions": [
            {"kernel": init.weight(3, 3, m, n, fan_in=4.5 * m), "bias": jnp.zeros(n)}
            for m, n in zip((image[2], *channels), channels)
        ],
        "hidden": {"kernel": init.weight(flat, hidden), "bias": jnp.zeros(hidden)},
        "classes": {"kernel": init.weight(hidden, classes), "bias": jnp.zeros(classes)},
    }
    data = {"image": init.normal(batch, *image), "label": init.integers(classes, batch)}

    def convolution(p, h):
        h = jax.lax.conv_general_dilated(
            h, p["kernel"].astype(dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(h + p["bias"].astype(dtype))

    def halve(h):
        b, height, width, c = h.shape
        return h.reshape(b, height // 2, 2, width // 2, 2, c).max((2, 4))

    def dense(p, h):
        return h @ p["kernel"].astype(dtype) + p["bias"].astype(dtype)

    def loss(params, batch):
        h = batch["image"].astype(dtype)
        for p in params["convolutions"]:
            h = halve(convolution(p, h))
        h = jax.nn.relu(dense(params["hidden"], h.reshape(len(h), -1)))
        return cross_entropy(dense(params["classes"], h), batch["label"])

    return loss, params, data


_net = {"image": (32, 32, 3), "channels": (32, 64, 128), "hidden": 256, "classes": 10}
row("cnn", "small", {"time": 2.5, "memory": 1.3, "compile": 1.5}, cnn, **_net, batch=64, dtype="float32")
row("cnn", "large", {"time": 1.5, "memory": 1.2, "compile": 1.5}, cnn, **_net, batch=128, dtype="bfloat16")


# ----------------------------------------------------------------------------------------- lstm


def lstm(*, vocab, width, length, batch, dtype):
    """Sequence to sequence: one LSTM reads the source, another goes on from its state through the target."""
    init = Init()

    def cell():
        return {
            "input": init.weight(width, 4 * width),
            "recurrent": init.weight(width, 4 * width),
            "bias": jnp.zeros(4 * width),
        }

    params = {
        "source": {"embedding": init.normal(vocab, width), "cell": cell()},
        "target": {"embedding": init.normal(vocab, width), "cell": cell()},
        "head": {"kernel": init.weight(width, vocab), "bias": jnp.zeros(vocab)},
    }
    data = {"source": init.integers(vocab, batch, length), "target": init.integers(vocab, batch, length + 1)}

    def run(p, tokens, state):
        # The input's share of the gates is one matmul over all steps; only the recurrent one is in the loop.
        x = p["embedding"].astype(dtype)[tokens]
        gates = x @ p["cell"]["input"].astype(dtype) + p["cell"]["bias"].astype(dtype)
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
        logits = h @ params["head"]["kernel"].astype(dtype) + params["head"]["bias"].astype(dtype)
        return cross_entropy(logits, batch["target"][:, 1:])

    return loss, params, data


_bars = {"time": 1.5, "memory": 1.3, "compile": 1.5}
row("lstm", "small", _bars, lstm, vocab=1024, width=256, length=32, batch=32, dtype="float32")
row("lstm", "large", _bars, lstm, vocab=32768, width=1024, length=64, batch=128, dtype="bfloat16")


# ------------------------------------------------------------------------------------------ mlp


def mlp(*, sizes, batch, dtype):
    """Dense layers with relu."""
    init = Init()
    params = [{"kernel": init.weight(m, n, fan_in=m / 2), "bias": jnp.zeros(n)} for m, n in itertools.pairwise(sizes)]
    data = {"x": init.normal(batch, sizes[0]), "label": init.integers(sizes[-1], batch)}

    def loss(params, batch):
        h = batch["x"].astype(dtype)
        for i, p in enumerate(params):
            h = jax.nn.relu(h) if i else h
            h = h @ p["kernel"].astype(dtype) + p["bias"].astype(dtype)
        return cross_entropy(h, batch["label"])

    return loss, params, data


_bars = {"time": 1.5, "compile": 1.5}
row("mlp", "small", _bars, mlp, sizes=(3072, 1024, 1024, 10), batch=128, dtype="float32")
_bars = {"time": 1.35, "memory": 1.05, "compile": 1.5}
row("mlp", "large", _bars, mlp, sizes=(3072, 2048, 2048, 10), batch=512, dtype="bfloat16")
