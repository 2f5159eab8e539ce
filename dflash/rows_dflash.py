"""The rows of a batch: each one's prompt, what was written behind it, and where its text stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


# Criteria that take a text wherever it lies. On the host they do not wait for what the device is doing.
HOST_CRITERIA = (MaxTimeCriteria, StopStringCriteria)


@dataclass
class Row:
    """A prompt of the batch and what was written behind it."""

    index: int
    prompt_ids: torch.Tensor  # [S], with its padding
    new_ids: list[int] = field(default_factory=list)
    is_done: bool = False

    def text(self, more_ids: torch.Tensor) -> torch.Tensor:
        """Prompt, new tokens and `more_ids`, [1, S + new + more], as plain `generate` shows them to processors."""
        return torch.cat([self.prompt_ids, self.prompt_ids.new_tensor(self.new_ids), more_ids])[None]

    @cached_property
    def _prompt_on_host(self) -> torch.Tensor:
        return self.prompt_ids.cpu()

    def text_on_host(self) -> torch.Tensor:
        """Prompt and new tokens, [1, S + new], on the CPU."""
        return torch.cat([self._prompt_on_host, torch.tensor(self.new_ids, dtype=self.prompt_ids.dtype)])[None]


def token_limit(criteria: StoppingCriteriaList, prompt_length: int) -> int:
    """How many new tokens the criteria allow; a caller's own length criterion stands in place of the config's."""
    return min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)) - prompt_length


def make_cutter(criteria: StoppingCriteriaList, max_new_tokens: int) -> Callable[[Row, list[int]], list[int]]:
    """`cut(row, token_ids)`: the new tokens up to where the text stops. They are written into the row.

    A stop can lie anywhere inside a block, so every prefix is asked about, as plain `generate` does.
    """
    stop_ids: set[int] = set()
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            stop_ids.update(criterion.eos_token_id.tolist())
    on_host = StoppingCriteriaList(c for c in criteria if type(c) in HOST_CRITERIA)
    others = StoppingCriteriaList(
        c
        for c in criteria
        if type(c) not in HOST_CRITERIA and not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))
    )

    def cut(row: Row, token_ids: list[int]) -> list[int]:
        for count, token_id in enumerate(token_ids, start=1):
            row.new_ids.append(token_id)
            row.is_done = token_id in stop_ids or len(row.new_ids) == max_new_tokens
            if on_host:
                row.is_done |= bool(on_host(row.text_on_host(), None).all())
            if others:
                row.is_done |= bool(others(row.text(row.prompt_ids[:0]), None).all())
            if row.is_done:
                return token_ids[:count]
        return token_ids

    return cut
