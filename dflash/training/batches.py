"""Batches of examples with their anchors: padded, one to a row, or packed side by side. It knows no text and no model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .anchors import NO_ANCHOR, sample_anchors
from .data import Example


PADDING_DOCUMENT = -1
# Widths are multiples of this, so that there are few shapes: kernels are chosen (and on a CPU compiled) anew for each.
WIDTH_STEP = 16
# Neighbours are chosen among so many sequences.
POOL = 2048


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. The target is causal, so padding on the right changes nothing before it.

    Attributes:
        input_ids: Token ids, [B, S].
        loss_mask: Supervised tokens, bool [B, S].
        document_ids: 0, 1, 2, … for the tokens of a row's documents and `PADDING_DOCUMENT` for padding, [B, S].
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
        """The rows of process `index` of `count`. A process without any gets a row without anchors, to compute on."""
        if index < len(self.input_ids):
            return Batch(*(getattr(self, name)[index::count] for name in self.__dataclass_fields__))
        return Batch(
            self.input_ids[:1], self.loss_mask[:1], self.document_ids[:1], torch.full_like(self.anchors[:1], NO_ANCHOR)
        )


def collate(
    examples: Sequence[Example],
    anchors: Sequence[Sequence[int]],
    pad_token_id: int,
    rows: Sequence[Sequence[int]] | None = None,
    width: int = 0,
) -> Batch:
    """Examples and their anchors as tensors, padded to the longest row in steps of `WIDTH_STEP`, and to `width`.

    Args:
        examples: The documents.
        anchors: Each document's own, counted from its first token.
        pad_token_id: What fills a row up.
        rows: Which documents share a row; `None` gives each a row of its own.
        width: Columns at least.
    """
    rows = [[i] for i in range(len(examples))] if rows is None else rows
    width = max(width, *(_padded(sum(len(examples[i]) for i in row)) for row in rows))
    batch = Batch(
        input_ids=torch.full((len(rows), width), pad_token_id),
        loss_mask=torch.zeros(len(rows), width, dtype=torch.bool),
        document_ids=torch.full((len(rows), width), PADDING_DOCUMENT),
        anchors=torch.full((len(rows), max(1, *(sum(len(anchors[i]) for i in row) for row in rows))), NO_ANCHOR),
    )
    for place, row in enumerate(rows):
        begin = num_anchors = 0
        for document, i in enumerate(row):
            end = begin + len(examples[i])
            batch.input_ids[place, begin:end] = torch.tensor(examples[i].token_array)
            batch.loss_mask[place, begin:end] = torch.tensor(examples[i].mask_array, dtype=torch.bool)
            batch.document_ids[place, begin:end] = document
            chosen = torch.tensor(anchors[i], dtype=torch.long) + begin
            batch.anchors[place, num_anchors : num_anchors + len(chosen)] = chosen
            begin, num_anchors = end, num_anchors + len(chosen)
    return batch


def _padded(length: int) -> int:
    return -(-length // WIDTH_STEP) * WIDTH_STEP


def batch_indices(lengths: Sequence[int], batch_tokens: int, rng: random.Random, pool: int = POOL) -> list[list[int]]:
    """One epoch's batches in random order: each of at most `batch_tokens` with padding, or of one longer sequence.

    Shuffled pools are sorted by length and cut: little is padding, and batches still differ from epoch to epoch.
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


def pack_examples(lengths: Sequence[int], width: int, rng: random.Random, pool: int = POOL) -> list[list[int]]:
    """One epoch's rows in random order: documents that together fill at most `width` columns, or a longer one alone.

    Each document of a shuffled pool, the longest first, goes into the first row with room for it.
    """
    order = rng.sample(range(len(lengths)), len(lengths))
    rows: list[list[int]] = []
    for begin in range(0, len(order), pool):
        open_rows: list[list[int]] = []
        room: list[int] = []
        for index in sorted(order[begin : begin + pool], key=lambda i: -lengths[i]):
            place = next((i for i, left in enumerate(room) if left >= lengths[index]), None)
            if place is None:
                place = len(open_rows)
                open_rows.append([])
                room.append(width)
            open_rows[place].append(index)
            room[place] -= lengths[index]
        rows += open_rows
    rng.shuffle(rows)
    return rows


def epoch_rows(
    lengths: Sequence[int], epoch: int, *, batch_tokens: int, seed: int, pack_length: int | None = None
) -> list[list[list[int]]]:
    """One epoch's batches of rows of documents, by their numbers. The same seed and epoch give the same."""
    rng = random.Random(f"batches-{seed}-{epoch}")
    if pack_length is None:
        indices = batch_indices(list(map(_padded, lengths)), batch_tokens, rng)
        return [[[i] for i in batch] for batch in indices]
    packed = pack_examples(lengths, pack_length, rng)
    count = max(1, batch_tokens // pack_length)
    return [packed[begin : begin + count] for begin in range(0, len(packed), count)]


def epoch_batches(
    examples: Sequence[Example],
    epoch: int,
    *,
    num_anchors: int,
    batch_tokens: int,
    pad_token_id: int,
    seed: int,
    pack_length: int | None = None,
    first: int = 0,
) -> Iterator[Batch]:
    """All examples once, with the anchors of this epoch. The same seed and epoch give the same batches.

    Args:
        examples: The documents.
        epoch: Counted from 0.
        num_anchors: Blocks per document at most.
        batch_tokens: Columns of a batch, padding included; one row at least.
        pad_token_id: What fills rows up.
        seed: Of the order and of the anchors.
        pack_length: Documents side by side in rows of this width; `None`: each has a row of its own.
        first: Batches before this one are left out, and cost nothing.
    """
    lengths = [len(example) for example in examples]
    batches = epoch_rows(lengths, epoch, batch_tokens=batch_tokens, seed=seed, pack_length=pack_length)
    for batch in batches[first:]:
        chosen = [i for row in batch for i in row]
        # A document's anchors depend on the document and not on its neighbours, and so does what is learned from it.
        anchors = [
            sample_anchors(examples[i].mask_array, num_anchors, seed=seed, epoch=epoch, index=i) for i in chosen
        ]
        places = iter(range(len(chosen)))
        rows = [[next(places) for _ in row] for row in batch]
        yield collate([examples[i] for i in chosen], anchors, pad_token_id, rows, _padded(pack_length or 0))
