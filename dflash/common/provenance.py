"""What a result file holds beside its figures: the command, the revision, and what the figures depend on."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from .files import write_text
from .logits import dtype_name
from .version import __version__


# Raised when a field of a result changes its meaning or goes away.
SCHEMA_VERSION = 1


def record(kind: str, environment: dict[str, Any], **content: Any) -> dict[str, Any]:
    """A result of this process: the command, the revision and the environment, then `content`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "command": command(),
        "revision": revision(),
        "environment": {"dflash": __version__, "python": platform.python_version(), **environment},
        **content,
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON; the file is whole at any moment."""
    write_text(path, json.dumps(result, indent=1) + "\n")


def environment(target: PreTrainedModel, drafter: PreTrainedModel) -> dict[str, Any]:
    """What the figures of a pair depend on besides the code: versions, hardware, dtype, attention, threads, sizes."""
    return {
        **versions(),
        **machine(target.device),
        "target_dtype": dtype_name(target),
        "drafter_dtype": dtype_name(drafter),
        "attention": target.config._attn_implementation,
        "target_parameters": target.num_parameters(),
        "drafter_parameters": drafter.num_parameters(),
        "block_size": drafter.config.block_size,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware of this process, and the name of the device that computes."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def versions() -> dict[str, str]:
    """The versions of Python and the libraries that every figure depends on."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def command() -> str:
    """The command line of this process without passwords of URLs and paths of this machine; a Hub id keeps its slash."""
    program = Path(sys.argv[0]).resolve()
    is_script = program.suffix == ".py" and program.name != "__main__.py"  # `python -m dflash` is `dflash`
    words = [f"{program.parent.name}/{program.name}" if is_script else "dflash"]
    for word in sys.argv[1:]:
        option = ""
        value = word
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
            option = f"{name}="
        value = re.sub(r"(?<=://)[^/\s]*@", "", value)
        path = Path(value)
        if os.path.isabs(os.path.expanduser(value)) or ".." in path.parts:
            value = path.name
        words.append(option + value)
    return shlex.join(words)


def public_name(source: str | os.PathLike[str] | None) -> str | None:
    """A Hub id as it is; the last part of a path on this machine."""
    if source is None:
        return None
    path = Path(source).expanduser()
    return path.absolute().name if path.exists() else os.fspath(source)


def revision() -> str:
    """The commit of this code; empty if it is no checkout, as in an environment inside a checkout of something else."""
    file = Path(__file__)
    is_ours = _git(file.parent, "ls-files", file.name)
    return _git(file.parent, "rev-parse", "--short", "HEAD") if is_ours else ""


def _git(folder: Path, *words: str) -> str:
    """What git says in a folder; empty after an error."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
