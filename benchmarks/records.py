"""How a benchmark writes what it measured: with the command, the revision and what the figures depend on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash.evaluation.harness import SCHEMA_VERSION, environment


def save(path: Path, target: Any, drafter: Any, **content: Any) -> None:
    """Writes a result as JSON, aside and then renamed."""
    # Absolute paths are this machine's and say nothing to a reader; a Hub id keeps its slash.
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "schema_version": SCHEMA_VERSION,
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "revision": revision.stdout.strip(),
        "environment": environment(target, drafter),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """A question behind the chat template, thinking off."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]
