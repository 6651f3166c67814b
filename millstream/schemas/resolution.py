"""Reading what was written with another version of a schema.

`mismatches(writer, reader)` lists every reason why values of the writer's type cannot all be read
as the reader's; `Resolution` turns them when there is none. `column_resolution` does the same with
Arrow columns.
The rules are Avro's, less those that lose something (a 64-bit number as a float) and those that
would make another Avro reader see other values (milliseconds read as microseconds).
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
    "value_turn",
]

_Turn: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a reader cannot read a writer's values."""

    field: str
    rule: str
    message: str


def matching_field(field: t.Field, writer: t.Record) -> t.Field | None:
    """The writer's field a reader's field is read from: the one of its name, else of an alias."""
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
        message = f"{t.kind(writer)} was written and is no option of {t.kind(reader)}"
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
        source = matching_field(field, writer)
        if source is not None:
            out += mismatches(source.type, field.type, where)
        elif field.required:
            out.append(
                Mismatch(
                    where,
                    "no_default",
                    "the written data does not have it and it has no default to take instead",
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
    """Turns values of the writer's record into the reader's; refused where that cannot be done."""

    def __init__(self, writer: t.Record, reader: t.Record) -> None:
        refuse_mismatches(writer, reader)
        self._value = value_turn(writer, reader)

    def value(self, plain: dict[str, Any]) -> dict[str, Any]:
        """A plain value of the writer as one of the reader."""
        turned: dict[str, Any] = plain if self._value is None else self._value(plain)
        return turned


def value_turn(writer: t.Type, reader: t.Type) -> _Turn | None:
    """A function on plain values, or None where they stay as they are."""
    if isinstance(writer, t.Nullable):
        inner = value_turn(writer.of, t.strip(reader)[0])
        return None if inner is None else lambda v: None if v is None else inner(v)
    reader, _ = t.strip(reader)
    if isinstance(writer, t.Union):
        return _union_turn(writer, reader)
    if isinstance(reader, t.Union):
        options = [option for option in reader.options if not _solid(writer, option, "")]
        return value_turn(writer, options[0])
    match writer, reader:
        case t.Record(), t.Record():
            return _record_turn(writer, reader)
        case t.List(), t.List():
            item = value_turn(writer.item, reader.item)
            return None if item is None else lambda v: [item(e) for e in v]
        case t.Map(), t.Map():
            value = value_turn(writer.value, reader.value)
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


def _record_turn(writer: t.Record, reader: t.Record) -> _Turn | None:
    plan: list[tuple[str, str | None, _Turn | None, object]] = []
    for field in reader.fields:
        source = matching_field(field, writer)
        if source is None:
            plan.append((field.name, None, None, field.default))
        else:
            turn = value_turn(source.type, field.type)
            plan.append((field.name, source.name, turn, None))
    names = [field.name for field in writer.fields]
    if [source for _, source, _, _ in plan] == names and all(
        name == source and turn is None for name, source, turn, _ in plan
    ):
        return None

    def turn_record(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: (
                fresh(default)
                if source is None
                else (value[source] if turn is None else turn(value[source]))
            )
            for name, source, turn, default in plan
        }

    return turn_record


def _union_turn(writer: t.Union, reader: t.Type) -> _Turn | None:
    turns = [value_turn(option, reader) for option in writer.options]
    if not any(turns):
        return None

    def turn_option(value: Any) -> Any:
        turn = turns[option_of(writer, value)]
        return value if turn is None else turn(value)

    return turn_option
