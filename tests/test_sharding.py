"""Programs for eight devices: every device reduces its own examples, whatever the route, and one sum joins the statistics.

What XLA makes of a program is read in its HLO: a loop over examples that it does not understand shows as an `all-gather`
of activations.
"""

import collections
import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

import pergrad as pg
from pergrad.reductions import Reduction
from pergrad.statistics import Statistic

DEVICES, B = 8, 32
STATISTICS = {
    "mean": pg.mean(),
    "square": pg.second_moment(),
    "cos": pg.elementwise(jnp.cos),
    "largest": pg.max_abs(),
    "norms": pg.norms(),
}
SMALL = {"chunk_bytes": 1 << 14}  # so that every route that can go in chunks does


def arrays(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(s) / np.sqrt(s[0] if len(s) > 1 else 1), jnp.float32) for s in shapes]


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def put(tree, on, *spec):
    return jax.device_put(tree, NamedSharding(on, P(*spec)))


# ---------------------------------------------------------------------------------------- models, one per kind of route


def dense(p, x):
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)


def convolution(p, x):
    layer = jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jnp.tanh(layer) ** 2)


def tied(p, tokens):
    return jnp.mean((jnp.tanh(p["e"][tokens] @ p["w"]) @ p["e"].T) ** 2)


def layers(p, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2)


def recurrent(p, x):
    step = lambda h, x: (jnp.tanh(h @ p + x), None)
    return jnp.mean(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0] ** 2)


def weight_norm(p, x):
    return jnp.mean(jnp.tanh(x @ (p / jnp.linalg.norm(p, axis=0))) ** 2)


TOKENS = np.random.default_rng(1).integers(0, 24, (B, 6))
CASES = {
    "dense": (dense, dict(zip("ab", arrays((16, 32), (32, 16)), strict=True)), arrays((B, 6, 16))[0]),
    "convolution": (convolution, *arrays((3, 3, 4, 8), (B, 8, 8, 4))),
    "tied": (tied, dict(zip("ew", arrays((24, 16), (16, 16)), strict=True)), TOKENS),
    "layers": (layers, *arrays((3, 16, 16), (B, 6, 16))),
    "recurrent": (recurrent, *arrays((16, 16), (B, 6, 16))),
    "weight_norm": (weight_norm, *arrays((32, 64), (B, 6, 32))),
}


# ---------------------------------------------------------------------------------------- what is asked


def collectives(compiled):
    """How many of each there are, and the most entries that one of them delivers, all-reduces left out."""
    found = re.findall(r"= (.*?) (all-[a-z-]+|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text())
    shapes = [(kind, shape) for shapes, kind in found for shape in re.findall(r"\[([\d,]*)\]", shapes)]
    sizes = [int(np.prod([int(d) for d in shape.split(",") if d])) for kind, shape in shapes if kind != "all-reduce"]
    return collections.Counter(kind for _, kind in found), max(sizes, default=0)


def close(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(np.max(np.abs(b), initial=0), 1e-3))


def build(loss, stats=STATISTICS, **options):
    return jax.jit(pg.value_and_stats(loss, stats, **(SMALL | options)))


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", CASES)
def test_every_device_reduces_its_own_examples(name):
    """No activation leaves its device; a device needs the memory of its own examples, and of the sums over devices."""
    loss, p, x = CASES[name]
    on = mesh(d=DEVICES)
    step = build(loss)
    compiled = step.lower(put(p, on), put(x, on, "d")).compile()
    kinds, largest = collectives(compiled)
    assert set(kinds) <= {"all-reduce"}, (kinds, largest)
    alone = step.lower(p, x[: B // DEVICES]).compile()
    got = compiled(put(p, on), put(x, on, "d"))
    allowed = alone.memory_analysis().temp_size_in_bytes + 3 * bytes_of(got)
    assert compiled.memory_analysis().temp_size_in_bytes <= allowed
    close(got, build(loss, impl="vmap")(p, x))


def test_masked_examples_on_other_devices():
    """The mask goes where its examples go, and the weight of an example counts those of all devices."""
    loss, p, x = CASES["dense"]
    on, mask = mesh(d=DEVICES), np.arange(B) % 3 == 0
    x = x.at[1].set(jnp.nan)
    step = lambda impl: jax.jit(lambda p, x, m: pg.value_and_stats(loss, STATISTICS, impl=impl, **SMALL)(p, x, mask=m))
    compiled = step("auto").lower(put(p, on), put(x, on, "d"), put(mask, on, "d")).compile()
    assert set(collectives(compiled)[0]) <= {"all-reduce"}
    close(compiled(put(p, on), put(x, on, "d"), put(mask, on, "d")), step("vmap")(p, x, mask))


def heads(p, x):
    return jnp.mean(jnp.einsum("bthk,hkd->btd", jnp.tanh(jnp.einsum("btd,dhk->bthk", x, p["in"])), p["out"]) ** 2)


@pytest.mark.parametrize("kind", ["dense", "heads"])
def test_parameters_split_over_devices(kind):
    """Tensor parallelism: statistics stay split as their parameters are, and nothing is gathered."""
    on = mesh(d=4, m=2)
    if kind == "dense":
        loss, p, x = CASES["dense"]
        where = {"a": P(None, "m"), "b": P("m")}
    else:
        loss, (first, last, x) = heads, arrays((16, 4, 8), (4, 8, 16), (B, 6, 16))
        p, where = {"in": first, "out": last}, {"in": P(None, "m"), "out": P("m")}
    compiled = build(loss).lower({k: put(p[k], on, *where[k]) for k in p}, put(x, on, "d")).compile()
    assert set(collectives(compiled)[0]) <= {"all-reduce"}
    value, out = got = compiled({k: put(p[k], on, *where[k]) for k in p}, put(x, on, "d"))
    for name in ("mean", "square", "cos", "largest"):
        assert {k: tuple(v.sharding.spec) for k, v in out[name].items()} == {k: tuple(s) for k, s in where.items()}
    close(got, build(loss, impl="vmap")(p, x))


@pytest.mark.parametrize("name, spec", [("dense", ("d", "m")), ("convolution", ("d", None, None, "m"))])
def test_an_axis_that_cannot_be_split_gives_its_devices_to_the_examples(name, spec):
    """Positions, and channels under patches: the operands move once, between devices, and none of them is gathered."""
    loss, p, x = CASES[name]
    on = mesh(d=4, m=2)
    compiled = build(loss).lower(put(p, on), put(x, on, *spec)).compile()
    kinds, largest = collectives(compiled)
    assert kinds["all-to-all"] and largest <= x.size // DEVICES * 2, (kinds, largest)
    close(compiled(put(p, on), put(x, on, *spec)), build(loss, impl="vmap")(p, x))


def test_every_device_has_some_examples_of_each_microbatch():
    """Microbatches of neighbouring examples would lie on some of the devices, and be sent to the others."""
    loss, p, x = CASES["dense"]
    on = mesh(d=DEVICES)
    compiled = build(loss, microbatch_size=16).lower(put(p, on), put(x, on, "d")).compile()
    assert set(collectives(compiled)[0]) <= {"all-reduce"}
    close(compiled(put(p, on), put(x, on, "d")), build(loss, impl="vmap")(p, x))


def test_fewer_examples_than_a_chunk():
    """One example on each device: slices of the batch would all be sent to every device."""
    loss, p, x = CASES["dense"]
    on = mesh(d=DEVICES)
    compiled = build(loss, chunk_bytes=None).lower(put(p, on), put(x[:8], on, "d")).compile()
    assert set(collectives(compiled)[0]) <= {"all-reduce"}
    close(compiled(put(p, on), put(x[:8], on, "d")), build(loss, impl="vmap")(p, x[:8]))


# ---------------------------------------------------------------------------------------- what surrounds it


class Least(Reduction):
    """min_b g_b: a reduction of a user's own, whose parts merge neither by a sum nor by a maximum."""

    per_example, coordinatewise = False, True
    __eq__ = lambda self, other: type(self) is type(other)
    __hash__ = lambda self: hash(type(self))

    def of(self, g, mask=None):
        return jnp.min(g, axis=0)

    def merge(self, a, b):
        return jnp.minimum(a, b)


class Leasts(Statistic):
    name, reductions = "leasts()", (Least(),)

    def finish(self, outcome):
        return outcome.leaves[Least()]


def test_a_reduction_of_ones_own():
    loss, p, x = CASES["dense"]
    on = mesh(d=DEVICES)
    got = build(loss, Leasts())(put(p, on), put(x, on, "d"))
    close(got, build(loss, Leasts(), impl="vmap")(p, x))


def test_phi_that_reads_an_array():
    """A constant of the program goes along; a value of the surrounding program cannot, and the result is right all the same."""
    loss, p, x = CASES["dense"]
    on, levels = mesh(d=DEVICES), jnp.array([0.01, 0.1])

    def step(p, x, least, impl="auto"):
        each = [  # apart, or what one cannot all could not
            pg.elementwise(lambda g: jnp.abs(g) > levels[0]),
            pg.elementwise(lambda g: jnp.abs(g) > least),
            pg.dot(jax.tree.map(jnp.sin, p)),
        ]
        return [pg.grad_stats(loss, s, impl=impl, **SMALL)(p, x) for s in each]

    got = jax.jit(step)(put(p, on), put(x, on, "d"), 0.05)
    close(got, jax.jit(step, static_argnames="impl")(p, x, 0.05, impl="vmap"))


def test_vmapped_and_differentiated():
    """Around a train step there may be a vmap over seeds, or a derivative; the rule for devices stands in no way."""
    loss, p, x = CASES["dense"]
    on = mesh(d=DEVICES)

    def penalty(p, x, impl):
        out = pg.grad_stats(loss, {"v": pg.variance(), "n": pg.norms()}, impl=impl, **SMALL)(p, x)
        return sum(jnp.sum(v) for v in jax.tree.leaves(out))

    def both(p, x, impl="auto"):
        seeds = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), p)
        return jax.grad(penalty)(p, x, impl), jax.vmap(lambda q: penalty(q, x, impl))(seeds)

    got = jax.jit(both)(put(p, on), put(x, on, "d"))
    close(got, jax.jit(both, static_argnames="impl")(p, x, impl="vmap"), rtol=1e-4)


def test_traced_in_64_bits_and_compiled_outside():
    """A device's part is traced while XLA compiles, when the settings of the trace may be gone."""
    loss, p, x = CASES["dense"]
    on = mesh(d=DEVICES)
    with jax.enable_x64(True):
        p, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (p, x))
        want = jax.jit(pg.value_and_stats(loss, STATISTICS, impl="vmap"))(p, x)
        p, x = put(p, on), put(x, on, "d")
        lowered = build(loss).lower(p, x)
    got = lowered.compile()(p, x)
    assert all(v.dtype == np.float64 for v in jax.tree.leaves(got))
    close(got, want, rtol=1e-12)


@pytest.mark.parametrize("in_context", [False, True])
def test_a_mesh_with_explicit_axes(in_context):
    """Under `auto_axes`, as the documentation says; with the mesh in context, right at least."""
    loss, p, x = CASES["dense"]
    on = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Explicit,))
    whole, rows = NamedSharding(on, P()), NamedSharding(on, P("d"))
    like = {"mean": {"a": whole, "b": whole}, "norms": rows}
    stats = {name: STATISTICS[name] for name in like}
    step = auto_axes(pg.value_and_stats(loss, stats, **SMALL), axes=("d",), out_sharding=(whole, like))
    with jax.set_mesh(on) if in_context else contextlib.nullcontext():
        compiled = jax.jit(step).lower(put(p, on), put(x, on, "d")).compile()
    assert in_context or set(collectives(compiled)[0]) <= {"all-reduce"}
    close(compiled(put(p, on), put(x, on, "d")), build(loss, stats, impl="vmap")(p, x))


def test_norms_by_pairs_and_gram():
    """Products of positions, in chunks of examples; the Gram matrix needs all of them on every device."""
    (loss, p, x), on = CASES["dense"], mesh(d=DEVICES)
    x, stats, few = x[:, :2], {"n": pg.norms(per_leaf=True), "g": pg.gram()}, {"chunk_bytes": 1 << 10}
    routes = pg.explain(loss, stats, **few)(p, x).rows[0].route
    assert "products of positions" in routes and "of every two examples" in routes
    norms = build(loss, stats["n"], **few).lower(put(p, on), put(x, on, "d")).compile()
    assert set(collectives(norms)[0]) <= {"all-reduce"}
    close(build(loss, stats, **few)(put(p, on), put(x, on, "d")), build(loss, stats, impl="vmap")(p, x))
