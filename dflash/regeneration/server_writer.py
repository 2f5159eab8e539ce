"""The target on a server that speaks the OpenAI protocol (vLLM, SGLang, …): prompts' ids go out, answers' ids come back."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from dflash.common.fingerprints import config_fingerprint
from dflash.model.generation_dflash import max_positions
from dflash.training import stop_ids

from .answering import Answer, Request, Sampling


LONGEST_QUOTE = 160  # letters of what a server said that an error repeats


class ServerWriter:
    """A served target, with the attributes of [`TargetWriter`]. Whatever goes wrong with it is a ValueError of one sentence that names the address.

    It is asked for completions of ids, so that the chat template is ours. Engines that do not tell the ids of an answer
    have its text encoded again, which is exact for most texts and not for all; the answer says so.

    Args:
        url: With or without the `/v1` behind it.
        model: The name that it serves the target under; `None`: the only one.
        tokenizer: The target's.
        config: The target's.
        generation_config: The target's, whose stop tokens end an answer.
        batch_size: How many requests are under way side by side.
        api_key: If it wants one.
        timeout: Longest silence, in seconds.
    """

    is_concurrent = True

    def __init__(
        self,
        url: str,
        model: str | None,
        tokenizer: Any,
        config: Any,
        generation_config: Any = None,
        batch_size: int = 64,
        api_key: str | None = None,
        timeout: float = 3600.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url or repr(url)} is no server's URL: give one like http://localhost:8000.")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._timeout, self.batch_size, self._tokenizer = timeout, batch_size, tokenizer
        self._stops = stop_ids(generation_config) or {tokenizer.eos_token_id} - {None}
        served = self._models()
        self.model = model if model is not None else served[0]
        if self.model not in served or (model is None and len(served) > 1):
            raise ValueError(f"{self.url} serves {', '.join(served)} and not {model}: name one of them as the model.")
        self.positions = max_positions(SimpleNamespace(config=config))  # type: ignore[arg-type]
        self.revision = getattr(config, "_commit_hash", None)
        self.facts = {"served_model": self.model, "config": config_fingerprint(config, generation_config)}

    def __call__(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """The answers, asked for side by side."""
        if len(requests) == 1:
            return [self._ask(requests[0], sampling)]
        with ThreadPoolExecutor(self.batch_size) as pool:
            return list(pool.map(lambda request: self._ask(request, sampling), requests))

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            # vLLM and SGLang would else fill in the sampling defaults of the target's own config.
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "seed": request.seed % 2**31,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        reply = self._json("POST", "/v1/completions", asked)
        try:
            choice = reply["choices"][0]
            text, finish, token_ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
            is_known = isinstance(token_ids, list) and bool(token_ids)
            token_ids = list(token_ids) if is_known else self._encode(text)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url}/v1/completions answered no completion: {_quote(reply)}.") from error
        if finish not in ("stop", "length"):
            raise ValueError(f"{self.url}/v1/completions ended an answer with {finish!r}: look at its log.")
        ended = finish == "stop"
        if ended and (not token_ids or token_ids[-1] not in self._stops) and self._stops:
            token_ids.append(self._stop())  # most engines leave it out of the text
        return Answer(token_ids, ended, is_encoded=not is_known)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _stop(self) -> int:
        own = self._tokenizer.eos_token_id
        return own if own in self._stops else min(self._stops)

    def _models(self) -> list[str]:
        answer = self._json("GET", "/v1/models")
        try:
            found = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.url}/v1/models lists no models but {_quote(answer)}: is this a model server?"
            ) from error
        if not found:
            raise ValueError(f"{self.url} serves no model: start it with the target.")
        return found

    def _json(self, method: str, path: str, asked: Any = None) -> Any:
        connection = self._connection()
        try:
            connection.request(
                method, f"{self._parts.path}{path}", None if asked is None else json.dumps(asked), self._headers
            )
            response = connection.getresponse()
            body = response.read()
        except TimeoutError as error:
            raise ValueError(
                f"{self.url}{path} did not answer within {self._timeout:g} seconds: ask for shorter answers or fewer at once."
            ) from error
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"{self.url}{path} cannot be reached ({reason}): is the server running there?") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(
                f"{self.url}{path} answered {response.status} {response.reason}: {_quote(_message(body))}."
            )
        try:
            return json.loads(body)
        except ValueError as error:
            raise ValueError(f"{self.url}{path} answered 200 with no JSON: {_quote(body)}.") from error

    def _connection(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=self._timeout, context=ssl.create_default_context())
        return HTTPConnection(host, port, timeout=self._timeout)


def _message(body: bytes) -> Any:
    """What an error's body says, without the JSON around it."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        return error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        return body


def _quote(said: Any) -> str:
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said if isinstance(said, str) else str(said)
    text = " ".join(text.split())
    return (text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…") or "nothing"
