"""Throughput at several batch sizes against `target.generate` at the same batch, in one run.

    python benchmarks/batch.py --output benchmarks/results/batch_tiny_cpu.json

The embedded pair on its held-out problems, greedy, padded on the left. A batch counts with the median of its repeats, in
which the two take turns; tokens are counted up to each row's end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from records import prompt_ids, save
from rich.progress import track

from dflash import spec_generate
from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.cli.options import show_table
from dflash.common.stopwatch import seconds_of
from dflash.evaluation import any_table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=32, help="prompts at each batch size")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def measure(target: Any, drafter: Any, batches: list[list[list[int]]], args: argparse.Namespace) -> dict[str, Any]:
    """Both ways of decoding on every batch."""
    seconds = {"target.generate": 0.0, "dflash": 0.0}
    num_tokens = num_identical = 0
    for batch in track(batches, description=f"batch {len(batches[0])}"):
        width = max(map(len, batch))
        ids = torch.tensor([[target.generation_config.pad_token_id] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        asked: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": args.max_new_tokens, "do_sample": False}
        runs: dict[str, Callable[[], torch.Tensor]] = {
            "target.generate": lambda ids=ids, asked=asked: target.generate(ids, **asked),
            "dflash": lambda ids=ids, asked=asked: spec_generate(drafter, target, ids, **asked),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        texts: dict[str, torch.Tensor] = {}

        def decode(name: str, runs: Any = runs, texts: Any = texts) -> None:
            texts[name] = runs[name]()

        for repeat in range(args.repeats):
            for name in sorted(runs, reverse=bool(repeat % 2)):
                times[name].append(seconds_of(partial(decode, name)))
        for name in runs:
            seconds[name] += median(times[name])
        ours, plain = texts["dflash"][:, width:], texts["target.generate"][:, width:]
        num_identical += sum(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
        num_tokens += sum(length_of(row, target.generation_config.eos_token_id) for row in plain.tolist())
    speeds = {name: num_tokens / taken for name, taken in seconds.items()}
    return {
        "batch_size": len(batches[0]),
        "prompts": sum(map(len, batches)),
        "identical": num_identical,
        "tokens": num_tokens,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "speedup": round(speeds["dflash"] / speeds["target.generate"], 4),
    }


def length_of(token_ids: list[int], stop_id: int) -> int:
    return token_ids.index(stop_id) + 1 if stop_id in token_ids else len(token_ids)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target, drafter, tokenizer = load_embedded_pair()
    prompts = [prompt_ids(tokenizer, problem.question) for problem in heldout_problems()[: args.prompts]]
    spec_generate(drafter, target, prompts[:2], max_new_tokens=8, temperature=0.0)  # warm-up
    summary = []
    for size in args.batch_sizes:
        batches = [prompts[begin : begin + size] for begin in range(0, len(prompts) - size + 1, size)]
        summary.append(measure(target, drafter, batches, args))
    show_table(any_table(summary))
    if args.output is not None:
        decoding = {"temperature": 0.0, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
        save(args.output, target, drafter, "batch", decoding=decoding, summary=summary)


if __name__ == "__main__":
    main()
