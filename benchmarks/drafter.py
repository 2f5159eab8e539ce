"""What a trained drafter accepts on prompts that it has not seen, beside how it was trained.

    python benchmarks/drafter.py --target stories260K --drafter stories-DFlash --prompts held.jsonl \
        --output benchmarks/results/drafter_stories_cpu.json

Greedy, one prompt at a time, in blocks of each of `--block-sizes`. Every text is compared with `target.generate`'s, and `training`
in the JSON is the checkpoint's own `training.json`. A prompt is a row with `prompt_ids` or `prompt`, or one to train on
(`messages`, `text`), of which it is what stands before the first answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from records import save
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import DFlashDraftModel
from dflash.cli.options import show_table
from dflash.evaluation import DECODED, PLAIN, Prompt, compare, summarise, table_of, timed_blocks, timed_generate
from dflash.training import encode, encode_prompt, prompt_of, read_rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id")
    parser.add_argument("--drafter", type=Path, required=True, help="folder that `dflash train` wrote")
    parser.add_argument("--prompts", required=True, help="JSON lines, or another source that training reads")
    parser.add_argument("--split", default="train")
    parser.add_argument("--limit", type=int, help="so many prompts (default: all)")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def prompt_ids(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """What is to be continued of a row."""
    if "prompt_ids" in row:
        return list(row["prompt_ids"])
    return encode_prompt(row["prompt"], tokenizer) if "prompt" in row else prompt_of(encode(row, tokenizer))


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    record = args.drafter / "training.json"
    if not record.is_file():
        raise SystemExit(f"{args.drafter} holds no training.json: give a folder that `dflash train` wrote.")
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    rows = list(read_rows(args.prompts, args.split))[: args.limit]
    prompts = [Prompt(Path(args.prompts).stem, torch.tensor([prompt_ids(row, tokenizer)])) for row in rows]

    def ours(block_size: int) -> Any:
        options = {"max_new_tokens": args.max_new_tokens, "temperature": 0.0, "block_size": block_size}
        return lambda ids: timed_blocks(drafter, target, ids, **options)

    methods = {
        PLAIN: lambda ids: timed_generate(target, ids, max_new_tokens=args.max_new_tokens, do_sample=False),
        **{f"dflash, block {block_size}": ours(block_size) for block_size in args.block_sizes},
    }
    measurements = compare(methods, prompts, args.repeats, lambda items: track(items, description="prompts"))
    summary = summarise(measurements)
    show_table(table_of(summary, DECODED, short=True))
    if args.output is not None:
        decoding = {"temperature": 0.0, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
        save(
            args.output,
            target,
            drafter,
            kind="drafter",
            decoding=decoding,
            training=json.loads(record.read_text(encoding="utf-8")),
            summary=summary,
            measurements=list(map(asdict, measurements)),
        )


if __name__ == "__main__":
    main()
