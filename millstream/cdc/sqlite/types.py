"""Columns of SQLite as types of a topic, and their values as Arrow arrays. Pure.

SQLite takes any value in any column, whatever its declared type. Here the declared type counts: a
value that does not fit it is refused with a clear error, never changed.

| declared | type | values that fit |
| --- | --- | --- |
| name with BOOL | bool | 0, 1, 'true', 'false' |
| DATE | date | 'YYYY-MM-DD', or a whole day as a number as below |
| DATETIME, TIMESTAMP... | timestamp (UTC) | ISO text; integer: Unix seconds; real: Julian day |
| DECIMAL(p,s), NUMERIC(p,s) | decimal(p,s) | numbers and text with at most these digits |
| name with INT | int64 | integers |
| name with CHAR, CLOB, TEXT | string | text and numbers |
| name with BLOB | binary | blobs |
| name with REAL, FLOA, DOUB | float64 | numbers |
| nothing, any other name | string | everything, blobs as X'0102' |

A time without a zone is taken as UTC, as SQLite's own functions do. A column of the key is an
int64, binary or string, so that its order is known outside SQLite too.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = ["Value", "array_of", "is_textual", "key_type_of", "type_of"]

Value: TypeAlias = int | float | str | bytes | None

_DIGITS: Final = re.compile(r"(?:DEC(?:IMAL)?|NUMERIC)\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)")
# Beyond them a Julian day or a Unix time is no date that Python and SQLite know.
_LAST_JULIAN: Final = 5_373_484.5
_UNIX_DAY_ZERO: Final = 2_440_587.5
_FIRST_SECOND: Final = -62_135_596_800
_LAST_SECOND: Final = 253_402_300_799
_DAY: Final = 86_400
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TRUTH: Final = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
_SHOWN: Final = 40  # letters of a value in a message


def type_of(declared: str) -> t.Type:
    """The type of a column by its declared type.

    >>> type_of("decimal(10, 2)"), type_of("UNSIGNED BIG INT"), type_of("")
    (Decimal(precision=10, scale=2), Int(bits=64, signed=True), String())
    """
    name = declared.upper().strip()
    if "BOOL" in name:
        return t.Bool()
    if name == "DATE":
        return t.Date()
    if name.startswith(("DATETIME", "TIMESTAMP")):
        return t.Timestamp(utc=True)
    if digits := _DIGITS.fullmatch(name):
        precision, scale = int(digits[1]), int(digits[2] or 0)
        fits = 1 <= precision <= 38 and scale <= precision
        return t.Decimal(precision, scale) if fits else t.String()
    # The order of these is SQLite's own for affinities: "CHARINT" is an integer.
    if "INT" in name:
        return t.Int(64)
    if is_textual(name):
        return t.String()
    if "BLOB" in name:
        return t.Binary()
    if any(part in name for part in ("REAL", "FLOA", "DOUB")):
        return t.Float(64)
    return t.String()


def is_textual(declared: str) -> bool:
    """Whether SQLite stores numbers as text in a column with this declared type."""
    name = declared.upper()
    return "INT" not in name and any(part in name for part in ("CHAR", "CLOB", "TEXT"))


def key_type_of(declared: str) -> t.Type | None:
    """The type of a column that belongs to the key; None: it cannot be part of one."""
    usual = type_of(declared)
    if isinstance(usual, t.Float):
        return None  # two numbers may look alike when written, and a key is text
    return usual if isinstance(usual, (t.Int, t.Binary)) else t.String()


def array_of(
    type_: t.Type, declared: str, values: Sequence[Value], *, name: str, as_text: bool, key: bool
) -> pa.Array:
    """Values of a column as an Arrow array; raises `Unfit` for one that does not fit its type.

    `name` is that of table and column, for messages. `as_text`: any value is written as text.
    """
    arrow = arrow_type(type_)
    fit = _fit_of(type_, declared, as_text, key)
    try:
        return pa.array([None if value is None else fit(value) for value in values], arrow)
    except (ValueError, TypeError, ArithmeticError, pa.ArrowException):
        _refuse(type_, declared, values, fit, name)
        raise


def _fit_of(type_: t.Type, declared: str, as_text: bool, key: bool) -> Callable[[Any], object]:
    """What makes of a value one that Arrow takes."""
    match type_:
        case t.String():
            if key:
                return _key_text
            return _plain_text if is_textual(declared) and not as_text else _any_text
        case t.Int():
            return _whole
        case t.Float():
            return _number
        case t.Binary():
            return _blob
        case t.Bool():
            return _truth
        case t.Decimal():
            return _decimal
        case t.Date():
            return _day
        case _:
            return _moment


def _refuse(
    type_: t.Type,
    declared: str,
    values: Sequence[Value],
    fit: Callable[[Any], object],
    name: str,
) -> None:
    for value in values:
        try:
            pa.array([None if value is None else fit(value)], arrow_type(type_))
        except (ValueError, TypeError, ArithmeticError, pa.ArrowException):
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
            column = name.rpartition(".")[2]
            raise errors.Unfit(
                name,
                f"{t.kind(type_)} (declared {declared or 'without a type'})",
                f"the {_storage(value)} {shown}. Correct the row, or capture the column as the "
                f'database writes it: text = ["{column}"]',
            ) from None


def _storage(value: Value) -> str:
    names = {int: "integer", float: "real", str: "text", bytes: "blob"}
    return names.get(type(value), "value")


# -- one value ----------------------------------------------------------------------------
# Each raises ValueError for what does not fit.


def _whole(value: Value) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)  # an expression made a real of it
    if isinstance(value, int):
        return value
    raise ValueError(value)


def _number(value: Value) -> float:
    if not isinstance(value, (int, float)) or float(value) != value:
        raise ValueError(value)
    return float(value)


def _blob(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(value)
    return value


def _truth(value: Value) -> bool:
    found = value.lower() if isinstance(value, str) else value
    if isinstance(found, bytes) or found not in _TRUTH:
        raise ValueError(value)
    return _TRUTH[found]  # 1.0 is found as 1


def _decimal(value: Value) -> decimal.Decimal:
    if isinstance(value, bytes):
        raise ValueError(value)
    # The shortest text of a real is what was meant: 12.34 is stored as 12.3399999999999999.
    found = decimal.Decimal(repr(value) if isinstance(value, float) else str(value).strip())
    if not found.is_finite():
        raise ValueError(value)
    return found


def _key_text(value: Value) -> str:
    if isinstance(value, (int, str)):
        return str(value)
    raise ValueError(value)


def _plain_text(value: Value) -> str:
    if isinstance(value, bytes):
        raise ValueError(value)
    return value if isinstance(value, str) else repr(value)


def _any_text(value: Value) -> str:
    return f"X'{value.hex().upper()}'" if isinstance(value, bytes) else _plain_text(value)


def _day(value: Value) -> dt.date:
    if isinstance(value, str):
        return dt.date.fromisoformat(value.strip())
    moment = _moment(value)
    if moment != moment.replace(hour=0, minute=0, second=0, microsecond=0):
        raise ValueError(value)
    return moment.date()


def _moment(value: Value) -> dt.datetime:
    if isinstance(value, str):
        found = dt.datetime.fromisoformat(value.strip())
        return found.astimezone(dt.UTC) if found.tzinfo else found.replace(tzinfo=dt.UTC)
    if isinstance(value, float) and 0 <= value < _LAST_JULIAN:
        # A double holds a Julian day to 0.04 ms; SQLite's functions count milliseconds too.
        return _EPOCH + dt.timedelta(milliseconds=round((value - _UNIX_DAY_ZERO) * _DAY * 1000))
    if isinstance(value, (int, float)) and _FIRST_SECOND <= value <= _LAST_SECOND:
        whole = int(value // 1)
        return _EPOCH + dt.timedelta(seconds=whole, microseconds=round((value - whole) * 1e6))
    raise ValueError(value)
