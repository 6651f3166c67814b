"""The end of an aggregate: deleted for good, deleted to begin again, or archived.

1. Archived only: copy its appends to the archive, from the first one that is not there yet.
2. Store a message without a value as its next version, if no other append came first. From now on
   the aggregate takes no appends, and readers of all events see its end.
3. Remove its messages before that one (and that one too, if its id may be used again).
4. Remove its snapshot.

Each step can be repeated, so a call that was interrupted is completed by the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from millstream.errors import (
    AggregateDeleted,
    AggregateNotFound,
    ConfigError,
    TopicNotFound,
    VersionConflict,
    WrongSequence,
)
from millstream.event_store.appending import AggregateHead, Appender
from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import NEW, Expected, Unchanged, check_expected
from millstream.event_store.format import (
    ARCHIVED_HEADER,
    PREVIOUS_HEADER,
    STORED_HEADER,
    VERSIONS_HEADER,
    join_lines,
    versions_text,
)
from millstream.event_store.ids import subject_of
from millstream.event_store.messages import AppendMessage
from millstream.event_store.reading import AggregateReader, Learn
from millstream.event_store.snapshots import Snapshots
from millstream.events.classify import NULL_HEADER
from millstream.events.event import ID_HEADER
from millstream.events.fence import EXPECTED_HEADER
from millstream.messaging import Topic
from millstream.messaging.publishing.event_publisher import PUBLISH_SECONDS
from millstream.messaging.topics.admin import Purge
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.api import PubAck
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers, unique_token

__all__ = ["ARCHIVE_SUFFIX", "AggregateEnding", "Archive"]

ARCHIVE_SUFFIX: Final = "-archive"
# Appends that may be stored while an aggregate is being ended, before it counts as busy.
TRIES_MAX: Final = 20
# The server's, and headers that say how a message is stored, which is not so for its copy.
_NOT_COPIED: Final = ("Nats-", PREVIOUS_HEADER)


class Archive:
    """The topic that holds the events of archived aggregates; created when it is first needed."""

    def __init__(
        self,
        name: str,
        open: Callable[[bool], Awaitable[Topic]],
        types: EventTypes,
        learn: Learn,
    ) -> None:
        self.name = name
        self._types = types
        self._open = open  # with True: create it if there is none
        self._learn = learn
        self._reader: AggregateReader | None = None
        self._topic: Topic | None = None

    async def topic(self, create: bool = False) -> Topic:
        """The topic; TopicNotFound when there is none yet."""
        if self._topic is None:
            self._topic = await self._open(create)
        return self._topic

    async def reader(self, create: bool = False) -> AggregateReader:
        """Reads what is in it."""
        if self._reader is None:
            topic = await self.topic(create)
            self._reader = AggregateReader(topic.handle, self._types, self._learn)
        return self._reader


class AggregateEnding:
    """Deletes and archives the aggregates of one store."""

    def __init__(
        self,
        store: Topic,
        reader: AggregateReader,
        appender: Appender,
        snapshots: Snapshots | None,
        archive: Archive,
    ) -> None:
        self._topic = store
        self._reader = reader
        self._appender = appender
        self._snapshots = snapshots
        self._archive = archive

    async def delete(self, id: str, expected: Expected, reusable: bool) -> None:
        """Remove an aggregate's events; a second call completes the first."""
        await self._check_permission(id)
        last, sequence = await self._reader.head(id)
        if last is None and sequence:  # only what other programs have published
            await self._remove(id, sequence + 1)
            return
        last = await self._last(id)
        end = last.offset
        if not last.ends:
            # Not what is last by now: with another deletion the id may have begun again.
            end = await self._end(id, expected, None)
        elif last.archive is not None:
            await self._remove_archived(id)
        await self._remove(id, end + 1 if reusable else end)

    async def archive(self, id: str) -> None:
        """Move an aggregate's events to the archive; a second call completes the first."""
        await self._check_permission(id)
        last = await self._last(id)
        if last.ends and last.archive is None:
            raise AggregateDeleted(self._topic.name, id)
        for _ in range(TRIES_MAX):
            if last.ends:
                break
            # It got another event, which has to be copied as well, or another call copies it too.
            with suppress(VersionConflict, WrongSequence):
                await self._copy(id)
                await self._end(id, last.last, self._archive.name)
            last = await self._last(id)
        else:
            raise VersionConflict(self._topic.name, id, "no more events", last.last)
        await self._remove(id, last.offset)

    async def _check_permission(self, id: str) -> None:
        """PermissionDenied before anything is changed, for a user that may not remove events."""
        await self._purge(id, 1)  # nothing is stored before offset 1

    async def _last(self, id: str) -> AppendMessage:
        last = await self._reader.last(id)
        if last is None:
            raise AggregateNotFound(self._topic.name, id)
        return last

    async def _end(self, id: str, expected: Expected, archive: str | None) -> int:
        """Step 2: the message after which there are no others; its offset."""
        check_expected(expected, id)
        if expected is NEW or isinstance(expected, Unchanged):
            raise ConfigError(f"delete: expected {expected}; give a version, or ANY")
        for _ in range(TRIES_MAX):
            head = await self._appender.head(id)
            if head.deleted:
                return head.sequence
            if head.version == 0:
                raise AggregateNotFound(self._topic.name, id)
            if isinstance(expected, int) and head.version != expected:
                raise VersionConflict(self._topic.name, id, expected, head.version)
            version = versions_text(head.version + 1, head.version + 1)
            pairs = [
                (ID_HEADER, unique_token(20)),
                (VERSIONS_HEADER, version),
                (EXPECTED_HEADER, str(head.sequence)),
                (NULL_HEADER, "1"),
            ]
            if archive is not None:
                pairs.append((ARCHIVED_HEADER, archive))
            subject = self._subject(self._topic.handle, id)
            message = OutgoingMessage(subject.encode(), encode_headers(pairs), b"")
            try:
                ack = await _publish(self._topic.handle, message)
            except WrongSequence:
                continue  # another append, or a copy of this message, came first
            self._appender.remember(id, AggregateHead(head.version + 1, ack.seq, True))
            return ack.seq
        raise VersionConflict(
            self._topic.name, id, expected, (await self._appender.head(id)).version
        )

    async def _copy(self, id: str) -> None:
        """Step 1: what is not in the archive yet, in order, each once."""
        archive = await self._archive.topic(create=True)
        there = await (await self._archive.reader(create=True)).last(id)
        done = 0 if there is None else there.last
        sequence = 0 if there is None else there.offset
        same = there is None
        async for append in self._reader.appends(id):
            if append.last <= done or append.ends:
                same = same or (append.last, append.stored_ns) == (done, there and there.stored_ns)
                continue
            if not same:
                break
            pairs = [(n, v) for n, v in append.headers.items() if not n.startswith(_NOT_COPIED)]
            pairs += [
                # Not by the append's id, which another append may have, or none.
                (ID_HEADER, f"{append.offset}-{append.stored_ns}-archived"),
                (STORED_HEADER, str(append.stored_ns)),
                (EXPECTED_HEADER, str(sequence)),
            ]
            subject = self._subject(archive.handle, id)
            block = encode_headers(pairs, foreign=True)
            ack = await _publish(
                archive.handle, OutgoingMessage(subject.encode(), block, join_lines(append.lines))
            )
            sequence = ack.seq
        if not same:
            raise ConfigError(
                f"'{self._archive.name}' holds events of an earlier '{id}', which are not those of "
                f"store '{self._topic.name}'. Delete that topic, or copy it and then delete it"
            )

    async def _remove_archived(self, id: str) -> None:
        """The copies of an archived aggregate."""
        with suppress(TopicNotFound):
            archive = await self._archive.topic()
            number = self._reader.partition(id).number
            what = Purge(subject=self._subject(archive.handle, id), partition=number)
            await archive.admin.purge(what)

    async def _remove(self, id: str, before: int) -> None:
        """Steps 3 and 4."""
        await self._purge(id, before)
        self._appender.forget(id)
        if self._snapshots is not None:
            await self._snapshots.delete(id)

    async def _purge(self, id: str, before: int) -> None:
        number = self._reader.partition(id).number
        subject = self._subject(self._topic.handle, id)
        await self._topic.admin.purge(Purge(subject=subject, before=before, partition=number))

    def _subject(self, topic: TopicHandle, id: str) -> str:
        number = self._reader.partition(id).number
        return subject_of(topic.partitions[number].prefix or topic.shape.topic, id)


async def _publish(topic: TopicHandle, message: OutgoingMessage) -> PubAck:
    if topic.publisher.full:
        await topic.publisher.wait_for_space()
    ack: PubAck = await topic.publisher.publish(message, PUBLISH_SECONDS, lambda ack: ack)
    return ack
