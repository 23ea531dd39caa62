"""`python -m benchmarks render FILE …`: the tables and the plot of the README, from records alone.

Files of one machine make one section. Where two of them have the same row, the later file on the command line counts; with
several files, every line names its own.
"""

import argparse
import json
import re
from pathlib import Path

from . import plot

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks: written by `python -m benchmarks render` -->", "<!-- /benchmarks -->"

PLAIN, JUDGED = "plain", "mean + second moment"  # as in columns.py, which needs JAX
PUBLISHED = {"cnn": 1.20, "lstm": 1.00, "translation": 1.29, "pixelcnn": 4.54}  # a step by Eve over Adam's, TPU v3-8

# Who is compared at mean + second moment: heading -> (whose record, column).
COMPARED = {
    "pergrad": ("rows", JUDGED),
    "jax.vmap": ("rows", "vmap"),
    "optax": ("rows", "optax microbatches"),
    "torch.func": ("peers", "torch.func"),
    "Opacus": ("peers", "Opacus"),
    "BackPACK": ("peers", "BackPACK SumGradSquared"),
}
STATISTICS = {
    "mean": ("rows", "mean"),
    "mean, second moment": ("rows", JUDGED),
    "mean, second moment, sign": ("rows", "mean + second + sign"),
    "norms": ("rows", "norms"),
    "clipped mean": ("rows", "clipped mean"),
    "Opacus' ghost clipping": ("peers", "Opacus ghost"),
}


class Section:
    """All rows of one machine, each with the record and the file that it is from."""

    def __init__(self, machine):
        self.machine, self.files, self.lines, self.findings = machine, {}, {}, []

    def add(self, path, record):
        self.files[path] = record
        theirs = {r["row"]: r for r in record["peers"].get("rows", [])}
        self.findings = record["peers"].get("findings", self.findings)
        for row in record["rows"]:
            self.lines[row["row"]] = {"file": path, "rows": row, "peers": theirs.get(row["row"])}


def sections(paths) -> list[Section]:
    out = {}
    for path in paths:
        record = json.loads(path.read_text())
        machine = record["machine"]
        key = machine["device"], machine["cores"] if machine["platform"] == "cpu" else machine["devices"]
        out.setdefault(key, Section(machine)).add(path, record)
    return list(out.values())


def found(line, whose, column) -> dict:
    """The record of one cell: with "ratios", or with "error"; empty if it was not run."""
    row = line[whose]
    if row is None or "error" in row:
        return {} if row is None else row
    entry = row["columns"].get(column, {})
    check = row["agreement"].get(column, {}) if whose == "peers" else {}
    return {"error": "wrong numbers: see the file"} if check.get("agrees") is False else entry


class Notes:
    """Footnotes of a table: equal texts share a number."""

    def __init__(self):
        self.texts = []

    def mark(self, text):
        if text not in self.texts:
            self.texts.append(text)
        return f"<sup>{self.texts.index(text) + 1}</sup>"

    def __str__(self):
        return " ".join(f"<sup>{k + 1}</sup> {text.rstrip('.')}." for k, text in enumerate(self.texts))


def ratio(value) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def cell(entry, notes, *quantities) -> str:
    if "ratios" not in entry:
        return f"fails {notes.mark(_short(entry['error']))}" if "error" in entry else "–"
    values = (entry["ratios"][q] for q in quantities)
    return " / ".join(ratio(v["median"] if isinstance(v, dict) else v) for v in values)


def _short(error):
    """One line that Markdown leaves alone."""
    return "`" + re.sub(r"\s+", " ", error).replace("`", "'").replace("|", "\\|") + "`"


def table(head, body) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *body])


def milliseconds(line, whose):
    entry = found(line, whose, PLAIN)
    return _milliseconds(entry["seconds"]["median"]) if "seconds" in entry else "–"


def _milliseconds(seconds):
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def labels(section) -> dict[str, str]:
    """A name for each row; with several files, a letter for each row's file."""
    letters = {path: f" [{chr(97 + k)}]" if len(section.files) > 1 else "" for k, path in enumerate(section.files)}
    return {name: f"{name}{letters[line['file']]}" for name, line in section.lines.items()}


def comparison(section) -> str:
    notes, names = Notes(), labels(section)
    shown = {h: at for h, at in COMPARED.items() if any(found(line, *at) for line in section.lines.values())}
    theirs = any(line["peers"] for line in section.lines.values())
    head = [
        "model",
        "plain, ms" + (" (PyTorch's)" if theirs else ""),
        *(h.replace("pergrad", "**pergrad**") for h in shown),
    ]
    body = []
    for name, line in section.lines.items():
        plain = milliseconds(line, "rows") + (f" ({milliseconds(line, 'peers')})" if theirs else "")
        cells = [cell(found(line, *at), notes, "time", "memory_with_results") for at in shown.values()]
        body.append([names[name], plain, f"**{cells[0]}**", *cells[1:]])
    return f"{table(head, body)}\n\n{notes}".strip()


def statistics(section) -> str:
    notes, names = Notes(), labels(section)
    shown = {h: at for h, at in STATISTICS.items() if any(found(line, *at) for line in section.lines.values())}
    body = []
    for name, line in section.lines.items():
        judged = found(line, "rows", JUDGED)
        build = ratio(judged["ratios"]["compile"]["median"]) if "ratios" in judged else "–"
        body.append([names[name], *(cell(found(line, *at), notes, "time") for at in shown.values()), build])
    return f"{table(['model', *shown, 'compile time'], body)}\n\n{notes}".strip()


def steps(section) -> str:
    names, notes, body = labels(section), Notes(), []
    for name, line in section.lines.items():
        entries = line["rows"].get("steps")
        if not entries or "seconds" not in entries["adam"]:
            continue
        adam = _milliseconds(entries["adam"]["seconds"]["median"])
        measured = [cell(entries[n], notes, "time") for n in ("eve", "micro_adam_var")]
        published = PUBLISHED.get(name.split("-")[0])
        body.append([names[name], adam, *measured, f"{published:.2f}" if published else "–"])
    head = ["model", "Adam, ms", "Eve", "MicroAdamVar", "Eve, as published"]
    return f"{table(head, body)}\n\n{notes}".strip() if body else ""


def described(section) -> str:
    """The machine, the versions, and the files that all numbers of the section are from."""
    machine = section.machine
    where = (
        f"{machine['cores']} cores of an {machine['cpu']}"
        if machine["platform"] == "cpu"
        else f"one {machine['device']}"
    )
    versions = {}
    for record in section.files.values():
        ours, theirs = record["versions"], record["peers"].get("versions", {})
        for title, version in (
            ("JAX", ours["jax"]),
            ("optax", ours["optax"]),
            ("PyTorch", theirs.get("torch")),
            ("Opacus", theirs.get("opacus")),
            ("BackPACK", theirs.get("backpack-for-pytorch")),
        ):
            if version:
                versions.setdefault(title, {})[version] = None
    letters = [f"[{chr(97 + k)}] " if len(section.files) > 1 else "" for k in range(len(section.files))]
    files = ", ".join(
        f"{letter}[`{_relative(path)}`]({_relative(path)})"
        + (" (of a tree with uncommitted changes)" if r["dirty"] else "")
        for letter, (path, r) in zip(letters, section.files.items())
    )
    software = ", ".join(f"{title} {' and '.join(v)}" for title, v in versions.items())
    return f"**On {where}.** Every number from {files}; {software}."


def _relative(path):
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def block(parts: list[Section]) -> str:
    out = []
    for section in parts:
        name = _relative(next(iter(section.files)).with_suffix(""))
        out += [
            described(section),
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">'
            f'<img alt="Time and memory of mean + second moment, × the plain gradient" src="{name}-light.svg"></picture>',
            "Mean and second moment of the per-example gradients: time / peak memory, × the same framework's plain "
            "mini-batch gradient in the same run. (Memory is what is allocated in the call, results included.)",
            comparison(section),
            "Other statistics by pergrad: time × plain, and what compiling mean + second moment takes × compiling plain.",
            statistics(section),
        ]
        if trained := steps(section):
            out += ["A whole training step: time × that of `optax.adam` on the plain gradient.", trained]
        if wrong := [f["what"] for f in section.findings if f.get("wrong")]:
            out += ["Tried again in that run, and wrong without a word: " + "; ".join(wrong) + "."]
    return "\n\n".join(part for part in out if part)


def written(readme: str, text: str) -> str:
    if BEGIN not in readme or END not in readme:
        raise SystemExit(f"README.md has no block between {BEGIN} and {END}")
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}"


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks render", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="records, as benchmarks/results/*.json")
    parser.add_argument("--print", action="store_true", help="print the block; leave README and plots alone")
    options = parser.parse_args(argv)
    parts = sections(options.files)
    text = block(parts)
    if options.print:
        print(text)
        return
    for section in parts:
        stem = next(iter(section.files)).with_suffix("")
        series = {h: {name: found(line, *at) for name, line in section.lines.items()} for h, at in COMPARED.items()}
        plot.draw(series, stem)
    README.write_text(written(README.read_text(), text))
