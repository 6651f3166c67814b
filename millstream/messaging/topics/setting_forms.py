"""How settings may be written, and the one form in which they are held. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from millstream.errors import ConfigError
from millstream.settings import parse_duration, parse_size

__all__ = [
    "Duration",
    "FrozenMetadata",
    "Size",
    "choice",
    "duration_text",
    "read_duration",
    "read_metadata",
    "read_size",
    "short_repr",
]

Duration = str | float | timedelta  # "7d", seconds, or a timedelta
Size = str | int  # "10GiB" or bytes


class FrozenMetadata(Mapping[str, str]):
    """A mapping of texts that cannot be changed and can be hashed."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str] | Sequence[tuple[str, str]] = ()) -> None:
        self._items = dict(sorted(dict(items).items()))

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def read_duration(name: str, value: Duration | None) -> timedelta | None:
    """The duration that a setting was given as."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise ConfigError(f"{name}: {value} is negative")
        return value
    try:
        return timedelta(seconds=parse_duration(value))
    except (ConfigError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{name}: {value!r} is not a duration. Write it like '10s', '12h' or '7d'"
        ) from error


def read_size(name: str, value: Size | None) -> int | None:
    """The bytes that a setting was given as."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name}: {value!r} is not a size. Write it like '512KiB', '64MiB' or '10GiB'"
        ) from error


Choice = TypeVar("Choice", bound=StrEnum)


def choice(kind: type[Choice]) -> Callable[[str, Choice | str], Choice]:
    """A reader of one of an enumeration's values; case and the joints between words are free."""

    def read(name: str, value: Choice | str) -> Choice:
        try:
            return kind(re.sub(r"[ _-]", "", str(value)).lower())
        except ValueError:
            known = ", ".join(kind)
            raise ConfigError(f"{name}: {value!r} is not one of {known}") from None

    return read


def read_metadata(name: str, value: Mapping[str, str]) -> FrozenMetadata:
    """The mapping that a setting was given as."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: give a mapping of texts, not {value!r}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str) or not key:
            raise ConfigError(f"{name}: {key!r}: {text!r} must both be texts")
    return FrozenMetadata(value)


def duration_text(time: timedelta) -> str:
    """A duration as it may be written in settings.

    >>> duration_text(timedelta(days=1, minutes=30)), duration_text(timedelta(milliseconds=250))
    ('1d30m', '250ms')
    """
    left = time // timedelta(microseconds=1)
    parts = []
    units = (("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000))
    for unit, size in (*units, ("ms", 1000), ("us", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def short_repr(value: Any) -> str:
    """A dataclass written with only what differs from the defaults, in the form it is given in."""
    shown = [
        f"{field.name}={_plain(getattr(value, field.name))!r}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _plain(value: object) -> object:
    if isinstance(value, timedelta):
        return duration_text(value)
    return value.value if isinstance(value, StrEnum) else value
