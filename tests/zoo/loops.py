"""Loops: over layers, over time, nested; rematerialised, reversed, unrolled, empty."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .case import BARE, B, Built, add, case, readout


def zeros(x, *shape):
    return jnp.zeros(shape, x.dtype)


# Loops over layers: the parameters are the xs of the scan.


def block(x, p):
    h = checkpoint_name(jnp.tanh(x @ p["up"] + p["b"]), "hidden")
    return x + p["scale"] * (h @ p["down"])


def layers(name, why, body, *tags, n=4, **options):
    """A stack of residual blocks, run by a scan whose step is `body(x, layer) -> x`."""

    def build(d):
        def loss(p, x):
            x, _ = lax.scan(lambda x, layer: (body(x, layer), None), x @ p["in"], p["layers"], **options)
            return readout(x)

        stack = {"up": d(n, 3, 7, scale=0.4), "b": d(n, 7), "down": d(n, 7, 3, scale=0.4), "scale": d(n, 3)}
        return Built(loss, ({"in": d(2, 3), "layers": stack}, d(B, 6, 2)))

    add(name, build, "scan", *tags, why=why)


policies = jax.checkpoint_policies

layers("layers", "The statistic is taken in the backward body, layer by layer.", block)
layers("layers-reverse", "Layers from last to first.", block, reverse=True)
layers("layers-unrolled", "Two layers a step, with an odd one left.", block, n=3, unroll=2)
layers("layers-fully-unrolled", "No loop is left.", block, n=3, unroll=True)
layers("layers-one", "A loop of one step.", block, n=1)
layers("layers-none", "A loop of no steps: its leaves are empty.", block, n=0)
layers("layers-remat", "The forward is run again inside the backward body.", jax.checkpoint(block), "remat")
layers(
    "layers-remat-nothing",
    "Nothing is saved.",
    jax.checkpoint(block, policy=policies.nothing_saveable),
    "remat",
)
layers(
    "layers-remat-everything",
    "All is saved: remat without its point.",
    jax.checkpoint(block, policy=policies.everything_saveable),
    "remat",
)
layers(
    "layers-remat-dots",
    "Outputs of contractions are saved.",
    jax.checkpoint(block, policy=policies.dots_saveable),
    "remat",
)
layers(
    "layers-remat-dots-unbatched",
    "Only contractions without batch axes are saved.",
    jax.checkpoint(block, policy=policies.dots_with_no_batch_dims_saveable),
    "remat",
)
layers(
    "layers-remat-names",
    "Named values are saved.",
    jax.checkpoint(block, policy=policies.save_only_these_names("hidden")),
    "remat",
)
layers(
    "layers-remat-without-cse",
    "prevent_cse=False, as is usual inside a scan.",
    jax.checkpoint(block, prevent_cse=False),
    "remat",
)
layers(
    "layers-remat-nested",
    "Remat of remat.",
    jax.checkpoint(lambda x, p: jax.checkpoint(block)(jnp.sin(x), p)),
    "remat",
)
layers("layers-jit", "A jitted body.", jax.jit(block))
layers("layers-remat-of-jit", "Remat around jit.", jax.checkpoint(jax.jit(block)), "remat")
layers(
    "layers-cond",
    "A branch that depends on the data of the example, inside the body.",
    lambda x, p: lax.cond(x.sum() > 0, block, lambda x, p: x * p["scale"], x, p),
    "cond",
    "couples",
)


@case("scan", "shared")
def layers_with_shared_weight(d):
    """Every layer adds its own weight to one that all share: a constant of the loop and an x of the loop."""

    def loss(p, x):
        def body(x, layer):
            return jnp.tanh(x @ p["shared"] + x @ layer["w"] + layer["b"]), None

        return readout(lax.scan(body, x, p["layers"])[0])

    params = {"shared": d(3, 3), "layers": {"w": d(4, 3, 3), "b": d(4, 3)}}
    return Built(loss, (params, d(B, 7, 3)))


@case("scan", "shared")
def layers_used_outside_too(d):
    """The stacked parameters are the xs of a loop, and one layer is used again after it."""

    def loss(w, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return readout(x @ w[1])

    return Built(loss, (d(4, 3, 3), d(B, 7, 3)))


@case("scan", "shared")
def layers_run_twice(d):
    """Two loops over the same stack, one of them backwards."""

    def loss(w, x):
        for reverse in (False, True):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, reverse=reverse)
        return readout(x)

    return Built(loss, (d(4, 3, 3), d(B, 7, 3)))


@case("scan")
def layers_stacked_in_the_loss(d):
    """Separate leaves, stacked by the loss before the loop: the gradient is cut up after the loop."""

    def loss(p, x):
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p)
        return readout(lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, stack)[0])

    return Built(loss, ([{"w": d(3, 3), "b": d(3)} for _ in range(4)], d(B, 7, 3)))


@case("scan")
def layers_transposed_stack(d):
    """The axis of layers is the last of the leaf."""

    def loss(w, x):
        return readout(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.moveaxis(w, -1, 0))[0])

    return Built(loss, (d(3, 3, 4), d(B, 7, 3)))


@case("scan")
def layers_in_groups(d):
    """A loop over groups of layers around a loop over the layers of a group."""

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return readout(lax.scan(lambda x, w: lax.scan(layer, x, w), x, w)[0])

    return Built(loss, (d(2, 4, 3, 3), d(B, 7, 3)))


@case("scan", "remat")
def layers_in_groups_remat(d):
    """Square-root checkpointing: remat around the inner loop and around its body."""

    def loss(w, x):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w), None

        @jax.checkpoint
        def group(x, w):
            return lax.scan(layer, x, w)

        return readout(lax.scan(group, x, w)[0])

    return Built(loss, (d(2, 4, 3, 3), d(B, 7, 3)))


@case("scan")
def layers_skip_connections(d):
    """Every layer also emits an output, which a later loop reads back in reverse."""

    def loss(p, x):
        x, skips = lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, p["down"])
        x, _ = lax.scan(lambda x, wy: (jnp.tanh(x @ wy[0] + wy[1]), None), x, (p["up"], skips), reverse=True)
        return readout(x)

    return Built(loss, ({"down": d(4, 3, 3), "up": d(4, 3, 3)}, d(B, 7, 3)))


@case("scan", "conv")
def layers_of_convolutions(d):
    """A loop over convolutional layers."""

    def loss(w, x):
        def body(x, w):
            out = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return x + jnp.tanh(out), None

        return readout(lax.scan(body, x, w)[0])

    return Built(loss, (d(3, 3, 2, 2, 2), d(B, 4, 6, 2)))


@case("scan")
def layers_transformer(d):
    """Attention, norms, biases and embeddings in one loop: the model the library is built for."""

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale

    def loss(p, batch):
        i, j = batch

        def layer(x, p):
            h = norm(x, p["n1"])
            q, k, v = jnp.einsum("btd,dnhk->nbhtk", h, p["qkv"])
            scores = jnp.where(jnp.tri(6, dtype=bool), jnp.einsum("bhsk,bhtk->bhst", q, k), -1e9)
            x = x + jnp.einsum("bhst,bhtk,hkd->bsd", jax.nn.softmax(scores), v, p["o"])
            h = norm(x, p["n2"])
            return x + jax.nn.gelu(h @ p["up"] + p["b"]) @ p["down"], None

        x = p["token"][i] + p["position"][: i.shape[1]]
        x, _ = lax.scan(jax.checkpoint(layer), x, p["layers"])
        logits = norm(x, p["norm"]) @ p["token"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), j[..., None], -1))

    stack = {"n1": d.positive(3, 4), "n2": d.positive(3, 4), "qkv": d(3, 4, 3, 2, 2), "o": d(3, 2, 2, 4)}
    stack |= {"up": d(3, 4, 7), "b": d(3, 7), "down": d(3, 7, 4)}
    params = {"token": d(11, 4), "position": d(8, 4), "norm": d.positive(4), "layers": stack}
    return Built(loss, (params, (d.ints(0, 11, B, 6), d.ints(0, 11, B, 6))))


# Loops over time: the parameters are constants of the scan, their gradients pile up in the carry.


def recurrent(name, why, cell, params, *tags, keep=False, state=1, **options):
    """`cell(p, states, x) -> states` over seven steps; the first state is read out at every step."""

    def build(d):
        def loss(p, x):
            def step(states, x):
                states = cell(p, states, x)
                return states, states[0]

            if keep:
                x = jnp.swapaxes(x, 0, 1)
            start = (zeros(x, *x.shape[1:-1], 3),) * state
            last, hs = lax.scan(step, start, x, **options)
            return readout(hs) + readout(last[-1])

        return Built(loss, (params(d), d(B, 7, 2)), {} if keep else BARE)

    add(name, build, "scan", "time", *tags, why=why)


def vanilla(p, states, x):
    return (jnp.tanh(x @ p["w"] + states[0] @ p["u"] + p["b"]),)


def vanilla_params(d):
    return {"w": d(2, 3), "u": d(3, 3), "b": d(3)}


def lstm(p, states, x):
    h, c = states
    i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm_params(d):
    return {"w": d(2, 12), "u": d(3, 12), "b": d(12)}


def gru(p, states, x):
    (h,) = states
    z = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"])
    r = jax.nn.sigmoid(x @ p["wr"] + h @ p["ur"])
    return (z * h + (1 - z) * jnp.tanh(x @ p["w"] + (r * h) @ p["u"] + p["b"]),)


def gru_params(d):
    return {"wz": d(2, 3), "uz": d(3, 3), "wr": d(2, 3), "ur": d(3, 3), "w": d(2, 3), "u": d(3, 3), "b": d(3)}


def concatenated(p, states, x):
    return (jnp.tanh(jnp.concatenate([x, states[0], jnp.ones_like(x[..., :1])], -1) @ p),)


recurrent("time-rnn", "The plain recurrent network on the bare example.", vanilla, vanilla_params)
recurrent("time-rnn-batched", "The same with an axis of examples inside.", vanilla, vanilla_params, keep=True)
recurrent("time-rnn-reverse", "Backwards in time.", vanilla, vanilla_params, reverse=True)
recurrent("time-rnn-unrolled", "Two steps at once, one left over.", vanilla, vanilla_params, unroll=2)
recurrent("time-rnn-remat", "The step is rematerialised.", jax.checkpoint(vanilla), vanilla_params, "remat")
recurrent(
    "time-rnn-jit",
    "The step is jitted, so the accumulation lies inside a call.",
    jax.jit(vanilla),
    vanilla_params,
)
recurrent("time-rnn-one-weight", "Input, state and bias in one product.", concatenated, lambda d: d(6, 3))
recurrent("time-lstm", "Two states and a fused product.", lstm, lstm_params, state=2)
recurrent("time-lstm-batched", "The same with an axis of examples inside.", lstm, lstm_params, keep=True, state=2)
recurrent(
    "time-lstm-remat",
    "Remat with saved contractions.",
    jax.checkpoint(lstm, policy=policies.dots_saveable),
    lstm_params,
    "remat",
    state=2,
)
recurrent("time-gru", "Seven leaves, one of them behind a gate.", gru, gru_params)
recurrent(
    "time-twice-per-step",
    "The same weight twice in one step.",
    lambda p, h, x: vanilla(p, vanilla(p, h, x), x),
    vanilla_params,
    "shared",
)
recurrent(
    "time-function-of-weight",
    "The step uses a function of the weight: the accumulated value is not the gradient.",
    lambda p, h, x: vanilla(p | {"u": jnp.tanh(p["u"]) * 0.5}, h, x),
    vanilla_params,
)
recurrent(
    "time-transposed-weight",
    "The step uses the transpose.",
    lambda p, h, x: vanilla(p | {"u": p["u"].T}, h, x),
    vanilla_params,
)
recurrent(
    "time-cond",
    "A branch per step that depends on the example.",
    lambda p, h, x: (lax.cond(x[0] > 0, lambda h: vanilla(p, (h,), x)[0], lambda h: h @ p["u"], h[0]),),
    vanilla_params,
    "cond",
)


@case("scan", "time")
def time_without_inputs(d):
    """A loop without xs, from a state made of the example."""

    def loss(w, x):
        return readout(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0])

    return Built(loss, (d(3, 3), d(B, 3)))


@case("scan", "time")
def time_state_is_parameter(d):
    """The first state is a parameter."""

    def loss(p, x):
        def step(h, x):
            return jnp.tanh(h @ p["u"] + x), None

        return readout(lax.scan(step, p["h0"], x)[0])

    return Built(loss, ({"h0": d(3), "u": d(3, 3)}, d(B, 7, 3)), BARE)


@case("scan", "time")
def time_parameters_in_carry(d):
    """Parameters travel in the carry of the loop instead of as its constants."""

    def loss(w, x):
        def step(carry, x):
            w, h = carry
            return (w, jnp.tanh(h @ w + x)), None

        return readout(lax.scan(step, (w, zeros(x, 3)), x)[0][1])

    return Built(loss, (d(3, 3), d(B, 7, 3)), BARE)


@case("scan", "time")
def time_fast_weights(d):
    """The weight in the carry changes at every step (a linear transformer with memory)."""

    def loss(p, x):
        def step(memory, x):
            k, v, q = x @ p["k"], x @ p["v"], x @ p["q"]
            memory = 0.9 * memory + jnp.outer(k, v)
            return memory, q @ memory

        return readout(lax.scan(step, p["start"], x)[1])

    params = {"k": d(2, 3), "v": d(2, 4), "q": d(2, 3), "start": d(3, 4)}
    return Built(loss, (params, d(B, 7, 2)), BARE)


@case("scan", "time", "shared")
def time_inside_and_outside(d):
    """A weight in the loop and after it."""

    def loss(w, x):
        h, hs = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, zeros(x, 3), x)
        return readout(hs @ w.T + h)

    return Built(loss, (d(3, 3), d(B, 7, 3)), BARE)


@case("scan", "time", "shared")
def time_bidirectional(d):
    """Two loops with a common input weight."""

    def loss(p, x):
        def run(u, reverse):
            step = lambda h, x: (jnp.tanh(h @ u + x @ p["w"]),) * 2
            return lax.scan(step, zeros(x, 3), x, reverse=reverse)[1]

        return readout(jnp.concatenate([run(p["u"], False), run(p["v"], True)], -1))

    return Built(loss, ({"w": d(2, 3), "u": d(3, 3), "v": d(3, 3)}, d(B, 7, 2)), BARE)


@case("scan", "time")
def time_last_state_only(d):
    """Only the last state is read: the cotangent of the outputs is a symbolic zero."""

    def loss(p, x):
        h, _ = lax.scan(lambda h, x: (vanilla(p, (h,), x)[0],) * 2, zeros(x, 3), x)
        return readout(h)

    return Built(loss, (vanilla_params(d), d(B, 7, 2)), BARE)


@case("scan", "time")
def time_one_step(d):
    """A single step of time."""

    def loss(p, x):
        return readout(lax.scan(lambda h, x: (vanilla(p, h, x), None), (zeros(x, 3),), x)[0][0])

    return Built(loss, (vanilla_params(d), d(B, 1, 2)), BARE)


@case("scan", "time")
def time_no_steps(d):
    """No step at all: parameters of the loop get zeros."""

    def loss(p, x):
        h, _ = lax.scan(lambda h, x: (vanilla(p, h, x), None), (p["h0"],), x)
        return readout(h[0] * 2.0)

    return Built(loss, (vanilla_params(d) | {"h0": d(3)}, d(B, 0, 2)), BARE)


@case("scan", "time")
def time_then_layers(d):
    """Time outside, stacked layers inside: every step runs through the layers with their own states."""

    def loss(p, x):
        def step(states, x):
            def layer(x, each):
                p, h = each
                h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
                return h, h

            top, states = lax.scan(layer, x, (p, states))
            return states, top

        return readout(lax.scan(step, zeros(x, 2, 3), x)[1])

    return Built(loss, ({"w": d(2, 3, 3), "u": d(2, 3, 3), "b": d(2, 3)}, d(B, 7, 3)), BARE)


@case("scan", "time")
def layers_then_time(d):
    """Layers outside, time inside: accumulation in the carry inside a body whose weights are xs."""

    def loss(p, x):
        def layer(x, p):
            step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]),) * 2
            return lax.scan(step, zeros(x, 3), x)[1], None

        return readout(lax.scan(layer, x, p)[0])

    return Built(loss, ({"w": d(2, 3, 3), "u": d(2, 3, 3), "b": d(2, 3)}, d(B, 7, 3)), BARE)


@case("scan", "time", "shared")
def time_within_time(d):
    """A loop in a loop with one weight constant to both, and one to the inner only."""

    def loss(p, x):
        def outer(h, x):
            def inner(z, _):
                return jnp.tanh(z @ p["u"] + h), None

            z, _ = lax.scan(inner, h, None, length=3)
            h = jnp.tanh(z @ p["u"] + x @ p["w"])
            return h, h

        return readout(lax.scan(outer, zeros(x, 3), x)[1])

    return Built(loss, ({"w": d(2, 3), "u": d(3, 3)}, d(B, 6, 2)), BARE)


@case("scan", "time", "conv")
def time_convolutional(d):
    """A recurrent network of convolutions."""

    def loss(w, x):
        def step(h, x):
            both = jnp.concatenate([h, x], -1)
            h = jnp.tanh(lax.conv_general_dilated(both, w, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")))
            return h, h

        return readout(lax.scan(step, zeros(x, 1, 7, 3), x[:, None])[1])

    return Built(loss, (d(2, 4, 3), d(B, 4, 7, 1)), BARE)


@case("scan", "time")
def time_layer_norm(d):
    """Small leaves accumulated over time: scale and shift of a norm inside the step."""

    def loss(p, x):
        def step(h, x):
            h = jnp.tanh(h) + x
            h = h / jnp.sqrt(jnp.mean(h**2) + 1e-4) * p["scale"] + p["shift"]
            return h, h

        return readout(lax.scan(step, zeros(x, 3), x)[1])

    return Built(loss, ({"scale": d.positive(3), "shift": d(3)}, d(B, 7, 3)), BARE)


@case("scan", "time")
def time_scalar_parameter(d):
    """A scalar in the loop: a learned rate of decay."""

    def loss(a, x):
        return readout(lax.scan(lambda h, x: (jax.nn.sigmoid(a) * h + x,) * 2, zeros(x, 3), x)[1])

    return Built(loss, (d.positive(), d(B, 7, 3)), BARE)


@case("scan", "time")
def time_weight_per_step(d):
    """A weight indexed with the counter of the loop: the gradient is scattered in the carry."""

    def loss(w, x):
        def step(carry, x):
            i, h = carry
            return (i + 1, jnp.tanh(h @ w[i % 2] + x)), None

        return readout(lax.scan(step, (0, zeros(x, 3)), x)[0][1])

    return Built(loss, (d(2, 3, 3), d(B, 7, 3)), BARE)


@case("scan", "time")
def time_embedding_and_dense(d):
    """Decoder with attention over the encoder's states: activations that are constants of the loop."""

    def loss(p, b):
        keys = jnp.tanh(b["source"] @ p["k"])

        def step(h, token):
            mix = jax.nn.softmax(keys @ (h @ p["q"])) @ b["source"]
            h = jnp.tanh(p["table"][token] + mix @ p["m"] + h @ p["u"])
            return h, h

        return readout(lax.scan(step, zeros(keys, 3), b["target"])[1])

    params = {"k": d(2, 4), "q": d(3, 4), "table": d(7, 3), "m": d(2, 3), "u": d(3, 3)}
    return Built(loss, (params, {"source": d(B, 4, 2), "target": d.ints(0, 7, B, 6)}), BARE)


# Other loops.


@case("fori")
def loop_fori(d):
    """fori_loop with static bounds, which becomes a scan."""

    def loss(p, x):
        return readout(lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ p["w"] + p["b"] * i), x))

    return Built(loss, ({"w": d(3, 3), "b": d(3)}, d(B, 7, 3)))


@case("fori")
def loop_fori_indexed_layers(d):
    """fori_loop that indexes its layer: a dynamic slice of the stack per step."""

    def loss(w, x):
        return readout(lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ w[i]), x))

    return Built(loss, (d(4, 3, 3), d(B, 7, 3)))


@case("while")
def loop_while_without_gradient(d):
    """A while loop per example, with as many steps as its data say, in a part without gradient."""

    def loss(p, x):
        x = lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.7 * x, x)
        return readout(jnp.tanh(x @ p["w"] + p["b"]))

    return Built(loss, ({"w": d(3, 4), "b": d(4)}, 3.0 * d(B, 7, 3)), BARE)


@case("while")
def loop_while_on_parameters(d):
    """A while loop over stopped parameters: power iteration to a tolerance."""

    def loss(w, x):
        def body(state):
            v, i = state
            v = w.T @ (w @ v)
            return v / jnp.linalg.norm(v), i + 1

        start = jnp.ones((4,), w.dtype) / 2
        v, _ = lax.stop_gradient(lax.while_loop(lambda s: s[1] < 5, body, (start, 0)))
        return readout(jnp.tanh(x @ w / jnp.linalg.norm(w @ v)))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("scan")
def loop_map_over_tokens(d):
    """lax.map over tokens: weights are constants of a loop without a carry."""

    def loss(p, x):
        return readout(lax.map(lambda x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"], x))

    return Built(loss, ({"w": d(3, 7), "b": d(7), "v": d(7, 2)}, d(B, 6, 3)), BARE)


@case("scan")
def loop_map_in_batches(d):
    """lax.map with batch_size, which leaves a remainder."""

    def loss(w, x):
        return readout(lax.map(lambda x: jnp.tanh(x @ w), x, batch_size=3))

    return Built(loss, (d(3, 4), d(B, 7, 3)), BARE)


@case("scan")
def loop_associative_scan(d):
    """A linear recurrence by associative_scan, with gates from the example."""

    def loss(p, x):
        a = jax.nn.sigmoid(x @ p["gate"])
        u = x @ p["in"]
        _, h = lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (a, u), axis=1)
        return readout(jnp.tanh(h) @ p["out"])

    return Built(loss, ({"gate": d(3, 4), "in": d(3, 4), "out": d(4, 2)}, d(B, 7, 3)))


@case("scan")
def loop_state_space(d):
    """A diagonal state-space layer: a decay that is a parameter, and a cumulative sum over time."""

    def loss(p, x):
        decay = jnp.exp(-jax.nn.softplus(p["a"]) * jnp.arange(7)[:, None])
        h = jnp.cumsum(x @ p["in"] / decay, axis=1) * decay
        return readout(jnp.tanh(h) @ p["out"])

    return Built(loss, ({"a": d(4, scale=0.3) - 1.0, "in": d(3, 4), "out": d(4, 2)}, d(B, 7, 3)))


@case("scan")
def loop_chunked_attention(d):
    """Attention over chunks of keys with a running softmax."""

    def loss(p, x):
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]

        def chunk(carry, kv):
            top, below, total = carry
            scores = q @ kv[0].T
            peak = lax.stop_gradient(jnp.maximum(top, scores.max(-1)))
            weight = jnp.exp(scores - peak[:, None])
            shrink = jnp.exp(top - peak)
            return (peak, below * shrink + weight.sum(-1), total * shrink[:, None] + weight @ kv[1]), None

        start = (jnp.full((6,), -1e9, x.dtype), zeros(x, 6), zeros(x, 6, 3))
        (_, below, total), _ = lax.scan(chunk, start, (k.reshape(3, 2, 4), v.reshape(3, 2, 3)))
        return readout(total / below[:, None])

    return Built(loss, ({"q": d(2, 4), "k": d(2, 4), "v": d(2, 3)}, d(B, 6, 2)), BARE)


@case("scan")
def loop_over_heads_then_sum(d):
    """A sum over the steps of a loop whose weights are xs (pipeline of experts)."""

    def loss(p, x):
        def expert(total, p):
            return total + jnp.tanh(x @ p["up"]) @ p["down"], None

        return readout(lax.scan(expert, jnp.zeros_like(x), p)[0])

    return Built(loss, ({"up": d(4, 3, 7), "down": d(4, 7, 3)}, d(B, 6, 3)))
