"""Trains the tiny pair's drafter by the recipe `short` with `forward_kl`, on responses that its target writes first.

    python train_drafter.py --target target --gsm8k openai/gsm8k --output drafter --responses responses.jsonl
    python train_drafter.py --target target --gsm8k openai/gsm8k --output domino --responses responses.jsonl --init drafter

With `--init` it trains Domino's head on a drafter, whose own weights stay. Prompts are GSM8K train, the same questions with other numbers, and problems of `problems.py` (trained templates alone).
It runs on two CPU cores, a one-threaded worker on each, and ends with the acceptance on prompts that nothing was trained
or chosen on.
"""

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from evaluate_target import EVALUATION_SEED
from problems import generate
from tiny_tokenizer import MASK
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from word_problem_data import fingerprint, load_gsm8k
from workers import WORKERS, argument_parser, gather, spawn_workers

from dflash import DFlashDraftModel, spec_generate
from dflash.regeneration import Sampling, regenerate
from dflash.training import (
    AcceptanceCounts,
    Example,
    TrainingSettings,
    computes_in_bf16,
    encode_prompt,
    load_examples,
    make_drafter,
    measure_acceptance,
    new_drafter,
    train,
    write_examples,
)


# Templates held out for choosing the best checkpoint are asked with other seeds than those of the final figures.
CHOICE_SEED = EVALUATION_SEED + 1
# Domino's head, and a rate for it: it learned less at twice and at half of this one.
HEAD: dict[str, Any] = {
    "recipe": "short",
    "freeze_init": True,
    "gru_hidden_dim": 192,
    "emb_dim": 96,
    "muon_learning_rate": 0.008,
    "loss": "ce",
}
NUMBER = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?![\d,]|\.\d)")


@dataclass(frozen=True)
class Scale:
    """What `--smoke` shrinks, with the values of a full run; everything else is the same code.

    Attributes:
        problems: Generated problems, answered greedily.
        sampled_problems: Generated problems, answered by sampling.
        altered: Of GSM8K's questions, how many are also asked with other numbers, answered greedily.
        sampled_questions: Of GSM8K's questions, how many are also answered by sampling.
    """

    problems: int = 4000
    sampled_problems: int = 1000
    altered: int = 1500
    sampled_questions: int = 1500
    questions: int | None = None
    new_tokens: int = 224
    batch_size: int = 256
    layers: int = 3
    steps: int = 4200
    head_steps: int = 5200
    batch_tokens: int = 2048
    num_anchors: int = 16
    eval_every: int = 700
    choice_prompts: int = 8
    final_prompts: int = 40


FULL = Scale()
SMOKE = Scale(
    problems=12,
    sampled_problems=4,
    altered=4,
    sampled_questions=2,
    questions=6,
    new_tokens=24,
    batch_size=8,
    layers=1,
    steps=4,
    head_steps=4,
    batch_tokens=512,
    num_anchors=4,
    eval_every=4,
    choice_prompts=1,
    final_prompts=2,
)


def with_other_numbers(question: str, rng: random.Random) -> str:
    """The question with each number replaced by another one of as many digits."""

    def other(match: re.Match[str]) -> str:
        digits = len(match.group())
        return str(rng.randint(10 ** (digits - 1) + (digits == 1), 10**digits - 1))

    return NUMBER.sub(other, question)


def prompt_sets(questions: Sequence[str], scale: Scale, seed: int) -> Iterator[tuple[float, list[str]]]:
    """Prompts with the temperature that their answers are written at."""
    rng = random.Random(seed)
    made = [problem.question for problem in generate(scale.problems + scale.sampled_problems, seed)]
    altered = [with_other_numbers(question, rng) for question in questions[: scale.altered]]
    yield 0.0, [*questions, *altered, *made[: scale.problems]]
    yield 0.8, [*questions[-scale.sampled_questions :], *made[scale.problems :]]


def write_responses(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[str],
    scale: Scale,
    seed: int,
    rank: int,
) -> list[Example]:
    """What the target answers, greedily and sampled; each worker writes its share, and each gets all."""
    examples: list[Example] = []
    for temperature, texts in prompt_sets(questions, scale, seed):
        prompts = [encode_prompt(text, tokenizer) for text in texts[rank::WORKERS]]
        answers = regenerate(
            target,
            prompts,
            max_new_tokens=scale.new_tokens,
            batch_size=scale.batch_size,
            sampling=Sampling(temperature),
            seed=WORKERS * seed + rank,
        )
        is_shown = rank == 0 and sys.stderr.isatty()
        bar = tqdm(answers, f"answers at temperature {temperature}", len(prompts), disable=not is_shown)
        examples += [answer.example for answer in bar]
    return [example for share in gather(examples) for example in share]


def measure(
    drafter: DFlashDraftModel, target: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int, rank: int
) -> dict[str, Any]:
    """Acceptance over `prompts`, and for how many of them the text equals that of `target.generate`."""
    identical = 0
    share = prompts[rank::WORKERS]
    for prompt in share:
        input_ids = torch.tensor([prompt])
        ours = spec_generate(drafter, target, input_ids, max_new_tokens=new_tokens, temperature=0.0)
        plain = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=new_tokens, do_sample=False
        )
        identical += torch.equal(ours, plain)
    shares = gather((identical, measure_acceptance(drafter, target, share, new_tokens)))
    acceptance = sum((measured for _, measured in shares), AcceptanceCounts(0, 0, 0))
    return {
        "prompts": len(prompts),
        "identical": sum(count for count, _ in shares),
        "tau": round(acceptance.tau, 3),
        "tokens_per_step": round(acceptance.tokens_per_step, 3),
        "steps": acceptance.steps,
    }


def final_figures(
    output: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, gsm8k: str, scale: Scale, rank: int
) -> dict[str, Any]:
    """Figures of the saved drafter in fp32, on held-out templates and, where `gsm8k` has it, on GSM8K test."""
    drafter = DFlashDraftModel.from_pretrained(output, dtype=torch.float32).eval()
    held_out = generate(scale.final_prompts, EVALUATION_SEED, "heldout")
    sets = {"heldout_templates": [problem.question for problem in held_out]}
    if not gsm8k.endswith(".jsonl"):
        sets["gsm8k_test"] = [row.question for row in load_gsm8k(gsm8k, "test")[: scale.final_prompts]]
    return {
        name: measure(drafter, target, [encode_prompt(text, tokenizer) for text in texts], scale.new_tokens + 32, rank)
        for name, texts in sets.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, f"{FULL.steps} by default, {FULL.head_steps} of a head")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target, tokenizer inside")
    parser.add_argument(
        "--responses", type=Path, help="the target's answers: written here, or read if the file exists"
    )
    parser.add_argument("--init", type=Path, help="train a head on this drafter")
    parser.add_argument("--layers", type=int, help=f"the drafter's depth, {FULL.layers} by default")
    parser.add_argument("--intermediate", type=int, help="width of its MLPs, 1024 by default")
    parser.add_argument("--anchors", type=int, help=f"blocks per sequence, {FULL.num_anchors} by default")
    parser.add_argument("--loss", choices=("ce", "forward_kl"), help="as of dflash train, forward_kl by default")
    arguments = parser.parse_args()
    if arguments.init and (arguments.layers or arguments.intermediate or arguments.loss):
        parser.error("--layers, --intermediate and --loss are of a new drafter: leave them out, or leave out --init.")
    if arguments.output.exists() and not arguments.overwrite:
        parser.error(f"{arguments.output} exists: name another --output, or pass --overwrite to begin anew.")
    return arguments


def train_drafter(rank: int, arguments: argparse.Namespace) -> None:
    """One worker; the first one also writes and prints."""
    scale = SMOKE if arguments.smoke else FULL
    scale = scale if arguments.init is None else replace(scale, steps=scale.head_steps)
    given = {"steps": arguments.steps, "layers": arguments.layers, "num_anchors": arguments.anchors}
    scale = replace(scale, **{name: value for name, value in given.items() if value})
    began = time.monotonic()

    tokenizer = AutoTokenizer.from_pretrained(arguments.target, trust_remote_code=False)
    # The answers are written and the figures measured in fp32; the features that are trained on come from a bf16 target,
    # where the CPU computes in bf16.
    target = AutoModelForCausalLM.from_pretrained(
        arguments.target, dtype=torch.float32, trust_remote_code=False
    ).eval()
    gsm8k = load_gsm8k(arguments.gsm8k, "train")
    questions = [row.question for row in gsm8k][: scale.questions]
    training, choosing = questions[: -scale.choice_prompts], questions[-scale.choice_prompts :]
    are_given = arguments.responses is not None and arguments.responses.exists()
    if are_given:
        examples = load_examples(arguments.responses)
    else:
        examples = write_responses(target, tokenizer, training, scale, arguments.seed, rank)
        if arguments.responses and rank == 0:
            write_examples(arguments.responses, examples)
    answered = time.monotonic()
    tokens = sum(sum(example.loss_mask) for example in examples)
    if rank == 0:
        print(f"{len(examples)} answers of {tokens} tokens, {(answered - began) / 60:.1f} minutes", flush=True)

    torch.manual_seed(arguments.seed)
    target = target.to(torch.bfloat16) if computes_in_bf16() else target
    settings = TrainingSettings(
        steps=scale.steps,
        loss=arguments.loss or "forward_kl",
        num_anchors=scale.num_anchors,
        batch_tokens=scale.batch_tokens,
        eval_every=scale.eval_every,
        seed=arguments.seed,
    )
    if arguments.init is None:
        drafter = new_drafter(
            target,
            mask_token_id=tokenizer.convert_tokens_to_ids(MASK),
            num_hidden_layers=scale.layers,
            intermediate_size=arguments.intermediate or 1024,
            from_target=True,
        )
    else:
        settings = replace(settings, init=arguments.init.name, **HEAD)
        begun = DFlashDraftModel.from_pretrained(arguments.init, dtype=torch.float32)
        drafter = make_drafter(target, tokenizer, settings, begun)
    choosing += [problem.question for problem in generate(scale.choice_prompts, CHOICE_SEED, "heldout")]
    record = train(
        drafter,
        target,
        examples,
        [encode_prompt(text, tokenizer) for text in choosing],
        settings,
        arguments.output,
        provenance={
            "command": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
            "gsm8k_rows": len(gsm8k),
            "gsm8k_fingerprint": fingerprint(gsm8k),
            "scale": scale.__dict__,
        },
        show_progress=sys.stderr.isatty(),
        on_point=lambda point: print(json.dumps(point), flush=True),
        overwrite=arguments.overwrite,
    )
    trained = time.monotonic()

    figures = final_figures(arguments.output, target.float(), tokenizer, arguments.gsm8k, scale, rank)
    if rank > 0:
        return
    record_file = arguments.output / "training.json"
    facts = json.loads(record_file.read_text()) | {
        "curve": record.curve,
        "minutes": {
            "regeneration": round((answered - began) / 60, 1),
            "training": round((trained - answered) / 60, 1),
            "all": round((time.monotonic() - began) / 60, 1),
        },
        "figures": figures,
    }
    record_file.write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(figures, indent=2), flush=True)


def main() -> None:
    spawn_workers(train_drafter, parse_arguments())


if __name__ == "__main__":
    main()
