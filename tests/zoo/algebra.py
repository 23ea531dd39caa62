"""Linear algebra, Fourier transforms and complex numbers: mostly the generic rule."""

import jax
import jax.numpy as jnp
from jax import lax

from .case import BARE, B, Built, case, readout


def regular(w):
    """A well-conditioned square matrix made of `w`."""
    return 0.3 * w + 2.0 * jnp.eye(w.shape[0], dtype=w.dtype)


def definite(w):
    return w @ w.T + jnp.eye(w.shape[0], dtype=w.dtype)


@case("implicit")
def algebra_solve(d):
    """A linear layer given by its inverse; the activation is the right-hand side."""
    return Built(lambda w, x: readout(jnp.linalg.solve(regular(w), x)), (d(4, 4), d(B, 4, 3)), BARE)


@case("implicit")
def algebra_solve_right_hand_side(d):
    """The matrix comes from the example, the parameter is the right-hand side."""
    return Built(
        lambda p, x: readout(jnp.linalg.solve(definite(x), p["b"] @ p["w"])),
        ({"b": d(4, 2), "w": d(2, 3)}, d(B, 4, 7)),
        BARE,
    )


@case("implicit")
def algebra_ridge_regression(d):
    """A closed-form inner problem on features (meta-learning with a ridge head)."""

    def loss(p, b):
        f = jnp.tanh(b["x"] @ p["w"])
        head = jnp.linalg.solve(f.T @ f + jax.nn.softplus(p["ridge"]) * jnp.eye(4, dtype=f.dtype), f.T @ b["y"])
        return jnp.mean((jnp.tanh(b["xq"] @ p["w"]) @ head - b["yq"]) ** 2)

    batch = {"x": d(B, 7, 3), "y": d(B, 7, 2), "xq": d(B, 6, 3), "yq": d(B, 6, 2)}
    return Built(loss, ({"w": d(3, 4), "ridge": d.positive()}, batch), BARE)


@case()
def algebra_inverse(d):
    """jnp.linalg.inv of a parameter: contractions on both sides of the gradient."""
    return Built(lambda w, x: readout(x @ jnp.linalg.inv(regular(w))), (d(4, 4), d(B, 7, 4)))


@case()
def algebra_inverse_iterated(d):
    """Newton-Schulz iterations, as in Muon: products of a matrix with itself."""

    def loss(w, x):
        w = w / jnp.linalg.norm(w)
        for _ in range(3):
            w = 1.5 * w - 0.5 * w @ w.T @ w
        return readout(x @ w)

    return Built(loss, (d(3, 4), d(B, 7, 3)))


@case()
def algebra_cholesky(d):
    """A covariance by its factor: log-density of a Gaussian."""

    def loss(p, x):
        factor = jnp.linalg.cholesky(definite(p["w"]))
        z = lax.linalg.triangular_solve(factor, (x - p["mean"])[..., None], left_side=True, lower=True)
        return 0.5 * jnp.sum(z**2) + jnp.sum(jnp.log(jnp.diag(factor)))

    return Built(loss, ({"w": d(3, 4), "mean": d(3)}, d(B, 3)), BARE)


@case()
def algebra_slogdet(d):
    """A linear flow: the log-determinant is common to all examples."""

    def loss(w, x):
        return 0.5 * jnp.mean(jnp.sum((x @ regular(w)) ** 2, -1)) - jnp.linalg.slogdet(regular(w))[1]

    return Built(loss, (d(4, 4), d(B, 4)))


@case()
def algebra_det(d):
    """A determinant of a matrix that depends on the example."""
    return Built(lambda w, x: jnp.sin(0.1 * jnp.linalg.det(regular(w) + 0.1 * x)), (d(3, 3), d(B, 3, 3)), BARE)


@case()
def algebra_gaussian_process(d):
    """Marginal likelihood of a Gaussian process: kernel parameters go through a solve and a determinant."""

    def loss(p, b):
        gap = (b["x"][:, None] - b["x"]) ** 2
        k = jnp.exp(p["height"] - gap * jnp.exp(p["rate"])) + 0.1 * jnp.eye(6, dtype=gap.dtype)
        factor = jax.scipy.linalg.cho_factor(k, lower=True)
        alpha = jax.scipy.linalg.cho_solve(factor, b["y"])
        return 0.5 * b["y"] @ alpha + jnp.sum(jnp.log(jnp.diag(factor[0])))

    return Built(loss, ({"height": d(), "rate": d()}, {"x": d(B, 6), "y": d(B, 6)}), BARE)


@case()
def algebra_eigenvalues(d):
    """Eigenvalues of a symmetric matrix made by the example and the parameter."""

    def loss(w, x):
        return readout(jnp.linalg.eigvalsh(definite(x @ w)) * jnp.arange(1.0, 4.0))

    return Built(loss, (d(4, 3), d(B, 3, 4)), BARE)


@case()
def algebra_singular_values(d):
    """A nuclear norm as a regulariser beside a layer."""
    return Built(lambda w, x: readout(jnp.tanh(x @ w)) + 0.1 * jnp.linalg.norm(w, "nuc"), (d(3, 4), d(B, 7, 3)))


@case()
def algebra_orthogonal(d):
    """An orthogonal weight as the Q of a QR decomposition."""
    return Built(lambda w, x: readout(jnp.tanh(x @ jnp.linalg.qr(w)[0])), (d(4, 3), d(B, 7, 4)))


@case("fragile-sign")
def algebra_matrix_exponential(d):
    """A rotation as the exponential of a skew matrix, by its power series."""

    def loss(w, x):
        skew = 0.3 * (w - w.T)
        term, total = jnp.eye(3, dtype=w.dtype), jnp.eye(3, dtype=w.dtype)
        for k in range(1, 6):
            term = term @ skew / k
            total = total + term
        return readout(jnp.tanh(x @ total))

    return Built(loss, (d(3, 3), d(B, 7, 3)))


@case()
def algebra_matrix_power(d):
    """A power of a transition matrix."""
    return Built(lambda w, x: readout(x @ jnp.linalg.matrix_power(jax.nn.softmax(w), 3)), (d(4, 4), d(B, 7, 4)))


@case("complex")
def algebra_fourier_mixing(d):
    """FNet: the real part of a Fourier transform between two layers."""
    return Built(
        lambda p, x: readout(jnp.fft.fft2(jnp.tanh(x @ p["w"])).real @ p["v"]),
        ({"w": d(3, 4), "v": d(4, 2)}, d(B, 7, 3)),
    )


@case("complex")
def algebra_fourier_layer(d):
    """A Fourier neural operator: complex weights stored as two real leaves."""

    def loss(p, x):
        modes = jnp.fft.rfft(x, axis=1)[:, :3]
        weight = lax.complex(p["real"], p["imaginary"])
        modes = jnp.einsum("bkd,kdf->bkf", modes, weight)
        return readout(jnp.fft.irfft(modes, n=7, axis=1) + x @ p["skip"])

    return Built(loss, ({"real": d(3, 2, 4), "imaginary": d(3, 2, 4), "skip": d(2, 4)}, d(B, 7, 2)))


@case("complex")
def algebra_long_convolution(d):
    """A convolution as long as the sequence, by the Fourier transform of its kernel."""

    def loss(k, x):
        product = jnp.fft.rfft(x, n=14, axis=1) * jnp.fft.rfft(k, n=14, axis=0)
        return readout(jnp.tanh(jnp.fft.irfft(product, n=14, axis=1)[:, :7]))

    return Built(loss, (d(7, 3), d(B, 7, 3)))


@case("complex")
def algebra_complex_dense(d):
    """A complex product of activations with a weight made of two real halves of one leaf."""

    def loss(p, x):
        w = lax.complex(p[0], p[1])
        z = lax.complex(x, jnp.sin(x)) @ w
        return readout(jnp.abs(z) + jnp.angle(z + 3.0))

    return Built(loss, (d(2, 3, 4), d(B, 7, 3)))


@case("complex")
def algebra_rotary(d):
    """Rotary positions by complex multiplication, with learned frequencies."""

    def loss(p, x):
        turn = jnp.exp(1j * jnp.arange(7)[:, None] * p["frequency"])
        q, k = (x @ p[n] for n in ("q", "k"))
        q, k = (lax.complex(z[..., :2], z[..., 2:]) * turn for z in (q, k))
        scores = jnp.einsum("bsf,btf->bst", q, jnp.conj(k)).real
        return readout(jax.nn.softmax(scores) @ x)

    return Built(loss, ({"q": d(3, 4), "k": d(3, 4), "frequency": d.positive(2)}, d(B, 7, 3)))


@case("complex", "scan")
def algebra_complex_recurrence(d):
    """A linear recurrent unit: a complex diagonal state with a phase and a decay."""

    def loss(p, x):
        turn = jnp.exp(lax.complex(-jnp.exp(p["decay"]), p["phase"]))
        u = x @ p["in"]

        def step(h, u):
            h = turn * h + u
            return h, h.real

        _, hs = lax.scan(step, jnp.zeros_like(turn), u)
        return readout(jnp.tanh(hs) @ p["out"])

    params = {"decay": d(4, scale=0.3), "phase": d(4), "in": d(3, 4), "out": d(4, 2)}
    return Built(loss, (params, d(B, 7, 3)), BARE)


@case("complex")
def algebra_complex_batch(d):
    """Examples that are complex, parameters that are not."""

    def loss(w, x):
        return readout(jnp.abs(x @ w) ** 2)

    return Built(loss, (d(3, 4), d(B, 7, 3) + 1j * d(B, 7, 3)))


@case()
def algebra_sinkhorn(d):
    """Optimal transport between projected point clouds, by Sinkhorn iterations in log space."""

    def loss(w, b):
        cost = jnp.sum((b["x"][:, None] @ w - b["y"] @ w) ** 2, -1)
        f, g = jnp.zeros((4,), cost.dtype), jnp.zeros((6,), cost.dtype)
        for _ in range(3):
            f = -jax.nn.logsumexp(g - cost, axis=1)
            g = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
        return jnp.sum(jnp.exp(f[:, None] + g - cost) * cost) / 4

    return Built(loss, (d(3, 2), {"x": d(B, 4, 3), "y": d(B, 6, 3)}), BARE)


@case("implicit")
def algebra_conjugate_gradients(d):
    """A solve by conjugate gradients: the parameters are constants of the matrix-vector product."""

    def loss(p, x):
        matrix = lambda v: p["w"].T @ (p["w"] @ v) + jnp.exp(p["shift"]) * v
        return readout(jax.scipy.sparse.linalg.cg(matrix, x, maxiter=4)[0])

    return Built(loss, ({"w": d(4, 3), "shift": d()}, d(B, 3)), BARE)


@case("implicit")
def algebra_root(d):
    """lax.custom_root: a fixed point with an implicit derivative."""

    def loss(p, x):
        residual = lambda z: z - jnp.tanh(0.3 * z @ p["w"] + x @ p["u"])
        solve = lambda f, z: lax.fori_loop(0, 40, lambda _, z: z - f(z), z)
        tangent = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
        return readout(lax.custom_root(residual, jnp.zeros((3,), x.dtype), solve, tangent))

    return Built(loss, ({"w": d(3, 3), "u": d(2, 3)}, d(B, 2)), BARE)
