"""A client of one server that speaks the OpenAI protocol (vLLM, SGLang, …).

It puts a streamed answer under a clock and reads the server's own counters of what its drafts were worth. It knows nothing about loads, tables or files.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit


Message = Mapping[str, str]

LONGEST_QUOTE = 160  # letters of what a server said that an error repeats


@dataclass(frozen=True)
class Reply:
    """One streamed answer.

    Attributes:
        text: What was written, thinking included.
        num_tokens: As the server counts them.
        seconds: From opening the connection to the last token.
        seconds_to_first_token: From opening the connection to the first token.
        token_ids: Those of the text, where they were asked for and the engine tells them; else empty.
    """

    text: str
    num_tokens: int
    seconds: float
    seconds_to_first_token: float
    token_ids: tuple[int, ...] = ()

    @property
    def seconds_per_output_token(self) -> float:
        """Of the tokens behind the first, everything between the first and the last counted; NaN for one token."""
        tokens = self.num_tokens - 1
        return (self.seconds - self.seconds_to_first_token) / tokens if tokens > 0 else float("nan")


@dataclass(frozen=True)
class Drafting:
    """What a server's drafts were worth in some span.

    Attributes:
        tau: Tokens per verify step, the target's own included.
        per_position: Share of drafts whose proposal at position 1, 2, … was accepted, where the server says; else empty.
        source: The counters that it was taken from.
        steps: Verify steps, 0 if the server does not count them.
    """

    tau: float
    per_position: tuple[float, ...]
    source: str
    steps: float = 0.0


class Server:
    """A server by its URL, with or without the `/v1` behind it.

    Whatever goes wrong with it is a ValueError of one sentence that names the address and, where there is one, the status.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url or repr(url)} is no server's URL: give one like http://localhost:8000.")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def models(self) -> list[str]:
        """Names of the models that it serves."""
        answer = self._json("/v1/models")
        try:
            return [model["id"] for model in answer["data"]]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.url}/v1/models lists no models but {_quote(answer)}: is this a model server?"
            ) from error

    def only_model(self, name: str | None = None) -> str:
        """`name`, or the model's where there is one alone; ValueError with the names where there are others."""
        if name is not None:
            return name
        names = self.models()
        if len(names) != 1:
            raise ValueError(f"{self.url} serves {', '.join(names) or 'no model'}: name one with --model.")
        return names[0]

    def engine(self) -> str | None:
        """The engine's name and version, `None` if it does not tell."""
        for path, name, key in (("/version", "vllm", "version"), ("/get_server_info", "sglang", "version")):
            try:
                return f"{name} {self._json(path)[key]}"
            except (ValueError, KeyError, TypeError):
                continue
        return None

    def counters(self) -> dict[str, float] | None:
        """What `/metrics` counts about drafts since the server started, `None` if it has none."""
        try:
            with self._answer("GET", "/metrics") as (response, _):
                text = response.read().decode("utf-8", "replace")
        except ValueError:
            return None
        return _read_counters(text)

    def stream(
        self,
        model: str,
        messages: Sequence[Message],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        thinking: bool | None = None,
    ) -> Reply:
        """The answer to `messages`, streamed under the clock.

        Args:
            model: A name of [`models`].
            messages: Chat messages, each with `role` and `content`; the server's chat template is used.
            max_new_tokens: Longest answer.
            temperature: 0 decodes greedily.
            seed: Of the server's sampling noise.
            thinking: What the chat template is told as `enable_thinking`; `None` tells it nothing.
        """
        asked: dict[str, Any] = {"messages": list(messages), **_limits(model, max_new_tokens, temperature)}
        if seed is not None:
            asked["seed"] = seed
        if thinking is not None:
            asked["chat_template_kwargs"] = {"enable_thinking": thinking}
        return self._stream("/v1/chat/completions", asked)

    def complete(self, model: str, token_ids: Sequence[int], max_new_tokens: int) -> Reply:
        """The greedy continuation of a prompt's ids, streamed under the clock; with its ids if the engine tells them."""
        asked = {"prompt": list(token_ids), **_limits(model, max_new_tokens, 0.0), "return_token_ids": True}
        return self._stream("/v1/completions", asked)

    def _stream(self, path: str, asked: dict[str, Any]) -> Reply:
        pieces: list[str] = []
        token_ids: list[int] = []
        num_tokens, first, last, is_finished = None, 0.0, 0.0, False
        with self._answer("POST", path, asked) as (response, began):
            for chunk in self._chunks(response, path):
                now = time.perf_counter()
                piece, ids, ends = self._read_chunk(chunk, path)
                is_finished |= ends
                if piece or ends:  # the end may be a token without a text
                    pieces.append(piece)
                    token_ids += ids
                    first, last = first or now, now
                if isinstance(chunk.get("usage"), dict):
                    num_tokens = chunk["usage"].get("completion_tokens")
        where = f"{self.url}{path} answered 200"
        if not is_finished:
            raise ValueError(
                f"{where} and stopped in the middle of its stream, after {len(pieces)} pieces: look at its log."
            )
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(
                f"{where} with {len(pieces)} pieces of text and no count of its tokens: the engine must take "
                "stream_options.include_usage."
            )
        return Reply("".join(pieces), num_tokens, last - began, first - began, tuple(token_ids))

    def _read_chunk(self, chunk: dict[str, Any], path: str) -> tuple[str, list[int], bool]:
        """A chunk's text, its ids if the engine tells them, and whether it ends the answer."""
        if chunk.get("error"):
            error = chunk["error"]
            said = error.get("message", error) if isinstance(error, dict) else error
            raise ValueError(f"{self.url}{path} answered 200 and then an error in its stream: {_quote(said)}.")
        try:
            choices = chunk["choices"]
            if not choices:  # the usage's own chunk
                return "", [], False
            choice = choices[0]
            delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            return text, list(choice.get("token_ids") or ()), choice.get("finish_reason") is not None
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.url}{path} answered 200 and streamed no chat completion: {_quote(chunk)}."
            ) from error

    def _chunks(self, response: HTTPResponse, path: str) -> Iterator[dict[str, Any]]:
        """The events of a stream."""
        for line in response:
            text = line.strip()
            if not text.startswith(b"data:"):
                if text and not text.startswith((b":", b"event:", b"id:", b"retry:")):
                    raise ValueError(f"{self.url}{path} answered 200 and streamed no events: {_quote(line)}.")
                continue
            data = text.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                chunk = json.loads(data)
            except ValueError as error:
                raise ValueError(f"{self.url}{path} answered 200 and streamed no JSON: {_quote(data)}.") from error
            if not isinstance(chunk, dict):
                raise ValueError(f"{self.url}{path} answered 200 and streamed no chat completion: {_quote(data)}.")
            yield chunk

    def _json(self, path: str) -> Any:
        with self._answer("GET", path) as (response, _):
            body = response.read()
        try:
            return json.loads(body)
        except ValueError as error:
            raise ValueError(f"{self.url}{path} answered 200 with no JSON: {_quote(body)}.") from error

    @contextmanager
    def _answer(self, method: str, path: str, asked: Any = None) -> Iterator[tuple[HTTPResponse, float]]:
        """The response to a request with status 200, and when its connection was asked for."""
        connection, response = self._connection(), None
        try:
            body = None if asked is None else json.dumps(asked).encode()
            began = time.perf_counter()  # a server with a full queue lets a connection wait, and so its user
            connection.request(method, f"{self._parts.path}{path}", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                said = _quote(_message(response.read()))
                raise ValueError(f"{self.url}{path} answered {response.status} {response.reason}: {said}.")
            yield response, began
        except TimeoutError as error:
            raise ValueError(
                f"{self.url}{path} did not answer within {self._timeout:g} seconds: raise --timeout."
            ) from error
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            if response is not None:
                raise ValueError(
                    f"{self.url}{path} answered 200 and broke off ({reason}): look at its log."
                ) from error
            raise ValueError(f"{self.url}{path} cannot be reached ({reason}): is the server running there?") from error
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=self._timeout, context=ssl.create_default_context())
        return HTTPConnection(host, port, timeout=self._timeout)


def _limits(model: str, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """What every streamed request asks for."""
    return {
        "model": model,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


VLLM = "vllm:spec_decode_num_"
SGLANG = "sglang:"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)
POSITION = re.compile(r'[{,]\s*position="(\d+)"')
SGLANG_COUNTERS = {f"{SGLANG}spec_verify_calls", f"{SGLANG}generation_tokens", f"{SGLANG}num_requests"}


def drafting(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> Drafting | None:
    """What the drafts between two readings of [`Server.counters`] were worth, `None` if nothing was drafted.

    vLLM counts drafts and accepted tokens. SGLang counts verify steps, and of the tokens those that were kept, so that an
    answer's last step counts less there; versions without that counter show the mean of their last moments alone.
    """
    if before is None or after is None:
        return None
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts = delta.get(f"{VLLM}drafts", 0.0)
    if drafts > 0:
        per_position: list[float] = []
        while (name := f"{VLLM}accepted_tokens_per_pos {len(per_position)}") in delta:
            per_position.append(delta[name] / drafts)
        tau = 1 + delta.get(f"{VLLM}accepted_tokens", 0.0) / drafts
        return Drafting(tau, tuple(per_position), f"{VLLM}drafts, …accepted_tokens", drafts)
    steps, tokens = delta.get(f"{SGLANG}spec_verify_calls", 0.0), delta.get(f"{SGLANG}generation_tokens", 0.0)
    if steps > 0 and tokens > 0:
        # Each answer's first token is the prompt's forward's.
        kept = tokens - delta.get(f"{SGLANG}num_requests", 0.0)
        return Drafting(kept / steps, (), f"{SGLANG}spec_verify_calls", steps)
    recent = after.get(f"{SGLANG}spec_accept_length", 0.0)
    return Drafting(recent, (), f"{SGLANG}spec_accept_length, a mean of the last moments") if recent > 0 else None


def acceptance_lengths(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> list[int]:
    """Acceptance length of each draft between two readings of vLLM's counters, longest first; empty of other engines.

    The counts by position say how many drafts had 1, 2, … proposals accepted, and so how many had exactly that many.
    """
    if before is None or after is None:
        return []
    delta = {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
    reached = [delta.get(f"{VLLM}drafts", 0)]
    while (name := f"{VLLM}accepted_tokens_per_pos {len(reached) - 1}") in delta:
        reached.append(delta[name])
    if len(reached) == 1:
        return []
    exact = [here - further for here, further in pairwise([*reached, 0])]
    return [length for length in range(len(exact), 0, -1) for _ in range(exact[length - 1])]


def _read_counters(metrics: str) -> dict[str, float]:
    """The samples about drafts in Prometheus' text format, summed over engines; positions stand behind the name."""
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


def _message(body: bytes) -> Any:
    """What an error's body says, in the forms of OpenAI, vLLM and FastAPI, or all of it."""
    try:
        said = json.loads(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    return said


def _quote(said: Any) -> str:
    """The first letters of what a server said, on one line."""
    text = (
        said.decode("utf-8", "replace")
        if isinstance(said, bytes)
        else said
        if isinstance(said, str)
        else json.dumps(said)
    )
    text = " ".join(text.split()).rstrip(".")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return (text[:LONGEST_QUOTE] + " …" if len(text) > LONGEST_QUOTE else text) or "nothing"
