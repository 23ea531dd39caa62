"""Each statistic by its textbook formula, in NumPy and float64, from the stack of per-example gradients.

The gradients come from one model whose leaves are served in every way a leaf can be: an outer product per example, a
contraction over positions, rows of an embedding, a bias, padded slices of a fused weight, a shared weight, and a
parameter that is not used at all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from oracle import QUICK_TO_COMPILE

B = 7
RANDOM = np.random.default_rng(0)
PARAMS = {
    name: 0.7 * RANDOM.normal(size=shape)
    for name, shape in {
        "outer": (4, 3),
        "dense": (3, 4),
        "table": (9, 3),
        "kernel": (2, 2, 4),
        "bias": (4,),
        "fused": (6, 5),
        "shared": (4, 4),
        "unused": (2, 3),
        "scalar": (),
    }.items()
}
BATCH = {
    "ids": RANDOM.integers(0, 7, (B, 5)),  # rows 7 and 8 are never touched, and some twice by one example
    "z": RANDOM.normal(size=(B, 4)),
    "image": RANDOM.normal(size=(B, 6, 2)),
}


def loss(p, b):
    x = jnp.tanh(p["table"][b["ids"]] @ p["dense"] + p["bias"])
    x = jnp.tanh(jnp.tanh(x @ p["shared"]) @ p["shared"])
    conv = jax.lax.conv_general_dilated(b["image"], p["kernel"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    pooled = x.mean(1) + jnp.tanh(conv).mean(1)
    out = jnp.tanh(pooled @ p["fused"][:4, 1:3]) + p["scalar"] * jnp.tanh(b["z"] @ p["outer"])[:, :2]
    return jnp.mean(out**2)


@functools.cache
def stack():
    """The per-example gradients, one at a time by `jax.grad`, in float64."""
    with jax.enable_x64(True):
        grad = jax.jit(jax.grad(loss))
        each = [grad(PARAMS, {k: v[b : b + 1] for k, v in BATCH.items()}) for b in range(B)]
        return jax.tree.map(lambda *g: np.stack([np.asarray(x) for x in g]), *each)


def compute(stats, mask=None, **options):
    with jax.enable_x64(True):
        step = lambda p, b, m: pg.grad_stats(loss, stats, **options)(p, b, mask=m)
        out = jax.jit(step, compiler_options=QUICK_TO_COMPILE)(PARAMS, BATCH, mask)
        return jax.tree.map(np.asarray, out)


def unbiased_square(g):
    """μ² without the noise: the mean of g_i g_j over all pairs of different examples."""
    n = len(g)
    return sum(g[i] * g[j] for i in range(n) for j in range(n) if i != j) / (n * (n - 1))


def signal_to_noise(g):
    noise = g.std(0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((g == 0).all(0), 0.0, np.abs(g.mean(0)) / noise)


def huber(g):
    return jnp.where(jnp.abs(g) < 0.01, 50 * g**2, jnp.abs(g) - 0.005)


COORDINATEWISE = {
    "mean": (pg.mean(), lambda g: g.mean(0)),
    "second_moment": (pg.second_moment(), lambda g: (g * g).mean(0)),
    **{f"moment({k})": (pg.moment(k), lambda g, k=k: (g**k).mean(0)) for k in (1, 2, 3, 4, 5)},
    "abs_mean": (pg.abs_mean(), lambda g: np.abs(g).mean(0)),
    "sign_mean": (pg.sign_mean(), lambda g: ((g > 0).astype(float) - (g < 0)).mean(0)),
    **{
        f"variance({d})": (pg.variance(d), lambda g, d=d: ((g - g.mean(0)) ** 2).sum(0) / (len(g) - d))
        for d in (0, 1, 2)
    },
    **{f"std({d})": (pg.std(d), lambda g, d=d: g.std(0, ddof=d)) for d in (0, 1, 2)},
    "mean_square": (pg.mean_square(), unbiased_square),
    "mean_square, biased": (pg.mean_square(unbiased=False), lambda g: g.mean(0) ** 2),
    "snr": (pg.snr(), signal_to_noise),
    "elementwise cos": (pg.elementwise(jnp.cos), lambda g: np.cos(g).mean(0)),
    "elementwise exp": (pg.elementwise(jnp.exp), lambda g: np.exp(g).mean(0)),
    "elementwise g > 0": (pg.elementwise(lambda g: g > 0), lambda g: (g > 0).mean(0)),
    "elementwise g >= 0": (pg.elementwise(lambda g: g >= 0), lambda g: (g >= 0).mean(0)),
    "elementwise counts": (pg.elementwise(lambda g: jnp.int32(100 * g)), lambda g: np.trunc(100 * g).mean(0)),
    "elementwise huber": (pg.elementwise(huber), lambda g: np.where(abs(g) < 0.01, 50 * g**2, abs(g) - 0.005).mean(0)),
    "elementwise log": (
        pg.elementwise(lambda g: jnp.log(jnp.abs(g) + 1e-8)),
        lambda g: np.log(np.abs(g) + 1e-8).mean(0),
    ),
}
SUBTRACTS = {"std(0)", "std(1)", "std(2)", "snr"}  # the root of a difference: half of the digits, near zero
COUNTS = {"elementwise g > 0", "elementwise g >= 0", "elementwise counts"}  # of φ's that are no floats: in float32
LOOSE = SUBTRACTS | COUNTS
MASKS = {
    "all": None,
    "some": np.array([True, False, True, True, False, True, True]),
    "three": np.array([False, True, False, False, True, False, True]),
}
OPTIONS = {
    "whole": {},
    "twin": {"impl": "vmap"},
    "parts of 1": {"microbatch_size": 1},
    "parts of 2": {"microbatch_size": 2},
    "parts of 3": {"microbatch_size": 3},
    "chunks": {"chunk_bytes": 200},
}


SERVED = pytest.mark.parametrize(
    "mask, options",
    [(m, o) for m in MASKS for o in OPTIONS if m == "some" or o in ("whole", "twin", "parts of 2")],
)


@functools.cache
def computed(mask, options):
    """All coordinatewise statistics of one call."""
    stats = {name: s for name, (s, _) in COORDINATEWISE.items()}
    return compute(stats, MASKS[mask], **OPTIONS[options])


def close(got, want, rtol=1e-9, atol=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


@SERVED
def test_coordinatewise(mask, options):
    """A statistic is not what its name says; or a part of the batch, a mask or a sparse rule loses something."""
    keep = slice(None) if MASKS[mask] is None else MASKS[mask]
    got = computed(mask, options)
    for name, (_, formula) in COORDINATEWISE.items():
        want = jax.tree.map(lambda g, f=formula: np.asarray(f(g[keep]), np.float64), stack())
        loose = name in LOOSE
        for leaf in PARAMS:
            a, b = got[name][leaf], want[leaf]
            if name == "snr":  # where the examples agree but for rounding, both are large or infinite
                agree = stack()[leaf][keep].std(0) < 1e-8 * np.abs(stack()[leaf]).max(initial=1e-300)
                a, b = np.where(agree & (b != 0), 0, a), np.where(agree & (b != 0), 0, b)
            # A float32 sum is rounded relative to its terms, which here are up to a hundred times a gradient.
            atol = 1e-6 if name in COUNTS else 1e-9 if loose else 1e-13
            np.testing.assert_allclose(a, b, rtol=1e-6 if loose else 1e-9, atol=atol, err_msg=f"{name} of {leaf}")


@SERVED
def test_per_example_numbers(mask, options):
    """Norms (of a leaf that is never formed), losses and stacks keep the order of the batch; masked ones are 0."""
    stats = {"all": pg.norms(), "leaf": pg.norms(per_leaf=True), "stack": pg.per_example(), "losses": pg.losses()}
    got = compute(stats, MASKS[mask], **OPTIONS[options])
    kept = np.ones(B, bool) if MASKS[mask] is None else MASKS[mask]
    g = jax.tree.map(lambda g: g * kept.reshape(-1, *[1] * (g.ndim - 1)), stack())
    leaf = jax.tree.map(lambda g: np.linalg.norm(g.reshape(B, -1), axis=1), g)
    close(got["stack"], g)
    close(got["leaf"], leaf, atol=1e-9)
    close(got["all"], np.linalg.norm(np.stack(jax.tree.leaves(leaf)), axis=0))
    with jax.enable_x64(True):
        losses = [loss(PARAMS, {k: v[b : b + 1] for k, v in BATCH.items()}) for b in range(B)]
    close(got["losses"], np.where(kept, losses, 0))


@pytest.mark.parametrize(
    "leaf, where", [("table", np.s_[7:]), ("fused", np.s_[4:]), ("fused", np.s_[:, 3:]), ("unused", np.s_[:])]
)
@SERVED
def test_what_no_example_touches(leaf, where, mask, options):
    """Rows that are not looked up, slices that are not used: every example counts there with φ(0)."""
    got = computed(mask, options)
    for name, at_zero in [
        ("mean", 0),
        ("second_moment", 0),
        ("snr", 0),
        ("elementwise cos", 1),
        ("elementwise exp", 1),
    ]:
        here = got[name][leaf][where]
        np.testing.assert_allclose(here, np.full_like(here, at_zero), rtol=1e-12, atol=0, err_msg=name)
    np.testing.assert_allclose(got["elementwise g >= 0"][leaf][where], 1, rtol=1e-6)
    np.testing.assert_allclose(got["elementwise log"][leaf][where], np.log(1e-8))


def test_a_phi_that_is_infinite_at_zero():
    """log 0 = −∞ in every coordinate that an example does not touch, as in the twin; not NaN from ∞ − ∞ or 0·∞."""
    stats = {"log": pg.elementwise(lambda g: jnp.log(jnp.abs(g))), "inverse": pg.elementwise(lambda g: 1 / g)}
    got, want = compute(stats), compute(stats, impl="vmap")
    close(got, want)
    assert (got["log"]["table"][7:] == -np.inf).all()
    assert (got["log"]["unused"] == -np.inf).all()


def test_a_complex_phi():
    """The characteristic function E exp(ig), which is 1 where nothing is touched."""
    phi = pg.elementwise(lambda g: jnp.exp(1j * 50 * g))
    got = compute(phi)
    close(got, jax.tree.map(lambda g: np.exp(1j * 50 * g).mean(0), stack()))


@pytest.mark.parametrize("options", ["whole", "chunks"])
@pytest.mark.parametrize("name", ["mean", "sign_mean", "variance(1)", "elementwise cos"])
def test_statistics_do_not_disturb_each_other(name, options):
    """What a statistic gives does not depend on which others are asked for with it (though the routes do)."""
    alone = compute(COORDINATEWISE[name][0], MASKS["some"], **OPTIONS[options])
    close(alone, computed("some", options)[name], atol=1e-13)


# ---------------------------------------------------------------------------------------- conventions


def of_numbers(stat, *gradients, **options):
    """A statistic of one parameter whose per-example gradients are given."""
    return float(pg.grad_stats(lambda w, x: (x * w).sum(), stat, **options)(1.0, jnp.array(gradients, jnp.float32)))


def test_snr_conventions():
    """No gradient: 0. All agree exactly: infinite. Opposite: 0. Never NaN from 0/0."""
    assert of_numbers(pg.snr(), 0.0, 0.0, 0.0) == 0
    assert of_numbers(pg.snr(), 2.0, 2.0, 2.0) == np.inf
    assert of_numbers(pg.snr(), -2.0, -2.0) == np.inf
    assert of_numbers(pg.snr(), 1.0, -1.0) == 0
    np.testing.assert_allclose(of_numbers(pg.snr(), 1.0, 2.0, 6.0), 3 / np.sqrt(7), rtol=1e-6)


def test_variance_is_never_negative():
    """E g² − (E g)² of equal numbers may round below zero, and its root would be NaN."""
    for value in (0.1, 1 / 3, 1e-3, 123.456, 1e6):
        assert 0 <= of_numbers(pg.variance(), *[value] * 7) <= 1e-6 * value**2
        assert 0 <= of_numbers(pg.std(), *[value] * 7) <= 1e-3 * value


def test_unbiased_mean_square_may_be_negative():
    """(n ḡ² − E g²)/(n − 1): for 1 and −1 it is −1. A clamp here would make its average biased."""
    assert of_numbers(pg.mean_square(), 1.0, -1.0) == -1
    assert of_numbers(pg.mean_square(unbiased=False), 1.0, -1.0) == 0


def test_unbiasedness():
    """Averaged over all pairs drawn from three examples, the unbiased estimates are the population's μ² and σ²."""
    values = [1.0, 4.0, -2.0]
    pairs = [(a, b) for a in values for b in values]
    square = np.mean([of_numbers(pg.mean_square(), *p) for p in pairs])
    variance = np.mean([of_numbers(pg.variance(ddof=1), *p) for p in pairs])
    np.testing.assert_allclose([square, variance], [np.mean(values) ** 2, np.var(values)], rtol=1e-6)


def test_sign_of_zero():
    """An example without a gradient has no vote, but counts in the mean."""
    assert of_numbers(pg.sign_mean(), 0.0, 0.0, 3.0, 5.0) == 0.5


def test_odd_moments_keep_their_sign():
    """φ of the factors of an outer product must not lose the sign of g³."""
    x = jnp.array([[1.0, -2.0], [-1.0, 3.0]])
    out = pg.grad_stats(lambda w, x: jnp.sum(jnp.tanh(x @ w) * jnp.array([1.0, -1.0])), pg.moment(3))(
        jnp.zeros((2, 2)), x
    )
    np.testing.assert_allclose(out, [[0.0, 0.0], [9.5, -9.5]], atol=1e-6)


def test_losses_are_those_of_the_examples():
    """And `value` is their mean over the examples that count."""
    step = pg.value_and_stats(lambda w, x: (x * w).sum(), pg.losses())
    value, out = step(2.0, jnp.array([1.0, 5.0, 3.0]), mask=jnp.array([True, False, True]))
    np.testing.assert_array_equal(out, [2.0, 0.0, 6.0])
    assert value == 4.0


def test_a_statistic_of_ones_own():
    """`coordinatewise` is all that a new additive statistic needs, in parts and with masks."""
    from pergrad.statistics import ABS, SQUARE, coordinatewise

    sparsity = coordinatewise("sparsity()", (ABS, SQUARE), lambda a, s, n: a * a / s + 0 * n)
    assert repr(sparsity) == "pg.sparsity()"
    mask = MASKS["some"]
    got = compute(sparsity, mask, microbatch_size=2)
    g = stack()["dense"][mask]
    np.testing.assert_allclose(got["dense"], np.abs(g).mean(0) ** 2 / (g**2).mean(0), rtol=1e-9)


# ---------------------------------------------------------------------------------------- many examples


def test_sums_of_many_examples_in_low_precision():
    """512 squares of equal size in bfloat16: an accumulator of bfloat16 would stop at 256."""
    x = np.ones((512, 4), jnp.bfloat16)
    w = np.zeros((4, 3), jnp.bfloat16)
    stats = [pg.second_moment(), pg.mean(), pg.elementwise(jnp.cos)]
    for options in ({}, {"microbatch_size": 64}, {"chunk_bytes": 1}):
        second, mean, cos = pg.grad_stats(lambda w, x: jnp.sum(x @ w), stats, **options)(w, x)
        np.testing.assert_allclose(second, np.ones((4, 3)), rtol=1e-6)
        np.testing.assert_allclose(mean, np.ones((4, 3)), rtol=1e-2)
        np.testing.assert_allclose(cos, np.full((4, 3), np.cos(1.0)), rtol=1e-5)
