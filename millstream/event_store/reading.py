"""Reading the messages of a store's topic: of one aggregate, of a pattern, of all."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from millstream.errors import MillstreamError, Undecodable
from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import Deleted, StoredEvent
from millstream.event_store.ids import pattern_of, subject_of
from millstream.event_store.messages import (
    AppendMessage,
    open_append,
    previous_in,
    stored_events,
)
from millstream.event_store.usual import AT_ONCE, usual_events
from millstream.events.event import Partition
from millstream.events.start import Start
from millstream.events.subject import partition_of
from millstream.events.undecodable import OnUndecodable, Report
from millstream.events.unpack import raw_of
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.subject_reader import read_last, read_sequences, read_subject
from millstream.wire.api import parse_ack_address
from millstream.wire.lost import check
from millstream.wire.message import RawMessage, StoredMessage

__all__ = ["AggregateReader", "Learn"]

_log = logging.getLogger("millstream.event_store")

# Payloads of a history that is read from its end: a load holds its events until it has the first.
BACK_BYTES_MAX: Final = 32 * 1024 * 1024

# Loads what the types of events in some appends need before they are decoded.
Learn = Callable[[list[AppendMessage]], Awaitable[None]]


class AggregateReader:
    """Reads appends through the broker's index of subjects: one aggregate is one subject."""

    def __init__(self, topic: TopicHandle, types: EventTypes, learn: Learn) -> None:
        self._topic = topic
        self._types = types
        self._jetstream = topic.jetstream
        self._learn = learn
        # For each stream: its configuration, and the connection's number of reconnects when it was
        # asked for. The broker may have found out since that it has lost events.
        self._looked: dict[str, tuple[int, Mapping[str, Any]]] = {}

    def partition(self, id: str) -> Partition:
        """The partition that holds an aggregate."""
        partitions = self._topic.partitions
        return partitions[partition_of(id, len(partitions))]

    def _subject(self, partition: Partition, id: str) -> str:
        return subject_of(partition.prefix or partition.topic, id)

    async def last(self, id: str) -> AppendMessage | None:
        """The last append of an aggregate, as the leader has it; None: it has none."""
        return (await self.head(id))[0]

    async def head(self, id: str) -> tuple[AppendMessage | None, int]:
        """The last append of an aggregate, and the offset of the last message on its subject.

        That is another one if something else has published there.
        """
        partition = self.partition(id)
        ask = {"last_by_subj": self._subject(partition, id)}
        found = await self._jetstream.get_message(partition.stream, ask)
        if found is None:
            return None, 0
        append = open_append(partition, raw_of(partition.stream, found))
        if append is None:
            _log.warning(
                "store %s: the message at offset %d of partition %d is not an append",
                *(partition.topic, found.sequence, partition.number),
            )
            async for one in self.appends(id):
                append = one
        return append, found.sequence

    async def last_with(
        self, id: str, other: tuple[str, str] | None = None
    ) -> tuple[AppendMessage, RawMessage | None] | None:
        """The last append of an aggregate, and the message on a subject of another stream.

        That one need not be the last there. One round trip; None: ask for each by itself.
        """
        partition = self.partition(id)
        if not _has_one_copy(await self._config(partition.stream)):
            return None
        own = (partition.stream, self._subject(partition, id))
        found = await read_last(self._jetstream, [own] if other is None else [own, other])
        if found is None:
            return None
        last, beside = found[0], None if other is None else found[1]
        append = None if last is None else open_append(partition, last)
        # Without one, something else was published there, or a mirror has answered that lags.
        return None if append is None else (append, beside)

    async def last_offset(self, pattern: str) -> int:
        """The offset of the last message that matches a pattern of ids; 0: there is none."""
        (subject,) = self.subjects(pattern)
        stream = self._topic.partitions[0].stream
        found = await self._jetstream.get_message(stream, {"last_by_subj": subject})
        return 0 if found is None else found.sequence

    async def at(self, number: int, sequence: int) -> AppendMessage | None:
        """The append at an offset of a partition."""
        return await self._one(self._topic.partitions[number], {"seq": sequence})

    async def _one(self, partition: Partition, ask: dict[str, Any]) -> AppendMessage | None:
        found: StoredMessage | None = await self._jetstream.get_message(partition.stream, ask)
        if found is None:
            return None
        return open_append(partition, raw_of(partition.stream, found))

    async def appends(self, id: str, start: int = 1) -> AsyncIterator[AppendMessage]:
        """The appends of an aggregate from an offset on, up to now."""
        async for partition, group in self._messages(id, start):
            for raw in group:
                append = open_append(partition, raw)
                if append is not None:
                    yield append

    def following(self, id: str, undecodable: OnUndecodable) -> ReadPlan:
        """The plan that reads the appends of an aggregate, and those that are stored later."""
        partition = self.partition(id)
        return ReadPlan(
            subjects=(self._subject(partition, id),),
            partitions=(partition.number,),
            follow=True,
            undecodable=undecodable,
        )

    async def events_of(
        self,
        id: str,
        start: int = 1,
        version: int = 1,
        key_ids: set[str] | None = None,
        report: Report | None = None,
    ) -> AsyncIterator[list[StoredEvent]]:
        """The events of an aggregate from an offset on, up to now, in groups.

        Appends that end before a version may be left out; they need not be decodable. `key_ids`
        collects those of the persons whose data are in the events. With a report, appends that
        cannot be decoded are reported and left out.
        """
        async for partition, group in self._messages(id, start):
            async for events in self._decoded(partition, group, version, key_ids, report):
                yield events

    async def events_before(
        self, append: AppendMessage, offset: int = 1, key_ids: set[str] | None = None
    ) -> AsyncIterator[list[StoredEvent]]:
        """The events before an append down to an offset: the newest group first, each in order.

        Each append says where some before it are, so the broker need not search for them. It ends
        early where one does not, where something else is found than it says, and after many bytes:
        that shows in the versions, and everything can be read by `events_of`.
        """
        partition, first, previous = append.partition, append.first, append.previous
        await self.check_loss(append.id, offset)
        size = 0
        while first > 1 and size < BACK_BYTES_MAX:
            wanted = [one for one in reversed(previous) if one >= offset]
            messages = await read_sequences(self._jetstream, partition.stream, wanted)
            if not messages:
                return
            events: list[StoredEvent] = []
            try:
                await self._decode_into(events, partition, messages, 1, key_ids)
            except MillstreamError:
                return
            if not _are_before(events, append.id, first, wanted[0]):
                return
            yield events
            first, previous = events[0].version, previous_in(messages[0].headers)
            size += sum(len(message.payload) for message in messages)

    async def events(self, plan: ReadPlan) -> AsyncIterator[list[StoredEvent]]:
        """The events of a plan in groups, each group of one partition."""
        report = plan.report()
        messages = read_messages(self._jetstream, self._topic.partitions, plan)
        try:
            async for partition, group in messages:
                async for events in self._decoded(partition, group, report=report):
                    yield events
        finally:
            await messages.aclose()

    async def events_in(self, append: AppendMessage) -> list[StoredEvent]:
        """The events of one append."""
        (usual,) = usual_events(append.partition, [append.raw], self._types)
        if usual is not None:
            return usual
        await self._learn([append])
        return list(stored_events(append, self._types))

    async def decode(self, partition: Partition, raw: RawMessage) -> list[StoredEvent]:
        """The events of one message."""
        return [event async for group in self._decoded(partition, [raw]) for event in group]

    async def _messages(
        self, id: str, start: int
    ) -> AsyncIterator[tuple[Partition, list[RawMessage]]]:
        partition = self.partition(id)
        subject = self._subject(partition, id)
        await self.check_loss(id, start)
        if _has_one_copy(await self._config(partition.stream)):
            found = await read_subject(self._jetstream, partition.stream, subject, start)
            if found is not None:
                yield partition, found
                return
        plan = ReadPlan(
            start=Start.at_offset(start), subjects=(subject,), partitions=(partition.number,)
        )
        messages = read_messages(self._jetstream, self._topic.partitions, plan)
        try:
            async for group in messages:
                yield group
        finally:
            await messages.aclose()

    async def _decoded(
        self,
        partition: Partition,
        messages: list[RawMessage],
        version: int = 1,
        key_ids: set[str] | None = None,
        report: Report | None = None,
    ) -> AsyncIterator[list[StoredEvent]]:
        """The events of messages; those before an undecodable one come before the error."""
        for first in range(0, len(messages), AT_ONCE):
            some = messages[first : first + AT_ONCE]
            while some:
                events: list[StoredEvent] = []
                try:
                    await self._decode_into(events, partition, some, version, key_ids)
                except MillstreamError as error:
                    if report is None or not isinstance(error, Undecodable):
                        if events:
                            yield events
                        raise
                    report(error)  # the append is left out, also the events before this one
                    some = [
                        raw for raw in some if parse_ack_address(raw.reply).sequence != error.offset
                    ]
                else:
                    yield events
                    break

    async def _decode_into(
        self,
        events: list[StoredEvent],
        partition: Partition,
        messages: list[RawMessage],
        version: int,
        key_ids: set[str] | None,
    ) -> None:
        types = self._types
        unusual: list[AppendMessage] = []
        found: list[list[StoredEvent] | AppendMessage] = []
        problem: Undecodable | None = None
        for raw, one in zip(messages, usual_events(partition, messages, types), strict=True):
            if one is not None:
                found.append(one)
                continue
            try:
                append = open_append(partition, raw)
            except Undecodable as error:
                problem = error
                break
            if append is not None and append.last >= version:
                found.append(append)
                unusual.append(append)
        if unusual:
            await self._learn(unusual)
            if key_ids is not None:
                key_ids.update(id_ for append in unusual for id_ in append.key_ids)
        for part in found:
            # One by one: those before a failure count.
            events.extend(part if isinstance(part, list) else stored_events(part, types))
        if problem is not None:
            raise problem

    def category(self, name: str) -> tuple[str, ...]:
        """The subjects of a category: of ids that are its name, or begin with it and a dot."""
        return (*self.subjects(name), *self.subjects(f"{name}.>"))

    def subjects(self, pattern: str) -> tuple[str, ...]:
        """The subjects of a pattern of ids, in every partition."""
        tokens = pattern_of(pattern)
        return tuple(f"{p.prefix or p.topic}.{tokens}" for p in self._topic.partitions)

    async def check_loss(self, id: str, start: int = 1) -> None:
        """DataLoss if the stream of an aggregate has lost events from an offset on."""
        check(await self._config(self.partition(id).stream), start)

    async def _config(self, stream: str) -> Mapping[str, Any]:
        reconnects = self._jetstream.connection.reconnects
        known = self._looked.get(stream)
        if known is None or known[0] != reconnects:
            config = (await self._jetstream.stream_info(stream)).config
            known = self._looked[stream] = reconnects, config
        return known[1]


def _has_one_copy(config: Mapping[str, Any]) -> bool:
    """Whether a stream has no copies that could lag."""
    return int(config.get("num_replicas", 1)) == 1


def _are_before(events: list[StoredEvent], id: str, version: int, offset: int) -> bool:
    """Whether these are the events of an aggregate before a version, from an offset on."""
    if not events or events[0].offset != offset:
        return False
    return (
        [event.version for event in events] == list(range(version - len(events), version))
        and {event.id for event in events} == {id}
        and Deleted not in {type(event.data) for event in events}
    )
