"""What a gateway does when clients ask for more than it can hold, and its books.

The policy: a connection with too much in progress is not read until some of it is done. When all
connections together have too much in progress, requests wait in line for room (`Budget`), the
first one first. New connections beyond the limit are refused. A client that sends a request too
slowly, or does not read its answers, is closed. Nothing that was accepted is dropped.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any, Final, Protocol

from millstream.deadline import now_ns

__all__ = ["Books", "Budget", "Closed", "Refused", "Waiter"]

NAMES_MAX: Final = 64  # of steps; more are counted together
OTHER_NAME: Final = "other"


class Refused(StrEnum):
    """Why a connection was not accepted."""

    CONNECTIONS = "too many connections"
    FILES = "too many open files"
    TLS = "TLS handshake failed"


class Closed(StrEnum):
    """Why a connection was closed."""

    CLIENT = "by the client"
    LOST = "connection lost"
    BAD_LENGTH = "bad length of a request"
    TOO_LARGE = "request too large"
    SLOW_REQUEST = "request took too long to arrive"
    NOT_READING = "answers not read"
    IDLE = "idle"
    PROTOCOL = "not understood"
    FAILED = "failed"
    STOPPED = "gateway stopped"


class Books:
    """Counters of a gateway since it was started."""

    def __init__(self) -> None:
        self.started = now_ns() / 1e9
        self.open = 0  # connections
        self.accepted = 0
        self.requests = 0
        self.in_flight = 0  # requests without an answer
        self.waited = 0  # times that a request had to wait for room
        self.bytes_in = 0
        self.bytes_out = 0
        self.refused = dict.fromkeys(Refused, 0)
        self.closed = dict.fromkeys(Closed, 0)
        self._steps: dict[str, list[float]] = {}  # CPU seconds, times

    def add(self, step: str, seconds: float) -> None:
        """Count CPU time of a step, such as the decoding of requests."""
        entry = self._steps.get(step)
        if entry is None:
            if len(self._steps) >= NAMES_MAX:
                step = OTHER_NAME
            entry = self._steps.setdefault(step, [0.0, 0])
        entry[0] += seconds
        entry[1] += 1

    def step(self, name: str) -> _Step:
        """Count the CPU time of a block; it must not contain an `await`."""
        return _Step(self, name)

    def to_json(self) -> dict[str, Any]:
        """As plain data for JSON; reasons that did not occur are left out."""
        return {
            "connections": {
                "open": self.open,
                "accepted": self.accepted,
                "refused": {str(why): number for why, number in self.refused.items() if number},
                "closed": {str(why): number for why, number in self.closed.items() if number},
            },
            "requests": self.requests,
            "in_flight": self.in_flight,
            "waited": self.waited,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "cpu_seconds": round(time.process_time(), 3),
            "steps": {
                name: {"cpu_seconds": round(seconds, 6), "times": int(times)}
                for name, (seconds, times) in sorted(self._steps.items())
            },
        }


class _Step:
    """A block whose CPU time is counted; by hand, because there are several in each request."""

    __slots__ = ("_begun", "_books", "_name")

    def __init__(self, books: Books, name: str) -> None:
        self._books, self._name = books, name

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._books.add(self._name, time.thread_time() - self._begun)


class Waiter(Protocol):
    """Something that waits for room."""

    def granted(self, size: int) -> None:
        """It has its room now; called from within `Budget`, so it must only take note."""


class Budget:
    """Bytes that all connections together may hold; those that find no room wait in line."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._line: dict[Waiter, int] = {}  # in the order of arrival

    @property
    def room(self) -> int:
        """Bytes that can be taken at once; 0 while others wait."""
        return 0 if self._line else max(0, self.limit - self.used)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    def take(self, size: int, waiter: Waiter) -> bool:
        """Take room if there is some; else the waiter stands in line and is called."""
        if self._line or not self._fits(size):
            self._line[waiter] = size
            return False
        self.used += size
        return True

    def force(self, size: int) -> None:
        """Count bytes that are held anyway."""
        self.used += size

    def give(self, size: int) -> None:
        """Give room back, to those who wait."""
        self.used -= size
        self._serve()

    def leave(self, waiter: Waiter) -> None:
        """Do not wait any more."""
        if self._line.pop(waiter, None) is not None:
            self._serve()

    def _fits(self, size: int) -> bool:
        return not self.used or self.used + size <= self.limit  # one always fits

    def _serve(self) -> None:
        while self._line:
            waiter, size = next(iter(self._line.items()))
            if not self._fits(size):
                return
            del self._line[waiter]
            self.used += size
            waiter.granted(size)
