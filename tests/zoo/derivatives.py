"""Derivatives inside the loss: custom rules, stopped gradients, meta-learning, physics."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .case import BARE, B, Built, case, fit, readout


@case()
def derive_stop_gradient_target(d):
    """A bootstrapped target: the same parameters once with and once without gradient."""

    def loss(p, batch):
        now, then = (jnp.tanh(x @ p["w"]) @ p["v"] for x in batch)
        return fit(now, 0.9 * lax.stop_gradient(then) + 0.1)

    return Built(loss, ({"w": d(3, 7), "v": d(7, 2)}, (d(B, 3), d(B, 3))))


@case()
def derive_stopped_parameter(d):
    """A frozen leaf: zeros."""
    return Built(
        lambda p, x: readout(jnp.tanh(x @ lax.stop_gradient(p["w"])) @ p["v"]),
        ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)),
    )


@case()
def derive_part_of_parameter_stopped(d):
    """Half of the rows are frozen."""

    def loss(w, x):
        w = jnp.concatenate([w[:2], lax.stop_gradient(w[2:])])
        return readout(jnp.tanh(x @ w))

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case()
def derive_custom_jvp(d):
    """A smooth activation with its own forward derivative."""

    @jax.custom_jvp
    def softplus(x):
        return jnp.logaddexp(x, 0.0)

    softplus.defjvps(lambda t, out, x: jax.nn.sigmoid(x) * t)
    return Built(lambda w, x: readout(softplus(x @ w)), (d(3, 4), d(B, 7, 3)))


@case("nonsmooth")
def derive_custom_jvp_relu(d):
    """A relu with its own derivative: exact zeros in cotangents."""
    return Built(
        lambda p, x: readout(jax.nn.relu6(jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"])),
        ({"w": d(3, 7), "b": d(7), "v": d(7, 2)}, d(B, 4, 3)),
    )


@case()
def derive_custom_jvp_of_parameters(d):
    """A custom forward rule that takes the parameter itself."""

    @jax.custom_jvp
    def layer(w, x):
        return jnp.tanh(x @ w)

    @layer.defjvp
    def _(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        out = layer(w, x)
        return out, (1 - out**2) * (x @ dw + dx @ w)

    return Built(lambda w, x: readout(layer(w, x)), (d(3, 4), d(B, 7, 3)))


@case("custom_vjp")
def derive_custom_vjp_activation(d):
    """An activation whose backward pass is not its derivative (gradient clipping)."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.tanh(30.0 * g) / 30.0,))
    return Built(lambda p, x: readout(clipped(x @ p["w"]) @ p["v"]), ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)))


@case("custom_vjp")
def derive_custom_vjp_of_parameter(d):
    """Gradient clipping on the parameter: applied per example, after the contraction, not linear."""

    @jax.custom_vjp
    def clipped(w):
        return w

    clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.tanh(20.0 * g) / 20.0,))
    return Built(lambda w, x: readout(jnp.tanh(x @ clipped(w))), (d(3, 4), d(B, 7, 3)))


@case("custom_vjp")
def derive_gradient_reversal(d):
    """Domain adaptation: the gradient of a branch changes its sign and size."""

    @jax.custom_vjp
    def reverse(x, strength):
        return x

    reverse.defvjp(lambda x, s: (x, s), lambda s, g: (-s * g, jnp.zeros_like(s)))

    def loss(p, x):
        h = jnp.tanh(x @ p["w"])
        return readout(h @ p["task"]) + readout(reverse(h, jnp.asarray(0.3, x.dtype)) @ p["domain"])

    return Built(loss, ({"w": d(3, 4), "task": d(4, 2), "domain": d(4, 7)}, d(B, 6, 3)))


@case("custom_vjp", "nonsmooth")
def derive_straight_through(d):
    """Quantised weights by stop_gradient, with a learned scale."""

    def loss(p, x):
        grid = p["w"] / p["s"]
        grid = grid + lax.stop_gradient(jnp.round(grid) - grid)
        return readout(jnp.tanh(x @ (grid * p["s"])))

    return Built(loss, ({"w": d(3, 4), "s": 0.1 * d.positive(4)}, d(B, 7, 3)))


@case("custom_vjp", "nonsmooth")
def derive_binary_weights(d):
    """Binary weights by custom_vjp, with a hard window in the backward pass."""

    @jax.custom_vjp
    def binary(w):
        return jnp.sign(w)

    binary.defvjp(lambda w: (binary(w), w), lambda w, g: (jnp.where(jnp.abs(w) < 0.8, g, 0.0),))
    return Built(lambda w, x: readout(jnp.tanh(x @ binary(w))), (d(7, 3), d(B, 4, 7)))


@case("custom_vjp")
def derive_custom_vjp_dense(d):
    """A layer whose backward pass computes the gradient of the weight by its own einsum."""

    @jax.custom_vjp
    def layer(w, b, x):
        return x @ w + b

    def forward(w, b, x):
        return layer(w, b, x), (w, x)

    def backward(saved, g):
        w, x = saved
        return jnp.einsum("btm,btn->mn", x, g), g.sum((0, 1)), jnp.einsum("btn,mn->btm", g, w)

    layer.defvjp(forward, backward)
    return Built(
        lambda p, x: readout(jnp.tanh(layer(p["w"], p["b"], jnp.sin(x @ p["in"])))),
        ({"in": d(2, 3), "w": d(3, 4), "b": d(4)}, d(B, 7, 2)),
    )


@case("custom_vjp", "scan")
def derive_custom_vjp_in_scan(d):
    """The same in a loop over layers with remat."""

    @jax.custom_vjp
    def layer(w, x):
        return jnp.tanh(x @ w)

    def backward(saved, g):
        w, x, out = saved
        g = g * (1 - out**2)
        return jnp.tensordot(x, g, ((0, 1), (0, 1))), g @ w.T

    layer.defvjp(lambda w, x: (layer(w, x), (w, x, layer(w, x))), backward)

    def loss(w, x):
        return readout(lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)[0])

    return Built(loss, (d(4, 3, 3), d(B, 7, 3)))


@case("custom_vjp", "scan")
def derive_custom_vjp_scan_backward(d):
    """A backward pass that is a loop written by hand, over chunks of tokens (fused cross-entropy)."""

    @jax.custom_vjp
    def entropy(w, x):
        return jnp.mean(jax.nn.logsumexp(x @ w, -1))

    def backward(saved, g):
        w, x = saved

        def chunk(dw, x):
            soft = jax.nn.softmax(x @ w) * g / 6
            return dw + x.T @ soft, soft @ w.T

        dw, dx = lax.scan(chunk, jnp.zeros_like(w), x.reshape(3, 2, -1))
        return dw, dx.reshape(x.shape)

    entropy.defvjp(lambda w, x: (entropy(w, x), (w, x)), backward)
    return Built(lambda p, x: entropy(p["w"], jnp.tanh(x @ p["in"])), ({"in": d(2, 3), "w": d(3, 7)}, d(B, 6, 2)), BARE)


@case("custom_vjp")
def derive_custom_vjp_nondiff_argument(d):
    """A custom rule with a static argument and a tree of parameters."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def net(power, p, x):
        return (x @ p["w"] + p["b"]) ** power

    def forward(power, p, x):
        return net(power, p, x), jax.vjp(partial(net.fun, power), p, x)[1]

    net.defvjp(forward, lambda power, pull, g: pull(0.5 * g))
    return Built(lambda p, x: readout(net(3, p, x)), ({"w": d(3, 4), "b": d(4)}, d(B, 7, 3)))


@case("custom_vjp")
def derive_fixed_point(d):
    """A fixed point with the implicit function theorem: parameters inside a custom_vjp."""

    def step(p, x, z):
        return jnp.tanh(x @ p["u"] + 0.3 * z @ p["w"])

    def solve(f, z):
        return lax.fori_loop(0, 40, lambda _, z: f(z), z)

    @jax.custom_vjp
    def fixed_point(p, x):
        return solve(partial(step, p, x), jnp.zeros((3,), x.dtype))

    def backward(saved, g):
        p, x, z = saved
        _, pull_z = jax.vjp(partial(step, p, x), z)
        u = solve(lambda u: g + pull_z(u)[0], g)
        return jax.vjp(lambda p, x: step(p, x, z), p, x)[1](u)

    fixed_point.defvjp(lambda p, x: (fixed_point(p, x), (p, x, fixed_point(p, x))), backward)
    return Built(lambda p, x: readout(fixed_point(p, x)), ({"u": d(2, 3), "w": d(3, 3)}, d(B, 2)), BARE)


@case("gradgrad")
def derive_maml(d):
    """One inner step of gradient descent on a support set: gradients of gradients."""

    def net(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

    def loss(p, task):
        inner = jax.grad(lambda p: fit(net(p, task["xs"]), task["ys"]))(p)
        p = jax.tree.map(lambda p, g: p - 0.3 * g, p, inner)
        return fit(net(p, task["xq"]), task["yq"])

    task = {"xs": d(B, 4, 2), "ys": d(B, 4, 1), "xq": d(B, 7, 2), "yq": d(B, 7, 1)}
    return Built(loss, ({"w": d(2, 3), "b": d(3), "v": d(3, 1)}, task), BARE)


@case("gradgrad")
def derive_maml_two_steps(d):
    """Two inner steps, unrolled, with learned step sizes."""

    def net(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

    def loss(params, task):
        p = params["net"]
        for k in range(2):
            inner = jax.grad(lambda p: fit(net(p, task["xs"]), task["ys"]))(p)
            p = jax.tree.map(lambda p, g: p - params["rate"][k] * g, p, inner)
        return fit(net(p, task["xq"]), task["yq"])

    task = {"xs": d(B, 4, 2), "ys": d(B, 4, 1), "xq": d(B, 7, 2), "yq": d(B, 7, 1)}
    params = {"net": {"w": d(2, 3), "b": d(3), "v": d(3, 1)}, "rate": 0.2 * d.positive(2)}
    return Built(loss, (params, task), BARE)


@case("gradgrad", "scan")
def derive_maml_scan(d):
    """Inner steps in a loop, whose carry is the parameters."""

    def loss(p, task):
        def step(p, _):
            g = jax.grad(lambda p: fit(jnp.tanh(task["xs"] @ p["w"]) @ p["v"], task["ys"]))(p)
            return jax.tree.map(lambda p, g: p - 0.2 * g, p, g), None

        p, _ = lax.scan(step, p, None, length=3)
        return fit(jnp.tanh(task["xq"] @ p["w"]) @ p["v"], task["yq"])

    task = {"xs": d(B, 4, 2), "ys": d(B, 4, 1), "xq": d(B, 7, 2), "yq": d(B, 7, 1)}
    return Built(loss, ({"w": d(2, 3), "v": d(3, 1)}, task), BARE)


def field(p, t, x):
    h = jnp.tanh(jnp.stack([t, x]) @ p["w1"] + p["b1"])
    return (jnp.tanh(h @ p["w2"] + p["b2"]) @ p["w3"])[0]


def field_params(d):
    return {"w1": d(2, 7), "b1": d(7), "w2": d(7, 4), "b2": d(4), "w3": d(4, 1)}


@case("gradgrad")
def derive_pinn(d):
    """Burgers' equation: first derivatives by grad, a second one by grad of grad."""

    def loss(p, b):
        t, x = b["t"], b["x"]
        u_t, u_x = jax.grad(field, (1, 2))(p, t, x)
        u_xx = jax.grad(jax.grad(field, 2), 2)(p, t, x)
        return (u_t + field(p, t, x) * u_x - 0.1 * u_xx) ** 2

    return Built(loss, (field_params(d), {"t": d(B), "x": d(B)}), BARE)


@case("gradgrad")
def derive_pinn_forward(d):
    """The same derivatives by jvp of jvp, at several points of one example."""

    def loss(p, b):
        def residual(t, x):
            one = jnp.ones_like(x)
            along_x = lambda x: jax.jvp(partial(field, p, t), (x,), (one,))[1]
            u_xx = jax.jvp(along_x, (x,), (one,))[1]
            u_t = jax.jvp(lambda t: field(p, t, x), (t,), (one,))[1]
            return u_t - u_xx

        return jnp.mean(jax.vmap(residual)(b["t"], b["x"]) ** 2)

    return Built(loss, (field_params(d), {"t": d(B, 6), "x": d(B, 6)}), BARE)


@case("gradgrad")
def derive_pinn_hessian(d):
    """The Laplacian as the trace of jax.hessian, plus a boundary term with the same parameters."""

    def u(p, x):
        return (jnp.tanh(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"])[0]

    def loss(p, b):
        laplace = jnp.trace(jax.hessian(u, 1)(p, b["x"]))
        return (laplace - 1.0) ** 2 + u(p, b["edge"]) ** 2

    params = {"w1": d(3, 7), "b1": d(7), "w2": d(7, 4), "b2": d(4), "w3": d(4, 1)}
    return Built(loss, (params, {"x": d(B, 3), "edge": d(B, 3)}), BARE)


@case("gradgrad")
def derive_gradient_penalty(d):
    """The norm of the gradient with respect to the input, as in WGAN-GP."""

    def critic(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])

    def loss(p, x):
        slope = jax.grad(critic, 1)(p, x)
        return critic(p, x) / x.size + (jnp.sqrt(jnp.sum(slope**2)) - 1.0) ** 2

    return Built(loss, ({"w": d(3, 7), "b": d(7), "v": d(7, 1)}, d(B, 3)), BARE)


@case("gradgrad")
def derive_score_matching(d):
    """The divergence of a vector field by jacfwd."""

    def score(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

    def loss(p, x):
        return jnp.trace(jax.jacfwd(score, 1)(p, x)) + 0.5 * jnp.sum(score(p, x) ** 2)

    return Built(loss, ({"w": d(3, 7), "b": d(7), "v": d(7, 3)}, d(B, 3)), BARE)


@case("gradgrad")
def derive_jacobian_penalty(d):
    """The whole Jacobian by jacrev, a vmapped backward pass inside the loss."""

    def net(p, x):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    return Built(
        lambda p, x: jnp.sum(jax.jacrev(net, 1)(p, x) ** 2) + readout(net(p, x)),
        ({"w": d(3, 7), "v": d(7, 2)}, d(B, 3)),
        BARE,
    )


@case("gradgrad")
def derive_hamiltonian(d):
    """Symplectic steps along gradients of a learned energy."""

    def energy(p, q):
        return jnp.sum(jnp.tanh(q @ p["w"] + p["b"]) @ p["v"])

    def loss(p, z):
        q, m = z[:3], z[3:]
        for _ in range(2):
            m = m - 0.3 * jax.grad(energy, 1)(p, q)
            q = q + 0.3 * m
        return readout(q)

    return Built(loss, ({"w": d(3, 7), "b": d(7), "v": d(7, 1)}, d(B, 6)), BARE)


@case("gradgrad")
def derive_jvp_along_parameters(d):
    """A derivative along a direction in parameter space, as in influence functions."""
    direction = {"w": d(3, 4), "v": d(4, 2)}

    def loss(p, x):
        net = lambda p: jnp.tanh(x @ p["w"]) @ p["v"]
        out, slope = jax.jvp(net, (p,), (jax.tree.map(lambda t, p: jnp.asarray(t, p.dtype), direction, p),))
        return readout(out) + readout(slope)

    return Built(loss, ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)))


@case("gradgrad")
def derive_linearize(d):
    """jax.linearize of the network at the parameters, applied to two tangents."""

    def loss(p, b):
        out, push = jax.linearize(lambda x: jnp.tanh(x @ p["w"]) @ p["v"], b["x"])
        return readout(out) + readout(push(b["t"])) + readout(push(2.0 * b["t"] + b["x"]))

    return Built(loss, ({"w": d(3, 4), "v": d(4, 2)}, {"x": d(B, 7, 3), "t": d(B, 7, 3)}), BARE)


@case("gradgrad")
def derive_hessian_vector_product(d):
    """Curvature along a direction by forward over reverse, in the parameters."""
    direction = d(3, 4)

    def loss(w, batch):
        x, y = batch
        inner = lambda w: fit(jnp.tanh(x @ w), y)
        return jnp.sum(jax.jvp(jax.grad(inner), (w,), (jnp.asarray(direction, w.dtype),))[1] ** 2)

    return Built(loss, (d(3, 4), (d(B, 7, 3), d(B, 7, 4))), BARE)


@case("gradgrad")
def derive_gradient_norm_of_parameters(d):
    """Sharpness-aware: the loss at a point one normalised ascent step away."""

    def loss(p, batch):
        x, y = batch
        inner = lambda p: fit(jnp.tanh(x @ p["w"]) @ p["v"], y)
        g = jax.grad(inner)(p)
        norm = jnp.sqrt(sum(jnp.sum(l**2) for l in jax.tree.leaves(g)))
        return inner(jax.tree.map(lambda p, g: p + 0.1 * g / norm, p, g))

    return Built(loss, ({"w": d(3, 4), "v": d(4, 2)}, (d(B, 7, 3), d(B, 7, 2))), BARE)


@case("gradgrad", "conv")
def derive_conv_gradient_penalty(d):
    """Second derivatives of a convolution: a convolution whose kernel is a gradient."""

    def critic(w, x):
        out = lax.conv_general_dilated(x[None], w, (2,), "SAME", dimension_numbers=("NTC", "TIO", "NTC"))
        return jnp.sum(jnp.tanh(out))

    return Built(lambda w, x: jnp.sum(jax.grad(critic, 1)(w, x) ** 2), (d(3, 2, 4), d(B, 7, 2)), BARE)


@case("gradgrad", "scan")
def derive_neural_ode(d):
    """A Runge-Kutta integration in a loop with a closed-over field."""

    def loss(p, x):
        f = lambda x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

        def step(x, _):
            k1 = f(x)
            k2 = f(x + 0.1 * k1)
            return x + 0.2 * k2, None

        return readout(lax.scan(step, x, None, length=4)[0])

    return Built(loss, ({"w": d(3, 7), "b": d(7), "v": d(7, 3)}, d(B, 3)))
