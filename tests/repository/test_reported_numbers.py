"""README and docs/ say what the committed results, tests and cards say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from reporting import filled, shown, tables_of

from dflash.evaluation import MARK, PLAIN, markdown, names_of, read_result


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs"]


@pytest.fixture(scope="module")
def made() -> Any:
    """The script that writes what comes from tests and cards."""
    spec = importlib.util.spec_from_file_location("made_tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marks() -> dict[str, list[Path]]:
    """The pages by the marks that they have."""
    found: dict[str, list[Path]] = {}
    for page in [PAGES[0], *sorted(PAGES[1].rglob("*.md"))]:
        for mark in MARK.findall(page.read_text(encoding="utf-8")):
            found.setdefault(mark, []).append(page)
    return found


def test_tables_are_those_that_the_committed_results_give() -> None:
    assert filled(check=True) == []


def test_tables_of_tests_and_cards_are_those_that_they_give(made: Any) -> None:
    assert made.changed_pages() == {}
    text = "".join(page.read_text(encoding="utf-8") for page in [PAGES[0], *PAGES[1].rglob("*.md")])
    assert {name for _, name in made.MARK.findall(text)} == set(made.MADE)


def test_every_committed_result_is_shown_or_named() -> None:
    """Promise: each committed result has a table or is named on a page, and no mark names a result that does not exist."""
    shown_names = {name for mark in marks() for name in names_of(mark)}
    committed = {path.stem for path in RESULTS.glob("*.json")}
    assert shown_names <= committed
    measured, recipes = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("measured.md", "recipes.md"))
    named = re.findall(r"`(\w+)`", measured + recipes)
    assert committed - shown_names <= set(named)
    assert all(f"results/{path.name})" in measured + recipes for path in RESULTS.glob("*.png"))


def test_one_table_stands_in_the_readme() -> None:
    """Promise: the README shows one measured table; the others are in docs/."""
    assert [mark for mark, pages in marks().items() if PAGES[0] in pages] == ["decode_tiny_cpu/headline"]


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_changed_number_is_noticed(name: str) -> None:
    """Guards the check itself: a digit of a figure differs, and the tables do."""
    result = read_result(RESULTS / f"{name}.json")
    before = [markdown(table) for table in tables_of(result)]
    assert before
    key = "fixtures" if "fixtures" in result else "summary"
    rows = list(result[key].values()) if isinstance(result[key], dict) else result[key]
    row = next(row for row in reversed(rows) if row.get("axis") != "budget")
    for field in (
        "speedup",
        "tau",
        "ms_to_first_token",
        "ms_per_token",
        "over_plain",
        "over_shortest",
        "kernels",
        "over_static",
        "history_over_without",
        "agrees",
    ):
        if isinstance(row.get(field), dict):
            row[field] = {name: value + 0.1 for name, value in row[field].items()}
        elif row.get(field) is not None:
            row[field] = "differs" if field == "agrees" else row[field] + 1
    if result["kind"] == "tools":
        row["result"] += "1"
    if result["kind"] == "gpu":
        next(row for row in rows if "ms_per_step" in row)["ms_per_step"] += 1
    if "training" in result:
        for figures in (result["training"].get("figures") or {}).values():
            figures["tau"] += 0.01
    if result["kind"] in ("drafter", "trees"):
        row["tau_micro"] += 0.01
    assert [markdown(table) for table in tables_of(result)] != before


@pytest.mark.parametrize("name", ["decode_tiny_cpu", "batch_tiny_cpu"])
def test_every_text_of_a_committed_result_is_the_targets_own(name: str) -> None:
    """A result with a differing text is a bug to find, not a figure to publish."""
    assert all(row["identical"] == row["prompts"] for row in read_result(RESULTS / f"{name}.json")["summary"])


def test_a_recipes_table_has_the_targets_side_by_side() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert re.search(r"^\| what changes \| cell \| stories, tau \| tiny, tau \| stories, to the base \|", text, re.M)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("recipes_long_cpu", "1024 tokens, block 16, one seed"),
        ("recipes_240_cpu", "1024 tokens, block 16, 3 seeds, 95 % intervals"),
        ("rejected_stories_cpu", "2048 tokens, 3 seeds, 95 % intervals"),
    ],
)
def test_recipes_are_stated_with_each_targets_size(name: str, said: str) -> None:
    """What a file says of its environment is of the last target alone."""
    text = shown([read_result(RESULTS / f"{name}.json")], False)
    assert f"steps of {said} · " in text
    assert "stories: LlamaForCausalLM of 260 K parameters, " in text
    assert "parameters + drafter" not in text


def test_the_table_of_a_shape():
    """Promise: ways of decoding, and forwards by dtype and number of columns."""
    row = {"method": PLAIN, "ms_per_step": 9.0, "stated_tau": 1.0, "ms_per_token": 9.0, "speedup_at_stated_tau": 1.0}
    forwards = [{"dtype": "bfloat16", "ms_per_forward": {"1 column": 8.0, "16 columns": 12.0}}]
    decoded, widths = tables_of({"kind": "shape", "summary": [row], "forwards": forwards})
    assert decoded == (
        ["method", "step, ms", "stated tau", "ms per token", "speed-up"],
        [[PLAIN, "9.00", "1", "9.00", "1.00x"]],
    )
    assert widths == (["dtype", "1 column, ms", "16 columns, ms"], [["bfloat16", "8.0", "12.0"]])


@pytest.mark.parametrize("name", ["gpu_qwen3", "gpu_qwen3_eager"])
def test_every_text_that_a_gpu_wrote_is_right(name: str) -> None:
    """Where its steps are said to be recorded, they were."""
    rows = [row for row in read_result(RESULTS / f"{name}.json")["summary"] if row["kind"] == "decode"]
    measured = [row for row in rows if row["status"] == "measured"]
    assert measured
    assert all(row["is_right"] and row["fallback"] is None for row in measured)
