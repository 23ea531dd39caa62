"""The training loop. One run: a configuration and a folder, from the first step or from the last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from pergrad import optim

from . import measure, optimizers, runs, tasks
from .config import Config
from .errors import BadInput, DiskFull, Diverged, Stopped, disk_full, is_disk_full
from .progress import Progress
from .tasks.common import in_haste

WRITE_SECONDS = 1.0  # how long metrics may wait on the device
WRITE_STEPS = 200


# ------------------------------------------------------------------------------------- pure functions


def keys(seed: Any) -> tuple[jax.Array, jax.Array]:
    """For the parameters, and for the steps."""
    first, second = jax.random.split(jax.random.key(seed))
    return first, second


def step_function(task: tasks.Task, optimizer: optax.GradientTransformationExtraArgs, microbatch_size=None) -> Callable:
    """``(params, state, batch, key) -> (params, state, report)``, pure: jit it, or vmap it over seeds and learning rates.

    The report has the loss, the norms of gradient and update, and for each leaf of the gradient and then of the new
    parameters the largest absolute value, and whether all is finite.
    """

    def step(params, state, batch, key):
        needed = optim.required_stats(optimizer, params, value=jnp.zeros(()))
        statistics = pg.value_and_stats(task.loss, needed, prng_argnums=2, microbatch_size=microbatch_size)
        value, stats = statistics(params, batch, key)
        updates, state = optimizer.update(stats["mean"], state, params, stats=stats, value=value)
        params = optax.apply_updates(params, updates)
        largest = [_largest(x) for tree in (stats["mean"], params) for x in jax.tree.leaves(tree)]
        report = {
            "loss": value,
            "step_length": _norm(updates),
            "gradient_norm": _norm(stats["mean"]),
            "largest": largest,
            "finite": [jnp.isfinite(x) for x in largest],
        }
        return params, state, report

    return step


def _norm(tree):
    return jnp.sqrt(
        sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), start=jnp.zeros(()))
    )


def _largest(x):
    return jnp.max(jnp.abs(x), initial=0.0)  # NaN, if one is


# ------------------------------------------------------------------------------------- a run


def run(
    config: Config,
    folder: str | Path,
    *,
    resume: bool = False,
    from_step: int | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Trains, and returns the last line of evaluation.

    Args:
      config: as `tasks.configure` makes it.
      folder: the run folder: new, or with ``resume`` one of the same configuration.
      from_step: go on from the checkpoint of this step, in place of the last one.
      show: progress on the terminal.
    """
    folder = Path(folder)
    tasks.check_device(config)
    task = tasks.build(config)  # before anything is written: most bad input ends here
    optimizer = optimizers.make(config)
    if resume and (folder / "config.json").exists():
        writer, before = runs.Folder.open(folder)
        _same(before, config, folder)
    else:
        try:
            writer = runs.Folder.create(folder, config, task.data)
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(folder, "and try again") from error
            raise BadInput(f"cannot make the run folder {folder} ({error.strerror or error}).") from None
    try:
        return _Loop(config, task, optimizer, writer, show).run(from_step)
    except Exception as error:
        if not isinstance(error, DiskFull) and is_disk_full(error):
            raise disk_full(folder, f"and go on with `pergrad resume {folder}`") from error
        raise
    finally:
        writer.close()


def resume(folder: str | Path, *, from_step: int | None = None, show: bool = True) -> dict[str, Any]:
    """Goes on with the run in ``folder``."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"{folder} is not there: expected a run folder, as `pergrad train` makes them.")
    config = Config.from_json(runs.read_json(folder / "config.json"), str(folder / "config.json"))
    return run(config, folder, resume=True, from_step=from_step, show=show)


def _same(before: Config, now: Config, folder: Path) -> None:
    differ = [f.name for f in dataclasses.fields(Config) if getattr(before, f.name) != getattr(now, f.name)]
    if differ:
        name = differ[0]
        raise BadInput(
            f"{folder} is a run with {name} {getattr(before, name)!r}, and now it is {getattr(now, name)!r}. Write `pergrad "
            f"resume {folder}` to go on with it, or --folder with another name for a new run."
        )


class _Loop:
    """The state of one run between its steps."""

    def __init__(self, config: Config, task: tasks.Task, optimizer: Any, folder: runs.Folder, show: bool):
        self.config, self.task, self.optimizer, self.folder, self.show = config, task, optimizer, folder, show
        self.learning_rate = optimizers.schedule(config)
        init_key, self.step_key = keys(config.seed)

        def start(key):
            params = task.init(key)
            return params, optimizer.init(params)

        self.params, self.state = jax.jit(start, compiler_options=in_haste(True))(init_key)
        self.names = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(self.params)
        ]
        self.step = 0
        self.seconds = 0.0
        self.waiting: list[tuple[int, Any]] = []  # reports that are still on the device
        self.written_at = 0.0  # in training seconds
        self.last_eval: dict[str, Any] = {}

    # -- from and to the disk

    def restore(self, from_step: int | None) -> None:
        if from_step is not None or self.folder.checkpoints.steps():
            (self.params, self.state), notes = self.folder.checkpoints.restore((self.params, self.state), from_step)
            self.step, self.seconds, self.last_eval = notes["step"], notes["seconds"], notes["evaluation"]
            if notes["data"] != runs.plain(self.task.data):
                raise BadInput(
                    f"{self.folder.path} was trained on other data: the checksums in data.json differ. Get the same "
                    "version of the data, or start a new run."
                )
            # Nothing is changed before all is checked; and if this is killed half-way, it can be done again.
            self.folder.check_metrics(notes["metrics_bytes"])
            self.folder.checkpoints.drop_after(self.step)
            self.folder.cut_metrics(notes["metrics_bytes"])
            self.folder.note_environment(self.step)
        else:
            self.folder.cut_metrics(0)
        self.written_at = self.seconds

    def save(self) -> None:
        self.folder.checkpoints.save(
            self.step,
            (self.params, self.state),
            seconds=self.seconds,
            evaluation=self.last_eval,
            metrics_bytes=self.folder.metrics_bytes(),
            data=self.task.data,
        )

    # -- lines of metrics

    def line(self, kind: str, step: int, **numbers: Any) -> dict[str, Any]:
        examples = step * self.config.batch_size
        entry = {"step": step, "examples": examples, "seconds": round(self.seconds, 3), "kind": kind, **numbers}
        self.board.add(entry)
        return entry

    def write(self) -> None:
        """Fetches the reports that wait, and writes them; raises `Diverged`."""
        if not self.waiting:
            return
        steps, reports = zip(*jax.device_get(self.waiting))
        self.tick()
        passed = self.seconds - self.written_at
        throughput = len(steps) * self.config.batch_size / passed if passed > 0 else 0.0
        self.waiting, self.written_at = [], self.seconds
        lines = []
        for step, report in zip(steps, reports):
            bad = self.not_finite(report)
            if bad is not None:
                self.folder.append(lines)
                self.diverged(step, *bad)
            lines.append(
                self.line(
                    "train",
                    step,
                    loss=report["loss"],
                    step_length=report["step_length"],
                    gradient_norm=report["gradient_norm"],
                    learning_rate=np.float32(np.asarray(self.learning_rate(step - 1))),
                    throughput=round(throughput, 1),
                )
            )
        self.folder.append(lines)
        self.progress.update(self.step, float(reports[-1]["loss"]))

    def not_finite(self, report) -> tuple[str, str] | None:
        """What is not, and in which leaf; of a loss, the leaf whose gradient is not finite either, or the largest."""
        gradients, parameters = np.split(np.asarray(report["largest"]), 2)
        if not np.isfinite(report["loss"]):
            size = np.where(np.isfinite(gradients), gradients, np.inf)
            return "loss", self.names[int(np.argmax(size))]
        for what, largest in (("gradient", gradients), ("parameters", parameters)):
            if not np.isfinite(largest).all():
                return what, self.names[int(np.argmin(np.isfinite(largest)))]
        return None

    def diverged(self, step: int, what: str, leaf: str) -> None:
        saved = self.folder.checkpoints.steps()
        checkpoint = saved[-1] if saved else None
        self.folder.set_status("diverged", step=step, what=what, leaf=leaf, checkpoint=checkpoint)
        where = {
            "loss": f"the loss is not finite, and the largest gradient is that of {leaf}",
            "gradient": f"the gradient of {leaf} is not finite",
            "parameters": f"{leaf} is not finite after the update",
        }[what]
        good = f"checkpoint {checkpoint} in {self.folder.path / 'checkpoints'}" if saved else "none"
        raise Diverged(
            f"diverged at step {step}: {where}. The last good checkpoint: {good}.\n"
            "Start a new run with a smaller --learning-rate, or with --clip-norm 1."
        )

    def evaluate(self) -> None:
        self.write()
        with self.pause():
            numbers = {name: np.float32(value) for name, value in self.task.evaluate(self.params).items()}
        self.last_eval = runs.plain(numbers)
        self.folder.append([self.line("eval", self.step, **numbers)])

    def measure(self, batch) -> None:
        self.write()
        with self.pause():
            found = jax.device_get(self.statistics(self.params, batch, self.key(self.step)))
            entry = measure.entry(found, batch, self.task.show, self.folder.path, self.step)
        self.folder.append([self.line("stats", self.step, **entry)])

    # -- time: only what is spent training

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.tick()
        yield
        self.since = time.perf_counter()

    # -- the loop

    def key(self, step: int) -> jax.Array:
        return jax.random.fold_in(self.step_key, step)

    def run(self, from_step: int | None) -> dict[str, Any]:
        config, total = self.config, self.config.steps
        self.restore(from_step)
        self.folder.set_status("running", step=self.step)
        haste = in_haste(config.preset == "smoke")
        step = step_function(self.task, self.optimizer, config.microbatch_size)
        step = jax.jit(step, donate_argnums=(0, 1), compiler_options=haste)
        statistics = measure.statistics(self.task.loss, self.task.stacked, config.microbatch_size)
        self.statistics = jax.jit(statistics, compiler_options=haste)
        self.since = time.perf_counter()
        title = f"{config.task}, {config.optimizer}"
        with (
            Board(self.folder.path / "tensorboard", self.step) as self.board,
            Progress(title, self.step, total, self.show) as self.progress,
            _signals() as stop,
        ):
            batches = self.task.batches(self.step, lambda: self.params)
            if self.step == 0:
                self.evaluate()
            compiled = None
            # A policy's episodes end at checkpoints only, and cannot be taken up anywhere else.
            anywhere = tasks.checkpoint_multiple(config) == 1
            while self.step < total:
                batch = next(batches)
                if self.step % config.stats_every == 0 and config.batch_size > 1:
                    self.measure(batch)
                key = self.key(self.step)
                if compiled is None:
                    with self.pause():
                        compiled = step.lower(self.params, self.state, batch, key).compile()
                self.params, self.state, report = compiled(self.params, self.state, batch, key)
                self.step += 1
                self.waiting.append((self.step, report))
                last = self.step == total
                self.tick()
                if last or len(self.waiting) >= WRITE_STEPS or self.seconds - self.written_at > WRITE_SECONDS:
                    self.write()
                if last or self.step % config.eval_every == 0:
                    self.evaluate()
                stopping = stop.is_set()
                if last or (stopping and anywhere) or self.step % config.checkpoint_every == 0:
                    self.write()
                    with self.pause():
                        self.save()
                        self.folder.set_status("running", step=self.step)
                if stopping and not last:
                    self.write()
                    self.folder.set_status("stopped", step=self.step)
                    raise Stopped(
                        f"stopped at step {self.step} of {total}. Go on with `pergrad resume {self.folder.path}`."
                    )
        self.folder.set_status("done", step=self.step)
        return self.last_eval


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, once; a second one does what it always does."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number, frame):
        stop.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Board:
    """The same numbers for TensorBoard: one event for each line.

    Written here and now. A `SummaryWriter` would do it in a thread, which dies in silence when the disk is full, and put
    the machine's name into the name of the file.
    """

    def __init__(self, folder: Path, step: int):
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import RecordWriter

        # Any: protobuf makes their classes as they are imported.
        self.events: Any = event_pb2
        self.summaries: Any = summary_pb2
        self.writer = RecordWriter(str(folder / f"events.out.tfevents.{int(time.time())}.{step}"))
        self._put(self.events.Event(file_version="brain.Event:2"))
        if step:  # what was written after it, before the run was killed, does not count
            begin = self.events.SessionLog(status=self.events.SessionLog.START)
            self._put(self.events.Event(step=step + 1, session_log=begin))

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.writer.close()
        except OSError:
            if kind is None:
                raise

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        self.writer.write(event.SerializeToString())

    def add(self, entry: dict[str, Any]) -> None:
        numbers = {
            f"{entry['kind']}/{name}": value
            for name, value in entry.items()
            if name not in ("step", "kind", "examples") and isinstance(value, float | np.floating | np.ndarray)
        }
        if entry["kind"] == "stats":
            for name in ("snr", "share_mean"):
                numbers |= {f"{name}/{layer}": value for layer, value in entry[name].items()}
            numbers["stats/noise_scale"] = entry["noise_scale"]["scale"]
        summary = self.summaries.Summary
        values = [summary.Value(tag=tag, simple_value=float(value)) for tag, value in numbers.items()]
        self._put(self.events.Event(step=entry["step"], summary=summary(value=values)))
