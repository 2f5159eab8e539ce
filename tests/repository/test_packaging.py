"""What is installed, pinned and promised: pyproject.toml, constraints.txt, README.md and the embedded pair agree."""

import os
import re
import runpy
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import printed_by

import dflash


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
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


def test_until_the_first_release_everything_installs_from_the_checkout() -> None:
    """README and notebooks named the package to an index that did not hold it."""
    if "not released yet" not in (ROOT / "CHANGELOG.md").read_text():
        pytest.skip("the package is published")
    books = sorted((ROOT / "notebooks").glob("*.ipynb"))
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *books]
    for path in pages:
        assert not re.search(r"pip install[^\n`]*dflash-transformers", path.read_text(encoding="utf-8")), path
    for path in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        assert "not on an index yet" in path.read_text(encoding="utf-8")
    for path in books:
        assert r"%pip install -q \"..[notebooks]\"" in path.read_text(encoding="utf-8"), path


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
    said = printed_by(hidden + snippet, tmp_path)
    printed = re.findall(r"^# (.*)$", snippet, re.MULTILINE)
    assert printed
    assert said.strip().splitlines() == printed


def workflow(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A workflow's triggers and jobs. YAML 1.1 reads the key `on` as true."""
    parsed = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return parsed[True], parsed["jobs"]


def commands_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_ci_workflow_runs_what_is_run_here() -> None:
    """Promise: every push and pull request runs `.ci/run`, with torch's CPU build, and nothing else decides."""
    triggers, jobs = workflow("ci.yml")
    assert {"push", "pull_request", "workflow_call"} <= set(triggers)
    (job,) = jobs.values()
    assert commands_of(job) == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "python:3.11" in job["container"]
    assert job["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")


def test_a_release_is_published_after_ci_from_a_tag_alone() -> None:
    """Promise: a tag that names the version builds wheel and sdist once CI has passed, and only that job may publish."""
    triggers, jobs = workflow("release.yml")
    assert triggers == {"push": {"tags": ["v*"]}}
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["build"]["needs"] == "ci"
    assert jobs["publish"]["needs"] == "build"
    commands = "\n".join(commands_of(jobs["build"]))
    assert re.search(r"python -m build\n.*twine check --strict dist/\*", commands)
    checked = next(command for command in commands_of(jobs["build"]) if "GITHUB_REF_NAME" in command)
    for tag, is_right in ((f"v{dflash.__version__}", True), ("v99.0.0", False)):
        done = subprocess.run(
            ["bash", "-c", checked], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False
        )
        assert (done.returncode == 0) == is_right
    assert "run" not in "".join(step for steps in jobs["publish"]["steps"] for step in steps)
    assert jobs["publish"]["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    may_publish = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert may_publish == ["publish"]


def test_ci_runs_what_people_install_and_both_ends_of_the_range() -> None:
    """Known gap: the range admitted a release of transformers that no run had seen, and on it the library was broken."""
    script = (ROOT / ".ci" / "run").read_text()
    (wanted,) = [name for name in PROJECT["dependencies"] if name.startswith("transformers")]
    oldest, above = re.fullmatch(r"transformers>=([\d.]+),<([\d.]+)", wanted).groups()  # type: ignore[union-attr]
    (newest,) = [pin for pin in PINS if re.match(r"transformers==.*>=", pin)]
    major, minor = newest.split("==")[1].split(".")[:2]
    assert above == f"{major}.{int(minor) + 1}"
    assert f"'transformers=={oldest}.*'" in script
    assert re.search(
        r"^\.venv-[\d.]+/bin/pytest </dev/null", script.replace("DFLASH_OTHER_PYTHON=$bin/python ", ""), re.M
    )
    assert f"'transformers=={major}.{int(minor) - 1}.*'" in script
    assert re.search(r'\.venv-plain/bin/pip install -q "\$wheel" &&', script)  # no constraints
    for environment in ("plain", oldest, f"{major}.{int(minor) - 1}"):
        assert f'"$work/.venv-{environment}/bin/dflash" demo' in script


def test_each_night_the_newest_transformers_is_tried() -> None:
    """Promise: its newest release, beyond the range too, and its main branch; a release that passes opens a pull request."""
    triggers, jobs = workflow("nightly.yml")
    assert triggers["schedule"]
    sources = [entry["transformers"] for entry in jobs["tests"]["strategy"]["matrix"]["include"]]
    assert sources == ["transformers", "git+https://github.com/huggingface/transformers"]
    for job in jobs.values():
        commands = commands_of(job)
        assert "--upgrade" in commands[0]
        assert any("pytest" in command for command in commands[1:])
    assert any("gh pr create" in command for command in commands_of(jobs["widen"]))


@pytest.mark.parametrize(
    ("version", "above", "pin"),
    [
        ("5.25.1", "5.26", "5.25.1"),
        ("6.0.0", "6.1", "6.0.0"),
        ("5.24.7", "5.25", "5.24.0"),
        ("5.25.0rc1", "5.25", "5.24.0"),
    ],
)
def test_the_range_is_widened_to_a_new_minor_release_alone(tmp_path: Path, version: str, above: str, pin: str) -> None:
    (tmp_path / "pyproject.toml").write_text('dependencies = ["torch>=2.13", "transformers>=4.57,<5.25"]\n')
    (tmp_path / "constraints.txt").write_text(
        'transformers==5.24.0; python_version >= "3.11"\ntransformers==5.20.2; python_version < "3.11"\n'
    )
    widen = runpy.run_path(str(ROOT / ".ci" / "widen_range.py"))["widen"]
    assert widen(tmp_path, version) == (above != "5.25")
    assert f"transformers>=4.57,<{above}" in (tmp_path / "pyproject.toml").read_text()
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    assert lines == [f'transformers=={pin}; python_version >= "3.11"', 'transformers==5.20.2; python_version < "3.11"']


def test_ci_runs_the_wheel_in_an_environment_that_holds_nothing_else() -> None:
    """Promise: what would be published is built, installed before anything else is, and run away from the checkout."""
    steps = (ROOT / ".ci" / "run").read_text().split("\nstep ")
    first = next(index for index, step in enumerate(steps) if ".venv/bin/" in step)
    wheel = steps[first]
    assert wheel.startswith('"the wheel"')
    assert re.search(
        r'-m build .*\n.*\npython3 -m venv \.venv\n\.venv/bin/pip install .*"\$wheel" </dev/null\n', wheel
    )
    for command in ('dflash" --version', "-m dflash --help", 'dflash" demo --prompts 1'):
        assert command in wheel
    assert "cd .elsewhere" in wheel
