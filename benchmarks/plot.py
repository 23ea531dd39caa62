"""The plot of the README: time and memory of mean + second moment, one line per model, one mark per library."""

from pathlib import Path

PANELS = {"time": "time", "memory_with_results": "peak memory"}
# Distinguishable without colour too; readable on white and on black.
MARKS = {
    "pergrad": ("D", "#e5484d"),
    "jax.vmap": ("o", "#3b82f6"),
    "optax": ("s", "#8b5cf6"),
    "torch.func": ("^", "#d97706"),
    "Opacus": ("v", "#10a37f"),
    "BackPACK": ("P", "#c026a3"),
}
THEMES = {"light": ("#1f2328", "#d0d7de", "#ffffff"), "dark": ("#e6edf3", "#3d444d", "#0d1117")}


def draw(series: dict[str, dict[str, dict]], stem: Path) -> list[Path]:
    """`series[library][model]` are records of columns; writes <stem>-<theme>.svg, without a background, and .png."""
    series = {name: rows for name, rows in series.items() if any("ratios" in e for e in rows.values())}
    return [_draw(series, stem, *theme) for theme in THEMES.items()]


def _draw(series, stem, theme, colours):
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ink, faint, paper = colours
    models = list(next(iter(series.values())))
    figure = Figure(figsize=(9, 1.15 + 0.47 * len(models)), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for ax, (quantity, title) in zip(axes, PANELS.items()):
        values = []
        for k, (name, rows) in enumerate(series.items()):
            marker, colour = MARKS[name]
            lift = 0.35 - 0.7 * k / max(len(series) - 1, 1)  # marks of one model do not hide each other
            points = [(_median(rows[m], quantity), -i + lift) for i, m in enumerate(models)]
            points = [(x, y) for x, y in points if x is not None]
            values += [x for x, _ in points]
            ax.plot(*zip(*points), marker, color=colour, markersize=6 if name == "pergrad" else 5, label=name, mew=0)
        ax.patch.set_visible(False)
        ax.set_xscale("log")
        ax.set_xlim(min(0.7, 0.9 * min(values)), 1.3 * max(values))
        ax.xaxis.set_major_locator(
            LogLocator(10, subs=(1, 2, 5) if max(values) < 40 else (1, 3) if max(values) < 200 else (1,))
        )
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.axvline(1, color=ink, linewidth=1, zorder=1)
        for i in range(len(models) - 1):
            ax.axhline(-i - 0.5, color=faint, linewidth=0.6)
        ax.grid(axis="x", color=faint, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.set_title(f"{title}, × the own plain gradient", color=ink, fontsize=10, loc="left")
        ax.set_ylim(-len(models) + 0.5, 0.5)
        ax.set_yticks([-i for i in range(len(models))], models, fontsize=10)
        ax.tick_params(colors=ink, length=0)
        ax.tick_params(axis="x", which="minor", bottom=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper center", ncols=len(names), frameon=False, labelcolor=ink, fontsize=10
    )
    figure.savefig(f"{stem}-{theme}.svg", transparent=True, metadata={"Date": None})
    figure.savefig(f"{stem}-{theme}.png", facecolor=paper, dpi=160)
    return Path(f"{stem}-{theme}.svg")


def _median(entry, quantity):
    if "ratios" not in entry:
        return None
    value = entry["ratios"][quantity]
    return value["median"] if isinstance(value, dict) else value
