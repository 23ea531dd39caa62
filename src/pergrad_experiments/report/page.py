"""The HTML file: one page, with its style, its script and its pictures inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from .charts import COLOURS, Dots, Lines, Series, Table, dashed, esc, number
from .panels import Gallery, Section

report_package = __name__.rpartition(".")[0]
GENERATOR = "pergrad report"


def page(title: str, lead: str, sections: Sequence[Section], notes: Sequence[str] = ()) -> str:
    style, script = (
        resources.files(report_package).joinpath(name).read_text("utf-8") for name in ("style.css", "page.js")
    )
    # The page may run this one script and nothing else, and open no connection: whatever a text of the data contains.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    links = "".join(f'<li><a href="#s{i}">{esc(section.title)}</a></li>' for i, section in enumerate(sections))
    navigation = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    said = "".join(f'<p class="soft">{esc(note)}</p>' for note in notes)
    body = "".join(section_html(section, i) for i, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="generator" content="{GENERATOR}"><link rel="icon" href="data:,">'
        f"<title>{esc(title)}</title>\n<style>{style}</style></head>\n<body><main>"
        f"<header><h1>{esc(title)}</h1><p>{esc(lead)}</p>{said}{navigation}</header>\n{body}</main>"
        f'<div id="tip" role="status" hidden></div>\n<script>{script}</script></body></html>\n'
    )


def section_html(section: Section, number: int) -> str:
    blocks = "\n".join(block_html(block) for block in section.blocks)
    return (
        f'<section id="s{number}"><h2>{esc(section.title)}</h2><p class="soft">{esc(section.lead)}</p>'
        f'<div class="blocks">{blocks}</div></section>\n'
    )


def block_html(block) -> str:
    if isinstance(block, Table):
        widths = [max(len(cell(x)) for x in column) for column in zip(block.columns, *block.rows)]
        wide = sum(widths) > 56 or len(block.rows) > 20
        return f"<figure{' class=wide' if wide else ''}>{caption(block)}{table_html(block)}</figure>"
    if isinstance(block, Gallery):
        return f"<figure>{caption(block)}{gallery_html(block)}</figure>"
    drawings, button = block.svg(), ""
    if isinstance(block, Lines) and block.can_log():
        log = block.wants_log()
        drawings += block.svg(log=not log).replace("<svg ", "<svg hidden ", 1)
        button = f'<button type="button" class="scale">{"log" if log else "linear"} scale</button>'
    values = f"<details><summary>Values</summary>{table_html(block.table())}</details>"
    curves = legend(block.shown()) if isinstance(block, Lines | Dots) else ""
    return f'<figure data-x="{esc(block.x_label)}">{caption(block, button)}{curves}{drawings}{values}</figure>'


def caption(block, button: str = "") -> str:
    about = f"<p>{esc(block.caption)}</p>" if block.caption else ""
    return f"<figcaption><h3>{esc(block.title)}</h3>{button}{about}</figcaption>"


def legend(series: Sequence[Series]) -> str:
    """A button for each curve."""
    if len(series) < 2:
        return ""
    entries = "".join(
        f'<li><button type="button" aria-pressed="true" data-key="{s.key}"><svg viewBox="0 0 24 10" aria-hidden="true">'
        f'<path class="line c{s.colour % COLOURS}" d="M1,5L23,5"{dashed(s.colour)}/></svg>{esc(s.label)}</button></li>'
        for s in series
    )
    return f'<ul class="legend" aria-label="Curves; press to hide">{entries}</ul>'


def table_html(table: Table) -> str:
    """Numbers to the right. On a phone, a table with sentences in it becomes a list, whose entries say their column."""
    numeric = [i > 0 and all(_is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(
        f"<th scope=col{' class=n' if n else ''}>{esc(name)}</th>" for name, n in zip(table.columns, numeric)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td data-c="{esc(name)}"{" class=n" if n else ""}>{cell(x)}</td>'
            for x, name, n in zip(row, table.columns, numeric)
        )
        + "</tr>"
        for row in table.rows
    )
    sentences = any(len(str(x)) > 40 for row in table.rows for x in row)
    kind = ' class="sentences"' if sentences else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def cell(x) -> str:
    return esc(number(x)) if isinstance(x, float) else esc(x)


def _is_number(x) -> bool:
    return isinstance(x, int | float) or (isinstance(x, str) and x[:1] in "–-0123456789" and len(x) < 40)


def gallery_html(gallery: Gallery) -> str:
    items = []
    for o in gallery.outliers:
        about = f"example {number(o.index)}: ‖gradient‖ {number(o.norm)}, loss {number(o.loss)}"
        if o.image is not None:
            shown = f'<img alt="{esc(about)}" src="data:image/png;base64,{base64.b64encode(o.image).decode()}">'
        elif o.text is not None:
            shown = f"<pre>{esc(o.text)}</pre>"
        else:
            shown = '<p class="soft">(its image cannot be shown)</p>'
        items.append(f'<li>{shown}<p class="soft">{esc(about)}</p></li>')
    return f'<ul class="gallery">{"".join(items)}</ul>'
