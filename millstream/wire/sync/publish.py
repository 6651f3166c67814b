"""Publishing with the blocking client: acknowledged, sent again until answered, for Spark workers.

A message that is sent twice must not be stored twice; the caller makes sure of it, with an
expected sequence (a fence) or with an id.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    AuthenticationFailed,
    ConnectError,
    MillstreamError,
    NoGuard,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
    Unconfirmed,
)
from millstream.guarded import (
    GUARD_SECONDS,
    entrance_of,
    guard_of_batch,
    guarded_topic,
    through,
)
from millstream.wire.api import RETRY, ErrorCode, PubAck, publish_error
from millstream.wire.batch import with_batch_headers
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import hpub, pub, status_of, unique_token
from millstream.wire.sync.connection import BlockingConnection

__all__ = ["publish_fenced_batch", "publish_one", "publish_pipelined"]

ATTEMPT_SECONDS: Final = 5.0  # for one answer; a large batch with fsync takes two
PAUSE_SECONDS: Final = 0.1
# Sent and not acknowledged: enough to keep a disk busy, far below what the server may buffer.
WINDOW_MESSAGES: Final = 64
WINDOW_BYTES: Final = 16 * 1024 * 1024
_AGAIN: Final = RETRY | {ErrorCode.BATCH_INCOMPLETE, ErrorCode.BATCH_TOO_MANY}


def publish_one(connection: BlockingConnection, message: OutgoingMessage, timeout: float) -> PubAck:
    """Store one message. ApiError: the server refused it. Unconfirmed: it may be stored."""
    return _until_answered(connection, [message], timeout)


def publish_fenced_batch(
    connection: BlockingConnection, messages: Sequence[OutgoingMessage], timeout: float
) -> PubAck:
    """Store messages of one stream side by side, all or none; the ack has the last one's sequence.

    One of them must carry an expected sequence: a batch without an answer is sent again, and the
    fence refuses the copy (WrongSequence) when the first was stored.
    """
    return _until_answered(connection, messages, timeout)


def _until_answered(
    connection: BlockingConnection, messages: Sequence[OutgoingMessage], timeout: float
) -> PubAck:
    deadline = Deadline(timeout)
    patience = Deadline(min(timeout, GUARD_SECONDS))  # for a guard that is being started
    answered = True
    while True:
        problem: Exception
        try:
            ack = _attempt(connection, messages, max(0.1, deadline.left(at_most=ATTEMPT_SECONDS)))
        except (AuthenticationFailed, PermissionDenied):
            raise
        except (RequestTimeout, NoResponders, ConnectError) as error:
            topic = guarded_topic(messages[0].subject)
            answered = answered and isinstance(error, NoResponders)
            if topic is not None and answered and patience.passed:
                raise NoGuard(topic, messages[-1].subject.decode()) from error
            problem = error
        else:
            if ack.error is None:
                return ack
            problem = publish_error(ack.error)
            if ack.error.err_code not in _AGAIN:
                raise problem
        if deadline.passed:
            if answered and isinstance(problem, ApiError | NoResponders):
                raise problem
            subject = messages[-1].subject.decode("utf-8", "replace")
            raise Unconfirmed(
                f"no ack for {len(messages)} message(s) on '{subject}' within {timeout:g} s: "
                f"they may or may not be stored ({problem})"
            ) from problem
        time.sleep(deadline.left(at_most=PAUSE_SECONDS))


def _attempt(
    connection: BlockingConnection, messages: Sequence[OutgoingMessage], seconds: float
) -> PubAck:
    connection.open(Deadline(seconds))
    topic = guarded_topic(messages[0].subject)
    if topic is not None and len(messages) > 1:
        _, guard = connection.request(guard_of_batch(topic), b"", b"", seconds)
        messages = [m._replace(subject=through(guard.decode(), m.subject)) for m in messages]
    elif topic is not None:
        messages = [messages[0]._replace(subject=entrance_of(messages[0].subject))]
    last = messages[-1]
    headers = last.headers
    if len(messages) > 1:
        batch = unique_token()
        for number, message in enumerate(messages[:-1], 1):
            block = with_batch_headers(message.headers, batch, number, commit=False)
            connection.check_size(len(block) + len(message.payload))
            connection.send(hpub(message.subject, b"", block, message.payload))
        headers = with_batch_headers(headers, batch, len(messages), commit=True)
    _, answer = connection.request(last.subject.decode(), bytes(last.payload), headers, seconds)
    return msgspec.json.decode(answer, type=PubAck)


class _Pipeline:
    """Messages under way on one socket: what was sent, what was answered."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self.prefix = f"{connection.new_inbox()}."
        self.generation = -1
        self.sid = b""
        self.waiting: dict[int, OutgoingMessage] = {}
        self.bytes = 0
        self.acks: dict[int, PubAck] = {}
        self.refused: MillstreamError | None = None
        self.sent = 0

    def subscribe(self) -> None:
        connection = self.connection
        if not connection.is_open or self.generation != connection.generation:
            connection.open(Deadline(connection.settings.connect_timeout))
            self.sid = connection.subscribe(f"{self.prefix}*", self._answer)
            self.generation = connection.generation

    def send(self, number: int, message: OutgoingMessage) -> None:
        subject, headers, payload = message
        self.connection.check_size(len(headers) + len(payload))
        reply = f"{self.prefix}{number}".encode()
        frame = hpub(subject, reply, headers, payload) if headers else pub(subject, reply, payload)
        self.connection.send(frame)

    def put(self, message: OutgoingMessage) -> None:
        self.waiting[self.sent] = message
        self.bytes += len(message.payload)
        self.sent += 1
        self.send(self.sent - 1, message)

    def _answer(self, subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        number = int(subject[len(self.prefix) :])
        message = self.waiting.get(number)
        if message is None or (not payload and status_of(headers)[0] == 503):
            return  # answered before, or nobody listens just now: it is sent again
        ack = msgspec.json.decode(payload, type=PubAck)
        if ack.error is not None:
            if ack.error.err_code not in RETRY:
                self.refused = publish_error(ack.error)
            return
        del self.waiting[number]
        self.bytes -= len(message.payload)
        self.acks[number] = ack

    def moved(self, before: int) -> bool:
        return self.refused is not None or len(self.waiting) < before

    @property
    def full(self) -> bool:
        return len(self.waiting) >= WINDOW_MESSAGES or self.bytes >= WINDOW_BYTES

    def again(self) -> None:
        """Send everything without an answer once more, on a new socket if need be."""
        self.subscribe()
        for number, message in list(self.waiting.items()):
            self.send(number, message)


def publish_pipelined(
    connection: BlockingConnection, messages: Iterable[OutgoingMessage], timeout: float
) -> Iterator[PubAck]:
    """Store messages with many under way; their acks in the order given.

    A message without an answer is sent again, so it may be stored twice unless it has an id.
    `timeout` is the longest time without any progress.
    """
    pipeline = _Pipeline(connection)
    pipeline.subscribe()
    given = 0
    try:
        for message in messages:
            while pipeline.full:
                _progress(pipeline, timeout)
            try:
                pipeline.put(message)
            except ConnectError:
                _progress(pipeline, timeout)
            while given in pipeline.acks:
                yield pipeline.acks.pop(given)
                given += 1
        while pipeline.waiting:
            _progress(pipeline, timeout)
        while given in pipeline.acks:
            yield pipeline.acks.pop(given)
            given += 1
    finally:
        if connection.is_open and connection.generation == pipeline.generation:
            connection.unsubscribe(pipeline.sid)


def _progress(pipeline: _Pipeline, timeout: float) -> None:
    """Return when an answer arrived; sends again what is not answered."""
    patience = Deadline(timeout)
    before = len(pipeline.waiting)
    problem: Exception | None = None
    while len(pipeline.waiting) == before and before:
        attempt = Deadline(patience.left(at_most=ATTEMPT_SECONDS))
        try:
            if pipeline.connection.wait(lambda: pipeline.moved(before), attempt):
                break
            problem = RequestTimeout(pipeline.prefix, attempt.seconds)
            pipeline.again()
        except AuthenticationFailed:
            raise
        except ConnectError as error:
            problem = error
            time.sleep(patience.left(at_most=PAUSE_SECONDS))
            _reopen(pipeline)
        if patience.passed:
            raise Unconfirmed(
                f"no ack for {before} message(s) within {timeout:g} s: they may or may not be "
                f"stored ({problem})"
            ) from problem
    if pipeline.refused is not None:
        raise pipeline.refused


def _reopen(pipeline: _Pipeline) -> None:
    try:
        pipeline.again()
    except AuthenticationFailed:
        raise
    except ConnectError:
        return  # the next turn tries again, within the caller's patience
