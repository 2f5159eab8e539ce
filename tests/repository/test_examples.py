"""Every example runs with `--tiny` on the embedded pair, and says that its text is the target's own."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from dflash.checkpoints import export_embedded_pair, heldout_problems, load_embedded_pair


EXAMPLES = Path(__file__).parents[2] / "examples"
HAS_NATIVE = hasattr(GenerationConfig(), "speculation_type")
SHARED = "pair.py"  # no example itself

# What an example must print beside the text.
SAID = {
    "batch.py": [r"2 answers, tau \d"],
    "chat.py": [
        r"(?sm)^> Omar .+\?\nOmar .+^> \w",
        r"tau \d+\.\d\d, 0 of \d+ prompt",
        r"tau \d+\.\d\d, [1-9]\d+ of \d+ prompt",
    ],
    "evaluation.py": [r"dflash: \d+% right", r"tau \d+\.\d\d", "2 of 2 texts identical, the same score: True"],
    "native_generate.py": ["custom_generate writes the same: True"]
    + ["speculation_type='dflash' writes the same: True"] * HAS_NATIVE,
    "pipeline.py": ["the same without the drafter: True"],
    "quickstart.py": [r"tau \d+\.\d\d", "the same as target.generate: True"],
    "sampling.py": [r"the same in blocks of \d+: True"],
    "streaming.py": [r"\[.+\]", r"[1-9]\d* steps after the prompt"],
    "text_iterator_streamer.py": [r"[1-9]\d* pieces"],
    "training.py": [r"step 2: loss \d+\.\d+, tau \d", r"example-DFlash: tau \d\.\d\d over [1-9]\d* verify steps"],
    "vllm_serving.py": [
        r"# vLLM: works",
        r"vllm serve \S+/demo/tiny-target --speculative-config '.*\"num_speculative_tokens\": 15}' --port 8000",
        r"# curl http://localhost:8000/v1/chat/completions",
    ],
}
ANSWERS_NOT = {"evaluation.py", "sampling.py", "training.py", "vllm_serving.py"}  # what they print is no greedy answer


@pytest.fixture(scope="module")
def answer() -> str:
    """What plain `generate` writes to the first held-out question, as far as `--tiny` goes."""
    target, _, tokenizer = load_embedded_pair()
    messages = [{"role": "user", "content": heldout_problems()[0].question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    sequences = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Runs an example as its command does, in this process."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", SAID)
def test_example_runs(
    name: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: the command in the docstring works as it stands, and what it prints is there."""
    monkeypatch.chdir(tmp_path)  # some write a checkpoint
    run(name, monkeypatch, "--tiny")
    printed = capsys.readouterr().out
    for said in SAID[name]:
        assert re.search(said, printed), printed
    if name not in ANSWERS_NOT:
        assert answer in printed


@pytest.mark.parametrize("name", [*SAID, SHARED])
def test_example_is_short_and_says_how_it_is_run(name: str) -> None:
    """Promise: under 100 lines; its first words are what it shows and the command."""
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert source.count("\n") < 100
    assert name == SHARED or f"    python examples/{name}\n" in source


def test_every_example_is_run_and_listed() -> None:
    """Promise: no example is forgotten here or in the folder's README."""
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == {*SAID, SHARED}
    listed = re.findall(r"^- `([\w.]+)`:", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name in listed if name.endswith(".py")} == files


def test_half_a_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a drafter without its target is one sentence, not a wrong pair."""
    with pytest.raises(SystemExit, match="go together"):
        run("quickstart.py", monkeypatch, "--tiny", "--drafter", "some/drafter")


def test_training_leaves_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: an example replaces a drafter only where `--overwrite` asks for it. It once replaced any of its name."""
    monkeypatch.chdir(tmp_path)
    name = "example-DFlash"
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("mine")
    with pytest.raises(SystemExit, match=f"{name} exists: .*--overwrite"):
        run("training.py", monkeypatch, "--tiny")
    assert (tmp_path / name / "config.json").read_text() == "mine"


@pytest.mark.parametrize("script", ["train_drafter", "train_target"])
def test_the_embedded_pair_s_scripts_leave_a_folder_that_is_there(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: as above, before anything is loaded."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "tiny_pair"))
    parse = runpy.run_path(str(EXAMPLES / "tiny_pair" / f"{script}.py"))["parse_arguments"]
    words = [script, "--output", str(tmp_path), *(["--target", "any"] * (script == "train_drafter"))]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        parse()
    assert f"{tmp_path} exists" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--overwrite"])
    assert parse().output == tmp_path


def test_nothing_that_is_run_as_it_stands_writes_over_a_reader_s_folder() -> None:
    """Promise: no script or notebook overwrites unasked, nor takes by default a name that a command of the pages writes."""
    root = EXAMPLES.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    command = re.compile(r"^dflash (?:adapt|convert|export|pair|train) .*$", re.MULTILINE)
    commands = "\n".join(line for page in pages for line in command.findall(page.read_text(encoding="utf-8")))
    assert "my-DFlash" in commands
    files = [path for name in ("examples", "notebooks", "benchmarks") for path in (root / name).rglob("*.*")]
    for path in files:
        if path.suffix not in (".py", ".ipynb"):
            continue
        source = path.read_text(encoding="utf-8").replace('\\"', '"').replace("\\n", "\n")
        assert "overwrite=True" not in source, path
        for name in re.findall(
            r'"--output".*default=(?:Path\()?"([\w-]+)"|^OUTPUT = "([\w-]+)"', source, re.MULTILINE
        ):
            assert not any(part and re.search(rf"(?<!\S){part}(?!\S)", commands) for part in name), path


def test_chat_reads_lines_until_an_empty_one(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: what is typed is answered, each turn after the ones before, and nothing after an empty line."""
    typed = [heldout_problems()[0].question, "And twice that?", "", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    run("chat.py", monkeypatch)
    printed = capsys.readouterr().out
    assert answer in printed
    (first, _), (reused, length) = re.findall(r"(\d+) of (\d+) prompt tokens", printed)
    assert first == "0"
    assert 0 < int(reused) < int(length)


def test_serving_refuses_what_vllm_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a drafter that vLLM would misread is refused before a command is printed."""
    target, drafter = export_embedded_pair(tmp_path / "demo")
    config = json.loads((drafter / "config.json").read_text())
    config["sample_from_anchor"] = config["dflash_config"]["sample_from_anchor"] = True
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="vLLM cannot serve"):
        run("vllm_serving.py", monkeypatch, "--tiny", "--target", str(target), "--drafter", str(drafter))
