"""A target's repository that holds code: no command runs it unless `--trust-remote-code` is given, and none asks on standard input."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import make_drafter, make_target, save_target

from dflash.common.messages import OWN_CODE
from dflash.training import prepare


ROOT = Path(__file__).parents[2]
CODE = """
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

Path({mark!r}).touch()
"""
ENDS = "raise SystemExit('The code ran.')\n"
GENERATE = "from pathlib import Path\nPath({mark!r}).touch()\ndef generate(model, **kwargs): ..."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target with code that leaves `ran`, a drafter, prompts and answers; whoever asks on standard input fails."""
    save_target(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "drafter-DFlash")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    (tmp_path / "target" / "own.py").write_text(CODE.format(mark=str(tmp_path / "ran")) + ENDS)
    rows = [{"text": "abc" * 20}, {"text": "bcd" * 20}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "prompts.txt").write_text("abc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dflash.common.openai_client.PAUSES", ())
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("standard input was asked"))
    return tmp_path


PAIR = ("--target", "target", "--drafter", "drafter-DFlash")
TRAIN = ("train", "--target", "target", "--data", "data.jsonl", "--steps", "1", "--held-out", "0")
COMMANDS = {
    "adapt": ("adapt", *PAIR, "--data", "data.jsonl", "--output", "new-DFlash"),
    "bench": ("bench", *PAIR, "--prompts", "prompts.txt", "--max-new-tokens", "2"),
    "convert": ("convert", "drafter-DFlash", "new-DFlash", "--target", "target"),
    "doctor": ("doctor", "target", "drafter-DFlash"),
    "eval": ("eval", *PAIR, "--prompts", "prompts.txt"),
    "eval of servers": (
        *("eval", *PAIR, "--prompts", "prompts.txt"),
        *("--url", "http://localhost:9", "--baseline-url", "http://localhost:9"),
    ),
    "export": ("export", "drafter-DFlash", "new-DFlash", "--target", "target"),
    "generate": ("generate", *PAIR, "abc", "--max-new-tokens", "2"),
    "regenerate": ("regenerate", "--target", "target", "--data", "data.jsonl", "--output", "new.jsonl"),
    "regenerate by a server": (
        *("regenerate", "--target", "target", "--data", "data.jsonl", "--output", "new.jsonl"),
        *("--url", "http://localhost:9"),
    ),
    "regenerate with a drafter": ("regenerate", *PAIR, "--data", "data.jsonl", "--output", "new.jsonl"),
    "train": (*TRAIN, "--output", "new-DFlash"),
    "train, dry": (*TRAIN, "--output", "new-DFlash", "--dry-run"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_code_of_a_target_only_by_the_flag(
    command: str, folder: Path, dflash_command: Callable[..., tuple[int, str, str]]
) -> None:
    """Promise: one sentence that names the flag. `yes | dflash regenerate …` once ran the code."""
    status, _, error = dflash_command(*COMMANDS[command])
    assert status == 1
    assert OWN_CODE in error
    assert "--trust-remote-code" in error
    assert not (folder / "ran").exists()
    assert dflash_command(*COMMANDS[command], "--trust-remote-code")[0] == "The code ran."
    assert (folder / "ran").exists()


def test_a_target_with_code_is_regenerated_by_the_flag(
    folder: Path, dflash_command: Callable[..., tuple[int, str, str]]
) -> None:
    """Promise: with the flag the command does its work."""
    code = folder / "target" / "own.py"
    code.write_text(code.read_text().removesuffix(ENDS))
    status, out, error = dflash_command(*COMMANDS["regenerate"], "--max-new-tokens", 4, "--trust-remote-code")
    assert status == 0, error
    assert "new.jsonl: 2 rows" in out


def test_a_generate_of_a_target_s_folder_is_not_run_unasked(
    folder: Path, dflash_command: Callable[..., tuple[int, str, str]]
) -> None:
    """Promise: nor is a `custom_generate` in a folder, which transformers 4 runs without being told to."""
    make_target().save_pretrained(folder / "target")  # with a config that names no code
    place = folder / "target" / "custom_generate"
    place.mkdir()
    (place / "generate.py").write_text(GENERATE.format(mark=str(folder / "ran")))
    is_told_apart = transformers.__version__.startswith("4.")
    for command in ("generate", "train, dry"):
        status, _, error = dflash_command(*COMMANDS[command])
        assert (status, OWN_CODE in error) == (int(is_told_apart), is_told_apart), error
        assert not (folder / "ran").exists()


def test_the_library_refuses_too(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"The target target: .*--trust-remote-code"):
        prepare("target", "data.jsonl", settings())
    assert not (folder / "ran").exists()


def settings() -> Any:
    from dflash.training import TrainingSettings

    return TrainingSettings(steps=1)


LOADERS = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
OUR_OWN = ("embedded.py", "clients.py")  # load what is inside the package, or trust it as they say


def loads_without_a_word(source: str) -> list[int]:
    """Lines that load a target and do not say whether its code may run."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        is_load = node.func.attr == "from_pretrained" and getattr(node.func.value, "id", None) in LOADERS
        if is_load and "trust_remote_code" not in [keyword.arg for keyword in node.keywords]:
            lines.append(node.lineno)
    return lines


def test_every_load_says_whether_code_may_run() -> None:
    """Promise: no call leaves it to transformers, which then asks on standard input."""
    assert loads_without_a_word(
        "AutoConfig.from_pretrained(name)\nAutoConfig.from_pretrained(name, trust_remote_code=x)"
    ) == [1]
    files = [path for name in ("dflash", "examples", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    faults = {str(path): loads_without_a_word(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in faults.items() if lines and Path(path).name not in OUR_OWN} == {}
