"""What the drafter is trained to lower, and what is counted meanwhile. It knows tensors, no model and no data.

Counted figures travel as sum and count, so that batches, processes and steps add up to the same figure however they were cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


# The paper's decay for its block sizes.
PAPER_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """The paper's gamma where it gives one, else half the block."""
    return PAPER_GAMMAS.get(block_size, block_size / 2)


def position_weights(block_size: int, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for offset k = 1..N-1 and 0 for the anchor, [N]: a wrong early token wastes all later ones."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / gamma)
    weights[0] = 0.0
    return weights


@dataclass(frozen=True)
class RowLosses:
    """Weighted loss of some rows as a sum, its weight, and which rows were right.

    Attributes:
        loss_sum: Sum of weight times cross entropy, a scalar with gradient.
        weight_sum: Sum of the weights, a scalar.
        is_correct: Whether the row's argmax is its label, bool [M].
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    is_correct: torch.Tensor


def chunked_cross_entropy(
    hidden_states: torch.Tensor,  # [M, D]
    labels: torch.Tensor,  # [M]
    weights: torch.Tensor,  # [M]
    head: Callable[[torch.Tensor], torch.Tensor],
    chunk_rows: int,
) -> RowLosses:
    """Weighted cross entropy of `head(hidden_states)`, of which at most `chunk_rows` rows of logits exist at a time.

    The backward pass computes a chunk's logits again instead of keeping them, unless there is one chunk: its logits are
    what the backward pass needs first, so forgetting them saves nothing.
    """

    def chunk(states: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(states).float()  # [chunk, V]; fp32 before argmax too, which is slow in bf16
        losses = functional.cross_entropy(logits, wanted, reduction="none")
        return (losses * weight).sum(), logits.detach().argmax(dim=-1) == wanted

    if len(hidden_states) <= chunk_rows:
        loss_sum, is_correct = chunk(hidden_states, labels, weights)
        return RowLosses(loss_sum, weights.sum(), is_correct)

    loss_sum = hidden_states.new_zeros((), dtype=torch.float32)
    correct = [torch.zeros(0, dtype=torch.bool, device=labels.device)]
    pieces = zip(hidden_states.split(chunk_rows), labels.split(chunk_rows), weights.split(chunk_rows), strict=True)
    for states, wanted, weight in pieces:
        loss, is_right = checkpoint(chunk, states, wanted, weight, use_reentrant=False)
        loss_sum = loss_sum + loss
        correct.append(is_right)
    return RowLosses(loss_sum, weights.sum(), torch.cat(correct))


@dataclass
class DraftCounts:
    """Teacher-forced counts of drafted blocks; `a += b` joins those of two batches.

    Attributes:
        loss_sum: Weighted cross entropy, summed.
        weight_sum: Its weights, summed.
        correct: Right rows by offset 1..N-1, [N - 1].
        rows: Trained rows by offset, [N - 1].
        accepted: Rows right in an unbroken run from the first one, over all blocks.
        blocks: Blocks with a trained row.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    correct: torch.Tensor
    rows: torch.Tensor
    accepted: torch.Tensor
    blocks: torch.Tensor

    def __iadd__(self, other: DraftCounts) -> DraftCounts:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def summary(self) -> dict[str, float | list[float]]:
        """The means: loss, accuracy of each offset, and accepted proposals per block."""
        return {
            "loss": (self.loss_sum / self.weight_sum.clamp(min=1e-9)).item(),
            "accuracy": [round(value, 4) for value in (self.correct / self.rows.clamp(min=1)).tolist()],
            "accepted_per_block": (self.accepted / self.blocks.clamp(min=1)).item(),
        }


def count_drafts(
    is_correct: torch.Tensor,  # bool [..., N]; the anchor's column is not looked at
    is_learned: torch.Tensor,  # bool [..., N]
    loss_sum: torch.Tensor,
    weight_sum: torch.Tensor,
) -> DraftCounts:
    """The counts of some blocks. A run is counted block by block, never as a product of mean accuracies.

    (Accuracies of different offsets are strongly dependent, and their product is far below what is accepted.)
    """
    block_size = is_correct.shape[-1]
    learned = is_learned.reshape(-1, block_size)[:, 1:]
    right = is_correct.reshape(-1, block_size)[:, 1:] & learned
    return DraftCounts(
        loss_sum=loss_sum.detach(),
        weight_sum=weight_sum.detach(),
        correct=right.sum(dim=0),
        rows=learned.sum(dim=0),
        accepted=right.long().cumprod(dim=1).sum(),
        blocks=learned.any(dim=1).sum(),
    )
