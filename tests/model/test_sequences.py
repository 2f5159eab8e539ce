"""Where a text stops: tokens are appended one by one, and criteria are called as `generate` calls them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from dflash.model.sequences_dflash import TextSequence, make_cutter


def sequence_of(*new_ids: int) -> TextSequence:
    return TextSequence(0, torch.tensor([7, 8]), list(new_ids))


def test_a_text_holds_prompt_new_tokens_and_more() -> None:
    """Promise: [1, S] as `generate` passes it; a copy on the host shares the new tokens."""
    sequence = sequence_of(3)
    on_host = sequence.on_host
    sequence.new_ids.append(4)
    assert sequence.text([5, 6]).tolist() == [[7, 8, 3, 4, 5, 6]]
    assert on_host.text().tolist() == [[7, 8, 3, 4]]


def test_a_stop_token_or_the_count_ends_a_text() -> None:
    """Promise: the token that stops is kept, the rest is not; a length criterion is the count's."""
    criteria = StoppingCriteriaList([EosTokenCriteria([4, 9]), MaxLengthCriteria(3)])
    cut = make_cutter(criteria, max_new_tokens=5)
    sequence = sequence_of(1)
    assert cut(sequence, [2, 9, 3]) == [2, 9]
    assert (sequence.new_ids, sequence.is_done) == ([1, 2, 9], True)
    sequence = sequence_of(1, 1)
    assert cut(sequence, [2]) == [2]
    assert not sequence.is_done
    assert cut(sequence, [2, 2, 2, 2]) == [2, 2]
    assert (len(sequence.new_ids), sequence.is_done) == (5, True)


def test_criteria_of_the_user_see_every_token() -> None:
    """Promise: one call a token, with the text up to it, also at the token that stops."""
    seen: list[list[int]] = []

    def noted(text_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(text_ids[0].tolist())
        return torch.tensor([text_ids[0, -1] == 5])

    criteria = StoppingCriteriaList([noted, MaxTimeCriteria(1e9), EosTokenCriteria(6)])
    cut = make_cutter(criteria, max_new_tokens=99)
    sequence = sequence_of()
    assert cut(sequence, [1, 5, 2]) == [1, 5]
    assert seen == [[7, 8, 1], [7, 8, 1, 5]]
    sequence = sequence_of()
    assert cut(sequence, [6]) == [6]
    assert seen[-1] == [7, 8, 6]


class SecondStop(EosTokenCriteria):
    """Stops at the second stop token of a text."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids, self.eos_token_id).sum(-1) == 2


class Later(MaxLengthCriteria):
    """Stops two tokens later."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[-1] >= self.max_length + 2)


def test_a_criterion_that_inherits_from_one_of_transformers_is_asked() -> None:
    """Bug: only its stop ids were read, or nothing, and the text ended elsewhere."""
    for criterion, committed in ((SecondStop([4]), [1, 4, 1, 4]), (Later(3), [1, 4, 1])):
        cut = make_cutter(StoppingCriteriaList([criterion]), max_new_tokens=99)
        assert cut(sequence_of(), [1, 4, 1, 4, 1]) == committed
