"""jit, branches, selections, poolings, and vmap inside the loss."""

import jax
import jax.numpy as jnp
from jax import lax

from .case import BARE, B, Built, case, fit, readout


@case()
def flow_jit(d):
    """The whole loss is jitted."""
    return Built(jax.jit(lambda p, x: readout(jnp.tanh(x @ p["w"] + p["b"]))), ({"w": d(3, 4), "b": d(4)}, d(B, 7, 3)))


@case()
def flow_nested_jit(d):
    """jit in jit, with a weight used at both levels."""

    @jax.jit
    def inner(w, x):
        return jnp.tanh(x @ w)

    @jax.jit
    def outer(w, x):
        return inner(w, inner(w, x)) + x @ w

    return Built(lambda w, x: readout(outer(w, x)), (d(3, 3), d(B, 7, 3)))


@case()
def flow_jit_of_parameters(d):
    """A jitted function of the parameters alone."""
    derive = jax.jit(lambda p: jnp.tanh(p["a"]) @ p["b"])
    return Built(lambda p, x: readout(x @ derive(p)), ({"a": d(3, 2), "b": d(2, 4)}, d(B, 7, 3)))


@case()
def flow_jit_returns_parameter(d):
    """A jitted function hands its parameter through untouched, next to a result."""

    @jax.jit
    def layer(w, x):
        return w, jnp.tanh(x @ w)

    def loss(w, x):
        w, x = layer(w, x)
        return readout(x @ w.T)

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("remat")
def flow_checkpoint(d):
    """jax.checkpoint around a part of a network without a loop."""

    @jax.checkpoint
    def part(p, x):
        return jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])

    return Built(lambda p, x: readout(part(p, x) @ p["w"]), ({"w": d(3, 4), "b": d(4), "v": d(4, 3)}, d(B, 7, 3)))


@case("remat")
def flow_checkpoint_whole(d):
    """The loss itself is rematerialised, dots saved."""
    part = jax.checkpoint(
        lambda p, x: readout(jnp.sin(jnp.tanh(x @ p["w"]) @ p["v"])),
        policy=jax.checkpoint_policies.dots_saveable,
    )
    return Built(part, ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)))


@case("cond")
def flow_cond_on_example(d):
    """The example chooses the branch: under vmap both run and the result is selected."""

    def loss(p, b):
        yes = lambda x: jnp.tanh(x @ p["w"])
        no = lambda x: x @ p["w"] * 0.5
        return readout(lax.cond(b["flag"] > 0, yes, no, b["x"]))

    return Built(loss, ({"w": d(3, 4)}, {"x": d(B, 7, 3), "flag": d(B)}), BARE)


@case("cond")
def flow_cond_on_parameter(d):
    """A predicate that is the same for all examples: the branch stays a branch."""

    def loss(p, x):
        return readout(lax.cond(p["gate"] > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ p["w"], x))

    return Built(loss, ({"w": d(3, 4), "gate": d.positive()}, d(B, 7, 3)))


@case("cond")
def flow_cond_on_argument(d):
    """A predicate that is an argument of the loss, neither parameter nor example."""

    def loss(p, x, train):
        return readout(lax.cond(train, lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ p["v"], x))

    return Built(loss, ({"w": d(3, 4), "v": d(3, 4)}, d(B, 7, 3), jnp.array(True)))


@case("cond")
def flow_cond_different_parameters(d):
    """Each branch has its own parameters: whoever is not chosen gets zeros."""

    def loss(p, b):
        small = lambda x: jnp.tanh(x @ p["w"] + p["b"])
        large = lambda x: jnp.tanh(x @ p["u"]) @ p["v"]
        return readout(lax.cond(b["flag"] > 0, small, large, b["x"]))

    params = {"w": d(3, 4), "b": d(4), "u": d(3, 2), "v": d(2, 4)}
    return Built(loss, (params, {"x": d(B, 7, 3), "flag": d(B)}), BARE)


@case("cond", "shared")
def flow_cond_and_outside(d):
    """A weight in a branch and after it."""

    def loss(w, b):
        x = lax.cond(b["flag"] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, b["x"])
        return readout(x @ w)

    return Built(loss, (d(3, 3), {"x": d(B, 7, 3), "flag": d(B)}), BARE)


@case("cond")
def flow_cond_nested(d):
    """A branch within a branch, one predicate per example and one common."""

    def loss(p, b):
        def yes(x):
            return lax.cond(b["flag"] > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ p["v"], x)

        return readout(lax.cond(p["gate"] > 0, yes, lambda x: x @ p["w"], b["x"]))

    params = {"w": d(3, 4), "v": d(3, 4), "gate": d.positive()}
    return Built(loss, (params, {"x": d(B, 7, 3), "flag": d(B)}), BARE)


@case("cond")
def flow_switch(d):
    """Three branches chosen by the example: dense, scale, constant."""

    def loss(p, b):
        branches = [
            lambda x: jnp.tanh(x @ p["w"]),
            lambda x: x * p["s"],
            lambda x: jnp.zeros_like(x) + p["s"],
        ]
        return readout(lax.switch(b["i"], branches, b["x"]))

    return Built(loss, ({"w": d(3, 3), "s": d(3)}, {"x": d(B, 7, 3), "i": d.ints(0, 3, B)}), BARE)


@case("cond")
def flow_switch_of_experts(d):
    """Hard routing: the example chooses its layer of a stack."""

    def loss(w, b):
        return readout(jnp.tanh(b["x"] @ w[b["i"]]))

    return Built(loss, (d(4, 3, 2), {"x": d(B, 7, 3), "i": d.ints(0, 4, B)}), BARE)


@case()
def flow_where(d):
    """Gating by jnp.where: some outputs get no cotangent."""

    def loss(p, x):
        return readout(jnp.where(x[..., :1] > 0, jnp.tanh(x @ p["w"]), x @ p["v"]))

    return Built(loss, ({"w": d(3, 4), "v": d(3, 4)}, d(B, 7, 3)))


@case()
def flow_where_weight_by_example(d):
    """The example selects between two weights entry by entry: the mask cannot be pulled out of the batch."""
    return Built(
        lambda p, b: readout(b["x"] @ jnp.where(b["m"] > 0, p["w"], p["v"])),
        ({"w": d(3, 4), "v": d(3, 4)}, {"x": d(B, 7, 3), "m": d(B, 3, 4)}),
        BARE,
    )


@case("nonsmooth")
def flow_top_k(d):
    """Sparse routing: the two best experts, with renormalised gates."""

    def loss(p, x):
        value, index = lax.top_k(x @ p["router"], 2)
        out = jnp.einsum("td,tkdf->tkf", x, p["experts"][index])
        return readout(jnp.einsum("tk,tkf->tf", jax.nn.softmax(value), jnp.tanh(out)))

    return Built(loss, ({"router": d(3, 4), "experts": d(4, 3, 2)}, d(B, 6, 3)), BARE)


@case("nonsmooth")
def flow_sort_activations(d):
    """Activations sorted: a permutation that differs per example."""
    return Built(lambda w, x: readout(jnp.sort(x @ w, axis=-1) * jnp.arange(1.0, 5.0)), (d(3, 4), d(B, 7, 3)))


@case("nonsmooth")
def flow_max_pool(d):
    """Max pooling with overlapping windows and padding."""

    def loss(w, x):
        x = x @ w
        return readout(lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2), (1, 2, 1), "SAME"))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case()
def flow_mean_pool(d):
    """Mean pooling with overlapping windows."""

    def loss(w, x):
        x = jnp.tanh(x @ w)
        return readout(lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "VALID") / 3)

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("nonsmooth")
def flow_maxout(d):
    """The largest of several linear maps."""
    return Built(lambda w, x: readout(jnp.max(jnp.einsum("btd,dkf->bktf", x, w), 1)), (d(3, 4, 2), d(B, 7, 3)))


@case("nonsmooth")
def flow_hinge(d):
    """A loss that is flat for some examples: their gradients are exactly zero."""

    def loss(w, batch):
        x, y = batch
        return jnp.mean(jnp.maximum(0.0, 0.3 - y * (x @ w)))

    return Built(loss, (d(7), (d(B, 7), d(B))))


@case()
def flow_cumulative_activations(d):
    """Cumulative sums and products of activations."""
    return Built(
        lambda w, x: readout(jnp.cumsum(jnp.tanh(x @ w), 1) + jnp.cumprod(1 + 0.1 * x @ w, 2)),
        (d(3, 4), d(B, 7, 3)),
    )


@case("vmap")
def flow_vmap_tokens(d):
    """A layer written for one token, mapped over tokens."""
    layer = lambda p, x: jnp.tanh(p["w"] @ x + p["b"])
    return Built(lambda p, x: readout(jax.vmap(layer, (None, 0))(p, x)), ({"w": d(4, 3), "b": d(4)}, d(B, 7, 3)), BARE)


@case("vmap")
def flow_vmap_batch(d):
    """A model for one example, mapped over the batch inside the loss: the usual Equinox idiom."""

    def model(p, x):
        return p["v"] @ jnp.tanh(p["w"] @ x + p["b"])

    def loss(p, batch):
        x, y = batch
        return fit(jax.vmap(model, (None, 0))(p, x), y)

    return Built(loss, ({"w": d(7, 3), "b": d(7), "v": d(2, 7)}, (d(B, 3), d(B, 2))))


@case("vmap")
def flow_vmap_heads(d):
    """Heads mapped over an axis of the parameters that is not the first."""

    def head(q, k, x):
        return jax.nn.softmax((x @ q) @ (x @ k).T) @ x

    return Built(
        lambda p, x: readout(jax.vmap(head, (1, 2, None), 1)(p["q"], p["k"], x)),
        ({"q": d(3, 2, 4), "k": d(3, 4, 2)}, d(B, 7, 3)),
        BARE,
    )


@case("vmap")
def flow_vmap_ensemble(d):
    """An ensemble of networks, all leaves mapped."""
    net = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]
    return Built(
        lambda p, x: readout(jax.vmap(net, (0, None))(p, x)),
        ({"w": d(4, 3, 7), "b": d(4, 7), "v": d(4, 7, 2)}, d(B, 6, 3)),
    )


@case("vmap", "scan")
def flow_vmap_of_scan(d):
    """Recurrent networks over several channels with one weight, by vmap of scan."""

    def run(w, x):
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros((3,), x.dtype), x)[1]

    return Built(lambda w, x: readout(jax.vmap(run, (None, 0))(w, x)), (d(3, 3), d(B, 2, 6, 3)), BARE)


@case("vmap")
def flow_vmap_with_axis_name(d):
    """A named axis inside the loss: psum over tokens."""

    def token(w, x):
        h = jnp.tanh(x @ w)
        return h - lax.pmean(h, "tokens") / 2

    return Built(
        lambda w, x: readout(jax.vmap(token, (None, 0), axis_name="tokens")(w, x)),
        (d(3, 4), d(B, 7, 3)),
        BARE,
    )


@case("vmap")
def flow_vmap_lookup(d):
    """A lookup for one token, mapped twice."""
    look = lambda e, i: jnp.tanh(e[i]) * (1.0 + i)
    return Built(
        lambda e, i: readout(jax.vmap(jax.vmap(look, (None, 0)), (None, 0))(e, i)),
        (d(7, 3), d.ints(0, 7, B, 6)),
    )


@case("couples")
def flow_batch_norm(d):
    """Statistics over the batch: of one example they are its own, which the batch loss is not."""

    def loss(p, x):
        h = x @ p["w"]
        h = (h - h.mean((0, 1))) / jnp.sqrt(h.var((0, 1)) + 1e-3)
        return readout(h * p["scale"] + p["shift"])

    return Built(loss, ({"w": d(3, 4), "scale": d.positive(4), "shift": d(4)}, d(B, 7, 3)))


@case()
def flow_pad_and_slice_activations(d):
    """Shifts in time by pad and slice between two uses of a layer."""

    def loss(p, x):
        x = jnp.tanh(x @ p["w"])
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] + x
        return readout(jnp.flip(x, 1) @ p["v"])

    return Built(loss, ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)))


@case()
def flow_optimization_barrier(d):
    """A barrier between the parameter and its use."""
    return Built(lambda w, x: readout(jnp.tanh(x @ lax.optimization_barrier(w))), (d(3, 4), d(B, 7, 3)))


@case()
def flow_named_scopes(d):
    """Names of scopes and reduced precision of values: operations that only annotate."""

    def loss(w, x):
        with jax.named_scope("layer"):
            h = lax.reduce_precision(x @ w, exponent_bits=8, mantissa_bits=12)
        return readout(jnp.tanh(h))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case("vmap")
def flow_custom_vmap(d):
    """The loss has a batching rule of its own, in the forward and in the backward pass."""

    @jax.custom_batching.custom_vmap
    def double(x):
        return 2.0 * x

    double.def_vmap(lambda size, batched, x: (x + x, batched[0]))
    apply = jax.custom_vjp(lambda x: double(x))
    apply.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))
    return Built(lambda p, x: readout(apply(jnp.tanh(x @ p["w"])) @ p["v"]), ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)))
