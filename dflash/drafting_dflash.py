"""Where proposals come from: one forward of the drafter per block or, where it pays, the text's own past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .conversation_dflash import Context, Conversation
from .lookup_dflash import PromptLookup
from .masks_dflash import decoding_visibility
from .rows_dflash import Row
from .target_dflash import TappedTarget
from .verification_dflash import PositionNoise, Proposals


logger = logging.get_logger(__name__)

# Verify steps without a single accepted proposal after which the drafter is called inactive.
INACTIVE_STEPS = 32


class Proposer:
    """`propose(rows, anchors, num_wanted)`: what the next verify step is to judge.

    Args:
        drafter: A `DFlashDraftModel`.
        tapped: Its target.
        memory: The caches; the drafter reads the context that waits there.
        block_size: Tokens in a block, anchor included.
        lookup: Competes with the drafter; `None`: the drafter alone.
        noise: For drafters whose proposals are drawn; `None`: they propose their likeliest path.
        temperature: Of the draws.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        tapped: TappedTarget,
        memory: Conversation,
        block_size: int,
        lookup: PromptLookup | None = None,
        noise: PositionNoise | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.drafter = drafter
        self.tapped = tapped
        self.memory = memory
        self.block_size = block_size
        self.lookup = lookup
        self.noise = noise
        self.temperature = temperature
        self._num_steps = self._num_accepted = 0

    def propose(self, rows: list[Row], anchors: torch.Tensor, num_wanted: int) -> Proposals:
        """At most `num_wanted` proposals [B, n] behind the anchors [B, 1] of all rows."""
        if not num_wanted:
            return Proposals(anchors[:, :0])
        found = self.lookup.propose(rows) if self.lookup is not None else {}
        if len(found) == len(rows):
            return Proposals(anchors.new_tensor(list(found.values())), looked_up=tuple(found)).first(num_wanted)
        proposals = self._draft(rows, anchors).first(num_wanted)
        return proposals.with_lookups(found) if found else proposals

    def record(self, proposals: Proposals, num_accepted: Sequence[int]) -> None:
        """Takes note of how many of each row's proposals stood."""
        for place, count in enumerate(num_accepted):
            self._num_accepted += count
            if self.lookup is not None:
                self.lookup.record(place in proposals.looked_up, count)
        self._num_steps += 1
        if self._num_steps == INACTIVE_STEPS and not self._num_accepted:
            _warn_inactive(self.drafter, self.tapped.target)

    def _draft(self, rows: list[Row], anchors: torch.Tensor) -> Proposals:
        """What the drafter proposes behind the anchors: one forward, after which its cache holds context alone.

        A drafter whose positions know nothing of each other proposes its argmax, at a temperature too: letting the target
        sample accepts more than positions that are sampled independently, at the same law (`verification_dflash`).
        """
        context, cache = self.memory.context, self.memory.draft_cache
        if context is None:
            raise RuntimeError("The drafter has read all that the target computed: nothing stands before the anchor.")
        masks = anchors.new_full((len(anchors), self.block_size - 1), self.drafter.config.mask_token_id)
        hidden_states = self.drafter(
            noise_embeds=self.tapped.embed(torch.cat([anchors, masks], dim=1)),
            context_hidden_states=context.features,
            past_key_values=cache,
            **self._placed(context),
        ).last_hidden_state
        cache.rollback(self.block_size)
        self.memory.mark_read()
        propose: Any = self.drafter.propose
        proposing = hidden_states[:, 0 if self.drafter.config.sample_from_anchor else 1 :]
        if self.noise is None:
            return propose(proposing, anchors, self.tapped.head)
        uniforms = torch.stack([self.noise.fresh(row.index, proposing.shape[1]) for row in rows])
        return propose(proposing, anchors, self.tapped.head, self.temperature, uniforms)

    def _placed(self, context: Context) -> dict[str, Any]:
        """Positions and mask of rows of different lengths; a single row's follow from its cache."""
        cache = self.memory.draft_cache
        if not cache.is_ragged:
            return {}
        is_block = context.is_real.new_ones(len(context.num_real), self.block_size)
        slots = cache.plan(
            torch.cat([context.is_real, is_block], dim=1), [count + self.block_size for count in context.num_real]
        )
        num_keys = cache.get_seq_length() + slots.shape[1]
        visible = decoding_visibility(self.drafter.config, slots[:, -self.block_size :], num_keys)
        return {"position_ids": slots, "attention_mask": visible}


def _warn_inactive(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    logger.warning(
        f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but nothing is "
        f"gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another target than "
        f"{target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template it was trained with "
        "(thinking on or off), or its target_layer_ids or mask_token_id are wrong."
    )
