"""The README says what the committed results say."""

import importlib.util
import json
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_table_is_the_one_that_the_committed_result_gives(report):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    result = json.loads(report.RESULT.read_text(encoding="utf-8"))
    assert report.with_table(readme, report.readme_table(result)) == readme


def test_a_changed_number_is_noticed(report):
    """Guards the check itself: one digit of one figure differs, and the tables do."""
    result = json.loads(report.RESULT.read_text(encoding="utf-8"))
    table = report.readme_table(result)
    result["summary"][-1]["speedup"] += 0.01
    assert report.readme_table(result) != table


def test_every_text_of_the_committed_result_is_the_targets_own(report):
    """A result with a differing text is a bug to find, not a figure to publish."""
    result = json.loads(report.RESULT.read_text(encoding="utf-8"))
    assert all(row["identical"] == row["prompts"] for row in result["summary"])
