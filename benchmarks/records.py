"""How a benchmark writes what it measured: with the command, the revision and what the figures depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.evaluation.journal import write_aside
from dflash.evaluation.records import record


def save(path: Path, target: Any, drafter: Any, kind: str = "decode", **content: Any) -> None:
    """Writes a result as JSON, aside and then renamed."""
    write_aside(path, record(kind, target, drafter, **content))


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """A question behind the chat template, thinking off."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]
