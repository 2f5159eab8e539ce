"""The frozen target's answer to a batch: the features that the drafter reads and, for some losses, the last hidden states.

The target runs without a cache and computes at most one column of logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.drafting_dflash import embed
from dflash.model.targets_dflash import LINEAR_TYPES, Layout, check_pair, decoder_layers, head

from .batches import Batch
from .layout import packed_causal_mask, positions_in_documents


# Attention that takes a 4-D mask, and so documents side by side.
PACKING_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of a target for a batch, on the drafter's device."""

    features: torch.Tensor  # [B, S, L * D], the tapped layers' states, concatenated in their order
    last_hidden_state: torch.Tensor | None = None  # [B, S, D], the head's input, where it was asked for


def can_pack(target: PreTrainedModel) -> bool:
    """Whether documents may stand side by side: a recurrent state and some attentions would go on into the next one."""
    config = target.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ())
    return not types - {"full_attention", "sliding_attention"} and config._attn_implementation in PACKING_ATTENTION


class FrozenTarget:
    """A frozen target that reads whole batches, and its drafter."""

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        check_pair(target, drafter)
        self.target: Any = target
        self.drafter: Any = drafter
        self.layout = Layout.of(target, drafter.config.target_layer_ids)
        target.requires_grad_(False)
        self.config = target.config.get_text_config(decoder=True)
        layers = decoder_layers(target)
        self._taps = [layers[i] for i in drafter.config.target_layer_ids]
        self._decoder = next(m for m in target.modules() if getattr(m, "layers", None) is layers)
        self._is_head_known = False

    @torch.no_grad()
    def __call__(self, batch: Batch, wants_states: bool = False) -> TargetStates:
        """The states of every column of `batch`; each of its documents is read as if it stood alone.

        Raises:
            ValueError: for documents side by side that this target cannot keep apart, or if the last hidden states are wanted
                and `logits` does not make the target's logits of them.
        """
        batch, target = batch.to(self.target.device), self.target
        placed = self._placed(batch.document_ids)
        if getattr(self.config, "num_kv_shared_layers", 0):  # such layers read their keys from a cache
            num_sequences, length = batch.input_ids.shape
            cache = PreallocatedCache(len(decoder_layers(target)), length, num_sequences)
            placed[self.layout.cache_name] = cache
        last = torch.tensor([batch.input_ids.shape[1] - 1])  # as a number, Gemma 4 would skip the other columns
        read = [*self._taps, self._decoder]
        with _outputs_of(read) as outputs:
            how: dict[str, Any] = {"logits_to_keep": last, "use_cache": self.layout.cache_name in placed}
            logits = target(input_ids=batch.input_ids, return_dict=True, **how, **placed).logits[:, -1]
        *states, last_hidden_state = (outputs[module].to(self.drafter.device) for module in read)
        features = torch.cat([state.to(self.drafter.dtype) for state in states], dim=-1)
        if not wants_states:
            return TargetStates(features)
        self._check_head(last_hidden_state[:, -1], logits)
        return TargetStates(features, last_hidden_state)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """The target's head over states [..., D]."""
        return head(self.target, states)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., D] of token_ids [...] by the target, as the drafter reads them, on its device."""
        return embed(self.target, self.drafter, token_ids)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's logits [M, V] of its last states [M, D]."""
        logits, config = self.head(states), self.config
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _placed(self, document_ids: torch.Tensor) -> dict[str, Any]:
        """Positions and masks of documents side by side; none where each stands alone, for padding follows it."""
        if not (document_ids > 0).any():
            return {}
        types = set(getattr(self.config, "layer_types", None) or ())
        if not can_pack(self.target):
            linear = sorted(types & set(LINEAR_TYPES))
            raise ValueError(
                f"{type(self.target).__name__} (attn_implementation={self.config._attn_implementation!r}"
                f"{', layers of type ' + ', '.join(linear) if linear else ''}) cannot keep documents of one row apart: leave "
                "pack_length out, or load it with attn_implementation='sdpa' if it has attention layers only."
            )
        window = getattr(self.config, "sliding_window", None)
        by_type = {
            name: packed_causal_mask(document_ids, window if name == "sliding_attention" else None, self.target.dtype)
            for name in types or {"sliding_attention"}  # without types, a window is every layer's
        }
        mask: Any = by_type if len(types) > 1 else next(iter(by_type.values()))
        return {"position_ids": positions_in_documents(document_ids), "attention_mask": mask}

    def _check_head(self, states: torch.Tensor, logits: torch.Tensor) -> None:
        """Refuses, once, a family whose forward does more to its logits: its drafters would learn something else."""
        if self._is_head_known:
            return
        ours = self.logits(states).float()
        error = (ours - logits.to(ours.device).float()).abs().max()
        if error > 0.05 * logits.float().std():
            differ = f"are not its head's over the last hidden state (they differ by {error.item():.3g})"
            name = type(self.target).__name__
            raise ValueError(f"The logits of {name} {differ}: train with loss='ce', which does not read them.")
        self._is_head_known = True


@contextmanager
def _outputs_of(modules: list[nn.Module]) -> Iterator[dict[nn.Module, torch.Tensor]]:
    """The first output of each of `modules` in the forward inside the `with`."""
    outputs: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = output if isinstance(output, torch.Tensor) else output[0]

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
