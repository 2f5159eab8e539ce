"""`dflash regenerate --url` and `dflash eval --url` on a server that takes texts and no ids, as `transformers serve`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LoopbackServer, QuietHandler, started
from tiny_models import greedy, make_target, make_tokenizer
from tokenizers.processors import TemplateProcessing

from dflash.common.openai_client import OpenAIClient
from dflash.common.text_completions import exact_text
from dflash.evaluation import Server, server_backend
from dflash.regeneration import (
    AnswerRequest,
    RegenerationSettings,
    Sampling,
    ServerWriter,
    TargetWriter,
    regenerate_data,
)


KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options"}
KNOWN |= {"generation_config"}
SAMPLED = [40, 41, 42]  # what the server answers if it is not asked to be greedy
PROMPT = [1, 40, 50, 2, 60]  # with special tokens
REQUEST = AnswerRequest(PROMPT, seed=7, max_new_tokens=12)


class TextEngine(LoopbackServer):
    """Encodes prompts itself, refuses fields that it does not know, and tells neither ids nor special tokens.

    The settings of a request are its `generation_config`; a setting that is left out is the target's own, and this target
    samples.
    """

    def __init__(self, target: Any, tokenizer: Any) -> None:
        super().__init__(TextHandler)
        self.target, self.tokenizer = target, tokenizer
        self.asked: list[dict[str, Any]] = []
        self.num_refused = 0
        self.lock = threading.Lock()
        self.barrier: threading.Barrier | None = None  # where refusals wait for each other
        self.encoded: list[list[int]] = []
        self.answer_ids: list[int] | None = None  # in place of the target's

    def answer(self, prompt_ids: list[int], asked: dict[str, Any]) -> list[int]:
        settings = json.loads(asked.get("generation_config", "{}"))
        if self.answer_ids is not None:
            return self.answer_ids
        if settings.get("do_sample", True):
            return SAMPLED
        sequences = greedy(self.target, torch.tensor([prompt_ids]), max_new_tokens=asked["max_tokens"])
        return sequences[0, len(prompt_ids) :].tolist()


class TextHandler(QuietHandler):
    server: TextEngine

    def do_GET(self) -> None:
        self.say('{"detail": "Not Found"}', 404)

    def do_POST(self) -> None:
        engine, asked = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if unexpected := set(asked) - KNOWN:
            with engine.lock:
                engine.num_refused += 1
            if engine.barrier is not None:
                engine.barrier.wait(60)
            self.say(json.dumps({"detail": f"Unexpected fields in the request: {unexpected}"}), 422)
            return
        if not isinstance(asked["prompt"], str):
            self.say('{"detail": "prompt must be a string."}', 400)
            return
        prompt_ids = engine.tokenizer(asked["prompt"])["input_ids"]
        token_ids = engine.answer(prompt_ids, asked)
        with engine.lock:
            engine.asked.append(asked)
            engine.encoded.append(prompt_ids)
        text = engine.tokenizer.decode(token_ids, skip_special_tokens=True)
        finish = "length" if len(token_ids) >= asked["max_tokens"] else "stop"
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
        whole = {"choices": [{"text": text, "finish_reason": finish}], "usage": usage}
        if not asked.get("stream"):
            self.say(json.dumps(whole))
            return
        begin, end = {"choices": [{"text": text}]}, whole | {"choices": [{"text": "", "finish_reason": finish}]}
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in (begin, end))
        self.say(events, kind="text/event-stream")  # without [DONE]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target()


def make_writer(engine: TextEngine, tokenizer: Any, **how: Any) -> ServerWriter:
    config, generation_config = engine.target.config, engine.target.generation_config
    return ServerWriter(
        OpenAIClient(engine.url), "my/pair", tokenizer, config, generation_config, wait=lambda _: None, **how
    )


def evaluated(engine: TextEngine, tokenizer: Any) -> list[int]:
    """The ids that `dflash eval --url` gets for `PROMPT`."""
    backend = server_backend(Server(engine.url), Server(engine.url), tokenizer, 12, "my/pair")
    [method, _] = backend.begin().values()
    return method(torch.tensor([PROMPT])).token_ids


def regenerated(engine: TextEngine, tokenizer: Any) -> list[int]:
    """The ids that `dflash regenerate --url` gets for `PROMPT`."""
    [answer] = make_writer(engine, tokenizer)([REQUEST], Sampling())
    return answer.token_ids


BOTH = pytest.mark.parametrize("ask", [evaluated, regenerated])


@BOTH
def test_the_target_answers_exactly_the_ids_and_greedily_whatever_its_own_config_says(target: Any, ask: Any) -> None:
    tokenizer = make_tokenizer()
    expected = greedy(target, torch.tensor([PROMPT]), max_new_tokens=12)[0, len(PROMPT) :].tolist()
    with started(TextEngine(target, tokenizer)) as engine:
        token_ids = ask(engine, tokenizer)
    assert engine.encoded == [PROMPT]
    assert len(expected) == 12
    assert not set(expected) & set(tokenizer.all_special_ids)
    assert token_ids == expected
    [asked] = engine.asked
    assert (asked["model"], asked["max_tokens"]) == ("my/pair", 12)


def test_a_server_gives_the_rows_that_the_target_gives_here(target: Any, tmp_path: Path) -> None:
    tokenizer, settings = make_tokenizer(), RegenerationSettings(max_new_tokens=8)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("how are you", "two", "what is 1 + 1?")]
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    regenerate_data(TargetWriter(target), tokenizer, rows, here, settings)
    with started(TextEngine(target, tokenizer)) as engine:
        record = regenerate_data(make_writer(engine, tokenizer), tokenizer, rows, there, settings)
    assert (record.rows, record.encoded, record.miscounted) == (3, 3, 0)
    assert there.read_bytes() == here.read_bytes()


def test_sampling_is_asked_for_with_all_its_settings(target: Any) -> None:
    tokenizer = make_tokenizer()
    with started(TextEngine(target, tokenizer)) as engine:
        [answer] = make_writer(engine, tokenizer)([REQUEST], Sampling(temperature=0.7, top_p=0.9, top_k=5))
        make_writer(engine, tokenizer)([REQUEST], Sampling(temperature=0.7))
    assert answer.token_ids[:3] == SAMPLED
    settings = [json.loads(asked["generation_config"]) for asked in engine.asked]
    asked = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0}
    neutral = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}  # not the target's own
    assert settings[0] == asked | neutral
    assert (settings[1]["top_p"], settings[1]["top_k"]) == (1.0, 0)  # 0 is all tokens there
    assert engine.asked[0]["seed"] == 7


@BOTH
def test_a_prompt_that_its_text_does_not_give_back_is_refused_and_not_sent(target: Any, ask: Any) -> None:
    """`tokenizer(text)` of such a server adds a last token here, so no text is encoded to the prompt."""
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$0 <pad>", special_tokens=[("<pad>", 0)])
    said = r"5 ids of the prompt '<\|im_start\|>.*: serve the target with vLLM or SGLang"
    with started(TextEngine(target, tokenizer)) as engine, pytest.raises(ValueError, match=said):
        ask(engine, tokenizer)
    assert (engine.asked, engine.num_refused) == ([], 1)


@BOTH
def test_a_server_with_another_tokenizer_is_refused(target: Any, ask: Any) -> None:
    other = make_tokenizer()
    other._tokenizer.post_processor = TemplateProcessing(single="<pad> $0", special_tokens=[("<pad>", 0)])
    said = "/v1/completions counted 6 tokens in a prompt of 5: it must serve the"
    with started(TextEngine(target, other)) as engine, pytest.raises(ValueError, match=said):
        ask(engine, make_tokenizer())


def test_a_first_token_that_the_tokenizer_adds_is_left_to_the_server() -> None:
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $0", special_tokens=[("<|im_start|>", 1)]
    )
    text = exact_text(PROMPT, tokenizer)
    assert not text.startswith("<|im_start|>")
    assert tokenizer(text)["input_ids"] == PROMPT
    with pytest.raises(ValueError, match="4 ids of the prompt"):
        exact_text(PROMPT[1:], tokenizer)  # the server would add it


def test_the_refusal_is_paid_once_also_by_requests_that_meet_it_at_once(target: Any, tmp_path: Path) -> None:
    tokenizer, settings = make_tokenizer(), RegenerationSettings(max_new_tokens=4)
    rows = [{"prompt_ids": [4, number]} for number in range(10, 40)]
    with started(TextEngine(target, tokenizer)) as engine:
        engine.barrier = threading.Barrier(4)
        writer = make_writer(engine, tokenizer, batch_size=4)
        record = regenerate_data(writer, tokenizer, rows, tmp_path / "r.jsonl", settings)
    assert (record.rows, engine.num_refused, len(engine.asked)) == (30, 4, 30)


def test_special_tokens_that_the_text_of_an_answer_lacks_are_seen_in_the_servers_count(
    target: Any, tmp_path: Path
) -> None:
    tokenizer, settings = make_tokenizer(), RegenerationSettings(max_new_tokens=9)
    start, end = 1, 2
    rows = [{"prompt_ids": [4, 50]}]
    with started(TextEngine(target, tokenizer)) as engine:
        records = []
        for number, answer_ids in enumerate(([40, 41, end], [40, start, 41, end])):
            engine.answer_ids = answer_ids
            writer = make_writer(engine, tokenizer)
            records.append(regenerate_data(writer, tokenizer, rows, tmp_path / f"{number}.jsonl", settings))
    assert [(record.encoded, record.miscounted) for record in records] == [(1, 0), (1, 1)]


@BOTH
def test_a_field_that_the_server_does_not_know_in_a_text_either_is_its_own_sentence(
    target: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setitem(globals(), "KNOWN", KNOWN - {"generation_config"})  # an older version
    said = r"answered 422 .*: .*'generation_config'.*; serve the target with vLLM"
    with started(TextEngine(target, tokenizer)) as engine, pytest.raises(ValueError, match=said):
        ask(engine, tokenizer)
    assert engine.asked == []


def test_the_baseline_may_have_another_name(target: Any) -> None:
    tokenizer = make_tokenizer()
    with started(TextEngine(target, tokenizer)) as engine:
        server = Server(engine.url)
        backend = server_backend(server, server, tokenizer, 4, "my/pair", baseline_model="my/target")
        for method in backend.begin().values():
            method(torch.tensor([PROMPT]))
    assert [asked["model"] for asked in engine.asked] == ["my/target", "my/pair"]
