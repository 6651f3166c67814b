"""Decodes what PostgreSQL's output plugin `pgoutput` (proto_version 1) sends. Pure.

It is our own because no maintained library does it: the ones on PyPI are prototypes, or decode row
by row. The protocol is ten kinds of messages, and a change of one row is nothing but offsets: so
many messages are walked at once, column by column, with vectors of offsets, and each column becomes
one Arrow array of the texts that the server wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from millstream import errors

__all__ = [
    "BEGIN",
    "COMMIT",
    "DELETE",
    "FULL_TUPLE",
    "INSERT",
    "KEY_TUPLE",
    "MESSAGE",
    "NO_TUPLE",
    "ORIGIN",
    "RELATION",
    "TRUNCATE",
    "TYPE",
    "UPDATE",
    "DecodedRows",
    "LogicalMessage",
    "Relation",
    "RelationColumn",
    "Texts",
    "decode_rows",
    "lsn_number",
    "lsn_text",
    "parse_begin",
    "parse_commit",
    "parse_message",
    "parse_relation",
    "parse_truncate",
    "relation_of",
]

# The first byte of a payload.
BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
ORIGIN: Final = ord("O")
RELATION: Final = ord("R")
TYPE: Final = ord("Y")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")
MESSAGE: Final = ord("M")

# What the old tuple of a change is.
NO_TUPLE: Final = 0
KEY_TUPLE: Final = ord("K")  # only columns of the replica identity; the others are null
FULL_TUPLE: Final = ord("O")
_NEW_TUPLE: Final = ord("N")

# The first byte of a column.
_NULL: Final = ord("n")
_UNCHANGED: Final = ord("u")  # a TOASTed value that was not touched, so it was not logged again
_TEXT: Final = ord("t")

_EPOCH: Final = 946_684_800_000_000  # 2000-01-01, from which PostgreSQL counts, after 1970-01-01
# Arrow's offsets have 31 bits. One payload is below 1 GiB: PostgreSQL builds it in one buffer.
_BYTES_MAX: Final = 2**31 - 64
_PADDING: Final = bytes(8)  # so that no offset of a field is behind the buffer, even of a cut row
_HEADER: Final = 6  # kind, relation, and the first byte of a tuple
# Below so many rows a plain loop is quicker than some hundred calls of numpy and Arrow.
_FEW: Final = 64
_COLUMNS_MAX: Final = 1_664  # of a table; PostgreSQL's own limit for any list of columns

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as a Relation message describes it."""

    name: str
    is_key: bool  # part of the replica identity
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as the stream describes it, before its first change and after each ALTER TABLE."""

    oid: int
    namespace: str
    name: str
    identity: str  # relreplident: "d", "n", "f" or "i"
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What pg_logical_emit_message wrote."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


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


# -- log positions ------------------------------------------------------------------------


def lsn_text(number: int) -> str:
    """A position in the log as PostgreSQL writes it.

    >>> lsn_text(0x16B374D848)
    '16/B374D848'
    """
    return f"{number >> 32:X}/{number & 0xFFFFFFFF:X}"


def lsn_number(text: str) -> int:
    """The number of a position in the log.

    >>> lsn_number("16/B374D848") == 0x16B374D848
    True
    """
    high, slash, low = text.partition("/")
    try:
        numbers = int(high, 16), int(low, 16)
    except ValueError:
        numbers = -1, -1
    if not slash or not all(0 <= n < 2**32 for n in numbers):
        raise errors.LogUnreadable(f"{text!r:.40} is not a log position such as '16/B374D848'")
    return numbers[0] << 32 | numbers[1]


# -- messages one by one ------------------------------------------------------------------


def parse_begin(payload: bytes) -> tuple[int, int, int]:
    """Position of the commit, its time in microseconds since 1970, and the transaction id."""
    final, time, xid = _fields("Begin", ">xQqI", payload)
    return final, time + _EPOCH, xid


def parse_commit(payload: bytes) -> tuple[int, int, int]:
    """Position of the commit, position behind it, and its time in microseconds since 1970."""
    commit, end, time = _fields("Commit", ">xxQQq", payload)
    return commit, end, time + _EPOCH


def parse_truncate(payload: bytes) -> tuple[int, tuple[int, ...]]:
    """Options (1: CASCADE, 2: RESTART IDENTITY), and the oids of the relations."""
    reader = _Reader("Truncate", payload)
    count, options = reader.take(">IB")
    if count * 4 != len(payload) - reader.at:
        reader.refuse(f"{count} relations")
    return options, struct.unpack_from(f">{count}I", payload, reader.at)


def parse_message(payload: bytes) -> LogicalMessage:
    """What pg_logical_emit_message wrote."""
    reader = _Reader("Message", payload)
    flags, lsn = reader.take(">BQ")
    prefix = reader.name()
    (size,) = reader.take(">I")
    if size != len(payload) - reader.at:
        reader.refuse(f"content of {size} bytes")
    return LogicalMessage(bool(flags & 1), lsn, prefix, bytes(payload[reader.at :]))


def parse_relation(payload: bytes) -> Relation:
    """A table and its columns, of which the changes that follow are made."""
    reader = _Reader("Relation", payload)
    (oid,) = reader.take(">I")
    namespace, name = reader.name(), reader.name()
    identity, count = reader.take(">cH")
    if count > _COLUMNS_MAX:
        reader.refuse(f"{count} columns")
    columns = []
    for _ in range(count):
        (flags,) = reader.take(">B")
        columns.append(RelationColumn(reader.name(), bool(flags & 1), *reader.take(">Ii")))
    if reader.at != len(payload):
        reader.refuse("more bytes than its columns need")
    # An empty namespace stands for pg_catalog.
    letter = identity.decode("latin-1")
    return Relation(oid, namespace or "pg_catalog", name, letter, tuple(columns))


def relation_of(payload: bytes) -> int:
    """The oid of the relation that an Insert, Update or Delete changes."""
    if len(payload) < _HEADER:
        raise _cut("change", payload)
    return int.from_bytes(payload[1:5], "big")


class _Reader:
    """Fields of one message, in order; never behind its end."""

    def __init__(self, what: str, payload: bytes) -> None:
        self.what, self.payload, self.at = what, payload, 1

    def take(self, form: str) -> tuple[Any, ...]:
        try:
            found = struct.unpack_from(form, self.payload, self.at)
        except struct.error:
            raise _cut(self.what, self.payload) from None
        self.at += struct.calcsize(form)
        return found

    def name(self) -> str:
        end = self.payload.find(b"\0", self.at)
        if end < 0:
            raise _cut(self.what, self.payload)
        try:
            text = self.payload[self.at : end].decode()
        except UnicodeDecodeError:
            self.refuse("a name that is not UTF-8")
        self.at = end + 1
        return text

    def refuse(self, found: str) -> NoReturn:
        size = len(self.payload)
        raise _bad(f"a message {self.what} of {size} bytes has {found} at byte {self.at}")


def _fields(what: str, form: str, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != struct.calcsize(form):
        raise _cut(what, payload)
    return struct.unpack(form, payload)


def _cut(what: str, payload: bytes) -> errors.LogUnreadable:
    return _bad(f"a message {what} has {len(payload)} bytes, which is too few or too many")


def _bad(text: str) -> errors.LogUnreadable:
    return errors.LogUnreadable(
        f"PostgreSQL's stream cannot be decoded: {text}. Nothing of it was stored or confirmed: "
        f"restart the capture. If it happens again, report it with the server's version"
    )


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
    good = ((kind == INSERT) & (first == _NEW_TUPLE)) | ((kind == DELETE) & has_old)
    good |= (kind == UPDATE) & (has_old | (first == _NEW_TUPLE))
    good &= walk.relations(starts) == relation.oid
    walk.require(good, starts, "not a change of this relation")
    at = starts + _HEADER
    old = None
    if has_old.any():
        old, at = walk.tuples(at, has_old)
        updated = has_old & has_new
        marked = walk.bytes[at] == _NEW_TUPLE
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
        kind, at = payload[0] if payload else 0, _HEADER
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
        if kind in (INSERT, UPDATE) and marker == _NEW_TUPLE:
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
    return _bad(f"change {row} of table {table} ({size} bytes) has {found} at byte {at}")


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
