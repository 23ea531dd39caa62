"""Blocks of transformers, for `lm` and `translation`: layer norm first, GELU, no biases but those of the norms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .common import dropout


def dense(inside: int, outside: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inside, outside, use_bias=False, dtype=dtype, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, dtype, rngs: nnx.Rngs):
        self.heads = heads
        self.query, self.key, self.value, self.out = (dense(width, width, dtype, rngs) for _ in range(4))

    def __call__(self, x, source=None, mask=None, causal=False):
        """From x to ``source`` (x itself, if not given), as far as ``mask`` [b, length of the source] goes."""
        source = x if source is None else source
        split = lambda h: h.reshape(*h.shape[:2], self.heads, -1)
        if mask is not None:
            mask = mask[:, None, None, :]
        mixed = jax.nn.dot_product_attention(
            split(self.query(x)), split(self.key(source)), split(self.value(source)), mask=mask, is_causal=causal
        )
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """Attention to itself, to another sequence if ``cross``, and a dense part."""

    def __init__(self, width: int, heads: int, hidden: int, dtype, rngs: nnx.Rngs, cross: bool = False):
        norm = lambda: nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm1, self.attention = norm(), Attention(width, heads, dtype, rngs)
        if cross:
            self.norm_cross, self.cross = norm(), Attention(width, heads, dtype, rngs)
        self.norm2, self.up, self.down = norm(), dense(width, hidden, dtype, rngs), dense(hidden, width, dtype, rngs)

    def __call__(self, h, key, rate, mask=None, source=None, source_mask=None, causal=False):
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        h = h + dropout(self.attention(self.norm1(h), mask=mask, causal=causal), rate, keys[0])
        if source is not None:
            h = h + dropout(self.cross(self.norm_cross(h), source, source_mask), rate, keys[1])
        return h + dropout(self.down(nnx.gelu(self.up(self.norm2(h)))), rate, keys[2])


def positions(length: int, width: int) -> jax.Array:
    """Sines and cosines: no parameters."""
    angles = jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(0, width, 2) / width)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, -1)[:, :width]
