"""Lookups: gathers of rows, in every mode, and what looks like one."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import BARE, B, Built, add, case, fit, readout


def lookup(name, why, look, *tags, low=0, high=7, shape=(6,), table=(7, 3), options=None):
    """A table, a lookup `look(table, indices)` and a readout in which equal rows get different cotangents."""

    def build(d):
        def loss(e, i):
            rows = look(e, i)
            one = rows.shape if options else rows.shape[1:]
            return readout(jnp.tanh(rows) * jnp.sin(1.0 + jnp.arange(math.prod(one))).reshape(one))

        return Built(loss, (d(*table), d.ints(low, high, B, *shape)), options or {})

    add(name, build, "embedding", *tags, why=why)


lookup("embedding", "E[i] with duplicates inside an example and rows that no example reads.", lambda e, i: e[i])
lookup("embedding-bare", "The same on the bare example.", lambda e, i: e[i], options=BARE)
lookup("embedding-many-duplicates", "Two rows and many tokens.", lambda e, i: e[i], high=2, shape=(11,))
lookup(
    "embedding-large-table",
    "More rows than the batch can touch.",
    lambda e, i: e[i],
    high=97,
    table=(97, 2),
    shape=(4,),
)
lookup(
    "embedding-negative",
    "Negative indices count from the end and may name the same row twice.",
    lambda e, i: e[i],
    low=-7,
    high=7,
)
lookup(
    "embedding-out-of-range",
    "Indexing beyond the table clamps the read; what it does to the gradient must match.",
    lambda e, i: e[i],
    low=-10,
    high=12,
)
lookup("embedding-take", "jnp.take along the first axis.", partial(jnp.take, axis=0, fill_value=0.0), low=-7)
lookup(
    "embedding-take-fill",
    "Out-of-range rows are filled: they get no gradient.",
    partial(jnp.take, axis=0, mode="fill", fill_value=0.3),
    low=-10,
    high=12,
)
lookup(
    "embedding-take-clip",
    "Out-of-range rows clip to the ends: the ends get more.",
    partial(jnp.take, axis=0, mode="clip"),
    low=-4,
    high=12,
)
lookup(
    "embedding-take-wrap",
    "Out-of-range rows wrap round.",
    partial(jnp.take, axis=0, mode="wrap"),
    low=-10,
    high=12,
)
lookup(
    "embedding-get-drop",
    "at[].get with mode='drop' and a fill value.",
    lambda e, i: e.at[i].get(mode="fill", fill_value=0.0),
    low=-3,
    high=12,
)
lookup("embedding-get-clip", "at[].get with mode='clip'.", lambda e, i: e.at[i].get(mode="clip"), low=0, high=12)
lookup(
    "embedding-in-bounds",
    "mode='promise_in_bounds' is another gather mode.",
    lambda e, i: e.at[i].get(mode="promise_in_bounds"),
)
lookup("embedding-index-matrix", "Indices with two axes.", lambda e, i: e[i], shape=(2, 4))
lookup("embedding-scalar-index", "One index for the bare example.", lambda e, i: e[i], shape=(), options=BARE)
lookup("embedding-one-index", "One index for each example of the batch.", lambda e, i: e[i], shape=())
lookup("embedding-one-row", "A table of one row.", lambda e, i: e[i], high=1, table=(1, 3))
lookup("embedding-thick-rows", "Rows that are matrices.", lambda e, i: e[i], table=(7, 2, 1))
lookup("embedding-unsigned-bytes", "Indices as bytes.", lambda e, i: e[i.astype(jnp.uint8)])
lookup(
    "embedding-one-hot",
    "A one-hot product: a dense rule with very sparse activations.",
    lambda e, i: jax.nn.one_hot(i, 7, dtype=e.dtype) @ e,
)
lookup(
    "embedding-middle-axis",
    "Columns instead of rows.",
    lambda e, i: jnp.moveaxis(e[:, i], 0, -1),
    table=(3, 7),
)
lookup(
    "embedding-middle-of-three",
    "A middle axis of a table with three.",
    lambda e, i: jnp.einsum("abtc->btac", e[:, i]).reshape(*i.shape, -1),
    table=(2, 7, 3),
)
lookup("embedding-scaled", "A constant after the lookup, as in transformers.", lambda e, i: e[i] * 1.7)
lookup(
    "embedding-renormalised",
    "The table is normalised before the lookup.",
    lambda e, i: (e / jnp.linalg.norm(e, axis=1, keepdims=True))[i],
)
lookup("embedding-transposed", "The table is stored transposed.", lambda e, i: e.T[i], table=(3, 7))
lookup("embedding-sliced-table", "Only a part of the table is addressed.", lambda e, i: e[1:6][i], high=5)
lookup(
    "embedding-bag",
    "A sum over the looked-up rows: every token has the same cotangent.",
    lambda e, i: e[i].sum(-2, keepdims=True),
)
lookup(
    "embedding-dynamic-slice",
    "A traced start of a slice, read with lax.dynamic_slice.",
    lambda e, i: lax.dynamic_slice_in_dim(e, i[0], 3),
    shape=(3,),
    options=BARE,
)
lookup(
    "embedding-dynamic-slice-clamped",
    "A start so late that it is clamped.",
    lambda e, i: lax.dynamic_slice_in_dim(e, i[0], 3),
    low=3,
    high=10,
    shape=(3,),
    options=BARE,
)
lookup(
    "embedding-dynamic-index",
    "lax.dynamic_index_in_dim on the second axis.",
    lambda e, i: lax.dynamic_index_in_dim(e, i, 1, keepdims=False),
    table=(3, 7),
    shape=(),
    options=BARE,
)
lookup(
    "embedding-take-along-axis",
    "take_along_axis on the parameter: one index per row.",
    lambda e, i: jnp.take_along_axis(e, i.reshape(2, 3), axis=0),
    table=(7, 3),
    options=BARE,
)


@case("embedding")
def embedding_two_indices(d):
    """w[i, j]: single entries of a matrix, possibly the same twice."""

    def loss(w, batch):
        i, j = batch
        return readout(jnp.tanh(w[i, j]) * (1.0 + jnp.arange(6)))

    return Built(loss, (d(4, 3), (d.ints(0, 4, B, 6), d.ints(-3, 3, B, 6))))


@case("embedding")
def embedding_two_indices_apart(d):
    """w[i, :, j]: index arrays that are not neighbours move the axis to the front."""

    def loss(w, batch):
        i, j = batch
        return readout(jnp.tanh(w[i, :, j]) ** 2)

    return Built(loss, (d(4, 3, 7), (d.ints(0, 4, B, 6), d.ints(-7, 7, B, 6))))


@case("embedding")
def embedding_positions(d):
    """A token table and the first rows of a position table, longer than the text."""

    def loss(p, i):
        x = p["token"][i] + p["position"][: i.shape[1]]
        return readout(jnp.tanh(x) @ p["out"])

    return Built(loss, ({"token": d(7, 3), "position": d(9, 3), "out": d(3, 4)}, d.ints(0, 7, B, 6)))


@case("embedding")
def embedding_positions_by_lookup(d):
    """Positions looked up with constant indices: the same rows for every example."""

    def loss(p, i):
        x = p["token"][i] * jnp.tanh(p["position"][jnp.arange(i.shape[1])])
        return readout(x)

    return Built(loss, ({"token": d(7, 3), "position": d(9, 3)}, d.ints(0, 7, B, 6)))


@case("embedding", "shared")
def embedding_tied(d):
    """A table that is also the output layer: scatter and contraction are summed before the statistic."""

    def loss(e, batch):
        i, j = batch
        logits = jnp.tanh(e[i]) @ e.T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), j[..., None], -1))

    return Built(loss, (d(11, 3), (d.ints(0, 11, B, 6), d.ints(0, 11, B, 6))))


@case("embedding", "shared")
def embedding_three_lookups(d):
    """One table read three times with indices of different shapes (word2vec with negatives)."""

    def loss(e, b):
        positive = jnp.sum(e[b["word"]] * e[b["context"]], -1)
        negative = jnp.einsum("bd,bnd->bn", e[b["word"]], e[b["negatives"]])
        return -jnp.mean(jax.nn.log_sigmoid(positive)) - jnp.mean(jax.nn.log_sigmoid(-negative))

    batch = {"word": d.ints(0, 7, B), "context": d.ints(0, 7, B), "negatives": d.ints(0, 7, B, 4)}
    return Built(loss, (d(7, 3), batch))


@case("embedding", "scan")
def embedding_inside_scan(d):
    """The lookup happens at every step of a loop over time: the table is a constant of the loop."""

    def loss(p, i):
        def step(h, token):
            h = jnp.tanh(p["table"][token] + h @ p["w"])
            return h, h

        _, hs = lax.scan(step, jnp.zeros((3,), p["w"].dtype), i)
        return readout(hs)

    return Built(loss, ({"table": d(7, 3), "w": d(3, 3)}, d.ints(0, 7, B, 6)), BARE)


@case("embedding")
def embedding_factorised(d):
    """A thin table followed by a projection, as in ALBERT."""
    return Built(
        lambda p, i: readout(jnp.tanh(p["table"][i] @ p["up"])),
        ({"table": d(11, 2), "up": d(2, 7)}, d.ints(0, 11, B, 6)),
    )


@case("embedding")
def embedding_projected_table(d):
    """The whole table goes through a layer before it is read: a contraction of a scatter."""
    return Built(
        lambda p, i: readout(jnp.tanh(p["table"] @ p["up"])[i]),
        ({"table": d(11, 2), "up": d(2, 7)}, d.ints(0, 11, B, 6)),
    )


@case("embedding")
def embedding_updated_rows(d):
    """Parameter values written into an array with at[].add and at[].set."""

    def loss(p, b):
        x = b["x"].at[b["i"]].add(p["a"])
        x = x.at[b["j"]].set(p["s"])
        return readout(jnp.tanh(x) * x)

    batch = {"x": d(B, 7, 3), "i": d.ints(0, 7, B, 4), "j": d.ints(0, 7, B)}
    return Built(loss, ({"a": d(4, 3), "s": d(3)}, batch), BARE)


@case("embedding")
def embedding_table_updated(d):
    """The parameter is overwritten in part before it is used: the overwritten rows get nothing."""

    def loss(e, b):
        e = e.at[b["i"]].set(0.5).at[b["j"]].multiply(2.0)
        return readout(b["x"] @ e)

    return Built(loss, (d(7, 3), {"x": d(B, 4, 7), "i": d.ints(0, 7, B), "j": d.ints(0, 7, B)}), BARE)


@case("embedding")
def embedding_segment_sum(d):
    """Messages on a graph: gather of nodes, a layer, and a sum by receiver."""

    def loss(p, g):
        message = jnp.tanh(g["x"][g["from"]] @ p["w"] + p["edge"][g["kind"]])
        node = jax.ops.segment_sum(message, g["to"], num_segments=4)
        return readout(jnp.tanh(node) @ p["v"])

    graph = {
        "x": d(B, 4, 3),
        "from": d.ints(0, 4, B, 7),
        "to": d.ints(0, 4, B, 7),
        "kind": d.ints(0, 2, B, 7),
    }
    return Built(loss, ({"w": d(3, 6), "edge": d(2, 6), "v": d(6, 2)}, graph), BARE)


@case("embedding", "bf16")
def embedding_bfloat16(d):
    """Duplicates added up in bfloat16: the order of addition shows only in the last bits."""

    def loss(e, i):
        return readout(jnp.tanh(e.astype(jnp.bfloat16)[i]).astype(e.dtype))

    return Built(loss, (d(7, 3), d.ints(0, 7, B, 6)))


@case("embedding")
def embedding_classifier(d):
    """Bag of words to classes with integer labels, padding index masked inside the loss."""

    def loss(p, batch):
        words, label = batch
        keep = (words > 0).astype(p["table"].dtype)[..., None]
        x = jnp.sum(p["table"][words] * keep, 1) / (1.0 + jnp.sum(keep, 1))
        return fit(jax.nn.softmax(jnp.tanh(x) @ p["w"]), jax.nn.one_hot(label, 4, dtype=x.dtype))

    words = d.ints(0, 7, B, 6) * (np.arange(6) < d.ints(1, 7, B, 1))
    return Built(loss, ({"table": d(7, 3), "w": d(3, 4)}, (words.astype(np.int32), d.ints(0, 4, B))))


@case("embedding")
def embedding_interpolated(d):
    """Rows mixed by a position between two integers, as in splines."""

    def loss(e, x):
        low = jnp.floor(x).astype(jnp.int32)
        part = (x - low)[..., None]
        return readout(jnp.tanh(e[low] * (1 - part) + e[low + 1] * part))

    return Built(loss, (d(7, 3), (6 * d.random.uniform(size=(B, 4))).astype(np.float32)))


@case("embedding")
def embedding_grid_sampled(d):
    """A grid of features read at points between its nodes, four lookups a point."""

    def loss(grid, points):
        read = lambda g: jax.scipy.ndimage.map_coordinates(g, list(points.T), order=1, mode="nearest")
        return readout(jnp.tanh(jax.vmap(read, 2, 1)(grid)))

    points = d.random.uniform(0, 1, (B, 6, 2)) * [3, 6]
    return Built(loss, (d(4, 7, 2), points.astype(np.float32)), BARE)
