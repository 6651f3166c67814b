"""Declaring a schema from a class, an Arrow schema, or Avro, Protobuf or JSON Schema."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.canonical import parse_json
from millstream.schemas.formats.avro import from_avro
from millstream.schemas.formats.jsonschema import from_json_schema
from millstream.schemas.formats.proto_reading import (
    find_message,
    from_descriptor,
    load_set,
    load_text,
)
from millstream.schemas.formats.python import from_python, is_schema_class
from millstream.schemas.schema import Schema, SchemaOrigin

__all__ = ["declare"]


def declare(
    source: object,
    *,
    format: str | None = None,
    name: str | None = None,
    message: str | None = None,
    drop_constraints: bool = False,
) -> Schema:
    """The schema of a class, an Arrow schema, or an Avro, Protobuf or JSON Schema text or object.

    The format is detected; `format` ("avro", "json", "protobuf") sets it if a text could be more
    than one. `name` renames the record, `message` chooses a Protobuf message, and
    `drop_constraints` drops value constraints (`pattern`, `gt`) that types cannot express. Anything
    that cannot be mapped is refused with the field and the reason.
    """
    record, origin = _read(source, format, name, message, drop_constraints)
    if name is not None:
        record = dataclasses.replace(record, name=name)
    return Schema(record, origin)


def _read(
    source: object, format_: str | None, name: str | None, message: str | None, drop: bool
) -> tuple[t.Record, SchemaOrigin | None]:
    if isinstance(source, Schema):
        return source.record, source.origin
    if isinstance(source, t.Record):
        return source, None
    if isinstance(source, type) and is_schema_class(source):
        text = f"{source.__module__}.{source.__qualname__}"
        return from_python(source, drop_constraints=drop), SchemaOrigin("python", text)
    kind = type(source).__module__.partition(".")[0]
    if kind == "pyarrow":
        return _arrow(source, name)
    if kind == "google" or hasattr(source, "DESCRIPTOR"):
        return _descriptor(source, message)
    if isinstance(source, (bytes, bytearray)) and format_ in (None, "descriptor", "protobuf"):
        return _descriptor(load_set(bytes(source)), message)
    if isinstance(source, (str, dict)):
        return _text(source, format_ or _format_of(source), name, message, drop)
    raise errors.SchemaError(
        f"cannot read a schema from {type(source).__name__}; give a dataclass, a msgspec Struct, "
        f"a Pydantic model, an Arrow schema, or Avro, Protobuf or JSON Schema"
    )


def _format_of(source: str | dict[str, Any]) -> str:
    if isinstance(source, str):
        if not source.lstrip().startswith("{"):
            return "protobuf"
        source = parse_json(source, "schema")
    if isinstance(source, dict):
        if source.get("type") == "record" and "fields" in source:
            return "avro"
        if "properties" in source or "$schema" in source or "$ref" in source:
            return "json"
    raise errors.SchemaError(
        "the text is neither .proto, nor an Avro record, nor a JSON Schema object; "
        "set format='avro', 'json' or 'protobuf'"
    )


def _text(
    source: str | dict[str, Any], format_: str, name: str | None, message: str | None, drop: bool
) -> tuple[t.Record, SchemaOrigin]:
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
    if format_ == "avro":
        return from_avro(source), SchemaOrigin("avro", text)
    if format_ == "json":
        record = from_json_schema(source, name=name, drop_constraints=drop)
        return record, SchemaOrigin("json", text)
    if format_ == "protobuf" and isinstance(source, str):
        files = load_text(text)
        full = find_message(list(files.file), message)
        return from_descriptor(files, full), SchemaOrigin("protobuf", text, full)
    raise errors.SchemaError(
        f"'{format_}' is not a format of schema texts; use 'avro', 'json' or 'protobuf' (as text)"
    )


def _arrow(source: Any, name: str | None) -> tuple[t.Record, SchemaOrigin]:
    # Imported here: other schemas do not need Arrow.
    import pyarrow as pa

    from millstream.schemas.formats.arrow import from_arrow

    if isinstance(source, pa.StructType):
        source = pa.schema(list(source))
    if not isinstance(source, pa.Schema):
        raise errors.SchemaError(f"give an Arrow schema, not a {type(source).__name__}")
    text = base64.b64encode(source.serialize()).decode()
    return from_arrow(source, name or "record"), SchemaOrigin("arrow", text)


def _descriptor(source: Any, message: str | None) -> tuple[t.Record, SchemaOrigin]:
    from google.protobuf import descriptor, descriptor_pb2

    if isinstance(source, descriptor_pb2.FileDescriptorProto):
        source = descriptor_pb2.FileDescriptorSet(file=[source])
    if not isinstance(source, descriptor_pb2.FileDescriptorSet):
        # A generated message class, or its descriptor.
        source = getattr(source, "DESCRIPTOR", source)
        if not isinstance(source, descriptor.Descriptor):
            raise errors.SchemaError(f"{source!r:.80} is not a Protobuf message or descriptor")
        message = source.full_name
        source = descriptor_pb2.FileDescriptorSet(file=_files_of(source.file))
    full = find_message(list(source.file), message)
    text = base64.b64encode(source.SerializeToString(deterministic=True)).decode()
    return from_descriptor(source, full), SchemaOrigin("descriptor", text, full)


def _files_of(file: Any) -> list[Any]:
    """A file and everything it imports, imports first."""
    from google.protobuf import descriptor_pb2

    out: dict[str, Any] = {}

    def add(one: Any) -> None:
        for needed in one.dependencies:
            if needed.name not in out:
                add(needed)
        proto = descriptor_pb2.FileDescriptorProto()
        one.CopyToProto(proto)
        out[one.name] = proto

    add(file)
    return list(out.values())
