"""What a case of the zoo is, and the few functions that cases are written with."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

B = 5  # examples in a batch; no other axis of a case has this size unless it wants to confuse


class Built(NamedTuple):
    loss: Callable[..., Any]  # loss(params, batch, ...) -> scalar, or (scalar, aux)
    args: tuple[Any, ...]  # leaves of the batch arguments lead with the axis of examples
    options: Mapping[str, Any] = {}  # keywords of pg.value_and_stats


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Built]
    tags: frozenset[str] = frozenset()
    rules: Mapping[str, str] = field(default_factory=dict, hash=False)
    why: str = ""

    def __repr__(self) -> str:
        return self.name


class Draw:
    """Arrays of a case, drawn from a generator that is seeded by the name of the case."""

    def __init__(self, name: str):
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *shape: int, scale: float = 0.7) -> np.ndarray:
        return (scale * self.random.standard_normal(shape)).astype(np.float32)

    def positive(self, *shape: int) -> np.ndarray:
        return self.random.uniform(0.5, 1.5, shape).astype(np.float32)

    def ints(self, low: int, high: int, *shape: int) -> np.ndarray:
        return self.random.integers(low, high, shape).astype(np.int32)


CASES: list[Case] = []


def add(
    name: str,
    build: Callable[[Draw], Built],
    *tags: str,
    why: str,
    rules: Mapping[str, str] | None = None,
) -> None:
    if any(case.name == name for case in CASES):
        raise ValueError(f"two cases of the zoo are called {name!r}")
    CASES.append(Case(name, lambda: build(Draw(name)), frozenset(tags), rules or {}, why))


def case(*tags: str, rules: Mapping[str, str] | None = None):
    """Registers `def some_name(d: Draw) -> Built` as the case some-name; its docstring says why."""

    def register(build: Callable[[Draw], Built]) -> Callable[[Draw], Built]:
        add(build.__name__.replace("_", "-"), build, *tags, why=build.__doc__ or "", rules=rules)
        return build

    return register


def cast(built: Built, dtype: Any) -> Built:
    """The same case with every floating leaf of its arguments in `dtype` (complex leaves to match)."""

    def to(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(leaf).astype(dtype)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return jnp.asarray(leaf).astype(jnp.result_type(dtype, jnp.complex64))
        return leaf

    return built._replace(args=jax.tree.map(to, built.args))


def readout(out):
    """A smooth scalar of `out` whose cotangents all differ; a mean, so that examples average."""
    return jnp.mean(out * jnp.sin(out + 0.5) + 0.2 * out)


def fit(out, target):
    return jnp.mean((out - target) ** 2)


BARE = {"keep_batch_dim": False}
