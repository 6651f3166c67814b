"""Reading the messages of a store's topic: of one aggregate, of a pattern, of all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from millstream.event_store.ids import pattern_of, subject_of
from millstream.event_store.messages import AppendMessage, open_append
from millstream.events.event import Partition
from millstream.events.start import Start
from millstream.events.subject import partition_of
from millstream.events.unpack import raw_of
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.subject_reader import read_subject
from millstream.wire.lost import check
from millstream.wire.message import RawMessage, StoredMessage

__all__ = ["AggregateReader", "Learn"]

# Loads what the types of events in some appends need before they are decoded.
Learn = Callable[[list[AppendMessage]], Awaitable[None]]


class AggregateReader:
    """Reads appends through the broker's index of subjects: one aggregate is one subject."""

    def __init__(self, topic: TopicHandle, learn: Learn) -> None:
        self._topic = topic
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
        partition = self.partition(id)
        ask = {"last_by_subj": self._subject(partition, id)}
        return await self._one(partition, ask)

    async def at(self, number: int, sequence: int) -> AppendMessage | None:
        """The append at an offset of a partition."""
        return await self._one(self._topic.partitions[number], {"seq": sequence})

    async def _one(self, partition: Partition, ask: dict[str, Any]) -> AppendMessage | None:
        found: StoredMessage | None = await self._jetstream.get_message(partition.stream, ask)
        if found is None:
            return None
        return open_append(partition, raw_of(partition.stream, found))

    async def appends(self, id: str, start: int = 1) -> AsyncGenerator[AppendMessage, None]:
        """The appends of an aggregate from an offset on, up to now."""
        partition = self.partition(id)
        subject = self._subject(partition, id)
        found: list[RawMessage] | None = None
        if await self._is_single(partition.stream, start):
            found = await read_subject(self._jetstream, partition.stream, subject, start)
        if found is not None:
            for append in await self._opened(partition, found):
                yield append
            return
        plan = ReadPlan(
            start=Start.at_offset(start), subjects=(subject,), partitions=(partition.number,)
        )
        async for _, appends in self.groups(plan):
            for append in appends:
                yield append

    def following(self, id: str) -> ReadPlan:
        """The plan that reads the appends of an aggregate, and those that are stored later."""
        partition = self.partition(id)
        subjects = (self._subject(partition, id),)
        return ReadPlan(subjects=subjects, partitions=(partition.number,), follow=True)

    async def groups(self, plan: ReadPlan) -> AsyncIterator[tuple[Partition, list[AppendMessage]]]:
        """The appends of a plan in groups, each group of one partition."""
        messages = read_messages(self._jetstream, self._topic.partitions, plan)
        try:
            async for partition, group in messages:
                yield partition, await self._opened(partition, group)
        finally:
            await messages.aclose()

    async def _opened(
        self, partition: Partition, messages: list[RawMessage]
    ) -> list[AppendMessage]:
        opened = (open_append(partition, raw) for raw in messages)
        appends = [append for append in opened if append is not None]
        await self._learn(appends)
        return appends

    def subjects(self, pattern: str) -> tuple[str, ...]:
        """The subjects of a pattern of ids, in every partition."""
        tokens = pattern_of(pattern)
        return tuple(f"{p.prefix or p.topic}.{tokens}" for p in self._topic.partitions)

    async def _is_single(self, stream: str, start: int) -> bool:
        """Whether a stream has one copy, which cannot lag; DataLoss when it has lost events."""
        reconnects = self._jetstream.connection.reconnects
        known = self._looked.get(stream)
        if known is None or known[0] != reconnects:
            config = (await self._jetstream.stream_info(stream)).config
            known = self._looked[stream] = reconnects, config
        check(known[1], start)
        return int(known[1].get("num_replicas", 1)) == 1
