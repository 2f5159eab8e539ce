"""A server that speaks the OpenAI protocol: its streamed answers under a clock, and its own counters of its drafts."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPResponse
from itertools import pairwise
from typing import Any

from dflash.common.json_text import parsed_json
from dflash.common.openai_client import OpenAIClient, quote


VLLM, SGLANG = "vllm:spec_decode_num_", "sglang:"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)
POSITION = re.compile(r'[{,]\s*position="(\d+)"')
SGLANG_COUNTERS = {f"{SGLANG}spec_verify_calls", f"{SGLANG}generation_tokens", f"{SGLANG}num_requests"}

Message = Mapping[str, str]
Counters = Mapping[str, float]


@dataclass(frozen=True)
class Reply:
    """One streamed answer. Seconds count from opening the connection."""

    text: str  # thinking included
    num_tokens: int  # as the server counts them
    seconds: float
    seconds_to_first_token: float
    token_ids: tuple[int, ...] = ()  # of the text if they were asked for and the engine sends them
    prompt_tokens: int | None = None  # as the server counts them, if it does

    @property
    def seconds_per_output_token(self) -> float:
        """Mean time of a token after the first; NaN if there is one token."""
        tokens = self.num_tokens - 1
        return (self.seconds - self.seconds_to_first_token) / tokens if tokens > 0 else float("nan")


class Server(OpenAIClient):
    """A server under measurement; arguments and errors are those of [`OpenAIClient`]."""

    def engine(self) -> str | None:
        """The engine's name and version; `None` if it does not tell."""
        for path, name in (("/version", "vllm"), ("/get_server_info", "sglang")):
            try:
                return f"{name} {self.json('GET', path)['version']}"
            except (ValueError, KeyError, TypeError):
                continue
        return None

    def counters(self) -> dict[str, float] | None:
        """The counters of `/metrics` about drafts since the server started; `None` if it has no such page."""
        try:
            with self.response("GET", "/metrics") as response:
                return read_counters(response.read().decode("utf-8", "replace"))
        except ValueError:
            return None

    def stream(
        self,
        model: str,
        messages: Sequence[Message],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        thinking: bool | None = None,
    ) -> Reply:
        """The answer to chat `messages` in the server's template, streamed under the clock.

        `seed` is that of the server's sampling noise. `thinking` is passed to the template as `enable_thinking`,
        unless it is `None`.
        """
        asked: dict[str, Any] = {} if seed is None else {"seed": seed}
        if thinking is not None:
            asked["chat_template_kwargs"] = {"enable_thinking": thinking}
        asked |= {"messages": list(messages), "temperature": temperature}
        return self._stream("/v1/chat/completions", model, max_new_tokens, asked)

    def complete(self, model: str, token_ids: Sequence[int], max_new_tokens: int, tokenizer: Any) -> Reply:
        """The greedy continuation of ids, streamed under the clock; with its own ids if the engine sends them.

        A server that takes no ids is asked by their text, which `tokenizer` decodes.
        """
        asked = {"prompt": list(token_ids), "temperature": 0.0, "return_token_ids": True}
        send = partial(self._stream, "/v1/completions", model, max_new_tokens)
        return self.completion(asked, tokenizer, send, lambda reply: reply.prompt_tokens)

    def _stream(self, path: str, model: str, max_new_tokens: int, asked: dict[str, Any]) -> Reply:
        where = f"{self.url}{path} answered 200"
        pieces: list[str] = []
        token_ids: list[int] = []
        num_tokens, prompt_tokens, first, last, is_finished = None, None, 0.0, 0.0, False
        asked |= {
            "model": model,
            "max_tokens": max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked).encode()
        began = time.perf_counter()  # a full server lets the connection wait, and its user with it
        with self.response("POST", path, body) as response:
            for chunk in _chunks(response, where):
                now = time.perf_counter()
                piece, ids, ends = _read_chunk(chunk, where)
                is_finished |= ends
                if piece or ends:  # the end may be a token without a text
                    pieces.append(piece)
                    token_ids += ids
                    first, last = first or now, now
                if isinstance(chunk.get("usage"), dict):
                    num_tokens = chunk["usage"].get("completion_tokens")
                    prompt_tokens = chunk["usage"].get("prompt_tokens")
        if not is_finished:
            said = f"{where} and stopped in the middle of its stream, after {len(pieces)} pieces"
            raise ValueError(f"{said}: look at its log.")
        if not isinstance(num_tokens, int) or num_tokens < 1:
            said = f"{where} with {len(pieces)} pieces of text and no count of its tokens"
            raise ValueError(f"{said}: the engine must take stream_options.include_usage.")
        return Reply("".join(pieces), num_tokens, last - began, first - began, tuple(token_ids), prompt_tokens)


def _chunks(response: HTTPResponse, where: str) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in map(bytes.strip, response):
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            continue
        if not line.startswith(b"data:"):
            raise ValueError(f"{where} and streamed no events: {quote(line)}.")
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            chunk = parsed_json(data)
        except ValueError as error:
            raise ValueError(f"{where} and streamed no JSON: {quote(data)}.") from error
        if not isinstance(chunk, dict):
            raise ValueError(f"{where} and streamed no chat completion: {quote(data)}.")
        yield chunk


def _read_chunk(chunk: dict[str, Any], where: str) -> tuple[str, list[int], bool]:
    """A chunk's text, its ids if the engine sends them, and whether it ends the answer."""
    if chunk.get("error"):
        error = chunk["error"]
        said = error.get("message", error) if isinstance(error, dict) else error
        raise ValueError(f"{where} and then an error in its stream: {quote(said)}.")
    try:
        choices = chunk["choices"]
        if not choices:  # the usage's own chunk
            return "", [], False
        choice = choices[0]
        delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if not isinstance(text, str):
            raise TypeError("The text is no string.")
        return text, list(choice.get("token_ids") or ()), choice.get("finish_reason") is not None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} and streamed no chat completion: {quote(chunk)}.") from error


@dataclass(frozen=True)
class Drafting:
    """The acceptance of a server's drafts in some span of time. Only vLLM counts by position."""

    tau: float  # tokens per verify step, the target's own included
    per_position: tuple[float, ...]  # share of drafts whose proposal at position 1, 2, … was accepted
    source: str  # the counters that it was taken from
    steps: float = 0.0  # verify steps; 0 if the server does not count them
    acceptance_lengths: list[int] = field(default_factory=list)  # of each draft, longest first


def read_counters(metrics: str) -> dict[str, float]:
    """The samples about drafts in Prometheus' text, summed over engines; a position follows its counter's name."""
    found: dict[str, float] = {}
    gauges: list[float] = []
    for sample in SAMPLE.finditer(metrics):
        name = sample["name"].removesuffix("_total")
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if name == f"{SGLANG}spec_accept_length":
            gauges.append(value)
        elif (name.startswith(VLLM) and not name.endswith("_created")) or name in SGLANG_COUNTERS:
            position = POSITION.search(sample["labels"] or "")
            key = f"{name} {position[1]}" if position else name
            found[key] = found.get(key, 0.0) + value
    if gauges:
        found[f"{SGLANG}spec_accept_length"] = sum(gauges) / len(gauges)
    return found


def drafting(before: Counters | None, after: Counters | None) -> Drafting | None:
    """The acceptance between two readings of [`Server.counters`]; `None` if nothing was drafted.

    vLLM counts drafts and accepted tokens. SGLang counts verify steps and the tokens that were kept, so an answer's
    last step counts less there; its older versions show only the mean of the last moments.
    """
    if before is None or after is None:
        return None
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts = delta.get(f"{VLLM}drafts", 0.0)
    if drafts > 0:
        counts: list[float] = []
        while (name := f"{VLLM}accepted_tokens_per_pos {len(counts)}") in delta:
            counts.append(delta[name])
        # Drafts with at least 0, 1, 2, … accepted proposals; the differences are those with exactly that many.
        reached = [round(count) for count in (drafts, *counts, 0.0)] if counts else []
        exact = [here - further for here, further in pairwise(reached)]
        lengths = [length for length in range(len(exact), 0, -1) for _ in range(exact[length - 1])]
        tau = 1 + delta.get(f"{VLLM}accepted_tokens", 0.0) / drafts
        shares = tuple(count / drafts for count in counts)
        return Drafting(tau, shares, f"{VLLM}drafts, …accepted_tokens", drafts, lengths)
    steps, tokens = delta.get(f"{SGLANG}spec_verify_calls", 0.0), delta.get(f"{SGLANG}generation_tokens", 0.0)
    if steps > 0 and tokens > 0:
        # The prefill gives each answer's first token.
        kept = tokens - delta.get(f"{SGLANG}num_requests", 0.0)
        return Drafting(kept / steps, (), f"{SGLANG}spec_verify_calls", steps)
    recent = after.get(f"{SGLANG}spec_accept_length", 0.0)
    return Drafting(recent, (), f"{SGLANG}spec_accept_length, a mean of the last moments") if recent > 0 else None
