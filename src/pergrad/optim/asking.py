"""How an optimizer says which statistics it needs.

An optimizer here is an ordinary optax transformation that reads statistics from one extra argument, ``stats=``, and reads
them only through `ask`. That one function is enough to find out what *any* composition of transformations needs
(`required_stats`): run it abstractly, and note what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import statistics
from ..api import grad_stats
from ..reductions import accumulator
from ..statistics import Statistic

#: What can be asked for by name alone. All of them merge exactly across batches: means weighted by counts, counts add.
PRIMITIVES: dict[str, Statistic] = {
    "mean": statistics.mean(),
    "second_moment": statistics.second_moment(),
    "sign_mean": statistics.sign_mean(),
    "count": statistics.count(),
}


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that names the statistics it needs.

    Attributes:
      init, update: as in optax; ``update(updates, state, params, stats=s)`` takes the statistics.
      stats: statistics by name, to be passed to `pg.value_and_stats`.

    >>> import jax.numpy as jnp, pergrad as pg
    >>> opt = pg.optim.micro_adam(1e-3)
    >>> opt.stats
    {'mean': pg.mean(), 'second_moment': pg.second_moment()}
    """

    stats: dict[str, Statistic]

    def __new__(cls, init: Callable, update: Callable, stats: Mapping[str, Statistic] | None = None):
        self = super().__new__(cls, init, update)
        self.stats = {"mean": PRIMITIVES["mean"], **(stats or {})}  # of the mean the updates are made
        return self


def primitives(*names: str) -> dict[str, Statistic]:
    return {name: PRIMITIVES[name] for name in names}


def ask(stats: Any, name: str, like: Any = None, statistic: Statistic | None = None) -> Any:
    """The statistic of this name, from the ``stats=`` that the optimizer's ``update`` was called with.

    Args:
      stats: what ``update`` got as ``stats=``.
      name: its key.
      like: the updates. Inside `optax.masked` and `optax.multi_transform` they hold only some of the parameters; the
        statistic is cut to the same. None: as it is, for statistics that are no tree like the parameters.
      statistic: what it is, for names other than "mean", "second_moment", "sign_mean" and "count".

    >>> import jax.numpy as jnp, optax, pergrad as pg
    >>> s = {"abs_mean": {"w": jnp.ones(2), "b": jnp.ones(3)}}
    >>> pg.optim.ask(s, "abs_mean", {"w": jnp.zeros(2), "b": optax.MaskedNode()}, pg.abs_mean())
    {'b': MaskedNode(), 'w': Array([1., 1.], dtype=float32)}
    """
    statistic = statistic or PRIMITIVES.get(name)
    value = stats.note(name, statistic) if isinstance(stats, Recorder) else _looked_up(stats, name, statistic)
    return value if like is None else aligned(value, like, name)


def _looked_up(stats, name, statistic):
    wanted = f'"{name}"' if statistic is None else f'"{name}", {statistic!r}'
    write = (
        "Write `value, s = pg.value_and_stats(loss, opt.stats)(params, batch)` and then "
        '`opt.update(s["mean"], state, params, stats=s)`; for a composition (`optax.chain`, …), '
        "`pg.optim.required_stats(opt, params)` in place of `opt.stats`."
    )
    if stats is None:
        raise ValueError(
            f"update was called without stats=, but this optimizer needs {wanted}. {write} If you did: some wrappers do "
            "not hand on what they do not know, `optax.MultiSteps` and `optax.lookahead` among them; for the first "
            "write `pg.optim.MultiSteps`, which merges statistics."
        )
    if not isinstance(stats, Mapping):
        raise TypeError(f"stats= was given {type(stats).__name__}; expected statistics by name. {write}")
    if name not in stats:
        raise ValueError(f"stats= holds {_listed(stats)}, but this optimizer needs {wanted}. {write}")
    if isinstance(stats[name], Statistic):
        raise TypeError(f'stats["{name}"] is the statistic {stats[name]!r} itself; expected its value. {write}')
    return stats[name]


def _is_masked(x) -> bool:
    return isinstance(x, optax.MaskedNode)


def aligned(tree: Any, like: Any, name: str = "a statistic") -> Any:
    """``tree`` without the leaves that `optax.masked` has taken out of ``like``."""
    structure = jax.tree.structure(like)
    try:
        out = jax.tree.map(lambda u, s: u if _is_masked(u) else s, like, tree, is_leaf=_is_masked)
    except ValueError:
        out = None
    if out is None or jax.tree.structure(out) != structure:
        raise ValueError(
            f"{name} has the tree {jax.tree.structure(tree)}, and the updates {structure}; expected the same, but for masked "
            'leaves. Take both from one call, `opt.update(s["mean"], state, params, stats=s)`, and leave out wrappers that '
            "rebuild the updates, such as `optax.flatten`."
        )
    return out


def _listed(names) -> str:
    return ", ".join(f'"{name}"' for name in names) or "nothing"


# ------------------------------------------------------------------------------------- finding out


class Recorder(Mapping):
    """Stands in for ``stats=`` in an abstract run of ``update``, and notes what it is asked for."""

    def __init__(self, params):
        self.params, self.asked = params, {}

    def note(self, name, statistic):
        if statistic is None:
            raise ValueError(
                f'ask(stats, "{name}") names none of {_listed(PRIMITIVES)}; expected the statistic itself beside its name. '
                f'Write, for example, `ask(stats, "{name}", updates, pg.abs_mean())`.'
            )
        known = self.asked.setdefault(name, statistic)
        if known is not statistic and (repr(known), known.reductions) != (repr(statistic), statistic.reductions):
            raise ValueError(
                f'"{name}" is asked for as {known!r} and as {statistic!r}, which may differ; expected one statistic for '
                "each name. Define the statistic once and share it, or give the two different names."
            )
        return example_of(statistic, self.params)

    def __getitem__(self, name):
        return ask(self, name)

    def __iter__(self):
        return iter(PRIMITIVES)

    def __len__(self):
        return len(PRIMITIVES)


def example_of(statistic: Statistic, params: Any) -> Any:
    """A value of the statistic's shapes and dtypes: that of two examples of a loss that has these parameters."""

    def loss(params, x):
        return x * sum(jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(params))

    return grad_stats(loss, statistic, keep_batch_dim=False, impl="vmap")(params, jnp.zeros(max(2, statistic.minimum)))


def required_stats(opt: optax.GradientTransformation, params: Any, **extra_args: Any) -> dict[str, Statistic]:
    """The statistics that an optax transformation needs, whatever it is composed of.

    Nothing is computed: ``opt.update`` is traced once, with something in place of ``stats=`` that notes what is asked for
    (`ask`). So it sees through `optax.chain`, `multi_transform`, `masked`, `inject_hyperparams`, `apply_if_finite`,
    `pg.optim.MultiSteps`, and through wrappers that are yet to be written.

    Args:
      opt: the transformation.
      params: the parameters, or their shapes.
      **extra_args: what else ``opt.update`` needs; it gets a ``value=`` in any case.

    >>> import jax.numpy as jnp, optax, pergrad as pg
    >>> opt = optax.chain(optax.clip_by_global_norm(1.0), pg.optim.eve(1e-3))
    >>> pg.optim.required_stats(opt, {"w": jnp.zeros(3)})
    {'mean': pg.mean(), 'second_moment': pg.second_moment(), 'count': pg.count()}
    """
    return {"mean": PRIMITIVES["mean"], **asked_by(opt, params, **extra_args)}


def asked_by(opt: optax.GradientTransformation, params: Any, **extra_args: Any) -> dict[str, Statistic]:
    """What ``opt.update`` asks of ``stats=``: `required_stats`, without the mean if only the updates are made of it."""
    opt = optax.with_extra_args_support(opt)
    asked: dict[str, Statistic] = {}

    def rehearse(params):
        recorder = Recorder(params)
        updates = jax.tree.map(lambda p: jnp.zeros(p.shape, accumulator(p.dtype)), params)
        opt.update(updates, opt.init(params), params, **{"value": jnp.zeros(()), "stats": recorder, **extra_args})
        asked.update(recorder.asked)

    jax.eval_shape(rehearse, params)
    return asked
