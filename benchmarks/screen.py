"""What a run shows on the screen: ratios, bars, failures."""

import itertools

from .columns import JUDGED
from .record import bars

MIB = 2**20
WIDTH = 160  # of a table at least: a narrow terminal wraps it, nothing is cut


def _cell(column, base):
    """Time, quartiles, temporary memory and, of JAX, trace + compile: as they are of the base, else × the base's."""
    if "ratios" not in column:
        return "failed"
    if base:
        median, q1, q3 = (column["seconds"][k] * 1e3 for k in ("median", "q1", "q3"))
        lines = [f"{median:.1f} ms", f"{q1:.1f}–{q3:.1f}", f"{column['memory']['temporary'] / MIB:.1f} MiB"]
        return "\n".join([*lines, f"{column['build_seconds']['median']:.2f} s"] if "build_seconds" in column else lines)
    ratios = column["ratios"]
    time = ratios["time"]
    lines = [f"{time['median']:.2f}", f"{time['q1']:.2f}–{time['q3']:.2f}", f"{ratios['memory']:.2f}"]
    return "\n".join([*lines, f"{ratios['compile']['median']:.2f}"] if "compile" in ratios else lines)


def _agreement(check):
    if "error" in check:
        return "not compared"
    lines = [f"{what} {error:.0e}" for what, error in check["errors"].items()]
    return "\n".join(lines if check["agrees"] else [*lines, f"WRONG: over {check['limit']:.0e}"])


def _grid(title, rows, key, last=None):
    """A table of one group of columns, and what failed in it."""
    rows = [r for r in rows if key in r]
    if not rows:
        return []
    names = list(rows[0][key])
    head = [
        "",
        *(n.replace(" + ", "\n+ ").replace(" ", "\n", "+" not in n) for n in names),
        *([last[0]] if last else []),
    ]
    body = [
        [
            f"{r['row']}\nbatch of {r['batch_size']}",
            *(_cell(r[key][n], n == names[0]) for n in names),
            *([last[1](r)] if last else []),
        ]
        for r in rows
    ]
    print_table(title, head, body)
    return [[r["row"], n, c["error"]] for r in rows for n, c in r[key].items() if "error" in c]


def show(rows: list[dict], peers: dict) -> None:
    """Tables of ratios (time and quartiles, temporary memory, trace + compile), of what failed, and of the bars."""
    twin = "relative error\nagainst the twin", lambda r: _agreement(r["agreement"])
    failures = _grid("time, its quartiles, temporary memory, trace + compile: × plain", rows, "columns", twin)
    failures += _grid("a whole training step: the same, × the first", rows, "steps")
    failures += [[r["row"], "agreement", r["agreement"]["error"]] for r in rows if "error" in r["agreement"]]
    theirs = peers.get("rows", [])
    failures += _grid("in PyTorch: time, its quartiles, peak memory without results: × plain", theirs, "columns")
    failures += [[r["row"], "PyTorch", r["error"]] for r in theirs if "error" in r]
    failures += [[r["row"], n, "WRONG"] for r in theirs for n, a in r.get("agreement", {}).items() if not a["agrees"]]
    if "skipped" in peers:
        print(f"without PyTorch's side: {peers['skipped']}")
    if failures:
        print_table("what failed", ["row", "column", "error"], failures)
    if peers.get("findings"):
        found = [[f["what"], f.get("error") or ("WRONG" if f["wrong"] else "right")] for f in peers["findings"]]
        print_table("cases known to be delicate, in PyTorch", ["case", "error"], found)
    verdicts = [
        [
            b["row"],
            b["quantity"],
            f"≤ {b['bar']}",
            "" if b["measured"] is None else f"{b['measured']:.3f}",
            b["verdict"],
        ]
        for b in bars(rows)
    ]
    print_table(f"bars of {JUDGED}, and of a step by Eve", ["row", "quantity", "bar", "measured", ""], verdicts)


def print_table(title, head, body):
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n{_plain_table(head, body)}")
        return
    several_lines = any("\n" in cell for line in body for cell in line)
    table = Table(title=title, title_justify="left", show_lines=several_lines)
    for name in head:
        table.add_column(name, no_wrap=name != "error")
    for line in body:
        table.add_row(*line)
    Console(width=max(Console().width, WIDTH)).print(table)


def _plain_table(head, body):
    lines = [[cell.split("\n") for cell in line] for line in [head, *body]]
    widths = [max(len(part) for line in lines for part in line[i]) for i in range(len(head))]
    out = []
    for line in lines:
        for parts in itertools.zip_longest(*line, fillvalue=""):
            out.append("  ".join(part.ljust(w) for part, w in zip(parts, widths)).rstrip())
        out.append("")
    return "\n".join(out)
