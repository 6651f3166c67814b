"""Reading a range without a consumer: where one may not be created, or would take what it reads.

The first are users that may only read, the second work queues. It is slower than a consumer (the
server answers batch by batch), but it needs no right except to ask, and removes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    ConnectError,
    MillstreamError,
    PermissionDenied,
    RequestTimeout,
)
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.api import ErrorCode
from millstream.wire.direct import (
    BATCH_MESSAGES,
    DirectMessage,
    next_of_leader,
    next_of_stream,
    status_of_answer,
)
from millstream.wire.message import RawMessage
from millstream.wire.protocol import parse_headers, unique_token
from millstream.wire.range_cursor import Range, check_loss

__all__ = ["NO_RESPONDERS", "DirectReader", "direct_batch", "open_range"]

ANSWER_SECONDS: Final = 5.0
# How often a reader that follows asks for new messages.
POLL_SECONDS: Final = 0.2
ATTEMPTS_MAX: Final = 10  # of one batch, before its error is raised
NO_RESPONDERS: Final = "503"  # as a status: nobody serves the stream


class DirectReader:
    """Delivers the messages of a range in order, each once; reads like an OrderedConsumer.

    The server takes one subject to choose by; with several, everything is delivered.
    """

    def __init__(self, jetstream: JetStream, stream: str, what: Range, signal: Signal) -> None:
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
        self._batch: list[DirectMessage] = []
        self._room = asyncio.Event()
        self._room.set()
        # Of the messages up to this sequence only the last of each subject is delivered.
        self._latest_until = 0
        self._latest: dict[bytes, tuple[int, RawMessage]] = {}
        self._finished = what.end is not None and what.end <= what.start
        self.closed = False
        self._look_again = False

    @property
    def done(self) -> bool:
        return self._finished and not self._ready and self._error is None

    async def open(self) -> None:
        """Start reading; raises when the stream cannot be read like this."""
        info = await self._jetstream.stream_info(self._stream)
        state = info.state
        if self.what.deliver == "new":
            self._next = state.last_seq + 1
        elif self.what.deliver == "last":
            self._next = max(1, state.last_seq)
        elif self.what.deliver == "last_per_subject":
            self._latest_until = state.last_seq
        elif self.what.start_time is not None:
            self._next = await self._jetstream.sequence_at(self._stream, self.what.start_time)
        self._check_loss(info.config)
        self._connection.on_connected.append(self._reconnected)
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
        if self._reconnected in self._connection.on_connected:
            self._connection.on_connected.remove(self._reconnected)

    def _reconnected(self) -> None:
        self._look_again = True  # the broker may have restarted and found a loss

    def _check_loss(self, config: Mapping[str, Any]) -> None:
        """DataLoss if the broker has lost some of what comes next."""
        check_loss(self.what, config, self._next)

    async def _run(self) -> None:
        attempts = 0
        try:
            while not self._finished:
                try:
                    if self._look_again:
                        info = await self._jetstream.stream_info(self._stream)
                        self._look_again = False
                        self._check_loss(info.config)
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
        ask = next_of_stream(self._next, self.what.subjects, self._connection.info.max_payload)
        self._batch, end = await direct_batch(self._jetstream, self._stream, ask)
        if end["Status"] == NO_RESPONDERS:
            await self._one_message()
        await self._deliver()

    async def _one_message(self) -> None:
        """The next message from the leader: a stream may not allow direct requests."""
        ask = next_of_leader(self._next, self.what.subjects)
        found = await self._jetstream.get_message(self._stream, ask)
        if found is not None:
            self._batch.append(DirectMessage.of_leader(self._stream, found))

    async def _deliver(self) -> None:
        before, end = self._next, self._end
        for found in self._batch:
            if found.stream != self._stream:
                return  # a mirror answered in its origin's name: ask again
            sequence = found.sequence
            if end is not None and sequence >= end:
                self._finished = True
                break
            self._next = sequence + 1
            self._number += 1
            message = found.as_delivered(self._number)
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
        ask = next_of_leader(self._next, self.what.subjects)
        try:
            found = await self._jetstream.get_message(self._stream, ask)
        except PermissionDenied:
            return True  # a user that may not ask the leader has to believe the copy
        return found is None or found.sequence >= end


async def direct_batch(
    jetstream: JetStream, stream: str, ask: Mapping[str, Any]
) -> tuple[list[DirectMessage], dict[str, str]]:
    """The messages that a question names, and the headers of the end."""
    connection = jetstream.connection
    found: list[DirectMessage] = []
    end: dict[str, str] = {}
    arrived = asyncio.Event()

    def handler(_subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        if code := status_of_answer(headers):
            end.update(parse_headers(headers), Status=str(code))
            arrived.set()
        else:
            found.append(DirectMessage.of_answer(headers, payload))

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


async def open_range(
    jetstream: JetStream, stream: str, what: Range, signal: Signal
) -> OrderedConsumer | DirectReader:
    """Start reading by a consumer, or without one where that cannot be."""
    consumer = OrderedConsumer(jetstream, stream, what, signal)
    try:
        await consumer.open()
        return consumer
    except PermissionDenied:
        consumer.close()
    except ApiError as error:
        consumer.close()
        if error.err_code != ErrorCode.WORK_QUEUE_NEEDS_ACKS:
            raise
    direct = DirectReader(jetstream, stream, what, signal)
    await direct.open()
    return direct
