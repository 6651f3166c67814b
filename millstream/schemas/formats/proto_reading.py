"""Protobuf descriptors to records.

proto3 fields without presence read as required-by-type with Protobuf's own zero as default; fields
with presence (`optional`, messages) are nullable; a oneof is a nullable union.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.formats.proto_pool import make_pool, need
from millstream.schemas.formats.proto_text import parse_proto
from millstream.schemas.formats.protobuf import (
    DURATION,
    MARK,
    SCALARS,
    TIMESTAMP,
    refusal,
    scalar_name,
)
from millstream.schemas.values.fit import compile_fit

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

__all__ = ["find_message", "from_descriptor", "load_set", "load_text"]


def load_set(data: bytes) -> FileDescriptorSet:
    """A serialized FileDescriptorSet, or a serialized single file."""
    pb = need()
    if len(data) > canonical.MAX_TEXT:
        raise errors.SchemaError(
            f"the descriptor has {len(data):,} bytes; at most {canonical.MAX_TEXT:,} are read"
        )
    try:
        return pb.FileDescriptorSet.FromString(data)
    except Exception as error:  # upb has its own DecodeError, in a different module in each version
        raise errors.SchemaError(f"the bytes are not a FileDescriptorSet: {error}") from None


def load_text(text: str) -> FileDescriptorSet:
    """The set with the one file a `.proto` text describes."""
    return need().FileDescriptorSet(file=[parse_proto(text)])


def find_message(files: list[FileDescriptorProto], name: str | None) -> str:
    """The full name of the message that is the event: the given one, or the only candidate."""
    last = files[-1] if files else None
    if last is None:
        raise errors.SchemaError("the descriptor set has no files")
    prefix = f"{last.package}." if last.package else ""
    if name is not None:
        return name if "." in name or not prefix else prefix + name
    used = {
        name
        for message in last.message_type
        for name in _used_types(message)
        if name != message.name
    }
    free = [m.name for m in last.message_type if m.name not in used]
    if len(free) != 1:
        known = ", ".join(m.name for m in last.message_type) or "none"
        raise errors.SchemaError(
            f"the file has the messages {known}: choose the event's message with message='...'"
        )
    return f"{prefix}{free[0]}"


def _used_types(message: Any) -> Iterator[str]:
    """The last names of the types a message's fields have, those of nested messages included."""
    for field in message.field:
        yield field.type_name.rpartition(".")[2]
    for nested in message.nested_type:
        yield from _used_types(nested)


def from_descriptor(source: FileDescriptorSet, message: str | None = None) -> t.Record:
    """The record of a message in a descriptor set."""
    files = list(source.file)
    name = find_message(files, message)
    pool = make_pool(files)
    try:
        descriptor = pool.FindMessageTypeByName(name)
    except KeyError:
        raise errors.SchemaError(f"the Protobuf schema has no message '{name}'") from None
    return _Reader(_comments(files)).record(descriptor, "", ())


def _comments(files: list[FileDescriptorProto]) -> dict[str, str]:
    """Leading comments by full name of message, field or oneof."""
    out: dict[str, str] = {}
    for file in files:
        texts = {
            tuple(info.path): info.leading_comments
            for info in file.source_code_info.location
            if info.leading_comments
        }

        def walk(message: Any, name: str, location: tuple[int, ...], texts: Any = texts) -> None:
            out[name] = texts.get(location, "")
            for i, field in enumerate(message.field):
                out[f"{name}.{field.name}"] = texts.get((*location, 2, i), "")
            for i, oneof in enumerate(message.oneof_decl):
                out[f"{name}.{oneof.name}"] = texts.get((*location, 8, i), "")
            for i, nested in enumerate(message.nested_type):
                walk(nested, f"{name}.{nested.name}", (*location, 3, i))

        for i, message in enumerate(file.message_type):
            walk(message, f"{file.package}.{message.name}".lstrip("."), (4, i))
    return out


class _Reader:
    def __init__(self, comments: dict[str, str]) -> None:
        self.comments = comments

    def notes(self, full_name: str) -> tuple[str, dict[str, Any]]:
        """The doc and the facts of a comment."""
        lines, facts = [], {}
        for line in self.comments.get(full_name, "").splitlines():
            line = line.removeprefix(" ").rstrip()
            if line.startswith(MARK):
                facts = canonical.parse_json(line.removeprefix(MARK), "@millstream comment")
            else:
                lines.append(line)
        if not isinstance(facts, dict):
            raise errors.SchemaError(f"the @millstream comment of '{full_name}' is not an object")
        return "\n".join(lines).strip("\n"), facts

    def record(self, message: Any, path: str, inside: tuple[str, ...]) -> t.Record:
        if message.full_name in inside:
            raise refusal(path, message.full_name, "the message contains itself; Arrow and Spark "
                          "have no such type")  # fmt: skip
        if len(inside) >= t.MAX_DEPTH:
            raise errors.SchemaError(f"the message is nested more than {t.MAX_DEPTH} levels deep")
        doc, facts = self.notes(message.full_name)
        inner = (*inside, message.full_name)
        fields, seen = [], set()
        for field in message.fields:
            oneof = field.containing_oneof
            if oneof is not None and len(oneof.fields) + (oneof.name != f"_{field.name}") > 1:
                if oneof.name not in seen:
                    seen.add(oneof.name)
                    fields.append(self.oneof(oneof, path, inner))
                continue
            fields.append(self.field(field, path, inner))
        fields = [_with_facts(field, facts) for field in fields]
        name = facts.get("name", message.full_name)
        return t.Record(
            name, tuple(fields), doc, canonical.texts(facts.get("aliases", ()), "aliases")
        )

    def oneof(self, oneof: Any, path: str, inside: tuple[str, ...]) -> t.Field:
        where = f"{path}.{oneof.name}" if path else oneof.name
        doc, facts = self.notes(f"{oneof.containing_type.full_name}.{oneof.name}")
        options = []
        for field in oneof.fields:
            options.append(self.value(field, where, inside, self.notes(field.full_name)[1]))
        try:
            union: t.Type = options[0] if len(options) == 1 else t.Union(tuple(options))
        except errors.SchemaError as error:
            raise refusal(where, f"oneof {oneof.name}", str(error)) from None
        nullable = not facts.get("present")
        type_ = t.Nullable(union) if nullable else union
        return t.Field(oneof.name, type_, None if nullable else t.MISSING, doc)

    def field(self, field: Any, path: str, inside: tuple[str, ...]) -> t.Field:
        where = f"{path}.{field.name}" if path else field.name
        doc, facts = self.notes(field.full_name)
        type_: t.Type
        default: object
        entry = field.message_type if field.type == field.TYPE_MESSAGE else None
        if entry is not None and entry.GetOptions().map_entry:
            key = self.leaf(entry.fields_by_name["key"], where, {"type": facts.get("key")})
            value = self.value(entry.fields_by_name["value"], where, inside, facts)
            try:
                type_, default = t.Map(value, key), {}
            except errors.SchemaError as error:
                raise refusal(where, "map", str(error)) from None
        elif field.is_repeated:
            type_, default = t.List(self.value(field, where, inside, facts)), []
        else:
            type_ = self.value(field, where, inside, facts)
            type_, default = _presence(field, type_, facts)
        return t.Field(field.name, type_, default, doc, (), field.number)

    def value(
        self, field: Any, path: str, inside: tuple[str, ...], facts: dict[str, Any]
    ) -> t.Type:
        if field.type == field.TYPE_GROUP:
            raise refusal(path, "group", "groups are deprecated; use a message")
        if field.type == field.TYPE_MESSAGE:
            name = field.message_type.full_name
            if name in (TIMESTAMP, DURATION):
                plain = t.Timestamp() if name == TIMESTAMP else t.Duration()
                return _agreed(path, plain, facts, lambda annotated: _message_of(annotated) == name)
            if name.startswith("google.protobuf."):
                raise refusal(path, name, "use a scalar (`optional` for one that may be missing)")
            return self.record(field.message_type, path, inside)
        return self.leaf(field, path, facts)

    def leaf(self, field: Any, path: str, facts: dict[str, Any]) -> t.Type:
        if field.type == field.TYPE_ENUM:
            enum = field.enum_type
            symbols = tuple(value.name for value in enum.values)
            if len({value.number for value in enum.values}) < len(symbols):
                raise refusal(path, enum.full_name, "two of its symbols share a number")
            plain: t.Type = t.Enum(enum.full_name.replace(".", "_"), symbols)
            return _agreed(
                path, plain, facts, lambda s: isinstance(s, t.Enum) and s.symbols == symbols
            )
        scalar = _SCALAR_NAMES[field.type]
        plain = SCALARS[scalar]
        return _agreed(path, plain, facts, lambda annotated: _scalar_of(annotated) == scalar)


_SCALAR_NAMES: Final = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32",
    8: "bool", 9: "string", 12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64",
    17: "sint32", 18: "sint64",
}  # fmt: skip


def _message_of(type_: t.Type) -> str | None:
    match type_:
        case t.Timestamp(True):
            return TIMESTAMP
        case t.Duration():
            return DURATION
        case _:
            return None


def _scalar_of(type_: t.Type) -> str | None:
    try:
        return scalar_name(type_)
    except errors.SchemaError:
        return None


def _agreed(path: str, plain: t.Type, facts: dict[str, Any], agrees: Any) -> t.Type:
    """The annotated type where there is one, which must be written as this Protobuf type."""
    if facts.get("type") is None:
        return plain
    annotated = canonical.type_from(facts["type"])
    if not agrees(annotated):
        raise refusal(path, plain, f"it is annotated as {t.kind(annotated)}; remove one of the two")
    return annotated


def _presence(field: Any, type_: t.Type, facts: dict[str, Any]) -> tuple[t.Type, object]:
    if field.is_required or facts.get("present"):
        return type_, t.MISSING
    # A declared default (proto2) is what every reader sees where nothing was written.
    if field.has_presence and not field.has_default_value:
        return t.Nullable(type_), None
    return type_, _default_of(field)


def _default_of(field: Any) -> object:
    if field.type == field.TYPE_ENUM:
        return field.enum_type.values_by_number[field.default_value].name
    return field.default_value


def _with_facts(field: t.Field, facts: dict[str, Any]) -> t.Field:
    """The field with the facts from its message's comment."""
    default = field.default
    if field.name in facts.get("required", ()):
        default = t.MISSING
    elif field.name in facts.get("defaults", {}):
        try:
            default = canonical.default_from(field.type, facts["defaults"][field.name])
        except errors.Unfit as error:
            raise errors.SchemaError(f"field '{field.name}': the default: {error}") from None
    else:
        default = _typed_zero(field.type, default)
    aliases = canonical.texts(facts.get("was", {}).get(field.name, ()), "aliases")
    number = facts.get("numbers", {}).get(field.name, field.number)
    unnumbered = facts.get("unnumbered", ())
    if unnumbered is True or field.name in unnumbered:
        number = None
    return dataclasses.replace(field, default=default, aliases=aliases, number=number)


def _typed_zero(type_: t.Type, default: object) -> object:
    """Protobuf's zero if it is a value of the annotated type (0 is not a date)."""
    if default is t.MISSING:
        return default
    try:
        return compile_fit(type_)(default)
    except errors.Unfit:
        return t.MISSING
