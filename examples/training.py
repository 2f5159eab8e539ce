"""A small drafter, trained end to end: the target writes its own answers, and the drafter learns to propose them.

    python examples/training.py
    python examples/training.py --target Qwen/Qwen3-0.6B --prompts prompts.jsonl --steps 5000 --layers 5 --block-size 16

Prints how many tokens the target wrote, then the loss and the acceptance on held-out prompts during training, and the
acceptance of the saved checkpoint. As it is, it runs for about a minute on a CPU, which is far too little for a good
drafter. `--prompts` is a file of JSON lines with a "prompt" each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from pair import questions
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import DFlashDraftModel
from dflash.checkpoints import load_embedded_pair
from dflash.regeneration import regenerate
from dflash.training import TrainingSettings, encode_prompt, measure_acceptance, new_drafter, train


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a local folder or an id on the Hub; default: the embedded target")
    parser.add_argument("--prompts", type=Path, help='JSON lines with a "prompt"; default: problems of the package')
    parser.add_argument("--mask-token", default="<|mask|>", help="a token of the target's that never occurs in text")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("example-DFlash"))
    parser.add_argument("--overwrite", action="store_true", help="begin anew if --output holds a run")
    parser.add_argument("--tiny", action="store_true", help="a few steps only, as the tests run it")
    return parser.parse_args()


def load_target(name: str | None) -> tuple[Any, Any]:
    """The target and its tokenizer, in float32."""
    if name is None:
        target, _, tokenizer = load_embedded_pair()
        return target, tokenizer
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, trust_remote_code=False
    ), AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def main() -> None:
    """Regenerates, trains, and measures what was saved."""
    arguments = parse()
    if arguments.output.exists() and not arguments.overwrite:
        raise SystemExit(f"{arguments.output} exists: name another --output, or pass --overwrite to begin anew.")
    torch.manual_seed(0)
    target, tokenizer = load_target(arguments.target)
    texts = questions(100)
    if arguments.prompts is not None:
        texts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [encode_prompt(text, tokenizer) for text in texts[: 16 if arguments.tiny else None]]
    held_out, prompts = prompts[:4], prompts[4:]

    length = 24 if arguments.tiny else 128
    answers = regenerate(target, prompts, max_new_tokens=length, batch_size=32)
    examples = [answer.example for answer in answers]
    print(f"{sum(sum(example.loss_mask) for example in examples)} tokens of the target's own")

    mask_token_id = tokenizer.convert_tokens_to_ids(arguments.mask_token)
    shape = {"num_hidden_layers": arguments.layers, "block_size": arguments.block_size}
    drafter = new_drafter(target, mask_token_id=mask_token_id, from_target=True, **shape)
    steps = 2 if arguments.tiny else arguments.steps
    settings = TrainingSettings(
        steps=steps,
        num_anchors=24,
        batch_tokens=1024,
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        eval_every=max(2, steps // 4),
        eval_new_tokens=length,
    )

    def show(point: dict[str, Any]) -> None:
        print(f"step {point['step']}: loss {point['loss']:.3f}, tau {point['tau']:.2f}")

    how = {"on_point": show, "overwrite": arguments.overwrite}
    train(drafter, target, examples, held_out, settings, arguments.output, **how)
    loaded = DFlashDraftModel.from_pretrained(arguments.output, dtype=torch.float32).to(target.device).eval()
    acceptance = measure_acceptance(loaded, target, held_out, max_new_tokens=length)
    print(f"{arguments.output}: tau {acceptance.tau:.2f} over {acceptance.steps} verify steps")


if __name__ == "__main__":
    main()
