"""Random programs: surgery agrees with the twin, and the mean with the plain gradient, whatever the program.

`make fuzz` runs the same properties for a long time with random seeds (`tests/fuzz`). A failure prints the program as a
script: put its loss into the zoo.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import pergrad as pg
from programs import FAMILIES, Program, programs

STATISTICS = {
    "mean": pg.mean(),
    "second_moment": pg.second_moment(),
    "sign_mean": pg.sign_mean(),
    "third_moment": pg.moment(3),
    "cos": pg.elementwise(jnp.cos),  # is not 0 at 0
    "variance": pg.variance(),
    "norms": pg.norms(),
    "leaf_norms": pg.norms(per_leaf=True),
    "per_example": pg.per_example(),
    "losses": pg.losses(),
}
DEGREE = {"second_moment": 2, "variance": 2, "third_moment": 3, "cos": 0, "sign_mean": 0}  # 1 for the others


@dataclasses.dataclass(frozen=True)
class Call:
    """How the statistics of a program are asked for."""

    size: int  # the first so many examples
    stats: tuple[str, ...]
    mask: tuple[bool, ...] | None
    microbatch_size: int | None
    chunk_bytes: int | None


@st.composite
def calls(draw, stats=tuple(STATISTICS)):
    size = draw(st.sampled_from([3, 2, 1, 4, 5]))
    masks = st.lists(st.booleans(), min_size=size, max_size=size).filter(any).map(tuple)
    return Call(
        size,
        tuple(draw(st.lists(st.sampled_from(stats), min_size=1, max_size=4, unique=True))),
        draw(st.none() | masks),
        draw(st.none() | st.integers(1, size)),
        draw(st.sampled_from([None, 1, 100, 400])),  # gradients that fit at once: all, one, few
    )


# Nobody waits for fast code here; compiling is most of the time.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# The compiler's simplifier takes 0 · x for 0 where it sees the zero (a one-hot): NaNs come and go with the program around.
LITERAL_MINDED = QUICK_TO_COMPILE | {"xla_disable_hlo_passes": "algsimp"}

programs_run = itertools.count(1)


def run(program: Program, call: Call, spoil=lambda batch: batch, compiler_options=QUICK_TO_COMPILE):
    """Statistics by surgery and by the twin, every per-example gradient, and the plain gradient."""
    if next(programs_run) % 100 == 0:
        jax.clear_caches()
    loss, p, batch = program.build()
    batch = spoil({k: v[: call.size] for k, v in batch.items()})
    mask = None if call.mask is None else np.array(call.mask)
    stats = {name: STATISTICS[name] for name in call.stats}
    options = {"keep_batch_dim": program.keep_batch_dim, "has_aux": program.has_aux}
    chunked = {"microbatch_size": call.microbatch_size, "chunk_bytes": call.chunk_bytes}

    def mean_loss(p, batch):
        if program.keep_batch_dim:
            batch = jax.tree.map(lambda a: a[:, None], batch)
        out = jax.vmap(loss, (None, 0))(p, batch)
        losses = out[0] if program.has_aux else out
        return jnp.mean(losses, where=mask)

    def everything(p, batch):
        got = pg.value_and_stats(loss, stats, impl="surgery", **options, **chunked)(p, batch, mask=mask)
        want = pg.value_and_stats(loss, stats, impl="vmap", **options)(p, batch, mask=mask)
        _, stack = pg.value_and_stats(loss, pg.per_example(), impl="vmap", **options)(p, batch)
        return got, want, stack, jax.grad(mean_loss)(p, batch)

    assume(differentiable(loss, program, p, batch))
    compiled = jax.jit(everything).lower(p, batch).compile(compiler_options)
    return jax.tree.map(np.asarray, compiled(p, batch))


def differentiable(loss, program: Program, p, batch) -> bool:
    """JAX itself cannot differentiate a few programs (forward mode through a custom_vjp)."""
    if "custom_vjp" not in program.text:
        return True
    example = jax.tree.map(lambda a: a[:1] if program.keep_batch_dim else a[0], batch)
    try:
        jax.eval_shape(jax.grad(loss, has_aux=program.has_aux), p, example)
    except (TypeError, NotImplementedError):
        return False
    return True


def tolerance(program: Program) -> float:
    if program.low:
        return 5e-2
    return 1e-9 if program.wide else 1e-4


def mismatches(program: Program, call: Call) -> list[str]:
    """What differs between surgery and its twin by more than rounding, in words."""
    with jax.enable_x64(program.wide):
        (value, got), (twin_value, want), stack, plain = run(program, call)
    gradients = jax.tree.leaves(stack)
    assume(all(np.isfinite(a).all() for a in gradients))
    assume(all(np.abs(a).max(initial=0) < 1e3 for a in gradients))
    rtol = tolerance(program)
    top = max((np.abs(a).max(initial=0) for a in gradients), default=0)
    # A gradient that is mathematically zero is rounding noise of the size of the others.
    scales = [max(np.abs(a).max(initial=0), 1e-2 * top) for a in gradients]
    noise = [np.abs(a) < 10 * rtol * s for a, s in zip(gradients, scales)]

    out = different("value", value, twin_value, [rtol] * 99)
    for name in call.stats:
        each = scales if jax.tree.structure(want[name]) == jax.tree.structure(stack) else [top]
        allowed = [rtol * max(s ** DEGREE.get(name, 1), s if name == "cos" else 0, 1e-30) for s in each]
        if name == "losses":
            allowed = [rtol * (1 + np.abs(want[name]).max())]
        if name == "sign_mean":
            allowed = [rtol + 2 * n.any(0) for n in noise]
        out += different(name, got[name], want[name], allowed)
        if name == "mean":
            out += different("mean, against the plain gradient", got[name], plain, allowed, dtypes=False)
    return out


def different(name, got, want, allowed, dtypes=True) -> list[str]:
    if jax.tree.structure(got) != jax.tree.structure(want):
        return [f"{name}: {jax.tree.structure(got)}, expected {jax.tree.structure(want)}"]
    out = []
    for (path, a), b, most in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), allowed):
        where = name + jax.tree_util.keystr(path)
        if a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            out.append(f"{where}: {a.dtype}{a.shape}, expected {b.dtype}{b.shape}")
        elif not (np.abs(a - b) <= most).all():
            out.append(f"{where}:\n{a}\nexpected\n{b}\nallowed {most}")
    return out


def nan_mismatches(program: Program, call: Call, where: int) -> list[str]:
    """The same, of where NaNs are when one number of one example's data is NaN."""

    def spoil(batch):
        x = batch["x"].copy()
        x[where % call.size].flat[where % x[0].size] = np.nan
        return batch | {"x": x}

    with jax.enable_x64(program.wide):
        (_, got), (_, want), _, _ = run(program, call, spoil, LITERAL_MINDED)
    got, want = (jax.tree.map(lambda a: np.isnan(a).astype(int), out) for out in (got, want))
    return [line for name in call.stats for line in different(f"NaNs of {name}", got[name], want[name], [0] * 99)]


# ------------------------------------------------------------------------------------------ the tests

# Convolutions with kernels of each example's own leak NaNs between examples in XLA itself (a grouped convolution is
# computed with a mask), so they are left out where NaNs are compared.
NAN_FAMILIES = tuple(family for family in FAMILIES if family != "conv")
NAN_CALLS = calls(("mean", "second_moment"))


def check(program: Program, call: Call):
    problems = mismatches(program, call)
    assert not problems, report(program, call, problems)


def check_nans(program: Program, call: Call, where: int):
    assume("lax.conv" not in program.text)
    problems = nan_mismatches(program, call, where)
    assert not problems, report(program, call, [f"x of example {where % call.size} is NaN at {where}", *problems])


def report(program, call, problems):
    return "\n".join([f"{call}", program.text, "", *problems])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=18)
@given(data=st.data())
def test_surgery_agrees_with_the_twin(family, data):
    check(data.draw(programs(family)), data.draw(calls()))


@pytest.mark.parametrize("family", NAN_FAMILIES)
@settings(max_examples=6)
@given(data=st.data())
def test_nans_are_where_the_twin_has_them(family, data):
    check_nans(data.draw(programs(family)), data.draw(NAN_CALLS), data.draw(st.integers(0, 50)))
