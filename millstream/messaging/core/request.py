"""Requests: one answer, or many."""

from __future__ import annotations

import asyncio
from typing import Final

from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    MillstreamError,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
)
from millstream.messaging.core.message import (
    HeaderItems,
    Message,
    Payload,
    body_of,
    subject_bytes,
)
from millstream.wire.aio.connection import Connection
from millstream.wire.protocol import status_of, unique_token

__all__ = ["ANSWERS_MAX", "QUIET_SECONDS", "gather", "request"]

NO_RESPONDERS: Final = 503
# A request to thousands of subscribers must not fill the memory by default.
ANSWERS_MAX: Final = 10_000
QUIET_SECONDS: Final = 0.2


async def request(
    connection: Connection,
    subject: str,
    data: Payload = b"",
    headers: HeaderItems | None = None,
    timeout: float | None = None,
) -> Message:
    """The first answer; later ones are discarded. The request is sent once and never repeated.

    Raises NoResponders immediately when there is no subscriber, RequestTimeout when none answers
    in time (the request may have been handled), ServiceError when the answer is an error, and
    PermissionDenied when this user may not publish there.
    """
    to = subject_bytes(subject)
    asked, asked_block = body_of(data, headers)
    block, payload = await connection.request(subject, asked, asked_block, timeout)
    answer = Message(connection, to, b"", block, payload)
    error = answer.service_error
    if error is not None:
        raise error
    return answer


async def gather(
    connection: Connection,
    subject: str,
    data: Payload = b"",
    headers: HeaderItems | None = None,
    *,
    limit: int = ANSWERS_MAX,
    quiet: float = QUIET_SECONDS,
    timeout: float | None = None,
) -> list[Message]:
    """The answers of all subscribers, in the order of arrival.

    Ends after `limit` answers, `quiet` seconds after the last answer, or after `timeout`,
    whichever is first. The quiet time starts with the first answer. Raises NoResponders
    immediately when there is no subscriber and RequestTimeout when none answered in time.
    Answers that are errors are included: see `Message.service_error`.
    """
    if limit < 1:
        raise ConfigError(f"gather: limit must be 1 or more, not {limit}")
    if not quiet > 0:
        raise ConfigError(f"gather: quiet must be more than 0 seconds, not {quiet}")
    to, (payload, block) = subject_bytes(subject), body_of(data, headers)
    deadline = Deadline(connection.settings.request_timeout if timeout is None else timeout)
    await connection.wait_connected(deadline)
    gathering = _Gathering(connection, subject, limit)
    try:
        connection.publish(to, payload, gathering.inbox.encode(), block)
        await gathering.wait(deadline, quiet)
    finally:
        gathering.close()
    if not gathering.answers:
        raise RequestTimeout(subject, deadline.seconds)
    return gathering.answers


class _Gathering:
    """The answers to one request, while they arrive."""

    def __init__(self, connection: Connection, subject: str, limit: int) -> None:
        self.inbox = f"{connection.inbox}.many.{unique_token(8)}"
        self.answers: list[Message] = []
        self._connection = connection
        self._subject = subject
        self._limit = limit
        self._error: MillstreamError | None = None
        self._news = asyncio.Event()
        self._interest = connection.subscribe(self.inbox, self._take)
        connection.on_denied.append(self._denied)
        connection.on_closed.append(self._closed)

    def _take(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if not data and status_of(headers)[0] == NO_RESPONDERS:
            self._error = NoResponders(self._subject)
        elif len(self.answers) < self._limit:
            self.answers.append(Message(self._connection, subject, reply, headers, data))
        self._news.set()

    def _denied(self, denied: PermissionDenied) -> None:
        if denied.subject in (self._subject, self.inbox):
            self._error = denied
            self._news.set()

    def _closed(self) -> None:
        self._error = ConnectionClosed("the connection was closed while answers were gathered")
        self._news.set()

    async def wait(self, deadline: Deadline, quiet: float) -> None:
        while len(self.answers) < self._limit:
            seconds = deadline.left(at_most=quiet if self.answers else None)
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                # After a stall of the program, an answer and the timeout may come together.
                if not self._news.is_set():
                    return
            self._news.clear()
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        self._connection.on_denied.remove(self._denied)
        self._connection.on_closed.remove(self._closed)
        self._connection.unsubscribe(self._interest)
