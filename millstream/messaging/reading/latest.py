"""The last plain event of each key: what a table holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

from millstream.errors import ConfigError
from millstream.events.classify import is_own_subject
from millstream.events.event import Event, Partition, PlainEvent
from millstream.events.start import Start
from millstream.events.subject import key_token, partition_of, text_keys
from millstream.events.undecodable import OnUndecodable
from millstream.events.unpack import events_of
from millstream.messaging.reading.at_offset import events_by
from millstream.messaging.reading.key_places import KeyPlaces
from millstream.messaging.reading.last_per_key import last_messages, last_messages_now
from millstream.messaging.reading.replay import ReadPlan
from millstream.messaging.topics.lookup import side_by_side
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.message import RawMessage

__all__ = ["LastStored", "last_of_key", "newest", "read_latest", "subject_of_key"]


async def last_of_key(jetstream: JetStream, places: KeyPlaces, key: str) -> Event | None:
    """The last plain event of a key, as of now; of several partitions, the one stored last."""

    async def last_in(partition: Partition) -> list[Event]:
        ask = {"last_by_subj": subject_of_key(partition, key)}
        return await events_by(jetstream, partition, ask)

    found = await side_by_side(last_in, await places.of(key))
    return newest(event for events in found for event in events[:1])


def newest(events: Iterable[Event]) -> Event | None:
    """The plain event that was stored last; None if there is none."""
    plain = [event for event in events if isinstance(event, PlainEvent)]
    return max(plain, key=lambda event: event.stored_ns, default=None)


async def read_latest(
    jetstream: JetStream,
    partitions: Sequence[Partition],
    places: KeyPlaces,
    keys: Sequence[str] = (),
    undecodable: OnUndecodable = "fail",
) -> AsyncGenerator[Event, None]:
    """The last event of each key (or of these keys), each key once.

    Every key that had an event when this started is included, with that event or a later one.
    Where a key may be in any partition, the last event of every key is held in memory.
    """
    if any(partition.prefix is None for partition in partitions):
        raise ConfigError("a foreign stream has no keys")
    keys = text_keys(keys)
    plan = ReadPlan(start=Start.LAST_PER_KEY, undecodable=undecodable)
    report = plan.report()
    at_home = await places.at_home()
    last = LastStored()
    for partition in partitions:
        wanted = keys
        if keys and at_home:
            count = len(partitions)
            wanted = tuple(key for key in keys if partition_of(key, count) == partition.number)
            if not wanted:
                continue
        async for messages in _messages(jetstream, partition, wanted, plan):
            if not at_home:
                last.add(partition, messages)
                continue
            for event in events_of(partition, messages, report=report):
                yield event
    for partition, raw in last.messages():
        for event in events_of(partition, [raw], report=report):
            yield event


class LastStored:
    """Of messages of several partitions, the one of each key that was stored last."""

    def __init__(self) -> None:
        self._events: dict[str | None, tuple[PlainEvent, Partition]] = {}

    def add(self, partition: Partition, messages: Iterable[RawMessage]) -> None:
        """Take messages; their values are not decoded, so that none hides an earlier one."""
        for raw in messages:
            event = PlainEvent(partition, raw)
            known = self._events.get(event.key)
            if known is None or known[0].stored_ns <= event.stored_ns:
                self._events[event.key] = event, partition

    def messages(self) -> Iterator[tuple[Partition, RawMessage]]:
        """The last message of each key."""
        for event, partition in self._events.values():
            yield partition, event.raw


async def _messages(
    jetstream: JetStream, partition: Partition, keys: Sequence[str], plan: ReadPlan
) -> AsyncGenerator[list[RawMessage], None]:
    """The last messages of the keys of one partition, or of these."""
    if keys:
        subjects = dict.fromkeys(subject_of_key(partition, key) for key in keys)
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
