"""What the models are made of: parameters from one seed, layers, attention, convolutions, losses.

Parameters are float32 and are cast to the dtype of the activations where they are used; norms, logits and losses are
computed in float32.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


class Init:
    """Arrays from one NumPy generator, so that a row is the same on every version and device."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def weight(self, *shape, fan_in=None):
        scale = 1 / math.sqrt(fan_in or shape[-2])
        return jnp.asarray(self.rng.standard_normal(shape, np.float32) * np.float32(scale))

    def normal(self, *shape):
        return jnp.asarray(self.rng.standard_normal(shape, np.float32))

    def integers(self, high, *shape):
        return jnp.asarray(self.rng.integers(high, size=shape, dtype=np.int32))

    def dense(self, m, n, *lead, fan_in=None):
        return {"kernel": self.weight(*lead, m, n, fan_in=fan_in or m), "bias": jnp.zeros((*lead, n))}

    def norm(self, width, *lead):
        return {"scale": jnp.ones((*lead, width)), "bias": jnp.zeros((*lead, width))}

    def block(self, width, *lead, cross=False):
        """A transformer layer, or with `lead` a stack of them."""
        p = {
            "norm1": self.norm(width, *lead),
            "qkv": self.dense(width, 3 * width, *lead),
            "out": self.dense(width, width, *lead),
            "norm2": self.norm(width, *lead),
            "up": self.dense(width, 4 * width, *lead),
            "down": self.dense(4 * width, width, *lead),
        }
        if cross:
            p["cross"] = {
                "norm": self.norm(width, *lead),
                "query": self.dense(width, width, *lead),
                "key_value": self.dense(width, 2 * width, *lead),
                "out": self.dense(width, width, *lead),
            }
        return p


def dense(p, h):
    return h @ p["kernel"].astype(h.dtype) + p["bias"].astype(h.dtype)


def normalized(h, axes):
    """To mean 0 and variance 1 over `axes`, in float32."""
    x = h.astype(jnp.float32)
    x = x - jnp.mean(x, axis=axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + 1e-5)


def layer_norm(p, h):
    return (normalized(h, -1) * p["scale"] + p["bias"]).astype(h.dtype)


def group_norm(p, h, groups):
    b, height, width, c = h.shape
    x = normalized(h.reshape(b, height, width, groups, c // groups), (1, 2, 4))
    return (x.reshape(h.shape) * p["scale"] + p["bias"]).astype(h.dtype)


def split_heads(h, parts, heads):
    """[b, t, parts·width] -> a list of [b, t, heads, width/heads]."""
    b, t, _ = h.shape
    h = h.reshape(b, t, parts, heads, -1)
    return [h[:, :, k] for k in range(parts)]


def attend(q, k, v, attention, causal=False):
    b, t, _, _ = q.shape
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=attention).reshape(b, t, -1)


def block(p, h, heads, attention, causal=False, memory=None):
    """A pre-norm transformer layer; with `memory`, it looks there too."""
    q, k, v = split_heads(dense(p["qkv"], layer_norm(p["norm1"], h)), 3, heads)
    h = h + dense(p["out"], attend(q, k, v, attention, causal))
    if memory is not None:
        c = p["cross"]
        (q,) = split_heads(dense(c["query"], layer_norm(c["norm"], h)), 1, heads)
        k, v = split_heads(dense(c["key_value"], memory), 2, heads)
        h = h + dense(c["out"], attend(q, k, v, attention))
    return h + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], h))))


def stack(layers, h, body, remat=False):
    """`h = body(p, h)` for each of the stacked layers."""
    step = jax.checkpoint(body) if remat else body
    return jax.lax.scan(lambda h, p: (step(p, h), None), h, layers)[0]


def convolution(kernel, h, stride=1, padding="SAME"):
    """`padding` may be a pair (top, bottom), (left, right) as well."""
    strides, dims = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(h, kernel.astype(h.dtype), strides, padding, dimension_numbers=dims)


def cross_entropy(logits, labels):
    """Mean of −log p(label). The label is picked by comparison: the gradient fuses, a gather's does not."""
    logits = logits.astype(jnp.float32)
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hit, logits, 0), axis=-1))
