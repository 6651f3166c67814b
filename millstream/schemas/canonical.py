"""The canonical JSON form of a type, in which the registry keeps schemas.

The form is stable: equal types give equal bytes, in every version of this package. Simple types
are their short name (`"int32"`, `"decimal(10,2)"`), the others an object with a `type`; absent
properties are left out rather than written as null.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.values.fit import compile_fit, found, jsonable, option_of

__all__ = [
    "MAX_TEXT",
    "default_from",
    "default_to",
    "dump",
    "fingerprintable",
    "load",
    "parse_json",
    "texts",
    "type_from",
    "type_to",
]

# The largest schema text that is read; generated schemas of hundreds of fields stay below 100 KB.
MAX_TEXT: Final = 1 << 20

_SIMPLES: Final[tuple[t.Type, ...]] = (
    t.Bool(),
    *(t.Int(bits, signed) for bits in (8, 16, 32, 64) for signed in (True, False)),
    t.Float(32),
    t.Float(64),
    t.String(),
    t.Binary(),
    t.Date(),
    t.Time("us"),
    t.Time("ms"),
    *(t.Timestamp(utc, "us") for utc in (True, False)),
    *(t.Timestamp(utc, "ms") for utc in (True, False)),
    t.Duration(),
    t.Uuid(),
)
_SIMPLE: Final = {t.kind(type_): type_ for type_ in _SIMPLES}
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)")
_FIXED = re.compile(r"fixed\((\d{1,5})\)")


def texts(form: Any, what: str) -> tuple[str, ...]:
    """A list of texts, as names and symbols are given."""
    if not isinstance(form, (list, tuple)) or not all(isinstance(text, str) for text in form):
        raise errors.SchemaError(f"the {what} are not a list of texts: {form!r:.60}")
    return tuple(form)


def parse_json(text: str | bytes, what: str) -> Any:
    """JSON of bounded size; faults are a `SchemaError` that names `what`."""
    if len(text) > MAX_TEXT:
        raise errors.SchemaError(
            f"the {what} has {len(text):,} characters; at most {MAX_TEXT:,} are read"
        )
    try:
        return json.loads(text)
    except RecursionError:
        raise errors.SchemaError(f"the {what} is nested too deeply") from None
    except ValueError as error:
        raise errors.SchemaError(f"the {what} is not JSON: {error}") from None


def dump(type_: t.Type) -> str:
    """The canonical text of a type."""
    return fingerprintable(type_to(type_))


def fingerprintable(form: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces."""
    return json.dumps(
        form, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def load(text: str | bytes) -> t.Type:
    """The type a canonical text describes."""
    return type_from(parse_json(text, "canonical schema"))


def type_to(type_: t.Type) -> Any:
    """The canonical form of a type, as values that `json` can write."""
    match type_:
        case t.Enum():
            form = {"type": "enum", "name": type_.name, "symbols": list(type_.symbols)}
            if type_.default is not None:
                form["default"] = type_.default
            return form
        case t.Nullable():
            return {"type": "nullable", "of": type_to(type_.of)}
        case t.List():
            return {"type": "list", "item": type_to(type_.item)}
        case t.Map():
            return {"type": "map", "key": type_to(type_.key), "value": type_to(type_.value)}
        case t.Union():
            return {"type": "union", "options": [type_to(option) for option in type_.options]}
        case t.Record():
            fields = [_field_to(field) for field in type_.fields]
            record: dict[str, Any] = {"type": "record", "name": type_.name, "fields": fields}
            if type_.doc:
                record["doc"] = type_.doc
            if type_.aliases:
                record["aliases"] = list(type_.aliases)
            return record
        case _:
            return t.kind(type_)


def _field_to(field: t.Field) -> dict[str, Any]:
    form: dict[str, Any] = {"name": field.name, "type": type_to(field.type)}
    if field.default is not t.MISSING:
        form["default"] = default_to(field.type, field.default)
    if field.doc:
        form["doc"] = field.doc
    if field.aliases:
        form["aliases"] = list(field.aliases)
    if field.number is not None:
        form["number"] = field.number
    return form


def type_from(form: Any, depth: int = 0) -> t.Type:
    """The type of a canonical form; anything else is refused."""
    if depth > t.MAX_DEPTH:
        raise errors.SchemaError(f"the schema is nested more than {t.MAX_DEPTH} levels deep")
    if isinstance(form, str):
        return _simple_from(form)
    if not isinstance(form, dict):
        raise errors.SchemaError(f"a canonical type is text or an object, not {form!r:.80}")
    try:
        match form["type"]:
            case "enum":
                return t.Enum(form["name"], texts(form["symbols"], "symbols"), form.get("default"))
            case "nullable":
                return t.Nullable(type_from(form["of"], depth + 1))
            case "list":
                return t.List(type_from(form["item"], depth + 1))
            case "map":
                value = type_from(form["value"], depth + 1)
                return t.Map(value, type_from(form["key"], depth + 1))
            case "union":
                return t.Union(tuple(type_from(o, depth + 1) for o in form["options"]))
            case "record":
                fields = tuple(_field_from(f, depth + 1) for f in form["fields"])
                aliases = texts(form.get("aliases", ()), "aliases")
                return t.Record(form["name"], fields, form.get("doc", ""), aliases)
            case other:
                raise errors.SchemaError(f"{other!r:.80} is not a canonical type")
    except (KeyError, TypeError, AttributeError) as error:
        raise errors.SchemaError(f"a canonical type is incomplete: {error!r}") from None


def _simple_from(name: str) -> t.Type:
    simple = _SIMPLE.get(name)
    if simple is not None:
        return simple
    if match := _DECIMAL.fullmatch(name):
        return t.Decimal(int(match[1]), int(match[2]))
    if match := _FIXED.fullmatch(name):
        return t.Binary(int(match[1]))
    raise errors.SchemaError(f"{name!r:.80} is not a canonical type")


def default_to(type_: t.Type, value: Any) -> Any:
    """A plain default as JSON; a union's default is written with the index of its option.

    The text alone would not show whether it is a date, base64 or plain text.
    """
    match type_:
        case t.Nullable():
            return None if value is None else default_to(type_.of, value)
        case t.Union():
            index = option_of(type_, value)
            return [index, default_to(type_.options[index], value)]
        case t.List():
            return [default_to(type_.item, item) for item in value]
        case t.Map():
            return {str(key): default_to(type_.value, item) for key, item in value.items()}
        case t.Record():
            return {f.name: default_to(f.type, value[f.name]) for f in type_.fields}
        case _:
            return jsonable(value)


def default_from(type_: t.Type, form: Any) -> Any:
    """The plain default of its JSON; `Unfit` if it does not fit the type."""
    match type_, form:
        case t.Nullable(), _:
            return None if form is None else default_from(type_.of, form)
        case t.Union(), [int(index), inner] if 0 <= index < len(type_.options):
            return default_from(type_.options[index], inner)
        case t.List(), list():
            return [default_from(type_.item, item) for item in form]
        case t.Map(), dict():
            empty = compile_fit(t.Map(t.Nullable(t.Bool()), type_.key), text=True)
            keys = empty(dict.fromkeys(form))
            return dict(
                zip(keys, (default_from(type_.value, v) for v in form.values()), strict=True)
            )
        case t.Record(), dict():
            given = {
                f.name: default_from(f.type, form[f.name]) for f in type_.fields if f.name in form
            }
            return compile_fit(type_)({**form, **given})
        case ((t.Union() | t.List() | t.Map() | t.Record()), _):
            raise errors.Unfit("", t.kind(type_), found(form))
        case _:
            return compile_fit(type_, text=True)(form)


def _field_from(form: dict[str, Any], depth: int) -> t.Field:
    type_ = type_from(form["type"], depth)
    default: object = t.MISSING
    if "default" in form:
        try:
            default = default_from(type_, form["default"])
        except errors.Unfit as error:
            raise errors.SchemaError(
                f"the default of field '{form['name']}' does not fit: "
                f"expected {error.expected}, found {error.found}"
            ) from None
    return t.Field(
        form["name"],
        type_,
        default,
        form.get("doc", ""),
        texts(form.get("aliases", ()), "aliases"),
        form.get("number"),
    )
