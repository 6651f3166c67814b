"""Values in an Avro schema's defaults: logical types are plain numbers there."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any, Final

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.values.fit import compile_fit, jsonable, option_of

__all__ = ["from_raw", "to_raw"]

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LOCAL_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (a wall clock has no zone)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_CONTEXT: Final = decimal.Context(prec=80)


def to_raw(type_: t.Type, value: Any, inside: bool = False) -> Any:
    """A plain value as the JSON of an Avro default.

    Avro takes the first option of every union in it. The default's own union can be reordered for
    that; one `inside` it cannot, and is `Unfit` if the value is of another option.
    """
    match type_:
        case t.Nullable():
            if inside and value is not None:
                raise errors.Unfit("", "null, the first option of Avro's union", f"{value!r:.60}")
            return None if value is None else to_raw(type_.of, value, inside)
        case t.Union():
            if option_of(type_, value) != 0:
                raise errors.Unfit("", t.kind(type_.options[0]), f"{value!r:.60}")
            return to_raw(type_.options[0], value, inside)
        case t.List():
            return [to_raw(type_.item, item, True) for item in value]
        case t.Map():
            return {key: to_raw(type_.value, item, True) for key, item in value.items()}
        case t.Record():
            return {f.name: to_raw(f.type, value[f.name], True) for f in type_.fields}
        case t.Binary():
            return value.decode("iso-8859-1")
        case t.Decimal(_, scale):
            unscaled = int(value.scaleb(scale, context=_CONTEXT))
            size = unscaled.bit_length() // 8 + 1
            return unscaled.to_bytes(size, "big", signed=True).decode("iso-8859-1")
        case t.Date():
            return (value - _EPOCH.date()).days
        case t.Time(unit):
            day = dt.datetime.combine(_LOCAL_EPOCH, value) - _LOCAL_EPOCH
            return day // _MICROSECOND // (1000 if unit == "ms" else 1)
        case t.Timestamp(utc, unit):
            since = (value - (_EPOCH if utc else _LOCAL_EPOCH)) // _MICROSECOND
            return since // (1000 if unit == "ms" else 1)
        case t.Duration():
            return value // _MICROSECOND
        case _:
            return jsonable(value)


def from_raw(type_: t.Type, raw: Any) -> Any:
    """The plain value of an Avro default."""
    match type_:
        case t.Nullable():
            return None if raw is None else from_raw(type_.of, raw)
        case t.Union():
            # A default belongs to the first option, which may come after a null here.
            return from_raw(type_.options[0], raw)
        case t.List():
            return [from_raw(type_.item, item) for item in raw]
        case t.Map():
            return {key: from_raw(type_.value, item) for key, item in raw.items()}
        case t.Record():
            return {
                f.name: from_raw(f.type, raw[f.name]) if f.name in raw else f.default
                for f in type_.fields
                if f.name in raw or not f.required
            }
        case _:
            return compile_fit(type_, text=isinstance(type_, t.Uuid))(_from_leaf(type_, raw))


def _from_leaf(type_: t.Type, raw: Any) -> Any:
    match type_:
        case t.Binary():
            return raw.encode("iso-8859-1")
        case t.Decimal(_, scale):
            unscaled = int.from_bytes(raw.encode("iso-8859-1"), "big", signed=True)
            return decimal.Decimal(unscaled).scaleb(-scale, context=_CONTEXT)
        case t.Date():
            return _EPOCH.date() + dt.timedelta(days=raw)
        case t.Time(unit):
            return (_LOCAL_EPOCH + raw * (1000 if unit == "ms" else 1) * _MICROSECOND).time()
        case t.Timestamp(utc, unit):
            since = raw * (1000 if unit == "ms" else 1) * _MICROSECOND
            return (_EPOCH if utc else _LOCAL_EPOCH) + since
        case t.Duration():
            return raw * _MICROSECOND
        case _:
            return raw
