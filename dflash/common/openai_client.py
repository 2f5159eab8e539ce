"""A client of one server that speaks the OpenAI protocol (vLLM, SGLang, …): addresses, headers, errors."""

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlsplit


Said = TypeVar("Said")

LONGEST_QUOTE = 160  # letters of a server's words that an error repeats
LONGEST_TIMEOUT = 1e8  # seconds; a socket takes no infinite number
PAUSES = (1.0, 4.0, 16.0, 60.0)  # seconds before a request is sent again
LONGEST_PAUSE = 600.0  # seconds; a server that asks for more is given up


class PassingFailure(ValueError):
    """A failure that may pass by itself. The server asks to wait `retry_after` seconds, 0 if it does not say."""

    def __init__(self, said: str, retry_after: float = 0.0) -> None:
        super().__init__(said)
        self.retry_after = retry_after


def pause(seconds: float) -> None:
    """Waits."""
    Event().wait(seconds)


def patiently(ask: Callable[[], Said], spread: float = 0.0, wait: Callable[[float], None] = pause) -> Said:
    """What `ask` returns; after each [`PassingFailure`] it is called again, at most once for each of `PAUSES`.

    A pause is as long as the server asks for, or that of `PAUSES` if that is longer, times 1 + `spread`. Requests that
    failed together should have different ones from 0 to 1: together again they would overload the server once more.
    """
    for seconds in PAUSES:
        try:
            return ask()
        except PassingFailure as failure:
            if failure.retry_after > LONGEST_PAUSE:
                raise
            wait(max(seconds, failure.retry_after) * (1 + spread))
    try:
        return ask()
    except PassingFailure as failure:
        raise ValueError(f"After {len(PAUSES) + 1} tries: {failure}") from failure


class OpenAIClient:
    """A server by its URL, with or without `/v1` at its end.

    Every failure is a ValueError of one sentence that names the address and, where there is one, the status; it is a
    [`PassingFailure`] if the same request may succeed later. A user name and a password in `url` are dropped; `api_key`
    is sent as a bearer token; `timeout` is the longest silence in seconds.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            self._address = parts.hostname or "", parts.port
        except ValueError:  # a port that is no number
            parts, self._address = urlsplit(""), ("", None)
        if parts.scheme not in ("http", "https") or not self._address[0]:
            raise ValueError(f"{url or repr(url)} is no server's URL: give one like http://localhost:8000.")
        if not 0 < timeout <= LONGEST_TIMEOUT:
            raise ValueError(f"timeout={timeout}: use a number of seconds above 0 and up to {LONGEST_TIMEOUT:g}.")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        # Made once: reading the certificates takes longer than many an answer.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    def models(self) -> list[str]:
        """Names of the models that the server serves."""
        answer = self.json("GET", "/v1/models")
        try:
            return [model["id"] for model in answer["data"]]
        except (KeyError, TypeError) as error:
            said = f"{self.url}/v1/models lists no models but {quote(answer)}"
            raise ValueError(f"{said}: is this a model server?") from error

    def only_model(self, name: str | None = None) -> str:
        """The model `name`, or the only one; ValueError with the names that are served if there is no such model."""
        names = self.models()
        served = f"{self.url} serves {', '.join(names) or 'no model'}"
        if not names:
            raise ValueError(f"{served}: start it with one.")
        if name is None and len(names) > 1:
            raise ValueError(f"{served}: name one with --model.")
        if name is not None and name not in names:
            raise ValueError(f"{served} and not {name}: name one of them with --model.")
        return name or names[0]

    def json(self, method: str, path: str, content: Any = None) -> Any:
        """What the server answers to a request, read as JSON."""
        with self.response(method, path, None if content is None else json.dumps(content).encode()) as response:
            body = response.read()
        try:
            return json.loads(body)
        except ValueError as error:
            raise ValueError(f"{self.url}{path} answered 200 with no JSON: {quote(body)}.") from error

    @contextmanager
    def response(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """The response to a request, of status 200; errors while the caller reads it are named as well."""
        where = f"{self.url}{path}"
        kind = HTTPConnection if self._tls is None else partial(HTTPSConnection, context=self._tls)
        connection: HTTPConnection = kind(*self._address, timeout=self._timeout)
        response = None
        try:
            connection.request(method, f"{self._path}{path}", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                said = quote(_message(response.read()))
                sentence = f"{where} answered {response.status} {response.reason}: {said}."
                if response.status == 429 or response.status >= 500:
                    raise PassingFailure(sentence, _retry_after(response))
                raise ValueError(sentence)
            yield response
        except TimeoutError as error:
            remedy = "raise the timeout, or ask for shorter answers or fewer at once"
            raise PassingFailure(f"{where} did not answer within {self._timeout:g} seconds: {remedy}.") from error
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            if response is not None:
                said = f"{where} answered {response.status} and broke off ({reason}): look at its log."
                raise PassingFailure(said) from error
            raise PassingFailure(f"{where} cannot be reached ({reason}): is the server running there?") from error
        finally:
            connection.close()


def quote(said: Any) -> str:
    """The first letters of a server's words, on one line."""
    if isinstance(said, bytes):
        said = said.decode("utf-8", "replace")
    text = " ".join((said if isinstance(said, str) else json.dumps(said)).split()).rstrip(".")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return (text[:LONGEST_QUOTE] + " …" if len(text) > LONGEST_QUOTE else text) or "nothing"


def _retry_after(response: HTTPResponse) -> float:
    """Seconds that the server asks to wait, as a number or a date; 0 if it does not say."""
    said = (response.getheader("Retry-After") or "").strip()
    if said.isdecimal():
        return float(said)
    try:  # by the server's own clock
        now = parsedate_to_datetime(response.getheader("Date") or "")
        return max(0.0, (parsedate_to_datetime(said) - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _message(body: bytes) -> Any:
    """The message in an error's body, in the forms of OpenAI, vLLM and FastAPI; else the whole body."""
    try:
        said = json.loads(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    return said
