"""What a kept conversation saves: the time to the first token of a follow-up question, against starting afresh.

    python benchmarks/conversation.py --output benchmarks/results/conversation_tiny_cpu.json

The embedded pair answers held-out problems one after the other in one growing chat, greedily. Both ways take turns on
every question, and their texts are compared.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from records import save
from rich.progress import track

from dflash import Conversation
from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.cli.options import show_table
from dflash.evaluation import any_table, timed_blocks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="questions in a chat")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def follow_up(tokenizer: Any, text: list[int], question: str) -> list[int]:
    """The chat so far and another question, token for token behind what was written."""
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    return [*text, *tokenizer(turn, add_special_tokens=False)["input_ids"]]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target, drafter, tokenizer = load_embedded_pair()
    asked: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": 0.0}
    problems = iter(heldout_problems())
    turns: list[list[dict[str, Any]]] = [[] for _ in range(args.turns)]
    for _ in track(range(args.chats), description="chats"):
        conversation, text = Conversation(), list[int]()
        for turn in turns:
            prompt = torch.tensor([follow_up(tokenizer, text, next(problems).question)])
            runs: dict[str, list[Any]] = {"fresh": [], "kept": []}
            for repeat in range(args.repeats):
                for name in sorted(runs, reverse=bool(repeat % 2)):
                    held = copy.deepcopy(conversation, {id(model): model for model in (target, drafter)})
                    more = {"conversation": held} if name == "kept" else {}
                    runs[name].append(timed_blocks(drafter, target, prompt, **asked, **more))
            timed_blocks(drafter, target, prompt, conversation=conversation, **asked)
            text = prompt[0].tolist() + runs["fresh"][0].token_ids
            turn.append(
                {
                    "prompt_tokens": prompt.shape[1],
                    "reused_tokens": conversation.num_reused,
                    "is_identical": runs["kept"][0].token_ids == runs["fresh"][0].token_ids,
                    **{name: 1e3 * median(run.seconds_to_first_token for run in made) for name, made in runs.items()},
                }
            )
    summary = [
        {
            "turn": number,
            "chats": len(turn),
            "identical": sum(chat["is_identical"] for chat in turn),
            "prompt_tokens": round(sum(chat["prompt_tokens"] for chat in turn) / len(turn), 1),
            "reused_tokens": round(sum(chat["reused_tokens"] for chat in turn) / len(turn), 1),
            "ms_to_first_token": {
                name: round(sum(chat[name] for chat in turn) / len(turn), 3) for name in ("fresh", "kept")
            },
        }
        for number, turn in enumerate(turns, start=1)
    ]
    show_table(any_table(summary))
    if args.output is not None:
        decoding = {"temperature": 0.0, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
        save(args.output, target, drafter, "conversation", decoding=decoding, summary=summary)


if __name__ == "__main__":
    main()
