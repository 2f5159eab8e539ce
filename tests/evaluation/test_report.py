"""`dflash report`: one page that needs no network, and a README's table, out of result files; and what is refused."""

from __future__ import annotations

import base64
import copy
import html
import io
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash.evaluation import (
    canvas,
    caveat,
    drawings,
    markdown,
    read_result,
    save_drawing,
    table_of,
    tables_of,
    with_table,
    write_page,
)


pytest.importorskip("matplotlib", reason="the page's plots are the extra `eval`")

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"
ROW = {
    "task": "GSM8K", "method": "dflash", "prompts": 4, "identical": 4, "tokens": 200, "tokens_per_second": 99.6, "speedup": 2.504,
    "speedup_p10": 2.0, "speedup_p90": 3.0, "tokens_per_step": 3.9, "ms_per_step": 4.0, "ms_to_first_token": 12.34,
    "tau_micro": 4.017, "tau_macro": 4.391, "acceptance_histogram": [5, 10, 20, 15, 10], "score": 0.75, "scored": 4,
    "peak_memory_bytes": 3 * 2**30, "ms_per_output_token": 10.04,
}  # fmt: skip
PLAIN = {
    **ROW, "method": "target.generate", "speedup": 1.0, "tau_micro": None, "tau_macro": None, "acceptance_histogram": None
}  # fmt: skip
RESULT = {
    "schema_version": 1, "kind": "eval", "command": "dflash eval --tasks gsm8k", "revision": "abc1234",
    "environment": {
        "torch": "2.13.0", "transformers": "5.23.0", "device": "NVIDIA H200", "target_dtype": "bfloat16", "attention": "sdpa",
        "target": "Qwen/Qwen3-4B", "drafter": "z-lab/Qwen3-4B-DFlash-b16",
    },
    "decoding": {"temperature": 0.0, "enable_thinking": False, "chat_template": "{{ messages }}" * 40},
    "summary": [PLAIN, ROW],
    "measurements": [],
}  # fmt: skip


RUN = {
    "settings": {"seed": 3}, "recipe": "short (Muon 0.02)", "versions": {"torch": "2.13.0"}, "device": "x86_64", "seconds": 90.0,
    "target": {"parameters": 3_543_232}, "drafter": {"parameters": 2_250_624}, "command": ["dflash", "train"],
    "curve": [{"step": 0, "tau": 3.25}, {"step": 50, "tau": 3.5, "loss": 1.25, "accuracy": [0.5]}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _coarse_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page holds does not depend on how finely its figures are drawn, and most of the time goes into that."""
    monkeypatch.setattr(canvas, "DPI", 20)


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what stands on a page beside its figures: they are made, and rendered to nothing."""
    monkeypatch.setattr(canvas, "png", lambda figure: b"")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, dflash_command: Callable[..., Any]) -> Any:
    """`run(…)`: exit status, standard output, standard error of `dflash report …`."""
    monkeypatch.setenv("COLUMNS", "200")
    return partial(dflash_command, "report")


def written(folder: Path, result: Any = RESULT, name: str = "eval.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(result if isinstance(result, str) else json.dumps(result), encoding="utf-8")
    return path


@pytest.mark.usefixtures("_undrawn")
def test_page_states_every_figure_and_what_it_depends_on(run: Any, tmp_path: Path) -> None:
    status, out, _ = run(written(tmp_path), "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert (status, out.strip()) == (0, str(tmp_path / "out" / "index.html"))
    for stated in (
        "NVIDIA H200", "bfloat16", "transformers 5.23.0", "Qwen/Qwen3-4B + z-lab/Qwen3-4B-DFlash-b16", "<dd>off</dd>", "abc1234",
        "dflash eval --tasks gsm8k", "{{ messages }}", "4.02", "tau, macro", "4.39", "75.0 %", "2.50x", "4 of 4",
        "3.00", "10.04", "arXiv:2602.06036v2, Table 1",
    ):  # fmt: skip
        assert stated in page, stated
    assert page.count("<figcaption>") == 3
    assert page.count("dflash eval --tasks gsm8k") == 1  # once, and not under every figure
    assert "<h2>eval</h2>" in page  # the kind is not said twice
    alternatives = re.findall(r'alt="(.*?)"', page)
    assert all("thinking off" in text and "NVIDIA H200" in text and "sha256" in text for text in alternatives)


@pytest.mark.usefixtures("_undrawn")
def test_another_page_is_not_replaced(run: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<title>My site</title>")
    status, _, err = run(written(tmp_path), "--output", tmp_path)
    assert status == 1
    assert "index.html is no page of results and would be replaced: name another --output" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.json", "index.html"]
    (tmp_path / "index.html").unlink()
    assert [run(written(tmp_path), "--output", tmp_path)[0] for _ in range(2)] == [0, 0]  # its own is


@pytest.mark.usefixtures("_undrawn")
def test_page_needs_no_network_and_has_both_themes(run: Any, tmp_path: Path) -> None:
    run(written(tmp_path), "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    addresses = re.findall(r'(?:src|srcset|href)="(.{0,22})', page)
    assert len(addresses) == 3 * 4
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert not re.search(r"<script|<link|@import|url\(", page)
    assert page.count("prefers-color-scheme: dark") == 1 + 3 * 2
    names = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert names == [f"eval_{plot}{end}.png" for plot in ("acceptance", "lengths", "speedup") for end in ("", "_dark")]


def test_a_phone_gets_figures_of_its_own_and_a_table_of_few_columns(run: Any, tmp_path: Path) -> None:
    """Labels of a wide figure are too small there, and a table of all columns is cut."""
    pytest.importorskip("PIL")
    from PIL import Image

    run(written(tmp_path), "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    images = re.findall(r'max-width: 40rem\)" srcset="data:image/png;base64,([^"]+)"', page)
    widths = {Image.open(io.BytesIO(base64.b64decode(image))).width for image in images}
    assert (len(images), widths) == (3 * 2, {4 * canvas.DPI})
    shown, every = (re.findall("<th>(.*?)</th>", part) for part in re.split("<details><summary>All columns", page)[:2])
    assert shown == ["method", "identical texts", "score", "tau", "tokens per step", "tokens/s", "speed-up"]
    assert set(shown) < set(every)


@pytest.mark.usefixtures("_undrawn")
def test_a_run_states_what_an_evaluation_states(run: Any, tmp_path: Path) -> None:
    """Bug: its hardware was "x86_64" beside an evaluation's "AMD EPYC, 2 threads", its dtype and thinking "not recorded"."""
    machine = {"cpu": "AMD EPYC", "threads": 2, "device": "cpu", "target_dtype": "bfloat16", "attention": "sdpa"}
    (tmp_path / "my-DFlash").mkdir()
    facts = {**RUN, **machine, "settings": {"seed": 3, "thinking": False}}
    for content in (facts, RUN):  # the second as an older version wrote it
        (tmp_path / "my-DFlash" / "training.json").write_text(json.dumps(content))
        run(tmp_path / "my-DFlash" / "training.json", "--output", tmp_path / "out")
        page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
        stated = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
        if content is facts:
            expected = {"hardware": "AMD EPYC, 2 threads", "dtype": "bfloat16", "attention": "sdpa", "thinking": "off"}
            assert stated.items() >= expected.items()
            assert "not recorded" not in stated
        else:
            assert stated["not recorded"] == "dtype, attention, thinking"


@pytest.mark.usefixtures("_undrawn")
def test_what_a_file_does_not_say_is_said_to_be_missing_in_one_line(run: Any, tmp_path: Path) -> None:
    run(written(tmp_path, {**RESULT, "environment": {}, "decoding": {}}), "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    missing = "pair, hardware, dtype, attention, versions, thinking, chat template, temperature"
    assert f"<dt>not recorded</dt><dd>{missing}</dd>" in page  # command and revision are there
    assert re.findall(r"<dt>(.*?)</dt>", page) == ["command", "revision", "not recorded"]
    assert "None" not in page
    assert "arXiv" not in re.sub(r"<footer>.*", "", page, flags=re.DOTALL)


@pytest.mark.usefixtures("_undrawn")
def test_text_of_a_file_cannot_become_markup(run: Any, tmp_path: Path) -> None:
    result = copy.deepcopy(RESULT)
    for row in result["summary"]:
        row["task"] = "<script>alert(1)</script>"
    run(written(tmp_path, result), "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.usefixtures("_undrawn")
def test_files_of_one_name_get_a_section_each(run: Any, tmp_path: Path) -> None:
    paths = [written(tmp_path / folder) for folder in ("a", "b")]
    run(*paths, "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<section id="(.*?)">', page) == ["eval", "eval-2"]


@pytest.mark.usefixtures("_undrawn")
def test_rows_of_other_measurements_are_tables(run: Any, tmp_path: Path) -> None:
    status, *_ = run(COMMITTED / "batch_tiny_cpu.json", "--output", tmp_path)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert status == 0
    rows = read_result(COMMITTED / "batch_tiny_cpu.json")["summary"]
    ways = "".join(f"<th>{way}, tokens/s</th>" for way in rows[0]["tokens_per_second"])
    assert f"{ways}<th>speed-up</th>" in page
    for row in rows:
        assert f"<td>{row['speedup']:.2f}x</td>" in page


def test_figures_are_those_that_the_rows_have_something_for(run: Any, tmp_path: Path) -> None:
    refused = [{**ROW, "acceptance_histogram": [60], "tau_micro": 1.0}]
    written(tmp_path, {**RESULT, "summary": refused, "widths": [{"width": 2, "ms_verify": 3.0}]}, "bench.json")
    assert run(tmp_path / "bench.json", "--output", tmp_path / "out")[0] == 0
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert {name for name in names if "dark" not in name} == {"bench_speedup.png", "bench_step_time.png"}


@pytest.mark.parametrize("best", [0, 1])
def test_a_checkpoint_is_shown_by_its_run(run: Any, tmp_path: Path, best: int) -> None:
    folder, facts = tmp_path / "my-DFlash", copy.deepcopy(RUN)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    facts["best_step"] = 50 * best
    facts["curve"][best]["tau"], facts["curve"][1 - best]["tau"] = 4.125, 5.0  # that forgets, and is not kept
    (folder / "training.json").write_text(json.dumps(facts))
    code, _, err = run(str(folder), "--output", str(tmp_path / "page"))
    assert code == 0, err
    page = (tmp_path / "page" / "index.html").read_text()
    for said in ("my-DFlash", "target of 3.5 M parameters", "short (Muon 0.02), 1.5 minutes, seed 3", "dflash train"):
        assert said in page
    figure = drawings(read_result(folder / "training.json"))[0].draw(canvas.LIGHT, True)
    figure.draw_without_rendering()
    (label,) = figure.axes[0].texts
    assert label.get_text() == f"4.12 at step {50 * best}"
    assert figure.axes[0].get_window_extent().contains(*label.get_window_extent().min)
    assert figure.axes[0].get_window_extent().contains(*label.get_window_extent().max)


def test_the_page_of_an_adapted_drafter_says_each_domain_and_position_before_and_after(
    run: Any, tmp_path: Path
) -> None:
    """Promise: before is the first point and after the kept one, which is not the last; a drafter's own run has no such table."""
    folder, facts = tmp_path / "my-DFlash", copy.deepcopy(RUN)
    folder.mkdir()
    values = {0: (2.0, [0.5, 0.25]), 50: (2.5, [0.75, 0.4]), 100: (1.5, [0.125, 0.1])}
    facts["curve"] = [
        {"step": step, "tau": tau, "domains": {"support": {"tau": tau, "tokens_per_step": tau, "accepted": accepted}}}
        for step, (tau, accepted) in values.items()
    ]
    facts["best_step"] = 50
    (folder / "training.json").write_text(json.dumps(facts))
    result = read_result(folder / "training.json")
    assert tables_of(result)[1:] == [
        (["domain", "tau before", "tau after"], [["support", "2.00", "2.50"]]),
        (
            ["domain", "accepted at position", "1", "2"],
            [["support", "before", "0.50", "0.25"], ["support", "after", "0.75", "0.40"]],
        ),
    ]
    code, _, err = run(str(folder), "--output", str(tmp_path / "page"))
    assert code == 0, err
    page = re.sub(r"\s+", "", (tmp_path / "page" / "index.html").read_text())
    assert "<td>support</td><td>2.00</td><td>2.50</td>" in page
    assert "<td>after</td><td>0.75</td><td>0.40</td>" in page
    del facts["best_step"], facts["curve"][0]["domains"]
    for facts_without in (facts, RUN):
        (folder / "training.json").write_text(json.dumps(facts_without))
        assert len(tables_of(read_result(folder / "training.json"))) == 1


def test_a_figure_that_no_row_has_anything_for_is_a_sentence(tmp_path: Path) -> None:
    """Promise: answers of one token each, which have no time per further token, end no canary with a traceback."""
    row = {"server": "dflash", "concurrency": 1, "tokens_per_second": 9.0, "ms_per_output_token_p50": None}
    with pytest.raises(ValueError, match=r"plot.png is not drawn: no row has what latency_throughput shows"):
        save_drawing({**RESULT, "kind": "serving", "summary": [row]}, "latency_throughput", tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**RESULT, "schema_version": 7}, "has schema version 7, and this version of dflash reads 1: measure again."),
        ({"model_type": "qwen3"}, "is no result: it has no schema_version; give one of `dflash bench`"),
        ([1, 2], "is no result: it has no schema_version"),
        ("# notes", "is not JSON ("),
        ("", "is not JSON ("),
        (
            {**RESULT, "summary": [{"task": "t"}]},
            "is no whole result: a row of its summary has no method; measure again.",
        ),
        ({**RESULT, "environment": [1]}, "is no result: its environment is [1]; give one of `dflash bench`"),
        ({**RESULT, "kind": ["eval"]}, "is no result: its kind is ['eval']; give one of `dflash bench`"),
    ],
    ids=["version", "config", "list", "markdown", "empty", "row", "environment", "kind"],
)
def test_a_file_that_cannot_be_shown_is_named(run: Any, tmp_path: Path, content: Any, message: str) -> None:
    good, bad = written(tmp_path), written(tmp_path, content, "bad.json")
    status, out, err = run(good, bad, "--output", tmp_path / "out")
    assert (status, out) == (1, "")
    assert err.startswith(f"dflash: {bad} {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"schema_version": 1, "fixtures": {}},
        *({**RESULT, "summary": summary} for summary in ([], [{}], [ROW, {}], {"tau": 2.0})),
    ],
    ids=["none", "empty", "empty row", "empty second row", "object"],
)
def test_a_lone_file_without_rows_is_named(run: Any, tmp_path: Path, content: Any) -> None:
    bad = written(tmp_path, content, "bad.json")
    status, out, err = run(bad, "--output", tmp_path / "out")
    assert (status, out) == (1, "")
    assert err.startswith(f"dflash: {bad} is no result: its summary holds no rows")


def test_bytes_and_missing_files_are_named(run: Any, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(range(256)))
    assert f"{weights} is not UTF-8" in run(weights, "--output", tmp_path / "out")[2]
    missing = tmp_path / "none.json"
    for unreadable, reason in (
        (missing, "cannot be read (No such file or directory): give a result of `dflash bench`"),
        (tmp_path, "is no result: its summary holds no rows"),
    ):
        status, _, err = run(unreadable, "--output", tmp_path / "out")
        assert (status, err.count("\n")) == (1, 1)
        assert err.startswith(f"dflash: {unreadable} {reason}")
    status, _, err = run(written(tmp_path), "--pages", tmp_path / "none.md")
    assert (status, err.count("\n")) == (1, 1)
    assert "none.md cannot be read (No such file or directory): name a Markdown file" in err


def test_a_table_is_written_between_its_marks_and_nowhere_else(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- t:begin -->\nold\n<!-- t:end -->\nafter\n", encoding="utf-8")
    path = written(tmp_path, name="t.json")
    for printed in (f"{page}\n", ""):  # the second time changes nothing
        assert run(path, "--pages", page)[:2] == (0, printed)
        text = page.read_text(encoding="utf-8")
        assert text.startswith("before\n<!-- t:begin -->\n| task | method |")
        assert text.endswith("`dflash eval --tasks gsm8k`\n<!-- t:end -->\nafter\n")
        assert "| GSM8K | dflash | 4 of 4 | 75.0 % | 4.02 | 3.90 | 100 | 2.50x |" in text
        assert "thinking off" in text
        assert "NVIDIA H200" in text
        assert "old" not in text


@pytest.mark.parametrize("words", [["--check"], []], ids=["check", "write"])
def test_folders_of_results_fill_and_check_folders_of_pages(run: Any, tmp_path: Path, words: list[str]) -> None:
    """Promise: with --check nothing is written, every page that differs is named, and the status is 1."""
    pages = [tmp_path / "README.md", tmp_path / "docs" / "how-to" / "measured.md"]
    for page in pages:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            "<!-- t:begin -->old<!-- t:end --> <!-- another:begin --><!-- another:end -->", encoding="utf-8"
        )
    written(tmp_path / "results", name="t.json")
    written(tmp_path / "results", name="unused.json")
    status, out, err = run(tmp_path / "results", "--pages", pages[0], "--pages", tmp_path / "docs", *words)
    assert status == bool(words)
    assert all(str(page) in (err if words else out) for page in pages)
    assert all(("old" in page.read_text(encoding="utf-8")) is bool(words) for page in pages)
    assert all("<!-- another:begin --><!-- another:end -->" in page.read_text(encoding="utf-8") for page in pages)


def test_a_mark_may_ask_for_the_headline_or_for_several_results(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = "<!-- t/headline:begin --><!-- t/headline:end --> <!-- t+u:begin --><!-- t+u:end -->"
    page.write_text(marks, encoding="utf-8")
    variant = {**ROW, "method": "dflash tree"}
    written(tmp_path, {**RESULT, "summary": [PLAIN, ROW, variant]}, "t.json")
    written(tmp_path, {**RESULT, "summary": [{**ROW, "task": "MATH"}], "command": "dflash eval 2"}, "u.json")
    assert run(tmp_path / "t.json", tmp_path / "u.json", "--pages", page)[0] == 0
    headline, joined = page.read_text(encoding="utf-8").split("<!-- t/headline:end -->")
    assert ("dflash tree" in headline, "dflash tree" in joined) == (False, True)
    assert "| GSM8K | dflash | 4 of 4 |" in headline
    assert joined.count("| task | method |") == 1
    assert "| MATH | dflash | 4 of 4 |" in joined
    assert ("`dflash eval --tasks gsm8k`" in joined, "`dflash eval 2`" in joined) == (True, True)


@pytest.mark.parametrize(
    "text",
    ["nothing", "<!-- t:begin -->", "<!-- t:end --><!-- t:begin -->", "<!-- t:begin --><!-- t:end --><!-- t:end -->"],
)
def test_a_page_without_the_place_is_left_alone(run: Any, tmp_path: Path, text: str) -> None:
    page = tmp_path / "README.md"
    page.write_text(text, encoding="utf-8")
    status, _, err = run(written(tmp_path, name="t.json"), "--pages", page)
    assert status == 1
    assert "put <!-- t:begin --> and <!-- t:end --> there" in err
    assert page.read_text(encoding="utf-8") == text


def test_impossible_requests_are_refused(run: Any, tmp_path: Path) -> None:
    path = written(tmp_path)
    assert "Nothing to write: give --output" in run(path)[2]
    assert "name them with --pages" in run(path, "--check", "--output", tmp_path / "out")[2]


def test_columns_without_a_value_are_left_out_and_pipes_kept_inside_cells() -> None:
    headings, cells = table_of([{"method": "a|b", "prompts": 2, "identical": 1, "speedup": None, "tau_micro": None}])
    assert headings == ["method", "identical texts"]
    assert cells == [["a|b", "1 of 2"]]
    assert markdown((headings, cells)).endswith("| a\\|b | 1 of 2 |")
    assert with_table("x<!-- n:begin -->y<!-- n:end -->z", "n", "T") == "x<!-- n:begin -->\nT\n<!-- n:end -->z"


def test_rows_of_any_shape_read_as_those_that_are_known() -> None:
    """Promise: a known field is written as everywhere, also one per method; no Python value stands in a cell."""
    rows = [
        {"is_simulated": True, "tokens_per_second": {"dflash": 99.6}, "speedup": 2.5, "ms_kept": 1 / 3, "runs": [1]},
        {},
    ]
    headings, cells = table_of(rows, None)
    assert headings == ["is simulated", "dflash, tokens/s", "speed-up", "ms kept"]
    assert cells == [["yes", "100", "2.50x", "0.3333"], [""] * 4]


def filled_readme(run: Any, folder: Path) -> str:
    """A README with the table of the result in `folder`."""
    readme = folder / "README.md"
    readme.write_text("<!-- eval:begin --><!-- eval:end -->", encoding="utf-8")
    run(folder / "eval.json", "--pages", readme)
    return readme.read_text(encoding="utf-8")


@pytest.mark.usefixtures("_undrawn")
def test_a_speedup_over_texts_of_another_length_is_said_to_be_one_of_seconds(run: Any, tmp_path: Path) -> None:
    """Promise: where rounding made a text longer or shorter, table and page say what the speed-up compares."""
    assert caveat([PLAIN, ROW]) == ""
    assert caveat([PLAIN, {**ROW, "task": "another", "tokens": 7}]) == ""
    shorter = {**ROW, "identical": 3, "tokens": 190}
    said = caveat([PLAIN, shorter])
    assert "a ratio of seconds" in said
    run(written(tmp_path, {**RESULT, "summary": [PLAIN, shorter]}), "--output", tmp_path / "out")
    assert said in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert said in filled_readme(run, tmp_path)


@pytest.mark.usefixtures("_undrawn")
def test_texts_that_rounding_may_change_are_said_to_be(run: Any, tmp_path: Path) -> None:
    """Promise: in half precision table and page say why a text may differ from generate's, and what shows that it does not."""
    assert caveat([PLAIN, ROW], "float32") == caveat([PLAIN, ROW]) == caveat([{"server": "s"}], "bfloat16") == ""
    said = caveat([PLAIN, ROW], "bfloat16")
    assert said.startswith("In bfloat16 two tokens can be within rounding of each other")
    assert "--dtype float32" in said
    run(written(tmp_path), "--output", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert said in html.unescape(page)
    assert said in filled_readme(run, tmp_path)


@pytest.mark.usefixtures("_undrawn")
def test_two_checkpoints_of_one_name_have_a_table_and_a_section_each(run: Any, tmp_path: Path) -> None:
    """Both were once known as `training`, and the table of one was written in the place of the other."""
    folders = [tmp_path / parent / "my-DFlash" for parent in ("a", "b")]
    for tau, folder in zip((3.25, 7.75), folders, strict=True):
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps({**RUN, "curve": [{"step": 0, "tau": tau}]}))
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- my-DFlash:begin --><!-- my-DFlash:end --> <!-- my-DFlash-2:begin --><!-- my-DFlash-2:end -->"
    )
    status, _, err = run(*folders, "--pages", page, "--output", tmp_path / "out")
    assert status == 0, err
    first, second = page.read_text(encoding="utf-8").split("<!-- my-DFlash:end -->")
    assert ("3.25" in first, "7.75" in first, "3.25" in second, "7.75" in second) == (True, False, False, True)
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)(?: <|</h2>)", html) == ["my-DFlash", "my-DFlash-2"]
    page.write_text("<!-- my-DFlash:begin --><!-- my-DFlash:end -->")
    status, _, err = run(*folders, "--pages", page)
    assert (status, "put <!-- my-DFlash-2:begin --> and <!-- my-DFlash-2:end --> there" in err) == (1, True)


def test_committed_results_of_bench_are_a_page_without_python(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(drawing: Any, path: Path) -> dict[str, str]:
        drawing.draw(canvas.LIGHT, True)
        return {"shows": drawing.shows, **dict.fromkeys(("wide", "narrow", "wide_dark", "narrow_dark"), "")}

    monkeypatch.setattr("dflash.evaluation.page._images", once)  # each figure once, and not by width and theme
    names = [path for path in COMMITTED.glob("*.json") if read_result(path)["kind"] == "decode"]
    page = write_page(sorted(names), tmp_path / "page").read_text(encoding="utf-8")
    assert set(re.findall(r"<h2>(\w+)", page)) == {path.stem for path in names}
    assert not caplog.text
    cells = re.findall(r"<(?:td|dd|th)>(.*?)</(?:td|dd|th)>", page)
    assert len(cells) > 100
    python = re.compile(r"None|True|False|\{&#39;|\[&#39;|_")
    written = [re.sub("<.*?>", "", cell) for cell in cells]
    assert not [cell for cell in written if python.search(cell) and not re.search(r"\.json|\.py\b", cell)]
