"""Avro: schemas to and from its JSON.

Where Avro's types are less exact than the model's (int8, unsigned numbers, durations), the field's
type has the canonical form in the property `millstream`, which other Avro readers ignore. It counts
only if it agrees with the Avro type around it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.formats.avro_values import from_raw, to_raw

__all__ = ["FORMAT", "from_avro", "parse_avro", "to_avro"]

FORMAT: Final = "Avro"
ANNOTATION: Final = "millstream"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_PLAIN: Final[dict[str, t.Type]] = {
    "boolean": t.Bool(),
    "int": t.Int(32),
    "long": t.Int(64),
    "float": t.Float(32),
    "double": t.Float(64),
    "string": t.String(),
    "bytes": t.Binary(),
}
_LOGICAL: Final[dict[tuple[str, str], t.Type]] = {
    ("int", "date"): t.Date(),
    ("int", "time-millis"): t.Time("ms"),
    ("long", "time-micros"): t.Time("us"),
    ("long", "timestamp-millis"): t.Timestamp(True, "ms"),
    ("long", "timestamp-micros"): t.Timestamp(True, "us"),
    ("long", "local-timestamp-millis"): t.Timestamp(False, "ms"),
    ("long", "local-timestamp-micros"): t.Timestamp(False, "us"),
    ("string", "uuid"): t.Uuid(),
}
_WRITTEN: Final[dict[t.Type, Any]] = {
    **{type_: name for name, type_ in _PLAIN.items()},
    **{
        type_: {"type": base, "logicalType": logical} for (base, logical), type_ in _LOGICAL.items()
    },
}


def parse_avro(source: str | bytes | dict[str, Any]) -> Any:
    """The Avro schema as JSON values."""
    if isinstance(source, (str, bytes)):
        return canonical.parse_json(source, "Avro schema")
    return source


# -- to Avro ------------------------------------------------------------------------------


def to_avro(record: t.Record) -> dict[str, Any]:
    """The Avro schema of a record; types that Avro does not have are refused."""
    form: dict[str, Any] = _Writer().record(record, "", "")
    return form


def _refusal(path: str, type_: t.Type, reason: str) -> errors.Unmappable:
    return errors.Unmappable(path, t.kind(type_), FORMAT, reason)


class _Writer:
    """One schema being written: named types are written out once and referenced afterwards."""

    def __init__(self) -> None:
        self.named: dict[str, t.Type] = {}

    def type(self, type_: t.Type, path: str, space: str) -> Any:
        match type_:
            case t.Nullable():
                inner = self.type(type_.of, path, space)
                return ["null", *inner] if isinstance(inner, list) else ["null", inner]
            case t.List():
                return {"type": "array", "items": self.type(type_.item, f"{path}[]", space)}
            case t.Map():
                if not isinstance(type_.key, t.String):
                    raise _refusal(path, type_, "Avro's map keys are always text")
                return {"type": "map", "values": self.type(type_.value, f"{path}{{}}", space)}
            case t.Union():
                return self.union(type_, path, space)
            case t.Enum():
                return self.enum(type_, path, space)
            case t.Record():
                return self.record(type_, path, space)
            case t.Decimal(precision, scale):
                digits = {"precision": precision, "scale": scale}
                return {"type": "bytes", "logicalType": "decimal", **digits}
            case t.Binary(size) if size is not None:
                known, form = self.name(f"fixed{size}", type_, path, space)
                return known or {"type": "fixed", **form, "size": size}
            case _:
                return _WRITTEN.get(type_) or _annotated(type_, path)

    def name(
        self, name: str, type_: t.Type, path: str, space: str
    ) -> tuple[str | None, dict[str, Any]]:
        """The reference to a type already written, or the name it is to be written with."""
        own_space, _, last = name.rpartition(".")
        for part in name.split("."):
            if not _NAME.fullmatch(part):
                raise _refusal(path or name, type_, f"'{name}' is not a name: letters, digits, _")
        form: dict[str, Any] = {"name": last}
        if own_space != space:
            form["namespace"] = own_space
        other = self.named.get(name)
        if other is None:
            self.named[name] = type_
            return None, form
        if other != type_:
            raise _refusal(path, type_, f"another type of this schema is also named '{name}'")
        if space and not own_space:
            raise _refusal(path, type_, f"'{name}' cannot be referred to from '{space}'")
        return name, form

    def enum(self, type_: t.Enum, path: str, space: str) -> Any:
        known, form = self.name(type_.name, type_, path, space)
        if known is not None:
            return known
        for symbol in type_.symbols:
            if not _NAME.fullmatch(symbol):
                raise _refusal(path, type_, f"'{symbol}' is not a symbol: letters, digits, _")
        form = {"type": "enum", **form, "symbols": list(type_.symbols)}
        if type_.default is not None:
            form["default"] = type_.default
        return form

    def record(self, record: t.Record, path: str, space: str) -> Any:
        known, form = self.name(record.name, record, path, space)
        if known is not None:
            return known
        inner = record.name.rpartition(".")[0]
        fields = []
        for field in record.fields:
            where = f"{path}.{field.name}" if path else field.name
            for name in (field.name, *field.aliases):
                if not _NAME.fullmatch(name):
                    raise _refusal(where, field.type, f"'{name}' is not a name: letters, digits, _")
            fields.append(self.field(field, where, inner))
        form = {"type": "record", **form, "fields": fields}
        if record.doc:
            form["doc"] = record.doc
        if record.aliases:
            form["aliases"] = list(record.aliases)
        return form

    def field(self, field: t.Field, path: str, space: str) -> dict[str, Any]:
        form: dict[str, Any] = {"name": field.name, "type": self.type(field.type, path, space)}
        if field.default is not t.MISSING:
            try:
                form["default"] = to_raw(field.type, field.default)
            except errors.Unfit:
                reason = "a default must be of the first option of each union; reorder or drop it"
                raise _refusal(path, field.type, reason) from None
            if field.default is not None and isinstance(field.type, t.Nullable):
                # Avro's default belongs to the first type of a union; null may be anywhere.
                form["type"] = [form["type"][1], "null", *form["type"][2:]]
        if field.doc:
            form["doc"] = field.doc
        if field.aliases:
            form["aliases"] = list(field.aliases)
        if field.number is not None:
            form[ANNOTATION] = {"number": field.number}
        return form

    def union(self, union: t.Union, path: str, space: str) -> list[Any]:
        out: list[Any] = []
        bases: dict[str, t.Type] = {}
        for option in union.options:
            form = self.type(option, path, space)
            base = form["type"] if isinstance(form, dict) else form
            if base not in ("record", "enum", "fixed"):
                other = bases.get(base)
                bases[base] = option
                if other is not None:
                    raise _refusal(
                        path,
                        union,
                        f"{t.kind(other)} and {t.kind(option)} are both its '{base}', "
                        f"and a union holds each type once",
                    )
            out.append(form)
        return out


def _annotated(type_: t.Type, path: str) -> dict[str, Any]:
    """The Avro type for every value of a type that Avro does not have."""
    if isinstance(type_, t.Duration) or type_ == t.Int(32, signed=False):
        base = "long"
    elif isinstance(type_, t.Int) and type_.bits < 32:
        base = "int"
    else:
        raise _refusal(path, type_, "no Avro type holds every value")
    return {"type": base, ANNOTATION: canonical.type_to(type_)}


# -- from Avro ----------------------------------------------------------------------------


def from_avro(source: str | bytes | dict[str, Any]) -> t.Record:
    """The record of an Avro schema, given as JSON text or as its values."""
    form = parse_avro(source)
    try:
        record = _Reader().type(form, "", "", 0)
    except (KeyError, TypeError, AttributeError) as error:
        raise errors.SchemaError(f"the Avro schema is malformed: {error!r}") from None
    if not isinstance(record, t.Record):
        raise errors.SchemaError(f"an event is a record; the Avro schema is {t.kind(record)}")
    return record


class _Reader:
    """One schema being read: the named types met so far, and those still open."""

    def __init__(self) -> None:
        self.named: dict[str, t.Type] = {}
        self.open: set[str] = set()

    def type(self, form: Any, path: str, space: str, depth: int) -> t.Type:
        # A level of the model is at most two of Avro's JSON (a union around a type).
        if depth > 2 * t.MAX_DEPTH:
            raise errors.SchemaError(f"the Avro schema is nested too deeply at '{path[:80]}'")
        if isinstance(form, list):
            return self.union(form, path, space, depth)
        if isinstance(form, str):
            return self.reference(form, path, space)
        match form["type"]:
            case "record" | "error":
                return self.record(form, path, space, depth)
            case "enum":
                symbols = canonical.texts(form["symbols"], "symbols")
                return self.keep(
                    form, space, t.Enum(_full(form, space), symbols, form.get("default"))
                )
            case "fixed":
                return self.keep(form, space, _fixed(form, path))
            case "array":
                return t.List(self.type(form["items"], f"{path}[]", space, depth + 1))
            case "map":
                return t.Map(self.type(form["values"], f"{path}{{}}", space, depth + 1))
            case str(base) if base in _PLAIN:
                return _primitive(base, form, path)
            case inner:
                return self.type(inner, path, space, depth + 1)

    def reference(self, name: str, path: str, space: str) -> t.Type:
        if name in _PLAIN:
            return _PLAIN[name]
        if name == "null":
            raise errors.Unmappable(path, "null", FORMAT, "null alone holds nothing; use a union")
        for full in (f"{space}.{name}" if space and "." not in name else name, name):
            if full in self.open:
                reason = "the record contains itself; Arrow and Spark have no such type"
                raise errors.Unmappable(path, f"record {full}", FORMAT, reason)
            if full in self.named:
                return self.named[full]
        raise errors.SchemaError(f"field '{path}': there is no Avro type named '{name}'")

    def keep(self, form: dict[str, Any], space: str, type_: t.Type) -> t.Type:
        self.named[_full(form, space)] = type_
        return type_

    def union(self, options: list[Any], path: str, space: str, depth: int) -> t.Type:
        types = [self.type(o, path, space, depth + 1) for o in options if o != "null"]
        if not types:
            raise errors.Unmappable(path, "union", FORMAT, "it allows nothing but null")
        try:
            union = types[0] if len(types) == 1 else t.Union(tuple(types))
        except errors.SchemaError as error:
            raise errors.Unmappable(path, "union", FORMAT, str(error)) from None
        return t.Nullable(union) if "null" in options else union

    def record(self, form: dict[str, Any], path: str, space: str, depth: int) -> t.Type:
        full = _full(form, space)
        inner = full.rpartition(".")[0]
        self.open.add(full)
        fields = []
        for field in form["fields"]:
            where = f"{path}.{field['name']}" if path else field["name"]
            fields.append(self.field(field, where, inner, depth))
        self.open.discard(full)
        aliases = canonical.texts(form.get("aliases", ()), "aliases")
        return self.keep(form, space, t.Record(full, tuple(fields), form.get("doc") or "", aliases))

    def field(self, form: dict[str, Any], path: str, space: str, depth: int) -> t.Field:
        type_ = self.type(form["type"], path, space, depth + 1)
        default: object = t.MISSING
        if "default" in form:
            try:
                default = from_raw(type_, form["default"])
            except (errors.Unfit, ValueError, TypeError, KeyError) as error:
                raise errors.SchemaError(
                    f"field '{path}': the Avro default {form['default']!r:.60} does not fit "
                    f"{t.kind(type_)}: {error}"
                ) from None
        number = (form.get(ANNOTATION) or {}).get("number")
        aliases = canonical.texts(form.get("aliases", ()), "aliases")
        return t.Field(form["name"], type_, default, form.get("doc") or "", aliases, number)


def _full(form: dict[str, Any], space: str) -> str:
    name: str = form["name"]
    own = form.get("namespace", space)
    return name if "." in name or not own else f"{own}.{name}"


def _primitive(base: str, form: dict[str, Any], path: str) -> t.Type:
    if ANNOTATION in form:
        annotated = canonical.type_from(form[ANNOTATION])
        if _annotated(annotated, path)["type"] != base:
            raise errors.Unmappable(
                path, base, FORMAT, f"it is annotated as {t.kind(annotated)}; remove one of the two"
            )
        return annotated
    logical = form.get("logicalType")
    if base == "bytes" and logical == "decimal":
        return t.Decimal(form["precision"], form.get("scale", 0))
    known = _LOGICAL.get((base, logical or ""))
    if logical is not None and known is None and logical in _REFUSED:
        raise errors.Unmappable(path, logical, FORMAT, _REFUSED[logical])
    # By the specification, readers ignore unknown logical types.
    return known or _PLAIN[base]


_REFUSED: Final = {
    "timestamp-nanos": "times have microseconds at most",
    "local-timestamp-nanos": "times have microseconds at most",
    "big-decimal": "its scale changes from value to value; use decimal",
}


def _fixed(form: dict[str, Any], path: str) -> t.Type:
    logical = form.get("logicalType")
    if logical == "decimal":
        return t.Decimal(form["precision"], form.get("scale", 0))
    if logical in ("duration", "uuid"):
        advice = "use the string uuid" if logical == "uuid" else "months have no fixed length"
        raise errors.Unmappable(path, f"fixed {logical}", FORMAT, advice)
    return t.Binary(form["size"])
