"""What a manager of many texts keeps of a request, and gives of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus


class Cancelled(Exception):
    """A request that was cancelled."""


@dataclass
class BatchOutput(GenerationOutput):
    """The output of one request: transformers' own, and how well its drafts were accepted.

    Attributes:
        acceptance_lengths (`list[int]`): Accepted proposals + 1, before cuts, of each verify step.
    """

    acceptance_lengths: list[int] = field(default_factory=list)

    def is_finished(self) -> bool:
        """Whether no token follows: the text is complete, or `error` says why not."""
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)

    def snapshot(self) -> BatchOutput:
        """A copy that later tokens do not change."""
        return replace(
            self,
            generated_tokens=list(self.generated_tokens),
            logprobs=list(self.logprobs),
            acceptance_lengths=list(self.acceptance_lengths),
        )


@dataclass(eq=False)
class Ticket:
    """A request on its way: waiting, reading its prompt, or a row of the batch."""

    number: int
    output: BatchOutput
    keywords: dict[str, Any]
    streaming: bool = False
    member: Any = None  # a `Member`, once its turn is near
    is_cancelled: bool = False


@dataclass
class ThreadStatus:
    """What servers look at.

    Attributes:
        fatal_error (`Exception`, *optional*): What has ended the manager's thread.
    """

    fatal_error: Exception | None = None


def as_prompt(input_ids: Any) -> list[int]:
    """The token ids of one prompt as a list."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"A prompt is {type(input_ids).__name__}: pass a list of token ids.") from error
    if ids.dim() == 0:
        raise ValueError(f"A prompt is the number {input_ids}: pass a list of prompts, each a list of token ids.")
    if ids.dim() > 1 and ids.shape[:-1].numel() != 1:
        raise ValueError(f"A prompt has the shape {list(ids.shape)}: pass one prompt a request.")
    prompt_ids: list[int] = ids.flatten().tolist()
    return prompt_ids
