"""`dflash regenerate --url`: hundreds of requests at once, and failures that pass or do not."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopbackServer, QuietHandler, started
from tiny_models import make_tokenizer
from transformers import GenerationConfig, Qwen3Config

from dflash.common.openai_client import LONGEST_PAUSE, PAUSES, OpenAIClient
from dflash.regeneration import (
    AnswerRequest,
    RegenerationRun,
    RegenerationSettings,
    Sampling,
    ServerWriter,
    regenerate_data,
)
from dflash.regeneration import run as run_module


GREEDY, REQUEST = Sampling(), AnswerRequest([5, 6, 7], seed=500, max_new_tokens=4)  # its pauses are 1.5 times as long
ANSWER = {"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [4, 2]}]}


class Canned(LoopbackServer):
    """Answers every request alike, after the failures that a test names: a status, headers and a body, or a dropped line."""

    def __init__(self, *failures: Any) -> None:
        super().__init__(CannedHandler)
        self.failures: Iterator[Any] = iter(failures)
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.lock = threading.Lock()

    def failure(self, prompt: tuple[int, ...]) -> Any:
        """What the next request fails with; `None` if it does not."""
        with self.lock:
            self.asked[prompt] += 1
            return next(self.failures, None)


class CannedHandler(QuietHandler):
    server: Canned

    def do_GET(self) -> None:
        self.say(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        failure = self.server.failure(tuple(asked["prompt"]))
        if failure is None:
            self.say(json.dumps(ANSWER))
        elif failure == "dropped":
            self.close_connection = True
        elif failure == "broken off":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
        else:
            status, headers, body = failure
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)


def failed(status: int, body: bytes = b"busy", **headers: str) -> tuple[int, dict[str, str], bytes]:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


def make_writer(url: str, wait: Any, **how: Any) -> ServerWriter:
    config, generation_config = Qwen3Config(max_position_embeddings=96), GenerationConfig(eos_token_id=2)
    return ServerWriter(
        OpenAIClient(url, timeout=3600.0), None, make_tokenizer(), config, generation_config, wait=wait, **how
    )


def test_a_request_is_sent_again_after_failures_that_may_pass_and_later_each_time() -> None:
    waits: list[float] = []
    with started(Canned(failed(503), "dropped", failed(429), "broken off")) as server:
        [answer] = make_writer(server.url, waits.append)([REQUEST], GREEDY)
    assert (answer.token_ids, answer.ended) == ([4, 2], True)
    assert waits == [1.5 * seconds for seconds in PAUSES]
    assert waits == sorted(set(waits))


def test_a_stop_token_that_a_server_omits_is_the_tokenizers() -> None:
    """Promise: of several stop tokens the tokenizer's own ends the answer, not the smallest."""
    body = json.dumps({"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [4]}]}).encode()
    with started(Canned(failed(200, body, Content_Length=str(len(body))))) as server:
        client = OpenAIClient(server.url, timeout=3600.0)
        config, generation_config = Qwen3Config(max_position_embeddings=96), GenerationConfig(eos_token_id=[1, 2])
        write = ServerWriter(client, None, make_tokenizer(), config, generation_config)
        assert make_tokenizer().eos_token_id == 2
        [answer] = write([REQUEST], GREEDY)
    assert answer.token_ids == [4, 2]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_asked_again(status: int) -> None:
    with started(Canned(failed(status))) as server:
        make_writer(server.url, lambda seconds: None)([REQUEST], GREEDY)
    assert sum(server.asked.values()) == 2


def test_requests_that_failed_together_come_back_at_different_times() -> None:
    def waited(seed: int) -> float:
        waits: list[float] = []
        with started(Canned(failed(503))) as server:
            make_writer(server.url, waits.append)([AnswerRequest([5], seed, 4)], GREEDY)
        return waits[0]

    assert len({waited(seed) for seed in range(3)}) == 3


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry_After": "30"}, 30.0),
        ({"Retry_After": str(int(LONGEST_PAUSE))}, LONGEST_PAUSE / 1.5),  # no pause is longer
        ({"Retry_After": "0"}, PAUSES[0]),
        ({"Retry_After": "soon"}, PAUSES[0]),
        ({"Retry_After": "Thu, 01 Jan 1970 00:00:00 GMT"}, PAUSES[0]),  # over
    ],
)
def test_a_server_says_when_to_come_back(headers: dict[str, str], seconds: float) -> None:
    waits: list[float] = []
    with started(Canned(failed(429, **headers))) as server:
        make_writer(server.url, waits.append)([REQUEST], GREEDY)
    assert waits == [1.5 * seconds]


def test_a_date_to_come_back_is_read_by_the_servers_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(CannedHandler, "date_time_string", lambda *_: "Thu, 01 Jan 2015 00:00:00 GMT")
    with started(Canned(failed(503, Retry_After="Thu, 01 Jan 2015 00:02:00 GMT"))) as server:
        make_writer(server.url, waits.append)([REQUEST], GREEDY)
    assert waits == [1.5 * 120]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (failed(400, b'{"error": "too long"}'), r"answered 400 Bad Request: too long\."),
        (failed(422, b'{"detail": "no such field"}'), r"answered 422 .*: no such field\."),
        (failed(404), "answered 404 Not Found: busy"),
        (failed(200, b"no JSON"), "answered 200 with no JSON: no JSON"),
        (failed(200, b"{}"), "is not a completion"),
        (failed(200, b'{"choices": [{"text": null, "finish_reason": "stop"}]}'), "is not a completion"),
        (failed(200, b"[" * 100_000), "answered 200 with no JSON"),
        (failed(501), "answered 501 Not Implemented: busy"),
        (failed(505), "answered 505"),
        (failed(503, Retry_After="3601"), r"answered 503 .*: busy; it asks to wait 3601 seconds: begin again then\."),
    ],
)
def test_a_request_that_would_fail_again_is_not_sent_again(failure: Any, said: str) -> None:
    waits: list[float] = []
    with started(Canned(failure)) as server:
        writer = make_writer(server.url, waits.append)
        with pytest.raises(ValueError, match=said):
            writer([REQUEST], GREEDY)
    assert (waits, sum(server.asked.values())) == ([], 1)


def test_a_server_that_stays_away_is_given_up_and_one_that_was_never_there_at_once() -> None:
    waits: list[float] = []
    with started(Canned()) as server:
        writer = make_writer(server.url, waits.append)
    with pytest.raises(ValueError, match=rf"^After {len(PAUSES) + 1} tries: .*cannot be reached \(.*refused\)"):
        writer([REQUEST], GREEDY)
    assert len(waits) == len(PAUSES)
    with pytest.raises(ValueError, match="cannot be reached"):
        make_writer(server.url, waits.append)
    assert len(waits) == len(PAUSES)


def test_a_silence_that_was_too_long_is_final_and_a_server_that_does_not_take_the_line_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five silences of the command's timeout would take five hours."""

    def silent(connection: HTTPConnection) -> Any:
        raise TimeoutError("timed out")

    waits: list[float] = []
    with started(Canned()) as server:
        writer = make_writer(server.url, waits.append)
        with monkeypatch.context() as patch:
            patch.setattr(HTTPConnection, "getresponse", silent)
            with pytest.raises(ValueError, match=r"did not answer within 3600 seconds: raise the timeout"):
                writer([REQUEST], GREEDY)
        assert waits == []
        monkeypatch.setattr(HTTPConnection, "connect", silent)
        with pytest.raises(ValueError, match=r"cannot be reached \(timed out\)"):
            writer([REQUEST], GREEDY)
    assert len(waits) == len(PAUSES)


class Interrupted(Canned):
    """Answers the prompt 5, is busy for 6, and answers a chat when nothing more is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.chat_is_here, self.is_paused, self.is_over = threading.Event(), threading.Event(), threading.Event()

    def failure(self, prompt: tuple[int, ...]) -> Any:
        super().failure(prompt)
        if prompt == (6,):
            return failed(503, Retry_After="300")
        if prompt == (5,):
            assert self.is_paused.wait(60)
            assert self.chat_is_here.wait(60)
        else:
            self.chat_is_here.set()
            assert self.is_over.wait(60)
        return None


@pytest.mark.parametrize("place", ["where rows are taken", "where answers are waited for"])
def test_an_interrupt_ends_the_pauses_and_nothing_is_asked_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It once took as long as the pauses of all tries, up to 40 minutes."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows, was_stopped = [{"prompt_ids": [5]}, {"prompt_ids": [6]}, {"messages": turn * 3}], []
    with started(Interrupted()) as server:
        writer = make_writer(server.url, lambda seconds: pause())

        class Stopped(threading.Event):
            def set(self) -> None:
                super().set()
                server.is_over.set()

        writer.stopped = Stopped()

        def pause() -> bool:
            server.is_paused.set()
            was_stopped.append(writer.stopped.wait(60))
            return was_stopped[-1]

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        if place == "where answers are waited for":
            waited = run_module.wait
            monkeypatch.setattr(run_module, "wait", lambda *args: [waited(*args), interrupt()])
        with pytest.raises(KeyboardInterrupt) as caught:
            regenerate_data(
                writer, make_tokenizer(), rows, tmp_path / "r.jsonl", run=RegenerationRun(on_done=interrupt)
            )
        assert was_stopped == [True]  # also while the error and its frames are kept
    assert caught.tb is not None
    assert sorted(server.asked.values()) == [1, 1, 1]


class OneIsBusy(Canned):
    """Refuses 5 for good when 6 is there, for which it is busy once."""

    def __init__(self) -> None:
        super().__init__()
        self.other_is_here = threading.Event()

    def failure(self, prompt: tuple[int, ...]) -> Any:
        super().failure(prompt)
        if prompt == (5,):
            assert self.other_is_here.wait(60)
            return failed(400)
        self.other_is_here.set()
        return failed(503) if self.asked[prompt] == 1 else None


def test_what_was_busy_when_another_failed_for_good_is_asked_again(tmp_path: Path) -> None:
    with started(OneIsBusy()) as server:
        writer = make_writer(server.url, lambda seconds: writer.stopped.is_set())
        with pytest.raises(ValueError, match="answered 400"):
            regenerate_data(writer, make_tokenizer(), [{"prompt_ids": [5]}, {"prompt_ids": [6]}], tmp_path / "r.jsonl")
    assert server.asked == {(5,): 1, (6,): 2}
    assert not writer.stopped.is_set()


AT_ONCE, BAD = 240, (4, 40)


class OneFails(Canned):
    """Answers when all requests are there and the bad one has failed for good."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = True
        self.all_are_here, self.has_failed = threading.Event(), threading.Event()

    def failure(self, prompt: tuple[int, ...]) -> Any:
        super().failure(prompt)
        with self.lock:
            if len(self.asked) == AT_ONCE:
                self.all_are_here.set()
            if self.asked[BAD] > len(PAUSES):
                self.has_failed.set()
        if not self.is_broken:
            return None
        if prompt == BAD:
            assert self.all_are_here.wait(60)
            return failed(503, b"no memory")
        assert self.has_failed.wait(60)
        return None


def test_of_hundreds_of_requests_at_once_one_that_fails_for_good_costs_no_other(tmp_path: Path) -> None:
    """A run with 309 requests under way once kept 3 answers: the others came after the failure, and were thrown away."""
    output = tmp_path / "r.jsonl"
    rows = [{"prompt_ids": [4 + number // 90, number % 90]} for number in range(AT_ONCE)]
    assert BAD in [tuple(row["prompt_ids"]) for row in rows]
    settings = RegenerationSettings(max_new_tokens=4)
    with started(OneFails()) as server:
        writer = make_writer(server.url, lambda seconds: None, batch_size=AT_ONCE)
        with pytest.raises(ValueError, match=r"After 5 tries: .* answered 503 .*: no memory"):
            regenerate_data(writer, make_tokenizer(), rows, output, settings)
        kept = [tuple(json.loads(line)["prompt_ids"]) for line in output.read_text().splitlines()]
        assert sorted(kept) == sorted(tuple(row["prompt_ids"]) for row in rows if tuple(row["prompt_ids"]) != BAD)
        server.is_broken = False
        server.asked.clear()
        record = regenerate_data(writer, make_tokenizer(), rows, output, settings, resume=True)
        assert server.asked == {BAD: 1}
    assert (record.rows, record.was_finished) == (AT_ONCE, AT_ONCE - 1)


def test_nothing_new_is_asked_after_a_failure(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [4, number]} for number in range(90)]
    with started(Canned(failed(400))) as server:
        writer = make_writer(server.url, lambda seconds: None, batch_size=1)
        with pytest.raises(ValueError, match="answered 400"):
            regenerate_data(writer, make_tokenizer(), rows, tmp_path / "r.jsonl")
    assert sum(server.asked.values()) <= 2  # the next may be on its way
