"""How result rows look: each function takes rows and gives a matplotlib figure; `save` writes the PNG.

Needs the extra `eval`. The colours keep apart for colour-blind readers, and each method has the same one in every figure.
It knows nothing about files of results, pages or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash.evaluation.harness import NATIVE, OURS, PLAIN, PROMPT_LOOKUP
from dflash.evaluation.results import Row, position_rates, task_key


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
WIDTH = 8.0  # inches: at the width of a README, text is as large as the README's own
PANEL_COLUMNS = 3
KEY_COLUMNS = 4
FEWEST_STEPS = 5  # a share of fewer verify steps is noise


# A line of a key: its name, its colour, its style.
Entry = tuple[str, str, Literal["-", "--"]]


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


def acceptance_by_position(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """How often the proposal at each position is accepted, a panel per task.

    Solid: of all verify steps. Dashed: of the steps that accepted everything before it (conditional), as far as there are
    at least `FEWEST_STEPS` of them. Methods that accept alike share the first one's curve.
    """
    chosen = _accepting(rows)
    colours = _colours([row["method"] for row in chosen], theme)
    key: list[Entry] = [(method, colours[method], "-") for method in colours if len(colours) > 1]
    key += [("of all steps", theme.ink, "-"), ("of steps that got there", theme.ink, "--")]
    figure, panels = _panels(_tasks(chosen), "Proposals accepted, by position in the block", note, theme, key)
    last = max([2, *(len(row["acceptance_histogram"]) - 1 for row in chosen)])
    for task, axes in panels.items():
        for row in _of(chosen, task):
            histogram = row["acceptance_histogram"]
            of_all, of_reached = position_rates(histogram)
            enough = [rate for i, rate in enumerate(of_reached) if sum(histogram[i:]) >= FEWEST_STEPS]
            colour = colours[row["method"]]
            axes.plot(range(1, len(of_all) + 1), of_all, color=colour, linewidth=2)
            axes.plot(range(1, len(enough) + 1), enough, color=colour, linewidth=1.6, linestyle=(0, (3, 1.5)))
        axes.set_ylim(0, 1.03)
        axes.set_xlim(1, last)
        _percent(axes)
        _whole_numbers(axes)
    next(iter(panels.values())).set_ylabel("accepted")
    _bottom_label(panels, "position behind the anchor (tokens)")
    return figure


def acceptance_lengths(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """How many tokens a verify step gives, as a histogram per task, with tau (micro) marked; methods that accept alike once."""
    chosen = _accepting(rows)
    colours = _colours([row["method"] for row in chosen], theme)
    key: list[Entry] = [(method, colours[method], "-") for method in colours if len(colours) > 1]
    figure, panels = _panels(_tasks(chosen), "Tokens per verify step", note, theme, key)
    for task, axes in panels.items():
        here = _of(chosen, task)
        width = 0.84 / len(here)
        for index, row in enumerate(here):
            histogram = row["acceptance_histogram"]
            shift = (index - (len(here) - 1) / 2) * width
            shares = [count / sum(histogram) for count in histogram]
            colour = colours[row["method"]]
            axes.bar([length + shift for length in range(1, len(shares) + 1)], shares, width, color=colour)
            axes.axvline(row["tau_micro"], color=theme.ink, linewidth=1, linestyle=(0, (2, 2)))
            axes.annotate(
                f"τ {row['tau_micro']:.2f}", (row["tau_micro"], 0.98 - 0.11 * index), (4, 0), color=theme.ink,
                xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=9,
            )  # fmt: skip
        axes.set_xlim(left=0.2)
        _percent(axes)
        _whole_numbers(axes)
    next(iter(panels.values())).set_ylabel("verify steps")
    _bottom_label(panels, "acceptance length (tokens, the target's own included)")
    return figure


def speedups(
    rows: Sequence[Row],
    note: str = "",
    theme: Theme = LIGHT,
    paper: Mapping[str, float] | None = None,
) -> Figure:
    """Speed-up over plain decoding by task and method, with its 10th to 90th percentile over prompts.

    Args:
        rows: Rows of `summarise`.
        note: What the figures depend on, one line below the figure.
        theme: Colours.
        paper: Published speed-ups of the same pair by [`task_key`]; drawn hatched beside the measured ones.
    """
    chosen = [row for row in rows if row["method"] != PLAIN and row.get("speedup") is not None]
    tasks = _tasks(chosen)
    colours = _colours([row["method"] for row in chosen], theme)
    bars: list[tuple[float, str, str, Row | None, float]] = []  # place, task, label, row, value
    middles, place = [], 0.0
    for task in tasks:
        group: list[tuple[str, Row | None, float]] = [
            (row["method"], row, row["speedup"]) for row in _of(chosen, task)
        ]
        if paper and task_key(task) in paper:
            group.append(("paper", None, paper[task_key(task)]))
        middles.append(place + (len(group) - 1) / 2)
        bars += [(place + index, task, *entry) for index, entry in enumerate(group)]
        place += len(group) + 0.7
    figure, axes = _figure("Speed-up over plain decoding", note, theme, 0.9 + 0.27 * place)
    furthest = max([1.0] + [max(value, (row or {}).get("speedup_p90") or 0) for *_, row, value in bars])
    for y, _, label, row, value in bars:
        end = value
        if row is None:
            axes.barh(y, value, 0.82, color="none", edgecolor=colours.get(OURS, theme.ink), hatch="////", linewidth=1)
        else:
            axes.barh(y, value, 0.82, color=colours[label])
            low, high = row.get("speedup_p10"), row.get("speedup_p90")
            if low is not None and high is not None and row.get("prompts", 2) > 1:
                axes.plot([low, high], [y, y], color=theme.ink, linewidth=1, alpha=0.75, solid_capstyle="butt")
                end = max(value, high)
        axes.annotate(
            f"{value:.2f}× {label}",
            (end, y),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=theme.ink,
        )
    axes.axvline(1, color=theme.muted, linewidth=1)
    axes.set_yticks(middles, tasks)
    axes.set_ylim(place - 0.7, -0.7)
    axes.set_xlim(0, furthest * 1.3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed-up (plain decoding = 1; thin line: 10th to 90th percentile of the prompts)")
    return figure


def step_time(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Milliseconds of one verify forward, and of one draft forward, by the width of the block.

    Args:
        rows: `width` in tokens, `ms_verify`, and `ms_draft` where it was measured.
        note: What the figures depend on, one line below the figure.
        theme: Colours.
    """
    ordered = sorted(rows, key=lambda row: row["width"])
    figure, axes = _figure("Time of one step, by its width", note, theme, 3.9)
    ends = []
    for name, label, colour in (("ms_verify", "verify", theme.ours), ("ms_draft", "draft", theme.lookup)):
        points = [(row["width"], row[name]) for row in ordered if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, marker="o", markersize=4)
            ends.append((*points[-1], label, colour))
    _widths(axes, [row["width"] for row in ordered])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("width (tokens)")
    axes.set_ylabel("time of one forward (ms)")
    _end_labels(axes, ends)
    return figure


def growth(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Milliseconds per token as the context grows, a curve per method.

    Args:
        rows: `context_tokens`, `method` and `ms_per_token`.
        note: What the figures depend on, one line below the figure.
        theme: Colours.
    """
    figure, axes = _figure("Time per token as the context grows", note, theme, 3.9)
    colours = _colours([row["method"] for row in rows], theme)
    ends = []
    for method, colour in colours.items():
        points = sorted((row["context_tokens"], row["ms_per_token"]) for row in rows if row["method"] == method)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, marker="o", markersize=4)
        ends.append((*points[-1], method, colour))
    _widths(axes, [row["context_tokens"] for row in rows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("time per token (ms)")
    _end_labels(axes, ends)
    return figure


def latency_throughput(
    rows: Sequence[Row], note: str = "", theme: Theme = LIGHT, target_ms: float | None = None
) -> Figure:
    """What a server gives against what a user waits: a curve per server, a point per number of requests at once.

    Args:
        rows: `server`, `concurrency`, `tokens_per_second` and `ms_per_output_token_p50` and `…_p99`.
        note: What the figures depend on, one line below the figure.
        theme: Colours.
        target_ms: The longest wait for a token that 99 of 100 requests may have, in milliseconds. It is drawn as a line, and
            waits are then the 99th percentiles of requests, else their medians.
    """
    key, wait = ("ms_per_output_token_p50", "median") if target_ms is None else ("ms_per_output_token_p99", "p99")
    figure, axes = _figure("Throughput against latency", note, theme, 4.2)
    names = list(dict.fromkeys(row["server"] for row in rows))
    colours = _colours(names, theme)
    for name in names:
        points = sorted((row for row in rows if row["server"] == name), key=lambda row: row["concurrency"])
        xs = [row[key] for row in points]
        ys = [row["tokens_per_second"] for row in points]
        axes.plot(xs, ys, color=colours[name], linewidth=2, marker="o", markersize=5)
        for x, y, row in zip(xs, ys, points, strict=True):
            axes.annotate(
                str(row["concurrency"]),
                (x, y),
                (6, -4),
                textcoords="offset points",
                fontsize=8,
                color=theme.muted,
                va="top",
            )
        axes.annotate(
            name,
            max(zip(xs, ys, strict=True), key=lambda point: point[1]),
            (0, 8),
            textcoords="offset points",
            ha="center",
            color=colours[name],
            weight="bold",
        )
    if target_ms is not None:
        axes.axvline(target_ms, color=theme.muted, linewidth=1, linestyle=(0, (3, 2)))
        axes.annotate(
            f"target {target_ms:g} ms", (target_ms, 0.97), (4, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=9, color=theme.muted,
        )  # fmt: skip
    axes.margins(x=0.12, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"time per output token, {wait} of requests (ms); numbers: requests at once")
    axes.set_ylabel("output tokens/s, all requests")
    return figure


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


def _figure(title: str, note: str, theme: Theme, height: float) -> tuple[Figure, Axes]:
    """A figure of one plot."""
    figure = _new_figure(note, theme, height + 0.3 * bool(note))
    axes = figure.subplots()
    _dress(axes, theme)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=theme.ink)
    return figure, axes


def _panels(
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


def _percent(axes: Axes) -> None:
    """Percentages without decimals on the y axis."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))


def _widths(axes: Axes, widths: Sequence[int]) -> None:
    """A logarithmic x axis that names the measured widths themselves."""
    named = sorted(set(widths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(named, [str(width) for width in named])
    axes.minorticks_off()
    if len(named) > 1:
        axes.set_xlim(named[0] * 0.93, named[-1] * (named[-1] / named[0]) ** 0.2)


def _end_labels(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names each curve at its last point, in its colour; labels that would touch are moved apart."""
    height = axes.get_ylim()[1] - axes.get_ylim()[0]
    lowest = -float("inf")
    for x, y, label, colour in sorted(ends, key=lambda end: end[1]):
        lowest = max(y, lowest + 0.07 * height)
        offset = (6, (lowest - y) / height * 190)
        axes.annotate(label, (x, y), offset, textcoords="offset points", va="center", color=colour, weight="bold")


def _bottom_label(panels: Mapping[str, Axes], text: str) -> None:
    """Labels the x axis once, below the first panel of the last line."""
    lowest = list(panels.values())[-1 - (len(panels) - 1) % PANEL_COLUMNS]
    lowest.set_xlabel(text, loc="left")


def _legend(figure: Figure, theme: Theme, entries: Sequence[Entry], top: float) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linestyle=style, linewidth=2) for _, colour, style in entries]
    figure.legend(
        lines, [name for name, *_ in entries], loc="upper left", bbox_to_anchor=(0.0, top),
        ncols=min(len(entries), KEY_COLUMNS), frameon=False, labelcolor=theme.ink, fontsize=9, handlelength=2.2,
        borderpad=0.2,
    )  # fmt: skip


def _colours(names: Sequence[str], theme: Theme) -> dict[str, str]:
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


def _accepting(rows: Sequence[Row]) -> list[Row]:
    """Rows with an acceptance to show: of twins the first, and of what proposes nothing none."""
    kept: list[Row] = []
    for row in rows:
        histogram = row.get("acceptance_histogram")
        twin = any((row["task"], histogram) == (other["task"], other["acceptance_histogram"]) for other in kept)
        if histogram and len(histogram) > 1 and not twin:
            kept.append(row)
    return kept


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows))


def _of(rows: Sequence[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task]
