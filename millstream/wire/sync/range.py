"""Reading a range of a stream with the blocking lane: for Spark workers.

One window is asked for at a time, never more than is left of the range, and received whole before
it is handed on: memory stays at one window whatever the range, and the server never waits for a
reader that is busy elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    AuthenticationFailed,
    ConnectError,
    ConnectFailed,
    NoResponders,
    RequestTimeout,
    TopicNotFound,
)
from millstream.wire.api import (
    NANOSECONDS,
    ConsumerConfig,
    ConsumerInfo,
    ErrorCode,
    parse_ack_address,
)
from millstream.wire.message import HEADER_BYTES_MAX, RawMessage
from millstream.wire.protocol import pub, status_of, unique_token
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream

__all__ = ["Collector", "Messages", "Window", "read_range", "read_windows"]

# A consumer that nobody pulls from is removed by the server after this long.
INACTIVE_SECONDS: Final = 60
SILENCE_SECONDS: Final = 5.0  # without a byte in an open window: ask on a new connection
PAUSE_SECONDS: Final = 0.2
_new: Final = tuple.__new__


@dataclass(frozen=True, slots=True)
class Window:
    """How much is asked for at once, and how long a reader keeps trying without progress."""

    messages: int = 20_000
    bytes: int = 8 * 1024 * 1024  # at least one largest message is always asked for
    give_up_after: float = 60.0  # seconds without progress


class Messages(Protocol):
    """The messages of a window, in whatever form they are handed on."""

    def __len__(self) -> int: ...

    def reply_of(self, number: int) -> bytes:
        """The address of a message's ack."""

    def first(self: M, count: int) -> M:
        """The first so many messages."""


M = TypeVar("M", bound=Messages)
MadeOf = TypeVar("MadeOf", bound=Messages, covariant=True)


class Collector(Protocol[MadeOf]):
    """Makes the messages of a window from what arrives."""

    @property
    def count(self) -> int:
        """Messages so far."""

    def begin(self, sid: bytes, wanted: int) -> None:
        """A new window: messages of one subscription, so many at most."""

    def feed(self, data: bytes, others: Callable[[bytes], None]) -> None:
        """Take bytes that arrived; what is not a message of the window goes to `others`."""

    def add(self, message: RawMessage) -> None:
        """Take a message that was among what went to `others`."""

    def end(self) -> tuple[MadeOf, bytes]:
        """The window, and the bytes of a frame that is not complete."""


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
    """The state of one range being read."""

    def __init__(
        self,
        connection: BlockingConnection,
        stream: str,
        subjects: tuple[str, ...],
        window: Window,
        collector: Collector[M],
    ) -> None:
        self.connection = connection
        self.jetstream = BlockingJetStream(connection)
        self.stream = stream
        self.subjects = subjects
        self.window = window
        self.collector = collector
        self.consumer = ""
        self.generation = -1
        self.expected = 1
        self.pending = 0
        self.copied = False  # the consumer may live on another node than the leader
        self.inbox = ""
        self.address = b""  # of the window that is open
        self.windows = 0
        self.sid = b""
        self.ended = False
        self.status = (0, "")

    def begin(self, start: int) -> None:
        """Make a consumer that starts at a sequence."""
        config = ConsumerConfig(
            name=f"read-{unique_token(12)}",
            ack_policy="none",
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=INACTIVE_SECONDS * NANOSECONDS,
        )
        if start > 1:
            config.deliver_policy, config.opt_start_seq = "by_start_sequence", start
        verb = f"CONSUMER.CREATE.{self.stream}.{config.name}"
        if len(self.subjects) == 1:
            config.filter_subject = self.subjects[0]
            verb = f"{verb}.{self.subjects[0]}"
        elif self.subjects:
            config.filter_subjects = list(self.subjects)
        body = {"stream_name": self.stream, "config": config, "action": "create"}
        info = self.jetstream.call(verb, body, ConsumerInfo)
        self.consumer, self.pending, self.expected = info.name, info.num_pending, 1
        self.copied = info.cluster is not None
        self.inbox = self.connection.new_inbox()
        self.sid = self.connection.subscribe(f"{self.inbox}.*", self._message)
        self.generation = self.connection.generation

    @property
    def usable(self) -> bool:
        return (
            bool(self.consumer)
            and self.connection.is_open
            and self.generation == self.connection.generation
        )

    def _message(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply.startswith(b"$JS.ACK."):
            # What the class does when it is called, without the call: this runs for every message.
            self.collector.add(_new(RawMessage, (subject, reply, headers, payload)))
            return
        # The last word about a window may come when the next one is open: it has another address.
        code, text = status_of(headers)
        if code != 100 and subject == self.address:
            self.ended, self.status = True, (code, text)

    def fetch(self, most: int) -> M:
        """One window: all that is there up to its limits; empty when the range is used up."""
        window, collector = self.window, self.collector
        self.ended, self.status = False, (0, "")
        largest = self.connection.info.max_payload + HEADER_BYTES_MAX
        batch = min(window.messages, most, self.pending or most)
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

    def used_up(self, position: int, end: int) -> bool:
        """Whether there is nothing more of the range, when the consumer has nothing more.

        A consumer reads the copy of the node that it lives on, which may be behind: in a cluster
        the leader is asked.
        """
        for subject in (self.subjects or (">",)) if self.copied else ():
            ask = {"seq": position, "next_by_subj": subject}
            try:
                found = self.jetstream.call(f"STREAM.MSG.GET.{self.stream}", ask, _Got)
            except ApiError as error:
                if error.err_code != ErrorCode.MESSAGE_NOT_FOUND:
                    raise
            else:
                if found.message.seq < end:
                    return False
        return True

    def forget(self) -> None:
        """Remove the consumer if the socket is still there; else the server does it later."""
        if self.usable:
            self.connection.unsubscribe(self.sid)
            verb = f"{self.jetstream.prefix}.CONSUMER.DELETE.{self.stream}.{self.consumer}"
            self.connection.send(pub(verb.encode(), b"", b""))
        self.consumer = ""


def read_range(
    connection: BlockingConnection,
    stream: str,
    start: int,
    end: int,
    subjects: tuple[str, ...] = (),
    window: Window | None = None,
) -> Iterator[list[RawMessage]]:
    """The messages with sequences in [start, end), in order, each once, in windows.

    A lost connection, a restarted server or a new leader is waited out; reading goes on at the
    next sequence. Sequences that were deleted are left out; whether that is a loss is for the
    caller to say.
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
    if start >= end:
        return
    reader = _Reader(connection, stream, subjects, window or Window(), collector)
    position = start
    patience = Deadline(reader.window.give_up_after)
    try:
        while position < end:
            try:
                if not reader.usable:
                    reader.begin(position)
                if reader.pending == 0:
                    if reader.used_up(position, end):
                        return
                    reader.forget()
                    _check_patience(connection, patience, "the copy that was asked is behind")
                    time.sleep(patience.left(at_most=PAUSE_SECONDS))
                    continue
                messages = reader.fetch(end - position)
            except (AuthenticationFailed, TopicNotFound):
                raise
            except (ConnectError, RequestTimeout, NoResponders, ApiError) as error:
                _pause(connection, patience, error)
                reader.consumer = ""
                continue
            total = len(messages)
            if not total:
                # What was promised is gone by now, or was not there yet: a new consumer tells.
                reader.forget()
                _check_patience(connection, patience, "the server gives nothing")
                continue
            first = parse_ack_address(messages.reply_of(0))
            last = parse_ack_address(messages.reply_of(total - 1))
            count = last.consumer_sequence - first.consumer_sequence + 1
            if first.consumer_sequence != reader.expected or count != total:
                reader.forget()  # something was lost on the way: read it again
                continue
            reader.expected = last.consumer_sequence + 1
            reader.pending = last.pending
            position = last.sequence + 1
            patience = Deadline(reader.window.give_up_after)
            if last.sequence >= end:
                yield messages.first(_before(messages, end))
                return
            yield messages
    finally:
        _forget_quietly(reader)


def _before(messages: Messages, end: int) -> int:
    """How many messages come before a sequence."""
    low, high = 0, len(messages)
    while low < high:
        middle = (low + high) // 2
        if parse_ack_address(messages.reply_of(middle)).sequence < end:
            low = middle + 1
        else:
            high = middle
    return low


def _pause(connection: BlockingConnection, patience: Deadline, error: Exception) -> None:
    connection.lose()
    _check_patience(connection, patience, error)
    time.sleep(patience.left(at_most=PAUSE_SECONDS))


def _check_patience(
    connection: BlockingConnection, patience: Deadline, why: Exception | str
) -> None:
    if patience.passed:
        raise ConnectFailed(
            f"no progress for {patience.seconds:g} s while reading from {connection.url}: {why}"
        ) from (why if isinstance(why, Exception) else None)


def _forget_quietly(reader: _Reader[M]) -> None:
    try:
        reader.forget()
    except ConnectError:
        reader.consumer = ""  # the server removes it when it has been idle
