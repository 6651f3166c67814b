"""An HTTP server that answers as a test wants it to."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Post:
    """One request as the server saw it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float  # monotonic


@dataclass(frozen=True)
class Say:
    """An answer; status 0: none, the connection is closed."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    after: float = 0.0  # seconds


class Endpoint:
    """Counts posts by body and lets `answer` decide, given the post and which try it is."""

    def __init__(self, answer: Callable[[Post, int], Say]) -> None:
        self.posts: list[Post] = []
        self.tries: dict[bytes, int] = defaultdict(int)
        self.connections = 0
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.answer = answer
        self.url = ""

    def bodies(self) -> list[bytes]:
        return [post.body for post in self.posts]


@contextmanager
def endpoint(
    answer: Callable[[Post, int], Say] = lambda _post, _tries: Say(),
) -> Iterator[Endpoint]:
    """A server on a free port of this machine."""
    told = Endpoint(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            with told.lock:
                told.connections += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            post = Post(self.path, headers, body, time.monotonic())
            with told.lock:
                told.posts.append(post)
                told.tries[body] += 1
                tries = told.tries[body]
                told.running += 1
                told.most_running = max(told.most_running, told.running)
            try:
                self.say(told.answer(post, tries))
            finally:
                with told.lock:
                    told.running -= 1

        def say(self, answer: Say) -> None:
            time.sleep(answer.after)
            if not answer.status:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.status != 204:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if answer.status != 204:
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            return  # the client went away on purpose

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
