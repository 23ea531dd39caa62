"""From the user's loss and arguments to the gradient of one example, as a function and as a jaxpr."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import compat
from .statistics import is_integer


@dataclasses.dataclass(frozen=True)
class Signature:
    """Which arguments of the loss are what; indices are non-negative and checked against a call's arguments."""

    argnums: int | tuple[int, ...]
    batch_argnums: int | tuple[int, ...]
    prng_argnums: int | tuple[int, ...]
    has_aux: bool
    keep_batch_dim: bool


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of `value_and_stats`, made plain: flat parameters, flat examples, and a function between them.

    ``one(params, example)`` takes flat lists (the example's arrays without their batch axis) and returns
    (loss, aux, flat gradients) of that example. Arguments that are neither are closed over.
    """

    params: list[jax.Array]
    names: list[str]
    treedef: Any
    examples: list[jax.Array]
    size: int
    one: Callable[..., tuple[jax.Array, Any, list[jax.Array]]]

    def leaves_like_params(self, tree: Any, what: str) -> list[jax.Array]:
        """The leaves of a tree that should be like the parameters."""
        paths, treedef = jax.tree.flatten_with_path(tree)
        names = [jax.tree_util.keystr(path) or "params" for path, _ in paths]
        if treedef != self.treedef:
            raise ValueError(
                f"{what} takes a tree like the parameters; given one with leaves {', '.join(names) or '(none)'}, expected "
                f"{', '.join(self.names)}. Write, for example, `jax.tree.map(jnp.ones_like, params)`, or a mean gradient."
            )
        leaves = [jnp.asarray(leaf) for _, leaf in paths]
        for name, given, param in zip(names, leaves, self.params, strict=True):
            if given.shape != param.shape:
                raise ValueError(
                    f"{what} takes a tree like the parameters; at {name} it has shape {given.shape}, expected {param.shape}. "
                    "Write arrays of the parameters' shapes."
                )
        return leaves


def _indices(given, name: str, count: int) -> tuple[int, ...]:
    out: list[int] = []
    if count == 0:
        raise ValueError(
            "the step was called without positional arguments; expected those of the loss. Write `step(params, batch)`: "
            "arguments given by keyword are passed on to the loss, but are neither parameters nor examples."
        )
    for i in given if isinstance(given, tuple) else (given,):
        if not is_integer(i) or not -count <= i < count:
            raise ValueError(
                f"{name} was given {given!r}, but the loss was called with {count} positional "
                f"argument{'s' * (count != 1)}: expected an index, or a tuple of indices, from 0 to {count - 1}. "
                f"Write, for example, `{name}={0 if name == 'argnums' else max(count - 1, 0)}`, and pass that "
                "argument by position."
            )
        if int(i) % count in out:
            raise ValueError(f"{name} was given {given!r}: expected distinct indices. Write each argument once.")
        out.append(int(i) % count)
    return tuple(out)


def make_problem(loss: Callable, signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Problem:
    """Check the arguments of one call and bring them into flat form."""
    s = signature
    argnums = _indices(s.argnums, "argnums", len(args))
    batch = _indices(s.batch_argnums, "batch_argnums", len(args))
    prng = _indices(s.prng_argnums, "prng_argnums", len(args))
    _refuse_overlap(argnums=argnums, batch_argnums=batch, prng_argnums=prng)

    differentiated = args[argnums[0]] if isinstance(s.argnums, int) else tuple(args[i] for i in argnums)
    paths, treedef = jax.tree.flatten_with_path(differentiated)
    names = [jax.tree_util.keystr(path) or "params" for path, _ in paths]
    params = [_parameter(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]

    examples, size, batch_tree = _examples([args[i] for i in batch], batch)
    keys, prng_tree = _split_keys([args[i] for i in prng], size)

    params = compat.vary_like(params, examples)

    def rebuild(params, example):
        full = list(args)
        diff = jax.tree.unflatten(treedef, params)
        for i, value in zip(argnums, [diff] if isinstance(s.argnums, int) else diff, strict=True):
            full[i] = value
        arrays, key_leaves = example[: len(examples)], example[len(examples) :]
        if s.keep_batch_dim:
            arrays = [x[None] for x in arrays]
        for i, value in zip(batch, jax.tree.unflatten(batch_tree, arrays), strict=True):
            full[i] = value
        for i, value in zip(prng, jax.tree.unflatten(prng_tree, key_leaves), strict=True):
            full[i] = value
        return full

    def value_and_aux(params, example):
        return _checked(loss(*rebuild(params, example), **kwargs), s)

    def one(params, example):
        (value, aux), grads = jax.value_and_grad(value_and_aux, has_aux=True)(list(params), list(example))
        return value, aux, grads

    return Problem(params, names, treedef, examples + keys, size, one)


def _refuse_overlap(**groups: tuple[int, ...]) -> None:
    seen: dict[int, str] = {}
    for name, indices in groups.items():
        for i in indices:
            if i in seen:
                raise ValueError(
                    f"argument {i} of the loss was given both as {seen[i]} and as {name}; expected each argument to "
                    "be one of parameters, batch or random key. Write distinct indices, such as "
                    "`argnums=0, batch_argnums=1, prng_argnums=2`."
                )
            seen[i] = name


def _parameter(name: str, leaf: Any) -> jax.Array:
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"parameter {name} is {type(leaf).__name__}; expected an array of floats. Take what is not an array out of "
            "the differentiated argument (with equinox: `eqx.partition(model, eqx.is_inexact_array)`)."
        ) from error
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"parameter {name} has dtype {array.dtype}, which has no gradient; expected a float dtype. Convert it "
            "(`x.astype(jnp.float32)`), or keep it out of the differentiated argument (pass it as another argument "
            "and name the parameters with `argnums`)."
        )
    return array


def _examples(batch_args: list[Any], argnums: tuple[int, ...]) -> tuple[list[jax.Array], int, Any]:
    paths, tree = jax.tree.flatten_with_path(batch_args)
    leaves, sizes = [], {}
    for (position, *rest), leaf in paths:
        name = f"argument {argnums[position.idx]}{jax.tree_util.keystr(tuple(rest))}"
        try:
            array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        except TypeError as error:
            raise TypeError(
                f"the batch holds {_describe(leaf)} at {name}; expected arrays with the examples on their "
                "leading axis. Pass anything else through an argument that is not in `batch_argnums`."
            ) from error
        if array.ndim == 0:
            raise ValueError(
                f"the batch holds a scalar at {name}; expected arrays with the examples on their leading axis. Pass "
                "what is shared by all examples through an argument that is not in `batch_argnums`, or repeat it with "
                "`jnp.broadcast_to(x, (B,))`."
            )
        leaves.append(array)
        sizes.setdefault(array.shape[0], name)
    if not leaves:
        raise ValueError(
            "the batch holds no arrays; expected at least one array with the examples on its leading axis. Name the "
            "arguments that carry examples with `batch_argnums`."
        )
    if len(sizes) > 1:
        listed = ", ".join(f"{n} at {name}" for n, name in sizes.items())
        raise ValueError(
            f"the batch's arrays have different leading axes: {listed}; expected one size, the number of examples. "
            "Pass what is shared by all examples through an argument that is not in `batch_argnums`."
        )
    (size,) = sizes
    if size == 0:
        raise ValueError(
            "the batch is empty (leading axis 0); expected at least one example. Skip the call when there is no data."
        )
    return leaves, size, tree


def _split_keys(prng_args: list[Any], size: int) -> tuple[list[jax.Array], Any]:
    leaves, tree = jax.tree.flatten(prng_args)
    for key in leaves:
        typed = jnp.issubdtype(getattr(key, "dtype", np.float32), jax.dtypes.prng_key)
        shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", type(key).__name__)
        legacy = not typed and dtype == np.uint32 and shape == jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape
        if not (legacy or (typed and shape == ())):
            raise TypeError(
                f"prng_argnums names an argument that is {dtype} of shape {shape}; expected one random key, which is "
                "split into one per example. Write `jax.random.key(0)`; keys that are already one per example are "
                "part of the batch (`batch_argnums`)."
            )
    return [jax.random.split(key, size) for key in leaves], tree


def _checked(out: Any, signature: Signature) -> tuple[jax.Array, Any]:
    """What the loss returned, as (value, aux), or an error that says what it should have returned."""
    if signature.has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"with has_aux=True the loss must return a pair (loss, aux), but it returned {_describe(out)}. "
                "Write `return loss, aux`, or leave has_aux out."
            )
        value, aux = out
    else:
        value, aux = out, None
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, float, int)) or jnp.shape(value) != ():
        hint = (
            "Write `return value, aux` together with `has_aux=True`."
            if isinstance(value, tuple) and not signature.has_aux
            else "Sum or average it to one number, such as `jnp.mean(per_token_loss)`."
        )
        raise TypeError(f"the loss must return a scalar, but it returned {_describe(value)}. {hint}")
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(
            f"the loss must return a real float, but it returned {_describe(value)}. "
            "Write, for example, `return jnp.real(value).astype(jnp.float32)`."
        )
    for path, leaf in jax.tree.flatten_with_path(aux)[0]:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int, complex)):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path)} is {_describe(leaf)}; expected a pytree of arrays, since aux is "
                "computed for every example and stacked. Return names and other constants outside of the loss."
            )
    return jnp.asarray(value), jax.tree.map(jnp.asarray, aux)


def _describe(x: Any) -> str:
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, tuple):
        return f"a tuple ({', '.join(_describe(e) for e in x)})"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (str, bool, int, float)) else type(x).__name__


def example_jaxpr(problem: Problem) -> tuple[Any, Sequence[Any], Any]:
    """The jaxpr of ``problem.one`` for a single example, its constants, and the shapes it returns.

    JAX's own differentiation has by then dealt with scan, remat, custom_vjp, cond and jit.
    """
    example = jax.eval_shape(lambda arrays: [x[0] for x in arrays], problem.examples)
    jaxpr, consts, out = compat.make_jaxpr(problem.one, problem.params, example)
    effects = compat.side_effects(jaxpr)
    if effects:
        raise ValueError(
            f"the loss has side effects ({', '.join(effects)}), which would run once per example, or not at all where "
            "the gradient does not need them; expected a pure function. Take prints and callbacks (`jax.debug.print`, "
            "`io_callback`) and mutable references out of the loss, return what they need as aux, or write "
            '`impl="vmap"`.'
        )
    return jaxpr, consts, out


def leaves_open(fun: Callable, name: str, args: Sequence[Any]) -> bool:
    """Does ``fun`` have an argument of this name that the positional ``args`` do not fill?"""
    try:
        signature = inspect.signature(fun)
        return name in signature.parameters and name not in signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        return False
