"""Schemas from Python classes: dataclasses, msgspec Structs and Pydantic models.

The annotation is the type. Where Python's types are not exact enough, annotate with a type of the
model, which takes precedence: `Annotated[int, types.Int(32)]`, `Annotated[Decimal,
types.Decimal(10, 2)]`, `Annotated[datetime, types.Timestamp(utc=False)]`. A bare `datetime` is a
point in time (with zone). `Field(...)` facts (doc, aliases) come from `Annotated[..., Doc("...")]`
and `Annotated[..., Aliases("old_name")]`, or Pydantic's `description`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import inspect
import sys
import types as pytypes
import typing
import uuid
from typing import Any, Final

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.values.fit import field_names

__all__ = ["Aliases", "Doc", "from_python", "is_schema_class"]

FORMAT: Final = "Python"

_LEAVES: Final[dict[Any, t.Type]] = {
    bool: t.Bool(),
    int: t.Int(64),
    float: t.Float(64),
    str: t.String(),
    bytes: t.Binary(),
    dt.date: t.Date(),
    dt.time: t.Time(),
    dt.datetime: t.Timestamp(),
    dt.timedelta: t.Duration(),
    uuid.UUID: t.Uuid(),
}
# What a type of the model, given inside Annotated, may be attached to.
_FITS: Final[dict[type, tuple[Any, ...]]] = {
    t.Bool: (bool,),
    t.Int: (int,),
    t.Float: (float,),
    t.String: (str,),
    t.Binary: (bytes,),
    t.Decimal: (decimal.Decimal,),
    t.Date: (dt.date,),
    t.Time: (dt.time,),
    t.Timestamp: (dt.datetime,),
    t.Duration: (dt.timedelta,),
    t.Uuid: (uuid.UUID,),
    t.Enum: (str,),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Doc:
    """What a field means: `Annotated[int, Doc("cents, never negative")]`."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Aliases:
    """Earlier names of a field: `Annotated[str, Aliases("customer")]`."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclasses.dataclass(slots=True)
class _Walk:
    """The current path, and the classes around it."""

    drop_constraints: bool
    inside: tuple[type, ...] = ()
    path: str = ""

    def below(self, name: str) -> _Walk:
        return dataclasses.replace(self, path=f"{self.path}.{name}" if self.path else name)

    def refuse(self, what: object, reason: str) -> errors.Unmappable:
        shown = what.__name__ if isinstance(what, type) else str(what)
        return errors.Unmappable(self.path or shown, shown, FORMAT, reason)


def is_schema_class(source: object) -> bool:
    """Whether a schema can be derived from the class."""
    return isinstance(source, type) and field_names(source) is not None


def from_python(cls: type, *, name: str | None = None, drop_constraints: bool = False) -> t.Record:
    """The record of a dataclass, msgspec Struct or Pydantic model.

    Value constraints (`gt`, `pattern`, `max_length`) are not part of the type model: they are
    refused, or left to the class with `drop_constraints=True`.
    """
    if not is_schema_class(cls):
        raise errors.SchemaError(
            f"{cls!r} is not a dataclass, a msgspec Struct or a Pydantic model"
        )
    record = _record(cls, _Walk(drop_constraints))
    return record if name is None else dataclasses.replace(record, name=name)


def _record(cls: type, walk: _Walk) -> t.Record:
    if cls in walk.inside:
        raise walk.refuse(cls, "the class contains itself; Arrow and Spark have no such type")
    if len(walk.inside) >= t.MAX_DEPTH:
        raise walk.refuse(cls, f"nested more than {t.MAX_DEPTH} levels deep")
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError) as error:
        raise walk.refuse(cls, f"its annotations cannot be resolved: {error}") from error
    inner = dataclasses.replace(walk, inside=(*walk.inside, cls))
    defaults = _defaults(cls)
    fields = []
    for name in field_names(cls) or ():
        fields.append(_field(name, hints[name], defaults.get(name, t.MISSING), inner.below(name)))
    if not fields:
        raise walk.refuse(cls, "the class has no fields")
    # Generated docs ("Order(id: int)") are useless; inherited ones belong to the base class.
    doc = cls.__dict__.get("__doc__") or ""
    doc = "" if doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)
    return t.Record(cls.__name__, tuple(fields), doc)


def _field(name: str, hint: Any, default: object, walk: _Walk) -> t.Field:
    doc = ""
    aliases: tuple[str, ...] = ()
    facts = _metadata(hint)
    if isinstance(default, _PydanticField):
        # Pydantic has already moved the facts out of the annotation.
        hint, facts, doc, default = default.hint, default.facts, default.doc, default.default
        type_ = _type(hint, walk, facts)
    else:
        type_ = _type(hint, walk)
    for fact in facts:
        if isinstance(fact, Doc):
            doc = fact.text
        elif isinstance(fact, Aliases):
            aliases = fact.names
    if isinstance(default, enum.Enum):
        default = default.value if isinstance(default.value, str) else default.name
    return t.Field(name, type_, default, doc, aliases)


# -- annotations --------------------------------------------------------------------------


def _metadata(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if typing.get_origin(hint) is typing.Annotated else ()


def _type(hint: Any, walk: _Walk, facts: tuple[Any, ...] = ()) -> t.Type:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _type(hint.__origin__, walk, (*facts, *hint.__metadata__))
    if origin in (typing.Union, pytypes.UnionType):
        return _union(typing.get_args(hint), walk, facts)
    given = [fact for fact in facts if type(fact) in _FITS]
    if given:
        return _given(hint, given, walk)
    narrowed = _narrowed(hint, facts, walk)
    if narrowed is not None:
        return narrowed
    if origin is typing.Literal:
        return _literal(typing.get_args(hint), walk)
    if origin in (list, tuple, collections.abc.Sequence):
        return _list(hint, walk)
    if origin in (dict, collections.abc.Mapping):
        key, value = typing.get_args(hint)
        return t.Map(_type(value, walk.below("{}")), _type(key, walk.below("{}")))
    if isinstance(hint, type):
        if hint in _LEAVES:
            return _LEAVES[hint]
        if issubclass(hint, enum.Enum):
            return _enum(hint)
        if is_schema_class(hint):
            return _record(hint, walk)
    raise walk.refuse(hint, _advice(hint))


def _advice(hint: Any) -> str:
    if hint is decimal.Decimal:
        return "set its digits: Annotated[Decimal, types.Decimal(precision, scale)]"
    if hint is Any or hint is object:
        return "'any value' is not a type; name one"
    if hint in (list, dict, tuple):
        return "set its item type, such as list[int] or dict[str, int]"
    if hint in (set, frozenset) or typing.get_origin(hint) in (set, frozenset):
        return "no format has sets; use a list"
    return "the model has no such type"


def _given(hint: Any, given: list[Any], walk: _Walk) -> t.Type:
    """The model type inside Annotated, which must agree with the Python type."""
    if len(given) > 1:
        raise walk.refuse(hint, f"two types are annotated: {given[0]} and {given[1]}")
    if hint not in _FITS[type(given[0])]:
        raise walk.refuse(hint, f"{t.kind(given[0])} is annotated on it, which is another type")
    type_: t.Type = given[0]
    return type_


def _union(args: tuple[Any, ...], walk: _Walk, facts: tuple[Any, ...]) -> t.Type:
    options = [arg for arg in args if arg is not type(None)]
    if len(options) == 1:
        inner = _type(options[0], walk, facts)
        return t.Nullable(inner)
    union: t.Type
    try:
        union = t.Union(tuple(_type(option, walk) for option in options))
    except errors.Unmappable:
        raise
    except errors.SchemaError as error:
        raise walk.refuse("union", str(error)) from None
    return t.Nullable(union) if len(options) < len(args) else union


def _list(hint: Any, walk: _Walk) -> t.Type:
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        raise walk.refuse(hint, "tuples of fixed length cannot be mapped; use a class or list[...]")
    return t.List(_type(args[0], walk.below("[]")))


def _literal(symbols: tuple[Any, ...], walk: _Walk) -> t.Type:
    if not all(isinstance(symbol, str) for symbol in symbols):
        raise walk.refuse("Literal", "only text can be the symbols of an enum")
    return t.Enum(walk.path.replace(".", "_").replace("[]", "_item"), symbols)


def _enum(cls: type[enum.Enum]) -> t.Type:
    """Text values are the symbols; for members with other values the names are."""
    texts = all(isinstance(member.value, str) for member in cls)
    return t.Enum(cls.__name__, tuple(m.value if texts else m.name for m in cls))


# -- constraints of libraries -------------------------------------------------------------

_CONSTRAINTS: Final = (
    "gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "regex",
)  # fmt: skip


def _narrowed(hint: Any, facts: tuple[Any, ...], walk: _Walk) -> t.Type | None:
    """A type that Pydantic's or msgspec's own metadata makes exact; constraints are refused."""
    constraints: dict[str, Any] = {}
    # Pydantic's Field(...) has its constraints in a separate list.
    inner = (one for fact in facts for one in getattr(fact, "metadata", ()) or ())
    for fact in (*facts, *inner):
        for name in (*_CONSTRAINTS, "max_digits", "decimal_places", "tz", "tz_constraint"):
            value = getattr(fact, name, None)
            if value is not None and not callable(value):
                constraints[name] = value
    result: t.Type | None = None
    if hint is decimal.Decimal and "max_digits" in constraints and "decimal_places" in constraints:
        result = t.Decimal(constraints.pop("max_digits"), constraints.pop("decimal_places"))
    if hint is dt.datetime and "tz" in constraints:
        result = t.Timestamp(utc=constraints.pop("tz"))
    unused = sorted(constraints.keys() & {*_CONSTRAINTS, "max_digits", "decimal_places", "tz"})
    if unused and not walk.drop_constraints:
        raise walk.refuse(
            hint,
            f"the constraint {unused[0]}={constraints[unused[0]]!r} is not part of a type and "
            f"would be lost; declare with drop_constraints=True to leave it to the class",
        )
    if result is None:
        result = _pydantic_alias(hint)
    return result


def _pydantic_alias(hint: Any) -> t.Type | None:
    """Pydantic's own datetime classes; looked up only where Pydantic is loaded."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None:
        return None
    if hint is pydantic.AwareDatetime:
        return t.Timestamp(utc=True)
    if hint is pydantic.NaiveDatetime:
        return t.Timestamp(utc=False)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _PydanticField:
    """Pydantic's facts about one field."""

    hint: Any
    facts: tuple[Any, ...]
    doc: str
    default: object


def _defaults(cls: type) -> dict[str, Any]:
    if hasattr(cls, "__struct_fields__"):
        return _struct_defaults(cls)
    if hasattr(cls, "__pydantic_fields__"):
        return _pydantic_defaults(cls)
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            out[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            out[field.name] = _made(field.default_factory)
    return out


def _struct_defaults(cls: Any) -> dict[str, Any]:
    import msgspec

    out: dict[str, Any] = {}
    for field in msgspec.structs.fields(cls):
        if field.default is not msgspec.NODEFAULT:
            out[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            out[field.name] = _made(field.default_factory)
    return out


def _pydantic_defaults(cls: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, info in cls.__pydantic_fields__.items():
        value: object = t.MISSING
        if info.default_factory is not None:
            value = _made(info.default_factory)
        elif not info.is_required():
            value = info.default
        out[name] = _PydanticField(
            info.annotation, tuple(info.metadata), info.description or "", value
        )
    return out


def _made(factory: Any) -> object:
    """The constant that a factory returns; MISSING if it returns a new value each time."""
    if factory in (list, dict):
        return factory()
    try:
        one, two = factory(), factory()
    except Exception:  # a factory may need the other fields; then there is no constant default
        return t.MISSING
    return one if type(one) is type(two) and one == two else t.MISSING
