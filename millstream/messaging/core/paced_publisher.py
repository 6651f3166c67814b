"""A sender that waits for its blocking subscribers: flow control end to end over core subjects.

After each half window the sender sends a request to `$MILL.FLOW.<subject>`. The request follows
the messages on the same connections, so a blocking subscriber reads it only when all of them fitted
into its buffer, and its answer means "continue". Without blocking subscribers the server answers
immediately and the sender does not wait; other subscribers never see the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from millstream.closing import AsyncClosing
from millstream.deadline import Deadline
from millstream.errors import ConfigError
from millstream.messaging.core.message import (
    HeaderItems,
    Payload,
    body_of,
    subject_bytes,
)
from millstream.messaging.core.request import NO_RESPONDERS
from millstream.messaging.core.subscriber import FLOW_PREFIX
from millstream.wire.aio.connection import Connection
from millstream.wire.protocol import status_of, unique_token

__all__ = ["PacedPublisher"]

WINDOW_MESSAGES: Final = 2048
WINDOW_BYTES: Final = 4 * 1024 * 1024
# Longer than any subscriber may block (9 s), so that a running one always answers before.
HOLD_SECONDS: Final = 10.0


class PacedPublisher(AsyncClosing):
    """Publishes to one subject no faster than its blocking subscribers read; at most once.

    The sender is at most a window of messages ahead of the slowest blocking subscriber, so one that
    can buffer the windows of its senders drops nothing. A subscriber that is full for its
    `block_seconds` drops, counts, and lets the sender continue. One that died delays the sender
    for 10 s, once.
    The sender waits for a subscriber that joins from the second half window on.
    """

    def __init__(
        self,
        connection: Connection,
        subject: str,
        *,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        if window_messages < 2 or window_bytes < 2:
            raise ConfigError(
                f"a window is two halves: window_messages {window_messages} and "
                f"window_bytes {window_bytes} must be 2 or more"
            )
        self.subject = subject
        self.published = 0
        self.held_seconds = 0.0
        self.unanswered = 0  # requests that not every known subscriber answered in time
        self._connection = connection
        self._to = subject_bytes(subject)
        self._ask_at = f"{FLOW_PREFIX}.{subject}".encode()
        self._inbox = f"{connection.inbox}.pace.{unique_token(8)}"
        self._half_messages = window_messages // 2
        self._half_bytes = window_bytes // 2
        self._messages = self._bytes = 0  # sent since the last request
        self._members: set[bytes] = set()
        self._requests: deque[_FlowRequest] = deque()  # two at most: one for each half
        self._number = 0
        self._interest = connection.subscribe(f"{self._inbox}.*", self._answered)
        connection.on_disconnected.append(self._let_go)
        connection.on_closed.append(self._let_go)

    async def publish(self, data: Payload = b"", headers: HeaderItems | None = None) -> None:
        """Send a message; waits while a blocking subscriber is more than a window behind."""
        payload, block = body_of(data, headers)
        self._connection.publish(self._to, payload, headers=block)
        self.published += 1
        self._messages += 1
        self._bytes += len(payload) + len(block)
        if self._messages >= self._half_messages or self._bytes >= self._half_bytes:
            self._ask()
            if len(self._requests) > 1:
                await self._wait_for(self._requests[0])
            await self._connection.writable()

    async def settle(self) -> None:
        """Return when every blocking subscriber has received all messages sent so far."""
        self._ask()
        while self._requests:
            await self._wait_for(self._requests[0])

    async def close(self) -> None:
        """Settle, then stop."""
        try:
            if not self._connection.closed:
                await self.settle()
        finally:
            self._connection.unsubscribe(self._interest)
            for listeners in (self._connection.on_disconnected, self._connection.on_closed):
                if self._let_go in listeners:
                    listeners.remove(self._let_go)

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()

    def _ask(self) -> None:
        self._messages = self._bytes = 0
        self._number += 1
        request = _FlowRequest(b"%d" % self._number, set(self._members))
        self._requests.append(request)
        self._connection.publish(self._ask_at, b"", f"{self._inbox}.{self._number}".encode())

    def _answered(self, subject: bytes, _reply: bytes, headers: bytes, member: bytes) -> None:
        number = subject.rpartition(b".")[2]
        none = not member and status_of(headers)[0] == NO_RESPONDERS
        if none:
            self._members.clear()
        else:
            self._members.add(member)
        for request in self._requests:
            if request.number == number:
                request.missing.discard(member)
                if none or not request.missing:
                    request.done.set()

    async def _wait_for(self, request: _FlowRequest) -> None:
        hold = Deadline(HOLD_SECONDS)
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                await request.done.wait()
        except TimeoutError:
            self.unanswered += 1
            self._forget(request.missing)
        finally:
            if request in self._requests:  # two tasks may wait for the same one
                self._requests.remove(request)
            self.held_seconds += HOLD_SECONDS - hold.left()

    def _forget(self, silent: set[bytes]) -> None:
        """Do not wait a second time for a subscriber that did not answer."""
        self._members -= silent
        for request in self._requests:
            if request.missing and request.missing <= silent:
                request.done.set()
            request.missing = request.missing - silent

    def _let_go(self) -> None:
        """Requests in flight are lost with the connection."""
        self._members.clear()
        for request in self._requests:
            request.done.set()


class _FlowRequest:
    """One "may I continue?" and the subscribers that have not answered it yet."""

    __slots__ = ("done", "missing", "number")

    def __init__(self, number: bytes, missing: set[bytes]) -> None:
        self.number = number
        self.missing = missing
        self.done = asyncio.Event()
