"""`python -m benchmarks`: every row under every column, the table on the screen and the record in a file.

`python -m benchmarks render FILE …` puts records into the README; `python -m benchmarks profile ROW …` says where the
time above the plain gradient goes.
"""

import argparse
import os
import sys
import time
from pathlib import Path


def arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add_device(parser)
    parser.add_argument("--only", help="rows or families, as in gpt,cnn,lstm,mlp", metavar="ROW,…")
    parser.add_argument("--columns", help="besides plain (default: all)", metavar="COLUMN,…")
    parser.add_argument("--repeats", type=int, help="rounds of timing (default: 7 on cpu, 15 on gpu)")
    parser.add_argument("--compile-repeats", type=int, help="rounds of compiling (default: 1 on cpu, 3 on gpu)")
    parser.add_argument("--no-steps", action="store_true", help="leave out whole training steps")
    parser.add_argument("--peers", metavar="PYTHON|none", help="the Python that has PyTorch (default: this one)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<device>-<date>.json")
    options = parser.parse_args(argv)
    settle_device(options)
    options.repeats = options.repeats or {"cpu": 7, "gpu": 15}[options.device]
    options.compile_repeats = options.compile_repeats or {"cpu": 1, "gpu": 3}[options.device]
    options.only = [name.strip() for name in options.only.split(",")] if options.only else None
    options.columns = [name.strip() for name in options.columns.split(",")] if options.columns else None
    if min(options.repeats, options.compile_repeats) < 1:
        parser.error("--repeats and --compile-repeats must be at least 1")
    return parser, options


def add_device(parser):
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--size", choices=("small", "large"), help="default: small on cpu, large on gpu")


def settle_device(options):
    """Must come before JAX looks for devices."""
    import jax

    options.size = options.size or {"cpu": "small", "gpu": "large"}[options.device]
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[options.device])
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # vmap stacks gradients


def warm_up(columns):
    """First uses import modules and fill caches: on a model that takes no time, so that the first row does not pay."""
    from . import measure, models

    loss, *args = models.mlp(sizes=(4, 4, 2), batch=8, dtype="float32")
    makers = {name: (lambda make=make: make(loss)) for name, make in columns.items()}
    measure.compile_all(makers, dict.fromkeys(makers, args), 1)


def measure_row(row, columns, options):
    import jax

    from . import agreement, measure
    from .columns import STEPS

    # On a GPU the compiler remembers which algorithms it chose. On a CPU it keeps nothing, and is spared the round.
    common = {"repeats": options.repeats, "uncounted": options.device == "gpu"}
    loss, params, batch = row.build()
    fresh = lambda: lambda *a: loss(*a)  # of its own each time: no cache that is keyed by the loss can carry over
    makers = {name: (lambda make=make: make(fresh())) for name, make in columns.items()}
    args = dict.fromkeys(makers, (params, batch))
    measured, compiled = measure.measure(makers, args, compile_repeats=options.compile_repeats, **common)
    out = {
        "row": row.name,
        "batch_size": row.batch_size,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "settings": row.settings,
        "bars": row.bars,
        "columns": measured,
        "agreement": agreement.compare(compiled, (params, batch), row.settings["dtype"]),
    }
    if row.steps and not options.no_steps:
        copied = lambda: jax.tree.map(lambda x: x.copy(), params)  # a step gives its parameters away
        made = {name: make(fresh()) for name, make in STEPS.items()}
        starts = {name: (start(copied()), batch) for name, (_, start) in made.items()}
        makers = {name: (lambda make=make: make(fresh())[0]) for name, make in STEPS.items()}
        out["steps"], _ = measure.measure(makers, starts, donate=(0,), **common)
    return out


def run(argv):
    parser, options = arguments(argv)
    from . import models, peers, record, screen
    from .columns import COLUMNS, PLAIN

    try:
        rows = models.select(options.size, options.only)
    except ValueError as error:
        parser.error(str(error))
    for name in options.columns or ():
        if name not in COLUMNS:
            parser.error(f"no column {name!r}; there are {', '.join(COLUMNS)}")
    columns = {n: c for n, c in COLUMNS.items() if not options.columns or n in (PLAIN, *options.columns)}

    start, tree = time.monotonic(), record.commit()  # what is committed during the run is not what is measured
    # PyTorch first, in a process that is gone when JAX takes the memory of the device.
    theirs = {"skipped": "not asked for"}
    if options.peers != "none" and not options.columns:
        described = [{"row": r.name, "family": r.family, "settings": r.settings} for r in rows]
        theirs = peers.run(options.peers, described, options.device, options.repeats)
    try:
        machine = record.machine()
    except (RuntimeError, AssertionError):  # JAX's ways to say so
        parser.error(f"JAX finds no {options.device} here")

    path = options.out or record.new_path(options.device)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "peers")}
    results = []
    warm_up(columns)
    for i, row in enumerate(rows):
        print(f"[{i + 1}/{len(rows)}] {row.name}, {len(columns)} columns …", flush=True)
        results.append(measure_row(row, columns, options))
        record.write(path, results, theirs, settings, machine, tree)  # after each row: a crash loses one row, not all
    screen.show(results, theirs)
    print(f"written: {os.path.relpath(path)}, after {time.monotonic() - start:.0f} s")
    wrong = [r["row"] for r in results if r["agreement"].get("agrees") is False]
    if wrong:
        raise SystemExit(f"WRONG NUMBERS in {', '.join(wrong)}: see the last column of the table")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["render"]:
        from . import render

        render.main(argv[1:])
    elif argv[:1] == ["profile"]:
        from . import profiling

        profiling.main(argv[1:])
    else:
        run(argv)


if __name__ == "__main__":
    main()
