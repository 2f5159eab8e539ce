"""What stands in a result file beside the figures: the command, the revision, and what the figures depend on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.evaluation.harness import SCHEMA_VERSION, environment


def record(kind: str, target: PreTrainedModel, drafter: PreTrainedModel, **content: Any) -> dict[str, Any]:
    """A result of this process: `content` behind the command, the revision and the environment."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "command": command(),
        "revision": revision(),
        "environment": environment(target, drafter),
        **content,
    }


def command() -> str:
    """What was called, without this machine's paths: they say nothing to a reader; a Hub id keeps its slash."""
    program = Path(sys.argv[0])
    name = program.stem if program.suffix != ".py" or program.stem == "dflash" else f"benchmarks/{program.name}"
    return " ".join([name, *(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])])


def revision() -> str:
    """The commit of this code, empty where it is installed and no checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""
