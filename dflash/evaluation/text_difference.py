"""The first difference of two greedy texts of one target, and the margin between its two tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.model.requests_dflash import read_prompt


@dataclass(frozen=True)
class Difference:
    """The first token that two texts do not share.

    The margin is the target's logit of the one token minus that of the other, in one forward over the shared text:
    near 0 for a tie that rounding decides, NaN if one text only continues after the end of the other.
    """

    index: int  # among the new tokens, counted from 0
    margin: float


@torch.no_grad()
def first_difference(
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor],
    token_ids: Sequence[int],
    other_ids: Sequence[int],
) -> Difference | None:
    """The first difference of two continuations of a prompt, `None` if they are identical. One target forward."""
    pairs = zip_longest(token_ids, other_ids)
    found = next(((i, token, other) for i, (token, other) in enumerate(pairs) if token != other), None)
    if found is None:
        return None
    index, token, other = found
    if token is None or other is None:
        return Difference(index, float("nan"))
    prompt_ids, attention_mask = read_prompt(input_ids)
    if attention_mask is not None:
        prompt_ids = prompt_ids[attention_mask.bool()][None]
    shared = torch.cat([prompt_ids, prompt_ids.new_tensor([list(token_ids[:index])])], dim=1)  # [1, S + index]
    logits = target(shared.to(target.device)).logits[0, -1].float()  # [V]
    return Difference(index, (logits[token] - logits[other]).item())
