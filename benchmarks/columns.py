"""The columns: ways to take a gradient and statistics of one loss.

A column makes a function `(params, batch) -> (value, results)` out of a loss; what `results` holds under
"g" and "g2" is compared with the twin's. A new column is one function, registered where it is defined.
"""

import functools
from collections.abc import Callable

import jax

import pergrad as pg

COLUMNS: dict[str, Callable] = {}
PLAIN, TWIN, JUDGED = "plain", "vmap", "mean + second moment"


def column(name, make=None):
    """Register `make(loss)` under `name`; without `make`, a decorator."""
    if make is None:
        return functools.partial(column, name)
    COLUMNS[name] = make
    return make


@column(PLAIN)
def plain(loss):
    value_and_grad = jax.value_and_grad(loss)

    def step(params, batch):
        value, g = value_and_grad(params, batch)
        return value, {"g": g}

    return step


def stats(impl="auto", **statistics):
    return lambda loss: pg.value_and_stats(loss, statistics, impl=impl)


column("mean", stats(g=pg.mean()))
column(JUDGED, stats(g=pg.mean(), g2=pg.second_moment()))
column("mean + second + sign", stats(g=pg.mean(), g2=pg.second_moment(), sign=pg.sign_mean()))
column("norms", stats(norms=pg.norms()))
column(TWIN, stats(impl="vmap", g=pg.mean(), g2=pg.second_moment()))
