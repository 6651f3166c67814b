"""Reading what was written with another version of a schema.

`mismatches(writer, reader)` lists the reasons why some values of the writer's type cannot be read
as the reader's. If there are none, `Resolution` converts values; `column_resolution` does the same
for Arrow columns. The rules are Avro's, without those that lose something (a 64-bit number as a
float) or that make another Avro reader see other values (milliseconds read as microseconds).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.values.fit import fresh, option_of

__all__ = [
    "Mismatch",
    "Resolution",
    "matching_field",
    "mismatches",
    "refuse_mismatches",
    "value_converter",
]

_Convert: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a reader cannot read a writer's values."""

    field: str
    rule: str
    message: str


def matching_field(field: t.Field, writer: t.Record) -> t.Field | None:
    """The writer's field that a reader's field is read from, by name or else by alias."""
    by_name = {candidate.name: candidate for candidate in writer.fields}
    for name in (field.name, *field.aliases):
        if name in by_name:
            return by_name[name]
    return None


# -- the rules ----------------------------------------------------------------------------


def mismatches(writer: t.Type, reader: t.Type, path: str = "") -> list[Mismatch]:
    """Every reason why the reader cannot read the writer's values; none means it can."""
    written, was_nullable = t.strip(writer)
    read, is_nullable = t.strip(reader)
    out = []
    if was_nullable and not is_nullable:
        message = f"it may be null in the written data, and {t.kind(read)} may not"
        out.append(Mismatch(path, "null_refused", message))
    return out + _solid(written, read, path)


def _solid(writer: t.Type, reader: t.Type, path: str) -> list[Mismatch]:
    if isinstance(writer, t.Union):
        found = []
        for option in writer.options:
            if _solid(option, reader, path):
                message = (
                    f"{t.kind(option)} can be in the written data and {t.kind(reader)} is read"
                )
                found.append(Mismatch(path, "option_unknown", message))
        return found
    if isinstance(reader, t.Union):
        if any(not _solid(writer, option, path) for option in reader.options):
            return []
        message = f"{t.kind(writer)} was written and is not an option of {t.kind(reader)}"
        return [Mismatch(path, "option_unknown", message)]
    match writer, reader:
        case t.Record(), t.Record():
            return _records(writer, reader, path)
        case t.List(), t.List():
            return mismatches(writer.item, reader.item, f"{path}[]")
        case t.Map(), t.Map() if writer.key == reader.key:
            return mismatches(writer.value, reader.value, f"{path}{{}}")
        case t.Enum(), t.Enum():
            return _enums(writer, reader, path)
    if writer == reader or _widens(writer, reader):
        return []
    message = f"{t.kind(writer)} was written and cannot be read as {t.kind(reader)}"
    return [Mismatch(path, "type_changed", message)]


def _widens(writer: t.Type, reader: t.Type) -> bool:
    """Whether every value of the writer's type is one of the reader's, and equal to it."""
    match writer, reader:
        case t.Int(), t.Int():
            return reader.low <= writer.low and writer.high <= reader.high
        case t.Int(bits), t.Float(width):
            return bits <= (32 if width == 64 else 16)
        case t.Float(), t.Float():
            return writer.bits <= reader.bits
        case t.Decimal(), t.Decimal():
            return writer.scale == reader.scale and writer.precision <= reader.precision
        case _:
            return False


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _records(writer: t.Record, reader: t.Record, path: str) -> list[Mismatch]:
    out = []
    known = {_last(name) for name in (reader.name, *reader.aliases)}
    if _last(writer.name) not in known:
        out.append(
            Mismatch(
                path,
                "name_changed",
                f"the record was named '{writer.name}' and is read as '{reader.name}'; keep the "
                f"name or add the old one to its aliases",
            )
        )
    for field in reader.fields:
        where = f"{path}.{field.name}" if path else field.name
        written = matching_field(field, writer)
        if written is not None:
            out += mismatches(written.type, field.type, where)
        elif field.required:
            out.append(
                Mismatch(
                    where,
                    "no_default",
                    "the written data does not have it and it has no default",
                )
            )
    return out


def _enums(writer: t.Enum, reader: t.Enum, path: str) -> list[Mismatch]:
    out = []
    if _last(writer.name) != _last(reader.name):
        message = f"the enum was named '{writer.name}' and is read as '{reader.name}'"
        out.append(Mismatch(path, "name_changed", message))
    unknown = [symbol for symbol in writer.symbols if symbol not in reader.symbols]
    if unknown and reader.default is None:
        message = (
            f"the symbols {', '.join(unknown[:8])} can be in the written data; the reader does not "
            f"know them and has no default symbol"
        )
        out.append(Mismatch(path, "symbol_unknown", message))
    return out


def refuse_mismatches(writer: t.Record, reader: t.Record) -> None:
    """Raise SchemaError unless the reader can read all values of the writer."""
    problems = mismatches(writer, reader)
    if not problems:
        return
    first = problems[0]
    where = f"field '{first.field}': " if first.field else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise errors.SchemaError(
        f"data of {t.kind(writer)} cannot be read as {t.kind(reader)}: {where}{first.message}{more}"
    )


# -- values -------------------------------------------------------------------------------


class Resolution:
    """Converts values of the writer's record to the reader's; SchemaError if that is impossible."""

    def __init__(self, writer: t.Record, reader: t.Record) -> None:
        refuse_mismatches(writer, reader)
        self.convert = value_converter(writer, reader)  # None: values stay the same

    def value(self, plain: dict[str, Any]) -> dict[str, Any]:
        """The reader's form of a plain value of the writer."""
        converted: dict[str, Any] = plain if self.convert is None else self.convert(plain)
        return converted


def value_converter(writer: t.Type, reader: t.Type) -> _Convert | None:
    """A function on plain values, or None if they stay the same."""
    if isinstance(writer, t.Nullable):
        inner = value_converter(writer.of, t.strip(reader)[0])
        return None if inner is None else lambda v: None if v is None else inner(v)
    reader, _ = t.strip(reader)
    if isinstance(writer, t.Union):
        return _union_converter(writer, reader)
    if isinstance(reader, t.Union):
        options = [option for option in reader.options if not _solid(writer, option, "")]
        return value_converter(writer, options[0])
    match writer, reader:
        case t.Record(), t.Record():
            return _record_converter(writer, reader)
        case t.List(), t.List():
            item = value_converter(writer.item, reader.item)
            return None if item is None else lambda v: [item(e) for e in v]
        case t.Map(), t.Map():
            value = value_converter(writer.value, reader.value)
            return None if value is None else lambda v: {k: value(e) for k, e in v.items()}
        case t.Enum(), t.Enum():
            known, default = frozenset(reader.symbols), reader.default
            if known.issuperset(writer.symbols):
                return None
            return lambda v: v if v in known else default
        case t.Int(), t.Float():
            return float
        case _:
            return None


def _record_converter(writer: t.Record, reader: t.Record) -> _Convert | None:
    plan: list[tuple[str, str | None, _Convert | None, object]] = []
    for field in reader.fields:
        written = matching_field(field, writer)
        if written is None:
            plan.append((field.name, None, None, field.default))
        else:
            convert = value_converter(written.type, field.type)
            plan.append((field.name, written.name, convert, None))
    names = [field.name for field in writer.fields]
    if [written for _, written, _, _ in plan] == names and all(
        name == written and convert is None for name, written, convert, _ in plan
    ):
        return None

    def convert_record(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: (
                fresh(default)
                if written is None
                else (value[written] if convert is None else convert(value[written]))
            )
            for name, written, convert, default in plan
        }

    return convert_record


def _union_converter(writer: t.Union, reader: t.Type) -> _Convert | None:
    converters = [value_converter(option, reader) for option in writer.options]
    if not any(converters):
        return None

    def convert_option(value: Any) -> Any:
        convert = converters[option_of(writer, value)]
        return value if convert is None else convert(value)

    return convert_option
