"""A declared schema: the record type of a topic's events, and the text it was declared with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, Final, Literal, TypeAlias

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.values.fit import compile_fit, jsonable

__all__ = ["Format", "Schema", "SchemaOrigin", "checked"]

Format: TypeAlias = Literal["arrow", "avro", "descriptor", "json", "protobuf", "python"]
_FORMATS: Final = ("arrow", "avro", "descriptor", "json", "protobuf", "python")
# The formats whose text determines the bytes on the wire (Avro's fixed sizes, Protobuf's numbers).
_WIRE_FORMATS: Final = ("avro", "descriptor", "protobuf")


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaOrigin:
    """What a schema was declared with: `format`, and its text as given."""

    format: Format
    text: str
    # Protobuf only: the full name of the event's message.
    message: str = ""

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise errors.SchemaError(
                f"'{self.format}' is not a schema format; choose one of {', '.join(_FORMATS)}"
            )


@dataclasses.dataclass(frozen=True)
class Schema:
    """The type of a topic's values; equal schemas have equal fingerprints."""

    record: t.Record
    origin: SchemaOrigin | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", checked(self.record))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical form (and of the text if it determines the wire format)."""
        digest = hashlib.sha256(canonical.dump(self.record).encode())
        if self.origin is not None and self.origin.format in _WIRE_FORMATS:
            origin = self.origin
            digest.update(f"\n{origin.format}\n{origin.message}\n{origin.text}".encode())
        return digest.hexdigest()

    @functools.cached_property
    def _fit(self) -> Any:
        return compile_fit(self.record)

    def fit(self, value: object) -> dict[str, Any]:
        """The plain form of a value; `Unfit` names field, expected and found."""
        plain: dict[str, Any] = self._fit(value)
        return plain

    def to_json(self) -> str:
        """The text that the registry stores: the canonical form and the original text."""
        form: dict[str, Any] = {"record": canonical.type_to(self.record)}
        if self.origin is not None:
            form["origin"] = {k: v for k, v in dataclasses.asdict(self.origin).items() if v}
        return canonical.fingerprintable(form)

    @classmethod
    def from_json(cls, text: str | bytes) -> Schema:
        """The schema of a stored text."""
        form = canonical.parse_json(text, "schema")
        try:
            record = canonical.type_from(form["record"])
            origin = SchemaOrigin(**form["origin"]) if "origin" in form else None
        except (KeyError, TypeError) as error:
            raise errors.SchemaError(f"the stored schema is incomplete: {error!r}") from None
        if not isinstance(record, t.Record):
            raise errors.SchemaError(f"a schema is a record, not {t.kind(record)}")
        return cls(record, origin)


def checked(record: t.Record) -> t.Record:
    """The record with every default in plain form; a default that does not fit is refused."""
    return dataclasses.replace(
        record, fields=tuple(_checked_field(field, field.name) for field in record.fields)
    )


def _checked_field(field: t.Field, path: str) -> t.Field:
    type_ = _checked_type(field.type, path)
    default = field.default
    if default is not t.MISSING:
        try:
            default = compile_fit(type_)(default)
            canonical.fingerprintable(jsonable(default))
        except errors.Unfit as error:
            inside = f" at '{error.field}'" if error.field else ""
            raise errors.SchemaError(
                f"field '{path}': the default does not fit its type{inside}: "
                f"expected {error.expected}, found {error.found}"
            ) from None
        except ValueError:
            raise errors.SchemaError(
                f"field '{path}': NaN and infinities cannot be defaults: JSON cannot write them"
            ) from None
    return dataclasses.replace(field, type=type_, default=default)


def _checked_type(type_: t.Type, path: str) -> t.Type:
    match type_:
        case t.Record():
            return dataclasses.replace(
                type_,
                fields=tuple(_checked_field(f, f"{path}.{f.name}") for f in type_.fields),
            )
        case t.Nullable():
            return t.Nullable(_checked_type(type_.of, path))
        case t.List():
            return t.List(_checked_type(type_.item, f"{path}[]"))
        case t.Map():
            return t.Map(_checked_type(type_.value, f"{path}{{}}"), type_.key)
        case t.Union():
            return t.Union(tuple(_checked_type(option, path) for option in type_.options))
        case _:
            return type_
