"""What can be typed after `pergrad`: a dataclass for each command, whose fields are its arguments.

tyro makes the parser and the help out of them. A command that is new is a class and its line in ``COMMANDS``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from .config import words_to_options
from .errors import BadInput, unknown


@dataclasses.dataclass
class Train:
    """Trains a model, from the first step, or with --resume from the last checkpoint."""

    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
    """What to train: see `pergrad list`."""
    optimizer: str = "adam"
    """One of pergrad's, or optax.NAME: see `pergrad list`."""
    preset: str = "cpu"
    """smoke (seconds, sample data), cpu (minutes), gpu, or paper (the published size)."""
    folder: Path | None = None
    """The run folder; if not given, runs/TASK-OPTIMIZER-PRESET-SEED."""
    resume: bool = False
    """Go on with the run in the folder, if there is one; it must be of this very configuration."""
    seed: int = 0
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    """constant, cosine or linear."""
    warmup: int | None = None
    """Steps over which the learning rate goes up."""
    clip_norm: float | None = None
    """Clip the mean gradient to this norm before the optimizer."""
    microbatch_size: int | None = None
    """At most so many examples at once: less memory, same result."""
    eval_every: int | None = None
    stats_every: int | None = None
    checkpoint_every: int | None = None
    task_options: tuple[str, ...] = ()
    """NAME=VALUE …: of the model and the data."""
    optimizer_options: tuple[str, ...] = ()
    """NAME=VALUE …: arguments of the optimizer, such as b1=0.95."""

    def run(self) -> None:
        from . import tasks, train

        config = tasks.configure(
            self.task,
            self.optimizer,
            self.preset,
            task_options=words_to_options(self.task_options, "--task-options"),
            optimizer_options=words_to_options(self.optimizer_options, "--optimizer-options"),
            **{
                name: getattr(self, name)
                for name in (
                    *("seed", "steps", "batch_size", "learning_rate", "schedule", "warmup", "clip_norm"),
                    *("microbatch_size", "eval_every", "stats_every", "checkpoint_every"),
                )
            },
        )
        folder = self.folder or Path("runs") / f"{self.task}-{self.optimizer}-{self.preset}-{self.seed}"
        report(train.run(config, folder, resume=self.resume), folder)


@dataclasses.dataclass
class Resume:
    """Goes on with a run that was stopped or killed."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    from_step: int | None = None
    """The step of an earlier checkpoint, in place of the last; what came after it is made again."""

    def run(self) -> None:
        from . import train

        report(train.resume(self.folder, from_step=self.from_step), self.folder)


@dataclasses.dataclass
class DataGet:
    """Fetches a data set by its package's name, checks it and unpacks it into the cache."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    from_file: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """The package's archive, if it is here already."""
    again: bool = False
    """Also if it is here."""
    keep: bool = False
    """Keep the archive in the cache."""

    def run(self) -> None:
        from .data import fetch

        fetch.get(self.name, self.from_file, self.again, self.keep)


@dataclasses.dataclass
class DataList:
    """Says which data sets there are, and which are here."""

    def run(self) -> None:
        from .data import fetch

        for name, source in fetch.SOURCES.items():
            state = "here" if fetch.is_here(name) else "not here"
            package = f"{source.client} {source.package} {source.version}, {source.size / 1e6:.0f} MB"
            print(f"{name:12} {state:9} {source.about}; {package}")
        print(f"cache: {fetch.cache()}")


@dataclasses.dataclass
class List:
    """Says which tasks, optimizers and presets there are, and the options of a task."""

    task: tyro.conf.Positional[str | None] = None
    """Show this one's options."""

    def run(self) -> None:
        from . import optimizers, tasks

        if self.task is None:
            print("tasks:")
            for name in tasks.TASKS:
                print(f"  {name:12} {first_line(tasks.module(name))}")
            print("presets:", *tasks.PRESETS)
            print("optimizers:", *optimizers.OPTIMIZERS)
            print("`pergrad list TASK` shows a task's options, `pergrad data list` the data sets.")
            return
        module = tasks.module(self.task)
        print(first_line(module))
        for name, preset in module.PRESETS.items():
            options = " ".join(f"{k}={v}" for k, v in dataclasses.asdict(preset.options).items())
            rest = " ".join(f"{k}={getattr(preset, k)}" for k in ("steps", "batch_size", "learning_rate"))
            print(f"{name}: {rest}; task options: {options}")


@dataclasses.dataclass
class Report:
    """Writes one HTML file about runs and studies: curves, tables, signal and noise, examples that stand out."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or one study folder."""
    out: Path | None = None
    """The file; if not given, report.html in the folder, or here if there are several."""
    figures: Path | None = None
    """A folder for the plots as SVG and PNG."""

    def run(self) -> None:
        from . import report, studies

        if not self.folders:
            raise BadInput("no folder was given: write `pergrad report runs/NAME`.")
        among = [folder for folder in self.folders if (folder / "study.json").exists()]
        out = self.out or (self.folders[0] if len(self.folders) == 1 else Path()) / "report.html"
        if among and len(self.folders) > 1:
            raise BadInput(f"{among[0]} is a study, which has a report of its own: write `pergrad report {among[0]}`.")
        if among:
            print(studies.write_report(among[0], out, self.figures))
        else:
            print(report.write(self.folders, out, figures=self.figures))


@dataclasses.dataclass
class Study:
    """Runs a study of one of the two papers: a grid of runs, and a report that sets them beside what was published."""

    name: tyro.conf.Positional[str]
    """Which one; `pergrad study list` says which there are."""
    preset: str = "cpu"
    """smoke, cpu, gpu or paper."""
    seeds: int | None = None
    """How many; if not given, 3, and 1 for smoke."""
    tasks: tuple[str, ...] = ()
    """Only these of the study's tasks."""
    folder: Path | None = None
    """The study folder; if not given, runs/study-NAME-PRESET."""
    resume: bool = False
    """Go on with the study in the folder: what is finished is not run again."""

    def run(self) -> None:
        from . import studies

        if self.name == "list":
            for name in studies.STUDIES:
                doc = (studies.module(name).__doc__ or "").strip()
                print(f"{name:16} {doc.splitlines()[0]}")
            return
        asked = studies.plan(self.name, self.preset, self.seeds, self.tasks)
        folder = self.folder or Path("runs") / f"study-{self.name}-{self.preset}"
        print(studies.run(asked, folder, resume=self.resume))


COMMANDS: dict[str, type] = {
    "train": Train,
    "resume": Resume,
    "list": List,
    "report": Report,
    "study": Study,
    "data get": DataGet,
    "data list": DataList,
}


def first_line(module) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def report(metrics: dict, folder: Path) -> None:
    numbers = ", ".join(f"{name} {value:.4g}" if value is not None else f"{name} –" for name, value in metrics.items())
    print(f"{numbers}\n{folder}")


def run(arguments: list[str]) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: pergrad COMMAND …    (pergrad COMMAND --help)\n")
        for name, command in COMMANDS.items():
            print(f"  pergrad {name:10} {first_line(command)}")
        return
    name, rest = arguments[0], arguments[1:]
    inner = [key.split()[1] for key in COMMANDS if key.startswith(f"{name} ")]
    if inner:
        if not rest or rest[0] not in inner:
            raise unknown(f"command pergrad {name}", rest[0] if rest else "", inner)
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        raise unknown("command", name, {key.split()[0]: None for key in COMMANDS})
    parse(COMMANDS[name], name, rest).run()


def parse(command: type, name: str, arguments: list[str]):
    """tyro's parser, with its complaints made short."""
    flags = {"--help"}
    for field in dataclasses.fields(command):
        flag = {"from_file": "from"}.get(field.name, field.name).replace("_", "-")
        flags |= {f"--{flag}", f"--no-{flag}"} if isinstance(field.default, bool) else {f"--{flag}"}
    for word in arguments:
        flag = word.split("=")[0].replace("_", "-")
        if word.startswith("--") and len(word) > 2 and flag not in flags:
            raise unknown(f"option of pergrad {name}", flag, flags)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(command, prog=f"pergrad {name}", args=arguments)
    except SystemExit as end:
        if not end.code:
            raise
        words = " ".join(complaint.getvalue().translate(str.maketrans("╭╮╰╯│─", "      ")).split())
        for title in ("Parsing error ", "Required options ", "Unrecognized options "):
            words = words.removeprefix(title)
        words = words.split(" For full helptext")[0].split(" Usage:")[0]
        if typed := re.search(r"Error parsing (--[\w-]+).* Argument helptext: \1 (\S+)", words):
            given = next((b for a, b in pairwise(arguments) if a.replace("_", "-") == typed[1]), "")
            words = f"{typed[1]} was given {given!r}: expected {typed[2].replace('{None}|', '')}"
        raise BadInput(f"{words[:300]} (`pergrad {name} --help` says what it takes)") from None
    finally:
        sys.stderr.flush()
