"""Weights, the chunked cross entropy, and figures that add up however the data was cut."""

import math

import pytest
import torch

from dflash.training.losses import (
    DraftCounts,
    chunked_cross_entropy,
    count_drafts,
    default_gamma,
    position_weights,
)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_weights_decay_from_the_first_drafted_token(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma
    weights = position_weights(block_size, gamma).tolist()
    assert weights[0] == 0.0
    assert weights[1] == 1.0
    for k in range(1, block_size):
        assert weights[k] == pytest.approx(math.exp(-(k - 1) / gamma))


def naive_cross_entropy(
    hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(labels)):
        logits = head.double() @ hidden[row].double()
        total = total + weights[row].double() * (logits.exp().sum().log() - logits[labels[row]])
    return total


@pytest.mark.parametrize("chunk_rows", [1, 4, 10, 64])
def test_chunked_loss_and_gradient_equal_the_naive_ones(chunk_rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(10, 6, requires_grad=True)
    labels, weights, head = torch.randint(0, 13, (10,)), torch.rand(10), torch.randn(13, 6)
    losses = chunked_cross_entropy(hidden, labels, weights, lambda states: states @ head.T, chunk_rows)
    expected = naive_cross_entropy(hidden, labels, weights, head)
    torch.testing.assert_close(losses.loss_sum, expected.float())
    torch.testing.assert_close(losses.weight_sum, weights.sum())
    (gradient,) = torch.autograd.grad(losses.loss_sum, hidden)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(gradient, expected_gradient)
    assert losses.is_correct.tolist() == [
        (head @ h).argmax() == label for h, label in zip(hidden, labels, strict=True)
    ]


@pytest.mark.parametrize(("chunk_rows", "num_calls"), [(4, 6), (10, 1)])
def test_logits_are_computed_again_only_where_there_are_several_chunks(chunk_rows: int, num_calls: int) -> None:
    calls: list[int] = []

    def head(states: torch.Tensor) -> torch.Tensor:
        calls.append(len(states))
        return states @ torch.ones(6, 7)

    hidden = torch.ones(10, 6, requires_grad=True)
    labels = torch.zeros(10, dtype=torch.long)
    chunked_cross_entropy(hidden, labels, torch.ones(10), head, chunk_rows).loss_sum.backward()
    assert len(calls) == num_calls
    assert max(calls) <= chunk_rows


def test_logits_of_more_than_one_chunk_never_exist_at_once() -> None:
    """Neither in the forward pass nor saved for the backward pass."""
    rows: list[int] = []
    hidden = torch.randn(20, 4, requires_grad=True)
    head = torch.randn(50, 4)

    def spying_head(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return states @ head.T

    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = chunked_cross_entropy(hidden, torch.zeros(20, dtype=torch.long), torch.ones(20), spying_head, 3)
    assert max(rows) == 3
    assert max(saved, default=0) < 3 * 50
    losses.loss_sum.backward()
    assert len(rows) == 2 * 7  # each chunk again


def test_no_rows_give_a_zero_loss() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    losses = chunked_cross_entropy(torch.zeros(0, 4), empty, torch.zeros(0), lambda states: states, 8)
    assert losses.loss_sum.item() == losses.weight_sum.item() == 0.0


def blocks_with_runs(runs: list[int], block_size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that are right for `runs[i]` tokens, wrong once, and right again."""
    is_correct = torch.ones(len(runs), block_size, dtype=torch.bool)
    for block, run in enumerate(runs):
        if run + 1 < block_size:
            is_correct[block, run + 1] = False
    is_learned = torch.ones_like(is_correct)
    is_learned[:, 0] = False
    return is_correct, is_learned


def counts_of(runs: list[int]) -> DraftCounts:
    return count_drafts(*blocks_with_runs(runs), torch.tensor(0.0), torch.tensor(1.0))


@pytest.mark.parametrize("batching", [[[3, 2, 1, 0]], [[3], [2], [1], [0]], [[3, 2, 1], [0]], [[0], [1, 3, 2]]])
def test_accepted_runs_have_the_same_mean_for_any_batching(batching: list[list[int]]) -> None:
    """A trainer once multiplied mean accuracies and averaged batches; runs 3, 2, 1, 0 are 1.5 accepted, always."""
    total, *others = [counts_of(runs) for runs in batching]
    for other in others:
        total += other
    assert total.summary()["accepted_per_block"] == 1.5


def test_accuracy_by_offset_counts_learned_rows_only() -> None:
    is_correct, is_learned = blocks_with_runs([4, 1, 0])
    is_learned[0, 3:] = False  # the first response ends inside its block
    summary = count_drafts(is_correct, is_learned, torch.tensor(2.0), torch.tensor(4.0)).summary()
    assert summary["accuracy"] == [pytest.approx(v, abs=1e-4) for v in (2 / 3, 2 / 3, 1.0, 1.0)]
    assert summary["accepted_per_block"] == pytest.approx((2 + 1 + 0) / 3)
    assert summary["loss"] == 0.5


def test_absent_blocks_count_for_nothing() -> None:
    is_correct, is_learned = blocks_with_runs([2, 0])
    is_learned[1] = False
    summary = count_drafts(is_correct, is_learned, torch.tensor(0.0), torch.tensor(0.0)).summary()
    assert summary["accepted_per_block"] == 2.0
    assert summary["loss"] == 0.0
