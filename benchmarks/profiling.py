"""`python -m benchmarks profile ROW …`: where the time above the plain gradient goes.

Twice, for mean + second moment: by *leaf* (the second moment of one group of parameters at a time, against the mean of
all), and by *operation* (the compiler's operations as the profiler times them, added up by what each is for, beside
those of the plain gradient). Events of several threads or streams are added: parts are of work, not of time.
"""

import argparse
import collections
import json
import re
import tempfile
from pathlib import Path

import jax

import pergrad as pg
from pergrad.statistics import Statistic

from . import measure, models, record, screen, timing
from .columns import COLUMNS, JUDGED, PLAIN


class SecondMomentOf(Statistic):
    """E g² of some leaves alone."""

    name = "second_moment() of some leaves"

    def __init__(self, chosen):
        self.chosen, self.reductions = chosen, pg.second_moment().reductions

    def leaves(self, names):
        return self.chosen

    def finish(self, outcome):
        found = outcome.leaves[self.reductions[0]]
        return [found[k] for k in self.chosen]


def groups(params) -> dict[str, list[int]]:
    """Leaves by name, biases apart from kernels: `['layers']['qkv']['kernel']` is one."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    out = collections.defaultdict(list)
    for k, name in enumerate(names):
        out[re.sub(r"\[\d+\]", "[…]", name)].append(k)
    return dict(out)


def by_leaf(row, repeats):
    """Milliseconds and bytes above the mean alone, for each group of leaves and for all."""
    loss, params, batch = row.build()
    makers = {
        "mean": lambda: COLUMNS["mean"](lambda *a: loss(*a)),
        JUDGED: lambda: COLUMNS[JUDGED](lambda *a: loss(*a)),
    }
    for name, chosen in groups(params).items():
        stats = {"g": pg.mean(), "g2": SecondMomentOf(chosen)}
        makers[name] = lambda stats=stats: pg.value_and_stats(lambda *a: loss(*a), stats)
    measured, _ = measure.measure(makers, dict.fromkeys(makers, (params, batch)), repeats)
    base = measured["mean"]
    out = []
    for name, entry in measured.items():
        if name == "mean" or "error" in entry:
            continue
        pairs = zip(entry["raw"]["seconds"], base["raw"]["seconds"])
        gap = timing.summary([mine - theirs for mine, theirs in pairs])
        more = entry["memory"]["temporary"] - base["memory"]["temporary"]
        out.append({"leaf": name, "seconds": gap, "bytes": more})
    return sorted(out, key=lambda e: -e["seconds"]["median"])


def by_operation(row, calls=10):
    """Seconds per call of each kind of operation, plain and with mean + second moment; the largest difference first."""
    loss, params, batch = row.build()
    spent = {}
    for name in (PLAIN, JUDGED):
        compiled = jax.jit(COLUMNS[name](loss)).lower(params, batch).compile()
        spent[name] = collections.Counter()
        sources = operations(compiled.as_text())
        for operation, seconds in traced(compiled, (params, batch), calls).items():
            if operation in sources:
                spent[name][sources[operation]] += seconds
    lines = {line for s in spent.values() for line in s}
    out = [{"source": line, PLAIN: spent[PLAIN][line], JUDGED: spent[JUDGED][line]} for line in lines]
    return sorted(out, key=lambda e: e[PLAIN] - e[JUDGED])


def traced(compiled, args, calls) -> collections.Counter:
    """Seconds per call of each of the compiled module's operations."""
    module = re.match(r"HloModule ([\w.\-]+)", compiled.as_text())[1]
    jax.block_until_ready(compiled(*args))
    spent = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(compiled(*args))
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for event in (e for line in plane.lines for e in line.events):
                    stats = dict(event.stats)
                    if "hlo_op" in stats and stats.get("hlo_module", module) == module:
                        spent[stats["hlo_op"]] += event.duration_ns * 1e-9 / calls
    return spent


def operations(text: str) -> dict[str, str]:
    """What each operation of a compiled module is for: a line of pergrad, or of the model, by the primitive alone.

    (pergrad runs the model's operations again, so that their lines are not to be had.) Loops and calls are left out: what
    they run is in the trace too.
    """
    frames = _frames(text)
    out = {}
    for match in re.finditer(r"^\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$", text, re.MULTILINE):
        name, kind, rest = match.groups()
        if kind in ("while", "conditional", "call", "parameter", "tuple", "get-tuple-element"):
            continue
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        named = re.search(r'op_name="(?:[^"]*/)?([^"]+)"', rest)
        ours = frames.get(int(frame[1])) if frame else None
        out[name] = ours or (f"model: {named[1]}" if named else f"compiler: {kind}")
    return out


def _frames(text: str) -> dict[int, str]:
    """The innermost frame of each stack of the module's header, where it is pergrad's own and does not replay the model."""

    def table(title):
        found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return dict(line.split(" ", 1) for line in found[1].splitlines()) if found else {}

    files, functions, locations = table("FileNames"), table("FunctionNames"), table("FileLocations")
    out = {}
    for number, frame in table("StackFrames").items():
        at = locations[re.search(r"file_location_id=(\d+)", frame)[1]]
        file, function, line = (re.search(rf"{k}=(\d+)", at)[1] for k in ("file_name_id", "function_name_id", "line"))
        path, name = Path(files[file].strip('"')), functions[function].strip('"')
        if "pergrad" in path.parts and path.name not in ("compat.py", "surgery.py"):
            out[int(number)] = f"{path.name}:{line} {name}"
    return out


def main(argv):
    from .__main__ import add_device, settle_device

    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description=__doc__)
    parser.add_argument("rows", nargs="+", metavar="ROW", help="as gpt-124m-t256, or a family of rows")
    add_device(parser)
    parser.add_argument("--repeats", type=int, default=7, help="rounds of timing (default 7)")
    parser.add_argument("--out", type=Path, help="a file for the numbers, as JSON")
    options = parser.parse_args(argv)
    settle_device(options)
    results = []
    for row in models.select(options.size, options.rows):
        leaves, lines = by_leaf(row, options.repeats), by_operation(row)
        results.append({"row": row.name, "settings": row.settings, "leaves": leaves, "operations": lines})
        cells = [
            [
                e["leaf"],
                *(f"{e['seconds'][k] * 1e3:+.2f}" for k in ("median", "q1", "q3")),
                f"{e['bytes'] / 2**20:+.1f}",
            ]
            for e in leaves
        ]
        head = ["leaf", "ms", "q1", "q3", "MiB"]
        screen.print_table(f"{row.name}: second moment of one leaf, above the mean of all", head, cells)
        cells = [[e["source"], *(f"{e[k] * 1e3:.2f}" for k in (PLAIN, JUDGED))] for e in lines[:25]]
        screen.print_table(f"{row.name}: ms by operation, the largest difference first", ["", PLAIN, JUDGED], cells)
    if options.out:
        found = {"machine": record.machine(), "versions": record.versions(), **record.commit(), "rows": results}
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
