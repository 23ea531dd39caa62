"""Runs: what they write, how they go on after being killed, and what they say to bad input."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pergrad_experiments import cli, commands, optimizers, runs, tasks, train
from pergrad_experiments.config import Config
from pergrad_experiments.errors import BadInput

SMOKE = {"quadratic": "eve", "seq2seq": "optax.sgd", "lm": "micro_adam", "translation": "sign_ema"}
SMOKE |= {"cifar10": "eve", "pixelcnn": "moments", "pong": "optax.adamw"}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder for the runs of this file, with a cache of its own."""
    folder = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERGRAD_CACHE", str(folder / "cache"))
        yield folder


def without_times(folder: Path):
    """Metrics but for what depends on the clock."""
    clock = ("seconds", "throughput")
    return [{k: x for k, x in line.items() if k not in clock} for line in runs.read_metrics(folder / "metrics.jsonl")]


def say(capsys, *arguments):
    """Runs the command; gives its exit code and what it wrote."""
    try:
        cli.main([str(a) for a in arguments])
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, capsys.readouterr()


def refuses(capsys, *arguments, code=2):
    """… which must end with one or two lines, and no traceback."""
    found, written = say(capsys, *arguments)
    assert found == code, written.err
    message = written.err.strip()
    assert message.startswith("pergrad: ") and len(message.splitlines()) <= 2, message
    return message


# ------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_runs(here, name):
    config = tasks.configure(name, SMOKE[name], "smoke")
    last = train.run(config, here / name, show=False)
    run = runs.read(here / name)
    assert run.config == config and run.status["state"] == "done" and run.status["step"] == config.steps
    assert run.data and run.environment["versions"]["jax"] == jax.__version__
    steps = [line["step"] for line in run.lines("train")]
    assert steps == list(range(1, config.steps + 1))
    for line in run.lines("train"):
        assert line["examples"] == line["step"] * config.batch_size
        assert all(
            np.isfinite(line[k]) for k in ("loss", "step_length", "gradient_norm", "learning_rate", "throughput")
        )
        assert line["step_length"] > 0
    evaluated = [line["step"] for line in run.lines("eval")]
    assert evaluated == list(range(0, config.steps, config.eval_every)) + [config.steps]
    assert all(run.lines("eval")[-1][k] == x for k, x in last.items())
    measured = run.lines("stats")
    assert [line["step"] for line in measured] == list(range(0, config.steps, config.stats_every))
    for line in measured:
        assert sum(line["norms"]["counts"]) == config.batch_size
        assert line["snr"].keys() == line["share_mean"].keys() == line["share_variance"].keys()
        # By layers, μ̂² and σ̂² add up to those of the noise scale.
        assert sum(line["noise"].values()) == pytest.approx(line["noise_scale"]["trace"], rel=1e-3)
        assert sum(line["signal"].values()) == pytest.approx(line["noise_scale"]["squared_norm"], rel=1e-2, abs=1e-5)
        norms = [o["norm"] for o in line["outliers"]]
        assert norms == sorted(norms, reverse=True) and norms[0] == pytest.approx(line["norms"]["quantiles"][-1])
        for outlier in line["outliers"]:
            assert outlier.get("text") or (here / name / outlier["image"]).stat().st_size > 0
    assert runs.Checkpoints(here / name / "checkpoints").steps()[-1] == config.steps
    assert any((here / name / "tensorboard").iterdir())


@pytest.mark.slow
def test_pong_goes_on_from_a_checkpoint(here):
    """The emulator's state is not stored; episodes begin anew where it was."""
    if not (here / "pong").exists():
        train.run(tasks.configure("pong", SMOKE["pong"], "smoke"), here / "pong", show=False)
    wanted = without_times(here / "pong")
    train.resume(here / "pong", from_step=4, show=False)
    assert without_times(here / "pong") == wanted


KILLED = """
import os, signal, sys
from pergrad_experiments import cli, runs

where, count = sys.argv[1], int(sys.argv[2])
calls = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at(call):
    global calls
    calls += 1
    return calls == count

append, save_tree = runs.Folder.append, runs.save_tree

def appending(self, entries):
    if where == "line" and at(entries):
        with open(self.path / "metrics.jsonl", "ab") as file:
            file.write(b'{"step": 3, "exam')
        die()
    append(self, entries)

def saving(path, tree):
    if where == "checkpoint" and at(path):
        import orbax.checkpoint as ocp
        ocp.StandardCheckpointer().save(path.absolute(), runs.flat(tree))  # returns before it is written
        die()
    save_tree(path, tree)
    if where == "list" and at(path):
        die()

runs.Folder.append, runs.save_tree = appending, saving
cli.main(sys.argv[3:])
"""


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_to_the_last_bit(here):
    """By SIGKILL, three times: while a checkpoint is written, before its list, and in the middle of a line of metrics."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(here / "compiled")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XLA_FLAGS": ""}
    command = [
        "train",
        "cifar10",
        "--optimizer",
        "eve",
        "--preset",
        "smoke",
        "--eval-every",
        "4",
        "--checkpoint-every",
        "4",
    ]

    def start(folder, *killed):
        program = ["-c", KILLED, *killed] if killed else ["-m", "pergrad_experiments.cli"]
        arguments = [*command, "--folder", str(here / folder), "--resume"]
        return subprocess.run([sys.executable, *program, *arguments], env=environment, capture_output=True, text=True)

    whole = start("whole")
    assert whole.returncode == 0, whole.stderr
    checkpoints = here / "killed" / "checkpoints"
    for moment, complete, half_done in (
        (("checkpoint", "1"), [], True),
        (("list", "2"), [4], True),
        (("line", "3"), [4], False),
    ):
        ended = start("killed", *moment)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert runs.Checkpoints(checkpoints).steps() == complete
        folders = {p.name for p in checkpoints.iterdir() if p.is_dir()}
        assert (len(folders) > len(complete)) == half_done
        assert runs.read(here / "killed").status["state"] == "running"
    ended = start("killed")
    assert ended.returncode == 0, ended.stderr
    assert without_times(here / "killed") == without_times(here / "whole")
    last = [runs.read_json(here / f / "checkpoints" / "12.json") for f in ("killed", "whole")]
    assert last[0]["evaluation"] == last[1]["evaluation"]
    again = start("killed")  # done: nothing to do
    assert again.returncode == 0 and without_times(here / "killed") == without_times(here / "whole")


def test_a_full_disk(here):
    """A file may not be larger than 6 kB: metrics soon are."""
    folder = here / "full"
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pergrad_experiments.cli",
            "train",
            "quadratic",
            "--preset",
            "smoke",
            "--folder",
            str(folder),
        ],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)),
    )
    assert ended.returncode == 4, ended.stderr
    assert "the disk is full" in ended.stderr and f"pergrad resume {folder}" in ended.stderr
    assert "Traceback" not in ended.stderr


# ------------------------------------------------------------------------------------- one small run


@pytest.fixture(scope="module")
def done(here):
    """A run of 30 steps that is done: checkpoints at 20 and 30."""
    train.run(tasks.configure("quadratic", "eve", "smoke"), here / "done", show=False)
    return here / "done"


@pytest.fixture
def copy(done, tmp_path):
    import shutil

    return Path(shutil.copytree(done, tmp_path / "copy"))


def test_from_an_earlier_checkpoint(copy, done):
    train.resume(copy, from_step=20, show=False)
    assert without_times(copy) == without_times(done)
    assert not list(copy.glob("environment-*.json"))


def test_another_machine_is_noted(copy):
    before = json.loads((copy / "environment.json").read_text())
    runs.write_json(copy / "environment.json", before | {"python": "3.9.0"})
    train.resume(copy, from_step=20, show=False)
    assert runs.read_json(copy / "environment-20.json")["python"] == before["python"]


def test_a_run_is_what_plain_optax_would_do(done):
    """Loss and step length of each step, from a loop written out."""
    config = runs.read(done).config
    task = tasks.build(config)
    init_key, _ = train.keys(config.seed)
    params, batches = task.init(init_key), task.batches(0, None)
    opt = optimizers.make(config)
    state = opt.init(params)
    gradient = jax.jit(lambda p, b: jax.vmap(lambda x: jax.value_and_grad(task.loss)(p, {"x": x[None]}, None))(b["x"]))
    for line in runs.read(done).lines("train")[:5]:
        losses, g = gradient(params, next(batches))
        stats = {"mean": {"w": g["w"].mean(0)}, "second_moment": {"w": (g["w"] ** 2).mean(0)}, "count": 16}
        updates, state = opt.update(stats["mean"], state, params, stats=stats)
        params = optax.apply_updates(params, updates)
        assert line["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
        assert line["step_length"] == pytest.approx(float(jnp.linalg.norm(updates["w"])), rel=1e-4)


def test_every_step_and_every_example_has_a_key_of_its_own(tmp_path, monkeypatch):
    """With a loss that is its key's random number times the parameters, the norms of a batch's gradients tell."""
    config = tasks.configure("quadratic", "adam", "smoke", steps=4, stats_every=1)
    noise = lambda params, batch, key: jax.random.normal(key) * jnp.sum(params["w"]) + 0 * jnp.sum(batch["x"])
    task = dataclasses.replace(tasks.build(config), loss=noise)
    monkeypatch.setattr(tasks, "build", lambda config: task)
    train.run(config, tmp_path / "run", show=False)
    run = runs.read(tmp_path / "run")
    assert len({line["gradient_norm"] for line in run.lines("train")}) == 4
    norms = [o["norm"] for line in run.lines("stats") for o in line["outliers"]]
    assert len(set(norms)) == len(norms) == 16


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_makes_a_step(name):
    config = tasks.configure("quadratic", name, "smoke", task_options={"dimension": 3})
    task = tasks.build(config)
    opt = optimizers.make(config)
    params = {"w": jnp.array([1.0, -2.0, 0.5])}
    step = train.step_function(task, opt)
    moved, state, report = step(params, opt.init(params), next(task.batches(0, None)), jax.random.key(0))
    assert np.isfinite(moved["w"]).all() and all(map(bool, report["finite"]))
    restored = runs.unflat(runs.flat(state), state)  # through a checkpoint and back
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_moments_are_the_family():
    s = {"mean": {"w": jnp.array([0.5, -1.0])}, "second_moment": {"w": jnp.array([2.0, 1.5])}, "count": 4}
    same = {("adam", ()): {}, ("micro_adam", ()): {"c": 1}, ("micro_adam_var", ()): {"a": 0, "c": 1}}
    for (name, _), options in same.items():
        wanted, found = (
            optimizers.make(tasks.configure("quadratic", n, "smoke", optimizer_options=o))
            for n, o in ((name, {}), ("moments", options))
        )
        updates = [o.update(s["mean"], o.init(s["mean"]), s["mean"], stats=s)[0]["w"] for o in (wanted, found)]
        np.testing.assert_allclose(*updates, rtol=1e-5)


def test_schedules():
    config = tasks.configure("quadratic", "adam", "smoke", learning_rate=1.0, steps=110, warmup=10)
    for name, middle, end in (("constant", 1.0, 1.0), ("linear", 0.5, 0.0), ("cosine", 0.5, 0.0)):
        rate = optimizers.schedule(Config.from_json(config.to_json() | {"schedule": name}, "x"))
        found = [float(rate(step)) for step in (0, 4, 9, 10, 60, 110)]
        np.testing.assert_allclose(found, [0.1, 0.5, 1.0, 1.0, middle, end], atol=1e-6)


def test_sigterm_stops_with_a_checkpoint(tmp_path, monkeypatch):
    """The signal is sent in the middle of step 7; the run goes on to the same end."""
    config = tasks.configure("quadratic", "adam", "smoke")
    key = train._Loop.key

    def during_a_step(self, step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return key(self, step)

    monkeypatch.setattr(train._Loop, "key", during_a_step)
    with pytest.raises(train.Stopped, match=r"stopped at step 7 of 30. Go on with `pergrad resume"):
        train.run(config, tmp_path / "a", show=False)
    monkeypatch.undo()
    assert runs.read(tmp_path / "a").status["state"] == "stopped"
    train.resume(tmp_path / "a", show=False)
    train.run(config, tmp_path / "b", show=False)
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")


# ------------------------------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "cifar10"], "unknown command 'trian': did you mean 'train'?"),
        (["train", "cifar"], "unknown task 'cifar': did you mean 'cifar10'?"),
        (["train", "quadratic", "--optimizer", "adamw"], "unknown optimizer 'adamw': did you mean"),
        (["train", "quadratic", "--preset", "smok"], "unknown preset 'smok': did you mean 'smoke'?"),
        (["train", "quadratic", "--optimiser", "eve"], "did you mean '--optimizer'?"),
        (["train", "quadratic", "--optimizer-options", "b3=1"], "unknown option of adam 'b3': did you mean 'b"),
        (["train", "quadratic", "--optimizer-options", "b1"], "expected NAME=VALUE"),
        (["train", "quadratic", "--optimizer-options", "b1=2"], "refuses its options: b1 was given 2.0"),
        (["train", "quadratic", "--task-options", "dimensions=3"], "did you mean 'dimension'?"),
        (
            ["train", "quadratic", "--task-options", "dimension=3.5"],
            "dimension of quadratic is '3.5': expected an integer",
        ),
        (["train", "quadratic", "--task-options", "covariance=x"], "expected one of uniform, curvature"),
        (["train", "quadratic", "--steps", "many"], "--steps was given 'many': expected INT"),
        (["train", "quadratic", "--steps", "0"], "steps is 0: expected at least 1"),
        (["train", "quadratic", "--seed", 2**32], "expected a number below 2^32"),
        (["train", "quadratic", "--learning-rate", "-1"], "learning_rate is -1.0"),
        (["train", "quadratic", "--schedule", "cosinus"], "did you mean 'cosine'?"),
        (["train"], "Missing from pergrad train: TASK"),
        (["train", "cifar10", "--preset", "smoke", "--batch-size", "97"], "97 examples of 96. Write --batch-size 96"),
        (["train", "pong", "--preset", "smoke", "--batch-size", "64"], "a rollout 32"),
        (["train", "cifar10"], "the data set cifar10 is not here. Write `pergrad data get cifar10`"),
        (["data", "gte"], "did you mean 'get'?"),
        (["resume", "nowhere"], "nowhere is not there"),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    assert message in refuses(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []  # nothing was made


def test_no_accelerator(capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("there is one")
    assert "needs an accelerator" in refuses(capsys, "train", "quadratic", "--preset", "gpu")


def test_the_extra_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(cli, "NEEDED", ("flax", "no_such_module"))
    assert "no_such_module missing: pip install 'pergrad[experiments]'" in refuses(capsys, "list")


def test_what_exists_is_not_written_over(capsys, copy, tmp_path):
    before = runs.list_files(copy)
    message = refuses(capsys, "train", "quadratic", "--preset", "smoke", "--folder", copy)
    assert f"{copy} exists: write `pergrad resume {copy}`" in message
    message = refuses(capsys, "train", "quadratic", "--preset", "smoke", "--folder", copy, "--resume")
    assert "is a run with optimizer 'eve', and now it is 'adam'" in message
    assert runs.list_files(copy) == before
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    assert "is no run folder" in refuses(
        capsys, "train", "quadratic", "--preset", "smoke", "--folder", tmp_path / "photos"
    )


@pytest.mark.parametrize("what", ["missing", "changed", "all"])
def test_a_damaged_checkpoint(capsys, copy, what):
    files = sorted(p for p in (copy / "checkpoints" / "30").rglob("*") if p.is_file() and p.stat().st_size)
    for victim in files if what == "all" else [max(files, key=lambda p: p.stat().st_size)]:
        if what == "changed":
            data = bytearray(victim.read_bytes())
            data[-1] ^= 1
            victim.write_bytes(data)
        else:
            victim.unlink()
    before = runs.list_files(copy)
    message = refuses(capsys, "resume", copy)
    assert ("has a changed file" if what == "changed" else "has lost its file") in message
    assert f"pergrad resume {copy} --from-step 20" in message
    assert runs.list_files(copy) == before
    assert say(capsys, "resume", copy, "--from-step", 20)[0] == 0
    assert "has no checkpoint of step 7" in refuses(capsys, "resume", copy, "--from-step", 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is of format 2, and this version of pergrad reads format 1"),
        ({"format": None}, "is of format None"),
        ({"optimiser": "x"}, "unknown entry 'optimiser'"),
        ({"steps": "__import__('os')"}, "expected an integer"),
        ({"task": "../../x"}, "unknown task"),
        ({"optimizer": "optax.apply_updates"}, "unknown optimizer"),
        ({"optimizer_options": [1]}, "optimizer_options"),
        ({"seed": None}, "seed"),
    ],
)
def test_a_configuration_of_someone_else(capsys, copy, change, message):
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    assert message in refuses(capsys, "resume", copy)


def test_damaged_files(copy, capsys):
    (copy / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n[1]\n')
    with pytest.raises(BadInput, match=r"metrics.jsonl, line 2: expected a JSON object"):
        runs.read(copy)
    assert "it is damaged" in refuses(capsys, "resume", copy)  # shorter than the checkpoint says
    (copy / "status.json").write_text('{"state": "fine"}')
    with pytest.raises(BadInput, match="has the state 'fine'"):
        runs.read(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        runs.read(copy)
    (copy / "config.json").unlink()
    with pytest.raises(BadInput, match=r"has no config.json: it is not a run folder"):
        runs.read(copy)


@pytest.mark.parametrize("change", [{"metrics_bytes": "x"}, {"files": []}, {"seconds": None}])
def test_damaged_notes_of_a_checkpoint(capsys, copy, change):
    path = copy / "checkpoints" / "30.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "30.json is damaged" in refuses(capsys, "resume", copy)


def test_other_data(capsys, copy):
    for path in (copy / "checkpoints").glob("*.json"):
        path.write_text(path.read_text().replace('"generated"', '"elsewhere"'))
    assert "was trained on other data" in refuses(capsys, "resume", copy)


def test_two_processes_in_one_folder(capsys, copy):
    folder, _ = runs.Folder.open(copy)
    assert "another process is writing" in refuses(capsys, "resume", copy)
    folder.close()
    assert say(capsys, "resume", copy)[0] == 0


def test_a_diverged_run_says_where(capsys, here):
    folder = here / "diverged"
    arguments = ["train", "quadratic", "--preset", "smoke", "--folder", folder, "--optimizer", "optax.sgd"]
    message = refuses(capsys, *arguments, "--learning-rate", 1000, "--checkpoint-every", 5, code=3)
    status = runs.read(folder).status
    assert status["state"] == "diverged" and status["leaf"] == "w"
    steps = [line["step"] for line in runs.read(folder).lines("train")]
    assert steps == list(range(1, status["step"]))  # up to the step before
    assert status["step"] > 5 and status["checkpoint"] == (status["step"] - 1) // 5 * 5
    assert f"diverged at step {status['step']}: the {status['what']}" in message
    assert f"checkpoint {status['checkpoint']}" in message and " w" in message


def test_numbers_in_json():
    found = runs.plain(
        {"a": np.float32(0.1), "b": jnp.array([1.5, np.inf]), "c": (np.int32(3), np.bool_(True)), 4: None}
    )
    assert json.dumps(found) == '{"a": 0.1, "b": [1.5, null], "c": [3, true], "4": null}'


def test_list_and_help(capsys):
    for arguments in (["list"], ["list", "lm"], ["data", "list"], ["--help"], []):
        code, written = say(capsys, *arguments)
        assert code == 0 and written.out
    code, written = say(capsys, "train", "--help")
    assert code == 0 and "--optimizer-options" in written.out
    assert all(name in say(capsys, "list")[1].out for name in (*tasks.TASKS, "micro_sign_sgd", "optax.lion"))
    assert set(commands.COMMANDS) >= {"train", "resume", "data get", "data list", "list"}
