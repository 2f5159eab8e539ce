"""Ways to answer a dialogue, turn by turn: plain decoding and DFlash both keep what they computed of the turns before.

It knows nothing about tasks and text: ids in, a continuation under a clock out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import PreTrainedModel

from dflash.model.decoding_dflash import Conversation

from .harness import OURS, PLAIN, VARIANTS, Method, decoding_methods
from .memory import PeakMemory
from .timing import TimedRun


# Called once for each dialogue; the first method is the one that the others are compared with.
Begin = Callable[[], dict[str, Method]]


@dataclass(frozen=True)
class Backend:
    """What answers, and what its figures depend on.

    Attributes:
        begin: Makes the methods of a dialogue.
        environment: Versions, hardware and the like.
        decoding: What else a reader has to know.
        memory: Watched while each method runs; `None` where it cannot be seen from here.
        max_prompt_tokens: The longest prompt that leaves room for the answer, `None` for any.
    """

    begin: Begin
    environment: dict[str, Any]
    decoding: dict[str, Any]
    memory: PeakMemory | None = None
    max_prompt_tokens: int | None = None


def pair_sessions(
    target: PreTrainedModel, drafter: PreTrainedModel, max_new_tokens: int, names: Sequence[str] | None = None
) -> Begin:
    """The methods of [`decoding_methods`], greedy; within a dialogue plain decoding and ours keep their caches.

    Were only one of the two to keep them, later turns would compare prompts and not decoders.
    """
    methods = decoding_methods(target, drafter, max_new_tokens, names)
    keeps = keeping_methods(target)

    def remembering(name: str) -> Method:
        if name not in keeps:
            return methods[name]
        if name == PLAIN:
            return PlainDialogue(target, methods[name])
        return partial(methods[name], conversation=Conversation())

    return lambda: {name: remembering(name) for name in methods}


def keeping_methods(target: PreTrainedModel) -> tuple[str, ...]:
    """The methods that keep their caches from turn to turn; none if plain decoding cannot."""
    return (PLAIN, OURS, *VARIANTS) if keeps_plain_cache(target) else ()


def keeps_plain_cache(target: PreTrainedModel) -> bool:
    """Whether a plain cache of `target` can go back to where two texts part: not with windows or recurrent layers."""
    layers = getattr(DynamicCache(config=target.config), "layers", [])
    return all(type(layer).__name__ == "DynamicLayer" for layer in layers)


class PlainDialogue:
    """`target.generate`, which computes of each further turn only what its cache does not hold."""

    def __init__(self, target: PreTrainedModel, method: Method) -> None:
        self._target = target
        self._method = method
        self._cache: Any = None
        self._held: list[int] = []

    def __call__(self, input_ids: torch.Tensor) -> TimedRun:
        """The continuation of input_ids [1, S], the whole dialogue so far."""
        run = self._method(input_ids, past_key_values=self._reopened(input_ids[0, :-1].tolist()))
        self._held = input_ids[0].tolist() + run.token_ids[:-1]
        return run

    def _reopened(self, wanted: list[int]) -> Any:
        """The cache as far as it and `wanted` are the same text, or a new one."""
        pairs = enumerate(zip(self._held, wanted, strict=False))
        shared = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(self._held), len(wanted)))
        surplus = 0 if self._cache is None else self._cache.get_seq_length() - shared
        if not shared or surplus < 0:
            self._cache = DynamicCache(config=self._target.config)
        elif surplus:
            self._cache.crop(-surplus)
        return self._cache
