"""The statistics that are no means over the examples, by their textbook formulas in NumPy and float64.

Two models hold every kind of leaf: that of `test_statistics`, and one of loops, branches, tied, broadcast, generated and
normalised weights. All statistics go in one call each, with and without a mask, whole, in parts and in small tiles.
"""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
import test_statistics as straight
from oracle import QUICK_TO_COMPILE

B = 7
RANDOM = np.random.default_rng(1)


class Model:
    """A loss, its arguments, and its per-example gradients in float64, one at a time by `jax.grad`."""

    def __init__(self, loss, params, batch):
        self.loss, self.params, self.batch = loss, params, batch
        self.v = jax.tree.map(lambda p: RANDOM.normal(size=np.shape(p)), params)  # for dot and cosine
        self.names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]

    @functools.cached_property
    def stack(self):
        with jax.enable_x64(True):
            grad = jax.jit(jax.grad(self.loss))
            each = [grad(self.params, jax.tree.map(lambda x, b=b: x[b : b + 1], self.batch)) for b in range(B)]
            return jax.tree.map(lambda *g: np.stack([np.asarray(x) for x in g]), *each)


def loops(p, b):
    x = jnp.asarray(p["tied"])[b["ids"]] * p["spread"].sum(0)
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, q: (x + jnp.tanh(x @ q["w"] + q["b"]), None)), x, p["layers"])
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["time"] + x), None), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    features = jnp.arange(8.0).reshape(2, 4) / 7
    turned = lambda h: jnp.tanh(h @ p["branch"]) + jnp.tanh(features @ p["features"]).mean(0)
    h = jax.lax.cond(b["z"].sum() > 0, turned, lambda h: h * h, h)
    h = jnp.tanh(h @ (p["normed"] / jnp.linalg.norm(p["normed"])) * p["scale"])
    h = jnp.tanh(h @ p["sum"].sum(0)) + b["z"] @ (p["sum"][0] * p["mask"])
    return jnp.mean((h @ p["tied"].T) ** 2) + p["number"] * jnp.mean(h * b["z"])


LOOPS = Model(
    loops,
    {
        name: 0.7 * RANDOM.normal(size=shape)
        if isinstance(shape, tuple)
        else {k: 0.7 * RANDOM.normal(size=s) for k, s in shape.items()}
        for name, shape in {
            "tied": (9, 4),
            "spread": (3, 4),
            "layers": {"w": (3, 4, 4), "b": (3, 4)},
            "time": (4, 4),
            "branch": (4, 4),
            "features": (4, 4),
            "normed": (4, 4),
            "scale": (4,),
            "sum": (2, 4, 4),
            "mask": (4, 4),
            "number": (),
            "unused": (2, 3),
            "empty": (0, 3),
        }.items()
    },
    {"ids": RANDOM.integers(0, 7, (B, 5)), "z": RANDOM.normal(size=(B, 4))},
)
MODELS = {"straight": Model(straight.loss, straight.PARAMS, straight.BATCH), "loops": LOOPS}

KEY = jax.random.key(3)
EDGES = [-np.inf, -0.011, -1e-3, 1e-3, 0.023, 5.0]


def over_batch():
    """What needs all examples at once, coordinate by coordinate: formula(g) for the examples that count, [n, …]."""

    def trimmed(g, p):
        out = int(p * len(g))
        return np.sort(g, 0)[out : len(g) - out].mean(0)

    cos = lambda g, where=None: jnp.mean(jnp.cos(g), axis=0, where=where)
    count = lambda g, where=None: jnp.sum(g < 0.01, axis=0, where=where)
    return {
        "median": (pg.median(), lambda g: np.median(g, 0)),
        "quantile": (pg.quantile(0.3), lambda g: np.quantile(g, 0.3, axis=0)),
        "quantiles": (pg.quantile([0, 0.25, 0.9, 1]), lambda g: np.quantile(g, [0, 0.25, 0.9, 1], axis=0)),
        "mad": (pg.mad(), lambda g: np.median(np.abs(g - np.median(g, 0)), 0)),
        **{f"trimmed {p}": (pg.trimmed_mean(p), functools.partial(trimmed, p=p)) for p in (0, 0.2, 0.49)},
        "reduce cos": (pg.reduce(cos), lambda g: np.cos(g).mean(0)),
        "reduce count": (pg.reduce(count), lambda g: (g < 0.01).sum(0)),
    }


def additive():
    def counts(g):
        def of(a, b, last):
            return ((g >= a) & ((g < b) | (last & (g == b)))).sum(0)

        return np.stack([of(a, b, k == len(EDGES) - 2) for k, (a, b) in enumerate(itertools.pairwise(EDGES))])

    return {
        "max_abs": (pg.max_abs(), lambda g: np.abs(g).max(0)),
        "histogram": (pg.histogram(EDGES), counts),
    }


def line(tree):
    """[B, everything], in the order of the leaves."""
    return np.concatenate([np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(tree)], axis=1)


@functools.cache
def matrix_of_projections(name, dim):
    """P, as the docstring of `Projection` has it: for coordinate i of leaf k the bits of one key, low bits first."""
    columns = []
    for k, leaf in enumerate(jax.tree.leaves(MODELS[name].params)):
        key = jax.random.fold_in(KEY, k)
        draw = lambda i, key=key: jax.random.bits(jax.random.fold_in(key, i), (-(-dim // 32),), np.uint32)
        words = np.asarray(jax.vmap(draw)(np.arange(np.size(leaf), dtype=np.uint32)))
        bits = words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
        columns.append(bits.reshape(len(words), 32 * words.shape[1])[:, :dim])
    return (1 - 2.0 * np.concatenate(columns).T) / np.sqrt(dim)


def of_the_whole_gradient(name, bound, only):
    """Statistics that look at all leaves, or at pairs of examples: formula(stack, kept), masked gradients being zero."""
    model, names = MODELS[name], MODELS[name].names

    def per_leaf(fn):
        return lambda g, kept: jax.tree.map(lambda x, v: fn(x.reshape(B, -1), np.ravel(v), kept), g, model.v)

    def cosine(x, v):
        sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(v)
        return np.where(sizes == 0, 0, x @ v / np.where(sizes == 0, 1, sizes))

    def clipped(g, kept, weigh):
        weights = np.where(kept, weigh(np.linalg.norm(line(g), axis=1)), 0)
        return jax.tree.map(lambda x: np.tensordot(weights, x, 1) / kept.sum(), g)

    def noise(x, kept):
        n = kept.sum()
        trace = x[kept].var(0, ddof=1).sum() if n > 1 else np.nan
        squared = (x[kept].mean(0) ** 2).sum() - trace / n
        return pg.NoiseScale(trace / squared, trace, squared)

    def noise_of(g, kept, chosen):
        out = [noise(x.reshape(B, -1), kept) if c else (None,) * 3 for x, c in zip(jax.tree.leaves(g), chosen)]
        return pg.NoiseScale(*(jax.tree.unflatten(jax.tree.structure(g), part) for part in zip(*out)))

    v = line(jax.tree.map(lambda v: v[None], model.v))[0]
    chosen = [only in leaf for leaf in names]
    mean = lambda x, kept: x[kept].mean(0)
    clip, normalize = lambda n: np.minimum(1, bound / n), lambda n: np.where(n == 0, 0, 1 / np.where(n == 0, 1, n))
    merging = {
        "dot": (pg.dot(model.v), lambda g, kept: line(g) @ v),
        "dot per leaf": (pg.dot(model.v, per_leaf=True), per_leaf(lambda x, v, kept: x @ v)),
        "cosine with a tree": (pg.cosine(model.v), lambda g, kept: cosine(line(g), v)),
        "clipped": (pg.clipped_mean(bound), lambda g, kept: clipped(g, kept, clip)),
        "clipped by an array": (pg.clipped_mean(np.asarray(bound)), lambda g, kept: clipped(g, kept, clip)),
        "hardly clipped": (pg.clipped_mean(1e9), lambda g, kept: clipped(g, kept, np.ones_like)),
        "normalized": (pg.normalized_mean(), lambda g, kept: clipped(g, kept, normalize)),
        "projections": (pg.projections(KEY, 40), lambda g, kept: line(g) @ matrix_of_projections(name, 40).T),
        "noise": (pg.noise_scale(), lambda g, kept: noise(line(g), kept)),
        "noise per leaf": (pg.noise_scale(per_leaf=True), lambda g, kept: noise_of(g, kept, [True] * len(names))),
        "noise of some": (
            pg.noise_scale(only=only),
            lambda g, kept: noise(line([x for x, c in zip(jax.tree.leaves(g), chosen, strict=True) if c]), kept),
        ),
        "noise of some per leaf": (
            pg.noise_scale(per_leaf=True, only=lambda leaf: only in leaf),
            lambda g, kept: noise_of(g, kept, chosen),
        ),
        "count": (pg.count(), lambda g, kept: np.float32(kept.sum())),
    }
    whole = {
        "cosine": (pg.cosine(), lambda g, kept: cosine(line(g), mean(line(g), kept))),
        "cosine per leaf": (
            pg.cosine(per_leaf=True),
            per_leaf(lambda x, v, kept: cosine(x, mean(x, kept))),
        ),
        "gram": (pg.gram(), lambda g, kept: line(g) @ line(g).T),
        "gram per leaf": (pg.gram(per_leaf=True), per_leaf(lambda x, v, kept: x @ x.T)),
    }
    return merging, whole


@functools.cache
def catalogue(name):
    """name -> (statistic, formula of the stack and of which count, can parts merge?)"""
    model = MODELS[name]
    bound = float(np.median(np.linalg.norm(line(model.stack), axis=1)))
    coordinates = lambda f: lambda g, kept: jax.tree.map(lambda x: np.asarray(f(x[kept])), g)
    merging, whole = of_the_whole_gradient(name, bound, {"straight": "bias", "loops": "scale"}[name])
    return {
        **{k: (s, coordinates(f), False) for k, (s, f) in over_batch().items()},
        **{k: (s, coordinates(f), True) for k, (s, f) in additive().items()},
        **{k: (s, f, True) for k, (s, f) in merging.items()},
        **{k: (s, f, False) for k, (s, f) in whole.items()},
    }


def close(got, want, name, rtol=1e-9, atol=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(want), name
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.shape == np.shape(b), (name, path, a.shape, np.shape(b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=f"{name}{jax.tree_util.keystr(path)}")


MASKS = {
    "all": None,
    "some": np.array([True, False, True, True, False, True, True]),
    "one": np.array([False, False, False, True, False, False, False]),
}
OPTIONS = {
    "whole": {},
    "twin": {"impl": "vmap"},
    "tiles": {"chunk_bytes": 200},
    "parts": {"microbatch_size": 2},
    "small parts in tiles": {"microbatch_size": 3, "chunk_bytes": 1},
}
LOOSE = {"reduce count"}  # in float32


@functools.cache
def step(name, options):
    """All of the catalogue in one call, or all that can be had from parts: a function of (batch, mask), compiled once."""
    model, parts = MODELS[name], "microbatch_size" in OPTIONS[options]
    stats = {k: s for k, (s, _, merges) in catalogue(name).items() if merges or not parts}
    run = lambda b, m: pg.grad_stats(model.loss, stats, **OPTIONS[options])(model.params, b, mask=m)
    compiled = jax.jit(run, compiler_options=QUICK_TO_COMPILE)

    def call(batch, mask):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, compiled(batch, mask))

    return call


@pytest.mark.parametrize("mask, options", [
    ("all", "whole"), ("some", "whole"), ("one", "whole"), ("some", "twin"),
    ("some", "tiles"), ("some", "parts"), ("all", "small parts in tiles"),
])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_catalogue(name, mask, options):
    """A statistic is not what its docstring says: for a kind of leaf, with a mask, in parts or in tiles."""
    model = MODELS[name]
    got = step(name, options)(model.batch, MASKS[mask])
    kept = np.ones(B, bool) if MASKS[mask] is None else MASKS[mask]
    g = jax.tree.map(lambda x: np.where(kept.reshape(-1, *[1] * (x.ndim - 1)), x, 0), model.stack)
    with np.errstate(all="ignore"):
        for k in got:
            want = catalogue(name)[k][1](g, kept)
            close(got[k], want, f"{k} of {name}: ", rtol=1e-6 if k in LOOSE else 1e-8, atol=1e-11)


# ---------------------------------------------------------------------------------------- hard values


def columns(stats, x, mask=None, **options):
    """Statistics of one parameter per column of x, whose per-example gradients are that column."""
    step = lambda x, m: pg.grad_stats(lambda w, x: (x * w).sum(), stats, **options)(jnp.ones(x.shape[1:]), x, mask=m)
    return jax.tree.map(np.asarray, jax.jit(step)(jnp.asarray(x, jnp.float32), mask))


TIES = np.array(
    [[1, 1, 1, 1, 1], [1, 2, 2, 2, 3], [0, 0, 5, 5, 5], [-1, -1, 0, 1, 1], [3, 1, 2, 2, 9], [-0.0, 0, 0, -0.0, 0]]
)
ENDS = np.array([
    [1, np.inf, 2, 3, 0], [np.inf, np.inf, np.inf, 1, 2], [-np.inf, np.inf, 1, 2, 3], [-np.inf, -np.inf, -np.inf, -1, 4],
    [np.inf] * 5,
])  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_order_statistics_of_ties_and_infinities(size, masked):
    """Equal values, both zeros, one to five examples: as NumPy has it. An infinite value is a value; ∞ − ∞ is NaN."""
    values = np.concatenate([TIES, ENDS])[:, :size].T
    stats = {
        "median": pg.median(),
        "q": pg.quantile([0, 0.1, 0.5, 0.75, 1]),
        "trim": pg.trimmed_mean(0.3),
        "mad": pg.mad(),
    }
    mask = None
    if masked:  # the same values, among others that do not count
        noise = np.array([[np.nan], [np.inf], [-np.inf], [7.0]]) * np.ones(values.shape[1])
        values, mask = np.concatenate([noise[:2], values, noise[2:]]), np.array([0, 0, *[1] * size, 0, 0], bool)
    got = columns(stats, values, mask)
    values = values[2:-2] if masked else values
    out = int(0.3 * size)
    with np.errstate(invalid="ignore"):
        middle = np.median(values, 0)
        np.testing.assert_allclose(got["median"], middle, rtol=1e-6)
        np.testing.assert_allclose(got["trim"], np.sort(values, 0)[out : size - out].mean(0), rtol=1e-6)
        np.testing.assert_allclose(got["mad"], np.median(np.abs(values - middle), 0), rtol=1e-6)
    finite = np.isfinite(values).all(0)
    np.testing.assert_allclose(
        got["q"][:, finite], np.quantile(values[:, finite], [0, 0.1, 0.5, 0.75, 1], axis=0), rtol=1e-6
    )
    np.testing.assert_array_equal(got["q"][[0, -1]], [values.min(0), values.max(0)])


def test_nan_in_one_example():
    """NaN is no value that could be in the middle: what orders or adds gives NaN; a histogram counts it nowhere."""
    got = columns(
        {
            "median": pg.median(), "q": pg.quantile([0, 1]), "trim": pg.trimmed_mean(0.4), "mad": pg.mad(),
            "max": pg.max_abs(), "hist": pg.histogram([-np.inf, 0, np.inf]), "norms": pg.norms(),
            "clip": pg.clipped_mean(1.0), "dot": pg.dot(np.ones(2)), "cosine": pg.cosine(np.ones(2)), "gram": pg.gram(),
        },
        np.array([[1, 2], [np.nan, 3], [5, -4], [2, 1]]),
    )  # fmt: skip
    for name in ("median", "trim", "mad", "max"):
        assert np.isnan(got[name][0]), name
        assert np.isfinite(got[name][1]), name
    assert np.isnan(got["q"][:, 0]).all()
    np.testing.assert_array_equal(got["q"][:, 1], [-4, 3])
    np.testing.assert_array_equal(got["hist"], [[0, 1], [3, 3]])
    for name in ("norms", "dot", "cosine"):
        np.testing.assert_array_equal(np.isnan(got[name]), [False, True, False, False])
    assert np.isnan(got["clip"]).all()  # its weight is NaN, and weights all coordinates
    np.testing.assert_array_equal(
        np.isnan(got["gram"]), np.array([[0, 1, 0, 0], [1] * 4, [0, 1, 0, 0], [0, 1, 0, 0]], bool)
    )


def test_histogram_edges_are_numpys():
    """Bins hold their lower edge, the last one both; what is outside, or NaN, is in none."""
    x = np.array([-2, -1, -1, 0, -0.0, 0.5, 1, 1, 2, 3, 3.5, np.nan, np.inf, -np.inf])
    edges = [-1, 0, 1, 3]
    got = columns(pg.histogram(edges), x[:, None])[:, 0]
    np.testing.assert_array_equal(got, np.histogram(x[np.isfinite(x)], edges)[0])
    everything = columns(pg.histogram([-np.inf, 0, np.inf]), x[:, None])[:, 0]
    np.testing.assert_array_equal(everything, [4, 9])
    assert got.dtype == np.int32


def test_a_histogram_counts_and_does_not_average():
    """Of 100,000 values, one bin holds them all: a sum of 1/n in float32 would be off by dozens."""
    x = np.ones((100_000, 1), np.float32)
    for options in ({}, {"chunk_bytes": 1024}, {"microbatch_size": 4096}):
        got = pg.grad_stats(lambda w, x: (x @ w).sum(), pg.histogram([0, 1, 2]), **options)(jnp.ones((1, 2)), x)
        np.testing.assert_array_equal(got, [np.zeros((1, 2)), np.full((1, 2), len(x))])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_masked_leaves_no_trace(name):
    """NaN and infinity in examples that do not count, under every statistic and every route."""
    model, mask = MODELS[name], MASKS["some"]
    spoil = lambda x, by: np.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, by) if x.dtype.kind == "f" else x
    batches = [
        {k: spoil(x, (np.nan, np.inf)[i % 2]) for i, (k, x) in enumerate(model.batch.items())},
        {k: spoil(x, 0.5) for k, x in model.batch.items()},
    ]
    got, want = (step(name, "whole")(b, mask) for b in batches)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", MODELS)
def test_one_broken_example(name):
    """NaN gets where the definition takes it, and nowhere else: the same places as in the twin, for every kind of leaf."""
    model = MODELS[name]
    batch = model.batch | {"z": np.where(np.arange(B)[:, None] == 2, np.nan, model.batch["z"])}
    got, want = (step(name, options)(batch, MASKS["some"]) for options in ("whole", "twin"))
    assert any(np.isnan(x).any() for x in jax.tree.leaves(want["clipped"]))
    for k in want:
        close(got[k], want[k], f"{k} of {name}", rtol=1e-8, atol=1e-11)


def test_an_example_without_gradient():
    """Its cosine and its direction are 0, not 0/0."""
    got = columns(
        {"c": pg.cosine(), "n": pg.normalized_mean(), "v": pg.cosine(np.zeros(2))}, np.array([[0, 0], [3, 4]])
    )
    np.testing.assert_allclose(got["c"], [0, 1])
    np.testing.assert_allclose(got["n"], [0.3, 0.4])
    np.testing.assert_array_equal(got["v"], 0)


def test_huge_and_tiny_gradients():
    """The product of two squares overflows long before the squares do; a norm on the bound is not clipped."""
    x = np.array([[3e18, 4e18], [3e-18, 4e-18]])
    got = columns({"c": pg.cosine(np.array([3e18, 4e18])), "clip": pg.clipped_mean(1.0), "n": pg.normalized_mean()}, x)
    np.testing.assert_allclose(got["c"], 1, rtol=1e-5)
    np.testing.assert_allclose(got["clip"], [0.3, 0.4], rtol=1e-5)
    np.testing.assert_allclose(got["n"], [0.6, 0.8], rtol=1e-5)
    np.testing.assert_array_equal(columns(pg.clipped_mean(5.0), np.array([[3, 4], [6, 8]])), [3, 4])


def test_complex_parameters():
    """Squares are |g|², products Re Σ conj(g) v, directions keep their phase; what has an order has none here."""
    draw = lambda *shape: (RANDOM.normal(size=shape) + 1j * RANDOM.normal(size=shape)).astype(np.complex64)

    def loss(p, b):
        x = jnp.asarray(p["table"])[b["ids"]] @ p["w"] * jnp.exp(1j * p["phase"]) + p["b"]
        return jnp.mean(jnp.abs(x * b["z"]) ** 2)

    params = {"table": draw(6, 3), "w": draw(3, 2), "b": draw(2), "phase": draw(2).real}
    batch = {"ids": RANDOM.integers(0, 6, (B, 4)), "z": draw(B, 1, 2)}
    v = {k: draw(*p.shape) if np.iscomplexobj(p) else draw(*p.shape).real for k, p in params.items()}
    stats = {
        "max": pg.max_abs(), "norms": pg.norms(), "dot": pg.dot(v), "cosine": pg.cosine(v), "gram": pg.gram(),
        "clip": pg.clipped_mean(0.1), "noise": pg.noise_scale(), "reduce": pg.reduce(lambda g: jnp.mean(g * g, axis=0)),
    }  # fmt: skip
    grad = jax.jit(jax.grad(loss))
    each = [grad(params, jax.tree.map(lambda x, b=b: x[b : b + 1], batch)) for b in range(B)]
    g = jax.tree.map(lambda *g: np.stack(g), *each)
    flat, along = line(g), line(jax.tree.map(lambda v: v[None], v))[0]
    size = np.linalg.norm(flat, axis=1)
    trace = np.sum(np.abs(flat - flat.mean(0)) ** 2) / (B - 1)
    want = {
        "max": jax.tree.map(lambda x: np.abs(x).max(0), g),
        "norms": size,
        "dot": (flat.conj() @ along).real,
        "cosine": (flat.conj() @ along).real / size / np.linalg.norm(along),
        "gram": (flat @ flat.conj().T).real,
        "clip": jax.tree.map(lambda x: np.tensordot(np.minimum(1, 0.1 / size), x, 1) / B, g),
        "noise": np.array([trace / (np.sum(np.abs(flat.mean(0)) ** 2) - trace / B), trace]),
        "reduce": jax.tree.map(lambda x: (x * x).mean(0), g),
    }
    for options in ({}, {"impl": "vmap"}, {"chunk_bytes": 64}):
        got = jax.jit(pg.grad_stats(loss, stats, **options), compiler_options=QUICK_TO_COMPILE)(params, batch)
        got["noise"] = np.array(got["noise"][:2])
        for k in want:
            close(jax.tree.map(np.asarray, got[k]), want[k], f"{k}, {options}", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_are_not_rounded(dtype):
    """In a model of 16 bits, the weight 1/√12 of a clipped gradient of ones is as exact as float32 has it."""
    params = {"outer": (3, 4), "dense": (3, 4), "kernel": (1, 3, 4), "table": (3, 4), "bias": (12,)}
    params = {k: jnp.zeros(s, dtype) for k, s in params.items()}

    def loss(p, x):
        conv = jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        ids = jnp.arange(3)[None]
        terms = [x[:, 0] @ p["outer"], (x @ p["dense"]) / 2, conv / 2, p["table"][ids], p["bias"]]
        return sum(jnp.sum(t) for t in terms)

    x = jnp.ones((5, 2, 3), dtype)
    one = {k: jax.tree.leaves(pg.grad_stats(lambda q, x: loss(params | {k: q}, x), pg.clipped_mean(1.0))(p, x))[0]
           for k, p in params.items()}  # fmt: skip
    for k, got in one.items():
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, np.full(got.shape, 12**-0.5), rtol=1e-6, err_msg=k)


# ---------------------------------------------------------------------------------------- under transformations


@pytest.fixture(scope="module")
def small():
    """The straight model and its catalogue, in float32, with eight examples."""
    model = MODELS["straight"]
    to32 = lambda tree: jax.tree.map(lambda x: x.astype(np.float32) if x.dtype.kind == "f" else x, tree)
    stats = {k: s for k, (s, _, _) in catalogue("straight").items() if k not in ("histogram", "reduce count")}
    batch = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), to32(model.batch))
    twin = jax.jit(pg.grad_stats(model.loss, stats, impl="vmap"), compiler_options=QUICK_TO_COMPILE)
    return model.loss, to32(model.params), batch, stats, twin


def agree(got, want):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        top = np.max(np.abs(b), initial=0)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * top, err_msg=jax.tree_util.keystr(path))


def test_under_shard_map(small):
    """Every device gets the statistics of its shard, in tiles and in loops that begin with zeros of the right kind."""
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    loss, params, batch, stats, twin = small
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    local = lambda p, b: jax.tree.map(lambda x: jnp.asarray(x)[None], pg.grad_stats(loss, stats, chunk_bytes=300)(p, b))
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    got = jax.jit(step, compiler_options=QUICK_TO_COMPILE)(params, batch)
    for d in range(2):
        shard = jax.tree.map(lambda x: x[4 * d : 4 * d + 4], batch)
        agree(jax.tree.map(lambda x: np.asarray(x)[d], got), twin(params, shard))


def test_under_vmap_with_donated_arguments(small):
    """Two models at once, each on its own batch; and what is kept until all norms are known survives donation."""
    loss, params, batch, stats, twin = small
    two = jax.tree.map(lambda x: np.stack([x, x[::-1]]), batch), jax.tree.map(lambda x: np.stack([x, 1.3 * x]), params)
    step = jax.vmap(lambda b, p: jax.tree.map(jnp.asarray, pg.grad_stats(loss, stats)(p, b)))
    got = jax.jit(step, compiler_options=QUICK_TO_COMPILE, donate_argnums=1)(*jax.tree.map(jnp.asarray, two))
    for d in range(2):
        b, p = jax.tree.map(lambda x: x[d], two)
        agree(jax.tree.map(lambda x: np.asarray(x)[d], got), twin(p, b))


# ---------------------------------------------------------------------------------------- what it costs


def shapes(*arrays):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), arrays)


def compiled(loss, stats, params, batch, **options):
    return jax.jit(pg.value_and_stats(loss, stats, **options)).lower(*shapes(params, batch)).compile()


def temporary(*args, **options):
    return compiled(*args, **options).memory_analysis().temp_size_in_bytes


def operations(fn, *args):
    """How often each primitive occurs in the jaxpr of ``fn``, inner jaxprs included."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return collections.Counter(walk(jax.make_jaxpr(fn)(*args).jaxpr))


N = 256
LAYERS = {"w": np.zeros((N, N), np.float32), "v": np.zeros((N, N), np.float32), "b": np.zeros(N, np.float32)}
ROWS = np.zeros((16, 4, N), np.float32)  # 16 examples at 4 positions; a matrix per example: 4 MiB
V = jax.tree.map(np.ones_like, LAYERS)


def layers(p, x):
    return jnp.mean(jnp.sin(x @ p["w"] + p["b"]) @ p["v"])


LINEAR = {
    "norms": (pg.norms(), "4 × 4 products of positions"),
    "gram": (pg.gram(), "4 × 4 products of positions, of every two examples"),
    "dot": (pg.dot(V), "products with the tree, from kept operands"),
    "cosine": (pg.cosine(V), "4 × 4 products of positions; products with the tree, from kept operands"),
    "clipped": (
        pg.clipped_mean(1.0),
        "4 × 4 products of positions; the plain gradient, weighted, from kept operands",
    ),
    "normalized": (
        pg.normalized_mean(),
        "4 × 4 products of positions; the plain gradient, weighted, from kept operands",
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_no_matrix_per_example(name):
    """Norms, products and clipping form no gradient where t × t is cheaper: by what `explain` says, and by memory."""
    stat, route = LINEAR[name]
    rows = {r.leaf: r.route for r in pg.explain(layers, stat)(LAYERS, ROWS).rows}
    assert rows["['w']"] == rows["['v']"] == route
    one = 4 * N * N * len(ROWS)
    assert temporary(layers, stat, LAYERS, ROWS) < one / 4
    assert temporary(layers, stat, LAYERS, ROWS, impl="vmap") >= one  # the measure sees what there is to see


def test_many_positions_are_formed():
    """Where t × t is the dearer side, norms and Gram matrices come from gradients formed a few at a time."""
    params, x = {"w": np.zeros((8, 8), np.float32)}, np.zeros((16, 100, 8), np.float32)
    loss = lambda p, x: jnp.mean(jnp.sin(x @ p["w"]))
    for stat in (pg.norms(), pg.gram(), pg.clipped_mean(1.0)):
        (row,) = pg.explain(loss, stat)(params, x).rows
        assert "products" not in row.route
        assert "formed" in row.route


def test_clipping_is_one_backward_pass():
    """As many FLOPs as the plain gradient, and those of the norms; no contraction or convolution is done twice."""
    plain, clipped = (compiled(layers, s, LAYERS, ROWS) for s in (pg.mean(), pg.clipped_mean(1.0)))
    flops = lambda c: c.cost_analysis()["flops"]
    norms = 2 * 2 * 16 * 16 * 4 * N  # two weights, both sides, 4 × 4 positions of 16 examples
    assert flops(clipped) < 1.02 * flops(plain) + 2 * norms

    def count(stat):
        return operations(pg.value_and_stats(layers, stat), LAYERS, ROWS)

    assert count(pg.clipped_mean(1.0))["dot_general"] == count(pg.mean())["dot_general"] + 4
    assert count(pg.clipped_mean(1.0))["cos"] == count(pg.mean())["cos"] == 1


def test_clipping_of_convolutions_and_lookups_is_one_backward_pass():
    """The weighted gradient of a kernel is one convolution, and of a table one scatter, like the plain ones."""

    def loss(p, b):
        x = jnp.sin(p["table"][b])
        conv = jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.mean(jnp.sin(conv))

    params = {"table": np.zeros((50, 16), np.float32), "kernel": np.zeros((3, 16, 32), np.float32)}
    ids = np.zeros((8, 12), np.int32)
    plain, clipped, norms = (
        operations(pg.value_and_stats(loss, s), params, ids) for s in (pg.mean(), pg.clipped_mean(1.0), pg.norms())
    )
    assert clipped["conv_general_dilated"] == plain["conv_general_dilated"]
    assert clipped["cos"] == plain["cos"] == 2
    assert clipped["scatter-add"] == plain["scatter-add"] + norms["scatter-add"]


def test_all_statistics_share_one_backward_pass():
    """The loss's derivative (here: a cosine) is computed once, whatever is asked for."""
    stats = {k: s for k, (s, _, _) in catalogue("straight").items()}
    stats = {k: s for k, s in stats.items() if not re.search("tree|dot|some|reduce cos", k)}  # of another model
    stats |= {"dot": pg.dot(V), "mean": pg.mean(), "snr": pg.snr(), "stack": pg.per_example(), "norms": pg.norms()}
    found = operations(pg.value_and_stats(layers, stats), LAYERS, ROWS)
    assert found["sin"] == found["cos"] == 1


GENERATED = {"w": np.ones((N, N), np.float32)}
TABLE = {"w": np.zeros((8192, 8), np.float32)}
LARGE = {
    "dense": (layers, LAYERS, ROWS),
    "generic": (lambda p, x: jnp.mean(jnp.sin(x @ (p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2))))), GENERATED, ROWS),
    "shared": (lambda p, x: jnp.mean(jnp.sin(jnp.sin(x @ p["w"]) @ p["w"].T)), GENERATED, ROWS),
    "columns of a table": (lambda p, i: jnp.mean(jnp.sin(p["w"][i])), TABLE, np.zeros((16, 4), np.int32)),
}


@pytest.mark.parametrize("name", LARGE)
def test_order_statistics_run_in_tiles(name):
    """All examples' gradients never exist at once, nor much more than chunk_bytes: for any kind of leaf."""
    loss, params, batch = LARGE[name]
    stats = {"median": pg.median(), "gram": pg.gram(), "q": pg.quantile([0.1, 0.9])}
    one = 4 * 16 * sum(np.size(p) for p in jax.tree.leaves(params))
    results = 4 * sum(3 * np.size(p) for p in jax.tree.leaves(params))
    assert temporary(loss, stats, params, batch, chunk_bytes=one // 32) < one / 4 + 2 * results


def test_one_column_of_a_large_table():
    """Not even one column of all examples' tables exists: rows go in blocks."""
    loss, params, batch = LARGE["columns of a table"]
    column = 4 * 16 * 8192
    (row,) = pg.explain(loss, pg.median(), chunk_bytes=column // 8)(params, batch).rows
    assert row.route == "formed 1 column at a time, of 512 rows at a time"
    assert row.extra_bytes <= column // 8
    result = 4 * 8192 * 8
    assert temporary(loss, pg.median(), params, batch, chunk_bytes=column // 8) < column / 2 + 2 * result


def test_noise_of_the_norm_layers_alone():
    """`only=` asks nothing of the other leaves: no gradient of a weight is formed, nor contracted."""

    def loss(p, x):
        h = jnp.sin(x @ p["in"]["kernel"])
        h = (h - h.mean(-1, keepdims=True)) * p["norm"]["scale"] + p["norm"]["bias"]
        return jnp.mean(jnp.sin(h @ p["out"]["kernel"]))

    dense = lambda: {"kernel": np.ones((N, N), np.float32)}
    norm = {"scale": np.ones(N, np.float32), "bias": np.ones(N, np.float32)}
    params = {"in": dense(), "norm": norm, "out": dense()}
    stat = pg.noise_scale(only="norm")
    rows = {r.leaf: r.route for r in pg.explain(loss, stat)(params, ROWS).rows}
    assert rows == {
        "['in']['kernel']": "not asked for",
        "['norm']['bias']": "reduced directly",
        "['norm']['scale']": "reduced directly",
        "['out']['kernel']": "not asked for",
    }
    # forward twice, and back through the outer weight
    assert operations(pg.grad_stats(loss, stat), params, ROWS)["dot_general"] == 3
    norm_layer = lambda q, x: loss(params | {"norm": q}, x)
    got, want = (
        pg.grad_stats(*a)(b, ROWS + 1) for a, b in [((loss, stat), params), ((norm_layer, pg.noise_scale()), norm)]
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)


# ---------------------------------------------------------------------------------------- in expectation


def test_projections_keep_inner_products():
    """E ⟨Pg, Ph⟩ = ⟨g, h⟩ over keys, with the variance of independent signs; a leaf longer than a tile of P has no seam."""
    x = RANDOM.normal(size=(3, 5000)).astype(np.float32)
    loss = lambda w, x: (x @ w).sum()
    sketch = jax.jit(jax.vmap(lambda key: pg.grad_stats(loss, pg.projections(key, 512))(jnp.ones(5000), x)))
    p = np.asarray(sketch(jax.random.split(jax.random.key(0), 40)), np.float64)
    found, gram = np.einsum("kbd,kcd->kbc", p, p), x.astype(np.float64) @ x.T
    spread = np.sqrt((gram**2 + np.outer(np.diag(gram), np.diag(gram))) / 512)  # or less
    assert (np.abs(found.mean(0) - gram) < 4 * spread / np.sqrt(40)).all()
    assert (found.std(0) < 1.5 * spread).all()


def test_noise_scale_is_unbiased():
    """Over 20,000 batches of four, trace and squared norm average to tr Σ and ‖μ‖²; with ever other examples masked."""
    mu, sigma = np.array([0.5, -0.2, 0.1]), np.array([1.0, 2.0, 0.5])
    x = mu + sigma * RANDOM.normal(size=(20_000, 4, 3))
    kept = RANDOM.permuted(np.tile([True, True, True, False], (20_000, 1)), axis=1)
    loss = lambda w, x: (x @ w).sum()
    for mask in (None, kept):
        step = lambda x, m: pg.grad_stats(loss, pg.noise_scale())(jnp.ones(3), x, mask=m)
        found = jax.jit(jax.vmap(step, in_axes=(0, None if mask is None else 0)))(x.astype(np.float32), mask)
        for got, want in ((found.trace, np.sum(sigma**2)), (found.squared_norm, np.sum(mu**2))):
            got = np.asarray(got, np.float64)
            assert abs(got.mean() - want) < 4 * got.std() / np.sqrt(len(got))
