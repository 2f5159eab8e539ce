"""Arguments that benchmarks share, and how they show and write a result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from dflash.cli.terminal import show_table
from dflash.common.provenance import environment, record, write_result
from dflash.evaluation import chat_encoder, tables_of


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of `--threads` and `--output`, to which a benchmark adds its own arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def parsed(parser: argparse.ArgumentParser, words: list[str] | None = None) -> argparse.Namespace:
    """The arguments; torch has as many threads as they say."""
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    return args


def finish(output: Path | None, kind: str, pair: tuple[Any, Any] | dict[str, Any], **content: Any) -> dict[str, Any]:
    """Shows the tables of a result, writes it to `output` if that is given, and returns it.

    Args:
        output: A JSON file.
        kind: Of the result; its tables are those that `dflash report` makes.
        pair: Target and drafter that were measured, or the facts of a result without a pair.
        content: Rows (`summary`) and whatever else the figures depend on.
    """
    result = record(kind, pair if isinstance(pair, dict) else environment(*pair), **content)
    for table in tables_of(result):
        show_table(table)
    if output is not None:
        write_result(output, result)
    return result


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """A question in the chat template, thinking off."""
    return chat_encoder(tokenizer)([{"role": "user", "content": question}])[0].tolist()
