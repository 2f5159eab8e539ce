"""The README says what the committed results say."""

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


def test_readme_tables_are_those_that_the_committed_results_give(report):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert report.with_all_tables(readme) == readme


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
