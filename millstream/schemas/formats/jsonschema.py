"""JSON Schema (draft 2020-12): schemas to and from its objects.

What JSON Schema can express is written with its own keywords (integer ranges, `format`, `enum`,
`$ref`). What it cannot (decimal digits, 32-bit floats, enum names) is in `x-millstream`, the
canonical form, which counts only if it agrees with the keywords around it. Keywords that constrain
values more than a type can are refused by default.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.values.fit import compile_fit, jsonable

__all__ = ["from_json_schema", "to_json_schema"]

FORMAT: Final = "JSON Schema"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
ANNOTATION: Final = "x-millstream"
_TITLE = re.compile(r"\w+(\.\w+)*")

_FORMATS: Final[dict[str, t.Type]] = {
    "date": t.Date(),
    "time": t.Time(),
    "date-time": t.Timestamp(),
    "duration": t.Duration(),
    "uuid": t.Uuid(),
}
# Keywords that describe a schema without constraining its values.
_NOTES: Final = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "definitions", "deprecated", "description",
    "examples", "readOnly", "title", "writeOnly", "default", ANNOTATION,
})  # fmt: skip
_WORDS: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items"}),
    "string": frozenset({"format", "enum", "contentEncoding"}),
    "integer": frozenset({"minimum", "maximum", "format"}),
    "number": frozenset({"format"}),
    "boolean": frozenset(),
}
_RANGES: Final = {
    (type_.low, type_.high): type_
    for type_ in (t.Int(bits, signed) for bits in (8, 16, 32, 64) for signed in (True, False))
}


# -- to JSON Schema -----------------------------------------------------------------------


def to_json_schema(record: t.Record) -> dict[str, Any]:
    """The JSON Schema of a record, which the JSON of every fitting value satisfies."""
    return {"$schema": DIALECT, **_type_to(record, "")}


def _type_to(type_: t.Type, path: str) -> dict[str, Any]:
    """A type in JSON Schema's keywords, annotated if they do not express all of it."""
    form = _keywords(type_, path)
    if not isinstance(type_, t.Record) and _understood(form) != type_:
        form[ANNOTATION] = canonical.type_to(type_)
    return form


def _understood(form: dict[str, Any]) -> t.Type | None:
    """The type that the keywords alone stand for."""
    try:
        return _Reader({}, drop=False).type(form, "", "", 0)
    except errors.SchemaError:
        return None


def _keywords(type_: t.Type, path: str) -> dict[str, Any]:
    match type_:
        case t.Bool():
            return {"type": "boolean"}
        case t.Int():
            return {"type": "integer", "minimum": type_.low, "maximum": type_.high}
        case t.Float(bits):
            return {"type": "number", "format": "float" if bits == 32 else "double"}
        case t.String():
            return {"type": "string"}
        case t.Binary():
            return {"type": "string", "contentEncoding": "base64"}
        case t.Decimal():
            return {"type": "string", "format": "decimal"}
        case t.Timestamp(utc):
            return {"type": "string", **({"format": "date-time"} if utc else {})}
        case t.Date() | t.Time() | t.Duration() | t.Uuid():
            return {"type": "string", "format": type(type_).__name__.lower()}
        case t.Enum():
            return {"type": "string", "enum": list(type_.symbols)}
        case t.Nullable():
            return {"anyOf": [_type_to(type_.of, path), {"type": "null"}]}
        case t.List():
            return {"type": "array", "items": _type_to(type_.item, f"{path}[]")}
        case t.Map():
            value = _type_to(type_.value, f"{path}{{}}")
            return {"type": "object", "additionalProperties": value}
        case t.Union():
            return _union_to(type_, path)
        case t.Record():
            return _record_to(type_, path)


def _union_to(union: t.Union, path: str) -> dict[str, Any]:
    kinds: dict[str, t.Type] = {}
    options = [_type_to(option, path) for option in union.options]
    for option, form in zip(union.options, options, strict=True):
        if isinstance(option, t.Record) and kinds.get("object") is None:
            continue
        # Numbers are one kind in JSON: 1 and 1.0 are written alike by many libraries.
        keyword = {"integer": "number"}.get(form["type"], form["type"])
        other = kinds.get(keyword)
        kinds[keyword] = option
        if other is not None:
            raise errors.Unmappable(
                path,
                t.kind(union),
                FORMAT,
                f"{t.kind(other)} and {t.kind(option)} are both a {form['type']} in JSON, "
                f"so readers could not distinguish them",
            )
    return {"anyOf": options}


def _record_to(record: t.Record, path: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field in record.fields:
        where = f"{path}.{field.name}" if path else field.name
        form = _type_to(field.type, where)
        # A record's `description` is its own.
        if field.doc and not isinstance(field.type, t.Record):
            form["description"] = field.doc
        if field.default is not t.MISSING:
            form["default"] = jsonable(field.default)
        properties[field.name] = form
    form = {
        "type": "object",
        "title": record.name,
        "properties": properties,
        "required": [field.name for field in record.fields if field.required],
        "additionalProperties": False,
    }
    if record.doc:
        form["description"] = record.doc
    facts = _record_facts(record)
    if facts:
        form[ANNOTATION] = facts
    return form


def _record_facts(record: t.Record) -> dict[str, Any]:
    """Properties of other formats: aliases, field numbers and names that cannot be a title."""
    facts: dict[str, Any] = {}
    if not _TITLE.fullmatch(record.name):
        facts["name"] = record.name
    if record.aliases:
        facts["aliases"] = list(record.aliases)
    for field in record.fields:
        fact: dict[str, Any] = {}
        if field.aliases:
            fact["aliases"] = list(field.aliases)
        if field.number is not None:
            fact["number"] = field.number
        if field.doc and isinstance(field.type, t.Record):
            fact["doc"] = field.doc
        if fact:
            facts.setdefault("fields", {})[field.name] = fact
    return facts


# -- from JSON Schema ---------------------------------------------------------------------


def from_json_schema(
    source: str | bytes | dict[str, Any], *, name: str | None = None, drop_constraints: bool = False
) -> t.Record:
    """The record of a JSON Schema object, given as text or as its values.

    Keywords that constrain values beyond their type (`pattern`, `minLength`, ...) are refused, or
    ignored with `drop_constraints=True`.
    """
    form = canonical.parse_json(source, FORMAT) if isinstance(source, (str, bytes)) else source
    try:
        record = _Reader(form, drop_constraints).type(form, "", name or _title(form), 0)
    except (KeyError, TypeError, AttributeError) as error:
        raise errors.SchemaError(f"the JSON Schema is malformed: {error!r}") from None
    if not isinstance(record, t.Record):
        raise errors.SchemaError(
            f"an event is a record (an object with properties); the JSON Schema is {t.kind(record)}"
        )
    return record if name is None else dataclasses.replace(record, name=name)


def _title(form: Any) -> str:
    return re.sub(r"\W+", "_", str(form.get("title") or "")) or "record"


class _Reader:
    """One document being read; references are followed inside it only."""

    def __init__(self, document: Any, drop: bool) -> None:
        self.document = document
        self.drop = drop
        self.following: list[str] = []

    def refuse(self, path: str, what: object, reason: str) -> errors.Unmappable:
        return errors.Unmappable(path or "(root)", str(what)[:80], FORMAT, reason)

    def type(self, form: Any, path: str, name: str, depth: int) -> t.Type:
        # A level of the model is at most three of JSON Schema's (a reference to a choice).
        if depth > 3 * t.MAX_DEPTH:
            raise errors.SchemaError(f"the JSON Schema is nested too deeply at '{path[:80]}'")
        if not isinstance(form, dict):
            raise self.refuse(path, form, "'any value' is not a type; name one")
        if "$ref" in form:
            return self.reference(form, path, name, depth)
        for keyword in ("anyOf", "oneOf"):
            if keyword in form:
                self.only(form, frozenset({keyword}), path)
                return self.annotated(form, self.choice(form[keyword], path, name, depth), path)
        if "const" in form and isinstance(form["const"], str):
            form = {"type": "string", **{k: v for k, v in form.items() if k != "const"},
                    "enum": [form["const"]]}  # fmt: skip
        if "enum" in form and "type" not in form:
            form = {"type": "string", **form}
        kind = form.get("type")
        if isinstance(kind, list):
            rest = {key: value for key, value in form.items() if key not in ("type", "default")}
            options = [{**rest, "type": one} if one != "null" else {"type": one} for one in kind]
            return self.choice(options, path, name, depth)
        if kind not in _WORDS:
            raise self.refuse(path, kind or form, "it has no 'type' that can be a column")
        self.only(form, _WORDS[kind] | {"type"}, path)
        if kind == "object":
            return self.mapping(form, path, name, depth)
        if kind == "array":
            if "items" not in form:
                raise self.refuse(path, "array", "set its type with 'items'")
            item = self.type(form["items"], f"{path}[]", f"{name}_item", depth + 1)
            return self.annotated(form, t.List(item), path)
        return self.annotated(form, self.leaf(kind, form, path, name), path)

    def only(self, form: dict[str, Any], keywords: frozenset[str], path: str) -> None:
        beyond = sorted(form.keys() - keywords - _NOTES)
        if beyond and not self.drop:
            raise self.refuse(
                path,
                beyond[0],
                "the keyword is not part of a type and would be lost; declare with "
                "drop_constraints=True to drop it",
            )

    def annotated(self, form: dict[str, Any], read: t.Type, path: str) -> t.Type:
        if ANNOTATION not in form:
            return read
        annotated_as = canonical.type_from(form[ANNOTATION])
        keywords = {k: v for k, v in form.items() if k not in _NOTES}
        if {k: v for k, v in _keywords(annotated_as, path).items() if k not in _NOTES} != keywords:
            raise self.refuse(
                path,
                t.kind(read),
                f"it is annotated as {t.kind(annotated_as)}; remove one of the two",
            )
        return annotated_as

    def reference(self, form: dict[str, Any], path: str, name: str, depth: int) -> t.Type:
        target = form["$ref"]
        self.only(form, frozenset({"$ref"}), path)
        if target in self.following:
            reason = "the definition contains itself; Arrow and Spark have no such type"
            raise self.refuse(path, target, reason)
        found = self.document
        if not isinstance(target, str) or not target.startswith("#"):
            raise self.refuse(path, target, "only references inside the document are followed")
        for part in target.lstrip("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise self.refuse(path, target, "the document has no such definition")
            found = found[part]
        self.following.append(target)
        last = target.rpartition("/")[2]
        read = self.type(found, path, re.sub(r"\W+", "_", last) or name, depth + 1)
        self.following.pop()
        return read

    def choice(self, options: list[Any], path: str, name: str, depth: int) -> t.Type:
        solid = [option for option in options if option != {"type": "null"}]
        if not solid:
            raise self.refuse(path, "null", "it allows nothing but null")
        types = [self.type(option, path, name, depth + 1) for option in solid]
        if len(types) == 1:
            return types[0] if len(solid) == len(options) else _nullable(types[0])
        try:
            union = t.Union(tuple(types))
        except errors.SchemaError as error:
            raise self.refuse(path, "anyOf", str(error)) from None
        return union if len(solid) == len(options) else t.Nullable(union)

    def mapping(self, form: dict[str, Any], path: str, name: str, depth: int) -> t.Type:
        extra = form.get("additionalProperties", True)
        if "properties" not in form:
            if not isinstance(extra, dict):
                raise self.refuse(path, "object", "set its 'properties', or the type of its values "
                                  "with 'additionalProperties'")  # fmt: skip
            value = self.type(extra, f"{path}{{}}", f"{name}_value", depth + 1)
            return self.annotated(form, t.Map(value), path)
        if isinstance(extra, dict):
            raise self.refuse(path, "object", "it is both a record and a map; choose one")
        return self.record(form, path, name, depth)

    def record(self, form: dict[str, Any], path: str, name: str, depth: int) -> t.Type:
        facts = form.get(ANNOTATION) or {}
        required = canonical.texts(form.get("required", []), "required properties")
        fields = []
        for key, value in form["properties"].items():
            where = f"{path}.{key}" if path else key
            below = f"{name}_{re.sub(r'[^0-9A-Za-z_]', '_', key)}"
            type_ = self.type(value, where, below, depth + 1)
            default = self.default(value, type_, where)
            if key not in required and default is t.MISSING:
                # An optional property is a nullable field.
                type_, default = _nullable(type_), None
            fact = facts.get("fields", {}).get(key, {})
            fields.append(
                t.Field(
                    key,
                    type_,
                    default,
                    fact.get("doc", "" if "properties" in value else value.get("description", "")),
                    canonical.texts(fact.get("aliases", ()), "aliases"),
                    fact.get("number"),
                )
            )
        title = form.get("title")
        called = title if isinstance(title, str) and _TITLE.fullmatch(title) else name
        called = facts.get("name", called)
        aliases = canonical.texts(facts.get("aliases", ()), "aliases")
        return t.Record(called, tuple(fields), form.get("description", ""), aliases)

    def default(self, form: dict[str, Any], type_: t.Type, path: str) -> object:
        if "default" not in form:
            return t.MISSING
        try:
            return compile_fit(type_, text=True)(form["default"])
        except errors.Unfit as error:
            raise errors.SchemaError(f"field '{path}': the default does not fit: {error}") from None

    def leaf(self, kind: str, form: dict[str, Any], path: str, name: str) -> t.Type:
        if kind == "boolean":
            return t.Bool()
        if kind == "integer":
            return self.integer(form, path)
        if kind == "number":
            return t.Float(32 if form.get("format") == "float" else 64)
        if "enum" in form:
            symbols = form["enum"]
            if not all(isinstance(symbol, str) for symbol in symbols):
                raise self.refuse(path, "enum", "only text can be the symbols of an enum")
            return t.Enum(name or "symbols", tuple(symbols))
        if "contentEncoding" in form:
            if form["contentEncoding"] != "base64":
                raise self.refuse(path, form["contentEncoding"], "bytes are written in base64 only")
            return t.Binary()
        keyword = form.get("format")
        # Formats without a type of their own (email, uri, hostname) stay text.
        return _FORMATS.get(keyword, t.String()) if keyword is not None else t.String()

    def integer(self, form: dict[str, Any], path: str) -> t.Type:
        if "minimum" not in form and "maximum" not in form:
            return t.Int(32 if form.get("format") == "int32" else 64)
        limits = (form.get("minimum", -(2**63)), form.get("maximum", 2**63 - 1))
        exact = _RANGES.get(limits)
        if exact is None and not self.drop:
            raise self.refuse(
                path,
                f"integer {limits[0]} to {limits[1]}",
                "only the ranges of 8, 16, 32 and 64 bits are types; declare with "
                "drop_constraints=True for a 64-bit number",
            )
        return exact or t.Int(64)


def _nullable(type_: t.Type) -> t.Type:
    return type_ if isinstance(type_, t.Nullable) else t.Nullable(type_)
