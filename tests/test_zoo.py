"""Every model of the zoo: surgery gives what the slow twin gives, in float32 and, to nine digits, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import pergrad as pg
import zoo

LOW = {"bf16", "f16", "mixed"}  # computed in few bits: compared loosely
LIBRARIES = {"flax", "nnx", "equinox", "haiku"}  # slow to trace, and of layers that other cases have
CASES = pytest.mark.parametrize("case", zoo.CASES, ids=str)
# In float64 what counts is the precision: one statistic of every kind of route.
PRECISE = {
    "mean": pg.mean(),
    "second_moment": pg.second_moment(),
    "cos": pg.elementwise(jnp.cos),
    "leaf_norms": pg.norms(per_leaf=True),
}


def test_the_zoo_is_large_enough():
    """Losing a module of cases (an import that went missing) would otherwise look like success."""
    assert len(zoo.CASES) >= 400


@CASES
def test_every_statistic_in_float32(case):
    """A rule gives a wrong number on this model."""
    tolerance = 2e-2 if LOW & case.tags else 2e-5
    assert not oracle.compare(case.build(), tolerance, fragile="fragile-sign" in case.tags)


@pytest.mark.parametrize("case", [c for c in zoo.CASES if not ({"no64"} | LOW | LIBRARIES) & c.tags], ids=str)
def test_nine_digits_in_float64(case):
    """A rule rounds to float32 somewhere, or its error in float32 was not rounding."""
    with jax.enable_x64(True):
        built = zoo.cast(case.build(), np.float64)
        statistics = PRECISE | oracle.of_all_at_once(built)
        assert not oracle.compare(built, 1e-9, statistics, fragile="fragile-sign" in case.tags)


@pytest.mark.parametrize("case", [c for c in zoo.CASES if c.rules], ids=str)
def test_the_expected_rule(case):
    """A model fell from its fast rule to a slower one; or `explain` names another than is used."""
    built = case.build()
    rows = pg.explain(built.loss, pg.second_moment(), **built.options)(*built.args).rows
    assert {row.leaf: row.rule for row in rows if row.leaf in case.rules} == dict(case.rules)
