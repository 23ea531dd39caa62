"""An encoder-decoder transformer that translates English into French.

One vocabulary for both languages and one embedding, tied to the output; sine positions; layers in scans. At width 1024
with 6 + 6 layers, dense parts of 4096 and a vocabulary of 32,000: 209M parameters. The data are sentence pairs of Tatoeba,
which are fewer and shorter than those of the usual benchmarks. An example is a pair, and its loss the mean over its own
French tokens. BLEU is sacrebleu's, of greedy translations of held-out English sentences, each against the one translation
in its pair.
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
    vocabulary: int = 32_000
    length: int = 64
    width: int = 1024
    layers: int = 6  # of the encoder, and of the decoder
    heads: int = 16
    hidden: int = 4096
    dropout: float = 0.1
    smoothing: float = 0.0  # of the labels, in training
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    eval_pairs: int = 1000
    bleu_pairs: int = 500
    sample: bool = False


PRESETS = {
    "smoke": Preset(
        Options(320, 32, 16, 1, 2, 32, 0.1, 0.0, "float32", 8, 4, True),
        *(12, 8, 3e-3),
        warmup=4,
        eval_every=6,
        stats_every=6,
        checkpoint_every=6,
    ),
    "cpu": Preset(
        Options(4000, 24, 128, 2, 4, 512, 0.0, 0.0, "float32", 500, 100),
        *(2000, 32, 1e-3),
        schedule="cosine",
        warmup=200,
        eval_every=500,
        stats_every=100,
        checkpoint_every=500,
    ),
    "gpu": Preset(
        Options(16_000, width=512, layers=6, heads=8, hidden=2048),
        *(20_000, 256, 5e-4),
        schedule="cosine",
        warmup=1000,
        eval_every=1000,
        stats_every=500,
        checkpoint_every=2000,
    ),
    "paper": Preset(
        Options(),
        *(30_000, 256, 3e-4),
        schedule="cosine",
        warmup=1000,
        eval_every=1000,
        stats_every=500,
        checkpoint_every=2000,
    ),
}


class Outside(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs):
        self.embed = nnx.Embed(options.vocabulary, options.width, dtype=jnp.dtype(options.dtype), rngs=rngs)
        self.encoder_norm = nnx.LayerNorm(options.width, rngs=rngs)
        self.decoder_norm = nnx.LayerNorm(options.width, rngs=rngs)


class Network:
    def __init__(self, options: Options):
        positive(options, "vocabulary", "length", "width", "layers", "heads", "hidden", "eval_pairs", "bleu_pairs")
        if options.width % options.heads:
            raise BadInput(f"width is {options.width} and heads {options.heads}: expected a multiple of it.")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(options, name) < 1:
                raise BadInput(
                    f"{name} is {getattr(options, name)}: expected a number from 0 up to, but not including, 1."
                )
        self.options, dtype = options, jnp.dtype(options.dtype)
        sizes = options.width, options.heads, options.hidden, dtype
        self.outside = Model(lambda rngs: Outside(options, rngs))
        self.encoder = Layers(lambda rngs: Block(*sizes, rngs), options.layers)
        self.decoder = Layers(lambda rngs: Block(*sizes, rngs, cross=True), options.layers)

    def init(self, key):
        keys = jax.random.split(key, 3)
        parts = {"outside": self.outside, "encoder": self.encoder, "decoder": self.decoder}
        return {name: part.init(key) for key, (name, part) in zip(keys, parts.items())}

    def embed(self, net, tokens, rate, key):
        h = net.embed(tokens) * math.sqrt(self.options.width)
        return dropout(h + positions(tokens.shape[1], self.options.width).astype(h.dtype), rate, key)

    def encode(self, params, english, key=None):
        rate, keys = self._random(key)
        net, there = self.outside(params["outside"]), english != text.PAD
        h = self.embed(net, english, rate, keys[0])
        h = self.encoder.run(params["encoder"], h, lambda layer, h, k: layer(h, k, rate, mask=there), keys[1])
        return net.encoder_norm(h).astype(h.dtype), there

    def decode(self, params, encoded, before, key=None):
        """Logits of the token after each of ``before``."""
        rate, keys = self._random(key)
        net, (source, there) = self.outside(params["outside"]), encoded
        h = self.embed(net, before, rate, keys[0])
        call = lambda layer, h, k: layer(h, k, rate, source=source, source_mask=there, causal=True)
        h = self.decoder.run(params["decoder"], h, call, keys[1])
        return net.embed.attend(net.decoder_norm(h).astype(h.dtype))

    def _random(self, key):
        rate = 0.0 if key is None else self.options.dropout
        return rate, jax.random.split(jax.random.key(0) if key is None else key)

    def translate(self, params, english):
        """By the likeliest token after each. All positions are computed anew for each, which keeps it simple."""
        encoded = self.encode(params, english)
        size, length = english.shape

        def step(carry, place):
            tokens, over = carry  # tokens[0] is the start
            found = jnp.argmax(self.decode(params, encoded, tokens)[:, place], axis=-1).astype(jnp.int32)
            found = jnp.where(over, text.PAD, found)
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, found[:, None], place + 1, axis=1)
            return (tokens, over | (found == text.END)), found

        start = jnp.zeros((size, length + 1), jnp.int32).at[:, 0].set(text.START)
        _, found = jax.lax.scan(step, (start, jnp.zeros(size, bool)), jnp.arange(length))
        return found.T


def init(options: Options):
    return Network(options).init


def make(options: Options, config) -> Task:
    network = Network(options)
    train, valid, sentences, made, about = text.pairs(options.sample, options.vocabulary, options.length)
    source = loader.Source(train)
    number = min(options.eval_pairs, len(sentences))
    # Held-out pairs are in the order of their length: take them from everywhere.
    order = np.random.default_rng(0).permutation(len(sentences))
    held_out = {name: np.asarray(x)[order[:number]] for name, x in valid.items()}
    french = [sentences[k][1] for k in order]
    for_bleu = {"english": np.asarray(valid["english"])[order[: options.bleu_pairs]]}

    def token_losses(params, batch, key=None, smoothing=0.0):
        keys = (None, None) if key is None else jax.random.split(key)
        targets = batch["french"]
        before = jnp.concatenate([jnp.full_like(targets[:, :1], text.START), targets[:, :-1]], axis=1)
        logits = network.decode(params, network.encode(params, batch["english"], keys[0]), before, keys[1])
        losses = cross_entropy(logits, targets)
        if smoothing:
            uniform = -jnp.mean(jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1)
            losses = (1 - smoothing) * losses + smoothing * uniform
        return losses, logits, targets != text.PAD

    def loss(params, batch, key):
        losses, _, there = token_losses(params, batch, key, options.smoothing)
        return jnp.mean(jnp.sum(losses * there, axis=1) / jnp.sum(there, axis=1))

    @partial(jitted, config)
    def measure(params, batch):
        losses, logits, there = token_losses(params, batch)
        return {
            "loss": jnp.sum(losses * there, axis=1) / jnp.sum(there, axis=1),
            "tokens": jnp.sum(there, axis=1),
            "correct": jnp.sum((jnp.argmax(logits, -1) == batch["french"]) & there, axis=1),
        }

    translate = jitted(config, network.translate)

    def translations(params):
        english, size = for_bleu["english"], min(50, len(for_bleu["english"]))
        for start in range(0, len(english), size):
            places = np.minimum(np.arange(start, start + size), len(english) - 1)
            for row in np.asarray(translate(params, english[places]))[: len(english) - start]:
                yield made.decode([int(t) for t in row if t not in (text.PAD, text.END)])

    def evaluate(params):
        from sacrebleu.metrics.bleu import BLEU

        t = totals(measure, params, held_out, min(50, number))
        found = list(translations(params))
        bleu = BLEU(smooth_method="exp").corpus_score(found, [french[: len(found)]])
        return {"loss": t["loss"] / number, "accuracy": t["correct"] / t["tokens"], "bleu": bleu.score}

    def show(batch, i):
        return " → ".join(made.decode([int(t) for t in batch[side][i]]) for side in ("english", "french"))

    return Task(
        init=network.init,
        loss=loss,
        batches=loader.batches(source, config.batch_size, config.seed),
        evaluate=evaluate,
        show=show,
        data=about,
        size=len(source),
        stacked=("encoder", "decoder"),
    )
