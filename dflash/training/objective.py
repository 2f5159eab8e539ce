"""The drafter's loss on a batch: states from the target, blocks through the drafter, rows through the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from dflash.model.modeling_dflash import DFlashDraftModel
from dflash.model.step_dflash import Pair

from .batches import Batch
from .block_attention import BLOCKWISE
from .losses import (
    DraftCounts,
    chunked_loss,
    count_drafts,
    default_gamma,
    position_weights,
    reads_target,
    selector_loss,
)
from .masks import lay_out_blocks
from .targets import FrozenTarget, TargetStates


# Rows of the head come in multiples of this: few shapes, for each of which kernels are chosen (and on a CPU compiled) anew.
ROW_STEP = 256


class DrafterLoss:
    """The drafter's loss on a batch, features and head taken from the target that `tapped` holds.

    Args:
        drafter: The drafter.
        tapped: Its target; frozen here.
        gamma: Decay of the weights called "decay"; `None` is the paper's for the block size.
        chunk_rows: Rows whose logits exist at a time; `None`: as many as `losses.CHUNK_LOGITS` allows.
        network: What computes the drafter's forward, if not the drafter itself: a compiled one.
        loss: A key of `losses.LOSSES`.
        weights: A key of `losses.POSITION_WEIGHTS`.
        dpace_alpha: Smoothing of the weights called "dpace".
        selector_weight: Weight of a DFlash2 selector's own loss beside the drafter's.

    Raises:
        ValueError: for an unknown loss or weights, or a drafter with a head of its own, which would not be trained.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        tapped: Pair,
        gamma: float | None = None,
        chunk_rows: int | None = None,
        network: Callable[..., Any] | None = None,
        *,
        loss: str = "ce",
        weights: str = "decay",
        dpace_alpha: float = 0.5,
        selector_weight: float = 1.0,
    ) -> None:
        self.drafter = drafter
        self.tapped = tapped
        self.target = FrozenTarget(tapped)
        self.chunk_rows = chunk_rows
        self.config = drafter.config
        self.network = drafter if network is None else network
        self.loss = loss
        self.reads_target = reads_target(loss)
        gamma = default_gamma(self.config.block_size) if gamma is None else gamma
        self.weights = position_weights(weights, gamma=gamma, alpha=dpace_alpha)
        self.selector_weight = selector_weight
        if drafter.lm_head is not None:
            raise ValueError(
                f"The drafter has a head of its own over {self.config.draft_vocab_size} tokens, which is not trained here: "
                "start from one that speaks through its target's head."
            )

    def __call__(self, batch: Batch, states: TargetStates | None = None) -> tuple[torch.Tensor, DraftCounts]:
        """The loss, summed over the batch's blocks, and its counts; `states` are what the target says, if known already."""
        attention = self.attention(batch.input_ids.device)
        layout = lay_out_blocks(
            batch.input_ids, batch.loss_mask, batch.document_ids, batch.anchors, self.config, attention
        )
        if states is None:
            states = self.target(batch, wants_states=self.reads_target)
        with torch.no_grad():
            noise_embeds = self.tapped.embed(layout.token_ids)
        hidden_states = self.network(
            noise_embeds=noise_embeds,
            context_hidden_states=states.features,
            position_ids=layout.position_ids,
            attention_mask=layout.attention_mask,
            attn_implementation=attention,
        ).last_hidden_state.flatten(0, 1)  # [B * R, D]

        block_size = self.config.block_size
        first = block_size - self.config.num_proposals  # the anchor's row proposes nothing, as a rule
        rows = _LearnedRows(layout.is_learned.view(-1, block_size))
        proposals = rows.is_learned[:, first:]  # [G, P]
        length = batch.input_ids.shape[1]
        begins = torch.arange(len(batch.input_ids), device=layout.previous.device)[:, None] * length
        labels, previous = rows.gather(layout.labels), rows.gather(layout.previous + begins)

        def weigh(log_probs: torch.Tensor) -> torch.Tensor:  # [M] -> [M]
            weights = self.weights(rows.scatter(log_probs.exp())[:, first:], proposals)
            return rows.gather(functional.pad(weights, (first, 0))) * rows.is_real

        teacher = states.last_hidden_state
        selector: Any = self.drafter.candidate_selector
        learned_states = hidden_states.index_select(0, rows.index)
        losses = chunked_loss(
            learned_states,
            labels,
            weigh,
            self._head,
            self.chunk_rows,
            loss=self.loss,
            teacher_states=None if teacher is None else teacher.flatten(0, 1)[previous],
            teacher_head=self.target.logits,
            num_candidates=0 if selector is None else selector.top_k,
        )
        loss_sum = losses.loss_sum
        if losses.candidates is not None:
            before = batch.input_ids.flatten()[previous]
            loss_sum = loss_sum + self.selector_weight * selector_loss(
                selector, learned_states, losses.candidates, labels, before, losses.weights
            )
        is_correct = rows.scatter(losses.is_correct)[:, first:]
        return loss_sum, count_drafts(is_correct, proposals, loss_sum, losses.weight_sum)

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        return self.drafter.compute_logits(states, self.tapped.head)

    def attention(self, device: torch.device) -> str:
        """What passes over the keys that nobody sees; flex attention's kernels take no dropout and no narrow heads."""
        has_kernels = device.type == "cuda" and not self.config.attention_dropout and self.config.head_dim >= 16
        return "flex_attention" if has_kernels else BLOCKWISE


class _LearnedRows:
    """The rows of all blocks [G, N] that are learned, taken out one behind the other: M of them.

    They are filled up with a row of any kind, so that there are few sizes.

    Attributes:
        is_learned: Which they are, bool [G, N].
        index: Their places in the flat grid, [M].
        is_real: Those that do not only fill up, bool [M].
    """

    def __init__(self, is_learned: torch.Tensor) -> None:
        self.is_learned = is_learned
        index = is_learned.flatten().nonzero().flatten()
        self.is_real = torch.arange(len(index) + -len(index) % ROW_STEP, device=index.device) < len(index)
        self.index = functional.pad(index, (0, len(self.is_real) - len(index)))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the rows, [M], of those of all rows in any shape."""
        return values.flatten()[self.index]

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Values [M] at their places, [G, N], and zero elsewhere."""
        grid = values.new_zeros(self.is_learned.numel())
        grid[self.index[self.is_real]] = values[self.is_real]
        return grid.view_as(self.is_learned)
