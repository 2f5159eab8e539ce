"""Command lines of the engines: what is printed can be pasted, and is what runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import dflash_process
from safetensors.torch import load_file, save_file
from tiny_models import make_drafter, make_target

from dflash.checkpoints import declared_block_size, server_command
from dflash.checkpoints.serving import INSTALL


AWKWARD = 'it\'s a "$HOME" `x` drafter-DFlash'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter whose folder tries the quoting; read-only."""
    folder = tmp_path_factory.mktemp("serving pair")
    make_target().save_pretrained(folder / "target")
    make_drafter().to(torch.bfloat16).save_pretrained(folder / AWKWARD)
    return folder / "target", folder / AWKWARD


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, dflash_command: Callable[..., Any]) -> Any:
    """`run("--engine", …)`: exit status, standard output, standard error of `dflash serve`; no engine may start."""
    # In this process an engine would take the place of pytest and end it with success.
    monkeypatch.setattr(os, "execv", lambda *words: pytest.fail(f"started {words}"))
    return partial(dflash_command, "serve")


def test_vllm_is_told_the_method_and_one_token_less_than_the_block() -> None:
    command = server_command("vllm", "T", "D", 16, ["--port", "1"]).command
    assert command[:4] == ("vllm", "serve", "T", "--speculative-config")
    assert json.loads(command[4]) == {"method": "dflash", "model": "D", "num_speculative_tokens": 15}
    assert command[5:] == ("--port", "1")


def test_sglang_counts_the_anchor() -> None:
    command = shlex.join(server_command("sglang", "T", "D", 16, ["--tp", "2"]).command)
    assert command == (
        "sglang serve --model-path T --speculative-algorithm DFLASH --speculative-draft-model-path D "
        "--speculative-num-draft-tokens 16 --tp 2"
    )


def test_tensorrt_llm_reads_a_file() -> None:
    plan = server_command("trtllm", "T", "D", 16, ["--tp_size", "2"])
    assert plan.command == ("trtllm-serve", "T", "--config", "dflash_trtllm.yaml", "--tp_size", "2")
    (text,) = plan.files.values()
    assert json.loads(text) == {
        "speculative_config": {"decoding_type": "DFlash", "max_draft_len": 15, "speculative_model": "D"}
    }


@pytest.mark.parametrize("engine", INSTALL)
def test_a_block_of_one_drafts_nothing(engine: str) -> None:
    with pytest.raises(ValueError, match="block_size=1"):
        server_command(engine, "T", "D", 1)


@pytest.mark.parametrize("engine", INSTALL)
def test_print_only_prints_and_a_shell_reads_it_back(
    run: Any, pair: tuple[Path, Path], engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: whatever the names hold, the printed lines give the engine the words that were meant."""
    monkeypatch.chdir(tmp_path)
    target, drafter = pair
    options = ("--engine", engine, "--target", target, "--drafter", drafter)
    status, out, _ = run(*options, "--print", "--", "--flag", "a 'b' $c")
    assert status == 0
    assert list(tmp_path.iterdir()) == []

    plan = server_command(engine, str(target), str(drafter), 6, ["--flag", "a 'b' $c"])
    program = plan.command[0]
    (tmp_path / program).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell = subprocess.run(["sh", "-c", out], capture_output=True, text=True, env=environment, check=True)
    assert tuple(shell.stdout.split("\0")[:-1]) == plan.command[1:]
    for name, text in plan.files.items():
        assert (tmp_path / name).read_text() == text + "\n"


@pytest.mark.parametrize("engine", INSTALL)
def test_serving_becomes_the_engine(pair: tuple[Path, Path], engine: str, tmp_path: Path) -> None:
    """Promise: the command is printed first, then the engine has our streams, its arguments and our exit status."""
    target, drafter = pair
    plan = server_command(engine, str(target), str(drafter), 6)
    program = tmp_path / plan.command[0]
    program.write_text('#!/bin/sh\necho "served $#"\ncat\nexit 7\n')
    program.chmod(0o755)
    words = ["--engine", engine, "--target", str(target), "--drafter", str(drafter)]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = dflash_process("serve", *words, text="from standard input", folder=tmp_path, PATH=path)
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"{plan.script()}\nserved {len(plan.command) - 1}\nfrom standard input"
    for name, text in plan.files.items():
        assert json.loads((tmp_path / name).read_text()) == json.loads(text)


@pytest.mark.parametrize("engine", INSTALL)
def test_an_engine_that_is_not_installed(
    run: Any, pair: tuple[Path, Path], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    status, out, err = run("--engine", engine, "--target", pair[0], "--drafter", pair[1])
    assert status == 1
    assert out.startswith(("vllm", "sglang", "printf"))
    assert INSTALL[engine] in err
    assert "--print" in err
    assert err.count("\n") == 1


def test_an_options_file_of_somebody_else_is_kept(
    run: Any, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "trtllm-serve"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "dflash_trtllm.yaml").write_text("mine: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = run("--engine", "trtllm", "--target", pair[0], "--drafter", pair[1])
    assert status == 1
    assert "dflash_trtllm.yaml exists" in err
    assert (tmp_path / "dflash_trtllm.yaml").read_text() == "mine: 1\n"


def _edited(drafter: Path, tmp_path: Path, **fields: Any) -> Path:
    copy = Path(shutil.copytree(drafter, tmp_path / "edited-DFlash"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


def test_a_drafter_that_the_engine_cannot_run_is_refused(run: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Promise: the finding in one sentence, nothing printed; another engine, or --no-check, goes on."""
    drafter = _edited(pair[1], tmp_path, architectures=["DFlashQwen3"])
    options = ("--target", pair[0], "--drafter", drafter, "--print")
    status, out, err = run("--engine", "sglang", *options)
    assert (status, out) == (1, "")
    assert "SGLang cannot serve" in err
    assert "architectures=['DFlashQwen3'] (config.json)" in err
    assert err.count("\n") == 1
    assert run("--engine", "vllm", *options)[0] == 0
    assert run("--engine", "sglang", *options, "--no-check")[0] == 0


def test_a_pair_that_does_not_belong_together_is_refused(run: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    status, _, err = run("--engine", "vllm", "--target", target, "--drafter", pair[1], "--print")
    assert status == 1
    assert "vocab_size" in err


def test_the_block_is_the_drafters_or_the_users(run: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert declared_block_size(str(pair[1])) == 6
    options = ("--engine", "vllm", "--target", pair[0], "--drafter", pair[1], "--print")
    assert '"num_speculative_tokens": 5' in run(*options)[1]
    assert '"num_speculative_tokens": 3' in run(*options, "--block-size", "4")[1]
    status, out, err = run(*options, "--block-size", "7")
    assert (status, out) == (1, "")
    assert "--block-size 7 is more than the 6" in err
    assert '"num_speculative_tokens": 6' in run(*options, "--block-size", "7", "--no-check")[1]
    nameless = _edited(pair[1], tmp_path, block_size=None, dflash_config={})
    with pytest.raises(ValueError, match="--block-size"):
        declared_block_size(str(nameless))


@pytest.mark.parametrize("option", ["--target", "--drafter"])
def test_a_folder_that_does_not_exist_is_refused(run: Any, pair: tuple[Path, Path], option: str) -> None:
    """Promise: a typing error is found before an engine loads anything; --no-check prints for another machine."""
    words = {"--engine": "vllm", "--target": pair[0], "--drafter": pair[1], "--block-size": 6, option: "./nope"}
    options = [item for pair_ in words.items() for item in pair_]
    status, out, err = run(*options, "--print")
    assert (status, out) == (1, "")
    assert f"{option} ./nope is not a folder" in err
    assert run(*options, "--print", "--no-check")[0] == 0


def test_a_drafter_of_the_hub_that_is_not_here(run: Any, pair: tuple[Path, Path]) -> None:
    """Offline, its block is the user's to give; nothing is checked."""
    options = ("--engine", "vllm", "--target", pair[0], "--drafter", "no/such-DFlash", "--print")
    status, _, err = run(*options)
    assert status == 1
    assert "--block-size" in err
    assert '"model": "no/such-DFlash"' in run(*options, "--block-size", "16")[1]


def test_weights_that_are_no_numbers_are_not_served(run: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter = _edited(pair[1], tmp_path)
    weights = load_file(drafter / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, drafter / "model.safetensors")
    status, out, err = run("--engine", "vllm", "--target", pair[0], "--drafter", drafter, "--print")
    assert (status, out) == (1, "")
    assert "norm.weight (model.safetensors): NaN or infinite weights" in err
