"""Columns of MySQL and MariaDB as types of a topic, and their values as Arrow arrays. Pure.

| MySQL | type |
| --- | --- |
| tinyint, bool | int8: nothing keeps other numbers than 0 and 1 out of a bool |
| smallint, mediumint, int, bigint, with unsigned | int16, int32, int32, int64; uint... |
| decimal(p,s) | decimal(p,s); string beyond 38 digits |
| float, double | float32, float64 |
| char, varchar, text, json, set | string; the members of a set with commas between them |
| binary, varbinary, blob | binary |
| date | date |
| datetime | timestamp without a zone |
| timestamp | timestamp (UTC) |
| time | string, "-838:59:59.25": it is a span of up to 34 days, not a time of day |
| year | int16 |
| enum | enum |
| bit(1), bit(n) | bool, uint64 |

Dates that do not exist ("0000-00-00", "2024-02-00") become null: no other system knows them.
The same functions read what the log has and what a query gives, so both are the same values.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = ["ColumnKind", "arrays_of", "kind_of", "logged_kind", "members_of"]

# Codes of types in the log; a part of the protocol.
_CODES: Final = {
    1: "tinyint",
    2: "smallint",
    3: "int",
    4: "float",
    5: "double",
    7: "timestamp",
    8: "bigint",
    9: "mediumint",
    10: "date",
    11: "time",
    12: "datetime",
    13: "year",
    15: "varchar",
    16: "bit",
    17: "timestamp",
    18: "datetime",
    19: "time",
    245: "json",
    246: "decimal",
    247: "enum",
    248: "set",
    252: "text",
    253: "varchar",
    254: "char",
}
_BITS: Final = {"tinyint": 8, "smallint": 16, "mediumint": 32, "int": 32, "bigint": 64}
_TEXTS: Final = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext"}
_BLOBS: Final = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}
_AS_BLOB: Final = {"char": "binary", "varchar": "varbinary", "text": "blob"}
_ZERO_YEAR: Final = 1900  # what a year of 0000 is read as in the log; a real one begins at 1901
_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """What a column is, as far as its values depend on it."""

    name: str  # "int", "varchar", "binary", ...
    unsigned: bool = False
    precision: int = 0
    scale: int = 0
    length: int = 0  # bytes of binary(n), bits of bit(n)
    members: tuple[str, ...] = ()  # of an enum or a set
    logged: bool = False  # values come from the log, not from a query

    def type_in(self, column: str) -> t.Type:
        """The type in the topic."""
        match self.name:
            case name if name in _BITS:
                return t.Int(_BITS[name], signed=not self.unsigned)
            case "decimal" if self.precision <= 38:
                return t.Decimal(self.precision, self.scale)
            case "float" | "double":
                return t.Float(32 if self.name == "float" else 64)
            case name if name in _BLOBS:
                return t.Binary()
            case "date":
                return t.Date()
            case "datetime" | "timestamp":
                return t.Timestamp(utc=self.name == "timestamp")
            case "year":
                return t.Int(16)
            case "bit":
                return t.Bool() if self.length == 1 else t.Int(64, signed=False)
            case "enum":
                return _enum(column, self.members)
            case _:
                return t.String()

    @property
    def as_key(self) -> bool:
        """Whether the column can be part of a key: its order and its text are exact."""
        return self.name not in ("float", "double", "time", "json")


def _enum(column: str, members: tuple[str, ...]) -> t.Type:
    try:
        return t.Enum(re.sub(r"[\x00-\x1f\x7f.]", "_", column), members)
    except errors.SchemaError:
        return t.String()  # an empty member, for instance


def kind_of(row: dict[str, Any]) -> ColumnKind | None:
    """The kind of a column by its row in information_schema; None if it cannot be captured."""
    name, full = str(row["DATA_TYPE"]).lower(), str(row["COLUMN_TYPE"])
    known = name in _BITS or name in _TEXTS or name in _BLOBS or name in _CODES.values()
    if not known:
        return None
    unsigned = "unsigned" in full.lower() and name in _BITS
    if name == "decimal":
        return ColumnKind(name, False, int(row["NUMERIC_PRECISION"]), int(row["NUMERIC_SCALE"]))
    if name in ("enum", "set"):
        return ColumnKind(name, members=members_of(full))
    if name == "bit":
        return ColumnKind(name, length=int(row["NUMERIC_PRECISION"]))
    if name == "binary":
        return ColumnKind(name, length=int(row["CHARACTER_MAXIMUM_LENGTH"]))
    return ColumnKind(name, unsigned)


def members_of(full: str) -> tuple[str, ...]:
    """The members of an enum or a set.

    >>> members_of("enum('a','it''s')")
    ('a', "it's")
    """
    return tuple(one.replace("''", "'") for one in re.findall(r"'((?:[^']|'')*)'", full))


def logged_kind(column: Any) -> ColumnKind | None:
    """The kind of a column as the log describes it; None if it cannot be captured."""
    name = _CODES.get(column.type)
    if name is None:
        return None
    if column.character_set_name == "binary":
        name = _AS_BLOB.get(name, name)
    length = {"bit": "bits", "binary": "max_length"}.get(name)
    unsigned = bool(column.unsigned) and name in _BITS
    return ColumnKind(
        name,
        unsigned,
        precision=column.precision if name == "decimal" else 0,
        scale=column.decimals if name == "decimal" else 0,
        length=getattr(column, length) if length else 0,
        members=_logged_members(column, name),
        logged=True,
    )


def _logged_members(column: Any, name: str) -> tuple[str, ...]:
    if name == "enum":
        return tuple(column.enum_values or ("",))[1:]  # the first is for values that are none
    return tuple(column.set_values or ()) if name == "set" else ()


# -- values -------------------------------------------------------------------------------


def arrays_of(
    types: Sequence[t.Type],
    kinds: Sequence[ColumnKind],
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
) -> list[pa.Array]:
    """Values by column as Arrow arrays; raises `Unfit` for one that does not fit its type."""
    return [
        _array(type_, kind, name, values)
        for type_, kind, name, values in zip(types, kinds, names, columns, strict=True)
    ]


def _array(type_: t.Type, kind: ColumnKind, name: str, values: Sequence[Any]) -> pa.Array:
    fit = _fit(kind, type_)
    arrow = arrow_type(type_)
    try:
        found = [None if value is None else fit(value) for value in values]
        return pa.array(found, arrow)
    except (ValueError, TypeError, ArithmeticError, pa.ArrowException):
        for value in values:
            try:
                pa.array([None if value is None else fit(value)], arrow)
            except (ValueError, TypeError, ArithmeticError, pa.ArrowException):
                column = name.rpartition(".")[2]
                raise errors.Unfit(
                    name,
                    f"{t.kind(type_)} ({kind.name})",
                    f"{value!r:.{_SHOWN}}. Correct the row, or capture the column as text: "
                    f'text = ["{column}"]',
                ) from None
        raise


def _fit(kind: ColumnKind, type_: t.Type) -> Callable[[Any], Any]:
    """What makes of a value of the driver one that Arrow takes."""
    plain = _PLAIN.get(kind.name, _same)
    match kind.name:
        case "binary":
            plain = _padded(kind.length)
        case "set":
            plain = _set(kind.members)
        case "bit" if kind.length == 1:
            plain = _one_bit
        case "year" if kind.logged:
            plain = _logged_year
        case "timestamp" if kind.logged:
            plain = _logged_moment
        case "time" if kind.logged:
            plain = _logged_span
        case "enum" if isinstance(type_, t.Enum):
            plain = _member(kind.members)
    if isinstance(type_, t.String) and kind.name not in _TEXTS:
        return lambda value: _text(plain(value))
    return plain


def _same(value: Any) -> Any:
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)  # in a character set that Python does not know
    return value


def _bytes(value: Any) -> bytes:
    if value == "":
        return b""  # mysql-replication gives a text for no bytes
    if not isinstance(value, bytes):
        raise ValueError(value)
    return value


def _padded(length: int) -> Callable[[Any], bytes]:
    # The log leaves the zeros at the end out.
    return lambda value: _bytes(value).ljust(length, b"\0")


def _set(members: tuple[str, ...]) -> Callable[[Any], str]:
    def joined(value: Any) -> str:
        return value if isinstance(value, str) else ",".join(m for m in members if m in value)

    return joined


def _member(members: tuple[str, ...]) -> Callable[[Any], str]:
    known = frozenset(members)

    def checked(value: Any) -> str:
        if value not in known:
            raise ValueError(value)
        return str(value)

    return checked


def _number_of_bits(value: Any) -> int:
    return int.from_bytes(value, "big") if isinstance(value, bytes) else int(value, 2)


def _one_bit(value: Any) -> bool:
    return bool(_number_of_bits(value))


def _logged_year(value: int) -> int:
    return 0 if value == _ZERO_YEAR else value


def _day(value: Any) -> dt.date | None:
    return None if isinstance(value, str) else value


def _moment(value: Any) -> dt.datetime | None:
    return None if isinstance(value, str) else value


def _logged_moment(value: dt.datetime) -> dt.datetime | None:
    # Zero is no timestamp but the date that does not exist: real ones begin a second later.
    return None if value == dt.datetime(1970, 1, 1) else value  # noqa: DTZ001  # without a zone


def _logged_span(value: dt.timedelta) -> str:
    # mysql-replication reads the parts of a second of a negative time from the wrong end.
    if value < dt.timedelta(0) and value.microseconds:
        whole, part = divmod(-value, dt.timedelta(seconds=1))
        value = -(dt.timedelta(seconds=whole) + dt.timedelta(seconds=1) - part)
    return _span(value)


def _span(value: dt.timedelta) -> str:
    sign = "-" if value < dt.timedelta(0) else ""
    whole, part = divmod(abs(value), dt.timedelta(seconds=1))
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    rest = f".{part.microseconds:06}".rstrip("0") if part else ""
    return f"{sign}{hours:02}:{minutes:02}:{seconds:02}{rest}"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_plain_json(value), ensure_ascii=False)


def _plain_json(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode()
        case dict():
            return {_plain_json(key): _plain_json(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain_json(one) for one in value]
        case decimal.Decimal():
            return float(value)
        case _:
            return value


def _text(value: Any) -> str | None:
    """Any value as text, for columns that are captured so."""
    match value:
        case None | str():
            return value
        case bytes():
            return value.hex()
        case bool():
            return str(int(value))
        case decimal.Decimal():
            return f"{value:f}"
        case dt.datetime():
            return value.isoformat(" ")
        case _:
            return str(value)


_PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(_TEXTS, _string),
    **dict.fromkeys(_BLOBS, _bytes),
    "date": _day,
    "datetime": _moment,
    "timestamp": _moment,
    "time": _span,
    "json": _json,
    "bit": _number_of_bits,
}
