"""Rows to events: which column is what. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import msgspec

from millstream.cli.files.rows import Row
from millstream.cli.options.times import nanoseconds
from millstream.errors import ConfigError
from millstream.events.escapes import unescaped
from millstream.events.event import nanoseconds_of
from millstream.messaging import NewEvent

__all__ = ["FileColumns"]

UNITS: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


@dataclass(frozen=True, slots=True)
class FileColumns:
    """What the columns of a file mean.

    Without `value`, and in files that have no column `value` or `value_base64`, the entire row is
    the value, as JSON. The names of the envelope are those that `export` writes.
    """

    key: str | None = None
    value: str | None = None
    time: str | None = None
    id: str | None = None
    unit: str | None = None  # of times that are numbers
    whole: bool = False  # the row is the value, whatever its columns are called
    empty_is_none: bool = False  # CSV has no null: an empty field is a missing key
    escapes: bool = False  # in Parquet, bytes of names and ids that are not UTF-8 are escaped

    value_of: Callable[[Any], Any] | None = None  # makes a value of the topic's type

    def __post_init__(self) -> None:
        if self.whole and self.value is not None:
            raise ConfigError("--whole takes the row as value, --value a column: choose one")
        if self.unit is not None and self.unit not in UNITS:
            raise ConfigError(f"--time-unit is one of {', '.join(UNITS)}, not {self.unit!r}")

    def typed(self, value_of: Callable[[Any], Any] | None) -> FileColumns:
        """The same, with a function that makes values of the topic's type; None: they are bytes."""
        return replace(self, value_of=value_of)

    def settled(self, row: Any) -> FileColumns:
        """The same, completed from the first row of the file."""
        if self.whole or self.value is not None:
            return self
        if not isinstance(row, Mapping) or not {"value", "value_base64"} & row.keys():
            return replace(self, whole=True)
        return replace(
            self,
            value="value",
            key=self.key or "key",
            time=self.time or "timestamp",
            id=self.id or "id",
        )

    def event(self, row: Row) -> NewEvent:
        """The event of a row."""
        _, fields, own = row
        table: Mapping[str, Any] = fields if isinstance(fields, Mapping) else {}
        value: Any
        if self.value_of is not None:
            found = fields if self.whole else self._typed_column(table)
            value = None if found is None else self.value_of(found)
        elif self.whole:
            value = own if own is not None else msgspec.json.encode(fields)
        else:
            value = self._value(table)
        headers = None if self.whole else self._headers(table)
        return NewEvent(value, self._key(table), headers, self._time(table), self._id(table))

    def _column(self, table: Mapping[str, Any], name: str | None, wanted: bool) -> Any:
        if name is None:
            return None
        if wanted and name not in table:
            raise ConfigError(f"it has no column '{name}'. It has: {', '.join(table) or 'none'}")
        return table.get(name)

    def _value(self, table: Mapping[str, Any]) -> bytes | None:
        name = self.value or "value"
        if table.get(f"{name}_null"):
            return None
        encoded = table.get(f"{name}_base64")
        if encoded:
            return _from_base64(f"{name}_base64", encoded)
        value = self._column(table, name, wanted=f"{name}_base64" not in table)
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return value.encode()
        if value is None:
            return b"" if encoded == "" else None
        return msgspec.json.encode(value)

    def _key(self, table: Mapping[str, Any]) -> str | bytes | None:
        if self.key is None:
            return None
        encoded = table.get(f"{self.key}_base64")
        if encoded:
            return _from_base64(f"{self.key}_base64", encoded)
        key = self._column(table, self.key, wanted=self.whole or self.key != "key")
        if key is None or isinstance(key, bytes):
            return key
        if isinstance(key, str):
            return None if not key and self.empty_is_none else key
        if isinstance(key, int) and not isinstance(key, bool):
            return str(key)
        raise ConfigError(f"column '{self.key}': a key is a string or a whole number, not {key!r}")

    def _time(self, table: Mapping[str, Any]) -> int | None:
        time = self._column(table, self.time, wanted=self.time not in (None, "timestamp"))
        if time is None or time == "":
            return None
        if isinstance(time, datetime):
            return nanoseconds_of(time)
        if isinstance(time, str) and self.unit is not None and time.lstrip("-").isdigit():
            time = int(time)
        if isinstance(time, str):
            return nanoseconds(time)
        if isinstance(time, int | float) and not isinstance(time, bool):
            if self.unit is None:
                raise ConfigError(f"column '{self.time}' holds numbers: give --time-unit")
            return int(time * UNITS[self.unit])
        raise ConfigError(f"column '{self.time}': {time!r} is not a time")

    def _id(self, table: Mapping[str, Any]) -> str | None:
        encoded = table.get(f"{self.id}_base64")
        if encoded:
            return _from_base64(f"{self.id}_base64", encoded).decode("utf-8", "surrogateescape")
        given = self._column(table, self.id, wanted=self.id not in (None, "id"))
        return None if given is None or given == "" else self._unescaped(str(given))

    def _unescaped(self, text: str) -> str:
        return unescaped(text) if self.escapes else text

    def _headers(self, table: Mapping[str, Any]) -> dict[str, str] | None:
        """All headers of a row."""
        given = _header_column("headers", table.get("headers"))
        found = {self._unescaped(name): value for name, value in given.items()}
        encoded = _header_column("headers_base64", table.get("headers_base64"))
        for pair in encoded.items():
            name, value = (
                _from_base64("headers_base64", text).decode("utf-8", "surrogateescape")
                for text in pair
            )
            found[name] = value
        return found or None

    def _typed_column(self, table: Mapping[str, Any]) -> Any:
        """The value column as JSON; files that hold it as text (CSV) are parsed."""
        value = self._column(table, self.value or "value", wanted=True)
        if not isinstance(value, str | bytes):
            return value
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"column '{self.value}' is not JSON: {error}") from error


def _header_column(column: str, found: Any) -> dict[str, str]:
    """Headers as an object, as its JSON text (CSV), or as pairs (Parquet)."""
    if found is None or found == "":
        return {}
    if isinstance(found, str):
        try:
            found = msgspec.json.decode(found)
        except msgspec.DecodeError as error:
            raise ConfigError(f"column '{column}' is not JSON: {error}") from error
    if isinstance(found, list) and all(isinstance(pair, dict) for pair in found):
        found = {pair.get("key"): pair.get("value") for pair in found}
    elif isinstance(found, list) and all(isinstance(p, tuple) and len(p) == 2 for p in found):
        found = dict(found)
    if isinstance(found, dict):
        found = {
            name: value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
            for name, value in found.items()
        }
    if not isinstance(found, dict) or not all(
        isinstance(text, str) for pair in found.items() for text in pair
    ):
        raise ConfigError(f"column '{column}': {found!r} is not an object of strings")
    return found


def _from_base64(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ConfigError(f"column '{name}' is not base64: {error}") from error
