"""`pergrad.analysis`: every formula against NumPy in float64, or against a simulation that does not use it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import pergrad as pg
from pergrad import analysis

PLACEMENTS = analysis.Placements._fields


def stats_of(gradients, **more):
    """The results of `analysis.STATS` for per-example gradients [B, ...]."""
    g = np.asarray(gradients, np.float64)
    return {"mean": jnp.asarray(g.mean(0)), "second_moment": jnp.asarray((g**2).mean(0)), "count": len(g), **more}


def exact(mean, std=1.0):
    """The statistics of a whole distribution."""
    mean = jnp.asarray(mean, jnp.float32)
    return {"mean": mean, "second_moment": mean**2 + std**2, "count": jnp.inf}


def tree_stats(batches):
    """Of several leaves at once: a tree of [B, ...] -> statistics with trees."""
    parts = jax.tree.map(stats_of, batches)
    of = lambda key: jax.tree.map(lambda p: p[key], parts, is_leaf=lambda p: "count" in p)
    return {"mean": of("mean"), "second_moment": of("second_moment"), "count": len(jax.tree.leaves(batches)[0])}


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["hidden"]["w"]) @ params["out"]["w"] + params["out"]["b"] - y) ** 2)


def model(examples=12):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "hidden": {"w": jax.random.normal(keys[0], (3, 4))},
        "out": {"w": jax.random.normal(keys[1], (4,)), "b": jnp.zeros(())},
    }
    return params, (jax.random.normal(keys[2], (examples, 3)), jax.random.normal(keys[3], (examples,)))


# ------------------------------------------------------------------------------------ moments


def test_moments_of_a_model_are_those_of_its_stacked_gradients():
    params, batch = model()
    stats = jax.jit(pg.grad_stats(loss, analysis.STATS))(params, batch)
    stack = pg.grad_stats(loss, pg.per_example())(params, batch)
    m = jax.jit(analysis.moments)(stats)
    for g, mean_square, variance in zip(*map(jax.tree.leaves, (stack, m.mean_square, m.variance))):
        g = np.asarray(g, np.float64)
        assert_allclose(variance, g.var(0, ddof=1), rtol=1e-3, atol=1e-6)
        assert_allclose(mean_square, g.mean(0) ** 2 - g.var(0, ddof=1) / len(g), rtol=1e-3, atol=1e-5)


def test_moments_are_unbiased():
    g = np.random.default_rng(0).normal(0.3, 1.0, (4, 200_000))  # four examples at 200,000 coordinates
    m = analysis.moments(stats_of(g))
    assert_allclose(m.mean_square.mean(), 0.09, atol=0.004)
    assert_allclose(m.variance.mean(), 1.0, atol=0.01)
    assert (m.mean_square < 0).mean() > 0.3


def test_moments_of_complex_gradients():
    g = np.array([1 + 2j, 3 - 1j, 0 + 1j])
    m = analysis.moments({"mean": g.mean(), "second_moment": (abs(g) ** 2).mean(), "count": 3})
    assert_allclose(m.variance, g.real.var(ddof=1) + g.imag.var(ddof=1), rtol=1e-5)
    assert_allclose(m.mean_square, abs(g.mean()) ** 2 - m.variance / 3, rtol=1e-5)


def test_one_example_is_an_error_or_nan():
    one = stats_of(np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"of 1 example.*at least 2.*average_stats"):
        analysis.moments(one)
    assert np.isnan(jax.jit(analysis.moments)(one | {"count": jnp.float32(1)}).variance).all()
    masked = pg.grad_stats(lambda w, x: (w * x).sum(), analysis.STATS)
    with pytest.raises(ValueError, match="of 1 example"):
        analysis.noise_scale(masked(1.0, jnp.ones(3), mask=jnp.array([True, False, False])))


def test_errors_about_the_statistics():
    with pytest.raises(TypeError, match=r"stats is ArrayImpl; expected a dict.*analysis.STATS"):
        analysis.moments(jnp.ones(3))
    with pytest.raises(ValueError, match=r"entries \['mean'\]; expected 'second_moment'"):
        analysis.moments({"mean": 1.0})
    with pytest.raises(ValueError, match=r'"sign_mean": pg.sign_mean\(\)'):
        signs = analysis.sign_placements()
        signs.update(exact([1.0]), signs.init(jnp.ones(1)))


# ------------------------------------------------------------------------------------- signal


def test_signal_to_noise_per_coordinate_and_layer():
    rng = np.random.default_rng(1)
    g = {
        "a": {"w": rng.normal(0.5, 2.0, (9, 5)), "b": rng.normal(1.0, 0.1, (9,))},
        "c": rng.normal(0.0, 1.0, (9, 2, 3)),
    }
    stats = tree_stats(g)
    flat = {k: g["a"][k].reshape(9, -1) for k in "wb"} | {"c": g["c"].reshape(9, -1)}
    m2 = {k: (x.mean(0) ** 2 - x.var(0, ddof=1) / 9).sum() for k, x in flat.items()}
    v = {k: x.var(0, ddof=1).sum() for k, x in flat.items()}

    snr = jax.jit(lambda s: analysis.signal_to_noise(s, squared=True, per="leaf"))(stats)
    assert_allclose([snr["a"]["w"], snr["a"]["b"], snr["c"]], [m2[k] / v[k] for k in "wbc"], rtol=1e-4)
    by_first = analysis.signal_to_noise(stats, squared=True, per=1)
    assert list(by_first) == ["a", "c"]
    assert_allclose(by_first["a"], (m2["w"] + m2["b"]) / (v["w"] + v["b"]), rtol=1e-4)
    by_kind = analysis.signal_to_noise(stats, per=lambda path: path.split("/")[-1])
    assert_allclose(by_kind["w"], np.sqrt(max(m2["w"] / v["w"], 0)), rtol=1e-4)
    whole = analysis.signal_to_noise(stats, squared=True, per="all")
    assert_allclose(whole, sum(m2.values()) / sum(v.values()), rtol=1e-4)
    assert jax.tree.map(jnp.shape, analysis.signal_to_noise(stats)) == {"a": {"w": (5,), "b": ()}, "c": (2, 3)}


def test_signal_to_noise_at_the_edges():
    # no gradient; no noise; no signal (μ̂² < 0)
    stats = stats_of([[0.0, 2.0, 1.0], [0.0, 2.0, -1.0]])
    assert_allclose(analysis.signal_to_noise(stats), [0, np.inf, 0])
    assert_allclose(analysis.signal_to_noise(stats, squared=True), [0, np.inf, -0.5])


@pytest.mark.parametrize("per", ["layer", 0, True, None, 1.5])
def test_unknown_layers_are_an_error(per):
    with pytest.raises(ValueError, match=r"per was given .*expected \"coordinate\""):
        analysis.signal_to_noise(exact([1.0]), per=per)


# -------------------------------------------------------------------------- averages over steps


def test_averaged_statistics_are_those_of_a_larger_batch():
    # Many independent averages: their μ̂² and σ̂² must be unbiased, and the variance of their mean σ²/count.
    rng, decay, steps, coordinates = np.random.default_rng(2), 0.8, 12, 40_000
    average = analysis.average_stats(decay)
    state = average.init(jnp.zeros(coordinates))
    advance = jax.jit(lambda s, state: average.update(s["mean"], state, stats=s)[1])
    for k in range(steps):
        state = advance(stats_of(rng.normal(0.2, 1.0, (3 + k % 2, coordinates))), state)
    stats = state.stats
    assert_allclose(jnp.var(stats["mean"]), 1 / stats["count"], rtol=0.03)
    m = analysis.moments(stats)
    assert_allclose(m.mean_square.mean(), 0.04, atol=0.002)
    assert_allclose(m.variance.mean(), 1.0, atol=0.01)

    w = (1 - decay) * decay ** np.arange(steps)[::-1]
    w /= w.sum()
    assert_allclose(stats["count"], 1 / sum(w**2 / (3 + np.arange(steps) % 2)), rtol=1e-5)


def test_a_step_that_is_not_finite_leaves_an_average_alone():
    average = analysis.average_stats(0.9)
    good, bad = exact([2.0]) | {"count": 4}, exact([np.inf]) | {"count": 4}
    state = average.update(None, average.init(jnp.zeros(1)), stats=good)[1]
    after = average.update(None, state, stats=bad)[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, after))
    assert np.isnan(average.init(jnp.zeros(1)).stats["mean"]).all()


def test_trackers_need_statistics_and_a_decay():
    with pytest.raises(ValueError, match=r"called without stats=.*stats=s\)"):
        track = analysis.track_noise_scale()
        track.update(jnp.ones(1), track.init(jnp.ones(1)))
    for make in (
        analysis.average_stats,
        analysis.track_noise_scale,
        analysis.track_preconditioner,
        analysis.sign_placements,
    ):
        with pytest.raises(ValueError, match=r"was given 1.0; expected a number from 0"):
            make(1.0)


# --------------------------------------------------------------------------------------- signs


def simulate_alignment(mean, std, batch_size, b1, steps, trials=1):
    """The mean cosine and agreement of the three placements, from their definitions, in NumPy."""
    rng, z = np.random.default_rng(3), np.sign(mean)
    cosines, agreements = np.zeros((2, trials, 3))
    for trial in range(trials):
        micro = sign = momentum = np.zeros_like(mean)
        for _ in range(steps):
            g = mean + std * rng.standard_normal((batch_size, len(mean)))
            micro = b1 * micro + (1 - b1) * np.sign(g).mean(0)
            sign = b1 * sign + (1 - b1) * np.sign(g.mean(0))
            momentum = b1 * momentum + (1 - b1) * g.mean(0)
        for i, u in enumerate((micro, sign, np.sign(momentum))):
            cosines[trial, i] = u @ z / max(np.linalg.norm(u) * np.linalg.norm(z), 1e-9)
            agreements[trial, i] = u @ z / (z @ z)
    return cosines.mean(0), agreements.mean(0)


MIXED = np.where(np.arange(8000) % 5 == 0, 1.0, 0.01)


@pytest.mark.parametrize(
    "mean, std, batch_size, b1, steps",
    [
        (np.full(8000, 0.1), 1.0, 8, 0.9, 60),
        (MIXED, 1.0, 8, 0.9, 60),
        (MIXED * 3, 2.0, 4, 0.8, 3),  # an EMA that has only begun
        (np.geomspace(1e-3, 3, 8000) * np.where(np.arange(8000) % 2, 1, -1), 1.0, 5, 0.7, 30),
        (np.linspace(-1, 1, 8000), 1.0, 6, 0.0, 2),  # no EMA: SignSGD is SignEMA
        (np.where(np.arange(8000) < 2000, 0.4, 0.0), 1.0, 8, 0.9, 60),  # sign 0 is 0
    ],
)
def test_predicted_alignment_is_the_simulated_one(mean, std, batch_size, b1, steps):
    cosine, agreement = simulate_alignment(mean, std, batch_size, b1, steps)
    predict = jax.jit(analysis.predicted_alignment, static_argnames=("b1", "measure", "steps"))
    stats = exact(mean, std)
    # 8000 coordinates: a cosine is known to about 0.01
    assert_allclose(predict(stats, batch_size, b1=b1, steps=steps), cosine, atol=0.025)
    assert_allclose(predict(stats, batch_size, b1=b1, steps=steps, measure="agreement"), agreement, atol=0.025)


def test_alignment_predicted_from_data_is_the_measured_one():
    """As a user does it: many examples for the statistics, then the three updates on other batches."""
    rng, b1, size, layers = np.random.default_rng(4), 0.8, 4, {"alike": np.full(4000, 0.3), "mixed": MIXED[:4000]}
    draw = lambda n: {k: m + rng.standard_normal((n, len(m))) for k, m in layers.items()}
    reference = tree_stats(draw(600))
    predicted = analysis.predicted_alignment(reference, size, b1=b1, per="leaf")
    signs = analysis.sign_placements(b1)
    state = signs.init(reference["mean"])
    for _ in range(30):
        g = draw(size)
        stats = tree_stats(g) | {"sign_mean": jax.tree.map(lambda x: jnp.asarray(np.sign(x).mean(0)), g)}
        directions, state = signs.update(stats, state)
    for name, u, expected in zip(PLACEMENTS, directions, predicted):
        measured = analysis.measured_alignment(u, reference["mean"], per="leaf")
        for layer in layers:
            assert_allclose(measured[layer], expected[layer], atol=0.05, err_msg=f"{name} {layer}")
    assert analysis.recommend(predicted) == {"alike": "SignEMA", "mixed": "MicroSignSGD"}


def test_sign_placements_are_their_definitions():
    rng, b1 = np.random.default_rng(5), 0.6
    signs = analysis.sign_placements(b1)
    state, micro, sign, momentum = signs.init(jnp.zeros(7)), 0, 0, 0
    for _ in range(5):
        g = rng.normal(size=(3, 7))
        directions, state = jax.jit(signs.update)(stats_of(g, sign_mean=jnp.asarray(np.sign(g).mean(0))), state)
        micro = b1 * micro + (1 - b1) * np.sign(g).mean(0)
        sign = b1 * sign + (1 - b1) * np.sign(g.mean(0))
        momentum = b1 * momentum + (1 - b1) * g.mean(0)
    for got, expected in zip(directions, (micro, sign, np.sign(momentum))):
        assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_alignment_at_the_edges():
    def alignment(stats, **options):
        return np.array(analysis.predicted_alignment(stats, 8, **options))

    assert_allclose(alignment(exact([0.0, 0.0], 0.0)), 0)  # no gradient
    assert_allclose(alignment(exact([2.0, -3.0], 0.0)), 1)  # no noise
    assert_allclose(alignment(exact([0.0, 0.0])), 0)  # no signal
    # a coordinate that nothing touches costs nothing
    assert_allclose(alignment(exact([0.5, 0.0], np.array([1.0, 0.0]))), alignment(exact([0.5])))
    # no EMA and one example: one sign, wherever it stands
    assert_allclose(np.ptp(np.array(analysis.predicted_alignment(exact([0.3, 0.8]), 1, b1=0.0))), 0, atol=1e-6)
    assert analysis.recommend(analysis.predicted_alignment(exact([0.0]), 8)) == "SignEMA"
    assert analysis.measured_alignment(jnp.zeros(3), jnp.ones(3)) == 0
    assert analysis.measured_alignment(-2 * jnp.ones(3), jnp.ones(3)) == -1
    assert analysis.measured_alignment(jnp.full(3, 0.5), jnp.array([1.0, 1.0, 0.0]), measure="agreement") == 0.5


def test_alignment_errors():
    with pytest.raises(ValueError, match=r'unknown measure \'angle\'.*measure="cosine"'):
        analysis.predicted_alignment(exact([1.0]), 8, measure="angle")
    with pytest.raises(ValueError, match=r"batch size is inf.*batch_size=B"):
        analysis.predicted_alignment(exact([1.0]))
    with pytest.raises(ValueError, match=r"steps was given 0"):
        analysis.predicted_alignment(exact([1.0]), 8, steps=0)
    with pytest.raises(ValueError, match=r"an alignment is NaN.*larger batch"):
        analysis.recommend(analysis.Placements(0.1, float("nan"), 0.2))


# ------------------------------------------------------------------------------ preconditioner


def test_the_two_parts_of_one_batch_are_its_squared_mean():
    params, batch = model()
    stats = pg.grad_stats(loss, analysis.STATS)(params, batch)
    m = analysis.moments(stats)
    for g, m2, v in zip(*map(jax.tree.leaves, (stats["mean"], m.mean_square, m.variance))):
        assert_allclose(m2 + v / 12, g**2, rtol=1e-4, atol=1e-6)
    shares = jax.jit(lambda s: analysis.preconditioner_shares(s, per=1))(stats)
    for layer in ("hidden", "out"):
        assert_allclose(shares.mean[layer] + shares.variance[layer], 1, rtol=1e-5)
    noise = sum(float(v.sum()) for v in jax.tree.leaves(m.variance["out"])) / 12
    nu = sum(float((g**2).sum()) for g in jax.tree.leaves(stats["mean"]["out"]))
    assert_allclose(shares.variance["out"], noise / nu, rtol=1e-4)


def test_tracked_shares_are_of_adams_own_preconditioner():
    params, (x, y) = model(40)
    b2, step = 0.9, pg.grad_stats(loss, analysis.STATS)
    per_coordinate = analysis.track_preconditioner(b2, per="coordinate")
    per_leaf = analysis.track_preconditioner(b2)
    optimizer = optax.chain(per_coordinate, per_leaf, optax.scale_by_adam(b2=b2), optax.scale(-0.01))
    state = optimizer.init(params)
    assert np.isnan(state[1].shares.mean["out"]["w"])

    @jax.jit
    def train_step(params, state, batch):
        stats = step(params, batch)
        updates, state = optimizer.update(stats["mean"], state, params, stats=stats)
        return optax.apply_updates(params, updates), state

    for k in range(8):
        part = slice(5 * k, 5 * k + 5)
        params, state = train_step(params, state, (x[part], y[part]))
    parts, tracked, adam, _ = state
    nu = jax.tree.map(jnp.add, parts.mean_square, parts.noise)
    for a, b in zip(jax.tree.leaves(nu), jax.tree.leaves(adam.nu)):
        assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    w = parts.noise["hidden"]["w"].sum() / adam.nu["hidden"]["w"].sum()
    assert_allclose(tracked.shares.variance["hidden"]["w"], w, rtol=1e-3)
    assert_allclose(tracked.shares.mean["hidden"]["w"], 1 - w, rtol=1e-2, atol=1e-3)


def test_shares_at_the_edges():
    shares = analysis.preconditioner_shares(stats_of([[0.0, 2.0, 1.0], [0.0, 2.0, -0.5]]), per="coordinate")
    assert_allclose(shares.mean, [0, 1, (0.25**2 - 1.125 / 2) / 0.25**2], rtol=1e-5)
    assert_allclose(shares.variance, [0, 0, 1.125 / 2 / 0.25**2], rtol=1e-5)
    # what another batch size would do: σ²/B falls as B grows
    larger = analysis.preconditioner_shares(exact([1.0], 3.0), batch_size=9)
    assert_allclose(larger.mean, 0.5, rtol=1e-5)


# --------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("quantity", ["noise", "relative_deviation", "preconditioner"])
@pytest.mark.parametrize("snr, b1, b2, steps", [(3.0, 0.95, 0.95, 150), (1.0, 0.9, 0.97, 200), (1.0, 0.8, 0.9, 5)])
def test_estimator_errors_are_the_simulated_ones(quantity, snr, b1, b2, steps):
    options = {"snr": snr, "batch_size": 16, "b1": b1, "b2": b2, "quantity": quantity, "steps": steps}
    formula = analysis.estimator_errors(**options)
    simulation = analysis.simulate_estimator_errors(jax.random.key(1), **options, trials=4000)
    # 4000 trials: 1 % to one standard deviation. The relative deviation is to first order: Adam's is too wide for
    # that where its m and v are of different lengths, which shows in the size of the error itself.
    assert_allclose(simulation.eve, formula.eve, rtol=0.05 if quantity != "relative_deviation" else 0.15)
    if quantity != "relative_deviation" or formula.adam < 0.1:
        assert_allclose(simulation.adam, formula.adam, rtol=0.05)


def test_the_square_root_of_the_batch_size():
    def ratio(quantity, snr, size):  # both averages over very many steps
        return analysis.estimator_errors(snr, size, b1=0.99999, b2=0.99999, quantity=quantity).ratio

    for size in (4, 64, 1024):
        assert_allclose(ratio("noise", 1.0, size), np.sqrt(size), rtol=1e-2)
        assert_allclose(ratio("relative_deviation", 1000.0, size), np.sqrt(size), rtol=1e-2)
        assert_allclose(ratio("relative_deviation", 0.01, size), 1, rtol=0.1)
        assert_allclose(ratio("relative_deviation", 1.0, size), np.sqrt((size + 2) / 3), rtol=1e-2)
        assert_allclose(ratio("preconditioner", 1e-4, size), np.sqrt(size), rtol=2e-2)
        assert_allclose(ratio("preconditioner", 30.0, size), 1, rtol=1e-2)


def test_estimators_of_one_example_are_the_same():
    for quantity in ("noise", "relative_deviation", "preconditioner"):
        assert_allclose(analysis.estimator_errors(2.0, 1, quantity=quantity).ratio, 1, rtol=1e-5)


def test_heavy_tails_cost_eve_more():
    options = {"snr": 1.0, "batch_size": 16, "b1": 0.95, "b2": 0.95, "quantity": "noise", "steps": 100}
    laplace = lambda key, shape: jax.random.laplace(key, shape) / np.sqrt(2)
    heavy = analysis.simulate_estimator_errors(jax.random.key(2), **options, noise=laplace)
    assert heavy.ratio < 0.8 * analysis.estimator_errors(**options).ratio


def test_estimator_arguments():
    errors = jax.jit(lambda r: analysis.estimator_errors(r, 8))(jnp.array([0.0, 1.0]))
    assert errors.adam.shape == (2,) and not np.isfinite(errors.adam[0])  # σ/μ has no meaning at μ = 0
    with pytest.raises(ValueError, match=r'unknown quantity \'sigma\': expected one of "noise"'):
        analysis.estimator_errors(1.0, 8, quantity="sigma")
    with pytest.raises(ValueError, match=r"batch_size was given 0"):
        analysis.simulate_estimator_errors(jax.random.key(0), 1.0, 0)
    with pytest.raises(ValueError, match=r"b2 was given 1"):
        analysis.estimator_errors(1.0, 8, b2=1.0)


# -------------------------------------------------------------------------------- noise scale


def test_noise_scale_of_a_model():
    params, batch = model()
    stack = pg.grad_stats(loss, pg.per_example())(params, batch)
    g = np.concatenate([np.asarray(x, np.float64).reshape(12, -1) for x in jax.tree.leaves(stack)], axis=1)
    trace = g.var(0, ddof=1).sum()
    squared_norm = (g.mean(0) ** 2).sum() - trace / 12
    stats = pg.grad_stats(loss, analysis.STATS)(params, batch)
    whole = jax.jit(analysis.noise_scale)(stats)
    assert_allclose(whole, (trace / squared_norm, trace, squared_norm), rtol=1e-4)
    per_leaf = analysis.noise_scale(stats, per="leaf")
    assert jax.tree.structure(per_leaf.scale) == jax.tree.structure(params)
    # an object with these fields will do as well, per leaf or whole, and leaves are summed
    assert_allclose(analysis.noise_scale(per_leaf).scale, whole.scale, rtol=1e-5)
    assert_allclose(analysis.noise_scale(per_leaf, per=1).trace["out"], sum(jax.tree.leaves(per_leaf.trace["out"])))
    assert_allclose(analysis.noise_scale(whole), whole, rtol=1e-5)


def test_tracked_noise_scale_is_right_where_single_batches_are_not():
    rng, track = np.random.default_rng(6), analysis.track_noise_scale(decay=0.99)
    mean = np.full(50, 0.1)  # ‖μ‖² = 0.5, tr Σ = 50: the noise scale is 100, with batches of 8
    advance = jax.jit(lambda s, state: track.update(s["mean"], state, stats=s)[1])
    state, single = track.init(jnp.zeros(50)), []
    assert np.isnan(state.noise_scale.scale)
    for _ in range(600):
        stats = stats_of(mean + rng.standard_normal((8, 50)))
        single.append(float(analysis.noise_scale(stats).squared_norm))
        state = advance(stats, state)
    assert min(single) < 0
    assert_allclose(state.noise_scale.trace, 50, rtol=0.05)
    assert_allclose(state.noise_scale.scale, 100, rtol=0.35)


def test_tracking_in_optax():
    params, batch = model()
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        analysis.track_noise_scale(0.9, per="leaf"),
        analysis.batch_size_schedule(12, maximum=48, multiple=4),
        optax.inject_hyperparams(optax.adam)(1e-2),
    )
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    step = pg.value_and_stats(loss, analysis.STATS)

    def body(carry, _):
        params, state = carry
        value, stats = step(params, batch)
        updates, state = optimizer.update(stats["mean"], state, params, stats=stats)
        return (optax.apply_updates(params, updates), state), value

    (trained, state), values = jax.jit(lambda c: jax.lax.scan(body, c, length=5))((params, optimizer.init(params)))
    assert values[-1] < values[0]
    found = optax.tree_utils.tree_get(state, "BatchSizeState")
    assert found.batch_size == 12 and found.steps == 5  # patience
    assert jax.tree.structure(state[1].trace) == jax.tree.structure(params)

    other, plain_state = params, plain.init(params)
    for _ in range(5):
        updates, plain_state = plain.update(jax.grad(loss)(other, batch), plain_state)
        other = optax.apply_updates(other, updates)
    for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(other)):
        assert_allclose(a, b, rtol=1e-3, atol=1e-4)  # tracking leaves updates alone


def test_tracking_another_structure_is_an_error():
    track = analysis.track_noise_scale(per="leaf")
    with pytest.raises(ValueError, match=r"expected PyTreeDef\(\{'a': \*\}\), for per='leaf'"):
        track.update(None, track.init({"a": jnp.ones(2)}), stats=analysis.NoiseScale(1.0, 1.0, 1.0))


def sizes(scales, **options):
    schedule = analysis.batch_size_schedule(**({"initial": 32, "maximum": 256, "multiple": 8, "decay": 0.0} | options))
    state = schedule.init(jnp.zeros(1))
    update = jax.jit(lambda s, state: schedule.update(None, state, stats=s)[1])
    out = []
    for trace, squared_norm in scales:
        state = update(analysis.NoiseScale(0.0, jnp.float32(trace), jnp.float32(squared_norm)), state)
        out.append(int(state.batch_size))
    return out


def test_batch_size_schedule():
    assert sizes([(100, 1)] * 4, patience=1) == [64, 96, 96, 96]  # a factor of two at a time; 100 to a multiple of 8
    assert sizes([(1000, 1)] * 5, patience=1) == [64, 128, 256, 256, 256]
    assert sizes([(1, 1)] * 4, patience=1, minimum=16) == [16] * 4
    assert sizes([(1, 1)] * 4, patience=1) == [16, 8, 8, 8]  # never below one multiple
    assert sizes([(100, 1)] * 6, patience=3) == [32, 32, 64, 64, 64, 96]
    assert sizes([(40, 1), (25, 1), (43, 1), (24, 1)], patience=1) == [32] * 4  # hysteresis
    assert sizes([(40, 1)], patience=1, factor=2.0) == [64]
    assert sizes([(40, -1)] * 3, patience=1) == [64, 128, 256]  # no signal to be seen: larger
    assert sizes([(0, 0)] * 2, patience=1) == [32] * 2  # no gradient: no reason to change
    assert sizes([(np.nan, 1)] * 2, patience=1) == [32] * 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"initial": 30}, r"initial was given 30: expected a positive multiple of 8"),
        ({"maximum": 100}, r"maximum was given 100"),
        ({"minimum": 64}, r"minimum=64, initial=32, maximum=256.*in this order"),
        ({"growth": 1.0}, r"growth=1.0.*expected tolerance > 0, growth > 1"),
        ({"decay": 1.0}, r"decay was given 1.0"),
    ],
)
def test_batch_size_schedule_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        sizes([], **options)
