"""Many texts at once: each request gets the text that it gets alone, whatever comes, goes, fails or is cancelled beside it."""

from __future__ import annotations

import asyncio
import random
import threading
from itertools import pairwise
from queue import Full
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny_models import (
    SMALL,
    VOCAB_SIZE,
    BatchScriptedDrafter,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    scripted,
    small_target,
)
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from dflash import BatchOutput, Conversation, History, spec_generate
from dflash.engine.batching import Conversations
from dflash.engine.manager import BatchManager
from dflash.engine.many_texts import generate_batch
from dflash.model.cache_dflash import LinearAttentionLayer
from dflash.model.targets_dflash import InexactError


NEW_TOKENS = 18
LENGTHS = [9, 1, 5, 12, 7, 3, 14, 2]
COLUMNS = 32  # of a step at most: 31 tokens may be looked up
LONGEST = max(LENGTHS) + NEW_TOKENS + COLUMNS  # positions of a row
GREEDY: dict[str, Any] = {"temperature": 0.0}


def limits(**fields: Any) -> Any:
    """What `ContinuousBatchingConfig` holds, which transformers 4 does not have."""
    return SimpleNamespace(**{"page_size": 4, "max_requests_per_batch": 3, **fields})


class Texts:
    """A target, a drafter that is right now and then, prompts, and what the target writes to them."""

    def __init__(self, target: PreTrainedModel, **overrides: Any) -> None:
        self.target = target
        prompts = [make_prompt(length, seed=10 + row) for row, length in enumerate(LENGTHS)]
        self.drafter: BatchScriptedDrafter = scripted(target, prompts, **{**SMALL, **overrides})
        self.prompts = [prompt[0].tolist() for prompt in prompts]
        self.truths = [truth[len(prompt) :] for truth, prompt in zip(self.drafter.truths, self.prompts, strict=True)]

    def generate(self, config: Any = None, **keywords: Any) -> list[Any]:
        settings = {"max_new_tokens": NEW_TOKENS, **GREEDY, **keywords}
        outputs = generate_batch(
            self.drafter, self.prompts, target=self.target, continuous_batching_config=config or limits(), **settings
        )
        return list(outputs.values())

    def manager(self, config: Any = None, **keywords: Any) -> BatchManager:
        settings = {"max_new_tokens": NEW_TOKENS, **GREEDY, **keywords}
        return BatchManager(self.drafter, self.target, continuous_batching_config=config or limits(), **settings)

    def alone(self, index: int, **keywords: Any) -> list[int]:
        settings = {"max_new_tokens": NEW_TOKENS, **GREEDY, **keywords}
        text = spec_generate(self.drafter, self.target, [self.prompts[index]], **settings)
        return text[0, len(self.prompts[index]) :].tolist()


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(small_target("qwen3"))


def is_right(output: Any, truth: list[int]) -> bool:
    return output.error is None and output.generated_tokens == truth[: len(output.generated_tokens)]


# -- the texts


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama_tied"])
def test_texts_equal_plain_ones_while_rows_come_and_go(kind: str) -> None:
    texts = Texts(small_target(kind))
    outputs = texts.generate()
    assert [output.generated_tokens for output in outputs] == [truth[:NEW_TOKENS] for truth in texts.truths]
    assert [output.prompt_ids for output in outputs] == texts.prompts
    assert all(isinstance(output, GenerationOutput) and output.is_finished() for output in outputs)
    assert max(max(output.acceptance_lengths) for output in outputs) > 3, "nothing is accepted, so nothing is shown"


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_running_states_join_the_batch(family: str) -> None:
    if LinearAttentionLayer is None:
        pytest.skip("this transformers cannot roll its states back")
    target = FAMILIES[family].make()
    vocab_size = target.config.vocab_size
    layers = {"num_hidden_layers": 1, "target_layer_ids": [0], "num_target_layers": target.config.num_hidden_layers}
    prompts = [
        make_prompt(length, seed=10 + row, vocab_size=vocab_size) for row, length in enumerate([9, 3, 5, 12, 1])
    ]
    drafter = scripted(target, prompts, **layers)
    ids = [prompt[0].tolist() for prompt in prompts]
    manager = BatchManager(drafter, target, continuous_batching_config=limits(), **GREEDY)
    manager.add_request(ids[0], max_new_tokens=1)  # so that the batch begins with the second of those read together
    manager.add_request(ids[1], max_new_tokens=12)
    second = list(manager.run())[-1]
    assert second.generated_tokens == drafter.truths[1][len(ids[1]) :][:12]
    outputs = generate_batch(
        drafter,
        ids,
        target=target,
        continuous_batching_config=limits(max_requests_per_batch=2),
        max_new_tokens=12,
        **GREEDY,
    )
    for prompt, truth, output in zip(ids, drafter.truths, outputs.values(), strict=True):
        assert output.generated_tokens == truth[len(prompt) : len(prompt) + 12]


def test_each_request_ends_by_its_own_length_and_stop_token(texts: Texts) -> None:
    manager = texts.manager()
    stop = texts.truths[3][5]
    for index, prompt in enumerate(texts.prompts):
        stops = stop if index == 3 else None
        manager.add_request(prompt, max_new_tokens=1 + 3 * index, eos_token_id=stops)
    for output in manager.run():
        index = int(output.request_id.removeprefix("req_"))
        length = texts.truths[3].index(stop) + 1 if index == 3 else 1 + 3 * index
        assert output.generated_tokens == texts.truths[index][:length]


def test_a_request_is_admitted_where_one_has_ended(texts: Texts) -> None:
    """Three rows, lengths that differ: refilled rows need fewer forwards than batches that wait for their longest text."""
    rows_run: list[int] = []
    embedding = texts.target.get_input_embeddings()
    manager = texts.manager()
    for index, prompt in enumerate(texts.prompts):
        manager.add_request(prompt, max_new_tokens=2 if index % 3 else NEW_TOKENS)
    handle = embedding.register_forward_pre_hook(lambda module, args: rows_run.append(len(args[0])))
    ended = [output.request_id for output in manager.run()]
    handle.remove()
    assert ended[0] != "req_0", "results wait for the first request"
    assert max(rows_run) == 3
    assert sorted(ended) == [f"req_{index}" for index in range(len(LENGTHS))]


def test_sampled_texts_have_seeds_of_their_own(texts: Texts) -> None:
    settings = {"temperature": 0.9, "top_k": 20}
    outputs = texts.generate(limits(seed=5), **settings)
    for index, output in enumerate(outputs):
        alone = texts.alone(index, generator=torch.Generator().manual_seed(5 + index), **settings)
        assert output.generated_tokens == alone
    torch.manual_seed(1)
    drawn = texts.generate(**settings)
    torch.manual_seed(1)
    again = texts.generate(limits(max_requests_per_batch=2), **settings)
    assert [output.generated_tokens for output in drawn] == [output.generated_tokens for output in again]
    seeded = [texts.generate(generator=torch.Generator().manual_seed(2), **settings) for _ in range(2)]
    assert [output.generated_tokens for output in seeded[0]] == [output.generated_tokens for output in seeded[1]]
    assert len({tuple(output.generated_tokens) for output in drawn}) > 1


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.3}, {"min_new_tokens": 6}, {"temperature": 0.8, "no_repeat_ngram_size": 2}]
)
def test_processors_see_the_text_of_their_own_request(texts: Texts, settings: dict[str, Any]) -> None:
    outputs = texts.generate(limits(seed=3), **settings)
    for index, output in enumerate(outputs):
        seeded = {"generator": torch.Generator().manual_seed(3 + index)} if "temperature" in settings else {}
        assert output.generated_tokens == texts.alone(index, **settings, **seeded)


class Remembers(LogitsProcessor):
    """Fails where it is called for another text than before."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = input_ids[0].tolist()
        assert text[: len(self.text)] == self.text, "two texts share a state"
        self.text = text
        return scores


def test_a_processors_state_is_one_requests(texts: Texts) -> None:
    processor = Remembers()
    outputs = texts.generate(logits_processor=[processor])
    assert [output.error for output in outputs] == [None] * len(LENGTHS)
    assert processor.text == []


def test_drawn_proposals_use_the_uniforms_of_their_request() -> None:
    """Under "rejection" each step draws; a request that ran alone has drawn the same, if its rows were never mixed up."""
    texts = Texts(small_target("qwen3"))
    settings = {"temperature": 0.7, "verification": "rejection", "prompt_lookup_num_tokens": 0}
    outputs = texts.generate(limits(seed=9), **settings)
    for index, output in enumerate(outputs):
        generator = torch.Generator().manual_seed(9 + index)
        alone = texts.alone(index, generator=generator, **settings)
        assert output.generated_tokens[:-1] == alone[:-1]  # before the last token nothing is drafted alone


def test_a_long_prompt_is_read_between_the_steps_of_others(texts: Texts) -> None:
    widths: list[int] = []
    manager = texts.manager(limits(), prefill_chunk_size=4)
    manager.add_request(texts.prompts[1])
    next(iter([manager._advance()]))  # the first row decodes
    prompt = make_prompt(26, seed=3)
    manager.add_request(prompt[0].tolist())
    embedding = texts.target.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    outputs = {output.request_id: output for output in manager.run()}
    handle.remove()
    chunks = [place for place, width in enumerate(widths) if width == 4]
    assert len(chunks) == 6, "26 tokens are six chunks of four and one of two"
    assert any(second - first > 1 for first, second in pairwise(chunks)), "no step ran between"
    truth = greedy(texts.target, prompt, max_new_tokens=NEW_TOKENS)[0, 26:].tolist()
    assert outputs["req_1"].generated_tokens == truth
    assert outputs["req_0"].generated_tokens == texts.truths[1][:NEW_TOKENS]


def test_log_probabilities_are_those_of_the_tokens(texts: Texts) -> None:
    output = texts.generate(limits(return_logprobs=True))[0]
    ids = torch.tensor([texts.prompts[0] + output.generated_tokens])
    with torch.no_grad():
        log_probs = texts.target(ids).logits[0, len(texts.prompts[0]) - 1 : -1].log_softmax(-1)
    of_tokens = log_probs.gather(1, torch.tensor(output.generated_tokens)[:, None]).flatten()
    torch.testing.assert_close(torch.tensor(output.logprobs), of_tokens, rtol=1e-4, atol=1e-4)


def test_a_generation_config_serves_all_requests(texts: Texts) -> None:
    """A server's says `use_cache=False`, because transformers has pages of its own."""
    config = GenerationConfig(max_new_tokens=7, do_sample=False, use_cache=False)
    outputs = generate_batch(texts.drafter, texts.prompts, config, target=texts.target, prompt_lookup_num_tokens=5)
    assert [output.generated_tokens for output in outputs.values()] == [truth[:7] for truth in texts.truths]
    assert config.max_new_tokens == 7
    assert config.use_cache is False


def test_a_text_without_a_length_ends_with_the_positions() -> None:
    """As in transformers' continuous batching: its callers rely on stop tokens alone."""
    texts = Texts(make_target("qwen3", num_hidden_layers=2, max_position_embeddings=32))
    outputs = generate_batch(texts.drafter, texts.prompts[2:4], target=texts.target, **GREEDY)
    for output, truth in zip(outputs.values(), texts.truths[2:4], strict=True):
        assert len(output.prompt_ids) + len(output.generated_tokens) == 32
        assert is_right(output, truth)


# -- bounds


def test_rows_and_positions_stay_within_their_bounds(texts: Texts) -> None:
    rows_run: list[int] = []
    embedding = texts.target.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: rows_run.append(len(args[0])))
    outputs = texts.generate(limits(max_requests_per_batch=8, max_batch_tokens=2 * COLUMNS))
    assert max(rows_run) == 2
    rows_run.clear()
    most = 2 * LONGEST
    outputs += texts.generate(limits(max_requests_per_batch=8, num_blocks=-(-most // 4)))
    handle.remove()
    assert 2 <= max(rows_run) < 4
    assert all(is_right(output, truth) for output, truth in zip(outputs, 2 * texts.truths, strict=True))


def test_what_has_ended_is_forgotten(texts: Texts) -> None:
    """Promise: a server's memory does not grow with the requests that it has answered."""
    manager = texts.manager()
    for _ in range(2):
        manager.add_requests(texts.prompts)
        assert len(list(manager.run())) == len(LENGTHS)
        assert not hasattr(manager._batch, "runner")
    for kept in (manager._tickets, manager._rows, manager._batch.members):
        assert not kept
    manager.add_requests([texts.prompts[0], *texts.prompts])
    while len(manager._tickets) > 1:
        manager._advance()
        if manager._batch.members:
            assert set(manager._batch.runner.proposer._lookups) <= set(manager._batch.members)


# -- conversations


def held(token_ids: list[int]) -> Conversation:
    """One that says that it holds these tokens."""
    conversation = Conversation()
    conversation.hold(token_ids, [])
    return conversation


def columns_run(target: PreTrainedModel, widths: list[int]) -> Any:
    embedding = target.get_input_embeddings()
    return embedding.register_forward_pre_hook(lambda module, args: widths.append(args[0].numel()))


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_a_second_turn_computes_what_is_new(chunk_size: int) -> None:
    """Two conversations in turn: the target reads a prompt's new tokens, and the drafter accepts as if it had read all."""
    texts = Texts(small_target("qwen3"))
    manager = texts.manager(prefill_chunk_size=chunk_size)
    manager.add_requests(texts.prompts[:2])
    firsts = {output.request_id: output for output in manager.run()}
    turns = [prompt + firsts[f"req_{index}"].generated_tokens for index, prompt in enumerate(texts.prompts[:2])]
    widths: list[int] = []
    handle = columns_run(texts.target, widths)
    prompts = [[*turn, *make_prompt(6, seed=index)[0].tolist()] for index, turn in enumerate(turns)]
    truths = [greedy(texts.target, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)[0] for prompt in prompts]
    widths.clear()
    manager.add_requests(prompts)
    while manager._waiting or manager._reading:
        manager._read_prompts()
    assert sum(widths) == 2 * (6 + 1), "the last token of a turn was never run"
    outputs = list(manager.run())
    handle.remove()
    for output in outputs:
        index = prompts.index(output.prompt_ids)
        truth = truths[index][len(prompts[index]) :].tolist()
        assert output.generated_tokens == truth[: len(output.generated_tokens)]


def test_kept_conversations_are_bounded_and_can_be_refused(texts: Texts) -> None:
    manager = texts.manager()
    manager.add_requests(texts.prompts)
    list(manager.run())
    assert len(manager._conversations) == 3, "as many as the batch has rows"
    with manager.pause():
        pass
    assert len(manager._conversations) == 0, "the models may have changed"
    most = 2 * LONGEST
    bounded = texts.manager(limits(num_blocks=-(-most // 4)))
    bounded.add_requests(texts.prompts)
    bounded._conversations.add(held([1] * most))
    bounded._advance()
    assert bounded._conversations.num_positions == 0, "rows come first"
    list(bounded.run())
    refused = texts.manager(limits(allow_block_sharing=False))
    refused.add_requests(texts.prompts)
    list(refused.run())
    assert len(refused._conversations) == 0


def test_the_least_recently_used_conversation_is_dropped_first() -> None:
    kept = Conversations(2)
    first, second, third = held([1, 2, 3, 4]), held([5, 6]), held([1, 2, 9])
    for conversation in (first, second):
        kept.add(conversation)
    assert kept.find([1, 2, 3, 4, 5]) is first
    kept.add(kept.take(first))
    kept.add(third)
    assert kept.find([5, 6, 7]) is None, "it was used least recently"
    assert kept.find([1, 8, 8]) is None, "each shares less than half"
    assert kept.find([1, 2, 9]) is third


# -- earlier texts


def test_earlier_texts_save_steps_and_change_no_text(texts: Texts) -> None:
    """The drafter is right for few tokens; the second time, what was written before is right for whole blocks."""
    history = History(ngram_size=3)
    for settings in ({}, {"temperature": 0.8}):
        plain = texts.generate(limits(seed=4), prompt_lookup_num_tokens=0, **settings)
        first = texts.generate(limits(seed=4), history=history, prompt_lookup_num_tokens=0, **settings)
        again = texts.generate(limits(seed=4), history=history, prompt_lookup_num_tokens=0, **settings)
        for outputs in (first, again):
            assert [output.generated_tokens for output in outputs] == [output.generated_tokens for output in plain]
        steps = [sum(len(output.acceptance_lengths) for output in outputs) for outputs in (first, again)]
        assert steps[1] < 0.75 * steps[0]


# -- bad input


@pytest.mark.parametrize(
    ("config", "keywords", "sentence"),
    [
        ({"max_batch_tokens": 3}, {}, "max_batch_tokens=3"),
        ({"max_requests_per_batch": 0}, {}, "max_requests_per_batch=0"),
        ({}, {"num_beams": 2}, "num_beams=2"),
        ({}, {"num_return_sequences": 2}, "num_return_sequences=2"),
        ({}, {"draft_tree": 8}, "draft_tree"),
        ({}, {"compile": True}, "compile"),
        ({}, {"max_draft_tokens": -1}, "max_draft_tokens=-1"),
    ],
    ids=str,
)
def test_settings_are_refused_before_any_forward(
    texts: Texts, config: dict[str, Any], keywords: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        texts.generate(limits(**config), **keywords)


def test_a_bad_request_fails_alone(texts: Texts) -> None:
    longest = texts.target.config.max_position_embeddings
    bad: list[Any] = [[], [VOCAB_SIZE], [1.5], [1] * longest, [1] * 200]
    config = limits(num_blocks=40)
    inputs = [texts.prompts[0], *bad, texts.prompts[1]]
    outputs = list(
        generate_batch(
            texts.drafter,
            inputs,
            target=texts.target,
            continuous_batching_config=config,
            max_new_tokens=NEW_TOKENS,
            **GREEDY,
        ).values()
    )
    sentences = ["is empty", "outside the target's vocabulary", "token ids", "positions: shorten", "raise num_blocks"]
    for output, sentence in zip(outputs[1:-1], sentences, strict=True):
        assert output.status == RequestStatus.FAILED
        assert sentence in output.error
        assert "\n" not in output.error
    assert is_right(outputs[0], texts.truths[0])
    assert is_right(outputs[-1], texts.truths[1])


@pytest.mark.parametrize("inputs", [[1, 2, 3], ["text"], [None]], ids=str)
def test_what_is_no_list_of_prompts_is_refused(texts: Texts, inputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="pass a list of"):
        generate_batch(texts.drafter, inputs, target=texts.target)


def test_ids_in_use_full_queues_and_own_processors_are_refused(texts: Texts) -> None:
    manager = texts.manager(limits(max_queue_size=2))
    assert manager.add_request(texts.prompts[0], request_id="mine") == "mine"
    with pytest.raises(ValueError, match="'mine' is in use"):
        manager.add_request(texts.prompts[1], request_id="mine")
    with pytest.raises(ValueError, match="temperature came for one request"):
        manager.add_request(texts.prompts[1], temperature=0.5)
    manager.add_request(texts.prompts[1])
    with pytest.raises(Full, match="max_queue_size=2"):
        manager.add_request(texts.prompts[2])
    outputs = list(manager.run())
    assert [output.error for output in outputs] == [None, None]


class Fails(LogitsProcessor):
    """Fails after a prompt that begins with `token_id`."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(input_ids[0, 0]) == self.token_id and input_ids.shape[1] > max(LENGTHS) + 3:
            raise RuntimeError("no grammar for this")
        return scores


def test_a_processor_that_fails_ends_its_request_alone(texts: Texts) -> None:
    history = History()
    outputs = texts.generate(logits_processor=[Fails(texts.prompts[3][0])], history=history)
    whole = [output.prompt_ids + output.generated_tokens for output in outputs if output.error is None]
    assert sorted(map(list, history._texts.values())) == sorted(whole), "a text that has failed is none to draft from"
    assert outputs[3].error == "no grammar for this"
    assert 0 < len(outputs[3].generated_tokens) < NEW_TOKENS
    for output, truth in zip(outputs, texts.truths, strict=True):
        assert output.generated_tokens == truth[: len(output.generated_tokens)]
        assert output is outputs[3] or len(output.generated_tokens) == NEW_TOKENS


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    texts = Texts(small_target("qwen3"))
    broken = texts.truths[2][4]

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        is_broken = (args[0] == broken)[..., None]
        return output.masked_fill(is_broken, torch.nan)

    texts.target.get_input_embeddings().register_forward_hook(spoil)
    outputs = texts.generate()
    assert "NaN or infinite" in outputs[2].error
    for output, truth in zip(outputs, texts.truths, strict=True):
        assert output.generated_tokens == truth[: len(output.generated_tokens)]
        assert (output.error is None) == (len(output.generated_tokens) == NEW_TOKENS)
    assert any(output.error is None for output in outputs)


def test_a_step_that_fails_ends_its_rows_and_no_other_request(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = texts.manager()
    manager.add_requests(texts.prompts)
    verify = type(manager._batch.target).verify
    calls: list[int] = []

    def fails_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return verify(*args)

    monkeypatch.setattr(manager._batch.target, "verify", lambda *args: fails_once(manager._batch.target, *args))
    outputs = list(manager.run())
    assert len(outputs) == len(LENGTHS)
    errors = [output.error for output in outputs if output.error is not None]
    assert errors == ["no memory"] * 3
    for output in outputs:
        index = int(output.request_id.removeprefix("req_"))
        assert output.generated_tokens == texts.truths[index][: len(output.generated_tokens)]


# -- a manager's thread


def test_results_stream_while_other_requests_are_written(texts: Texts) -> None:
    manager = texts.manager()
    streamed_id = manager.add_request(texts.prompts[0], streaming=True)
    manager.add_requests(texts.prompts[1:])
    manager.start()
    parts = [output.generated_tokens for output in manager.request_id_iter(streamed_id)]
    assert len(parts) > 2
    assert all(part == texts.truths[0][: len(part)] for part in parts)
    assert [len(part) for part in parts] == sorted(len(part) for part in parts)
    manager.stop()
    assert not manager.is_running()
    others = list(manager)
    assert len(others) == len(LENGTHS) - 1
    assert manager.get_result() is None
    with pytest.raises(ValueError, match="was stopped"):
        manager.add_request(texts.prompts[0])
    manager.start()
    manager.add_request(texts.prompts[2], request_id="again")
    assert is_right(manager.get_result("again"), texts.truths[2])
    manager.destroy()


def test_a_hard_stop_fails_what_is_not_complete(texts: Texts) -> None:
    manager = texts.manager()
    manager.start()
    with manager.pause():
        ids = manager.add_requests(texts.prompts)
        manager.stop(block=False, hard_stop=True)
    manager.join()
    outputs = {output.request_id: output for output in manager}
    assert list(outputs) == ids
    assert all("stopped before" in output.error for output in outputs.values())


def test_cancelled_requests_end_and_say_so(texts: Texts) -> None:
    manager = texts.manager()
    ids = manager.add_requests(texts.prompts)
    manager.cancel_request("nobody's")
    manager.cancel_request(ids[-1])  # waits
    manager._advance()
    manager.cancel_request(ids[0])  # is a row
    outputs = {output.request_id: output for output in manager.run()}
    assert set(outputs) == set(ids)
    for index, request_id in enumerate(ids):
        output = outputs[request_id]
        assert (output.error == "The request was cancelled.") == (index in (0, len(ids) - 1))
        assert output.generated_tokens == texts.truths[index][: len(output.generated_tokens)]
    assert outputs[ids[-1]].generated_tokens == []


def test_handlers_get_the_results_of_their_request(texts: Texts) -> None:
    """What servers do: an event loop, a handler for each request, registered before or after it is added."""

    async def serve() -> list[list[Any]]:
        manager = texts.manager()
        manager.start()
        ends = []
        results: list[list[Any]] = []
        for index, prompt in enumerate(texts.prompts):
            request_id = f"chat-{index}"
            end = asyncio.Event()
            of_request: list[Any] = []

            def handle(output: Any, of_request: list[Any] = of_request, end: asyncio.Event = end) -> None:
                of_request.append(output)
                if output.is_finished():
                    end.set()

            if index % 2:
                manager.register_result_handler(request_id, handle)
            manager.add_request(prompt, request_id=request_id, streaming=True)
            if not index % 2:
                manager.register_result_handler(request_id, handle)
            ends.append(end)
            results.append(of_request)
        for end in ends:
            await end.wait()
        assert manager.background_thread_status.fatal_error is None
        manager.stop()
        return results

    for of_request, truth in zip(asyncio.run(serve()), texts.truths, strict=True):
        assert of_request[-1].generated_tokens == truth[:NEW_TOKENS]
        assert len(of_request) > 1


def test_a_handler_gets_what_came_before_it(texts: Texts) -> None:
    async def register() -> list[Any]:
        manager = texts.manager()
        request_id = manager.add_request(texts.prompts[0], streaming=True)
        manager._advance()
        results: list[Any] = []
        manager.register_result_handler(request_id, results.append)
        await asyncio.sleep(0)
        return results

    results = asyncio.run(register())
    assert len(results) > 1
    assert is_right(results[-1], texts.truths[0])


def test_a_thread_that_dies_fails_every_request(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = texts.manager()
    monkeypatch.setattr(manager, "_read_prompts", lambda: 1 / 0)
    ids = manager.add_requests(texts.prompts)
    manager.start()
    manager.join()
    outputs = list(manager)
    assert [output.request_id for output in outputs] == ids
    assert all("division" in output.error for output in outputs)
    assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)


def test_two_managers_share_one_pair(texts: Texts) -> None:
    managers = [texts.manager(), texts.manager(limits(max_requests_per_batch=2))]
    for manager in managers:
        manager.add_requests(texts.prompts)
        manager.start()
    for manager in managers:
        manager.stop()
        outputs = {output.request_id: output for output in manager}
        for index, truth in enumerate(texts.truths):
            assert outputs[f"req_{index}"].generated_tokens == truth[:NEW_TOKENS]


def test_no_request_is_lost_or_mixed_up_under_cancels_and_failures(texts: Texts) -> None:
    """Requests come from three threads, some are bad, some are cancelled; each gets one result, of its own text."""
    manager = texts.manager(max_new_tokens=6, logits_processor=[Fails(texts.prompts[6][0])])
    manager.start()
    wanted: dict[str, int] = {}

    def ask(name: str, seed: int) -> None:
        chance = random.Random(seed)
        for number in range(40):
            index = chance.randrange(len(LENGTHS))
            request_id = f"{name}-{number}"
            wanted[request_id] = index
            is_bad = chance.random() < 0.2
            manager.add_request([VOCAB_SIZE] if is_bad else texts.prompts[index], request_id=request_id)
            if chance.random() < 0.3:
                manager.cancel_request(request_id)

    threads = [threading.Thread(target=ask, args=(name, seed)) for seed, name in enumerate("abc")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager.stop()
    outputs = list(manager)
    assert sorted(output.request_id for output in outputs) == sorted(wanted)
    for output in outputs:
        truth = texts.truths[wanted[output.request_id]]
        assert output.generated_tokens == truth[: len(output.generated_tokens)]
        assert output.error is not None or len(output.generated_tokens) == 6
    assert sum(output.error is None for output in outputs) > 30


def test_a_random_drafter_is_exact_too() -> None:
    target = make_target("qwen3", vocab_size=12)
    drafter = make_drafter(vocab_size=12, mask_token_id=11)
    prompts = [make_prompt(length, seed=row, vocab_size=12) for row, length in enumerate([3, 11, 6, 8, 2])]
    ids = [prompt[0].tolist() for prompt in prompts]
    outputs = drafter.generate_batch(  # type: ignore[operator]
        ids, target=target, max_new_tokens=40, continuous_batching_config=limits(), **GREEDY
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        truth = greedy(target, prompt, max_new_tokens=40)[0, prompt.shape[1] :].tolist()
        assert output.generated_tokens == truth


def test_what_only_plain_generation_can_do_is_inexact(texts: Texts) -> None:
    """Doors of pairs go on with the target's own method after this error alone."""
    with pytest.raises(InexactError):
        texts.manager(num_beams=2)


# -- what a row leaves behind


def test_a_kept_row_holds_what_its_drafter_has_not_read(texts: Texts) -> None:
    """Promise: the drafter's keys after the waiting context is read are those of the same text alone."""
    manager = texts.manager()
    manager.add_requests(texts.prompts[:3])
    list(manager.run())
    kept = {tuple(conversation.token_ids): conversation for conversation in manager._conversations._kept}
    assert len(kept) == 3
    for index in range(3):
        alone = Conversation()
        texts.alone(index, conversation=alone)
        conversation = kept[tuple(alone.token_ids)]
        keys = []
        for context in (conversation.context, alone.context):
            context.absorb()
            assert context.cache.lengths == [len(alone.token_ids)]
            of_layers, _ = context.cache.storage(0)
            keys.append(torch.stack([layer[0, :, : context.num_read] for layer in of_layers]))
        torch.testing.assert_close(*keys)


def test_prompts_that_are_read_together_fit_into_a_chunk(texts: Texts) -> None:
    """Promise: padding counts, so that a forward has no more columns than a chunk allows."""
    manager = texts.manager(limits(max_requests_per_batch=8), prefill_chunk_size=16)
    manager.add_requests([[5] * 8, [6] * 3, [7] * 3, [8] * 5, [9] * 6, [4] * 17])
    groups = []
    while group := manager._next():
        groups.append([len(ticket.output.prompt_ids) for ticket in group])
    assert groups == [[8, 3], [3, 5], [6], [17]]


def test_acceptance_lengths_are_those_of_the_text_alone(texts: Texts) -> None:
    """Promise: one of each verify step; the prompt's forward is none. The last token alone may be drafted beside other rows."""
    outputs = texts.generate(prompt_lookup_num_tokens=0)
    for index in (0, 3, 7):
        settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "prompt_lookup_num_tokens": 0, **GREEDY}
        prompt = [texts.prompts[index]]
        alone = spec_generate(texts.drafter, texts.target, prompt, return_dict_in_generate=True, **settings)
        [lengths] = alone.acceptance_lengths
        assert len(outputs[index].acceptance_lengths) == len(lengths)
        assert outputs[index].acceptance_lengths[:-1] == lengths[:-1]


def test_the_rows_never_have_more_positions_than_allowed(texts: Texts) -> None:
    """Promise: every row counts as long as the longest, the one that is admitted too."""
    manager = texts.manager(limits(max_requests_per_batch=8, num_blocks=2 * LONGEST // 4))
    manager.add_requests(texts.prompts)
    numbers = []
    while manager._tickets:
        manager._advance()
        rows = [member.longest for member in manager._batch.members.values()]
        numbers.append(len(rows))
        assert len(rows) * max(rows, default=0) <= 2 * LONGEST
    assert max(numbers) == 2


def test_a_conversation_may_give_way_to_the_prompt_that_would_go_on_from_it(texts: Texts) -> None:
    """Known bug: it was dropped for want of room, then taken, and the manager ended."""
    turn = [*texts.prompts[0], *texts.truths[0][:NEW_TOKENS], 7, 8, 9]
    longest = len(turn) + NEW_TOKENS + COLUMNS
    manager = texts.manager(limits(num_blocks=-(-longest // 4)))
    for prompt in (texts.prompts[0], turn):
        manager.add_request(prompt)
        [output] = manager.run()
        truth = greedy(texts.target, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)[0, len(prompt) :]
        assert output.generated_tokens == truth.tolist()


def test_a_result_stays_as_it_was_when_it_was_given() -> None:
    output = BatchOutput("a", [1], generated_tokens=[2], logprobs=[-0.5], acceptance_lengths=[1])
    result = output.snapshot()
    for values in (output.generated_tokens, output.logprobs, output.acceptance_lengths):
        values.append(9)
    assert (result.generated_tokens, result.logprobs, result.acceptance_lengths) == ([2], [-0.5], [1])


def test_a_request_that_is_written_has_left_the_queue(texts: Texts) -> None:
    """Promise: `max_queue_size` bounds what waits, and not what is a row already."""
    manager = texts.manager(limits(max_queue_size=1))
    for prompt in texts.prompts[:2]:
        manager.add_request(prompt)
        manager._advance()
    assert len(manager._batch.members) == 2
    assert len(list(manager.run())) == 2
