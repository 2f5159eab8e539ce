"""The target as the loop sees it: embedding rows, a forward that also gives the tapped layers' states, and the head.

Works on decoder-only `AutoModelForCausalLM`s of transformers 4.57 and 5.x whose attention is softmax over cached keys,
on 5.x also on those that mix it with linear layers, whole or spread over devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .attention_dflash import sharing_keys
from .cache_dflash import PreallocatedCache
from .compilation_dflash import SINGLE_STEPS, CompiledPair
from .masks_dflash import additive_mask, causal_visibility, tree_visibility
from .recurrent_dflash import LINEAR_TYPES, HybridCache, linear_mixers
from .trees_dflash import DraftTree
from .validation_dflash import check_pair, decoder_layers
from .verification_dflash import Verdict


class TappedTarget:
    """A target and the layers of it that a drafter reads.

    Args:
        target: The model whose text is wanted.
        drafter: A `DFlashDraftModel` trained for it.
        prompt_inputs: What the forward of a single prompt gets beside its ids: images.
        compiled: Runs verify steps; `None`: they run eagerly.

    Raises:
        ValueError: if the two do not belong together, or the target is of a kind that cannot be verified exactly.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompt_inputs: Mapping[str, Any] | None = None,
        compiled: CompiledPair | None = None,
    ) -> None:
        check_pair(target, drafter)
        self.compiled = compiled
        self.target = target
        self.drafter = drafter
        self.num_layers = len(decoder_layers(target))
        self._taps = [decoder_layers(target)[i] for i in drafter.config.target_layer_ids]
        self._mixers = linear_mixers(decoder_layers(target), self._layer_types())
        self._prompt_inputs = dict(prompt_inputs or {})
        # Where a model of images keeps how far the positions behind them lag behind the number of tokens.
        self._rope: Any = next((module for module in target.modules() if hasattr(module, "rope_deltas")), None)
        self._lag = 0
        self._shares_keys = bool(getattr(target.config.get_text_config(decoder=True), "num_kv_shared_layers", 0))
        self._drafter_device = drafter.device
        self._drafter_dtype = drafter.dtype

    def _layer_types(self) -> list[str]:
        return list(getattr(self.target.config.get_text_config(decoder=True), "layer_types", None) or ())

    def new_cache(self, capacity: int, num_rows: int = 1) -> PreallocatedCache:
        """An empty cache of the kind that the target needs, with room for `capacity` positions at first."""
        if self._mixers:
            return HybridCache(self._mixers, self.num_layers, capacity, num_rows)
        return PreallocatedCache(self.num_layers, capacity, num_rows)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embedding rows of token_ids [B, N], on the drafter's device: [B, N, D]."""
        embed: Any = self.drafter.embed  # a drafter may scale them
        return embed(token_ids, self.target.get_input_embeddings()).to(self._drafter_device)

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
        tree: DraftTree | None = None,
        unread: Verdict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs token_ids [B, S] behind `cache`; their keys and values are appended to it.

        In a ragged cache, is_real [B, S] says which columns are tokens and `num_real` how many there are in each row;
        default: all. With a `tree` the columns of the single row are its anchor and nodes.

        With an `unread` verdict on the last columns in `cache` these run behind what of them stands, and the cache's
        lengths stay as they are; raises NotCompiledError where that cannot be done.

        Returns the logits of the last `num_logits` columns [B, num_logits, V] and the context features of all
        [B, S, L * D], on the drafter's device and in its dtype. If it asks for all logits, all columns can be rolled
        back; else none, on a target with linear layers.
        """
        width, device = token_ids.shape[1], token_ids.device
        shape = None if tree is None else (tree.ancestors().to(device), torch.tensor(tree.depths, device=device))
        # A prompt's forward, which says what is padding, has a width of its own; it also gives the cache its storage.
        if self.compiled is None or is_real is not None or not cache.get_seq_length():
            return self._forward_eagerly(token_ids, cache, num_logits, is_real, num_real, shape)
        pair = self.compiled
        pair.num_steps += 1
        pair.num_single_steps += width == 1
        kind = f"a forward over {'one column' if width == 1 else 'columns'} of {'one row' if len(token_ids) == 1 else 'rows'}"

        def compiled() -> tuple[torch.Tensor, torch.Tensor]:
            num_rejected = None if unread is None else unread.num_rejected
            return pair.verify(self.target, self.drafter, token_ids, cache, shape, num_rejected)

        def eagerly() -> tuple[torch.Tensor, torch.Tensor]:
            return self._forward_eagerly(token_ids, cache, num_logits, None, None, shape)

        if unread is not None:
            return pair.ahead(kind, self.target, self.drafter, compiled)
        if width == 1 and pair.num_single_steps <= SINGLE_STEPS:
            return eagerly()
        return pair.either(
            kind, self.target, self.drafter, compiled, eagerly, lambda: cache.advance([width] * len(token_ids))
        )

    def _forward_eagerly(
        self,
        token_ids: torch.Tensor,
        cache: PreallocatedCache,
        num_logits: int,
        is_real: torch.Tensor | None,
        num_real: Sequence[int] | None,
        tree: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, start = token_ids.shape[1], cache.get_seq_length()
        placed: dict[str, Any] = {}
        if start == 0 and self._prompt_inputs:
            placed = self._prompt_inputs
        elif tree is not None:
            ancestors, depths = tree
            starts = torch.tensor([start], device=token_ids.device)

            def of_tree(window: int | None) -> torch.Tensor:
                return tree_visibility(starts, ancestors, depths, start + width, window)

            placed = {"position_ids": (start + depths)[None], "attention_mask": self._masks(of_tree)}
        elif cache.is_ragged:
            columns = torch.ones_like(token_ids, dtype=torch.bool) if is_real is None else is_real
            slots = cache.plan(columns, [token_ids.shape[1]] * len(token_ids) if num_real is None else num_real)
            keys = torch.arange(cache.get_seq_length() + width, device=slots.device)[None]  # [1, K]

            def of_rows(window: int | None) -> torch.Tensor:
                return causal_visibility(slots, keys, window)

            placed = {"position_ids": slots, "attention_mask": self._masks(of_rows, is_real)}
        elif self._rope is not None:  # said, because the model would take the lag of whatever prompt it saw last
            places = torch.arange(start, start + width, device=token_ids.device)[None]
            placed = {"position_ids": places + self._lag}
        recording: Any = nullcontext()
        if isinstance(cache, HybridCache):
            recording = cache.recording(width if num_logits == width else 0)
        # A prompt is long itself: its mask would be repeated instead, and that is longer than the keys.
        attending: Any = sharing_keys(self.target) if start and num_logits == width > 1 else nullcontext()
        with recording, attending, _Taps(self._taps, self._drafter_device, self._drafter_dtype) as taps:
            output = self.target(
                input_ids=token_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=self._logits_to_keep(num_logits, width),
                return_dict=True,
                **placed,
            )
        if placed is self._prompt_inputs and self._rope is not None:
            self._lag = self._find_lag(width)
        return output.logits[:, -num_logits:], taps.features

    def _find_lag(self, width: int) -> int:
        # Positions are given where `generate` has prepared them (transformers 5), else the model has found them itself.
        position_ids = self._prompt_inputs.get("position_ids")  # [3, 1, S], or [4, 1, S] with the text's own first
        if position_ids is None:
            return int(self._rope.rope_deltas)
        return int(position_ids[-3:].max()) + 1 - width

    def _logits_to_keep(self, num_logits: int, width: int) -> int | torch.Tensor:
        # Given as a number, Gemma 4 skips the other columns in the layers that share keys and values of earlier ones,
        # and the drafter reads all columns of every tapped layer.
        if self._shares_keys:
            return torch.arange(width - num_logits, width)
        return num_logits

    def _masks(
        self, visible: Callable[[int | None], torch.Tensor], is_real: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """`visible(window)` [B, S, keys] as an additive mask [B, 1, S, keys], by layer type where they differ.

        Linear layers see all that came before, but no padding: it stands on the left, of an empty cache, where a column
        of zeros leaves their state as it is.
        """
        window = getattr(self.target.config.get_text_config(decoder=True), "sliding_window", None)
        types = set(self._layer_types())

        def mask(width: int | None) -> torch.Tensor:
            return additive_mask(visible(width)[:, None], self.target.dtype)

        if len(types) > 1:
            masks: dict[str, torch.Tensor | None] = dict.fromkeys(types & set(LINEAR_TYPES), is_real)
            attention = types - set(LINEAR_TYPES)
            return masks | {name: mask(window if name == "sliding_attention" else None) for name in attention}
        return mask(None if types == {"full_attention"} else window)


class _Taps:
    """What `layers` put out in the one forward that this thread runs inside the `with`, side by side in `features`.

    A layer's output is copied as it comes and not held, so that a long prompt holds the tapped states once. Hooks stand for
    that forward alone, so a generator that is dropped half-way leaves none behind, and they listen to this thread alone,
    so two threads may generate on one target.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        self.layers = layers
        self.device, self.dtype = device, dtype
        self.features = torch.empty(0)  # [B, S, L * D] once the forward has run

    def __enter__(self) -> _Taps:
        thread = threading.get_ident()

        def keep(slot: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if threading.get_ident() == thread:
                    self._keep(slot, output[0] if isinstance(output, tuple) else output)

            hook.is_tap = True  # type: ignore[attr-defined]  # gone before another forward: no change of the model
            return hook

        self._handles = [layer.register_forward_hook(keep(slot)) for slot, layer in enumerate(self.layers)]
        return self

    def _keep(self, slot: int, states: torch.Tensor) -> None:
        *shape, size = states.shape
        if not slot:  # the first layer of them, so the first to run
            self.features = torch.empty(*shape, len(self.layers) * size, device=self.device, dtype=self.dtype)
        self.features[..., slot * size : (slot + 1) * size] = states

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
