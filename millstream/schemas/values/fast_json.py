"""JSON values of a record, checked by msgspec in C: a fast path to the results of `compile_fit`.

`fast_dump` and `fast_load` compile a msgspec Struct for a record. Their results are identical to
the checker's: the same bytes, the same Python types. They may refuse a value that the checker
accepts (a subclass of str, a number that may have been rounded), but never the other way round.
Callers pass every refused value to the checker, which accepts it or words the refusal.

msgspec cannot express some types; these parts of a value are checked in Python:

- In both directions: decimals (digits), durations (64 bits), 32-bit floats (rounding), whole
  milliseconds, unsigned 64-bit numbers (msgspec's bounds are signed), unions (msgspec needs a tag
  to tell records apart), and records with a quote or a backslash in a field name.
- When writing, also the types that msgspec would convert silently: a Decimal to a float, a set to
  a list, text to a date, any object to a record.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import uuid
from collections.abc import Callable, Mapping
from keyword import iskeyword
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.values.finite import compile_finite_fit
from millstream.schemas.values.fit import Fit, compile_fit, field_names, fresh, members

__all__ = ["REFUSALS", "Dump", "Load", "fast_dump", "fast_load", "fast_load_into"]

Dump: TypeAlias = Callable[[Any], bytes]
Load: TypeAlias = Callable[[bytes], dict[str, Any]]

# Whole numbers up to this are exact as 64-bit floats; the next one may have been rounded to it.
_EXACT: Final = float(2**53)
_ExactFloat: TypeAlias = Annotated[float, Meta(gt=-_EXACT, lt=_EXACT)]
_SIGNED_64: Final = 2**63 - 1
_convert: Final = msgspec.convert
# Annotations under which msgspec reads exactly what the checker reads from the same text.
_READ: Final[dict[t.Type, Any]] = {
    t.Bool(): bool,
    t.String(): str,
    t.Float(64): _ExactFloat,
    t.Binary(): bytes,
    t.Date(): dt.date,
    t.Time("us"): Annotated[dt.time, Meta(tz=False)],
    t.Timestamp(False, "us"): Annotated[dt.datetime, Meta(tz=False)],
    t.Uuid(): uuid.UUID,
}


def _bounded(type_: t.Type) -> bool:
    """Whether msgspec can check the type's bounds, if it has any."""
    return not isinstance(type_, t.Int) or type_.high <= _SIGNED_64


def _whole(type_: t.Int) -> Any:
    return Annotated[int, Meta(ge=type_.low, le=type_.high)]


class _Refused(Exception):
    """The fast path cannot be sure about the value; the checker decides."""


# What the fast path raises for a value that it does not accept.
REFUSALS: Final = (
    _Refused, errors.Unfit, msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError,
    RecursionError, TypeError, ValueError,
)  # fmt: skip


# -- reading ------------------------------------------------------------------------------


def fast_load(record: t.Record) -> Load:
    """JSON bytes to a plain value; `REFUSALS` mean that the checker must decide."""
    annotation, plain = _read_record(record)
    if annotation is Any:
        return _refuse_all
    decode = msgspec.json.Decoder(annotation).decode
    return lambda data: plain(decode(data))


def fast_load_into(make: Callable[..., Any], record: t.Record) -> tuple[Load, Fit] | None:
    """JSON bytes to `make(*values)` in two steps, with the values of the fields in their order.

    They are those of `fast_load`, without a dict in between. None if there is no fast path.
    """
    annotation, made = _read_record(record, make)
    return None if annotation is Any else (msgspec.json.Decoder(annotation).decode, made)


def _refuse_all(_: object) -> Any:
    raise _Refused


def _read(type_: t.Type) -> tuple[Any, Fit | None]:
    """The annotation for msgspec, and the step from its result to the plain value, if any."""
    match type_:
        case t.Int() if _bounded(type_):
            return _whole(type_), None
        case t.Binary(size) if size is not None:
            return Annotated[bytes, Meta(min_length=size, max_length=size)], None
        case t.Timestamp(True, "us"):
            return Annotated[dt.datetime, Meta(tz=True)], _to_utc
        case t.Decimal():
            return str, _read_decimal(type_)
        case t.Enum():
            return Literal[type_.symbols], None
        case t.Nullable():
            annotation, plain = _read(type_.of)
            return annotation | None, plain and _or_none(plain)
        case t.List():
            annotation, plain = _read(type_.item)
            return GenericAlias(list, annotation), plain and _each(plain)
        case t.Map():
            return _read_map(type_)
        case t.Record():
            return _read_record(type_)
        case _ if type_ in _READ:
            return _READ[type_], None
        case _:
            return Any, compile_fit(type_, text=True)


def _to_utc(value: dt.datetime) -> dt.datetime:
    return value if value.tzinfo is dt.UTC else value.astimezone(dt.UTC)


def _or_none(plain: Fit) -> Fit:
    return lambda value: None if value is None else plain(value)


def _each(plain: Fit) -> Fit:
    return lambda values: [plain(value) for value in values]


def _each_value(plain: Fit) -> Fit:
    return lambda values: {key: plain(value) for key, value in values.items()}


def _read_map(type_: t.Map) -> tuple[Any, Fit | None]:
    if not _bounded(type_.key):
        return Any, compile_fit(type_, text=True)
    key, _ = _read(type_.key)
    annotation, plain = _read(type_.value)
    if plain is None:
        return GenericAlias(dict, (key, annotation)), None
    return GenericAlias(dict, (key, annotation)), lambda value: {
        k: plain(v) for k, v in value.items()
    }


def _read_record(record: t.Record, make: Callable[..., Any] | None = None) -> tuple[Any, Fit]:
    fields: list[tuple[str, Any, Any]] = []
    # The dict display is compiled for the record's own names, as in `rows`: names enter the code
    # as literals only.
    used: dict[str, Any] = {"__builtins__": {}, "UNSET": UNSET, "make": make}
    items: list[str] = []
    for index, field in enumerate(record.fields):
        annotation, plain = _read(field.type)
        text = f"value.f{index}"
        if plain is not None:
            used[f"plain{index}"] = plain
            text = f"plain{index}({text})"
        default = field.default
        if default is t.MISSING:
            fields.append((f"f{index}", annotation, msgspec.NODEFAULT))
        elif plain is None:
            fields.append((f"f{index}", annotation, _default(default)))
        else:
            # A default is plain already: it must not go through `plain`.
            fields.append((f"f{index}", annotation | UnsetType, UNSET))
            used[f"default{index}"] = functools.partial(fresh, default)
            text = f"default{index}() if value.f{index} is UNSET else {text}"
        items.append(text if make is not None else f"{field.name!r}: {text}")
    struct = _struct(record, fields)
    if struct is None:
        return Any, compile_fit(record, text=True)
    values = ", ".join(items)
    code = f"{{{values}}}" if make is None else f"make({values})"
    display: Fit = eval(f"lambda value: {code}", used)
    return struct, display


def _default(default: Any) -> Any:
    if isinstance(default, (dict, list)):
        return msgspec.field(default_factory=functools.partial(fresh, default))
    return default


def _struct(record: t.Record, fields: list[tuple[str, Any, Any]]) -> Any:
    """The Struct of a record, or None if msgspec does not support one of its names."""
    if any('"' in field.name or "\\" in field.name for field in record.fields):
        return None
    return msgspec.defstruct(
        "Fields",
        fields,
        # Field names need not be identifiers, and some (`__init__`) would change the class.
        rename={f"f{index}": field.name for index, field in enumerate(record.fields)},
        kw_only=True,
        forbid_unknown_fields=True,
    )


# -- writing ------------------------------------------------------------------------------


def fast_dump(record: t.Record) -> Dump:
    """A value to JSON bytes; `REFUSALS` mean that the checker must decide."""
    check = _check_record(record)
    if check is None:
        return _refuse_all
    encode = msgspec.json.Encoder().encode
    return lambda value: encode(check(value))


def _written(type_: t.Type) -> tuple[Any, Fit | None]:
    """The annotation for msgspec, and the check that follows, if any."""
    match type_:
        case t.Bool():
            return bool, None
        case t.String():
            return str, None
        case t.Int() if _bounded(type_):
            return _whole(type_), None
        case t.Float(64):
            return Any, _check_float(compile_finite_fit(type_))
        case t.Enum():
            return Any, _check_symbol(type_)
        case t.Decimal():
            return Any, _check_decimal(type_)
        case t.Timestamp(True, "us"):
            return Any, _check_moment(compile_fit(type_))
        case t.Nullable():
            annotation, check = _written(type_.of)
            return annotation | None, check and _or_none(check)
        case t.List():
            return Any, _check_list(*_written(type_.item))
        case t.Map() if _bounded(type_.key):
            key, _ = _written(type_.key)
            annotation, check = _written(type_.value)
            return GenericAlias(dict, (key, annotation)), check and _each_value(check)
        case t.Record():
            return Any, _check_record(type_) or compile_finite_fit(type_)
        case _:
            return Any, compile_finite_fit(type_)


def _check_float(check: Fit) -> Fit:
    # The difference of a number and itself is 0 unless it is infinite or NaN.
    return lambda value: value if type(value) is float and value - value == 0 else check(value)


def _check_symbol(type_: t.Enum) -> Fit:
    symbols, check = frozenset(type_.symbols), compile_fit(type_)
    return lambda value: value if type(value) is str and value in symbols else check(value)


def _check_decimal(type_: t.Decimal) -> Fit:
    unit = decimal.Decimal((0, (1,), -type_.scale))
    # Raises where a digit would be lost on either side of the point.
    context = decimal.Context(type_.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    check = compile_fit(type_)

    def check_decimal(value: Any) -> decimal.Decimal:
        if type(value) is decimal.Decimal and value.is_finite() and value:
            return value.quantize(unit, context=context)
        plain: decimal.Decimal = check(value)
        return plain

    return check_decimal


def _read_decimal(type_: t.Decimal) -> Fit:
    check = _check_decimal(type_)
    return lambda text: check(decimal.Decimal(text))


def _check_moment(check: Fit) -> Fit:
    return lambda value: (
        value if type(value) is dt.datetime and value.tzinfo is dt.UTC else check(value)
    )


def _check_list(annotation: Any, check: Fit | None) -> Fit:
    # msgspec caches its plan for a Struct; for any other type it builds one in every call.
    items: Any = msgspec.defstruct("Items", [("items", GenericAlias(list, annotation))])

    def check_list(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise _Refused
        if annotation is not Any:
            value = _convert({"items": value}, items).items
        return value if check is None else [check(item) for item in value]

    return check_list


def _check_record(record: t.Record) -> Fit | None:
    """From a dict or an object to the record's Struct."""
    fields, checks = [], {}
    for index, field in enumerate(record.fields):
        annotation, check = _written(field.type)
        default = msgspec.NODEFAULT if field.default is t.MISSING else _default(field.default)
        fields.append((f"f{index}", annotation, default))
        if check is not None:
            checks[f"f{index}"] = (_passes(field.type), check)
    struct = _struct(record, fields)
    if struct is None:
        return None
    names = tuple(field.name for field in record.fields)
    items, further = _attribute_reader(names), _further_checks(checks)

    def check_record(value: Any) -> Any:
        cls: Any = type(value)
        if cls is not dict:
            known = _attributes(cls)
            if known is None:
                raise _Refused
            value = items(value) if known == names else members(value)
        return further(_convert(value, struct))

    return check_record


def _passes(type_: t.Type) -> str:
    """Python code that is true for the usual values of the type: they need no call."""
    inner, nullable = t.strip(type_)
    match inner:
        case t.Float(64):
            code = "type(v) is float and v - v == 0"
        case t.Timestamp(True, "us"):
            code = "type(v) is datetime and v.tzinfo is utc"
        case _:
            code = "False"
    return f"v is None or {code}" if nullable else code


def _further_checks(checks: dict[str, tuple[str, Fit]]) -> Fit:
    """Checks some attributes of a Struct and returns it; compiled like `_read_record`."""
    used: dict[str, Any] = {
        "__builtins__": {}, "type": type, "float": float, "datetime": dt.datetime, "utc": dt.UTC,
    }  # fmt: skip
    lines = ["def further(value):"]
    for name, (passes, check) in checks.items():
        used[f"check_{name}"] = check
        lines.append(f"    v = value.{name}")
        lines.append(f"    if not ({passes}): value.{name} = check_{name}(v)")
    exec("\n".join([*lines, "    return value"]), used)
    further: Fit = used["further"]
    return further


def _attribute_reader(names: tuple[str, ...]) -> Fit:
    """From an object with exactly these fields to a dict; compiled like `_read_record`."""
    if not all(name.isidentifier() and not iskeyword(name) for name in names):
        return members
    items = ", ".join(f"{name!r}: value.{name}" for name in names)
    reader: Fit = eval(f"lambda value: {{{items}}}", {"__builtins__": {}})
    return reader


# Bounded like `field_names`.
@functools.lru_cache(maxsize=1024)
def _attributes(cls: Any) -> tuple[str, ...] | None:
    """The field names of an event class; None for mappings, whose items count."""
    return None if issubclass(cls, Mapping) else field_names(cls)
