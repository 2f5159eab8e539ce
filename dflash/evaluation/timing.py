"""Times one decode and counts the tokens of its steps, for plain `target.generate` and DFlash alike.

The loop knows no clock: `next` is timed from outside. No hook is on the models, so a compiled forward runs as usual.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.common import acceptance
from dflash.model.decoding_dflash import Block
from dflash.model.generation_dflash import generate_blocks
from dflash.model.requests_dflash import read_prompt


Inputs = torch.Tensor | Mapping[str, torch.Tensor]
# Shows a bar over items; the second argument says what is done with them.
Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def silent(items: Iterable[Any], what: str) -> Iterable[Any]:
    """Shows no bar."""
    return items


@dataclass(frozen=True)
class TimedRun:
    """The tokens and the times of one decode. Seconds begin at the call and include the prompt's forward."""

    token_ids: list[int]  # the new ones; of a batch, one sequence after the other
    seconds: float  # to the last token
    seconds_to_first_token: float
    num_forwards: int | None  # of the target, the prompt's included; `None` if a server does not count them
    acceptance_lengths: list[int]  # per verify step, accepted proposals + 1, before stop and length cuts; else empty
    lookup_steps: tuple[int, ...] = ()  # indices of the verify steps that have looked-up proposals
    num_compilations: int = 0  # graphs that `torch.compile` made meanwhile: 0 after a warm-up

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all seconds, the prompt's forward included."""
        return len(self.token_ids) / self.seconds

    @property
    def draft_lengths(self) -> list[int]:
        """Acceptance lengths of the steps whose proposals are all the drafter's."""
        return draft_lengths(self.acceptance_lengths, self.lookup_steps)

    @property
    def tau(self) -> float:
        """Mean of `draft_lengths`, as the DFlash paper and the engines count it; NaN without such a step."""
        return tau(self.draft_lengths)

    @property
    def tau_with_lookup(self) -> float:
        """Mean acceptance length of all verify steps, looked-up tokens included; NaN without a step."""
        return tau(self.acceptance_lengths)

    @property
    def num_steps(self) -> int:
        """Forwards of the target after the prompt's; 0 if they are not known."""
        return (self.num_forwards or 1) - 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens kept, without the prefill's, per forward of the target after the prefill; NaN if there is none."""
        return (len(self.token_ids) - 1) / self.num_steps if self.num_steps else float("nan")


def draft_lengths(acceptance_lengths: Sequence[int], lookup_steps: Sequence[int]) -> list[int]:
    """The acceptance lengths of the steps that are not among `lookup_steps`."""
    return [length for step, length in enumerate(acceptance_lengths) if step not in lookup_steps]


def tau(acceptance_lengths: Sequence[int]) -> float:
    """Mean acceptance length over verify steps; NaN over none."""
    return acceptance.tau(sum(acceptance_lengths), len(acceptance_lengths))


def timed_generate(
    target: PreTrainedModel,
    input_ids: Inputs,
    on_tokens: Callable[[list[int]], None] | None = None,
    **kwargs: Any,
) -> TimedRun:
    """Runs `target.generate` with its `kwargs` under the clock: plain, with prompt lookup or with an assistant model.

    `input_ids` [1, S] may be what a tokenizer returns. The time of `on_tokens`, which gets new tokens as they come, is
    not counted.
    """
    prompt_ids, attention_mask = read_prompt(input_ids)
    if attention_mask is not None:
        attention_mask = attention_mask.to(target.device)
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    compiled_before = _num_graphs()
    clock = _StreamClock(on_tokens)
    sequences = generate(
        prompt_ids.to(target.device),
        attention_mask=attention_mask,
        streamer=clock,
        **kwargs,
    )
    token_ids = sequences[:, prompt_ids.shape[1] :].flatten().tolist()  # waits for the device
    return TimedRun(
        token_ids,
        time.perf_counter() - clock.began - clock.seconds_outside,
        clock.seconds_to_first_token,
        clock.num_forwards,
        acceptance_lengths=[],
        num_compilations=_num_graphs() - compiled_before,
    )


def timed_blocks(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: Inputs,
    on_block: Callable[[Block], None] | None = None,
    **kwargs: Any,
) -> TimedRun:
    """Runs [`generate_blocks`] with its `kwargs` to its end under the clock.

    `input_ids` [1, S] may be what a tokenizer returns. The time of `on_block`, which gets each block as it commits, is
    not counted.
    """
    texts: dict[int, list[int]] = {}
    num_steps: Counter[int] = Counter()
    lengths: list[int] = []
    lookup_steps: list[int] = []
    compiled_before = _num_graphs()
    seconds = 0.0
    seconds_to_first_token = 0.0
    began = time.perf_counter()
    for block in generate_blocks(drafter, target, input_ids, **kwargs):
        seconds += time.perf_counter() - began
        texts.setdefault(block.sequence, []).extend(block.token_ids)
        if block.is_prefill:
            seconds_to_first_token = seconds_to_first_token or seconds
        else:
            num_steps[block.sequence] += 1
            if block.is_lookup:
                lookup_steps.append(len(lengths))
            lengths.append(block.acceptance_length)
        if on_block is not None:
            on_block(block)
        began = time.perf_counter()
    return TimedRun(
        [token_id for sequence in sorted(texts) for token_id in texts[sequence]],
        seconds,
        seconds_to_first_token,
        num_forwards=1 + max(num_steps.values(), default=0),
        acceptance_lengths=lengths,
        lookup_steps=tuple(lookup_steps),
        num_compilations=_num_graphs() - compiled_before,
    )


class _StreamClock:
    """A `transformers` streamer that notes the time of the first token and the time that the listener took.

    `generate` calls it once per forward of the target, whichever way it decodes.
    """

    def __init__(self, on_tokens: Callable[[list[int]], None] | None) -> None:
        self.on_tokens = on_tokens
        self.seconds_outside = 0.0
        self.seconds_to_first_token = 0.0
        self.num_forwards = -1  # the prompt comes first
        self.began = time.perf_counter()

    def put(self, token_ids: torch.Tensor) -> None:
        """The prompt at first, then new tokens."""
        self.num_forwards += 1
        if self.num_forwards == 0:
            return
        now = time.perf_counter()
        self.seconds_to_first_token = self.seconds_to_first_token or now - self.began
        if self.on_tokens is not None:
            with torch._C.DisableTorchFunction():  # this read is not the decode's, and is not counted as one
                new_ids = token_ids.flatten().tolist()
            self.on_tokens(new_ids)
            self.seconds_outside += time.perf_counter() - now

    def end(self) -> None:
        """Does nothing, because no token is buffered."""


def _num_graphs() -> int:
    """Graphs that `torch.compile` has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: it has made none
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
