"""A topic read by position, with every message accounted for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.cdc.sink.fold import Format, format_of
from millstream.cdc.sink.topic_positions import LogState, TopicPosition, TopicPositions
from millstream.errors import ConfigError, DataLoss
from millstream.events import changes as ch
from millstream.events.event import SCHEMA_HEADER, Partition, PlainEvent
from millstream.events.fence import POSITION_HEADER, WRITER_HEADER, read_state
from millstream.events.positions import Position
from millstream.events.undecodable import OnUndecodable
from millstream.messaging.reading.batches import batches_of_messages
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.messaging.topic import Topic
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.registry.binding import TypedValues
from millstream.wire.message import RawMessage, stored_ns_of

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["Chunk", "TopicLog"]

CHUNK_BYTES: Final = 4 * 1024 * 1024  # of payloads that are decoded together
_POSITION_MARK: Final = f"\r\n{POSITION_HEADER}: ".encode()
_SCHEMA_MARK: Final = f"\r\n{SCHEMA_HEADER}: ".encode()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Events of one partition that follow each other."""

    partition: int
    events: Sequence[pa.RecordBatch]  # none: the messages were not events
    reached: TopicPosition  # after them
    version: int  # of the schema that they are read with
    written: Position | None = None  # of the writer that is watched: what is stored up to here
    rows: int = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", sum(batch.num_rows for batch in self.events))
        object.__setattr__(self, "bytes", sum(batch.nbytes for batch in self.events))


class TopicLog:
    """The events of a topic as rows of its newest schema version, from a position on."""

    def __init__(
        self,
        mill: Mill,
        name: str,
        fail_on_data_loss: bool = True,
        undecodable: OnUndecodable = "fail",
        writer: str | None = None,
    ) -> None:
        self._mill, self.name = mill, name
        self._strict = fail_on_data_loss
        # The end of this line in a header block: a position of the writer is beside it.
        self._writer = None if writer is None else f"\r\n{WRITER_HEADER}: {writer}\r\n".encode()
        plan = ReadPlan(fail_on_data_loss=fail_on_data_loss, undecodable=undecodable)
        self._plan, self._report = plan, plan.report()
        self._topic: Topic | None = None
        self._ids: set[bytes] = set()  # of schema versions that are known
        self.version = 0
        self.row = t.Record(name="none", fields=(t.Field("none", t.Bool()),))
        self.format: Format = "rows"

    async def open(self) -> None:
        """Look the topic up; also to read with a newer version of its schema from now on."""
        topic = await self._mill.topic(self.name)
        values = topic.value_type
        if not isinstance(values, TypedValues):
            raise ConfigError(
                f"topic '{self.name}' has no schema, so its events are not rows of a table. "
                f"Create it with one: create_topic({self.name!r}, schema=...)"
            )
        record = values.reader_schema.record
        self.format = format_of(arrow_type(record))
        if self.format == "changes":
            after = next(f.type for f in record.fields if f.name == ch.AFTER)
            row, _ = t.strip(after)
            if not isinstance(row, t.Record):
                raise ConfigError(f"topic '{self.name}': field '{ch.AFTER}' is not a record")
            record = row
        version = values.version.version
        known = await self._mill.schemas.topic(self.name)
        # One that was registered since is not known: its events have fields that `row` has not.
        self._ids = {str(one.id).encode() for one in known.versions if one.version <= version}
        self._topic, self.row, self.version = topic, record, version

    @property
    def topic(self) -> Topic:
        """The topic, once it is open."""
        if self._topic is None:
            raise ConfigError("open the log first")
        return self._topic

    @property
    def _has_gaps(self) -> bool:
        """Whether offsets vanish by design: a table keeps the last events of each key."""
        settings = self.topic.settings
        return settings.history is not None or settings.retention != "limits"

    async def states(self) -> dict[int, LogState]:
        """The partitions as they are now."""
        handle = self.topic.handle
        found = {}
        for partition in handle.partitions:
            info = await handle.jetstream.stream_info(partition.stream)
            state = info.state
            first = max(state.first_seq, 1) if state.messages else state.last_seq + 1
            found[partition.number] = LogState(info.created, first, state.last_seq + 1)
        return found

    # -- what was lost --------------------------------------------------------------------

    def _loss(self, partition: int, what: str) -> DataLoss:
        return DataLoss(
            f"'{self.name}/{partition}' {what}. The table lacks what was not applied. To begin "
            f"again, empty the table and apply under another name; to go on with what is left, "
            f"set fail_on_data_loss to False"
        )

    async def check(
        self, partition: int, position: TopicPosition, log: str, state: LogState
    ) -> TopicPosition:
        """The position to go on from; DataLoss if the log is not the one that was applied."""
        if log != state.created:
            if self._strict:
                raise self._loss(
                    partition,
                    f"was deleted and created again at {state.created} (what was applied is of the "
                    f"log created at {log})",
                )
            return TopicPosition()
        if position.offset > state.next:
            if self._strict:
                raise self._loss(
                    partition,
                    f"ends at offset {state.next - 1}, but {position.offset - 1} was applied "
                    f"before: the log lost messages at its end",
                )
            return TopicPosition(state.next)
        if position.last_time and state.first < position.offset and self._strict:
            stream = self._partition(partition).stream
            query = {"seq": position.offset - 1}
            found = await self.topic.handle.jetstream.get_message(stream, query)
            if found is not None and stored_ns_of(found.time) != position.last_time:
                raise self._loss(
                    partition,
                    f"has a different message at offset {position.offset - 1} than the one applied "
                    f"before: the log lost messages and used their offsets again",
                )
        if position.offset < state.first:
            await self._check_gap(partition, position.offset, state.first)
        return position

    async def _check_gap(self, partition: int, first: int, end: int) -> None:
        """DataLoss if the offsets [first, end) were to be read, unless that was accepted."""
        if self._has_gaps or not self._strict:
            return
        info = await self.topic.info()
        for lost in info.partitions[partition].lost:
            if lost.accepted is not None and lost.first <= first and end <= lost.last + 1:
                return
        raise self._loss(
            partition, f"lost the offsets {first} to {end - 1} before they were applied"
        )

    def _partition(self, number: int) -> Partition:
        return next(p for p in self.topic.handle.partitions if p.number == number)

    # -- reading --------------------------------------------------------------------------

    async def chunks(self, starts: TopicPositions, follow: bool) -> AsyncGenerator[Chunk, None]:
        """The events from such positions on; without `follow` up to the end as it is now.

        When a message is of a newer version of the schema, the chunks from it on are read with
        that version.
        """
        reached = dict(starts)
        while True:
            handle, version = self.topic.handle, self.version
            offsets = {p.stream: reached[p.number].offset for p in handle.partitions}
            plan = replace(self._plan, follow=follow)
            found = read_messages(handle.jetstream, handle.partitions, plan, starts=offsets)
            async with aclosing(found) as groups:
                async for partition, messages in groups:
                    for run, unknown in self._runs(messages):
                        if run:
                            yield await self._decoded(partition, run, reached)
                        if unknown:
                            await self.open()
                            self._ids.add(unknown)  # asked for once, also if it is of no version
                            if self.version != version:
                                break
                    if self.version != version:
                        break
            if self.version == version:
                return

    def _runs(
        self, messages: Sequence[RawMessage]
    ) -> Iterator[tuple[Sequence[RawMessage], bytes | None]]:
        """The messages in parts of a bounded size, and the schema that follows if it is unknown."""
        start, size = 0, 0
        for number, raw in enumerate(messages):
            at = raw.headers.find(_SCHEMA_MARK)
            if at >= 0:
                at += len(_SCHEMA_MARK)
                name = raw.headers[at : raw.headers.find(b"\r\n", at)]
                if name not in self._ids:
                    yield messages[start:number], name
                    start, size = number, 0
            size += len(raw.payload)
            if size >= CHUNK_BYTES:
                yield messages[start : number + 1], None
                start, size = number + 1, 0
        if start < len(messages):
            yield messages[start:], None

    async def _decoded(
        self,
        partition: Partition,
        messages: Sequence[RawMessage],
        reached: dict[int, TopicPosition],
    ) -> Chunk:
        number = partition.number
        position = reached[number]
        for raw in messages:
            address = PlainEvent(partition, raw).address
            if address.sequence > position.offset:
                await self._check_gap(number, position.offset, address.sequence)
            position = TopicPosition(address.sequence + 1, 0, address.timestamp_ns)
        values = self.topic.handle.value_type
        events = list(batches_of_messages(partition, messages, values, self._report))
        reached[number] = position
        return Chunk(
            number, events, position, self.version, self._written(position.offset, messages)
        )

    def _written(self, offset: int, messages: Sequence[RawMessage]) -> Position | None:
        if self._writer is None:
            return None
        for raw in reversed(messages):
            block = raw.headers
            if block.find(self._writer) >= 0 and block.find(_POSITION_MARK) >= 0:
                return read_state(offset, block).place
        return None
