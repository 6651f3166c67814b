"""Groups and their offsets, kept in a table.

A group has a key for its record, and keys for its offsets, each with those of up to `ROW_SIZE`
partitions. While keys of a group are written, what comes meanwhile is gathered for the next write.
Each write follows the one that this process knows of (compare-and-set): a process that was
overtaken by another cannot overwrite anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from millstream.errors import DataLoss, WrongSequence
from millstream.gateways.kafka.group_members import StoredGroup
from millstream.gateways.kafka.own_tables import own_table
from millstream.mill import Mill
from millstream.tables import Entry, Table

__all__ = [
    "GROUPS_TABLE",
    "Committed",
    "GroupTable",
    "GroupTakenOver",
    "KeptGroup",
    "TopicPartition",
]

_log = logging.getLogger("millstream.gateways.kafka")

GROUPS_TABLE: Final = "kafka-groups"
ROW_SIZE: Final = 128  # with the longest notes a row is smaller than a megabyte
_ROWS_READ: Final = 64  # that are asked for at once
_ATTEMPTS: Final = 5
_STALE_SECONDS: Final = 0.1  # a replica may answer with what was before a write

_Entry = tuple[int, int, int, str, int]  # partition, offset, leader epoch, note, time
_Row = list[tuple[str, bytes, list[_Entry]]]  # of a topic: name, id, entries

_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(StoredGroup).decode
_decode_row = msgspec.msgpack.Decoder(_Row).decode


class GroupTakenOver(Exception):
    """Another process has written the group since this one read it."""


class TopicPartition(NamedTuple):
    """A partition, by Kafka's names."""

    topic: str
    partition: int


class Committed(NamedTuple):
    """Where a group continues in a partition."""

    offset: int
    leader_epoch: int = -1
    note: str = ""
    time_ms: int = 0
    topic_id: bytes = b""  # a topic that was deleted and made again has another one


class _Key:
    """One key of the table."""

    def __init__(self, key: str, revision: int | None = None) -> None:
        self.key = key
        self._revision = revision  # None: it was never read
        self._tried: set[bytes | None] = set()  # values of which it is unknown if they are stored

    @property
    def is_stored(self) -> bool:
        """Whether it has a value, as far as is known."""
        return bool(self._revision) or bool(self._tried)

    async def put(self, table: Table, value: bytes | None) -> None:
        """Replace the value, or delete the key; GroupTakenOver: another process wrote it."""
        if self._revision is None or self._tried:
            await self._look(table)
        for attempt in range(_ATTEMPTS):
            self._tried.add(value)
            try:
                if value is None:
                    self._revision = await table.delete(self.key, revision=self._revision)
                else:
                    self._revision = await table.put(self.key, value, revision=self._revision)
            except WrongSequence:
                if attempt == _ATTEMPTS - 1:
                    raise
                known = self._revision
                await self._look(table)
                if self._revision == known:
                    await asyncio.sleep(_STALE_SECONDS)
                continue
            self._tried.clear()
            return

    async def _look(self, table: Table) -> None:
        """Learn the latest revision; GroupTakenOver if this process did not write it."""
        event = await table.topic.last(self.key)
        revision = 0 if event is None else event.offset
        if revision == self._revision:
            return
        value = None if event is None or event.value is None else bytes(event.value)
        if value not in self._tried and not (self._revision is None and value is None):
            raise GroupTakenOver(self.key)
        self._revision = revision


class _OffsetRow:
    """The offsets under one key."""

    def __init__(self, key: _Key, offsets: dict[TopicPartition, Committed]) -> None:
        self.key = key
        self.offsets = offsets

    async def write(
        self, table: Table, changes: Mapping[TopicPartition, Committed | None]
    ) -> dict[TopicPartition, Committed]:
        """Store it with the changes; returns what it then has."""
        after = {**self.offsets, **changes}
        offsets = {part: one for part, one in after.items() if one is not None}
        await self.key.put(table, _encode_offsets(offsets))
        self.offsets = offsets
        return offsets


@dataclass(slots=True)
class _Batch:
    """What is written together."""

    done: asyncio.Future[None]
    record: StoredGroup | None = None
    changes: dict[TopicPartition, Committed | None] = field(default_factory=dict)
    delete: bool = False


class KeptGroup:
    """The record and the offsets of one group, as they are stored."""

    def __init__(self, name: str, table: Callable[[], Table]) -> None:
        self.name = name
        self.record = StoredGroup()
        self.offsets: dict[TopicPartition, Committed] = {}
        self._table = table
        self._key = _Key(f"g/{name}")
        self._rows: list[_OffsetRow] = []
        self._row_of: dict[TopicPartition, _OffsetRow] = {}
        self._next: _Batch | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether anything of it is stored, or may be."""
        rows = any(row.key.is_stored for row in self._rows)
        return rows or self._key.is_stored or self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether something of it is being written."""
        return self._writer is not None

    # -- reading --------------------------------------------------------------------------

    def found_record(self, value: bytes, revision: int) -> None:
        """Its record was read."""
        try:
            self.record = _decode_record(value)
        except msgspec.DecodeError as error:
            raise _damaged(self._key.key, error) from error
        self._key = _Key(self._key.key, revision)

    def found_row(self, number: int, value: bytes, revision: int) -> None:
        """A row of its offsets was read."""
        self._grow(number + 1)
        key = self._rows[number].key.key
        try:
            offsets = _decode_offsets(value)
        except msgspec.DecodeError as error:
            raise _damaged(key, error) from error
        row = self._rows[number] = _OffsetRow(_Key(key, revision), offsets)
        self.offsets.update(offsets)
        self._row_of.update(dict.fromkeys(offsets, row))

    def _grow(self, count: int) -> None:
        for number in range(len(self._rows), count):
            self._rows.append(_OffsetRow(_Key(_row_key(self.name, number)), {}))

    # -- writing --------------------------------------------------------------------------

    def commit(self, changes: Mapping[TopicPartition, Committed | None]) -> Awaitable[None]:
        """Set offsets, or remove those that are None; to be awaited until that is stored."""
        batch = self._batch()
        batch.changes.update(changes)
        return asyncio.shield(batch.done)

    def put(self, record: StoredGroup) -> Awaitable[None]:
        """Replace the record; to be awaited until it, or a later one, is stored."""
        batch = self._batch()
        batch.record = record
        return asyncio.shield(batch.done)

    def delete(self) -> Awaitable[None]:
        """Remove all of it; to be awaited until nothing is stored."""
        batch = self._batch()
        batch.delete = True
        return asyncio.shield(batch.done)

    async def drain(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    def _batch(self) -> _Batch:
        """What is written next; it is not kept waiting longer than for the write before."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = _Batch(loop.create_future())
            # Those who wait may all have lost their connection.
            self._next.done.add_done_callback(lambda done: done.cancelled() or done.exception())
            if self._writer is None:
                self._writer = loop.create_task(self._write_all())
        return self._next

    async def _write_all(self) -> None:
        try:
            while self._next is not None:
                batch, self._next = self._next, None
                try:
                    await self._write(batch)
                except Exception as error:
                    batch.done.set_exception(error)
                else:
                    batch.done.set_result(None)
        finally:
            self._writer = None

    async def _write(self, batch: _Batch) -> None:
        table = self._table()
        writes = [
            self._write_row(table, row, changes) for row, changes in self._planned(batch.changes)
        ]
        if batch.record is not None:
            writes.append(self._write_record(table, batch.record))
        found = await asyncio.gather(*writes, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        if errors:
            raise next((one for one in errors if isinstance(one, GroupTakenOver)), errors[0])
        if batch.delete:
            await self._write_nothing(table)

    async def _write_record(self, table: Table, record: StoredGroup) -> None:
        await self._key.put(table, _encode(record))
        self.record = record

    async def _write_row(
        self, table: Table, row: _OffsetRow, changes: Mapping[TopicPartition, Committed | None]
    ) -> None:
        offsets = await row.write(table, changes)
        for part in changes:
            if part in offsets:
                self.offsets[part], self._row_of[part] = offsets[part], row
            else:
                self.offsets.pop(part, None)
                self._row_of.pop(part, None)

    async def _write_nothing(self, table: Table) -> None:
        for row in reversed(self._rows):
            if row.key.is_stored:
                await row.key.put(table, None)
        if self._key.is_stored:
            await self._key.put(table, None)
            self._key = _Key(self._key.key)
        self.record, self.offsets, self._rows, self._row_of = StoredGroup(), {}, [], {}

    def _planned(
        self, changes: Mapping[TopicPartition, Committed | None]
    ) -> list[tuple[_OffsetRow, dict[TopicPartition, Committed | None]]]:
        """The rows to write, each with its changes."""
        plan: dict[int, dict[TopicPartition, Committed | None]] = {}
        numbers = {id(row): number for number, row in enumerate(self._rows)}
        sizes = [len(row.offsets) for row in self._rows]
        room = 0  # rows before have none
        for part, change in changes.items():
            row = self._row_of.get(part)
            if row is not None:
                plan.setdefault(numbers[id(row)], {})[part] = change
            elif change is not None:
                while room < len(sizes) and sizes[room] >= ROW_SIZE:
                    room += 1
                if room == len(sizes):
                    sizes.append(0)
                sizes[room] += 1
                plan.setdefault(room, {})[part] = change
        self._grow(len(sizes))
        return [(self._rows[number], found) for number, found in plan.items()]


class GroupTable:
    """The table of all groups."""

    def __init__(self, mill: Mill, name: str = GROUPS_TABLE) -> None:
        self._mill = mill
        self._name = name
        self._opened: Table | None = None

    async def start(self) -> None:
        """Open the table; it is created the first time."""
        self._opened = await own_table(self._mill, self._name)

    def new(self, name: str) -> KeptGroup:
        """A group of which nothing is stored."""
        return KeptGroup(name, self._table)

    async def load_all(self) -> dict[str, KeptGroup]:
        """All groups, by name."""
        return await self._read(self._table().entries())

    async def load(self, name: str) -> KeptGroup:
        """One group as it is stored now."""
        kept = self.new(name)
        keys, first = [f"g/{name}"], 0
        while True:
            keys += [_row_key(name, number) for number in range(first, first + _ROWS_READ)]
            before = len(kept.offsets)
            await self._read(self._table().entries(keys), {name: kept})
            if len(kept.offsets) == before:
                return kept
            keys, first = [], first + _ROWS_READ

    def _table(self) -> Table:
        if self._opened is None:
            raise RuntimeError("start() the store first")
        return self._opened

    async def _read(
        self, entries: AsyncIterator[Entry], groups: dict[str, KeptGroup] | None = None
    ) -> dict[str, KeptGroup]:
        groups = {} if groups is None else groups
        async for entry in entries:
            kind, _, name = entry.key.partition("/")
            number = 0
            if kind == "o":
                text, _, name = name.partition("/")
                number = int(text) if text.isdecimal() else -1
            if kind not in ("g", "o") or number < 0:
                _log.warning("table '%s' has a key that is not ours: %r", self._name, entry.key)
                continue
            kept = groups.get(name) or groups.setdefault(name, self.new(name))
            if kind == "g":
                kept.found_record(bytes(entry.value), entry.revision)
            else:
                kept.found_row(number, bytes(entry.value), entry.revision)
        return groups


def _row_key(name: str, number: int) -> str:
    return f"o/{number}/{name}"


def _encode_offsets(offsets: Mapping[TopicPartition, Committed]) -> bytes:
    topics: dict[tuple[str, bytes], list[_Entry]] = {}
    for (topic, partition), one in offsets.items():
        entry = (partition, one.offset, one.leader_epoch, one.note, one.time_ms)
        topics.setdefault((topic, one.topic_id), []).append(entry)
    return _encode([(topic, number, entries) for (topic, number), entries in topics.items()])


def _decode_offsets(value: bytes) -> dict[TopicPartition, Committed]:
    return {
        TopicPartition(topic, partition): Committed(offset, epoch, note, time_ms, number)
        for topic, number, entries in _decode_row(value)
        for partition, offset, epoch, note, time_ms in entries
    }


def _damaged(key: str, error: Exception) -> DataLoss:
    return DataLoss(
        f"key {key!r} of table '{GROUPS_TABLE}' cannot be read: {error}. Restore the table from a "
        f"backup, or delete the key: the group then begins again without offsets"
    )
