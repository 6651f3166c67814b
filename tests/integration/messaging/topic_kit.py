"""Helpers for tests of topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from millstream.deadline import Deadline
from millstream.errors import NoResponders
from millstream.messaging import Lag, Subscription, Topic
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import PubAck, error_from
from millstream.wire.protocol import encode_headers
from tests.integration.messaging.event_kit import nothing


async def put(
    connection: Connection,
    subject: str,
    value: bytes = b"x",
    headers: Mapping[str, str] | None = None,
) -> int:
    """Store one message and return its offset; a refusal is raised."""
    block = encode_headers(headers) if headers else b""
    _, answer = await connection.request(subject, value, block)
    ack = msgspec.json.decode(answer, type=PubAck)
    if ack.error is not None:
        raise error_from(ack.error)
    return ack.seq


async def offsets(js: JetStream, stream: str) -> list[int]:
    """The offsets that a stream still has."""
    state = (await js.stream_info(stream)).state
    wanted = range(max(state.first_seq, 1), state.last_seq + 1)
    found = [await js.get_message(stream, {"seq": number}) for number in wanted]
    return [message.sequence for message in found if message is not None]


async def eventually(
    look: Callable[[], Awaitable[object]], expected: object, seconds: float = 60.0
) -> None:
    """Look again until what is seen is as expected."""
    deadline = Deadline(seconds)
    while True:
        try:
            seen = await look()
        except NoResponders as error:
            seen = error
        if seen == expected:
            return
        assert not deadline.passed, f"{seen!r} is not {expected!r} after {seconds:g} s"
        await asyncio.sleep(0.02)


async def of_read(topic: Topic, into: list[Any], **choices: Any) -> None:
    """Add the values that `read` gives, up to the first error."""
    async for event in topic.read(**choices):
        into.append(event.value)


async def of_lists(topic: Topic, into: list[Any], **choices: Any) -> None:
    """The same with `read_many`."""
    async for events in topic.read_many(**choices):
        into.extend(events.values)


async def of_batches(topic: Topic, into: list[Any], **choices: Any) -> None:
    """The same with `batches`."""
    async for batch in topic.batches(**choices):
        into.extend(batch.column("value").to_pylist())


async def done_with(topic: Topic, member: Subscription, seconds: float) -> None:
    """A subscription settles everything, and for a while nothing is redelivered."""
    await eventually(lambda: topic.subscriptions.lag(member.name), Lag(0, 0.0))
    # A lease that ran out while a process was stalled sent copies before the last ack arrived.
    while await member.pull(1000, 0.05):
        pass
    await nothing(member, seconds)


async def given_up(topic: Topic, member: Subscription) -> None:
    """A subscription settles everything, and its member receives nothing in the meantime."""

    async def lag() -> Lag:
        await nothing(member, 0.1)  # it has to fetch events, also those it dead-letters
        return await topic.subscriptions.lag(member.name)

    await eventually(lag, Lag(0, 0.0))
