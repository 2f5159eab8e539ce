"""`cuda_graph=True`: steps that are recorded once and replayed, on a recorder that keeps what CUDA graphs promise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
import torch
from devices import CHANGES, NEW_TOKENS, TEXT_LENGTH, Pair, PlayedRecorder
from families import FAMILIES
from tiny_models import GREEDY, SMALL, greedy, make_drafter, make_prompt

from dflash import Conversation, spec_generate
from dflash.engine import fallback_reason, recorded, runner
from dflash.model import decoding_dflash


RECORDED: dict[str, Any] = {"cuda_graph": True}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> PlayedRecorder:
    """The recorder of the CPU."""
    recorder = PlayedRecorder()
    monkeypatch.setitem(recorded.RECORDERS, "cpu", recorder)
    monkeypatch.setattr(recorded, "SMALLEST_CAPACITY", 256)
    return recorder


@pytest.fixture
def pair(recorder: PlayedRecorder) -> Pair:
    """A pair of which nothing is recorded."""
    return Pair.make()


@pytest.fixture
def _small_rooms(recorder: PlayedRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SMALLEST_CAPACITY", 64)
    for module in (runner, decoding_dflash):
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
    assert recorder.num_recordings == 1
    assert recorder.num_replays >= 3 * (len(eager) - 2)  # all steps but the last token's
    assert fallback_reason(pair.drafter, pair.target) is None


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0.9, "top_k": 9, "top_p": 0.8}], ids=str)
def test_sampled_text_is_the_eager_one(pair: Pair, recorder: PlayedRecorder, sampling: dict[str, Any]) -> None:
    """Promise: a seed writes the same text, and another temperature needs no recording."""
    eager = pair.follow_sampled(17, **sampling)
    assert pair.write([17], **sampling, **RECORDED) == eager
    num_recordings = recorder.num_recordings
    warmer = {**sampling, "temperature": 1.3}
    eager = pair.follow_sampled(17, **warmer)
    assert pair.write([17], **warmer, **RECORDED) == eager
    assert recorder.num_recordings == num_recordings == 1


def test_sequences_of_a_batch_end_at_different_times(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: those that go on stay in the recording, at their own places."""
    last = next(i for i in range(130, TEXT_LENGTH) if pair.text[0, i] not in pair.text[0, 70:i])
    lengths = [last - 40, last - 9, last - 55, last - 21]
    stop = {"stop_token_ids": [int(pair.text[0, last])], "max_new_tokens": 80}
    expected = [pair.text[0, length : last + 1].tolist() for length in lengths]
    for _ in range(2):
        assert pair.write(lengths, **stop, **RECORDED) == expected
    assert recorder.num_recordings == 1


@pytest.mark.usefixtures("_small_rooms")
@pytest.mark.parametrize("lengths", [[17], [17, -60, 31]], ids=["one", "three"])
def test_a_text_that_outgrows_its_recording_moves_to_a_larger_one(
    pair: Pair, recorder: PlayedRecorder, lengths: list[int]
) -> None:
    pair.check(lengths, max_new_tokens=150, **RECORDED)
    assert recorder.num_recordings == (3 if len(lengths) == 1 else 2)


@pytest.mark.usefixtures("_small_rooms")
def test_a_batch_that_shrinks_and_outgrows_its_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    last = next(i for i in range(60, TEXT_LENGTH) if pair.text[0, i] not in pair.text[0, 30:i])
    lengths = [last + 1, last - 20]  # the second one ends soon
    stop = {"stop_token_ids": [int(pair.text[0, last])], "max_new_tokens": 100}
    eager = pair.write(lengths, compile=False, **stop)
    assert len(eager[1]) == 21
    assert len(eager[0]) > 60
    assert pair.write(lengths, **stop, **RECORDED) == eager
    assert recorder.num_recordings == 2


def test_a_conversation_goes_on_recorded(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: between its turns a conversation owns its caches, and other texts use the recording."""
    conversation = Conversation()
    for length in (17, 70, 90, 33, 140):
        pair.check([length], conversation=conversation, **RECORDED)
        pair.check([-23], **RECORDED)
    assert conversation.num_reused == 33 + NEW_TOKENS - 1
    assert recorder.num_recordings == 1


@pytest.mark.usefixtures("_small_rooms")
@pytest.mark.parametrize("prompt_length", [27, 41])
def test_wide_lookups_at_a_recordings_end_lose_nothing(prompt_length: int, recorder: PlayedRecorder) -> None:
    """Known bug: their columns moved the text to other storage, and the next replay did not see them."""
    pair = Pair.make(seed=11)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 63, "max_matching_ngram_size": 2, "max_new_tokens": 200}
    blocks = list(pair.blocks([prompt_length], **options, **RECORDED))
    assert pair.texts_of(blocks) == pair.expected([prompt_length], 200)
    assert any(block.is_lookup for block in blocks)
    assert recorder.num_replays > 10


def test_texts_in_and_outside_inference_mode_share_a_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: what is recorded in inference mode is written outside of it."""
    with torch.inference_mode():
        pair.check([17], **RECORDED)
    pair.check([60], **RECORDED)
    assert fallback_reason(pair.drafter, pair.target) is None
    assert recorder.num_recordings == 1


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


def test_caches_after_a_recorded_text_are_the_eager_ones(pair: Pair) -> None:
    """Promise: also the context that waits, which no later replay overwrites."""
    kept = Conversation()
    plain = Conversation()
    pair.write([17], conversation=plain, compile=False)
    pair.write([17], conversation=kept, **RECORDED)
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
    assert recorder.num_recordings == 1


def test_an_error_of_the_callers_object_frees_the_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] > 30:
            raise RuntimeError("a criterion")
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(RuntimeError, match="a criterion"):
        pair.write([17], stopping_criteria=[criterion], **RECORDED)
    pair.check([33], **RECORDED)
    assert recorder.num_recordings == 1


def test_two_texts_at_once_have_a_recording_each(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: no text reads or overwrites what belongs to the other."""
    texts: list[list[int]] = [[], []]
    for first, second in zip_longest(pair.blocks([17], **RECORDED), pair.blocks([-60], **RECORDED)):
        texts[0] += first.token_ids if first else []
        texts[1] += second.token_ids if second else []
    assert texts == pair.expected([17, -60])
    assert recorder.num_recordings == 2


def test_two_threads_write_their_own_texts(pair: Pair) -> None:
    """Promise: threads may share a recorded pair."""
    pair.check_in_threads([17, -60], **RECORDED)


def test_a_third_key_drops_the_recording_that_was_used_least_lately(pair: Pair, recorder: PlayedRecorder) -> None:
    for lengths in ([17], [17, 60], [33]):  # one, two, one
        pair.check(lengths, **RECORDED)
    assert recorder.num_recordings == 2
    pair.check([17, 60, 33], **RECORDED)  # drops two
    pair.check([17], **RECORDED)
    assert recorder.num_recordings == 3
    pair.check([17, 60], **RECORDED)
    assert recorder.num_recordings == 4


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
    assert f"{type(error).__name__}: {first_line}" in warning
    assert "\n" not in warning
    assert first_line in str(fallback_reason(pair.drafter, pair.target))


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_replay_that_fails_in_mid_text_leaves_the_right_text(
    pair: Pair, recorder: PlayedRecorder, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fails_at = fails_at
    pair.check([17, -60, 31], **RECORDED)
    assert recorder.num_replays == fails_at
    assert len(warnings_of(caplog)) == 1


def test_a_model_that_reads_values_runs_eagerly(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    mlp = pair.target.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states * (1.0 if states.sum().item() < 1e9 else 0.0))
    pair.check([17], **RECORDED)
    assert "_local_scalar_dense is not permitted" in warnings_of(caplog)[0]


def test_a_recording_that_computes_something_else_is_not_used(
    pair: Pair, recorder: PlayedRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: the first replay is compared with the step that was recorded."""
    recorder.spoil = lambda outputs: outputs.features.copy_(outputs.features.flip(-1))
    pair.check([17], **RECORDED)
    assert recorder.num_replays == 1
    assert "computes something else than eagerly" in warnings_of(caplog)[0]


def test_without_a_cuda_device_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair.make()
    for _ in range(2):
        pair.check([17], **RECORDED)
    assert len(warnings_of(caplog)) == 1
    assert fallback_reason(pair.drafter, pair.target) == "cpu is no CUDA device"


def test_a_pair_that_is_moved_to_a_device_is_recorded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bug: a pair that was once asked on the CPU was never recorded again."""
    pair = Pair.make()
    pair.check([17], **RECORDED)
    recorder = PlayedRecorder()
    monkeypatch.setitem(recorded.RECORDERS, "cpu", recorder)
    weight = pair.target.lm_head.weight
    pair.target.lm_head.weight = torch.nn.Parameter(weight.detach().clone())  # as a move does
    pair.check([17], **RECORDED)
    assert recorder.num_recordings == 1


@pytest.mark.skipif(not FAMILIES["qwen3_next"].is_served, reason="transformers 4 has no common form of running states")
def test_linear_layers_are_not_recorded(recorder: PlayedRecorder, caplog: pytest.LogCaptureFixture) -> None:
    """Known bug: what compiled steps refused was recorded."""
    target = FAMILIES["qwen3_next"].make()
    drafter = make_drafter()
    prompt = make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=12, eos_token_id=None)
    output = spec_generate(drafter, target, prompt, max_new_tokens=12, **GREEDY, **RECORDED)
    assert torch.equal(output.sequences, truth)
    assert "layers of type linear_attention" in warnings_of(caplog)[0]
    assert recorder.num_recordings == 0


def test_two_ways_to_run_a_step_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="cuda_graph=True and compile=True"):
        pair.blocks([17], compile=True, **RECORDED)


@pytest.mark.parametrize(
    "keywords",
    [
        {"draft_tree": 6},
        {"adaptive": True},
        {"output_scores": True},
        {"output_logits": True},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "verification": "rejection"},
        {"max_draft_tokens": 0},
    ],
    ids=str,
)
def test_steps_that_need_the_host_run_eagerly(pair: Pair, recorder: PlayedRecorder, keywords: dict[str, Any]) -> None:
    """Promise: they write the same text, and nothing is recorded."""
    is_exact = "adaptive" not in keywords
    recorded_text = pair.write([17], **keywords, **RECORDED)
    assert recorder.num_recordings == 0
    assert not is_exact or recorded_text == pair.write([17], compile=False, **keywords)
    assert "temperature" in keywords or "repetition_penalty" in keywords or recorded_text == pair.expected([17])


def test_steps_with_a_lookup_run_between_replays(recorder: PlayedRecorder) -> None:
    """Promise: a text that repeats itself is looked up, and the rest of it is recorded."""
    pair = Pair.make(seed=11)
    asked: dict[str, Any] = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2, "max_new_tokens": 120}
    blocks = list(pair.blocks([17], **asked, **RECORDED))
    assert pair.texts_of(blocks) == pair.expected([17], 120)
    num_looked_up = sum(block.is_lookup for block in blocks)
    assert 0 < num_looked_up < len(blocks) - 1
    assert 0 < recorder.num_replays <= len(blocks) - num_looked_up


# What changes


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_recorded_anew(
    pair: Pair, recorder: PlayedRecorder, change: Callable[[Pair], None]
) -> None:
    """Promise: a replay holds addresses and operations, and the text is that of the model as it is now."""
    pair.check([17], **RECORDED)
    change(pair)
    pair.write_text()
    pair.check([17], **RECORDED)
    assert recorder.num_recordings == 2


def test_weights_that_change_in_their_place_need_no_recording(pair: Pair, recorder: PlayedRecorder) -> None:
    """Promise: a merged adapter, or a step of training, is read by the next replay."""
    pair.check([17], **RECORDED)
    with torch.no_grad():
        pair.target.model.layers[0].mlp.down_proj.weight.neg_()
    pair.write_text()
    pair.check([17], **RECORDED)
    assert recorder.num_recordings == 1


def test_hooks_on_a_model_see_every_forward(pair: Pair) -> None:
    """Promise: a hook that comes in mid-text makes the rest run eagerly."""
    blocks = pair.blocks([17], **RECORDED)
    written = [token_id for _ in range(4) for token_id in next(blocks).token_ids]
    forwards: list[int] = []
    with pair.target.register_forward_pre_hook(lambda *_: forwards.append(1)):
        rest = list(blocks)
    assert written + [token_id for block in rest for token_id in block.token_ids] == pair.expected([17])[0]
    assert len(forwards) == len(rest)


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
    assert recorder.num_recordings == 1


@pytest.mark.parametrize(
    ("fields", "keywords"),
    [
        ({"selector_rank": 4, "selector_top_k": 5}, {}),
        ({"gru_hidden_dim": 6, "emb_dim": 4}, {}),
        ({}, {"draft_window": (4, 12)}),
    ],
    ids=["selector", "Domino", "window"],
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
    keep = runner.EngineRunner.keep

    def noted(self: Any, step: Any, num_kept: list[int]) -> None:
        proposed.append(step.proposals.token_ids.flatten().tolist())
        keep(self, step, num_kept)

    monkeypatch.setattr(runner.EngineRunner, "keep", noted)
    for way in (RECORDED, {"compile": False}):
        other.check([17], **keywords, **way)
    half = len(proposed) // 2
    assert proposed[:half] == proposed[half:]
    assert recorder.num_recordings == 1
