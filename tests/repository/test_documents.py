"""Documents beside the code: the drawing of one block stands alone and counts right, CONTRIBUTING names what exists."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from test_layering import FLOORS


ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "how_one_block_works.svg"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawing() -> ElementTree.Element:
    return ElementTree.parse(PATH).getroot()


def row(drawing: ElementTree.Element, step: str, y: str) -> list[str]:
    """The classes of a step's squares at a height, from left to right."""
    group = next(group for group in drawing.iter(f"{SVG}g") if group.get("id") == step)
    squares = [rect for rect in group.iter(f"{SVG}rect") if rect.get("y") == y and rect.get("width") == "60"]
    return [rect.get("class", "") for rect in sorted(squares, key=lambda rect: float(rect.get("x", "0")))]


def test_drawing_loads_nothing_and_runs_nothing(drawing: ElementTree.Element) -> None:
    """Promise: GitHub shows it as an image, where scripts, fonts and links of other places do not load."""
    text = PATH.read_text(encoding="utf-8")
    assert not re.search(r"<(script|image|foreignObject|use)|href=|url\((?!#)|@import", text)
    assert drawing.find(f"{SVG}title") is not None
    assert drawing.find(f"{SVG}desc") is not None


def test_every_colour_has_a_dark_one(drawing: ElementTree.Element) -> None:
    """Promise: on a dark page nothing keeps the colour that it has on paper."""
    style = drawing.findtext(f"{SVG}style", "")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    coloured = {name for name, rule in re.findall(r"\.(\w+) \{([^}]*#[0-9a-f]{6}[^}]*)\}", light)}
    also_dark = set(re.findall(r"\.(\w+)", dark))
    assert coloured
    assert coloured <= also_dark
    drawn = {element.get("fill") for element in drawing.iter()} | {element.get("stroke") for element in drawing.iter()}
    assert drawn == {None}  # colours come from the style alone


def test_figures_are_those_of_the_squares(drawing: ElementTree.Element) -> None:
    """Promise: what is accepted, kept and committed is what the words say."""
    text = PATH.read_text(encoding="utf-8")
    num_accepted, acceptance_length = (
        int(re.search(rf"{name} (\d)", text)[1]) for name in ("num_accepted", "acceptance_length")
    )
    drafted, chosen = row(drawing, "accept", "353"), row(drawing, "accept", "395")
    assert drafted == ["good"] * num_accepted + ["bad"]
    assert chosen == ["good"] * num_accepted + ["own", "unused"]
    assert row(drawing, "draft", "24") == ["anchor"] + ["mask"] * len(drafted)
    assert acceptance_length == num_accepted + 1
    assert f"{acceptance_length} tokens for one forward" in text


def test_contributing_names_files_and_names_that_exist() -> None:
    """Promise: who follows a recipe finds each file and each name that it speaks of."""
    said = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", CONTRIBUTING, flags=re.DOTALL)))
    folders = (ROOT / name for name in ("dflash", "tests", "benchmarks", "examples", "docs"))
    paths = [
        *ROOT.glob("*.*"),
        *ROOT.glob("docs/**/*.md"),
        *(path for folder in folders for path in folder.rglob("*.py")),
    ]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    for name in said:
        if re.fullmatch(r"[\w./*]+\.(py|md|toml)", name) and "*" not in name:
            assert any(f"/{file}".endswith(f"/{name}") for file in files), name
    sources = [*ROOT.glob("dflash/**/*.py"), *ROOT.glob("tests/**/*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = {name for name in said if re.fullmatch(r"_?[A-Z][A-Za-z_]+(\.\w+)?|[a-z]+(_[a-z]+)+", name)}
    assert len(names) > 20
    for name in names:
        assert re.search(rf"\b{name.split('.')[-1]}\b", source), name


def test_contributing_runs_the_tests_as_ci_does() -> None:
    """Promise: the older transformers is set up by the lines that `.ci/run` uses."""
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (unpinned,) = re.findall(r"grep -vE '[^']+' constraints\.txt", CONTRIBUTING)
    assert unpinned in steps


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_rooms_are_named_in_the_order_in_which_they_import(name: str) -> None:
    """Promise: "only rooms before it in this table" is the rule that `test_layering.py` holds."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `dflash/(\w+)` \|", text, re.MULTILINE)) == FLOORS
