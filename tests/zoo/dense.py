"""Matrix products: every way in which a weight reaches a contraction."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from .case import BARE, B, Built, case, fit, readout


@case()
def dense_vector(d):
    """A weight without an output axis: the cotangent is a scalar."""
    return Built(lambda w, x: jnp.tanh(x @ w) ** 2, (d(3), d(B, 3)), BARE)


@case()
def dense_matrix(d):
    """The plain layer: no time axis, a bias."""

    def loss(p, batch):
        x, y = batch
        return fit(jnp.tanh(x @ p["w"] + p["b"]), y)

    return Built(loss, ({"w": d(7, 3), "b": d(3)}, (d(B, 7), d(B, 3))))


@case()
def dense_bare(d):
    """The bare example: the gradient is an outer product without any contracted axis."""

    def loss(p, x):
        return readout(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"])

    return Built(loss, ({"w1": d(3, 7), "b1": d(7), "w2": d(7, 2)}, d(B, 3)), BARE)


@case()
def dense_mlp(d):
    """Three layers, so that cotangents themselves depend on every example."""

    def loss(p, batch):
        x, y = batch
        for w, b in p[:-1]:
            x = jax.nn.gelu(x @ w + b)
        w, b = p[-1]
        return fit(x @ w + b, y)

    sizes = (3, 7, 11, 2)
    params = [(d(m, n), d(n)) for m, n in pairwise(sizes)]
    return Built(loss, (params, (d(B, 3), d(B, 2))))


@case()
def dense_time(d):
    """A time axis: squares and signs do not commute with the contraction any more."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w)), (d(3, 4), d(B, 7, 3)))


@case()
def dense_time_bare(d):
    """A time axis and no batch axis."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w)), (d(3, 4), d(B, 7, 3)), BARE)


@case()
def dense_time_one(d):
    """A time axis of length one, which may take the shortcut of the outer product."""
    return Built(lambda w, x: readout(x @ w), (d(3, 4), d(B, 1, 3)))


@case()
def dense_two_time_axes(d):
    """Two contracted axes, as in images passed through a dense layer."""
    return Built(lambda w, x: readout(x @ w), (d(3, 4), d(B, 2, 7, 3)))


@case()
def dense_long_time(d):
    """More time steps than weights: the side on which the Gram matrix is dear."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w)), (d(2, 3), d(B, 29, 2)))


@case()
def dense_wide(d):
    """Few time steps and many weights: the side on which the Gram matrix is cheap."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w)), (d(17, 19, scale=0.3), d(B, 2, 17)))


@case()
def dense_size_one_axes(d):
    """Axes of size one in the weight, where squeezes and broadcasts look alike."""

    def loss(p, x):
        return readout(jnp.tanh(x @ p["narrow"]) @ p["widen"])

    return Built(loss, ({"narrow": d(7, 1), "widen": d(1, 3)}, d(B, 4, 7)))


@case()
def dense_odd_einsum(d):
    """Output axes in an odd order: the gradient is transposed after the contraction."""
    return Built(lambda w, x: readout(jnp.einsum("btd,fd->fbt", x, w) ** 2), (d(4, 3), d(B, 7, 3)))


@case()
def dense_weight_on_the_left(d):
    """w @ x: the weight is the left operand."""
    return Built(lambda w, x: readout(jnp.tanh(w @ x)), (d(4, 3), d(B, 3, 7)), BARE)


@case()
def dense_transposed_weight(d):
    """w.T @ x: a transpose between the weight and the contraction."""
    return Built(lambda w, x: readout(jnp.tanh(w.T @ x)), (d(3, 4), d(B, 3, 7)), BARE)


@case()
def dense_general(d):
    """Weights with more than two axes, one and two of them contracted."""

    def loss(p, x):
        h = jnp.tanh(jnp.einsum("btd,dhk->bhtk", x, p["into"]))
        return readout(jnp.einsum("bhtk,hkd->btd", h, p["out"]))

    return Built(loss, ({"into": d(3, 2, 7), "out": d(2, 7, 4)}, d(B, 6, 3)))


@case()
def dense_tensordot(d):
    """Contraction over two axes that are not neighbours."""
    return Built(lambda w, x: readout(jnp.tensordot(x, w, axes=((1, 3), (2, 0)))), (d(3, 7, 2), d(B, 2, 4, 3)))


@case()
def dense_per_position(d):
    """A weight for every position: time is a batch axis of the contraction."""
    return Built(lambda w, x: readout(jnp.einsum("btd,tdf->btf", x, w)), (d(4, 3, 2), d(B, 4, 3)))


@case()
def dense_per_position_middle(d):
    """The batch axis of the contraction lies in the middle of the weight."""
    return Built(lambda w, x: readout(jnp.einsum("bdst,dtf->sfbt", x, w)), (d(3, 4, 2), d(B, 3, 7, 4)))


@case()
def dense_experts(d):
    """A soft mixture of experts: experts are a batch axis, tokens are contracted."""

    def loss(p, x):
        gate = jax.nn.softmax(x @ p["router"])
        h = jnp.einsum("btd,edf->ebtf", x, p["up"])
        y = jnp.einsum("ebtf,efd->ebtd", jnp.tanh(h), p["down"])
        return readout(jnp.einsum("bte,ebtd->btd", gate, y))

    params = {"router": d(3, 4), "up": d(4, 3, 7), "down": d(4, 7, 2)}
    return Built(loss, (params, d(B, 6, 3)))


@case()
def dense_experts_dispatched(d):
    """Tokens sorted into experts first: 'etd,edf->etf' on the bare example."""

    def loss(p, x):
        h = jnp.einsum("etd,edf->etf", x, p["up"])
        return readout(jnp.einsum("etf,efd->etd", jnp.tanh(h), p["down"]))

    return Built(loss, ({"up": d(2, 3, 7), "down": d(2, 7, 4)}, d(B, 2, 6, 3)), BARE)


@case()
def dense_bilinear(d):
    """A weight that meets two activations: a contraction of three operands."""

    def loss(w, batch):
        return readout(jnp.einsum("bi,ijk,bj->bk", batch["left"], w, batch["right"]))

    return Built(loss, (d(3, 4, 2), {"left": d(B, 3), "right": d(B, 4)}))


@case()
def dense_three_operands(d):
    """Two weights and an activation in one einsum: a gradient passes through the other weight."""
    return Built(
        lambda p, x: readout(jnp.einsum("btd,dk,kf->btf", x, p["a"], p["b"])),
        ({"a": d(3, 2), "b": d(2, 7)}, d(B, 4, 3)),
    )


@case()
def dense_quadratic_form(d):
    """x' W x: both sides of the gradient come from the same activation."""
    return Built(lambda w, x: jnp.tanh(x @ w @ x) ** 2, (d(3, 3), d(B, 3)), BARE)


@case()
def dense_outer_weight(d):
    """A weight of rank one made from two vectors."""
    return Built(lambda p, x: readout(jnp.tanh(x @ jnp.outer(p["u"], p["v"]))), ({"u": d(3), "v": d(4)}, d(B, 7, 3)))


@case()
def dense_low_rank(d):
    """W + A @ B: three leaves behind one contraction, two of them behind another."""
    return Built(
        lambda p, x: readout(jnp.tanh(x @ (p["w"] + p["a"] @ p["b"]))),
        ({"w": d(4, 3), "a": d(4, 2), "b": d(2, 3)}, d(B, 7, 4)),
    )


@case()
def dense_lora(d):
    """The usual adapter: a frozen constant weight and x @ A @ B."""
    frozen = d(4, 3)
    return Built(
        lambda p, x: readout(jnp.tanh(x @ frozen + 2.0 * (x @ p["a"]) @ p["b"])),
        ({"a": d(4, 2), "b": d(2, 3)}, d(B, 7, 4)),
    )


@case()
def dense_matrix_chain(d):
    """A product of weights before any activation: the inner gradient is a matrix product of a gradient."""
    return Built(lambda p, x: readout(x @ (p[0] @ p[1] @ p[2])), ([d(3, 2), d(2, 7), d(7, 4)], d(B, 6, 3)))


@case()
def dense_reshaped(d):
    """A flat parameter vector cut and reshaped into layers, as ravel_pytree users write."""

    def loss(flat, x):
        w1, b1, w2 = flat[:21].reshape(3, 7), flat[21:28], flat[28:].reshape(7, 2)
        return readout(jnp.tanh(x @ w1 + b1) @ w2)

    return Built(loss, (d(42), d(B, 4, 3)))


@case()
def dense_reshape_merges_axes(d):
    """A reshape that merges and splits axes of the weight across its matrix axes."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w.reshape(6, 7))), (d(2, 7, 3), d(B, 4, 6)))


@case()
def dense_fused_qkv_slices(d):
    """Attention whose q, k and v are slices of one product."""

    def loss(p, x):
        qkv = x @ p["qkv"]
        q, k, v = qkv[..., :4], qkv[..., 4:8], qkv[..., 8:]
        return readout(jax.nn.softmax(q @ k.mT / 2.0) @ v @ p["out"])

    return Built(loss, ({"qkv": d(3, 11), "out": d(3, 2)}, d(B, 7, 3)))


@case()
def dense_fused_qkv_weight_slices(d):
    """The weight itself is sliced: three contractions padded and added into one leaf."""

    def loss(w, x):
        q, k, v = x @ w[:, :4], x @ w[:, 4:8], x @ w[:, 8:]
        return readout(jax.nn.softmax(q @ k.mT / 2.0) @ v)

    return Built(loss, (d(3, 11), d(B, 7, 3)))


@case()
def dense_fused_qkv_split(d):
    """The same through jnp.split, on an axis that leads."""

    def loss(w, x):
        q, k, v = jnp.split(w, 3)
        return readout(jax.nn.softmax((x @ q) @ (x @ k).mT) @ (x @ v))

    return Built(loss, (d(12, 3), d(B, 7, 4)))


@case("shared")
def dense_overlapping_slices(d):
    """Slices that overlap: contributions meet on some rows only and are summed before the statistic."""
    return Built(lambda w, x: readout(jnp.tanh(x[..., :4] @ w[:4]) + x[..., 3:7] @ w[2:6]), (d(6, 3), d(B, 2, 7)))


@case()
def dense_strided_slice(d):
    """Every other row: the gradient is padded with interior zeros."""
    return Built(lambda w, x: readout(x @ w[1::2]), (d(7, 4), d(B, 2, 3)))


@case()
def dense_concatenated(d):
    """Two leaves stacked into one weight."""
    return Built(
        lambda p, x: readout(jnp.tanh(x @ jnp.concatenate([p["a"], p["b"]], axis=1))),
        ({"a": d(3, 2), "b": d(3, 7)}, d(B, 4, 3)),
    )


@case()
def dense_stacked(d):
    """jnp.stack of leaves into a batched weight."""
    return Built(lambda p, x: readout(jnp.einsum("btd,edf->betf", x, jnp.stack(p))), ([d(3, 2)] * 4, d(B, 7, 3)))


@case()
def dense_padded(d):
    """A weight padded before its use: the gradient is a slice of the contraction."""
    return Built(lambda w, x: readout(x @ jnp.pad(w, ((1, 2), (0, 1)))), (d(4, 2), d(B, 6, 7)))


@case()
def dense_flipped_and_rolled(d):
    """Reversal and rotation of the weight: structural, and easy to get the wrong way round."""
    return Built(lambda w, x: readout(x @ jnp.roll(w[::-1], 1, axis=1)), (d(7, 3), d(B, 2, 7)))


@case("shared")
def dense_tiled(d):
    """A weight repeated twice: a sum over copies before the statistic."""
    return Built(lambda w, x: readout(jnp.tanh(x @ jnp.tile(w, (2, 1)))), (d(3, 4), d(B, 7, 6)))


@case("shared")
def dense_repeated(d):
    """jnp.repeat of rows: the sum over copies runs over an inner axis."""
    return Built(lambda w, x: readout(jnp.tanh(x @ jnp.repeat(w, 2, axis=0))), (d(3, 4), d(B, 7, 6)))


@case()
def dense_tril(d):
    """A causal mask on the weight: the masked entries must be zero for every statistic."""
    return Built(lambda w, x: readout(jnp.tril(w) @ x), (d(7, 7), d(B, 7, 3)), BARE)


@case()
def dense_masked(d):
    """A constant mask of zeros and ones, as in MADE and in pruned networks."""
    mask = (np.arange(21).reshape(7, 3) % 4 != 0).astype(np.float32)
    return Built(lambda w, x: readout(x @ (w * mask)), (d(7, 3), d(B, 4, 7)))


@case()
def dense_where_two_weights(d):
    """A constant choice between two leaves: each gets half of one contraction."""
    choose = np.arange(21).reshape(7, 3) % 2 == 0
    return Built(
        lambda p, x: readout(x @ jnp.where(choose, p["a"], p["b"])),
        ({"a": d(7, 3), "b": d(7, 3)}, d(B, 4, 7)),
    )


@case()
def dense_scaled_by_constant(d):
    """A constant factor per entry: squares need its square, signs its sign."""
    factor = d(3, 4)
    return Built(lambda w, x: readout(x @ (w * factor)), (d(3, 4), d(B, 7, 3)))


@case()
def dense_negated_and_divided(d):
    """A negative constant factor: signs flip, squares do not."""
    return Built(lambda w, x: readout(x @ (-w / 3.0)), (d(3, 4), d(B, 7, 3)))


@case()
def dense_scaled_by_parameter(d):
    """A scalar parameter times a weight: the scalar's gradient reduces the whole contraction."""
    return Built(
        lambda p, x: readout(x @ (p["s"] * p["w"])),
        ({"s": np.float32(0.7) * d.positive(), "w": d(3, 4)}, d(B, 7, 3)),
    )


@case()
def dense_scaled_per_example(d):
    """The factor comes from the example, so it may not be taken out of the statistic."""
    return Built(lambda w, b: readout(b["x"] @ (w * b["s"])), (d(3, 4), {"x": d(B, 7, 3), "s": d.positive(B)}), BARE)


@case("shared")
def dense_symmetric(d):
    """w + w.T: a contraction and its own transpose."""
    return Built(lambda w, x: readout(jnp.tanh(x @ (w + w.T))), (d(3, 3), d(B, 7, 3)))


@case("shared", "fragile-sign")
def dense_skew(d):
    """w - w.T: the diagonal of the gradient is exactly zero."""
    return Built(lambda w, x: readout(jnp.tanh(x @ (w - w.T))), (d(3, 3), d(B, 7, 3)))


@case()
def dense_diagonal(d):
    """jnp.diag of a vector: the gradient is the diagonal of a contraction."""
    return Built(lambda v, x: readout(jnp.tanh(x @ jnp.diag(v))), (d(3), d(B, 7, 3)))


@case()
def dense_block_diagonal(d):
    """Blocks of one weight matrix."""
    return Built(lambda p, x: readout(x @ jax.scipy.linalg.block_diag(*p)), ([d(2, 3), d(4, 1)], d(B, 7, 6)))


@case()
def dense_kronecker(d):
    """A Kronecker product of two leaves."""
    return Built(
        lambda p, x: readout(jnp.tanh(x @ jnp.kron(p["a"], p["b"]))),
        ({"a": d(2, 3), "b": d(3, 2)}, d(B, 7, 6)),
    )


@case("shared")
def dense_circulant(d):
    """A matrix gathered from a vector with constant indices: many entries share one parameter."""
    index = (np.arange(7)[:, None] - np.arange(7)[None, :]) % 7
    return Built(lambda v, x: readout(x @ v[index]), (d(7), d(B, 2, 7)))


@case()
def dense_positive_weights(d):
    """softplus of a weight: the contraction is multiplied by a factor that no example changes."""
    return Built(lambda w, x: readout(x @ jax.nn.softplus(w)), (d(3, 4), d(B, 7, 3)))


@case()
def dense_softmax_weights(d):
    """Rows of a weight on the simplex: reductions after the contraction."""
    return Built(lambda w, x: readout(x @ jax.nn.softmax(w, axis=-1)), (d(3, 4), d(B, 7, 3)))


@case()
def dense_weight_norm(d):
    """Direction and length of a weight are two leaves."""

    def loss(p, x):
        w = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
        return readout(jnp.tanh(x @ w))

    return Built(loss, ({"g": d.positive(4), "v": d(3, 4)}, d(B, 7, 3)))


@case()
def dense_spectral_norm(d):
    """A weight over its largest singular value, by power iteration with stopped vectors."""
    start = d(4)

    def loss(w, x):
        u = start
        for _ in range(3):
            v = w @ u / jnp.linalg.norm(w @ u)
            u = w.T @ v / jnp.linalg.norm(w.T @ v)
        u, v = jax.lax.stop_gradient((u, v))
        return readout(jnp.tanh(x @ (w / (v @ w @ u))))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case()
def dense_hypernetwork(d):
    """A network of the parameters alone makes the weight."""

    def loss(p, x):
        w = (jnp.tanh(p["z"] @ p["h1"]) @ p["h2"]).reshape(3, 4)
        return readout(jnp.tanh(x @ w))

    return Built(loss, ({"z": d(2), "h1": d(2, 7), "h2": d(7, 12)}, d(B, 6, 3)))


@case()
def dense_hypernetwork_of_the_example(d):
    """A network of the example makes the weight: no weight is common to the examples."""

    def loss(p, b):
        w = (jnp.tanh(b["z"] @ p["h1"]) @ p["h2"]).reshape(3, 4)
        return readout(jnp.tanh(b["x"] @ w))

    return Built(loss, ({"h1": d(2, 7), "h2": d(7, 12)}, {"z": d(B, 2), "x": d(B, 6, 3)}), BARE)


@case()
def dense_standardised(d):
    """Weight standardisation: mean and variance over the fan-in."""

    def loss(w, x):
        w = (w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-2)
        return readout(jnp.tanh(x @ w))

    return Built(loss, (d(7, 3), d(B, 4, 7)))


@case()
def dense_attention(d):
    """Multi-head causal attention written out with projections of three axes."""

    def loss(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bhtk", x, p[n]) for n in "qkv")
        scores = jnp.einsum("bhsk,bhtk->bhst", q, k) / jnp.sqrt(3.0).astype(x.dtype)
        scores = jnp.where(jnp.tri(6, dtype=bool), scores, -1e9)
        return readout(jnp.einsum("bhst,bhtk,hkd->bsd", jax.nn.softmax(scores), v, p["o"]))

    params = {"q": d(4, 2, 3), "k": d(4, 2, 3), "v": d(4, 2, 3), "o": d(2, 3, 7)}
    return Built(loss, (params, d(B, 6, 4)))


@case()
def dense_library_attention(d):
    """jax.nn.dot_product_attention with fewer heads of keys than of queries."""

    def loss(p, x):
        q = jnp.einsum("btd,dhk->bthk", x, p["q"])
        k, v = jnp.einsum("btd,dnhk->nbthk", x, p["kv"])
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return readout(jnp.einsum("bthk,hkd->btd", out, p["o"]))

    params = {"q": d(3, 4, 2), "kv": d(3, 2, 2, 2), "o": d(4, 2, 7)}
    return Built(loss, (params, d(B, 6, 3)))


@case()
def dense_associative_memory(d):
    """A modern Hopfield layer: learned patterns are both keys and values."""
    return Built(lambda p, x: readout(jax.nn.softmax(x @ p.T) @ p), (d(7, 3), d(B, 4, 3)))


@case("bf16")
def dense_bfloat16_compute(d):
    """Parameters cast to bfloat16 inside the loss: the statistic is of the gradient in bfloat16."""

    def loss(p, x):
        w, v = (p[n].astype(jnp.bfloat16) for n in ("w", "v"))
        out = jnp.tanh(x.astype(jnp.bfloat16) @ w) @ v
        return readout(out.astype(p["w"].dtype))

    return Built(loss, ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)))


@case("bf16")
def dense_bfloat16_parameters(d):
    """Parameters and activations in bfloat16: statistics come out wider than the gradient."""
    bf16 = lambda a: a.astype(jnp.bfloat16)

    def loss(p, x):
        return readout((jnp.tanh(x @ p["w"] + p["b"])).astype(jnp.float32))

    return Built(loss, ({"w": bf16(d(3, 4)), "b": bf16(d(4))}, bf16(d(B, 7, 3))))


@case("f16")
def dense_float16_parameters(d):
    """Parameters in float16, whose squares would underflow."""

    def loss(w, x):
        return readout(jnp.tanh(x @ w).astype(jnp.float32))

    return Built(loss, (d(3, 4).astype(np.float16), d(B, 7, 3).astype(np.float16)))


@case("bf16")
def dense_mixed_precision(d):
    """Leaves of different types in one tree, promoted where they meet."""

    def loss(p, x):
        h = jnp.tanh(x.astype(jnp.bfloat16) @ p["low"]).astype(x.dtype)
        return readout(h @ p["high"] + p["half"])

    params = {"low": d(3, 4).astype(jnp.bfloat16), "high": d(4, 2), "half": d(2).astype(np.float16)}
    return Built(loss, (params, d(B, 7, 3)))


@case("bf16")
def dense_preferred_element_type(d):
    """bfloat16 operands accumulated and returned in a wider type."""

    def loss(w, x):
        w16, x16 = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        return readout(jnp.einsum("btd,df->btf", x16, w16, preferred_element_type=w.dtype))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case()
def dense_einsum_diagonal(d):
    """A repeated index reads the diagonal of a weight; another sums a whole axis away."""
    return Built(
        lambda p, x: readout(jnp.einsum("btd,dd->btd", x, p["square"]) + jnp.einsum("btd,df->btd", x, p["wide"])),
        ({"square": d(3, 3), "wide": d(3, 4)}, d(B, 7, 3)),
    )
