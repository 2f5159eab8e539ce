"""The acceptor: what processors are called with, which rule is used, and what it says of broken logits."""

from __future__ import annotations

import pytest
import torch
from tiny_models import request_of
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from dflash.engine.trees import TreeAcceptor
from dflash.model.acceptance_dflash import TARGET_BROKE, Acceptor, Proposals
from dflash.model.sequences_dflash import TextSequence


VOCAB = 6


def never(text_ids: torch.Tensor) -> bool:
    return False


def logits_for(*token_ids: list[int]) -> torch.Tensor:
    """Logits [B, N, V] whose best tokens are these."""
    return 5.0 * torch.nn.functional.one_hot(torch.tensor(token_ids), VOCAB).float()


def sequences_of(*new_ids: list[int]) -> list[TextSequence]:
    return [TextSequence(index, torch.tensor([1, 2]), list(ids)) for index, ids in enumerate(new_ids)]


class Noted(LogitsProcessor):
    """Writes down every text that it is called with, and forbids token 0."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores)
        self.texts.append(input_ids.tolist())
        return scores.index_fill(-1, torch.tensor([0]), -torch.inf)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_processors_are_called_once_for_each_token_that_may_be_committed(num_sequences: int) -> None:
    """Promise: in order, with the whole batch's copies of the text, up to the first proposal that is refused."""
    noted = [Noted() for _ in range(num_sequences)]
    acceptor = Acceptor(request_of(num_sequences), [LogitsProcessorList([each]) for each in noted], never)
    proposals = Proposals(torch.tensor([[3, 4, 5]] * num_sequences))
    sequences = sequences_of(*[[index + 3] for index in range(num_sequences)])
    acceptance = acceptor.accept(logits_for(*[[3, 2, 5, 1]] * num_sequences), sequences, proposals)
    assert acceptance.num_accepted.tolist() == [1] * num_sequences
    assert acceptance.token_ids[:, :2].tolist() == [[3, 2]] * num_sequences
    for index, each in enumerate(noted):
        text = [1, 2, index + 3]
        assert each.texts == [[text] * num_sequences, [[*text, 3]] * num_sequences]


def test_a_drawn_proposal_is_processed_on_while_it_is_possible() -> None:
    """Promise: under the drawing rules, any proposal that the processors leave possible may be accepted."""
    noted = Noted()
    acceptor = Acceptor(request_of(do_sample=True, verification="block"), [LogitsProcessorList([noted])], never)
    acceptor.accept(logits_for([3, 3, 3]), sequences_of([]), Proposals(torch.tensor([[4, 0]])))
    assert noted.texts == [[[1, 2]], [[1, 2, 4]]]  # token 0 is forbidden, so nothing follows it
    noted.texts.clear()
    acceptor.accept(logits_for([3, 3, 3]), sequences_of([]), Proposals(torch.tensor([[4, 5]])))
    assert noted.texts == [[[1, 2]], [[1, 2, 4]], [[1, 2, 4, 5]]]


def test_a_batch_in_which_sequences_have_left_is_processed_by_index() -> None:
    """Promise: the processors of sequence i, and its copy of the text, whatever its place is now."""
    noted = [Noted() for _ in range(3)]
    acceptor = Acceptor(request_of(3), [LogitsProcessorList([each]) for each in noted], never)
    live = [sequences_of([], [], [4])[2]]
    acceptor.accept(logits_for([3]), live, Proposals(torch.empty(1, 0, dtype=torch.long)))
    assert [each.texts for each in noted] == [[], [], [[[1, 2, 4]] * 3]]


def test_a_processor_sees_a_sequence_at_its_own_place() -> None:
    """Promise: of what a processor returns for the whole batch, a sequence gets what belongs to its index."""

    def by_place(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 9.0 * torch.eye(VOCAB)[: len(scores)]  # as one that keeps a state for each sequence

    acceptor = Acceptor(request_of(3), [LogitsProcessorList([by_place])] * 3, never)
    logits = torch.zeros(2, 1, VOCAB)
    live = sequences_of([], [], [])[1:]
    acceptance = acceptor.accept(logits, live, Proposals(torch.empty(2, 0, dtype=torch.long)))
    assert acceptance.token_ids.tolist() == [[1], [2]]


def test_processors_that_read_only_scores_share_one_call() -> None:
    """Promise: a temperature sees all columns of all sequences at once."""
    calls: list[torch.Size] = []

    class Counted(TemperatureLogitsWarper):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append(scores.shape)
            return super().__call__(input_ids, scores)

    Counted.__name__ = "TemperatureLogitsWarper"
    request = request_of(2, do_sample=True, keeping={"scores"})
    acceptor = Acceptor(request, [LogitsProcessorList([Counted(0.5)])] * 2, never)
    acceptor._is_prefix_free = True
    logits = logits_for([3, 2], [4, 1])
    acceptance = acceptor.accept(logits, sequences_of([], []), Proposals(torch.tensor([[3], [4]])))
    assert calls == [torch.Size([4, VOCAB])]
    assert acceptance.scores is not None
    assert torch.equal(acceptance.scores, 2 * logits)


def test_text_and_scores_are_those_of_each_prefix() -> None:
    """Promise: a repetition penalty sees the accepted proposals before each column."""
    torch.manual_seed(1)
    penalty = RepetitionPenaltyLogitsProcessor(1.8)
    acceptor = Acceptor(request_of(keeping={"scores"}), [LogitsProcessorList([penalty])], never)
    logits = torch.randn(1, 4, VOCAB)
    text, token_ids = torch.tensor([[1, 2]]), list[int]()
    expected = []
    for column in range(4):
        expected.append(penalty(text, logits[:, column].clone()))
        token_ids.append(int(expected[-1].argmax()))
        text = torch.cat([text, torch.tensor([[token_ids[-1]]])], dim=1)
    acceptance = acceptor.accept(logits, sequences_of([]), Proposals(torch.tensor([token_ids[:3]])))
    assert acceptance.num_accepted.tolist() == [3]
    assert acceptance.token_ids[0].tolist() == token_ids
    assert acceptance.scores is not None
    torch.testing.assert_close(acceptance.scores, torch.stack(expected, dim=1))


class Nothing(LogitsProcessor):
    """Leaves no token possible after a text that ends with 3."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf) if input_ids[0, -1] == 3 else scores


def test_no_possible_token_is_an_error_unless_the_text_has_stopped() -> None:
    """Promise: the processor is named; after a stop nothing is read, so nothing is wrong; a broken target is told as such."""
    proposals = Proposals(torch.tensor([[3, 4]]))
    logits = logits_for([3, 4, 5])
    acceptor = Acceptor(request_of(), [LogitsProcessorList([Nothing()])], never)
    with pytest.raises(ValueError, match=r"\(Nothing\) left no token possible after 3 tokens"):
        acceptor.accept(logits, sequences_of([]), proposals)

    noted = Noted()
    processors = [LogitsProcessorList([noted, Nothing()])]
    acceptor = Acceptor(request_of(), processors, lambda text_ids: bool(text_ids[0, -1] == 3))
    acceptance = acceptor.accept(logits, sequences_of([]), proposals)
    assert acceptance.token_ids[0, 0] == 3
    assert int(acceptance.num_accepted) >= 1
    assert noted.texts == [[[1, 2]], [[1, 2, 3]]], "processors saw a text that goes on after its end"

    acceptor = Acceptor(request_of(), processors, never)
    broken = torch.full_like(logits, torch.nan)
    assert acceptor.accept(broken, sequences_of([]), proposals).num_accepted.tolist() == [TARGET_BROKE]


def test_another_shape_of_scores_is_refused() -> None:
    """Promise: a processor that returns another shape is named; scores [V] of one text are taken, as `generate` does."""

    def flat(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[0]

    def short(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :2]

    empty = Proposals(torch.empty(1, 0, dtype=torch.long))
    acceptor = Acceptor(request_of(), [LogitsProcessorList([flat])], never)
    assert acceptor.accept(logits_for([3]), sequences_of([]), empty).token_ids.tolist() == [[3]]
    acceptor = Acceptor(request_of(), [LogitsProcessorList([short])], never)
    with pytest.raises(ValueError, match=r"returned \[1, 2\] for scores \[1, 6\]"):
        acceptor.accept(logits_for([3]), sequences_of([]), empty)


def test_auto_is_block_for_drawn_proposals_and_match_for_others() -> None:
    """Promise: a greedy request always matches; a named rule is used for every proposal."""
    plain = Proposals(torch.tensor([[3]]))
    drawn = Proposals(torch.tensor([[3]]), torch.tensor([[[3]]]), torch.ones(1, 1, 1))
    rules = {}
    for verification in ("auto", "match", "rejection", "block"):
        acceptor = Acceptor(request_of(do_sample=True, verification=verification), [LogitsProcessorList()], never)
        rules[verification] = (acceptor.rule(plain), acceptor.rule(drawn))
    assert rules == {
        "auto": ("match", "block"),
        "match": ("match", "match"),
        "rejection": ("rejection", "rejection"),
        "block": ("block", "block"),
    }
    greedy = Acceptor(request_of(verification="block"), [LogitsProcessorList()], never)
    assert greedy.rule(drawn) == "match"


def test_what_one_function_on_the_device_can_accept() -> None:
    """Promise: greedy without processors, and sampling by a `Sampler`; never where scores are returned."""
    warped, penalised = [LogitsProcessorList([TemperatureLogitsWarper(0.5)])], [LogitsProcessorList([Noted()])]
    plain = [LogitsProcessorList()]
    assert TreeAcceptor(request_of(), plain, never).can_fuse
    assert not TreeAcceptor(request_of(), penalised, never).can_fuse
    assert not TreeAcceptor(request_of(keeping={"scores"}), plain, never).can_fuse
    assert TreeAcceptor(request_of(do_sample=True), warped, never).can_fuse
    assert not TreeAcceptor(request_of(do_sample=True), penalised, never).can_fuse
    assert not TreeAcceptor(request_of(do_sample=True, keeping={"scores"}), warped, never).can_fuse
    assert TreeAcceptor(request_of(do_sample=True, verification="block"), warped, never).can_fuse


def test_a_sampled_choice_depends_on_its_position_alone() -> None:
    """Promise: a block of proposals and single columns draw the same tokens."""
    torch.manual_seed(2)
    logits = torch.randn(2, 3, VOCAB)
    together = Acceptor(request_of(2, do_sample=True), [LogitsProcessorList()] * 2, never)
    choices = together.accept(logits, sequences_of([], [5]), Proposals(torch.zeros(2, 2, dtype=torch.long))).token_ids
    alone = Acceptor(request_of(2, do_sample=True), [LogitsProcessorList()] * 2, never)
    empty = Proposals(torch.empty(2, 0, dtype=torch.long))
    for column in range(3):
        written = sequences_of([0] * column, [5] + [0] * column)
        single = alone.accept(logits[:, column : column + 1], written, empty).token_ids
        assert torch.equal(single, choices[:, column : column + 1])
