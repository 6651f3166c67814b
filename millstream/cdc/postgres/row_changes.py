"""Runs of the replication stream as changes by column. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.model import RowChanges, TableShape
from millstream.cdc.postgres.collector import RowRun, Truncated
from millstream.cdc.postgres.pgoutput import (
    DELETE,
    INSERT,
    NO_TUPLE,
    Relation,
)
from millstream.cdc.postgres.row_texts import DecodedRows, Texts, decode_rows
from millstream.cdc.postgres.types import from_text
from millstream.errors import LogUnreadable
from millstream.events import changes as ch

__all__ = ["changes_of", "truncation_of"]

_TIME: Final = pa.timestamp("us", "UTC")
_OPS: Final = pa.array([ch.CREATE, ch.UPDATE, ch.DELETE])
_Columns = dict[str, pa.Array]


def truncation_of(one: Truncated, shape: TableShape) -> RowChanges:
    """A TRUNCATE as a change."""
    transaction = one.transaction
    return RowChanges(
        shape,
        op=pa.array([ch.TRUNCATE]),
        after=pa.nulls(1, shape.row_type),
        commit=pa.array([transaction.commit], pa.uint64()),
        place=pa.array([2 * one.number], pa.uint64()),
        time=pa.array([transaction.time], _TIME),
        transaction=pa.array([str(transaction.xid)]),
        number=pa.array([one.number], pa.int64()),
        total=pa.array([transaction.total], pa.int64()),
    )


def changes_of(run: RowRun, shape: TableShape) -> RowChanges:
    """The changes of a run, in the shape of its relation."""
    columns = _indexes(run.relation, shape)
    decoded = decode_rows(run.relation, run.payloads, columns.values())
    kind, old_kind = decoded.kind, decoded.old_kind
    new = _texts(decoded.new, columns)
    old = {} if decoded.old is None else _texts(decoded.old, columns)
    unchanged = _unchanged(decoded, columns, new, old)
    numbers = np.array(run.numbers, np.int64)
    made = RowChanges(
        shape,
        op=_OPS.take(pa.array(np.where(kind == INSERT, 0, np.where(kind == DELETE, 2, 1)))),
        after=_struct(shape, new, kind == DELETE),
        before=_struct(shape, old, old_kind == NO_TUPLE) if old else None,
        unchanged=unchanged,
        place=pa.array(2 * numbers, pa.uint64()),
        number=pa.array(numbers),
        **_of_transactions(run),
    )
    if not old:
        return made
    _check_keys(made, kind == DELETE, old)
    moved = _moved(shape, kind, new, old)
    return _split(made, moved, numbers) if moved.any() else made


def _indexes(relation: Relation, shape: TableShape) -> dict[str, int]:
    found = {column.name: index for index, column in enumerate(relation.columns)}
    return {column.name: found[column.name] for column in shape.columns}


def _texts(found: Sequence[Texts | None], columns: dict[str, int]) -> _Columns:
    texts = {name: found[index] for name, index in columns.items()}
    return {name: column.texts for name, column in texts.items() if column is not None}


def _struct(shape: TableShape, texts: _Columns, nulls: Any) -> pa.StructArray:
    mask = pa.array(nulls) if nulls.any() else None
    arrays = [from_text(texts[c.name], c.type, c.name) for c in shape.columns]
    return pa.StructArray.from_arrays(arrays, fields=list(shape.row_type), mask=mask)


def _unchanged(
    decoded: DecodedRows, columns: dict[str, int], new: _Columns, old: _Columns
) -> pa.ListArray | None:
    """Which columns were not sent, for each change; values that the old row has are filled in.

    A full old row has them all. One of key columns has those of the key, which may be large too.
    """
    missing: dict[str, Any] = {}
    for name, index in columns.items():
        column = decoded.new[index]
        if column is None or column.unchanged is None:
            continue
        kept = column.unchanged
        if old:
            sent = old[name].is_valid()  # what is stored apart is never null
            new[name] = pc.if_else(pc.and_(kept, sent), old[name], new[name])
            kept = pc.and_not(kept, sent)
        if pc.any(kept).as_py():
            missing[name] = kept.to_pylist()
    if not missing:
        return None
    rows = zip(*missing.values(), strict=True)
    names = list(missing)
    lists = [[n for n, is_kept in zip(names, row, strict=True) if is_kept] or None for row in rows]
    return pa.array(lists, pa.list_(pa.string()))


def _of_transactions(run: RowRun) -> dict[str, pa.Array]:
    """What the transaction of each change says."""
    starts = np.array(run.starts, np.int64)
    counts: Any = np.append(starts[1:], len(run.payloads)) - starts
    rows = pa.array(np.repeat(np.arange(len(counts)), counts))
    found = run.transactions
    return {
        "commit": pa.array([one.commit for one in found], pa.uint64()).take(rows),
        "time": pa.array([one.time for one in found], _TIME).take(rows),
        "transaction": pa.array([str(one.xid) for one in found]).take(rows),
        "total": pa.array([one.total for one in found], pa.int64()).take(rows),
    }


def _check_keys(changes: RowChanges, deleted: Any, old: _Columns) -> None:
    """A deletion without its key could not be followed by any reader."""
    gone = pa.array(deleted)
    for name in changes.table.key:
        if pc.any(pc.and_(gone, old[name].is_null())).as_py():
            raise LogUnreadable(
                f"table {changes.table.full_name}: a deletion came without the key column "
                f"'{name}'. It must be part of the replica identity: "
                f"ALTER TABLE {changes.table.full_name} REPLICA IDENTITY FULL"
            )


def _moved(shape: TableShape, kind: Any, new: _Columns, old: _Columns) -> Any:
    """Which updates changed the key."""
    moved = np.zeros(len(kind), bool)
    for name in shape.key:
        differs = pc.not_equal(new[name], old[name]).fill_null(False)
        moved |= differs.to_numpy(zero_copy_only=False)
    return moved


def _split(changes: RowChanges, moved: Any, numbers: Any) -> RowChanges:
    """A changed key is a deletion of the old one, then a new row."""
    order = np.repeat(np.arange(len(moved)), np.where(moved, 2, 1))
    first = np.zeros(len(order), bool)  # the deletions
    first[:-1] = (order[1:] == order[:-1]) & moved[order[:-1]]
    second = np.roll(first, 1)
    rows, is_first, is_second = pa.array(order), pa.array(first), pa.array(second)

    def taken(array: Any, nulls: pa.Array | None = None) -> Any:
        found = array.take(rows)
        return found if nulls is None else _without(found, nulls)

    before, unchanged = changes.before, changes.unchanged
    ops = pc.if_else(is_first, ch.DELETE, pc.if_else(is_second, ch.CREATE, taken(changes.op)))
    return RowChanges(
        changes.table,
        op=ops,
        after=taken(changes.after, is_first),
        before=None if before is None else taken(before, is_second),
        unchanged=None if unchanged is None else taken(unchanged, is_first),
        commit=taken(changes.commit),
        place=pa.array(2 * numbers[order] - first, pa.uint64()),
        time=taken(changes.time),
        transaction=taken(changes.transaction),
        number=taken(changes.number),
        total=taken(changes.total),
    )


def _without(array: Any, nulls: pa.Array) -> Any:
    """An array with more nulls; it may be one of structs or lists."""
    places = pa.array(range(len(array)), pa.int64())
    return array.take(pc.if_else(nulls, pa.scalar(None, pa.int64()), places))
