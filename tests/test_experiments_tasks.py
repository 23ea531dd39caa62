"""Each task: its model is what its docstring says, and every example has a loss of its own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from pergrad_experiments import measure, tasks
from pergrad_experiments.data import loader, text
from pergrad_experiments.tasks import pixelcnn, pong, quadratic, seq2seq
from pergrad_experiments.tasks.common import Layers, Model, in_haste

WITHOUT_DROPOUT = {"lm": {"dropout": 0.0}, "translation": {"dropout": 0.0}, "pixelcnn": {"dropout": 0.0}}


def jit(f):
    return jax.jit(f, compiler_options=in_haste(True))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def smoke(name, **options):
    config = tasks.configure(name, "adam", "smoke", task_options={**WITHOUT_DROPOUT.get(name, {}), **options})
    return tasks.build(config)


# The papers' tables, to the digits that they print.
@pytest.mark.parametrize(
    ("name", "millions"),
    [("cifar10", "1.1"), ("seq2seq", "2.2"), ("translation", "209"), ("pong", "4"), ("pixelcnn", "49")],
)
def test_published_sizes(name, millions):
    count = tasks.parameters(tasks.configure(name, "adam", "paper")) / 1e6
    digits = len(millions.partition(".")[2])
    assert f"{count:.{digits}f}" == millions


@pytest.mark.parametrize("name", tasks.TASKS)
def test_examples_do_not_see_each_other(name):
    """The loss of a batch is the mean of the losses of batches of one, and so a mean over examples."""
    task = smoke(name)
    params = jit(task.init)(jax.random.key(0))
    batch = next(task.batches(0, lambda: params))
    batch = {k: x[:3] for k, x in batch.items()}
    one = jit(lambda i: task.loss(params, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), batch), KEY))
    whole = jit(task.loss)(params, batch, KEY)
    np.testing.assert_allclose(whole, np.mean([one(i) for i in range(3)]), rtol=2e-5)


KEY = jax.random.key(7)


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name != "pong"])
def test_a_batch_depends_on_seed_and_step_alone(name):
    task = smoke(name)
    from_start = task.batches(0, None)
    wanted = [next(from_start) for _ in range(4)][3]
    again = next(task.batches(3, None))
    assert wanted.keys() == again.keys()
    assert all(np.array_equal(wanted[k], again[k]) for k in wanted)
    assert not np.array_equal(wanted["index"], next(task.batches(2, None))["index"])


def test_every_pass_sees_every_example_once():
    source = loader.Source({"x": np.arange(10) * 2})
    batches = loader.batches(source, 5, seed=3)(0, None)
    passes = [np.concatenate([next(batches)["x"] for _ in range(2)]) for _ in range(2)]
    assert [sorted(p) for p in passes] == [list(range(0, 20, 2))] * 2
    assert not np.array_equal(*passes)


def test_stacked_layers_run_one_after_another():
    from flax import nnx

    make = lambda rngs: nnx.Linear(3, 3, rngs=rngs)
    layers = Layers(make, 4)
    params = layers.init(jax.random.key(0))
    x = jnp.ones((2, 3))
    expected = x
    for k in range(4):
        expected = jnp.tanh(Model(make)(jax.tree.map(lambda p, k=k: p[k], params))(expected))
    found = layers.run(params, x, lambda layer, h, key: jnp.tanh(layer(h)), jax.random.key(1))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# ------------------------------------------------------------------------------------- what is measured


def test_signal_and_noise_by_layer():
    """Against the formulas, on per-example gradients by vmap; a stacked leaf is taken apart."""

    def loss(params, batch, key):
        return jnp.mean(jnp.sum(jnp.sin(batch["x"] * params["layers"]["w"] + params["b"]), axis=(1, 2)))

    rng = np.random.default_rng(0)
    params = {"layers": {"w": rng.normal(size=(2, 3)).astype("f")}, "b": np.float32(0.3)}
    batch = {"index": np.arange(5, dtype="i"), "x": rng.normal(size=(5, 2, 3)).astype("f")}
    found = measure.statistics(loss, ("layers",), None)(params, batch, KEY)
    g = jax.vmap(lambda b: jax.grad(loss)(params, jax.tree.map(lambda x: x[None], b), KEY))(batch)
    leaves = {"b": g["b"], "layers/0/w": g["layers"]["w"][:, 0], "layers/1/w": g["layers"]["w"][:, 1]}
    assert set(found["snr"]) == set(leaves)
    for name, x in leaves.items():
        x = np.asarray(x, np.float64).reshape(5, -1)
        variance = x.var(0, ddof=1)
        signal, noise = (x.mean(0) ** 2 - variance / 5).sum(), variance.sum()
        np.testing.assert_allclose(found["signal"][name], signal, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["noise"][name], noise, rtol=1e-3)
        np.testing.assert_allclose(found["snr"][name], math.sqrt(max(signal, 0) / noise), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found["share_mean"][name], signal / (signal + noise / 5), rtol=1e-3)
        np.testing.assert_allclose(found["share_variance"][name], noise / 5 / (signal + noise / 5), rtol=1e-3)
    squares = sum((np.asarray(x, np.float64) ** 2).reshape(5, -1).sum(1) for x in leaves.values())
    np.testing.assert_allclose(found["norms"], np.sqrt(squares), rtol=1e-5)


@pytest.mark.parametrize("covariance", ["uniform", "curvature"])
def test_the_quadratics_gradients_are_as_it_says(covariance):
    options = quadratic.Options(dimension=4, noise=0.5, covariance=covariance)
    config = tasks.configure("quadratic", "adam", "smoke", batch_size=20_000, task_options=dataclasses.asdict(options))
    task = tasks.build(config)
    params = {"w": jnp.array([1.0, -2.0, 0.5, 3.0])}
    stats = {"mean": pg.mean(), "variance": pg.variance()}
    found = pg.grad_stats(task.loss, stats, prng_argnums=2)(params, next(task.batches(0, None)), KEY)
    h, sigma = quadratic.curvature(options), quadratic.noise(options)
    assert sigma[3] == (0.5 if covariance == "uniform" else 1.0)
    np.testing.assert_allclose(found["mean"]["w"], h * params["w"], atol=0.02)
    np.testing.assert_allclose(found["variance"]["w"], (h * sigma) ** 2, rtol=0.05)
    assert task.evaluate(params)["excess_loss"] == pytest.approx(float(0.5 * jnp.sum(h * params["w"] ** 2)))


# ------------------------------------------------------------------------------------- text


def test_additions_are_right():
    made = seq2seq.draw(seq2seq.Options(digits=3))(np.random.default_rng(0), 200)
    lengths = set()
    for question, answer in zip(made["question"], made["answer"]):
        a, b = map(int, seq2seq.text(question).split("+"))
        assert seq2seq.text(answer) == f"={a + b}"
        assert seq2seq.END in question and seq2seq.END in answer
        lengths.add(len(str(a)))
    assert lengths == {1, 2, 3}


def test_what_is_behind_the_end_of_a_question_does_not_matter():
    model = Model(lambda rngs: seq2seq.Net(seq2seq.Options(width=4), rngs))
    params = model.init(jax.random.key(0))
    question = np.array([[1, 10, 2, seq2seq.END]])
    longer = np.array([[1, 10, 2, seq2seq.END, seq2seq.PAD, seq2seq.PAD]])
    short, long = (model(params).encode(q) for q in (question, longer))
    assert all(np.array_equal(a, b) for a, b in zip(short, long))


def test_byte_pairs_can_be_read_back():
    made = text.tokenizer(["It was – ‘naïve’, said Алиса.  Twice"] * 3, 300)
    for line in ("It was – ‘naïve’, said Алиса.  Twice", "\t 日本 😀"):
        assert made.decode(made.encode(line).ids) == line


def test_language_model_sees_no_later_token():
    config = tasks.configure("lm", "adam", "smoke", task_options=WITHOUT_DROPOUT["lm"])
    network = tasks.module("lm").Network(tasks.options_of(config))
    params = jit(network.init)(jax.random.key(0))
    logits = jit(network)
    tokens = np.arange(3, 12, dtype="i")[None]
    changed = tokens.copy()
    changed[0, 5] = 100
    before, after = logits(params, tokens), logits(params, changed)
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-5)
    assert not np.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_translation_ignores_padding_and_translates_greedily():
    config = tasks.configure("translation", "adam", "smoke", task_options={"dropout": 0.0, "length": 6})
    network = tasks.module("translation").Network(tasks.options_of(config))
    params = jit(network.init)(jax.random.key(0))
    english = np.array([[5, 9, 77, text.END, 0, 0], [8, text.END, 0, 0, 0, 0]], "i")
    before = np.array([[text.START, 7, 12], [text.START, 40, 3]], "i")
    logits = jit(lambda english: network.decode(params, network.encode(params, english), before))
    np.testing.assert_allclose(logits(english), logits(np.pad(english, ((0, 0), (0, 3)))), rtol=1e-5, atol=1e-5)
    found = np.asarray(jit(network.translate)(params, english))
    given = np.concatenate([np.full((2, 1), text.START), found[:, :-1]], axis=1)
    likeliest = np.argmax(network.decode(params, network.encode(params, english), given), axis=-1)
    over = np.cumsum(given == text.END, axis=1) > 0
    assert np.array_equal(found, np.where(over, text.PAD, likeliest))


# ------------------------------------------------------------------------------------- images


def test_pixelcnn_sees_pixels_above_and_to_the_left_only():
    options = pixelcnn.Options(width=2, blocks=1, mixtures=1, dropout=0.0)
    model = pixelcnn.network(options)
    params = jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    # Biases and scales are 0 and 1 at first, which could hide something.
    params = jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape).astype("f"), params)
    out = jit(lambda x: model(params)(x))
    x = rng.uniform(-1, 1, size=(1, 12, 12, 3)).astype("f")
    base = np.asarray(out(x))[0].reshape(144, -1)
    for place in (0, 40, 77, 143):
        changed = x.copy().reshape(144, 3)
        changed[place] += 1.0
        moved = np.abs(np.asarray(out(changed.reshape(x.shape)))[0].reshape(144, -1) - base).max(axis=1) > 1e-6
        assert not moved[: place + 1].any()
        assert moved[place + 1 :].any() == (place < 143)


def test_pixels_probabilities_sum_to_one():
    """Σ over green and blue of p(red, green, blue) is p(red), a difference of two values of a logistic CDF."""
    rng = np.random.default_rng(1)
    out = np.broadcast_to(rng.normal(size=10).astype("f"), (256, 256, 10)).copy()
    _, (mean, scale) = out[0, 0, 0], (out[0, 0, 1], out[0, 0, 4])
    green, blue = np.meshgrid(np.arange(256), np.arange(256))
    for red in (0, 100, 255):
        image = np.stack([np.full_like(green, red), green, blue], -1).astype("u1")
        bits = pixelcnn.bits_per_dim(image[:, :, None], out[:, :, None])  # 256 images of 256×1
        assert bits.shape == (256,)
        one = lambda x, o: pixelcnn.bits_per_dim(x[None, None, None], o[None, None, None])[0]
        each = jit(jax.vmap(jax.vmap(one)))(image, out)
        total = np.sum(2.0 ** (-3 * np.asarray(each, np.float64)))
        cdf = lambda x: 1 / (1 + np.exp(-(x / 127.5 - 1 - mean) / np.exp(scale)))
        wanted = (1 if red == 255 else cdf(red + 0.5)) - (0 if red == 0 else cdf(red - 0.5))
        assert total == pytest.approx(wanted, rel=1e-3)
        np.testing.assert_allclose(np.mean(each, axis=1), bits, rtol=1e-4)


def test_augmented_images_are_shifted_and_reflected():
    from pergrad_experiments.tasks import cifar10

    image = np.arange(32 * 32 * 3, dtype="u1").reshape(32, 32, 3)
    made = [cifar10.augment({"image": image, "label": 1}, np.random.default_rng(k))["image"] for k in range(40)]
    assert {x.shape for x in made} == {(32, 32, 3)}
    assert len({x.tobytes() for x in made}) > 20


def test_a_residual_net_of_depth_20():
    config = tasks.configure("cifar10", "adam", "smoke", task_options={"model": "resnet", "width": 16, "depth": 20})
    model = tasks.module("cifar10").network(tasks.options_of(config))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    kernels = [x for x in jax.tree.leaves(shapes) if x.ndim in (2, 4) and x.shape[:2] != (1, 1)]
    assert len(kernels) == 20
    assert jax.eval_shape(lambda p, x: model(p)(x), shapes, jnp.zeros((2, 32, 32, 3))).shape == (2, 10)


# ------------------------------------------------------------------------------------- pong


def test_advantages():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 5, 1)).astype("f")
    over, last = np.array([[0], [1], [0], [0], [0]], bool), np.array([0.7], "f")
    g, l = 0.9, 0.8
    found = pong.advantages(rewards, values, over, last, g, l)[:, 0]
    r, v = rewards[:, 0], np.append(values[:, 0], last)
    delta = r + g * v[1:] * (1 - over[:, 0]) - v[:-1]
    wanted = [
        delta[0] + g * l * delta[1],
        delta[1],
        delta[2] + g * l * delta[3] + (g * l) ** 2 * delta[4],
        delta[3] + g * l * delta[4],
        delta[4],
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_game_is_what_its_seed_says():
    def played(seed):
        game = pong.Game(2, (seed,))
        steps = [game.step(np.array([k % 6, (k * k) % 6])) for k in range(120)]
        frames = game.frames
        game.close()
        return frames, np.sum([rewards for rewards, _ in steps], axis=0)

    (first, points), (again, _), (other, _) = played(1), played(1), played(2)
    assert first.shape == (2, 84, 84, 4) and first.dtype == np.uint8
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (points < 0).all()  # the other player is good


def test_ppo_at_the_old_policy_follows_the_advantage():
    """With the new policy equal to the old one, the surrogate's gradient is that of −log π · A."""
    options = {"value_weight": 0.0, "entropy_weight": 0.0}
    config = tasks.configure("pong", "adam", "smoke", task_options=options)
    task, model = tasks.build(config), pong.network(tasks.options_of(config))
    params = jit(task.init)(jax.random.key(0))
    batch = {k: x[:4] for k, x in next(task.batches(0, lambda: params)).items()}

    def plain(params):
        log_probs = jax.nn.log_softmax(model(params)(batch["image"])[0])
        return -jnp.mean(jnp.take_along_axis(log_probs, batch["action"][:, None], 1)[:, 0] * batch["advantage"])

    found, wanted = jit(jax.grad(task.loss))(params, batch, KEY), jit(jax.grad(plain))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), found, wanted)
