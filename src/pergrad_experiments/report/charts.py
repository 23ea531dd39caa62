"""Charts as data, and each of them as SVG: the same drawing for the page and for a paper.

A chart has a title, a caption, ``svg(…)``, ``alt()`` (what it shows, in words) and ``table()`` (its values). In the page,
colours are CSS variables by class; in a file they are written out, and the legend is part of the picture.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 30, 48
COLOURS = 7
DASHES = ("", "7 4", "2 3", "9 3 2 3")
POINTS = 200  # of a curve
#: Okabe and Ito's colours, which differ for all kinds of colour vision; a grey for the last.
LIGHT = ("#0072b2", "#d55e00", "#008a63", "#b5578f", "#c58a00", "#2f9fd8", "#6b6b6b")
#: Stops of a scale that grows evenly in lightness, from dark blue to yellow, as seen by all kinds of colour vision.
SCALE = ("#00224e", "#2a3f6d", "#575c6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838")

Numbers = Sequence[float]


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def esc(text: Any) -> str:
    """For HTML and XML, whatever it is: no markup, no control characters, none that turn the direction of writing."""
    return html.escape(_UNPRINTABLE.sub("�", str(text)), quote=True)


# ------------------------------------------------------------------------------------- numbers


def short(x: float) -> str:
    """A tick's label: ``0.001``, ``20k``, ``10⁻⁵``."""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else "–"
    size = abs(x)
    exponent = math.floor(math.log10(size) + 1e-9)
    if exponent >= 9 or exponent < -4:
        digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        factor = f"{x / 10.0**exponent:.3g}"
        return f"10{digits}" if factor == "1" else f"{factor}·10{digits}"
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{x / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{x:.4g}"


def number(x: float | None) -> str:
    """In a table: four digits."""
    if x is None or not math.isfinite(x):
        return "–"
    return f"{x:.4g}" if abs(x) < 1e5 else f"{x:,.0f}" if abs(x) < 1e9 else f"{x:.3e}"


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0**e for e in range(first, last + 1, every) for f in (factors if every == 1 else (1,))]
        ticks = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(ticks) >= 3:
            return ticks
    return ticks if len(ticks) >= 2 else linear_ticks(low, high, 4)


@dataclasses.dataclass(frozen=True)
class Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    at: tuple[float, ...] | None = None  # ticks here, not where it is round
    whole: bool = False  # ticks at integers only

    @classmethod
    def over(cls, values: Sequence[float], start, end, log=False, zero=False, at=None) -> Axis:
        """That holds all values, with a margin where it does not begin at zero."""
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (0.1 if log else 0.0, 1.0)
        if zero:
            low = min(low, 0.0)
        if log:
            low, high = (low / 1.5, high * 1.5) if low == high else (low, high)
            margin = (high / low) ** 0.04
            return cls(low / margin, high * margin, start, end, True, at)
        if low == high:
            low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
        margin = (high - low) * 0.04
        return cls(low - (0 if zero and low == 0 else margin), high + margin, start, end, False, at)

    def __call__(self, x: float) -> float:
        if self.log:
            part = math.log(max(x, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (x - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(part, -0.02), 1.02)

    def ticks(self) -> list[float]:
        if self.at is not None:
            return list(self.at)
        ticks = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        return [t for t in ticks if t == round(t)] if self.whole else ticks


def thin(x: np.ndarray, *ys: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, ...]:
    """Means over stretches of equal length, at most ``points`` of them. A stretch with a value that is not finite has none."""
    if len(x) <= points:
        return (x, *ys)
    bounds = np.linspace(0, len(x), points + 1).astype(int)
    counts = np.diff(bounds)
    return tuple(np.add.reduceat(v, bounds[:-1]) / counts for v in (x, *ys))


# ------------------------------------------------------------------------------------- pieces of SVG


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle", more: str = "") -> str:
    cls = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{cls}{more}>{esc(words)}</text>'


def path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def axes(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    out = []
    for tick in y.ticks():
        out.append(f'<line class="grid" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.append(text(x.start - 8, y(tick) + 4, short(tick), "tick", "end"))
    ticks, last = x.ticks(), -math.inf
    for place, tick in enumerate(ticks):
        if x(tick) - last < 34:
            continue
        last = x(tick)
        out.append(f'<line class="axis" x1="{last:.1f}" x2="{last:.1f}" y1="{y.start:.1f}" y2="{y.start + 4:.1f}"/>')
        out.append(text(last, y.start + 17, short(tick), "tick alt" if place % 2 else "tick"))
    out.append(f'<line class="axis" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{y.start:.1f}" y2="{y.start:.1f}"/>')
    out.append(text((x.start + x.end) / 2, HEIGHT - 8, x_label, "label"))
    out.append(text(0, 14, y_label, "label", "start"))
    return "".join(out)


def file_style() -> str:
    """The style of a chart that is a file of its own: light, and written out."""
    colours = "".join(f".c{i}{{stroke:{c};fill:{c}}}" for i, c in enumerate(LIGHT))
    return (
        "<style>text{font:12px 'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#1a1a1a}.tick{fill:#444;font-size:11px}"
        ".grid{stroke:#e3e3e3}.axis{stroke:#777}.reference{stroke:#777;stroke-dasharray:4 4;fill:none}.zero{stroke:#999}"
        f"{colours}.line{{fill:none;stroke-width:1.8;stroke-linejoin:round}}.band{{stroke:none;fill-opacity:.16}}"
        ".whisker{fill:none;stroke-width:1.5}.bar{stroke:none}.cell0{fill:#eee}.mark{fill:#d55e00;stroke:none}"
        ".hit{fill:none;stroke:none}</style>"
    )


def document(inner: str, height: float, name: str, file: bool, log: bool = False) -> str:
    label = esc(name)
    if file:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}">'
            f'<title>{label}</title>{file_style()}<rect width="100%" height="100%" fill="#fff"/>{inner}</svg>\n'
        )
    scale = "log" if log else "linear"
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}" data-scale="{scale}">{inner}</svg>'


def legend_rows(series: Sequence[Series]) -> str:
    """For a file; the page has buttons."""
    return "".join(
        f'<g><line class="line c{s.colour % COLOURS}" x1="{LEFT}" x2="{LEFT + 22}" y1="{HEIGHT + 10 + 18 * i}" '
        f'y2="{HEIGHT + 10 + 18 * i}"{dashed(s.colour)}/>{text(LEFT + 30, HEIGHT + 14 + 18 * i, s.label, anchor="start")}</g>'
        for i, s in enumerate(series)
    )


def dashed(colour: int) -> str:
    dash = DASHES[colour // COLOURS % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


# ------------------------------------------------------------------------------------- charts


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve, with the ends of its confidence interval where there is one. Equal keys are hidden together."""

    label: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    colour: int = 0
    points: bool = False  # values that stand alone

    @property
    def key(self) -> str:
        return f"k{self.colour}"

    def finite(self, log: bool = False, log_x: bool = False) -> list[tuple[float, float, float, float]]:
        low, high = self.low if self.low is not None else self.y, self.high if self.high is not None else self.y
        rows = [tuple(map(float, row)) for row in zip(self.x, self.y, low, high)]
        return [
            (x, y, lo if math.isfinite(lo) else y, hi if math.isfinite(hi) else y)
            for x, y, lo, hi in rows
            if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log) and (x > 0 or not log_x)
        ]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Curves over one x axis."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    caption: str = ""
    log_x: bool = False
    log_y: bool | None = None  # None: by the values
    reference: float | None = None  # a horizontal line
    x_ticks: tuple[float, ...] | None = None

    def shown(self) -> list[Series]:
        return [s for s in self.series if s.finite()]

    def can_log(self) -> bool:
        values = [y for s in self.shown() for _, y, _, _ in s.finite()]
        return bool(values) and min(values) > 0

    def wants_log(self) -> bool:
        if self.log_y is not None:
            return self.log_y and self.can_log()
        values = [y for s in self.shown() for _, y, _, _ in s.finite()]
        return self.can_log() and max(values) > 10 * min(values)

    def svg(self, file: bool = False, log: bool | None = None) -> str:
        log = self.wants_log() if log is None else log
        rows = [(s, s.finite(log, self.log_x)) for s in self.shown()]
        xs = [x for _, points in rows for x, _, _, _ in points]
        # An interval far wider than the curves must not squeeze them: it may leave the picture.
        ys = [y for _, points in rows for _, y, _, _ in points] + (
            [self.reference] if self.reference is not None else []
        )
        spread = max(ys) - min(ys) if len(ys) > 1 else math.inf
        ends = [e for _, points in rows for _, _, lo, hi in points for e in (lo, hi)]
        if log:
            ys += [e for e in ends if min(ys) / 3 <= e <= max(ys) * 3]
        else:
            ys += [e for e in ends if min(ys) - spread / 3 <= e <= max(ys) + spread / 3]
        x = Axis.over(xs, LEFT, WIDTH - RIGHT, self.log_x, at=self.x_ticks)
        y = Axis.over(ys, HEIGHT - BOTTOM, TOP, log)
        out = [axes(x, y, self.x_label, self.y_label)]
        if self.reference is not None:
            level = y(self.reference)
            out.append(f'<line class="reference" x1="{x.start}" x2="{x.end}" y1="{level:.1f}" y2="{level:.1f}"/>')
        for s, points in rows:
            if points:
                out.append(self.curve(s, points, x, y))
        if file:
            out.append(legend_rows([s for s, _ in rows]))
        else:
            out.append(
                f'<rect class="hit" x="{x.start}" y="{TOP}" width="{x.end - x.start}" height="{y.start - TOP}"/>'
            )
        height = HEIGHT + (18 * len(rows) + 6 if file else 0)
        return document("".join(out), height, self.alt(), file, log)

    def curve(self, s: Series, points: list, x: Axis, y: Axis) -> str:
        colour = f"c{s.colour % COLOURS}"
        out = []
        has_interval = s.low is not None and any(lo != hi for _, _, lo, hi in points)
        few = s.points or len(points) <= 12
        if has_interval and few:
            out += [
                f'<path class="whisker {colour}" d="{path([(x(a), y(lo)), (x(a), y(hi))])}"/>'
                for a, _, lo, hi in points
            ]
        elif has_interval:
            edge = [(x(a), y(hi)) for a, _, _, hi in points] + [(x(a), y(lo)) for a, _, lo, _ in reversed(points)]
            out.append(f'<path class="band {colour}" d="{path(edge)}Z"/>')
        line = path([(x(a), y(b)) for a, b, _, _ in points])
        hidden = ' stroke="none" style="stroke:none"' if s.points else dashed(s.colour)
        out.append(f'<path class="line {colour}" d="{line}"{hidden}/>')
        if few:
            out += [f'<circle class="{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b, _, _ in points]
        values = ";".join(f"{a:.6g},{b:.4g}" for a, b, _, _ in points)
        return f'<g class="series" data-key="{s.key}" data-label="{esc(s.label)}" data-v="{values}">{"".join(out)}</g>'

    def alt(self) -> str:
        parts = []
        for s in self.shown()[:6]:
            points = s.finite()
            parts.append(f"{s.label}: from {number(points[0][1])} to {number(points[-1][1])}")
        more = len(self.shown()) - 6
        return (
            f"{self.title}. {self.y_label} against {self.x_label}. "
            + "; ".join(parts)
            + (f"; and {more} more" if more > 0 else "")
        )

    def table(self) -> Table:
        rows = []
        shown = self.shown()
        xs = sorted({x for s in shown for x, *_ in s.finite()})
        # A few places of the longest curve; each curve's nearest value, if it is near.
        places = xs if len(xs) <= 12 else [xs[round(i * (len(xs) - 1) / 9)] for i in range(10)]
        for place in places:
            row: list[Any] = [place]
            for s in shown:
                points = s.finite()
                x, y, lo, hi = min(points, key=lambda p: abs(p[0] - place))
                near = abs(x - place) <= (xs[-1] - xs[0]) / 60 if len(xs) > 12 else x == place
                row.append("–" if not near else number(y) if lo == hi else f"{number(y)} ({number(lo)} … {number(hi)})")
            rows.append(row)
        return Table(self.title, [self.x_label, *(s.label for s in shown)], rows)


@dataclasses.dataclass(frozen=True)
class Dots:
    """Values with intervals, a row for each name: who is where."""

    title: str
    names: list[str]
    x_label: str
    series: list[Series]  # x: places in ``names``; y: values
    caption: str = ""
    reference: float | None = None

    def shown(self) -> list[Series]:
        return [s for s in self.series if s.finite()]

    def svg(self, file: bool = False) -> str:
        left, step = 168, max(26, 15 * len(self.shown()) + 12)
        top = 8
        height = top + step * len(self.names) + BOTTOM
        values = [v for s in self.shown() for _, *ends in s.finite() for v in ends]
        values += [self.reference] if self.reference is not None else []
        x = Axis.over(values, left, WIDTH - RIGHT)
        bottom = height - BOTTOM
        out = []
        last = -math.inf
        for place, tick in enumerate(x.ticks()):
            out.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{bottom}"/>')
            if x(tick) - last >= 34:
                last = x(tick)
                out.append(text(last, bottom + 17, short(tick), "tick alt" if place % 2 else "tick"))
        if self.reference is not None:
            at = x(self.reference)
            out.append(f'<line class="reference" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        for i, name in enumerate(self.names):
            out.append(text(left - 10, top + step * (i + 0.5) + 4, shortened(name, 22), "tick", "end"))
        for order, s in enumerate(self.shown()):
            colour, marks = f"c{s.colour % COLOURS}", []
            for i, value, low, high in s.finite():
                y = top + step * (i + 0.5) + (order - (len(self.shown()) - 1) / 2) * 13
                marks.append(
                    f'<path class="whisker {colour}" d="{path([(x(low), y), (x(high), y)])}"/>' if low != high else ""
                )
                said = f"{self.names[int(i)]}, {s.label}: {number(value)}" + (
                    f" ({number(low)} … {number(high)})" if low != high else ""
                )
                marks.append(
                    f'<circle class="{colour}" cx="{x(value):.1f}" cy="{y:.1f}" r="4.5" data-tip="{esc(said)}"/>'
                )
            out.append(f'<g class="series" data-key="{s.key}" data-label="{esc(s.label)}">{"".join(marks)}</g>')
        out.append(text((left + WIDTH - RIGHT) / 2, height - 8, self.x_label, "label"))
        if file:
            for i, s in enumerate(self.shown()):
                out.append(f'<circle class="c{s.colour % COLOURS}" cx="{left}" cy="{height + 10 + 18 * i}" r="4.5"/>')
                out.append(text(left + 12, height + 14 + 18 * i, s.label, anchor="start"))
            height += 18 * len(self.shown()) + 6
        return document("".join(out), height, self.alt(), file)

    def alt(self) -> str:
        said = [f"{self.names[int(i)]}, {s.label}: {number(v)}" for s in self.shown() for i, v, _, _ in s.finite()]
        return f"{self.title}. {self.x_label}. " + "; ".join(said[:12]) + ("; and more" if len(said) > 12 else "")

    def table(self) -> Table:
        rows = []
        for i, name in enumerate(self.names):
            row: list[Any] = [name]
            for s in self.shown():
                found = [p for p in s.finite() if int(p[0]) == i]
                row.append(interval(*found[0][1:]) if found else "–")
            rows.append(row)
        return Table(self.title, ["", *(s.label for s in self.shown())], rows)


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """A value for each name and time, in colours."""

    title: str
    names: list[str]
    times: Numbers
    values: np.ndarray  # [names, times]; NaN where there is none
    x_label: str
    scale_label: str
    caption: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False

    def domain(self) -> tuple[float, float]:
        known = self.values[np.isfinite(self.values) & ((self.values > 0) | (not self.log))]
        low = self.low if self.low is not None else float(known.min()) if known.size else 0.1
        high = self.high if self.high is not None else float(known.max()) if known.size else 1.0
        return low, high if high > low else low * 2 or 1.0

    def svg(self, file: bool = False) -> str:
        left, bar, step = 168, 56, max(11.0, min(22.0, 240 / len(self.names)), 72 / len(self.names))
        top = 8
        bottom = top + step * len(self.names)
        height = bottom + BOTTOM
        right = WIDTH - RIGHT - bar
        low, high = self.domain()
        bounds = np.linspace(left, right, len(self.times) + 1).tolist()
        out = []
        for i, name in enumerate(self.names):
            y = top + step * i
            out.append(
                text(left - 8, y + step / 2 + 4, shortened(name, 22), "tick", "end", more=f' data-tip="{esc(name)}"')
            )
            for j, time in enumerate(self.times):
                value = float(self.values[i, j])
                said = f"{name}, {self.x_label} {short(time)}: {number(value)}"
                known = math.isfinite(value) and (value > 0 or not self.log)
                fill = f'fill="{shade(value, low, high, self.log)}"' if known else 'class="cell0"'
                size = f'width="{bounds[j + 1] - bounds[j] + 0.3:.1f}" height="{step - 1:.1f}"'
                out.append(f'<rect x="{bounds[j]:.1f}" y="{y:.1f}" {size} {fill} data-tip="{esc(said)}"/>')
        shown = [round(k) for k in np.linspace(0, len(self.times) - 1, min(5, len(self.times)))]
        for place, j in enumerate(dict.fromkeys(shown)):
            middle = (bounds[j] + bounds[j + 1]) / 2
            out.append(text(middle, bottom + 16, short(float(self.times[j])), "tick alt" if place % 2 else "tick"))
        out.append(text((left + right) / 2, height - 8, self.x_label, "label"))
        # The scale.
        x, parts = right + 14, 40
        for k in range(parts):
            y = bottom - (bottom - top) * (k + 1) / parts
            colour = shade(k / (parts - 1), 0, 1, False)
            out.append(
                f'<rect x="{x}" y="{y:.1f}" width="10" height="{(bottom - top) / parts + 0.5:.1f}" fill="{colour}"/>'
            )
        axis = Axis(low, high, bottom, top, self.log)
        last = math.inf
        for tick in axis.ticks():
            if last - axis(tick) >= 14:
                last = axis(tick)
                out.append(text(x + 14, last + 4, short(tick), "tick", "start"))
        if file:
            out.append(text(WIDTH - RIGHT, height - 8, self.scale_label, "tick", "end"))
        return document("".join(out), height, self.alt(), file)

    def alt(self) -> str:
        known = self.values[np.isfinite(self.values)]
        spread = f"between {number(float(known.min()))} and {number(float(known.max()))}" if known.size else "unknown"
        return f"{self.title}. {self.scale_label} of {len(self.names)} layers over {self.x_label}, {spread}"

    def table(self) -> Table:
        picked = list(dict.fromkeys(round(k) for k in np.linspace(0, len(self.times) - 1, min(6, len(self.times)))))
        rows = [[name, *(number(float(self.values[i, j])) for j in picked)] for i, name in enumerate(self.names)]
        return Table(self.title, [f"layer \\ {self.x_label}", *(short(float(self.times[j])) for j in picked)], rows)


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts between edges; ``marks`` are single values that are pointed out."""

    title: str
    edges: Numbers
    counts: Numbers
    x_label: str
    caption: str = ""
    marks: tuple[tuple[str, float], ...] = ()

    def svg(self, file: bool = False) -> str:
        x = Axis.over(self.edges, LEFT, WIDTH - RIGHT)
        y = Axis.over([*self.counts, 0], HEIGHT - BOTTOM, TOP + 12, zero=True)
        y = dataclasses.replace(y, whole=True)
        out = [axes(x, y, self.x_label, "examples")]
        for a, b, count in zip(self.edges, self.edges[1:], self.counts):
            said = f"{number(a)} to {number(b)}: {count:g}"
            size = f'width="{max(x(b) - x(a) - 1, 0.5):.1f}" height="{max(y.start - y(count), 0):.1f}"'
            out.append(f'<rect class="bar c0" x="{x(a):.1f}" y="{y(count):.1f}" {size} data-tip="{esc(said)}"/>')
        for name, value in self.marks:
            at = x(value)
            triangle = path([(at - 5, TOP), (at + 5, TOP), (at, TOP + 9)])
            out.append(f'<path class="mark" d="{triangle}Z" data-tip="{esc(f"{name}: {number(value)}")}"/>')
        return document("".join(out), HEIGHT, self.alt(), file)

    def alt(self) -> str:
        marks = "; ".join(f"{name} at {number(value)}" for name, value in self.marks)
        total = sum(self.counts)
        return f"{self.title}. {total:g} examples between {number(self.edges[0])} and {number(self.edges[-1])}" + (
            f"; {marks}" if marks else ""
        )

    def table(self) -> Table:
        rows = [[f"{number(a)} to {number(b)}", f"{n:g}"] for a, b, n in zip(self.edges, self.edges[1:], self.counts)]
        return Table(self.title, [self.x_label, "examples"], rows)


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells are text or numbers; numbers stand to the right."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    caption: str = ""


Chart = Lines | Dots | Heatmap | Histogram


def interval(mean: float, low: float, high: float) -> str:
    return number(mean) if low == high else f"{number(mean)} ± {number((high - low) / 2)}"


def shortened(name: str, length: int) -> str:
    """Without its middle: the ends of a layer's name say most."""
    half = (length - 1) // 2
    return name if len(name) <= length else f"{name[:half]}…{name[-half:]}"


def shade(value: float, low: float, high: float, log: bool) -> str:
    if log:
        part = math.log(max(value, low) / low) / math.log(high / low)
    else:
        part = (value - low) / (high - low)
    place = min(max(part, 0.0), 1.0) * (len(SCALE) - 1)
    first = min(int(place), len(SCALE) - 2)
    a, b = (tuple(int(SCALE[k][i : i + 2], 16) for i in (1, 3, 5)) for k in (first, first + 1))
    return "#" + "".join(f"{round(p + (q - p) * (place - first)):02x}" for p, q in zip(a, b))
