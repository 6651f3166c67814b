"""Rows of a file to values of a topic's type. Pure except for asking the topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import Topic

__all__ = ["typed_values"]

_TRUE: Final = frozenset({"true", "t", "yes", "1"})
_FALSE: Final = frozenset({"false", "f", "no", "0"})


def typed_values(topic: Topic) -> Callable[[Any], Any] | None:
    """The function that makes a value of the topic's type of a row; None without a schema.

    Text fields (all fields of CSV) become numbers and booleans where the schema has those; the rest
    is read as in JSON: times as ISO 8601, bytes as base64.
    """
    from millstream.schemas.registry.binding import TypedValues
    from millstream.schemas.values.fit import compile_fit

    values = topic.value_type
    if not isinstance(values, TypedValues):
        return None
    record = values.schema.record
    fit = compile_fit(record, text=True)
    plans = {field.name: _plan(field.type) for field in record.fields}

    def make(row: Any) -> Any:
        if not isinstance(row, Mapping):
            raise ConfigError(f"expected a row with columns, found {type(row).__name__}")
        plain = {
            name: _from_text(value, *plans[name]) if isinstance(value, str) else value
            for name, value in row.items()
            if name in plans
        }
        return fit(plain)

    return make


def _plan(type_: Any) -> tuple[str, bool]:
    """What text becomes: "int", "float", "bool" or "text"; and whether empty text is null."""
    from millstream.schemas import types as t

    nullable = isinstance(type_, t.Nullable)
    inner = type_.of if isinstance(type_, t.Nullable) else type_
    for kind, name in ((t.Bool, "bool"), (t.Int, "int"), (t.Float, "float")):
        if isinstance(inner, kind):
            return name, nullable
    return "text", nullable and not isinstance(inner, t.String)


def _from_text(text: str, kind: str, empty_is_null: bool) -> Any:
    """The value of a text; text that is not such a value stays text and is refused by the type."""
    if not text and empty_is_null:
        return None
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        return text
    if kind == "bool":
        lower = text.lower()
        return True if lower in _TRUE else False if lower in _FALSE else text
    return text
