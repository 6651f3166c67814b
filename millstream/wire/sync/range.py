"""Reading a range of a stream with the blocking client: for Spark workers.

One window is requested at a time, never more than is left of the range, and received completely
before it is handed on: memory stays at one window whatever the range, and the server never waits
for a reader that is busy elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    ConnectError,
    ConnectFailed,
    MillstreamError,
    NoResponders,
    RequestTimeout,
)
from millstream.wire.api import ConsumerInfo, ErrorCode, consumer_request
from millstream.wire.message import HEADER_BYTES_MAX, RawMessage
from millstream.wire.protocol import pub, status_of
from millstream.wire.range_cursor import GIVEN_AWAY_SECONDS, Range, RangeCursor, Step
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.direct import read_directly
from millstream.wire.sync.window import Collector, Messages, Window

__all__ = ["read_range", "read_windows"]

SILENCE_SECONDS: Final = 5.0  # without a byte in an open window: ask on a new connection
_new: Final = tuple.__new__

M = TypeVar("M", bound=Messages)


class _Place(msgspec.Struct):
    seq: int


class _Got(msgspec.Struct):
    """What is needed of the answer about one message."""

    message: _Place


class _List(list[RawMessage]):
    def reply_of(self, number: int) -> bytes:
        return self[number].reply

    def first(self, count: int) -> _List:
        return _List(self[:count])


class _Lister:
    """Collects messages one by one, as the connection's parser cuts them."""

    def __init__(self) -> None:
        self._messages = _List()

    @property
    def count(self) -> int:
        return len(self._messages)

    def begin(self, sid: bytes, wanted: int) -> None:
        self._messages = _List()

    def feed(self, data: bytes, others: Callable[[bytes], None]) -> None:
        others(data)

    def add(self, message: RawMessage) -> None:
        self._messages.append(message)

    def end(self) -> tuple[_List, bytes]:
        return self._messages, b""


class _Reader(Generic[M]):
    """The consumer of a range, and the windows that are read from it."""

    def __init__(
        self,
        connection: BlockingConnection,
        stream: str,
        cursor: RangeCursor,
        window: Window,
        collector: Collector[M],
    ) -> None:
        self.connection = connection
        self.jetstream = BlockingJetStream(connection)
        self.stream = stream
        self.cursor = cursor
        self.window = window
        self.collector = collector
        self.consumer = ""
        self.generation = -1
        self.inbox = ""
        self.address = b""  # of the window that is open
        self.windows = 0
        self.sid = b""
        self.ended = False
        self.status = (0, "")

    def next(self) -> M | None:
        """Do the next step of reading; the messages that came of it, if any."""
        try:
            messages, pause, why = self._do_step()
        except MillstreamError as error:
            self.forget()
            if isinstance(error, ConnectError | RequestTimeout):
                self.connection.lose()  # a silent socket is as good as none
            messages, pause, why = None, self.cursor.failed(error), error
        if pause is None:
            raise ConnectFailed(
                f"no progress for {self.window.give_up_after:g} s while reading from "
                f"{self.connection.url}: {why}"
            ) from (why if isinstance(why, Exception) else None)
        if pause:
            time.sleep(pause)
        return messages

    def _do_step(self) -> tuple[M | None, float | None, Exception | str]:
        """Messages, seconds to wait before the next step (None: give up), and why."""
        cursor = self.cursor
        if cursor.step() is Step.OPEN or not self.usable:
            self.forget()
            cursor.consumer_lost()
            self.open()
            return None, 0.0, ""
        if cursor.step() is Step.ASK_LEADER:
            pause = cursor.leader_answered(self._leader_has_more())
            if pause is None or cursor.step() is not Step.ASK_LEADER:
                return None, pause, "the copy that was asked lags"
            time.sleep(pause)  # and then look whether the copy has caught up
        messages = self.fetch()
        count = len(messages)
        if not count:
            return None, cursor.nothing_came(), "the server sends nothing"
        part = cursor.take(count, messages.reply_of)
        if part is None or part.start == part.stop:
            return None, 0.0, ""
        return (messages if part.stop == count else messages.first(part.stop)), 0.0, ""

    def open(self) -> None:
        """Create a consumer at the cursor's position."""
        config = self.cursor.config()
        verb, body = consumer_request(self.stream, config)
        patience = min(GIVEN_AWAY_SECONDS, self.connection.settings.request_timeout)
        try:
            info = self.jetstream.call(verb, body, ConsumerInfo, patience)
        except ApiError as error:
            if not self.cursor.adapted_to(error):
                raise
            self.open()
            return
        self.consumer = info.name
        self.inbox = self.connection.new_inbox()
        self.sid = self.connection.subscribe(f"{self.inbox}.*", self._message)
        self.generation = self.connection.generation
        self.cursor.opened(info)

    def _message(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply.startswith(b"$JS.ACK."):
            # As calling the class would, but faster: this runs for every message.
            self.collector.add(_new(RawMessage, (subject, reply, headers, payload)))
            return
        # The status of a window may come when the next one is open: it has another address.
        code, text = status_of(headers)
        if code != 100 and subject == self.address:
            self.ended, self.status = True, (code, text)

    def fetch(self) -> M:
        """One window: all that is stored up to its limits; empty when the consumer has nothing."""
        window, collector, cursor = self.window, self.collector, self.cursor
        self.ended, self.status = False, (0, "")
        largest = self.connection.info.max_payload + HEADER_BYTES_MAX
        most = (cursor.what.end or 0) - cursor.next_sequence
        batch = min(window.messages, most, cursor.pending or most)
        request = {"batch": batch, "max_bytes": max(window.bytes, largest), "no_wait": True}
        verb = f"{self.jetstream.prefix}.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"
        self.windows += 1
        self.address = f"{self.inbox}.{self.windows}".encode()
        collector.begin(self.sid, batch)
        self.connection.send(pub(verb.encode(), self.address, msgspec.json.encode(request)))
        with self.connection.diverted(collector.feed) as give_back:
            while not self.ended and collector.count < batch:
                if not self.connection.receive(Deadline(SILENCE_SECONDS)):
                    raise RequestTimeout(verb, SILENCE_SECONDS)
            messages, rest = collector.end()
            give_back(rest)
        if self.status[0] == 503:
            raise NoResponders(verb)
        return messages

    def _leader_has_more(self) -> bool | None:
        """Whether the leader has more of the range; None: unknown."""
        try:
            found = [self._next_sequence(ask) for ask in self.cursor.questions()]
        except MillstreamError as error:
            return self.cursor.leader_failed(error)
        return any(map(self.cursor.is_more, found))

    def _next_sequence(self, ask: Mapping[str, Any]) -> int | None:
        try:
            return self.jetstream.call(f"STREAM.MSG.GET.{self.stream}", ask, _Got).message.seq
        except ApiError as error:
            if error.err_code == ErrorCode.MESSAGE_NOT_FOUND:
                return None
            raise

    @property
    def usable(self) -> bool:
        """Whether the consumer's subscription is on the present socket."""
        return self.connection.is_open and self.generation == self.connection.generation

    def forget(self) -> None:
        """Remove the consumer if the socket still works; else the server does it later."""
        consumer, self.consumer = self.consumer, ""
        if not consumer or not self.usable:
            return
        try:
            self.connection.unsubscribe(self.sid)
            verb = f"{self.jetstream.prefix}.CONSUMER.DELETE.{self.stream}.{consumer}"
            self.connection.send(pub(verb.encode(), b"", b""))
        except ConnectError:
            return


def read_range(
    connection: BlockingConnection,
    stream: str,
    start: int,
    end: int,
    subjects: tuple[str, ...] = (),
    window: Window | None = None,
) -> Iterator[list[RawMessage]]:
    """The messages with sequences in [start, end), in order, each once, in windows.

    A lost connection, a restarted server or a new leader is waited out; reading continues at
    the next sequence. Deleted sequences are left out; the caller decides whether that is a loss.
    """
    return read_windows(connection, stream, start, end, subjects, window, collector=_Lister())


def read_windows(
    connection: BlockingConnection,
    stream: str,
    start: int,
    end: int,
    subjects: tuple[str, ...] = (),
    window: Window | None = None,
    *,
    collector: Collector[M],
) -> Iterator[M]:
    """The same, in the form that a collector makes of them."""
    window = window or Window()
    attempt = connection.settings.request_timeout
    cursor = RangeCursor(Range(start, end, subjects=subjects), window.give_up_after, attempt)
    reader = _Reader(connection, stream, cursor, window, collector)
    try:
        while cursor.step() is not Step.END:
            messages = reader.next()
            if messages is not None:
                yield messages
    except ApiError as error:
        if error.err_code != ErrorCode.WORK_QUEUE_NEEDS_ACKS:
            raise
        yield from read_directly(connection, stream, cursor, collector)
    finally:
        reader.forget()
