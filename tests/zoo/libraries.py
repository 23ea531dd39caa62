"""Models of the usual libraries, which are imported only when a case of theirs is built."""

import jax
import jax.numpy as jnp
import numpy as np

from .case import BARE, B, Built, Draw, case, fit, readout


def redrawn(d: Draw, params, scale=0.5):
    """The same tree with every floating leaf drawn anew: initial zeros and ones would hide mistakes."""
    floating = lambda l: hasattr(l, "dtype") and jnp.issubdtype(l.dtype, jnp.floating)
    return jax.tree.map(lambda l: d(*l.shape, scale=scale) if floating(l) else l, params)


def flax_case(d, model, x, targets=None, apply=None):
    """A Flax linen model whose loss compares with targets or reads out."""
    apply = apply or (lambda p, x: model.apply({"params": p}, x))
    params = redrawn(d, model.init(jax.random.key(0), x[:1])["params"])
    if targets is None:
        return Built(lambda p, x: readout(apply(p, x)), (params, x))
    return Built(lambda p, batch: fit(apply(p, batch[0]), batch[1]), (params, (x, targets)))


@case("flax")
def flax_mlp(d):
    """The plain network of Flax linen."""
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(7), nn.gelu, nn.Dense(4), jnp.tanh, nn.Dense(2)])
    return flax_case(d, model, d(B, 3), d(B, 2))


@case("flax", "conv")
def flax_cnn(d):
    """Convolutions, group norm, pooling, dense."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 2))(x)
            x = jnp.tanh(nn.GroupNorm(num_groups=2)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
            x = jnp.tanh(nn.Conv(6, (2, 2), strides=2, feature_group_count=2)(x))
            return nn.Dense(2)(x.reshape(x.shape[0], -1))

    return flax_case(d, Model(), d(B, 6, 8, 1), d(B, 2))


@case("flax", "conv")
def flax_transposed_convolution(d):
    """nn.ConvTranspose upwards."""
    import flax.linen as nn

    return flax_case(
        d, nn.Sequential([nn.ConvTranspose(3, (3, 2), (2, 2)), jnp.tanh, nn.Conv(2, (1, 1))]), d(B, 3, 4, 2)
    )


def flax_recurrent(d, make, x):
    """The state of a Flax cell has the type of its parameters, which the float64 run changes."""
    return flax_case(d, make(x.dtype), x, apply=lambda p, x: make(x.dtype).apply({"params": p}, x))


@case("flax", "scan", "time")
def flax_lstm(d):
    """nn.RNN over an LSTM cell."""
    import flax.linen as nn

    def make(dtype):
        return nn.Sequential([nn.RNN(nn.OptimizedLSTMCell(4, param_dtype=dtype)), nn.Dense(2)])

    return flax_recurrent(d, make, d(B, 7, 3))


@case("flax", "scan", "time")
def flax_gru_bidirectional(d):
    """Two recurrent networks, one of them reversed, whose outputs are joined."""
    import flax.linen as nn

    def make(dtype):
        cells = (nn.GRUCell(n, param_dtype=dtype) for n in (3, 4))
        return nn.Bidirectional(*(nn.RNN(cell) for cell in cells))

    return flax_recurrent(d, make, d(B, 6, 2))


def flax_block():
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            h = nn.LayerNorm()(x)
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, mask=mask)
            h = nn.LayerNorm()(x)
            return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(7)(h))), None

    return Block


@case("flax", "fragile-sign")
def flax_transformer_block(d):
    """Multi-head attention with biases; the bias of the keys has no gradient but rounding."""
    block = flax_block()()
    return flax_case(d, block, d(B, 6, 4), apply=lambda p, x: block.apply({"params": p}, x)[0])


@case("flax", "scan", "remat", "fragile-sign")
def flax_scanned_transformer(d):
    """nn.scan over rematerialised blocks, with a tied embedding."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, i):
            embed = nn.Embed(11, 4)
            position = self.param("position", nn.initializers.normal(), (9, 4))
            stack = nn.scan(
                nn.remat(flax_block(), prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = stack()(embed(i) + position[: i.shape[1]], None)
            return embed.attend(nn.RMSNorm()(x))

    model = Model()
    tokens = d.ints(0, 11, B, 6)
    params = redrawn(d, model.init(jax.random.key(0), tokens[:1])["params"])

    def loss(p, batch):
        logits = model.apply({"params": p}, batch["in"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["out"][..., None], -1))

    return Built(loss, (params, {"in": tokens, "out": d.ints(0, 11, B, 6)}))


@case("flax")
def flax_tied_embedding(d):
    """nn.Embed that reads and attends."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, i):
            embed = nn.Embed(7, 3)
            return embed.attend(jnp.tanh(nn.Dense(3)(embed(i))))

    return flax_case(d, Model(), d.ints(0, 7, B, 6))


@case("flax", "shared")
def flax_shared_module(d):
    """One submodule called twice, and weight norm."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(3)
            return nn.WeightNorm(nn.Dense(2))(jnp.tanh(layer(jnp.tanh(layer(x)))))

    return flax_case(d, Model(), d(B, 7, 3))


@case("flax", "prng")
def flax_dropout(d):
    """nn.Dropout with a key for every example."""
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(7), jnp.tanh, nn.Dropout(0.4, deterministic=False), nn.Dense(2)])
    x = d(B, 4, 3)
    params = redrawn(d, model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)["params"])

    def loss(p, x, key):
        return readout(model.apply({"params": p}, x, rngs={"dropout": key}))

    return Built(loss, (params, x, jax.random.key(2)), {"prng_argnums": 2})


@case("flax", "bf16")
def flax_bfloat16(d):
    """Computation in bfloat16 with parameters in float32, the usual mixed precision."""
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(7, dtype=jnp.bfloat16), jnp.tanh, nn.Dense(2, dtype=jnp.bfloat16)])
    return flax_case(d, model, d(B, 4, 3), apply=lambda p, x: model.apply({"params": p}, x).astype(x.dtype))


@case("flax", "aux", "couples")
def flax_batch_norm(d):
    """Batch norm in training: running statistics as auxiliary output, examples apart from each other."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
            return nn.Dense(2)(jnp.tanh(x))

    model = Model()
    x = d(B, 7, 3)
    variables = model.init(jax.random.key(0), x)

    def loss(p, x, running):
        out, new = model.apply({"params": p, "batch_stats": running}, x, mutable=["batch_stats"])
        return readout(out), new

    params = redrawn(d, variables["params"])
    params["Dense_0"].pop("bias")  # its gradient is rounding: the norm takes it away
    bias = np.zeros(4, np.float32)

    def without_bias(p, x, running):
        return loss(p | {"Dense_0": p["Dense_0"] | {"bias": bias}}, x, running)

    return Built(without_bias, (params, x, variables["batch_stats"]), {"has_aux": True})


def nnx_case(d, model, x, run=None):
    """A Flax nnx model, split into its graph and its parameters."""
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    run = run or (lambda model, x: model(x))

    def loss(params, x, rest):
        return readout(run(nnx.merge(graph, params, rest), x))

    return Built(loss, (redrawn(d, params), x, rest))


@case("nnx")
def nnx_mlp(d):
    """Linear layers and a layer norm; the parameters are an nnx.State."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(3, 7, rngs=rngs), nnx.LayerNorm(7, rngs=rngs), jnp.tanh, nnx.Linear(7, 2, rngs=rngs)
    )
    return nnx_case(d, model, d(B, 4, 3))


@case("nnx", "conv")
def nnx_cnn(d):
    """Convolutions of nnx."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    first = nnx.Conv(2, 4, (3, 2), strides=(1, 2), rngs=rngs)
    second = nnx.Conv(4, 4, (3, 3), feature_group_count=4, padding="VALID", rngs=rngs)
    return nnx_case(d, nnx.Sequential(first, jnp.tanh, second), d(B, 6, 8, 2))


@case("nnx", "fragile-sign")
def nnx_transformer(d):
    """Embedding, attention and a norm in one module, tied head."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, 4, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
            self.norm = nnx.RMSNorm(4, rngs=rngs)

        def __call__(self, i):
            x = self.embed(i)
            x = x + self.attention(x)
            return self.embed.attend(self.norm(x))

    return nnx_case(d, Model(nnx.Rngs(0)), d.ints(0, 7, B, 6))


@case("nnx")
def nnx_einsum_and_lora(d):
    """A dense layer over two axes and a low-rank adapter."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    general = nnx.LinearGeneral((2, 3), (3, 2), axis=(-2, -1), rngs=rngs)
    adapter = nnx.LoRA(2, 2, 3, rngs=rngs)
    return nnx_case(d, nnx.Sequential(general, jnp.tanh, adapter), d(B, 7, 2, 3))


@case("nnx", "scan", "vmap")
def nnx_scanned_layers(d):
    """Layers made by nnx.vmap and run by nnx.scan."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(model, x):
        return model(x)

    return nnx_case(d, create(nnx.Rngs(0)), d(B, 7, 3), run)


def eqx_case(d, model, args, run=None, options=BARE):
    """An Equinox model, partitioned into its arrays and the rest; its layers see the bare example."""
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)
    run = run or (lambda model, x: model(x))
    return Built(lambda p, x: readout(run(eqx.combine(p, static), x)), (redrawn(d, params), args), options)


@case("equinox")
def equinox_mlp(d):
    """An MLP of Equinox: weights on the left of vectors."""
    import equinox as eqx

    return eqx_case(d, eqx.nn.MLP(3, 2, 7, 2, jnp.tanh, key=jax.random.key(0)), d(B, 3))


@case("equinox", "vmap")
def equinox_mlp_batched(d):
    """The usual idiom: vmap over the batch inside the loss."""
    import equinox as eqx

    model = eqx.nn.MLP(3, 2, 7, 1, jnp.tanh, key=jax.random.key(0))
    return eqx_case(d, model, d(B, 3), lambda model, x: jax.vmap(model)(x), {})


@case("equinox", "vmap")
def equinox_tokens(d):
    """A norm and a layer mapped over tokens, an embedding before."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 2)
    model = (eqx.nn.Embedding(7, 4, key=keys[0]), eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 3, key=keys[1]))

    def run(model, i):
        embed, norm, linear = model
        return jax.vmap(lambda i: linear(jnp.tanh(norm(embed(i)))))(i)

    return eqx_case(d, model, d.ints(0, 7, B, 6), run)


@case("equinox", "conv")
def equinox_cnn(d):
    """Channels first without an axis of examples; pooling and a group norm."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(2, 4, (3, 2), padding=1, key=keys[0]),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Conv2d(4, 3, 2, groups=1, use_bias=False, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(18, 2, key=keys[2]),
        ]
    )
    return eqx_case(d, model, d(B, 2, 6, 7))


@case("equinox", "scan", "time")
def equinox_gru(d):
    """A GRU cell run by lax.scan."""
    import equinox as eqx

    def run(cell, x):
        step = lambda h, x: (cell(x, h),) * 2
        return jax.lax.scan(step, jnp.zeros((4,), x.dtype), x)[1]

    return eqx_case(d, eqx.nn.GRUCell(2, 4, key=jax.random.key(0)), d(B, 7, 2), run)


@case("equinox", "scan", "time")
def equinox_lstm(d):
    """An LSTM cell run by lax.scan and a linear head."""
    import equinox as eqx

    def run(model, x):
        cell, head = model
        start = (jnp.zeros((4,), x.dtype),) * 2
        (h, _), _ = jax.lax.scan(lambda state, x: (cell(x, state), None), start, x)
        return head(h)

    keys = jax.random.split(jax.random.key(0), 2)
    model = (eqx.nn.LSTMCell(2, 4, key=keys[0]), eqx.nn.Linear(4, 3, key=keys[1]))
    return eqx_case(d, model, d(B, 7, 2), run)


@case("equinox")
def equinox_attention(d):
    """Multi-head attention without biases."""
    import equinox as eqx

    model = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
    return eqx_case(d, model, d(B, 7, 4), lambda model, x: model(x, x, x))


@case("equinox", "scan")
def equinox_stacked_layers(d):
    """Layers made by filter_vmap and run by a scan over their arrays."""
    import equinox as eqx

    def run(model, x):
        arrays, static = eqx.partition(model, eqx.is_array)
        step = lambda x, layer: (x + jnp.tanh(eqx.combine(layer, static)(x)), None)
        return jax.lax.scan(step, x, arrays)[0]

    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))
    return eqx_case(d, make(jax.random.split(jax.random.key(0), 4)), d(B, 3), run)


@case("equinox", "shared")
def equinox_shared(d):
    """eqx.nn.Shared ties the head to the embedding."""
    import equinox as eqx

    embed = eqx.nn.Embedding(7, 3, key=jax.random.key(0))
    head = eqx.nn.Linear(3, 7, use_bias=False, key=jax.random.key(1))
    where = lambda pair: pair[1].weight
    shared = eqx.nn.Shared((embed, head), where, lambda pair: pair[0].weight)

    def run(shared, i):
        embed, head = shared()
        return jax.vmap(lambda i: head(jnp.tanh(embed(i))))(i)

    return eqx_case(d, shared, d.ints(0, 7, B, 6), run)


def haiku_case(d, forward, x):
    import haiku as hk

    model = hk.without_apply_rng(hk.transform(forward))
    params = redrawn(d, model.init(jax.random.PRNGKey(0), x[:1]))
    return Built(lambda p, x: readout(model.apply(p, x)), (params, x))


@case("haiku")
def haiku_mlp(d):
    """An MLP of Haiku."""
    import haiku as hk

    return haiku_case(d, lambda x: hk.nets.MLP([7, 4, 2], activation=jnp.tanh)(x), d(B, 3))


@case("haiku", "conv")
def haiku_cnn(d):
    """Convolutions in both layouts and a layer norm."""
    import haiku as hk

    def forward(x):
        x = jnp.tanh(hk.Conv2D(4, (3, 2), stride=(1, 2))(x))
        x = hk.LayerNorm(-1, True, True)(x)
        x = hk.DepthwiseConv2D(1, (2, 2), padding="VALID")(x)
        return hk.Linear(2)(hk.Flatten()(jnp.tanh(x)))

    return haiku_case(d, forward, d(B, 4, 6, 2))


@case("haiku", "scan", "time")
def haiku_lstm(d):
    """hk.dynamic_unroll of an LSTM."""
    import haiku as hk

    def forward(x):
        core = hk.LSTM(4)
        start = jax.tree.map(lambda l: l.astype(x.dtype), core.initial_state(x.shape[0]))
        out, _ = hk.dynamic_unroll(core, x, start, time_major=False)
        return hk.Linear(2)(out)

    return haiku_case(d, forward, d(B, 7, 3))


@case("haiku")
def haiku_transformer(d):
    """Embedding and attention; the key has no bias to lose."""
    import haiku as hk

    def forward(i):
        x = hk.Embed(7, 4)(i)
        init = hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(2, 3, w_init=init, model_size=4, with_bias=False)(x, x, x)
        return hk.Linear(3)(jnp.tanh(hk.RMSNorm(-1)(x)))

    return haiku_case(d, forward, d.ints(0, 7, B, 6))


@case("haiku", "scan")
def haiku_layer_stack(d):
    """hk.layer_stack, a scan over stacked parameters."""
    import haiku as hk

    def forward(x):
        return hk.layer_stack(4)(lambda x: x + jnp.tanh(hk.Linear(3)(x)))(x)

    return haiku_case(d, forward, d(B, 7, 3))
