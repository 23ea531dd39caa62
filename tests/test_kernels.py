"""The fused contraction: against sums in float64 for shapes drawn at random, lowered for a GPU, and inside the engine.

Nothing here needs a GPU: kernels run interpreted, or are lowered and not run. `benchmarks/kernels.py` checks them on a card.
"""

import contextlib
import functools
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

import pergrad as pg
from pergrad.kernels import batched_contraction, mosaic, triton
from pergrad.reductions import ABS, IDENTITY, SIGN, SQUARE, Phi
from pergrad.rules import dense

contraction = importlib.import_module("pergrad.kernels.contraction")
COS, CUBE, POSITIVE = Phi("cos", jnp.cos), Phi("g³", lambda g: g**3), Phi("g > 0", lambda g: g > 0)
PHIS = (IDENTITY, SQUARE, SIGN, ABS, COS, CUBE, POSITIVE)


def operands(b, s, t, m, n, dtype, seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal((b, s, t, side)), dtype) for side in (m, n)]


def definition(x, delta, phis, mask=None):
    """Σ_b φ(x_bᵀ δ_b) in float64, by NumPy."""
    g = np.einsum("bstm,bstn->bsmn", np.asarray(x, np.float64), np.asarray(delta, np.float64))
    g = g if mask is None else g[np.asarray(mask)]
    with jax.enable_x64(True):
        return [np.sum(np.asarray(phi(jnp.asarray(g))), axis=0) for phi in phis]


def error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30)


def turned(x, delta, transposed):
    return [a.swapaxes(2, 3) if t else a for a, t in zip((x, delta), transposed, strict=True)]


# ---------------------------------------------------------------------------------------- numbers


@settings(max_examples=12)
@given(
    dims=st.tuples(*[st.integers(1, top) for top in (4, 2, 40, 50, 70)]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    phis=st.lists(st.sampled_from(PHIS), min_size=1, max_size=4, unique=True),
    transposed=st.tuples(st.booleans(), st.booleans()),
    masked=st.booleans(),
    step=st.sampled_from([16, 32]),
)
def test_the_triton_kernel_interpreted(dims, dtype, phis, transposed, masked, step):
    """Several tiles and ragged edges on every side; NaN in examples that do not count."""
    x, delta = operands(*dims, dtype, seed=sum(dims))
    mask = jnp.arange(dims[0]) % 2 == 0 if masked else None
    if masked:
        x = jnp.where(mask[:, None, None, None], x, jnp.nan)
    blocks = triton.Blocks(16, 32, step, warps=4, stages=2)
    got = triton.contraction(*turned(x, delta, transposed), phis, mask, transposed, blocks=blocks, interpret=True)
    for phi, a, b in zip(phis, got, definition(x, delta, phis, mask), strict=True):
        assert a.shape == (dims[1], *dims[3:]) and a.dtype == jnp.float32
        assert error(a, b) < 1e-5, phi.name


# (b, s, t, m, n), transposed, masked, blocks: rows that do not fill a tile or a step, one slot, fewer steps than slots.
HOPPER = {
    "two tiles, two pages": ((3, 2, 128, 128, 256), (False, False), False, None),
    "ragged, masked": ((4, 1, 72, 192, 64), (False, False), True, None),
    "x the other way round": ((3, 1, 64, 136, 128), (True, False), True, mosaic.Blocks(128, 128, 64, 1)),
    "δ the other way round": ((2, 1, 64, 64, 96), (False, True), False, mosaic.Blocks(128, 64, 64, 3)),
    "both, one example": ((1, 1, 64, 72, 96), (True, True), False, None),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX's interpreter knows no transposed operands before 0.12")
@pytest.mark.parametrize("name", HOPPER)
def test_the_mosaic_kernel_interpreted(name):
    """Warpgroups, barriers and copies are simulated; an access that nothing orders, or memory nobody wrote, is an error."""
    dims, transposed, masked, blocks = HOPPER[name]
    x, delta = operands(*dims, jnp.bfloat16)
    mask = jnp.arange(dims[0]) % 2 == 1 if masked else None
    if masked:
        x = jnp.where(mask[:, None, None, None], x, jnp.nan)
    assert mosaic.obstacle(*dims[2:], x.dtype, transposed) == ""
    watched = plgpu.InterpretGPUParams(detect_races=True)
    phis = (IDENTITY, SQUARE, SIGN)[: 2 + masked]
    got = mosaic.contraction(
        *turned(x, delta, transposed), phis, mask, transposed, blocks=blocks, multiprocessors=2, interpret=watched
    )
    for phi, a, b in zip(phis, got, definition(x, delta, phis, mask), strict=True):
        assert a.shape == (dims[1], *dims[3:]) and error(a, b) < 1e-5, phi.name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_reference(chunk, masked):
    """XLA's way, in chunks that divide the batch and in others, is the definition too."""
    x, delta = operands(7, 2, 5, 4, 6, jnp.float32)
    mask = jnp.array([1, 0, 1, 1, 0, 1, 1], bool) if masked else None
    got = batched_contraction(x, delta, PHIS, mask=mask, weight=0.5, chunk=chunk)
    for phi, a, b in zip(PHIS, got, definition(x, delta, PHIS, mask), strict=True):
        assert error(a, 0.5 * b) < 1e-6, phi.name


@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
@pytest.mark.parametrize("t, m, n", [(1, 3, 5), (100, 768, 3072), (17, 40, 1)])
def test_blocks_are_ones_that_triton_takes(t, m, n, outputs):
    """Powers of two, at least 16, for as many registers as there are."""
    for dtype in (jnp.float32, jnp.bfloat16):
        cut = triton.blocks_for(t, m, n, dtype, outputs)
        for size in (cut.m, cut.n, cut.t):
            assert size >= 16 and size & (size - 1) == 0
        assert cut.m * cut.n * (1 + outputs) // (32 * cut.warps) <= 200


# ---------------------------------------------------------------------------------------- for a GPU


@contextlib.contextmanager
def as_if_on_a_gpu():
    """From JAX 0.12 on lowering for a GPU asks what GPU; before, it takes one of compute capability 9.0."""
    if hasattr(jax.sharding, "AbstractDevice"):
        device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
            yield
    else:
        yield


def lowered(fn, *args):
    with as_if_on_a_gpu():
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_lowers_for_a_gpu(dtype):
    """As far as JAX goes without one: to the compiler's input, in blocks as they would be chosen."""
    x, delta = operands(3, 2, 70, 40, 200, dtype)
    mask = jnp.array([True, False, True])
    for phis, transposed in [(PHIS[:4], (False, False)), (PHIS[4:], (True, True))]:
        call = functools.partial(triton.contraction, phis=phis, mask=mask, transposed=transposed)
        assert "triton" in lowered(call, *turned(x, delta, transposed))


@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
def test_mosaic_lowers_for_a_gpu(outputs):
    phis, dims = (IDENTITY, SQUARE, SIGN, ABS)[:outputs], (3, 1, 72, 192, 320)
    mask = jnp.array([True, False, True])
    for transposed in [(False, False), (True, True)] if outputs == 2 else [(False, False)]:
        x, delta = operands(*dims[:2], 128 if any(transposed) else 72, *dims[3:], jnp.bfloat16)
        call = functools.partial(mosaic.contraction, phis=phis, mask=mask, transposed=transposed)
        assert "mosaic_gpu" in lowered(call, *turned(x, delta, transposed))


def test_a_program_for_either_platform():
    """What is chosen on a machine with a GPU must also compile for its CPU, where XLA computes it."""
    x, delta = operands(5, 1, 6, 4, 3, jnp.float32)
    call = functools.partial(batched_contraction, phis=PHIS, weight=2.0, implementation="triton")
    assert lowered(call, x, delta).count("gpu.triton") == 2  # seven outputs, four in one pass
    for a, b in zip(jax.jit(call)(x, delta), definition(x, delta, PHIS), strict=True):
        assert error(a, 2 * b) < 1e-6


# ---------------------------------------------------------------------------------------- the choice


def layer(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def routes(stats=pg.second_moment()):
    w, x = jnp.ones((16, 16)), jnp.ones((4, 5, 16))
    return pg.explain(layer, stats)(w, x).rows[0].route


@pytest.fixture
def gpu(monkeypatch):
    """The choice as it is made where the device is a GPU."""
    lower = contraction._cannot_lower.__wrapped__  # not what it remembers of machines without one

    def cannot_lower(*args):
        with as_if_on_a_gpu():
            return lower(*args)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(contraction, "_cannot_lower", cannot_lower)


def test_nothing_unmeasured_is_chosen(gpu, monkeypatch):
    """A kernel that no recorded run has found good on this kind of device is not taken unasked."""
    monkeypatch.delenv(contraction.VARIABLE, raising=False)
    assert contraction.MEASURED == {} and "formed" in routes()
    monkeypatch.setitem(contraction.MEASURED, jax.devices()[0].device_kind, ("mosaic", "triton"))
    assert routes() == "one fused kernel (triton)"
    monkeypatch.setenv(contraction.VARIABLE, "xla")
    assert "formed" in routes()


def test_asked_for_and_taken(gpu, monkeypatch):
    monkeypatch.setenv(contraction.VARIABLE, "triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert routes({"g": pg.mean(), "c": pg.elementwise(jnp.cos)}) == "one fused kernel (triton)"


@pytest.mark.parametrize(
    "phi, said",
    [(jnp.sort, "sort"), (lambda g: g * jnp.array([1.0, 2.0])[0], "constants")],
    ids=["no such operation", "reads an array"],
)
def test_what_a_kernel_cannot_do_xla_does(gpu, monkeypatch, phi, said):
    monkeypatch.setenv(contraction.VARIABLE, "triton")
    with pytest.warns(UserWarning, match=rf"PERGRAD_KERNEL=triton was asked for, but .*{said}"):
        assert "formed" in routes(pg.elementwise(phi))


def test_asked_for_without_a_gpu(monkeypatch):
    """A warning, and the right numbers."""
    monkeypatch.setenv(contraction.VARIABLE, "triton")
    w, x = operands(2, 1, 3, 4, 4, jnp.float32)
    w, x = w[0, 0].T @ w[0, 0], x[:, 0]
    with pytest.warns(UserWarning, match="the device is a cpu"):
        got = pg.grad_stats(layer, pg.second_moment())(w, x)
    assert error(got, np.asarray(pg.grad_stats(layer, pg.second_moment(), impl="vmap")(w, x))) < 1e-6


def test_an_unknown_kernel(monkeypatch):
    monkeypatch.setenv(contraction.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="unknown PERGRAD_KERNEL='cuda': expected one of xla, triton, mosaic"):
        routes()


@pytest.mark.parametrize(
    "shape, dtype, said", [((1, 1, 2**16, 2**15), "bfloat16", "2³¹"), ((1, 1, 2, 2), "int8", "int8")]
)
def test_operands_out_of_reach(gpu, monkeypatch, shape, dtype, said):
    monkeypatch.setenv(contraction.VARIABLE, "triton")
    side = contraction.Operand(shape, dtype)
    with pytest.warns(UserWarning, match=said):
        assert contraction.choose(side, side, [SQUARE]) == "xla"


# ---------------------------------------------------------------------------------------- in the engine


def two_ways(p, x):
    return jnp.mean((p["b"] @ jnp.tanh(x @ p["a"]).swapaxes(1, 2)) ** 2)


def grouped_convolution(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(x, p, (2, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)
    return jnp.mean(jnp.tanh(out) ** 2)


def used_twice(p, x):
    return jnp.mean((jnp.tanh(jnp.tanh(x @ p) @ p) @ p.T) ** 2)


def layers(p, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2)


def recurrent(p, x):
    step = lambda h, x: (jnp.tanh(h @ p + x), None)
    return jnp.mean(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0] ** 2)


MODELS = {
    "both sides": (two_ways, {"a": (10, 20), "b": (7, 20)}, (6, 5, 10)),
    "convolution": (grouped_convolution, (3, 2, 2, 6), (6, 7, 6, 4)),
    "used twice": (used_twice, (8, 8), (6, 5, 8)),
    "layers": (layers, (3, 8, 8), (6, 5, 8)),
    "recurrent": (recurrent, (8, 8), (6, 5, 8)),
}
STATISTICS = {
    "mean": pg.mean(),
    "square": pg.second_moment(),
    "sign": pg.sign_mean(),
    "cube": pg.moment(3),
    "cos": pg.elementwise(jnp.cos),
    "norms": pg.norms(),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_rule_that_contracts(monkeypatch, name):
    """Dense layers either way round, convolutions offset by offset, shared weights, layers and steps of a scan; a mask."""
    monkeypatch.setattr(dense, "choose", lambda *_: "triton")
    monkeypatch.setattr(triton, "contraction", functools.partial(triton.contraction, interpret=True))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    loss, shapes, batch = MODELS[name]
    random = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(random.standard_normal(shape) / 2, jnp.float32)
    p = jax.tree.map(draw, shapes, is_leaf=lambda s: isinstance(s, tuple))
    x, mask = draw(batch), np.arange(6) != 2
    assert all("fused kernel" in r.route for r in pg.explain(loss, STATISTICS)(p, x).rows)
    step = lambda impl: jax.jit(lambda p, x, m: pg.grad_stats(loss, STATISTICS, impl=impl)(p, x, mask=m))(p, x, mask)
    for a, b in zip(jax.tree.leaves(step("auto")), jax.tree.leaves(step("vmap")), strict=True):
        assert error(a, np.asarray(b, np.float64)) < 1e-5


def test_operands_that_lie_the_other_way_round():
    """They are recognised, so that a kernel reads them as they are; nothing moves in memory."""

    def which(loss, p, x):
        seen = []
        original = dense.Contraction.routes
        try:
            dense.Contraction.routes = lambda self, *a: seen.append(self.transposed) or original(self, *a)
            pg.explain(loss, pg.second_moment())(p, x)
        finally:
            dense.Contraction.routes = original
        return seen

    x = jnp.ones((4, 5, 6))
    assert which(lambda p, x: jnp.sum((x @ p) ** 2), jnp.ones((6, 3)), x) == [(False, False)]
    # The positions last: p x, whose cotangent lies like its result.
    assert which(lambda p, x: jnp.sum((p @ x[0]) ** 2), jnp.ones((3, 5)), x) == [(True, True)]


def test_vmapped_and_differentiated():
    """What a kernel does not know, its XLA twin does."""
    x, delta = operands(4, 1, 3, 5, 6, jnp.float32)
    call = lambda name: lambda x, delta: batched_contraction(x, delta, (SQUARE,), implementation=name)[0]
    for fn in (
        lambda name: jax.grad(lambda x: jnp.sum(call(name)(x, delta) ** 2))(x),
        lambda name: jax.vmap(call(name))(jnp.stack([x, 2 * x]), jnp.stack([delta, delta])),
    ):
        assert error(fn("triton"), np.asarray(fn("xla"), np.float64)) < 1e-6
