"""One decode under a clock: plain `target.generate` and DFlash, measured alike.

The loop knows no clock; here `next` is timed from outside. What the caller does with each piece of text (printing it) is
outside the clock in both. It knows nothing about text, data sets or tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.generation_dflash import Block, generate_blocks
from dflash.validation_dflash import read_prompt


@dataclass(frozen=True)
class TimedRun:
    """What one decode wrote and how long it took.

    Attributes:
        token_ids: The new tokens, prompt excluded.
        seconds: From the call to the last token, the prompt's forward included.
        seconds_to_first_token: From the call to the first token.
        num_forwards: Forwards of the target, the prompt's included.
        acceptance_lengths: Per verify step, accepted proposals + 1, before stop and length cuts; empty for plain decoding.
    """

    token_ids: list[int]
    seconds: float
    seconds_to_first_token: float
    num_forwards: int
    acceptance_lengths: list[int]

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all seconds, the prompt's forward included."""
        return len(self.token_ids) / self.seconds

    @property
    def tau(self) -> float:
        """Mean acceptance length, as the DFlash paper and the engines count it; NaN without a verify step."""
        steps = len(self.acceptance_lengths)
        return sum(self.acceptance_lengths) / steps if steps else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Tokens kept, without the prefill's, per forward of the target behind the prefill; NaN if there is none."""
        steps = self.num_forwards - 1
        return (len(self.token_ids) - 1) / steps if steps else float("nan")


def timed_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor],
    on_tokens: Callable[[list[int]], None] | None = None,
    **kwargs: Any,
) -> TimedRun:
    """Runs `target.generate` under the clock; with `prompt_lookup_num_tokens` or `assistant_model` those too.

    Args:
        target: Any causal language model.
        input_ids: Token ids [1, S], or what a tokenizer returns.
        on_tokens: Called with new tokens as they come; its own time is not counted.
        kwargs: Those of `target.generate`.
    """
    prompt_ids, attention_mask = read_prompt(input_ids)
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    with _counted_forwards(target) as forwards:
        clock = _StreamClock(on_tokens)
        sequences = generate(
            prompt_ids.to(target.device),
            attention_mask=None if attention_mask is None else attention_mask.to(target.device),
            streamer=clock,
            **kwargs,
        )
        token_ids = sequences[0, prompt_ids.shape[1] :].tolist()  # waits for the device
        seconds = time.perf_counter() - clock.began - clock.seconds_outside
    return TimedRun(token_ids, seconds, clock.seconds_to_first_token, len(forwards), [])


def timed_blocks(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor],
    on_block: Callable[[Block], None] | None = None,
    **kwargs: Any,
) -> TimedRun:
    """Runs [`generate_blocks`] to its end under the clock.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only causal language model.
        input_ids: Token ids [1, S], or what a tokenizer returns.
        on_block: Called with each block as it commits; its own time is not counted.
        kwargs: Those of [`generate_blocks`].
    """
    token_ids: list[int] = []
    lengths: list[int] = []
    seconds = seconds_to_first_token = 0.0
    with _counted_forwards(target) as forwards:
        began = time.perf_counter()
        for block in generate_blocks(drafter, target, input_ids, **kwargs):
            seconds += time.perf_counter() - began
            token_ids += block.token_ids
            if block.is_prefill:
                seconds_to_first_token = seconds
            else:
                lengths.append(block.acceptance_length)
            if on_block is not None:
                on_block(block)
            began = time.perf_counter()
    return TimedRun(token_ids, seconds, seconds_to_first_token, len(forwards), lengths)


class _StreamClock:
    """A `transformers` streamer that notes when the first token came and how long the listener took."""

    def __init__(self, on_tokens: Callable[[list[int]], None] | None) -> None:
        self.on_tokens = on_tokens
        self.seconds_outside = self.seconds_to_first_token = 0.0
        self._has_prompt = False
        self.began = time.perf_counter()

    def put(self, token_ids: torch.Tensor) -> None:
        """The prompt at first, then new tokens."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        now = time.perf_counter()
        self.seconds_to_first_token = self.seconds_to_first_token or now - self.began
        if self.on_tokens is not None:
            self.on_tokens(token_ids.flatten().tolist())
            self.seconds_outside += time.perf_counter() - now

    def end(self) -> None:
        """Nothing is held back."""


@contextmanager
def _counted_forwards(target: PreTrainedModel) -> Iterator[list[None]]:
    """A list that grows by one with each forward of `target` inside the `with`."""
    forwards: list[None] = []
    handle = target.register_forward_hook(lambda *args: forwards.append(None))
    try:
        yield forwards
    finally:
        handle.remove()
