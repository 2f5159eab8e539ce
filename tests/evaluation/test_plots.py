"""Figures hold the numbers of the rows, name their units, and read on a light and a dark page."""

import json
import random
import sys
from pathlib import Path

import pytest


pytest.importorskip("matplotlib", reason="plots are the extra `eval`")

import sweep
from matplotlib.colors import to_hex

from dflash.evaluation import METHODS, NATIVE, OURS, PLAIN, PROMPT_LOOKUP, canvas, plots, results


ROOT = Path(__file__).parents[2]
HISTOGRAM = [6, 3, 1, 10]  # of 20 steps 14 accept the first proposal, 11 the second, 10 the third


def row(task="math", method="dflash", **more):
    numbers = {"prompts": 8, "speedup": 2.5, "speedup_p10": 2.0, "speedup_p90": 3.0, "tau_micro": 2.75}
    return {"task": task, "method": method, **numbers, "acceptance_histogram": HISTOGRAM, **more}


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    return found + [text.get_text() for legend in legends for text in legend.get_texts()]


def test_position_rates_count_as_a_loop_over_the_steps_does():
    draw = random.Random(0)
    lengths = [draw.choice([1, 1, 2, 3, 5, 8]) for _ in range(200)]
    of_all, of_reached = results.position_rates([lengths.count(length) for length in range(1, 12)])
    for position in range(1, 8):
        reached = [length for length in lengths if length >= position]
        accepted = [length for length in lengths if length >= position + 1]
        assert of_all[position - 1] == pytest.approx(len(accepted) / 200)
        assert of_reached[position - 1] == pytest.approx(len(accepted) / len(reached))
    assert len(of_all) == len(of_reached) == 7  # nothing past the longest


def test_acceptance_is_drawn_of_all_steps_and_of_those_that_got_there():
    figure = plots.acceptance_by_position([row()])
    of_all, of_reached = figure.axes[0].lines
    assert list(of_all.get_ydata()) == pytest.approx([14 / 20, 11 / 20, 10 / 20])
    assert list(of_reached.get_ydata()) == pytest.approx([14 / 20, 11 / 14, 10 / 11])
    assert list(of_all.get_xdata()) == [1, 2, 3]
    assert texts(figure) == ["11 steps", "of all steps", "of steps that got there"]


def test_a_share_of_very_few_steps_is_not_drawn():
    """One step of one is 100 %, which says nothing; the key says where the curve ends and the last point of how many it is."""
    of_all, of_reached = plots.acceptance_by_position([row(acceptance_histogram=[20, 10, 0, 1])]).axes[0].lines
    assert len(of_all.get_ydata()) == 3
    assert list(of_reached.get_ydata()) == pytest.approx([11 / 31, 1 / 11])
    few = plots.acceptance_by_position([row(acceptance_histogram=[20, 9, 1])])
    assert list(few.axes[0].lines[1].get_ydata()) == pytest.approx([10 / 30, 1 / 10])
    assert texts(few)[0] == "10 steps"


def test_every_task_has_a_panel_and_every_method_its_own_colour():
    methods = {
        "dflash": HISTOGRAM,
        "dflash compiled": HISTOGRAM,
        "dflash tree": [1, 2, 3, 4],
        "random": [20],
        "plain": None,
    }
    rows = [row(t, name, acceptance_histogram=histogram) for t in "abcd" for name, histogram in methods.items()]
    figure = plots.acceptance_by_position(rows)
    assert len(figure.axes[0].lines) == 2 * 2  # twins share a curve; nothing accepted is none
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b", "c", "d"]
    assert len({to_hex(line.get_color()) for line in figure.axes[0].lines}) == 2
    assert [text for text in texts(figure) if "steps" not in text] == ["dflash", "dflash tree"]


def test_methods_that_draft_as_ours_are_left_out_where_ours_is_by_task():
    """Their histograms differ by near-ties alone; where ours was not measured, they are all there is."""
    other = [HISTOGRAM[0] + 1, *HISTOGRAM[1:]]
    rows = [row("with ours", "dflash"), row("with ours", "dflash eager", acceptance_histogram=other)]
    rows += [row("without", "dflash eager", acceptance_histogram=other), row("without", "dflash tree")]
    for draw in (plots.acceptance_by_position, plots.acceptance_lengths):
        panels = draw(rows).axes
        assert [axes.get_title(loc="left") for axes in panels] == ["with ours", "without"]
        per_curve = 2 if draw is plots.acceptance_by_position else len(HISTOGRAM)
        drawn = [len(axes.lines if per_curve == 2 else axes.patches) for axes in panels]
        assert drawn == [per_curve, 2 * per_curve]


def test_the_key_of_many_methods_stands_between_the_title_and_the_panels():
    names = ["prompt lookup", "native dflash", "dflash", "dflash compiled", "dflash tree", "random drafter adaptive"]
    rows = [row(method=name, acceptance_histogram=[index + 1, 9]) for index, name in enumerate(names)]
    figure = plots.acceptance_by_position(rows)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    title, whole, panel = (part.get_window_extent() for part in (legend.get_title(), legend, figure.axes[0].title))
    assert all(title.y0 >= text.get_window_extent().y1 for text in legend.get_texts())
    assert whole.y0 >= panel.y1
    assert whole.x1 <= figure.bbox.x1
    assert title.y1 <= figure.bbox.y1


def test_a_task_with_short_steps_does_not_cut_off_another() -> None:
    rows = [row("long"), row("short", acceptance_histogram=[9, 9])]
    assert [axes.get_xlim() for axes in plots.acceptance_by_position(rows).axes] == [(1, 3), (1, 3)]


def test_lengths_are_shares_of_steps_with_tau_marked():
    figure = plots.acceptance_lengths([row()])
    assert [bar.get_height() for bar in figure.axes[0].patches] == pytest.approx([0.3, 0.15, 0.05, 0.5])
    assert texts(figure) == ["dflash: τ 2.75"]
    (mark,) = figure.axes[0].collections[0].get_segments()
    assert [x for x, _ in mark] == [2.75, 2.75]


def test_every_mark_of_tau_names_its_method_and_strikes_through_no_label():
    names = ["dflash", "dflash tree", "dflash with lookup", "dflash adaptive"]
    rows = [
        row(method=name, tau_micro=4 + i / 100, acceptance_histogram=[9, i + 1, 1]) for i, name in enumerate(names)
    ]
    as_ours = row(method="dflash compiled", tau_micro=4.5, acceptance_histogram=[8, 2, 1])  # but for near-ties
    figure = plots.acceptance_lengths([*rows, as_ours])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{name}: τ {4 + i / 100:.2f}" for i, name in enumerate(names)
    ]
    colours = [to_hex(line.get_color()) for line in legend.get_lines()]
    assert colours == [to_hex(mark.get_color()[0]) for mark in axes.collections]
    assert len(set(colours)) == 4
    highest = max(mark.get_window_extent().y1 for mark in [*axes.collections, *axes.patches])
    assert all(text.get_window_extent().y0 >= highest for text in legend.get_texts())


def test_no_bar_has_the_colour_of_its_whisker():
    for theme in (canvas.LIGHT, canvas.DARK):
        assert not {"#000000", "#ffffff", theme.ink} & {*canvas.colours_of(METHODS, theme).values(), *theme.others}


def test_every_method_has_a_colour_of_its_own():
    """Bug: orange, pink, light blue and purple stood for two methods each in the figure of `dflash bench`."""
    every = [
        PLAIN,
        PROMPT_LOOKUP,
        NATIVE,
        OURS,
        *(name for name in METHODS if name not in (PLAIN, PROMPT_LOOKUP, NATIVE, OURS)),
    ]
    for theme in (canvas.LIGHT, canvas.DARK):
        colours = canvas.colours_of(every, theme)
        assert len(set(colours.values())) == len(every) == 12
        bars = plots.speedups([row(method=name) for name in every], theme=theme).axes[0].patches
        assert len({bar.get_facecolor() for bar in bars}) == 11  # plain decoding is a line


@pytest.mark.parametrize("draw", [plots.acceptance_by_position, plots.acceptance_lengths, plots.speedups])
def test_a_narrow_figure_cuts_nothing(draw):
    methods = ["native dflash", "dflash", "dflash compiled", "random drafter adaptive"]
    rows = [
        row(task, name, acceptance_histogram=[i + 1, 9, 30])
        for i, name in enumerate(methods)
        for task in ("held-out templates", "b")
    ]
    figure = draw(rows, "", canvas.LIGHT.narrow())
    figure.draw_without_rendering()
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    written = [*figure.texts, *legends, figure._suptitle]
    written += [part for axes in figure.axes for part in (*axes.texts, axes.xaxis.label, axes.yaxis.label, axes.title)]
    boxes = [part.get_window_extent() for part in written if part in legends or (part and part.get_text())]
    assert all(box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)


def test_speedups_stand_beside_the_papers_of_the_same_task_alone():
    rows = [row("GSM8K", "target.generate", speedup=1.0), row("GSM8K"), row("MT-Bench", speedup=1.9)]
    axes = plots.speedups(rows, paper={"gsm8k": 5.15, "math500": 6.09}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2.5, 5.15, 1.9]  # plain decoding is the line at 1
    assert [bar.get_hatch() for bar in axes.patches] == [None, "////", None]
    assert [text.get_text() for text in axes.texts] == ["2.50× dflash", "5.15× paper", "1.90× dflash"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["GSM8K", "MT-Bench"]


def test_step_time_without_a_drafter_has_one_curve():
    rows = [{"width": width, "ms_verify": 10.0 + width} for width in (16, 1, 4)]
    axes = plots.step_time(rows).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [[11.0, 14.0, 26.0]]
    both = plots.step_time([{**row, "ms_draft": 2.0} for row in rows])
    assert sorted(texts(both)) == ["draft", "verify"]


def test_growth_has_a_curve_per_method_in_order_of_context():
    rows = [
        {"context_tokens": n, "method": method, "ms_per_token": n / k}
        for method, k in (("target.generate", 10), ("dflash", 40))
        for n in (4096, 512)
    ]
    axes = sweep.growth(rows).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [[51.2, 409.6], [12.8, 102.4]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "4096"]


def test_latency_throughput_names_servers_loads_and_the_target():
    rows = [
        {
            "server": server,
            "concurrency": n,
            "tokens_per_second": 100.0 * n,
            "ms_per_output_token_p50": wait + n,
            "ms_per_output_token_p99": wait + 2 * n,
        }
        for server, wait in (("baseline", 20), ("dflash", 5))
        for n in (4, 1)
    ]
    axes = plots.latency_throughput(rows).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[21, 24], [6, 9]]
    assert [list(line.get_ydata()) for line in axes.lines] == [[100, 400]] * 2
    assert "median" in axes.get_xlabel()
    figure = plots.latency_throughput(rows, target_ms=12.5)
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[22, 28], [7, 13], [12.5, 12.5]]
    assert "p99" in figure.axes[0].get_xlabel()
    assert sorted(texts(figure)) == ["1", "1", "4", "4", "baseline", "dflash", "target 12.5 ms"]


def all_figures(theme=canvas.LIGHT):
    yield plots.acceptance_by_position([row()], "note", theme)
    yield plots.acceptance_lengths([row()], "note", theme)
    yield plots.speedups([row()], "note", theme)
    yield plots.step_time([{"width": 1, "ms_verify": 1.0}, {"width": 2, "ms_verify": 1.5}], "note", theme)
    yield sweep.growth([{"context_tokens": 8, "method": "dflash", "ms_per_token": 2.0}], "note", theme)
    load = {"server": "dflash", "concurrency": 1, "tokens_per_second": 9.0, "ms_per_output_token_p50": 3.0}
    yield plots.latency_throughput([load], "note", theme)


@pytest.mark.parametrize("theme", [canvas.LIGHT, canvas.DARK], ids=["light", "dark"])
def test_axes_are_labelled_and_text_is_readable_on_the_paper(theme):
    def luminance(colour):
        channels = [int(to_hex(colour)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for figure in all_figures(theme):
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel() or any(label.get_text() for label in axes.get_yticklabels())
        assert figure.get_supxlabel() == "note"
        paper = luminance(figure.get_facecolor())
        for label in (axes.xaxis.label, *axes.get_xticklabels()):
            dark, light = sorted((paper, luminance(label.get_color())))
            assert (light + 0.05) / (dark + 0.05) > 4.5  # WCAG AA


def test_a_png_is_as_wide_as_a_readme_at_double_density():
    header = canvas.png(plots.speedups([row()]))[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") == 1600


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"Plots need matplotlib: run pip install .*eval\]' in the checkout"):
        plots.speedups([row()])


PAIR = {"target": "Qwen/Qwen3-4B", "drafter": "z-lab/Qwen3-4B-DFlash-b16"}
GREEDY = {"temperature": 0.0, "enable_thinking": False}


def test_published_figures_are_those_of_the_pair():
    speedups, source = results.published({"environment": PAIR, "decoding": GREEDY})
    assert speedups["gsm8k"] == 5.15
    assert "2602.06036v2, Table 1: transformers, H200, thinking off" in source
    assert results.published({"environment": PAIR, "decoding": {**GREEDY, "temperature": 1.0}})[0]["gsm8k"] == 4.71


@pytest.mark.parametrize(
    ("pair", "decoding"),
    [
        ({**PAIR, "target": "Qwen/Qwen3-8B"}, GREEDY),
        ({**PAIR, "drafter": "me/my-DFlash"}, GREEDY),
        ({}, GREEDY),
        (PAIR, {**GREEDY, "enable_thinking": True}),
        (PAIR, {**GREEDY, "temperature": 0.7}),
        (PAIR, {"temperature": 0.0}),
    ],
)
def test_another_pair_temperature_or_thinking_mode_has_no_published_figures(pair, decoding):
    assert results.published({"environment": pair, "decoding": decoding}) is None


def test_published_figures_agree_with_the_model_cards():
    cards = json.loads((ROOT / "model_cards" / "drafters.json").read_text(encoding="utf-8"))["drafters"]
    known = {
        (card["id"], card["target"]["id"], result["setup"].split(",")[0], results.task_key(task)): [speedup, tau]
        for card in cards
        for result in card["results"]
        if result["where"] == "Table 1"
        for task, tau, speedup in result["rows"]
    }
    figures = json.loads((ROOT / "dflash" / "evaluation" / "published.json").read_text(encoding="utf-8"))["figures"]
    stated = {
        (entry["drafter"], entry["target"], f"T={entry['temperature']}", results.task_key(task)): numbers
        for entry in figures
        for task, *numbers in entry["rows"]
    }
    assert stated == {key: value for key, value in known.items() if key[-1] != "average"}
