"""README and docs/ say what the committed results say."""

import importlib.util
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_that_the_committed_results_give(report):
    """Promise: every page that shows a table, and every table on some page."""
    shown = set()
    for path in report.pages():
        text = path.read_text(encoding="utf-8")
        assert report.with_all_tables(text) == text, path
        shown |= set(report.shown(text))
    assert shown == {*report.TABLES, *report.OTHERS}


def test_one_table_stands_in_the_readme(report):
    """Promise: beside its example of tau the README shows one measured table; the others are in docs/."""
    assert report.shown((ROOT / "README.md").read_text(encoding="utf-8")) == ["tau_example", "headline"]


def test_every_committed_result_is_shown(report):
    """Promise: no figure is kept that no page shows."""
    of_recipes = {name for names in report.RECIPE_RESULTS for name in names}
    assert {path.stem for path in report.RESULTS.glob("*.json")} == {*report.TABLES} | of_recipes
    measured = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    assert all(f"results/{path.name})" in measured for path in report.RESULTS.glob("*.png"))


def test_an_unknown_table_is_refused(report):
    with pytest.raises(ValueError, match="no table 'no_such'"):
        report.with_all_tables("<!-- no_such:begin --><!-- no_such:end -->")


@pytest.mark.parametrize("command", ["--check", "write"])
def test_several_pages_are_filled_and_checked(report, tmp_path, monkeypatch, capsys, command):
    """Promise: one run fills every page; with --check nothing is written and each page that disagrees is named."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/measured.md"):
        (tmp_path / name).write_text("a\n<!-- sampling_tiny:begin -->\nold\n<!-- sampling_tiny:end -->\nb\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["report.py", *([command] if command == "--check" else [])])
    assert report.main() == (command == "--check")
    for name in ("README.md", "docs/measured.md"):
        assert ("old" in (tmp_path / name).read_text()) is (command == "--check")
        assert (
            (f"{name} and the results disagree" in capsys.readouterr().err)
            or name != "README.md"
            or command != "--check"
        )


@pytest.mark.parametrize("name", ["decode_tiny_cpu", "batch_tiny_cpu"])
def test_a_changed_number_is_noticed(report, name):
    """Guards the check itself: one digit of one figure differs, and the tables do."""
    result = report.read(name)
    table = report.TABLES[name](result)
    result["summary"][-1]["speedup"] += 0.01
    assert report.TABLES[name](result) != table


@pytest.mark.parametrize("name", ["decode_tiny_cpu", "batch_tiny_cpu"])
def test_every_text_of_a_committed_result_is_the_targets_own(report, name):
    """A result with a differing text is a bug to find, not a figure to publish."""
    assert all(row["identical"] == row["prompts"] for row in report.read(name)["summary"])
