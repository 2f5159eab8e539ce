"""What all figures have in common: paper, colours, axes, keys and labels, and the PNG that one is written to.

Needs the extra `eval`. The colours keep apart for colour-blind readers, and each method has the same one in every figure.
It knows nothing about what a figure shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .methods import NATIVE, OURS, PLAIN, PROMPT_LOOKUP


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
WIDTH = 8.0  # inches: at the width of a README, text is as large as the README's own
PANEL_COLUMNS = 3
KEY_COLUMNS = 4

# A line of a key: its name, its colour, its style.
Entry = tuple[str, str, Literal["-", "--"]]
# A name, a colour, and points in the order of x.
Curve = tuple[str, str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Theme:
    """Colours of a figure: paper, text, secondary text, grid, and one per series."""

    paper: str
    ink: str
    muted: str
    grid: str
    plain: str
    ours: str
    native: str
    lookup: str
    others: tuple[str, ...]


# The palette of Okabe and Ito, brightened on a dark page.
LIGHT = Theme(
    "#ffffff", "#1f2328", "#59636e", "#e4e8ec", "#8c959f", "#0072b2", "#009e73", "#e69f00",
    ("#d55e00", "#cc79a7", "#56b4e9", "#000000"),
)  # fmt: skip
DARK = Theme(
    "#0d1117", "#e6edf3", "#9198a1", "#2a313a", "#8b949e", "#56b4e9", "#2bbf96", "#f0b429",
    ("#f0883e", "#e39ac6", "#9ecbff", "#ffffff"),
)  # fmt: skip


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the figure as a PNG and gives its path; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor=figure.get_facecolor())
    return path


def _new_figure(note: str, theme: Theme, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('Plots need matplotlib: pip install "dflash-transformers[eval]".') from error
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=theme.paper)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color=theme.muted)
    return figure


def one_plot(title: str, note: str, theme: Theme, height: float) -> tuple[Figure, Axes]:
    """A figure of one plot."""
    figure = _new_figure(note, theme, height + 0.3 * bool(note))
    axes = figure.subplots()
    _dress(axes, theme)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=theme.ink)
    return figure, axes


def small_plots(
    names: Sequence[str], title: str, note: str, theme: Theme, key: Sequence[Entry]
) -> tuple[Figure, dict[str, Axes]]:
    """A figure of one small plot per name, all on the same scale, below the title and its key."""
    columns = min(len(names), PANEL_COLUMNS)
    lines = -(-len(names) // columns)
    head = 0.35 + 0.21 * -(-len(key) // KEY_COLUMNS)  # inches
    height = 0.6 + head + (2.1 if lines > 1 else 2.5) * lines
    figure = _new_figure(note, theme, height)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height))  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    places = list(grid.flat)
    for axes in places[len(names) :]:
        axes.remove()
    for index, (name, axes) in enumerate(zip(names, places, strict=False)):
        _dress(axes, theme)
        axes.tick_params(labelbottom=index + columns >= len(names))
        axes.set_title(name, loc="left", fontsize=10, color=theme.ink)
    figure.text(0.01, 1 - 0.08 / height, title, va="top", fontsize=12, weight="bold", color=theme.ink)
    if key:
        _legend(figure, theme, key, 1 - 0.3 / height)
    return figure, dict(zip(names, places, strict=False))


def _dress(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)
    axes.tick_params(colors=theme.muted, labelcolor=theme.ink, length=0, labelsize=9)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.ink)
        label.set_fontsize(9.5)


def shares_of_counts(axes: Axes) -> None:
    """Percentages without decimals on the y axis, whole numbers on the x axis."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))


def label_once(panels: Mapping[str, Axes], x: str, y: str) -> None:
    """Labels both axes of all panels: y beside the first, x below the first of the last line."""
    places = list(panels.values())
    places[0].set_ylabel(y)
    places[-1 - (len(places) - 1) % PANEL_COLUMNS].set_xlabel(x, loc="left")


def curves(title: str, drawn: Sequence[Curve], x: str, y: str, note: str, theme: Theme) -> Figure:
    """A figure of one plot, over a logarithmic x axis that names the places measured; y begins at 0."""
    figure, axes = one_plot(title, note, theme, 3.9)
    for _, colour, points in drawn:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, marker="o", markersize=4)
    places = sorted({place for *_, points in drawn for place, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    if len(places) > 1:
        axes.set_xlim(places[0] * 0.93, places[-1] * (places[-1] / places[0]) ** 0.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _label_ends(axes, drawn)
    return figure


def _label_ends(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Names each curve at its last point, in its colour; labels that would touch are moved apart."""
    height = axes.get_ylim()[1] - axes.get_ylim()[0]
    lowest = -float("inf")
    for name, colour, points in sorted(drawn, key=lambda curve: curve[2][-1][1]):
        place, y = points[-1]
        lowest = max(y, lowest + 0.07 * height)
        offset = (6, (lowest - y) / height * 190)
        axes.annotate(name, (place, y), offset, textcoords="offset points", va="center", color=colour, weight="bold")


def _legend(figure: Figure, theme: Theme, entries: Sequence[Entry], top: float) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linestyle=style, linewidth=2) for _, colour, style in entries]
    figure.legend(
        lines, [name for name, *_ in entries], loc="upper left", bbox_to_anchor=(0.0, top),
        ncols=min(len(entries), KEY_COLUMNS), frameon=False, labelcolor=theme.ink, fontsize=9, handlelength=2.2,
        borderpad=0.2,
    )  # fmt: skip


def colours_of(names: Sequence[str], theme: Theme) -> dict[str, str]:
    """A colour per name, in order of appearance."""
    fixed = {
        PLAIN: theme.plain,
        OURS: theme.ours,
        NATIVE: theme.native,
        PROMPT_LOOKUP: theme.lookup,
        "baseline": theme.plain,
    }
    free = [name for name in dict.fromkeys(names) if name not in fixed]
    rest = {name: theme.others[index % len(theme.others)] for index, name in enumerate(free)}
    return {name: fixed.get(name) or rest[name] for name in dict.fromkeys(names)}
