"""Computes the drafter's loss on a batch: target states, drafter forward over all blocks, target's head, loss."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .batches import Batch
from .block_attention import BLOCKWISE, FLEX
from .frozen_target import FrozenTarget, TargetStates
from .layout import BlockLayout, lay_out_blocks
from .lean_mlp import lean_mlps
from .losses import (
    DraftCounts,
    PositionWeights,
    RowLosses,
    Teacher,
    chunked_loss,
    count_drafts,
    decay_weights,
    default_gamma,
    dpace_weights,
    head_loss,
    reads_target,
)
from .settings import PositionWeightsName, TrainingSettings


# The number of positions that the head gets is rounded up to a multiple of this, so that few shapes occur: torch
# selects kernels for each new shape and, on a CPU, compiles them.
ROW_STEP = 256


def _decay(settings: TrainingSettings, block_size: int) -> PositionWeights:
    return decay_weights(settings.gamma or default_gamma(block_size))


def _dpace(settings: TrainingSettings, block_size: int) -> PositionWeights:
    return dpace_weights(settings.dpace_alpha)


# By name, the function that makes the rule of `position_weights` from the settings and the block size.
POSITION_WEIGHTS: dict[PositionWeightsName, Callable[[TrainingSettings, int], PositionWeights]] = {
    "decay": _decay,
    "dpace": _dpace,
}


class DrafterLoss:
    """Computes the drafter's loss on a batch, with the target's embedding and head.

    Args:
        frozen_target: The frozen target and its drafter.
        settings: The recipe. Only the settings of the loss and `chunk_rows` are read. Default: the recipe `short`.
        network: Function that runs the drafter's forward, such as the compiled drafter. Default: the drafter.
        states_of: Function that returns the target's states of a batch, such as a reader of those on disk. Default: the
            target's forward.

    Raises:
        ValueError: for a drafter with a language-model head of its own, which would not be trained.
    """

    def __init__(
        self,
        frozen_target: FrozenTarget,
        settings: TrainingSettings | None = None,
        network: Callable[..., Any] | None = None,
        states_of: Callable[[Batch, bool], TargetStates] | None = None,
    ) -> None:
        self.frozen_target = frozen_target
        self.drafter: Any = frozen_target.drafter
        self.config = self.drafter.config
        self.settings = settings = settings or TrainingSettings()
        self.network = self.drafter if network is None else network
        self.states_of = frozen_target if states_of is None else states_of
        make_weights = POSITION_WEIGHTS[settings.position_weights]
        self.weights = make_weights(settings, self.config.block_size)
        if self.drafter.lm_head is not None:
            raise ValueError(
                f"The drafter has a head of its own over {self.config.draft_vocab_size} tokens, which is not trained "
                "here: start from a drafter that uses its target's head."
            )

    def __call__(self, batch: Batch) -> tuple[Tensor, DraftCounts]:
        """Returns the sum of all weighted losses (scalar, with gradient), and the batch's `DraftCounts`."""
        attention = self.attention(batch.input_ids.device)
        layout = lay_out_blocks(*batch, self.config, attention)
        states = self.states_of(batch, reads_target(self.settings.loss))
        hidden_states = self._forward(layout, states.features, attention)  # [B * R, D]

        first = self.config.block_size - self.config.num_proposals  # 1, unless the anchor's position proposes too
        is_trained = layout.is_trained.view(-1, self.config.block_size)
        trained = _TrainedPositions(is_trained, first)
        sequences = torch.arange(len(batch.input_ids), device=layout.previous.device)
        length = batch.input_ids.shape[1]
        places_before = layout.previous + sequences[:, None] * length  # in the flattened batch
        labels = trained.gather(layout.labels)

        def weigh(log_probs: Tensor) -> Tensor:  # [M] -> [M]
            label_probs = trained.scatter(log_probs.exp())
            weights = self.weights(label_probs, trained.proposals)
            weights = functional.pad(weights, (first, 0))
            return trained.gather(weights) * trained.is_real

        teacher = None
        if states.last_hidden_state is not None:
            teacher_states = states.last_hidden_state.flatten(0, 1)
            teacher = Teacher(teacher_states[trained.gather(places_before)], self.frozen_target.logits)
        causal_head = self.drafter.causal_head(self.frozen_target.embed)
        trained_states = hidden_states.index_select(0, trained.index)
        losses = chunked_loss(
            trained_states,
            labels,
            weigh,
            lambda states: self.drafter.compute_logits(states, self.frozen_target.head),
            self.settings.chunk_rows,
            loss=self.settings.loss,
            teacher=teacher,
            num_candidates=0 if causal_head is None else causal_head.top_k,
        )
        loss_sum = losses.loss_sum
        if losses.candidates is not None:
            tokens = batch.input_ids.flatten()[places_before]  # [G * N], the token before each position
            of_head = self._head_loss(causal_head, trained, trained_states, tokens, labels, losses)
            loss_sum = loss_sum + self.settings.selector_weight * of_head
        is_correct = trained.scatter(losses.is_correct)
        return loss_sum, count_drafts(
            is_correct,
            trained.proposals,
            loss_sum,
            losses.weight_sum,
        )

    def _head_loss(
        self,
        causal_head: Any,
        trained: "_TrainedPositions",
        trained_states: Tensor,  # [M, D]
        previous_ids: Tensor,  # [G * N]
        labels: Tensor,  # [M]
        losses: RowLosses,
    ) -> Tensor:
        """Returns the loss of the head's choices among the candidates, each after the true tokens before it."""
        candidates: Any = losses.candidates
        block_size = self.config.block_size
        by_block = previous_ids.view(-1, block_size)
        states = _states_after(causal_head, by_block[:, trained.first :])  # [G, P, H]
        states = functional.pad(states, (0, 0, trained.first, 0)).flatten(0, 1)  # [G * N, H]
        return head_loss(
            causal_head,
            trained_states,
            states.index_select(0, trained.index),
            trained.index % block_size - trained.first,
            candidates,
            labels,
            losses.weights,
            trained.gather(previous_ids),
        )

    def _forward(self, layout: BlockLayout, features: Tensor, attention: str) -> Tensor:
        """Runs the drafter on all queries; returns its last hidden states [B * R, D]."""
        with torch.no_grad():
            noise_embeds = self.frozen_target.embed(layout.token_ids)
        # torch.compile decides by itself what to recompute.
        with lean_mlps(self.drafter) if self.network is self.drafter else nullcontext():
            output = self.network(
                noise_embeds=noise_embeds,
                context_hidden_states=features,
                position_ids=layout.position_ids,
                attention_mask=layout.attention_mask,
                attn_implementation=attention,
            )
        return output.last_hidden_state.flatten(0, 1)

    def attention(self, device: torch.device) -> str:
        """Returns the name of the attention to train with: flex attention on CUDA, else blockwise.

        Both skip unseen keys. Flex attention has no kernels for dropout or narrow heads; such a drafter uses blockwise
        attention on CUDA too.
        """
        has_kernels = not self.config.attention_dropout and self.config.head_dim >= 16
        return FLEX if device.type == "cuda" and has_kernels else BLOCKWISE


def _states_after(causal_head: Any, token_ids: Tensor) -> Tensor:
    """Runs a causal head over the tokens [G, P] of all blocks; returns its state after each of them, [G, P, H]."""
    # Under autocast, matrix products would return bf16 while the first state has the weights' dtype.
    with torch.autocast(token_ids.device.type, enabled=False):
        inputs = causal_head.inputs(token_ids)
        state = inputs.new_zeros(len(token_ids), causal_head.state_size)
        states = []
        for inputs_of_token in inputs.unbind(dim=1):
            state = causal_head.read(inputs_of_token, state)
            states.append(state)
    return torch.stack(states, dim=1)


class _TrainedPositions:
    """Indices [M] into the flattened positions [G * N] of all blocks.

    They are those of the trained positions, then index 0 repeated until M is a multiple of `ROW_STEP`.
    `is_real` is False for the repeats.
    """

    def __init__(self, is_trained: Tensor, first: int) -> None:  # bool [G, N], and the first position that proposes
        self.shape = is_trained.shape
        self.first = first
        self.proposals = is_trained[:, first:]  # [G, P]
        index = is_trained.flatten().nonzero().flatten()
        num_filled = -len(index) % ROW_STEP
        is_real = torch.ones_like(index, dtype=torch.bool)
        self.is_real = functional.pad(is_real, (0, num_filled))  # [M]
        self.index = functional.pad(index, (0, num_filled))  # [M], indices into the flattened [G, N]

    def gather(self, values: Tensor) -> Tensor:
        """Returns the entries of `values` at the M indices.

        `values` has one entry per position, in any shape. The padding repeats the first entry.
        """
        return values.flatten()[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """Returns a tensor [G, P] with `values` [M] at the trained positions and zeros elsewhere."""
        grid = values.new_zeros(self.shape)
        real = self.index[self.is_real]
        grid.view(-1)[real] = values[self.is_real]
        return grid[:, self.first :]
