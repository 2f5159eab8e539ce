"""What every example here shares: its options, and the pair of models that they name (the embedded one by default)."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import DFlashDraftModel
from dflash.checkpoints import heldout_problems, load_embedded_pair


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of an example: which pair, and how long its texts are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a local folder or an id on the Hub; default: the embedded pair")
    parser.add_argument("--drafter", help="a DFlash drafter for that target")
    parser.add_argument("--tiny", action="store_true", help="a few tokens only, as the tests run it")
    return parser


def load(arguments: argparse.Namespace) -> tuple[Any, DFlashDraftModel, Any]:
    """Target, drafter and tokenizer, in float32 on the CPU for the embedded pair, else where and as they are stored."""
    if (arguments.target is None) != (arguments.drafter is None):
        raise SystemExit("--target and --drafter go together: a drafter is trained for one target.")
    if arguments.target is None:
        return load_embedded_pair(torch.float32)
    target = AutoModelForCausalLM.from_pretrained(
        arguments.target, dtype="auto", device_map="auto", trust_remote_code=False
    ).eval()
    drafter = DFlashDraftModel.from_pretrained(arguments.drafter, dtype="auto", device_map=target.device).eval()
    return (
        target,
        drafter,
        AutoTokenizer.from_pretrained(arguments.target, padding_side="left", trust_remote_code=False),
    )


def chat(tokenizer: Any, question: str) -> str:
    """The question in the target's chat template, thinking off: the form that drafters are trained on."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)


def questions(count: int) -> list[str]:
    """Word problems that the embedded pair was not trained on."""
    return [problem.question for problem in heldout_problems()[:count]]
