"""Whether a value fits a type, and the plain Python value it stands for.

`compile_fit(type)` builds a function once; calling it checks a value strictly (nothing is coerced
that could lose or change meaning) and returns it in plain form: dicts for records, every default
filled in, symbols as text, timestamps in UTC, decimals at their scale. With `text=True` the leaves
are first read from JSON's forms (ISO 8601, base64, decimal text), so defaults, the JSON wire
format and Python objects share one set of rules.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import numbers
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from millstream import errors
from millstream.schemas import types as t

__all__ = [
    "MAX_FLOAT32",
    "Fit",
    "compile_fit",
    "field_names",
    "found",
    "fresh",
    "jsonable",
    "members",
    "option_of",
    "unfit_below",
]

Fit: TypeAlias = Callable[[Any], Any]

# Long values are cut in messages: enough to recognise one without flooding a log.
_SHOWN = 60
MAX_FLOAT32: Final = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_LEAST_TIMEDELTA: Final = dt.timedelta(microseconds=-(2**63))
_MOST_TIMEDELTA: Final = dt.timedelta(microseconds=2**63 - 1)
# Enough digits that quantize never rounds or signals.
_CONTEXT: Final = decimal.Context(prec=80)


def found(value: object) -> str:
    """A short description of a value for an error message."""
    if value is None:
        return "null"
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ may fail in any way; the message must not
        text = f"<unprintable: {type(error).__name__}>"
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    name = type(value).__name__
    return text if name in text else f"{name} {text}"


def unfit_below(name: str, error: errors.Unfit) -> errors.Unfit:
    """The same misfit, seen from the container that holds it under `name`."""
    if not error.field:
        field = name
    elif error.field.startswith("["):
        field = name + error.field
    else:
        field = f"{name}.{error.field}"
    return errors.Unfit(field, error.expected, error.found)


def jsonable(plain: object) -> Any:
    """A plain value in JSON's forms; `compile_fit(type, text=True)` reads it back."""
    return msgspec.to_builtins(plain, str_keys=True)


def members(value: object) -> Mapping[str, Any] | None:
    """The fields of a dict, dataclass, msgspec Struct or Pydantic model; None for anything else."""
    if isinstance(value, Mapping):
        return value
    kind: Any = type(value)
    names = field_names(kind)
    if names is None:
        return None
    return {name: getattr(value, name, t.MISSING) for name in names}


# A program has few event classes; the bound is for classes created in a loop.
@functools.lru_cache(maxsize=1024)
def field_names(cls: type) -> tuple[str, ...] | None:
    """The field names of a dataclass, msgspec Struct or Pydantic model class."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    for attribute in ("__struct_fields__", "__pydantic_fields__"):
        names = getattr(cls, attribute, None)
        if names is not None:
            return tuple(names)
    return None


def compile_fit(type_: t.Type, *, text: bool = False) -> Fit:
    """A function that returns the plain form of a value of the type, or raises `Unfit`."""
    match type_:
        case t.Record():
            return _fit_record(type_, text)
        case t.Nullable():
            return _fit_nullable(compile_fit(type_.of, text=text))
        case t.List():
            return _fit_list(type_, text)
        case t.Map():
            return _fit_map(type_, text)
        case t.Union():
            return _fit_union(type_, text)
        case _:
            leaf = _fit_leaf(type_)
            reads = _TEXT.get(type(type_)) if text else None
            return leaf if reads is None else _fit_text(type_, reads, leaf)


# -- containers ---------------------------------------------------------------------------


def _fit_nullable(fit: Fit) -> Fit:
    return lambda value: None if value is None else fit(value)


def _fit_list(type_: t.List, text: bool) -> Fit:
    item = compile_fit(type_.item, text=text)
    expected = t.kind(type_)

    def fit(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise errors.Unfit("", expected, found(value))
        out: list[Any] = []
        try:
            for element in value:
                out.append(item(element))
        except errors.Unfit as error:
            raise unfit_below(f"[{len(out)}]", error) from None
        return out

    return fit


def _fit_map(type_: t.Map, text: bool) -> Fit:
    fit_key, fit_value = compile_fit(type_.key), compile_fit(type_.value, text=text)
    number_keys = text and isinstance(type_.key, t.Int)
    expected = t.kind(type_)

    def fit(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise errors.Unfit("", expected, found(value))
        out = {}
        for key, element in value.items():
            if number_keys:
                key = _whole_number(key)
            try:
                key = fit_key(key)
                out[key] = fit_value(element)
            except errors.Unfit as error:
                raise unfit_below(f"[{key!r}]", error) from None
        return out

    return fit


def _whole_number(text: object) -> object:
    """The number a JSON object's key stands for; anything else is left for the key's own check."""
    if isinstance(text, str) and len(text) <= 20 and text.removeprefix("-").isdecimal():
        return int(text)
    return text


def _fit_union(type_: t.Union, text: bool) -> Fit:
    options = [compile_fit(option, text=text) for option in type_.options]
    expected = t.kind(type_)

    def fit(value: Any) -> Any:
        for option in options:
            try:
                return option(value)
            except errors.Unfit:
                continue
        raise errors.Unfit("", expected, found(value))

    return fit


def option_of(union: t.Union, value: object) -> int:
    """The index of the option a value belongs to."""
    for index, option in enumerate(union.options):
        try:
            compile_fit(option)(value)
        except errors.Unfit:
            continue
        return index
    raise errors.Unfit("", t.kind(union), f"{value!r:.60}")


def _fit_record(record: t.Record, text: bool) -> Fit:
    plan = [
        (f.name, compile_fit(f.type, text=text), f.default, t.kind(f.type)) for f in record.fields
    ]
    known = frozenset(f.name for f in record.fields)
    expected = t.kind(record)

    def fit(value: Any) -> dict[str, Any]:
        given = value if type(value) is dict else members(value)
        if given is None:
            raise errors.Unfit("", expected, found(value))
        out: dict[str, Any] = {}
        missing = 0
        for name, fit_field, default, kind in plan:
            element = given.get(name, t.MISSING)
            if element is t.MISSING:
                if default is t.MISSING:
                    raise errors.Unfit(name, kind, "nothing: the field is missing")
                missing += name not in given
                out[name] = fresh(default)
                continue
            try:
                out[name] = fit_field(element)
            except errors.Unfit as error:
                raise unfit_below(name, error) from None
        if len(given) + missing != len(plan):
            extra = next(iter(given.keys() - known))
            raise errors.Unfit(str(extra), f"no such field in {expected}", found(given[extra]))
        return out

    return fit


def fresh(default: Any) -> Any:
    """A copy of a default, which the caller may change."""
    if isinstance(default, dict):
        return {key: fresh(value) for key, value in default.items()}
    if isinstance(default, list):
        return [fresh(value) for value in default]
    return default


# -- leaves -------------------------------------------------------------------------------


def _fit_leaf(type_: t.Type) -> Fit:
    match type_:
        case t.Int():
            return _fit_int(type_)
        case t.Float():
            return _fit_float(type_)
        case t.Binary():
            return _fit_binary(type_)
        case t.Decimal():
            return _fit_decimal(type_)
        case t.Enum():
            return _fit_enum(type_)
        case t.Timestamp():
            return _fit_timestamp(type_)
        case t.Time():
            return _fit_time(type_)
        case _:
            return _PLAIN_LEAVES[type(type_)]


def _fit_bool(value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    raise errors.Unfit("", "bool", found(value))


def _fit_string(value: Any) -> str:
    if not isinstance(value, str):
        raise errors.Unfit("", "string", found(value))
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise errors.Unfit("", "string in Unicode", f"{value[:20]!a}, a lone surrogate") from None
    return value if type(value) is str else str.__str__(value)


def _fit_date(value: Any) -> dt.date:
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        return value if type(value) is dt.date else _plain_date(value)
    raise errors.Unfit("", "date", found(value))


def _fit_duration(value: Any) -> dt.timedelta:
    if not isinstance(value, dt.timedelta):
        raise errors.Unfit("", "duration", found(value))
    if not _LEAST_TIMEDELTA <= value <= _MOST_TIMEDELTA:
        raise errors.Unfit("", "duration within 64 bits of microseconds", found(value))
    if type(value) is dt.timedelta:
        return value
    _refuse_nanoseconds(value, "duration")
    return dt.timedelta(value.days, value.seconds, value.microseconds)


def _fit_uuid(value: Any) -> uuid.UUID:
    if isinstance(value, uuid.UUID):
        return value if type(value) is uuid.UUID else uuid.UUID(int=value.int)
    raise errors.Unfit("", "uuid", found(value))


_PLAIN_LEAVES: Final[dict[type, Fit]] = {
    t.Bool: _fit_bool,
    t.String: _fit_string,
    t.Date: _fit_date,
    t.Duration: _fit_duration,
    t.Uuid: _fit_uuid,
}


def _fit_int(type_: t.Int) -> Fit:
    low, high, expected = type_.low, type_.high, t.kind(type_)

    def fit(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise errors.Unfit("", expected, found(value))
            value = int(value)
        if low <= value <= high:
            return int(value)
        raise errors.Unfit("", f"{expected} ({low} to {high})", found(value))

    return fit


def _fit_float(type_: t.Float) -> Fit:
    exact = 2**53 if type_.bits == 64 else 2**24
    single = type_.bits == 32
    expected = t.kind(type_)

    def fit(value: Any) -> float:
        if not isinstance(value, float):
            if isinstance(value, bool) or not isinstance(value, int):
                raise errors.Unfit("", expected, found(value))
            if not -exact <= value <= exact:
                raise errors.Unfit("", f"{expected}, exactly", found(value))
        number = float(value)
        if single:
            if abs(number) > MAX_FLOAT32 and abs(number) != float("inf"):
                raise errors.Unfit("", expected, f"{found(value)}, out of range")
            number = struct.unpack("<f", struct.pack("<f", number))[0]
        return number

    return fit


def _fit_binary(type_: t.Binary) -> Fit:
    size, expected = type_.size, t.kind(type_)

    def fit(value: Any) -> bytes:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise errors.Unfit("", expected, found(value))
        data = bytes(value)
        if size is not None and len(data) != size:
            raise errors.Unfit("", expected, f"{len(data)} bytes")
        return data

    return fit


def _fit_decimal(type_: t.Decimal) -> Fit:
    precision, scale, expected = type_.precision, type_.scale, t.kind(type_)
    unit = decimal.Decimal((0, (1,), -scale))

    def fit(value: Any) -> decimal.Decimal:
        if not isinstance(value, decimal.Decimal) or not value.is_finite():
            raise errors.Unfit("", expected, found(value))
        if value and value.adjusted() >= precision - scale:
            raise errors.Unfit("", expected, f"{found(value)}, too many digits before the point")
        _, digits, exponent = value.as_tuple()
        if isinstance(exponent, int) and exponent < -scale and any(digits[exponent + scale :]):
            raise errors.Unfit("", expected, f"{found(value)}, too many digits after the point")
        return value.quantize(unit, context=_CONTEXT) if value else unit * 0

    return fit


def _fit_enum(type_: t.Enum) -> Fit:
    symbols = frozenset(type_.symbols)
    shown = ", ".join(type_.symbols[:8]) + (", ..." if len(type_.symbols) > 8 else "")
    expected = f"{t.kind(type_)} ({shown})"

    def fit(value: Any) -> str:
        symbol = value
        if isinstance(value, enum.Enum):
            symbol = value.value if isinstance(value.value, str) else value.name
        if isinstance(symbol, str) and symbol in symbols:
            return str.__str__(symbol)
        raise errors.Unfit("", expected, found(value))

    return fit


def _plain_date(value: dt.date) -> dt.date:
    return dt.date(value.year, value.month, value.day)


def _plain_time(value: dt.datetime | dt.time) -> dt.time:
    parts = (value.hour, value.minute, value.second, value.microsecond)
    return dt.time(*parts, value.tzinfo, fold=value.fold)


def _refuse_nanoseconds(value: Any, expected: str) -> None:
    """Pandas' timestamps are datetimes that may hold nanoseconds."""
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise errors.Unfit("", f"{expected} in whole microseconds", found(value))


def _fit_timestamp(type_: t.Timestamp) -> Fit:
    utc, whole_ms, expected = type_.utc, type_.unit == "ms", t.kind(type_)

    def fit(value: Any) -> Any:
        if not isinstance(value, dt.datetime):
            raise errors.Unfit("", expected, found(value))
        if (value.utcoffset() is None) if utc else (value.tzinfo is not None):
            wanted = "with a zone" if utc else "without a zone"
            raise errors.Unfit("", f"{expected} {wanted}", found(value))
        given = value
        if type(value) is not dt.datetime:
            _refuse_nanoseconds(value, expected)
            value = dt.datetime.combine(_plain_date(value), _plain_time(value))
        if utc and value.tzinfo is not dt.UTC:
            try:
                value = value.astimezone(dt.UTC)
            except (OverflowError, ValueError):
                raise errors.Unfit("", f"{expected} of years 1 to 9999", found(given)) from None
        # In UTC: the offset of a zone may have microseconds.
        if whole_ms and value.microsecond % 1000:
            raise errors.Unfit("", f"{expected} in whole milliseconds", found(given))
        return value

    return fit


def _fit_time(type_: t.Time) -> Fit:
    whole_ms, expected = type_.unit == "ms", t.kind(type_)

    def fit(value: Any) -> dt.time:
        if not isinstance(value, dt.time) or value.tzinfo is not None:
            raise errors.Unfit("", f"{expected} without a zone", found(value))
        if whole_ms and value.microsecond % 1000:
            raise errors.Unfit("", f"{expected} in whole milliseconds", found(value))
        return value if type(value) is dt.time else _plain_time(value)

    return fit


# -- leaves read from text ----------------------------------------------------------------


def _read_decimal(value: Any) -> Any:
    return decimal.Decimal(value)


def _reader(target: Any) -> Fit:
    return lambda value: msgspec.convert(value, target)


_TEXT: Final[dict[type, Fit]] = {
    t.Binary: _reader(bytes),
    t.Decimal: _read_decimal,
    t.Date: _reader(dt.date),
    t.Time: _reader(dt.time),
    t.Timestamp: _reader(dt.datetime),
    t.Duration: _reader(dt.timedelta),
    t.Uuid: _reader(uuid.UUID),
}


def _fit_text(type_: t.Type, read: Fit, leaf: Fit) -> Fit:
    expected = f"{t.kind(type_)} as text"

    def fit(value: Any) -> Any:
        if not isinstance(value, str):
            raise errors.Unfit("", expected, found(value))
        try:
            return leaf(read(value))
        except (msgspec.ValidationError, decimal.InvalidOperation, ValueError) as error:
            if isinstance(error, errors.Unfit):
                raise
            raise errors.Unfit("", expected, found(value)) from None

    return fit
