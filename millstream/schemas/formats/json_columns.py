"""Many JSON texts of one schema as a column, parsed in one go.

Arrow's JSON reader has no Python step for each text, but accepts some texts that the codec refuses,
and leaves open whether a field was null or missing. So what it read is checked column by column;
when one check fails, or the schema has a type that it cannot read exactly, every text goes through
the codec. The codec is the definition; the fast path may only be a shortcut to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.formats.json_wire import JsonWire
from millstream.schemas.schema import Schema
from millstream.schemas.values.columns import ColumnBuilder

__all__ = ["JsonColumns", "NotFast", "checked"]

_Convert: TypeAlias = Callable[[Any], Any]  # what the reader made -> the column of the type
_UUID: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_DECIMAL: Final = r"^-?[0-9]{1,38}(\.[0-9]{1,38})?$"
_ISO_SECONDS: Final = 19  # characters of a time without fraction and zone
_ISO_MICROS: Final = 26
_EXACT: Final = float(2**53)  # whole numbers from here on may have been rounded


class NotFast(Exception):
    """Only the codec can decide about a text, or about the schema."""


class JsonColumns:
    """Reads texts of one schema, each followed by a line end, as a struct array."""

    def __init__(self, schema: Schema) -> None:
        record = schema.record
        self._wire = JsonWire(schema)
        self._builder = ColumnBuilder(record)
        self._convert: _Convert | None = None
        self._counted: dict[int, bytes] = {}  # fields whose nulls must be in the texts
        try:
            fields = [pa.field(field.name, _read_type(field.type)) for field in record.fields]
            self._convert = _record_converter(record, top=True)
        except NotFast:
            return
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema(fields), unexpected_field_behavior="error"
        )
        names = list(_names(record))
        for number, field in enumerate(record.fields):
            if isinstance(field.type, t.Nullable) and field.default is not None:
                if names.count(field.name) > 1 or not _is_plain(field.name):
                    self._convert = None
                self._counted[number] = b'"%b":null' % field.name.encode()

    def column(self, texts: bytes, count: int) -> pa.StructArray:
        """The values of `count` texts; `Unfit` if one of them is not a value of the schema."""
        if self._convert is not None:
            try:
                return self._fast(texts, count, self._convert)
            except (NotFast, pa.ArrowException, UnicodeDecodeError):
                pass  # the codec decides, and words the refusal
        return self.column_by_codec(texts, count)

    def column_by_codec(self, texts: bytes, count: int) -> pa.StructArray:
        """`column` without the fast path; it defines the result of `column`."""
        load = self._wire.load
        return self._builder.build([load(text) for text in texts.split(b"\n", count)[:count]])

    def _fast(self, texts: bytes, count: int, convert: _Convert) -> pa.StructArray:
        if not count:
            return self._builder.build([])
        if not _one_a_line(texts, count):
            raise NotFast
        # Arrow's reader does not check that text is UTF-8. A lone block has a lone chunk.
        pa.array([texts], pa.large_binary()).cast(pa.large_string())
        how = pj.ReadOptions(use_threads=False, block_size=len(texts) + 1)
        table = pj.read_json(pa.BufferReader(texts), read_options=how, parse_options=self._options)
        if table.num_rows != count:
            raise NotFast
        read = table.combine_chunks().to_struct_array()
        read = read.combine_chunks() if isinstance(read, pa.ChunkedArray) else read
        for number, mark in self._counted.items():
            nulls = read.field(number).null_count
            if nulls and texts.count(mark) != nulls:
                raise NotFast
        return convert(read)


def _one_a_line(texts: bytes, count: int) -> bool:
    """Whether no text can end in another line: Arrow's reader takes line ends for spaces."""
    borders = texts.count(b"}\n{") + 1
    return texts.count(b"\n") == borders == count and texts[:1] == b"{" and texts[-2:] == b"}\n"


def _names(type_: t.Type) -> Iterator[str]:
    """The names of all fields, at any depth."""
    match type_:
        case t.Record():
            for field in type_.fields:
                yield field.name
                yield from _names(field.type)
        case t.Nullable():
            yield from _names(type_.of)
        case t.List():
            yield from _names(type_.item)


def _is_plain(name: str) -> bool:
    """Whether a name is the same text in JSON."""
    return name.isascii() and '"' not in name and "\\" not in name


def _read_type(type_: t.Type) -> pa.DataType:
    """The type that Arrow's reader is asked for."""
    match type_:
        case t.Bool() | t.Int() | t.String():
            return arrow_type(type_)
        case t.Float():
            return pa.float64()
        case t.Enum() | t.Uuid() | t.Timestamp() | t.Date() | t.Decimal():
            return pa.string()
        case t.Nullable():
            return _read_type(type_.of)
        case t.List():
            return pa.list_(_read_type(type_.item))
        case t.Record():
            return pa.struct([(field.name, _read_type(field.type)) for field in type_.fields])
        case _:
            raise NotFast


# -- checked conversion -----------------------------------------------------------------------


def checked(type_: t.Type) -> _Convert:
    """Makes the column of a type from what was read; NotFast where only the codec can decide."""
    match type_:
        case t.Nullable():
            return checked(type_.of)
        case t.Record():
            return _record_converter(type_)
        case t.List():
            return _list_converter(type_)
        case t.Float(bits):
            return _single if bits == 32 else _exact
        case t.Enum():
            symbols = pa.array(type_.symbols, pa.string())
            return lambda array: _sure(array, pc.is_in(array, symbols))
        case t.Uuid():
            return lambda array: _sure(array, pc.match_substring_regex(array, _UUID))
        case t.Decimal():
            target = arrow_type(type_)
            return lambda array: _sure(array, pc.match_substring_regex(array, _DECIMAL)).cast(
                target
            )
        case t.Date():
            return _date
        case t.Timestamp():
            return _time_converter(type_)
        case _:
            return lambda array: array


def _sure(array: Any, holds: Any) -> Any:
    """The array if a condition holds for every value of it that is not null."""
    if not pc.all(pc.or_(holds, pc.is_null(array))).as_py():
        raise NotFast
    return array


def _exact(array: Any) -> Any:
    """Numbers that were not rounded; not those that JSON does not have."""
    return _sure(array, pc.less(pc.abs(array), _EXACT))


def _single(array: Any) -> Any:
    narrow = _exact(array).cast(pa.float32())
    _sure(array, pc.equal(narrow.cast(pa.float64()), array))
    return narrow


def _date(array: Any) -> Any:
    _sure(array, pc.equal(pc.binary_length(array), 10))
    return _sure(array, pc.greater(array, "0001")).cast(pa.date32())


def _time_converter(type_: t.Timestamp) -> _Convert:
    target, zone = arrow_type(type_), b"Z" if type_.utc else b""

    def convert(array: Any) -> Any:
        # Only the two forms that the codec writes; Arrow reads more of them than the codec does.
        lengths = pc.binary_length(array)
        short = pc.equal(lengths, _ISO_SECONDS + len(zone))
        long = pc.equal(lengths, _ISO_MICROS + len(zone))
        _sure(array, pc.or_(short, long))
        _sure(array, pc.equal(pc.utf8_slice_codeunits(array, 10, 11), "T"))
        if zone:
            _sure(array, pc.ends_with(array, "Z"))
        _sure(array, pc.greater(array, "0001"))
        times = array.cast(target)
        if type_.unit == "ms":
            micros = pc.fill_null(times.cast(pa.int64()), 0).to_numpy()
            if (micros % 1000).any():
                raise NotFast
        return times

    return convert


def _mask(array: Any) -> Any:
    return array.is_null() if array.null_count else None


def _record_converter(record: t.Record, top: bool = False) -> _Convert:
    fields = list(arrow_type(record))
    plan = []
    for field in record.fields:
        # Deeper down nothing shows whether a field was null or missing, unless that is the same.
        nullable = isinstance(field.type, t.Nullable) and (top or field.default is None)
        plan.append((nullable, checked(field.type)))

    def convert(array: Any) -> Any:
        absent = array.null_count
        columns = []
        for number, (nullable, inner) in enumerate(plan):
            child = array.field(number)
            if child.null_count != absent and not nullable:
                raise NotFast
            columns.append(inner(child))
        return pa.StructArray.from_arrays(columns, fields=fields, mask=_mask(array))

    return convert


def _list_converter(type_: t.List) -> _Convert:
    target, inner = arrow_type(type_), checked(type_.item)
    nullable = isinstance(type_.item, t.Nullable)

    def convert(array: Any) -> Any:
        values = array.values
        if values.null_count and not nullable:
            raise NotFast
        return pa.ListArray.from_arrays(
            array.offsets, inner(values), type=target, mask=_mask(array)
        )

    return convert
