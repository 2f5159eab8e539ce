"""GSM8K rows and generated problems as token ids with a loss weight per token. It knows no model."""

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from problems import drills, stream
from transformers import PreTrainedTokenizerFast


WIDTH_STEP = 16


@dataclass(frozen=True)
class Example:
    """One question and its worked answer."""

    question: str
    answer: str

    @property
    def final(self) -> str:
        """The number after `####`."""
        return self.answer.rsplit("####", 1)[-1].strip().replace(",", "")


@dataclass(frozen=True)
class Batch:
    """Right-padded rows; `weights` is 0 on padding and belongs to the token of the same column."""

    input_ids: torch.Tensor  # [B, S]
    weights: torch.Tensor  # [B, S]


def load_gsm8k(source: str, split: str) -> list[Example]:
    """Reads GSM8K from a Hub id, a folder that holds `train.jsonl` and `test.jsonl`, or one .jsonl file."""
    path = Path(source)
    if path.is_dir():
        path = path / f"{split}.jsonl"
    if path.suffix == ".jsonl":
        rows = load_dataset("json", data_files=str(path), split="train")
    else:
        rows = load_dataset(source, "main", split=split)
    return [Example(row["question"].strip(), row["answer"].strip()) for row in rows]


def fingerprint(examples: list[Example]) -> str:
    """A short hash of the rows, to tell one version of a data set from another."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(f"{example.question}\0{example.answer}\0".encode())
    return digest.hexdigest()[:16]


def generated(seed: int, split: str = "train") -> Iterator[Example]:
    """Endless generated problems."""
    return (Example(problem.question, problem.answer) for problem in stream(seed, split))


def practice(seed: int) -> Iterator[Example]:
    """Endless rows of bare arithmetic."""
    return (Example(question, answer) for question, answer in drills(seed))


def cycle(examples: list[Example], rng: random.Random) -> Iterator[Example]:
    """Endless passes over `examples`, each in a new order."""
    while True:
        yield from rng.sample(examples, len(examples))


class Encoder:
    """Turns examples into the chat format, with weight 1 on the answer and its end, `prompt_weight` before."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> None:
        self.tokenizer = tokenizer
        self.prompt_weight = prompt_weight

    def prompt(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def rows(self, examples: list[Example]) -> list[tuple[list[int], int]]:
        """Token ids and the length of the prompt, for each example."""
        prompts = self.tokenizer([self.prompt(example.question) for example in examples])["input_ids"]
        answers = self.tokenizer([example.answer + self.tokenizer.eos_token for example in examples])["input_ids"]
        return [(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]

    def batch(self, rows: list[tuple[list[int], int]], width: int) -> Batch:
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)  # [B, S]
        weights = torch.zeros(len(rows), width)  # [B, S]
        for row, (ids, prompt_length) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            weights[row, :prompt_length] = self.prompt_weight
            weights[row, prompt_length : len(ids)] = 1.0
        return Batch(input_ids, weights)


@dataclass(frozen=True)
class Mix:
    """Shares of the rows; what remains is generated problems."""

    gsm8k: float
    drills: float


def mixed_rows(gsm8k: list[Example], mix: Mix, seed: int) -> Iterator[Example]:
    """Endless rows from the three sources; only GSM8K's ever repeat."""
    rng = random.Random(seed)
    sources = (cycle(gsm8k, rng), practice(seed), generated(seed))
    shares = (mix.gsm8k, mix.drills, 1 - mix.gsm8k - mix.drills)
    while True:
        yield next(rng.choices(sources, shares)[0])


def bucketed_batches(
    encoder: Encoder, examples: Iterator[Example], batch_tokens: int, max_length: int, seed: int
) -> Iterator[Batch]:
    """Endless batches of about `batch_tokens`, rows of like length together so that little is padding.

    Widths are multiples of
    `WIDTH_STEP` and each width has one row count: the CPU's bf16 kernels are compiled anew for every shape they meet.
    """
    rng = random.Random(seed)
    waiting: dict[int, list[tuple[list[int], int]]] = {}
    while True:
        ready: list[Batch] = []
        for row in encoder.rows(list(itertools.islice(examples, 512))):
            width = -(-len(row[0]) // WIDTH_STEP) * WIDTH_STEP
            if width > max_length:
                continue
            bucket = waiting.setdefault(width, [])
            bucket.append(row)
            if len(bucket) == max(1, batch_tokens // width):
                ready.append(encoder.batch(waiting.pop(width), width))
        rng.shuffle(ready)
        yield from ready
