"""How settings are written, converted and checked, and how one is declared. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar, overload

from millstream.declared import Declaration, Form, default_text
from millstream.errors import ConfigError
from millstream.settings import parse_size, read_seconds

__all__ = [
    "Duration",
    "Fixed",
    "FrozenMetadata",
    "OneWay",
    "SetBy",
    "Setting",
    "SettingKind",
    "Size",
    "choice",
    "duration",
    "duration_text",
    "number",
    "number_fault",
    "read_duration",
    "read_metadata",
    "several",
    "short_repr",
    "size",
    "switch",
    "text",
]

Duration = str | float | timedelta  # "7d", seconds, or a timedelta
Size = str | int  # "10GiB" or bytes


class FrozenMetadata(Mapping[str, str]):
    """An immutable, hashable mapping of strings."""

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
    """A duration, however it was given."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise ConfigError(f"{name}: {value} is negative")
        return value
    try:
        return timedelta(seconds=read_seconds(name, value))
    except OverflowError as error:
        raise ConfigError(f"{name}: {value!r} is too long") from error


def read_size(name: str, value: Size | None) -> int | None:
    """A number of bytes, however it was given."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name}: {value!r} is not a size. Write it like '512KiB', '64MiB' or '10GiB'"
        ) from error


def read_metadata(name: str, value: Mapping[str, str]) -> FrozenMetadata:
    """Metadata that cannot be changed any more."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: give a mapping of strings, not {value!r}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str) or not key:
            raise ConfigError(f"{name}: {key!r}: {text!r} must both be strings")
    return FrozenMetadata(value)


# -- kinds of settings --------------------------------------------------------------------


def _unchanged(name: str, value: Any) -> Any:
    return value


def _no_fault(value: Any) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class SettingKind:
    """Which values a setting takes: how they are written, converted and checked."""

    form: Form
    read: Callable[[str, Any], Any] = _unchanged  # name and value as given -> value as held
    fault: Callable[[Any], str | None] = _no_fault  # what is wrong with a value, or None
    choices: tuple[str, ...] = ()


def number_fault(value: object, most: int | None = None) -> str | None:
    """What is wrong with a number that must be 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"{value!r} is not a whole number of 1 or more"
    if most is not None and value > most:
        return f"{value:,} is more than the maximum of {most:,}"
    return None


def several(value: Any) -> tuple[Any, ...]:
    """A sequence, or a single value as one: the letters of a text are never meant."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def number(most: int | None = None) -> SettingKind:
    """A whole number of 1 or more."""
    return SettingKind(Form.NUMBER, fault=lambda value: number_fault(value, most))


def size(most: int | None = None) -> SettingKind:
    """A number of bytes, written as a number or as "10GiB"."""
    return SettingKind(Form.SIZE, read_size, lambda value: number_fault(value, most))


def duration(shortest: timedelta) -> SettingKind:
    """A time span, written as "7d", in seconds or as a timedelta."""

    def fault(value: timedelta) -> str | None:
        if value >= shortest:
            return None
        return f"{duration_text(value)} is below the minimum of {duration_text(shortest)}"

    return SettingKind(Form.DURATION, read_duration, fault)


def choice(kind: type[StrEnum]) -> SettingKind:
    """A member of an enumeration; upper case, spaces, "-" and "_" make no difference."""

    def read(name: str, value: StrEnum | str) -> StrEnum:
        try:
            return kind(re.sub(r"[ _-]", "", str(value)).lower())
        except ValueError:
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(kind)}") from None

    return SettingKind(Form.CHOICE, read, choices=tuple(kind))


def switch() -> SettingKind:
    """True or False."""

    def fault(value: object) -> str | None:
        return None if isinstance(value, bool) else f"{value!r} is not True or False"

    return SettingKind(Form.SWITCH, fault=fault)


def text(
    check: Callable[[str], str | None] = _no_fault, choices: tuple[str, ...] = ()
) -> SettingKind:
    """A string that passes a check, or one of a few."""

    def fault(value: object) -> str | None:
        if not isinstance(value, str):
            return f"{value!r} is not a string"
        if choices and value not in choices:
            return f"{value!r} is not one of {', '.join(choices)}"
        return check(value)

    return SettingKind(Form.CHOICE if choices else Form.TEXT, fault=fault, choices=choices)


# -- the declaration of a setting ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fixed:
    """A setting that cannot be changed after the topic was created."""

    why: str


@dataclass(frozen=True, slots=True)
class OneWay:
    """A switch that can be turned on later, but never off."""

    why: str


@dataclass(frozen=True, slots=True)
class SetBy:
    """A setting that another command sets, so it is not an option of `topic create`."""

    command: str
    fixed: str = ""  # why it cannot be changed after the topic was created


Given = TypeVar("Given")
Held = TypeVar("Held")


class Setting(Generic[Given, Held]):
    """One setting, declared once: a field of a frozen dataclass with everything about it.

    A value is converted when it is assigned. Options of commands, the stream configuration and
    the documentation are derived from the declaration.
    """

    def __init__(
        self,
        default: Held,
        kind: SettingKind,
        help: str,
        *,
        group: str = "",
        flags: tuple[str, ...] = (),
        stream_key: str = "",
        change: Fixed | OneWay | SetBy | None = None,
        default_text: str = "",
    ) -> None:
        self.default, self.kind = default, kind
        self.declaration = Declaration(
            help,
            kind.form,
            group,
            flags,
            metavar="|".join(kind.choices),
            default_text=default_text,
        )
        self.stream_key = stream_key  # of the JetStream stream configuration, if it is one value
        self.change = change

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Held: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Held: ...
    def __get__(self, instance: object | None, owner: type) -> Held:
        return self.default if instance is None else instance.__dict__[self.name]

    def __set__(self, instance: object, value: Given) -> None:
        instance.__dict__[self.name] = self.kind.read(self.name, value)

    def fault(self, value: Held) -> str | None:
        """What is wrong with a value, on its own, or None."""
        if value is None and self.default is None:
            return None
        found = self.kind.fault(value)
        return None if found is None else f"{self.name}: {found}"

    @property
    def is_feature(self) -> bool:
        """Whether it is a switch whose default follows from the other settings."""
        return self.kind.form is Form.SWITCH and self.default is None

    @property
    def set_by(self) -> str:
        """The command that sets it, or "" if it is an option of `topic create`."""
        return self.change.command if isinstance(self.change, SetBy) else ""

    @property
    def default_text(self) -> str:
        """What holds when it is not given."""
        return default_text(self.declaration, self.default)

    @property
    def is_fixed(self) -> bool:
        """Whether it cannot be changed after the topic was created."""
        match self.change:
            case Fixed():
                return True
            case SetBy(fixed=why):
                return bool(why)
        return False


# -- texts --------------------------------------------------------------------------------


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
    """A dataclass with only the fields that differ from their defaults, as they may be given."""
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
