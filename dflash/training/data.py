"""Rows of text as token ids with a loss mask, and batches of them with anchors. It knows no model.

A row is a chat (`messages`), a `prompt` and its `completion`, or what the target itself wrote: `prompt_ids` and
`response_ids`, which are taken token for token.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .anchors import NO_ANCHOR, sample_anchors


PADDING_DOCUMENT = -1
# Batches are a multiple of this wide: few shapes, for each of which kernels are chosen (and on a CPU compiled) anew.
WIDTH_STEP = 16


@dataclass(frozen=True)
class Example:
    """One sequence; `loss_mask` is 1 on the tokens that the drafter learns to propose."""

    input_ids: list[int]
    loss_mask: list[int]

    @property
    def prompt_ids(self) -> list[int]:
        """What stands before the first supervised token."""
        return self.input_ids[: self.loss_mask.index(1)]


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; behind a causal target, padding on the right changes nothing before it.

    Attributes:
        input_ids: Token ids, [B, S].
        loss_mask: Supervised tokens, bool [B, S].
        document_ids: 0 for a token and `PADDING_DOCUMENT` for padding, [B, S].
        anchors: Columns where blocks begin, `NO_ANCHOR` where a sequence has fewer, [B, A].
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    anchors: torch.Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def share(self, index: int, count: int) -> Batch:
        """The rows of process `index` of `count`; one without any gets a row to compute on that has no anchor."""
        if index < len(self.input_ids):
            return Batch(*(getattr(self, name)[index::count] for name in self.__dataclass_fields__))
        return Batch(
            self.input_ids[:1], self.loss_mask[:1], self.document_ids[:1], torch.full_like(self.anchors[:1], NO_ANCHOR)
        )


def encode(row: Mapping[str, Any], tokenizer: Any, **template_kwargs: Any) -> Example:
    """The token ids of one row of data, written with the tokenizer's chat template.

    Args:
        row: `messages`; or `prompt` and `completion` as text; or `prompt_ids` and `response_ids`.
        tokenizer: The target's tokenizer.
        template_kwargs: For the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: for a row of another form, or a chat template that does not mark what the assistant says.
    """
    if "response_ids" in row:
        return with_response(row["prompt_ids"], row["response_ids"])
    if "completion" in row:
        prompt_ids = encode_prompt(row["prompt"], tokenizer, **template_kwargs)
        completion_ids = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        return with_response(prompt_ids, [*completion_ids, tokenizer.eos_token_id])
    if "messages" not in row:
        raise ValueError(
            f"A row with the columns {sorted(row)} cannot be trained on: give messages, or prompt and completion."
        )
    encoded = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **template_kwargs
    )
    loss_mask = list(map(int, encoded["assistant_masks"]))
    if not any(loss_mask):
        raise ValueError(
            "The chat template marks no token as the assistant's: wrap what the assistant says in "
            "{% generation %}…{% endgeneration %} in the template, or give rows of prompt and completion."
        )
    return Example(list(encoded["input_ids"]), loss_mask)


def encode_prompt(prompt: str, tokenizer: Any, **template_kwargs: Any) -> list[int]:
    """Token ids of one user message, up to where the assistant begins."""
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **template_kwargs,
    )
    return list(encoded["input_ids"])


def with_response(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Example:
    """A prompt and a supervised response behind it."""
    return Example([*prompt_ids, *response_ids], [0] * len(prompt_ids) + [1] * len(response_ids))


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Writes single-turn examples as JSON lines of `prompt_ids` and `response_ids`."""
    with path.open("w") as file:
        for example in examples:
            cut = example.loss_mask.index(1)
            row = {"prompt_ids": example.input_ids[:cut], "response_ids": example.input_ids[cut:]}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read_examples(path: Path, tokenizer: Any = None, **template_kwargs: Any) -> list[Example]:
    """Reads JSON lines of any form that `encode` takes; only ids need no tokenizer."""
    with path.open() as file:
        return [encode(json.loads(line), tokenizer, **template_kwargs) for line in file]


def fingerprint(examples: Iterable[Example]) -> str:
    """A short hash of the examples, to tell one version of the data from another."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.input_ids, example.loss_mask)).encode())
    return digest.hexdigest()[:16]


def collate(examples: Sequence[Example], anchors: Sequence[Sequence[int]], pad_token_id: int) -> Batch:
    """Examples and their anchors as tensors, padded to the longest of each, the examples to a `WIDTH_STEP`."""
    size = len(examples), max(_padded_length(example) for example in examples)
    batch = Batch(
        input_ids=torch.full(size, pad_token_id),
        loss_mask=torch.zeros(size, dtype=torch.bool),
        document_ids=torch.full(size, PADDING_DOCUMENT),
        anchors=torch.full((len(examples), max(1, *map(len, anchors), 1)), NO_ANCHOR),
    )
    for i, (example, chosen) in enumerate(zip(examples, anchors, strict=True)):
        length = len(example.input_ids)
        batch.input_ids[i, :length] = torch.tensor(example.input_ids)
        batch.loss_mask[i, :length] = torch.tensor(example.loss_mask, dtype=torch.bool)
        batch.document_ids[i, :length] = 0
        batch.anchors[i, : len(chosen)] = torch.tensor(chosen, dtype=torch.long)
    return batch


def _padded_length(example: Example) -> int:
    return -(-len(example.input_ids) // WIDTH_STEP) * WIDTH_STEP


def batch_indices(lengths: Sequence[int], batch_tokens: int, rng: random.Random, pool: int = 2048) -> list[list[int]]:
    """One epoch's batches in random order: each of at most `batch_tokens` with padding, or of one longer sequence.

    Shuffled pools are sorted by length and cut, so that little is padding and batches still differ from epoch to epoch.
    """
    order = rng.sample(range(len(lengths)), len(lengths))
    batches: list[list[int]] = []
    for begin in range(0, len(order), pool):
        current: list[int] = []
        for index in sorted(order[begin : begin + pool], key=lambda i: lengths[i]):
            if current and (len(current) + 1) * lengths[index] > batch_tokens:
                batches.append(current)
                current = []
            current.append(index)
        batches.append(current)
    rng.shuffle(batches)
    return batches


def epoch_batches(
    examples: Sequence[Example],
    epoch: int,
    *,
    num_anchors: int,
    batch_tokens: int,
    pad_token_id: int,
    seed: int,
) -> Iterator[Batch]:
    """All examples once, with the anchors of this epoch. The same seed and epoch give the same batches."""
    rng = random.Random(f"batches-{seed}-{epoch}")
    for indices in batch_indices([_padded_length(example) for example in examples], batch_tokens, rng):
        chosen = [examples[i] for i in indices]
        anchors = [
            sample_anchors(example.loss_mask, num_anchors, seed=seed, epoch=epoch, index=i)
            for i, example in zip(indices, chosen, strict=True)
        ]
        yield collate(chosen, anchors, pad_token_id)
