"""A client of one server that speaks the OpenAI protocol (vLLM, SGLang, …): addresses, headers, errors."""

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .json_text import parsed_json
from .text_completions import REMEDY, TextOnlyError, check_prompt_tokens, text_request


Result = TypeVar("Result")

LONGEST_QUOTE = 160  # letters of a server's words that an error repeats
LONGEST_TIMEOUT = 1e8  # seconds; a socket takes no infinite number
PAUSES = (1.0, 4.0, 16.0, 60.0)  # seconds before a request is sent again
LONGEST_PAUSE = 600.0  # seconds; if a server asks for more, the request fails
TRANSIENT = (408, 429, 500, 502, 503, 504)  # statuses of failures that may pass by themselves


class TransientError(ValueError):
    """A failure that may pass by itself. The server asks to wait `retry_after` seconds, 0 if it does not say."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def with_retries(ask: Callable[[], Result], wait: Callable[[float], bool | None], spread: float = 0.0) -> Result:
    """What `ask` returns; after each [`TransientError`] it is called again, at most once for each of `PAUSES`.

    `wait` is given the seconds of a pause, and ends the tries by returning true, as that of a `threading.Event` does. A
    pause is as long as the server asks for, or that of `PAUSES` if that is longer, times 1 + `spread`, and at most
    `LONGEST_PAUSE`. Requests that failed together should have different spreads from 0 to 1: together again they would
    overload the server once more.
    """
    for seconds in PAUSES:
        try:
            return ask()
        except TransientError as error:
            if wait(min(max(seconds, error.retry_after) * (1 + spread), LONGEST_PAUSE)):
                raise
    try:
        return ask()
    except TransientError as error:
        raise ValueError(f"After {len(PAUSES) + 1} tries: {error}") from error


class OpenAIClient:
    """A server by its URL, with or without `/v1` at its end.

    Every failure is a ValueError of one sentence that names the address and, where there is one, the status; it is a
    [`TransientError`] if the same request may succeed later. A user name and a password in `url` are dropped; `api_key`
    is sent as a bearer token; `timeout` is the longest silence in seconds.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            self._address = parts.hostname or "", parts.port
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # a port that is no number
            is_url = False
        if not is_url:
            raise ValueError(f"{url or repr(url)} is no server's URL: give one like http://localhost:8000.")
        if not 0 < timeout <= LONGEST_TIMEOUT:
            raise ValueError(f"timeout={timeout}: use a number of seconds above 0 and up to {LONGEST_TIMEOUT:g}.")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._is_text_only = False  # several threads may find it out at once, each by a refusal of its own
        # Made once: reading the certificates takes longer than many an answer.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    def models(self) -> list[str]:
        """Names of the models that the server serves."""
        answer = self.json("GET", "/v1/models")
        try:
            names = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError):
            names = [None]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{self.url}/v1/models lists no models but {quote(answer)}: is this a model server?")
        return names

    def only_model(self, name: str | None = None) -> str:
        """`name`, or the only model that the server lists; ValueError with the names of several.

        A name is not looked up: `transformers serve` answers for a folder that it does not list.
        """
        if name is not None:
            return name
        try:
            names = self.models()
        except TransientError as error:
            if " answered " not in str(error):  # it cannot be reached
                raise
            raise ValueError(f"{str(error).rstrip('.')}: name the model with --model.") from error
        if len(names) == 1:
            return names[0]
        listed = f"{self.url} lists {', '.join(names)}" if names else f"{self.url} lists no model"
        raise ValueError(f"{listed}: name the one that it serves with --model.")

    def json(self, method: str, path: str, content: Any = None) -> Any:
        """What the server answers to a request, read as JSON."""
        with self.response(method, path, None if content is None else json.dumps(content).encode()) as response:
            body = response.read()
        try:
            return parsed_json(body)
        except ValueError as error:
            raise ValueError(f"{self.url}{path} answered 200 with no JSON: {quote(body)}.") from error

    def completion(
        self,
        request: Mapping[str, Any],
        tokenizer: Any,
        send: Callable[[dict[str, Any]], Result],
        prompt_tokens: Callable[[Result], Any],
    ) -> Result:
        """What `send` returns for a `request` to `/v1/completions` whose prompt is token ids.

        A server that refuses ids (`transformers serve`) is asked by the text of the ids, then and from then on;
        `prompt_tokens` reads from its reply how many tokens it made of that text. ValueError if they are not the ids.
        """
        if not self._is_text_only:
            try:
                return send(dict(request))
            except TextOnlyError:
                self._is_text_only = True
        reply = send(text_request(request, tokenizer))
        check_prompt_tokens(prompt_tokens(reply), request["prompt"], f"{self.url}/v1/completions")
        return reply

    @contextmanager
    def response(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """The response to a request, of status 200; errors while the caller reads it are named as well."""
        where = f"{self.url}{path}"
        kind = HTTPConnection if self._tls is None else partial(HTTPSConnection, context=self._tls)
        connection: HTTPConnection = kind(*self._address, timeout=self._timeout)
        response = None
        try:
            _connect(connection, where)
            connection.request(method, f"{self._path}{path}", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response, where)
            yield response
        except TimeoutError as error:  # asked again it would be as slow, after hours
            remedy = "raise the timeout, or ask for shorter answers or fewer at once"
            raise ValueError(f"{where} did not answer within {self._timeout:g} seconds: {remedy}.") from error
        except (OSError, HTTPException) as error:
            if response is None:
                raise _unreachable(where, error) from error
            reason = str(error) or type(error).__name__
            raise TransientError(
                f"{where} answered {response.status} and broke off ({reason}): look at its log."
            ) from error
        finally:
            connection.close()


def quote(answer: Any) -> str:
    """The first letters of a server's answer, on one line."""
    if isinstance(answer, bytes):
        answer = answer.decode("utf-8", "replace")
    elif not isinstance(answer, str):
        answer = json.dumps(answer)
    text = " ".join(answer.split()).rstrip(".")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    if len(text) > LONGEST_QUOTE:
        text = f"{text[:LONGEST_QUOTE]} …"
    return text or "nothing"


def _connect(connection: HTTPConnection, where: str) -> None:
    """Connects now, so that a server that is not there is not taken for one that is slow."""
    try:
        connection.connect()
    except OSError as error:
        raise _unreachable(where, error) from error


def _unreachable(where: str, error: Exception) -> TransientError:
    reason = str(error) or type(error).__name__
    return TransientError(f"{where} cannot be reached ({reason}): is the server running there?")


def _refusal(response: HTTPResponse, where: str) -> ValueError:
    """The error for a status that is not 200."""
    message = quote(_message(response.read()))
    sentence = f"{where} answered {response.status} {response.reason}: {message}"
    if response.status == 422 and message.startswith("Unexpected fields in the request"):  # as `transformers serve`
        return TextOnlyError(f"{sentence}; {REMEDY}.")
    if response.status not in TRANSIENT:
        return ValueError(f"{sentence}.")
    seconds = _retry_after(response)
    if seconds > LONGEST_PAUSE:
        return ValueError(f"{sentence}; it asks to wait {seconds:g} seconds: begin again then.")
    return TransientError(f"{sentence}.", seconds)


def _retry_after(response: HTTPResponse) -> float:
    """Seconds that the server asks to wait, as a number or a date; 0 if it does not say."""
    pause = (response.getheader("Retry-After") or "").strip()
    if pause.isdecimal():
        return float(pause)
    try:  # by the server's own clock
        now = parsedate_to_datetime(response.getheader("Date") or "")
        return max(0.0, (parsedate_to_datetime(pause) - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _message(body: bytes) -> Any:
    """The message in an error's body, in the forms of OpenAI, vLLM and FastAPI; else the whole body."""
    try:
        message = parsed_json(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(message, dict) and message.get(key):
            message = message[key]
    return message
