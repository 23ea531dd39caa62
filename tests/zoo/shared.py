"""One parameter, many uses: contributions are summed per example before the statistic."""

import jax
import jax.numpy as jnp
from jax import lax

from .case import BARE, B, Built, case, fit, readout


@case("shared")
def shared_siamese(d):
    """Two inputs through one layer: contractions of equal shape."""

    def loss(p, pair):
        left, right = (jnp.tanh(x @ p["w"] + p["b"]) for x in pair)
        return jnp.mean(jnp.sum((left - right) ** 2, -1)) + readout(left * right)

    return Built(loss, ({"w": d(3, 4), "b": d(4)}, (d(B, 3), d(B, 3))))


@case("shared")
def shared_three_lengths(d):
    """Three uses with different numbers of time steps."""

    def loss(w, b):
        return readout(jnp.tanh(b["a"] @ w)) + readout(b["b"] @ w) + readout(jnp.sin(b["c"] @ w))

    return Built(loss, (d(3, 4), {"a": d(B, 7, 3), "b": d(B, 3), "c": d(B, 2, 3, 3)}))


@case("shared")
def shared_layers(d):
    """A deep network with one layer, unrolled in Python."""

    def loss(p, x):
        for _ in range(4):
            x = x + jnp.tanh(x @ p["w"] + p["b"])
        return readout(x)

    return Built(loss, ({"w": d(3, 3), "b": d(3)}, d(B, 7, 3)))


@case("shared")
def shared_layers_bare(d):
    """The same on the bare example: a sum of outer products."""

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return readout(x)

    return Built(loss, (d(3, 3), d(B, 3)), BARE)


@case("shared")
def shared_autoencoder(d):
    """w down and w.T up: a contraction and the transpose of another."""

    def loss(p, x):
        return fit(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T + p["c"], x)

    return Built(loss, ({"w": d(7, 3), "b": d(3), "c": d(7)}, d(B, 4, 7)))


@case("shared")
def shared_left_and_right(d):
    """A weight on the left and on the right of activations."""
    return Built(lambda w, x: readout(jnp.tanh(w @ x) + x @ w), (d(3, 3), d(B, 3, 3)), BARE)


@case("shared")
def shared_dense_and_convolution(d):
    """A kernel used as a convolution and, reshaped, as a dense layer."""

    def loss(w, x):
        conv = lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NTC", "TIO", "NTC"))
        return readout(jnp.tanh(conv)) + readout(x[:, :2].reshape(-1, 6) @ w.reshape(6, 4))

    return Built(loss, (d(2, 3, 4), d(B, 7, 3)))


@case("shared")
def shared_dense_and_scale(d):
    """A weight in a contraction and entry by entry."""
    return Built(
        lambda w, b: readout(b["x"] @ w) + readout(jnp.tanh(w * b["y"])),
        (d(3, 4), {"x": d(B, 7, 3), "y": d(B, 3, 4)}),
        BARE,
    )


@case("shared", "bf16")
def shared_through_different_casts(d):
    """One use in bfloat16 and one in full precision."""

    def loss(w, x):
        low = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(w.dtype)
        return readout(jnp.tanh(low) + jnp.sin(x @ w))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("shared")
def shared_slices_and_whole(d):
    """The whole weight once and a row of it again."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w) * w[1] + w[0, 2]), (d(3, 4), d(B, 7, 3)))


@case("shared")
def shared_mixer(d):
    """MLP-mixer: one square weight over time and over channels."""

    def loss(w, x):
        x = x + jnp.tanh(jnp.einsum("btd,ts->bsd", x, w))
        return readout(x + jnp.tanh(x @ w))

    return Built(loss, (d(3, 3), d(B, 3, 3)))


@case("shared")
def shared_cancelling_uses(d):
    """Uses of opposite sign: the sum per example is far smaller than its parts."""
    return Built(
        lambda w, b: readout(b["x"] @ w - (b["x"] + 0.1 * b["y"]) @ w),
        (d(3, 4), {"x": d(B, 7, 3), "y": d(B, 7, 3)}),
    )


@case("shared")
def shared_same_array_twice(d):
    """One value at two places of the parameter tree is two parameters."""
    w = d(3, 3)
    return Built(lambda p, x: readout(jnp.tanh(x @ p[0]) @ p[1]), ((w, w), d(B, 7, 3)))


@case("shared")
def shared_ensemble(d):
    """A common trunk and three heads with a common weight and their own scales."""

    def loss(p, x):
        h = jnp.tanh(x @ p["trunk"])
        return sum(readout(jnp.sin((h * s) @ p["head"])) for s in p["scales"])

    return Built(loss, ({"trunk": d(3, 4), "head": d(4, 2), "scales": [d(4), d(4), d(4)]}, d(B, 7, 3)))


@case("shared")
def shared_kernel_matrix(d):
    """A kernel matrix between tokens: the same projection on both sides of a product."""

    def loss(w, x):
        z = x @ w
        return readout(jnp.exp(-0.1 * jnp.sum((z[:, :, None] - z[:, None]) ** 2, -1)))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("shared")
def shared_under_jit(d):
    """A jitted layer called twice with the same parameters."""

    @jax.jit
    def layer(p, x):
        return jnp.tanh(x @ p["w"] + p["b"])

    return Built(lambda p, x: readout(layer(p, layer(p, x))), ({"w": d(3, 3), "b": d(3)}, d(B, 7, 3)))
