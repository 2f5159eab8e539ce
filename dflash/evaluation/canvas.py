"""The look that all figures share: paper, colours, axes, keys and labels; and the PNG of a figure.

Needs the extra `eval`. Colour-blind readers can tell the colours apart, and a method has the same colour in every figure.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from io import BytesIO
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dflash.common.messages import INSTALL_EXTRAS

from .methods import NATIVE, OURS, PLAIN, PROMPT_LOOKUP


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
DASHED = (0, (3, 1.5))

# A line of a key: its name, its colour, its style.
Entry = tuple[str, str, Literal["-", "--"]]
Point = tuple[float, float]
# A name, a colour, and points in the order of x.
Curve = tuple[str, str, list[Point]]


class Labels(NamedTuple):
    """The title of a figure, and those of its axes."""

    title: str
    x: str
    y: str


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
    width: float = 8.0  # inches; at 8, a README's width, text is as large as the README's own
    num_columns: int = 3  # small plots side by side

    def narrow(self) -> Theme:
        """This theme at the width of a phone."""
        return replace(self, width=4.0, num_columns=1)

    def settings(self) -> Any:
        """The settings of matplotlib under which a figure is made."""
        return {
            "figure.facecolor": self.paper,
            "figure.titlesize": 12,
            "figure.titleweight": "bold",
            "axes.facecolor": self.paper,
            "axes.edgecolor": self.grid,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.labelcolor": self.ink,
            "axes.labelsize": 9.5,
            "axes.titlecolor": self.ink,
            "axes.titlesize": 10,
            "text.color": self.ink,
            "legend.frameon": False,
            "legend.labelcolor": self.ink,
            "lines.linewidth": 2,
        }


# The palette of Okabe and Ito, brightened on a dark page, and as many more as `METHODS` have names: those that differ most from
# the others for all kinds of colour vision.
LIGHT = Theme(
    "#ffffff", "#1f2328", "#59636e", "#e4e8ec", "#8c959f", "#0072b2", "#009e73", "#e69f00",
    ("#d55e00", "#cc79a7", "#56b4e9", "#882255", "#2735a6", "#b32517", "#b3b185", "#9a587f"),
)  # fmt: skip
DARK = Theme(
    "#0d1117", "#e6edf3", "#9198a1", "#2a313a", "#8b949e", "#56b4e9", "#2bbf96", "#f0b429",
    ("#f0883e", "#e39ac6", "#9ecbff", "#c9a0dc", "#40518d", "#a14206", "#026fd7", "#8f6370"),
)  # fmt: skip


def themed(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Wraps `draw(rows, note, theme, …)` to run under the settings of its theme. ValueError if matplotlib is not installed."""

    @wraps(draw)
    def drawn(rows: Sequence[Any], note: str = "", theme: Theme = LIGHT, **options: Any) -> Figure:
        try:
            import matplotlib
            import matplotlib.figure
        except ImportError as error:
            raise ValueError(f"Plots need matplotlib: run {INSTALL_EXTRAS} in the checkout of dflash.") from error
        with matplotlib.rc_context(theme.settings()):
            return draw(rows, note, theme, **options)

    return drawn


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    image = BytesIO()
    figure.savefig(image, dpi=DPI)
    return image.getvalue()


def _new_figure(note: str, theme: Theme, height: float) -> Figure:
    from matplotlib.figure import Figure

    lines = textwrap.wrap(note, int(18 * theme.width))
    height += 0.15 * len(lines)
    figure = Figure(figsize=(theme.width, height), layout="constrained")
    if note:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=theme.muted, weight="normal")
    return figure


def one_plot(title: str, note: str, theme: Theme, height: float) -> tuple[Figure, Axes]:
    """A figure of one plot."""
    figure = _new_figure(note, theme, height)
    axes = figure.subplots()
    _dress(axes, theme)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, axes


def small_plots(
    names: Sequence[str], labels: Labels, note: str, theme: Theme, key: Sequence[Entry] = ()
) -> tuple[Figure, dict[str, Axes]]:
    """A figure of one small plot per name, all on the same scale, below the title and the key of all of them."""
    columns = min(len(names), theme.num_columns)
    lines = math.ceil(len(names) / columns)
    line_height = 2.1 if lines > 1 else 2.5  # inches
    entries_a_line = max(1, int(theme.width) - 4)
    key_height = 0.21 * math.ceil(len(key) / entries_a_line)
    figure = _new_figure(note, theme, 0.95 + key_height + line_height * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    places = list(grid.flat)
    for axes in places[len(names) :]:
        axes.remove()
    panels = dict(zip(names, places, strict=False))
    for index, (name, axes) in enumerate(panels.items()):
        _dress(axes, theme)
        axes.tick_params(labelbottom=index + columns >= len(names))
        axes.set_title(name, loc="left")
    places[0].set_ylabel(labels.y)
    lowest_line = (lines - 1) * columns
    places[lowest_line].set_xlabel(wrapped(labels.x, theme), loc="left")
    if not key:
        figure.suptitle(labels.title, x=0.01, ha="left")
        return figure, panels
    figure.legend(  # below its own title: the layout knows no key between a figure's title and its panels
        *handles(key),
        title=labels.title,
        title_fontproperties={"size": 12, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=min(len(key), entries_a_line),
        fontsize=9,
        handlelength=2.2,
        borderpad=0.2,
    )
    return figure, panels


def wrapped(label: str, theme: Theme) -> str:
    """An axis label, broken into lines that fit the figure."""
    return textwrap.fill(label, int(9 * theme.width))


def handles(entries: Sequence[Entry]) -> tuple[list[Any], list[str]]:
    """Lines and names of a key, as `legend` takes them."""
    from matplotlib.lines import Line2D

    lines = []
    names = []
    for name, colour, style in entries:
        lines.append(Line2D([], [], color=colour, linestyle=style))
        names.append(name)
    return lines, names


def line(axes: Axes, points: Sequence[Point], colour: str) -> None:
    """Points that are joined, each with a dot."""
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=colour,
        marker="o",
        markersize=4,
    )


def write(axes: Axes, text: str, place: Point, offset: Point, **look: Any) -> None:
    """Text beside a place of the data, at an offset in points, readable on bars and lines."""
    axes.annotate(text, place, offset, textcoords="offset points", path_effects=outlined(axes), **look)


def outlined(axes: Axes) -> list[Any]:
    """`path_effects` that give a line or text an edge in the colour of the paper, so that it stands out from bars."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground=axes.get_facecolor())]


def _dress(axes: Axes, theme: Theme) -> None:
    # Ticks are made when a figure is drawn, after its settings have ended.
    axes.tick_params(colors=theme.muted, labelcolor=theme.ink, length=0, labelsize=9)
    axes.grid(color=theme.grid, linewidth=0.8)


def shares_of_counts(axes: Axes) -> None:
    """Percentages without decimals on the y axis, whole numbers on the x axis."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    round_steps = [1, 2, 5, 10]
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=round_steps))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=round_steps, integer=True))


def curves(labels: Labels, drawn: Sequence[Curve], note: str, theme: Theme) -> Figure:
    """A figure of one plot over a logarithmic x axis that has a tick at each measured value; y begins at 0."""
    figure, axes = one_plot(labels.title, note, theme, 3.9)
    places: set[float] = set()
    key: list[Entry] = []
    for name, colour, points in drawn:
        line(axes, points, colour)
        places |= {x for x, _ in points}
        key.append((name, colour, "-"))
    ticks = sorted(places)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(labels.x)
    axes.set_ylabel(labels.y)
    axes.legend(*handles(key), loc="best")
    return figure


def colours_of(names: Sequence[str], theme: Theme) -> dict[str, str]:
    """A colour per name, in order of appearance."""
    known = {
        PLAIN: theme.plain,
        "baseline": theme.plain,
        OURS: theme.ours,
        NATIVE: theme.native,
        PROMPT_LOOKUP: theme.lookup,
    }
    others = cycle(theme.others)
    return {name: known.get(name) or next(others) for name in dict.fromkeys(names)}
