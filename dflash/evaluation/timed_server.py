"""Times the streamed answers of a server that speaks the OpenAI protocol, and reads the counters of its drafts."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPResponse
from typing import Any, NamedTuple

from dflash.common.json_text import parsed_json
from dflash.common.openai_client import OpenAIClient, quote


VLLM, SGLANG = "vllm:spec_decode_num_", "sglang:"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)
POSITION = re.compile(r'[{,]\s*position="(\d+)"')
ACCEPTED_AT = re.compile(rf"{VLLM}accepted_tokens_per_pos (\d+)")
SGLANG_MEAN = f"{SGLANG}spec_accept_length"
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
        request: dict[str, Any] = {"messages": list(messages), "temperature": temperature}
        if seed is not None:
            request["seed"] = seed
        if thinking is not None:
            request["chat_template_kwargs"] = {"enable_thinking": thinking}
        return self._stream("/v1/chat/completions", model, max_new_tokens, request)

    def complete(self, model: str, token_ids: Sequence[int], max_new_tokens: int, tokenizer: Any) -> Reply:
        """The greedy continuation of ids, streamed under the clock; with its own ids if the engine sends them.

        A server that takes no ids is asked by their text, which `tokenizer` decodes.
        """
        request = {"prompt": list(token_ids), "temperature": 0.0, "return_token_ids": True}
        send = partial(self._stream, "/v1/completions", model, max_new_tokens)
        return self.completion(request, tokenizer, send, lambda reply: reply.prompt_tokens)

    def _stream(self, path: str, model: str, max_new_tokens: int, request: dict[str, Any]) -> Reply:
        where = f"{self.url}{path} answered 200"
        pieces: list[Piece] = []
        times: list[float] = []
        usage: dict[str, Any] = {}
        request |= {
            "model": model,
            "max_tokens": max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(request).encode()
        began = time.perf_counter()  # a full server lets the connection wait, and its user with it
        with self.response("POST", path, body) as response:
            for chunk in _chunks(response, where):
                now = time.perf_counter()
                piece = _read_chunk(chunk, where)
                # Half a character and the end may be tokens without a text.
                if piece.text or piece.token_ids or piece.ends:
                    pieces.append(piece)
                    times.append(now - began)
                if isinstance(chunk.get("usage"), dict):
                    usage = chunk["usage"]
        if not any(piece.ends for piece in pieces):
            raise ValueError(
                f"{where} and stopped in the middle of its stream, after {len(pieces)} pieces: look at its log."
            )
        num_tokens = usage.get("completion_tokens")
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(
                f"{where} with {len(pieces)} pieces of text and no count of its tokens: the engine must take "
                "stream_options.include_usage."
            )
        return Reply(
            "".join(piece.text for piece in pieces),
            num_tokens,
            times[-1],
            times[0],
            tuple(token_id for piece in pieces for token_id in piece.token_ids),
            usage.get("prompt_tokens"),
        )


class Piece(NamedTuple):
    """A piece of a streamed answer."""

    text: str
    token_ids: Sequence[int]  # empty if the engine does not send them
    ends: bool  # whether it ends the answer


def _chunks(response: HTTPResponse, where: str) -> Iterator[Any]:
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
        yield chunk


def _read_chunk(chunk: Any, where: str) -> Piece:
    if not isinstance(chunk, dict):
        raise ValueError(f"{where} and streamed no chat completion: {quote(chunk)}.")
    error = chunk.get("error")
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ValueError(f"{where} and then an error in its stream: {quote(message)}.")
    try:
        if not chunk["choices"]:  # the usage's own chunk
            return Piece("", (), False)
        choice = chunk["choices"][0]
        delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
        texts = [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
        text = next(filter(None, texts), "")
        if not isinstance(text, str):
            raise TypeError("The text is no string.")
        token_ids = list(choice.get("token_ids") or ())
        ends = choice.get("finish_reason") is not None
        return Piece(text, token_ids, ends)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} and streamed no chat completion: {quote(chunk)}.") from error


@dataclass(frozen=True)
class DraftFigures:
    """The acceptance of a server's drafts in some span of time. Only vLLM counts by position."""

    tau: float  # tokens per verify step, the target's own included
    per_position: tuple[float, ...]  # share of drafts whose proposal at position 1, 2, … was accepted
    source: str  # the counters that it was taken from
    steps: float = 0.0  # verify steps; 0 if the server does not count them
    acceptance_lengths: list[int] = field(default_factory=list)  # of each draft, longest first


def read_counters(metrics: str) -> dict[str, float]:
    """The samples about drafts in Prometheus' text, summed over engines; a position follows its counter's name."""
    counters: Counter[str] = Counter()
    means: list[float] = []
    for sample in SAMPLE.finditer(metrics):
        name = sample["name"].removesuffix("_total")
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if name == SGLANG_MEAN:
            means.append(value)
        elif name in SGLANG_COUNTERS or (name.startswith(VLLM) and not name.endswith("_created")):
            position = POSITION.search(sample["labels"] or "")
            counters[f"{name} {position[1]}" if position else name] += value  # type: ignore[assignment]
    if means:
        counters[SGLANG_MEAN] = sum(means) / len(means)  # type: ignore[assignment]
    return dict(counters)


def drafting(before: Counters | None, after: Counters | None) -> DraftFigures | None:
    """The acceptance between two readings of [`Server.counters`]; `None` if no counter moved.

    vLLM counts drafts and accepted tokens. SGLang counts verify steps and the tokens that were kept, so an answer's
    last step counts less there. Its older versions show only a mean of the last moments, which is returned as it is, even if nothing
    was drafted in between.
    """
    if before is None or after is None:
        return None
    new = Counter(after)
    new.subtract(before)
    drafts = new[f"{VLLM}drafts"]
    if drafts > 0:
        at_position = {}
        for name, count in new.items():
            match = ACCEPTED_AT.fullmatch(name)
            if match:
                at_position[int(match[1])] = count
        accepted = [at_position[position] for position in sorted(at_position)]
        lengths = []
        if accepted:
            # `accepted[i]` drafts had their proposal at position i accepted, and those before it.
            for draft in range(round(drafts)):
                num_accepted = sum(draft < count for count in accepted)
                lengths.append(1 + num_accepted)
        return DraftFigures(
            1 + new[f"{VLLM}accepted_tokens"] / drafts,
            tuple(count / drafts for count in accepted),
            f"{VLLM}drafts, …accepted_tokens",
            drafts,
            lengths,
        )
    steps = new[f"{SGLANG}spec_verify_calls"]
    tokens = new[f"{SGLANG}generation_tokens"]
    if steps > 0 and tokens > 0:
        kept = tokens - new[f"{SGLANG}num_requests"]  # the prefill gives each answer's first token
        return DraftFigures(kept / steps, (), f"{SGLANG}spec_verify_calls", steps)
    recent = after.get(SGLANG_MEAN, 0.0)
    return DraftFigures(recent, (), f"{SGLANG_MEAN}, a mean of the last moments") if recent > 0 else None
