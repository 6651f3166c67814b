"""Single events in Avro's binary encoding, by fastavro."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import io
from typing import Any, Final

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.extras import needed
from millstream.schemas.formats.avro import parse_avro, to_avro
from millstream.schemas.schema import Schema
from millstream.schemas.values.fit import Fit, compile_fit, unfit_below

__all__ = ["AvroWire"]

_MICROSECOND: Final = dt.timedelta(microseconds=1)
_DECIMAL_BITS: Final = 127  # of 38 digits
_CONTEXT: Final = decimal.Context(prec=80)


class AvroWire:
    """A schema declared in Avro is written as declared, any other as `to_avro` maps it."""

    def __init__(self, schema: Schema) -> None:
        fastavro = needed("fastavro")
        record, origin = schema.record, schema.origin
        if origin is not None and origin.format == "avro":
            form = parse_avro(origin.text)
        else:
            form = to_avro(record)
        try:
            self._parsed = fastavro.parse_schema(copy.deepcopy(form), named_schemas={})
            bare = _with_bare_decimals(form)
            self._read_as = fastavro.parse_schema(copy.deepcopy(bare), named_schemas={})
        except Exception as error:  # fastavro's schema errors have no common base class
            raise errors.SchemaError(f"fastavro refuses the Avro schema: {error}") from error
        names: dict[str, Any] = {}
        _gather_names(self._parsed, names)
        self._kind = t.kind(record)
        self._to = _to_wire(record, self._parsed, names)
        self._from = _from_wire(record)
        self._fit = compile_fit(record)
        self._write = fastavro.schemaless_writer
        self._read = fastavro.schemaless_reader

    def dump(self, value: object) -> bytes:
        """The bytes of a value that fits the schema."""
        return self.dump_plain(self._fit(value))

    def dump_plain(self, plain: dict[str, Any]) -> bytes:
        """The bytes of a plain value, which is known to fit the schema."""
        out = io.BytesIO()
        self._write(out, self._parsed, plain if self._to is None else self._to(plain))
        return out.getvalue()

    def load(self, data: bytes) -> dict[str, Any]:
        """The plain value of the bytes, checked; bytes left over are refused too."""
        plain: dict[str, Any] = self._fit(self.load_unchecked(data))
        return plain

    def load_unchecked(self, data: bytes) -> Any:
        """What is in the bytes, for a caller that checks whether the values fit."""
        stream = io.BytesIO(data)
        try:
            value = self._read(stream, self._read_as, None)
        except Exception as error:  # fastavro raises anything for wrong bytes
            reason = f"{type(error).__name__} {error}"
            raise errors.Unfit("", f"{self._kind} in Avro", f"other bytes: {reason}") from None
        if stream.tell() != len(data):
            left = len(data) - stream.tell()
            raise errors.Unfit("", f"{self._kind} in Avro", f"{left} more bytes after it")
        return value if self._from is None else self._from(value)


def _with_bare_decimals(form: Any) -> Any:
    """The schema with decimals as bytes: a hostile one may take minutes to become a number.

    Not in unions, where only fastavro knows which option a value is of.
    """
    if isinstance(form, list):
        single = len([option for option in form if option != "null"]) == 1
        return [_with_bare_decimals(option) for option in form] if single else form
    if not isinstance(form, dict):
        return form
    if form.get("type") == "bytes" and form.get("logicalType") == "decimal":
        return "bytes"
    out = dict(form)
    for key in ("items", "values", "type"):
        if key in form:
            out[key] = _with_bare_decimals(form[key])
    if "fields" in form:
        out["fields"] = [{**f, "type": _with_bare_decimals(f["type"])} for f in form["fields"]]
    return out


def _gather_names(form: Any, names: dict[str, Any]) -> None:
    """Named types of a parsed schema by full name."""
    if isinstance(form, list):
        for option in form:
            _gather_names(option, names)
    elif isinstance(form, dict):
        if "name" in form and form.get("type") in ("record", "error", "enum", "fixed"):
            names[form["name"]] = form
        for key in ("items", "values", "type"):
            if isinstance(form.get(key), (list, dict)):
                _gather_names(form[key], names)
        for field in form.get("fields", ()):
            _gather_names(field["type"], names)


def _tag(form: Any) -> str:
    """fastavro's name for an option of a union."""
    while isinstance(form, dict):
        if form.get("type") in ("record", "error", "enum", "fixed"):
            return str(form["name"])
        form = form["type"]
    return str(form)


def _to_wire(type_: t.Type, form: Any, names: dict[str, Any]) -> Fit | None:
    """From plain values to what fastavro takes, or None where they are the same."""
    if isinstance(form, str):
        form = names.get(form, form)
    if isinstance(form, dict) and isinstance(form.get("type"), (list, dict)):
        return _to_wire(type_, form["type"], names)
    inner, nullable = t.strip(type_)
    if isinstance(form, list):
        options = [option for option in form if option != "null"]
        if isinstance(inner, t.Union):
            convert: Fit | None = _union_to_wire(inner, options, names)
        else:
            convert = _to_wire(inner, options[0], names)
        if convert is None or not nullable:
            return convert
        return lambda value: None if value is None else convert(value)
    match inner:
        case t.Duration():
            return lambda value: value // _MICROSECOND
        case t.List():
            item = _to_wire(inner.item, form["items"], names)
            return item and (lambda value: [item(e) for e in value])
        case t.Map():
            element = _to_wire(inner.value, form["values"], names)
            return element and (lambda value: {k: element(v) for k, v in value.items()})
        case t.Record():
            forms = {field["name"]: field["type"] for field in form["fields"]}
            converters = {f.name: _to_wire(f.type, forms[f.name], names) for f in inner.fields}
            return _on_fields(
                {name: convert for name, convert in converters.items() if convert is not None}
            )
        case _:
            return None


def _on_fields(converters: dict[str, Fit]) -> Fit | None:
    if not converters:
        return None
    pairs = list(converters.items())

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        out = dict(value)
        for name, one in pairs:
            try:
                out[name] = one(out[name])
            except errors.Unfit as error:
                raise unfit_below(name, error) from None
        return out

    return convert


def _union_to_wire(union: t.Union, forms: list[Any], names: dict[str, Any]) -> Fit:
    # fastavro finds the option by trial and error, and guesses wrong for a date among numbers.
    plan = [
        (compile_fit(option), _tag(form), _to_wire(option, form, names))
        for option, form in zip(union.options, forms, strict=True)
    ]

    def convert(value: Any) -> Any:
        for fit, tag, inner in plan:
            try:
                fit(value)
            except errors.Unfit:
                continue
            return (tag, value if inner is None else inner(value))
        raise errors.Unfit("", t.kind(union), repr(value))

    return convert


def _from_wire(type_: t.Type) -> Fit | None:
    """From what fastavro gives to plain values, or None where they are the same."""
    match type_:
        case t.Nullable():
            inner = _from_wire(type_.of)
            return inner and (lambda value: None if value is None else inner(value))
        case t.Duration():
            return lambda value: value * _MICROSECOND
        case t.Decimal():
            return _decimal_from_wire(type_)
        case t.List():
            item = _from_wire(type_.item)
            return item and (lambda value: [item(e) for e in value])
        case t.Map():
            element = _from_wire(type_.value)
            return element and (lambda value: {k: element(v) for k, v in value.items()})
        case t.Record():
            converters = {f.name: _from_wire(f.type) for f in type_.fields}
            return _on_fields(
                {name: convert for name, convert in converters.items() if convert is not None}
            )
        case t.Union():
            return _union_from_wire(type_)
        case _:
            return None


def _decimal_from_wire(type_: t.Decimal) -> Fit:
    def convert(value: Any) -> decimal.Decimal:
        if isinstance(value, decimal.Decimal):  # of a union, or of a fixed size
            return value
        unscaled = int.from_bytes(value, "big", signed=True)
        if unscaled.bit_length() > _DECIMAL_BITS:
            raise errors.Unfit("", t.kind(type_), f"a number of {unscaled.bit_length():,} bits")
        return decimal.Decimal(unscaled).scaleb(-type_.scale, context=_CONTEXT)

    return convert


def _union_from_wire(union: t.Union) -> Fit | None:
    # A decimal in a union is one already, and bytes are bytes.
    converters = [
        None if isinstance(option, t.Decimal) else _from_wire(option) for option in union.options
    ]
    if not any(converters):
        return None
    plan = [
        (compile_fit(option), convert)
        for option, convert in zip(union.options, converters, strict=True)
    ]

    def convert_option(value: Any) -> Any:
        for fit, convert in plan:
            try:
                converted = value if convert is None else convert(value)
                fit(converted)
            except (errors.Unfit, TypeError, KeyError, AttributeError, OverflowError):
                continue
            return converted
        return value

    return convert_option
