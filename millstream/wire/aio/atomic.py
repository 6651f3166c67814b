"""Atomic batches: several messages of one stream, all stored or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from millstream.deadline import Deadline, now_ns
from millstream.errors import (
    ApiError,
    ConfigError,
    ConnectError,
    NoGuard,
    NoResponders,
    RequestTimeout,
    Unconfirmed,
    WrongSequence,
)
from millstream.guarded import GUARD_SECONDS, guard_of_batch, guarded_topic, through
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.direct_reader import open_range
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.api import RETRY, ErrorCode, PubAck, parse_ack_address, publish_error
from millstream.wire.batch import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX, with_batch_headers
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import hpub, parse_headers, unique_token
from millstream.wire.range_cursor import Range

__all__ = ["publish_batch"]

ATTEMPT_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 0.1
# How far the clocks of client and server may differ when a batch is looked for in the log.
CLOCK_SECONDS: Final = 60
_AGAIN: Final = RETRY | {ErrorCode.BATCH_INCOMPLETE, ErrorCode.BATCH_TOO_MANY}


async def publish_batch(
    jetstream: JetStream, stream: str, messages: Sequence[OutgoingMessage], timeout: float
) -> PubAck:
    """Store all messages, one after the other without anything in between, or none.

    The ack has the sequence of the last one and their count. A batch without an answer is looked
    for in the log before it is sent again, so it is stored once. If the broker cannot be asked in
    between, messages with an expected sequence are still stored once: WrongSequence then has
    `sent_again`, and the first attempt may have been stored.
    """
    _check(jetstream, messages)
    deadline = Deadline(timeout)
    began = now_ns()
    sent: list[str] = []
    while True:
        batch_id = unique_token()
        sent.append(batch_id)
        final = False  # the answer stands, unless the log shows that an earlier attempt was stored
        try:
            ack = await _attempt(jetstream, messages, batch_id, deadline)
        except (RequestTimeout, NoResponders, ConnectError) as error:
            if isinstance(error, NoGuard) and len(sent) == 1:
                raise
            problem: Exception = error
        else:
            if ack.error is None:
                return ack
            problem = publish_error(ack.error)
            final = ack.error.err_code not in _AGAIN
            if final and len(sent) == 1:
                raise problem
            # Its ids may be remembered before its messages can be read: look once more then.
            final = final and ack.error.err_code != ErrorCode.BATCH_DUPLICATE
        try:
            found = await _find(jetstream, stream, sent, began, len(messages))
            missing = f"it is not in '{stream}'"
        except (RequestTimeout, NoResponders, ConnectError):
            found, missing = None, f"'{stream}' could not be searched for it"
            final = False
        if found is not None:
            return found
        if final:
            if isinstance(problem, WrongSequence):
                problem.sent_again = True
            raise problem
        if deadline.passed:
            refused = isinstance(problem, ApiError) and len(sent) == 1
            if refused or isinstance(problem, NoResponders):
                raise problem
            raise Unconfirmed(
                f"no answer for a batch of {len(messages)} messages within {timeout:g} s, "
                f"and {missing}"
            ) from problem
        await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))


def _check(jetstream: JetStream, messages: Sequence[OutgoingMessage]) -> None:
    if not 1 <= len(messages) <= BATCH_MESSAGES_MAX:
        raise ConfigError(
            f"an atomic batch of {len(messages):,} messages: it takes 1 to {BATCH_MESSAGES_MAX:,}"
        )
    total = 0
    for message in messages:
        size = len(message.headers) + len(message.payload)
        jetstream.connection.check_size(size + 128)  # with the batch's own headers
        total += size
    if total > BATCH_BYTES_MAX:
        raise ConfigError(
            f"an atomic batch of {total:,} bytes: it takes at most {BATCH_BYTES_MAX:,}"
        )


async def _attempt(
    jetstream: JetStream, messages: Sequence[OutgoingMessage], batch_id: str, deadline: Deadline
) -> PubAck:
    connection = jetstream.connection
    await connection.wait_connected(deadline)
    topic = guarded_topic(messages[0].subject)
    if topic is not None:
        guard = await _guard_of(connection, topic, deadline)
        messages = [m._replace(subject=through(guard, m.subject)) for m in messages]
    last = len(messages)
    for number, message in enumerate(messages[:-1], 1):
        block = with_batch_headers(message.headers, batch_id, number, commit=False)
        connection.send(hpub(message.subject, b"", block, message.payload))
        if connection.congested:
            await connection.writable()
    final = messages[-1]
    block = with_batch_headers(final.headers, batch_id, last, commit=True)
    attempt = max(0.1, deadline.left(at_most=ATTEMPT_SECONDS))
    _, answer = await connection.request(
        final.subject.decode(), bytes(final.payload), block, attempt, asks_again=True
    )
    return msgspec.json.decode(answer, type=PubAck)


async def _guard_of(connection: Connection, topic: str, deadline: Deadline) -> str:
    """The guard that takes the batch; NoGuard when none answers for a while."""
    subject = guard_of_batch(topic)
    patience = Deadline(deadline.left(at_most=GUARD_SECONDS))
    while True:
        try:
            attempt = max(0.1, deadline.left(at_most=ATTEMPT_SECONDS))
            _, answer = await connection.request(subject, b"", b"", attempt, asks_again=True)
            return answer.decode()
        except NoResponders as error:
            if patience.passed:
                raise NoGuard(topic, subject) from error
        await asyncio.sleep(patience.left(at_most=PAUSE_SECONDS))


async def _find(
    jetstream: JetStream, stream: str, batch_ids: Sequence[str], began_ns: int, count: int
) -> PubAck | None:
    """The ack of a batch that was stored although its answer was lost; None when it was not."""
    since = datetime.fromtimestamp(began_ns / 1e9, UTC) - timedelta(seconds=CLOCK_SECONDS)
    last = (await jetstream.stream_info(stream)).state.last_seq
    start = await jetstream.sequence_at(stream, since.isoformat().replace("+00:00", "Z"))
    what = Range(start, last + 1, headers_only=True, over_loss=True)
    reader = await open_range(jetstream, stream, what, Signal())
    try:
        while not reader.done:
            for message in reader.take_now(1000):
                headers = parse_headers(message.headers)
                known = headers.get("Nats-Batch-Id") in batch_ids
                if known and "Nats-Batch-Commit" in headers:
                    sequence = parse_ack_address(message.reply).sequence
                    return PubAck(stream=stream, seq=sequence, count=count)
            if not reader.done:
                await reader.signal.wait()
    finally:
        reader.close()
    return None
