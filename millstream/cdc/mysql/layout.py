"""Tables as the log describes them, and rows of the log by column. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millstream import errors
from millstream.cdc.model import Column, RowChanges, TableShape
from millstream.cdc.mysql.types import ColumnKind, arrays_of, logged_kind
from millstream.cdc.settings import CaptureSettings
from millstream.events import changes as ch
from millstream.schemas import types as t

__all__ = ["Placed", "Row", "TableLayout", "changes_of", "layout_of", "signature_of", "struct_of"]

_NUMBER: Final = pa.uint64()
_TIME: Final = pa.timestamp("us", "UTC")
Values = list[Any]
_EMPTY_SET: Final = "empty set"
_NOT_SENT: Final = ("cols bitmap", "same with before values")


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A captured table in one of its shapes."""

    shape: TableShape
    kinds: tuple[ColumnKind, ...]

    def values(self, row: dict[str, Any], why_null: dict[str, str]) -> Values:
        """The values of a row of the log, in the order of the shape's columns."""
        found = [row[column.name] for column in self.shape.columns]
        if why_null:
            for i, column in enumerate(self.shape.columns):
                why = why_null.get(column.name)
                if why == _EMPTY_SET:
                    found[i] = ""
                elif why in _NOT_SENT:
                    raise errors.LogUnreadable(
                        f"table {self.shape.full_name}: the log has rows without column "
                        f"'{column.name}'. A session has set binlog_row_image to another value "
                        f"than FULL, or the column is generated: then leave it out with exclude"
                    )
        return found

    def moved(self, before: Values, after: Values) -> bool:
        """Whether an update changed the key."""
        names = [column.name for column in self.shape.columns]
        return any(before[i] != after[i] for i in (names.index(name) for name in self.shape.key))


@dataclass(frozen=True, slots=True)
class Row:
    """One change of the log, of a table in a layout; a truncation has neither row."""

    layout: int  # its number among those that were seen
    op: str
    before: Values | None
    after: Values | None


def signature_of(columns: Sequence[Any]) -> tuple[Any, ...]:
    """What tells two shapes of a table in the log apart."""
    return tuple(
        (
            *(column.name, column.type, column.unsigned, column.character_set_name),
            *(column.is_primary, tuple(column.enum_values or ()), tuple(column.set_values or ())),
            *(getattr(column, name, None) for name in ("precision", "decimals", "bits")),
            getattr(column, "max_length", None),
        )
        for column in columns
    )


def layout_of(columns: Sequence[Any], now: TableShape, settings: CaptureSettings) -> TableLayout:
    """How a table is captured whose columns the log describes so; `now` is how it is today."""
    full = now.full_name
    own = settings.settings_of(full)
    if any(not column.name for column in columns):
        raise errors.SourceLost(
            settings.name,
            f"the log has changes of table {full} without the names of its columns: "
            f"binlog_row_metadata was not FULL when they were made",
        )
    key = _key(columns, now, own.key)
    today = {column.name: column for column in now.columns}
    found, kinds = [], []
    for column in columns:
        name = column.name
        left_out = name in own.exclude or (own.columns and name not in own.columns)
        if left_out and name not in key:
            continue
        kind = logged_kind(column)
        if kind is None:
            raise errors.BreakingChange(
                full, name, "it has a type that cannot be captured", f'exclude = ["{name}"]'
            )
        as_text = name in own.text and name not in key
        type_ = t.String() if as_text else kind.type_in(name)
        known = today.get(name)
        same = known is not None and known.type == type_
        found.append(known if known is not None and same else Column(name, type_, kind.name))
        kinds.append(kind)
    return TableLayout(TableShape(now.namespace, now.name, tuple(found), key), tuple(kinds))


def _key(columns: Sequence[Any], now: TableShape, chosen: Sequence[str]) -> tuple[str, ...]:
    names = {column.name for column in columns}
    primary = tuple(column.name for column in columns if column.is_primary)
    if set(now.key) <= names and (chosen or not primary or set(primary) == set(now.key)):
        return now.key
    if not primary:
        raise errors.BreakingChange(now.full_name, now.key[0], "the key of the table has changed")
    return primary


# -- Arrow --------------------------------------------------------------------------------


@dataclass(slots=True)
class Placed:
    """Rows of one layout with their positions."""

    rows: list[Row]
    commit: list[int]
    number: list[int]
    total: list[int]
    transaction: list[str]
    time: list[int]  # seconds since 1970


def changes_of(layout: TableLayout, placed: Placed) -> RowChanges:
    """Rows of one layout as changes; a key change is two."""
    op: list[str] = []
    before: list[Values | None] = []
    after: list[Values | None] = []
    place: list[int] = []
    source: list[int] = []  # which of the rows it is
    for i, row in enumerate(placed.rows):
        last = 2 * placed.number[i]
        if row.before is not None and row.after is not None and layout.moved(row.before, row.after):
            op += [ch.DELETE, ch.CREATE]
            before += [row.before, None]
            after += [None, row.after]
            place += [last - 1, last]
            source += [i, i]
        else:
            op.append(row.op)
            before.append(row.before)
            after.append(row.after)
            place.append(last)
            source.append(i)
    seconds = pa.array([placed.time[i] * 1_000_000 for i in source], pa.int64())
    return RowChanges(
        layout.shape,
        op=pa.array(op, pa.string()),
        after=struct_of(layout, after),
        commit=pa.array([placed.commit[i] for i in source], _NUMBER),
        place=pa.array(place, _NUMBER),
        time=seconds.cast(_TIME),
        before=struct_of(layout, before),
        transaction=pa.array([placed.transaction[i] for i in source], pa.string()),
        number=pa.array([placed.number[i] for i in source], pa.int64()),
        total=pa.array([placed.total[i] for i in source], pa.int64()),
    )


def struct_of(layout: TableLayout, rows: Sequence[Sequence[Any] | None]) -> pa.StructArray:
    """Rows as a struct array; None stays null."""
    shape = layout.shape
    if all(row is None for row in rows):
        return pa.nulls(len(rows), shape.row_type)
    width = len(shape.columns)
    columns = [[None if row is None else row[i] for row in rows] for i in range(width)]
    arrays = arrays_of(
        [column.type for column in shape.columns],
        layout.kinds,
        [f"{shape.full_name}.{column.name}" for column in shape.columns],
        columns,
    )
    mask = pa.array([row is None for row in rows], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=list(shape.row_type), mask=mask)
