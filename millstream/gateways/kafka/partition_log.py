"""One partition of a topic as Kafka's clients see it: append, read, look up offsets by time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.errors import MillstreamError
from millstream.gateways.kafka.batch_cache import BatchCache, Piece
from millstream.gateways.kafka.checkpoints import Checkpoints
from millstream.gateways.kafka.offset_index import NO_EVENTS, UNKNOWN
from millstream.gateways.kafka.partition_offsets import PartitionOffsets
from millstream.gateways.kafka.partition_reader import OutOfRange, PartitionReader
from millstream.gateways.kafka.partition_writer import Appended, PartitionWriter
from millstream.gateways.kafka.partitioners import partitioner_after
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import BadBatch, RawBatch, Records
from millstream.gateways.overload import Books
from millstream.messaging.topic import Topic
from millstream.wire.aio.publisher import StreamPublisher

if TYPE_CHECKING:
    from millstream.gateways.values import TopicValues

__all__ = ["Appended", "OutOfRange", "PartitionLog"]

RecordPartitioner = Callable[[str], Awaitable[None]]
_TIME_MAX: Final = 2**62


class PartitionLog:
    """An open partition. When it has failed, it has to be opened again: see `failed`."""

    def __init__(
        self,
        topic: Topic,
        number: int,
        checkpoints: Checkpoints,
        values: TopicValues | None,
        cache: BatchCache,
        books: Books,
        *,
        record_partitioner: RecordPartitioner,
        publisher: StreamPublisher | None = None,
    ) -> None:
        """`publisher`: what packs are published by, if not by that of the topic."""
        handle = topic.handle
        partition = handle.partitions[number]
        prefix = handle.shape.prefixes[number]
        self._jetstream = handle.jetstream
        self._cache = cache
        self.topic = topic
        self.number = number
        self.offsets = PartitionOffsets(
            handle.jetstream, partition.stream, prefix, checkpoints.of(partition.stream)
        )
        self._reader = PartitionReader(
            handle.jetstream, partition, self.offsets, values, cache, books
        )
        self._writer: PartitionWriter | None = None  # made when it is first written to
        self._values, self._books = values, books
        self._publisher = publisher
        self._partitioner = topic.settings.partitioner
        self._record_partitioner = record_partitioner
        self._recording: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Learn which offsets there are."""
        await self.offsets.open()

    async def close(self) -> None:
        """Store what was taken, and a checkpoint."""
        try:
            if self._writer is not None:
                await self._writer.close()
            if self._recording is not None:
                await asyncio.wait([self._recording])
        finally:
            await self.offsets.close()
            self._cache.forget(self.offsets.stream)

    @property
    def failed(self) -> bool:
        """Whether it has to be opened again."""
        return self.offsets.failed is not None

    @property
    def start_offset(self) -> int:
        """The first offset."""
        return self.offsets.start_offset

    @property
    def end_offset(self) -> int:
        """The offset of the next event."""
        return self.offsets.end_offset

    @property
    def leader_epoch(self) -> int:
        """Raised when the broker lost what was stored."""
        return self.offsets.leader_epoch

    def watch(self, callback: Callable[[], object]) -> None:
        """Call it when there is something new."""
        self.offsets.watch(callback)

    def unwatch(self, callback: Callable[[], object]) -> None:
        """Do not call it any more."""
        self.offsets.unwatch(callback)

    async def look_at_head(self, max_age: float = 0) -> None:
        """Learn where the log begins now, or did so many seconds ago."""
        await self.offsets.look_at_head(max_age)

    # -- writing --------------------------------------------------------------------------

    async def append(
        self, batch: RawBatch, oldest_ms: int = -_TIME_MAX, newest_ms: int = _TIME_MAX
    ) -> asyncio.Future[Appended]:
        """Take a batch to be stored; the future says where it is then.

        BadBatch if its records, or any, cannot be stored, also when one is older or newer than
        these times.
        """
        if self._writer is None:
            try:
                target = self.topic.fenced_target()
                if self._publisher is not None:
                    target = replace(target, publisher=self._publisher)
            except MillstreamError as error:
                raise BadBatch(ErrorCode.policy_violation, str(error)) from error
            self._writer = PartitionWriter(
                target, self.number, self.offsets, self._values, self._cache, self._books
            )

        def look_at(records: Records) -> None:
            _check_times(records.times, oldest_ms, newest_ms)
            if "key" in records.columns.schema.names:
                self._look_at_keys(records.columns.column("key"))

        return await self._writer.append(batch, look_at)

    def _look_at_keys(self, keys: pa.Array) -> None:
        found = partitioner_after(self._partitioner, keys, self.number, self.topic.partitions)
        if found is not None and found != self._partitioner:
            self._partitioner = found
            loop = asyncio.get_running_loop()
            self._recording = loop.create_task(self._record(found, self._recording))

    async def _record(self, found: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._record_partitioner(found)

    async def partitioner_recorded(self) -> None:
        """Return when readers by key know in which partitions to look."""
        if self._recording is not None:
            await asyncio.wait([self._recording])
            if self._recording.done() and self._recording.exception() is not None:
                self._partitioner = self.topic.settings.partitioner  # the next batch tries again
                self._recording = None

    async def delete_before(self, offset: int) -> int:
        """Delete the events before an offset; where the log begins then."""
        offsets = self.offsets
        if not 0 <= offset <= offsets.end_offset:
            raise OutOfRange
        if offset > offsets.start_offset:
            sequence = offsets.index.sequence_of(offset)
            offsets.start_at(offset)
            await offsets.save()
            if sequence > 1:
                await self._jetstream.purge_stream(offsets.stream, {"seq": sequence})
            await offsets.look_at_head(0)
        return offsets.start_offset

    # -- reading --------------------------------------------------------------------------

    async def read(self, offset: int, max_bytes: int) -> list[Piece]:
        """Whole batches from an offset on, in pieces; OutOfRange if the log does not have it."""
        return await self._reader.read(offset, max_bytes)

    async def offset_at(self, time_ms: int) -> tuple[int, int] | None:
        """The first event with this time or a later one, and its time; None: there is none."""
        offsets = self.offsets
        await offsets.look_at_head(0)
        after = offsets.first_sequence
        while (unit := offsets.index.next_unit(time_ms, after)) is not None:
            start, stop, _ = unit
            latest, found = await self._look_for(start, stop, time_ms)
            if found is not None:
                return found
            offsets.index.set_time(start, stop, latest)
            after = stop
        return None

    async def max_time(self) -> tuple[int, int] | None:
        """The event with the largest time, and that time; None: there are no events."""
        offsets = self.offsets
        await offsets.look_at_head(0)
        first = offsets.first_sequence
        while (unit := offsets.index.latest_unit(first)) is not None:
            start, stop, is_known = unit
            latest, _ = await self._look_for(start, stop, UNKNOWN)
            if is_known:
                _, found = await self._look_for(start, stop, latest)
                if found is not None:
                    return found
            offsets.index.set_time(start, stop, latest)
        return None

    async def _look_for(
        self, start: int, stop: int, time_ms: int
    ) -> tuple[int, tuple[int, int] | None]:
        """The largest time of a unit, and the first event at or after a time."""
        latest = NO_EVENTS
        for raw in await self._reader.messages(start, stop):
            base, times = self._reader.times(raw)
            for row, time in enumerate(times):
                if base + row < self.offsets.start_offset:
                    continue
                if time >= time_ms:
                    return time, (base + row, time)
                latest = max(latest, time)
        return latest, None


def _check_times(span: tuple[int, int] | None, oldest_ms: int, newest_ms: int) -> None:
    if span is None or (oldest_ms <= span[0] and span[1] <= newest_ms):
        return
    wrong = span[0] if span[0] < oldest_ms else span[1]
    raise BadBatch(
        ErrorCode.invalid_timestamp,
        f"a record has the time {wrong} ms; this topic accepts {oldest_ms} to {newest_ms} "
        f"(message.timestamp.before.max.ms, message.timestamp.after.max.ms)",
    )
