"""Many Avro values of one schema to a column and back, a field of all of them at a time. Pure.

A path for records of flat fields, of fields that may be null and of such records: whatever is not
known to be sound, and every other schema, is left to `AvroWire`, which is the definition. What is
read is checked as strictly; fields that Arrow's type does not check are left to `Conformer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.schemas import Schema, arrow_type, to_avro
from millstream.schemas import types as t
from millstream.schemas.formats.avro import parse_avro
from millstream.schemas.formats.json_columns import NotFast

__all__ = ["AvroColumns", "NotFast"]

_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_PAD: Final = bytes(32)  # after the values: numbers are read without looking for their end
_NUMBER_MAX: Final = 10  # bytes
_WIDE: Final = 16  # bytes of a decimal in Arrow
_NARROW_DIGITS: Final = 18  # such a decimal fits 64 bits


class _Values(NamedTuple):
    """Values one after the other: where the rest of each starts, and where it ends."""

    block: _Numbers
    buffer: pa.Buffer  # the same bytes
    at: _Numbers
    end: _Numbers

    def some(self, rows: _Numbers) -> _Values:
        return self._replace(at=self.at[rows], end=self.end[rows])


class _Field(NamedTuple):
    """How values of a type are read, and how a column of them is written."""

    # The column of the type, and where the rest of each value starts.
    read: Callable[[_Values], tuple[pa.Array, _Numbers]]
    # Columns of bytes, which are joined row by row; what is null may be written as anything.
    write: Callable[[pa.Array], list[pa.Array]]


class AvroColumns:
    """Reads and writes values of one schema; NotFast for a schema that only `AvroWire` knows."""

    def __init__(self, schema: Schema) -> None:
        origin = schema.origin
        declared = origin is not None and origin.format == "avro"
        form = parse_avro(origin.text) if declared and origin else to_avro(schema.record)
        try:
            self._field = _field_of(schema.record, copy.deepcopy(form), {})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise NotFast from None

    def column(self, values: Sequence[bytes]) -> pa.StructArray:
        """The values as a column; NotFast or an Arrow error if one is not known to be sound."""
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        data = b"".join([*values, _PAD])
        end = np.cumsum(sizes)
        block = np.frombuffer(data, np.uint8)
        given = _Values(block, pa.py_buffer(data), end - sizes, end)
        column, at = self._field.read(given)
        _all(at == end)
        return column

    def rows(self, column: pa.StructArray, prefix: bytes = b"") -> list[bytes]:
        """The values of a column without nulls, which are known to fit, after a prefix."""
        if column.offset:
            column = column.take(pa.array(np.arange(len(column))))
        parts = self._field.write(column)
        start = [pa.repeat(pa.scalar(prefix, pa.binary()), len(column))] if prefix else []
        joined = pc.binary_join_element_wise(*start, *parts, pa.scalar(b"", pa.binary()))
        found: list[bytes] = joined.to_pylist()
        return found


def _all(holds: Any) -> None:
    if not holds.all():
        raise NotFast


# -- which fields -------------------------------------------------------------------------


def _named(form: Any, names: dict[str, Any]) -> Any:
    """The form itself, where it is in another one or was given by its name."""
    while isinstance(form, dict) and isinstance(form.get("type"), dict):
        form = form["type"]
    if isinstance(form, str):
        return names.get(form, form)
    if isinstance(form, dict) and form.get("type") in ("record", "error", "enum", "fixed"):
        name = f"{form.get('namespace', '')}.{form['name']}".rpartition(".")[2]
        if names.setdefault(name, form) is not form:
            raise NotFast  # the same name in two namespaces
    return form


def _field_of(type_: t.Type, form: Any, names: dict[str, Any]) -> _Field:
    """The reader and writer of a type, as its Avro form has it."""
    form = _named(form, names)
    name = form.get("type") if isinstance(form, dict) else form
    match type_:
        case t.Nullable():
            options = form["type"] if isinstance(form, dict) else form
            return _nullable(type_, options, names)
        case t.Record() if name in ("record", "error"):
            forms = {field["name"]: field["type"] for field in form["fields"]}
            if list(forms) != [field.name for field in type_.fields]:
                raise NotFast
            fields = [_field_of(f.type, forms[f.name], names) for f in type_.fields]
            return _record(type_, fields)
        case t.Enum() if name == "enum":
            return _enum(form["symbols"])
        case t.Decimal() if name in ("bytes", "fixed"):
            return _decimal(type_, form.get("size") if name == "fixed" else None)
        case t.Binary(size) if size is not None and name == "fixed" and form["size"] == size:
            return _fixed(size)
        case t.Bool() if name == "boolean":
            return _BOOL
        case t.Int() if name in ("int", "long"):
            return _whole(type_)
        case t.Float(bits) if name == ("float" if bits == 32 else "double"):
            return _float(np.dtype(f"<f{bits // 8}"))
        case t.String() | t.Uuid() if name == "string":
            return _text(pa.string())
        case t.Binary(None) if name == "bytes":
            return _text(pa.binary())
        case t.Date() | t.Time() | t.Timestamp() | t.Duration() if name in ("int", "long"):
            return _time(type_)
        case _:
            raise NotFast


# -- numbers ------------------------------------------------------------------------------


def _number(given: _Values) -> tuple[_Numbers, _Numbers]:
    """Whole numbers of Avro, and where what follows them starts."""
    block, at, end = given.block, given.at, given.end
    found = block[at]
    value = (found & 0x7F).astype(np.uint64)
    at = at + 1
    open_ = np.flatnonzero(found >= 0x80)
    for place in range(1, _NUMBER_MAX):
        if not len(open_):
            break
        found = block[at[open_]]
        value[open_] |= (found & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
        at[open_] += 1
        if place == _NUMBER_MAX - 1:
            _all(found <= 1)  # the last of 64 bits
        open_ = open_[found >= 0x80]
    _all(at <= end)
    half = (value >> np.uint64(1)).view(np.int64)
    return half ^ -(value & np.uint64(1)).view(np.int64), at


def _written_numbers(values: _Numbers) -> pa.Array:
    """Whole numbers as Avro writes them."""
    signed = values.astype(np.int64, copy=False)
    coded = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    most = int(coded.max()) if len(coded) else 0
    width = max(1, -(-most.bit_length() // 7))
    if width == 1:
        return _bytes_of(coded.astype(np.uint8), 1)
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    pieces = coded[:, None] >> shifts  # a row for each number
    kept = pieces != 0
    kept[:, 0] = True
    written = (pieces & np.uint64(0x7F)).astype(np.uint8)
    written[:, :-1] |= np.where(kept[:, 1:], np.uint8(0x80), np.uint8(0))
    starts = np.zeros(len(coded) + 1, np.int32)
    np.cumsum(kept.sum(axis=1), out=starts[1:])
    return pa.Array.from_buffers(
        pa.binary(), len(coded), [None, pa.py_buffer(starts), pa.py_buffer(written[kept])]
    )


def _bytes_of(values: _Numbers, size: int) -> pa.Array:
    """Numbers of a fixed size as the bytes that they are in memory."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.binary(size), len(values), [None, data]).cast(pa.binary())


def _plain(array: pa.Array, kind: pa.DataType) -> _Numbers:
    """The numbers under a column; 0 where it is null."""
    numbers = array.view(kind)
    found: _Numbers = (numbers.fill_null(0) if numbers.null_count else numbers).to_numpy()
    return found


def _whole(type_: t.Int) -> _Field:
    target = arrow_type(type_)
    high = min(type_.high, 2**63 - 1)

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        values, at = _number(given)
        if type_.high < 2**63 - 1:
            _all((values >= type_.low) & (values <= high))
        return pa.array(values).cast(target), at

    return _Field(read, lambda array: [_written_numbers(_plain(array, target))])


def _time(type_: t.Date | t.Time | t.Timestamp | t.Duration) -> _Field:
    target = arrow_type(type_)
    storage = pa.int32() if isinstance(type_, t.Date) else pa.int64()
    factor = 1000 if isinstance(type_, (t.Time, t.Timestamp)) and type_.unit == "ms" else 1
    limit = (2**31 if isinstance(type_, t.Date) else 2**63) // factor

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        values, at = _number(given)
        if limit < 2**63:
            _all((values >= -limit) & (values < limit))
        numbers = pa.array(values * factor if factor > 1 else values)
        return numbers.cast(storage).view(target), at

    def write(array: pa.Array) -> list[pa.Array]:
        numbers = _plain(array, storage)
        return [_written_numbers(numbers // factor if factor > 1 else numbers)]

    return _Field(read, write)


def _read_bool(given: _Values) -> tuple[pa.Array, _Numbers]:
    found = given.block[given.at]
    _all((found <= 1) & (given.at < given.end))
    return pa.array(found == 1), given.at + 1


def _write_bool(array: pa.Array) -> list[pa.Array]:
    return [_bytes_of(_plain(array.cast(pa.uint8()), pa.uint8()), 1)]


_BOOL: Final = _Field(_read_bool, _write_bool)


def _float(kind: np.dtype[Any]) -> _Field:
    size = kind.itemsize
    target = pa.from_numpy_dtype(kind)

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        after = given.at + size
        _all(after <= given.end)
        found = np.ascontiguousarray(given.block[given.at[:, None] + np.arange(size)])
        return pa.array(found.view(kind)[:, 0]), after

    return _Field(read, lambda array: [_bytes_of(_plain(array, target), size)])


# -- texts and bytes ----------------------------------------------------------------------


def _cut(given: _Values, start: _Numbers, after: _Numbers) -> pa.Array:
    """A part of each value, as a column of bytes."""
    if not len(start):
        return pa.array([], pa.binary())
    borders = np.empty(2 * len(start), np.int32)
    borders[::2], borders[1::2] = start, after
    buffers = [None, pa.py_buffer(borders), given.buffer]
    # Every other piece is what lies between two values.
    pieces = pa.Array.from_buffers(pa.binary(), len(borders) - 1, buffers)
    return pieces.take(pa.array(np.arange(0, len(borders), 2)))


def _sized(given: _Values) -> tuple[_Numbers, _Numbers]:
    """Where bytes with their number before them start and end."""
    sizes, start = _number(given)
    _all((sizes >= 0) & (sizes <= given.end - start))
    return start, start + sizes


def _text(target: pa.DataType) -> _Field:
    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        start, after = _sized(given)
        return _cut(given, start, after).cast(target), after

    def write(array: pa.Array) -> list[pa.Array]:
        filled = array.fill_null(b"" if target == pa.binary() else "")
        sizes = pc.binary_length(filled).to_numpy()
        return [_written_numbers(sizes), filled.cast(pa.binary())]

    return _Field(read, write)


def _fixed(size: int) -> _Field:
    target = pa.binary(size)

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        after = given.at + size
        _all(after <= given.end)
        return _cut(given, given.at, after).cast(target), after

    return _Field(read, lambda array: [array.fill_null(bytes(size)).cast(pa.binary())])


def _enum(symbols: list[str]) -> _Field:
    known = pa.array(symbols, pa.string())

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        numbers, at = _number(given)
        _all((numbers >= 0) & (numbers < len(symbols)))
        return known.take(pa.array(numbers)), at

    def write(array: pa.Array) -> list[pa.Array]:
        numbers = pc.index_in(array, known)
        if numbers.null_count > array.null_count:
            raise NotFast
        return [_written_numbers(_plain(numbers, pa.int32()))]

    return _Field(read, write)


def _decimal(type_: t.Decimal, size: int | None) -> _Field:
    target = arrow_type(type_)

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        start, after = (given.at, given.at + size) if size is not None else _sized(given)
        sizes = after - start
        _all((sizes >= 1) & (sizes <= 8) & (after <= given.end))
        first = given.block[start]
        value = np.where(first >= 0x80, np.int64(-1), np.int64(0))
        for place in range(int(sizes.max(initial=0))):
            here = place < sizes
            value[here] = (value[here] << 8) | given.block[start[here] + place]
        pairs = np.empty((len(value), 2), np.int64)  # of 128 bits, the lower ones first
        pairs[:, 0], pairs[:, 1] = value, value >> 63
        column = pa.Array.from_buffers(target, len(value), [None, pa.py_buffer(pairs)])
        column.validate(full=True)  # that they have no more digits
        return column, after

    def write(array: pa.Array) -> list[pa.Array]:
        whole = memoryview(array.buffers()[1]).cast("B")[: _WIDE * len(array)]
        if type_.precision <= _NARROW_DIGITS:
            unscaled: list[int] = whole.cast("q")[::2].tolist()
        else:
            unscaled = [
                int.from_bytes(whole[at : at + _WIDE], "little", signed=True)
                for at in range(0, len(whole), _WIDE)
            ]
        if size is not None:
            return [pa.array([n.to_bytes(size, "big", signed=True) for n in unscaled], pa.binary())]
        texts = [n.to_bytes((n.bit_length() + 8) >> 3, "big", signed=True) for n in unscaled]
        column = pa.array(texts, pa.binary())
        return [_written_numbers(pc.binary_length(column).to_numpy()), column]

    return _Field(read, write)


# -- parts ----------------------------------------------------------------------------------


def _record(record: t.Record, fields: list[_Field]) -> _Field:
    kinds = list(arrow_type(record))

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        columns = []
        for field in fields:
            column, at = field.read(given)
            columns.append(column)
            given = given._replace(at=at)
        return pa.StructArray.from_arrays(columns, fields=kinds), given.at

    def write(array: pa.Array) -> list[pa.Array]:
        return [
            part for number, field in enumerate(fields) for part in field.write(array.field(number))
        ]

    return _Field(read, write)


def _nullable(type_: t.Nullable, options: Any, names: dict[str, Any]) -> _Field:
    if not isinstance(options, list) or len(options) != 2 or "null" not in options:
        raise NotFast
    null = options.index("null")
    inner = _field_of(type_.of, options[1 - null], names)
    target = arrow_type(type_)
    marks = [_written_numbers(np.array([option]))[0] for option in (null, 1 - null)]

    def read(given: _Values) -> tuple[pa.Array, _Numbers]:
        option, at = _number(given)
        _all((option == 0) | (option == 1))
        there = np.flatnonzero(option != null)
        given = given._replace(at=at)
        if len(there) == len(at):
            return inner.read(given)
        if not len(there):
            return pa.nulls(len(at), target), at
        column, after = inner.read(given.some(there))
        at = at.copy()
        at[there] = after
        rows = np.full(len(at), -1)
        rows[there] = np.arange(len(there))
        return column.take(pa.array(rows, mask=rows < 0)), at

    def write(array: pa.Array) -> list[pa.Array]:
        if not array.null_count:
            return [pa.repeat(marks[1], len(array)), *inner.write(array)]
        there = array.is_valid()
        mark = pc.if_else(there, marks[1], marks[0])
        nothing = pa.scalar(b"", pa.binary())
        return [mark, *(pc.if_else(there, part, nothing) for part in inner.write(array))]

    return _Field(read, write)
