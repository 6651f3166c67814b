"""The last event of each key, also of keys that are written while they are read.

A reader of last events skips an event that is replaced before it is delivered, and its replacement
is after the end of the range. So when something was written meanwhile, the keys that were not seen
are looked up one by one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec

from millstream.errors import ConfigError
from millstream.events.classify import is_own_subject
from millstream.events.event import Event, Partition
from millstream.events.start import Start
from millstream.events.subject import key_token, partition_of
from millstream.events.unpack import events_in, raw_of
from millstream.messaging.reading.replay import ReadPlan, read_events
from millstream.messaging.topics.lookup import side_by_side
from millstream.wire.aio.jetstream import JetStream

__all__ = ["last_of_key", "last_on", "read_latest"]

# The server's limit of subjects in one answer.
SUBJECTS_PAGE: Final = 100_000
PAGES_MAX: Final = 10_000  # a billion keys; ends a loop that would never end


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct):
    state: _State
    total: int = 0


async def last_on(jetstream: JetStream, partition: Partition, subject: str) -> Event | None:
    """The last event of a subject now."""
    found = await jetstream.get_message(partition.stream, {"last_by_subj": subject})
    if found is None:
        return None
    raw = raw_of(partition.stream, found)
    if partition.learn is not None:
        await partition.learn([raw])
    return events_in(partition, raw)[0]


async def read_latest(
    jetstream: JetStream, partitions: Sequence[Partition], keys: Sequence[str] = ()
) -> AsyncGenerator[Event, None]:
    """The last event of each key (or of these keys), each key once.

    Every key that had an event when this started is included, with that event or a later one.
    """
    if any(partition.prefix is None for partition in partitions):
        raise ConfigError("a foreign stream has no keys")
    if keys:
        for event in await side_by_side(
            lambda key: last_of_key(jetstream, partitions, key), dict.fromkeys(keys)
        ):
            if event is not None:
                yield event
        return
    for partition in partitions:
        async for event in _latest_of(jetstream, partition):
            yield event


async def last_of_key(
    jetstream: JetStream, partitions: Sequence[Partition], key: str
) -> Event | None:
    """The last plain event of a key, as of now."""
    partition = partitions[partition_of(key, len(partitions))]
    if partition.prefix is None:
        raise ConfigError(f"'{partition.topic}' is a foreign stream: its subjects carry no keys")
    return await last_on(jetstream, partition, f"{partition.prefix}.{key_token(key)}")


async def _latest_of(jetstream: JetStream, partition: Partition) -> AsyncGenerator[Event, None]:
    before = (await jetstream.stream_info(partition.stream)).state.last_seq
    seen: set[str] = set()
    async for event in read_events(jetstream, [partition], ReadPlan(start=Start.LAST_PER_KEY)):
        if event.subject not in seen:
            seen.add(event.subject)
            yield event
    if (await jetstream.stream_info(partition.stream)).state.last_seq == before:
        return
    missed = [s for s in await _subjects(jetstream, partition) if s not in seen]
    for found in await side_by_side(lambda subject: last_on(jetstream, partition, subject), missed):
        if found is not None:
            yield found


async def _subjects(jetstream: JetStream, partition: Partition) -> list[str]:
    """The subjects that hold events."""
    found: list[str] = []
    for page in range(PAGES_MAX):
        ask = {"subjects_filter": f"{partition.prefix}.*", "offset": page * SUBJECTS_PAGE}
        info = await jetstream.call(f"STREAM.INFO.{partition.stream}", ask, _Info)
        subjects = info.state.subjects or {}
        size = partition.prefix_size
        found.extend(s for s in subjects if not is_own_subject(s.encode(), size))
        if not subjects or (page + 1) * SUBJECTS_PAGE >= info.total:
            break
    return found
