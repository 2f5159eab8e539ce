"""How a benchmark writes what it measured: with the command, the revision and what the figures depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.common.provenance import environment, record, write_result
from dflash.evaluation import chat_encoder


def save(path: Path, target: Any, drafter: Any, kind: str, **content: Any) -> None:
    """Writes a result as JSON, aside and then renamed."""
    write_result(path, record(kind, environment(target, drafter), **content))


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """A question behind the chat template, thinking off."""
    return chat_encoder(tokenizer)([{"role": "user", "content": question}])[0].tolist()
