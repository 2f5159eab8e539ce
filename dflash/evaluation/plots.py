"""What each figure shows: functions that take result rows and return a matplotlib figure.

Needs the extra `eval`. Every function takes `note`, what the figures depend on, written below the figure, and `theme`, the
colours and the width (`canvas.Theme`). This module knows nothing about files, pages and clocks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from . import canvas
from .canvas import DASHED, LIGHT, Curve, Entry, Labels, Theme, themed
from .methods import DRAFTS_AS_OURS, OURS, PLAIN
from .results import Row, grouped, position_rates, task_key


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_STEPS = 10  # a share of fewer verify steps is noise
PAPER = "paper"
TASK = itemgetter("task")
GAP = 0.7  # between the bars of two tasks


@themed
def acceptance_by_position(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """How often the proposal at each position is accepted, a panel per task.

    Solid: of all verify steps. Dashed: of the steps that accepted everything before it (conditional), as far as there are
    at least `FEWEST_STEPS` of them; the first method's last point says how many. Methods that accept alike share one curve.
    """
    tasks = _drafting_by_task(rows)
    colours = _colours(tasks, theme)
    key: list[Entry] = []
    if len(colours) > 1:
        key += [(method, colour, "-") for method, colour in colours.items()]
    key += [("of all steps", theme.ink, "-"), ("of steps that got there", theme.ink, "--")]
    labels = Labels("Proposals accepted, by position", "position after the anchor (tokens)", "accepted")
    figure, panels = canvas.small_plots(list(tasks), labels, note, theme, key)
    last = 2
    for task, axes in panels.items():
        for row in tasks[task]:
            histogram = row["acceptance_histogram"]
            last = max(last, len(histogram) - 1)
            steps, end = _draw_rates(axes, histogram, colours[row["method"]])
            if steps and row is tasks[task][0]:
                canvas.write(
                    axes,
                    f"{steps} steps",
                    end,
                    (0, -8),
                    ha="right",
                    va="top",
                    fontsize=8,
                )
        axes.set_ylim(0, 1.03)
        canvas.shares_of_counts(axes)
    for axes in panels.values():
        axes.set_xlim(1, last)
    return figure


def _draw_rates(axes: Axes, histogram: Sequence[int], colour: str) -> tuple[int, canvas.Point]:
    """Draws both curves of a method; returns the steps of the last conditional rate, and its place."""
    of_all, of_reached = position_rates(histogram)
    enough: list[float] = []
    steps = 0
    for position, rate in enumerate(of_reached):
        reached = sum(histogram[position:])
        if reached >= FEWEST_STEPS:
            enough.append(rate)
            steps = reached
    axes.plot(range(1, len(of_all) + 1), of_all, color=colour)
    axes.plot(
        range(1, len(enough) + 1),
        enough,
        color=colour,
        linewidth=1.6,
        linestyle=DASHED,
    )
    last_rate = enough[-1] if enough else 0.0
    return steps, (len(enough), last_rate)


@themed
def acceptance_lengths(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """How many tokens a verify step gives, as a histogram per task, with each method's tau (micro) marked and written.

    Methods that accept alike are drawn once.
    """
    tasks = _drafting_by_task(rows)
    colours = _colours(tasks, theme)
    labels = Labels(
        "Tokens per verify step",
        "acceptance length (tokens, the target's own included)",
        "verify steps",
    )
    figure, panels = canvas.small_plots(list(tasks), labels, note, theme)
    highest = max(max(_shares(row)) for of_task in tasks.values() for row in of_task)
    longest_key = max(map(len, tasks.values()))
    for task, axes in panels.items():
        key: list[Entry] = []
        width = 0.84 / len(tasks[task])
        first = 1 - (0.84 - width) / 2  # the middle of the first bar of length 1
        for row in tasks[task]:
            shares = _shares(row)
            colour = colours[row["method"]]
            tau = row["tau_micro"]
            places = [first + index for index in range(len(shares))]
            axes.bar(places, shares, width, color=colour)
            axes.vlines(
                tau,
                0,
                highest,
                color=colour,
                linestyle=DASHED,
                path_effects=canvas.outlined(axes),
            )
            key.append((f"{row['method']}: τ {tau:.2f}", colour, "--"))
            first += width
        axes.legend(
            *canvas.handles(key),
            loc="upper right",
            fontsize=8.5,
            borderpad=0.1,
        )
        axes.set_xlim(left=0.2)
        axes.set_ylim(0, highest * (1.06 + 0.1 * longest_key))  # the key stands above
        canvas.shares_of_counts(axes)
    return figure


def _colours(tasks: Mapping[str, Sequence[Row]], theme: Theme) -> dict[str, str]:
    """The colours of the methods of all tasks."""
    return canvas.colours_of([row["method"] for of_task in tasks.values() for row in of_task], theme)


def _shares(row: Row) -> list[float]:
    """The share of the verify steps that gave 1, 2, 3, … tokens."""
    histogram = row["acceptance_histogram"]
    return [count / sum(histogram) for count in histogram]


@themed
def speedups(
    rows: Sequence[Row], note: str = "", theme: Theme = LIGHT, paper: Mapping[str, float] | None = None
) -> Figure:
    """Speed-up over plain decoding by task and method, with its 10th to 90th percentile over prompts.

    `paper` holds published speed-ups of the same pair by [`task_key`]; they are drawn hatched beside the measured ones.
    """
    compared = [row for row in rows if row["method"] != PLAIN and row.get("speedup") is not None]
    tasks = grouped(compared, TASK)
    colours = _colours(tasks, theme)
    for task, of_task in tasks.items():
        published = (paper or {}).get(task_key(task))
        if published is not None:
            of_task.append({"method": PAPER, "speedup": published})
    num_bars = sum(map(len, tasks.values()))
    height = num_bars + GAP * len(tasks)  # in bars
    inches = 0.9 + 0.27 * height
    figure, axes = canvas.one_plot("Speed-up over plain decoding", note, theme, inches)
    colour_of_paper = colours.get(OURS, theme.ink)
    middles = []
    furthest = 1.0
    y = 0.0
    for of_task in tasks.values():
        first = y
        for row in of_task:
            colour = colours.get(row["method"], colour_of_paper)
            end = _draw_speedup(axes, y, row, colour)
            furthest = max(furthest, end)
            y += 1
        middles.append((first + y - 1) / 2)
        y += GAP
    axes.axvline(1, color=theme.muted, linewidth=1)
    letters = int(2 * theme.width)
    names = [textwrap.fill(task, letters, break_long_words=False) for task in tasks]
    axes.set_yticks(middles, names)
    axes.set_ylim(height - GAP, -GAP)
    room = furthest * 2.1 / (theme.width - 3.05)  # for the labels
    axes.set_xlim(0, furthest + room)
    axes.grid(axis="y", visible=False)
    label = "speed-up (plain decoding = 1; line: 10th to 90th percentile of prompts)"
    axes.set_xlabel(canvas.wrapped(label, theme))
    return figure


def _draw_speedup(axes: Axes, y: float, row: Row, colour: str) -> float:
    """Draws a bar, its spread and its label; returns where it ends."""
    end = row["speedup"]
    look: dict[str, Any] = {"color": colour}
    if row["method"] == PAPER:
        look = {"color": "none", "edgecolor": colour, "hatch": "////"}
    axes.barh(y, end, 0.82, **look)
    label = f"{end:.2f}× {row['method']}"
    low = row.get("speedup_p10")
    high = row.get("speedup_p90")
    if low is not None and high is not None and row.get("prompts", 2) > 1:
        axes.plot(
            [low, high],
            [y, y],
            color=axes.title.get_color(),  # the ink
            linewidth=1,
            path_effects=canvas.outlined(axes),
        )
        end = max(end, high)
    canvas.write(
        axes,
        label,
        (end, y),
        (5, 0),
        va="center",
        fontsize=9,
    )
    return end


@themed
def step_time(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Milliseconds of one verify forward, and of one draft forward, by the width of the block.

    A row has `width` in tokens, `ms_verify`, and `ms_draft` where it was measured.
    """
    drawn: list[Curve] = []
    for name, colour in (("verify", theme.ours), ("draft", theme.lookup)):
        field = f"ms_{name}"
        points = [(row["width"], row[field]) for row in rows if row.get(field) is not None]
        if points:
            drawn.append((name, colour, sorted(points)))
    labels = Labels(
        "Time of one step, by its width",
        "width (tokens)",
        "time of one forward (ms)",
    )
    return canvas.curves(labels, drawn, note, theme)


@themed
def run_curve(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Tau on held-out prompts by the step of a training run; a row has `step`, `tau`, and `is_kept` for the checkpoint's."""
    figure, axes = canvas.one_plot("Acceptance while training", note, theme, 3.9)
    points = []
    kept = None
    for row in sorted(rows, key=lambda row: row["step"]):
        point = row["step"], row["tau"]
        points.append(point)
        if row.get("is_kept"):
            kept = point
    step, tau = kept or points[-1]
    side, shift = ("left", 6) if step == points[0][0] else ("right", -6)
    canvas.line(axes, points, theme.ours)
    canvas.write(
        axes,
        f"{tau:.2f} at step {step:,}",
        (step, tau),
        (shift, 6),
        ha=side,
        color=theme.ours,
        weight="bold",
    )
    highest = max(tau for _, tau in points)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_xlabel("step")
    axes.set_ylabel("tau on held-out prompts (tokens)")
    return figure


@themed
def latency_throughput(
    rows: Sequence[Row], note: str = "", theme: Theme = LIGHT, target_ms: float | None = None
) -> Figure:
    """Throughput of a server against the wait of its users: a curve per server, a point per number of requests at once.

    A row has `server`, `concurrency`, `tokens_per_second`, and `ms_per_output_token_p50` and `…_p99`. `target_ms` is the
    longest wait for a token that 99 of 100 requests may have: it is drawn as a line, and waits are then 99th percentiles.
    """
    percentile, wait = ("p50", "median") if target_ms is None else ("p99", "p99")
    figure, axes = canvas.one_plot("Throughput against latency", note, theme, 4.2)
    curves: dict[str, list[canvas.Point]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        point = row[f"ms_per_output_token_{percentile}"], row["tokens_per_second"]
        curves.setdefault(row["server"], []).append(point)
        canvas.write(
            axes,
            str(row["concurrency"]),
            point,
            (6, -4),
            va="top",
            fontsize=8,
            color=theme.muted,
        )
    colours = canvas.colours_of(list(curves), theme)
    for name, points in curves.items():
        colour = colours[name]
        highest = max(points, key=lambda point: point[1])
        canvas.line(axes, points, colour)
        canvas.write(
            axes,
            name,
            highest,
            (0, 8),
            ha="center",
            color=colour,
            weight="bold",
        )
    if target_ms is not None:
        axes.axvline(target_ms, color=theme.muted, linewidth=1, linestyle=DASHED)
        canvas.write(
            axes,
            f"target {target_ms:g} ms",
            (target_ms, 0.97),
            (4, 0),
            xycoords=("data", "axes fraction"),
            fontsize=9,
            color=theme.muted,
        )
    axes.margins(x=0.12, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"time per output token, {wait} of requests (ms); numbers: requests at once")
    axes.set_ylabel("output tokens/s, all requests")
    return figure


def _drafting_by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows with proposals, by their task; of rows with the same acceptance, or the same drafts, the first alone."""
    drafting = {}
    for task, of_task in grouped(rows, TASK).items():
        methods = {row["method"] for row in of_task}
        distinct: dict[str, Row] = {}
        for row in of_task:
            histogram = row.get("acceptance_histogram") or []
            # Drafts of these differ by near-ties alone, and there are fewer colours than methods.
            is_ours_again = OURS in methods and row["method"] in DRAFTS_AS_OURS
            if len(histogram) > 1 and not is_ours_again:
                distinct.setdefault(str(histogram), row)
        if distinct:
            drafting[task] = list(distinct.values())
    return drafting
