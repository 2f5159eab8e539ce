"""The target as the loop sees it: embedding rows, a forward that also gives the tapped layers' states, and the head.

Works on any decoder-only `AutoModelForCausalLM` of transformers 4.57 and 5.x whose attention is softmax over cached
keys, whole or spread over devices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .cache_dflash import PreallocatedCache
from .masks_dflash import additive_mask, causal_visibility
from .validation_dflash import check_pair, decoder_layers


class TappedTarget:
    """A target and the layers of it that a drafter reads.

    Args:
        target: The model whose text is wanted.
        drafter: A `DFlashDraftModel` trained for it.

    Raises:
        ValueError: if the two do not belong together, or the target is of a kind that cannot be verified exactly.
    """

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        check_pair(target, drafter)
        self.target = target
        self.num_layers = len(decoder_layers(target))
        self._taps = [decoder_layers(target)[i] for i in drafter.config.target_layer_ids]
        self._drafter_device = drafter.device
        self._drafter_dtype = drafter.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embedding rows of token_ids [B, N], on the drafter's device: [B, N, D]."""
        return self.target.get_input_embeddings()(token_ids).to(self._drafter_device)

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's head over the drafter's hidden states [B, N, D]: logits [B, N, V]."""
        head = self.target.get_output_embeddings()
        weight = next(head.parameters(), None)
        device, dtype = hidden_states.device, self.target.dtype
        if weight is not None:  # a quantised head may show none, or one that is not floating point
            dtype = weight.dtype if weight.is_floating_point() else dtype
            # Offloaded weights are on "meta" between calls; their hooks fetch them and move the input.
            device = device if weight.device.type == "meta" else weight.device
        return head(hidden_states.to(device, dtype))

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        num_logits: int,
        is_real: torch.Tensor | None = None,
        num_real: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs token_ids [B, S] behind `cache`; their keys and values are appended to it.

        In a ragged cache, is_real [B, S] says which columns are tokens and `num_real` how many there are in each row;
        default: all.

        Returns the logits of the last `num_logits` columns [B, num_logits, V] and the context features of all
        [B, S, L * D], on the drafter's device and in its dtype.
        """
        placed: dict[str, Any] = {}
        if cache.is_ragged:
            is_real = torch.ones_like(token_ids, dtype=torch.bool) if is_real is None else is_real
            slots = cache.plan(is_real, [token_ids.shape[1]] * len(token_ids) if num_real is None else num_real)
            placed = {"position_ids": slots, "attention_mask": self._masks(slots, cache.get_seq_length())}
        with _tapped(self._taps) as states:
            output = self.target(
                input_ids=token_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits,
                return_dict=True,
                **placed,
            )
        features = torch.cat([state.to(self._drafter_device, self._drafter_dtype) for state in states], dim=-1)
        return output.logits[:, -num_logits:], features

    def _masks(self, slots: torch.Tensor, num_used: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """What rows at `slots` [B, S] see of a ragged cache: an additive mask [B, 1, S, keys], by layer type where they differ."""
        config = self.target.config.get_text_config(decoder=True)
        keys = torch.arange(num_used + slots.shape[1], device=slots.device)[None]  # [1, K]

        def mask(window: int | None) -> torch.Tensor:
            return additive_mask(causal_visibility(slots, keys, window)[:, None], self.target.dtype)

        window = getattr(config, "sliding_window", None)
        types = set(getattr(config, "layer_types", None) or ())
        if types == {"full_attention", "sliding_attention"}:
            return {"full_attention": mask(None), "sliding_attention": mask(window)}
        return mask(None if types == {"full_attention"} else window)


@contextmanager
def _tapped(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The outputs of `layers` in the one forward that this thread runs inside the `with`.

    Hooks stand for that forward alone, so a generator that is dropped half-way leaves none behind, and they listen to
    this thread alone, so two threads may generate on one target.
    """
    states: list[torch.Tensor] = [torch.empty(0)] * len(layers)
    thread = threading.get_ident()

    def keep(slot: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                states[slot] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layer.register_forward_hook(keep(slot)) for slot, layer in enumerate(layers)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
