"""`dflash canary` against real servers on loopback that stream events and count drafts; and against broken ones."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LoopbackServer, QuietHandler, started
from tiny_models import BLOCK_SIZE, ScriptedDrafter, greedy, make_drafter, make_target, make_tokenizer

from dflash import generate_blocks
from dflash.cli import app as cli
from dflash.evaluation import (
    Load,
    PeakMemory,
    Question,
    Server,
    answer_questions,
    chat_encoder,
    read_result,
    run_canary,
    server_backend,
    summarise,
    timed_blocks,
)
from dflash.evaluation.canary import at_target, percentile
from dflash.evaluation.timed_server import drafting, read_counters


USER = [{"role": "user", "content": "hi"}]
STEP = 0.003  # seconds of a verify step


class Engine(LoopbackServer):
    """A server whose every verify step takes `STEP` and gives `tau` tokens, streamed, counted and exposed as vLLM does."""

    def __init__(self, tau: int = 1, num_tokens: int = 13, metrics: str = "vllm", **faults: Any) -> None:
        super().__init__(Handler)
        self.tau, self.num_tokens, self.metrics, self.faults = tau, num_tokens, metrics, faults
        self.lock = threading.Lock()
        self.drafts = 100  # what others asked before
        self.accepted = 250
        self.requests: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self.keys: list[str | None] = []

    def exposed(self) -> str:
        if self.metrics == "vllm":
            lines = [
                "# TYPE vllm:spec_decode_num_drafts counter",
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts}.0',
            ]
            lines += [
                'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09',
                'vllm:kv_cache_usage_perc{engine="0"} 0.5',
            ]
            lines += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.accepted}.0']
            per_position = [f"{self.drafts - 40}.0" if i < self.tau - 1 else "60.0" for i in range(3)]
            for i, value in enumerate(per_position):
                lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {value}']
            return "\n".join(lines) + "\n"
        answered = len(self.requests)
        counters = [
            f'sglang:generation_tokens_total{{tp_rank="0"}} {1000 + answered * self.num_tokens}',
            f'sglang:num_requests_total{{tp_rank="0"}} {7 + answered}',
            f'sglang:spec_verify_calls_total{{tp_rank="0"}} {self.drafts}',
        ]
        gauge = ['sglang:spec_accept_length{tp_rank="0"} 2.5', 'sglang:spec_accept_length{tp_rank="1"} 3.5']
        return "\n".join({"sglang": counters + gauge, "sglang-old": gauge, "none": []}[self.metrics]) + "\n"


class Handler(QuietHandler):
    server: Engine

    def do_GET(self) -> None:
        if self.path == "/v1/models" and "unlisted" in self.server.faults:  # as `transformers serve` without a cache
            self.say("Internal Server Error", 500)
        elif self.path == "/v1/models":
            self.say(self.server.faults.get("models", json.dumps({"data": [{"id": "org/model"}]})))
        elif self.path == "/version":
            self.say('{"version": "0.33.0"}')
        elif self.path == "/metrics" and self.server.metrics != "none":
            self.say(self.server.exposed(), kind="text/plain")
        else:
            self.say('{"detail": "Not Found"}', 404)

    def do_POST(self) -> None:
        engine, asked = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with engine.lock:
            number = len(engine.requests)
            engine.requests.append(asked)
            engine.keys.append(self.headers["Authorization"])
            engine.under_way += 1
            engine.most_under_way = max(engine.most_under_way, engine.under_way)
        if "status" in engine.faults and number >= engine.faults.get("after", 0):
            self.say(engine.faults["body"], engine.faults["status"])
        else:
            self.stream(engine, asked)

    def stream(self, engine: Engine, asked: dict[str, Any]) -> None:
        if isinstance(engine, Decoder):
            self.send_response(200)
            self.end_headers()
            for event in engine.events(asked):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if "raw" in engine.faults:
            self.wfile.write(engine.faults["raw"])
            return

        def event(delta: dict[str, str] | None, reason: str | None = None, **more: Any) -> None:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
            self.wfile.write(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n")

        event({"role": "assistant", "content": ""})
        self.wfile.write(b": ping\n\n")
        time.sleep(5 * STEP)  # the prompt's forward
        event({"content": f"{asked['messages'][-1]['content']}:"})
        done = 1
        while done < engine.num_tokens:
            time.sleep(STEP)
            kept = min(engine.tau, engine.num_tokens - done)
            with engine.lock:
                engine.drafts += 1
                engine.accepted += engine.tau - 1
            event({"content": "".join(f" {i}" for i in range(done, done + kept))})
            done += kept
        with engine.lock:
            engine.under_way -= 1
        event({}, "stop")
        event(None, usage={"prompt_tokens": 3, "completion_tokens": done})
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def serving(engine: Engine | None = None, **options: Any) -> Iterator[Engine]:
    with started(engine or Engine(**options)) as engine:
        yield engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, dflash_command: Callable[..., Any]) -> Any:
    """`run(…)`: exit status, standard output, standard error of `dflash canary …`."""
    monkeypatch.setenv("COLUMNS", "300")
    return partial(dflash_command, "canary")


def test_a_streamed_answer_is_whole_and_under_the_clock() -> None:
    with serving(tau=4) as engine:
        reply = Server(f"{engine.url}/v1/").stream("org/model", USER, 64, temperature=0.7, seed=3, thinking=False)
    assert reply.text == "hi:" + "".join(f" {i}" for i in range(1, 13))
    assert reply.num_tokens == 13
    assert reply.seconds_to_first_token >= 5 * STEP
    assert reply.seconds >= 8 * STEP  # 12 tokens after the first in 3 steps
    assert reply.seconds_per_output_token == pytest.approx((reply.seconds - reply.seconds_to_first_token) / 12)
    asked = engine.requests[0]
    assert (asked["max_tokens"], asked["temperature"], asked["seed"]) == (64, 0.7, 3)
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked["stream_options"] == {"include_usage": True}


def test_what_the_prompts_forward_took_is_the_first_tokens() -> None:
    """A role alone is no token: the clock of the first one goes on."""
    with serving() as engine:
        reply = Server(engine.url).stream("org/model", USER, 64)
    assert 5 * STEP <= reply.seconds_to_first_token < reply.seconds


def test_canary_measures_both_servers_under_the_same_load(run: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(40)), encoding="utf-8")
    output = tmp_path / "new" / "canary.json"
    with serving(tau=1) as plain, serving(tau=4) as fast:
        status, out, err = run(
            "--url", fast.url, "--baseline-url", plain.url, "--prompts", prompts, "--concurrency", "4,1", "--rounds", 1,
            "--max-new-tokens", 32, "--price-per-hour", 3.6, "--target-ms-per-token", 1e6, "--hardware", "1x H200",
            "--output", output,
        )  # fmt: skip
    assert (status, err) == (0, "")
    result = read_result(output)
    rows = {(row["server"], row["concurrency"]): row for row in result["summary"]}
    assert list(rows) == [("baseline", 1), ("dflash", 1), ("baseline", 4), ("dflash", 4)]
    for (name, level), row in rows.items():
        assert (row["requests"], row["failed"], row["tokens"]) == (16, 0, 16 * 13)
        assert row["identical"] == 16
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"], rel=1e-3)
        assert row["cost_per_million_tokens"] == pytest.approx(1000 / row["tokens_per_second"], rel=1e-3)
        assert row["ms_to_first_token_p50"] >= 5e3 * STEP
        assert row["ms_to_first_token_p50"] <= row["ms_to_first_token_p99"]
        if name == "dflash":
            base = rows["baseline", level]
            assert row["tau"] == 4.0
            assert row["accepted_per_position"] == [1.0, 1.0, 1.0]
            assert row["speedup"] == pytest.approx(row["tokens_per_second"] / base["tokens_per_second"], rel=1e-3)
    assert rows["baseline", 1]["tau"] == 1.0  # it counts drafts of which nothing is accepted
    assert [engine.most_under_way for engine in (plain, fast)] == [4, 4]
    # The same prompts in the same order: warm-up and 16 of each level, none twice while there are enough.
    orders = [[asked["messages"][0]["content"] for asked in engine.requests] for engine in (plain, fast)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(set(orders[0])) == len(orders[0]) == 1 + 16 + 4 + 16
    assert result["decoding"]["prompts_repeat"] is False
    assert result["at_target"] == {
        name: max((rows[name, level] for level in (1, 4)), key=lambda row: row["tokens_per_second"])
        for name in ("baseline", "dflash")
    }
    assert result["environment"]["servers"]["dflash"] == {
        "url": fast.url,
        "model": "org/model",
        "engine": "vllm 0.33.0",
    }
    assert (result["kind"], result["environment"]["device"]) == ("serving", "1x H200")
    assert len(result["measurements"]) == 64
    best = result["at_target"]["dflash"]
    assert f"Within the target, dflash: {best['tokens_per_second']:.0f} tokens/s, {best['concurrency']} at once" in out
    assert out.count("p99") == 2
    assert "prefix cache" not in out


def test_canary_of_one_server_and_its_plot(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are the extra `eval`")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}\n')
    with serving(tau=4, metrics="none", num_tokens=3) as engine:
        status, out, _ = run(
            "--url", engine.url, "--prompts", prompts, "--concurrency", "2", "--plot", tmp_path / "plot.png",
            "--target-ms-per-token", 0,
        )  # fmt: skip
        assert engine.requests[-1]["messages"] == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
        ]
    assert status == 0
    assert "speed-up" not in out  # of nothing
    assert "tau" not in out  # the server does not say
    assert "prefix cache" in out  # 18 requests, one prompt
    assert "Within the target, dflash: no level" in out
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("metrics", "tau", "source"),
    [
        ("vllm", 4.0, "vllm:"),
        ("sglang", 3.0, "spec_verify_calls"),
        ("sglang-old", 3.0, "last moments"),
        ("none", None, ""),
    ],
)
def test_acceptance_is_what_the_server_counted_meanwhile(metrics: str, tau: float | None, source: str) -> None:
    """What it counted before (here 2.5 accepted of each draft) belongs to others."""
    with serving(tau=4, num_tokens=10, metrics=metrics) as engine:
        server = Server(engine.url)
        before = server.counters()
        for _ in range(3):
            server.stream("org/model", USER, 64)  # 9 tokens after the first in 3 steps: 4 + 4 + 1
        found = drafting(before, server.counters())
    if tau is None:
        assert found is None
    else:
        assert found is not None
        assert found.tau == pytest.approx(tau)
        assert source in found.source


class Warming(Engine):
    """Accepts everything in its first answers, which are the warm-up, and nothing later."""

    def __init__(self, num_warm_ups: int) -> None:
        super().__init__(tau=4, num_tokens=5)
        self.num_warm_ups = num_warm_ups

    @property
    def tau(self) -> int:
        return 4 if len(self.requests) <= self.num_warm_ups else 1

    @tau.setter
    def tau(self, value: int) -> None:
        """Set by `Engine`."""

    requests: list[dict[str, Any]] = []


def test_acceptance_leaves_out_the_warm_up() -> None:
    """The first drafts of a server compile and fill its caches; here they accept 3 proposals each, the others none."""
    with serving(Warming(num_warm_ups=2)) as engine:
        result = run_canary({"dflash": (Server(engine.url), "org/model")}, [USER] * 3, Load(concurrency=(2,)))
    assert result["summary"][0]["tau"] == 1.0


@pytest.mark.parametrize("field", ["temperature", "price_per_hour", "target_ms_per_output_token"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_load_of_infinite_numbers_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}: use a finite number"):
        Load(**{field: value})


@pytest.mark.parametrize(
    "faults", [{"unlisted": True}, {"models": '{"data": []}'}, {"models": '{"data": [{"id": "cached"}]}'}]
)
def test_a_model_that_is_named_need_not_be_listed(run: Any, faults: dict[str, Any]) -> None:
    """Promise: `transformers serve FOLDER`, which lists the cache of the Hub alone, is measured by `--model FOLDER`."""
    with serving(num_tokens=2, **faults) as engine:
        status, out, err = run("--url", engine.url, "--model", "my/pair", "--concurrency", 1)
        assert (status, err) == (0, "")
        assert "tokens/s" in out
        assert {asked["model"] for asked in engine.requests} == {"my/pair"}


def test_canary_asks_the_baseline_by_its_own_name(run: Any) -> None:
    """A server of a folder answers to the name of that folder alone, and a pair's folder is another than its target's."""
    with serving(num_tokens=2) as fast, serving(num_tokens=2) as plain:
        servers = ("--url", fast.url, "--baseline-url", plain.url)
        status, _, err = run(*servers, "--model", "my/pair", "--baseline-model", "my/target", "--concurrency", 1)
        assert (status, err) == (0, "")
        assert {asked["model"] for asked in fast.requests} == {"my/pair"}
        assert {asked["model"] for asked in plain.requests} == {"my/target"}


def test_canary_refuses_before_anything_is_asked(run: Any, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    with serving() as engine:
        for options, said in (
            (("--output", tmp_path / "old.json"), "old.json exists: pass overwrite (--overwrite)"),
            (("--plot", tmp_path), "is a folder: name a file in it"),
            (("--temperature", "inf"), "temperature=inf: use a finite number"),
            (("--timeout", "inf"), "timeout=inf: use a number of seconds"),
        ):
            assert said in run("--url", engine.url, *options)[2]
        assert engine.requests == []
    assert (tmp_path / "old.json").read_text() == "{}"
    assert "http://x:y is no server's URL" in run("--url", "http://x:y")[2]


def test_counters_of_several_engines_are_added_up() -> None:
    def read(*engines: tuple[int, int]) -> dict[str, float]:
        lines = ["vllm:spec_decode_num_drafts_total nonsense", "# vllm:spec_decode_num_drafts 5"]
        for i, (drafts, accepted) in enumerate(engines):
            lines.append(f'vllm:spec_decode_num_drafts_total{{engine="{i}",model_name="a}} b"}} {drafts}')
            lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{engine="{i}"}} {accepted}')
        return read_counters("\n".join(lines))

    found = drafting(read((10, 20), (5, 5)), read((30, 80), (15, 10)))
    assert found is not None
    assert found.tau == 1 + (60 + 5) / (20 + 10)
    assert drafting(read((30, 80)), read((10, 20))) is None  # restarted meanwhile


def test_positions_are_read_in_their_own_order() -> None:
    """Promise: ten positions and more, in whatever order the page lists them."""
    name = "vllm:spec_decode_num_"
    lines = [f"{name}drafts_total 4", f"{name}accepted_tokens_total 12"]
    for position in (10, 2, 0, 1):
        lines.append(f'{name}accepted_tokens_per_pos_total{{position="{position}"}} {4 - min(position, 3)}')
    found = drafting({}, read_counters("\n".join(lines)))
    assert found is not None
    assert found.per_position == (1.0, 0.75, 0.5, 0.25)
    assert found.acceptance_lengths == [5, 4, 3, 2]


class Decoder(Engine):
    """A server that decodes: a target with a drafter or alone, its text streamed and its drafts counted block by block."""

    def __init__(self, target: Any, drafter: Any, tokenizer: Any, tells_ids: bool, metrics: str) -> None:
        super().__init__(metrics=metrics)
        self.target, self.drafter, self.tokenizer, self.tells_ids = target, drafter, tokenizer, tells_ids
        self.drafts = self.accepted = 0
        self.per_position = [0] * (BLOCK_SIZE - 1)

    def exposed(self) -> str:
        if self.metrics != "vllm":
            return super().exposed()
        name = "vllm:spec_decode_num_"
        lines = [f"{name}drafts_total {self.drafts}", f"{name}accepted_tokens_total {self.accepted}"]
        for i, count in enumerate(self.per_position):
            lines.append(f'{name}accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {count}')
        return "\n".join(lines) + "\n"

    def steps(self, asked: dict[str, Any]) -> Iterator[list[int]]:
        ids = torch.tensor([asked["prompt"]])
        if self.drafter is None:
            for token in greedy(self.target, ids, max_new_tokens=asked["max_tokens"])[0, ids.shape[1] :].tolist():
                yield [token]
            return
        options = {"max_new_tokens": asked["max_tokens"], "temperature": asked["temperature"]}
        for block in generate_blocks(self.drafter, self.target, ids, prompt_lookup_num_tokens=0, **options):
            if not block.is_prefill:
                self.drafts += 1
                self.accepted += block.num_accepted
                for i in range(block.num_accepted):
                    self.per_position[i] += 1
            yield block.token_ids

    def events(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.num_tokens = 0
        for token_ids in self.steps(asked):
            self.num_tokens += len(token_ids)
            choice: dict[str, Any] = {"text": self.tokenizer.decode(token_ids), "finish_reason": None}
            if self.tells_ids and asked["return_token_ids"]:
                choice["token_ids"] = token_ids
            yield {"choices": [choice]}
        yield {"choices": [{"text": "", "finish_reason": "length"}]}
        yield {"choices": [], "usage": {"completion_tokens": self.num_tokens}}


@pytest.mark.parametrize(("metrics", "tells_ids"), [("vllm", True), ("sglang", False), ("none", True)])
def test_a_served_pair_is_evaluated_as_a_pair_in_this_process_is(metrics: str, tells_ids: bool) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    encode = chat_encoder(tokenizer)
    question = Question("mt-bench", 0, ("what is 1 + 1?",))
    ids = encode([{"role": "user", "content": question.turns[0]}])
    drafter = ScriptedDrafter(target, greedy(target, ids, max_new_tokens=40), [3, 0, 2])
    there = timed_blocks(drafter, target, ids, max_new_tokens=24, temperature=0.0, prompt_lookup_num_tokens=0)
    with (
        serving(Decoder(target, drafter, tokenizer, tells_ids, metrics)) as fast,
        serving(Decoder(target, None, tokenizer, tells_ids, metrics)) as plain,
    ):
        begin = server_backend(Server(fast.url), Server(plain.url), tokenizer, max_new_tokens=24).begin
        [[base, ours]] = answer_questions([question], begin, encode, tokenizer, PeakMemory(on_cuda=False))
    assert (base.method, ours.method) == ("target.generate", "dflash")
    assert base.text == ours.text == tokenizer.decode(there.token_ids, skip_special_tokens=True)
    assert ours.is_identical
    assert (base.num_forwards, base.acceptance_lengths) == (24, [])
    assert 0 < ours.seconds_to_first_token[0] < ours.seconds[0]
    if metrics == "vllm":
        assert ours.acceptance_lengths == sorted(there.acceptance_lengths, reverse=True)
    else:
        assert ours.acceptance_lengths == []
    if tells_ids:
        assert ours.num_tokens == 24
    assert ours.num_forwards == (None if metrics == "none" else there.num_forwards)
    plain_row, row = summarise([base, ours])
    assert plain_row["tokens_per_step"] == 1.0
    assert row["tokens_per_step"] == (
        None if metrics == "none" else pytest.approx(23 / (there.num_forwards - 1), abs=1e-4)
    )


def test_tokens_without_a_text_are_counted() -> None:
    """Bug: those of half a character were dropped, so that ids differed from those of plain decoding."""
    chunks = [("a", [5]), ("", [240, 159]), ("b", [152, 128]), ("", [2])]
    events = [{"choices": [{"text": text, "token_ids": ids, "finish_reason": None}]} for text, ids in chunks]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    events.append({"choices": [], "usage": {"completion_tokens": 6}})
    raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    with serving(raw=raw) as engine:
        reply = Server(engine.url).complete("org/model", [1], 8, None)
    assert reply.token_ids == (5, 240, 159, 152, 128, 2)


def test_eval_asks_two_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    target.config.save_pretrained(tmp_path / "target")
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    pair = ["--target", str(tmp_path / "target"), "--drafter", "org/model-DFlash"]
    common = [*pair, "--tasks", "gsm8k", "--data-root", str(tmp_path), "--max-new-tokens", "8"]

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash", "eval", *common, *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr()

    drafter = make_drafter()
    with (
        serving(Decoder(target, drafter, tokenizer, True, "vllm")) as fast,
        serving(Decoder(target, None, tokenizer, True, "none")) as plain,
    ):
        output = tmp_path / "r.json"
        out, err = run(
            *("--url", fast.url, "--baseline-url", plain.url, "--baseline-model", "org/target"),
            *("--hardware", "1x H200", "--output", str(output)),
        )
    assert "dflash:" not in err
    result = read_result(output)
    base, ours = result["summary"]
    assert (ours["method"], ours["identical"], ours["scored"], ours["tokens"]) == ("dflash", 1, 1, 8)
    assert ours["tau_micro"] == pytest.approx(1 + fast.accepted / fast.drafts, abs=1e-3)  # the warm-up said the same
    assert base["tokens_per_step"] == 1.0
    assert result["environment"]["engine"] == "vllm 0.33.0"
    assert result["decoding"]["servers"]["dflash"] == {"url": fast.url, "model": "org/model"}
    assert result["decoding"]["servers"]["target.generate"] == {"url": plain.url, "model": "org/target"}
    assert result["decoding"]["peak_memory"] == "not measured"
    assert "vllm 0.33.0, 1x H200, greedy, batch 1, thinking off" in out
    assert "--url and --baseline-url go together" in run("--url", fast.url)[1]
    refused = run("--url", fast.url, "--baseline-url", plain.url, "--methods", "native dflash")[1]
    assert "--methods native dflash run in this process" in refused
    assert "cannot be reached" in run("--url", fast.url, "--baseline-url", plain.url)[1]


def test_a_failed_request_is_counted_and_the_rest_measured() -> None:
    refusal = {"status": 503, "body": '{"error": {"message": "queue is full"}}', "after": 12}
    with serving(tau=4, num_tokens=5, **refusal) as engine:
        load = Load(concurrency=(1,))
        result = run_canary({"dflash": (Server(engine.url), "org/model")}, [USER] * 3, load)
    row = result["summary"][0]
    assert (row["requests"], row["failed"], row["tokens"]) == (16, 5, 11 * 5)  # one went to the warm-up
    failed = [m["error"] for m in result["measurements"] if "error" in m]
    assert len(failed) == 5
    assert "answered 503" in failed[0]
    assert at_target(result["summary"], Load(target_ms_per_output_token=1e6)) == {"dflash": None}


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"status": 500, "body": "Internal Server Error"}, "answered 500 Internal Server Error: Internal Server Error."),
        ({"status": 400, "body": '{"error": {"message": "max_tokens is too large"}}'}, "answered 400 Bad Request: max_tokens is too large."),
        ({"status": 404, "body": '{"detail": "Not Found"}'}, "answered 404 Not Found: Not Found."),
        ({"status": 401, "body": ""}, "answered 401 Unauthorized: nothing."),
        ({"raw": b"<html><body>Welcome</body></html>\n"}, "answered 200 and streamed no events: <html><body>Welcome</body></html>."),
        ({"raw": b"data: {oops\n\n"}, "answered 200 and streamed no JSON: {oops."),
        ({"raw": b"data: \xff\xfe\x00\n\n"}, "answered 200 and streamed no JSON:"),
        ({"raw": b'data: {"hello": 1}\n\n'}, 'answered 200 and streamed no chat completion: {"hello": 1}.'),
        ({"raw": b"data: [1]\n\n"}, "answered 200 and streamed no chat completion: [1]."),
        ({"raw": b'data: {"choices": [{"delta": null}]}\n\n'}, "answered 200 and streamed no chat completion:"),
        ({"raw": b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'}, "answered 200 and streamed no chat completion:"),
        ({"raw": b"data: " + b"[" * 100_000 + b"\n\n"}, "answered 200 and streamed no JSON:"),
        ({"raw": b'data: {"error": {"message": "CUDA error"}}\n\n'}, "answered 200 and then an error in its stream: CUDA error."),
        ({"raw": b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'}, "and stopped in the middle of its stream, after 1 pieces"),
        ({"raw": b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'}, "and no count of its tokens"),
        ({"raw": b""}, "and stopped in the middle of its stream, after 0 pieces"),
    ],
    ids=["500", "400", "404", "401", "html", "no-json", "bytes", "other-json", "list", "null", "number", "deep", "error", "cut", "usage", "empty"],
)  # fmt: skip
def test_a_server_that_fails_is_named_in_one_sentence(run: Any, faults: dict[str, Any], message: str) -> None:
    with serving(**faults) as engine:
        status, out, err = run("--url", engine.url, "--concurrency", 1)
        assert (status, out) == (1, "")
        assert err.startswith(f"dflash: {engine.url}/v1/chat/completions answered ")
        assert message in err
        assert err.count("\n") == 1


def test_a_server_that_is_not_there_or_silent_is_named(run: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{free.getsockname()[1]}"
    _, _, err = run("--url", down)
    assert err.startswith(f"dflash: {down}/v1/models cannot be reached (")
    assert "is the server running there?" in err
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ValueError, match=r"did not answer within 0\.05 seconds: raise the timeout"):
            Server(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05).models()


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    """The connection is reset in the middle of a body."""

    def reset(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\ndata: ")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=reset, args=(listener,))
        thread.start()
        with pytest.raises(ValueError, match=r"/v1/models answered 200 and broke off \("):
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}").models()
        thread.join()


def test_requests_that_make_no_sense_are_refused(run: Any, tmp_path: Path) -> None:
    assert "localhost:8000 is no server's URL: give one like http://" in run("--url", "localhost:8000")[2]
    assert (
        "--concurrency 0,4 is not a list of numbers from 1 on" in run("--url", "http://x", "--concurrency", "0,4")[2]
    )
    assert "--concurrency many is not a list" in run("--url", "http://x", "--concurrency", "many")[2]
    assert "--api-key-env NO_SUCH_KEY is not set" in run("--url", "http://x", "--api-key-env", "NO_SUCH_KEY")[2]
    same = ("--output", tmp_path / "x", "--plot", tmp_path / "new" / ".." / "x")
    assert "x is the file that --output writes: give it another name" in run("--url", "http://x", *same)[2]
    bad = tmp_path / "prompts.jsonl"
    for text, message in (
        (
            '{"prompt": "a"}\n{"prompt": 3}\n',
            "line 2 is not a prompt: write a text in UTF-8, or a JSON object with messages, prompt or question",
        ),
        ('{"text": "a"}\n', "line 1 is not a prompt"),
        ('{"prompt": " "}\n', "line 1 is not a prompt"),
        ('{"messages": [1]}\n', "line 1 is not a prompt"),
        ("\n", "is empty: write one prompt on each line"),
    ):
        bad.write_text(text, encoding="utf-8")
        assert message in run("--url", "http://x", "--prompts", bad)[2]
    with serving(models='{"data": [{"id": "a"}, {"id": "b"}]}') as engine:
        assert "lists a, b: name the one that it serves with --model." in run("--url", engine.url)[2]
    with serving(models='{"data": []}') as engine:
        assert "lists no model: name the one that it serves with --model." in run("--url", engine.url)[2]
    with serving(models='{"models": []}') as engine:
        assert '/v1/models lists no models but {"models": []}: is this a model server?' in run("--url", engine.url)[2]
    with serving(models='{"data": [{"id": 7}]}') as engine:
        assert '/v1/models lists no models but {"data": [{"id": 7}]}: is this a' in run("--url", engine.url)[2]
    with serving(unlisted=True) as engine:
        assert (
            "answered 500 Internal Server Error: Internal Server Error: name the model with --model."
            in run("--url", engine.url)[2]
        )
    with serving(models="hello") as engine:
        assert "/v1/models answered 200 with no JSON: hello." in run("--url", engine.url)[2]


def test_the_key_goes_to_the_server_and_nowhere_else(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    output = tmp_path / "canary.json"
    with serving(num_tokens=2) as engine:
        _, out, err = run("--url", engine.url, "--concurrency", 1, "--api-key-env", "MY_KEY", "--output", output)
        assert set(engine.keys) == {"Bearer sk-secret"}
    assert "sk-secret" not in out + err + output.read_text(encoding="utf-8")
    assert "user:pass" not in Server("http://user:pass@host:1/v1").url


def test_the_target_is_met_by_measured_levels_alone() -> None:
    def row(server: str, level: int, speed: float, wait: float, first: float = 10.0) -> dict[str, Any]:
        waits = {"ms_per_output_token_p99": wait, "ms_to_first_token_p99": first}
        return {"server": server, "concurrency": level, "tokens_per_second": speed, "failed": 0, **waits}

    rows = [row("a", 1, 100, 5), row("a", 2, 180, 9), row("a", 4, 150, 9), row("a", 8, 400, 11), row("b", 1, 50, 20)]
    found = at_target(rows, Load(target_ms_per_output_token=10))
    assert (found["a"], found["b"]) == (rows[1], None)
    assert at_target(rows, Load(target_ms_per_output_token=10, target_ms_to_first_token=9.9))["a"] is None
    assert at_target(rows, Load()) == {}


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([5, 1, 4, 2, 3], 0.5) == 3
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile(range(1, 17), 0.99) == 16
    assert percentile([7.0, math.nan], 0.99) == 7.0
    assert percentile([], 0.5) is None
