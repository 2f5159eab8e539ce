"""A server that speaks the OpenAI protocol, with its streamed answers under a clock. It knows no load, table or file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from dflash.common.openai_client import OpenAIClient, quote

from .draft_counters import read_counters


Message = Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """One streamed answer.

    Attributes:
        text: The answer, thinking included.
        num_tokens: As the server counts them.
        seconds: From opening the connection to the last token.
        seconds_to_first_token: From opening the connection to the first token.
        token_ids: The ids of the text if they were asked for and the engine sends them; else empty.
    """

    text: str
    num_tokens: int
    seconds: float
    seconds_to_first_token: float
    token_ids: tuple[int, ...] = ()

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
        """The answer to `messages`, streamed under the clock.

        Args:
            model: A name of [`models`].
            messages: Chat messages, each with `role` and `content`; the server's chat template is used.
            max_new_tokens: Longest answer.
            temperature: 0 decodes greedily.
            seed: Of the server's sampling noise.
            thinking: Passed to the chat template as `enable_thinking`; `None` passes nothing.
        """
        asked: dict[str, Any] = {"messages": list(messages), **_limits(model, max_new_tokens, temperature)}
        if seed is not None:
            asked["seed"] = seed
        if thinking is not None:
            asked["chat_template_kwargs"] = {"enable_thinking": thinking}
        return self._stream("/v1/chat/completions", asked)

    def complete(self, model: str, token_ids: Sequence[int], max_new_tokens: int) -> Reply:
        """The greedy continuation of a prompt's ids, streamed under the clock; with its ids if the engine sends them."""
        asked = {"prompt": list(token_ids), **_limits(model, max_new_tokens, 0.0), "return_token_ids": True}
        return self._stream("/v1/completions", asked)

    def _stream(self, path: str, asked: dict[str, Any]) -> Reply:
        where = f"{self.url}{path} answered 200"
        pieces: list[str] = []
        token_ids: list[int] = []
        num_tokens, first, last, is_finished = None, 0.0, 0.0, False
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


def _limits(model: str, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """The fields of every streamed request."""
    return {
        "model": model,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chunks(response: HTTPResponse, where: str) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in response:
        text = line.strip()
        if not text.startswith(b"data:"):
            if text and not text.startswith((b":", b"event:", b"id:", b"retry:")):
                raise ValueError(f"{where} and streamed no events: {quote(line)}.")
            continue
        data = text.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
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
        return text, list(choice.get("token_ids") or ()), choice.get("finish_reason") is not None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} and streamed no chat completion: {quote(chunk)}.") from error
