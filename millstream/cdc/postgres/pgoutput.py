"""Decodes what PostgreSQL's output plugin `pgoutput` (proto_version 1) sends. Pure.

It is our own because no maintained library does it: the ones on PyPI are prototypes, or decode row
by row. The protocol is ten kinds of messages; those about rows are decoded by `row_texts`, many at
once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from millstream import errors

__all__ = [
    "BEGIN",
    "COMMIT",
    "DELETE",
    "FULL_TUPLE",
    "HEADER",
    "INSERT",
    "KEY_TUPLE",
    "NEW_TUPLE",
    "NO_TUPLE",
    "RELATION",
    "TRUNCATE",
    "UPDATE",
    "Relation",
    "RelationColumn",
    "cut_off",
    "lsn_number",
    "lsn_text",
    "parse_begin",
    "parse_commit",
    "parse_relation",
    "parse_truncate",
    "relation_of",
    "undecodable",
]

# The first byte of a payload. Origin, Type and Message say nothing that a capture needs.
BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
RELATION: Final = ord("R")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")

# What the old tuple of a change is.
NO_TUPLE: Final = 0
KEY_TUPLE: Final = ord("K")  # only columns of the replica identity; the others are null
FULL_TUPLE: Final = ord("O")
NEW_TUPLE: Final = ord("N")

_EPOCH: Final = 946_684_800_000_000  # 2000-01-01, from which PostgreSQL counts, after 1970-01-01
HEADER: Final = 6  # kind, relation, and the first byte of a tuple
_COLUMNS_MAX: Final = 1_664  # of a table; PostgreSQL's own limit for any list of columns


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
    if len(payload) < HEADER:
        raise cut_off("change", payload)
    return int.from_bytes(payload[1:5], "big")


class _Reader:
    """Fields of one message, in order; never behind its end."""

    def __init__(self, what: str, payload: bytes) -> None:
        self.what, self.payload, self.at = what, payload, 1

    def take(self, form: str) -> tuple[Any, ...]:
        try:
            found = struct.unpack_from(form, self.payload, self.at)
        except struct.error:
            raise cut_off(self.what, self.payload) from None
        self.at += struct.calcsize(form)
        return found

    def name(self) -> str:
        end = self.payload.find(b"\0", self.at)
        if end < 0:
            raise cut_off(self.what, self.payload)
        try:
            text = self.payload[self.at : end].decode()
        except UnicodeDecodeError:
            self.refuse("a name that is not UTF-8")
        self.at = end + 1
        return text

    def refuse(self, found: str) -> NoReturn:
        size = len(self.payload)
        raise undecodable(f"a message {self.what} of {size} bytes has {found} at byte {self.at}")


def _fields(what: str, form: str, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != struct.calcsize(form):
        raise cut_off(what, payload)
    return struct.unpack(form, payload)


def cut_off(what: str, payload: bytes) -> errors.LogUnreadable:
    """The error of a message that is too short or too long."""
    return undecodable(f"a message {what} has {len(payload)} bytes, which is too few or too many")


def undecodable(text: str) -> errors.LogUnreadable:
    """The error of a message that cannot be decoded, and what to do."""
    return errors.LogUnreadable(
        f"PostgreSQL's stream cannot be decoded: {text}. Nothing of it was stored or confirmed: "
        f"restart the capture. If it happens again, report it with the server's version"
    )
