"""The call itself: trees, arguments, auxiliary output, random keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .case import BARE, B, Built, case, fit, readout


class Layer(NamedTuple):
    w: np.ndarray
    b: np.ndarray


class Batch(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@case()
def call_nested_tree(d):
    """Dicts, lists, tuples, named tuples and None in one tree of parameters."""

    def loss(p, batch):
        x = batch.x
        for layer in p["body"]:
            x = jnp.tanh(x @ layer.w + layer.b)
        return fit(x @ p["head"][0] + p["head"][1], batch.y)

    params = {"body": [Layer(d(3, 4), d(4)), Layer(d(4, 7), d(7))], "head": (d(7, 2), d(2), None)}
    return Built(loss, (params, Batch(d(B, 3), d(B, 2))))


@case()
def call_bare_array(d):
    """The parameter is an array and not a tree."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w)), (d(3, 4), d(B, 3)))


@case("aux")
def call_aux(d):
    """An auxiliary dict of arrays of several shapes and types."""

    def loss(p, batch):
        x, y = batch
        h = jnp.tanh(x @ p["w"] + p["b"])
        return fit(h, y), {"hidden": h, "active": jnp.sum(h > 0), "shape": (h.mean(), jnp.argmax(h, -1))}

    return Built(loss, ({"w": d(3, 4), "b": d(4)}, (d(B, 3), d(B, 4))), {"has_aux": True})


@case("aux")
def call_aux_of_parameters(d):
    """Auxiliary output that no example changes, on the bare example."""

    def loss(p, x):
        return readout(jnp.tanh(x @ p["w"])), (jnp.sum(p["w"] ** 2), jnp.arange(3), x[0])

    return Built(loss, ({"w": d(3, 4)}, d(B, 7, 3)), {"has_aux": True, **BARE})


@case("aux", "scan")
def call_aux_from_scan(d):
    """The auxiliary output is what a loop over layers emits."""

    def loss(w, x):
        def body(x, w):
            x = jnp.tanh(x @ w)
            return x, jnp.sqrt(jnp.mean(x**2))

        x, norms = jax.lax.scan(body, x, w)
        return readout(x), norms

    return Built(loss, (d(4, 3, 3), d(B, 7, 3)), {"has_aux": True})


@case()
def call_two_parameter_trees(d):
    """Gradients with respect to two arguments, of which the second comes after the batch."""

    def loss(generator, x, critic):
        return readout(jnp.tanh(x @ generator["w"]) @ critic["v"] + critic["b"])

    return Built(loss, ({"w": d(3, 4)}, d(B, 7, 3), {"v": d(4, 2), "b": d(2)}), {"argnums": (0, 2)})


@case()
def call_second_argument(d):
    """The parameters are not the first argument."""
    return Built(
        lambda x, p: readout(jnp.tanh(x @ p["w"])),
        (d(B, 7, 3), {"w": d(3, 4)}),
        {"argnums": 1, "batch_argnums": 0},
    )


@case()
def call_two_batch_arguments(d):
    """Inputs and labels are separate arguments."""

    def loss(p, x, y):
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ p["w"]) * jax.nn.one_hot(y, 4, dtype=x.dtype), -1))

    return Built(loss, ({"w": d(3, 4)}, d(B, 3), d.ints(0, 4, B)), {"batch_argnums": (1, 2)})


@case()
def call_two_batch_arguments_bare(d):
    """Scalars per example as a batch argument of the bare example."""

    def loss(p, x, y):
        return (jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2

    return Built(loss, ({"w": d(3, 4), "v": d(4)}, d(B, 3), d(B)), {"batch_argnums": (1, 2), **BARE})


@case()
def call_further_arguments(d):
    """Arguments that are neither parameters nor examples: frozen weights and a scalar."""

    def loss(p, x, frozen, strength):
        return readout(jnp.tanh(x @ frozen["w"]) @ p["v"]) + strength * jnp.sum(p["v"] ** 2)

    return Built(loss, ({"v": d(4, 2)}, d(B, 7, 3), {"w": d(3, 4)}, np.float32(0.1) * d.positive()))


@case()
def call_argument_of_batch_size(d):
    """A further argument whose leading axis happens to be as long as the batch."""
    return Built(lambda p, x, c: readout(jnp.tanh(x @ p) @ c), (d(3, B), d(B, 7, 3), d(B, 2)))


@case()
def call_axes_of_batch_size(d):
    """Every axis is as long as the batch: only names tell them apart."""
    return Built(lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"]), ({"w": d(B, B), "b": d(B)}, d(B, B, B)))


@case()
def call_integer_batch(d):
    """Examples of integers and of booleans only."""

    def loss(p, b):
        x = b["count"].astype(p["w"].dtype) @ p["w"]
        return readout(jnp.tanh(x) * jnp.where(b["flag"], p["s"], 1.0))

    batch = {"count": d.ints(-2, 3, B, 7), "flag": d.ints(0, 2, B, 3).astype(bool)}
    return Built(loss, ({"w": d(7, 3), "s": d(3)}, batch))


@case()
def call_one_example(d):
    """A batch of one."""
    return Built(lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"])), ({"w": d(3, 4), "b": d(4)}, d(1, 7, 3)))


@case()
def call_two_examples(d):
    """A batch of two."""
    return Built(lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"])), ({"w": d(3, 4), "b": d(4)}, d(2, 7, 3)))


@case()
def call_prime_batch(d):
    """A batch of thirteen, which no chunk divides."""
    return Built(lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"])), ({"w": d(3, 4), "b": d(4)}, d(13, 7, 3)))


@case()
def call_equal_examples(d):
    """All examples are the same: the variance is zero but for rounding."""
    x = np.repeat(d(1, 7, 3), B, axis=0)
    return Built(lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"])), ({"w": d(3, 4), "b": d(4)}, x))


@case()
def call_zero_example(d):
    """An example of zeros, whose gradient is exactly zero."""
    x = d(B, 7, 3)
    x[2] = 0
    return Built(lambda w, x: readout(jnp.tanh(x @ w)), (d(3, 4), x))


def dropout(key, x, rate=0.4):
    keep = jax.random.bernoulli(key, np.float32(1 - rate), x.shape)
    return jnp.where(keep, x / (1 - rate), 0.0)


@case("prng")
def call_dropout(d):
    """Dropout with a key of the new kind, split per example."""

    def loss(p, x, key):
        return readout(dropout(key, jnp.tanh(x @ p["w"])) @ p["v"])

    args = ({"w": d(3, 7), "v": d(7, 2)}, d(B, 4, 3), jax.random.key(3))
    return Built(loss, args, {"prng_argnums": 2})


@case("prng")
def call_dropout_raw_key(d):
    """Dropout with a key of the old kind: two unsigned integers."""

    def loss(p, x, key):
        return readout(dropout(key, jnp.tanh(x @ p["w"])) @ p["v"])

    args = ({"w": d(3, 7), "v": d(7, 2)}, d(B, 4, 3), jax.random.PRNGKey(3))
    return Built(loss, args, {"prng_argnums": 2})


@case("prng", "scan")
def call_dropout_in_scan(d):
    """A key split for the layers of a loop, with remat; the batch is the third argument."""

    def loss(w, key, x):
        @jax.checkpoint
        def layer(x, each):
            w, key = each
            return x + dropout(key, jnp.tanh(x @ w)), None

        return readout(jax.lax.scan(layer, x, (w, jax.random.split(key, 4)))[0])

    args = (d(4, 3, 3), jax.random.key(5), d(B, 7, 3))
    return Built(loss, args, {"prng_argnums": 1, "batch_argnums": 2})


@case("prng")
def call_two_keys(d):
    """Two keys, on the bare example, for dropout and for noise on the weight."""

    def loss(p, x, noise, drop):
        w = p["mean"] + jnp.exp(p["log"]) * jax.random.normal(noise, (3, 4), np.float32).astype(x.dtype)
        return readout(dropout(drop, jnp.tanh(x @ w)))

    args = ({"mean": d(3, 4), "log": d(3, 4) - 1}, d(B, 7, 3), jax.random.key(1), jax.random.PRNGKey(2))
    return Built(loss, args, {"prng_argnums": (2, 3), **BARE})


@case("prng")
def call_unsplit_key(d):
    """A key that is not declared: every example gets the same mask."""

    def loss(w, x, key):
        return readout(dropout(key, jnp.tanh(x @ w)))

    return Built(loss, (d(3, 4), d(B, 7, 3), jax.random.key(4)), BARE)


@case("prng")
def call_variational_autoencoder(d):
    """The reparameterised Gaussian and its divergence."""

    def loss(p, x, key):
        h = jnp.tanh(x @ p["encode"] + p["b"])
        mean, log = jnp.split(h @ p["latent"], 2, axis=-1)
        z = mean + jnp.exp(0.5 * log) * jax.random.normal(key, mean.shape, np.float32).astype(x.dtype)
        divergence = 0.5 * jnp.mean(jnp.sum(jnp.exp(log) + mean**2 - 1.0 - log, -1))
        return fit(jnp.tanh(z @ p["decode"]), x) + 0.1 * divergence

    params = {"encode": d(7, 4), "b": d(4), "latent": d(4, 6), "decode": d(3, 7)}
    return Built(loss, (params, d(B, 7), jax.random.key(6)), {"prng_argnums": 2})


@case("prng")
def call_categorical_sampling(d):
    """REINFORCE: a sampled action without gradient, its log-probability with."""

    def loss(p, x, key):
        logits = jnp.tanh(x @ p["w"]) @ p["v"]
        action = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        return -jnp.mean(
            jnp.sin(1.0 + action) * jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        )

    return Built(loss, ({"w": d(3, 7), "v": d(7, 4)}, d(B, 3), jax.random.key(7)), {"prng_argnums": 2})
