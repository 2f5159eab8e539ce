"""The look that all figures share: paper, colours, axes, keys and labels; and the PNG of a figure.

Needs the extra `eval`. Colour-blind readers can tell the colours apart, and a method has the same colour in every figure.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

from dflash.common.messages import INSTALL_EXTRAS

from .methods import NATIVE, OURS, PLAIN, PROMPT_LOOKUP


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200

# A line of a key: its name, its colour, its style.
Entry = tuple[str, str, Literal["-", "--"]]
# A name, a colour, and points in the order of x.
Curve = tuple[str, str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Theme:
    """Colours and width of a figure."""

    paper: str
    ink: str
    muted: str  # of secondary text
    grid: str
    plain: str
    ours: str
    native: str
    lookup: str
    others: tuple[str, ...]  # of other methods, in order of appearance
    sizes: tuple[str, str]  # of methods that differ in a size: of the smallest and of the largest
    width: float = 8.0  # inches; at 8, a README's width, text is as large as the README's own
    num_columns: int = 3  # small plots side by side

    def narrow(self) -> Theme:
        """This theme at the width of a phone."""
        return replace(self, width=4.0, num_columns=1)


# The palette of Okabe and Ito, brightened on a dark page, and as many more as `METHODS` have names: those that differ most from
# the others for all kinds of colour vision.
LIGHT = Theme(
    "#ffffff", "#1f2328", "#59636e", "#e4e8ec", "#8c959f", "#0072b2", "#009e73", "#e69f00",
    ("#d55e00", "#cc79a7", "#56b4e9", "#882255", "#2735a6", "#b32517", "#b3b185", "#9a587f"),
    ("#9ecae1", "#08519c"),
)  # fmt: skip
DARK = Theme(
    "#0d1117", "#e6edf3", "#9198a1", "#2a313a", "#8b949e", "#56b4e9", "#2bbf96", "#f0b429",
    ("#f0883e", "#e39ac6", "#9ecbff", "#c9a0dc", "#40518d", "#a14206", "#026fd7", "#8f6370"),
    ("#1f5f99", "#c6e2ff"),
)  # fmt: skip


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    image = BytesIO()
    figure.savefig(image, dpi=DPI, facecolor=figure.get_facecolor())
    return image.getvalue()


def _new_figure(note: str, theme: Theme, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"Plots need matplotlib: run {INSTALL_EXTRAS} in the checkout of dflash.") from error
    lines = textwrap.wrap(note, int(18 * theme.width))
    figure = Figure(figsize=(theme.width, height + 0.15 * len(lines)), layout="constrained", facecolor=theme.paper)
    if note:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=theme.muted)
    return figure


def one_plot(title: str, note: str, theme: Theme, height: float) -> tuple[Figure, Axes]:
    """A figure of one plot."""
    figure = _new_figure(note, theme, height)
    axes = figure.subplots()
    _dress(axes, theme)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=theme.ink)
    return figure, axes


def small_plots(
    names: Sequence[str], labels: tuple[str, str, str], note: str, theme: Theme, key: Sequence[Entry] = ()
) -> tuple[Figure, dict[str, Axes]]:
    """A figure of one small plot per name, all on the same scale, below the title and the key of all of them.

    `labels` are the title and those of the x and y axes.
    """
    title, x_label, y_label = labels
    columns = min(len(names), theme.num_columns)
    lines, of_key = -(-len(names) // columns), max(1, int(theme.width) - 4)
    head = 0.35 + 0.21 * -(-len(key) // of_key)  # inches
    figure = _new_figure(note, theme, 0.6 + head + (2.1 if lines > 1 else 2.5) * lines)
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height))  # type: ignore[union-attr, call-arg]
    places = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes in places[len(names) :]:
        axes.remove()
    for index, (name, axes) in enumerate(zip(names, places, strict=False)):
        _dress(axes, theme)
        axes.tick_params(labelbottom=index + columns >= len(names))
        axes.set_title(name, loc="left", fontsize=10, color=theme.ink)
    places[0].set_ylabel(y_label)
    places[len(names) - 1 - (len(names) - 1) % columns].set_xlabel(wrapped(x_label, theme), loc="left")
    figure.text(0.01, 1 - 0.08 / height, title, va="top", fontsize=12, weight="bold", color=theme.ink)
    if key:
        figure.legend(
            *handles(key), loc="upper left", bbox_to_anchor=(0.0, 1 - 0.3 / height), ncols=min(len(key), of_key),
            frameon=False, labelcolor=theme.ink, fontsize=9, handlelength=2.2, borderpad=0.2,
        )  # fmt: skip
    return figure, dict(zip(names, places, strict=False))


def wrapped(label: str, theme: Theme) -> str:
    """An axis label in lines that the figure is wide enough for."""
    return textwrap.fill(label, int(9 * theme.width))


def handles(entries: Sequence[Entry]) -> tuple[list[Any], list[str]]:
    """Lines and names of a key, as `legend` takes them."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linestyle=style, linewidth=2) for _, colour, style in entries]
    return lines, [name for name, *_ in entries]


def outlined(theme: Theme) -> list[Any]:
    """`path_effects` of a line that crosses bars: an edge of paper."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground=theme.paper)]


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


def curves(labels: tuple[str, str, str], drawn: Sequence[Curve], note: str, theme: Theme) -> Figure:
    """A figure of one plot over a logarithmic x axis that names the places measured; y begins at 0.

    Each curve is named at its last point in its colour; names that would touch are moved apart.
    """
    title, x_label, y_label = labels
    figure, axes = one_plot(title, note, theme, 3.9)
    for _, colour, points in drawn:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, marker="o", markersize=4)
    places = sorted({place for *_, points in drawn for place, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    if len(places) > 1:
        room = 1.4 / (theme.width - 2.1)  # for the names
        axes.set_xlim(places[0] * 0.93, places[-1] * (places[-1] / places[0]) ** room)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    height, lowest = axes.get_ylim()[1], -float("inf")
    for name, colour, points in sorted(drawn, key=lambda curve: curve[2][-1][1]):
        place, y = points[-1]
        lowest = max(y, lowest + 0.07 * height)
        offset = (6, (lowest - y) / height * 190)
        axes.annotate(name, (place, y), offset, textcoords="offset points", va="center", color=colour, weight="bold")
    return figure


def colours_of(names: Sequence[str], theme: Theme) -> dict[str, str]:
    """A colour per name, in order of appearance; names that differ in the number at their end alone get shades of one colour."""
    fixed = {PLAIN: theme.plain, OURS: theme.ours, NATIVE: theme.native, PROMPT_LOOKUP: theme.lookup}
    fixed["baseline"] = theme.plain
    sizes: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if re.search(r"\d$", name):
            sizes.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    for series in sizes.values():
        if len(series) > 1:
            from matplotlib.colors import LinearSegmentedColormap, to_hex

            shades = LinearSegmentedColormap.from_list("sizes", theme.sizes)
            series.sort(key=lambda name: int(re.findall(r"\d+", name)[-1]))
            fixed |= {name: to_hex(shades(index / (len(series) - 1))) for index, name in enumerate(series)}
    others = cycle(theme.others)
    return {name: fixed.get(name) or next(others) for name in dict.fromkeys(names)}
