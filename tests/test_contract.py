"""What `pg.value_and_stats` promises, whatever the model: arguments, types, masks, parts, transformations, devices."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg
from oracle import QUICK_TO_COMPILE

B = 8
BOTH = pytest.mark.parametrize("impl", ["surgery", "vmap"])
EVERY = {
    "mean": pg.mean(),
    "second": pg.second_moment(),
    "sign": pg.sign_mean(),
    "cos": pg.elementwise(jnp.cos),
    "norms": pg.norms(),
    "leaf_norms": pg.norms(per_leaf=True),
    "losses": pg.losses(),
    "per_example": pg.per_example(),
}


def arrays(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=s).astype(np.float32) for s in shapes]


def model(seed=0):
    """An embedding, a convolution over positions, a dense layer with a bias: every kind of hot leaf."""
    table, kernel, w, b = arrays((7, 4), (3, 4, 4), (4, 3), (3,), seed=seed)
    return {"table": table, "kernel": kernel, "w": w, "b": b}


def data(size=B, seed=1):
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(0, 7, (size, 6)).astype(np.int32),
        "y": random.normal(size=(size, 3)).astype(np.float32),
    }


def loss(p, batch):
    x = p["table"][batch["ids"]]
    x = jnp.tanh(jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
    out = jnp.tanh(x @ p["w"] + p["b"]).mean(1)
    return jnp.mean((out - batch["y"]) ** 2)


quick = functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)


def run(fn, stats, *args, mask=None, **options):
    """`pg.value_and_stats`, called under jit."""
    return quick(lambda args, mask: pg.value_and_stats(fn, stats, **options)(*args, mask=mask))(args, mask)


@functools.cache
def twin(size=B, seed=1, mask=None):
    """Every statistic of the model by the twin."""
    return run(loss, EVERY, model(), data(size, seed), mask=None if mask is None else np.array(mask), impl="vmap")


def one_by_one(fn, p, batch, size=B):
    """The gradients of single examples, each by plain `jax.grad`, and their losses."""
    gradient = quick(jax.value_and_grad(fn))
    each = [gradient(p, jax.tree.map(lambda x, b=b: x[b : b + 1], batch)) for b in range(size)]
    return np.stack([v for v, _ in each]), jax.tree.map(lambda *g: np.stack(g), *[g for _, g in each])


def close(got, want, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol), got, want)


def shapes(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def by_hand(stack, losses):
    """Every statistic of `EVERY` in NumPy."""
    over = lambda fn: jax.tree.map(fn, stack)
    squares = over(lambda g: (g.reshape(len(g), -1).astype(np.float64) ** 2).sum(1))
    return {
        "mean": over(lambda g: g.mean(0)),
        "second": over(lambda g: (g**2).mean(0)),
        "sign": over(lambda g: np.sign(g).mean(0)),
        "cos": over(lambda g: np.cos(g).mean(0)),
        "norms": np.sqrt(sum(jax.tree.leaves(squares))),
        "leaf_norms": jax.tree.map(np.sqrt, squares),
        "losses": losses,
        "per_example": stack,
    }


# ---------------------------------------------------------------------------------------- value and definition


@pytest.mark.parametrize("impl", ["auto", "surgery", "vmap"])
def test_definition(impl):
    """The statistics are those of gradients taken one example at a time by `jax.grad`, and the value is their mean loss."""
    losses, stack = one_by_one(loss, model(), data())
    value, out = quick(pg.value_and_stats(loss, EVERY, impl=impl))(model(), data())
    np.testing.assert_allclose(value, losses.mean(), rtol=1e-6)
    close(out, by_hand(stack, losses))


@BOTH
def test_mean_is_the_gradient_of_the_batch_loss(impl):
    """A hidden scaling, by the batch size or by 1/2, would show here."""
    value, out = pg.value_and_stats(loss, pg.mean(), impl=impl)(model(), data())
    want = jax.value_and_grad(loss)(model(), data())
    close((value, out), want)


def test_without_jit():
    """Eager calls work, and agree with jitted ones."""
    close(pg.value_and_stats(loss, EVERY)(model(), data()), twin())


def test_auto_is_surgery():
    """`impl="auto"` must not fall back to the slow way."""
    text = lambda impl: str(jax.make_jaxpr(pg.value_and_stats(loss, pg.second_moment(), impl=impl))(model(), data()))
    assert text("auto") == text("surgery") != text("vmap")


def test_called_twice_with_other_shapes():
    """Nothing of the first call (its batch size, its mask) is kept for the second."""
    step = quick(pg.value_and_stats(loss, EVERY))
    for size in (8, 3, 1, 8):
        losses, stack = one_by_one(loss, model(), data(size), size)
        close(step(model(), data(size))[1], by_hand(stack, losses))


@BOTH
def test_grad_stats(impl):
    """The same without the value; with aux, (statistics, aux), as `jax.grad` has it."""
    want = twin()[1]
    close(quick(pg.grad_stats(loss, EVERY, impl=impl))(model(), data()), want)
    with_aux = lambda p, b: (loss(p, b), {"ids": b["ids"]})
    out, aux = quick(pg.grad_stats(with_aux, EVERY, has_aux=True, impl=impl))(model(), data(), mask=np.ones(B, bool))
    close(out, want)
    np.testing.assert_array_equal(aux["ids"][:, 0], data()["ids"])


# ---------------------------------------------------------------------------------------- trees and types


@dataclasses.dataclass
class Wanted:
    first: typing.Any
    second: typing.Any


jax.tree_util.register_dataclass(Wanted, ["first", "second"], [])


class Named(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


@pytest.mark.parametrize(
    "stats",
    [
        pg.mean(),
        (pg.mean(), pg.losses()),
        [pg.mean(), [pg.norms(), None]],
        {"a": {"b": (pg.mean(), pg.std())}, "c": pg.losses()},
        Wanted(pg.mean(), {"x": pg.sign_mean()}),
        Named(pg.mean(), pg.norms(per_leaf=True)),
        {},
        None,
        (),
    ],
    ids=["single", "tuple", "list", "nested", "dataclass", "named", "no-dict", "none", "no-tuple"],
)
@BOTH
def test_output_has_the_tree_of_the_statistics(stats, impl):
    """Results stand where their statistics stood, in any container."""
    is_statistic = lambda s: hasattr(s, "reductions")
    value, out = pg.value_and_stats(loss, stats, impl=impl)(model(), data())
    assert np.shape(value) == ()
    single = lambda s: pg.value_and_stats(loss, s, impl="vmap")(model(), data())[1]
    close(out, jax.tree.map(single, stats, is_leaf=is_statistic))


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_are_float32_or_wider(impl, dtype):
    """A sum of squares in bfloat16 would stop growing after 256 examples."""
    cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype) if x.dtype == np.float32 else x)
    value, out = run(loss, EVERY, cast(model()), cast(data()), impl=impl)
    assert {x.dtype for x in jax.tree.leaves(out)} <= {np.dtype(np.float32), np.dtype(dtype)}
    tree_like = {k: out[k] for k in ("mean", "second", "sign", "cos")}
    for name, leaf in tree_like.items():
        assert shapes(leaf) == jax.tree.map(lambda x: (x.shape, np.dtype(np.float32)), model()), name
    assert value.dtype in (np.float32, np.dtype(dtype))


@BOTH
def test_float64_stays_float64(impl):
    """With 64 bits, results have 64 bits, and ten digits of them are right."""
    with jax.enable_x64(True):
        wide = functools.partial(jax.tree.map, lambda x: x.astype(np.float64) if x.dtype == np.float32 else x)
        p, batch = wide(model()), wide(data())
        losses, stack = one_by_one(loss, p, batch)
        value, out = run(loss, EVERY, p, batch, impl=impl)
        assert {x.dtype for x in jax.tree.leaves((value, out))} == {np.dtype(np.float64)}
        close(out, by_hand(stack, losses), rtol=1e-10, atol=1e-12)


@BOTH
def test_mixed_types_keep_to_themselves(impl):
    """A float64 leaf does not widen its float32 neighbour, and is not narrowed by it."""
    with jax.enable_x64(True):
        p = {"a": np.ones((3, 2), np.float32), "b": np.ones(2, np.float64)}
        fn = lambda p, x: jnp.mean(jnp.tanh(x @ p["a"] + p["b"]) ** 2)
        _, out = pg.value_and_stats(fn, pg.second_moment(), impl=impl)(p, arrays((4, 3))[0])
        assert (out["a"].dtype, out["b"].dtype) == (np.float32, np.float64)


def test_small_float16_gradients_have_squares():
    """1e-4 squared is 0 in float16: φ must be taken in float32, on the factors too."""
    w, x = np.zeros((3, 2), np.float16), np.full((4, 3), 1e-2, np.float16)
    fn = lambda w, x: jnp.sum(x @ w) * np.float16(1e-2)
    out = pg.grad_stats(fn, pg.second_moment())(w, x)
    np.testing.assert_allclose(out, np.full((3, 2), 1e-8), rtol=1e-2)


@BOTH
def test_argnums(impl):
    """An index gives that argument's tree, a tuple a tuple of trees, also of one; negative ones count from the end."""
    p, v = {"w": arrays((3, 4))[0]}, arrays((4,))[0]
    x = arrays((B, 3), seed=2)[0]
    fn = lambda p, x, v: jnp.mean(jnp.tanh(x @ p["w"]) @ v)
    step = lambda argnums: pg.grad_stats(fn, pg.second_moment(), argnums, impl=impl)(p, x, v)
    both = step((0, 2))
    assert isinstance(both, tuple)
    close(step(0), both[0])
    close(step(2), both[1])
    close(step(-1), both[1])
    close(step((2,)), (both[1],))
    close(step((2, 0)), both[::-1])


@BOTH
def test_aux_is_stacked(impl):
    """Aux of every example on a new leading axis, whatever its type, also of constants; `value` is the pair."""

    def with_aux(p, b):
        return loss(p, b), {"ids": b["ids"], "n": 3, "hit": b["y"] > 0, "none": None, "total": jnp.sum(p["w"])}

    step = pg.value_and_stats(with_aux, pg.mean(), has_aux=True, impl=impl)
    (value, aux), out = step(model(), data())
    want, plain = pg.value_and_stats(loss, pg.mean())(model(), data())
    close((value, out), (want, plain))
    assert shapes(aux) == {
        "ids": ((B, 1, 6), np.dtype(np.int32)),
        "n": ((B,), np.dtype(np.int32)),
        "hit": ((B, 1, 3), np.dtype(bool)),
        "none": None,
        "total": ((B,), np.dtype(np.float32)),
    }
    np.testing.assert_array_equal(aux["ids"][:, 0], data()["ids"])
    (_, parts), _ = pg.value_and_stats(with_aux, pg.mean(), has_aux=True, impl=impl, microbatch_size=3)(model(), data())
    close(parts, aux)


@BOTH
def test_several_batch_arguments(impl):
    """Inputs and targets in two arguments, with another in between that is not split."""
    fn = lambda p, ids, scale, y: scale * loss(p, {"ids": ids, "y": y})
    batch = data()
    got = run(fn, EVERY, model(), batch["ids"], 2.0, batch["y"], batch_argnums=(1, 3), impl=impl)
    want = run(lambda p, b: 2 * loss(p, b), EVERY, model(), batch)
    close(got, want)


@BOTH
def test_bare_examples(impl):
    """keep_batch_dim=False: the loss sees no axis of examples."""

    def bare(p, b):
        assert b["ids"].shape == (6,)
        assert b["y"].shape == (3,)
        return loss(p, jax.tree.map(lambda x: x[None], b))

    close(run(bare, EVERY, model(), data(), keep_batch_dim=False, impl=impl), twin())


@BOTH
def test_the_loss_sees_a_batch_of_one(impl):
    """keep_batch_dim=True: a leading axis of one, on every leaf of the batch."""
    seen = []

    def watched(p, b):
        seen.append(jax.tree.map(jnp.shape, b))
        return loss(p, b)

    pg.value_and_stats(watched, pg.mean(), impl=impl)(model(), data())
    assert seen
    assert all(s == {"ids": (1, 6), "y": (1, 3)} for s in seen)


@BOTH
def test_further_arguments(impl):
    """Positional ones that are neither parameters nor batch, and keywords, of any kind, reach the loss untouched."""

    def fn(p, b, extra, *, activation, scale, table):
        assert extra["name"] == "x"
        return scale * extra["c"].sum() * jnp.mean(activation(jnp.asarray(table)[b["ids"]] @ p["kernel"][0]))

    extra = {"name": "x", "c": np.ones(B, np.float32)}  # of the batch's size, but not split
    options = {"activation": jnp.tanh, "scale": 2.0, "table": model()["table"]}
    got = pg.value_and_stats(fn, EVERY, impl=impl)(model(), data(), extra, **options)
    want = run(lambda p, b: fn(p, b, extra, **options), EVERY, model(), data(), impl="vmap")
    close(got, want)


# ---------------------------------------------------------------------------------------- random keys

KEYS = pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["new", "raw"])


def dropped(p, b, key):
    keep = jax.random.bernoulli(key, 0.5, (1, 7))
    x = b["x"] if isinstance(b, dict) else b
    return jnp.mean(jnp.where(keep, jnp.tanh(x @ p), 0.0)), keep


@KEYS
@BOTH
def test_each_example_has_its_own_key(key, impl):
    """One dropout mask for the whole batch would make the statistics of noise wrong (see also the twin below)."""
    w, x = arrays((3, 7), (B, 3))
    step = pg.value_and_stats(dropped, EVERY, has_aux=True, prng_argnums=2, impl=impl)
    (_, keep), _ = step(w, x, key)
    assert len({tuple(k) for k in np.asarray(keep).reshape(B, 7).tolist()}) > B // 2
    (_, again), _ = step(w, x, key)
    np.testing.assert_array_equal(keep, again)
    (_, other), _ = step(w, x, jax.random.fold_in(key, 1))
    assert (np.asarray(keep) != np.asarray(other)).any()


@KEYS
def test_both_ways_draw_the_same(key):
    """Surgery and twin split the key alike."""
    w, x = arrays((3, 7), (B, 3))
    one, other = (
        pg.value_and_stats(dropped, EVERY, has_aux=True, prng_argnums=2, impl=impl)(w, x, key)
        for impl in ("surgery", "vmap")
    )
    close(one, other)


@KEYS
@pytest.mark.parametrize("size", [1, 3, 4])
def test_keys_do_not_depend_on_microbatches(key, size):
    """The same randomness in parts as in one piece."""
    w, x = arrays((3, 7), (B, 3))
    whole, parts = (
        pg.value_and_stats(dropped, EVERY, has_aux=True, prng_argnums=2, microbatch_size=m)(w, x, key)
        for m in (None, size)
    )
    close(parts, whole)


def test_several_keys():
    """A tuple of keys; two keys of the same value still draw the same, per example."""
    w, x = arrays((3, 7), (B, 3))

    def fn(w, x, a, b):
        return jnp.mean(jnp.tanh(x @ w)), (jax.random.uniform(a), jax.random.uniform(b))

    key = jax.random.key(1)
    (_, (a, b)), _ = pg.value_and_stats(fn, pg.mean(), has_aux=True, prng_argnums=(2, 3))(w, x, key, key)
    np.testing.assert_array_equal(a, b)
    assert len(set(a.tolist())) == B


def test_an_undeclared_key_is_shared():
    """Without prng_argnums the key is a constant of the loss: one mask for all, as `jax.vmap` has it."""
    w, x = arrays((3, 7), (B, 3))
    (_, keep), _ = pg.value_and_stats(dropped, pg.mean(), has_aux=True)(w, x, jax.random.key(0))
    assert (np.asarray(keep) == np.asarray(keep)[:1]).all()


def test_keys_as_part_of_the_batch():
    """One key per example that the user split: what the error about stacked keys recommends."""
    w, x = arrays((3, 7), (B, 3))
    key = jax.random.key(5)
    split = pg.value_and_stats(dropped, pg.mean(), has_aux=True, prng_argnums=2)(w, x, key)
    bare = lambda w, b: dropped(w, b["x"][None], b["key"])
    batch = {"x": x, "key": jax.random.split(key, B)}
    close(pg.value_and_stats(bare, pg.mean(), has_aux=True, keep_batch_dim=False)(w, batch), split)


# ---------------------------------------------------------------------------------------- parts and masks


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("mask", [None, (True, False, True, True, False, True, True, False)], ids=["all", "masked"])
def test_microbatches(size, mask):
    """In parts (that divide the batch, or do not, or are larger) as in one piece."""
    given = None if mask is None else np.array(mask)
    close(run(loss, EVERY, model(), data(), mask=given, microbatch_size=size), twin(mask=mask))


def test_microbatches_of_the_twin():
    """The twin takes parts too, and they change nothing."""
    close(run(loss, EVERY, model(), data(), microbatch_size=3, impl="vmap"), twin())


@pytest.mark.parametrize("size, chunk_bytes", [(5, 1), (7, 100), (5, 300), (8, 300), (7, 1 << 20)])
def test_chunks(size, chunk_bytes):
    """Whatever memory there is for chunks, the same numbers (a chunk that does not divide the batch has a tail)."""
    close(run(loss, EVERY, model(), data(size), chunk_bytes=chunk_bytes), twin(size))


MASKS = {
    "some": [True, False, True, True, False, True, True, True],
    "one": [False] * 5 + [True, False, False],
    "all": [True] * 8,
    "integers": [1, 0, 2, 0, 0, 1, 1, 1],
}


SERVED = pytest.mark.parametrize(
    "options",
    [{}, {"microbatch_size": 3}, {"chunk_bytes": 100}, {"impl": "vmap"}],
    ids=["whole", "parts", "chunks", "twin"],
)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@SERVED
def test_mask(mask, options):
    """A masked example counts nowhere: the statistics are those of the others; per-example results keep their place, 0."""
    keep = np.flatnonzero(mask)
    value, out = run(loss, EVERY, model(), data(), mask=np.array(mask), **options)
    losses, stack = one_by_one(loss, model(), jax.tree.map(lambda x: x[keep], data()), len(keep))
    want = by_hand(stack, losses)
    np.testing.assert_allclose(value, losses.mean(), rtol=1e-5)
    for name in ("norms", "leaf_norms", "losses", "per_example"):
        for leaf in jax.tree.leaves(out[name]):
            assert (np.asarray(leaf)[~np.array(mask, bool)] == 0).all()
        out[name] = jax.tree.map(lambda x: x[keep], out[name])
    close(out, want)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@SERVED
def test_masked_examples_may_hold_anything(bad, options):
    """Padding of NaN or infinity does not reach the results: 0·NaN is NaN, so a mask must select, not multiply."""
    mask = np.array(MASKS["some"])
    batch = data()
    batch["y"][~mask] = bad
    got = run(loss, EVERY, model(), batch, mask=mask, **options)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    close(got, twin(mask=tuple(MASKS["some"])))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options", [{}, {"microbatch_size": 3}, {"chunk_bytes": 100}], ids=["whole", "parts", "chunks"]
)
def test_nan_shows_up_as_in_the_twin(bad, options):
    """One bad example spoils what the twin says it spoils, and its norm tells which it was."""
    batch = data()
    batch["y"][5, 1] = bad
    got, want = (run(loss, EVERY, model(), batch, **o) for o in (options, {"impl": "vmap"}))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.isnan(a), np.isnan(b)), got, want)
    close(got, want)
    assert np.flatnonzero(~np.isfinite(got[1]["norms"])).tolist() == [5]


def test_nan_in_one_row_of_an_embedding_stays_in_that_row():
    """NaN in a lookup's gradient must not spread over the table by sums of rows."""
    table = arrays((7, 4))[0]
    batch = {
        "ids": np.array([[0, 1, 1], [2, 1, 2], [4, 4, 5]], np.int32),
        "s": np.array([1.0, np.nan, 1.0], np.float32),
    }
    fn = lambda t, b: jnp.sum(jnp.sin(t[b["ids"]])) * b["s"].sum()
    got, want = (run(fn, EVERY, table, batch, impl=i)[1] for i in ("surgery", "vmap"))
    assert np.isnan(got["second"]).any(1).tolist() == [False, True, True, False, False, False, False]
    close(got, want)


# ---------------------------------------------------------------------------------------- transformations


def test_in_a_training_loop_under_scan():
    """Parameters change from step to step, inside `lax.scan`, as outside of it."""
    step = pg.value_and_stats(loss, {"g": pg.mean(), "s": pg.second_moment()})
    batches = jax.tree.map(lambda *x: np.stack(x), *[data(seed=s) for s in range(4)])

    def train(p, batch):
        value, s = step(p, batch)
        new = jax.tree.map(lambda w, g, s: w - 0.1 * g / (jnp.sqrt(s) + 1e-3), p, s["g"], s["s"])
        return new, value

    p, values = quick(lambda p: jax.lax.scan(train, p, batches))(model())
    want, wanted = model(), []
    for k in range(4):
        want, value = train(want, jax.tree.map(lambda x, k=k: x[k], batches))
        wanted.append(value)
    close(p, want, rtol=1e-4, atol=1e-5)
    close(values, np.stack(wanted), rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"chunk_bytes": 100}, {"microbatch_size": 3}], ids=["whole", "chunks", "parts"]
)
def test_under_vmap_over_parameters(options):
    """An ensemble of seeds: an outer vmap must not mix with the one over examples."""
    models = jax.tree.map(lambda *x: np.stack(x), *[model(s) for s in range(3)])
    got = quick(jax.vmap(pg.value_and_stats(loss, EVERY, **options), (0, None)))(models, data())
    want = [run(loss, EVERY, model(s), data(), impl="vmap") for s in range(3)]
    close(got, jax.tree.map(lambda *x: np.stack(x), *want))


def test_under_vmap_over_parameters_and_batches():
    """Each model its own batch and its own mask."""
    models = jax.tree.map(lambda *x: np.stack(x), *[model(s) for s in range(3)])
    batches = jax.tree.map(lambda *x: np.stack(x), *[data(seed=s) for s in range(3)])
    masks = np.array([MASKS["some"], MASKS["one"], MASKS["all"]])
    step = lambda p, b, m: pg.value_and_stats(loss, EVERY)(p, b, mask=m)
    got = quick(jax.vmap(step))(models, batches, masks)
    want = [run(loss, EVERY, model(s), data(seed=s), mask=masks[s], impl="vmap") for s in range(3)]
    close(got, jax.tree.map(lambda *x: np.stack(x), *want))


def test_the_gradient_of_a_function_of_statistics():
    """The statistics can be differentiated (a gradient-noise penalty), by the twin at least."""
    penalty = lambda p, impl: sum(
        x.sum() for x in jax.tree.leaves(pg.grad_stats(loss, pg.variance(), impl=impl)(p, data()))
    )
    got, want = (quick(jax.grad(functools.partial(penalty, impl=impl)))(model()) for impl in ("surgery", "vmap"))
    close(got, want, rtol=1e-4, atol=1e-5)


def test_as_part_of_a_larger_function():
    """Statistics of an inner loss whose parameters are computed (a hypernetwork's output) under jit."""
    z = arrays((3,))[0]
    make = lambda z: jax.tree.map(lambda w: w * jnp.sin(z).sum(), model())
    got, want = (
        quick(lambda z, impl=impl: pg.value_and_stats(loss, EVERY, impl=impl)(make(z), data()))(z)
        for impl in ("surgery", "vmap")
    )
    close(got, want)


def test_under_checkpoint_and_cond():
    """Inside `jax.checkpoint` and behind `lax.cond`, as users' train steps have it."""
    step, want = pg.value_and_stats(loss, EVERY), twin()
    close(quick(jax.checkpoint(step))(model(), data()), want)
    zeros = lambda p, b: jax.tree.map(jnp.zeros_like, want)
    close(quick(lambda flag: jax.lax.cond(flag, step, zeros, model(), data()))(True), want)


def test_shapes_are_known_without_running():
    """`jax.eval_shape` of the step, and lowering from ShapeDtypeStructs, as checkpointing libraries do."""
    step = pg.value_and_stats(loss, EVERY)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model(), data()))
    want = twin()
    assert shapes(jax.eval_shape(step, *structs)) == shapes(want)
    close(quick(step).lower(*structs).compile()(model(), data()), want)


def test_donated_parameters():
    """A train step that gives its parameters away."""
    step = pg.value_and_stats(loss, pg.mean())

    @functools.partial(quick, donate_argnums=0)
    def train(p, batch):
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, step(p, batch)[1])

    given = jax.tree.map(jnp.array, model())
    out = train(given, data())
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    want = jax.tree.map(lambda w, g: w - 0.1 * g, model(), jax.grad(loss)(model(), data()))
    close(out, want)


def test_the_step_is_compiled_once():
    """A second call of a jitted step traces nothing."""
    count = 0

    def counted(p, b):
        nonlocal count
        count += 1
        return loss(p, b)

    step = quick(pg.value_and_stats(counted, pg.mean()))
    step(model(), data())
    before = count
    step(model(1), data(seed=5))
    assert count == before


# ---------------------------------------------------------------------------------------- devices


@pytest.fixture(scope="module")
def devices():
    found = jax.devices("cpu")
    assert len(found) == 8, "tests/conftest.py asks for eight virtual devices before jax starts"
    return np.array(found)


def test_shard_map(devices):
    """Every device has one shard of the batch: sums and counts of the shards add up to the whole (as in the guide)."""
    mesh = Mesh(devices[:4], "d")
    batch = data(16)
    stats = {"g": pg.mean(), "s": pg.second_moment(), "n": pg.norms()}

    @quick
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), {"g": P(), "s": P(), "n": P("d")})
    )
    def step(p, batch):
        p = jax.tree.map(lambda w: jax.lax.pcast(w, "d", to="varying"), p)
        value, out = pg.value_and_stats(loss, stats)(p, batch)
        over = lambda x: jax.tree.map(lambda a: jax.lax.pmean(a, "d"), x)
        return over(value), {"g": over(out["g"]), "s": over(out["s"]), "n": out["n"]}

    close(step(model(), batch), run(loss, stats, model(), batch))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"chunk_bytes": 100}, {"microbatch_size": 3}], ids=["whole", "chunks", "parts"]
)
def test_shard_map_of_replicated_parameters(devices, check_vma, options):
    """Without any cast of the parameters: each shard's own statistics, none of them summed over devices behind one's back.

    With `check_vma` the derivative of replicated parameters is summed over devices by JAX itself, unless they are cast.
    """
    mesh = Mesh(devices, "d")
    batch = data(32)
    stats = {"s": pg.second_moment(), "cos": pg.elementwise(jnp.cos), "n": pg.norms()}

    def shard(p, batch):
        if check_vma:
            p = jax.tree.map(lambda w: jax.lax.pcast(w, "d", to="varying"), p)
        value, out = pg.value_and_stats(loss, stats, **options)(p, batch)
        return jax.tree.map(lambda x: x[None], (value, out))

    step = quick(jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=check_vma))
    got = step(model(), batch)
    alone = quick(pg.value_and_stats(loss, stats, impl="vmap"))
    for k in range(8):
        part = jax.tree.map(lambda x, k=k: x[4 * k : 4 * k + 4], batch)
        want = alone(model(), part)
        close(jax.tree.map(lambda x, k=k: np.asarray(x)[k], got), want)


@pytest.mark.parametrize(
    "options", [{}, {"chunk_bytes": 100}, {"microbatch_size": 8}], ids=["whole", "chunks", "parts"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_batch_sharded_under_jit(devices, options, masked):
    """Arrays sharded over eight devices give what arrays on one device give."""
    mesh = Mesh(devices, "d")
    mask = np.arange(16) % 3 != 1 if masked else None
    step = pg.value_and_stats(loss, EVERY, **options)
    want = run(loss, EVERY, model(), data(16), mask=mask)
    put = lambda tree, spec: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)
    got = quick(step)(put(model(), P()), put(data(16), P("d")), mask=put(mask, P("d")))
    assert len(jax.tree.leaves(put(data(16), P("d")))[0].sharding.device_set) == 8
    close(got, want)


def test_parameters_sharded_under_jit(devices):
    """Tensor parallelism: parameters split over a second axis of the mesh; means stay as large as the parameters."""
    mesh = Mesh(devices.reshape(2, 4), ("d", "m"))
    w, v, b = arrays((4, 8), (8, 4), (8,))
    p = {"w": w, "v": v, "b": b}
    x = arrays((16, 4), seed=3)[0]
    fn = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]) ** 2)
    where = {"w": P(None, "m"), "v": P("m", None), "b": P("m")}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    step = pg.value_and_stats(fn, EVERY)
    got = quick(step)({k: put(p[k], where[k]) for k in p}, put(x, P("d")))
    close(got, quick(step)(p, x))


# ---------------------------------------------------------------------------------------- one pass


def count(jaxpr, name):
    """How often a primitive occurs in a jaxpr and in all jaxprs inside it."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            total += count(inner, name) if hasattr(inner, "eqns") else 0
    return total


def test_statistics_share_one_pass():
    """More statistics do not run the model again: the same number of contractions serves variance as its two moments."""

    def dots(stats):
        fn = lambda p, x: jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
        p = dict(zip("ab", arrays((3, 4), (4, 2))))
        return count(jax.make_jaxpr(pg.value_and_stats(fn, stats))(p, arrays((B, 5, 3))[0]).jaxpr, "dot_general")

    few = dots([pg.mean(), pg.second_moment()])
    assert dots([pg.mean(), pg.second_moment(), pg.variance(), pg.std(), pg.snr(), pg.mean_square()]) == few
    assert dots({"a": pg.mean(), "b": [pg.mean(), pg.mean()]}) == dots(pg.mean())
    assert dots([pg.mean(), pg.second_moment(), pg.abs_mean(), pg.elementwise(jnp.cos)]) == few


def test_the_plain_gradient_costs_what_it_costs():
    """The mean alone needs exactly the contractions of `jax.grad`."""
    fn = lambda p, x: jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
    p = dict(zip("ab", arrays((3, 4), (4, 2))))
    x = arrays((B, 5, 3))[0]
    ours = count(jax.make_jaxpr(pg.value_and_stats(fn, pg.mean()))(p, x).jaxpr, "dot_general")
    assert ours == count(jax.make_jaxpr(jax.value_and_grad(fn))(p, x).jaxpr, "dot_general") == 5


def test_losses_alone_take_no_gradient():
    """No reductions, no backward pass."""
    fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = arrays((3, 4), (B, 3))
    jaxpr = jax.make_jaxpr(pg.value_and_stats(fn, pg.losses()))(w, x).jaxpr
    assert count(jaxpr, "dot_general") == 1


# ---------------------------------------------------------------------------------------- unusual leaves


@BOTH
def test_unused_parameters_are_zero(impl):
    """Zeros, of which φ is taken: E cos 0 = 1."""
    p = {"w": arrays((3, 2))[0], "unused": np.ones((4, 5), np.float32), "n": np.float32(3)}
    fn = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]))
    _, out = pg.value_and_stats(fn, EVERY, impl=impl)(p, arrays((B, 3))[0])
    for name, want in [("mean", 0), ("second", 0), ("sign", 0), ("cos", 1)]:
        np.testing.assert_array_equal(out[name]["unused"], np.full((4, 5), want, np.float32))
        np.testing.assert_array_equal(out[name]["n"], want)
    np.testing.assert_array_equal(out["leaf_norms"]["unused"], np.zeros(B))
    np.testing.assert_array_equal(out["per_example"]["unused"], np.zeros((B, 4, 5)))


@pytest.mark.parametrize("mask", [None, np.arange(B) > 2], ids=["all", "masked"])
@BOTH
def test_no_parameter_is_used(impl, mask):
    """A loss that does not depend on its parameters, or not on its batch."""
    w, x = arrays((3, 2), (B, 3))
    for fn in (lambda w, x: jnp.mean(x), lambda w, x: jnp.float32(2.5), lambda w, x: jnp.sum(jnp.sin(w))):
        close(run(fn, EVERY, w, x, mask=mask, impl=impl), run(fn, EVERY, w, x, mask=mask, impl="vmap"))


@BOTH
def test_empty_and_scalar_leaves(impl):
    """Arrays without elements and numbers among the parameters and in the batch."""
    p = {
        "empty": np.zeros((0, 3), np.float32),
        "none": np.zeros((2, 0), np.float32),
        "s": np.float32(0.7),
        "w": arrays((3, 2))[0],
    }
    batch = {"x": arrays((B, 3))[0], "e": np.zeros((B, 0), np.float32), "s": arrays((B,))[0]}

    def fn(p, b):
        h = p["s"] * jnp.tanh(b["x"] @ p["w"] + b["e"] @ p["empty"][:, :2]) + jnp.sum(p["none"])
        return jnp.mean(h**2) * jnp.sum(b["s"])

    losses, stack = one_by_one(fn, p, batch)
    close(run(fn, EVERY, p, batch, impl=impl)[1], by_hand(stack, losses))


@BOTH
def test_python_numbers_as_parameters(impl):
    """A float in the tree (a learning rate, a temperature) is a weakly typed parameter."""
    p = {"t": 0.5, "w": arrays((3, 2))[0]}
    fn = lambda p, x: jnp.mean(jnp.tanh(p["t"] * x @ p["w"]))
    value, out = pg.value_and_stats(fn, EVERY, impl=impl)(p, arrays((B, 3))[0])
    losses, stack = one_by_one(fn, p, arrays((B, 3))[0])
    close(out, by_hand(stack, losses))
    assert out["mean"]["t"].dtype == np.float32


@BOTH
def test_complex_parameters(impl):
    """g as `jax.grad` has it, squares as |g|², norms of all of it."""
    re, im, x = arrays((3, 2), (3, 2), (B, 3))
    w = (re + 1j * im).astype(np.complex64)
    fn = lambda w, x: jnp.mean(jnp.abs(jnp.sin(x @ w)) ** 2)
    stack = np.stack([jax.grad(fn)(w, x[b : b + 1]) for b in range(B)])
    stats = [pg.mean(), pg.second_moment(), pg.norms(), pg.per_example(), pg.variance()]
    _, (mean, second, norms, each, variance) = pg.value_and_stats(fn, stats, impl=impl)(w, x)
    close(mean, stack.mean(0), rtol=1e-4, atol=1e-5)
    close(second, (np.abs(stack) ** 2).mean(0), rtol=1e-4, atol=1e-5)
    close(variance, stack.var(0), rtol=1e-4, atol=1e-4)
    close(norms, np.linalg.norm(stack.reshape(B, -1), axis=1), rtol=1e-4)
    close(each, stack, rtol=1e-4, atol=1e-5)


@BOTH
def test_integers_and_booleans_in_the_batch(impl):
    """Leaves of the batch without a gradient, of every size."""
    batch = {
        "i8": np.arange(B, dtype=np.int8),
        "u": np.arange(3 * B, dtype=np.uint32).reshape(B, 3) % 3,
        "b": np.arange(B) % 2 == 0,
        "empty": np.zeros((B, 0), np.int32),
        "x": arrays((B, 3))[0],
    }
    fn = lambda w, b: (
        jnp.where(b["b"][0], 1.0, 2.0) * jnp.mean(jnp.tanh(b["x"] @ w)[:, b["u"]]) + b["i8"].sum() * w.sum()
    )
    w = arrays((3, 4))[0]
    losses, stack = one_by_one(fn, w, batch)
    close(run(fn, EVERY, w, batch, impl=impl)[1], by_hand(stack, losses), atol=1e-5)


def test_numpy_and_jax_arrays_are_alike():
    """Also lists of arrays, and a batch that lives on the device."""
    on_device = jax.tree.map(jnp.asarray, (model(), data()))
    close(quick(pg.value_and_stats(loss, EVERY))(*on_device), twin())


def test_the_batch_may_be_of_one():
    """B = 1 has a mean and a variance (0)."""
    losses, stack = one_by_one(loss, model(), data(1), 1)
    close(run(loss, EVERY, model(), data(1))[1], by_hand(stack, losses))
    _, variance = run(loss, pg.variance(), model(), data(1))
    assert all(np.abs(v).max() < 1e-6 for v in jax.tree.leaves(variance))


# ---------------------------------------------------------------------------------------- models of libraries


def test_a_flax_model_and_its_state():
    """Results have the tree of `variables["params"]`, so that `apply` and optax take them."""
    nn = pytest.importorskip("flax.linen")
    net = nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(2)])
    x = arrays((B, 3))[0]
    params = net.init(jax.random.key(0), x)["params"]
    fn = lambda p, x: jnp.mean(net.apply({"params": p}, x) ** 2)
    value, out = pg.value_and_stats(fn, pg.mean())(params, x)
    close((value, out), jax.value_and_grad(fn)(params, x))
    net.apply({"params": out}, x)


def test_an_equinox_model():
    """Results are models: the partitioned module's tree, with which `eqx.combine` works."""
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    fn = lambda p, x: jnp.mean(eqx.combine(p, static)(x) ** 2)
    x = arrays((B, 3))[0]
    _, out = pg.value_and_stats(fn, pg.mean(), keep_batch_dim=False)(params, x)
    assert isinstance(out, eqx.nn.MLP)
    close(out, jax.grad(lambda p: jnp.mean(jax.vmap(fn, (None, 0))(p, x)))(params))
    assert eqx.combine(out, static)(x[0]).shape == (2,)


def test_an_nnx_model():
    """The parameters are an nnx.State, and so are the results."""
    nnx = pytest.importorskip("flax.nnx")
    graph, params = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    fn = lambda p, x: jnp.mean(nnx.merge(graph, p)(x) ** 2)
    x = arrays((B, 3))[0]
    _, out = pg.value_and_stats(fn, pg.mean())(params, x)
    assert isinstance(out, nnx.State)
    close(out, jax.grad(fn)(params, x))


def test_with_optax():
    """A train step of optax on the mean: the loss goes down as with the plain gradient."""
    import optax

    optimizer = optax.adam(1e-2)
    step = pg.value_and_stats(loss, {"mean": pg.mean()})

    def train(get):
        p = model()
        state = optimizer.init(p)
        for seed in range(3):
            updates, state = optimizer.update(get(p, data(seed=seed)), state, p)
            p = optax.apply_updates(p, updates)
        return p

    close(train(lambda p, b: step(p, b)[1]["mean"]), train(jax.grad(loss)), rtol=1e-3, atol=1e-4)
