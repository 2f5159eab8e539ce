"""Answers in the target's own words: what a drafter must learn is what its target would write, not what the data says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.cache_dflash import PreallocatedCache
from dflash.recurrent_dflash import LINEAR_TYPES

from .data import Example, with_response


@dataclass(frozen=True)
class Regenerated:
    """What the target wrote behind prompt number `index`; `ended` is False where `max_new_tokens` cut it off."""

    index: int
    example: Example
    ended: bool


def regenerate(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[Regenerated]:
    """The target's response to each prompt, greedy at temperature 0, in the order in which batches finish.

    Prompts of like length share a batch. Sampling is reproducible by `seed` on one machine and changes no global state.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        with torch.random.fork_rng():
            torch.manual_seed(seed * 1_000_003 + begin)
            responses = _respond(target, [prompts[i] for i in chosen], max_new_tokens, temperature)
        stops = _stop_ids(target)
        for i, response in zip(chosen, responses, strict=True):
            end = next((k for k, token_id in enumerate(response) if token_id in stops), None)
            kept = response if end is None else response[: end + 1]
            yield Regenerated(i, with_response(prompts[i], kept), ended=end is not None)


@torch.inference_mode()
def _respond(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
) -> list[list[int]]:
    """New tokens behind each prompt, one batch, with whatever stands behind a stop token."""
    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)  # padded with a token that nobody sees
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    config = target.config.get_text_config(decoder=True)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    # Appending in place is faster; targets with linear layers have caches of their own.
    has_states = set(LINEAR_TYPES) & set(getattr(config, "layer_types", None) or ())
    capacity = width + max_new_tokens
    cache = {} if has_states else {"past_key_values": PreallocatedCache(config.num_hidden_layers, capacity)}
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    sequences = generate(
        input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        max_new_tokens=max_new_tokens,
        **cache,
        **({"do_sample": False} | sampling),
    )
    return sequences[:, width:].tolist()


def _stop_ids(target: PreTrainedModel) -> set[int]:
    stops = target.generation_config.eos_token_id
    return set() if stops is None else {stops} if isinstance(stops, int) else set(stops)
