"""Reading a range of a work queue with the blocking client: by direct requests, taking nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import msgspec

from millstream.deadline import Deadline
from millstream.errors import ConnectFailed, MillstreamError, RequestTimeout
from millstream.wire.direct import (
    DirectMessage,
    matches,
    next_of_leader,
    next_of_stream,
    status_of_answer,
)
from millstream.wire.protocol import pub
from millstream.wire.range_cursor import RangeCursor
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.streams import get_message
from millstream.wire.sync.window import Collector, Messages

__all__ = ["read_directly"]

ANSWER_SECONDS: Final = 5.0

M = TypeVar("M", bound=Messages)


class _DirectWindows(Generic[M]):
    """The windows of a range, one direct request each."""

    def __init__(
        self,
        connection: BlockingConnection,
        stream: str,
        cursor: RangeCursor,
        collector: Collector[M],
    ) -> None:
        self._connection = connection
        self._jetstream = BlockingJetStream(connection)
        self._stream = stream
        self._cursor = cursor
        self._collector = collector
        self._next = cursor.next_sequence
        self._number = 0
        self._subjects = cursor.what.subjects
        self._end = cursor.what.end or 0

    def next(self) -> M | None:
        """The next window; None: the range is complete."""
        while self._next < self._end:
            # A mirror may answer in its origin's name.
            batch = [message for message in self._batch() if message.stream == self._stream]
            if not batch and not (batch := self._of_leader()):
                return None
            before = self._next
            self._collector.begin(b"", len(batch))
            for message in batch:
                self._take(message)
            messages, _ = self._collector.end()
            if len(messages):
                return messages
            if self._next == before:
                return None  # what is left is after the end
        return None

    def _take(self, message: DirectMessage) -> None:
        if message.sequence >= self._end:
            return
        self._next = message.sequence + 1
        several = len(self._subjects) > 1  # the server gives everything then
        if not several or any(matches(pattern, message.subject) for pattern in self._subjects):
            self._number += 1
            self._collector.add(message.as_delivered(self._number))

    def _batch(self) -> list[DirectMessage]:
        """What one direct request gives; empty: nothing, or the stream allows no such requests."""
        connection = self._connection
        found: list[DirectMessage] = []
        status: list[int] = []

        def answered(_subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
            if code := status_of_answer(headers):
                status.append(code)
            else:
                found.append(DirectMessage.of_answer(headers, payload))

        if not connection.is_open:
            connection.open(Deadline(connection.settings.request_timeout))
        verb = f"{self._jetstream.prefix}.DIRECT.GET.{self._stream}"
        ask = next_of_stream(self._next, self._subjects, connection.info.max_payload)
        inbox = connection.new_inbox()
        sid = connection.subscribe(inbox, answered)
        try:
            connection.send(pub(verb.encode(), inbox.encode(), msgspec.json.encode(ask)))
            while not status:
                if not connection.receive(Deadline(ANSWER_SECONDS)):
                    raise RequestTimeout(verb, ANSWER_SECONDS)
        finally:
            if connection.is_open:
                connection.unsubscribe(sid)
        return found

    def _of_leader(self) -> list[DirectMessage]:
        """The next message as the leader has it: a copy may lag, or allow no direct requests."""
        ask = next_of_leader(self._next, self._subjects)
        found = get_message(self._jetstream, self._stream, ask)
        if found is None or found.sequence >= self._end:
            return []
        return [DirectMessage.of_leader(self._stream, found)]


def read_directly(
    connection: BlockingConnection,
    stream: str,
    cursor: RangeCursor,
    collector: Collector[M],
) -> Iterator[M]:
    """The messages of the cursor's range in windows; what is removed meanwhile is left out."""
    windows = _DirectWindows(connection, stream, cursor, collector)
    while True:
        try:
            messages = windows.next()
        except MillstreamError as error:
            pause = cursor.failed(error)
            if pause is None:
                raise ConnectFailed(
                    f"no progress while reading '{stream}' from {connection.url}: {error}"
                ) from error
            connection.lose()
            time.sleep(pause)
            continue
        if messages is None:
            return
        cursor.progress()
        yield messages
