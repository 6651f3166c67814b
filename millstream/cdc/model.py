"""What every source of changes hands over: tables, rows and changes by column. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = ["CaptureLag", "Column", "Finding", "Received", "RowChanges", "TableShape"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a captured table, and its type in the topic."""

    name: str
    type: t.Type  # never Nullable: every field of a row is
    source_type: str = ""  # as the database writes it, for messages: "numeric(10,2)"
    # What the database knows the column by when it is renamed (PostgreSQL: attnum); 0: nothing.
    identity: int = 0


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table as it is captured: its columns in order, without those left out, and its key."""

    namespace: str  # schema or database; "" where there is none
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    estimate: int | None = field(default=None, compare=False)  # of its rows; None: not known
    # What the database knows it by: another one means that it was made again. 0: nothing.
    identity: int = field(default=0, compare=False)

    @property
    def full_name(self) -> str:
        """Such as "public.orders"."""
        return f"{self.namespace}.{self.name}" if self.namespace else self.name

    @property
    def row_type(self) -> pa.StructType:
        """The Arrow type of a row: a nullable field for each column."""
        return pa.struct([pa.field(c.name, arrow_type(c.type)) for c in self.columns])


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of one table, in one shape, in the order of their positions, by column.

    Arrays have one item for each change. `commit` and the array after it are the position of a
    change: unique in the source, and growing. A key change is two changes (the deletion of the old
    key, and the new row) that share `number`.
    """

    table: TableShape
    op: pa.Array  # string: events.changes.OPS
    after: pa.StructArray  # of table.row_type; null for deletions
    commit: pa.Array  # uint64
    place: pa.Array  # uint64, from 1: grows within a commit
    time: pa.Array  # timestamp[us, UTC]
    before: pa.StructArray | None = None  # of table.row_type; for a deletion at least its key
    unchanged: pa.ListArray | None = None  # list<string>
    transaction: pa.Array | None = None  # string
    number: pa.Array | None = None  # int64
    total: pa.Array | None = None  # int64

    def __len__(self) -> int:
        return len(self.op)

    def filter(self, wanted: pa.Array) -> RowChanges:
        """Those for which a boolean array is true."""

        def part(array: Any) -> Any:
            return None if array is None else array.filter(wanted)

        return RowChanges(
            self.table,
            *(part(a) for a in (self.op, self.after, self.commit, self.place, self.time)),
            *(part(a) for a in (self.before, self.unchanged)),
            *(part(a) for a in (self.transaction, self.number, self.total)),
        )


@dataclass(frozen=True, slots=True)
class Received:
    """What a source has handed over: changes, and how far it is with them.

    Once these and all earlier ones are stored, `Source.confirm(upto)` may be called.
    """

    changes: Sequence[RowChanges]
    upto: int  # every commit at or before this position has been handed over completely
    idle: bool = False  # nothing more is waiting: a good moment to store what there is


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `cdc check`: what was looked at, whether it is all right, and what to do."""

    subject: str  # "wal_level", "table public.orders"
    ok: bool
    text: str
    fix: str = ""  # a statement or a setting
    fatal: bool = True  # when not ok: a capture must not start; else it is a warning


@dataclass(frozen=True, slots=True)
class CaptureLag:
    """How far a capture is behind its source."""

    bytes: int | None = None  # of the source's log that is not confirmed
    seconds: float | None = None  # since the last commit that was received, if any is waiting
    kept_bytes: int | None = None  # of log that the source keeps for this capture
    budget_bytes: int | None = None  # that it may keep
    details: dict[str, Any] = field(default_factory=dict)  # the source's own words
