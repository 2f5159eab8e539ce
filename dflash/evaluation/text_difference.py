"""The first difference of two greedy texts of one target, and the margin between its two tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from transformers.modeling_utils import PreTrainedModel


@dataclass(frozen=True)
class Difference:
    """The first place where two texts differ.

    The margin is the difference of the target's logits of both tokens, in one forward over the shared text. It is near 0 for
    a tie that rounding decides, and NaN if one text ends there.
    """

    index: int  # among the new tokens, counted from 0
    margin: float


@torch.no_grad()
def first_difference(
    target: PreTrainedModel,
    input_ids: torch.Tensor,  # [1, S]
    token_ids: Sequence[int],
    other_ids: Sequence[int],
) -> Difference | None:
    """The first difference of two continuations of a prompt, `None` if they are identical. One target forward."""
    index = num_shared(token_ids, other_ids)
    shorter, longer = sorted((len(token_ids), len(other_ids)))
    if index == longer:
        return None
    if index == shorter:
        return Difference(index, float("nan"))
    shared = input_ids.new_tensor([token_ids[:index]])
    text_ids = torch.cat([input_ids, shared], dim=1)  # [1, S + index]
    outputs = target(text_ids.to(target.device))
    logits = outputs.logits[0, -1].float()  # [V]
    token_id = token_ids[index]
    other_id = other_ids[index]
    margin = logits[token_id] - logits[other_id]
    return Difference(index, margin.item())


def num_shared(token_ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """The number of tokens that two texts share from their beginning on."""
    pairs = zip(token_ids, other_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
