"""How fast each way of decoding is, on the same prompts and the same pair, in one run.

    python benchmarks/decode.py --gsm8k openai/gsm8k --output benchmarks/results/decode_tiny_cpu.json

Without arguments it measures the embedded pair on its held-out problems. Greedy, batch 1. The JSON holds every
measurement, the summary, the command and the environment; the README's table is made from it by `benchmarks/report.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
from records import prompt_ids, save
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import DFlashDraftModel
from dflash.embedded import heldout_problems, load_embedded_pair
from dflash.evaluation.harness import Prompt, compare, decoding_methods, summarise


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id of the target (default: the embedded pair)")
    parser.add_argument("--drafter", help="folder or Hub id of the drafter")
    parser.add_argument("--gsm8k", help="also measure GSM8K's test questions: a Hub id, or a local JSONL file")
    parser.add_argument("--prompts", type=int, default=40, help="prompts per task")
    parser.add_argument("--methods", nargs="+", help="methods besides target.generate (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if (args.target is None) != (args.drafter is None):
        parser.error("--target and --drafter go together: give both, or neither for the embedded pair.")
    return args


def load_pair(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    dtype = getattr(torch, args.dtype)
    if args.target is None:
        return load_embedded_pair(dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
    drafter = DFlashDraftModel.from_pretrained(args.drafter, dtype=dtype).eval()
    return target, drafter, AutoTokenizer.from_pretrained(args.target)


def questions(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for problem in heldout_problems()[: args.prompts]:
        yield "held-out templates", problem.question
    if args.gsm8k:
        rows = (
            datasets.load_dataset("json", data_files=args.gsm8k, split="train")
            if os.path.isfile(args.gsm8k)
            else datasets.load_dataset(args.gsm8k, "main", split="test")
        )
        for row in rows.select(range(args.prompts)):
            yield "GSM8K test", row["question"]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target, drafter, tokenizer = load_pair(args)
    prompts = [Prompt(task, torch.tensor([prompt_ids(tokenizer, question)])) for task, question in questions(args)]

    methods = decoding_methods(target, drafter, args.max_new_tokens, args.methods)
    measurements = compare(methods, prompts, args.repeats, lambda todo: track(todo, description="decoding"))
    summary = summarise(measurements)

    table = Table("task", "method", "identical", "tokens/s", "speed-up", "tokens/step", "tau", "ms/step")
    for row in summary:
        table.add_row(
            row["task"],
            row["method"],
            f"{row['identical']}/{row['prompts']}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f} ({row['speedup_p10']:.2f}-{row['speedup_p90']:.2f})",
            f"{row['tokens_per_step']:.2f}",
            "" if row["tau_micro"] is None else f"{row['tau_micro']:.2f}",
            f"{row['ms_per_step']:.2f}",
        )
    Console().print(table)
    if args.output is not None:
        save(
            args.output,
            target,
            drafter,
            decoding={
                "temperature": 0.0,
                "batch_size": 1,
                "max_new_tokens": args.max_new_tokens,
                "repeats": args.repeats,
                "enable_thinking": False,
                "chat_template": tokenizer.chat_template,
            },
            summary=summary,
            measurements=[asdict(measurement) for measurement in measurements],
        )


if __name__ == "__main__":
    main()
