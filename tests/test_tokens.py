"""granularity="token": statistics over the positions at which an example uses a weight.

A weight that an example uses at T positions has T token gradients: T times what each position contributes, so that
their mean over positions and examples is the mean gradient, and N = B·T gradients go into every statistic.

The oracle knows nothing of that machinery: each loss is written a second time with one copy of every parameter per
position (``copies[t]`` is what position t sees), and differentiated with respect to the copies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from oracle import QUICK_TO_COMPILE

B = 5
STATISTICS = {
    "mean": (pg.mean(), lambda g: g.mean(0)),
    "second_moment": (pg.second_moment(), lambda g: (g * g).mean(0)),
    "third_moment": (pg.moment(3), lambda g: (g**3).mean(0)),
    "sign_mean": (pg.sign_mean(), lambda g: np.sign(g).mean(0)),
    "abs_mean": (pg.abs_mean(), lambda g: np.abs(g).mean(0)),
    "variance": (pg.variance(ddof=1), lambda g: g.var(0, ddof=1)),
    "std": (pg.std(ddof=2), lambda g: g.std(0, ddof=2)),
    "mean_square": (pg.mean_square(), lambda g: g.mean(0) ** 2 - g.var(0, ddof=1) / len(g)),
    "cos": (pg.elementwise(jnp.cos), lambda g: np.cos(g).mean(0)),
    "exp": (pg.elementwise(jnp.exp), lambda g: np.exp(g).mean(0)),
    "max_abs": (pg.max_abs(), lambda g: np.abs(g).max(0)),
    "histogram": (pg.histogram([-9, -0.0123, 0.00456, 9]), lambda g: np.stack([
        ((g >= a) & (g < b)).sum(0) for a, b in [(-9, -0.0123), (-0.0123, 0.00456), (0.00456, 9)]
    ])),
}  # fmt: skip
# What needs all tokens at once, and cannot be had from parts.
OVER_ALL = {
    "quantiles": (pg.quantile([0.1, 0.5, 1]), lambda g: np.quantile(g, [0.1, 0.5, 1], axis=0)),
    "trimmed": (pg.trimmed_mean(0.2), lambda g: np.sort(g, 0)[int(0.2 * len(g)) : len(g) - int(0.2 * len(g))].mean(0)),
    "mad": (pg.mad(), lambda g: np.median(np.abs(g - np.median(g, 0)), 0)),
    "reduce": (
        pg.reduce(lambda g, where=None: jnp.sum(jnp.cos(g), axis=0, where=where)),
        lambda g: np.cos(g).sum(0),
    ),
}


@dataclasses.dataclass
class Case:
    """`copied(copies, batch)` is `loss` with a copy of each parameter for each of its `tokens` positions."""

    name: str
    loss: Callable
    copied: Callable
    params: Any
    batch: Any
    tokens: Any  # positions per example, for every leaf

    def gradients(self, keep=None):
        """Per leaf, the token gradients of the examples to keep, [N, …], in float64."""
        copies = jax.tree.map(lambda p, t: jnp.broadcast_to(p, (t, *np.shape(p))), self.params, self.tokens)
        grad = jax.jit(jax.grad(self.copied), compiler_options=QUICK_TO_COMPILE)
        each = [grad(copies, self.example(b)) for b in (range(B) if keep is None else np.flatnonzero(keep))]
        return jax.tree.map(lambda t, *g: np.concatenate([np.asarray(x) * t for x in g]), self.tokens, *each)

    def example(self, b):
        return jax.tree.map(lambda x: x[b : b + 1], self.batch)

    def compute(self, stats, mask=None, **options):
        step = lambda p, x, m: pg.value_and_stats(self.loss, stats, granularity="token", **options)(p, x, mask=m)
        return jax.jit(step, compiler_options=QUICK_TO_COMPILE)(self.params, self.batch, mask)


class Draw:
    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def __call__(self, *shape):
        return 0.7 * self.random.normal(size=shape)

    def ints(self, high, *shape):
        return self.random.integers(0, high, shape)


CASES = []


def case(build):
    CASES.append((build.__name__.replace("_", " "), build))
    return build


def readout(x):
    return jnp.mean(x * jnp.sin(x + 0.5))


# ---------------------------------------------------------------------------------------- the cases


@case
def dense_with_bias(d):
    """One position for every row that the layer sees."""
    return (
        lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"])),
        lambda c, x: readout(jnp.tanh(jnp.einsum("btm,tmn->btn", x, c["w"]) + c["b"])),
        {"w": d(3, 4), "b": d(4)},
        d(B, 6, 3),
        {"w": 6, "b": 6},
    )


@case
def a_vector_per_example(d):
    """One position: tokens are examples."""
    return (
        lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"])),
        lambda c, x: readout(jnp.tanh(x @ c["w"][0] + c["b"][0])),
        {"w": d(3, 4), "b": d(4)},
        d(B, 3),
        {"w": 1, "b": 1},
    )


@case
def leaves_with_different_numbers_of_positions(d):
    """Before and after pooling: N is each leaf's own."""
    return (
        lambda p, x: readout(jnp.tanh(jnp.tanh(x @ p["w"]).mean(1) @ p["v"])),
        lambda c, x: readout(jnp.tanh(jnp.tanh(jnp.einsum("btm,tmn->btn", x, c["w"])).mean(1) @ c["v"][0])),
        {"w": d(3, 4), "v": d(4, 2)},
        d(B, 6, 3),
        {"w": 6, "v": 1},
    )


@case
def positions_of_an_image(d):
    """Positions on two axes; a linear read-out after."""
    return (
        lambda w, x: readout(jnp.tanh(x @ w)),
        lambda c, x: readout(jnp.tanh(jnp.einsum("btm,tmn->btn", x.reshape(1, 6, 4), c))),
        d(4, 2),
        d(B, 2, 3, 4),
        6,
    )


@case
def linear_loss(d):
    """The cotangent is the same for all examples; the positions are still positions."""
    return (
        lambda w, x: jnp.mean(x @ w),
        lambda c, x: jnp.mean(jnp.einsum("btm,tmn->btn", x, c)),
        d(3, 2),
        d(B, 6, 3),
        6,
    )


@case
def constant_features(d):
    """The activations are the same for all examples; the positions are still positions."""
    features = d(6, 3)
    return (
        lambda w, x: readout(jnp.tanh(features @ w + x)),
        lambda c, x: readout(jnp.tanh(jnp.einsum("tm,tmn->tn", features, c) + x)),
        d(3, 2),
        d(B, 6, 2),
        6,
    )


@case
def heads(d):
    """A weight with an axis that it shares with the activations: each head has all positions."""
    return (
        lambda w, x: readout(jnp.tanh(jnp.einsum("bthm,hmn->bthn", x, w))),
        lambda c, x: readout(jnp.tanh(jnp.einsum("bthm,thmn->bthn", x, c))),
        d(2, 3, 4),
        d(B, 6, 2, 3),
        6,
    )


@case
def embedding(d):
    """Every lookup is a position; rows looked up twice by one example are two tokens."""
    return (
        lambda w, i: readout(jnp.tanh(jnp.asarray(w)[i])),
        lambda c, i: readout(jnp.tanh(c[jnp.arange(6)[None], i])),
        d(9, 3),
        d.ints(7, B, 6),
        6,
    )


@case
def tied_embedding(d):
    """Looked up at six positions and multiplied at six: twelve."""
    return (
        lambda w, i: readout(jnp.tanh(jnp.tanh(jnp.asarray(w)[i]) @ w.T)),
        lambda c, i: readout(jnp.tanh(jnp.einsum("btd,tvd->btv", jnp.tanh(c[jnp.arange(6)[None], i]), c[6:]))),
        d(7, 3),
        d.ints(7, B, 6),
        12,
    )


@case
def convolution_1x1(d):
    """A 1 × 1 convolution is a dense layer over pixels."""
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (
        lambda w, x: readout(jnp.tanh(conv(x, w))),
        lambda c, x: readout(jnp.tanh(jnp.einsum("btm,tmn->btn", x.reshape(1, 6, 3), c[:, 0, 0]))),
        d(1, 1, 3, 2),
        d(B, 2, 3, 3),
        6,
    )


def patches(x, size, stride):
    """[b, H, W, c] -> [b, positions, size, size, c], by slices."""
    high, wide = ((n - size) // stride + 1 for n in x.shape[1:3])
    cuts = [
        x[:, i * stride : i * stride + size, j * stride : j * stride + size] for i in range(high) for j in range(wide)
    ]
    return jnp.stack(cuts, 1)


@case
def convolution_3x3(d):
    """A token is an output position."""
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (
        lambda w, x: readout(jnp.tanh(conv(x, w))),
        lambda c, x: readout(jnp.tanh(jnp.einsum("btijm,tijmn->btn", patches(x, 3, 1), c))),
        d(3, 3, 2, 4),
        d(B, 5, 4, 2),
        6,
    )


@case
def strided_padded_convolution_in_groups(d):
    """Padding, strides and groups change the positions, and nothing else."""
    conv = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (2, 2), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )

    def copied(c, x):
        cut = patches(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 3, 2).reshape(1, -1, 3, 3, 2, 2)
        out = jnp.einsum("btijgm,tijmgn->btgn", cut, c.reshape(-1, 3, 3, 2, 2, 3))
        return readout(jnp.tanh(out).reshape(1, -1, 6))

    return lambda w, x: readout(jnp.tanh(conv(x, w))), copied, d(3, 3, 2, 6), d(B, 5, 4, 4), 6


@case
def layer_norm(d):
    """Scale and offset are used once per row."""

    def norm(x, scale, offset):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale + offset

    return (
        lambda p, x: readout(jnp.tanh(norm(jnp.tanh(x @ p["w"]), p["scale"], p["offset"]))),
        lambda c, x: readout(jnp.tanh(norm(jnp.tanh(jnp.einsum("btm,tmn->btn", x, c["w"])), c["scale"], c["offset"]))),
        {"w": d(3, 4), "scale": d(4), "offset": d(4)},
        d(B, 6, 3),
        {"w": 6, "scale": 6, "offset": 6},
    )


@case
def used_twice(d):
    """Two uses of one weight: their positions add up."""
    return (
        lambda w, x: readout(jnp.tanh(jnp.tanh(x @ w) @ w)),
        lambda c, x: readout(
            jnp.tanh(jnp.einsum("btm,tmn->btn", jnp.tanh(jnp.einsum("btm,tmn->btn", x, c[:6])), c[6:]))
        ),
        d(3, 3),
        d(B, 6, 3),
        12,
    )


@case
def used_at_different_lengths(d):
    """At six positions and, pooled, at one: seven."""
    return (
        lambda w, x: readout(jnp.tanh(jnp.tanh(x @ w).mean(1) @ w)),
        lambda c, x: readout(jnp.tanh(jnp.tanh(jnp.einsum("btm,tmn->btn", x, c[:6])).mean(1) @ c[6])),
        d(3, 3),
        d(B, 6, 3),
        7,
    )


@case
def slices_of_a_fused_weight(d):
    """Disjoint slices, each at all positions; the rest of the weight has φ(0) for every token."""
    return (
        lambda w, x: readout(jnp.tanh(x @ w[:, :2]) * jnp.sin(x @ w[:, 2:4])),
        lambda c, x: readout(
            jnp.tanh(jnp.einsum("btm,tmn->btn", x, c[..., :2])) * jnp.sin(jnp.einsum("btm,tmn->btn", x, c[..., 2:4]))
        ),
        d(3, 5),
        d(B, 6, 3),
        6,
    )


@case
def scan_over_layers(d):
    """Stacked layers: every layer has its own positions."""

    def loss(p, x):
        return readout(jax.lax.scan(lambda x, q: (x + jnp.tanh(x @ q["w"] + q["b"]), None), x, p)[0])

    def copied(c, x):
        for k in range(4):
            x = x + jnp.tanh(jnp.einsum("btm,tmn->btn", x, c["w"][:, k]) + c["b"][:, k])
        return readout(x)

    return loss, copied, {"w": d(4, 3, 3), "b": d(4, 3)}, d(B, 6, 3), {"w": 6, "b": 6}


@case
def scan_over_rematerialised_layers(d):
    """The same with `jax.checkpoint`."""

    def loss(w, x):
        return readout(jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), x, w)[0])

    def copied(c, x):
        for k in range(2):
            x = x + jnp.tanh(jnp.einsum("btm,tmn->btn", x, c[:, k]))
        return readout(x)

    return loss, copied, d(2, 3, 3), d(B, 6, 3), 6


@case
def scan_over_time(d):
    """A recurrent weight: every step is a position."""

    def loss(p, x):
        step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]),) * 2
        return readout(jax.lax.scan(step, jnp.zeros((1, 4), x.dtype), jnp.moveaxis(x, 1, 0))[1])

    def copied(c, x):
        h, out = jnp.zeros((1, 4), x.dtype), []
        for t in range(6):
            h = jnp.tanh(x[:, t] @ c["w"][t] + h @ c["u"][t] + c["b"][t])
            out.append(h)
        return readout(jnp.stack(out))

    return loss, copied, {"w": d(3, 4), "u": d(4, 4), "b": d(4)}, d(B, 6, 3), {"w": 6, "u": 6, "b": 6}


@case
def shared_layer_in_a_loop(d):
    """One layer applied three times to six positions: eighteen."""

    def loss(w, x):
        return readout(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0])

    def copied(c, x):
        for k in range(3):
            x = jnp.tanh(jnp.einsum("btm,tmn->btn", x, c[6 * k : 6 * k + 6]))
        return readout(x)

    return loss, copied, d(3, 3), d(B, 6, 3), 18


@case
def an_unused_parameter(d):
    """Zero for every token."""
    return (
        lambda p, x: readout(jnp.tanh(x @ p["w"])),
        lambda c, x: readout(jnp.tanh(jnp.einsum("btm,tmn->btn", x, c["w"]))),
        {"w": d(3, 4), "unused": d(2, 2)},
        d(B, 6, 3),
        {"w": 6, "unused": 1},
    )


@pytest.fixture(params=CASES, ids=lambda given: given[0])
def built(request):
    name, build = request.param
    with jax.enable_x64(True):
        yield Case(name, *build(Draw(len(name))))


def compare(built, got, gradients):
    for name in got:
        formula = (STATISTICS | OVER_ALL)[name][1]
        for (path, g), a in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(got[name]), strict=True):
            top = np.abs(g).max(initial=1e-30)
            atol = 1e-7 * top if name == "std" else 1e-10 * max(top, top**3, 1)
            np.testing.assert_allclose(
                a, formula(g), rtol=1e-8, atol=atol, err_msg=f"{built.name}: {name}{jax.tree_util.keystr(path)}"
            )


# ---------------------------------------------------------------------------------------- the tests


def test_the_oracle_of(built):
    """The copied loss is the loss, and its tokens average to its gradient: else the tests below mean nothing."""
    for b in (0, 3):
        example = built.example(b)
        value, want = jax.value_and_grad(built.loss)(built.params, example)
        copies = jax.tree.map(lambda p, t: jnp.broadcast_to(p, (t, *np.shape(p))), built.params, built.tokens)
        copied_value, got = jax.value_and_grad(built.copied)(copies, example)
        np.testing.assert_allclose(copied_value, value, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a.sum(0), b, rtol=1e-9, atol=1e-12), got, want)


def test_tokens_of(built):
    """Every statistic over the B·T token gradients; the value is the mean loss of examples, as ever."""
    value, got = built.compute({name: s for name, (s, _) in (STATISTICS | OVER_ALL).items()})
    compare(built, got, built.gradients())
    np.testing.assert_allclose(value, np.mean([built.loss(built.params, built.example(b)) for b in range(B)]))


@pytest.mark.parametrize("options", [{"microbatch_size": 2}, {"chunk_bytes": 100}], ids=["parts", "chunks"])
def test_masked_tokens_in_parts_of(built, options):
    """A masked example takes all its tokens along, and N counts those of the others; in parts or chunks."""
    mask = np.array([True, False, True, True, False])
    statistics = STATISTICS if "microbatch_size" in options else STATISTICS | OVER_ALL
    _, got = built.compute({name: s for name, (s, _) in statistics.items()}, mask, **options)
    compare(built, got, built.gradients(mask))


def test_losses_over_tokens_are_still_per_example():
    """`losses` is about examples and may be asked for along with token statistics."""
    with jax.enable_x64(True):
        built = Case("dense", *dense_with_bias(Draw(0)))
        value, (losses, _) = built.compute((pg.losses(), pg.mean()))
    assert losses.shape == (B,)
    np.testing.assert_allclose(np.mean(losses), value)


def test_tokens_differ_from_examples():
    """Second moments over tokens are larger: averaging over positions takes noise away."""
    built = Case("dense", *dense_with_bias(Draw(0)))
    _, tokens = built.compute(pg.second_moment())
    _, examples = pg.value_and_stats(built.loss, pg.second_moment())(built.params, built.batch)
    assert all((t > e).all() for t, e in zip(jax.tree.leaves(tokens), jax.tree.leaves(examples), strict=True))
