"""Small leaves: biases, scales, normalisation, scalars; and functions of the parameters alone."""

import jax
import jax.numpy as jnp
import numpy as np

from .case import BARE, B, Built, case, fit, readout


@case()
def reduce_bias(d):
    """A bias over two axes of positions."""
    return Built(lambda b, x: readout(jnp.tanh(x + b)), (d(3), d(B, 4, 7, 3)))


@case()
def reduce_bias_channels_first(d):
    """A bias on a middle axis."""
    return Built(lambda b, x: readout(jnp.tanh(x + b[:, None, None])), (d(3), d(B, 3, 4, 7)))


@case()
def reduce_scale(d):
    """A scale: the product with the activation happens before the sum."""
    return Built(lambda s, x: readout(jnp.tanh(x * s)), (d(3), d(B, 4, 3)))


@case()
def reduce_full_size(d):
    """A parameter as large as the example: nothing is summed."""
    return Built(lambda p, x: readout(jnp.tanh(x * p["s"] + p["b"])), ({"s": d(4, 3), "b": d(4, 3)}, d(B, 4, 3)), BARE)


@case()
def reduce_odd_axes(d):
    """Broadcast over the first and third axis of four."""
    return Built(lambda b, x: readout(jnp.tanh(x * b[None, :, None, :])), (d(3, 7), d(B, 2, 3, 4, 7)), BARE)


@case()
def reduce_size_one_axes(d):
    """Axes of size one in the parameter that are broadcast, next to one that is really of size one."""
    return Built(lambda b, x: readout(jnp.tanh(x * b)), (d(1, 3, 1, 1), d(B, 4, 3, 7, 1)), BARE)


@case()
def reduce_scalar(d):
    """A scalar parameter."""
    return Built(lambda s, x: readout(jnp.tanh(x * s)), (d.positive(), d(B, 3, 4)))


@case()
def reduce_temperature(d):
    """A learned temperature next to a layer, as in CLIP."""

    def loss(p, batch):
        x, y = batch
        logits = x @ p["w"] * jnp.exp(p["t"])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.softmax(y), -1))

    return Built(loss, ({"w": d(3, 4), "t": 0.3 * d.positive()}, (d(B, 3), d(B, 4))))


@case()
def reduce_layer_norm(d):
    """Scale and shift of a layer norm before a layer."""

    def loss(p, x):
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return readout(jnp.tanh((x * p["scale"] + p["shift"]) @ p["w"]))

    return Built(loss, ({"scale": d.positive(7), "shift": d(7), "w": d(7, 3)}, d(B, 4, 7)))


@case("fragile-sign")
def reduce_bias_before_norm(d):
    """A bias that the norm removes: its gradient is rounding, whatever rule serves it."""

    def loss(p, x):
        x = x @ p["w"] + p["b"]
        x = x - x.mean((1, 2), keepdims=True)
        return readout(x / jnp.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-3) * p["scale"])

    return Built(loss, ({"w": d(3, 4), "b": d(1), "scale": d.positive(4)}, d(B, 7, 3)))


@case()
def reduce_rms_norm(d):
    """RMS norm with the scale stored as an offset from one."""

    def loss(p, x):
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * (1.0 + p["scale"])
        return readout(jnp.tanh(x @ p["w"]))

    return Built(loss, ({"scale": d(7, scale=0.1), "w": d(7, 3)}, d(B, 4, 7)))


@case()
def reduce_group_norm(d):
    """Statistics by groups of channels; the scale is reshaped into groups."""

    def loss(p, x):
        b, h, w, c = x.shape
        g = x.reshape(b, h, w, 2, c // 2)
        g = (g - g.mean((1, 2, 4), keepdims=True)) / jnp.sqrt(g.var((1, 2, 4), keepdims=True) + 1e-4)
        g = g * p["scale"].reshape(2, c // 2) + p["shift"].reshape(2, c // 2)
        return readout(jnp.tanh(g))

    return Built(loss, ({"scale": d.positive(6), "shift": d(6)}, d(B, 4, 3, 6)))


@case()
def reduce_zero_size(d):
    """Leaves without entries, next to one with."""

    def loss(p, x):
        return readout(jnp.tanh(x @ p["w"] + p["b"])) + jnp.sum(p["none"] ** 2) + jnp.sum(x[..., :0] @ p["zero"])

    params = {"w": d(3, 4), "b": d(4), "none": d(0, 3), "zero": d(0, 2)}
    return Built(loss, (params, d(B, 7, 3)))


@case()
def reduce_unused(d):
    """Parameters that the loss does not read: zeros, of the right shape."""
    return Built(
        lambda p, x: readout(jnp.tanh(x @ p["w"])),
        ({"w": d(3, 4), "unused": d(2, 7), "scalar": d.positive()}, d(B, 3)),
    )


@case()
def reduce_only_unused(d):
    """No parameter is read at all."""
    return Built(lambda p, x: readout(x), ({"a": d(3), "b": d(2, 4)}, d(B, 3)))


@case()
def reduce_constant_in_example(d):
    """A leaf used in a regulariser only: the gradient is the same for all examples."""
    return Built(
        lambda p, x: readout(jnp.tanh(x @ p["w"])) + 0.1 * jnp.sum(jnp.cos(p["r"])),
        ({"w": d(3, 4), "r": d(2, 3)}, d(B, 3)),
    )


@case()
def reduce_only_regulariser(d):
    """The loss does not depend on the example: values and gradients are not batched at all."""
    return Built(lambda p, x: jnp.sum(p["w"] ** 2) + jnp.prod(p["s"]), ({"w": d(3, 4), "s": d.positive(3)}, d(B, 3)))


@case("shared")
def reduce_dense_with_decay(d):
    """loss + 0.1 |w|^2: a contraction plus a term that is common to the examples."""

    def loss(p, x):
        return readout(jnp.tanh(x @ p["w"] + p["b"])) + 0.1 * jnp.sum(p["w"] ** 2)

    return Built(loss, ({"w": d(3, 4), "b": d(4)}, d(B, 7, 3)))


@case("shared", "nonsmooth")
def reduce_dense_with_lasso(d):
    """A regulariser with a kink and one by rows."""

    def loss(w, x):
        return readout(x @ w) + 0.1 * jnp.abs(w).sum() + 0.2 * jnp.linalg.norm(w, axis=1).sum()

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("shared")
def reduce_orthogonality(d):
    """|W'W - 1|^2: a contraction of the parameters with themselves beside that of the example."""

    def loss(w, x):
        return readout(x @ w) + 0.1 * jnp.sum((w.T @ w - jnp.eye(3, dtype=w.dtype)) ** 2)

    return Built(loss, (d(4, 3), d(B, 7, 4)))


@case("shared")
def reduce_weighted_decay(d):
    """The strength of the regulariser comes with the example."""
    return Built(
        lambda w, b: readout(b["x"] @ w) + b["s"] * jnp.sum(jnp.sin(w)),
        (d(3, 4), {"x": d(B, 7, 3), "s": d.positive(B)}),
        BARE,
    )


@case()
def reduce_cumulative_sum(d):
    """Ordered thresholds made by a cumulative sum of the parameter."""
    return Built(lambda p, x: readout(jax.nn.sigmoid(x[..., None] - jnp.cumsum(p))), (d.positive(7), d(B, 3)))


@case("nonsmooth")
def reduce_sorted(d):
    """A sorted parameter: the gradient is permuted back."""
    return Built(lambda p, x: readout(jnp.tanh(x * jnp.sort(p))), (d(7), d(B, 3, 7)))


@case("nonsmooth")
def reduce_extremes(d):
    """Maximum and minimum of a parameter: a single entry gets the gradient."""
    return Built(lambda p, x: readout(jnp.tanh(x * p.max(0) + p.min(1)[:, None])), (d(3, 7), d(B, 3, 7)), BARE)


@case()
def reduce_logsumexp(d):
    """Log-normaliser of mixture weights."""

    def loss(p, x):
        log_weight = p["a"] - jax.nn.logsumexp(p["a"])
        inside = -0.5 * (x[:, None] - p["m"]) ** 2 * jnp.exp(-2 * p["s"]) - p["s"]
        return -jnp.mean(jax.nn.logsumexp(log_weight + inside, axis=1))

    return Built(loss, ({"a": d(4), "m": d(4), "s": d(4, scale=0.2)}, d(B)))


@case()
def reduce_product(d):
    """A product over the parameter, and one over the activations it scales."""
    return Built(
        lambda p, x: jnp.prod(p["u"]) * readout(jnp.prod(x * p["v"], axis=-1)),
        ({"u": d.positive(4), "v": d.positive(3)}, d(B, 7, 3)),
    )


@case()
def reduce_cross_entropy(d):
    """Integer labels: the gather is on activations, not on a parameter."""

    def loss(p, batch):
        x, label = batch
        log_p = jax.nn.log_softmax(x @ p["w"] + p["b"])
        return -jnp.mean(jnp.take_along_axis(log_p, label[:, None], axis=1))

    return Built(loss, ({"w": d(7, 4), "b": d(4)}, (d(B, 7), d.ints(0, 4, B))))


@case()
def reduce_masked_tokens(d):
    """A masked mean over the tokens of an example: its denominator differs per example."""

    def loss(p, b):
        out = jnp.tanh(b["x"] @ p["w"] + p["b"]).sum(-1) ** 2
        return jnp.sum(out * b["mask"]) / jnp.sum(b["mask"])

    mask = (np.arange(7) < np.array([7, 3, 1, 5, 2])[:, None]).astype(np.float32)
    return Built(loss, ({"w": d(3, 4), "b": d(4)}, {"x": d(B, 7, 3), "mask": mask}), BARE)


@case("nonsmooth")
def reduce_relu_dead_unit(d):
    """A unit that no example wakes: exact zeros in values, squares and signs."""

    def loss(p, batch):
        x, y = batch
        return fit(jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"], y)

    b1 = np.array([0.3, -99.0, 0.2, 0.1], np.float32)
    return Built(loss, ({"w1": d(3, 4), "b1": b1, "w2": d(4, 2)}, (d(B, 3), d(B, 2))))


@case()
def reduce_huge_and_tiny(d):
    """Gradients of one leaf over many orders of magnitude."""
    scale = np.array([1e-6, 1.0, 1e5], np.float32)
    return Built(lambda w, x: readout(jnp.tanh(x * scale * w)), (d(3, scale=1e-5), d(B, 4, 3)))
