"""The last plain event of each key: what a table holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from millstream.errors import ConfigError
from millstream.events.classify import is_own_subject
from millstream.events.event import Event, Partition
from millstream.events.start import Start
from millstream.events.subject import key_token, partition_of, text_keys
from millstream.events.undecodable import OnUndecodable
from millstream.events.unpack import events_of
from millstream.messaging.reading.at_offset import events_by
from millstream.messaging.reading.last_per_key import last_messages, last_messages_now
from millstream.messaging.reading.replay import ReadPlan
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.message import RawMessage

__all__ = ["last_of_key", "read_latest", "subject_of_key"]


async def last_of_key(
    jetstream: JetStream, partitions: Sequence[Partition], key: str
) -> Event | None:
    """The last plain event of a key, as of now."""
    partition = partitions[partition_of(key, len(partitions))]
    ask = {"last_by_subj": subject_of_key(partition, key)}
    found = await events_by(jetstream, partition, ask)
    return found[0] if found else None


async def read_latest(
    jetstream: JetStream,
    partitions: Sequence[Partition],
    keys: Sequence[str] = (),
    undecodable: OnUndecodable = "fail",
) -> AsyncGenerator[Event, None]:
    """The last event of each key (or of these keys), each key once.

    Every key that had an event when this started is included, with that event or a later one.
    """
    if any(partition.prefix is None for partition in partitions):
        raise ConfigError("a foreign stream has no keys")
    keys = text_keys(keys)
    plan = ReadPlan(start=Start.LAST_PER_KEY, undecodable=undecodable)
    report = plan.report()
    for partition in partitions:
        async for messages in _messages(jetstream, partition, keys, len(partitions), plan):
            for event in events_of(partition, messages, report=report):
                yield event


async def _messages(
    jetstream: JetStream, partition: Partition, keys: Sequence[str], partitions: int, plan: ReadPlan
) -> AsyncGenerator[list[RawMessage], None]:
    """The last messages of the keys of one partition."""
    if keys:
        here = [key for key in keys if partition_of(key, partitions) == partition.number]
        subjects = dict.fromkeys(subject_of_key(partition, key) for key in here)
        async for messages in last_messages_now(jetstream, partition, list(subjects)):
            yield messages
        return
    size = partition.prefix_size
    async for messages in last_messages(jetstream, partition, plan, None):
        yield [raw for raw in messages if not is_own_subject(raw.subject, size)]


def subject_of_key(partition: Partition, key: str) -> str:
    """The subject of a key's events."""
    if partition.prefix is None:
        raise ConfigError(f"'{partition.topic}' is a foreign stream: its subjects carry no keys")
    return f"{partition.prefix}.{key_token(key)}"
