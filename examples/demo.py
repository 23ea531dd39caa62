"""Statistics of per-example gradients of a small transformer and a small CNN, and 200 training steps of each.

`make demo` runs it. Both losses are plain JAX and know nothing of pergrad; the data lies in `examples/data`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

import pergrad as pg

DATA = Path(__file__).parent / "data"
STEPS = 200
STATISTICS = {
    "mean": pg.mean(),
    "second_moment": pg.second_moment(),
    "sign": pg.sign_mean(),
    "snr": pg.snr(),
    "norms": pg.norms(),
}
FOR_TRAINING = {name: STATISTICS[name] for name in ("mean", "second_moment")}

console = Console(width=None if Console().is_terminal else 100, highlight=False)


# --- two models -----------------------------------------------------------------------------------


@dataclass
class Task:
    name: str
    loss: Callable  # (params, batch) -> scalar
    params: Any
    batches: Iterator  # endless
    learning_rates: dict[str, float]


def transformer(rng: np.random.Generator, width=64, depth=3, heads=4, context=64, batch_size=32) -> Task:
    """A character-level decoder: the layers in a `lax.scan`, each of them rematerialised."""
    text = (DATA / "text.txt").read_text()
    alphabet = sorted(set(text))
    codes = np.searchsorted(alphabet, list(text)).astype(np.int32)

    def weight(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    params = {
        "embed": weight(len(alphabet), width),
        "position": weight(context, width),
        "layers": {
            "norm1": jnp.ones((depth, width)),
            "qkv": weight(depth, width, 3 * width),
            "out": weight(depth, width, width),
            "norm2": jnp.ones((depth, width)),
            "up": weight(depth, width, 4 * width),
            "up_bias": jnp.zeros((depth, 4 * width)),
            "down": weight(depth, 4 * width, width),
        },
        "norm": jnp.ones(width),
        "unembed": weight(width, len(alphabet)),
    }

    def rms_norm(h, scale):
        return scale * h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def layer(h, p):
        b, t, _ = h.shape
        q, k, v = jnp.split((rms_norm(h, p["norm1"]) @ p["qkv"]).reshape(b, t, heads, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.reshape(b, t, -1) @ p["out"]
        return h + jax.nn.gelu(rms_norm(h, p["norm2"]) @ p["up"] + p["up_bias"]) @ p["down"], None

    def loss(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        h = params["embed"][inputs] + params["position"]
        h, _ = jax.lax.scan(layer, h, params["layers"])
        logits = rms_norm(h, params["norm"]) @ params["unembed"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def batches():
        windows = np.lib.stride_tricks.sliding_window_view(codes, context + 1)
        while True:
            yield jnp.asarray(windows[rng.integers(len(windows), size=batch_size)])

    return Task("transformer", loss, params, batches(), {"Adam": 5e-3, "MicroAdam": 2e-2})


def cnn(rng: np.random.Generator, batch_size=64) -> Task:
    """Three convolutions, two of them with strides, and a dense layer."""
    data = np.load(DATA / "fashion.npz")
    images, labels = data["images"][..., None].astype(np.float32) / 255, data["labels"].astype(np.int32)

    def weight(*shape):
        return jnp.asarray(rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1])), jnp.float32)

    channels, strides = (1, 16, 32, 32), (1, 2, 2)
    params = {
        "convolutions": [{"kernel": weight(3, 3, m, n), "bias": jnp.zeros(n)} for m, n in pairwise(channels)],
        "dense": {"kernel": weight(7 * 7 * 32, 10) / 4, "bias": jnp.zeros(10)},
    }

    def loss(params, batch):
        h = batch["image"]
        for p, stride in zip(params["convolutions"], strides, strict=True):
            h = jax.lax.conv_general_dilated(
                h, p["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jax.nn.relu(h + p["bias"])
        logits = h.reshape(h.shape[0], -1) @ params["dense"]["kernel"] + params["dense"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def batches():
        while True:
            chosen = rng.choice(len(images), size=batch_size, replace=False)
            yield {"image": jnp.asarray(images[chosen]), "label": jnp.asarray(labels[chosen])}

    return Task("CNN", loss, params, batches(), {"Adam": 4e-3, "MicroAdam": 1.6e-2})


# --- an update rule in ten lines ------------------------------------------------------------------


def micro_adam(learning_rate, b1=0.9, b2=0.999, eps=1e-8):
    """Adam, with the mean of the squared gradients where Adam has the square of the mean gradient."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros(()), zeros, zeros

    def update(mean, state, params=None, *, second_moment, **_):
        t, m, v = state
        t = t + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, mean)
        v = jax.tree.map(lambda v, s: b2 * v + (1 - b2) * s, v, second_moment)
        rate = learning_rate * jnp.sqrt(1 - b2**t) / (1 - b1**t)
        return jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + eps), m, v), (t, m, v)

    return optax.GradientTransformationExtraArgs(init, update)


OPTIMIZERS = {"Adam": optax.adam, "MicroAdam": micro_adam}


# --- what the statistics say ----------------------------------------------------------------------


def signal_and_noise(stats, batch_size):
    """Unbiased estimates of |E g|² and of the trace of g's covariance, from the moments over one batch."""
    mean_square = sum(jnp.sum(g**2) for g in jax.tree.leaves(stats["mean"]))
    second_moment = sum(jnp.sum(s) for s in jax.tree.leaves(stats["second_moment"]))
    b = batch_size
    return (b * mean_square - second_moment) / (b - 1), b * (second_moment - mean_square) / (b - 1)


def show_statistics(task, params, batch):
    step = pg.value_and_stats(task.loss, STATISTICS)
    twin = pg.value_and_stats(task.loss, STATISTICS, impl="vmap")
    _, stats = jax.jit(step)(params, batch)
    _, expected = jax.jit(twin)(params, batch)

    table = Table(title="At the start, over one batch", title_justify="left")
    table.add_column("parameter")
    for heading in ("|E g|", "√E |g|²", "|E sign g|", "SNR > 1", "from twin"):
        table.add_column(heading, justify="right")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    columns = [jax.tree.leaves(stats[name]) for name in ("mean", "second_moment", "sign", "snr")]
    columns += [jax.tree.leaves(expected["second_moment"])]
    for path, mean, square, sign, snr, twin_square in zip(paths, *columns, strict=True):
        table.add_row(
            path,
            f"{jnp.linalg.norm(mean):.2e}",
            f"{jnp.sqrt(jnp.sum(square)):.2e}",
            f"{jnp.mean(jnp.abs(sign)):.2f}",
            f"{jnp.mean(snr > 1):.1%}",
            f"{jnp.max(jnp.abs(square - twin_square)) / jnp.max(twin_square):.0e}",
        )
    console.print(table)
    console.print("[dim]from twin: largest difference of E g² from vmap's, over the largest entry[/dim]")

    low, middle, high = np.quantile(np.asarray(stats["norms"]), [0, 0.5, 1])
    console.print(f"norms of the per-example gradients: from {low:.3g} to {high:.3g}, median {middle:.3g}\n")


def show_cost(task, params, batch, rounds=15):
    functions = {
        "gradient": jax.value_and_grad(task.loss),
        "mean and second moment": pg.value_and_stats(task.loss, FOR_TRAINING),
        "all five statistics": pg.value_and_stats(task.loss, STATISTICS),
    }
    compiled, compile_seconds, seconds = {}, {}, {name: [] for name in functions}
    for name, function in functions.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(function).lower(params, batch).compile()
        compile_seconds[name] = time.perf_counter() - start
        jax.block_until_ready(compiled[name](params, batch))
    # In turns, so that whatever else the machine does falls on all of them alike.
    for _ in range(rounds):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(params, batch))
            seconds[name].append(time.perf_counter() - start)

    table = Table(title=f"Time, medians of {rounds}", title_justify="left")
    for heading in ("", "ms", "ratio", "compile s"):
        table.add_column(heading, justify="right" if heading else "left")
    medians = {name: np.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["gradient"]
        table.add_row(name, f"{1000 * median:.1f}", f"{ratio:.2f}", f"{compile_seconds[name]:.1f}")
    console.print(table)


# --- training -------------------------------------------------------------------------------------


class Speed(ProgressColumn):
    def render(self, task):
        return Text(f"{task.speed or 0:.0f} steps/s")


def train(task, optimizer_name, evaluation_batch):
    optimizer = optax.with_extra_args_support(OPTIMIZERS[optimizer_name](task.learning_rates[optimizer_name]))
    step = pg.value_and_stats(task.loss, FOR_TRAINING)

    @jax.jit
    def train_step(params, state, batch):
        value, stats = step(params, batch)
        second_moment = stats["second_moment"]
        updates, state = optimizer.update(stats["mean"], state, params, second_moment=second_moment)
        batch_size = jax.tree.leaves(batch)[0].shape[0]
        return optax.apply_updates(params, updates), state, value, signal_and_noise(stats, batch_size)

    params, state = task.params, optimizer.init(task.params)
    evaluate = jax.jit(task.loss)
    before = evaluate(params, evaluation_batch)
    # A terminal gets a bar; a file or a pipe gets a line now and then.
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed()
    columns += TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()
    history = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{task.name}, {optimizer_name}", total=STEPS, loss=float(before))
        for number in range(1, STEPS + 1):
            params, state, value, measured = train_step(params, state, next(task.batches))
            history.append(jax.device_get(measured))
            progress.update(bar, advance=1, loss=float(value))
            if number == 1:
                start = time.perf_counter()  # after the first step, which compiles
            elif number % 50 == 0 and not console.is_terminal:
                speed = (number - 1) / (time.perf_counter() - start)
                left = (STEPS - number) / speed
                console.print(
                    f"{task.name}, {optimizer_name}: step {number}/{STEPS}, loss {value:.3f}, "
                    f"{speed:.0f} steps/s, {left:.0f} s left"
                )
    after = evaluate(params, evaluation_batch)

    # One batch says little about |E g|²: its noise is as large as itself. The ratio of averages is steadier.
    signal, noise = np.mean(history[-STEPS // 4 :], axis=0)
    scale = f"{noise / signal:.0f} examples" if signal > 0 else "more than these batches can tell"
    console.print(
        f"{task.name}, {optimizer_name}: loss on a fixed batch {before:.3f} → {after:.3f}, gradient noise scale {scale}"
    )
    return params


def confident_coordinates(task, params, batch):
    """The fraction of all coordinates whose signal is larger than their noise."""
    _, snr = jax.jit(pg.value_and_stats(task.loss, pg.snr()))(params, batch)
    return jnp.mean(jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(snr)]) > 1)


def main():
    start = time.perf_counter()
    for make in (transformer, cnn):
        task = make(np.random.default_rng(0))
        batch = next(task.batches)
        size = sum(leaf.size for leaf in jax.tree.leaves(task.params))
        console.rule(f"{task.name}: {size:,} parameters, batches of {len(jax.tree.leaves(batch)[0])}")
        print(pg.explain(task.loss, STATISTICS)(task.params, batch))
        print()
        show_statistics(task, task.params, batch)
        show_cost(task, task.params, batch)
        print()
        for name in OPTIMIZERS:
            trained = train(task, name, batch)
        fractions = [confident_coordinates(task, params, batch) for params in (task.params, trained)]
        console.print("coordinates with SNR > 1: {:.1%} before, {:.1%} after training".format(*fractions))
        print()
    seconds = time.perf_counter() - start
    console.print(f"All in {seconds:.0f} s, on {jax.devices()[0].platform} with JAX {jax.__version__}")


if __name__ == "__main__":
    main()
