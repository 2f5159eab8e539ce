"""Every notebook runs from top to bottom in a fresh kernel, and stands in git as it is to be opened: without outputs."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[2]
BOOKS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}
NAMES = (
    "01_quickstart",
    "02_how_one_block_works",
    "03_train_a_drafter",
    "04_measure",
    "05_bring_your_own_target",
)

# Extras that a notebook's first cell installs, and what everything here needs.
ALLOWED = {"dflash", "torch", "transformers", "matplotlib", "rich"} | set(sys.stdlib_module_names)
LONGEST_HELPER = 8
SECONDS = 120  # for a whole notebook, as it is opened

# What is put after the cell that is tagged "parameters": a run of a few seconds, of the same cells.
TINY = {
    "03_train_a_drafter": "STEPS, MAX_NEW_TOKENS, MAX_PROMPTS = 2, 24, 16",
    "04_measure": "NUM_PROMPTS, REPEATS = 1, 1",
}
# What an executed notebook must say in its outputs' text, and how many pictures it must show.
SAID = {
    "01_quickstart": [r"Each part is 12/6", r"the same text: True", r"\d+ steps, tau \d+\.\d\d"],
    "02_how_one_block_works": [r"12 of 15 accepted", r"next anchor: '2'", r"\d+ steps, tau \d+\.\d\d"],
    "03_train_a_drafter": [r"12 prompts to learn from", r"best after 2 steps: tau", r"the target's own text: True"],
    "04_measure": [r"target\.generate +1 of 1 identical", r"dflash +1 of 1 identical", r"blocks of 16 +tau"],
    "05_bring_your_own_target": [
        r"random-llama: the same text: True",
        r"random-qwen3: the same text: True",
        r"works +vLLM",
        r"num_target_layers is 8 and the target's is 12",
        r"target_layer_ids = \[1, 2, 3, 4, 7\]",
        r"rope_theta",
    ],
}
PICTURES = {
    "01_quickstart": 1,
    "02_how_one_block_works": 5,
    "03_train_a_drafter": 2,
    "04_measure": 4,
    "05_bring_your_own_target": 1,
}


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code(book: dict[str, Any]) -> list[str]:
    """The code cells, a magic command as `pass`."""
    cells = [source(cell) for cell in book["cells"] if cell["cell_type"] == "code"]
    return [re.sub(r"^(\s*)[%!].*$", r"\1pass", text, flags=re.MULTILINE) for text in cells]


def faults(book: dict[str, Any]) -> list[str]:
    """What a notebook holds that it must not."""
    found = []
    for cell in book["cells"]:
        if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"] is not None):
            found.append(f"cell {cell['id']} has outputs")
        if set(cell["metadata"]) - {"tags"}:
            found.append(f"cell {cell['id']} has metadata of an editor")
    if set(book["metadata"]) != {"kernelspec", "language_info"} or set(book["metadata"]["language_info"]) != {"name"}:
        found.append("the notebook has metadata of a machine")
    for tree in map(ast.parse, code(book)):
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"imports {module}" for module in modules if module.split(".")[0] not in ALLOWED]
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > LONGEST_HELPER:
                found.append(f"{node.name} is longer than {LONGEST_HELPER} lines")
            if isinstance(node, ast.ClassDef):
                found.append(f"defines the class {node.name}")
    first = next(source(cell) for cell in book["cells"] if cell["cell_type"] == "code")
    if not re.search(r"find_spec\(\"dflash\"\) is None:\n    %pip install", first):
        found.append("the first cell does not install what is missing")
    calls = "\n".join(source(cell) for cell in book["cells"] if cell["cell_type"] == "code")
    if len(re.findall(r"^\s*(%pip|!)", calls, re.MULTILINE)) != 1:
        found.append("installs or runs something else")
    return found


def test_every_notebook_is_here_and_run() -> None:
    assert tuple(BOOKS) == NAMES
    assert set(SAID) == set(PICTURES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stripped_and_keeps_its_helpers_small(name: str) -> None:
    """Promise: no outputs in git, no package but this one and its extras, no helper that belongs in the package."""
    assert faults(BOOKS[name]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"outputs": [{"output_type": "stream"}]}, "outputs"),
        ({"execution_count": 3}, "outputs"),
        ({"metadata": {"collapsed": False}}, "metadata"),
        ({"source": "import numpy"}, "imports numpy"),
        ({"source": "from scipy.stats import norm"}, "imports scipy"),
        ({"source": "def f():\n" + "    x = 1\n" * 8}, "longer than 8"),
        ({"source": "class Helper:\n    pass"}, "class Helper"),
        ({"source": "!pip install numpy"}, "installs"),
        ({"source": "%pip install numpy"}, "installs"),
    ],
)
def test_planted_fault_is_found(change: dict[str, Any], fault: str) -> None:
    """Guards the check itself."""
    book = json.loads(json.dumps(BOOKS[NAMES[0]]))
    cell = [cell for cell in book["cells"] if cell["cell_type"] == "code"][1]
    cell.update(change)
    assert any(fault in found for found in faults(book)), faults(book)


def test_quickstart_is_the_published_snippet() -> None:
    """Promise: the notebook runs the quickstart's block for folders, word for word."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (snippet,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "trust_remote_code" in text]
    assert snippet.strip() in map(source, BOOKS["01_quickstart"]["cells"])


@pytest.mark.notebook
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: opened and run as it is, a notebook comes to its end in time and shows what its text says."""
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebooks")
    pytest.importorskip("ipykernel", reason="needs the extra notebooks")
    pytest.importorskip("matplotlib", reason="needs the extra notebooks")
    # A kernel of this interpreter, whatever kernels the machine has; nothing is written outside the folder.
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": name, "language": "python"}))
    places = {
        "JUPYTER_PATH": "jupyter",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        "HF_MODULES_CACHE": "hf",
    }
    for variable, folder in places.items():
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    book = nbformat.reads(json.dumps(BOOKS[name]), as_version=4)
    if name in TINY:
        (cell,) = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]
        cell.source += f"\n{TINY[name]}"
    work = tmp_path / "work"
    work.mkdir()
    end = time.monotonic() + SECONDS
    nbclient.NotebookClient(
        book,
        timeout_func=lambda cell: max(1, end - time.monotonic()),
        kernel_name="python3",
        resources={"metadata": {"path": str(work)}},
    ).execute()

    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    shown = "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)  # colours
    for said in SAID[name]:
        assert re.search(said, shown), shown
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[name]
