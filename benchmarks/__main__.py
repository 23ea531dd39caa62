"""`python -m benchmarks`: every row under every column, the table on the screen and the record in a file."""

import argparse
import os
from pathlib import Path


def arguments(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help="rows or families, as in transformer,cnn,lstm,mlp", metavar="ROW,…")
    parser.add_argument("--columns", help="besides plain (default: all)", metavar="COLUMN,…")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--size", choices=("small", "large"), help="default: small on cpu, large on gpu")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of timing (default 15)")
    parser.add_argument("--compile-repeats", type=int, default=3, help="rounds of compiling (default 3)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<device>-<date>.json")
    options = parser.parse_args(argv)
    options.size = options.size or {"cpu": "small", "gpu": "large"}[options.device]
    options.only = [name.strip() for name in options.only.split(",")] if options.only else None
    options.columns = [name.strip() for name in options.columns.split(",")] if options.columns else None
    if min(options.repeats, options.compile_repeats) < 1:
        parser.error("--repeats and --compile-repeats must be at least 1")
    return parser, options


def measure_row(row, columns, repeats, compile_repeats):
    from . import agreement, measure
    from .columns import PLAIN

    loss, params, batch = row.build()
    args = (params, batch)
    # A lambda of its own each time: no cache that is keyed by the loss can carry over.
    makers = {name: (lambda make=make: make(lambda *a: loss(*a))) for name, make in columns.items()}
    compiled, builds, errors = measure.compile_all(makers, args, compile_repeats)
    seconds, run_errors = measure.run_all(compiled, args, repeats)
    errors |= run_errors

    working = {name: f for name, f in compiled.items() if name not in errors}
    out = {}
    for name in columns:
        if name in errors:
            out[name] = {"error": errors[name]}
            continue
        total = [sum(b.values()) for b in builds[name]]
        out[name] = {
            "seconds": measure.summary(seconds[name]),
            "build_seconds": measure.summary(total),
            "memory": measure.memory(compiled[name]),
            "raw": {"seconds": seconds[name], "build": builds[name]},
        }
    if PLAIN not in errors:
        base = out[PLAIN]
        base_builds = [sum(b.values()) for b in builds[PLAIN]]
        for name, entry in out.items():
            if "error" in entry:
                continue
            entry["ratios"] = {
                "time": measure.ratios(seconds[name], seconds[PLAIN]),
                "memory": _over(entry, base, "temporary"),
                "memory_with_results": _over(entry, base, "temporary", "results"),
                "compile": measure.ratios([sum(b.values()) for b in builds[name]], base_builds),
            }
    return {
        "row": row.name,
        "batch_size": row.batch_size,
        "settings": row.settings,
        "bars": row.bars,
        "columns": out,
        "agreement": agreement.compare(working, args, row.settings["dtype"]),
    }


def _over(entry, base, *kinds):
    mine, plain = (sum(e["memory"][kind] for kind in kinds) for e in (entry, base))
    return mine / max(plain, 1)


def main(argv=None):
    parser, options = arguments(argv)
    # Before JAX is imported.
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[options.device]
    from . import models, record
    from .columns import COLUMNS, PLAIN

    try:
        machine = record.machine()
    except (RuntimeError, AssertionError):  # JAX's ways to say so
        parser.error(f"JAX finds no {options.device} here")
    try:
        rows = models.select(options.size, options.only)
    except ValueError as error:
        parser.error(str(error))
    for name in options.columns or ():
        if name not in COLUMNS:
            parser.error(f"no column {name!r}; there are {', '.join(COLUMNS)}")
    columns = {n: c for n, c in COLUMNS.items() if not options.columns or n in (PLAIN, *options.columns)}

    results = []
    for i, row in enumerate(rows):
        print(f"[{i + 1}/{len(rows)}] {row.name}, {len(columns)} columns …", flush=True)
        results.append(measure_row(row, columns, options.repeats, options.compile_repeats))
    record.show(results)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    path = record.write(results, settings, machine, options.out)
    print(f"written: {os.path.relpath(path)}")
    wrong = [r["row"] for r in results if r["agreement"].get("agrees") is False]
    if wrong:
        raise SystemExit(f"WRONG NUMBERS in {', '.join(wrong)}: see the last column of the table")


if __name__ == "__main__":
    main()
