"""Dicts and lists as the values of events without a schema, and of messages: JSON. Pure.

What is written is compact UTF-8, by msgspec's rules: times, dates, UUIDs and decimals become text,
sets and tuples lists, dataclasses objects, and keys that are numbers text. What JSON cannot hold is
refused: msgspec would write bytes as base64, and NaN as null, and nobody could tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, NoneType
from typing import Any, Final, TypeGuard

import msgspec

from millstream.errors import ConfigError, NotJson

__all__ = [
    "JSON_HEADERS",
    "as_json",
    "has_content_type",
    "is_json",
    "json_bytes",
    "payload_bytes",
    "read_json",
    "with_json_header",
]

_CONTENT_TYPE: Final = "content-type"
JSON_HEADERS: Final[Mapping[str, str]] = MappingProxyType({_CONTENT_TYPE: "application/json"})

_BYTES: Final = (bytes, bytearray, memoryview)
_ALWAYS: Final = frozenset({str, int, bool, NoneType})  # of these JSON holds every value
# What msgspec raises for a value that it cannot write; a lone surrogate is a ValueError.
_REFUSED: Final = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


def is_json(value: object) -> TypeGuard[dict[Any, Any] | list[Any]]:
    """Whether a value is written as JSON: a dict or a list."""
    return isinstance(value, dict | list)


def as_json(
    value: Any, headers: Mapping[str, str] | None
) -> tuple[bytes, Mapping[str, str] | None]:
    """A dict or list as its JSON and the headers with its content type; others as they are."""
    if not is_json(value):
        return value, headers
    return json_bytes(value), with_json_header(headers)


def with_json_header(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """The headers, and the content type unless they have one."""
    if not headers:
        return JSON_HEADERS
    return headers if has_content_type(headers) else {**JSON_HEADERS, **headers}


def has_content_type(names: Iterable[str]) -> bool:
    """Whether a header with the content type is among these names."""
    return any(str(name).lower() == _CONTENT_TYPE for name in names)


def payload_bytes(what: str, value: object, advice: str = "Convert it") -> bytes:
    """Bytes as they are, text as UTF-8; the error says who takes no other value (`what`)."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise ConfigError(
        f"{what} takes bytes, text, a dict or a list, found {type(value).__name__}. {advice}, for "
        f"example with str(), or put it into a dict"
    )


def json_bytes(value: dict[Any, Any] | list[Any]) -> bytes:
    """A dict or list as JSON; ConfigError names what JSON cannot hold, and where it is."""
    try:
        data = _encode(value)
        if _holds_all(value):
            return data
    except RecursionError:
        raise ConfigError("the value cannot be written as JSON: nested too deeply") from None
    except _REFUSED:
        pass
    path, kind = _unfit(value)
    raise ConfigError(
        f"the value cannot be written as JSON: {path} is {kind}. Convert it, or use a topic "
        f"with a schema"
    )


def read_json(data: object, where: Callable[[], str]) -> Any:
    """What JSON text holds; NotJson says where it is and why it is none, and shows nothing of it.

    >>> read_json(b'{"a":1}', lambda: "orders/0, offset 7")
    {'a': 1}
    """
    if data is None:
        raise NotJson(where(), "it has no value (a deletion)")
    if not isinstance(data, bytes):
        raise NotJson(where(), "its topic has a schema: its value is decoded already")
    try:
        return _decode(data)
    except UnicodeDecodeError:
        raise NotJson(where(), "it is not UTF-8") from None
    except RecursionError:
        raise NotJson(where(), "it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise NotJson(where(), str(error) if data else "it is empty") from None


def _holds_all(value: Any) -> bool:
    """Whether JSON that msgspec wrote holds everything: no bytes, and only finite numbers."""
    left = [value]  # not recursive: this runs for every value
    for item in left:
        kind = type(item)
        if kind in _ALWAYS:
            continue
        if kind is dict:
            left.extend(item.values())
        elif kind is list or kind is tuple:
            left.extend(item)
        elif isinstance(item, float):
            if item - item != 0:
                return False
        elif isinstance(item, _BYTES):
            return False
        else:
            plain = msgspec.to_builtins(item, builtin_types=_BYTES, str_keys=True)
            if type(plain) is not kind:  # else this would never end
                left.append(plain)
    return True


def _unfit(value: Any) -> tuple[str, str]:
    """Where in a value the first thing is that JSON cannot hold, and what it is."""
    path = "value"
    while True:
        for key, item in _items(value):
            if not _fits(item):
                path, value = f"{path}[{key!r:.80}]", item
                break
        else:
            return path, _described(value)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple | set | frozenset) else ()


def _fits(value: Any) -> bool:
    try:
        _encode(value)
        return _holds_all(value)
    except _REFUSED:
        return False


def _described(value: Any) -> str:
    if type(value) is float:
        return str(value)
    if isinstance(value, dict):  # each of its values fits, so it is a key
        return "a dict with a key that is neither text nor a number"
    if type(value) is str:
        return "text with a lone surrogate"
    return f"of type {type(value).__name__}"
