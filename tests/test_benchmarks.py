"""The benchmark measures what it says: models, columns, interleaving, records, and the README that is written from them."""

import inspect
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import __main__ as command
from benchmarks import agreement, models, peers, profiling, record, render, screen, timing
from benchmarks.columns import ADAM, COLUMNS, EVE, JUDGED, PLAIN, STEPS, TWIN

import oracle
import pergrad as pg

F32, XLA = {"dtype": "float32"}, {"dtype": "float32", "attention": "xla"}
TINY = {
    "gpt": {"vocab": 11, "width": 8, "layers": 2, "heads": 2, "length": 5, "remat": False, **XLA},
    "translation": {"vocab": 11, "width": 8, "layers": 1, "heads": 2, "length": 4, **XLA},
    "vit": {"image": 8, "patch": 4, "width": 8, "layers": 1, "heads": 2, "classes": 3, **XLA},
    "cnn": {"image": (8, 8, 3), "channels": (4, 5), "hidden": 6, "classes": 3, **F32},
    "resnet": {"image": 16, "width": 4, "depths": (1, 1), "groups": 2, "classes": 3, **F32},
    "pixelcnn": {"image": 4, "width": 4, "scales": 1, "resnets": 1, "mixtures": 2, **F32},
    "lstm": {"vocab": 11, "width": 4, "length": 3, **F32},
    "mlp": {"sizes": (5, 6, 3), **F32},
}
FAMILIES = {row.family: row.build.func for row in models.ROWS}


def quick(fn):
    return jax.jit(fn, compiler_options=oracle.QUICK_TO_COMPILE)


def close(tree, expected, limit=1e-4):
    return agreement.relative_error(jax.device_get(tree), jax.device_get(expected)) < limit


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_of_every_family_agree(family):
    """A model of the benchmark is not the mean of its examples' losses, or pergrad is wrong on it."""
    loss, params, batch = FAMILIES[family](**TINY[family], batch=3)
    names = (PLAIN, JUDGED, TWIN)
    found = quick(lambda *args: [COLUMNS[name](loss)(*args) for name in names])(params, batch)
    (value, plain), (ours_value, ours), (_, twin) = found
    assert close(value, ours_value) and close(plain["g"], twin["g"])
    assert close(ours["g"], twin["g"]) and close(ours["g2"], twin["g2"])


def test_every_column_and_step_agrees():
    """Columns that only one family checks: statistics against the twin's, and steps against optax on the twin's mean."""
    loss, params, batch = models.mlp(**TINY["mlp"], batch=16)
    twin = {"clipped": pg.clipped_mean(1.0), "norms": pg.norms(), "sign": pg.sign_mean()}

    def everything(params, batch):
        steps = {}
        for name, make in STEPS.items():
            step, start = make(loss)
            (moved, _), value = step((params, start(params)[1]), batch)
            steps[name] = jax.tree.map(jnp.subtract, moved, params), value
        found = {name: make(loss)(params, batch) for name, make in COLUMNS.items()}
        return found, steps, pg.grad_stats(loss, twin, impl="vmap")(params, batch)

    found, steps, expected = quick(everything)(params, batch)
    _, truth = found[TWIN]
    for name, (value, results) in found.items():
        assert close(value, found[PLAIN][0]), name
        for key, got in results.items():
            assert close(got, {**truth, **expected}[key]), (name, key)
    for name, (moved, value) in steps.items():
        assert close(value, found[PLAIN][0]), name
        # The first step of each goes against the mean gradient, and by Adam and by Eve at most the learning rate.
        assert all((np.sign(m) * np.sign(g) <= 0).all() for m, g in zip(*map(jax.tree.leaves, (moved, truth["g"])))), (
            name
        )
    assert all(float(jnp.abs(m).max()) > 0 for m in jax.tree.leaves(steps[EVE][0]))


class Shapes(models.Init):
    """In the place of `Init`: arrays that are traced and never made."""

    weight = lambda self, *shape, fan_in=None: jnp.zeros(shape)
    normal = lambda self, *shape: jnp.zeros(shape)
    integers = lambda self, high, *shape: jnp.zeros(shape, jnp.int32)


# Published sizes, where a row bears a published name. Heads are not tied: 38.6 million more for the first, 51.5 for the other.
SIZES = {"gpt-124m-t256": 124.4e6 + 38.6e6, "gpt-350m-t512": 354.8e6 + 51.5e6, "vit-s": 22.0e6, "resnet18": 11.7e6}


@pytest.mark.parametrize("row", models.ROWS, ids=lambda row: f"{row.name}-{row.size}")
def test_every_row_builds_and_traces(row, monkeypatch):
    """A large row would only fail on the machine that it is meant for."""
    inspect.signature(FAMILIES[row.family]).bind(**row.settings)
    assert set(TINY[row.family]) | {"batch"} == set(row.settings), "the tiny model is not of the same arguments"
    monkeypatch.setattr(models, "Init", Shapes)
    settings = row.settings | (
        {"attention": "xla"} if "attention" in row.settings else {}
    )  # cuDNN's needs a GPU to trace
    losses = []

    def build():
        loss, params, batch = FAMILIES[row.family](**settings)
        losses.append(loss)
        return params, batch

    params, batch = jax.eval_shape(build)
    value, out = jax.eval_shape(COLUMNS[JUDGED](losses[0]), params, batch)
    assert value.shape == () and jax.tree.structure(out["g2"]) == jax.tree.structure(params)
    assert {x.shape[0] for x in jax.tree.leaves(batch)} == {row.batch_size}
    if row.name in SIZES:
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == pytest.approx(SIZES[row.name], rel=0.01)


def test_pixelcnn_sees_only_what_came_before(monkeypatch):
    """Shifts and paddings of the two streams: a density in which a pixel sees itself means nothing."""
    outputs = []
    monkeypatch.setattr(models, "logistic_mixture", lambda x, out, m: (outputs.append(out), out[0, 2, 1].sum())[1])
    loss, params, batch = models.pixelcnn(**TINY["pixelcnn"] | {"scales": 2}, batch=1)
    gradient = quick(jax.grad(loss, argnums=1))(params, batch)
    seen = np.abs(np.asarray(gradient[0])).sum(-1) > 0
    before = np.arange(16).reshape(4, 4) < 2 * 4 + 1
    assert (seen == before).all()


def test_logistic_mixture_is_a_probability():
    """Summed over the 256 values of blue, what remains (of red and green) does not depend on the parameters of blue."""
    levels = jnp.arange(256) / 127.5 - 1
    pixels = jnp.stack([jnp.full(256, 0.2), jnp.full(256, -0.7), levels], -1)[:, None, None, None]
    total = jax.jit(lambda out: jnp.sum(jax.vmap(lambda x: jnp.exp(-3 * models.logistic_mixture(x, out, 2)))(pixels)))
    first = jnp.linspace(-1.0, 1.0, 20)[None, None, None]
    other = first.at[..., 2 + 6 * 2 :].add(jnp.array([0.5, -0.4, 1.0, -1.0, 0.3, 0.9]))
    assert float(total(first)) == pytest.approx(float(total(other)), rel=1e-3)


# ---------------------------------------------------------------------------------- timing


class Clock:
    """Time that passes only when something takes it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def takes(self, seconds, calls=None):
        def run():
            self.now += seconds
            if calls is not None:
                calls.append(seconds)

        return run


def test_functions_take_turns(monkeypatch):
    """Timed one after the other instead of in rounds, a slow minute would fall on one of them."""
    clock, calls = Clock(monkeypatch), []
    functions = {"a": clock.takes(1.0, calls), "b": clock.takes(2.0, calls)}
    seconds, errors = timing.run_all(functions, 3, at_least=0.1, at_most=100.0)
    assert calls[4:] == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]  # after two calls of each to warm up
    assert seconds == {"a": [1.0] * 3, "b": [2.0] * 3} and not errors


def test_short_calls_are_repeated_and_long_ones_are_not(monkeypatch):
    clock, short, long = Clock(monkeypatch), [], []
    functions = {"short": clock.takes(0.01, short), "long": clock.takes(5.0, long)}
    seconds, _ = timing.run_all(functions, 3, at_least=0.05, at_most=3.0)
    assert len(short) == 2 + 3 * 5 and len(long) == 1 + 1
    assert seconds["short"] == pytest.approx([0.01] * 3) and seconds["long"] == [5.0]


def test_what_fails_is_reported_in_one_line(monkeypatch):
    def fails():
        raise ValueError("no such thing in /some/place here\nand more")

    seconds, errors = timing.run_all({"bad": fails, "good": Clock(monkeypatch).takes(1.0)}, 1)
    assert errors == {"bad": "ValueError: no such thing in here"} and list(seconds) == ["good"]


def test_ratios_are_taken_within_rounds():
    """The median of ratios is not the ratio of medians when the machine slows down for a while."""
    assert timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])["median"] == 2.0
    assert timing.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5}


# ---------------------------------------------------------------------------------- records


@pytest.fixture
def tiny_row(monkeypatch):
    monkeypatch.setattr(models, "ROWS", [])
    models.row("mlp", "small", {"time": 1e9, "eve": 0.0}, models.mlp, steps=True, **TINY["mlp"], batch=8)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # so that what a run sets is undone
    monkeypatch.setattr(command, "warm_up", lambda columns: None)
    return models.ROWS[0]


def test_a_run_writes_its_record(tiny_row, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    command.main(["--repeats", "1", "--peers", "none", "--out", str(path)])
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert list(row["columns"]) == list(COLUMNS) and list(row["steps"]) == list(STEPS)
    for entry in (*row["columns"].values(), *row["steps"].values()):
        assert "error" not in entry
        assert entry["ratios"]["time"]["median"] > 0 and entry["memory"]["arguments"] > 0
    assert row["columns"][PLAIN]["ratios"]["time"]["median"] == row["steps"][ADAM]["ratios"]["time"]["median"] == 1
    assert row["agreement"]["agrees"] and row["parameters"] == 5 * 6 + 6 + 6 * 3 + 3
    assert {b["quantity"]: b["verdict"] for b in found["bars"]} == {"time": "met", "eve": "missed"}
    assert found["versions"]["jax"] == jax.__version__ and found["machine"]["platform"] == "cpu"
    shown = capsys.readouterr().out
    assert "mlp" in shown and "missed" in shown and "without PyTorch's side" in shown
    text = render.block(render.sections([path]))
    assert f"{row['columns'][JUDGED]['ratios']['time']['median']:.2f}" in text and "cpu.json" in text


def test_wrong_numbers_end_the_run_with_an_error(tiny_row, tmp_path, monkeypatch):
    def wrong(loss):
        right = COLUMNS[TWIN](loss)
        return lambda *args: jax.tree.map(lambda x: 1.01 * x, right(*args))

    monkeypatch.setitem(COLUMNS, JUDGED, wrong)
    with pytest.raises(SystemExit, match="WRONG NUMBERS in mlp"):
        command.main(["--repeats", "1", "--peers", "none", "--no-steps", "--out", str(tmp_path / "cpu.json")])


def test_unknown_names_are_refused(capsys):
    for argv, said in ((["--only", "none"], "no row 'none'"), (["--columns", "x"], "no column 'x'")):
        with pytest.raises(SystemExit):
            command.main([*argv, "--peers", "none"])
        assert said in capsys.readouterr().err


def test_peers_that_cannot_run_say_so(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "PyTorch is not installed" in peers.run(None, [], "cpu", 1)["skipped"]
    assert "failed" in peers.run("/nowhere/python", [], "cpu", 1)["skipped"]


def entry(time, memory=1.0, **more):
    ratios = {"time": {"median": time, "q1": time, "q3": time}, "memory": memory, "memory_with_results": memory}
    return {"seconds": {"median": time / 10, "q1": 0, "q3": 0}, "memory": {"temporary": 1}, "ratios": ratios, **more}


@pytest.fixture
def records(tmp_path):
    """Two files of one machine: a row that only the first has, and one that both have."""
    compiled = entry(1.25, 0.5)
    compiled["ratios"]["compile"] = {"median": 3.21}
    ours = {PLAIN: entry(1.0), JUDGED: compiled, TWIN: {"error": "E: a | b\nc"}}
    theirs = {"plain": entry(1.0), "torch.func": entry(2.5), "Opacus": entry(7.77)}
    checks = {"torch.func": {"agrees": True}, "Opacus": {"agrees": False}}
    finding = {"what": "a known case", "statistic": "second moment", "relative_error": 1.0, "wrong": True}
    shared = {"machine": {"platform": "cpu", "device": "Chip", "cpu": "Chip", "cores": 2, "devices": 1}, "dirty": False}
    paths = []
    for name, rows in (("first", ("gpt-a", "cnn")), ("second", ("cnn",))):
        found = shared | {
            "versions": {"jax": "1", "optax": "2"},
            "rows": [{"row": r, "columns": ours, "steps": {ADAM: entry(1.0), EVE: entry(1.1)}} for r in rows],
            "peers": {
                "versions": {},
                "rows": [{"row": "cnn", "columns": theirs, "agreement": checks}],
                "findings": [finding],
            },
        }
        for row in found["rows"]:
            row["steps"]["micro_adam_var"] = entry(1.3 if name == "first" else 1.4)
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(found))
    return paths


def test_the_rendered_block_hides_nothing(records):
    """A failure, wrong numbers or the file of a number would be missing from the README."""
    text = render.block(render.sections(records))
    lines = {line.split("|")[1].strip(): line for line in reversed(text.splitlines()) if line.startswith("|")}
    assert "1.25 / 0.50" in lines["gpt-a [a]"] and "2.50 / 1.00" in lines["cnn [b]"]
    assert "7.77" not in text and "wrong numbers" in text, "numbers that are wrong were shown"
    assert "fails <sup>1</sup>" in lines["gpt-a [a]"] and r"`E: a \| b c`" in text
    assert "first.json" in text and "second.json" in text and "a known case" in text
    assert "1.40" in text and "| 1.20 |" in text, "the later file counts; the published number stands beside it"


def test_the_plot_is_drawn(records, tmp_path):
    pytest.importorskip("matplotlib")
    (section,) = render.sections(records)
    series = {h: {n: render.found(line, *at) for n, line in section.lines.items()} for h, at in render.COMPARED.items()}
    drawn = render.plot.draw(series, tmp_path / "plot")
    assert [p.name for p in drawn] == ["plot-light.svg", "plot-dark.svg"]
    assert all(p.stat().st_size > 1000 and p.with_suffix(".png").stat().st_size > 1000 for p in drawn)


def test_only_the_block_of_the_readme_changes():
    before, after = "before\n", "\nafter"
    assert render.written(f"{before}{render.BEGIN}\nold\n{render.END}{after}", "new") == (
        f"{before}{render.BEGIN}\n\nnew\n\n{render.END}{after}"
    )
    with pytest.raises(SystemExit, match="no block"):
        render.written("nothing", "new")


def test_the_readme_says_what_its_files_say():
    """A number was changed by hand, or a record without rendering it again."""
    readme = render.README.read_text()
    block = readme.split(render.BEGIN, 1)[1].split(render.END, 1)[0].strip()
    paths = list(dict.fromkeys(re.findall(r"\]\((benchmarks/results/[^)]+\.json)\)", block)))
    assert block == render.block(render.sections([Path(render.ROOT / p) for p in paths])).strip()


def test_the_columns_of_the_readme_exist():
    """render.py must not import JAX, and so has names of its own for the columns."""
    ours = {column for whose, column in (*render.COMPARED.values(), *render.STATISTICS.values()) if whose == "rows"}
    assert ours <= set(COLUMNS) and (render.PLAIN, render.JUDGED) == (PLAIN, JUDGED)


def test_operations_are_traced_to_their_source(capsys):
    """The compiler's text is not a format that is promised: `profile` must not silently find nothing in it."""
    loss, params, batch = models.mlp(**TINY["mlp"], batch=8)
    text = quick(COLUMNS[JUDGED](loss)).lower(params, batch).compile().as_text()
    assert "model: dot_general" in profiling.operations(text).values()
    screen.print_table("title", ["a", "b"], [["1", "2\n3"]])
    assert "title" in capsys.readouterr().out


def test_leaves_are_grouped_by_name():
    _, params, _ = models.cnn(**TINY["cnn"], batch=2)
    found = profiling.groups(params)
    assert len(found["['convolutions'][…]['kernel']"]) == 2
    assert sorted(k for group in found.values() for k in group) == list(range(len(jax.tree.leaves(params))))


def test_records_are_numbered_by_day(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "HERE", tmp_path)
    first = record.new_path("cpu")
    first.parent.mkdir()
    first.write_text("")
    assert record.new_path("cpu").name == first.stem + "-2.json"
