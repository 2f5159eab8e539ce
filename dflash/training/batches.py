"""Cuts examples into batches and draws the anchors of their blocks. It imports no model.

An example is called a document here. A sequence is one row of a batch: a padded document, or several packed documents.
"""

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
# Widths are rounded up to a multiple of this, so that few shapes occur: torch selects kernels for each new shape and,
# on a CPU, compiles them.
WIDTH_STEP = 16
# Number of shuffled documents that are sorted by length together.
POOL = 2048


def valid_anchors(loss_mask: Sequence[int]) -> list[int]:
    """Returns the positions at which a block may begin: the token there and the next one are supervised.

    While decoding, an anchor is a token that the target wrote, and the drafter first proposes the token after it. So
    the token after an anchor is never part of a prompt.
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
    """Returns at most `num_anchors` distinct valid anchors of a document, in ascending order, drawn anew each epoch.

    The draw depends only on the arguments. `index` is the document's index in the data, so neither its batch nor a
    restart changes the draw. For a document with fewer valid positions than `num_anchors`, all of them are returned.
    `rejected` holds the anchors of drafts that verification rejected: a share `rejected_share` of the result is drawn
    from them, or less if they are too few.

    Example:
        >>> sample_anchors([0, 0, 1, 1, 1], 8, seed=0, epoch=0, index=0)
        [2, 3]
    """
    candidates = set(valid_anchors(loss_mask))
    generator = random.Random(f"{seed}-{epoch}-{index}")
    count = min(num_anchors, len(candidates))
    rejected_candidates = sorted(candidates.intersection(rejected))
    wanted = round(rejected_share * count)
    num_rejected = min(wanted, len(rejected_candidates))
    anchors = generator.sample(rejected_candidates, num_rejected)
    remaining = sorted(candidates.difference(anchors))
    num_others = count - num_rejected
    anchors += generator.sample(remaining, num_others)
    return sorted(anchors)


class Batch(NamedTuple):
    """Right-padded sequences as tensors. The target is causal, so tokens never see the padding on their right.

    Attributes:
        input_ids: Token ids, [B, S].
        loss_mask: Whether a token is supervised, bool [B, S].
        document_ids: Index of the token's document in its sequence; `PADDING_DOCUMENT` for padding, [B, S].
        anchors: Columns where blocks begin, filled with `NO_ANCHOR` in sequences that have fewer, [B, A].
    """

    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    anchors: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Returns the batch with all tensors on `device`."""
        tensors = [tensor.to(device) for tensor in self]
        return Batch(*tensors)

    def micro_batch(self, index: int, num_micro_batches: int) -> "Batch":
        """Returns every `num_micro_batches`-th sequence of the batch, beginning with the one at `index`.

        There is one such micro-batch for each process and gradient accumulation step. If there are fewer sequences than
        micro-batches, each remaining micro-batch is a copy of the first sequence with all anchors removed. Its process
        runs a forward like the others, and its loss is 0.
        """
        if index < len(self.input_ids):
            own = [tensor[index::num_micro_batches] for tensor in self]
            return Batch(*own)
        first = Batch(*[tensor[:1] for tensor in self])
        no_anchors = torch.full_like(first.anchors, NO_ANCHOR)
        return first._replace(anchors=no_anchors)


@dataclass(frozen=True)
class BatchPlan:
    """How data is cut into batches and blocks.

    Attributes:
        num_anchors: Largest number of blocks per document.
        batch_tokens: Largest number of tokens per batch, padding included. A longer sequence is a batch by itself.
        seed: Seed of the order of documents and of the anchors.
        pad_token_id: Token id of the padding.
        pack_length: Width of sequences into which documents are packed. Default: one document per sequence.
        rejected_share: Share of a document's anchors that is drawn from its `rejected` anchors.
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
    """Returns examples and their anchors as a [`Batch`].

    The batch is as wide as its longest sequence, rounded up to a multiple of `WIDTH_STEP`, or `width` columns if that
    is more.

    Args:
        examples: The documents, by index.
        anchors: Anchors of each document, by the same index, counted from the document's first token.
        pad_token_id: Token id of the padding.
        sequences: For each sequence the indices of its documents. Default: one document per sequence.
        width: Smallest number of columns. It is not rounded up, so give a multiple of `WIDTH_STEP` to keep shapes few.
    """
    if sequences is None:
        sequences = [[index] for index in range(len(examples))]
    rows = [_packed(examples, anchors, sequence) for sequence in sequences]
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


def _packed(examples: Any, anchors: Any, sequence: Sequence[int]) -> tuple[list[int], ...]:
    """Concatenates the documents of a sequence; returns its token ids, loss mask, document ids and anchor columns."""
    token_ids: list[int] = []
    loss_mask: list[int] = []
    documents: list[int] = []
    columns: list[int] = []
    for document, index in enumerate(sequence):
        example, begin = examples[index], len(token_ids)
        columns += [begin + anchor for anchor in anchors[index]]
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
    """Yields the indices 0 to `count - 1` in random order, in lists of at most `pool`."""
    order = rng.sample(range(count), count)
    for begin in range(0, count, pool):
        yield order[begin : begin + pool]


def batch_indices(lengths: Sequence[int], batch_tokens: int, rng: random.Random, pool: int = POOL) -> list[list[int]]:
    """Returns an epoch's batches in random order, as lists of indices.

    A batch has at most `batch_tokens` tokens, padding included, or is one longer sequence. Pools of shuffled sequences
    are sorted by length and cut, so that there is little padding and batches still differ between epochs.
    """
    batches: list[list[int]] = []
    for indices in _pools(len(lengths), rng, pool):
        batch: list[int] = []
        for index in sorted(indices, key=lengths.__getitem__):
            num_tokens = (len(batch) + 1) * lengths[index]
            if batch and num_tokens > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def pack_examples(lengths: Sequence[int], width: int, rng: random.Random, pool: int = POOL) -> list[list[int]]:
    """Packs documents into sequences of at most `width` tokens; returns these as lists of indices, in random order.

    The documents of a shuffled pool, longest first, go into the first sequence that has room. A document longer than
    `width` is a sequence by itself.
    """
    sequences: list[list[int]] = []
    for indices in _pools(len(lengths), rng, pool):
        room: list[int] = []
        first = len(sequences)  # index of the pool's first sequence
        for index in sorted(indices, key=lambda index: -lengths[index]):
            length = lengths[index]
            has_room = [columns >= length for columns in room]
            if not any(has_room):
                room.append(width)
                sequences.append([])
                has_room.append(True)
            place = has_room.index(True)
            room[place] -= length
            sequences[first + place].append(index)
    rng.shuffle(sequences)
    return sequences


def epoch_sequences(lengths: Sequence[int], epoch: int, plan: BatchPlan) -> list[list[list[int]]]:
    """Returns an epoch's batches, each a list of sequences of document indices. Plan and epoch decide them."""
    rng = random.Random(f"batches-{plan.seed}-{epoch}")
    width = plan.pack_length
    batches = []
    if width is None:
        padded = list(map(_padded, lengths))
        for indices in batch_indices(padded, plan.batch_tokens, rng):
            alone = [[index] for index in indices]
            batches.append(alone)
        return batches
    columns = _padded(width)
    count = max(1, plan.batch_tokens // columns)
    batch: list[list[int]] = []
    for sequence in pack_examples(lengths, width, rng):
        num_tokens = sum(lengths[index] for index in sequence)
        if num_tokens > columns:  # one long document: the other sequences of the batch would be padded to its length
            batches.append([sequence])
            continue
        batch.append(sequence)
        if len(batch) == count:
            batches.append(batch)
            batch = []
    if batch:
        batches.append(batch)
    return batches


def epoch_batches(examples: Examples, epoch: int, plan: BatchPlan, first: int = 0) -> Iterator[Batch]:
    """Yields the batches of an epoch (from 0), which hold each example once. Plan and epoch decide them.

    Batches before the index `first` are skipped, and their examples are not read. A document's anchors depend on the
    plan, the epoch, the document and its index in `examples`, not on its batch or on a restart.
    """
    width = _padded(plan.pack_length or 0)
    batches = epoch_sequences(lengths_of(examples), epoch, plan)
    for sequences in batches[first:]:
        documents = {index: examples[index] for index in chain.from_iterable(sequences)}
        anchors = {
            index: sample_anchors(
                document.mask_array,
                plan.num_anchors,
                seed=plan.seed,
                epoch=epoch,
                index=index,
                rejected=document.rejected,
                rejected_share=plan.rejected_share,
            )
            for index, document in documents.items()
        }
        yield collate(documents, anchors, plan.pad_token_id, sequences, width)
