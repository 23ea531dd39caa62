"""Optimizers in compositions: within optax's wrappers, over mini-batches, in a train step, saved, and sharded."""

import functools
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import pergrad as pg
from optimizers import ALL, assert_close, every_optimizer, stats_of
from oracle import QUICK_TO_COMPILE
from pergrad import analysis, optim

PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "v": jnp.array([[1.0, -1.0]]), "b": jnp.array(0.3)}


def gradients(seed, size=6):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0.3, 1.0, (size, *p.shape)), jnp.float32), PARAMS)


STATS = [stats_of(gradients(k)) for k in range(3)]


def run(opt, params=PARAMS, stats=STATS, jit=False, **extra):
    """The updates of every step, and the last state."""
    opt, out = optax.with_extra_args_support(opt), []
    state = opt.init(params)
    update = lambda s, state: opt.update(s["mean"], state, params, stats=s, **extra)
    update = jax.jit(update, compiler_options=QUICK_TO_COMPILE) if jit else update
    for s in stats:
        updates, state = update(s, state)
        out.append(updates)
    return out, state


def part(tree, *names):
    return {name: tree[name] for name in names}


def stats_part(stats, *names):
    return [{k: s[k] if k == "count" else part(s[k], *names) for k in s} for s in stats]


# ---------------------------------------------------------------------------------- what is needed


def test_every_optimizer_says_what_it_needs():
    """`opt.stats`, which is written down, is what is asked for."""
    for name, make in ALL.items():
        opt = make(0.1)
        assert opt.stats == optim.required_stats(opt, PARAMS), name
    assert list(optim.eve(0.1).stats) == ["mean", "second_moment", "count"]
    assert list(optim.adam(0.1).stats) == list(optim.required_stats(optax.adam(0.1), PARAMS)) == ["mean"]
    shapes = jax.eval_shape(lambda: PARAMS)
    assert optim.required_stats(optim.eve(0.1), shapes) == optim.eve(0.1).stats


def by_hand(needs):
    """A transformation that asks for other statistics than those known by name, and steps along the last of them."""

    def update(updates, state, params=None, *, stats=None, **_):
        for name, statistic in needs.items():
            updates = optim.ask(stats, name, statistic=statistic)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


LABELS = {"w": "eve", "v": "sign", "b": "plain"}
COMPOSITIONS = {
    "chain": (optax.chain(optax.clip(1.0), optim.eve(0.1), optax.clip(1.0)), {"second_moment", "count"}),
    "multi_transform": (
        optax.multi_transform(
            {"eve": optim.eve(0.1), "sign": optim.micro_sign_sgd(0.1), "plain": optax.sgd(0.1)}, LABELS
        ),
        {"second_moment", "sign_mean", "count"},
    ),
    "masked": (optax.masked(optim.micro_adam(0.1), {"w": True, "v": False, "b": False}), {"second_moment"}),
    "inject_hyperparams": (optax.inject_hyperparams(optim.eve)(0.1), {"second_moment", "count"}),
    "apply_if_finite": (optax.apply_if_finite(optim.micro_sign_sgd(0.1), 2), {"sign_mean"}),
    "MultiSteps": (optim.MultiSteps(optax.chain(optim.micro_adam(0.1)), 2), {"second_moment", "count"}),
    "optax.MultiSteps": (optax.MultiSteps(optim.adam(0.1), 2), set()),
    "skip": (optim.eve(0.1, on_nonfinite="skip"), {"second_moment", "count"}),
    "trackers": (
        optax.chain(analysis.track_noise_scale(), optim.micro_sign_sgd(0.1)),
        {"second_moment", "count", "sign_mean"},
    ),
    "schedule_free": (optax.contrib.schedule_free(optim.eve(0.1, b1=0.0), 0.1), {"second_moment", "count"}),
    "plateau": (optax.chain(optim.eve(0.1), optax.contrib.reduce_on_plateau()), {"second_moment", "count"}),
    "another": (by_hand({"median": pg.median(), "a": pg.abs_mean()}), {"median", "a"}),
}


@pytest.mark.parametrize("opt, needs", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_required_stats_sees_through(opt, needs):
    needed = optim.required_stats(opt, PARAMS)
    assert set(needed) == {"mean"} | needs
    if "median" in needs:
        assert repr(needed["median"]) == "pg.median()"


# ---------------------------------------------------------------------------------- compositions


def test_clipping_before_and_after():
    """Before, it acts on m, and not on the statistics; after, on the step."""
    opt = optax.chain(optax.clip(0.2), optim.eve(0.1), optax.clip(0.05))
    clip = lambda tree, most: jax.tree.map(lambda x: jnp.clip(x, -most, most), tree)
    inner, expected = optim.eve(0.1), []
    state = inner.init(PARAMS)
    for s in STATS:
        updates, state = inner.update(clip(s["mean"], 0.2), state, PARAMS, stats=s)
        expected.append(clip(updates, 0.05))
    got, _ = run(opt)
    assert_close(got, expected)
    assert float(jnp.max(jnp.abs(got[0]["w"]))) == pytest.approx(0.05)


@every_optimizer
def test_groups_and_masks_are_optimizers_of_their_own(make):
    multi, _ = run(optax.multi_transform({"a": make(0.1), "b": make(0.3)}, {"w": "a", "v": "b", "b": "a"}))
    masked, _ = run(optax.masked(make(0.1), {"w": True, "v": False, "b": True}))
    first, _ = run(make(0.1), part(PARAMS, "w", "b"), stats_part(STATS, "w", "b"))
    second, _ = run(make(0.3), part(PARAMS, "v"), stats_part(STATS, "v"))
    assert_close([part(u, "w", "b") for u in multi], first)
    assert_close([part(u, "v") for u in multi], second)
    assert_close([part(u, "w", "b") for u in masked], first)
    assert_close([u["v"] for u in masked], [s["mean"]["v"] for s in STATS])  # passed through


def test_a_mask_over_a_whole_subtree():
    params, stats = {"a": PARAMS, "c": PARAMS}, stats_of({"a": gradients(0), "c": gradients(1)})
    (got,), _ = run(optax.masked(optim.eve(0.1), {"a": True, "c": False}), params, [stats])
    assert_close(got["a"], run(optim.eve(0.1), PARAMS, STATS[:1])[0][0])
    assert_close(got["c"], stats["mean"]["c"])


@every_optimizer
def test_injected_hyperparameters(make):
    """They are traced: in init they may be known and in update not, and neither the state's structure nor a number changes."""
    rtol = 5e-4  # 1 − 0.999 in float32
    got, state = run(optax.inject_hyperparams(make)(0.1), jit=True)
    assert_close(got, run(make(0.1))[0], rtol)
    halved = lambda count: 0.1 / 2.0**count
    scheduled, _ = run(optax.inject_hyperparams(make)(halved, weight_decay=lambda count: 0.2 * count))
    assert_close(scheduled, run(make(halved, weight_decay=lambda count: 0.2 * count))[0], rtol)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.1)


def test_skipping_with_injected_wide_or_narrow_rates():
    """A learning rate in an array may be wider than the updates: what is skipped has the types of what is not."""
    opt = optax.inject_hyperparams(functools.partial(optim.eve, on_nonfinite="skip"), hyperparam_dtype=jnp.float32)(0.1)
    half = STATS[0] | {"mean": jax.tree.map(lambda x: x.astype(jnp.bfloat16), STATS[0]["mean"])}
    assert_close(run(opt, stats=[half])[0], run(optim.eve(0.1), stats=[half])[0], rtol=0.01)


def test_apply_if_finite():
    bad = stats_of(jax.tree.map(lambda g: g.at[0].set(jnp.nan), gradients(9)))
    got, state = run(optax.apply_if_finite(optim.eve(0.1), 3), stats=[STATS[0], bad, STATS[1]])
    assert_close([got[0], got[2]], run(optim.eve(0.1))[0][:2])
    assert state.total_notfinite == 1 and all((u == 0).all() for u in jax.tree.leaves(got[1]))


def test_wrappers_of_optax_contrib():
    """They hand `stats=` on, so that the optimizer inside does what it does alone."""
    plain = run(optim.eve(0.1, b1=0.0))[0]
    free, _ = run(optax.contrib.schedule_free(optim.eve(0.1, b1=0.0), 0.1))
    reference, _ = run(optax.contrib.schedule_free(replayed(plain), 0.1))
    assert_close(free, reference)
    plateau, _ = run(optax.chain(optim.eve(0.1), optax.contrib.reduce_on_plateau()), value=jnp.array(1.0))
    assert_close(plateau, run(optim.eve(0.1))[0])
    mechanic, _ = run(optax.contrib.mechanize(optim.eve(0.1, b1=0.0)))
    assert_close(mechanic, run(optax.contrib.mechanize(replayed(plain)))[0])


def replayed(updates):
    """A transformation that gives these updates, whatever comes in."""
    stacked = jax.tree.map(lambda *u: jnp.stack(u), *updates)
    return optax.GradientTransformation(
        lambda params: jnp.zeros([], int), lambda u, k, params=None: (jax.tree.map(lambda x: x[k], stacked), k + 1)
    )


def test_trackers_of_analysis_beside_an_optimizer():
    chain = optax.chain(
        analysis.track_noise_scale(0.5),
        optax.masked(analysis.average_stats(0.9), {"w": True, "v": False, "b": True}),
        optim.eve(0.1),
    )
    got, state = run(chain)
    assert_close(got, run(optim.eve(0.1))[0])
    alone = analysis.track_noise_scale(0.5)
    tracked = alone.init(PARAMS)
    for s in STATS:
        tracked = alone.update(None, tracked, stats=s)[1]
    assert_close(state[0].noise_scale, tracked.noise_scale, rtol=1e-4)
    means = state[1].inner_state.stats["mean"]
    assert isinstance(means["v"], optax.MaskedNode) and means["w"].shape == (3,)


def test_plain_accumulation():
    """optax.MultiSteps hands no statistics on in a composition: refused, where they are needed. Adam needs none."""
    half = [
        stats_of(jax.tree.map(lambda g: g[:3], gradients(0))),
        stats_of(jax.tree.map(lambda g: g[3:], gradients(0))),
    ]
    for opt in (optax.MultiSteps(optim.adam(0.1), 2), optim.MultiSteps(optim.adam(0.1), 2)):
        assert_close(run(opt, stats=half)[0][1], run(optim.adam(0.1), stats=STATS[:1])[0][0])
    plain = optax.MultiSteps(optim.eve(0.1), 2)
    for opt in (plain, optax.chain(plain.gradient_transformation())):
        with pytest.raises(ValueError, match=r"optax.MultiSteps.*write `pg.optim.MultiSteps`"):
            optim.required_stats(opt, PARAMS)
    # By hand, with stats= given to it directly, nobody can refuse it: the statistics are the last mini-batch's, as documented.
    state = plain.init(PARAMS)
    for s in half:
        updates, state = plain.update(s["mean"], state, PARAMS, stats=s)
    last = half[1] | {"mean": STATS[0]["mean"]}
    assert_close(updates, run(optim.eve(0.1), stats=[last])[0][0])


# ---------------------------------------------------------------------------------- over mini-batches


@every_optimizer
def test_two_half_batches_are_one_whole(make):
    """Halves of unequal size, one of them masked; also with clipping inside, which then acts on the whole."""
    inner = optax.chain(optax.clip(0.3), make(0.1))
    opt = optim.MultiSteps(inner, 2)
    mask = jnp.array([True, True, False, True, False, True, True, True])
    halves, wholes = [], []
    for k in range(3):
        g = gradients(k, size=8)
        wholes.append(stats_of(g, mask))
        halves += [stats_of(jax.tree.map(lambda x, c=c: x[c], g), mask[c]) for c in (slice(0, 2), slice(2, 8))]
    got, state = run(opt, stats=halves, jit=True)
    expected, inner_state = run(inner, stats=wholes)
    assert all((u == 0).all() for u in jax.tree.leaves(got[::2]))
    assert_close(got[1::2], expected, rtol=2e-4)  # μ̂² and σ̂² are differences, and their roots divide
    assert_close(state.inner_opt_state, inner_state, rtol=2e-4)
    assert state.gradient_step == 3 and optim.MultiSteps.has_updated(state)


def test_mini_batches_that_do_not_count():
    """One without examples; one that should_skip_update_fn refuses; and k by a schedule."""
    nothing = stats_of(gradients(5), jnp.zeros(6, bool))
    broken = stats_of(jax.tree.map(lambda g: g.at[0].set(jnp.nan), gradients(6)))
    opt = optim.MultiSteps(
        optim.eve(0.1), lambda step: jnp.where(step == 0, 2, 1), should_skip_update_fn=optax.skip_not_finite
    )
    # Of an empty mini-batch the mean is NaN: refused like the broken one, and both are drawn again.
    got, state = run(opt, stats=[STATS[0], nothing, broken, nothing, STATS[0], STATS[1]], jit=True)
    assert_close([got[4], got[5]], run(optim.eve(0.1), stats=[twice(STATS[0]), STATS[1]])[0], rtol=1e-5)
    assert all((u == 0).all() for u in jax.tree.leaves(got[:4])) and state.gradient_step == 2
    # Without that, it is one of the k, and weighs nothing.
    got, _ = run(optim.MultiSteps(optim.eve(0.1), 2), stats=[STATS[0], nothing])
    assert_close(got[1], run(optim.eve(0.1))[0][0], rtol=1e-5)


def twice(stats):
    return stats | {"count": 2 * stats["count"]}


def test_accumulation_of_a_model():
    """With surgery: whole batch, microbatches, and mini-batches of unequal size give one and the same step."""

    def loss(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (3, 5)), "v": jax.random.normal(keys[1], (5,))}
    batch = jax.random.normal(keys[2], (10, 3)), jax.random.normal(keys[3], (10,))
    mask = jnp.arange(10) != 4
    inner = optax.chain(optim.eve(0.1), optax.clip(0.09))

    def stepped(opt, batches, **options):
        step, p = pg.train_step(loss, opt, donate=False, **options), params
        state = opt.init(p)
        for b, m in batches:
            p, state, _ = step(p, state, b, mask=m)
        return p

    whole = stepped(inner, [(batch, mask)])
    assert_close(stepped(inner, [(batch, mask)], microbatch_size=4), whole, rtol=1e-5)
    parts = [(jax.tree.map(lambda x, c=c: x[c], batch), mask[c]) for c in (slice(0, 3), slice(3, 10))]
    assert_close(stepped(optim.MultiSteps(inner, 2), parts, microbatch_size=3), whole, rtol=1e-5)
    assert float(jnp.max(jnp.abs(whole["w"] - params["w"]))) > 0.05


def test_accumulation_in_one_group():
    """The others take a step with every mini-batch."""
    groups = {"slow": optim.MultiSteps(optim.eve(0.1), 2), "fast": optim.micro_adam(0.1)}
    got, _ = run(optax.multi_transform(groups, {"w": "slow", "v": "slow", "b": "fast"}), stats=[STATS[0]] * 2)
    slow, _ = run(optim.eve(0.1), part(PARAMS, "w", "v"), stats_part([twice(STATS[0])], "w", "v"))
    fast, _ = run(optim.micro_adam(0.1), part(PARAMS, "b"), stats_part([STATS[0]] * 2, "b"))
    assert_close(part(got[1], "w", "v"), slow[0])
    assert_close([part(u, "b") for u in got], fast)


def test_accumulation_keeps_its_types():
    """In a scan: complex and 16-bit parameters; accumulators in a chosen dtype."""
    params = {"c": jnp.ones(3, jnp.complex64), "h": jnp.ones(2, jnp.bfloat16)}
    g = {"c": gradients(0)["w"] * (1 + 1j), "h": gradients(1)["w"][:, :2]}
    stats = stats_of(g)
    for dtype in (None, jnp.bfloat16):
        opt = optim.MultiSteps(optim.micro_rmsprop(0.1, momentum=0.5), 2, accumulator_dtype=dtype)

        def body(state, _, opt=opt):
            updates, state = opt.update(stats["mean"], state, params, stats=stats)
            return state, updates

        state, updates = jax.jit(lambda opt=opt, body=body: jax.lax.scan(body, opt.init(params), length=4))()
        expected = run(optim.micro_rmsprop(0.1, momentum=0.5), params, [twice(stats)] * 2)[0]
        steps = [jax.tree.map(lambda u, k=k: u[k], updates) for k in (1, 3)]
        assert_close(steps, expected, rtol=1e-5 if dtype is None else 0.02)
        assert state.acc_stats["second_moment"]["c"].dtype == jnp.float32
        assert state.acc_grads["h"].dtype == (dtype or jnp.float32)


def test_statistics_that_merge_and_that_do_not():
    merging = {
        "s": pg.sign_mean(),
        "e": pg.elementwise(jnp.tanh),
        "c": pg.clipped_mean(1.0),
        "m": pg.moment(3),
        "r": pg.reduce(lambda g: g.mean(0)),
    }
    optim.MultiSteps(by_hand(merging), 2).init(PARAMS)
    for statistic in (
        pg.variance(),
        pg.median(),
        pg.max_abs(),
        pg.mean_square(unbiased=False),
        pg.norms(),
        pg.losses(),
        pg.std(),
        pg.histogram([0, 1]),
    ):
        with pytest.raises(
            ValueError, match=re.escape(f'{statistic!r}, which the optimizer asks for as "x", is no mean')
        ):
            optim.MultiSteps(by_hand({"x": statistic}), 2).init(PARAMS)

    # and what merges is merged: clipped means of halves make that of the whole
    def loss(w, x):
        return jnp.sum(x @ w)

    x, w = jax.random.normal(jax.random.key(0), (5, 3)), jnp.zeros(3)
    opt = by_hand({"c": pg.clipped_mean(0.5)})
    accumulating, needed = optim.MultiSteps(opt, 2), {"mean": pg.mean(), "c": pg.clipped_mean(0.5), "count": pg.count()}
    state = accumulating.init(w)
    measure = jax.jit(pg.grad_stats(loss, needed))
    for some in (x[:2], x[2:]):
        s = measure(w, some)
        updates, state = accumulating.update(s["mean"], state, w, stats=s)
    whole = measure(w, x)
    assert_close(updates, whole["c"])


# ---------------------------------------------------------------------------------- the train step


def linear_loss(params, batch, scale=1.0, *, shift=0.0):
    x, y = batch
    return scale * jnp.mean((x @ params["w"] + params["b"] + shift - y) ** 2)


def linear_problem(size=6):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=3), jnp.float32), "b": jnp.zeros(())}
    return params, (
        jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),
        jnp.asarray(rng.normal(size=size), jnp.float32),
    )


def expected_step(opt, loss, params, *args, **options):
    needed = optim.required_stats(opt, params)
    value, s = jax.jit(pg.value_and_stats(loss, needed, **options))(params, *args)
    updates, state = optax.with_extra_args_support(opt).update(s["mean"], opt.init(params), params, stats=s)
    return optax.apply_updates(params, updates), state, value


def test_train_step_is_the_loop_written_out():
    params, batch = linear_problem()
    mask = jnp.arange(6) < 4
    for opt in (
        optim.eve(0.1),
        optax.adam(0.1),
        optax.chain(optax.clip_by_global_norm(0.1), optim.micro_sign_sgd(0.1)),
    ):
        got = pg.train_step(linear_loss, opt, donate=False)(params, opt.init(params), batch)
        assert_close(got, expected_step(opt, linear_loss, params, batch), rtol=1e-5)
    opt = optim.eve(0.1)
    step = pg.train_step(linear_loss, opt, donate=False)
    four = jax.tree.map(lambda x: x[:4], batch)
    assert_close(
        step(params, opt.init(params), batch, mask=mask), expected_step(opt, linear_loss, params, four), rtol=1e-5
    )
    # arguments of the loss, by position and by keyword
    got = step(params, opt.init(params), batch, 2.0, shift=0.5)
    assert_close(got, expected_step(opt, lambda p, b: linear_loss(p, b, 2.0, shift=0.5), params, batch), rtol=1e-5)


def test_train_step_metrics_and_aux():
    params, batch = linear_problem()
    opt = optim.micro_adam(0.1)

    def with_aux(params, batch):
        value = linear_loss(params, batch)
        return value, {"root": jnp.sqrt(value)}

    step = pg.train_step(
        with_aux, opt, has_aux=True, metrics={"n": pg.norms(), "noise": pg.noise_scale()}, donate=False
    )
    new, _, (value, aux), metrics = step(params, opt.init(params), batch)
    assert_close((new, value), expected_step(opt, linear_loss, params, batch)[::2], rtol=1e-5)
    assert aux["root"].shape == metrics["n"].shape == (6,)
    assert_close(metrics["noise"], jax.jit(pg.grad_stats(linear_loss, pg.noise_scale()))(params, batch), rtol=1e-4)


def test_train_step_with_keys_and_bare_examples():
    params, batch = linear_problem()
    opt = optim.eve(0.1)

    def dropped(params, example, key):
        x, y = example
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return (jnp.where(kept, x, 0) @ params["w"] + params["b"] - y) ** 2

    options = {"prng_argnums": 2, "keep_batch_dim": False}
    key = jax.random.key(3)
    got = pg.train_step(dropped, opt, donate=False, **options)(params, opt.init(params), batch, key)
    assert_close(got, expected_step(opt, dropped, params, batch, key, **options), rtol=1e-5)


# Every state, so that none holds one buffer twice: donation would refuse it.
STATES = {
    **{name: ALL[name](0.05) for name in ("eve", "micro_rmsprop with momentum", "micro_adadelta", "micro_sign_sgd")},
    "skip": optim.eve(0.05, on_nonfinite="skip", weight_decay=0.1),
    "MultiSteps": optim.MultiSteps(optim.eve(0.05), 2),
    "trackers": optax.chain(
        analysis.track_noise_scale(per="coordinate"),
        analysis.track_preconditioner(per="all"),
        analysis.average_stats(0.9),
        analysis.batch_size_schedule(6, maximum=12),
        optim.eve(0.05),
    ),
    "injected": optax.inject_hyperparams(optim.eve)(0.05),
}


@pytest.mark.parametrize("opt", STATES.values(), ids=STATES)
def test_train_step_donates(opt):
    params, batch = linear_problem()
    step, state = pg.train_step(linear_loss, opt), opt.init(params)
    old = jax.tree.leaves((params, state))
    losses = []
    for _ in range(6):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    assert all(x.is_deleted() for x in old)
    assert losses[-1] < losses[0]


def test_train_step_descends_in_complex_parameters():
    target = jnp.array([1 + 2j, -3j], jnp.complex64)
    batch = target + jnp.array([[0.1j], [-0.1j], [0.1], [-0.1]])
    for opt in (
        optax.sgd(0.1),
        optim.eve(0.1),
        optim.micro_sign_sgd(optax.linear_schedule(0.1, 0.0, 100)),
        optim.micro_rmsprop(0.03),
    ):
        params = jnp.zeros(2, jnp.complex64)
        step, state = pg.train_step(lambda w, x: jnp.sum(jnp.abs(w - x) ** 2), opt), opt.init(params)
        for _ in range(150):
            params, state, _ = step(params, state, batch)
        assert_allclose(params, target, atol=0.3)


# ---------------------------------------------------------------------------------- saved and sharded


def composed():
    return optax.chain(
        analysis.track_noise_scale(),
        optim.MultiSteps(optax.chain(optax.clip(1.0), optim.eve(0.1, on_nonfinite="skip", mu_dtype=jnp.bfloat16)), 2),
        optim.micro_sign_sgd(lambda step: 0.1 / (step + 1)),
    )


def test_state_goes_through_checkpoints(tmp_path):
    """Saved in the middle of an accumulation, by orbax and by flax, and training goes on as if nothing had been."""
    opt = composed()

    @jax.jit
    def update(state, s):
        return opt.update(s["mean"], state, PARAMS, stats=s)

    _, state = update(opt.init(PARAMS), STATS[0])
    expected, last = update(state, STATS[1])

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(tmp_path / "state", jax.eval_shape(opt.init, PARAMS))
    by_flax = flax.serialization.from_bytes(opt.init(PARAMS), flax.serialization.to_bytes(state))

    for restored in (by_orbax, by_flax):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b)
        assert_close(update(restored, STATS[1]), (expected, last))


def test_sharded_state_keeps_its_sharding():
    """Eight devices: the batch over four, the parameters over two; the numbers of one device."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))

    def loss(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (3, 4)), "v": jax.random.normal(keys[1], (4, 2))[:, :1].repeat(2, 1)}
    batch = jax.random.normal(keys[2], (8, 3)), jax.random.normal(keys[3], (8, 2))
    for opt in (optim.eve(0.1), optim.MultiSteps(optim.micro_adam(0.1, on_nonfinite="skip"), 1)):
        step = pg.train_step(loss, opt, donate=False)
        alone = step(params, opt.init(params), batch)
        sharded = jax.device_put(params, columns), jax.device_put(batch, rows)
        state = opt.init(sharded[0])
        like_params = lambda state: [x for x in jax.tree.leaves(state) if x.ndim == 2]
        assert len(like_params(state)) >= 4 and all(x.sharding == columns for x in like_params(state))
        got = step(sharded[0], state, sharded[1])
        assert all(x.sharding.is_equivalent_to(columns, 2) for x in like_params(got[:2]))
        assert_close(got, alone, rtol=1e-4)


def test_statistics_merged_within_shard_map():
    """Each device sees its shard only; means weighted by counts, counts added, are those of the whole batch."""
    params, batch = linear_problem(16)
    mask = jnp.arange(16) % 5 != 0
    opt, mesh = optim.eve(0.1), Mesh(np.array(jax.devices()), ("data",))

    def step(params, state, batch, mask):
        _, s = pg.value_and_stats(linear_loss, opt.stats)(params, batch, mask=mask)
        n = jax.lax.psum(s["count"], "data")
        s = jax.lax.psum(jax.tree.map(lambda x: x * s["count"] / n, s), "data") | {"count": n}
        return opt.update(s["mean"], state, params, stats=s)

    specs = (P(), P(), P("data"), P("data"))
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))
    got = sharded(params, opt.init(params), batch, mask)
    _, s = pg.value_and_stats(linear_loss, opt.stats)(params, batch, mask=mask)
    assert_close(got, opt.update(s["mean"], opt.init(params), params, stats=s), rtol=1e-4)


# ---------------------------------------------------------------------------------- errors

ADAM_LIKE = (optim.adam, optim.micro_adam, optim.micro_adam_var, optim.micro_adam_msq, optim.eve)
SIGNS = (optim.sign_sgd, optim.sign_ema, optim.micro_sign_sgd)
OTHERS = (optim.micro_rmsprop, optim.micro_adadelta, optim.micro_adagrad)


def each(makes, name, *values):
    return [(make, name, value) for make in makes for value in values]


@pytest.mark.parametrize(
    "make, name, value",
    [
        *each((*ADAM_LIKE, *SIGNS), "b1", 1.0, -0.1),
        *each(ADAM_LIKE, "b2", 1.0, float("nan"), "0.9", None, True),
        *each(ADAM_LIKE, "eps", -1e-8, float("inf")),
        *each(ADAM_LIKE, "eps_root", -1.0),
        *each((*ADAM_LIKE, *SIGNS, *OTHERS), "learning_rate", -0.1, None, "1e-3", np.ones(2)),
        *each((*ADAM_LIKE, *SIGNS, *OTHERS), "weight_decay", -0.1),
        *each((*ADAM_LIKE, *SIGNS, *OTHERS), "mu_dtype", jnp.int32, "float31"),
        *each((*ADAM_LIKE, *SIGNS, *OTHERS), "on_nonfinite", "ignore"),
        *each((optim.micro_rmsprop,), "decay", 1.5),
        *each((optim.micro_rmsprop,), "momentum", 1.0),
        *each((optim.micro_rmsprop,), "initial_scale", -1.0),
        *each((optim.micro_adadelta,), "rho", 1.0),
        *each(OTHERS, "eps", -1.0),
        *each((optim.micro_adagrad,), "initial_accumulator_value", -1.0),
    ],
)
def test_bad_hyperparameters(make, name, value):
    arguments = {"learning_rate": 0.1, name: value}
    text = rf"{name} was given {re.escape(repr(value))}; expected .*Write.*`{name}="
    with pytest.raises(ValueError, match=text):
        make(**arguments)


def other_shape(updates, state, params=None, *, stats=None, **_):
    return optim.ask(stats, "second_moment", {"x": updates["w"]}), state


OPT, S = optim.eve(0.1), STATS[0]
ERRORS = {
    "a schedule where optax takes none": (
        lambda: optim.eve(0.1, b1=lambda k: 0.9),
        TypeError,
        "b1 was given a function; expected a number from 0 .*`optax.inject_hyperparams",
    ),
    "16-bit hyperparameters": (
        lambda: optax.inject_hyperparams(optim.eve)(0.1).init(jnp.ones(2, jnp.bfloat16)),
        ValueError,
        r"b2 was given Array\(1, dtype=bfloat16\); expected a number from 0 up to, but not including, 1",
    ),
    "weights": (
        lambda: optim.scale_by_moments(-1.0, 1.0),
        ValueError,
        "a was given -1.0; expected a number that is not",
    ),
    "one example has no variance": (
        lambda: OPT_VAR.update(S["mean"], OPT_VAR.init(PARAMS), PARAMS, stats=S | {"count": np.float32(1)}),
        ValueError,
        "weighted with 0.0 and 1.0.*the batch has 1 example; expected two or more.*larger batch",
    ),
    "no stats": (
        lambda: OPT.update(S["mean"], OPT.init(PARAMS), PARAMS),
        ValueError,
        r'without stats=, but this optimizer needs "second_moment", pg.second_moment\(\).*`value, s = pg.value_and_stats',
    ),
    "stats that are no mapping": (
        lambda: OPT.update(S["mean"], OPT.init(PARAMS), PARAMS, stats=S["mean"]["w"]),
        TypeError,
        r"stats= was given ArrayImpl; expected statistics by name. Write",
    ),
    "stats without the one": (
        lambda: OPT.update(S["mean"], OPT.init(PARAMS), PARAMS, stats={"mean": S["mean"]}),
        ValueError,
        r'stats= holds "mean", but this optimizer needs "second_moment".*for a composition .*required_stats\(opt, params\)',
    ),
    "no stats at all": (
        lambda: OPT.update(S["mean"], OPT.init(PARAMS), PARAMS, stats={}),
        ValueError,
        "stats= holds nothing",
    ),
    "statistics instead of values": (
        lambda: OPT.update(S["mean"], OPT.init(PARAMS), PARAMS, stats=OPT.stats),
        TypeError,
        r'stats\["second_moment"\] is the statistic pg.second_moment\(\) itself; expected its value',
    ),
    "another tree": (
        lambda: optax.GradientTransformationExtraArgs(lambda p: (), other_shape).update(PARAMS, (), stats=S),
        ValueError,
        "second_moment has the tree .*'b'.*and the updates .*'x'.*expected the same, but for masked leaves",
    ),
    "flattened updates": (
        lambda: optim.required_stats(optax.flatten(OPT), PARAMS),
        ValueError,
        "second_moment has the tree.*leave out wrappers that rebuild the updates, such as `optax.flatten`",
    ),
    "a statistic without its definition": (
        lambda: optim.required_stats(by_hand({"abs": None}), PARAMS),
        ValueError,
        r'ask\(stats, "abs"\) names none of "mean".*`ask\(stats, "abs", updates, pg.abs_mean\(\)\)`',
    ),
    "two statistics of one name": (
        lambda: optim.required_stats(
            optax.chain(by_hand({"q": pg.quantile(0.1)}), by_hand({"q": pg.median()})), PARAMS
        ),
        ValueError,
        r'"q" is asked for as pg.quantile\(0.1\) and as pg.median\(\).*give the two different names',
    ),
    "MultiSteps of what": (
        lambda: optim.MultiSteps(0.1, 2),
        TypeError,
        "first argument, given float.*`pg.optim.MultiSteps",
    ),
    "MultiSteps of none": (
        lambda: optim.MultiSteps(OPT, 0),
        ValueError,
        "every_k_schedule was given 0; expected a positive",
    ),
    "MultiSteps of sums": (
        lambda: optim.MultiSteps(OPT, 2, use_grad_mean=False),
        ValueError,
        "use_grad_mean=False would set .*expected True. Write a learning rate",
    ),
    "MultiSteps in integers": (
        lambda: optim.MultiSteps(OPT, 2, accumulator_dtype=int),
        ValueError,
        "accumulator_dtype was given <class 'int'>; expected None or a float dtype",
    ),
    "MultiSteps of a composition": (
        lambda: optim.MultiSteps(optax.chain(OPT), 2).stats,
        AttributeError,
        r"composition has no `.stats`.*`pg.optim.required_stats\(opt, params\)`",
    ),
    "train_step of what": (
        lambda: pg.train_step(linear_loss, optim.eve),
        TypeError,
        r"expected an optax transformation as the second argument, given function. Write.*`pg.train_step\(loss,",
    ),
    "train_step of which": (
        lambda: pg.train_step(linear_loss, OPT, argnums=(0, 1)),
        ValueError,
        r"trains the first argument of the loss, given argnums=\(0, 1\). Write a loss that takes",
    ),
    "train_step with one example": (
        lambda: pg.train_step(linear_loss, OPT_VAR)(PARAMS_1, OPT_VAR.init(PARAMS_1), linear_problem(1)[1]),
        ValueError,
        "weighted with 0.0 and 1.0.*the batch has 1 example; expected two or more",
    ),
    "train_step, at once": (lambda: pg.train_step(linear_loss, OPT, metrics=pg.mean), TypeError, "Write `pg.mean"),
    "another rule": (
        lambda: optim.scale_learning_rate(0.1, 32, 64, rule="square"),
        ValueError,
        'unknown rule \'square\': expected one of "sqrt", "linear"',
    ),
    "no batch": (
        lambda: optim.scale_learning_rate(0.1, 32, 0),
        ValueError,
        "batch was given 0; expected a positive number",
    ),
    "no base": (lambda: optim.scale_learning_rate(-0.1, 32, 64), ValueError, "base was given -0.1; expected"),
}
OPT_VAR, PARAMS_1 = optim.micro_adam_var(0.1), linear_problem()[0]


@pytest.mark.parametrize("call, error, text", ERRORS.values(), ids=ERRORS)
def test_errors_say_what_to_write(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert type(caught.value) is error and "{" not in re.sub(r"`[^`]*`|PyTreeDef\(.*?\)", "", str(caught.value))


def test_equal_statistics_of_one_name_are_one():
    opt = optax.chain(by_hand({"q": pg.median()}), by_hand({"q": pg.median()}))
    assert set(optim.required_stats(opt, PARAMS)) == {"mean", "q"}


def test_an_error_within_a_loss_is_not_ours():
    """What users write wrong in a loss is said as in value_and_stats."""
    with pytest.raises(TypeError, match="must return a scalar"):
        step = pg.train_step(lambda p, b: p["w"], OPT, donate=False)
        step(linear_problem()[0], OPT.init(linear_problem()[0]), linear_problem()[1])
