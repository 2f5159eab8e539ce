"""Batches of examples with the anchors of their blocks: a sequence holds one document, padded, or several. It knows no model."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .data import Example
from .lazy_sequences import lengths_of


PADDING_DOCUMENT = -1
NO_ANCHOR = -1
# Widths are multiples of this, so that there are few shapes: kernels are chosen (and on a CPU compiled) anew for each.
WIDTH_STEP = 16
# Number of sequences among which neighbours are chosen.
POOL = 2048


def valid_anchors(loss_mask: Sequence[int]) -> list[int]:
    """Positions at which a block may begin: the token is supervised, and so is the next one.

    While decoding, an anchor is a token of the target, and the drafter proposes its successor first. A position whose
    successor belongs to a prompt never occurs.
    """
    return [i for i in range(len(loss_mask) - 1) if loss_mask[i] and loss_mask[i + 1]]


def sample_anchors(
    loss_mask: Sequence[int],
    num_anchors: int,
    *,
    seed: int,
    epoch: int,
    index: int,
    rejected: Sequence[int] = (),
    rejected_share: float = 0.0,
) -> list[int]:
    """At most `num_anchors` distinct valid anchors in ascending order, drawn anew each epoch.

    They depend on `(seed, epoch, index)` and on the sequence alone, `index` being its place in the data. Neither its batch nor
    a restart changes them. A sequence with fewer valid positions gives all of them. `rejected_share` of them, as far as there are
    as many, are drawn from `rejected`, the anchors of drafts that verification rejected.

    Example:
        >>> sample_anchors([0, 0, 1, 1, 1], 8, seed=0, epoch=0, index=0)
        [2, 3]
    """
    candidates = valid_anchors(loss_mask)
    rng = random.Random(f"{seed}-{epoch}-{index}")
    count, recorded = min(num_anchors, len(candidates)), sorted(set(rejected).intersection(candidates))
    chosen = set(rng.sample(recorded, min(round(rejected_share * count), len(recorded))))
    others = [anchor for anchor in candidates if anchor not in chosen]
    return sorted([*chosen, *rng.sample(others, count - len(chosen))])


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. The target is causal, so padding on the right changes nothing before it.

    Attributes:
        input_ids: Token ids, [B, S].
        loss_mask: Supervised tokens, bool [B, S].
        document_ids: 0, 1, 2, … for the tokens of a sequence's documents and `PADDING_DOCUMENT` for padding, [B, S].
        anchors: Columns where blocks begin, `NO_ANCHOR` where a sequence has fewer, [B, A].
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    anchors: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def share(self, index: int, count: int) -> "Batch":
        """The sequences of process `index` of `count`; without any, one without anchors, to compute on."""
        if index < len(self.input_ids):
            return Batch(*(getattr(self, name)[index::count] for name in self.__dataclass_fields__))
        none = torch.full_like(self.anchors[:1], NO_ANCHOR)
        return Batch(self.input_ids[:1], self.loss_mask[:1], self.document_ids[:1], none)


def collate(
    examples: Sequence[Example],
    anchors: Sequence[Sequence[int]],
    pad_token_id: int,
    sequences: Sequence[Sequence[int]] | None = None,
    width: int = 0,
) -> Batch:
    """Examples and their anchors as tensors, padded to a multiple of `WIDTH_STEP` and to `width`.

    Args:
        examples: The documents.
        anchors: Each document's own, counted from its first token.
        pad_token_id: Fills sequences up.
        sequences: The documents of each sequence, by number. Default: one each.
        width: Columns at least.
    """
    sequences = [[i] for i in range(len(examples))] if sequences is None else sequences
    width = max(width, *(_padded(sum(len(examples[i]) for i in sequence)) for sequence in sequences))
    most = max(1, *(sum(len(anchors[i]) for i in sequence) for sequence in sequences))
    batch = Batch(
        input_ids=torch.full((len(sequences), width), pad_token_id),
        loss_mask=torch.zeros(len(sequences), width, dtype=torch.bool),
        document_ids=torch.full((len(sequences), width), PADDING_DOCUMENT),
        anchors=torch.full((len(sequences), most), NO_ANCHOR),
    )
    for place, sequence in enumerate(sequences):
        begin = num_anchors = 0
        for document, i in enumerate(sequence):
            end = begin + len(examples[i])
            batch.input_ids[place, begin:end] = torch.tensor(examples[i].token_array)
            batch.loss_mask[place, begin:end] = torch.tensor(examples[i].mask_array, dtype=torch.bool)
            batch.document_ids[place, begin:end] = document
            most = num_anchors + len(anchors[i])
            batch.anchors[place, num_anchors:most] = torch.tensor(anchors[i], dtype=torch.long) + begin
            begin, num_anchors = end, most
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
    """One epoch's sequences in random order: documents that together fill at most `width` columns, or a longer one.

    Each document of a shuffled pool, the longest first, goes into the first sequence with room for it.
    """
    order = rng.sample(range(len(lengths)), len(lengths))
    sequences: list[list[int]] = []
    for begin in range(0, len(order), pool):
        open_ones: list[list[int]] = []
        room: list[int] = []
        for index in sorted(order[begin : begin + pool], key=lambda i: -lengths[i]):
            place = next((i for i, left in enumerate(room) if left >= lengths[index]), len(room))
            if place == len(room):
                open_ones.append([])
                room.append(width)
            open_ones[place].append(index)
            room[place] -= lengths[index]
        sequences += open_ones
    rng.shuffle(sequences)
    return sequences


def epoch_sequences(
    lengths: Sequence[int], epoch: int, *, batch_tokens: int, seed: int, pack_length: int | None = None
) -> list[list[list[int]]]:
    """One epoch's batches as sequences of document numbers. The same seed and epoch give the same."""
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
    rejected_share: float = 0.0,
) -> Iterator[Batch]:
    """All examples once, with the anchors of this epoch. The same seed and epoch give the same batches.

    Args:
        examples: The documents.
        epoch: Counted from 0.
        num_anchors: Blocks per document at most.
        batch_tokens: Columns of a batch, padding included; one sequence at least.
        pad_token_id: Fills sequences up.
        seed: Of the order and of the anchors.
        pack_length: Documents side by side in sequences of this width. Default: a sequence each.
        first: Batches before this one are left out, and cost nothing.
        rejected_share: Share of a document's anchors that are drawn from its `rejected` ones.
    """
    batches = epoch_sequences(
        lengths_of(examples), epoch, batch_tokens=batch_tokens, seed=seed, pack_length=pack_length
    )
    for batch in batches[first:]:
        documents = {i: examples[i] for sequence in batch for i in sequence}
        # A document's anchors depend on the document and not on its neighbours, and so does what is learned from it.
        how: dict[str, Any] = {"seed": seed, "epoch": epoch, "rejected_share": rejected_share}
        of_each = documents.items()
        anchors = [sample_anchors(e.mask_array, num_anchors, index=i, rejected=e.rejected, **how) for i, e in of_each]
        places = iter(range(len(documents)))
        sequences = [[next(places) for _ in sequence] for sequence in batch]
        yield collate(list(documents.values()), anchors, pad_token_id, sequences, _padded(pack_length or 0))
