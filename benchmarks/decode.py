"""How fast each way of decoding is, on the same prompts and the same pair, in one run.

    python benchmarks/decode.py --gsm8k openai/gsm8k --output benchmarks/results/decode_tiny_cpu.json

Without arguments it measures the embedded pair on its held-out problems. Greedy, batch 1. The JSON holds every
measurement, the summary, the command and the environment; the README's table is made from it by `benchmarks/report.py`.
Plots stand beside it. `dflash bench` does the same for any pair and any prompts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from records import prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import DFlashDraftModel
from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.cli.bench import bar, show
from dflash.common.provenance import write_result
from dflash.evaluation import Prompt, check_methods, run_bench, save_plots


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id of the target (default: the embedded pair)")
    parser.add_argument("--drafter", help="folder or Hub id of the drafter")
    parser.add_argument("--gsm8k", help="also measure GSM8K's test questions: a Hub id, or a local JSONL file")
    parser.add_argument("--prompts", type=int, default=40, help="prompts per task")
    parser.add_argument("--methods", nargs="+", help="methods besides target.generate (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profiled", type=int, default=4, help="prompts per task that are looked into")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if (args.target is None) != (args.drafter is None):
        parser.error("--target and --drafter go together: give both, or neither for the embedded pair.")
    try:
        check_methods(args.methods or ())
    except ValueError as error:
        parser.error(str(error))
    return args


def load_pair(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    dtype = getattr(torch, args.dtype)
    if args.target is None:
        target, drafter, tokenizer = load_embedded_pair(dtype)
        return target.to(args.device), drafter.to(args.device), tokenizer
    place = {"dtype": dtype, "device_map": args.device}
    target = AutoModelForCausalLM.from_pretrained(args.target, **place).eval()
    drafter = DFlashDraftModel.from_pretrained(args.drafter, **place).eval()
    return target, drafter, AutoTokenizer.from_pretrained(args.target)


def questions(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for problem in heldout_problems()[: args.prompts]:
        yield "held-out templates", problem.question
    if args.gsm8k:
        import datasets

        rows = (
            datasets.load_dataset("json", data_files=args.gsm8k, split="train")
            if os.path.isfile(args.gsm8k)
            else datasets.load_dataset(args.gsm8k, "main", split="test")
        )
        for row in rows.select(range(min(args.prompts, len(rows)))):
            yield "GSM8K test", row["question"]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target, drafter, tokenizer = load_pair(args)
    prompts = [Prompt(task, torch.tensor([prompt_ids(tokenizer, question)])) for task, question in questions(args)]
    names = {"target": args.target, "drafter": args.drafter}
    setting = {**names, "enable_thinking": False, "chat_template": tokenizer.chat_template}
    result = run_bench(
        target, drafter, prompts, args.max_new_tokens, args.repeats, args.methods, args.profiled, setting, bar
    )
    show(result)
    if args.output is not None:
        write_result(args.output, result)
        save_plots(result, args.output)


if __name__ == "__main__":
    main()
