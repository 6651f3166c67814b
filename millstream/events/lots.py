"""Lists of values and their keys, checked, in lots that fit the buffers of packs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from millstream.errors import ConfigError
from millstream.events.encoding import value_bytes
from millstream.events.json_value import is_json, json_bytes
from millstream.events.key_field import KeyField
from millstream.events.subject import KEY_BYTES_MAX, Key, checked_key
from millstream.events.value_type import ValueType

__all__ = ["Lot", "LotLimits", "lots_of"]


@dataclass(frozen=True, slots=True)
class LotLimits:
    """Where a list is cut."""

    events: int
    bytes: int  # of values that are bytes


@dataclass(frozen=True, slots=True)
class Lot:
    """Values and the key of each; of a topic without a schema also which of them are JSON."""

    values: list[Any]
    keys: list[Key | KeyField]
    json: list[bool] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def real_keys(self) -> list[Key]:
        """The keys, also where a field is the key."""
        keys: list[Any] = self.keys
        field = keys[0] if keys else None
        return field.keys_of(self.values) if isinstance(field, KeyField) else keys

    def slice(self, start: int, end: int) -> Lot:
        json = None if self.json is None else self.json[start:end]
        return Lot(self.values[start:end], self.keys[start:end], json)

    def select(self, indices: Sequence[int]) -> Lot:
        values, keys, json = self.values, self.keys, self.json
        return Lot(
            [values[index] for index in indices],
            [keys[index] for index in indices],
            None if json is None else [json[index] for index in indices],
        )


def lots_of(
    values: Iterable[Any],
    keys: Iterable[Key] | None,
    key: str | None,
    value_type: ValueType | None,
    limits: LotLimits,
) -> Iterator[Lot]:
    """The values in order. A list or tuple is checked completely before the first lot.

    `keys` has a key for each value, or `key` names the field that is the key. ConfigError for keys
    of another number, for something that is no key, for a field that cannot be one, and, in a topic
    without a schema, for a value that it does not take. Typed values are not looked at.
    """
    _check_arguments(values, keys, key)
    field = None if key is None else KeyField(key, value_type)
    typed = value_type is not None
    if isinstance(values, list | tuple):
        # One more than there may be: a generator of keys need not have an end.
        given = None if keys is None else list(islice(keys, len(values) + 1))
        yield from _cut(_checked(list(values), given, field, typed, 0), limits)
        return
    left = iter(values)
    others = None if keys is None else iter(keys)
    done = 0
    while True:
        some = list(islice(left, limits.events))
        given = None if others is None else list(islice(others, len(some) or 1))
        if not some:
            if given:
                raise ConfigError(f"more keys than values: there are {done:,} values")
            return
        yield from _cut(_checked(some, given, field, typed, done), limits)
        done += len(some)


def _check_arguments(values: object, keys: object, key: object) -> None:
    if keys is not None and key is not None:
        raise ConfigError("give keys, one for each value, or the field that is the key: not both")
    if hasattr(values, "__arrow_c_stream__") or hasattr(values, "__arrow_c_array__"):
        raise ConfigError(f"{type(values).__name__} is a frame: give it to send_batch()")
    for name, given in (("values", values), ("keys", keys)):
        if given is None and name == "keys":
            continue
        if isinstance(given, str | bytes | bytearray | memoryview | Mapping) or not isinstance(
            given, Iterable
        ):
            raise ConfigError(
                f"{name} are a list or another iterable, found {type(given).__name__}. A single "
                f"event goes through send()"
            )
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"key is the name of a field, found {type(key).__name__}")


def _cut(lot: Lot, limits: LotLimits) -> Iterator[Lot]:
    count = len(lot)
    if lot.json is None:
        for start in range(0, count, limits.events):
            yield lot.slice(start, start + limits.events)
        return
    start = size = 0
    for index, value in enumerate(lot.values, 1):
        size += 0 if value is None else len(value)
        if index - start == limits.events or size >= limits.bytes or index == count:
            yield lot.slice(start, index)
            start, size = index, 0


def _checked(
    values: list[Any], keys: list[Key] | None, field: KeyField | None, typed: bool, before: int
) -> Lot:
    """The values as a lot, whose first one is number `before`."""
    if keys is not None and len(keys) != len(values):
        found = f"{len(keys):,}" if len(keys) < len(values) else "more"
        raise ConfigError(f"keys for {found} of {len(values):,} values: give one for each")
    if not typed:
        if field is not None:
            keys = field.items_of(values, before)
        data, json = _payloads(values, before)
        return Lot(data, _checked_keys(keys, len(values), before), json)
    if field is not None:
        return Lot(values, [field] * len(values))
    return Lot(values, _checked_keys(keys, len(values), before))


def _payloads(values: list[Any], before: int) -> tuple[list[Any], list[bool]]:
    data: list[bytes | None] = []
    json: list[bool] = []
    for value in values:
        json.append(is_json(value))
        try:
            if value is None or type(value) is bytes:
                data.append(value)
            else:
                data.append(json_bytes(value) if json[-1] else value_bytes(value))
        except ConfigError as error:
            raise ConfigError(f"value {before + len(data)}: {error}") from error
    return data, json


def _checked_keys(keys: list[Key] | None, count: int, before: int) -> list[Key | KeyField]:
    """The keys: texts as they are if that says their bytes, else as bytes."""
    if keys is None:
        return [None] * count
    try:
        # All of them at once, which takes a third of the time; not if one is bytes or None.
        texts: list[Any] = keys
        if "".join(texts).isascii() and max(map(len, texts), default=0) <= KEY_BYTES_MAX:
            return texts
    except TypeError:
        pass
    checked: list[Key | KeyField] = []
    for key in keys:
        try:
            checked.append(None if key is None else checked_key(key))
        except ConfigError as error:
            raise ConfigError(f"key {before + len(checked)}: {error}") from error
    return checked
