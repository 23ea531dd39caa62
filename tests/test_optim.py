"""The rules of `pergrad.optim`: against NumPy in float64, against optax, against each other, and at the edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import pergrad as pg
from optimizers import ALL, assert_close, every_optimizer, stats_of
from oracle import QUICK_TO_COMPILE
from pergrad import optim


def trajectory(opt, params, draws, gradient=lambda w, x: w - x):
    """Parameters after each step of a scan, on a quadratic: an example x pulls w towards itself."""

    def body(carry, x):
        params, state = carry
        stats = stats_of(jax.tree.map(lambda p, x: jax.vmap(gradient, (None, 0))(p, x), params, x))
        updates, state = opt.update(stats["mean"], state, params, stats=stats)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    run = jax.jit(lambda: jax.lax.scan(body, (params, opt.init(params)), draws)[1], compiler_options=QUICK_TO_COMPILE)
    return run()


# ---------------------------------------------------------------------------------- against NumPy
#
# Each rule once more, from its definition, one number at a time if need be: a function of the gradients [B, d] of step t,
# with what it remembers in a dict.


def adam_like(nu, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, nesterov=False, clamp=False):
    def rule(g, t, memory):
        mean = g.mean(0)
        memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * mean
        memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * nu(g)
        m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
        if nesterov:
            m = b1 * memory["m"] / (1 - b1 ** (t + 1)) + (1 - b1) * mean / (1 - b1**t)
        return m / (np.sqrt((np.maximum(v, 0) if clamp else v) + eps_root) + eps)

    return rule


def eve(b1=0.9, b2=0.999, eps=1e-8, correction=True):
    def rule(g, t, memory):
        memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g.mean(0)
        memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * (g**2).mean(0)
        m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
        return m / (np.sqrt(v / len(g) + correction * (1 - 1 / len(g)) * m**2) + eps)

    return rule


def from_all_steps(g, memory, weigh):
    """E ḡ² by Eve's idea, from sums over all steps so far: `weigh` says what the step k steps ago weighs."""
    history = memory.setdefault("history", [])
    history.append(g)
    weights = np.array([weigh(k) for k in range(len(history))])[::-1]
    m = sum(w * h.mean(0) for w, h in zip(weights, history)) / weights.sum()
    s = sum(w * (h**2).mean(0) for w, h in zip(weights, history)) / weights.sum()
    return s / len(g) + (1 - 1 / len(g)) * m**2, weights.sum()


def rmsprop(decay=0.9, eps=1e-8, initial=0.0, inside=True, corrected=False):
    def rule(g, t, memory):
        expected, weight = from_all_steps(g, memory, lambda k: (1 - decay) * decay**k)
        v = weight * expected + decay**t * initial
        v = v / weight if corrected else v
        return g.mean(0) / (np.sqrt(v + eps) if inside else np.sqrt(v) + eps)

    return rule


def adadelta(rho=0.9, eps=1e-6):
    def rule(g, t, memory):
        expected, weight = from_all_steps(g, memory, lambda k: (1 - rho) * rho**k)
        u = np.sqrt(memory.get("x", 0) + eps) / np.sqrt(weight * expected + eps) * g.mean(0)
        memory["x"] = rho * memory.get("x", 0) + (1 - rho) * u**2
        return u

    return rule


def adagrad(initial=0.1, eps=1e-7):
    def rule(g, t, memory):
        expected, weight = from_all_steps(g, memory, lambda k: 1.0)
        return g.mean(0) / np.sqrt(initial + weight * expected + eps)

    return rule


def signs(before, after, b1=0.9):
    def rule(g, t, memory):
        memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * before(g)
        return after(memory["m"])

    return rule


def same(x):
    return x


def var(g):
    return g.var(0, ddof=1)


def second(g):
    return (g**2).mean(0)


def squared_mean(g):
    return g.mean(0) ** 2


def unbiased_squared_mean(g):
    return g.mean(0) ** 2 - g.var(0, ddof=1) / len(g)


RULES = {
    "adam": (optim.adam, {}, adam_like(squared_mean)),
    "adam, other arguments": (
        optim.adam,
        {"b1": 0.7, "b2": 0.8, "eps": 1e-2, "eps_root": 1e-3, "nesterov": True},
        adam_like(squared_mean, 0.7, 0.8, 1e-2, 1e-3, nesterov=True),
    ),
    "micro_adam": (optim.micro_adam, {}, adam_like(second)),
    "micro_adam, nesterov": (optim.micro_adam, {"nesterov": True, "b2": 0.9}, adam_like(second, b2=0.9, nesterov=True)),
    "micro_adam_var": (optim.micro_adam_var, {"b2": 0.9}, adam_like(var, b2=0.9)),
    "micro_adam_msq": (
        optim.micro_adam_msq,
        {"b2": 0.6, "eps": 0.1},
        adam_like(unbiased_squared_mean, b2=0.6, eps=0.1, clamp=True),
    ),
    "eve": (optim.eve, {}, eve()),
    "eve, other arguments": (optim.eve, {"b1": 0.5, "b2": 0.7, "eps": 1e-3}, eve(0.5, 0.7, 1e-3)),
    "eve without correction": (optim.eve, {"correction": False}, eve(correction=False)),
    "micro_rmsprop": (optim.micro_rmsprop, {}, rmsprop()),
    "micro_rmsprop, other arguments": (
        optim.micro_rmsprop,
        {"decay": 0.7, "eps": 1e-3, "initial_scale": 0.5, "eps_in_sqrt": False},
        rmsprop(0.7, 1e-3, 0.5, inside=False),
    ),
    "micro_rmsprop, bias_correction": (
        optim.micro_rmsprop,
        {"bias_correction": True, "initial_scale": 0.5},
        rmsprop(initial=0.5, corrected=True),
    ),
    "micro_adadelta": (optim.micro_adadelta, {}, adadelta()),
    "micro_adadelta, other arguments": (optim.micro_adadelta, {"rho": 0.6, "eps": 1e-2}, adadelta(0.6, 1e-2)),
    "micro_adagrad": (optim.micro_adagrad, {}, adagrad()),
    "micro_adagrad, other arguments": (
        optim.micro_adagrad,
        {"initial_accumulator_value": 0.0, "eps": 1e-2},
        adagrad(0.0, 1e-2),
    ),
    "sign_sgd": (optim.sign_sgd, {}, signs(lambda g: np.sign(g.mean(0)), same)),
    "sign_ema": (optim.sign_ema, {"b1": 0.7}, signs(lambda g: g.mean(0), np.sign, 0.7)),
    "micro_sign_sgd": (optim.micro_sign_sgd, {}, signs(lambda g: np.sign(g).mean(0), same)),
}


@pytest.mark.parametrize("make, arguments, rule", RULES.values(), ids=RULES)
def test_rules_are_their_definitions(make, arguments, rule):
    """100 noisy steps in float64, with a schedule for the learning rate and one for the weight decay of one leaf."""
    rng, steps, size, decay = np.random.default_rng(0), 100, 5, np.array([1.0, 1.0, 1.0, 0.0])
    draws = rng.normal([0.5, -1.0, 0.01, 2.0], [1.0, 0.1, 1.0, 3.0], (steps, size, 4))
    w = start = np.array([0.4, 0.1, -1.0, 0.0])
    expected, memory = [], {}
    for t, x in enumerate(draws, start=1):
        rate, decayed = 0.1 / t, 0.01 * t
        w = w - rate * (rule(w - x, t, memory) + decayed * decay * w)
        expected.append(w)
    with jax.enable_x64(True):
        schedules = {"learning_rate": lambda k: 0.1 / (k + 1), "weight_decay": lambda k: 0.01 * (k + 1)}
        opt = make(**arguments, **schedules, mask={"w": True, "b": False})
        tree = lambda x: {"w": jnp.asarray(x[..., :3]), "b": jnp.asarray(x[..., 3])}
        got = trajectory(opt, tree(start), tree(draws))
        assert_allclose(got["w"], np.array(expected)[:, :3], rtol=1e-9, atol=1e-12)
        assert_allclose(got["b"], np.array(expected)[:, 3], rtol=1e-9, atol=1e-12)


def test_momentum_of_rmsprop_and_its_weight_decay():
    """Momentum comes after the learning rate, as in optax; weight decay is no part of it."""
    rng, beta = np.random.default_rng(1), 0.8
    draws = rng.normal(1.0, 1.0, (30, 4, 2))
    w, trace, rule, memory, expected = np.zeros(2), 0, rmsprop(), {}, []
    for t, x in enumerate(draws, start=1):
        u = -0.1 / t * rule(w - x, t, memory)
        trace = u + beta * trace
        w = w + (u + beta * trace) - 0.1 / t * 0.3 * w
        expected.append(w)
    with jax.enable_x64(True):
        opt = optim.micro_rmsprop(lambda k: 0.1 / (k + 1), momentum=beta, nesterov=True, weight_decay=0.3)
        assert_allclose(trajectory(opt, jnp.zeros(2), jnp.asarray(draws)), expected, rtol=1e-9)


# ---------------------------------------------------------------------------------- against optax


def gradient_pairs(steps, size, shape=(40,), scale=1.0):
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.normal(0.1, scale, (steps, size, *shape)), jnp.float32)


def updates_side_by_side(ours, optaxs, gradients, params):
    """The updates of both for the same gradients, [steps, 2, …]; the parameters of each follow its own."""

    def body(carry, g):
        (p, s), (q, r) = carry
        stats = stats_of(g)
        a, s = ours.update(stats["mean"], s, p, stats=stats)
        b, r = optaxs.update(stats["mean"], r, q)
        return ((p + a, s), (q + b, r)), (a, b)

    start = ((params, ours.init(params)), (params, optaxs.init(params)))
    return jax.jit(lambda: jax.lax.scan(body, start, gradients)[1])()


SCHEDULE = optax.cosine_decay_schedule(1e-2, 200)
ADAMS = {
    "adam": (optim.adam(1e-2), optax.adam(1e-2)),
    "adam, schedule": (optim.adam(SCHEDULE, b1=0.8, b2=0.95), optax.adam(SCHEDULE, b1=0.8, b2=0.95)),
    "adam, eps_root": (optim.adam(1e-2, eps=1e-3, eps_root=1e-4), optax.adam(1e-2, eps=1e-3, eps_root=1e-4)),
    "nadam": (optim.adam(1e-2, nesterov=True), optax.nadam(1e-2)),
    "adamw": (optim.adam(SCHEDULE, weight_decay=0.1), optax.adamw(SCHEDULE, weight_decay=0.1)),
    "adamw, mask": (
        optim.adam(1e-2, weight_decay=0.1, mask=lambda p: False),
        optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: False),
    ),
    "nadamw": (
        optim.adam(1e-2, weight_decay=lambda k: 0.1 / (k + 1.0), nesterov=True),
        optax.nadamw(1e-2, weight_decay=lambda k: 0.1 / (k + 1.0)),
    ),
    "sign_sgd": (optim.sign_sgd(SCHEDULE, b1=0.0), optax.sign_sgd(SCHEDULE)),
}


@pytest.mark.parametrize("ours, optaxs", ADAMS.values(), ids=ADAMS)
def test_adam_is_that_of_optax_step_by_step(ours, optaxs):
    a, b = updates_side_by_side(ours, optaxs, gradient_pairs(200, 8), jnp.ones(40))
    assert_close(a, b)


ONE_EXAMPLE = {
    "eve": (optim.eve(1e-2), optax.adam(1e-2)),
    "eve, nadamw": (optim.eve(1e-2, weight_decay=0.1, nesterov=True), optax.nadamw(1e-2, weight_decay=0.1)),
    "micro_adam": (optim.micro_adam(1e-2), optax.adam(1e-2)),
    "rmsprop": (optim.micro_rmsprop(1e-2), optax.rmsprop(1e-2)),
    "rmsprop, momentum": (
        optim.micro_rmsprop(SCHEDULE, decay=0.8, momentum=0.9, initial_scale=0.3),
        optax.rmsprop(SCHEDULE, decay=0.8, momentum=0.9, initial_scale=0.3),
    ),
    "rmsprop, nesterov": (
        optim.micro_rmsprop(1e-2, momentum=0.9, nesterov=True, eps_in_sqrt=False, bias_correction=True),
        optax.rmsprop(1e-2, momentum=0.9, nesterov=True, eps_in_sqrt=False, bias_correction=True),
    ),
    "adadelta": (optim.micro_adadelta(0.5, rho=0.8), optax.adadelta(0.5, rho=0.8)),
    "adagrad": (optim.micro_adagrad(1e-2), optax.adagrad(1e-2)),
    "adagrad from 0": (
        optim.micro_adagrad(1e-2, initial_accumulator_value=0.0),
        optax.adagrad(1e-2, initial_accumulator_value=0.0),
    ),
    "micro_sign_sgd": (optim.micro_sign_sgd(1e-2, b1=0.0), optax.sign_sgd(1e-2)),
}


@pytest.mark.parametrize("ours, optaxs", ONE_EXAMPLE.values(), ids=ONE_EXAMPLE)
def test_of_one_example_each_rule_is_the_classical_one(ours, optaxs):
    a, b = updates_side_by_side(ours, optaxs, gradient_pairs(100, 1), jnp.ones(40))
    assert_close(a, b)


def test_a_model_trains_as_with_optax():
    """The statistics by surgery, 200 steps: the same parameters in the end; and eve, on one example, is adam."""

    def loss(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2)

    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (3, 8)), "b": jnp.zeros(8), "v": jax.random.normal(keys[1], (8,))}
    data = jax.random.normal(keys[2], (200, 4, 3)), jax.random.normal(keys[3], (200, 4))

    def train(opt, data, gradient):
        def body(carry, batch):
            params, state = carry
            updates, state = gradient(opt, params, batch, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda: jax.lax.scan(body, (params, opt.init(params)), data)[0][0])()

    def ours(opt, params, batch, state):
        value, s = pg.value_and_stats(loss, opt.stats)(params, batch)
        return opt.update(s["mean"], state, params, stats=s)

    def plain(opt, params, batch, state):
        return opt.update(jax.grad(loss)(params, batch), state, params)

    reference = train(optax.adamw(1e-3, weight_decay=0.1), data, plain)
    got = train(optim.adam(1e-3, weight_decay=0.1), data, ours)
    one_example = jax.tree.map(lambda x: x[:, :1], data)
    eve_reference = train(optax.adam(1e-3), one_example, plain)
    eve_got = train(optim.eve(1e-3), one_example, ours)
    for a, b in zip(jax.tree.leaves((got, eve_got)), jax.tree.leaves((reference, eve_reference))):
        assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_optax_adam_goes_on_with_ours():
    theirs, ours, params = optax.adam(1e-2), optim.micro_adam(1e-2), jnp.ones(3)
    g = jnp.array([1.0, -2.0, 0.1])
    _, state = theirs.update(g, theirs.init(params))
    assert jax.tree.structure(state) == jax.tree.structure(ours.init(params))
    a, _ = theirs.update(g, state)
    b, _ = ours.update(g, state, stats={"mean": g, "second_moment": g**2})
    assert_allclose(a, b, rtol=1e-6)


# ---------------------------------------------------------------------------------- against each other

finite = st.floats(-10, 10, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
batches = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(finite, min_size=2 * size, max_size=2 * size), min_size=1, max_size=4).map(
        lambda rows: np.array(rows, np.float64).reshape(len(rows), size, 2)
    )
)
decays = st.floats(0, 0.999)


def core_updates(core, gradients):
    state, out = core.init(jnp.zeros(2)), []
    for g in gradients:
        stats = stats_of(jnp.asarray(g))
        updates, state = core.update(stats["mean"], state, stats=stats)
        out.append(updates)
    return out, state


@given(batches, decays, decays)
def test_the_family_holds_adam_and_micro_adam(gradients, b1, b2):
    with jax.enable_x64(True):
        options = {"b1": b1, "b2": b2, "eps": 1e-3}
        adam, _ = core_updates(optim.scale_by_moments(1, lambda b: 1 / b, **options), gradients)
        reference, _ = core_updates(optax.with_extra_args_support(optax.scale_by_adam(**options)), gradients)
        assert_allclose(adam, reference, rtol=1e-6, atol=1e-9)
        micro, _ = core_updates(optim.scale_by_moments(1, 1, **options), gradients)
        rule, memory = adam_like(second, **options), {}
        assert_allclose(micro, [rule(g, t, memory) for t, g in enumerate(gradients, 1)], rtol=1e-6, atol=1e-9)


@given(batches, st.floats(0, 3), st.floats(0, 3))
def test_the_family_is_linear_in_its_weights(gradients, a, c):
    with jax.enable_x64(True):
        nu = lambda a, c: core_updates(optim.scale_by_moments(a, c), gradients[:2])[1].nu
        assert_allclose(nu(a, c), a * nu(1, 0) + c * nu(0, 1), rtol=1e-9, atol=1e-12 * np.max(gradients**2))


def test_where_the_weights_agree_one_example_is_enough():
    g = np.random.default_rng(8).normal(size=(3, 1, 2))
    adam, _ = core_updates(optim.scale_by_moments(1, lambda b: 1 / b), g)
    traced = jax.jit(lambda: core_updates(optim.scale_by_moments(1, lambda b: 1 / b), g)[0])()
    expected, _ = core_updates(optax.with_extra_args_support(optax.scale_by_adam()), g)
    assert_close([adam, traced], [expected, expected], rtol=1e-5)


def test_weights_known_only_when_the_program_runs_give_the_same():
    """As `optax.inject_hyperparams` has them: nothing in Python may depend on their values."""
    gradients = np.random.default_rng(7).normal(size=(3, 4, 2))
    of = lambda a, c, b1=0.9, b2=0.99: core_updates(optim.scale_by_moments(a, c, b1, b2), gradients)[1].nu
    traced = jax.jit(of)
    for a, c in ((1.0, 1.0), (0.0, 2.0), (0.5, 0.25)):
        assert_allclose(traced(a, c), of(a, c), rtol=1e-4)


def test_the_estimates_are_unbiased():
    g = np.random.default_rng(3).normal(0.5, 1.0, (3, 200_000))  # batches of three, at 200,000 coordinates
    stats = stats_of(jnp.asarray(g, jnp.float32))

    def first_nu(a, c):
        core = optim.scale_by_moments(a, c, b2=0.0)
        return np.asarray(core.update(stats["mean"], core.init(stats["mean"]), stats=stats)[1].nu)

    assert_allclose(first_nu(1, 0).mean(), 0.25, atol=0.01)
    assert_allclose(first_nu(0, 1).mean(), 1.0, atol=0.01)
    assert (first_nu(1, 0) < 0).mean() > 0.2  # clamped after the average, not before


def test_eve_knows_its_preconditioner_better_than_adam():
    """Of the same mean, and where noise outweighs signal, a standard error lower by √B, while B is below m's length."""
    size, steps, mu = 16, 400, 0.01
    draws = jax.random.normal(jax.random.key(0), (steps, size, 1000)) + mu

    def nu(opt, estimate):
        def body(state, g):
            stats = stats_of(g)
            return opt.update(stats["mean"], state, stats=stats)[1], None

        state = jax.jit(lambda: jax.lax.scan(body, opt.init(jnp.zeros(1000)), draws)[0])()[0]
        return np.asarray(estimate(state.mu, state.nu / (1 - 0.99**steps)))

    adam = nu(optim.adam(1.0, 0.99, 0.99), lambda m, v: v)
    eve_ = nu(optim.eve(1.0, 0.99, 0.99), lambda m, v: v / size + (1 - 1 / size) * m**2)
    assert_allclose([adam.mean(), eve_.mean()], mu**2 + 1 / size, rtol=0.03)
    assert_allclose(adam.std() / eve_.std(), np.sqrt(size), rtol=0.1)


# ---------------------------------------------------------------------------------- learning rates for another batch

EXAMPLES, COORDINATES, START, DECAY = 2400, 1000, 0.05, 0.7
# For each optimizer the rule that it takes, and d √B-power aside: η such that its drift is that of w' = −w per DECAY/EXAMPLES.
SCALED = {
    "sgd": (optax.sgd, "linear", lambda b: b),
    "micro_adam": (optim.micro_adam, "linear", lambda b: b),
    "micro_sign_sgd": (optim.micro_sign_sgd, "linear", lambda b: b * np.sqrt(np.pi / 2)),
    "adam": (optim.adam, "sqrt", lambda b: np.sqrt(b)),
    "eve": (optim.eve, "sqrt", lambda b: np.sqrt(b)),
    "sign_sgd": (optim.sign_sgd, "sqrt", lambda b: np.sqrt(b * np.pi / 2)),
}


def drift_and_diffusion(opt, size):
    """Where COORDINATES parameters are after so many examples, and how far spread: examples pull to 0 with noise 1."""
    opt = optax.with_extra_args_support(opt)

    def body(carry, key):
        w, state = carry
        stats = stats_of(w - jax.random.normal(key, (size, COORDINATES)))
        updates, state = opt.update(stats["mean"], state, w, stats=stats)
        return (w + updates, state), None

    start = jnp.full(COORDINATES, START)
    keys = jax.random.split(jax.random.key(size), EXAMPLES // size)
    w = jax.jit(lambda: jax.lax.scan(body, (start, opt.init(start)), keys)[0][0])()
    return float(w.mean()), float(w.std())


@pytest.mark.parametrize("make, rule, rate", SCALED.values(), ids=SCALED)
def test_scaled_learning_rates_keep_drift_and_diffusion(make, rule, rate):
    """After as many examples, in smaller and larger batches: the same place, the same spread, as derived there."""
    base = DECAY / EXAMPLES * rate(4)
    small = drift_and_diffusion(make(base), 4)
    scaled, other = (
        optim.scale_learning_rate(base, 4, 16, rule=r) for r in (rule, {"sqrt": "linear", "linear": "sqrt"}[rule])
    )
    large = drift_and_diffusion(make(scaled), 16)
    assert_allclose(small[0], START * np.exp(-DECAY), rtol=0.06)
    assert_allclose(large, small, rtol=0.1)
    wrong = drift_and_diffusion(make(other), 16)
    assert abs(wrong[1] / small[1] - 1) > 0.3 and abs(wrong[0] / small[0] - 1) > 0.2


def test_scaled_schedules():
    schedule = optim.scale_learning_rate(optax.linear_schedule(1.0, 0.0, 10), 16, 4)
    assert_allclose([schedule(0), schedule(5)], [0.5, 0.25])
    assert optim.scale_learning_rate(0.1, 16, 64, "linear") == pytest.approx(0.4)


# ---------------------------------------------------------------------------------- at the edges


def steps_of(opt, stats, params, count=3):
    state, out = opt.init(params), []
    for _ in range(count):
        updates, state = opt.update(stats["mean"], state, params, stats=stats)
        out.append(updates)
    return out, state


@every_optimizer
def test_zero_gradients_move_nothing(make):
    out, _ = steps_of(make(0.1), stats_of(jnp.zeros((4, 3))), jnp.ones(3))
    assert all((u == 0).all() for u in out)
    out, _ = steps_of(make(0.1, weight_decay=0.5), stats_of(jnp.zeros((4, 3))), jnp.ones(3))
    assert_allclose(out, np.full((3, 3), -0.05), rtol=1e-6)


def test_constant_gradients():
    """All examples and steps agree: what is documented of each rule."""
    g = np.array([2.0, -0.5, 1e-3], np.float32)
    stats = stats_of(jnp.asarray(np.tile(g, (16, 1))))
    for make in (optim.adam, optim.micro_adam, optim.eve, optim.micro_adam_msq):
        assert_allclose(steps_of(make(0.1), stats, jnp.zeros(3))[0], np.tile(-0.1 * np.sign(g), (3, 1)), rtol=1e-4)
    # without the correction, √B times as far
    ablation = steps_of(optim.eve(0.1, correction=False), stats, jnp.zeros(3))[0]
    assert_allclose(ablation, np.tile(-0.4 * np.sign(g), (3, 1)), rtol=1e-4)
    # no variance: the step is −η m̂/ε
    assert_allclose(steps_of(optim.micro_adam_var(0.1, eps=0.5), stats, jnp.zeros(3))[0][2], -0.2 * g, rtol=1e-2)
    for make, length in ((optim.sign_sgd, 1 - 0.9**3), (optim.micro_sign_sgd, 1 - 0.9**3), (optim.sign_ema, 1)):
        assert_allclose(steps_of(make(0.1), stats, jnp.zeros(3))[0][2], -0.1 * length * np.sign(g), rtol=1e-5)
    classical = {
        optim.micro_rmsprop: optax.rmsprop,
        optim.micro_adadelta: optax.adadelta,
        optim.micro_adagrad: optax.adagrad,
    }
    for ours, theirs in classical.items():  # as where B = 1
        a, _ = steps_of(ours(0.1), stats, jnp.zeros(3))
        b, _ = steps_of(optax.with_extra_args_support(theirs(0.1)), stats, jnp.zeros(3))
        assert_allclose(a, b, rtol=1e-4)


@every_optimizer
def test_one_example_that_is_not_finite(make):
    """Propagated as arithmetic does; or skipped, counted, and all goes on as if it had never been."""
    good, params = stats_of(jnp.ones((4, 3))), jnp.ones(3)
    skipping = make(0.1, on_nonfinite="skip", weight_decay=0.1)
    plain = make(0.1, weight_decay=0.1)
    update = jax.jit(lambda s, state: skipping.update(s["mean"], state, params, stats=s))
    expected, reference = steps_of(plain, good, params, 2)
    for value in (np.nan, np.inf):
        bad = stats_of(jnp.ones((4, 3)).at[1, 2].set(value))
        first, state = update(good, skipping.init(params))
        skipped, state = update(bad, state)
        second, state = update(good, state)
        assert optax.tree.get(state, "skipped") == 1
        assert (skipped == 0).all()
        assert_close([first, second], expected, rtol=1e-5)
        assert_close(state.inner_state, reference, rtol=1e-5)
        if np.isnan(value):
            propagated, _ = plain.update(bad["mean"], plain.init(params), params, stats=bad)
            assert np.isnan(propagated[2]) and np.isfinite(propagated[:2]).all()


def test_skipping_looks_at_statistics_too():
    """What optax.apply_if_finite cannot see: updates were clipped, the second moment is infinite."""
    stats = {"mean": jnp.ones(2), "second_moment": jnp.array([1.0, np.inf]), "count": 4.0}
    opt = optim.eve(0.1, on_nonfinite="skip")
    updates, state = opt.update(stats["mean"], opt.init(jnp.zeros(2)), stats=stats)
    assert (updates == 0).all() and state.skipped == 1 and (state.inner_state[0].nu == 0).all()
    # a square that overflows, of an update that is finite
    opt = optim.adam(0.1, on_nonfinite="skip")
    assert opt.update(jnp.array([1e30]), opt.init(jnp.zeros(1)))[1].skipped == 1


def test_a_mask_that_leaves_one_example_or_none():
    """The count is an array then: no error is possible, and no number but NaN."""
    g, one, none = jnp.array([[2.0], [3.0]]), jnp.array([True, False]), jnp.array([False, False])
    run = jax.jit(lambda make, mask: steps_of(make(0.1), stats_of(g, mask), jnp.zeros(1), 1)[0][0], static_argnums=0)
    for make in (optim.micro_adam_var, optim.micro_adam_msq):
        assert np.isnan(run(make, one))
        rounded = stats_of(g, one) | {"second_moment": jnp.array([3.9])}  # s − ḡ² of one example is 0, to rounding
        assert np.isnan(jax.jit(lambda s, make=make: steps_of(make(0.1), s, jnp.zeros(1), 1)[0][0])(rounded))
    for make in (
        optim.eve,
        optim.micro_adam,
        optim.micro_rmsprop,
        optim.micro_adadelta,
    ):  # of one example: the classical
        assert_allclose(run(make, one), steps_of(make(0.1), stats_of(g[:1]), jnp.zeros(1), 1)[0][0], rtol=1e-5)
    assert np.isnan(run(optim.eve, none))
    skipping = optim.eve(0.1, on_nonfinite="skip")
    updates, state = skipping.update(jnp.array([np.nan]), skipping.init(jnp.zeros(1)), stats=jax.jit(stats_of)(g, none))
    assert updates == 0 and state.skipped == 1


def test_a_count_known_only_when_the_program_runs_gives_the_same():
    stats = stats_of(jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]]))
    for make in (optim.eve, optim.micro_rmsprop, ALL["micro_adam_var"], ALL["micro_adam_msq"]):
        known = steps_of(make(0.1), stats | {"count": np.float32(3)}, jnp.zeros(2))[0]
        traced = jax.jit(lambda n, make=make: steps_of(make(0.1), stats | {"count": n}, jnp.zeros(2))[0])(3)
        assert_allclose(known, traced, rtol=1e-4)


@every_optimizer
def test_state_keeps_its_types(make):
    """In a scan, whose carry may not change: 16-bit and complex parameters, state in a chosen dtype, one-number leaves."""
    params = {
        "half": jnp.ones((2, 3), jnp.bfloat16),
        "complex": jnp.ones(3, jnp.complex64),
        "one": jnp.zeros(()),
        "empty": None,
    }
    rng = np.random.default_rng(4)
    wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)  # as statistics are
    g = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(5, *p.shape)), wide(p)), params)
    g["complex"] *= 1 + 2j
    stats = stats_of(g)
    for options in ({}, {"mu_dtype": jnp.bfloat16, "on_nonfinite": "skip", "weight_decay": 0.1}):
        opt = make(0.1, **options)

        def step(carry, _=None, opt=opt):
            params, state = carry
            updates, state = opt.update(stats["mean"], state, params, stats=stats)
            return (optax.apply_updates(params, updates), state), updates

        start = params, opt.init(params)
        jax.eval_shape(lambda start, step=step: jax.lax.scan(step, start, length=3), start)
        (trained, state), updates = step(start)
        assert all(np.isfinite(np.asarray(x, np.complex64)).all() for x in jax.tree.leaves((trained, updates)))
        kinds = {x.dtype.name for x in jax.tree.leaves(state)}
        assert ("bfloat16" in kinds) == ("mu_dtype" in options) and "complex64" in kinds
        assert kinds <= {"bfloat16", "float32", "complex64", "int32"}


def test_sixteen_bit_parameters_have_float32_moments():
    g = stats_of(jnp.asarray(np.random.default_rng(5).normal(size=(4, 50)), jnp.float32))
    wide, narrow = (steps_of(optim.eve(0.1), g, jnp.zeros(50, dtype))[0] for dtype in (jnp.float32, jnp.bfloat16))
    assert_allclose(narrow, wide, rtol=1e-6)
    rounded = steps_of(optim.eve(0.1, mu_dtype=jnp.bfloat16), g, jnp.zeros(50))[0]
    assert_allclose(rounded, wide, rtol=0.02)
    assert not np.array_equal(rounded[1], wide[1])


def test_complex_parameters_are_divided_by_one_modulus():
    """|g|² is one number: the update points along g. (Of two real parameters, each would have its own.)"""
    g = jnp.asarray(np.random.default_rng(6).normal(size=(2, 4, 30)).view(np.complex128)[..., 0], jnp.complex64)
    stats = stats_of(g.reshape(4, -1)[:, :2])
    for make in (optim.eve, optim.micro_adam, optim.micro_rmsprop, optim.micro_adadelta, optim.micro_adagrad):
        (u,), _ = steps_of(make(0.1), stats, jnp.zeros(2, jnp.complex64), 1)
        assert_allclose(jnp.angle(-u), jnp.angle(stats["mean"]), rtol=1e-4)


def test_step_counters_do_not_overflow():
    most = np.iinfo(np.int32).max
    stats = stats_of(jnp.array([[1.0], [3.0]]))
    for make in (optim.eve, functools.partial(optim.adam, nesterov=True), optim.micro_rmsprop, optim.micro_adagrad):
        opt = make(0.1)
        state = steps_of(opt, stats, jnp.zeros(1))[1]
        late = optax.tree.set(state, count=jnp.asarray(most, jnp.int32))
        updates, late = opt.update(stats["mean"], late, stats=stats)
        assert optax.tree.get(late, "count") == most and np.isfinite(updates).all() and updates < 0


def test_a_step_needs_no_copies_of_the_state():
    """Donated state is written in place: no temporary array of the parameters' size, and one where the step may be refused."""
    size = 1 << 16
    params, stats = (
        jnp.zeros(size),
        {k: jnp.ones(size) for k in ("mean", "second_moment", "sign_mean")} | {"count": 4.0},
    )
    for make in (optim.adam, optim.eve, optim.micro_adam_var, optim.micro_rmsprop, optim.micro_sign_sgd):
        for on_nonfinite, allowed in (("propagate", 0.1), ("skip", 1.1)):
            opt = make(0.1, on_nonfinite=on_nonfinite)

            def step(state, params, stats, opt=opt):
                updates, state = opt.update(stats["mean"], state, params, stats=stats)
                return state, params + updates

            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(opt.init(params), params, stats).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < allowed * params.nbytes
