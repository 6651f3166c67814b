"""The last event of each key, now or before an offset or a time.

The broker finds the last message of a subject. A key is a subject, so that is enough for topics
without packs:

1. Read the last message of each subject, up to the end.
2. A key that was written after the end is missing, and so is one that is written while they are
   read. Look up the subjects that were not seen: their last message before the end.

A pack holds events of many keys under one subject. In a topic with packs everything up to the end
is read, and the last event of each key is kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.events.classify import is_own_subject
from millstream.events.event import Partition
from millstream.events.unpack import raw_of
from millstream.messaging.reading.replay import (
    ReadPlan,
    holds_packs,
    read_messages,
    subjects_of,
)
from millstream.messaging.topics.lookup import side_by_side, stream_subjects
from millstream.wire.aio.direct_reader import direct_batch
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.message import RawMessage

__all__ = [
    "check_follow",
    "last_messages",
    "last_messages_before",
    "last_messages_now",
    "stored_subjects",
]

# Subjects in one question: the server answers with at most 1,024 messages.
ASK_SUBJECTS: Final = 1000
ASK_BYTES: Final = 256 * 1024
ANSWER_BYTES: Final = 8 * 1024 * 1024
FILTER_SUBJECTS: Final = 100  # of one reader


async def check_follow(jetstream: JetStream, partitions: Sequence[Partition]) -> None:
    """Refuse to follow the last events of a topic with packs."""
    for partition in partitions:
        if await holds_packs(jetstream, partition):
            raise ConfigError(
                f"'{partition.topic}' holds packs, and the broker cannot find the last event of a "
                f"key in them: with follow=True, LAST_PER_KEY cannot be read from it. Read "
                f"LAST_PER_KEY up to an offset, then everything from that offset"
            )


async def last_messages(
    jetstream: JetStream, partition: Partition, plan: ReadPlan, end: int | None
) -> AsyncGenerator[list[RawMessage], None]:
    """The last message of each subject before `end`; None: now, or a later one."""
    before = (await jetstream.stream_info(partition.stream)).state.last_seq
    wanted = before + 1 if end is None else min(end, before + 1)
    if wanted <= 1:
        return
    seen: set[bytes] = set()
    bounded = replace(plan, end=wanted, partitions=[partition.number])
    async for _, messages in read_messages(jetstream, [partition], bounded):
        fresh = [raw for raw in messages if raw.subject not in seen]
        seen.update(raw.subject for raw in fresh)
        yield fresh
    info = await jetstream.stream_info(partition.stream)
    if info.state.last_seq < wanted:
        return  # nothing was written after the end
    patterns = subjects_of(partition, plan) or (">",)
    missed = [
        subject
        async for subject in stored_subjects(jetstream, partition, patterns)
        if subject.encode() not in seen
    ]
    if end is None:
        found = last_messages_now(jetstream, partition, missed)
    else:
        found = last_messages_before(jetstream, partition, missed, wanted, info.config)
    async for messages in found:
        yield messages


async def last_messages_now(
    jetstream: JetStream, partition: Partition, subjects: Sequence[str]
) -> AsyncGenerator[list[RawMessage], None]:
    """The last message of each subject now."""
    stream = partition.stream
    for part in _parts(subjects):
        found = await side_by_side(
            lambda subject: jetstream.get_message(stream, {"last_by_subj": subject}), part
        )
        messages = [raw_of(stream, message) for message in found if message is not None]
        if partition.learn is not None:
            await partition.learn(messages)
        yield messages


def last_messages_before(
    jetstream: JetStream,
    partition: Partition,
    subjects: Sequence[str],
    end: int,
    config: Mapping[str, Any],
) -> AsyncGenerator[list[RawMessage], None]:
    """The last message of each subject before a sequence; `config` is the stream's."""
    # Any copy of a stream answers a direct get, also one that lags.
    direct = bool(config.get("allow_direct")) and int(config.get("num_replicas", 1)) == 1
    find = _lasts_before if direct else _read_before
    return find(jetstream, partition, subjects, end)


async def _lasts_before(
    jetstream: JetStream, partition: Partition, subjects: Sequence[str], end: int
) -> AsyncGenerator[list[RawMessage], None]:
    """The last message of each subject before a sequence, by the server's index of subjects."""
    for part in _parts(subjects):
        left = dict.fromkeys(subject.encode() for subject in part)
        while left:
            ask = {
                "multi_last": [subject.decode() for subject in left],
                "up_to_seq": end - 1,
                "batch": ASK_SUBJECTS,
                "max_bytes": max(ANSWER_BYTES, jetstream.connection.info.max_payload * 2),
            }
            found, status = await direct_batch(jetstream, partition.stream, ask)
            messages = [one.as_delivered(number) for number, one in enumerate(found, 1)]
            if partition.learn is not None:
                await partition.learn(messages)
            yield messages
            for raw in messages:
                left.pop(raw.subject, None)
            if not messages or status.get("Nats-Num-Pending", "0") == "0":
                break  # what is left has no message before the end


async def _read_before(
    jetstream: JetStream, partition: Partition, subjects: Sequence[str], end: int
) -> AsyncGenerator[list[RawMessage], None]:
    """The same by reading everything of these subjects up to there."""
    for part in _parts(subjects, FILTER_SUBJECTS):
        latest: dict[bytes, RawMessage] = {}
        plan = ReadPlan(end=end, subjects=part, partitions=[partition.number])
        async for _, messages in read_messages(jetstream, [partition], plan):
            latest.update((raw.subject, raw) for raw in messages)
        yield list(latest.values())


async def stored_subjects(
    jetstream: JetStream, partition: Partition, patterns: Sequence[str], own: bool = False
) -> AsyncGenerator[str, None]:
    """The subjects that hold messages; Millstream's own only if asked for."""
    size = partition.prefix_size
    for pattern in patterns:
        async for subject, _ in stream_subjects(jetstream, partition.stream, pattern):
            if own or not is_own_subject(subject.encode(), size):
                yield subject


def _parts(subjects: Sequence[str], most: int = ASK_SUBJECTS) -> Iterator[list[str]]:
    """The subjects in parts that fit one question."""
    part: list[str] = []
    size = 0
    for subject in subjects:
        if part and (len(part) >= most or size >= ASK_BYTES):
            yield part
            part, size = [], 0
        part.append(subject)
        size += len(subject)
    if part:
        yield part
