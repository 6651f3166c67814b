"""Rows and changes of SQLite as Arrow. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from millstream import errors
from millstream.cdc.model import RowChanges, TableShape
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.sqlite.catalog import shape_of
from millstream.cdc.sqlite.log import LoggedChange
from millstream.cdc.sqlite.triggers import Definition, read_row
from millstream.cdc.sqlite.types import Value, array_of
from millstream.events import changes as ch
from millstream.schemas import types as t

__all__ = ["batch_of", "changes_of", "commit_of", "is_after", "key_of", "key_value"]

_TIME = pa.timestamp("us", "UTC")
_NUMBER = pa.uint64()


def commit_of(number: int) -> int:
    """The commit position of a change, by its number.

    Every second position: the rows of a snapshot have the one between two changes.
    """
    return 2 * number


def _columns(
    shape: TableShape, settings: CaptureSettings, columns: Sequence[Sequence[Value]]
) -> list[pa.Array]:
    own = settings.settings_of(shape.full_name)
    return [
        array_of(
            column.type,
            column.source_type,
            values,
            name=f"{shape.full_name}.{column.name}",
            as_text=column.name in own.text,
            key=column.name in shape.key,
        )
        for column, values in zip(shape.columns, columns, strict=True)
    ]


def batch_of(
    shape: TableShape, settings: CaptureSettings, rows: Sequence[Sequence[Value]]
) -> pa.RecordBatch:
    """Rows of a snapshot, whose values are in the order of the shape's columns."""
    arrays = _columns(shape, settings, list(zip(*rows, strict=True)))
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in shape.columns])


def key_of(shape: TableShape, row: Sequence[Value]) -> list[str]:
    """The key of a row as texts."""
    names = [column.name for column in shape.columns]
    found = [row[names.index(name)] for name in shape.key]
    _check_key(shape, found)
    return [value.hex() if isinstance(value, bytes) else str(value) for value in found]


def key_value(type_: t.Type, text: str) -> Value:
    """The value that `key_of` has written."""
    match type_:
        case t.Int():
            return int(text)
        case t.Binary():
            return bytes.fromhex(text)
        case _:
            return text


def _check_key(shape: TableShape, key: Iterable[Value]) -> None:
    if any(value is None for value in key):
        raise errors.Unfit(
            f"{shape.full_name}.{shape.key[0]}",
            "a key",
            "a row whose key is null, which SQLite allows. Correct the row, and declare the "
            "column NOT NULL",
        )


def is_after(table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
    """Which keys are after `edge`, in the order in which snapshots read rows."""
    types = {column.name: column.type for column in table.columns}
    after = pa.repeat(pa.scalar(False), keys.num_rows)
    for name, text in reversed(list(zip(table.key, edge, strict=True))):
        column = keys.column(name)
        value = pa.scalar(key_value(types[name], text), column.type)
        same = pc.and_(pc.equal(column, value), after)
        after = pc.or_(pc.greater(column, value), same)
    return after


# -- changes ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Collected:
    """Changes of one shape, row by row."""

    shape: TableShape
    places: list[int]  # of the shape's columns in a recorded row
    keys: list[int]
    op: list[str] = field(default_factory=list)
    before: list[list[Value] | None] = field(default_factory=list)
    after: list[list[Value] | None] = field(default_factory=list)
    seq: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    time: list[int] = field(default_factory=list)

    def add(self, entry: LoggedChange) -> None:
        old = None if entry.old is None else read_row(entry.old)
        new = None if entry.new is None else read_row(entry.new)
        for row in (old, new):
            if row is not None:
                _check_key(self.shape, (row[i] for i in self.keys))
        moved = (
            old is not None
            and new is not None
            and any(old[i] != new[i] or type(old[i]) is not type(new[i]) for i in self.keys)
        )
        if moved:
            self._append(entry, ch.DELETE, old, None, 1)
            self._append(entry, ch.CREATE, None, new, 2)
        else:
            self._append(entry, entry.op, old, new, 1)

    def _append(
        self,
        entry: LoggedChange,
        op: str,
        old: list[Value] | None,
        new: list[Value] | None,
        place: int,
    ) -> None:
        self.op.append(op)
        self.before.append(old)
        self.after.append(new)
        self.seq.append(entry.seq)
        self.place.append(place)
        self.time.append(entry.time)

    def finished(self, settings: CaptureSettings) -> RowChanges:
        count = len(self.op)
        ones = pa.repeat(pa.scalar(1, pa.int64()), count)
        return RowChanges(
            self.shape,
            op=pa.array(self.op, pa.string()),
            after=self._rows(self.after, settings),
            commit=pa.array([commit_of(seq) for seq in self.seq], _NUMBER),
            place=pa.array(self.place, _NUMBER),
            time=pa.array([time * 1000 for time in self.time], pa.int64()).cast(_TIME),
            before=self._rows(self.before, settings),
            transaction=pa.array([str(seq) for seq in self.seq], pa.string()),
            number=ones,
            total=ones,
        )

    def _rows(
        self, rows: Sequence[Sequence[Value] | None], settings: CaptureSettings
    ) -> pa.StructArray:
        columns = [[None if row is None else row[i] for row in rows] for i in self.places]
        return pa.StructArray.from_arrays(
            _columns(self.shape, settings, columns),
            fields=list(self.shape.row_type),
            mask=pa.array([row is None for row in rows], pa.bool_()),
        )


def changes_of(
    entries: Iterable[LoggedChange],
    definition: Callable[[int], tuple[Definition, bool]],
    settings: CaptureSettings,
) -> list[RowChanges]:
    """Entries of the log as changes, those of one shape together; `definition` tells the shapes."""
    found: dict[int, _Collected] = {}
    for entry in entries:
        collected = found.get(entry.shape)
        if collected is None:
            recorded, captured = definition(entry.shape)
            if not captured:
                continue
            shape = shape_of(recorded, settings.settings_of(recorded.table))
            names = [name for name, _ in recorded.columns]
            places = [names.index(column.name) for column in shape.columns]
            keys = [names.index(name) for name in shape.key]
            collected = found[entry.shape] = _Collected(shape, places, keys)
        collected.add(entry)
    return [collected.finished(settings) for collected in found.values()]
