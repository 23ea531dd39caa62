"""An LSTM encoder-decoder that adds decimal numbers: "35+7" → "=42", with teacher forcing.

One-hot characters; the encoder reads the question, and its state is where the decoder begins. Both are LSTMs of the same
width; the decoder's outputs go through a dense layer. At width 512: 2.2M parameters. An example's loss is the mean over
the characters of its own answer, the end included.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .common import Model, Preset, Task, cross_entropy, generated, jitted, positive, totals

ALPHABET = "0123456789+= "
PAD, END = len(ALPHABET), len(ALPHABET) + 1
SIZE = len(ALPHABET) + 2


@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 512
    digits: int = 3  # the most that a summand has
    eval_examples: int = 1000


PRESETS = {
    "smoke": Preset(
        Options(width=16, digits=1, eval_examples=32), 20, 16, 1e-2, eval_every=10, stats_every=10, checkpoint_every=10
    ),
    "cpu": Preset(Options(width=128, digits=2), 3000, 128, 3e-3, eval_every=250, stats_every=100, checkpoint_every=500),
    "gpu": Preset(Options(), 20_000, 128, 3e-3, eval_every=500, stats_every=500, checkpoint_every=2000),
    "paper": Preset(Options(), 10_000, 128, 3e-3, eval_every=500, stats_every=250, checkpoint_every=2000),
}


class Net(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs):
        self.encoder = nnx.OptimizedLSTMCell(SIZE, options.width, rngs=rngs)
        self.decoder = nnx.OptimizedLSTMCell(SIZE, options.width, rngs=rngs)
        self.dense = nnx.Linear(options.width, SIZE, rngs=rngs)

    def encode(self, questions):
        """The state after the question; what is behind its end leaves the state as it is."""
        zeros = jnp.zeros((len(questions), self.encoder.hidden_features))

        def step(state, x):
            new = self.encoder(state, jax.nn.one_hot(x, SIZE))[0]
            return jax.tree.map(lambda n, o: jnp.where((x != PAD)[:, None], n, o), new, state), None

        return jax.lax.scan(step, (zeros, zeros), questions.T)[0]

    def decode_step(self, state, x):
        state, out = self.decoder(state, jax.nn.one_hot(x, SIZE))
        return state, self.dense(out)

    def __call__(self, questions, answers):
        """Logits of every character of the answers, given those before it."""
        _, logits = jax.lax.scan(self.decode_step, self.encode(questions), answers[:, :-1].T)
        return jnp.swapaxes(logits, 0, 1)

    def answer(self, questions, length):
        """By its own likeliest characters."""

        def step(carry, _):
            state, x = carry
            state, logits = self.decode_step(state, x)
            x = jnp.argmax(logits, axis=-1)
            return (state, x), x

        start = jnp.full(len(questions), ALPHABET.index("="))
        _, out = jax.lax.scan(step, (self.encode(questions), start), None, length)
        return out.T


def draw(options: Options):
    """Pairs of numbers, of a random number of digits each; questions and answers as codes, padded."""
    powers = 10 ** np.arange(options.digits + 1, dtype=np.int64)

    def make(rng, batch_size):
        highest = 10 ** rng.integers(1, options.digits + 1, size=(batch_size, 2))
        numbers = rng.integers(0, highest)
        questions = np.full((batch_size, 2 * options.digits + 2), PAD, np.int32)
        answers = np.full((batch_size, len(powers) + 2), PAD, np.int32)
        for k, (a, b) in enumerate(numbers):
            question = [ALPHABET.index(c) for c in f"{a}+{b}"] + [END]
            answer = [ALPHABET.index(c) for c in f"={a + b}"] + [END]
            questions[k, : len(question)] = question
            answers[k, : len(answer)] = answer
        return {"question": questions, "answer": answers}

    return make


def text(codes) -> str:
    return "".join(ALPHABET[c] for c in codes if c < len(ALPHABET))


def init(options: Options):
    return Model(lambda rngs: Net(options, rngs)).init


def make(options: Options, config) -> Task:
    positive(options, "width", "digits", "eval_examples")
    model = Model(lambda rngs: Net(options, rngs))

    def loss(params, batch, key):
        del key
        targets = batch["answer"][:, 1:]
        losses = cross_entropy(model(params)(batch["question"], batch["answer"]), targets)
        there = targets != PAD
        return jnp.mean(jnp.sum(losses * there, axis=1) / jnp.sum(there, axis=1))

    # Drawn from another stream than the training data. With few digits the same questions do occur in both.
    held_out = draw(options)(np.random.default_rng((2**32 + 1, options.digits)), options.eval_examples)

    @partial(jitted, config)
    def measure(params, batch):
        net, targets = model(params), batch["answer"][:, 1:]
        logits = net(batch["question"], batch["answer"])
        there = targets != PAD
        answers = net.answer(batch["question"], targets.shape[1])
        return {
            "loss": jnp.sum(cross_entropy(logits, targets) * there, axis=1) / jnp.sum(there, axis=1),
            "tokens": jnp.sum(there, axis=1),
            "correct": jnp.sum((jnp.argmax(logits, -1) == targets) & there, axis=1),
            "exact": jnp.all((answers == targets) | ~there, axis=1),
        }

    def evaluate(params):
        t = totals(measure, params, held_out, min(250, options.eval_examples))
        n = options.eval_examples
        return {"loss": t["loss"] / n, "accuracy": t["correct"] / t["tokens"], "exact_match": t["exact"] / n}

    return Task(
        init=model.init,
        loss=loss,
        batches=generated(draw(options), config.batch_size, config.seed),
        evaluate=evaluate,
        show=lambda batch, i: text(batch["question"][i]) + text(batch["answer"][i]),
        data={"additions": {"source": "generated"}},
    )
