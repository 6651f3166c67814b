"""Decodes pgoutput's messages about rows: Insert, Update and Delete. Pure.

A change of a row is nothing but lengths and texts. So many messages are walked at once, column by
column, with vectors of offsets, and each column becomes one Arrow array of the texts that the
server wrote; row by row it would take ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream import errors
from millstream.cdc.postgres.pgoutput import (
    DELETE,
    FULL_TUPLE,
    HEADER,
    INSERT,
    KEY_TUPLE,
    NEW_TUPLE,
    NO_TUPLE,
    UPDATE,
    Relation,
    relation_of,
    undecodable,
)

__all__ = ["DecodedRows", "Texts", "decode_rows"]

# The first byte of a column.
_NULL: Final = ord("n")
_UNCHANGED: Final = ord("u")  # a TOASTed value that was not touched, so it was not logged again
_TEXT: Final = ord("t")

# Arrow's offsets have 31 bits. One payload is below 1 GiB: PostgreSQL builds it in one buffer.
_BYTES_MAX: Final = 2**31 - 64
_PADDING: Final = bytes(8)  # so that no offset of a field is behind the buffer, even of a cut row
# Below so many rows a plain loop is quicker than some hundred calls of numpy and Arrow.
_FEW: Final = 64

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Texts:
    """One column of many tuples, as the server wrote it."""

    texts: pa.StringArray  # null: SQL null, no tuple, or unchanged
    unchanged: pa.BooleanArray | None  # TOASTed values that were not sent; None: there are none


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Changes of one relation in order; each array has one item for each change."""

    kind: Bytes  # INSERT, UPDATE or DELETE
    old_kind: Bytes  # NO_TUPLE, KEY_TUPLE or FULL_TUPLE
    # By column of the relation; None for a column that was not asked for.
    new: tuple[Texts | None, ...]  # all null for deletions
    old: tuple[Texts | None, ...] | None  # None: no change has an old tuple

    def __len__(self) -> int:
        return len(self.kind)


# -- rows, many at once -------------------------------------------------------------------


def decode_rows(
    relation: Relation, payloads: Sequence[bytes], wanted: Iterable[int] | None = None
) -> DecodedRows:
    """Decode Insert, Update and Delete messages of one relation, in order.

    `wanted` are the columns to decode, by their index in the relation; None: all of them.
    """
    only = frozenset(wanted) if wanted is not None else None
    if len(payloads) < _FEW:
        return _decode_few(relation, payloads, only)
    data = b"".join((*payloads, _PADDING))
    if len(data) > _BYTES_MAX:
        raise errors.LogUnreadable(
            f"{len(data):,} bytes of changes were given at once; decode fewer at a time"
        )
    count = len(payloads)
    ends: Ints = np.cumsum(np.fromiter(map(len, payloads), np.int64, count))
    starts: Ints = np.concatenate((np.zeros(1, np.int64), ends[:-1]))[:count]
    walk = _Walk(relation, data, ends, only)
    row = int((ends - starts).argmin())
    relation_of(payloads[row])  # refuses the shortest if it has no header
    kind = walk.bytes[starts]
    first = walk.bytes[starts + 5]
    has_old = (first == KEY_TUPLE) | (first == FULL_TUPLE)
    has_new = kind != DELETE
    good = ((kind == INSERT) & (first == NEW_TUPLE)) | ((kind == DELETE) & has_old)
    good |= (kind == UPDATE) & (has_old | (first == NEW_TUPLE))
    good &= walk.relations(starts) == relation.oid
    walk.require(good, starts, "not a change of this relation")
    at = starts + HEADER
    old = None
    if has_old.any():
        old, at = walk.tuples(at, has_old)
        updated = has_old & has_new
        marked = walk.bytes[at] == NEW_TUPLE
        walk.require(marked | ~updated, at, "no new tuple")
        at = at + updated
    new, at = walk.tuples(at, has_new)
    walk.require(at == ends, at, "more bytes than its columns need, or fewer")
    return DecodedRows(kind, np.where(has_old, first, np.uint8(NO_TUPLE)), new, old)


class _Walk:
    """The columns of many tuples at once: one offset for each row, which moves from left to right.

    An offset is never behind the end of its row: a field that would be is refused.
    """

    def __init__(
        self, relation: Relation, data: bytes, ends: Ints, wanted: frozenset[int] | None
    ) -> None:
        self.relation, self.data, self.ends, self.wanted = relation, data, ends, wanted
        self.bytes: Bytes = np.frombuffer(data, np.uint8)
        self.buffer = pa.py_buffer(data)
        # A number at every byte: rows are not aligned.
        self._numbers = np.ndarray((len(data) - 3,), ">u4", data, strides=(1,))

    def relations(self, starts: Ints) -> Ints:
        """The oid in each row's header."""
        return self._numbers[starts + 1].astype(np.int64)

    def tuples(self, at: Ints, present: Bools) -> tuple[tuple[Texts | None, ...], Ints]:
        """The columns of the tuples that start at these offsets, and the offsets behind them.

        A row whose tuple is not present stays where it is, and its columns are null.
        """
        every = bool(present.all())
        count = len(self.relation.columns)
        self.require(at + 2 <= np.where(present, self.ends, at + 2), at, "no number of columns")
        columns = (self._numbers[at] >> 16).astype(np.int64)
        fits = columns == count
        self.require(fits if every else fits | ~present, at, f"not {count} columns")
        at = at + 2 if every else at + 2 * present
        found = []
        for index in range(count):
            texts, at = self._column(index, at, None if every else present)
            found.append(texts)
        return tuple(found), at

    def _column(self, index: int, at: Ints, present: Bools | None) -> tuple[Texts | None, Ints]:
        # The padding is read for a tuple that ends early, and is no kind of column.
        kind = self.bytes[at]
        is_text = kind == _TEXT
        unchanged = kind == _UNCHANGED
        known = is_text | unchanged | (kind == _NULL)
        if present is not None:
            is_text &= present
            unchanged &= present
            known |= ~present
        self.require(known, at, f"no value of the column {self.relation.columns[index].name!r}")
        if is_text.all():
            starts = at + 5
            after = starts + self._numbers[at + 1]
        else:
            size = self._numbers[at + 1].astype(np.int64)
            step: Any = 1 if present is None else present.astype(np.int64)
            starts = at + np.where(is_text, 5, step)
            after = starts + np.where(is_text, size, 0)
        self.require(after <= self.ends, at, "a value that goes beyond its end")
        if self.wanted is not None and index not in self.wanted:
            return None, after
        texts = self._texts(index, starts, after, is_text)
        mask = _booleans(unchanged) if unchanged.any() else None
        return Texts(texts, mask), after

    def _texts(self, index: int, starts: Ints, ends: Ints, valid: Bools) -> pa.StringArray:
        """The bytes between the offsets as one array."""
        count = len(starts)
        # Texts and the gaps between them, taken as one array without a copy; then Arrow copies
        # every other item, the texts, into an array of their own.
        offsets = np.empty(2 * count, np.int32)
        offsets[0::2] = starts
        offsets[1::2] = ends
        parts = pa.Array.from_buffers(
            pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), self.buffer]
        )
        every_other = np.arange(0, 2 * count, 2, dtype=np.int32)
        bits = None if valid.all() else _bitmap(valid)
        taken = parts.take(
            pa.Array.from_buffers(pa.int32(), count, [bits, pa.py_buffer(every_other)])
        )
        try:
            return taken.cast(pa.string())
        except pa.ArrowInvalid:
            raise _not_utf8(self.relation, index) from None

    def require(self, good: Bools, at: Ints, otherwise: str) -> None:
        """Refuse everything unless this holds for every row."""
        if good.all():
            return
        row = int(np.argmin(good))
        start = int(self.ends[row - 1]) if row else 0
        size = int(self.ends[row]) - start
        raise _bad_row(self.relation, row, size, otherwise, int(at[row]) - start)


# -- rows, one by one ---------------------------------------------------------------------


def _decode_few(
    relation: Relation, payloads: Sequence[bytes], wanted: frozenset[int] | None
) -> DecodedRows:
    count = len(relation.columns)
    new, old = _Columns(relation, len(payloads)), _Columns(relation, len(payloads))
    kinds, old_kinds = bytearray(), bytearray()
    for row, payload in enumerate(payloads):
        kind, at = payload[0] if payload else 0, HEADER
        if relation_of(payload) != relation.oid:
            raise _bad_row(relation, row, len(payload), "not a change of this relation", 1)
        marker = payload[5]
        if marker in (KEY_TUPLE, FULL_TUPLE) and kind in (UPDATE, DELETE):
            at = old.read(row, payload, at)
            old_kinds.append(marker)
            if kind == UPDATE:
                marker, at = payload[at] if at < len(payload) else 0, at + 1
        else:
            old_kinds.append(NO_TUPLE)
        if kind in (INSERT, UPDATE) and marker == NEW_TUPLE:
            at = new.read(row, payload, at)
        elif kind != DELETE or not old_kinds[-1]:
            raise _bad_row(relation, row, len(payload), "no such tuple", at)
        if at != len(payload):
            raise _bad_row(relation, row, len(payload), "more bytes than its columns need", at)
        kinds.append(kind)
    indexes = [i if wanted is None or i in wanted else None for i in range(count)]
    return DecodedRows(
        np.frombuffer(bytes(kinds), np.uint8),
        np.frombuffer(bytes(old_kinds), np.uint8),
        tuple(None if i is None else new.texts(i) for i in indexes),
        tuple(None if i is None else old.texts(i) for i in indexes) if any(old_kinds) else None,
    )


class _Columns:
    """The values of tuples of a few rows, by column."""

    def __init__(self, relation: Relation, rows: int) -> None:
        self.relation, self.rows = relation, rows
        self.values: list[list[bytes | None]] = [[None] * rows for _ in relation.columns]
        self.unchanged: dict[int, list[int]] = {}  # column -> rows

    def read(self, row: int, payload: bytes, at: int) -> int:
        """Take a tuple that starts at this byte; the byte behind it."""
        size = len(payload)
        if at + 2 > size or payload[at] << 8 | payload[at + 1] != len(self.values):
            text = f"not {len(self.values)} columns"
            raise _bad_row(self.relation, row, size, text, at)
        at += 2
        for index, values in enumerate(self.values):
            kind = payload[at] if at < size else 0
            if kind == _TEXT:
                start = at + 5
                at = start + int.from_bytes(payload[at + 1 : start], "big")
                if start > size or at > size:
                    text = "a value that goes beyond its end"
                    raise _bad_row(self.relation, row, size, text, start)
                values[row] = payload[start:at]
            elif kind in (_NULL, _UNCHANGED):
                at += 1
                if kind == _UNCHANGED:
                    self.unchanged.setdefault(index, []).append(row)
            else:
                text = f"no value of the column {self.relation.columns[index].name!r}"
                raise _bad_row(self.relation, row, size, text, at)
        return at

    def texts(self, index: int) -> Texts:
        try:
            texts = [None if v is None else str(v, "utf-8") for v in self.values[index]]
        except UnicodeDecodeError:
            raise _not_utf8(self.relation, index) from None
        mask = None
        if (rows := self.unchanged.get(index)) is not None:
            flags = [False] * self.rows
            for row in rows:
                flags[row] = True
            mask = pa.array(flags, pa.bool_())
        return Texts(pa.array(texts, pa.string()), mask)


def _bad_row(relation: Relation, row: int, size: int, found: str, at: int) -> errors.LogUnreadable:
    table = f"{relation.namespace}.{relation.name}"
    return undecodable(f"change {row} of table {table} ({size} bytes) has {found} at byte {at}")


def _not_utf8(relation: Relation, index: int) -> errors.LogUnreadable:
    return errors.LogUnreadable(
        f"table {relation.namespace}.{relation.name}: the column {relation.columns[index].name!r} "
        f"has a text that is not UTF-8. A database with the encoding SQL_ASCII can hold such; "
        f"correct the row or leave the column out"
    )


def _bitmap(bools: Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bools, bitorder="little"))


def _booleans(bools: Bools) -> pa.BooleanArray:
    return pa.Array.from_buffers(pa.bool_(), len(bools), [None, _bitmap(bools)])
