"""Single events as bytes: Avro, Protobuf and JSON behind one protocol.

A codec is compiled once for the schema its owner writes and reads. `encode` checks a value strictly
before a byte is made; `decode` reads what any version wrote, checks it just as strictly (the bytes
may come from a client of any language) and resolves it to the owner's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.resolution import Resolution
from millstream.schemas.schema import Schema
from millstream.schemas.values.fit import compile_fit, found

__all__ = ["WIRE_FORMATS", "Codec", "Wire", "WireFormat", "make_codec"]

WireFormat: TypeAlias = Literal["avro", "json", "protobuf"]
WIRE_FORMATS: Final[tuple[WireFormat, ...]] = ("avro", "json", "protobuf")
# Writer versions kept compiled; a topic has a handful, and one too many costs a compile, no more.
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
    """One schema in one wire format: plain, checked values to bytes and back."""

    def dump(self, plain: dict[str, Any]) -> bytes:
        """The bytes of a plain value."""

    def load(self, data: bytes) -> dict[str, Any]:
        """The plain value of the bytes, checked."""


def make_codec(schema: Schema, format_: WireFormat) -> Codec:
    """The codec of a schema; refused if the format cannot hold one of its types."""
    return _SchemaCodec(schema, format_)


class _SchemaCodec:
    def __init__(self, schema: Schema, format_: WireFormat) -> None:
        if format_ not in WIRE_FORMATS:
            raise errors.ConfigError(
                f"'{format_}' is not a wire format; one of {', '.join(WIRE_FORMATS)} is"
            )
        self.format = format_
        self.schema = schema
        self._wire = _make_wire(schema, format_)
        self._dump = self._wire.dump
        self._fit = compile_fit(schema.record)
        self._writers: dict[str, tuple[Wire, Resolution]] = {}

    def encode(self, value: object) -> bytes:
        return self._dump(self._fit(value))

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
    if format_ == "json":
        return _JsonWire(schema)
    if format_ == "avro":
        from millstream.schemas.formats.avro_wire import AvroWire

        return AvroWire(schema)
    from millstream.schemas.formats.protobuf_wire import ProtobufWire

    return ProtobufWire(schema)


class _JsonWire:
    """JSON by msgspec: ISO 8601 times, base64 bytes, decimals and UUIDs as text."""

    def __init__(self, schema: Schema) -> None:
        from millstream.schemas.formats.jsonschema import to_json_schema

        # Refuses unions whose options look alike in JSON.
        to_json_schema(schema.record)
        self._kind = t.kind(schema.record)
        self._fit = compile_fit(schema.record, text=True)
        self._finite = _finite_check(schema.record)
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode

    def dump(self, plain: dict[str, Any]) -> bytes:
        if self._finite is not None:
            self._finite(plain, "")
        return self._encode(plain)

    def load(self, data: bytes) -> dict[str, Any]:
        try:
            raw = self._decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise errors.Unfit("", f"{self._kind} as JSON", f"other bytes: {error}") from None
        plain: dict[str, Any] = self._fit(raw)
        return plain


_Check: TypeAlias = Callable[[Any, str], None]


def _finite_check(type_: t.Type) -> _Check | None:
    """A check that every float can be written as JSON, or None where there are none."""
    match type_:
        case t.Float():
            return _check_finite
        case t.Nullable():
            inner = _finite_check(type_.of)
            return inner and (lambda v, path: None if v is None else inner(v, path))
        case t.Union():
            checks = [check for check in map(_finite_check, type_.options) if check is not None]
            return _check_any if checks else None
        case t.List():
            item = _finite_check(type_.item)
            return item and (lambda v, path: _each(item, enumerate(v), path))
        case t.Map():
            value = _finite_check(type_.value)
            return value and (lambda v, path: _each(value, v.items(), path))
        case t.Record():
            plan = [(f.name, check) for f in type_.fields if (check := _finite_check(f.type))]
            return _record_check(plan) if plan else None
        case _:
            return None


def _check_finite(value: Any, path: str) -> None:
    if value - value != 0:
        raise errors.Unfit(path, "a number JSON can write", found(value))


def _each(check: _Check, pairs: Any, path: str) -> None:
    for key, value in pairs:
        check(value, f"{path}[{key!r}]")


def _record_check(plan: list[tuple[str, _Check]]) -> _Check:
    def check(value: Any, path: str) -> None:
        for name, one in plan:
            one(value[name], f"{path}.{name}" if path else name)

    return check


def _check_any(value: Any, path: str) -> None:
    """Floats at any depth of a value whose option is not known."""
    if isinstance(value, float):
        _check_finite(value, path)
    elif isinstance(value, dict):
        _each(_check_any, value.items(), path)
    elif isinstance(value, list):
        _each(_check_any, enumerate(value), path)
