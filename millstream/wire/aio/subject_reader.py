"""All messages of one subject with one round trip, where that is possible.

A pull consumer needs a request for itself, one for its messages and one for the state of the
stream. A push consumer sends what it has as soon as it exists, and the answer to the request that
creates it says how many messages that are. Few messages on a single node are read like this. In
every case of doubt (a lost connection, a gap, a silence, too many messages, a copy that may lag, a
user without the permission) `read_subject` gives None, and the caller reads in the usual way.
"""

from __future__ import annotations

import asyncio
from typing import Final

from millstream.errors import ApiError, ConnectError, NoResponders, PermissionDenied, RequestTimeout
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import NANOSECONDS, ConsumerConfig, parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.protocol import status_of, unique_token

__all__ = ["read_subject"]

# More than this is read by a pull consumer, which the reader slows down when it is slow.
MESSAGES_MAX: Final = 2000
BYTES_MAX: Final = 16 * 1024 * 1024
# Between two messages; the usual way has more patience.
SILENCE_SECONDS: Final = 2.0
INACTIVE_SECONDS: Final = 5  # the server removes the consumer if the request to do so is lost
_FLOW_CONTROL: Final = 100  # the status of a heartbeat, or of a question whether to go on


class _Arrived:
    """Messages of the consumer, as they come."""

    def __init__(self, connection: Connection) -> None:
        self.messages: list[RawMessage] = []
        self._connection = connection
        self._bytes = 0
        self._changed = asyncio.Event()

    @property
    def too_many(self) -> bool:
        return len(self.messages) > MESSAGES_MAX or self._bytes > BYTES_MAX

    def take(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if status_of(headers)[0] == _FLOW_CONTROL and not payload:
            # The server waits for the answer after a few megabytes, so a slow reader is not cut
            # off. Without one it sends no more.
            if reply and not self.too_many:
                self._connection.publish(reply, b"")
        elif not self.too_many:
            self.messages.append(RawMessage(subject, reply, headers, payload))
            self._bytes += len(headers) + len(payload)
        self._changed.set()

    async def complete(self, wanted: int) -> bool:
        """Wait until all have come; False when they stop coming, or are too many."""
        while len(self.messages) < wanted:
            before = len(self.messages)
            self._changed.clear()
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                if len(self.messages) == before:
                    return False
            if self.too_many:
                return False
        return True


async def read_subject(
    jetstream: JetStream, stream: str, subject: str, start: int = 1
) -> list[RawMessage] | None:
    """The messages on a subject from a sequence on, up to now, in order; None: use another way."""
    connection = jetstream.connection
    if not connection.connected:
        return None
    inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
    name = f"read-{unique_token(12)}"
    config = ConsumerConfig(
        name=name,
        ack_policy="none",
        mem_storage=True,
        num_replicas=1,
        deliver_subject=inbox,
        filter_subject=subject,
        inactive_threshold=INACTIVE_SECONDS * NANOSECONDS,
        flow_control=True,
        idle_heartbeat=INACTIVE_SECONDS * NANOSECONDS,
    )
    if start > 1:
        config.deliver_policy, config.opt_start_seq = "by_start_sequence", start
    arrived = _Arrived(connection)
    interest = connection.subscribe(inbox, arrived.take)
    try:
        info = await jetstream.create_consumer(stream, config, timeout=SILENCE_SECONDS)
        # What was sent before this answer was written counts as delivered.
        wanted = info.num_pending + info.delivered.consumer_seq
        if wanted > MESSAGES_MAX or not await arrived.complete(wanted):
            return None
        return _in_order(arrived.messages[:wanted])
    except (ApiError, ConnectError, NoResponders, PermissionDenied, RequestTimeout):
        return None
    finally:
        connection.unsubscribe(interest)
        if connection.connected:
            verb = f"{jetstream.prefix}.CONSUMER.DELETE.{stream}.{name}"
            connection.publish(verb.encode(), b"")


def _in_order(messages: list[RawMessage]) -> list[RawMessage] | None:
    """The messages, if none of them was lost on the way.

    They come in their order, so the numbers of the first and the last tell about all between them.
    """
    for number in {1, len(messages)} if messages else ():
        if parse_ack_address(messages[number - 1].reply).consumer_sequence != number:
            return None
    return messages
