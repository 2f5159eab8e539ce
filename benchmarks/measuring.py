"""Arguments that benchmarks share, and how they show and write a result."""

import argparse
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from reporting import tables_of

from dflash.checkpoints import heldout_problems
from dflash.cli.terminal import show_table
from dflash.common.provenance import environment, record, write_result
from dflash.evaluation import chat_encoder


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
    """Shows the tables of a result as `reporting.py` makes them, writes it to `output` if that is given, and returns it.

    `pair` is the target and the drafter that were measured, or the facts of a result without a pair; `content` holds rows
    (`summary`) and whatever else the figures depend on.
    """
    result = record(kind, pair if isinstance(pair, dict) else environment(*pair), **content)
    for table in tables_of(result):
        show_table(table)
    if output is not None:
        write_result(output, result)
    return result


def turns(names: Iterable[str], repeats: int) -> list[str]:
    """The names as often as repeats say, every other time backwards: no way of decoding always comes first."""
    return [name for repeat in range(repeats) for name in sorted(names, reverse=bool(repeat % 2))]


def simulated(shape: str, tau: float, repeats: int) -> dict[str, Any]:
    """What a result says of a `scripted_pair`, and how often it was measured."""
    return {
        "target": f"random weights, shape {shape}",
        "drafter": f"random weights, shape {shape}, scripted",
        "temperature": 0.0,
        "shape": shape,
        "is_simulated": True,
        "stated_tau": tau,
        "repeats": repeats,
    }


def versions() -> dict[str, str]:
    """What the figures of a result without a pair depend on."""
    system = f"{platform.system()} {platform.machine()}"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "system": system}


def heldout_prompts(tokenizer: Any) -> list[list[int]]:
    """The embedded pair's held-out questions in the chat template, thinking off."""
    encode = chat_encoder(tokenizer)
    return [encode([{"role": "user", "content": problem.question}])[0].tolist() for problem in heldout_problems()]
