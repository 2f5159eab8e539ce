"""The caches of texts that have ended, for prompts that go on from them, as the next turn of a conversation does."""

from __future__ import annotations

import threading
from itertools import takewhile
from typing import Any

import torch

from dflash.model.decoding_dflash import Conversation

from .state import own_part, state_of_modules


SAMPLED_VALUES = 16  # of each tensor, by which changed weights are noticed


class Conversations:
    """The caches of texts that have ended, for prompts that go on from them. The least recently used are dropped first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: list[Conversation] = []  # the last used one last

    @property
    def num_positions(self) -> int:
        """The positions of all their texts."""
        return sum(len(conversation.token_ids) for conversation in self._kept)

    def find(self, prompt_ids: list[int]) -> Conversation | None:
        """The one that shares most with a prompt, if that is half of its text or more."""

        def num_shared(conversation: Conversation) -> int:
            pairs = zip(conversation.token_ids, prompt_ids, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        best = max(self._kept, key=num_shared, default=None)
        if best is None or 2 * num_shared(best) < len(best.token_ids):
            return None
        return best

    def take(self, conversation: Conversation) -> Conversation:
        """Gives one away: its caches are about to change."""
        self._kept.remove(conversation)
        return conversation

    def add(self, conversation: Conversation) -> None:
        """Keeps the caches of a text."""
        self._kept.append(conversation)
        self.drop_to(self.most)

    def drop_to(self, most: int) -> None:
        """Keeps at most this many."""
        self._kept = self._kept[max(0, len(self._kept) - most) :]

    def __len__(self) -> int:
        return len(self._kept)


class KeptConversations:
    """The conversations that requests of a drafter and a target go on from, by themselves.

    They are dropped when a model has changed: a server's models do not, and a trainer's do.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._conversations = Conversations(most)
        self._weights: Any = None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return KeptConversations, (self._conversations.most,)  # a copy of a model begins without any

    def take(self, prompt_ids: list[int], *models: Any) -> tuple[Conversation, Any]:
        """The conversation that a prompt goes on from, for this request alone, or a new one; and the state of the models."""
        weights = _sample(*models)
        with self._lock:
            if weights is None or weights != self._weights:
                self._conversations.drop_to(0)
                self._weights = weights
            kept = self._conversations.find(prompt_ids)
            conversation = Conversation() if kept is None else self._conversations.take(kept)
        return conversation, weights

    def give(self, conversation: Conversation, begun: Any, *models: Any) -> None:
        """Keeps the conversation of a text that has ended, unless models are not as they were when it was taken (`begun`)."""
        weights = _sample(*models)
        with self._lock:
            is_known = weights is not None and begun == weights == self._weights
            if conversation.token_ids and is_known:
                self._conversations.add(conversation)


def _sample(*models: Any) -> list[Any] | None:
    """The state of the modules of models, how often their weights were written, and some values; `None`: it cannot be told.

    A trained or exchanged weight changes it, and an adapter or a hook that is added, scaled, switched on or switched off. What
    is written through `weight.data` is no counted write, and changes it where one of the values is another.
    """
    try:
        state = []
        samples = []
        for model in models:
            state += state_of_modules(model)
            for weight in model.parameters():
                if weight.is_meta:  # offloaded between calls
                    continue
                num_writes = None if weight.is_inference() else weight._version
                state.append(num_writes)
                values = own_part(weight.detach()).flatten()
                step = max(1, len(values) // SAMPLED_VALUES)
                samples.append(values[::step][:SAMPLED_VALUES].float())  # some devices have no float64
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for sample in samples:
            by_device.setdefault(sample.device, []).append(sample)
        return [state, [torch.cat(parts).tolist() for parts in by_device.values()]]
    except Exception:  # of any type: weights of a quantiser, or of a device that lacks memory, raise it
        return None
