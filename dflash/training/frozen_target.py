"""Runs the frozen target over a batch: features for the drafter and, for some losses, the last hidden states.

The target runs without a cache, unless its layers share keys, and computes the logits of the last column only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.drafting_dflash import embed
from dflash.model.targets_dflash import (
    LINEAR_TYPES,
    Layout,
    check_pair,
    decoder_layers,
    head,
    layer_types,
    tapped,
    text_config,
)

from .batches import Batch
from .layout import packed_causal_mask, positions_in_documents
from .settings import Facts


# Attention implementations that accept a 4-D mask, by which packed documents do not see each other.
PACKING_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of a target for a batch, on the drafter's device."""

    features: Tensor  # [B, S, L * D], the states of the layers that the drafter reads, concatenated
    last_hidden_state: Tensor | None = None  # [B, S, D], the input of the target's head, if it was asked for


def can_pack(target: PreTrainedModel) -> bool:
    """Whether `target` can read packed documents. Recurrent layers and attention without 4-D masks would mix them."""
    is_attention = {*layer_types(target)} <= {"full_attention", "sliding_attention"}
    return is_attention and text_config(target)._attn_implementation in PACKING_ATTENTION


class FrozenTarget:
    """Runs a target over batches and returns the states that `drafter` reads. It freezes `target` in place.

    Raises:
        ValueError: if `drafter` does not belong to `target`.
    """

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        check_pair(target, drafter)
        target.requires_grad_(False)
        self.target: Any = target
        self.drafter: Any = drafter
        self.layout = Layout.of(target, drafter.config.target_layer_ids)
        self.config = text_config(target)
        self._layers = decoder_layers(target)
        taps = [self._layers[index] for index in drafter.config.target_layer_ids]
        owners = (module for module in target.modules() if getattr(module, "layers", None) is self._layers)
        self._read = [*taps, next(owners)]  # the modules whose outputs are the states
        self._is_head_known = False

    @torch.no_grad()
    def __call__(self, batch: Batch, wants_states: bool = False) -> TargetStates:
        """Returns the states of every column of `batch`, with the last hidden states if `wants_states`.

        Packed documents do not see each other.

        Raises:
            ValueError: for packed documents that this target cannot keep apart, or, with `wants_states`, if `logits`
                cannot compute the target's logits from its last hidden states.
        """
        batch = batch.to(self.target.device)
        options = self._masks(batch.document_ids)
        num_sequences, length = batch.input_ids.shape
        if self.layout.shares_keys:  # layers that share keys read them from a cache
            options[self.layout.cache_name] = PreallocatedCache(len(self._layers), length, num_sequences)
        with tapped(self._read) as outputs:
            logits = self.target(
                input_ids=batch.input_ids,
                # A tensor, because for an int Gemma 4 would skip the other columns.
                logits_to_keep=torch.tensor([length - 1]),
                use_cache=self.layout.shares_keys,
                return_dict=True,
                **options,
            ).logits[:, -1]
        *states, last_hidden_state = (output.to(self.drafter.device) for output in outputs)
        features = torch.cat(states, dim=-1).to(self.drafter.dtype)
        if not wants_states:
            return TargetStates(features)
        self._check_head(last_hidden_state[:, -1], logits)
        return TargetStates(features, last_hidden_state)

    def head(self, states: Tensor) -> Tensor:
        """Returns the output [..., V] of the target's language-model head for states [..., D], without scaling."""
        return head(self.target, states)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the target's embeddings [..., D] of token_ids [...], scaled for the drafter and on its device."""
        return embed(self.target, self.drafter, token_ids)

    def logits(self, states: Tensor) -> Tensor:
        """Returns the target's logits [M, V] of its last hidden states [M, D], scaled and capped as in its config."""
        logits, config = self.head(states), self.config
        factor = getattr(config, "logit_scale", 1.0)
        divisor = getattr(config, "logits_scaling", 1.0)
        logits = logits * factor / divisor
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _masks(self, document_ids: Tensor) -> Facts:
        """Returns the `position_ids` and `attention_mask` that keep packed documents apart; empty if none are packed.

        A document that is alone in its sequence needs no mask, because only padding follows it. ValueError if the
        target cannot keep documents apart.
        """
        if not (document_ids > 0).any():
            return {}
        types = {*layer_types(self.target)}
        if not can_pack(self.target):
            linear = sorted(types & set(LINEAR_TYPES))
            layers = f", layers of type {', '.join(linear)}" if linear else ""
            raise ValueError(
                f"{type(self.target).__name__} (attn_implementation={self.config._attn_implementation!r}{layers}) "
                "cannot keep packed documents apart: leave pack_length out, or load the target with "
                "attn_implementation='sdpa' if it has attention layers only."
            )
        window = getattr(self.config, "sliding_window", None)
        windows = {"full_attention": None, "sliding_attention": window}
        masks = {
            name: packed_causal_mask(document_ids, windows[name], self.target.dtype)
            for name in types or {"sliding_attention"}  # in a config without layer types, all layers have the window
        }
        mask: Any = masks if len(masks) > 1 else masks.popitem()[1]
        return {"position_ids": positions_in_documents(document_ids), "attention_mask": mask}

    def _check_head(self, states: Tensor, logits: Tensor) -> None:
        """Raises ValueError unless `logits` of states [B, D] gives the target's logits [B, V]. Checks only once.

        If a family's forward changes its logits in another way, the drafter would learn from wrong logits.
        """
        if self._is_head_known:
            return
        expected = logits.float()
        computed = self.logits(states).float()
        error = (computed - expected.to(states.device)).abs().max()
        if error > 0.05 * expected.std():
            raise ValueError(
                f"The logits of {type(self.target).__name__} differ from its head applied to the last hidden state (by "
                f"{error.item():.3g}): train with loss='ce', which does not read them."
            )
        self._is_head_known = True
