"""Single events as bytes: Avro, Protobuf and JSON behind one protocol.

A codec is compiled once for the schema its owner writes and reads. `encode` checks a value strictly
before it is written. `decode` reads bytes of any version, checks them just as strictly (they may
come from a client in any language) and resolves the value to the owner's version.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol, TypeAlias

from millstream import errors
from millstream.schemas.formats.avro_wire import AvroWire
from millstream.schemas.formats.json_wire import JsonWire
from millstream.schemas.formats.protobuf_wire import ProtobufWire
from millstream.schemas.resolution import Resolution
from millstream.schemas.schema import Schema

__all__ = ["WIRE_FORMATS", "Codec", "Wire", "WireFormat", "make_codec"]

WireFormat: TypeAlias = Literal["avro", "json", "protobuf"]
WIRE_FORMATS: Final[tuple[WireFormat, ...]] = ("avro", "json", "protobuf")
# Compiled writer versions to keep; a topic has a handful, and a miss only costs a compile.
_MAX_WRITERS: Final = 64


class Codec(Protocol):
    """Turns the values of a topic into bytes and back."""

    @property
    def format(self) -> WireFormat:
        """The wire format."""

    @property
    def schema(self) -> Schema:
        """The schema values are written with and resolved to."""

    def encode(self, value: object) -> bytes:
        """The bytes of a value that fits the schema; `Unfit` for one that does not."""

    def decode(self, data: bytes, writer: Schema | None = None) -> dict[str, Any]:
        """The plain value in the bytes, written with `writer`, as the codec's schema has it."""


class Wire(Protocol):
    """One schema in one wire format: values to bytes and back, checked both ways."""

    def dump(self, value: object) -> bytes:
        """The bytes of a value that fits the schema."""

    def load(self, data: bytes) -> dict[str, Any]:
        """The plain value of the bytes, checked."""


def make_codec(schema: Schema, format_: WireFormat) -> Codec:
    """The codec of a schema; refused if the format cannot hold one of its types."""
    return _SchemaCodec(schema, format_)


class _SchemaCodec:
    def __init__(self, schema: Schema, format_: WireFormat) -> None:
        if format_ not in WIRE_FORMATS:
            raise errors.ConfigError(
                f"'{format_}' is not a wire format; choose one of {', '.join(WIRE_FORMATS)}"
            )
        self.format = format_
        self.schema = schema
        self._wire = _make_wire(schema, format_)
        self._dump = self._wire.dump
        self._writers: dict[str, tuple[Wire, Resolution]] = {}

    def encode(self, value: object) -> bytes:
        return self._dump(value)

    def decode(self, data: bytes, writer: Schema | None = None) -> dict[str, Any]:
        if writer is None or writer is self.schema:
            return self._wire.load(data)
        known = self._writers.get(writer.fingerprint)
        if known is None:
            known = self._learn(writer)
        wire, resolution = known
        return resolution.value(wire.load(data))

    def _learn(self, writer: Schema) -> tuple[Wire, Resolution]:
        if len(self._writers) >= _MAX_WRITERS:
            self._writers.pop(next(iter(self._writers)))
        made = (_make_wire(writer, self.format), Resolution(writer.record, self.schema.record))
        self._writers[writer.fingerprint] = made
        return made


def _make_wire(schema: Schema, format_: WireFormat) -> Wire:
    match format_:
        case "json":
            return JsonWire(schema)
        case "avro":
            return AvroWire(schema)
        case "protobuf":
            return ProtobufWire(schema)
