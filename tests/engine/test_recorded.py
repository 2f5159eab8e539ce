"""`cuda_graph=True`: steps that are recorded once and replayed, on a recorder that keeps what CUDA graphs promise."""

from __future__ import annotations

import weakref
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import NEW_TOKENS, TEXT_LENGTH, Pair, PlayedRecorder, move_parameter
from tiny_models import BLOCK_SIZE, SMALL, make_drafter
from torch._subclasses import FakeTensorMode

from dflash import Conversation
from dflash.engine import fallback_reason, recorded, runner, whole
from dflash.engine.state import PairState
from dflash.engine.waiting import Recordable
from dflash.model import decoding_dflash
from dflash.model.acceptance_dflash import Proposals
from dflash.model.drafting_dflash import Context


RECORDED: dict[str, Any] = {"cuda_graph": True}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> PlayedRecorder:
    """The recorder of the CPU."""
    return PlayedRecorder.of_the_cpu(monkeypatch)


@pytest.fixture
def pair(recorder: PlayedRecorder) -> Pair:
    """A pair of which nothing is recorded."""
    return Pair.make()


@pytest.fixture
def _small_rooms(recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SMALLEST_CAPACITY", 64)
    for module in (recorded, decoding_dflash):
        monkeypatch.setattr(module, "INITIAL_NEW_TOKENS", 8)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings about recorded steps."""
    return [record.message for record in caplog.records if "cuda_graph" in record.message]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
def test_recorded_text_and_acceptance_are_the_eager_ones(kind: str, recorder: PlayedRecorder) -> None:
    """Promise: one recording serves all steps of a text, and the next text."""
    pair = Pair.make(kind)
    pair.check([17], **RECORDED)
    pair.check([60], **RECORDED)
    eager = list(pair.blocks([17], compile=False))
    assert list(pair.blocks([17], **RECORDED)) == eager
    assert any(block.num_accepted for block in eager)
    assert recorder.num_made == 1
    assert recorder.num_calls >= 3 * (len(eager) - 2)  # all steps but the last token's
    assert fallback_reason(pair.drafter, pair.target) is None


def test_sequences_of_a_batch_end_at_different_times(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: those that go on stay in the recording, at their own places."""
    last = next(i for i in range(130, TEXT_LENGTH) if pair.text[0, i] not in pair.text[0, 70:i])
    lengths = [last - 40, last - 9, last - 55, last - 21]
    stop = {"stop_token_ids": [int(pair.text[0, last])], "max_new_tokens": 80}
    expected = [pair.text[0, length : last + 1].tolist() for length in lengths]
    for _ in range(2):
        assert pair.write(lengths, **stop, **RECORDED) == expected
    assert recorder.num_made == 1


@pytest.mark.usefixtures("_small_rooms")
@pytest.mark.parametrize("lengths", [[17], [17, -60, 31]], ids=["one", "three"])
def test_a_text_that_outgrows_its_recording_moves_to_a_larger_one(
    pair: Pair, recorder: PlayedRecorder, lengths: list[int]
) -> None:
    pair.check(lengths, max_new_tokens=150, **RECORDED)
    assert recorder.num_made > 1


@pytest.mark.usefixtures("_small_rooms")
def test_a_batch_that_shrinks_and_outgrows_its_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    last = next(i for i in range(60, TEXT_LENGTH) if pair.text[0, i] not in pair.text[0, 30:i])
    lengths = [last + 1, last - 20]  # the second one ends soon
    stop = {"stop_token_ids": [int(pair.text[0, last])], "max_new_tokens": 150}
    eager = pair.write(lengths, compile=False, **stop)
    assert len(eager[1]) == 21
    assert len(eager[0]) > 60
    assert pair.write(lengths, **stop, **RECORDED) == eager
    assert recorder.num_made == 4  # 96, 128, 192 and 256 positions


@pytest.mark.usefixtures("_small_rooms")
@pytest.mark.parametrize("length", [27, 41])
def test_a_wide_lookup_at_the_end_of_a_recording_loses_nothing(length: int, recorder: PlayedRecorder) -> None:
    """Known bug: its columns moved the text to other storage, and the next replay did not see them."""
    pair = Pair.make(seed=11)
    asked: dict[str, Any] = {"prompt_lookup_num_tokens": 63, "max_matching_ngram_size": 2, "max_new_tokens": 200}
    blocks = list(pair.blocks([length], **asked, **RECORDED))
    assert pair.texts_of(blocks) == pair.expected([length], 200)
    assert any(block.is_lookup for block in blocks)


LOOKED_UP: dict[str, Any] = {"prompt_lookup_num_tokens": 12, "max_matching_ngram_size": 2, "max_new_tokens": 120}


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_k": 3}], ids=["greedy", "sampled"])
def test_steps_that_verify_what_was_looked_up_are_recorded(recorder: PlayedRecorder, asked: dict[str, Any]) -> None:
    """Promise: beside those that draft, over the same keys and values; also the first one of a text."""
    pair = Pair.make(seed=11)

    def blocks_of(length: int, **keywords: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return list(pair.blocks([length], generator=generator, **LOOKED_UP, **asked, **keywords))

    num_steps = 0
    for length in (60, 41, 60):
        eager = blocks_of(length, compile=False)
        looked_up = [block for block in eager if block.is_lookup]
        assert 1 < len(looked_up) < len(eager) - 5
        assert eager[1].is_lookup == (length == 60)
        assert asked or any(block.num_accepted for block in looked_up)
        assert blocks_of(length, **RECORDED) == eager
        num_steps += len(eager) - 2
    assert recorder.num_made == 2
    assert recorder.num_calls >= num_steps
    assert fallback_reason(pair.drafter, pair.target) is None


def test_each_length_of_lookups_has_a_step_of_its_own(recorder: PlayedRecorder) -> None:
    pair = Pair.make(seed=11)
    for num_tokens, num_made in ((12, 2), (7, 3), (12, 3)):
        asked = LOOKED_UP | {"prompt_lookup_num_tokens": num_tokens}
        pair.check([27], **asked, **RECORDED)
        assert recorder.num_made == num_made
    pair.check([27], **RECORDED)
    assert recorder.num_made == 3


def test_kinds_of_step_are_recorded_over_the_same_storage(
    pair: Pair, recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: texts of several kinds take turns without another recording; of more kinds than are kept, the newest stay."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"block_size": 3}]
    expected = [pair.write([17], compile=False, **kind) for kind in kinds]
    for _ in range(2):
        assert [pair.write([17], **kind, **RECORDED) for kind in kinds] == expected
        assert recorder.num_made == 3
    recordings = PairState.of(pair.drafter, pair.target).recordings
    (recording,) = recordings.values()
    monkeypatch.setattr(recorded, "MOST_STEPS", 2)
    assert pair.write([17], temperature=0.7, top_k=3, **RECORDED) == pair.write(
        [17], temperature=0.7, top_k=3, compile=False
    )
    assert len(recording.steps) == 2
    assert [pair.write([17], **kind, **RECORDED) for kind in kinds] == expected
    assert list(recordings.values()) == [recording]
    assert recorder.num_made == 4 + 3


@pytest.mark.parametrize("num_tokens", [4, 12], ids=["narrow", "wide"])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.2, "top_k": 2}], ids=["greedy", "sampled"])
def test_lookups_of_a_batch_are_verified_beside_drafts(
    recorder: PlayedRecorder, num_tokens: int, asked: dict[str, Any]
) -> None:
    """Promise: one recorded step serves a batch, whichever of its texts repeat themselves; drafts follow a short lookup."""
    pair = Pair.make(seed=11)
    lengths = [60, 41, 27]
    asked = LOOKED_UP | {"prompt_lookup_num_tokens": num_tokens} | asked
    eager = list(pair.blocks(lengths, compile=False, **asked))
    blocks = list(pair.blocks(lengths, **asked, **RECORDED))
    assert pair.texts_of(blocks, 3) == pair.texts_of(eager, 3)
    looked_up = [block for block in blocks if block.is_lookup]
    assert any(block.num_accepted for block in looked_up)
    num_drafted, num_drafted_eagerly = (
        sum(block.num_accepted for block in of_text if not block.is_lookup) for of_text in (blocks, eager)
    )
    assert num_drafted > num_drafted_eagerly / 2
    assert len({block.sequence for block in looked_up}) > 1
    assert {block.num_proposals for block in blocks if not block.is_prefill} <= {BLOCK_SIZE - 1, 0}
    num_steps = len([block for block in blocks if block.sequence == 0]) - 2
    assert recorder.num_calls >= num_steps
    assert recorder.num_made == 1
    assert fallback_reason(pair.drafter, pair.target) is None


def test_drafts_stand_where_nothing_was_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: of texts without a match, and after the end of a short one."""
    monkeypatch.setattr(whole, "_draft", lambda inputs: Proposals(torch.tensor([[1, 2, 3], [4, 5, 6]])))
    state = SimpleNamespace(looked_up_ids=torch.tensor([[7, -1, -1], [-1, -1, -1]]))
    inputs: Any = SimpleNamespace(state=state, kind=SimpleNamespace(is_batch=True))
    assert whole._propose(inputs).token_ids.tolist() == [[7, 2, 3], [4, 5, 6]]


def test_a_conversation_goes_on_recorded(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: between its turns a conversation owns its caches, and other texts use the recording."""
    conversation = Conversation()
    for length in (17, 70, 90, 33, 140):
        pair.check([length], conversation=conversation, **RECORDED)
        pair.check([-23], **RECORDED)
    assert conversation.num_reused == 33 + NEW_TOKENS - 1
    assert recorder.num_made == 1


def test_texts_in_and_outside_inference_mode_share_a_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: what is recorded in inference mode is written outside of it."""
    with torch.inference_mode():
        pair.check([17], **RECORDED)
    pair.check([60], **RECORDED)
    assert fallback_reason(pair.drafter, pair.target) is None
    assert recorder.num_made == 1


def test_eager_and_recorded_turns_of_a_conversation_take_turns(pair: Pair) -> None:
    conversation = Conversation()
    for length, keywords in ((17, RECORDED), (57, {"compile": False}), (97, RECORDED), (137, {"compile": False})):
        pair.check([length], conversation=conversation, **keywords)
        assert conversation.num_reused >= length - NEW_TOKENS - 17


def states_of(conversation: Conversation) -> list[torch.Tensor]:
    """Keys and values of both caches, and the context that waits."""
    states = [conversation.context.waiting.features]
    for cache in (conversation.target_cache, conversation.context.cache):
        (length,) = cache.lengths
        keys, values = cache.storage(0)
        states += [layer[:1, :, :length] for layer in (*keys, *values)]
    return [part.clone() for part in states]


@pytest.mark.parametrize("asked", [{}, LOOKED_UP], ids=["drafts", "lookups"])
def test_caches_after_a_recorded_text_are_the_eager_ones(recorder: PlayedRecorder, asked: dict[str, Any]) -> None:
    """Promise: also the context that waits, which no later replay overwrites, and no step with a lookup drops."""
    pair = Pair.make(seed=11)
    kept = Conversation()
    plain = Conversation()
    pair.write([60], conversation=plain, compile=False, **asked)
    pair.write([60], conversation=kept, **asked, **RECORDED)
    pair.write([-60], **RECORDED)
    assert kept.token_ids == plain.token_ids
    for mine, theirs in zip(states_of(kept), states_of(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_blocks", range(1, 6))
def test_a_text_that_is_closed_early_frees_its_recording(
    pair: Pair, recorder: PlayedRecorder, num_blocks: int
) -> None:
    """Promise: after any number of blocks, and in a conversation, the next text is right and records nothing."""
    pair.check([26], **RECORDED)
    conversation = Conversation()
    blocks = pair.blocks([17], conversation=conversation, **RECORDED)
    written = [token_id for _ in range(num_blocks) for token_id in next(blocks).token_ids]
    blocks.close()
    pair.check([-26], **RECORDED)
    pair.check([17 + len(written)], conversation=conversation, **RECORDED)
    assert conversation.num_reused == 17 + len(written) - 1
    assert recorder.num_made == 1


def test_an_error_of_the_callers_object_frees_the_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] > 30:
            raise RuntimeError("a criterion")
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(RuntimeError, match="a criterion"):
        pair.write([17], stopping_criteria=[criterion], **RECORDED)
    pair.check([33], **RECORDED)
    assert recorder.num_made == 1


def test_two_texts_at_once_have_a_recording_each(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: no text reads or overwrites what belongs to the other."""
    texts: list[list[int]] = [[], []]
    for first, second in zip_longest(pair.blocks([17], **RECORDED), pair.blocks([-60], **RECORDED)):
        texts[0] += first.token_ids if first else []
        texts[1] += second.token_ids if second else []
    assert texts == pair.expected([17, -60])
    assert recorder.num_made == 2


def test_a_third_key_drops_the_recording_that_was_used_least_lately(pair: Pair, recorder: PlayedRecorder) -> None:
    for lengths in ([17], [17, 60], [33]):  # one, two, one
        pair.check(lengths, **RECORDED)
    assert recorder.num_made == 2
    pair.check([17, 60, 33], **RECORDED)  # drops two
    pair.check([17], **RECORDED)
    assert recorder.num_made == 3
    pair.check([17, 60], **RECORDED)
    assert recorder.num_made == 4


# What cannot be recorded


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory.\nSee more"), RuntimeError("operation not permitted")],
    ids=str,
)
def test_a_text_goes_on_eagerly_where_recording_fails(
    pair: Pair, recorder: PlayedRecorder, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: one warning with the error's first line, and the reason can be asked for."""
    recorder.error = error
    for lengths in ([17], [17, -60]):
        pair.check(lengths, **RECORDED)
    (warning,) = warnings_of(caplog)
    first_line = str(error).partition("\n")[0]
    assert f"{type(error).__name__}('{first_line}" in warning
    assert "\n" not in warning
    assert first_line in str(fallback_reason(pair.drafter, pair.target))


def test_a_model_that_reads_values_runs_eagerly(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    mlp = pair.target.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states * (1.0 if states.sum().item() < 1e9 else 0.0))
    pair.check([17], **RECORDED)
    assert "the host waits in aten._local_scalar_dense" in warnings_of(caplog)[0]


def test_without_a_cuda_device_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair.make()
    for _ in range(2):
        pair.check([17], **RECORDED)
    assert len(warnings_of(caplog)) == 1
    assert "cpu is no CUDA device" in str(fallback_reason(pair.drafter, pair.target))


def test_a_pair_that_is_moved_to_a_device_is_recorded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bug: a pair that was once asked on the CPU was never recorded again."""
    pair = Pair.make()
    pair.check([17], **RECORDED)
    recorder = PlayedRecorder()
    monkeypatch.setitem(recorded.RECORDERS, "cpu", recorder)
    weight = pair.target.lm_head.weight
    pair.target.lm_head.weight = torch.nn.Parameter(weight.detach().clone())  # as a move does
    pair.check([17], **RECORDED)
    assert recorder.num_made == 1


def test_two_ways_to_run_a_step_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="cuda_graph=True and compile=True"):
        pair.blocks([17], compile=True, **RECORDED)


# What changes


def test_a_text_that_began_before_a_change_returns_no_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    blocks = pair.blocks([17], **RECORDED)
    for _ in range(4):
        next(blocks)
    move_parameter(pair)
    pair.write_text()
    pair.check([17], **RECORDED)
    blocks.close()
    pair.check([17], **RECORDED)
    assert recorder.num_made == 2


def test_weights_that_change_in_their_place_need_no_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: a merged adapter, or a step of training, is read by the next replay."""
    pair.check([17], **RECORDED)
    with torch.no_grad():
        pair.target.model.layers[0].mlp.down_proj.weight.neg_()
    pair.write_text()
    pair.check([17], **RECORDED)
    assert recorder.num_made == 1


def test_a_text_after_logits_that_were_not_finite_is_right(pair: Pair) -> None:
    """Known bug: storage that a broken model had written NaN into spoiled the next text."""
    weight = pair.target.model.layers[1].self_attn.v_proj.weight
    kept = weight.detach().clone()
    blocks = pair.blocks([17], **RECORDED)
    for _ in range(3):
        next(blocks)
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        list(blocks)
    with torch.no_grad():
        weight.copy_(kept)
    pair.check([8], **RECORDED)


# Drafters


@pytest.mark.parametrize("lengths", [[60], [60, 33, 90]], ids=["one", "three"])
def test_a_drafter_with_a_window_is_recorded(pair: Pair, recorder: PlayedRecorder, lengths: list[int]) -> None:
    """Promise: it proposes at the positions that its tokens have in the text."""
    asked: dict[str, Any] = {"draft_window": (4, 12), "max_new_tokens": 80}
    eager = list(pair.blocks(lengths, compile=False, **asked))
    assert list(pair.blocks(lengths, **asked, **RECORDED)) == eager
    pair.check(lengths, **asked, **RECORDED)
    assert recorder.num_made == 1


@pytest.mark.parametrize(
    ("fields", "keywords"),
    [
        ({"selector_rank": 4, "selector_top_k": 5}, {}),
        ({"gru_hidden_dim": 6, "emb_dim": 4}, {}),
        ({"markov_rank": 4, "enable_confidence_head": True}, {}),
        ({}, {"draft_window": (4, 12)}),
    ],
    ids=["selector", "Domino", "DSpark", "window"],
)
def test_recorded_proposals_are_the_eager_ones(
    pair: Pair, recorder: PlayedRecorder, fields: Any, keywords: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a drafter's head and its window are part of the recorded step."""
    drafter = make_drafter(**SMALL, **fields)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    other = Pair(pair.target, drafter, pair.text, pair.other)  # type: ignore[arg-type]
    proposed: list[list[int]] = []
    commit = runner.EngineDecoder.commit

    def noted(self: Any, step: Any) -> Any:
        proposed.append(step.proposals.token_ids.flatten().tolist())
        return commit(self, step)

    monkeypatch.setattr(runner.EngineDecoder, "commit", noted)
    for way in (RECORDED, {"compile": False}):
        other.check([17], **keywords, **way)
    half = len(proposed) // 2
    assert proposed[:half] == proposed[half:]
    assert recorder.num_made == 1


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_cache_that_has_moved_in_mid_text_is_recorded_anew(pair: Pair, recorder: PlayedRecorder, which: str) -> None:
    """Promise: a replay writes where the text's keys are, also after an eager step that was too wide for the recording."""
    kept, plain = Conversation(), Conversation()
    pair.write([17], conversation=plain, compile=False)
    blocks = pair.blocks([17], conversation=kept, **RECORDED)
    for _ in range(4):
        next(blocks)
    cache = kept.target_cache if which == "target" else kept.context.cache
    cache.storage(4096)  # what such a step does
    assert sum(1 for _ in blocks) > 2
    assert kept.token_ids == plain.token_ids
    for mine, theirs in zip(states_of(kept), states_of(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("fails_at", [0, 4], ids=["at its end", "in its middle"])
def test_a_text_is_whole_though_its_caches_have_no_room_beside_the_recording(
    pair: Pair, recorder: PlayedRecorder, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known bugs: the copy of its caches ran out of memory, and the text was lost; its conversation was refused."""

    def no_room(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    conversation = Conversation()
    monkeypatch.setattr(recorded, "room_like", no_room)
    recorder.fails_at = fails_at
    pair.check([17], conversation=conversation, **RECORDED)
    assert len(conversation.token_ids) == 17 + NEW_TOKENS - 1
    monkeypatch.undo()
    pair.check([17 + NEW_TOKENS], conversation=conversation, cuda_graph=False)
    assert conversation.num_reused == 17 + NEW_TOKENS - 1
    pair.check([33], cuda_graph=False)


@pytest.mark.parametrize("fails_at", [1, 4])
@pytest.mark.parametrize("verification", ["auto", "rejection"])
def test_the_text_of_a_seed_does_not_depend_on_a_step_that_failed(
    pair: Pair, recorder: PlayedRecorder, fails_at: int, verification: str
) -> None:
    """Known bug: the eager step after it drew further numbers."""
    drafter = make_drafter(**SMALL, selector_rank=4, selector_top_k=5)
    pair = Pair(pair.target, drafter, pair.text, pair.other)  # type: ignore[arg-type]
    asked: dict[str, Any] = {"temperature": 1.5, "verification": verification}
    eager = list(pair.blocks([17], compile=False, **asked))
    recorder.fails_at = fails_at
    assert list(pair.blocks([17], **asked, **RECORDED)) == eager
    assert recorder.num_calls == fails_at


def test_a_text_under_autocast_runs_eagerly(pair: Pair, recorder: PlayedRecorder) -> None:
    """Known bug: its keys had another dtype, and so had the storage that later texts got."""
    with torch.autocast("cpu", torch.bfloat16):
        pair.write([17], **RECORDED)
    assert recorder.num_made == 0
    pair.check([17], **RECORDED)
    assert recorder.num_made == 1


def test_a_step_whose_check_is_interrupted_is_not_kept(
    recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known bug: the next text replayed it unchecked."""
    pair = Pair.make(seed=11)
    check = recorded.checked
    num_checked = 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_checked
        num_checked += 1
        if num_checked == 2:
            raise KeyboardInterrupt
        return check(*args)

    monkeypatch.setattr(recorded, "checked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.write([41], **LOOKED_UP, **RECORDED)
    assert recorder.num_made == 2
    (recording,) = PairState.of(pair.drafter, pair.target).recordings.values()
    assert len(recording.steps) == 1


def test_a_lookup_joins_no_context(recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bug: each one joined all that waits, which an eager one only adds to."""
    pair = Pair.make(seed=11)
    num_joined = 0
    asked = LOOKED_UP | {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}
    join = Context.joined

    def joined(parts: Any) -> Any:
        nonlocal num_joined
        num_joined += 1
        return join(parts)

    monkeypatch.setattr(Context, "joined", joined)
    pair.check([60], **asked, compile=False)
    num_joined, num_eager = 0, num_joined
    pair.check([60], **asked, **RECORDED)
    assert num_joined <= num_eager


# By default


@pytest.fixture
def _by_itself(recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a device that records by itself, and has a gigabyte free."""
    monkeypatch.setitem(runner.AUTO_RUNNERS, "cpu", recorded.AutoRecordedRunner)
    monkeypatch.setattr(recorded, "free_bytes", lambda device: 2**30)
    monkeypatch.setattr(recorded, "AUTO_TOKENS", 20)


@pytest.mark.usefixtures("_by_itself")
def test_steps_are_recorded_by_themselves(
    pair: Pair, recorder: PlayedRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    for length in (17, 60):
        pair.check([length])
    assert recorder.num_made == 1
    num_calls = recorder.num_calls
    pair.check([17], cuda_graph=False)
    assert recorder.num_calls == num_calls
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("_by_itself")
@pytest.mark.parametrize("name", ["target", "drafter", "callback"])
def test_nothing_is_recorded_by_itself_in_training(pair: Pair, recorder: PlayedRecorder, name: str) -> None:
    """Promise: training has the memory that recordings would hold, also where a callback watches texts between its steps."""
    if name == "callback":
        PairState.of(pair.drafter, pair.target).watch(lambda sequences, blocks: None)
    else:
        getattr(pair, name).train()
    pair.check([17])
    assert recorder.num_made == 0
    pair.check([17], **RECORDED)
    assert recorder.num_made == 1


@pytest.mark.usefixtures("_by_itself")
def test_a_recording_that_would_hold_much_memory_is_not_made(
    pair: Pair, recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: by itself a recording holds a quarter of the free memory at most."""
    layers = (pair.target.config, pair.drafter.config)
    of_position = sum(
        2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim for config in layers
    )
    needed = 512 * of_position * 4
    monkeypatch.setattr(recorded, "free_bytes", lambda device: needed - 1)
    pair.check([17])
    assert recorder.num_made == 0
    monkeypatch.setattr(recorded, "free_bytes", lambda device: needed)
    pair.check([17])
    assert recorder.num_made == 1
    monkeypatch.setattr(recorded, "free_bytes", lambda device: 0)
    num_calls = recorder.num_calls
    pair.check([17])  # on the recording that is there
    assert recorder.num_made == 1
    assert recorder.num_calls > num_calls
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("_by_itself", "_small_rooms")
def test_a_text_whose_next_recording_does_not_fit_goes_on_eagerly(
    pair: Pair, recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([2**30])
    monkeypatch.setattr(recorded, "free_bytes", lambda device: next(free, 0))
    pair.check([17], max_new_tokens=150)
    assert recorder.num_made == 1
    assert recorder.num_calls < 30
    pair.check([17], max_new_tokens=20)
    assert recorder.num_made == 1


@pytest.mark.usefixtures("_by_itself")
def test_models_that_cannot_be_recorded_run_eagerly_without_a_word(
    pair: Pair, recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "why_not", lambda *models: "it makes its own masks")
    pair.check([17])
    assert recorder.num_made == 0
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("_by_itself")
def test_a_recording_that_fails_is_tried_once(
    pair: Pair, recorder: PlayedRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.error = RuntimeError("no graph")
    for _ in range(2):
        pair.check([17])
    (warning,) = warnings_of(caplog)
    assert "no graph" in warning


def test_recordings_make_room_for_a_long_prompt(
    pair: Pair, recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: what an earlier text has left takes no memory that the keys of the next prompt need."""
    pair.check([17], **RECORDED)
    recordings = PairState.of(pair.drafter, pair.target).recordings
    (recording,) = recordings.values()
    monkeypatch.setattr(recorded, "free_bytes", lambda device: 2 * recording.num_bytes)
    recorded.make_room(recordings, 512, torch.device("cpu"))
    assert len(recordings) == 1
    recorded.make_room(recordings, 513, torch.device("cpu"))
    assert not recordings
    recorded.make_room(recordings, 513, torch.device("cpu"))
    pair.check([17], **RECORDED)
    assert recorder.num_made == 2


@pytest.mark.usefixtures("_by_itself")
@pytest.mark.parametrize("name", ["target", "drafter", "callback"])
def test_recordings_are_dropped_for_training(pair: Pair, recorder: PlayedRecorder, name: str) -> None:
    """Known bug: those of texts before it stayed while it ran."""
    pair.check([17])
    state = PairState.of(pair.drafter, pair.target)
    assert state.recordings
    if name == "callback":
        state.watch(lambda sequences, blocks: None)
    else:
        getattr(pair, name).train()
        pair.check([17])
    assert not state.recordings


@pytest.mark.usefixtures("_by_itself")
def test_a_lack_of_memory_passes(pair: Pair, recorder: PlayedRecorder, caplog: pytest.LogCaptureFixture) -> None:
    """Known bug: after one, no text of the pair was recorded any more, and a warning named a keyword that was not passed."""
    recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    pair.check([17])
    assert recorder.num_made == 0
    assert not warnings_of(caplog)
    recorder.error = None
    pair.check([17])
    assert recorder.num_made == 1


@pytest.mark.usefixtures("_by_itself")
def test_short_texts_are_not_recorded_by_themselves(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: a recording does not take longer than it saves."""
    pair.check([17], max_new_tokens=19)
    assert recorder.num_made == 0
    pair.check([17], max_new_tokens=20)
    assert recorder.num_made == 1


@pytest.mark.usefixtures("_by_itself")
def test_with_a_window_nothing_is_recorded_by_itself(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: the drafter keeps few keys."""
    pair.check([17], draft_window=(4, 12))
    assert recorder.num_made == 0


def test_at_most_two_recordings_are_kept(pair: Pair, recorder: PlayedRecorder) -> None:
    """Known bug: texts that were open at once left as many as they were."""
    streams = [pair.blocks([17] * count, **RECORDED) for count in (1, 2, 3)]
    for num_sequences, stream in enumerate(streams, start=1):
        for _ in range(num_sequences + 1):  # first a block each of the prompts
            next(stream)
    assert recorder.num_made == 3
    for stream in streams:
        stream.close()
    assert len(PairState.of(pair.drafter, pair.target).recordings) == 2


def test_a_recording_that_does_nothing_is_noticed(
    pair: Pair, recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known bug: a graph recorded on another device's stream is empty, and its outputs were those of the recording."""
    monkeypatch.setitem(recorded.RECORDERS, "cpu", lambda function: (lambda: None, function()))
    pair.check([17], **RECORDED)
    (warning,) = warnings_of(caplog)
    assert "it computes something else than eagerly" in warning


def test_a_text_that_is_open_keeps_the_memory_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a graph reads no memory that another tensor has since."""

    def record(function: Any) -> Any:
        outputs = function()

        def replay() -> None:
            for output, new in zip(outputs, function(), strict=True):
                output.copy_(new)

        return replay, outputs

    monkeypatch.setitem(recorded.RECORDERS, "cpu", record)
    pair = Pair.make()
    stream = pair.blocks([17], **RECORDED)
    next(stream)
    next(stream)
    weight = pair.target.lm_head.weight
    memory = weakref.ref(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert memory() is not None
    stream.close()
    assert memory() is None


def waiting_operations() -> dict[str, Any]:
    """Operations on a tensor of numbers and a mask for which the host waits, by name."""
    return {
        "item": lambda numbers, mask: numbers[0].item(),
        "nonzero": lambda numbers, mask: mask.nonzero(),
        "where": lambda numbers, mask: torch.where(mask),
        "masked_select": lambda numbers, mask: numbers[mask],
        "assigned": lambda numbers, mask: numbers.index_put((mask,), numbers[:1]),
        "unique": lambda numbers, mask: numbers.unique(),
        "consecutive": lambda numbers, mask: numbers.unique_consecutive(),
        "rows": lambda numbers, mask: numbers[:, None].unique(dim=0),
        "bincount": lambda numbers, mask: numbers.bincount(),
        "repeated": lambda numbers, mask: numbers.repeat_interleave(numbers),
        "condition": lambda numbers, mask: bool((numbers > 2).all()),
    }


@pytest.mark.parametrize("name", waiting_operations())
def test_what_waits_for_the_device_is_not_recorded(name: str) -> None:
    """Promise: it is found before the recording, which it would break."""
    numbers, mask = torch.tensor([3, 1, 2]), torch.tensor([True, False, True])
    with Recordable("cpu"), pytest.raises(RuntimeError, match="the host waits in aten"):
        waiting_operations()[name](numbers, mask)


def test_what_the_host_reads_is_not_recorded() -> None:
    with FakeTensorMode():
        numbers = torch.empty(3, device="cuda")
        with (
            Recordable(),
            pytest.raises(RuntimeError, match=r"the host reads the result of aten\._to_copy"),
        ):
            numbers.cpu()


def test_a_copy_from_the_hosts_memory_is_not_recorded() -> None:
    with FakeTensorMode():
        numbers = torch.empty(3, device="cuda")
        with Recordable(), pytest.raises(RuntimeError, match="copies from the host"):
            torch.ops.aten.copy_(numbers, torch.empty(3))
        with Recordable():
            torch.ops.aten.copy_(numbers, numbers + 1)


def test_what_a_graph_can_hold_is_recorded() -> None:
    numbers, mask = torch.tensor([3, 1, 2]), torch.tensor([True, False, True])
    with Recordable("cpu"):
        places = torch.arange(3)
        numbers[places] = numbers.where(mask, 0)[places]
        repeated = numbers.repeat_interleave(torch.tensor([2, 0, 1]), output_size=3)
    assert repeated.tolist() == [3, 3, 2]
    with Recordable("cuda"):
        assert numbers[mask].sum().item() == 5  # tensors of the host are there
