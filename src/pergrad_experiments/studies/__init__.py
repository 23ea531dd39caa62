"""The studies, one file each: a grid of runs or measurements, and what to conclude from them.

A study's module has a docstring, whose first line says what it asks; ``tasks(preset)``, the names of its tasks;
``jobs(preset, seeds, tasks)``, its grid; and ``findings(results)``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .. import report, runs
from .. import tasks as all_tasks
from .. import train as training
from ..errors import BadInput, Diverged, Stopped, unknown
from ..report import load
from ..report.charts import Table, thin
from ..report.panels import Section
from . import together
from .common import Claim, Findings, Job, Measure, Result, Results, Train

FORMAT = 1
STUDIES = (
    "sign-placement",
    "preconditioner",
    "lr-scaling",
    "overhead",
    "eve-vs-adam",
    "eve-batch-size",
    "eve-ablation",
    "step-size",
    "eve-runtime",
    "estimator-error",
)
DEFAULT_SEEDS = {"smoke": 1, "cpu": 3, "gpu": 3, "paper": 3}
CURVE = 16  # stretches of a run in results.json, each with its mean loss


def module(name: str) -> ModuleType:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


# ------------------------------------------------------------------------------------- running


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `study.json` holds: what was asked."""

    study: str
    preset: str
    seeds: int
    tasks: tuple[str, ...]

    def jobs(self) -> dict[str, Job]:
        return {job_name(job): job for job in module(self.study).jobs(self.preset, self.seeds, self.tasks)}

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


def job_name(job: Job) -> str:
    """Its place in the grid, as the name of a file."""
    words = [f"{v:g}" if isinstance(v, float) else str(v) for v in job.place.values()]
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", "-".join(words))


def plan(name: str, preset: str, seeds: int | None = None, tasks: Sequence[str] = ()) -> Plan:
    study = module(name)
    if preset not in all_tasks.PRESETS:
        raise unknown("preset", preset, all_tasks.PRESETS)
    known = study.tasks(preset)
    for task in tasks:
        if task not in known:
            raise unknown("task", task, known, f" of the study {name}")
    seeds = DEFAULT_SEEDS[preset] if seeds is None else seeds
    if seeds < 1:
        raise BadInput(f"--seeds is {seeds}: expected at least 1.")
    return Plan(name, preset, seeds, tuple(t for t in known if t in tasks or not tasks))


def run(asked: Plan, folder: str | Path, *, resume: bool = False, figures: bool = True) -> Path:
    """Runs what is not finished, writes the report, and returns its path."""
    folder = Path(folder)
    jobs = asked.jobs()
    prepare(jobs, asked)
    begin(folder, asked, resume)
    try:
        run_jobs(jobs, folder)
    except (Stopped, KeyboardInterrupt):  # a measurement knows no signals
        raise Stopped(f"stopped. Go on with the same command and --resume; {folder} has what is finished.") from None
    results = collect(asked, folder)
    write_compact(folder / "results.json", compact(asked, results, conclusions(asked, results)))
    return write_report(folder, folder / "report.html", folder / "figures" if figures else None, png=False)


def prepare(jobs: dict[str, Job], asked: Plan) -> None:
    """What would end a later job for want of data or a device is said now."""
    if asked.preset == "gpu":
        import jax

        if jax.default_backend() == "cpu":
            raise BadInput(
                "the preset gpu needs an accelerator, and JAX sees only a CPU. Write --preset cpu, or install jax[cuda]."
            )
    seen = set()
    for job in jobs.values():
        if isinstance(job, Train) and job.config.task not in seen:
            seen.add(job.config.task)
            try:
                all_tasks.build(job.config)
            except BadInput as error:
                others = [t for t in asked.tasks if t != job.config.task]
                hint = f" Or leave it out: --tasks {' '.join(others)}." if others else ""
                raise BadInput(f"{job.config.task}: {error}{hint}") from None


def begin(folder: Path, asked: Plan, resume: bool) -> None:
    path = folder / "study.json"
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise BadInput(f"{folder} exists, and is no study: write --folder with another name.")
        folder.mkdir(parents=True, exist_ok=True)
    elif not resume:
        raise BadInput(f"{folder} exists: write --resume to go on with it, or --folder with another name.")
    else:
        before = read_plan(folder)
        for name in ("study", "preset", "tasks"):
            if getattr(before, name) != getattr(asked, name):
                given, now = (
                    " ".join(x) if isinstance(x, tuple) else x for x in (getattr(before, name), getattr(asked, name))
                )
                raise BadInput(
                    f"{folder} is a study with {name} {given}, and now it is {now}: write --folder with another name."
                )
        if asked.seeds < before.seeds:
            raise BadInput(
                f"{folder} has {before.seeds} seeds, and now it is {asked.seeds}: write --seeds {before.seeds}, or more."
            )
    for name in ("runs", "measurements"):
        (folder / name).mkdir(exist_ok=True)
    runs.write_json(path, asked.to_json())


def read_plan(folder: Path) -> Plan:
    found = load.small(folder, "study.json")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BadInput(f"{folder / 'study.json'} is of another format; this version of pergrad reads format {FORMAT}.")
    name, preset, seeds, names = (found.get(k) for k in ("study", "preset", "seeds", "tasks"))
    fits = (
        isinstance(seeds, int)
        and 0 < seeds < 1000
        and isinstance(names, list)
        and all(isinstance(t, str) for t in names)
    )
    if not (fits and isinstance(name, str) and isinstance(preset, str)):
        raise BadInput(f"{folder / 'study.json'} is damaged.")
    return plan(name, preset, seeds, tuple(names or ()))


def run_jobs(jobs: dict[str, Job], folder: Path) -> None:
    unfinished = {name: job for name, job in jobs.items() if not finished(name, job, folder)}
    done = len(jobs) - len(unfinished)
    if done:
        say(f"{done} of {len(jobs)} jobs are finished")

    def announce(names: Sequence[str]) -> None:
        nonlocal done
        done += len(names)
        say(f"[{done}/{len(jobs)}] {names[0]}" + (f" and {len(names) - 1} more, together" if len(names) > 1 else ""))

    training_jobs = [(name, job) for name, job in unfinished.items() if isinstance(job, Train)]
    for members in together.groups([job.config for _, job in training_jobs]):
        chosen = [training_jobs[k] for k in members]
        announce([name for name, _ in chosen])
        folders = [folder / "runs" / name for name, _ in chosen]
        if chosen[0][1].config.task in together.TASKS:
            together.run([job.config for _, job in chosen], folders)
            continue
        try:
            training.run(chosen[0][1].config, folders[0], resume=True, show=sys.stderr.isatty())
        except Diverged as error:
            say(str(error).splitlines()[0])
    for name, job in unfinished.items():
        if isinstance(job, Measure):
            announce([name])
            found = {"job": job.place, "result": job.call(), "environment": runs.environment()}
            runs.write_json(folder / "measurements" / f"{name}.json", found)


def finished(name: str, job: Job, folder: Path) -> bool:
    """Ended for good: diverged runs would diverge again."""
    if isinstance(job, Measure):
        return (folder / "measurements" / f"{name}.json").exists()
    path = folder / "runs" / name / "status.json"
    return path.exists() and runs.read_json(path).get("state") in ("done", "diverged")


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------- reporting


def collect(asked: Plan, folder: Path) -> Results:
    """What there is of the grid, read as data."""
    found = []
    for name, job in asked.jobs().items():
        if isinstance(job, Train):
            if (folder / "runs" / name / "config.json").exists():
                one = load.run(folder / "runs" / name)
                if one.config != job.config:
                    raise BadInput(
                        f"{one.folder} is of another configuration than this study's: start it anew in another --folder."
                    )
                found.append(Result(name, job.place, run=one))
        elif (folder / "measurements" / f"{name}.json").exists():
            content = load.small(folder / "measurements", f"{name}.json")
            values = content.get("result") if isinstance(content, dict) else None
            if isinstance(values, dict):
                environment = load.as_dict(content.get("environment"))
                found.append(Result(name, job.place, values=values, environment=environment))
    return Results(found)


def write_report(folder: Path, out: Path, figures: Path | None = None, png: bool = True) -> Path:
    """The report of a study folder, from what is finished."""
    folder = Path(folder)
    asked = read_plan(folder)
    study = module(asked.study)
    results = collect(asked, folder)
    found = conclusions(asked, results)
    unfinished = len(asked.jobs()) - sum(r.run is None or r.run.ended for r in results.items)
    lead = f"Preset {asked.preset}, {asked.seeds} seed{'s' * (asked.seeds != 1)}, {', '.join(asked.tasks)}."
    machines = list(dict.fromkeys(report.machine(r.environment) for r in results.items if r.environment))
    lead += f" Measured on: {'; '.join(machines[:3])}." if machines else ""
    lead += f" {unfinished} of {len(asked.jobs())} jobs are not finished." if unfinished else ""
    doc = (study.__doc__ or "").strip()
    question, _, about = doc.partition("\n\n")
    sections = [
        Section("Claims", lead, [claims_table(found.claims)]),
        Section("Results", " ".join(about.split()), [*found.blocks]),
    ]
    shown = [folder / "runs" / name for name in found.show]
    title = f"{asked.study}: {question[0].lower()}{question[1:]}"
    return report.write(shown, out, title=title, before=sections, figures=figures, png=png)


def conclusions(asked: Plan, results: Results) -> Findings:
    """The study's findings, out of numbers that may be anyone's."""
    if not results.items:
        return Findings([], [], [])
    try:
        found = module(asked.study).findings(results)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        if all(r.values is None for r in results.items):
            raise
        raise BadInput(
            f"the measurements are not those of the study {asked.study} ({repr(error)[:80]}): they are damaged."
        ) from error
    return dataclasses.replace(found, claims=[judged_at(claim, asked.preset) for claim in found.claims])


def judged_at(claim: Claim, preset: str) -> Claim:
    """`smoke` tests that all works, and nothing else."""
    return dataclasses.replace(claim, verdict="not tested") if preset == "smoke" else claim


def claims_table(claims: Sequence[Claim]) -> Table:
    rows: list[list[Any]] = [[c.claim, c.published, c.measured, c.verdict, c.rule, c.scale] for c in claims]
    columns = ["claim", "published", "measured here", "verdict", "agrees if", "scale here"]
    papers = "; ".join(dict.fromkeys(c.paper for c in claims))
    caption = f"Claims of {papers}. A verdict is about the scale in the last column, and no other."
    return Table("Published and measured", columns, rows, caption)


def compact(asked: Plan, results: Results, found: Findings) -> dict[str, Any]:
    """All of a study in one small file: what plots and tables are made of."""
    jobs = []
    for r in results.items:
        entry: dict[str, Any] = {"place": r.place}
        if r.run is None:
            entry["result"] = rounded(r.values)
        else:
            last = {k: v[-1] for k, v in r.run.evals.items() if len(v)}
            entry |= {"state": r.run.state, "parameters": all_tasks.parameters(r.run.config), "final": rounded(last)}
            entry["loss"] = rounded(thin(r.run.train["loss"], points=CURVE)[0])
        jobs.append(entry)
    tables = [
        {"title": t.title, "columns": t.columns, "rows": t.rows}
        for t in (b if isinstance(b, Table) else b.table() for b in found.blocks)
    ]
    return {
        **asked.to_json(),
        "environment": runs.environment(),
        "claims": [dataclasses.asdict(claim) for claim in found.claims],
        "tables": tables,
        "jobs": jobs,
    }


def write_compact(path: Path, content: dict[str, Any]) -> None:
    """As JSON with a line for each job, claim and table: small, and differences between versions can be read."""
    entries = []
    for name, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(runs.plain(each), ensure_ascii=False) for each in value)
            entries.append(f"{json.dumps(name)}: [\n  {rows}\n ]")
        else:
            entries.append(f"{json.dumps(name)}: {json.dumps(runs.plain(value), ensure_ascii=False)}")
    beside = path.with_name(path.name + ".partial")
    beside.write_text("{\n " + ",\n ".join(entries) + "\n}\n", "utf-8")
    os.replace(beside, path)


def rounded(x: Any) -> Any:
    """Four digits."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, list | tuple | np.ndarray):
        return [rounded(v) for v in x]
    if isinstance(x, float | np.floating):
        return float(f"{x:.4g}") if math.isfinite(x) else None
    return x


__all__ = ["DEFAULT_SEEDS", "STUDIES", "Plan", "module", "plan", "run", "write_report"]
