"""A decoder-only transformer as a language model, on WikiText-2 or on reviews of movies.

Layers are in a scan and rematerialised; sine positions; the embedding is tied to the output. The text is cut into windows of
``length`` tokens, of a byte-pair encoding made from its training part. An example is a window, and its loss the mean over its
tokens. Perplexity is per token of the encoding, over windows of the validation text: to compare between runs of one
vocabulary, not with numbers per word. ``gpu`` and ``paper`` are of the size of GPT-2 small; no count is published to match.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..data import loader, text
from ..errors import BadInput
from .common import Layers, Model, Preset, Task, cross_entropy, dropout, jitted, positive, totals
from .transformer import Block, positions


@dataclasses.dataclass(frozen=True)
class Options:
    corpus: Literal["wikitext2", "reviews", "sample"] = "wikitext2"
    vocabulary: int = 16_384
    length: int = 512
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    dropout: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the computation; parameters are in float32
    eval_windows: int = 200


PRESETS = {
    "smoke": Preset(
        Options("sample", 320, 16, 16, 2, 2, 32, 0.1, "float32", 8),
        *(12, 8, 3e-3),
        warmup=4,
        eval_every=6,
        stats_every=6,
        checkpoint_every=6,
    ),
    "cpu": Preset(
        Options("wikitext2", 2048, 64, 128, 4, 4, 512, 0.0, "float32", 200),
        *(1500, 16, 1e-3),
        schedule="cosine",
        warmup=100,
        eval_every=250,
        stats_every=100,
        checkpoint_every=250,
    ),
    "gpu": Preset(
        Options(),
        *(10_000, 64, 6e-4),
        schedule="cosine",
        warmup=500,
        eval_every=500,
        stats_every=250,
        checkpoint_every=1000,
    ),
    "paper": Preset(
        Options(length=1024),
        *(20_000, 64, 6e-4),
        schedule="cosine",
        warmup=1000,
        eval_every=500,
        stats_every=500,
        checkpoint_every=1000,
    ),
}


class Outside(nnx.Module):
    """All but the layers."""

    def __init__(self, options: Options, rngs: nnx.Rngs):
        self.embed = nnx.Embed(options.vocabulary, options.width, dtype=jnp.dtype(options.dtype), rngs=rngs)
        self.norm = nnx.LayerNorm(options.width, rngs=rngs)


class Network:
    def __init__(self, options: Options):
        positive(options, "vocabulary", "length", "width", "layers", "heads", "hidden", "eval_windows")
        if options.width % options.heads:
            raise BadInput(f"width is {options.width} and heads {options.heads}: expected a multiple of it.")
        if not 0 <= options.dropout < 1:
            raise BadInput(f"dropout is {options.dropout}: expected a number from 0 up to, but not including, 1.")
        self.options, dtype = options, jnp.dtype(options.dtype)
        self.outside = Model(lambda rngs: Outside(options, rngs))
        block = lambda rngs: Block(options.width, options.heads, options.hidden, dtype, rngs)
        self.layers = Layers(block, options.layers)

    def init(self, key):
        outside, layers = jax.random.split(key)
        return {"outside": self.outside.init(outside), "layers": self.layers.init(layers)}

    def __call__(self, params, tokens, key=None):
        """Logits of the token after each. With a key, dropout."""
        rate = 0.0 if key is None else self.options.dropout
        keys = jax.random.split(jax.random.key(0) if key is None else key)
        net = self.outside(params["outside"])
        h = net.embed(tokens) * math.sqrt(self.options.width)
        h = dropout(h + positions(tokens.shape[1], self.options.width).astype(h.dtype), rate, keys[0])
        call = lambda layer, h, key: layer(h, key, rate, causal=True)
        h = self.layers.run(params["layers"], h, call, keys[1])
        return net.embed.attend(net.norm(h).astype(h.dtype))


def init(options: Options):
    return Network(options).init


def make(options: Options, config) -> Task:
    network = Network(options)
    train, valid, made, about = text.corpus(options.corpus, options.vocabulary)
    source, held_out = text.Windows(train, options.length), text.Windows(valid, options.length)
    number = min(options.eval_windows, len(held_out))
    held_out = {"tokens": np.stack([held_out[k]["tokens"] for k in range(number)])}

    def losses(params, tokens, key=None):
        return jnp.mean(cross_entropy(network(params, tokens[:, :-1], key), tokens[:, 1:]), axis=1)

    @partial(jitted, config)
    def measure(params, batch):
        return {"loss": losses(params, batch["tokens"])}

    def evaluate(params):
        loss = totals(measure, params, held_out, min(16, number))["loss"] / number
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    return Task(
        init=network.init,
        loss=lambda params, batch, key: jnp.mean(losses(params, batch["tokens"], key)),
        batches=loader.batches(source, config.batch_size, config.seed),
        evaluate=evaluate,
        show=lambda batch, i: made.decode(batch["tokens"][i].tolist()),
        data=about,
        size=len(source),
        stacked=("layers",),
    )
