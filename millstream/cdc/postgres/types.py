"""PostgreSQL's types: what they are in a topic, and how their texts become Arrow arrays. Pure.

A column has the same Arrow array whether it comes from a snapshot (`select_expression`, then
`from_adbc`) or from the stream (`from_text`), if both sessions have SESSION.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream import errors
from millstream.cdc.model import Column
from millstream.cdc.postgres.arrays import split_arrays
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = [
    "SESSION",
    "SESSION_OPTIONS",
    "TypeFacts",
    "from_adbc",
    "from_text",
    "output_text",
    "quoted",
    "select_expression",
    "type_of",
]

# Settings of every session that reads values: on them depends how the server writes these.
SESSION: Final[Mapping[str, str]] = {
    "client_encoding": "UTF8",
    "timezone": "UTC",
    "datestyle": "ISO,MDY",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "3",
    "lc_monetary": "C",
    "row_security": "off",  # refuses a query whose rows a policy would hide
    "search_path": "pg_catalog",  # names of tables and types in values are written in full
}

# The same for libpq's keyword "options".
SESSION_OPTIONS: Final = " ".join(f"-c {name}={value}" for name, value in SESSION.items())

# By oid: these are fixed in every PostgreSQL.
_FIXED: Final[Mapping[int, t.Type]] = {
    16: t.Bool(),
    17: t.Binary(),
    20: t.Int(64),
    21: t.Int(16),
    23: t.Int(32),
    26: t.Int(64),  # oid: unsigned 32 bits, which Spark does not have
    700: t.Float(32),
    701: t.Float(64),
    1082: t.Date(),
    1083: t.Time(),
    1114: t.Timestamp(utc=False),
    1184: t.Timestamp(utc=True),
    2950: t.Uuid(),
}
_NUMERIC: Final = 1700
_DIGITS_MAX: Final = 38
_NESTED_MAX: Final = 16  # domains over domains over arrays; PostgreSQL has no cycles
_SCALE_BITS: Final = 0x7FF
_SCALE_SIGN: Final = 0x400


@dataclass(frozen=True, slots=True)
class TypeFacts:
    """What the catalog says about a type."""

    oid: int
    name: str
    kind: str = "b"  # typtype: base, composite, domain, enum, pseudo, range, multirange
    labels: tuple[str, ...] = ()  # of an enum, in its order
    item: int = 0  # oid of the items, if it is an array
    separator: str = ","  # between the items of arrays of this type
    base: int = 0  # of a domain
    base_typmod: int = -1


def type_of(oid: int, typmod: int, facts: Mapping[int, TypeFacts]) -> t.Type:
    """The type of a column in the topic; String for types that are kept as PostgreSQL writes them.

    >>> type_of(1700, (10 << 16 | 2) + 4, {})
    Decimal(precision=10, scale=2)
    """
    for _ in range(_NESTED_MAX):
        known = facts.get(oid)
        if known is None or known.kind != "d":
            break
        oid, typmod = known.base, known.base_typmod if known.base_typmod >= 0 else typmod
    if oid in _FIXED:
        return _FIXED[oid]
    if oid == _NUMERIC:
        return _numeric(typmod)
    if known is None:
        return t.String()
    if known.kind == "e":
        return _enum(known)
    if known.item:
        item = facts.get(known.item)
        if item is None or item.separator == ",":
            inner = type_of(known.item, typmod, facts)
            # A domain over an array may be an item; only one dimension can be held.
            return t.String() if isinstance(inner, t.List) else t.List(item=t.Nullable(of=inner))
    return t.String()


def _numeric(typmod: int) -> t.Type:
    """numeric(p,s) as Decimal; as String without limits, or where Decimal has none such."""
    if typmod < 4:
        return t.String()
    precision, scale = (typmod - 4) >> 16, (typmod - 4) & _SCALE_BITS
    # The scale has 11 bits and may be negative: numeric(3,-2) holds 12300.
    if not 1 <= precision <= _DIGITS_MAX or scale & _SCALE_SIGN or scale > precision:
        return t.String()
    return t.Decimal(precision, scale)


def _enum(facts: TypeFacts) -> t.Type:
    try:
        return t.Enum(re.sub(r"[\x00-\x1f\x7f.]", "_", facts.name), facts.labels)
    except errors.SchemaError:  # an empty label, or too many
        return t.String()


# -- texts to arrays ----------------------------------------------------------------------


def from_text(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    """Values as the server wrote them, as an array of the type's Arrow type.

    `name` is the column's, for errors: a value that the type cannot hold raises `Unfit`.
    """
    convert = _CONVERT.get(type.__class__)
    if convert is None:
        return texts
    try:
        return convert(texts, type, name)
    except pa.ArrowInvalid:
        bad = _first_bad(texts, lambda part: convert(part, type, name))
        raise _unfit(name, type, bad) from None


def _cast(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    return texts.cast(arrow_type(type))


def _bool(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    true = pc.equal(texts, "t")
    if not pc.all(pc.or_(true, pc.equal(texts, "f")), min_count=0).as_py():
        raise pa.ArrowInvalid("neither t nor f")
    return true


def _time(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    # Arrow reads no times of day, but points in time.
    days = pc.binary_join_element_wise("1970-01-01", texts, " ")
    return days.cast(pa.timestamp("us")).cast(arrow_type(type))


def _enum_texts(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    symbols = getattr(type, "symbols", ())
    known = pc.is_in(texts, value_set=pa.array(symbols, pa.string()))
    if not pc.all(pc.or_(known, pc.is_null(texts)), min_count=0).as_py():
        raise pa.ArrowInvalid("a label that is not known")
    return texts


def _binary(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    """From \\x00ff: all digits of all values at once."""
    if not len(texts):
        return pa.array([], pa.binary())
    if not pc.all(pc.starts_with(texts, "\\x"), min_count=0).as_py():
        raise pa.ArrowInvalid("not in hex")
    digits = pc.utf8_slice_codeunits(texts, 2)
    offsets = np.frombuffer(digits.buffers()[1], np.int32)[digits.offset :][: len(digits) + 1]
    starts = offsets - offsets[0]
    if (starts & 1).any():
        raise pa.ArrowInvalid("half a byte")
    data = digits.buffers()[2]
    whole = b"" if data is None else memoryview(data)[offsets[0] : offsets[-1]]
    try:
        found = binascii.unhexlify(whole)
    except binascii.Error:
        raise pa.ArrowInvalid("not in hex") from None
    valid = None
    if digits.null_count:
        bools = digits.is_valid().to_numpy(zero_copy_only=False)
        valid = pa.py_buffer(np.packbits(bools, bitorder="little"))
    parts = [valid, pa.py_buffer((starts >> 1).astype(np.int32)), pa.py_buffer(found)]
    return pa.Array.from_buffers(pa.binary(), len(digits), parts)


def _list(texts: pa.StringArray, type: t.Type, name: str) -> pa.Array:
    found = split_arrays(texts)
    if isinstance(found, int):
        raise pa.ArrowInvalid("not an array of one dimension that starts at 1")
    items, offsets = found
    inner = t.strip(getattr(type, "item", t.String()))[0]
    return pa.ListArray.from_arrays(offsets, from_text(items, inner, f"{name}[]"))


_CONVERT: Final[Mapping[type[Any], Callable[[pa.StringArray, Any, str], pa.Array]]] = {
    t.Bool: _bool,
    t.Int: _cast,
    t.Float: _cast,
    t.Decimal: _cast,
    t.Date: _cast,
    t.Timestamp: _cast,
    t.Time: _time,
    t.Enum: _enum_texts,
    t.Binary: _binary,
    t.List: _list,
}


# -- snapshots ----------------------------------------------------------------------------

_DATES: Final = (-719_162, 2_932_896)  # days of the years 1 and 9999, after 1970-01-01
_DAY: Final = 86_400_000_000
# The driver gives these in the Arrow type of the topic's type.
_NATIVE: Final[Mapping[str, t.Type]] = {
    "boolean": t.Bool(),
    "smallint": t.Int(16),
    "integer": t.Int(32),
    "bigint": t.Int(64),
    "real": t.Float(32),
    "double precision": t.Float(64),
    "text": t.String(),
    "character varying": t.String(),
    # A cast to text would remove the spaces at its end, which the stream has.
    "character": t.String(),
    "bytea": t.Binary(),
    "date": t.Date(),
    "time without time zone": t.Time(),
    "timestamp without time zone": t.Timestamp(utc=False),
    "timestamp with time zone": t.Timestamp(utc=True),
}
# Casts to text that write what the type's output function does; not so those of inet ("/32"),
# boolean ("true") and character, nor those that somebody made for a type of their own.
_CAST_AS_OUTPUT: Final = frozenset(
    {
        *("numeric", "uuid", "json", "jsonb", "interval", "money", "time with time zone"),
        *(_NATIVE.keys() - {"boolean", "character"}),
    }
)
_BRACKETS: Final = re.compile(r"\([^)]*\)")


def quoted(name: str) -> str:
    """A name for a statement.

    >>> quoted('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def select_expression(column: Column) -> str:
    """What a snapshot selects for a column, so that `from_adbc` can read it.

    >>> select_expression(Column("price", t.Decimal(10, 2), "numeric(10,2)"))
    '"price"::text AS "price"'
    """
    name = quoted(column.name)
    plain = _BRACKETS.sub("", column.source_type)
    return name if _NATIVE.get(plain) == column.type else f"{output_text(column)} AS {name}"


def output_text(column: Column) -> str:
    """An expression for a column's text exactly as the stream has it, which a cast may not give.

    >>> output_text(Column("price", t.Decimal(10, 2), "numeric(10,2)"))
    '"price"::text'
    """
    name = quoted(column.name)
    plain = _BRACKETS.sub("", column.source_type)
    if plain in _CAST_AS_OUTPUT or plain.endswith("[]"):
        return f"{name}::text"
    # The output function itself; a row of nulls is a value, unlike for IS NULL.
    return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END"


def from_adbc(array: pa.Array, type: t.Type, name: str) -> pa.Array:
    """A column of a snapshot as the array that `from_text` gives for the same rows."""
    wanted = arrow_type(type)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.type != wanted or isinstance(type, t.Enum):
        return from_text(array.cast(pa.string()), type, name)
    limits = _limits(type)
    if limits is None:
        return array
    width = pa.int32() if isinstance(type, t.Date) else pa.int64()
    numbers = array.view(width)
    outside = pc.or_(pc.less(numbers, limits[0]), pc.greater(numbers, limits[1]))
    if pc.any(outside, min_count=0).as_py():
        number = numbers.filter(outside)[0].as_py()
        raise _unfit(name, type, f"number {number} (infinity, or outside these years)")
    return array


def _limits(type: t.Type) -> tuple[int, int] | None:
    """Numbers that a native value has if its text can be held."""
    match type:
        case t.Date():
            return _DATES
        case t.Timestamp():
            return _DATES[0] * _DAY, (_DATES[1] + 1) * _DAY - 1
        case t.Time():
            return 0, _DAY - 1
        case _:
            return None


# -- errors -------------------------------------------------------------------------------

_SHOWN: Final = 60


def _first_bad(texts: pa.StringArray, convert: Callable[[pa.StringArray], object]) -> str:
    """The first text that cannot be converted, found by halves."""
    low, high = 0, len(texts)  # it is among these
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(texts.slice(low, middle - low))
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    text = str(texts[low].as_py())
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _unfit(name: str, type: t.Type, found: str) -> errors.Unfit:
    match type:
        case t.Date() | t.Timestamp():
            expected = f"{t.kind(type)} of the years 1 to 9999"
        case t.List():
            expected = f"{t.kind(type)} with one dimension from 1"
        case t.Enum():
            return errors.Unfit(
                name,
                f"{t.kind(type)} ({', '.join(type.symbols[:8])})",
                f"{found}, a label that was added since: restart the capture",
            )
        case _:
            expected = t.kind(type)
    return errors.Unfit(
        name,
        expected,
        f"{found}; list the column under 'text' in the table's settings to capture it as "
        f"PostgreSQL writes it",
    )
