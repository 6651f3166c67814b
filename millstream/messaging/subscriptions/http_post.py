"""Posting to one HTTP endpoint from an event loop: threads and reused connections, nothing else.

The standard library does all that a push needs; an HTTP library would be the package's only
dependency that most users never touch.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Final, NamedTuple
from urllib.parse import urlsplit

__all__ = ["Answer", "HttpEndpoint"]

# Only the start of a response is read; a connection with more to read is not reused.
ANSWER_BYTES_MAX: Final = 16 * 1024
TEXT_CHARS_MAX: Final = 200


class Answer(NamedTuple):
    """The endpoint's response; status 0: none, although it may have handled the post."""

    status: int
    reason: str
    text: str = ""  # the start of the body, on one line
    retry_after: str | None = None


class HttpEndpoint:
    """One URL to post to; connections are reused, each by one post at a time."""

    def __init__(
        self, url: str, timeout: float, context: ssl.SSLContext | None, pool: Executor
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._timeout = timeout
        self._context = context
        self._pool = pool
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []  # at most one for each thread of the pool
        self._closed = False

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post and return the response: status 0 after the timeout or a broken connection."""
        loop = asyncio.get_running_loop()
        post = _Post(self, body, dict(headers))
        try:
            async with asyncio.timeout(self._timeout):
                return await loop.run_in_executor(self._pool, post.run)
        except TimeoutError:
            return Answer(0, f"not within {self._timeout:g} s")
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, f"{type(error).__name__}: {error}")
        finally:
            post.abandon()

    def close(self) -> None:
        """Close the connections that are not in use; the others close when their post ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # -- for posts, in their threads ------------------------------------------------------

    @property
    def target(self) -> str:
        return self._target

    def take(self) -> http.client.HTTPConnection | None:
        """An idle connection, if there is one."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def connect(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout, context=self._context
        )

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class _Post:
    """One post; it runs in a thread and may be abandoned from the event loop."""

    def __init__(self, endpoint: HttpEndpoint, body: bytes, headers: dict[str, str]) -> None:
        self._endpoint = endpoint
        self._body, self._headers = body, headers
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """Abort it if it still runs, so that its thread is free for the next post."""
        with self._lock:
            self._abandoned = True
            used = self._connection
            if used is not None and used.sock is not None:
                with contextlib.suppress(OSError):
                    used.sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> Answer:
        kept = self._endpoint.take()
        if kept is not None:
            try:
                return self._exchange(kept)
            except (http.client.HTTPException, OSError):
                # The endpoint closed an idle connection: the post itself may still work.
                if self._abandoned:
                    raise
        return self._exchange(self._endpoint.connect())

    def _exchange(self, connection: http.client.HTTPConnection) -> Answer:
        with self._lock:
            if self._abandoned:
                connection.close()
                raise TimeoutError("abandoned")
            self._connection = connection
        reusable = False
        try:
            connection.request("POST", self._endpoint.target, self._body, self._headers)
            response = connection.getresponse()
            data = response.read(ANSWER_BYTES_MAX)
            reusable = response.isclosed() and not response.will_close
            text = " ".join(data[: 4 * TEXT_CHARS_MAX].decode("utf-8", "replace").split())
            return Answer(
                response.status,
                response.reason,
                text[:TEXT_CHARS_MAX],
                response.getheader("Retry-After"),
            )
        finally:
            with self._lock:
                self._connection = None
                reusable = reusable and not self._abandoned
            if reusable:
                self._endpoint.give_back(connection)
            else:
                connection.close()
