"""Whether a new version of a schema may follow the old ones (pure).

| mode | promise |
| --- | --- |
| BACKWARD | readers with the new version read what the last version wrote |
| FORWARD | readers with the last version read what the new version writes |
| FULL | both |
| ..._TRANSITIVE | the same against every earlier version, not only the last |
| NONE | no promise |
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final, Literal

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.resolution import Mismatch, matching_field, mismatches
from millstream.schemas.schema import Schema

__all__ = ["Mode", "Problem", "check", "parse_mode"]

_Direction = Literal["backward", "forward"]


class Mode(enum.StrEnum):
    """The compatibility mode of a topic: what its schema's versions guarantee."""

    BACKWARD = "BACKWARD"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD = "FORWARD"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL = "FULL"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"
    NONE = "NONE"

    @property
    def transitive(self) -> bool:
        """Whether every earlier version counts, not only the last."""
        return self.value.endswith("_TRANSITIVE")

    @property
    def directions(self) -> tuple[_Direction, ...]:
        """Which side must be able to read the other's data."""
        return _DIRECTIONS[self.value.removesuffix("_TRANSITIVE")]


_DIRECTIONS: Final[dict[str, tuple[_Direction, ...]]] = {
    "BACKWARD": ("backward",),
    "FORWARD": ("forward",),
    "FULL": ("backward", "forward"),
    "NONE": (),
}


def parse_mode(text: str) -> Mode:
    """The mode of that name, in any case; `ConfigError` lists the names."""
    try:
        return Mode(text.upper())
    except ValueError:
        raise errors.ConfigError(
            f"'{text}' is not a compatibility mode; choose one of {', '.join(Mode)}"
        ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a version may not follow: the field, the broken rule, and both versions."""

    field: str
    rule: str
    message: str
    # "backward": the new version cannot read old data. "forward": old readers cannot read new data.
    direction: _Direction
    # The index in `olds` of the version it was compared with.
    version: int

    def __str__(self) -> str:
        where = f"field '{self.field}'" if self.field else "the record"
        return f"{where}: {self.message} [{self.direction}, {self.rule}]"


def check(
    new: Schema | t.Record, olds: Sequence[Schema | t.Record], mode: Mode | str
) -> list[Problem]:
    """Why `new` may not follow `olds` (oldest first) under the mode; an empty list means it may."""
    mode = parse_mode(mode)
    newest = _record(new)
    first = 0 if mode.transitive else max(len(olds) - 1, 0)
    problems = []
    for version in range(first, len(olds)):
        old = _record(olds[version])
        for direction in mode.directions:
            writer, reader = (old, newest) if direction == "backward" else (newest, old)
            found = mismatches(writer, reader) + _numbers(writer, reader, "")
            problems += [Problem(m.field, m.rule, m.message, direction, version) for m in found]
    return problems


def _record(schema: Schema | t.Record) -> t.Record:
    return schema.record if isinstance(schema, Schema) else schema


def _numbers(writer: t.Type, reader: t.Type, path: str) -> list[Mismatch]:
    """Protobuf readers use numbers only: a number must keep its field and a field its number."""
    writer, reader = t.strip(writer)[0], t.strip(reader)[0]
    match writer, reader:
        case t.List(), t.List():
            return _numbers(writer.item, reader.item, f"{path}[]")
        case t.Map(), t.Map():
            return _numbers(writer.value, reader.value, f"{path}{{}}")
        case t.Record(), t.Record():
            return _field_numbers(writer, reader, path)
        case _:
            return []


def _field_numbers(writer: t.Record, reader: t.Record, path: str) -> list[Mismatch]:
    out = []
    written = {field.number: field for field in writer.fields if field.number is not None}
    for field in reader.fields:
        where = f"{path}.{field.name}" if path else field.name
        source = matching_field(field, writer)
        other = written.get(field.number) if field.number is not None else None
        if source is not None:
            out += _numbers(source.type, field.type, where)
            if None not in (source.number, field.number) and source.number != field.number:
                message = f"its field number was {source.number} and is {field.number}"
                out.append(Mismatch(where, "number_changed", message))
        elif other is not None and not {other.name, *other.aliases} & {field.name, *field.aliases}:
            message = f"its field number {field.number} belongs to '{other.name}'"
            out.append(Mismatch(where, "number_reused", message))
    return out
