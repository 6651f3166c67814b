"""Topics of changes, made by hand: what a capture would have written.

source = await ChangeTopic.create(mill, "orders", columns)
await source.write([insert({"id": 1}), update({"id": 1}, unchanged=["note"])])
assert source.rows == {...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from millstream import Mill
from millstream.cdc.change_values import FRAME_COLUMNS, frame_of, record_of
from millstream.cdc.model import Column, RowChanges, TableShape
from millstream.cdc.settings import Format
from millstream.events import changes as ch
from millstream.events.packs.packing import Packing
from millstream.messaging.publishing.writer import Writer

__all__ = ["Change", "ChangeTopic", "delete", "insert", "truncate", "update"]

Row = Mapping[str, Any]
TIME = datetime(2026, 11, 17, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Change:
    """One change; of a deletion `row` has the key."""

    op: str
    row: Row | None
    unchanged: Sequence[str] = ()


def insert(row: Row) -> Change:
    return Change(ch.CREATE, row)


def update(row: Row, unchanged: Sequence[str] = ()) -> Change:
    return Change(ch.UPDATE, row, unchanged)


def delete(key: Row) -> Change:
    return Change(ch.DELETE, key)


def truncate() -> Change:
    return Change(ch.TRUNCATE, None)


@dataclass
class ChangeTopic:
    """The topic of one table, its writer, and the rows that the table would have."""

    mill: Mill
    name: str
    shape: TableShape
    format: Format = "changes"
    capture: str = "test"
    commit: int = 0
    rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    _writer: Writer | None = None

    @classmethod
    async def create(
        cls,
        mill: Mill,
        name: str,
        columns: Sequence[Column],
        key: Sequence[str] = ("id",),
        format: Format = "changes",
    ) -> ChangeTopic:
        made = cls(mill, name, TableShape("public", name, tuple(columns), tuple(key)), format)
        await mill.create_topic(name, schema=record_of(columns, name, format))
        await made.open()
        return made

    async def open(self) -> None:
        topic = await self.mill.topic(self.name)
        packs = Packing(max_events=1000, linger=10.0)
        self._writer = topic.writer(f"cdc-{self.capture}", packs)
        await self._writer.open()

    @property
    def writer(self) -> Writer:
        assert self._writer is not None
        return self._writer

    async def close(self) -> None:
        await self.writer.close()

    async def grow(self, *columns: Column) -> None:
        """The table gets more columns: the next version of the schema."""
        shape = self.shape
        both = (*shape.columns, *columns)
        self.shape = TableShape(shape.namespace, shape.name, both, shape.key)
        await self.writer.flush()
        await self.mill.schemas.register(self.name, record_of(both, self.name, self.format))
        await self.writer.close()
        await self.open()

    async def write(
        self,
        changes: Sequence[Change],
        commit: int | None = None,
        first: int = 1,
        total: int | None = None,
    ) -> int:
        """Store the changes of one transaction, from number `first` on; returns its commit."""
        self.commit = self.commit + 1 if commit is None else commit
        for change in changes:
            self._fold(change)
        count = len(changes)
        numbers = list(range(first, first + count))
        kind = self.shape.row_type
        gone = [one.op == ch.DELETE for one in changes]
        frame = RowChanges(
            self.shape,
            op=pa.array([one.op for one in changes]),
            after=pa.array(
                [None if g else c.row for c, g in zip(changes, gone, strict=True)], kind
            ),
            commit=pa.array([self.commit] * count, pa.uint64()),
            place=pa.array(numbers, pa.uint64()),
            time=pa.array([TIME] * count, pa.timestamp("us", "UTC")),
            before=pa.array(
                [c.row if g else None for c, g in zip(changes, gone, strict=True)], kind
            ),
            unchanged=pa.array([list(one.unchanged) or None for one in changes], _NAMES),
            transaction=pa.array([f"tx{self.commit}"] * count),
            number=pa.array(numbers, pa.int64()),
            total=pa.array([first + count - 1 if total is None else total] * count, pa.int64()),
        )
        await self.writer.write_batch(
            frame_of(frame, self.format),
            positions=(frame.commit, frame.place),
            columns=FRAME_COLUMNS[self.format],
        )
        await self.writer.flush()
        return self.commit

    def _fold(self, change: Change) -> None:
        if change.op == ch.TRUNCATE or change.row is None:
            self.rows.clear()
            return
        key = tuple(change.row[name] for name in self.shape.key)
        if change.op == ch.DELETE:
            self.rows.pop(key, None)
            return
        row = {column.name: change.row.get(column.name) for column in self.shape.columns}
        if change.unchanged:
            row.update({name: self.rows[key][name] for name in change.unchanged})
        self.rows[key] = row


_NAMES = pa.list_(pa.string())
