"""Reports: one HTML file about any number of training runs, and the same plots as files for papers.

`load` reads run folders as data, `panels` decides what is drawn, `charts` draws it as SVG, `page` puts it together.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import BadInput
from . import charts, load, panels
from .charts import Table
from .page import GENERATOR, page
from .panels import Gallery, Section


def write(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    figures: str | Path | None = None,
    title: str | None = None,
    before: Sequence[Section] = (),
    png: bool = True,
) -> Path:
    """Writes the report of some run folders to the file ``out``.

    Args:
      folders: run folders.
      out: an HTML file: a new one, or an earlier report.
      figures: a folder for the plots as SVG and PNG.
      title: of the page; if not given, made of the tasks.
      before: sections that come first, such as a study's.
      png: also as PNG.
    """
    runs = [load.run(Path(folder)) for folder in folders]
    sections = [*before, *panels.sections(runs)]
    tasks = ", ".join(dict.fromkeys(run.config.task for run in runs))
    lead = f"{len(runs)} training run{'s' * (len(runs) != 1)}." if runs and not before else ""
    text = page(title or f"Training of {tasks}", lead, sections, notes(runs))
    target = write_page(Path(out), text)
    if figures is not None:
        write_figures(sections, Path(figures), png)
    return target


def notes(runs: Sequence[load.Run]) -> list[str]:
    """On which machines, and what is missing."""
    out = []
    machines = dict.fromkeys(machine(run.environment) for run in runs if run.environment)
    if machines:
        out.append(
            "Measured on: " + "; ".join(list(machines)[:4]) + (", and others" if len(machines) > 4 else "") + "."
        )
    for run in runs:
        if run.skipped:
            out.append(f"{run.folder.name}: {run.skipped} lines of metrics.jsonl could not be read and are left out.")
    return out


def machine(environment: dict[str, Any]) -> str:
    """In words, where something was measured: of a file that may be anyone's."""
    words = [str(environment[k])[:80] for k in ("device", "processor") if isinstance(environment.get(k), str)]
    if isinstance(environment.get("cores"), int):
        words.append(f"{environment['cores']} cores")
    versions = environment.get("versions")
    if isinstance(versions, dict):
        words += [f"{name} {str(versions[name])[:20]}" for name in ("pergrad", "jax") if name in versions]
    return ", ".join(dict.fromkeys(words))


def write_page(path: Path, text: str) -> Path:
    if path.exists() and (not path.is_file() or GENERATOR.encode() not in path.open("rb").read(2000)):
        raise BadInput(f"{path} exists and is no report: write --out with another name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".partial")
        beside.write_text(text, "utf-8")
        os.replace(beside, path)
    except PermissionError:
        raise BadInput(f"cannot write {path}: write --out with another name.") from None
    return path


def write_figures(sections: Sequence[Section], folder: Path, png: bool = True) -> list[Path]:
    """Every plot as SVG, and as PNG of three times its size."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[Path, str] = {}
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Table | Gallery):
                continue
            name = f"{slug(section.title)}-{slug(block.title)}"
            same = sum(path.stem == name or path.stem.startswith(f"{name}--") for path in drawings)
            path = folder / (f"{name}--{same + 1}.svg" if same else f"{name}.svg")
            drawings[path] = block.svg(file=True)
            path.write_text(drawings[path], "utf-8")
    for path, drawing in drawings.items() if png else ():
        path.with_suffix(".png").write_bytes(rasterized(drawing))
    return list(drawings)


def rasterized(drawing: str, **options: Any) -> bytes:
    """An SVG as PNG. Without a font there would be no text in it, and no complaint."""
    import resvg_py
    from PIL import Image

    letter = "<svg xmlns='http://www.w3.org/2000/svg' width='40' height='40'>{}<text y='30'>M</text></svg>"
    probe = bytes(resvg_py.svg_to_bytes(svg_string=letter.format(charts.file_style()), background="#fff", **options))
    if len(set(Image.open(io.BytesIO(probe)).convert("L").tobytes())) < 2:
        raise BadInput(
            "the SVG files are written, but PNG needs a font, and none is here: install DejaVu Sans, Helvetica or Arial "
            "(Debian: fonts-dejavu-core)."
        )
    return bytes(resvg_py.svg_to_bytes(svg_string=drawing, zoom=3, **options))


def slug(words: str) -> str:
    """A file's name out of anything."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:60] or "plot"


__all__ = ["Gallery", "Section", "machine", "write", "write_figures"]
