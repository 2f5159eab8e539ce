"""What each figure shows: functions that take result rows and return a matplotlib figure.

Needs the extra `eval`. Every function takes `note`, what the figures depend on, written below the figure, and `theme`, the
colours and the width (`canvas.Theme`). This module knows nothing about files, pages and clocks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import canvas
from .canvas import LIGHT, Curve, Entry, Theme
from .methods import DRAFTS_AS_OURS, OURS, PLAIN
from .results import Row, position_rates, task_key


if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_STEPS = 10  # a share of fewer verify steps is noise
PAPER = "paper"


def acceptance_by_position(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """How often the proposal at each position is accepted, a panel per task.

    Solid: of all verify steps. Dashed: of the steps that accepted everything before it (conditional), as far as there are
    at least `FEWEST_STEPS` of them; the first method's last point says how many. Methods that accept alike share one curve.
    """
    chosen = _accepting(rows)
    colours = canvas.colours_of([row["method"] for row in chosen], theme)
    key: list[Entry] = [(method, colours[method], "-") for method in colours if len(colours) > 1]
    key += [("of all steps", theme.ink, "-"), ("of steps that got there", theme.ink, "--")]
    labels = "Proposals accepted, by position", "position after the anchor (tokens)", "accepted"
    figure, panels = canvas.small_plots(_tasks(chosen), labels, note, theme, key)
    last = max([2, *(len(row["acceptance_histogram"]) - 1 for row in chosen)])
    for task, axes in panels.items():
        for index, row in enumerate(_of(chosen, task)):
            histogram = row["acceptance_histogram"]
            of_all, of_reached = position_rates(histogram)
            reached = [sum(histogram[position:]) for position in range(len(of_reached))]
            enough = [rate for rate, steps in zip(of_reached, reached, strict=True) if steps >= FEWEST_STEPS]
            colour = colours[row["method"]]
            axes.plot(range(1, len(of_all) + 1), of_all, color=colour, linewidth=2)
            axes.plot(range(1, len(enough) + 1), enough, color=colour, linewidth=1.6, linestyle=(0, (3, 1.5)))
            if enough and index == 0:
                axes.annotate(
                    f"{reached[len(enough) - 1]} steps", (len(enough), enough[-1]), (0, -8), ha="right", va="top",
                    textcoords="offset points", fontsize=8, color=theme.ink, path_effects=canvas.outlined(theme),
                )  # fmt: skip
        axes.set_ylim(0, 1.03)
        axes.set_xlim(1, last)
        canvas.shares_of_counts(axes)
    return figure


def acceptance_lengths(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """How many tokens a verify step gives, as a histogram per task, with each method's tau (micro) marked and written.

    Methods that accept alike are drawn once.
    """
    chosen = _accepting(rows)
    colours = canvas.colours_of([row["method"] for row in chosen], theme)
    labels = "Tokens per verify step", "acceptance length (tokens, the target's own included)", "verify steps"
    figure, panels = canvas.small_plots(_tasks(chosen), labels, note, theme)
    highest = max((max(row["acceptance_histogram"]) / sum(row["acceptance_histogram"]) for row in chosen), default=1.0)
    for task, axes in panels.items():
        here = _of(chosen, task)
        width = 0.84 / len(here)
        key: list[Entry] = []
        for index, row in enumerate(here):
            histogram, tau, colour = row["acceptance_histogram"], row["tau_micro"], colours[row["method"]]
            shift = (index - (len(here) - 1) / 2) * width
            shares = [count / sum(histogram) for count in histogram]
            axes.bar([length + shift for length in range(1, len(shares) + 1)], shares, width, color=colour)
            axes.vlines(tau, 0, highest, color=colour, linestyle=(0, (3, 1.5)), path_effects=canvas.outlined(theme))
            key.append((f"{row['method']}: τ {tau:.2f}", colour, "--"))
        axes.legend(
            *canvas.handles(key), loc="upper right", frameon=False, labelcolor=theme.ink, fontsize=8.5, borderpad=0.1
        )
        axes.set_xlim(left=0.2)
        most = max(len(_of(chosen, name)) for name in panels)
        axes.set_ylim(0, highest * (1.06 + 0.1 * most))  # the key stands above
        canvas.shares_of_counts(axes)
    return figure


def speedups(
    rows: Sequence[Row], note: str = "", theme: Theme = LIGHT, paper: Mapping[str, float] | None = None
) -> Figure:
    """Speed-up over plain decoding by task and method, with its 10th to 90th percentile over prompts.

    `paper` holds published speed-ups of the same pair by [`task_key`]; they are drawn hatched beside the measured ones.
    """
    chosen = [row for row in rows if row["method"] != PLAIN and row.get("speedup") is not None]
    tasks = _tasks(chosen)
    colours = canvas.colours_of([row["method"] for row in chosen], theme)
    bars: list[tuple[float, Row]] = []  # place and row
    middles, place = [], 0.0
    for task in tasks:
        group = _of(chosen, task)
        if paper and task_key(task) in paper:
            group.append({"method": PAPER, "speedup": paper[task_key(task)]})
        middles.append(place + (len(group) - 1) / 2)
        bars += [(place + index, row) for index, row in enumerate(group)]
        place += len(group) + 0.7
    figure, axes = canvas.one_plot("Speed-up over plain decoding", note, theme, 0.9 + 0.27 * place)
    furthest = max([1.0] + [max(row["speedup"], row.get("speedup_p90") or 0) for _, row in bars])
    for y, row in bars:
        end = value = row["speedup"]
        label, low, high = row["method"], row.get("speedup_p10"), row.get("speedup_p90")
        if label == PAPER:
            axes.barh(y, value, 0.82, color="none", edgecolor=colours.get(OURS, theme.ink), hatch="////", linewidth=1)
        else:
            axes.barh(y, value, 0.82, color=colours[label])
        if low is not None and high is not None and row.get("prompts", 2) > 1:
            axes.plot([low, high], [y, y], color=theme.ink, linewidth=1, path_effects=canvas.outlined(theme))
            end = max(value, high)
        axes.annotate(
            f"{value:.2f}× {label}", (end, y), (5, 0), textcoords="offset points", va="center", fontsize=9,
            color=theme.ink, path_effects=canvas.outlined(theme),
        )  # fmt: skip
    axes.axvline(1, color=theme.muted, linewidth=1)
    axes.set_yticks(middles, [textwrap.fill(task, int(2 * theme.width), break_long_words=False) for task in tasks])
    axes.set_ylim(place - 0.7, -0.7)
    axes.set_xlim(0, furthest * (1 + 2.1 / (theme.width - 3.05)))  # with room for the labels
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(canvas.wrapped("speed-up (plain decoding = 1; line: 10th to 90th percentile of prompts)", theme))
    return figure


def step_time(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Milliseconds of one verify forward, and of one draft forward, by the width of the block.

    A row has `width` in tokens, `ms_verify`, and `ms_draft` where it was measured.
    """
    drawn: list[Curve] = []
    for name, key, colour in (("verify", "ms_verify", theme.ours), ("draft", "ms_draft", theme.lookup)):
        points = sorted((row["width"], row[key]) for row in rows if row.get(key) is not None)
        drawn += [(name, colour, points)] if points else []
    labels = "Time of one step, by its width", "width (tokens)", "time of one forward (ms)"
    return canvas.curves(labels, drawn, note, theme)


def growth(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Milliseconds per token as the context grows, a curve per method; a row has `context_tokens`, `method`, `ms_per_token`."""
    drawn: list[Curve] = [
        (method, colour, sorted((r["context_tokens"], r["ms_per_token"]) for r in rows if r["method"] == method))
        for method, colour in canvas.colours_of([row["method"] for row in rows], theme).items()
    ]
    labels = "Time per token as the context grows", "context (tokens)", "time per token (ms)"
    return canvas.curves(labels, drawn, note, theme)


def run_curve(rows: Sequence[Row], note: str = "", theme: Theme = LIGHT) -> Figure:
    """Tau on held-out prompts by the step of a training run; a row has `step`, `tau`, and `is_kept` for the checkpoint's."""
    figure, axes = canvas.one_plot("Acceptance while training", note, theme, 3.9)
    points = sorted((row["step"], row["tau"]) for row in rows)
    axes.plot(*zip(*points, strict=True), color=theme.ours, linewidth=2, marker="o", markersize=4)
    kept = [(row["step"], row["tau"]) for row in rows if row.get("is_kept")]
    step, tau = (kept or points)[-1]
    side, shift = ("left", 6) if step == points[0][0] else ("right", -6)
    axes.annotate(
        f"{tau:.2f} at step {step:,}", (step, tau), (shift, 6), textcoords="offset points", ha=side, color=theme.ours,
        weight="bold", path_effects=canvas.outlined(theme),
    )  # fmt: skip
    axes.set_ylim(0, 1.15 * max(tau for _, tau in points))
    axes.set_xlabel("step")
    axes.set_ylabel("tau on held-out prompts (tokens)")
    return figure


def latency_throughput(
    rows: Sequence[Row], note: str = "", theme: Theme = LIGHT, target_ms: float | None = None
) -> Figure:
    """Throughput of a server against the wait of its users: a curve per server, a point per number of requests at once.

    A row has `server`, `concurrency`, `tokens_per_second`, and `ms_per_output_token_p50` and `…_p99`. `target_ms` is the
    longest wait for a token that 99 of 100 requests may have: it is drawn as a line, and waits are then 99th percentiles.
    """
    key, wait = ("ms_per_output_token_p50", "median") if target_ms is None else ("ms_per_output_token_p99", "p99")
    figure, axes = canvas.one_plot("Throughput against latency", note, theme, 4.2)
    names = list(dict.fromkeys(row["server"] for row in rows))
    colours = canvas.colours_of(names, theme)
    for name in names:
        mine = sorted((row for row in rows if row["server"] == name), key=lambda row: row["concurrency"])
        points = [(row[key], row["tokens_per_second"]) for row in mine]
        axes.plot(*zip(*points, strict=True), color=colours[name], linewidth=2, marker="o", markersize=5)
        small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": theme.muted, "va": "top"}
        for row, point in zip(mine, points, strict=True):
            axes.annotate(str(row["concurrency"]), point, (6, -4), **small)
        strong: dict[str, Any] = {"color": colours[name], "weight": "bold", "ha": "center"}
        axes.annotate(name, max(points, key=lambda point: point[1]), (0, 8), textcoords="offset points", **strong)
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


def _accepting(rows: Sequence[Row]) -> list[Row]:
    """Rows with proposals; of rows with the same acceptance, or the same drafts, the first alone."""
    kept: list[Row] = []
    with_ours = {row["task"] for row in rows if row["method"] == OURS}
    for row in rows:
        # Near-ties apart, and there are fewer colours than methods.
        if row["task"] in with_ours and row["method"] in DRAFTS_AS_OURS:
            continue
        histogram = row.get("acceptance_histogram")
        twin = any((row["task"], histogram) == (other["task"], other["acceptance_histogram"]) for other in kept)
        if histogram and len(histogram) > 1 and not twin:
            kept.append(row)
    return kept


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows))


def _of(rows: Sequence[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task]
