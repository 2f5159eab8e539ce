"""Batches of examples with the anchors of their blocks. A sequence holds one padded document, or several. It knows no model."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .examples import Example, Examples, lengths_of


PADDING_DOCUMENT = -1
NO_ANCHOR = -1
# Widths are multiples of this, so that there are few shapes: each new shape has its kernels chosen, and on a CPU compiled.
WIDTH_STEP = 16
# Sequences that are sorted by length together.
POOL = 2048


def valid_anchors(loss_mask: Sequence[int]) -> list[int]:
    """Positions at which a block may begin: the token is supervised, and so is the next one.

    While decoding, an anchor is a token of the target, and the drafter proposes its successor first. A position whose
    successor belongs to a prompt never occurs.
    """
    return [place for place, pair in enumerate(pairwise(loss_mask)) if all(pair)]


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
    a restart changes them. A sequence with fewer valid positions gives all of them. `rejected` are the anchors of drafts that
    verification rejected. The share `rejected_share` of the anchors is drawn from them, as far as they suffice.

    Example:
        >>> sample_anchors([0, 0, 1, 1, 1], 8, seed=0, epoch=0, index=0)
        [2, 3]
    """
    candidates = set(valid_anchors(loss_mask))
    generator = random.Random(f"{seed}-{epoch}-{index}")
    count = min(num_anchors, len(candidates))
    recorded = sorted(candidates.intersection(rejected))
    wanted = round(rejected_share * count)
    num_recorded = min(wanted, len(recorded))
    anchors = generator.sample(recorded, num_recorded)
    remaining = sorted(candidates.difference(anchors))
    num_others = count - num_recorded
    anchors += generator.sample(remaining, num_others)
    return sorted(anchors)


class Batch(NamedTuple):
    """Right-padded sequences. The target is causal, so padding on the right changes nothing before it.

    Attributes:
        input_ids: Token ids, [B, S].
        loss_mask: Supervised tokens, bool [B, S].
        document_ids: 0, 1, 2, … for the tokens of a sequence's documents and `PADDING_DOCUMENT` for padding, [B, S].
        anchors: Columns where blocks begin, `NO_ANCHOR` where a sequence has fewer, [B, A].
    """

    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    anchors: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        tensors = [tensor.to(device) for tensor in self]
        return Batch(*tensors)

    def share(self, index: int, num_shares: int) -> "Batch":
        """Share `index` of the batch, which is cut into `num_shares`, one for each part of each process.

        A batch of fewer sequences than shares leaves some shares empty. Such a share is the first sequence without anchors: its
        process computes like the others, and its loss is 0.
        """
        if index < len(self.input_ids):
            own = [tensor[index::num_shares] for tensor in self]
            return Batch(*own)
        first = Batch(*[tensor[:1] for tensor in self])
        no_anchors = torch.full_like(first.anchors, NO_ANCHOR)
        return first._replace(anchors=no_anchors)


@dataclass(frozen=True)
class BatchPlan:
    """How data is cut into batches and blocks.

    Attributes:
        num_anchors: Blocks per document at most.
        batch_tokens: Columns of a batch, padding included; one sequence at least.
        seed: Of the order and of the anchors.
        pad_token_id: Fills sequences up.
        pack_length: Documents side by side in sequences of this width. Default: a sequence each.
        rejected_share: Share of a document's anchors that are drawn from its `rejected` ones.
    """

    num_anchors: int
    batch_tokens: int
    seed: int = 0
    pad_token_id: int = 0
    pack_length: int | None = None
    rejected_share: float = 0.0


def collate(
    examples: Sequence[Example] | Mapping[int, Example],
    anchors: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    pad_token_id: int,
    sequences: Sequence[Sequence[int]] | None = None,
    width: int = 0,
) -> Batch:
    """Examples and their anchors as tensors, padded to a multiple of `WIDTH_STEP` and to `width`.

    Args:
        examples: The documents, by number.
        anchors: Each document's own, counted from its first token.
        pad_token_id: Fills sequences up.
        sequences: The documents of each sequence, by number. Default: one each.
        width: Columns at least.
    """
    if sequences is None:
        sequences = [[number] for number in range(len(examples))]
    rows = [_side_by_side(examples, anchors, sequence) for sequence in sequences]
    token_ids, loss_masks, documents, columns = zip(*rows, strict=True)
    longest = max(map(len, token_ids))
    width = max(width, _padded(longest))
    most_anchors = max(map(len, columns))
    return Batch(
        input_ids=_filled(token_ids, width, pad_token_id),
        loss_mask=_filled(loss_masks, width, 0).bool(),
        document_ids=_filled(documents, width, PADDING_DOCUMENT),
        anchors=_filled(columns, max(1, most_anchors), NO_ANCHOR),
    )


def _side_by_side(examples: Any, anchors: Any, sequence: Sequence[int]) -> tuple[list[int], ...]:
    """The token ids, loss mask, document ids and anchors of one sequence."""
    token_ids: list[int] = []
    loss_mask: list[int] = []
    documents: list[int] = []
    columns: list[int] = []
    for document, number in enumerate(sequence):
        example, begin = examples[number], len(token_ids)
        columns += [begin + anchor for anchor in anchors[number]]
        token_ids += example.token_array
        loss_mask += example.mask_array
        documents += [document] * len(example)
    return token_ids, loss_mask, documents, columns


def _filled(rows: Iterable[list[int]], width: int, value: int) -> Tensor:
    padding = [value] * width
    return torch.tensor([(row + padding)[:width] for row in rows])


def _padded(length: int) -> int:
    return -(-length // WIDTH_STEP) * WIDTH_STEP


def _pools(count: int, rng: random.Random, pool: int) -> Iterator[list[int]]:
    """The numbers below `count` in random order, `pool` at a time."""
    order = rng.sample(range(count), count)
    for begin in range(0, count, pool):
        yield order[begin : begin + pool]


def batch_indices(lengths: Sequence[int], batch_tokens: int, rng: random.Random, pool: int = POOL) -> list[list[int]]:
    """One epoch's batches in random order: each of at most `batch_tokens` with padding, or of one longer sequence.

    Shuffled pools are sorted by length and cut: little is padding, and batches still differ from epoch to epoch.
    """
    batches: list[list[int]] = []
    for numbers in _pools(len(lengths), rng, pool):
        batch: list[int] = []
        for number in sorted(numbers, key=lengths.__getitem__):
            num_tokens = (len(batch) + 1) * lengths[number]
            if batch and num_tokens > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def pack_examples(lengths: Sequence[int], width: int, rng: random.Random, pool: int = POOL) -> list[list[int]]:
    """One epoch's sequences in random order: documents that together fill at most `width` columns, or a longer one.

    Each document of a shuffled pool, the longest first, goes into the first sequence with room for it.
    """
    sequences: list[list[int]] = []
    for numbers in _pools(len(lengths), rng, pool):
        room: list[int] = []
        first = len(sequences)  # of this pool
        for number in sorted(numbers, key=lambda number: -lengths[number]):
            length = lengths[number]
            has_room = [columns >= length for columns in room]
            if not any(has_room):
                room.append(width)
                sequences.append([])
                has_room.append(True)
            place = has_room.index(True)
            room[place] -= length
            sequences[first + place].append(number)
    rng.shuffle(sequences)
    return sequences


def epoch_sequences(lengths: Sequence[int], epoch: int, plan: BatchPlan) -> list[list[list[int]]]:
    """The batches of an epoch as sequences of document numbers. The same plan and epoch give the same batches."""
    rng = random.Random(f"batches-{plan.seed}-{epoch}")
    width = plan.pack_length
    batches = []
    if width is None:
        padded = list(map(_padded, lengths))
        for numbers in batch_indices(padded, plan.batch_tokens, rng):
            alone = [[number] for number in numbers]
            batches.append(alone)
        return batches
    packed = pack_examples(lengths, width, rng)
    count = max(1, plan.batch_tokens // width)
    for begin in range(0, len(packed), count):
        end = begin + count
        batches.append(packed[begin:end])
    return batches


def epoch_batches(examples: Examples, epoch: int, plan: BatchPlan, first: int = 0) -> Iterator[Batch]:
    """All examples once, with the anchors of this epoch, which counts from 0. The same plan and epoch give the same batches.

    Batches before number `first` are left out, and cost nothing. The anchors of a document depend on the plan's seed, the epoch, the
    document and its number, and not on its batch or on a restart.
    """
    width = _padded(plan.pack_length or 0)
    batches = epoch_sequences(lengths_of(examples), epoch, plan)
    for sequences in batches[first:]:
        documents = {number: examples[number] for number in chain.from_iterable(sequences)}
        anchors = {
            number: sample_anchors(
                document.mask_array,
                plan.num_anchors,
                seed=plan.seed,
                epoch=epoch,
                index=number,
                rejected=document.rejected,
                rejected_share=plan.rejected_share,
            )
            for number, document in documents.items()
        }
        yield collate(documents, anchors, plan.pad_token_id, sequences, width)
