"""What is installed, pinned and promised: pyproject.toml, constraints.txt, README.md and the embedded pair agree."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

import dflash


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
README = (ROOT / "README.md").read_text()
ASSETS = ROOT / "dflash" / "assets"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def test_every_dependency_is_pinned_exactly() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = {normal(name) for group in groups for name in group}
    assert wanted - {normal(pin) for pin in PINS} <= {"dflash-transformers", "pre-commit"}
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][^ ;]*(; python_version (>=|<) \"3\.11\")?", pin) for pin in PINS)
    assert "torch==2.13.0" in PINS


def test_what_runs_is_what_is_pinned() -> None:
    """On the versions that constraints.txt names; a run with others on purpose (transformers 4.57) has nothing to compare."""
    pins = dict(pin.split(";")[0].split("==") for pin in PINS if "<" not in pin)
    if metadata.version("transformers") != pins["transformers"] or sys.version_info < (3, 11):
        pytest.skip("not the pinned set")
    for name in ("torch", "accelerate", "safetensors", "tokenizers", "huggingface-hub"):
        assert metadata.version(name).split("+")[0] == pins[name]


def test_nothing_installs_the_registrys_dflash() -> None:
    texts = [
        path
        for pattern in ("*.md", "*.toml", ".ci/run", "dflash/**/*.py", "examples/**/*")
        for path in ROOT.glob(pattern)
    ]
    for path in texts:
        if path.is_file() and path.suffix not in {".png", ".json", ".pyc"}:
            assert not re.search(r"pip install[^\n`]* dflash(?![-/\w])", path.read_text()), path


def test_readme_gives_two_commands_of_one_line_each() -> None:
    """`.ci/run` reads the second one from here, so the README cannot drift from what is run."""
    lines = README.splitlines()
    jobs = [line for line in lines if re.match(r"python3? -m venv .*\bdflash demo$", line)]
    tests = [line for line in lines if re.match(r"python3? -m venv .*\[test\].*\bpytest$", line)]
    assert len(jobs) == len(tests) == 1
    assert "-c constraints.txt" in jobs[0]
    assert "-c constraints.txt" in tests[0]


def test_embedded_pair_is_small_and_holds_no_code() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert (
        sum(path.stat().st_size for path in files) <= 16 * 2**20 + 2**20
    )  # weights and tokenizer; a megabyte of text
    assert not [path for path in files if path.suffix == ".py" and path.parent != ASSETS]
    for folder in ("tiny-target", "tiny-DFlash"):
        assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in (ASSETS / folder).iterdir()}


def test_the_version_is_said_once() -> None:
    """Promise: the package's own is the distribution's, the citation's and the newest of the changelog."""
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == dflash.__version__
    with suppress(metadata.PackageNotFoundError):
        assert metadata.version("dflash-transformers") == dflash.__version__


def test_installation_holds_every_asset() -> None:
    try:
        listed = {path.as_posix() for path in metadata.files("dflash-transformers") or ()}
    except metadata.PackageNotFoundError:
        pytest.skip("run from a checkout")
    if not any(path.startswith("dflash/") for path in listed):
        pytest.skip("an editable installation")
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dflash").rglob("*") if path.is_file()}
    assert {path for path in here if "__pycache__" not in path} <= listed


def test_remote_code_snippet_runs_where_the_package_is_not_importable(tmp_path: Path) -> None:
    """The quickstart's block for folders, word for word, on those that `dflash export-demo demo` writes."""
    from dflash.checkpoints import export_embedded_pair

    export_embedded_pair(tmp_path / "demo")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    (snippet,) = [block for block in blocks if "trust_remote_code=True" in block]
    hidden = "import sys\nsys.modules['dflash'] = None\n"
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", hidden + snippet], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^# (.*)$", snippet, re.MULTILINE)
    assert printed
    assert done.stdout.strip().splitlines() == printed
