"""Schemas to Protobuf descriptors (`FileDescriptorProto`), comments included.

What Protobuf's types cannot express (decimal digits, defaults, aliases, that a nested record is
required) is written in comments as `@millstream {...}`. A schema written as `.proto` text and read
again is therefore the same schema, and other Protobuf tools ignore the comments. `proto_reading`
reads descriptors, `proto_text` reads and writes `.proto` text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.formats.proto_pool import make_pool, need

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

__all__ = [
    "FORMAT",
    "MARK",
    "assigned_numbers",
    "is_message",
    "pin_numbers",
    "scalar_name",
    "to_descriptor",
    "union_members",
]

FORMAT: Final = "Protobuf"
# Starts the comment line with what the types cannot express.
MARK: Final = "@millstream "
FILE_NAME: Final = "schema.proto"
TIMESTAMP: Final = "google.protobuf.Timestamp"
DURATION: Final = "google.protobuf.Duration"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_NUMBER: Final = 536_870_911
_RESERVED: Final = range(19_000, 20_000)


def refusal(path: str, what: t.Type | str, reason: str) -> errors.Unmappable:
    """The error for what Protobuf cannot hold."""
    return errors.Unmappable(path, what if isinstance(what, str) else t.kind(what), FORMAT, reason)


def scalar_name(type_: t.Type) -> str:
    """The Protobuf scalar that holds every value of a flat type."""
    match type_:
        case t.Bool():
            return "bool"
        case t.Int(bits, signed):
            return f"{'int' if signed else 'uint'}{64 if bits == 64 else 32}"
        case t.Float(bits):
            return "float" if bits == 32 else "double"
        case t.String() | t.Decimal() | t.Uuid():
            return "string"
        case t.Binary():
            return "bytes"
        case t.Date():
            return "int32"
        case t.Time() | t.Timestamp(False):
            return "int64"
        case _:
            raise errors.SchemaError(f"{t.kind(type_)} is not a Protobuf scalar")


def is_message(type_: t.Type) -> bool:
    """Whether values are written as a message, which Protobuf can leave out."""
    return isinstance(type_, (t.Record, t.Duration)) or (
        isinstance(type_, t.Timestamp) and type_.utc
    )


def union_members(field: t.Field, union: t.Union) -> list[str]:
    """The names of the fields of the oneof a union is written as."""
    return [f"{field.name}_{index}" for index in range(len(union.options))]


def assigned_numbers(record: t.Record) -> dict[str, list[int]]:
    """The field numbers of each field (several for a union): those declared, then the free ones."""
    taken = {field.number for field in record.fields if field.number is not None}
    out: dict[str, list[int]] = {}
    following = 1
    for field in record.fields:
        inner, _ = t.strip(field.type)
        wanted = len(inner.options) if isinstance(inner, t.Union) else 1
        if wanted == 1 and field.number is not None:
            out[field.name] = [field.number]
            continue
        numbers: list[int] = []
        while len(numbers) < wanted:
            if following not in taken and following not in _RESERVED:
                numbers.append(following)
            following += 1
        out[field.name] = numbers
    return out


def pin_numbers(record: t.Record, earlier: Sequence[t.Record] = ()) -> t.Record:
    """The record with a number for every field: those of earlier versions (oldest first) are kept.

    A number once used is never given to another field, so that Protobuf readers of any version see
    the fields they know.
    """
    known: dict[str, int] = {}
    used: set[int] = set()
    for version in earlier:
        used.update(f.number for f in version.fields if f.number is not None)
        known.update({f.name: f.number for f in version.fields if f.number is not None})
    used.update(f.number for f in record.fields if f.number is not None)
    fields = []
    for field in record.fields:
        number = field.number
        for name in (field.name, *field.aliases):
            number = known.get(name) if number is None else number
        if number is None:
            number = next(n for n in range(1, _MAX_NUMBER) if n not in used and n not in _RESERVED)
            used.add(number)
        fields.append(dataclasses.replace(field, number=number))
    return dataclasses.replace(record, fields=tuple(fields))


# -- to a descriptor ----------------------------------------------------------------------


def to_descriptor(record: t.Record) -> FileDescriptorProto:
    """The proto3 file of a record: its message first, then one message per nested record."""
    pb = need()
    package, _, _ = record.name.rpartition(".")
    file = pb.FileDescriptorProto(name=FILE_NAME, package=package, syntax="proto3")
    writer = _Writer(pb, file)
    writer.message(record, "")
    for name in sorted(writer.imports):
        file.dependency.append(f"google/protobuf/{name.rpartition('.')[2].lower()}.proto")
    _refuse_clashes(file, record)
    return file


def _refuse_clashes(file: FileDescriptorProto, record: t.Record) -> None:
    """Refuse names that clash only in Protobuf (`a_0` and `a0` are the same in its JSON)."""
    try:
        make_pool([file])
    except errors.Unmappable:
        raise
    except errors.SchemaError as error:
        raise refusal(record.name, record, str(error)) from None


class _Writer:
    """One file being written; each record becomes one message, also if it is used several times."""

    def __init__(self, pb: Any, file: FileDescriptorProto) -> None:
        self.pb = pb
        self.file = file
        self.imports: set[str] = set()
        self.messages: dict[str, t.Record] = {}

    def name(self, record: t.Record) -> str:
        package = f"{self.file.package}." if self.file.package else ""
        return record.name.removeprefix(package).replace(".", "_")

    def message(self, record: t.Record, path: str) -> str:
        """The message's name; it is added to the file if it is not in it yet."""
        name = self.name(record)
        if not _NAME.fullmatch(name):
            raise refusal(path or name, record, f"'{name}' is not a name: letters, digits, _")
        other = self.messages.setdefault(name, record)
        if other is not record and other != record:
            raise refusal(path, record, f"another record of this schema is also named '{name}'")
        if any(message.name == name for message in self.file.message_type):
            return name
        message = self.file.message_type.add(name=name)
        location = [4, len(self.file.message_type) - 1]
        facts: dict[str, Any] = {}
        full = f"{self.file.package}.{name}" if self.file.package else name
        if full != record.name:
            facts["name"] = record.name
        if record.aliases:
            facts["aliases"] = list(record.aliases)
        numbers = assigned_numbers(record)
        for field in record.fields:
            where = f"{path}.{field.name}" if path else field.name
            self.field(message, field, where, numbers[field.name], location)
            self.field_facts(field, facts)
        # Most records declare no numbers at all: one flag instead of a list.
        if len(facts.get("unnumbered", ())) == len(record.fields):
            facts["unnumbered"] = True
        self.synthetic_oneofs(message)
        self.comment(location, record.doc, facts)
        return name

    def field_facts(self, field: t.Field, facts: dict[str, Any]) -> None:
        inner, nullable = t.strip(field.type)
        if field.default is t.MISSING:
            facts.setdefault("required", []).append(field.name)
        elif field.default not in (([], {}) if not nullable else (None,)):
            facts.setdefault("defaults", {})[field.name] = canonical.default_to(
                field.type, field.default
            )
        if field.aliases:
            facts.setdefault("was", {})[field.name] = list(field.aliases)
        if isinstance(inner, t.Union) and field.number is not None:
            facts.setdefault("numbers", {})[field.name] = field.number
        if field.number is None:
            facts.setdefault("unnumbered", []).append(field.name)

    def field(
        self, message: DescriptorProto, field: t.Field, path: str, numbers: list[int],
        location: list[int],
    ) -> None:  # fmt: skip
        inner, nullable = t.strip(field.type)
        if not _NAME.fullmatch(field.name):
            raise refusal(path, field.type, f"'{field.name}' is not a name: letters, digits, _")
        if any(not 1 <= n <= _MAX_NUMBER or n in _RESERVED for n in numbers):
            raise refusal(path, field.type, f"{numbers[0]} is not a field number")
        if isinstance(inner, t.Union):
            self.oneof(message, field, inner, path, numbers, location)
            return
        proto = message.field.add(name=field.name, number=numbers[0])
        proto.label = self.pb.FieldDescriptorProto.LABEL_OPTIONAL
        at = [*location, 2, len(message.field) - 1]
        facts: dict[str, Any] = {}
        if isinstance(inner, (t.List, t.Map)):
            if nullable:
                raise refusal(path, field.type, "an empty list or map looks like a missing one")
            proto.label = self.pb.FieldDescriptorProto.LABEL_REPEATED
            if isinstance(inner, t.Map):
                facts |= self.map_entry(message, proto, inner, path)
            else:
                facts |= self.value(message, proto, inner.item, path)
        else:
            facts |= self.value(message, proto, inner, path)
            if not is_message(inner):
                proto.proto3_optional = nullable
            elif not nullable:
                facts["present"] = True
        self.comment(at, field.doc, facts)

    def value(self, message: DescriptorProto, proto: Any, type_: t.Type, path: str) -> Any:
        """Set the type of a field; return what its Protobuf type cannot express."""
        if isinstance(type_, (t.Nullable, t.List, t.Map, t.Union)):
            raise refusal(path, type_, "a list or map cannot hold it; wrap it in a record")
        package = f".{self.file.package}." if self.file.package else "."
        if isinstance(type_, t.Record):
            proto.type = self.pb.FieldDescriptorProto.TYPE_MESSAGE
            proto.type_name = package + self.message(type_, path)
            return {}
        if isinstance(type_, t.Enum):
            proto.type = self.pb.FieldDescriptorProto.TYPE_ENUM
            proto.type_name = f"{package}{message.name}.{self.enum(message, type_, path)}"
            return {"type": canonical.type_to(type_)}
        if isinstance(type_, t.Duration) or (isinstance(type_, t.Timestamp) and type_.utc):
            name = DURATION if isinstance(type_, t.Duration) else TIMESTAMP
            self.imports.add(name)
            proto.type = self.pb.FieldDescriptorProto.TYPE_MESSAGE
            proto.type_name = f".{name}"
            return {} if type_ in (t.Duration(), t.Timestamp()) else {"type": t.kind(type_)}
        scalar = scalar_name(type_)
        proto.type = getattr(self.pb.FieldDescriptorProto, f"TYPE_{scalar.upper()}")
        return {} if SCALARS[scalar] == type_ else {"type": t.kind(type_)}

    def enum(self, message: DescriptorProto, type_: t.Enum, path: str) -> str:
        name = type_.name.replace(".", "_")
        for used in (name, *type_.symbols):
            if not _NAME.fullmatch(used):
                raise refusal(path, type_, f"'{used}' is not a name: letters, digits, _")
        for other in message.enum_type:
            same = {value.name for value in other.value} & set(type_.symbols)
            if other.name == name and [v.name for v in other.value] == list(type_.symbols):
                return name
            if other.name == name or same:
                raise refusal(
                    path, type_, f"its names clash with the enum '{other.name}' next to it"
                )
        enum = message.enum_type.add(name=name)
        for number, symbol in enumerate(type_.symbols):
            enum.value.add(name=symbol, number=number)
        return name

    def map_entry(self, message: DescriptorProto, proto: Any, type_: t.Map, path: str) -> Any:
        pb = self.pb.FieldDescriptorProto
        camel = "".join(part[:1].upper() + part[1:] for part in proto.name.split("_"))
        entry = message.nested_type.add(name=f"{camel}Entry")
        entry.options.map_entry = True
        key = entry.field.add(name="key", number=1, label=pb.LABEL_OPTIONAL)
        facts = {}
        if self.value(message, key, type_.key, path):
            facts["key"] = t.kind(type_.key)
        value = entry.field.add(name="value", number=2, label=pb.LABEL_OPTIONAL)
        facts |= self.value(message, value, type_.value, path)
        package = f".{self.file.package}." if self.file.package else "."
        proto.type = pb.TYPE_MESSAGE
        proto.type_name = f"{package}{message.name}.{entry.name}"
        return facts

    def oneof(
        self, message: DescriptorProto, field: t.Field, union: t.Union, path: str,
        numbers: list[int], location: list[int],
    ) -> None:  # fmt: skip
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=field.name)
        facts = {} if isinstance(field.type, t.Nullable) else {"present": True}
        self.comment([*location, 8, index], field.doc, facts)
        for name, option, number in zip(
            union_members(field, union), union.options, numbers, strict=True
        ):
            proto = message.field.add(name=name, number=number, oneof_index=index)
            proto.label = self.pb.FieldDescriptorProto.LABEL_OPTIONAL
            at = [*location, 2, len(message.field) - 1]
            self.comment(at, "", self.value(message, proto, option, path))

    def synthetic_oneofs(self, message: DescriptorProto) -> None:
        """Protobuf marks presence in proto3 with a oneof of one field, after the real ones."""
        for proto in message.field:
            if proto.proto3_optional:
                proto.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{proto.name}")

    def comment(self, location: list[int], doc: str, facts: dict[str, Any]) -> None:
        lines = doc.splitlines()
        if facts:
            lines.append(MARK + json.dumps(facts, sort_keys=True, separators=(",", ":")))
        if lines:
            text = "".join(f" {line}\n" if line else "\n" for line in lines)
            self.file.source_code_info.location.add(path=location, leading_comments=text)


SCALARS: Final[dict[str, t.Type]] = {
    "bool": t.Bool(),
    "int32": t.Int(32),
    "sint32": t.Int(32),
    "sfixed32": t.Int(32),
    "int64": t.Int(64),
    "sint64": t.Int(64),
    "sfixed64": t.Int(64),
    "uint32": t.Int(32, signed=False),
    "fixed32": t.Int(32, signed=False),
    "uint64": t.Int(64, signed=False),
    "fixed64": t.Int(64, signed=False),
    "float": t.Float(32),
    "double": t.Float(64),
    "string": t.String(),
    "bytes": t.Binary(),
}
