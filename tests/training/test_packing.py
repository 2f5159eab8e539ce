"""Documents side by side in one row: they change neither what the target says of them nor what is learned from them."""

import random
from collections.abc import Sequence

import pytest
import torch
from families import FAMILIES
from tiny_models import make_drafter, make_target
from transformers import PreTrainedModel

from dflash import DFlashDraftModel
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.targets_dflash import Target
from dflash.training import (
    LOSSES,
    Batch,
    BatchPlan,
    DrafterLoss,
    Example,
    FrozenTarget,
    TrainingSettings,
    can_pack,
    collate,
    epoch_batches,
    sample_anchors,
    with_response,
)
from dflash.training.batches import epoch_sequences, pack_examples


SERVED = [name for name, family in FAMILIES.items() if family.exists and family.is_served and family.images is None]


def drafter_for(target: PreTrainedModel) -> DFlashDraftModel:
    return make_drafter(hidden_size=target.config.get_text_config(decoder=True).hidden_size, block_size=5)


def make_examples(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    return [
        with_response([rng.randrange(3, 80) for _ in range(3)], [rng.randrange(3, 80) for _ in range(length - 3)])
        for length in lengths
    ]


# --- rows ---


def test_rows_hold_every_document_once_and_no_more_than_fits() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(5, 70) for _ in range(300)]
    rows = pack_examples(lengths, 64, random.Random(1), pool=128)
    assert sorted(index for row in rows for index in row) == list(range(300))
    assert all(sum(lengths[i] for i in row) <= 64 or len(row) == 1 for row in rows)
    filled = sum(lengths) / (64 * len(rows))
    assert filled > 0.9
    assert rows == pack_examples(lengths, 64, random.Random(1), pool=128)
    assert rows != pack_examples(lengths, 64, random.Random(2), pool=128)


def test_a_row_tells_its_documents_apart() -> None:
    """Against a loop: ids, documents and anchors of each, and padding after the last."""
    examples = make_examples([6, 9, 5, 7])
    anchors = [[3, 4], [3, 5, 6], [], [4]]
    batch = collate(examples, anchors, pad_token_id=0, sequences=[[2, 0], [1, 3]], width=20)
    assert batch.input_ids.shape == (2, 20)
    for place, row in enumerate([[2, 0], [1, 3]]):
        begin, expected_anchors = 0, []
        for document, i in enumerate(row):
            for offset in range(len(examples[i])):
                assert batch.input_ids[place, begin + offset] == examples[i].input_ids[offset]
                assert batch.loss_mask[place, begin + offset] == examples[i].loss_mask[offset]
                assert batch.document_ids[place, begin + offset] == document
            expected_anchors += [begin + anchor for anchor in anchors[i]]
            begin += len(examples[i])
        assert batch.document_ids[place, begin:].tolist() == [-1] * (20 - begin)
        assert not batch.loss_mask[place, begin:].any()
        assert [anchor for anchor in batch.anchors[place].tolist() if anchor >= 0] == expected_anchors


def documents_and_anchors(batches: Sequence[Batch]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ids and the anchors of each document, wherever it stands."""
    found = set()
    for batch in batches:
        for row in range(len(batch.input_ids)):
            for document in set(batch.document_ids[row].tolist()) - {-1}:
                columns = (batch.document_ids[row] == document).nonzero().flatten()
                begin, end = int(columns[0]), int(columns[-1]) + 1
                anchors = tuple(anchor - begin for anchor in batch.anchors[row].tolist() if begin <= anchor < end)
                found.add((tuple(batch.input_ids[row, begin:end].tolist()), anchors))
    return found


def test_a_documents_anchors_do_not_depend_on_its_neighbours() -> None:
    rng = random.Random(0)
    examples = make_examples([rng.randrange(6, 40) for _ in range(30)])

    def epoch(number: int, pack_length: int | None) -> list[Batch]:
        plan = BatchPlan(num_anchors=4, batch_tokens=128, seed=5, pack_length=pack_length)
        return list(epoch_batches(examples, number, plan))

    packed = epoch(0, 60)
    assert {batch.input_ids.shape for batch in packed} <= {(2, 64), (1, 64)}  # a multiple of 16, two rows to a batch
    assert documents_and_anchors(packed) == documents_and_anchors(epoch(0, None))
    expected = {
        (tuple(e.input_ids), tuple(sample_anchors(e.loss_mask, 4, seed=5, epoch=0, index=i)))
        for i, e in enumerate(examples)
    }
    assert documents_and_anchors(packed) == expected
    assert documents_and_anchors(epoch(1, 60)) != expected


# --- what the target says ---


@pytest.mark.parametrize("name", SERVED)
def test_a_target_says_of_a_packed_document_what_it_says_of_it_alone(name: str) -> None:
    """Of every family; those with a running state are refused, for it would go on into the next document."""
    target = FAMILIES[name].make()
    drafter = drafter_for(target)
    read = FrozenTarget(target, drafter)
    alone_target = Target(target, drafter.config.target_layer_ids)
    num_layers, mixers = alone_target.num_layers, alone_target.mixers
    examples = make_examples([11, 6, 14])
    alone = [read(collate([example], [[]], 0), wants_states=True) for example in examples]
    for example, states in zip(examples, alone, strict=True):
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            logits, features = alone_target.verify(ids, PreallocatedCache(num_layers, len(example), mixers=mixers))
        torch.testing.assert_close(states.features[:, : len(example)], features, rtol=1e-4, atol=1e-4)
        assert states.last_hidden_state is not None
        ours = read.logits(states.last_hidden_state[:, : len(example)])
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)

    packed = collate(examples, [[]] * 3, 0, sequences=[[0, 1, 2]])
    if not can_pack(target):
        with pytest.raises(ValueError, match="cannot keep packed documents apart"):
            read(packed)
        return
    together, begin = read(packed, wants_states=True), 0
    assert together.last_hidden_state is not None
    for example, states in zip(examples, alone, strict=True):
        columns = slice(begin, begin + len(example))
        assert states.last_hidden_state is not None
        for ours, theirs in (
            (together.features, states.features),
            (together.last_hidden_state, states.last_hidden_state),
        ):
            torch.testing.assert_close(ours[0, columns], theirs[0, : len(example)], rtol=1e-4, atol=1e-4)
        begin += len(example)


def test_logits_that_are_not_the_heads_are_not_learned_from() -> None:
    target = make_target("qwen3")
    own_forward = target.forward
    drafter = drafter_for(target)

    def forward(*args: object, **kwargs: object) -> object:
        output = own_forward(*args, **kwargs)
        output.logits = output.logits.flip(-1)
        return output

    target.forward = forward
    read = FrozenTarget(target, drafter)
    batch = collate(make_examples([9]), [[]], 0)
    read(batch)
    with pytest.raises(ValueError, match=r"logits of Qwen3ForCausalLM differ from its head applied.*loss='ce'"):
        read(batch, wants_states=True)


# --- what is learned ---


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_packing_changes_neither_loss_nor_gradient(loss: str, weights: str) -> None:
    target = make_target("qwen3_sliding")
    drafter = drafter_for(target)
    examples, anchors = make_examples([11, 7, 14, 9]), [[3, 5, 9], [4], [3, 4, 5, 12], [6]]
    # Supervised from its first token on, so that nothing but its document ends the block before it.
    examples[2] = with_response([], examples[2].input_ids)
    settings = TrainingSettings(chunk_rows=7, loss=loss, position_weights=weights)
    loss_of = DrafterLoss(FrozenTarget(target, drafter), settings)
    found = []
    for rows in (None, [[0, 2], [3, 1]], [[1, 3, 0, 2]]):
        drafter.zero_grad()
        loss_sum, counts = loss_of(collate(examples, anchors, 0, rows))
        loss_sum.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
        assert all(gradient.any() for gradient in gradients.values())
        found.append((loss_sum.detach(), vars(counts), gradients))
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_document_wider_than_the_packed_sequences_is_a_batch_of_its_own() -> None:
    """Bug: its neighbours in the batch were padded to its length, three times what a batch may hold."""
    lengths = [20, 12, 30, 90, 8, 25, 31, 16]
    plan = BatchPlan(num_anchors=1, batch_tokens=64, pack_length=32)
    batches = epoch_sequences(lengths, 0, plan)
    assert sorted(number for batch in batches for sequence in batch for number in sequence) == list(range(8))
    assert [[3]] in batches
    for batch in batches:
        widths = [sum(lengths[number] for number in sequence) for sequence in batch]
        assert len(batch) == 1 or max(widths) <= 32
        assert len(batch) <= 2
