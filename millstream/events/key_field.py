"""A field of values that is the key of their events. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import ConfigError, Unfit
from millstream.events.subject import KEY_BYTES_MAX, Key, checked_key, not_a_key
from millstream.events.value_type import ValueType

__all__ = ["KeyField"]


class KeyField:
    """Stands for the key of an event while it waits: the key is what the field has in its column.

    So keys cost nothing: the column of the field is the column of keys. Whole numbers become text.
    """

    __slots__ = ("_index", "_kinds", "_type", "_value_type", "name")

    def __init__(self, name: str, value_type: ValueType | None) -> None:
        self.name = name
        self._value_type = value_type
        if value_type is None:
            return
        record = value_type.column([]).type
        self._index = record.get_field_index(name)
        if self._index < 0:
            names = ", ".join(field.name for field in record)
            raise ConfigError(f"no field {name!r}, which is to be the key; the fields are {names}")
        self._type = record.field(self._index).type
        if not _is_key_type(self._type):
            raise ConfigError(
                f"field {name!r} is {self._type}: a key is text, bytes or a whole number"
            )

    def column(self, values: pa.StructArray) -> pa.Array:
        """The keys of typed values; Unfit for one that is too long."""
        found = pc.struct_field(values, [self._index])
        if pa.types.is_integer(self._type):
            found = found.cast(pa.string())
        keys = found.cast(pa.binary())
        longest = pc.max(pc.binary_length(keys)).as_py() or 0
        if longest > KEY_BYTES_MAX:
            row = pc.index(pc.binary_length(keys), longest).as_py()
            expected = f"a key of at most {KEY_BYTES_MAX:,} bytes"
            raise Unfit(self.name, expected, f"{longest:,} bytes", row)
        return keys

    def keys_of(self, values: list[Any]) -> list[Key]:
        """The key of each typed value before it is in a column, for its partition.

        None where the value does not fit the schema: it will not be stored.
        """
        raw = self._raw(values)
        if raw is not None:
            kinds = {kind for kind in set(map(type, raw)) if kind is not type(None)}
            if kinds <= {str, bytes}:
                return [_usable(key) for key in raw]
            if kinds <= {int, uuid.UUID}:
                return [None if key is None else str(key) for key in raw]
        return [self._key_of(value) for value in values]

    def _raw(self, values: list[Any]) -> list[Any] | None:
        """What the values have in the field; None unless all are alike and have it."""
        try:
            if set(map(type, values)) == {dict}:
                return [value[self.name] for value in values]
            return list(map(attrgetter(self.name), values))
        except (AttributeError, LookupError):
            return None

    def _key_of(self, value: Any) -> Key:
        if self._value_type is None:
            return None
        try:
            key: Key = self.column(self._value_type.column([value]))[0].as_py()
        except Unfit:
            return None
        return key

    def items_of(self, values: list[Any], before: int) -> list[Key]:
        """The keys of values without a schema, which are dicts; the first is number `before`."""
        keys: list[Key] = []
        for number, value in enumerate(values, before):
            if not isinstance(value, Mapping) or self.name not in value:
                raise ConfigError(
                    f"value {number} has no field {self.name!r}, which is to be its key"
                )
            key = value[self.name]
            if isinstance(key, int) and not isinstance(key, bool):
                key = str(int(key))
            elif key is not None and not isinstance(key, str | bytes):
                raise ConfigError(f"value {number}: {not_a_key(key)}")
            keys.append(key)
        return keys


def _usable(key: Key) -> Key:
    """The key; None if an event cannot have it."""
    if key is None or (len(key) <= KEY_BYTES_MAX and key.isascii()):
        return key
    try:
        return checked_key(key)
    except ConfigError:
        return None


def _is_key_type(kind: pa.DataType) -> bool:
    is_kind = pa.types
    checks = (is_kind.is_string, is_kind.is_binary, is_kind.is_fixed_size_binary)
    return any(check(kind) for check in (*checks, is_kind.is_integer))
