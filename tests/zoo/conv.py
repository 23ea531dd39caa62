"""Convolutions: dimensions, strides, dilations, padding, groups, layouts."""

import jax
import jax.numpy as jnp
from jax import lax

from .case import BARE, B, Built, add, case, fit, readout


def conv(name, why, x_shape, w_shape, layout, *tags, stride=None, padding="VALID", **options):
    """A layer of one convolution and a smooth readout; the loss sees a batch of one example."""
    stride = stride or (1,) * (len(x_shape) - 2)

    def build(d):
        def loss(w, x):
            out = lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=layout, **options)
            return readout(jnp.tanh(out))

        return Built(loss, (d(*w_shape), d(*x_shape)))

    add(name, build, "conv", *tags, why=why)


D1, D2, D3 = ("NTC", "TIO", "NTC"), ("NHWC", "HWIO", "NHWC"), ("NDHWC", "DHWIO", "NDHWC")

conv("conv-1d", "The smallest one.", (B, 7, 2), (3, 2, 4), D1)
conv(
    "conv-1d-stride",
    "The stride does not divide the length: the last inputs are never read.",
    (B, 8, 2),
    (3, 2, 4),
    D1,
    stride=(3,),
)
conv(
    "conv-1d-causal",
    "Padding on one side and a dilated kernel, as in WaveNet.",
    (B, 7, 2),
    (2, 2, 3),
    D1,
    padding=[(3, 0)],
    rhs_dilation=(3,),
)
conv("conv-1d-one-by-one", "A kernel of one: a dense layer in disguise.", (B, 7, 2), (1, 2, 3), D1)
conv("conv-1d-one-output", "One output position: no contraction is left.", (B, 3, 2), (3, 2, 4), D1)
conv("conv-2d", "All axes different, so that a transposition shows.", (B, 6, 7, 2), (3, 2, 2, 4), D2)
conv("conv-2d-same", "SAME with an even kernel pads unevenly.", (B, 6, 7, 2), (2, 3, 2, 4), D2, padding="SAME")
conv(
    "conv-2d-same-stride",
    "SAME with strides that differ per axis.",
    (B, 7, 9, 2),
    (3, 3, 2, 3),
    D2,
    padding="SAME",
    stride=(2, 3),
)
conv(
    "conv-2d-same-lower",
    "SAME_LOWER puts the odd pad first.",
    (B, 6, 7, 2),
    (2, 4, 2, 3),
    D2,
    padding="SAME_LOWER",
)
conv(
    "conv-2d-explicit-padding",
    "Different padding on all four sides.",
    (B, 4, 6, 2),
    (3, 2, 2, 3),
    D2,
    padding=[(0, 2), (3, 1)],
)
conv(
    "conv-2d-negative-padding",
    "Negative padding crops the input.",
    (B, 7, 8, 2),
    (2, 3, 2, 3),
    D2,
    padding=[(-1, 2), (1, -2)],
)
conv(
    "conv-2d-channels-first",
    "NCHW with OIHW kernels.",
    (B, 2, 6, 7),
    (4, 2, 3, 2),
    ("NCHW", "OIHW", "NCHW"),
    padding="SAME",
)
conv(
    "conv-2d-odd-layout",
    "Examples in the middle of neither operand's usual place.",
    (B, 6, 2, 7),
    (2, 3, 4, 2),
    ("NHCW", "IHOW", "CWNH"),
)
conv(
    "conv-2d-rhs-dilation",
    "A trous, different per axis.",
    (B, 7, 8, 2),
    (2, 3, 2, 3),
    D2,
    rhs_dilation=(3, 2),
    padding="SAME",
)
conv(
    "conv-2d-lhs-dilation",
    "A dilated input: a transposed convolution.",
    (B, 3, 4, 2),
    (3, 2, 2, 3),
    D2,
    lhs_dilation=(2, 3),
    padding=[(1, 2), (0, 1)],
)
conv(
    "conv-2d-both-dilations",
    "Dilations of both sides together with a stride.",
    (B, 4, 3, 2),
    (2, 2, 2, 3),
    D2,
    lhs_dilation=(2, 3),
    rhs_dilation=(3, 2),
    stride=(2, 1),
    padding=[(2, 1), (1, 3)],
)
conv("conv-2d-groups", "Two groups.", (B, 6, 4, 4), (3, 2, 2, 6), D2, feature_group_count=2)
conv(
    "conv-2d-depthwise",
    "As many groups as channels.",
    (B, 6, 7, 3),
    (3, 2, 1, 3),
    D2,
    feature_group_count=3,
    padding="SAME",
)
conv(
    "conv-2d-depthwise-multiplier",
    "Depthwise with two outputs a channel, and a stride.",
    (B, 6, 7, 3),
    (3, 2, 1, 6),
    D2,
    feature_group_count=3,
    stride=(2, 1),
)
conv(
    "conv-2d-groups-channels-first",
    "Groups in the other layout.",
    (B, 4, 6, 7),
    (6, 2, 2, 3),
    ("NCHW", "OIHW", "NCHW"),
    feature_group_count=2,
    stride=(1, 2),
)
conv("conv-2d-one-by-one", "1x1 with a stride.", (B, 6, 7, 3), (1, 1, 3, 4), D2, stride=(2, 3))
conv(
    "conv-2d-patches",
    "Patch embedding: the kernel is the stride.",
    (B, 6, 4, 3),
    (3, 2, 3, 4),
    D2,
    stride=(3, 2),
)
conv("conv-2d-stride-beyond-kernel", "The stride skips inputs.", (B, 9, 8, 2), (2, 1, 2, 3), D2, stride=(4, 3))
conv(
    "conv-2d-kernel-beyond-input",
    "The kernel only fits by padding: some of its entries never see the input.",
    (B, 2, 3, 2),
    (4, 3, 2, 3),
    D2,
    padding=[(2, 2), (1, 1)],
)
conv("conv-2d-one-channel", "One channel in, one out.", (B, 6, 7, 1), (3, 2, 1, 1), D2)
conv("conv-3d", "Three spatial axes.", (B, 4, 3, 5, 2), (2, 2, 3, 2, 3), D3)
conv(
    "conv-3d-stride",
    "Three spatial axes, strides, dilation, SAME.",
    (B, 4, 3, 5, 2),
    (2, 3, 2, 2, 3),
    D3,
    stride=(2, 1, 3),
    rhs_dilation=(1, 2, 1),
    padding="SAME",
)
conv(
    "conv-3d-depthwise",
    "Three spatial axes, depthwise.",
    (B, 4, 3, 5, 2),
    (2, 2, 3, 1, 4),
    D3,
    feature_group_count=2,
)


@case("conv")
def conv_bare(d):
    """The bare example: a convolution with an axis of one added by the loss."""

    def loss(w, x):
        out = lax.conv_general_dilated(x[None], w, (1, 2), "SAME", dimension_numbers=D2)[0]
        return readout(jnp.tanh(out))

    return Built(loss, (d(3, 2, 2, 4), d(B, 6, 7, 2)), BARE)


@case("conv")
def conv_batch_groups(d):
    """batch_group_count: the axis of examples of the operand holds frames that are grouped."""

    def loss(w, x):
        out = lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=D1, batch_group_count=2)
        return readout(jnp.tanh(out))

    return Built(loss, (d(3, 3, 4), d(B, 6, 7, 3)), BARE)


@case("conv")
def conv_of_frames(d):
    """Frames of a video as the batch of the convolution: contracted inside one example."""

    def loss(w, x):
        return readout(jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=D2)))

    return Built(loss, (d(2, 3, 2, 3), d(B, 3, 4, 6, 2)), BARE)


@case("conv")
def conv_under_vmap(d):
    """A convolution of one image under the loss's own vmap."""

    def one(w, x):
        return lax.conv_general_dilated(x[None], w, (2, 1), "VALID", dimension_numbers=D2)[0]

    def loss(w, x):
        return readout(jnp.tanh(jax.vmap(one, (None, 0))(w, x)))

    return Built(loss, (d(3, 2, 2, 4), d(B, 6, 7, 2)))


@case("conv")
def conv_under_vmap_of_kernels(d):
    """An ensemble of kernels under vmap: JAX turns it into groups."""

    def one(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=D2)

    def loss(w, x):
        return readout(jnp.tanh(jax.vmap(one, (0, None))(w, x)))

    return Built(loss, (d(3, 2, 3, 2, 4), d(B, 4, 6, 2)))


@case("conv", "shared")
def conv_shared(d):
    """The same kernel applied twice, at two resolutions."""

    def loss(w, x):
        x = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=D2))
        x = jnp.tanh(lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=D2))
        return readout(x)

    return Built(loss, (d(3, 2, 3, 3), d(B, 6, 7, 3)))


@case("conv")
def conv_transpose(d):
    """lax.conv_transpose, as decoders use it."""

    def loss(p, x):
        x = jnp.tanh(lax.conv_transpose(x, p["w"], (2, 3), "SAME", dimension_numbers=D2) + p["b"])
        return readout(x)

    return Built(loss, ({"w": d(3, 4, 2, 3), "b": d(3)}, d(B, 3, 4, 2)))


@case("conv")
def conv_transpose_kernel(d):
    """The gradient form of the transposed convolution: flipped kernel, channels swapped."""

    def loss(w, x):
        out = lax.conv_transpose(x, w, (2,), "VALID", dimension_numbers=D1, transpose_kernel=True)
        return readout(jnp.tanh(out))

    return Built(loss, (d(3, 4, 2), d(B, 6, 2)))


@case("conv")
def conv_local(d):
    """Unshared kernels for every position."""

    def loss(w, x):
        out = lax.conv_general_dilated_local(x, w, (1,), "VALID", (3,), dimension_numbers=("NTC", "TIO", "NTC"))
        return readout(jnp.tanh(out))

    return Built(loss, (d(4, 6, 3), d(B, 6, 2)))


@case("conv")
def conv_by_patches(d):
    """Patches taken first, then a dense layer over them."""

    def loss(w, x):
        patches = lax.conv_general_dilated_patches(x, (2, 3), (1, 2), "SAME", dimension_numbers=D2)
        return readout(jnp.tanh(patches @ w))

    return Built(loss, (d(12, 3), d(B, 4, 7, 2)))


@case("conv")
def conv_numpy_style(d):
    """jnp.convolve flips the kernel."""
    return Built(lambda w, x: readout(jnp.tanh(jnp.convolve(x, w, mode="full"))), (d(3), d(B, 7)), BARE)


@case("conv", "bf16")
def conv_bfloat16(d):
    """A convolution in bfloat16 of a kernel kept wider."""

    def loss(w, x):
        low = jnp.bfloat16
        out = lax.conv_general_dilated(x.astype(low), w.astype(low), (1, 1), "SAME", dimension_numbers=D2)
        return readout(jnp.tanh(out).astype(w.dtype))

    return Built(loss, (d(3, 2, 2, 4), d(B, 4, 6, 2)))


@case("conv", "nonsmooth")
def conv_net_pooling(d):
    """Convolution, max pooling, convolution, mean pooling, dense: a small network of the usual kind."""

    def loss(p, batch):
        x, y = batch
        x = jnp.tanh(lax.conv_general_dilated(x, p["w1"], (1, 1), "SAME", dimension_numbers=D2) + p["b1"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jnp.tanh(lax.conv_general_dilated(x, p["w2"], (1, 1), "VALID", dimension_numbers=D2) + p["b2"])
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 1, 1), (1, 1, 1, 1), "VALID") / 2
        return fit(x.reshape(x.shape[0], -1) @ p["w3"], y)

    params = {"w1": d(3, 3, 1, 4), "b1": d(4), "w2": d(2, 2, 4, 3), "b2": d(3), "w3": d(9, 2)}
    return Built(loss, (params, (d(B, 6, 8, 1), d(B, 2))))


@case("conv")
def conv_resized(d):
    """A U-shaped pair with jax.image.resize between."""

    def loss(p, x):
        h = jnp.tanh(lax.conv_general_dilated(x, p["down"], (2, 2), "SAME", dimension_numbers=D2))
        h = jax.image.resize(h, (h.shape[0], 6, 7, h.shape[-1]), "bilinear")
        return readout(lax.conv_general_dilated(h, p["up"], (1, 1), "SAME", dimension_numbers=D2) + x)

    return Built(loss, ({"down": d(3, 3, 2, 4), "up": d(3, 2, 4, 2)}, d(B, 6, 7, 2)))


@case("conv")
def conv_resized_kernel(d):
    """The kernel itself is resized, as for patch embeddings of another resolution."""

    def loss(w, x):
        w = jax.image.resize(w, (4, 3, 2, 3), "bilinear")
        return readout(jnp.tanh(lax.conv_general_dilated(x, w, (4, 3), "VALID", dimension_numbers=D2)))

    return Built(loss, (d(2, 2, 2, 3), d(B, 8, 6, 2)))
