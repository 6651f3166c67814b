"""Reading a range without a consumer: for users that may read but not create consumers.

Slower than a consumer (the server answers batch by batch), but it needs no right except to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    ConnectError,
    MillstreamError,
    PermissionDenied,
    RequestTimeout,
)
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.message import RawMessage
from millstream.wire.protocol import (
    parse_header_items,
    parse_headers,
    status_of,
    unique_token,
)
from millstream.wire.range_cursor import Range

__all__ = ["DirectReader", "direct_batch", "direct_message", "server_headers"]

BATCH_MESSAGES: Final = 1000
BATCH_BYTES: Final = 8 * 1024 * 1024
ANSWER_SECONDS: Final = 5.0
# How often a reader that follows asks for new messages.
POLL_SECONDS: Final = 0.2
ATTEMPTS_MAX: Final = 10  # of one batch, before its error is raised
NANOSECONDS: Final = 1_000_000_000
_SEQUENCE_MARK: Final = b"\r\nNats-Sequence: "


class DirectReader:
    """Delivers the messages of a range in order, each once; reads like an OrderedConsumer.

    The server takes one subject to choose by; with several, everything is delivered.
    """

    def __init__(self, jetstream: JetStream, stream: str, what: Range, signal: Signal) -> None:
        if what.deliver not in (None, "new", "last_per_subject"):
            raise ConfigError(
                f"without the right to create subscriptions, '{what.deliver}' cannot be read"
            )
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._stream = stream
        self.what = what
        self.signal = signal
        self._next = what.start
        self._number = 0
        self._ready: list[RawMessage] = []
        self._task: asyncio.Task[None] | None = None
        self._error: MillstreamError | None = None
        self._batch: list[tuple[bytes, bytes]] = []
        self._room = asyncio.Event()
        self._room.set()
        # Of the messages up to this sequence only the last of each subject is delivered.
        self._latest_until = 0
        self._latest: dict[bytes, tuple[int, RawMessage]] = {}
        self._finished = what.end is not None and what.end <= what.start
        self.closed = False

    @property
    def done(self) -> bool:
        return self._finished and not self._ready and self._error is None

    async def open(self) -> None:
        """Start reading; raises when the stream cannot be read like this."""
        state = (await self._jetstream.stream_info(self._stream)).state
        if self.what.deliver == "new":
            self._next = state.last_seq + 1
        elif self.what.deliver == "last_per_subject":
            self._latest_until = state.last_seq
        elif self.what.start_time is not None:
            self._next = await self._jetstream.sequence_at(self._stream, self.what.start_time)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def take_now(self, at_most: int) -> list[RawMessage]:
        """Up to `at_most` messages that have arrived; empty: wait for the signal, or done."""
        taken, self._ready = self._ready[:at_most], self._ready[at_most:]
        if len(self._ready) <= BATCH_MESSAGES:
            self._room.set()
        if not taken and self._error is not None:
            raise self._error
        return taken

    def close(self) -> None:
        """Stop; safe to call twice."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        attempts = 0
        try:
            while not self._finished:
                try:
                    await self._one_batch()
                    attempts = 0
                except (ConnectError, RequestTimeout):
                    attempts += 1
                    if attempts == ATTEMPTS_MAX:
                        raise
                    await asyncio.sleep(POLL_SECONDS)
                await self._room.wait()
        except MillstreamError as error:
            self._error = error
        self.signal.set()

    async def _one_batch(self) -> None:
        """Ask for what comes next, wait for all of it, and continue after it."""
        self._batch, _ = await direct_batch(self._jetstream, self._stream, self._question())
        await self._deliver()

    def _question(self) -> dict[str, Any]:
        ask: dict[str, Any] = {
            "seq": self._next,
            "batch": BATCH_MESSAGES,
            "max_bytes": max(BATCH_BYTES, self._connection.info.max_payload * 2),
        }
        if len(self.what.subjects) == 1:
            ask["next_by_subj"] = self.what.subjects[0]
        return ask

    async def _deliver(self) -> None:
        before, end = self._next, self._end
        for headers, payload in self._batch:
            known = server_headers(headers)
            if known.get("Nats-Stream") != self._stream:
                return  # a mirror answered in its origin's name: ask again
            sequence = int(known["Nats-Sequence"])
            if end is not None and sequence >= end:
                self._finished = True
                break
            self._next = sequence + 1
            self._number += 1
            message = direct_message(self._stream, known, headers, payload, self._number)
            if sequence <= self._latest_until:
                self._latest.pop(message.subject, None)  # the new one takes its turn in order
                self._latest[message.subject] = sequence, message
            else:
                self._give_latest()
                self._ready.append(message)
        if self._finished or self._next > self._latest_until:
            self._give_latest()
        if self._ready:
            self.signal.set()
        if len(self._ready) > BATCH_MESSAGES:
            self._room.clear()  # the reader is slower than the server
        if end is not None and (self._next >= end or (not self._batch and await self._is_end(end))):
            self._finished = True
            self._give_latest()
        elif self._next == before:
            if self._latest and await self._is_end(self._latest_until + 1):
                self._give_latest()
            await asyncio.sleep(POLL_SECONDS)

    @property
    def _end(self) -> int | None:
        """Where reading ends: the last message of a subject may be after the end of the range."""
        end = self.what.end
        return end if end is None or not self._latest_until else max(end, self._latest_until + 1)

    def _give_latest(self) -> None:
        """Deliver the last message of each subject, when they are known."""
        end = self.what.end
        found = [m for sequence, m in self._latest.values() if end is None or sequence < end]
        self._latest.clear()
        if found:
            self._ready.extend(found)
            self.signal.set()

    async def _is_end(self, end: int) -> bool:
        """Whether the leader has nothing more either; any copy answers, also one that lags."""
        subject = self.what.subjects[0] if len(self.what.subjects) == 1 else ">"
        ask = {"seq": self._next, "next_by_subj": subject}
        try:
            found = await self._jetstream.get_message(self._stream, ask)
        except PermissionDenied:
            return True  # a user that may not ask the leader has to believe the copy
        return found is None or found.sequence >= end


async def direct_batch(
    jetstream: JetStream, stream: str, ask: Mapping[str, Any]
) -> tuple[list[tuple[bytes, bytes]], dict[str, str]]:
    """Headers and payloads of the messages that a question names, and the headers of the end."""
    connection = jetstream.connection
    found: list[tuple[bytes, bytes]] = []
    end: dict[str, str] = {}
    arrived = asyncio.Event()

    def handler(_subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        code, _ = status_of(headers)
        # A stored message may start like a status; only messages have a sequence.
        if code and _SEQUENCE_MARK not in headers:
            end.update(parse_headers(headers), Status=str(code))
            arrived.set()
        else:
            found.append((headers, payload))

    inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
    await connection.wait_connected(Deadline(ANSWER_SECONDS))
    interest = connection.subscribe(inbox, handler)
    subject = f"{jetstream.prefix}.DIRECT.GET.{stream}"
    try:
        connection.publish(subject.encode(), msgspec.json.encode(ask), inbox.encode())
        while not arrived.is_set():  # however long it takes while messages come
            before = len(found)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await arrived.wait()
            except TimeoutError as error:
                if len(found) == before:
                    raise RequestTimeout(subject, ANSWER_SECONDS) from error
    finally:
        connection.unsubscribe(interest)
    return found, end


def server_headers(headers: bytes) -> dict[str, str]:
    """The headers by name: the last of each, because the server's come after the message's own."""
    return dict(parse_header_items(headers))


def direct_message(
    stream: str, known: Mapping[str, str], headers: bytes, payload: bytes, number: int
) -> RawMessage:
    """A message that was looked up, in the form of a delivered one."""
    stored = datetime.fromisoformat(known["Nats-Time-Stamp"])
    stored_ns = int(stored.timestamp()) * NANOSECONDS + stored.microsecond * 1000
    pending = known.get("Nats-Num-Pending", "0")
    sequence = known["Nats-Sequence"]
    reply = f"$JS.ACK.{stream}.direct.1.{sequence}.{number}.{stored_ns}.{pending}"
    subject = known["Nats-Subject"].encode("utf-8", "surrogateescape")
    return RawMessage(subject, reply.encode(), headers, payload)
