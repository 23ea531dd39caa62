"""What bad input gets: an error that says what was given, what was expected, and what to write instead.

Every case is one call and pieces of text that its error must hold, in three parts: given, expected, instead. What
breaks when one fails is a user's afternoon.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import pergrad as pg
from pergrad.statistics import Statistic

W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
X = np.linspace(-2, 1, 12, dtype=np.float32).reshape(4, 3)
KEY = jax.random.key(0)
TRUE = np.ones(4, bool)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(loss=loss, stats=None, *args, **options):
    return pg.value_and_stats(loss, pg.mean() if stats is None else stats, *args, **options)


def keyed(w, x, key):
    return loss(w, x) + jax.random.normal(key, ())


@dataclasses.dataclass
class Bad:
    name: str
    call: Callable[[], Any]
    error: type[Exception]
    given: tuple[str, ...] | str
    expected: tuple[str, ...] | str
    instead: tuple[str, ...] | str

    def parts(self):
        for part in (self.given, self.expected, self.instead):
            yield from (part,) if isinstance(part, str) else part


def check(bad: Bad):
    with pytest.raises(bad.error) as caught:
        bad.call()
    text = str(caught.value)
    assert type(caught.value) is bad.error, text
    missing = [piece for piece in bad.parts() if piece not in text]
    assert not missing, text
    assert "{" not in re.sub(r"`[^`]*`", "", text), f"an f-string that is none: {text}"
    return text


def table(*cases: Bad):
    return pytest.mark.parametrize("bad", cases, ids=lambda bad: bad.name)


# ---------------------------------------------------------------------------------------- which argument is what


def _index(name, call, given, count, instead):
    return Bad(
        name, call, ValueError, (given, f"called with {count} positional"), ("index", f"to {count - 1}"), instead
    )


@table(
    _index("argnums too large", lambda: step(loss, None, 5)(W, X), "argnums was given 5", 2, "`argnums=0`"),
    _index("argnums too small", lambda: step(loss, None, -3)(W, X), "argnums was given -3", 2, "`argnums=0`"),
    _index("argnums a list", lambda: step(loss, None, [0])(W, X), "argnums was given [0]", 2, "`argnums=0`"),
    _index("argnums a name", lambda: step(loss, None, "w")(W, X), "argnums was given 'w'", 2, "`argnums=0`"),
    _index("argnums a boolean", lambda: step(loss, None, True)(W, X), "argnums was given True", 2, "`argnums=0`"),
    _index("argnums None", lambda: step(loss, None, None)(W, X), "argnums was given None", 2, "`argnums=0`"),
    _index("argnums a fraction", lambda: step(loss, None, 0.5)(W, X), "argnums was given 0.5", 2, "`argnums=0`"),
    _index(
        "one of argnums too large", lambda: step(loss, None, (0, 2))(W, X), "argnums was given (0, 2)", 2, "`argnums=0`"
    ),
    _index(
        "batch_argnums too large",
        lambda: step(batch_argnums=2)(W, X),
        "batch_argnums was given 2",
        2,
        "`batch_argnums=1`",
    ),
    _index(
        "batch given by keyword",
        lambda: step()(W, x=X),
        "batch_argnums was given 1",
        1,
        "pass that argument by position",
    ),
    _index(
        "prng_argnums too large",
        lambda: step(keyed, prng_argnums=3)(W, X, KEY),
        "prng_argnums was given 3",
        3,
        "`prng_argnums=2`",
    ),
    _index(
        "prng_argnums None", lambda: step(prng_argnums=None)(W, X), "prng_argnums was given None", 2, "prng_argnums="
    ),
    Bad(
        "an argument both parameter and batch",
        lambda: step(loss, None, 1)(W, X),
        ValueError,
        ("argument 1", "both as argnums and as batch_argnums"),
        "one of parameters, batch or random key",
        "`argnums=0, batch_argnums=1, prng_argnums=2`",
    ),
    Bad(
        "an argument both batch and key",
        lambda: step(prng_argnums=-1)(W, X),
        ValueError,
        ("argument 1", "both as batch_argnums and as prng_argnums"),
        "one of parameters, batch or random key",
        "`argnums=0, batch_argnums=1, prng_argnums=2`",
    ),
    Bad(
        "a parameter twice",
        lambda: step(loss, None, (0, -2))(W, X),
        ValueError,
        "argnums was given (0, -2)",
        "expected distinct indices",
        "Write each argument once",
    ),
)
def test_which_argument_is_what(bad):
    check(bad)


def test_a_call_without_arguments():
    """ "An index from 0 to -1" helps nobody."""
    text = check(
        Bad(
            "nothing",
            lambda: step()(w=W, x=X),
            ValueError,
            "without positional arguments",
            "expected those of the loss",
            "`step(params, batch)`",
        )
    )
    assert "-1" not in text


# ---------------------------------------------------------------------------------------- parameters


@table(
    *(
        Bad(
            f"{np.dtype(dtype).name} parameters",
            lambda dtype=dtype: step(lambda p, x: loss(p["w"][0], x))({"w": [W.astype(dtype)]}, X),
            TypeError,
            ("parameter ['w'][0]", np.dtype(dtype).name),
            "expected a float dtype",
            ("`x.astype(jnp.float32)`", "`argnums`"),
        )
        for dtype in (np.int32, np.int8, np.uint8, bool)
    ),
    Bad(
        "a Python integer",
        lambda: step(lambda w, x: jnp.sum(x * w))(2, X),
        TypeError,
        ("parameter params", "int32"),
        "expected a float dtype",
        "`x.astype(jnp.float32)`",
    ),
    Bad(
        "a key as parameter",
        lambda: step()(KEY, X),
        TypeError,
        "key<fry>",
        "expected a float dtype",
        "`argnums`",
    ),
    Bad(
        "a name among the parameters",
        lambda: step(lambda p, x: loss(p["w"], x))({"w": W, "activation": "tanh"}, X),
        TypeError,
        "parameter ['activation'] is str",
        "expected an array of floats",
        ("differentiated argument", "eqx.partition(model, eqx.is_inexact_array)"),
    ),
    Bad(
        "a function among the parameters",
        lambda: step(lambda p, x: loss(p[0], x))((W, jnp.tanh), X),
        TypeError,
        "parameter [1] is",
        "expected an array of floats",
        "eqx.partition",
    ),
    Bad(
        "an integer in the second of two arguments",
        lambda: step(lambda w, x, v: loss(w, x) + v["n"], None, (0, 2))(W, X, {"n": np.int32(3)}),
        TypeError,
        ("['n']", "int32"),
        "expected a float dtype",
        "`argnums`",
    ),
)
def test_parameters(bad):
    check(bad)


def test_an_equinox_model_with_functions_in_it():
    """The most likely first mistake of a user of Equinox."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 1, key=KEY)
    with pytest.raises(TypeError, match=r"parameter .*activation.*eqx\.partition"):
        step(lambda m, x: jnp.mean(jax.vmap(m)(x)))(model, X)


# ---------------------------------------------------------------------------------------- the batch


@table(
    Bad(
        "a scalar in the batch",
        lambda: step(lambda w, b: loss(w, b["x"]))(W, {"x": X, "weight": np.float32(2)}),
        ValueError,
        "a scalar at argument 1['weight']",
        "the examples on their leading axis",
        ("`batch_argnums`", "jnp.broadcast_to"),
    ),
    Bad(
        "a Python number in the batch",
        lambda: step(lambda w, b: loss(w, b[0]))(W, (X, 3.0)),
        ValueError,
        "a scalar at argument 1[1]",
        "the examples on their leading axis",
        "jnp.broadcast_to",
    ),
    Bad(
        "lists in place of arrays",
        lambda: step()(W, X.tolist()),
        ValueError,
        "a scalar at argument 1[0][0]",
        "expected arrays",
        "`batch_argnums`",
    ),
    Bad(
        "text in the batch",
        lambda: step(lambda w, b: loss(w, b["x"]))(W, {"x": X, "id": "a"}),
        TypeError,
        ("holds str", "at argument 1['id']"),
        "expected arrays",
        "`batch_argnums`",
    ),
    Bad(
        "an array of text",
        lambda: step(lambda w, b: loss(w, b["x"]))(W, {"x": X, "id": np.array(["a", "b", "c", "d"])}),
        TypeError,
        ("argument 1['id']", "<U1"),
        "expected arrays",
        "`batch_argnums`",
    ),
    Bad(
        "different leading axes",
        lambda: step(lambda w, b: loss(w, b["x"]))(W, {"x": X, "y": X[:2]}),
        ValueError,
        ("4 at argument 1['x']", "2 at argument 1['y']"),
        "expected one size",
        "`batch_argnums`",
    ),
    Bad(
        "different leading axes of two arguments",
        lambda: step(lambda w, x, y: loss(w, x), batch_argnums=(1, 2))(W, X, X[:3]),
        ValueError,
        ("4 at argument 1", "3 at argument 2"),
        "expected one size",
        "`batch_argnums`",
    ),
    Bad(
        "an empty batch",
        lambda: step()(W, X[:0]),
        ValueError,
        "the batch is empty (leading axis 0)",
        "expected at least one example",
        "Skip the call",
    ),
    Bad(
        "no arrays",
        lambda: step(lambda w, b: jnp.sum(w))(W, {}),
        ValueError,
        "the batch holds no arrays",
        "expected at least one array",
        "`batch_argnums`",
    ),
    Bad(
        "no batch argument",
        lambda: step(batch_argnums=())(W, X),
        ValueError,
        "the batch holds no arrays",
        "expected at least one array",
        "`batch_argnums`",
    ),
)
def test_batch(bad):
    check(bad)


@table(
    *(
        Bad(
            f"{name} where a key belongs",
            lambda given=given: step(keyed, prng_argnums=2)(W, X, given),
            TypeError,
            ("prng_argnums", said),
            "expected one random key",
            ("`jax.random.key(0)`", "`batch_argnums`"),
        )
        for name, given, said in [
            ("a seed", 0, "int"),
            ("floats", np.ones(2, np.float32), "float32 of shape (2,)"),
            ("a stack of keys", jax.random.split(KEY, 4), "key<fry> of shape (4,)"),
            ("a stack of raw keys", jax.random.split(jax.random.PRNGKey(0), 4), "uint32 of shape (4, 2)"),
            ("too many words", np.ones(3, np.uint32), "uint32 of shape (3,)"),
        ]
    )
)
def test_keys(bad):
    check(bad)


# ---------------------------------------------------------------------------------------- what the loss returns

AVERAGE = "`jnp.mean(per_token_loss)`"
REAL = "`return jnp.real(value).astype(jnp.float32)`"


@table(
    *(
        Bad(f"the loss returns {name}", lambda fn=fn: step(fn)(W, X), TypeError, given, expected, instead)
        for name, fn, given, expected, instead in [
            ("a vector", lambda w, x: jnp.sum(x @ w, -1), "shape (1,) and dtype float32", "scalar", AVERAGE),
            ("a matrix", lambda w, x: x @ w, "shape (1, 2)", "scalar", AVERAGE),
            ("nothing", lambda w, x: None, "NoneType", "scalar", AVERAGE),
            ("text", lambda w, x: "low", "str 'low'", "scalar", AVERAGE),
            ("a dict", lambda w, x: {"loss": loss(w, x)}, "dict", "scalar", AVERAGE),
            ("a pair", lambda w, x: (loss(w, x), x), "a tuple (", "scalar", ("`return value, aux`", "`has_aux=True`")),
            ("a count", lambda w, x: jnp.sum(x > 0), "int32", "real float", REAL),
            ("a predicate", lambda w, x: jnp.all(x > 0), "bool", "real float", REAL),
            ("a complex number", lambda w, x: loss(w, x) * 1j, "complex64", "real float", REAL),
            ("a Python integer", lambda w, x: 3, "int", "real float", "astype(jnp.float32)"),
        ]
    ),
    *(
        Bad(f"aux: {name}", lambda fn=fn: step(fn, None, 0, True)(W, X), TypeError, given, expected, instead)
        for name, fn, given, expected, instead in [
            ("none", loss, "shape () and dtype float32", "a pair (loss, aux)", "`return loss, aux`"),
            ("three results", lambda w, x: (loss(w, x), x, x), "a tuple (", "a pair (loss, aux)", "`return loss, aux`"),
            ("a list", lambda w, x: [loss(w, x), x], "list", "a pair (loss, aux)", "`return loss, aux`"),
            ("swapped", lambda w, x: (x, loss(w, x)), "shape (1, 3)", "scalar", "`jnp.mean"),
            (
                "text",
                lambda w, x: (loss(w, x), {"layer": ["relu"]}),
                "aux['layer'][0] is str 'relu'",
                "pytree of arrays",
                "outside",
            ),
            ("a function", lambda w, x: (loss(w, x), jnp.tanh), "aux is", "pytree of arrays", "outside of the loss"),
        ]
    ),
)
def test_what_the_loss_returns(bad):
    check(bad)


@pytest.mark.parametrize("impl", ["surgery", "vmap"])
def test_both_ways_refuse_the_same_loss(impl):
    """The twin must not accept what surgery refuses, or prototypes do not carry over."""
    with pytest.raises(TypeError, match="must return a scalar"):
        step(lambda w, x: x @ w, impl=impl)(W, X)


def test_errors_of_the_loss_itself_come_through():
    """The user's own exception, as it was raised, with its line in the traceback."""

    def broken(w, x):
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        step(broken)(W, X)


# ---------------------------------------------------------------------------------------- what is asked for


def mine(g):
    return g


@table(
    Bad(
        "a name in place of a statistic",
        lambda: step(loss, {"g": "mean"}),
        TypeError,
        "stats['g'] is str 'mean'",
        "expected a statistic, or a pytree of statistics",
        '`{"g": pg.mean(), "g2": pg.second_moment()}`',
    ),
    Bad(
        "a number in place of a statistic",
        lambda: step(loss, [pg.mean(), 2]),
        TypeError,
        "stats[1] is int 2",
        "expected a statistic",
        "pg.mean()",
    ),
    Bad(
        "a statistic that was not called",
        lambda: step(loss, {"g": (pg.mean,)}),
        TypeError,
        "stats['g'][0] is the function mean",
        "a statistic",
        "`pg.mean()`",
    ),
    Bad(
        "a lambda in place of a statistic",
        lambda: step(loss, {"g": lambda g: g**2}),
        TypeError,
        "stats['g'] is",
        "a statistic",
        "pg.elementwise(",
    ),
    Bad(
        "a function of the user's in place of a statistic",
        lambda: step(loss, mine),
        TypeError,
        ("stats is", "mine"),
        "a statistic",
        "pg.elementwise(",
    ),
    Bad(
        "no loss",
        lambda: step(None),
        TypeError,
        "given NoneType",
        "expected a loss function",
        "value_and_stats(loss, stats)",
    ),
    Bad(
        "loss and statistics exchanged",
        lambda: pg.value_and_stats(pg.mean(), loss),
        TypeError,
        "as the first argument",
        "expected a loss function",
        "`pg.value_and_stats(loss, stats)(params, batch)`",
    ),
    *(
        Bad(
            f"{name}={given!r}",
            lambda name=name, given=given: step(**{name: given}),
            ValueError,
            f"unknown {name} {given!r}",
            expected,
            f'`{name}="{instead}"`',
        )
        for name, given, expected, instead in [
            ("granularity", "tokens", 'expected one of "example", "token"', "example"),
            ("granularity", None, 'expected one of "example", "token"', "example"),
            ("granularity", ["token"], 'expected one of "example", "token"', "example"),
            ("impl", "fast", 'expected one of "auto", "surgery", "vmap"', "auto"),
            ("impl", 0, 'expected one of "auto", "surgery", "vmap"', "auto"),
        ]
    ),
    *(
        Bad(
            f"{name}={given!r}",
            lambda name=name, given=given: step(**{name: given}),
            ValueError,
            f"{name} was given {given!r}",
            "expected None or a positive integer",
            instead,
        )
        for name, instead in [("microbatch_size", "`microbatch_size=32`"), ("chunk_bytes", "8 << 20")]
        for given in (0, -1, 2.0, True, "all")
    ),
    Bad(
        "tokens of the twin",
        lambda: step(granularity="token", impl="vmap"),
        ValueError,
        ('impl="vmap"', 'given granularity="token"'),
        "whole examples only",
        ('impl="surgery"', 'granularity="example"'),
    ),
    *(
        Bad(
            f"{name} over tokens",
            lambda s=s: step(loss, {"a": s}, granularity="token"),
            ValueError,
            ("stats['a']", repr(s)),
            'no meaning at granularity="token"',
            'granularity="example"',
        )
        for name, s in [
            ("norms", pg.norms()),
            ("leaf norms", pg.norms(per_leaf=True)),
            ("gradients", pg.per_example()),
            ("dot", pg.dot(W)),
            ("cosine", pg.cosine()),
            ("clipping", pg.clipped_mean(1.0)),
            ("normalising", pg.normalized_mean()),
            ("gram", pg.gram()),
            ("projections", pg.projections(KEY, 8)),
            ("noise scale", pg.noise_scale()),
        ]
    ),
    Bad(
        "a statistic with an argument that was not called",
        lambda: step(loss, pg.quantile),
        TypeError,
        "stats is the function quantile",
        "a statistic",
        "`pg.quantile(q)`",
    ),
)
def test_what_is_asked_for(bad):
    check(bad)


@pytest.mark.parametrize("function", [pg.value_and_stats, pg.grad_stats, pg.explain, pg.check])
def test_every_function_checks_its_request_at_once(function):
    """Errors of the request come where the request is written, not where it is first called."""
    with pytest.raises(TypeError, match=r"`pg\.mean\(\)`"):
        function(loss, pg.mean)
    with pytest.raises(ValueError, match="unknown granularity 'word'"):
        function(loss, pg.mean(), granularity="word")


@pytest.mark.parametrize("function", [pg.value_and_stats, pg.grad_stats, pg.explain, pg.check])
def test_a_misspelt_option(function):
    """The error names the option and nothing internal."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'microbatch'") as caught:
        function(loss, pg.mean(), microbatch=3)
    assert "Request" not in str(caught.value)


# ---------------------------------------------------------------------------------------- statistics

FEW = "examples, but the batch has"


@table(
    *(
        Bad(
            f"{s!r} of {count}",
            lambda s=s, count=count: step(loss, {"a": s})(W, X[:count]),
            ValueError,
            (repr(s), f"{FEW} {count}"),
            f"needs at least {needed} {FEW}",
            instead,
        )
        for s, count, needed, instead in [
            (pg.variance(ddof=1), 1, 2, ("`pg.variance(ddof=0)`", "a larger batch")),
            (pg.std(ddof=1), 1, 2, ("ddof=0", "a larger batch")),
            (pg.std(ddof=4), 4, 5, ("ddof=0", "a larger batch")),
            (pg.mean_square(), 1, 2, ("`pg.mean_square(unbiased=False)`", "a larger batch")),
            (pg.snr(), 1, 2, "a larger batch"),
            (pg.noise_scale(), 1, 2, "a larger batch"),
        ]
    ),
    *(
        Bad(
            f"moment({k!r})",
            lambda k=k: pg.moment(k),
            ValueError,
            f"given {k!r}",
            "a positive integer k",
            "`pg.elementwise(lambda g: jnp.abs(g) ** p)`",
        )
        for k in (0, -1, 1.5, True, None, "2")
    ),
    *(
        Bad(
            f"{name}({ddof!r})",
            lambda name=name, ddof=ddof: getattr(pg, name)(ddof),
            ValueError,
            f"given {ddof!r}",
            f"{name}(ddof) takes a non-negative integer",
            f"`pg.{name}(ddof=1)`",
        )
        for name in ("variance", "std")
        for ddof in (-1, 0.5, True, None)
    ),
    *(
        Bad(
            f"elementwise({given!r})",
            lambda given=given: pg.elementwise(given),
            TypeError,
            f"given {type(given).__name__}",
            "takes a function of an array",
            "`pg.elementwise(jnp.tanh)`",
        )
        for given in (2, "tanh", None)
    ),
    *(
        Bad(
            f"elementwise: {name}",
            lambda fn=fn: step(loss, pg.elementwise(fn, name="mine"))(W, X),
            ValueError,
            ("elementwise(mine)", f"it returned {shape}"),
            "must return an array of the shape it is given",
            "`lambda g: jnp.log1p(jnp.abs(g))`",
        )
        for name, fn, shape in [("a sum", jnp.sum, "()"), ("a new axis", lambda g: g[None], "(1, ")]
    ),
)
def test_statistics(bad):
    check(bad)


def takes(name, call, given, expected, instead, error=ValueError):
    return Bad(name, call, error, given, expected, instead)


def in_parts(stat):
    return takes(
        f"{stat!r} in parts",
        lambda: step(loss, {"a": stat}, microbatch_size=3)(W, X),
        (repr(stat), "given microbatch_size=3"),
        "all 4 examples at once",
        "without microbatch_size",
    )


def complex_loss(w, x):
    return jnp.mean(jnp.abs(x @ w) ** 2)


@table(
    *(
        takes(
            f"quantile({q!r})", lambda q=q: pg.quantile(q), f"given {q!r}", "numbers from 0 to 1", "`pg.quantile(0.9)`"
        )
        for q in (1.5, -0.1, [], [0.5, 2], "0.5", None, True, float("nan"), [[0.5]])
    ),
    *(
        takes(f"trimmed_mean({p!r})", lambda p=p: pg.trimmed_mean(p), f"given {p!r}", "0 ≤ p < 0.5", "`pg.median()`")
        for p in (0.5, -0.1, 1, "0.1", None, True, float("nan"))
    ),
    *(
        takes(
            f"histogram({e!r})",
            lambda e=e: pg.histogram(e),
            f"given {e!r}",
            "at least two increasing numbers",
            "`pg.histogram(np.linspace(-1, 1, 21))`",
        )
        for e in ([1], [], 10, [0, 0], [1, 0], [0, float("nan")], None, ["a", "b"], [[0, 1], [1, 2]])
    ),
    *(
        takes(
            f"clipped_mean({c!r})",
            lambda c=c: pg.clipped_mean(c),
            f"given {c!r}",
            "a positive number",
            "`pg.clipped_mean(1.0)`",
        )
        for c in (0, -1.0, float("nan"), "1", None, True, np.ones(3), [1.0])
    ),
    *(
        takes(
            f"projections(key, {d!r})",
            lambda d=d: pg.projections(KEY, d),
            f"given {d!r}",
            "a positive integer dim",
            "`pg.projections(key, 512)`",
        )
        for d in (0, -1, 2.0, None, True)
    ),
    *(
        takes(
            f"projections({name})",
            lambda k=k: pg.projections(k, 8),
            f"given {type(k).__name__}",
            "one random key",
            "`pg.projections(jax.random.key(0), 512)`",
            TypeError,
        )
        for name, k in [("a number", 0), ("keys", jax.random.split(KEY)), ("floats", np.ones(2)), ("None", None)]
    ),
    takes("reduce(5)", lambda: pg.reduce(5), "given int", "a function of an array", "`pg.reduce(lambda g", TypeError),
    *(
        takes(
            f"reduce: {name}",
            lambda fn=fn: step(loss, pg.reduce(fn))(W, X),
            ("reduce(<lambda>)", f"it returned {shape}"),
            "must map [B, …] to […]",
            "`lambda g: jnp.std(g, axis=0)`",
        )
        for name, fn, shape in [("all axes", lambda g: jnp.sum(g), "()"), ("no axis", lambda g: g, "(4, ")]
    ),
    takes(
        "reduce: no where",
        lambda: masked(TRUE, stats=pg.reduce(lambda g: jnp.std(g, axis=0))),
        ("reduce(<lambda>)", "was given a mask"),
        "takes no `where`",
        "`lambda g, where=None: jnp.std(g, axis=0, where=where)`",
        TypeError,
    ),
    takes(
        "a tree that is not like the parameters",
        lambda: step(loss, pg.dot({"w": W}))(W, X),
        ("dot(tree)", "leaves ['w']"),
        "expected params",
        "`jax.tree.map(jnp.ones_like, params)`",
    ),
    takes(
        "a tree of other shapes",
        lambda: step(loss, pg.cosine(W.T))(W, X),
        ("cosine(tree)", "shape (2, 3)"),
        "expected (3, 2)",
        "the parameters' shapes",
    ),
    takes(
        "a complex tree",
        lambda: step(loss, pg.dot(1j * W))(W, X),
        ("dot(tree)", "at params it is complex"),
        "where the parameter is float32",
        "its real and its imaginary part",
        TypeError,
    ),
    takes(
        "noise of no leaf",
        lambda: step(lambda p, x: loss(p["w"], x), pg.noise_scale(only="norm"))({"w": W}, X),
        "pg.noise_scale(only='norm') matches no parameter",
        "there are ['w']",
        '`only="norm|scale"`',
    ),
    takes(
        "noise of a list of leaves",
        lambda: pg.noise_scale(only=["norm"]),
        "given ['norm']",
        "a regular expression or a function",
        '`pg.noise_scale(only="norm|scale")`',
        TypeError,
    ),
    *map(
        in_parts,
        [pg.median(), pg.mad(), pg.quantile(0.1), pg.trimmed_mean(0.1), pg.reduce(loss), pg.cosine(), pg.gram()],
    ),
    *(
        takes(
            f"{s!r} of complex parameters",
            lambda s=s: step(complex_loss, s)(W.astype(np.complex64), X),
            f"{name} orders the values of a coordinate; given complex",
            "which have no order",
            "two parameters",
            TypeError,
        )
        for name, s in [
            ("median, mad, quantile and trimmed_mean", pg.median()),
            ("median, mad, quantile and trimmed_mean", pg.trimmed_mean(0.1)),
            ("histogram", pg.histogram([0, 1])),
        ]
    ),
    takes(
        "projections of complex parameters",
        lambda: step(complex_loss, pg.projections(KEY, 8))(W.astype(np.complex64), X),
        "given complex ones",
        "projections takes real parameters",
        "two parameters",
        TypeError,
    ),
)
def test_the_catalogue(bad):
    check(bad)


def test_a_function_of_all_examples_sees_all_examples():
    """Not one of them, while its shapes are worked out: medians of means divide the batch into groups."""
    groups = pg.reduce(lambda g: jnp.median(jnp.mean(g.reshape(2, 2, *g.shape[1:]), axis=1), axis=0))
    for options in ({}, {"chunk_bytes": 1}, {"impl": "vmap"}):
        stats = {"a": groups, "g": pg.mean()}
        _, out = step(lambda p, x: loss(p["w"], x), stats, **options)({"w": W, "unused": W}, X)
        jax.tree.map(lambda a, g: np.testing.assert_allclose(a, g, rtol=1e-5), out["a"], out["g"])  # of two groups


def test_a_batch_in_one_part_needs_no_merging():
    """microbatch_size=B is the whole batch."""
    step(loss, (pg.median(), pg.gram()), microbatch_size=4)(W, X)


def test_variance_of_tokens_of_one_example():
    """One example of several tokens has a variance over tokens: no error."""
    _, out = step(lambda w, x: loss(w, x), pg.variance(ddof=1), granularity="token")(W, np.ones((1, 5, 3), np.float32))
    assert np.isfinite(out).all()


# ---------------------------------------------------------------------------------------- masks


def masked(mask, loss=loss, args=(W, X), **options):
    return step(loss, **options)(*args, mask=mask)


def has_own_mask(w, x, mask=None):
    return loss(w, x) if mask is None else jnp.sum(mask) * loss(w, x)


def has_own_mask_last(w, x, scale, mask=None):
    return scale * has_own_mask(w, x, mask)


@table(
    *(
        Bad(
            f"a mask of shape {shape}",
            lambda shape=shape: masked(np.ones(shape, bool)),
            ValueError,
            (f"shape {shape}", "4 examples"),
            "expected shape (4,), one boolean per example",
            "masked in the loss itself",
        )
        for shape in [(3,), (5,), (4, 1), (4, 3), ()]
    ),
    Bad(
        "weights as a mask",
        lambda: masked(np.ones(4, np.float32)),
        TypeError,
        "dtype float32",
        "expected booleans",
        ("`mask > 0`", "the loss"),
    ),
    Bad("text as a mask", lambda: masked("all"), TypeError, "str 'all'", "expected booleans", "`mask="),
    Bad(
        "a mask of nothing",
        lambda: masked(np.zeros(4, bool)),
        ValueError,
        "leaves out every example",
        "expected at least one True",
        "Skip the call",
    ),
    Bad(
        "a mask of zeros",
        lambda: masked([0, 0, 0, 0]),
        ValueError,
        "leaves out every example",
        "expected at least one True",
        "Skip the call",
    ),
    Bad(
        "the loss has a mask of its own",
        lambda: masked(TRUE, has_own_mask),
        ValueError,
        "the loss has an argument `mask` of its own",
        "which examples count",
        "by position, or rename it",
    ),
    Bad(
        "the loss has a mask of its own, after another argument",
        lambda: masked(TRUE, has_own_mask_last, (W, X, 2.0)),
        ValueError,
        "the loss has an argument `mask` of its own",
        "which examples count",
        "by position, or rename it",
    ),
)
def test_masks(bad):
    check(bad)


def test_the_losses_own_mask_by_position():
    """What the error recommends works: the loss's mask by position, the step's by name."""
    got = step(has_own_mask)(W, X, np.ones(3), mask=[True, False, True, True])
    want = step(lambda w, x: 3 * loss(w, x))(W, X[[0, 2, 3]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_a_mask_of_nothing_under_jit():
    """Where the values cannot be seen all is NaN, as the text of the error promises; zeros would look like data."""
    run = jax.jit(lambda m: step(loss, [pg.mean(), pg.second_moment(), pg.variance()])(W, X, mask=m))
    value, out = run(np.zeros(4, bool))
    assert np.isnan(value)
    assert all(np.isnan(a).all() for a in out)


def test_a_mask_that_leaves_too_few_for_ddof():
    """The count is not known when tracing: NaN, not infinity and not zero."""
    _, out = step(loss, [pg.variance(ddof=1), pg.std(ddof=2), pg.snr(), pg.mean_square()])(W, X, mask=[0, 1, 0, 0])
    assert all(np.isnan(a).all() for a in out)


# ---------------------------------------------------------------------------------------- impure losses


def effect_free(text):
    assert "side effects" in text
    assert "expected a pure function" in text
    assert '`impl="vmap"`' in text
    assert "aux" in text


def prints(w, x):
    jax.debug.print("{}", x.sum())
    return loss(w, x)


def calls_back(w, x):
    extra = io_callback(lambda a: np.float32(a.sum()), jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(x))
    return loss(w, x) + extra


def prints_in_a_loop(w, x):
    def body(h, _):
        jax.debug.print("{}", h.sum())
        return jnp.tanh(h @ w @ w.T), None

    return jnp.mean(jax.lax.scan(body, x, length=2)[0])


@pytest.mark.parametrize("function", [pg.value_and_stats, pg.explain, pg.check])
@pytest.mark.parametrize(
    "impure, effect", [(prints, "DebugEffect"), (calls_back, "IOEffect"), (prints_in_a_loop, "DebugEffect")]
)
def test_side_effects(function, impure, effect):
    """Prints and callbacks would run never, or once per example, or (in a loop) be lost: refused, by name."""
    with pytest.raises(ValueError) as caught:
        function(impure, pg.mean())(W, X)
    effect_free(str(caught.value))
    assert effect in str(caught.value)


def test_side_effects_of_the_twin(capfd):
    """What the error recommends works."""
    _, out = step(prints, impl="vmap")(W, X)
    jax.effects_barrier()
    np.testing.assert_allclose(out, step(impl="vmap")(W, X)[1])
    assert len(capfd.readouterr().out.split()) == 4


@pytest.mark.parametrize("impl", ["surgery", "vmap"])
def test_a_loss_that_reads_what_it_leaked(impl):
    """A tracer of an earlier call, used in this one."""
    store = {}

    def leaks(w, x):
        if "seen" in store:
            return jnp.mean(x @ w + store["seen"])
        store["seen"] = jnp.tanh(x @ w)
        return jnp.mean(store["seen"])

    run = step(leaks, impl=impl)
    run(W, X)
    with pytest.raises(ValueError) as caught:
        run(W, X)
    text = str(caught.value)
    assert "leaks tracers" in text
    assert "expected a pure function" in text
    assert "`has_aux=True`" in text


def test_a_loss_that_only_stores_a_tracer_is_right():
    """Storing harms nobody until it is read: the numbers are those of the pure loss, and `check` says what is wrong."""
    kept = []

    def stores(w, x):
        kept.append(x @ w)
        return loss(w, x)

    np.testing.assert_array_equal(step(stores)(W, X)[1], step()(W, X)[1])
    report = pg.check(stores, pg.mean())(W, X)
    assert not report.ok
    assert "leaks tracers" in str(report)
    assert "aux" in str(report)


# ---------------------------------------------------------------------------------------- tokens


def two_lengths(w, x):
    """Rows 0-2 are used at one position, row 3 at five."""
    return jnp.mean(jnp.tanh(x.mean(1) @ w[:3])) + jnp.mean(jnp.tanh(x[..., :1] @ w[3:]))


@table(
    Bad(
        "slices used at different numbers of positions",
        lambda: step(two_lengths, granularity="token")(np.ones((4, 2), np.float32), np.ones((4, 5, 3), np.float32)),
        ValueError,
        ("shape (4, 2)", "[1, 5]", "test_errors.py"),
        "expected one number",
        ('granularity="example"', "parameters of their own"),
    ),
)
def test_tokens(bad):
    check(bad)


# ---------------------------------------------------------------------------------------- the errors' own form


def test_statistics_are_named_as_they_are_written():
    """Errors and `explain` speak of a statistic by its call."""
    written = [
        "pg.mean()", "pg.second_moment()", "pg.moment(3)", "pg.abs_mean()", "pg.sign_mean()", "pg.variance(ddof=1)",
        "pg.std(ddof=0)", "pg.mean_square()", "pg.mean_square(unbiased=False)", "pg.snr()", "pg.norms()",
        "pg.norms(per_leaf=True)", "pg.losses()", "pg.per_example()",
    ]  # fmt: skip
    for text in written:
        made = eval(text, {"pg": pg})
        assert isinstance(made, Statistic)
        assert repr(made) == text
    assert repr(pg.elementwise(jnp.tanh)) == "pg.elementwise(tanh)"
