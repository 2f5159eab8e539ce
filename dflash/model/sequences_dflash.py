"""The sequences of a batch, and where each of them stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria


# Criteria of transformers that accept a text on the CPU, so that the host does not wait for the device.
HOST_CRITERIA = (MaxTimeCriteria, StopStringCriteria)


@dataclass
class TextSequence:
    """A prompt of the batch and the tokens generated after it."""

    index: int  # in the request's batch
    prompt_ids: torch.Tensor  # [S], with its padding
    new_ids: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def length(self) -> int:
        """Tokens of the prompt, with its padding, and after it."""
        return self.prompt_ids.shape[0] + len(self.new_ids)

    @cached_property
    def on_host(self) -> TextSequence:
        """This sequence with its prompt on the CPU. The list of new tokens is shared."""
        return replace(self, prompt_ids=self.prompt_ids.cpu())

    def text(self, more_ids: Sequence[int] = ()) -> torch.Tensor:
        """Prompt, new tokens and `more_ids`, [1, S + new + more], as `generate` passes them to processors."""
        new_ids = self.prompt_ids.new_tensor([*self.new_ids, *more_ids])
        return torch.cat([self.prompt_ids, new_ids])[None]


def make_cutter(criteria: StoppingCriteriaList, max_new_tokens: int) -> Callable[[TextSequence, list[int]], list[int]]:
    """Returns `cut(sequence, token_ids)`, which commits tokens one by one, as `generate` does, until the text stops.

    `cut` appends to `sequence.new_ids`, sets `sequence.is_done`, and returns the tokens that it has appended. Stop tokens and
    the number of new tokens are compared on the host; only further criteria are called, after each token.
    """
    stop_ids: set[int] = set()
    host_criteria = StoppingCriteriaList()
    device_criteria = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            stop_ids.update(criterion.eos_token_id.tolist())
        elif type(criterion) in HOST_CRITERIA:
            host_criteria.append(criterion)
        elif type(criterion) is not MaxLengthCriteria:  # `max_new_tokens` says the same
            device_criteria.append(criterion)

    def stops(sequence: TextSequence) -> bool:
        is_stopped = sequence.new_ids[-1] in stop_ids or len(sequence.new_ids) == max_new_tokens
        # All criteria are called, as in `generate`: some keep a state of the text.
        if host_criteria:
            is_stopped |= bool(host_criteria(sequence.on_host.text(), None).all())
        if device_criteria:
            is_stopped |= bool(device_criteria(sequence.text(), None).all())
        return is_stopped

    def cut(sequence: TextSequence, token_ids: list[int]) -> list[int]:
        for count, token_id in enumerate(token_ids, start=1):
            sequence.new_ids.append(token_id)
            sequence.is_done = stops(sequence)
            if sequence.is_done:
                return token_ids[:count]
        return token_ids

    return cut
