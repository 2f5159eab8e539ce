"""Servers on a free port of loopback, each for as long as a `with` lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar


class LoopbackServer(ThreadingHTTPServer):
    """Answers each request in a thread of its own."""

    daemon_threads = True
    request_queue_size = 1024  # connections at once that no thread has taken yet

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing; `say` answers with a whole body."""

    def log_message(self, *args: object) -> None:
        """Standard error is for what failed."""

    def say(self, body: str, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


Started = TypeVar("Started", bound=LoopbackServer)


@contextmanager
def started(server: Started) -> Iterator[Started]:
    """The server at work, stopped and its port free at the end."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
