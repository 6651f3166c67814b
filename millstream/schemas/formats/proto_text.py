"""`.proto` text to a descriptor and back.

The text is parsed by proto-schema-parser, a pure-Python parser of Buf's published grammar, because
no compiler may be needed at run time (grpcio-tools carries one, but pins Protobuf's version and
reports errors on the process's standard error only). Names and numbers are then checked by
Protobuf's own descriptor pool.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.extras import needed
from millstream.schemas.formats.proto_pool import need
from millstream.schemas.formats.protobuf import FILE_NAME, FORMAT, to_descriptor

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

__all__ = ["parse_proto", "to_proto"]

# Nested braces; the parser recurses, about eight frames per level.
_MAX_BRACES: Final = 24
_SCALARS: Final = frozenset({
    "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "bytes",
    "uint32", "sfixed32", "sfixed64", "sint32", "sint64",
})  # fmt: skip


# -- from text ----------------------------------------------------------------------------


def parse_proto(text: str) -> FileDescriptorProto:
    """The descriptor of a `.proto` text; syntax errors name line and column."""
    if len(text) > canonical.MAX_TEXT:
        raise errors.SchemaError(
            f"the .proto text has {len(text):,} characters; at most {canonical.MAX_TEXT:,} are read"
        )
    depth = deepest = 0
    for mark in re.finditer(r"[{}\[\]<>()]", text):
        depth += 1 if mark[0] in "{[<(" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_BRACES:
        raise errors.SchemaError(f"the .proto text is nested more than {_MAX_BRACES} braces deep")
    tree = _parse(text)
    return _Builder(need()).file(tree)


def _parse(text: str) -> Any:
    parser = needed("proto_schema_parser.parser")
    listener: Any = needed("antlr4.error.ErrorListener").ErrorListener

    class Refuse(listener):  # type: ignore[misc]
        """Raises: the parser itself would print the error and continue with a guess."""

        def syntaxError(  # noqa: N802
            self, recognizer: Any, symbol: Any, line: int, column: int, msg: str, e: Any
        ) -> None:
            raise errors.SchemaError(f"the .proto text, line {line}, column {column}: {msg[:200]}")

    def listen(part: Any) -> None:
        part.removeErrorListeners()
        part.addErrorListener(Refuse())

    try:
        return parser.Parser(setup_lexer=listen, setup_parser=listen).parse(text)
    except RecursionError:
        raise errors.SchemaError("the .proto text is nested too deeply") from None


class _Builder:
    """Makes a descriptor from the syntax tree."""

    def __init__(self, pb: Any) -> None:
        from proto_schema_parser import ast

        self.pb = pb
        self.ast = ast
        self.locations: Any = None
        self.proto3 = True

    def file(self, tree: Any) -> FileDescriptorProto:
        if tree.edition is not None:
            raise errors.SchemaError("a .proto text with an edition needs a compiler; give a "
                                     "FileDescriptorSet, or syntax = \"proto3\"")  # fmt: skip
        syntax = (tree.syntax or "proto2").strip("\"'")
        if syntax not in ("proto2", "proto3"):
            raise errors.SchemaError(f"'{syntax}' is not a .proto syntax; proto2 and proto3 are")
        self.proto3 = syntax == "proto3"
        file = self.pb.FileDescriptorProto(name=FILE_NAME)
        if self.proto3:
            file.syntax = syntax
        self.locations = file.source_code_info.location
        comments: list[Any] = []
        for element in tree.file_elements:
            match element:
                case self.ast.Package():
                    file.package = element.name
                case self.ast.Import():
                    file.dependency.append(element.name)
                case self.ast.Message():
                    location = [4, len(file.message_type)]
                    self.message(
                        file.message_type.add(name=element.name), element, location, comments
                    )
                case self.ast.Enum():
                    self.enum(file.enum_type.add(name=element.name), element)
                case self.ast.Extension():
                    raise errors.SchemaError("extensions in a .proto text are not supported")
            comments = self.gathered(comments, element)
        return file

    def gathered(self, comments: list[Any], element: Any) -> list[Any]:
        """The comments before the next element."""
        if isinstance(element, self.ast.Comment):
            return comments if element.inline else [*comments, element]
        return []

    def comment(self, location: list[int], comments: list[Any]) -> None:
        lines = [line for comment in comments for line in _comment_lines(comment.text)]
        if lines:
            text = "".join(f"{line}\n" for line in lines)
            self.locations.add(path=location, leading_comments=text)

    def message(self, message: Any, tree: Any, location: list[int], before: list[Any]) -> None:
        self.comment(location, before)
        comments: list[Any] = []
        for element in tree.elements:
            match element:
                case self.ast.Field():
                    self.comment([*location, 2, len(message.field)], comments)
                    self.field(message, element)
                case self.ast.MapField():
                    self.comment([*location, 2, len(message.field)], comments)
                    self.map_field(message, element)
                case self.ast.OneOf():
                    self.comment([*location, 8, len(message.oneof_decl)], comments)
                    self.oneof(message, element, location)
                case self.ast.Message():
                    inner = [*location, 3, len(message.nested_type)]
                    nested = message.nested_type.add(name=element.name)
                    self.message(nested, element, inner, comments)
                case self.ast.Enum():
                    self.enum(message.enum_type.add(name=element.name), element)
                case self.ast.Group():
                    raise errors.Unmappable(element.name, "group", FORMAT, "use a message")
                case self.ast.Reserved():
                    _reserve(message, element)
            comments = self.gathered(comments, element)
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def field(self, message: Any, tree: Any, oneof: int | None = None) -> None:
        pb = self.pb.FieldDescriptorProto
        field = message.field.add(name=tree.name, number=_number(tree.number, tree.name))
        _set_type(pb, field, tree.type)
        cardinality = tree.cardinality.value if tree.cardinality is not None else ""
        field.label = {"REPEATED": pb.LABEL_REPEATED, "REQUIRED": pb.LABEL_REQUIRED}.get(
            cardinality, pb.LABEL_OPTIONAL
        )
        if oneof is not None:
            field.oneof_index = oneof
        elif cardinality == "OPTIONAL" and self.proto3:
            field.proto3_optional = True
        for option in tree.options:
            name = option.name.strip()
            if name == "packed":
                field.options.packed = option.value in (True, "true")
            elif name == "default":
                field.default_value = _default_text(option.value)

    def map_field(self, message: Any, tree: Any) -> None:
        pb = self.pb.FieldDescriptorProto
        camel = "".join(part[:1].upper() + part[1:] for part in tree.name.split("_"))
        entry = message.nested_type.add(name=f"{camel}Entry")
        entry.options.map_entry = True
        for number, (name, type_) in enumerate(
            (("key", tree.key_type), ("value", tree.value_type)), start=1
        ):
            part = entry.field.add(name=name, number=number, label=pb.LABEL_OPTIONAL)
            _set_type(pb, part, type_)
        field = message.field.add(name=tree.name, number=_number(tree.number, tree.name))
        field.label, field.type = pb.LABEL_REPEATED, pb.TYPE_MESSAGE
        field.type_name = entry.name

    def oneof(self, message: Any, tree: Any, location: list[int]) -> None:
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=tree.name)
        comments: list[Any] = []
        for element in tree.elements:
            if isinstance(element, self.ast.Field):
                self.comment([*location, 2, len(message.field)], comments)
                self.field(message, element, index)
            elif isinstance(element, self.ast.Group):
                raise errors.Unmappable(element.name, "group", FORMAT, "use a message")
            comments = self.gathered(comments, element)

    def enum(self, enum: Any, tree: Any) -> None:
        for element in tree.elements:
            if isinstance(element, self.ast.EnumValue):
                enum.value.add(name=element.name, number=element.number)
            elif isinstance(element, self.ast.Option) and element.name == "allow_alias":
                enum.options.allow_alias = element.value in (True, "true")


def _set_type(pb: Any, field: Any, name: str) -> None:
    if name in _SCALARS:
        field.type = getattr(pb, f"TYPE_{name.upper()}")
    else:
        # The pool finds out whether it is a message or an enum.
        field.type_name = name


def _number(number: Any, name: str) -> int:
    if not isinstance(number, int) or not 1 <= number <= 536_870_911:
        raise errors.SchemaError(f"field '{name}': {number!r:.40} is not a field number")
    return number


def _reserve(message: Any, tree: Any) -> None:
    for name in tree.names:
        message.reserved_name.append(str(name).strip("\"'"))
    for text in tree.ranges:
        first, _, last = str(text).replace("to", " to ").partition(" to ")
        start = int(first)
        end = start if not last.strip() else 536_870_911 if "max" in last else int(last)
        message.reserved_range.add(start=start, end=end + 1)


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(getattr(value, "name", value))


def _comment_lines(text: str) -> list[str]:
    if text.startswith("//"):
        return [line.strip().removeprefix("//") for line in text.splitlines()]
    inner = text.removeprefix("/*").removesuffix("*/")
    return [" " + re.sub(r"^\s*\*?\s?", "", line) for line in inner.splitlines() if line.strip()]


# -- to text ------------------------------------------------------------------------------


def to_proto(record: t.Record) -> str:
    """The `.proto` text (proto3) of a record."""
    return _Printer(to_descriptor(record)).text()


class _Printer:
    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self.comments = {
            tuple(info.path): info.leading_comments for info in file.source_code_info.location
        }

    def text(self) -> str:
        lines = ['syntax = "proto3";', ""]
        if self.file.package:
            lines += [f"package {self.file.package};", ""]
        lines += [f'import "{name}";' for name in self.file.dependency]
        lines += [""] if self.file.dependency else []
        for i, message in enumerate(self.file.message_type):
            lines += [*self.message(message, (4, i)), ""]
        return "\n".join(lines)

    def comment(self, location: tuple[int, ...], indent: str) -> list[str]:
        text = self.comments.get(location, "")
        return [f"{indent}//{line}".rstrip() for line in text.splitlines()]

    def message(self, message: Any, location: tuple[int, ...]) -> list[str]:
        lines = [*self.comment(location, ""), f"message {message.name} {{"]
        for enum in message.enum_type:
            lines.append(f"  enum {enum.name} {{")
            lines += [f"    {value.name} = {value.number};" for value in enum.value]
            lines.append("  }")
        entries = {nested.name: nested for nested in message.nested_type}
        shown: set[int] = set()
        for i, field in enumerate(message.field):
            at = (*location, 2, i)
            if field.HasField("oneof_index") and not field.proto3_optional:
                if field.oneof_index not in shown:
                    shown.add(field.oneof_index)
                    lines += self.oneof(message, field.oneof_index, location)
                continue
            lines += self.comment(at, "  ")
            lines.append(f"  {_field_text(field, entries)} {field.name} = {field.number};")
        return [*lines, "}"]

    def oneof(self, message: Any, index: int, location: tuple[int, ...]) -> list[str]:
        lines = self.comment((*location, 8, index), "  ")
        lines.append(f"  oneof {message.oneof_decl[index].name} {{")
        for i, field in enumerate(message.field):
            if field.HasField("oneof_index") and field.oneof_index == index:
                lines += self.comment((*location, 2, i), "    ")
                lines.append(f"    {_type_text(field)} {field.name} = {field.number};")
        return [*lines, "  }"]


def _field_text(field: Any, entries: dict[str, Any]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None and field.label == field.LABEL_REPEATED:
        return f"map<{_type_text(entry.field[0])}, {_type_text(entry.field[1])}>"
    if field.label == field.LABEL_REPEATED:
        return f"repeated {_type_text(field)}"
    return f"optional {_type_text(field)}" if field.proto3_optional else _type_text(field)


def _type_text(field: Any) -> str:
    if field.type_name:
        # A leading dot: the full name, which no nearer name can hide.
        return str(field.type_name)
    return str(field.Type.Name(field.type)).removeprefix("TYPE_").lower()
