"""Greedy accuracy and end-of-sequence rate of a tiny target, on generated problems and on GSM8K test."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from problems import FRAMES_HELD_OUT, generate
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from word_problem_data import Encoder, Example, load_gsm8k


# Far from every training seed: trained templates are asked with numbers and names of their own.
EVALUATION_SEED = 1_000_003


@dataclass(frozen=True)
class Score:
    """Counts, so that scores of parts can be added."""

    count: int
    correct: int
    ended: int

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.count)

    @property
    def eos_rate(self) -> float:
        return self.ended / max(1, self.count)

    def summary(self) -> dict[str, float]:
        return asdict(self) | {"accuracy": round(self.accuracy, 4), "eos_rate": round(self.eos_rate, 4)}


@torch.inference_mode()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[str],
    max_new_tokens: int,
    batch: int,
) -> list[tuple[str, bool]]:
    """The greedy answer to each question and whether it ended by itself."""
    encoder = Encoder(tokenizer, prompt_weight=0.0)
    prompts = [encoder.prompt(question) for question in questions]
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: list[tuple[str, bool]] = [("", False)] * len(prompts)
    for begin in range(0, len(prompts), batch):
        chosen = by_length[begin : begin + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
        sequences = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        written = sequences[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        ended = (written == tokenizer.eos_token_id).any(dim=1).tolist()
        for index, text, end in zip(chosen, texts, ended, strict=True):
            found[index] = (text, end)
    return found


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    max_new_tokens: int = 220,
    batch: int = 100,
) -> Score:
    """Exact match of the number after `####`, and the share of answers that end by themselves."""
    given = answers(model, tokenizer, [example.question for example in examples], max_new_tokens, batch)
    pairs = list(zip(given, examples, strict=True))
    correct = sum("####" in text and Example("", text).final == example.final for (text, _), example in pairs)
    return Score(len(pairs), correct, sum(end for _, end in given))


def generated_sets(count: int) -> dict[str, list[Example]]:
    """Problems by what was held out: nothing but the numbers, the template, the whole frame."""
    trained = generate(count, EVALUATION_SEED, "train")
    held_out = generate(2 * count, EVALUATION_SEED, "heldout")
    sets = {
        "trained_templates": trained,
        "heldout_templates": [problem for problem in held_out if problem.frame not in FRAMES_HELD_OUT],
        "heldout_frames": [problem for problem in held_out if problem.frame in FRAMES_HELD_OUT],
    }
    return {name: [Example(row.question, row.answer) for row in rows] for name, rows in sets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--gsm8k", default="openai/gsm8k", help="Hub id, folder or .jsonl file")
    parser.add_argument("--count", type=int, default=300, help="problems of each generated set")
    parser.add_argument("--gsm8k-count", type=int, default=300, help="problems of GSM8K test, 0 for none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32, trust_remote_code=False).eval()
    sets = generated_sets(arguments.count)
    if arguments.gsm8k_count:
        sets["gsm8k_test"] = load_gsm8k(arguments.gsm8k, "test")[: arguments.gsm8k_count]
    print(json.dumps({name: score(model, tokenizer, rows).summary() for name, rows in sets.items()}, indent=2))


if __name__ == "__main__":
    main()
