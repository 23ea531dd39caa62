"""Studies: every one runs, goes on where it was, and judges as it says."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from pergrad_experiments import commands, report, runs, studies, tasks, train
from pergrad_experiments.errors import BadInput, Stopped
from pergrad_experiments.report import load
from pergrad_experiments.studies import common, eve_runtime, eve_vs_adam, lr_scaling, overhead, step_size, together
from pergrad_experiments.studies.common import Result, Results, judge, paired

# Two of five tasks, which are quick to compile; the others' smoke runs are among the tests of the tasks.
FEWER = {"eve-vs-adam": ("cifar10", "seq2seq"), "eve-runtime": ("seq2seq",)}


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory):
    """Studies run the same programs: compile each once."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0.0, -1)):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def smoke(name, seeds=1):
    return studies.plan(name, "smoke", seeds, FEWER.get(name, ()))


# ------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_study_runs(name, tmp_path, capsys):
    folder = tmp_path / "study"
    path = studies.run(smoke(name), folder)
    text = path.read_text()
    assert path == folder / "report.html" and "<h2>Claims</h2>" in text and text.count("<svg") > 1
    results = json.loads((folder / "results.json").read_text())
    jobs = smoke(name).jobs()
    assert [job["place"] for job in results["jobs"]] == [job.place for job in jobs.values()]
    for job in results["jobs"]:
        finite = job.get("result") or (job["state"] == "done" and job["final"] and job["loss"])
        assert finite, job
    assert results["claims"] and all(claim["verdict"] == "not tested" for claim in results["claims"])
    assert all(claim["measured"] not in ("", "–") for claim in results["claims"])
    assert list((folder / "figures").glob("*.svg"))
    # What is finished is not run again, and the report can be made anew.
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.json") if p.parent != folder}
    studies.run(smoke(name), folder, resume=True)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*.json") if p.parent != folder}
    capsys.readouterr()
    commands.Report((folder,), out=tmp_path / "again.html").run()
    assert capsys.readouterr().out.strip() == str(tmp_path / "again.html")
    assert "<h2>Claims</h2>" in (tmp_path / "again.html").read_text()


@pytest.mark.parametrize("preset", tasks.PRESETS)
@pytest.mark.parametrize("name", studies.STUDIES)
def test_grids(name, preset):
    """Every job of every preset is a valid configuration with a name of its own."""
    study = studies.module(name)
    listed = study.jobs(preset, 3, study.tasks(preset))
    names = [studies.job_name(job) for job in listed]
    assert len(set(names)) == len(names) > 0 and all(re.fullmatch(r"[A-Za-z0-9._+-]+", n) for n in names)
    assert studies.plan(name, preset).seeds == (1 if preset == "smoke" else 3)
    for job in listed:
        if isinstance(job, common.Train):
            assert job.config.seed == job.place["seed"] and job.config.preset == preset


def test_list_names_every_study(capsys):
    commands.Study("list").run()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(studies.STUDIES)


def test_equal_examples_and_rates_by_rule():
    listed = [job for job in lr_scaling.jobs("cpu", 1, ("quadratic",)) if job.place["optimizer"] == "adam"]
    assert len({job.config.steps * job.config.batch_size for job in listed}) == 1
    rates = {(j.place["rule"], j.place["batch_size"]): j.config.learning_rate for j in listed}
    base = rates["base", 128]
    assert rates["sqrt", 512] == pytest.approx(2 * base) and rates["sqrt", 32] == pytest.approx(base / 2)
    assert rates["linear", 512] == pytest.approx(4 * base) and rates["none", 2048] == base


# ------------------------------------------------------------------------------------- runs together


def quadratic(seed, rate, **settings):
    return tasks.configure(
        "quadratic", settings.pop("optimizer", "eve"), "smoke", seed=seed, learning_rate=rate, **settings
    )


def test_runs_together_are_those_of_single_runs(tmp_path):
    configs = [quadratic(s, r, warmup=3, schedule="cosine", clip_norm=2.0) for s in (0, 1) for r in (0.01, 0.1)]
    assert together.groups(configs) == [[0, 1, 2, 3]]
    together.run(configs, [tmp_path / f"{k}" for k in range(4)])
    for k in (0, 3):
        train.run(configs[k], tmp_path / f"single{k}", show=False)
        one, single = runs.read(tmp_path / f"{k}"), runs.read(tmp_path / f"single{k}")
        assert one.config == single.config and one.status["state"] == "done"
        for kind in ("train", "eval", "stats"):
            assert len(one.lines(kind)) == len(single.lines(kind)) > 0
            for a, b in zip(one.lines(kind), single.lines(kind)):
                same(a, b)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds", "throughput", "text"}:
            same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    else:
        assert a == b


def test_one_of_them_diverges(tmp_path):
    configs = [quadratic(0, rate, optimizer="optax.sgd") for rate in (0.01, 1e30, 0.02)]
    together.run(configs, [tmp_path / f"{k}" for k in range(3)])
    found = [load.run(tmp_path / f"{k}") for k in range(3)]
    assert [run.state for run in found][::2] == ["done", "done"]
    assert found[1].state.startswith("diverged at step") and len(found[1].train["loss"]) < 30
    assert np.isfinite(found[1].train["loss"]).all() and np.isfinite(found[2].train["loss"]).all()
    assert found[2].train["loss"][-1] != found[0].train["loss"][-1]


def test_what_cannot_be_together():
    configs = [
        quadratic(0, 0.1),
        quadratic(0, 0.1, batch_size=8),
        quadratic(1, 0.2),
        quadratic(0, 0.1, optimizer="adam"),
    ]
    cifar = [tasks.configure("cifar10", "adam", "smoke", seed=s) for s in (0, 1)]
    assert together.groups([*configs, *cifar]) == [[0, 2], [1], [3], [4], [5]]


# ------------------------------------------------------------------------------------- going on


def test_an_interrupted_study_goes_on(tmp_path, monkeypatch):
    asked = smoke("preconditioner", 2)
    whole = tmp_path / "whole"
    studies.run(asked, whole)
    folder, done = tmp_path / "cut", []
    really = together.run

    def cut_off(configs, folders):
        if done:
            runs.Folder.create(folders[0], configs[0], {}).append(
                [{"kind": "train", "step": 1, "examples": 1, "loss": 9.0}]
            )
            raise KeyboardInterrupt
        done.append(folders)
        really(configs, folders)

    monkeypatch.setattr(together, "run", cut_off)
    with pytest.raises(Stopped, match="--resume"):
        studies.run(asked, folder)
    monkeypatch.undo()
    kept = {p: (p / "metrics.jsonl").read_bytes() for p in done[0]}
    # A report of what there is says that it is not all.
    words = studies.write_report(folder, tmp_path / "part.html").read_text()
    assert "8 of 12 jobs are not finished" in words
    with pytest.raises(BadInput, match="write --resume"):
        studies.run(asked, folder)
    studies.run(asked, folder, resume=True)
    assert all((p / "metrics.jsonl").read_bytes() == content for p, content in kept.items())
    a, b = (json.loads((f / "results.json").read_text()) for f in (whole, folder))
    assert [j["final"] for j in a["jobs"]] == [j["final"] for j in b["jobs"]]
    # More seeds are fine, fewer are not.
    with pytest.raises(BadInput, match="--seeds 2"):
        studies.run(smoke("preconditioner", 1), folder, resume=True)
    studies.begin(folder, smoke("preconditioner", 3), True)
    with pytest.raises(BadInput, match="with study preconditioner"):
        studies.begin(folder, smoke("lr-scaling", 3), True)


# ------------------------------------------------------------------------------------- judging


@pytest.mark.parametrize(
    "found, verdict",
    [
        ((0.9, 0.85, 0.95, 3), "agrees"),
        ((1.1, 1.05, 1.2, 3), "disagrees"),
        ((0.9, 0.7, 1.1, 3), "undecided"),
        ((0.5, 0.5, 0.5, 1), "undecided"),
        ((math.nan, math.nan, math.nan, 0), "not tested"),
    ],
)
def test_judge(found, verdict):
    assert judge(found, 1.0, above=False) == verdict
    opposite = {"agrees": "disagrees", "disagrees": "agrees"}
    assert judge(found, 1.0, above=True) == opposite.get(verdict, verdict)


def test_paired_is_by_seed():
    a, b = {0: 1.0, 1: 10.0, 2: 100.0, 3: math.inf}, {0: 2.0, 1: 20.0, 2: 200.0, 3: 1.0}
    assert paired(a, b) == (pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5), 3)
    mean, low, high, n = paired(a, {0: 3.0, 1: 10.0}, log=False)
    assert (mean, n) == (-1.0, 2) and low < -1 < high


def result(place, final, task="cifar10", state="done", lengths=()):
    """A run that ended with this loss."""
    config = tasks.configure(task, "adam", "smoke", seed=place["seed"])
    metric, less = common.JUDGED_BY[task]
    evals = {"step": np.array([12.0]), "examples": np.array([192.0]), metric: np.array([final if less else -final])}
    trained = {name: np.zeros(0) for name in ("step", "examples", "loss", "throughput")}
    run = load.Run(None, config, {"state": state}, {}, {**trained, "step_length": np.array(lengths)}, evals, [], None)
    return Result("name", {"task": task, **place}, run=run)


def two(eve, adam, task="cifar10"):
    both = {"Eve": eve, "Adam": adam}
    return Results(result({"label": k, "seed": s}, v, task) for k, values in both.items() for s, v in enumerate(values))


@pytest.mark.parametrize("task", ["cifar10", "pong"])
def test_verdicts_follow_the_numbers(task):
    (claim,) = eve_vs_adam.findings(two([1.0, 1.1, 1.2], [1.5, 1.62, 1.7], task)).claims
    assert claim.verdict == "agrees" and "3 seeds" in claim.measured and "parameters" in claim.scale
    (claim,) = eve_vs_adam.findings(two([1.5, 1.62, 1.7], [1.0, 1.1, 1.2], task)).claims
    assert claim.verdict == "disagrees"
    (claim,) = eve_vs_adam.findings(two([1.0, 1.7, 1.2], [1.1, 1.2, 1.3], task)).claims
    assert claim.verdict == "undecided"
    (claim,) = eve_vs_adam.findings(two([1.0], [2.0], task)).claims
    assert claim.verdict == "undecided" and "no interval" in claim.measured


def test_best_learning_rate():
    finals = {0.1: 2.0, 0.2: 1.0, 0.4: 3.0}
    results = [result({"learning_rate": r, "seed": s}, f + s / 10) for r, f in finals.items() for s in (0, 1)]
    chosen, found, remark = common.best(Results(results), "learning_rate")
    assert chosen == {"learning_rate": 0.2} and len(found.items) == 2 and remark == ""
    results[2] = result({"learning_rate": 0.2, "seed": 0}, 1.0, state="diverged")
    chosen, _, remark = common.best(Results(results), "learning_rate")
    assert chosen == {"learning_rate": 0.1} and "end of the grid" in remark
    diverged = [result({"learning_rate": 0.1, "seed": 0}, 1.0, state="diverged")]
    assert common.best(Results(diverged), "learning_rate")[2] == "every run diverged"


@pytest.mark.parametrize("power, verdict", [(0.5, "agrees"), (0.3, "disagrees")])
def test_exponent_of_estimator_error(power, verdict):
    asked = studies.plan("estimator-error", "cpu")
    results = [
        Result(
            name,
            job.place,
            values={"ratio": job.place["batch_size"] ** power * (1 + job.place["seed"] / 100), "formula": 1.0},
        )
        for name, job in asked.jobs().items()
    ]
    found = studies.conclusions(asked, Results(results))
    assert {claim.verdict for claim in found.claims} == {verdict}


def test_deviation_of_step_lengths():
    rng = np.random.default_rng(0)
    trend = np.exp(-np.arange(4000) / 2000)
    lengths = trend * (1 + 0.1 * rng.standard_normal(4000))
    place = {"seed": 0}
    assert step_size.deviation(result(place, 1.0, lengths=lengths)) == pytest.approx(0.1, rel=0.05)
    assert step_size.deviation(result(place, 1.0, lengths=trend)) < 2e-3
    assert math.isnan(step_size.deviation(result(place, 1.0, state="diverged", lengths=lengths)))


def test_distance_of_curves():
    examples = np.linspace(0, 100, 11)
    a = {"examples": examples, "loss": 10.0 ** (-examples / 50)}
    b = {"examples": examples, "loss": 3 * 10.0 ** (-examples / 50)}
    assert lr_scaling.apart(a, b, "loss") == pytest.approx(math.log10(3)) and lr_scaling.apart(a, a, "loss") == 0


def test_runtime_is_eve_over_adam():
    values = {
        "parameters": 1,
        "batch_size": 1,
        "seconds": {"adam": [1.0, 2.0, 1.0], "eve": [1.5, 3.0, 1.5]},
        "bytes": {"adam": 2, "eve": 3},
    }
    found = eve_runtime.findings(Results([Result("a", {"task": "pixelcnn"}, values=values)]))
    assert found.claims[0].verdict == "agrees" and found.claims[0].measured.startswith("1.5 ")
    assert eve_runtime.PUBLISHED == {
        "cifar10": 1.2,
        "seq2seq": 1.0,
        "translation": 1.29,
        "pong": 1.18,
        "pixelcnn": 4.54,
    }
    assert found.blocks[1].rows[0][-1] == "1.5"


def test_overhead_of_the_twin_is_seen():
    """The measurement, not the machine: what takes ten times the memory is said to."""
    values = {"parameters": 1, "bytes": {"gradient": 10}, "seconds": {"gradient": [1.0, 1.0]}}
    for k, name in enumerate(overhead.STATISTICS):
        values["bytes"][name], values["seconds"][name] = 10 * (k + 1), [1.0 + k, 1.0 + k]
    (claim,) = overhead.findings(Results([Result("a", {"task": "lm", "batch_size": 4}, values=values)])).claims
    assert claim.verdict == "disagrees" and "memory × 2" in claim.measured


# ------------------------------------------------------------------------------------- bad input


def test_bad_input(tmp_path):
    with pytest.raises(BadInput, match="did you mean 'preconditioner'"):
        studies.plan("precondition", "smoke")
    with pytest.raises(BadInput, match="unknown preset"):
        studies.plan("overhead", "tiny")
    with pytest.raises(BadInput, match="did you mean 'cifar10'"):
        studies.plan("eve-vs-adam", "cpu", tasks=("cifar",))
    with pytest.raises(BadInput, match="at least 1"):
        studies.plan("overhead", "cpu", 0)
    with pytest.raises(BadInput, match="is no study"):
        (tmp_path / "a.txt").touch()
        studies.run(smoke("overhead"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_data_that_is_not_here_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PERGRAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BadInput, match=r"pergrad data get cifar10[\s\S]*--tasks quadratic"):
        studies.run(studies.plan("preconditioner", "cpu"), tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies") / "errors"
    studies.run(smoke("estimator-error"), folder)
    return folder


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("study.json", {"format": 2}, "format 1"),
        ("study.json", {"format": 1, "study": "overhead", "preset": "smoke", "seeds": "many", "tasks": []}, "damaged"),
        ("study.json", {"format": 1, "study": "../x", "preset": "smoke", "seeds": 1, "tasks": []}, "unknown study"),
        ("study.json", [], "format 1"),
        ("measurements/noise-4-3-0.json", {"result": {"ratio": "<b>"}}, "damaged"),
    ],
)
def test_a_study_folder_from_someone_else(measured, tmp_path, name, content, match):
    folder = shutil.copytree(measured, tmp_path / "study")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=match):
        studies.write_report(folder, tmp_path / "r.html")


def test_a_run_of_another_configuration(tmp_path):
    asked = smoke("step-size")
    studies.begin(tmp_path / "study", asked, False)
    name, job = next(iter(asked.jobs().items()))
    runs.Folder.create(tmp_path / "study" / "runs" / name, dataclasses.replace(job.config, steps=7), {}).close()
    with pytest.raises(BadInput, match="another configuration"):
        studies.write_report(tmp_path / "study", tmp_path / "r.html")
    with pytest.raises(BadInput, match="a report of its own"):
        commands.Report((tmp_path / "study", tmp_path)).run()
    assert report.panels.groups([]) == []


def test_results_are_those_of_their_runs():
    """Every claim of results/ stands in RESULTS.md as it was measured."""
    top = Path(__file__).parent.parent
    text = (top / "RESULTS.md").read_text("utf-8")
    files = sorted((top / "results").glob("*.json"))
    assert len(files) >= 7
    for path in files:
        for claim in json.loads(path.read_text("utf-8"))["claims"]:
            words = [claim[name].replace("|", "\\|") for name in ("claim", "published", "measured")]
            row = f"| {' | '.join(words)} | **{claim['verdict']}** | {claim['scale']} | [{path.stem}](results/{path.name}) |"
            assert row in text, row
