"""What must not go wrong beside many texts: threads, failures, settings of one request, and what is left in memory."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_many_texts import COLUMNS, GREEDY, LENGTHS, LONGEST, NEW_TOKENS, Texts, held, is_right, limits
from tiny_models import BLOCK_SIZE, greedy, make_target, small_target
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation import stopping_criteria

from dflash import BatchManager, Conversation


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(small_target("qwen3"))


def no_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


# -- threads


def test_who_waits_for_results_is_told_when_the_manager_has_stopped(texts: Texts) -> None:
    """Known bug: the last notice came while the thread was still alive, or never."""
    manager = texts.manager()
    manager.start()
    taken: list[Any] = []
    consumer = threading.Thread(target=lambda: taken.extend(manager), daemon=True)
    consumer.start()
    manager.add_request(texts.prompts[0])
    manager.stop()
    consumer.join(20)
    assert not consumer.is_alive()
    assert len(taken) == 1


def test_a_request_that_waits_for_its_place_is_refused_by_a_stop(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = texts.manager(limits(max_queue_size=1))
    errors: list[str] = []
    waits = threading.Event()
    wait_for = manager._changed.wait_for

    def add() -> None:
        try:
            manager.add_request(texts.prompts[1])
        except ValueError as error:
            errors.append(str(error))

    adder = threading.Thread(target=add)

    def noted(*args: Any) -> bool:
        if threading.current_thread() is adder:
            waits.set()  # holding the lock, which only waiting gives up
        return wait_for(*args)

    monkeypatch.setattr(manager._changed, "wait_for", noted)
    manager.start()
    with manager.pause():
        manager.add_request(texts.prompts[0])
        adder.start()
        waits.wait()
        manager.stop(block=False, hard_stop=True)
    manager.join()
    adder.join()
    assert len(errors) == 1
    assert "was stopped" in errors[0]


def test_waiting_for_the_end_inside_a_pause_is_refused(texts: Texts) -> None:
    """Known bug: with a request it waited forever."""
    manager = texts.manager()
    manager.start()
    with manager.pause():
        manager.add_request(texts.prompts[0])
        for wait in (manager.stop, manager.join):
            with pytest.raises(ValueError, match="block=False"):
                wait()
    assert manager.is_running()  # nothing has been stopped
    manager.stop()
    assert is_right(manager.get_result(), texts.truths[0])


def test_a_manager_without_requests_ends_inside_a_pause(texts: Texts) -> None:
    manager = texts.manager()
    manager.start()
    with manager.pause():
        manager.stop()
    assert not manager.is_running()


# -- failures


class Interrupts(StoppingCriteria):
    """Ctrl-C at one of the calls of all its copies."""

    calls: itertools.count[int]
    at = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if next(Interrupts.calls) == Interrupts.at:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("call", [0, 1, 9], ids=["first token", "second of a group", "inside a step"])
def test_no_text_goes_on_from_an_interrupted_step(texts: Texts, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    monkeypatch.setattr(Interrupts, "calls", itertools.count(), raising=False)
    monkeypatch.setattr(Interrupts, "at", call)
    manager = texts.manager(stopping_criteria=[Interrupts()])
    manager.add_requests(texts.prompts)
    outputs = []
    with pytest.raises(KeyboardInterrupt):
        outputs += list(manager.run())
    outputs += list(manager.run())
    assert len(outputs) == len(LENGTHS)
    assert {output.error for output in outputs} == {None, "KeyboardInterrupt"}
    for output in outputs:
        truth = texts.truths[texts.prompts.index(output.prompt_ids)]
        assert output.generated_tokens == truth[: len(output.generated_tokens)]
        assert output.error or len(output.generated_tokens) == NEW_TOKENS


def test_a_row_that_was_nan_does_not_spoil_the_next_one_in_its_place() -> None:
    texts = Texts(small_target("qwen3"))
    order = [0, 6, 1]  # the second one breaks, and the third one, which is short, comes in its place
    others = {token_id for index in (0, 1) for token_id in texts.prompts[index] + texts.truths[index]}
    broken = next(token_id for token_id in texts.truths[6][2:] if token_id not in others)

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        is_broken = (args[0] == broken)[..., None]
        return output.masked_fill(is_broken, torch.nan)

    texts.target.get_input_embeddings().register_forward_hook(spoil)
    manager = texts.manager(limits(max_requests_per_batch=2), prompt_lookup_num_tokens=0, max_draft_tokens=0)
    manager.add_requests([texts.prompts[index] for index in order])
    outputs = {output.request_id: output for output in manager.run()}
    assert "NaN" in outputs["req_1"].error
    assert is_right(outputs["req_0"], texts.truths[0])
    assert is_right(outputs["req_2"], texts.truths[1])


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_failed_admission_leaves_the_rows_as_they_were(
    texts: Texts, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    manager = texts.manager()
    manager.add_requests(texts.prompts[:num_rows])
    manager._advance()
    manager.add_request(texts.prompts[2], request_id="fails")
    with monkeypatch.context() as patch:
        patch.setattr("dflash.engine.batching.append_context", no_memory)
        manager._advance()
    outputs = {output.request_id: output for output in manager.run()}
    assert outputs.pop("fails").error == "no memory"
    for output, truth in zip(outputs.values(), texts.truths, strict=False):
        assert is_right(output, truth)
        assert len(output.generated_tokens) == NEW_TOKENS


def test_a_text_is_complete_where_its_caches_cannot_be_kept(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = texts.manager()
    manager.add_request(texts.prompts[0])
    manager.add_request(texts.prompts[1], max_new_tokens=4)
    manager._advance()
    monkeypatch.setattr(manager._batch, "_copy", no_memory)
    outputs = list(manager.run())
    assert [len(output.generated_tokens) for output in outputs] == [4, NEW_TOKENS]
    assert all(output.error is None for output in outputs)
    assert len(manager._conversations) == 0


def test_an_output_that_cannot_be_written_fails_alone(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = texts.manager()
    add = manager._add
    monkeypatch.setattr(
        manager, "_add", lambda block, output: no_memory() if output.request_id == "req_1" else add(block, output)
    )
    manager.add_requests(texts.prompts[:3])
    outputs = {output.request_id: output for output in manager.run()}
    assert outputs["req_1"].error == "no memory"
    for index in (0, 2):
        assert outputs[f"req_{index}"].generated_tokens == texts.truths[index][:NEW_TOKENS]


def test_a_pause_that_fails_drops_what_was_kept(texts: Texts) -> None:
    manager = texts.manager()
    manager.add_request(texts.prompts[0])
    assert len(list(manager.run())) == 1
    assert len(manager._conversations) == 1
    with pytest.raises(RuntimeError, match="half changed"), manager.pause():
        raise RuntimeError("half changed")
    assert len(manager._conversations) == 0


def test_a_row_that_lives_through_a_pause_is_not_kept(texts: Texts) -> None:
    """Bug: its keys from before the pause, of other weights, served later prompts."""
    manager = texts.manager()
    manager.add_requests(texts.prompts[:2])
    manager._advance()
    with manager.pause():
        pass
    manager.add_request(texts.prompts[2])
    while manager._tickets:
        manager._advance()
    [kept] = manager._conversations._kept
    assert kept.token_ids[: LENGTHS[2]] == texts.prompts[2]


@pytest.mark.parametrize("way", ["run", "start"])
def test_what_was_kept_is_dropped_where_writing_begins_again(texts: Texts, way: str) -> None:
    """Bug: with no `pause`, weights that had changed between two runs went on from the caches of the older ones."""
    manager = texts.manager()
    manager.add_request(texts.prompts[0])
    while manager._tickets:
        manager._advance()
    assert len(manager._conversations) == 1
    if way == "run":
        assert len(list(manager.run())) == 1
    else:
        manager.start()
        assert len(manager._conversations) == 0
        manager.stop()
    assert len(manager._conversations) == 0


def test_nothing_runs_inside_the_callers_own_pause(texts: Texts) -> None:
    """Bug: `run` wrote whole texts inside `pause`, which promises that no step runs."""
    manager = texts.manager()
    manager.add_request(texts.prompts[0])
    with manager.pause(), pytest.raises(ValueError, match="Inside pause"):
        next(manager.run())
    [output] = manager.run()
    assert is_right(output, texts.truths[0])


def test_a_run_waits_for_the_pause_of_another_thread(texts: Texts) -> None:
    manager = texts.manager()
    manager.add_request(texts.prompts[0])
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(manager.run()))
    with manager.pause():
        thread.start()
        thread.join(0.2)
        assert not outputs
        assert thread.is_alive()
    thread.join()
    assert is_right(outputs[0], texts.truths[0])


def test_a_cancelled_row_has_the_acceptance_of_its_own_steps_alone(texts: Texts) -> None:
    manager = texts.manager()
    request_id = manager.add_request(texts.prompts[0])
    manager._advance()
    manager._advance()
    manager.cancel_request(request_id)
    [output] = manager.run()
    assert sum(output.acceptance_lengths) == len(output.generated_tokens) - 1


def test_steps_may_leave_inference_mode(texts: Texts) -> None:
    manager = texts.manager()
    manager.add_requests(texts.prompts[:3], streaming=True)
    results = manager.run()
    with torch.inference_mode():
        next(results)
    assert {result.error for result in results} == {None}


# -- settings of one request


class Counts(StoppingCriteria):
    """Stops its text after six calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return torch.full((len(input_ids),), self.num_calls >= 6)


def test_a_criterions_state_is_one_requests(texts: Texts) -> None:
    outputs = texts.generate(stopping_criteria=[Counts()])
    assert [len(output.generated_tokens) for output in outputs] == [6] * len(LENGTHS)


class Ticks(StoppingCriteria):
    """A clock that goes on by a second with each token of all texts."""

    num_tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        Ticks.num_tokens += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "fields", [{"max_requests_per_batch": 1}, {"max_requests_per_batch": 8, "num_blocks": -(-LONGEST // 4)}], ids=str
)
def test_the_clock_of_a_request_begins_with_its_row(
    texts: Texts, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(Ticks, "num_tokens", 0)
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: Ticks.num_tokens))
    outputs = texts.generate(limits(**fields), max_time=7.5, stopping_criteria=[Ticks()])
    assert [len(output.generated_tokens) for output in outputs] == [9] * len(LENGTHS)


def test_the_clock_of_a_prompt_that_is_read_alone_begins_with_its_row(texts: Texts) -> None:
    """Known bug: it began while the prompts before it were read."""
    manager = texts.manager(max_time=60.0, prefill_chunk_size=len(texts.prompts[0]))
    manager.add_requests(texts.prompts[:2])
    [first] = manager._next()
    [second] = manager._waiting
    assert first.member is not None
    assert second.member is None
    first.member = None
    manager._waiting.appendleft(first)
    assert len(list(manager.run())) == 2


def test_a_maximal_length_counts_the_prompt(texts: Texts) -> None:
    """Known bug: it was ignored."""
    of_config = GenerationConfig(max_length=24, do_sample=False)
    for keywords, length in (({"max_length": 20, **GREEDY}, 20), ({"generation_config": of_config}, 24)):
        manager = BatchManager(texts.drafter, texts.target, **keywords)
        manager.add_requests(texts.prompts[:3])
        assert {len(output.prompt_ids + output.generated_tokens) for output in manager.run()} == {length}
        manager.add_request(texts.prompts[0], max_new_tokens=3)
        [output] = manager.run()
        assert len(output.generated_tokens) == 3


@pytest.mark.parametrize("setting", [{"min_new_tokens": 9}, {"min_length": 16}], ids=str)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20}], ids=["greedy", "sampled"])
def test_a_request_with_its_own_stop_token_has_its_own_processors(
    texts: Texts, setting: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Known bug: those of a request without a stop token were applied."""
    manager = texts.manager(limits(seed=3), **setting, **sampling)
    settings = {**setting, **sampling}
    alone = []
    for index in range(3):
        keywords: dict[str, Any] = {"generator": torch.Generator().manual_seed(3 + index)} if sampling else {}
        free = texts.alone(index, **sampling, **keywords)
        stops = {"eos_token_id": free[5]} if index != 1 else {}
        keywords = {"generator": torch.Generator().manual_seed(3 + index)} if sampling else {}
        alone.append(texts.alone(index, **settings, **stops, **keywords))
        manager.add_request(texts.prompts[index], **stops)
    outputs = {output.request_id: output for output in manager.run()}
    assert [outputs[f"req_{index}"].generated_tokens for index in range(3)] == alone


def test_a_requests_stop_token_comes_before_those_of_the_manager(texts: Texts) -> None:
    manager = texts.manager(stop_token_ids=[])
    stop = texts.truths[0][5]
    manager.add_request(texts.prompts[0], eos_token_id=stop)
    [output] = manager.run()
    assert output.generated_tokens == texts.truths[0][: texts.truths[0].index(stop) + 1]


def test_several_rows_are_no_prompt(texts: Texts) -> None:
    """Known bug: they were written as one text."""
    manager = texts.manager()
    with pytest.raises(ValueError, match=r"\[2, 2\]: pass one prompt"):
        manager.add_request([[1, 2], [3, 4]])
    manager.add_request(torch.tensor([texts.prompts[0]]))
    [output] = manager.run()
    assert is_right(output, texts.truths[0])


def test_an_id_of_the_callers_is_not_given_again(texts: Texts) -> None:
    manager = texts.manager()
    manager.add_request(texts.prompts[0], request_id="req_1")
    assert manager.add_request(texts.prompts[1]) == "req_2"
    assert manager.add_request(texts.prompts[2]) == "req_3"


# -- memory


def test_caches_that_were_copied_or_dropped_are_freed(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Any] = []
    begin = Conversation.begin

    def noted(self: Conversation, target_cache: Any, *args: Any) -> None:
        caches.append(weakref.ref(target_cache))
        begin(self, target_cache, *args)

    monkeypatch.setattr(Conversation, "begin", noted)
    manager = texts.manager()
    manager.add_requests(texts.prompts[:3])
    manager._advance()
    gc.collect()
    assert [cache() for cache in caches if cache()] == [manager._batch.conversation.target_cache]
    monkeypatch.setattr(manager._batch, "run_step", no_memory)
    manager._advance()
    gc.collect()
    assert not any(cache() for cache in caches)


def test_a_text_without_a_length_gets_room_for_a_part_of_its_positions() -> None:
    target = make_target("qwen3", num_hidden_layers=2, max_position_embeddings=32768)
    texts = Texts(target)
    manager = BatchManager(texts.drafter, target, **GREEDY)
    manager.add_request(texts.prompts[0])
    manager._advance()
    [keys, *_], _ = manager._batch.conversation.target_cache.storage(0)
    assert keys.shape[2] == 1280  # 1024 new tokens, the prompt and a step


@pytest.mark.parametrize(
    ("keywords", "overrides", "columns"),
    [
        ({}, {}, COLUMNS),
        ({"prompt_lookup_num_tokens": 0}, {}, BLOCK_SIZE),
        ({"prompt_lookup_num_tokens": 0}, {"sample_from_anchor": True}, BLOCK_SIZE + 1),
    ],
    ids=str,
)
def test_a_row_has_room_for_its_last_step(keywords: dict[str, Any], overrides: dict[str, Any], columns: int) -> None:
    """Known bug: at the end of a text all caches doubled, because a lookup proposes more than a block."""
    texts = Texts(small_target("qwen3"), **overrides)
    manager = texts.manager(limits(max_batch_tokens=columns), **keywords)
    manager.add_request(texts.prompts[0])
    while not manager._batch.members:
        manager._advance()
    [member] = manager._batch.members.values()
    assert member.longest == LENGTHS[0] + NEW_TOKENS + columns
    with pytest.raises(ValueError, match=f"up to {columns}"):
        texts.manager(limits(max_batch_tokens=columns - 1), **keywords)


@pytest.mark.parametrize("place", ["run_step", "admit", "read"])
def test_kept_conversations_give_way_where_memory_lacks(
    texts: Texts, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Bug: requests failed for want of the memory that kept conversations took."""
    manager = texts.manager(prefill_chunk_size=4)
    manager.add_request(texts.prompts[0])
    while manager._tickets:
        manager._advance()
    assert len(manager._conversations) == 1
    owner: Any = manager._batch.target if place == "read" else manager._batch
    call = getattr(type(owner), place)
    failed = []

    def needs_memory(self: Any, *args: Any) -> Any:
        output = call(self, *args) if place == "read" else None  # it fails with the chunk in its cache
        if len(manager._conversations):
            failed.append(place)
            no_memory()
        return output if place == "read" else call(self, *args)

    monkeypatch.setattr(type(owner), place, needs_memory)
    turn = [*texts.prompts[0], *texts.truths[0][:NEW_TOKENS], 7, 8, 9, 7, 8]
    manager._conversations.add(held([1, 2, 3]))
    for prompt in (turn, texts.prompts[2]):
        manager.add_request(prompt)
    while manager._tickets:
        manager._advance()
    assert failed
    assert len(manager._results) == 3
    for output in manager._results:
        assert output.error is None
        truth = greedy(texts.target, torch.tensor([output.prompt_ids]), max_new_tokens=NEW_TOKENS)
        assert output.generated_tokens == truth[0, len(output.prompt_ids) :].tolist()


def test_an_idle_manager_holds_no_rows_and_a_stopped_one_nothing(texts: Texts) -> None:
    """Bug: the storage of a batch stayed until another one had been allocated."""
    manager = texts.manager()
    manager.start()
    for request_id in manager.add_requests(texts.prompts[:3]):
        manager.get_result(request_id)
    assert not hasattr(manager._batch.conversation, "target_cache")
    assert len(manager._conversations) == 3
    manager.stop()
    assert len(manager._conversations) == 0
