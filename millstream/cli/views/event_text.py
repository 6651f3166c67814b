"""Events as text: one JSON object, a line of a chosen format, or only the value. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.cli.options.reading import FORMAT_HELP, VALUE_FORMS, EventFormat
from millstream.cli.options.times import time_text
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import Event

__all__ = [
    "Formatter",
    "event_record",
    "formatter",
    "formatter_of",
    "header_fields",
    "json_line",
    "shown",
    "text_field",
    "value_bytes",
    "value_field",
]

_PIECE: Final = re.compile(rb"%(.)|\\(x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_ESCAPES: Final = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\", b"0": b"\0"}


def value_bytes(value: Any) -> bytes:
    """A value as bytes: as it is, as JSON if it is typed, empty if there is none."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


def shown(data: bytes) -> bytes:
    """Bytes that are safe on one line of a terminal: text as it is, anything else escaped.

    >>> shown("gr\\u00fcn".encode()), shown(b"a\\nb\\xff")
    (b'gr\\xc3\\xbcn', b'a\\\\nb\\\\xff')
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1").encode("unicode_escape").decode()
        return text.encode()
    if text.isprintable():
        return data
    return "".join(
        ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text
    ).encode()


def event_record(event: Event, form: str = "auto") -> dict[str, Any]:
    """An event as JSON; bytes that are not text are in a field that ends in _base64."""
    record: dict[str, Any] = {
        "topic": event.topic,
        "partition": event.partition,
        "offset": event.offset,
        "index": event.index,
        **text_field("subject", event.subject),
        "timestamp": time_text(event.timestamp_ns),
        **text_field("id", event.id),
        **text_field("key", event.key),
        **header_fields(event.headers),
    }
    record |= value_field(event.value, form)
    return record


def text_field(name: str, text: str | None) -> dict[str, str]:
    """A text, in a field whose name says how it is written; nothing if there is none."""
    if text is None:
        return {}
    if _encodable(text):
        return {name: text}
    return {f"{name}_base64": _base64(text)}


def header_fields(headers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Headers; those whose name or value is not text have a field of their own, both in base64."""
    plain = {n: text for n, text in headers.items() if _encodable(n) and _encodable(text)}
    fields = {"headers": plain} if plain else {}
    if len(plain) < len(headers):
        other = {n: text for n, text in headers.items() if n not in plain}
        fields["headers_base64"] = {_base64(n): _base64(text) for n, text in other.items()}
    return fields


def value_field(value: Any, form: str) -> dict[str, Any]:
    """The value, in a field whose name says how it is written."""
    if not isinstance(value, bytes):
        return {"value": value}
    if form == "base64":
        return {"value_base64": base64.b64encode(value).decode()}
    if form == "json":
        try:
            return {"value": msgspec.json.decode(value)}
        except msgspec.DecodeError as error:
            raise ConfigError(f"its value is not JSON: {error}. Use --value auto") from error
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError as error:
        if form == "text":
            raise ConfigError(f"its value is not UTF-8: {error}. Use --value auto") from error
        return {"value_base64": base64.b64encode(value).decode()}


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON."""
    return msgspec.json.encode(record) + b"\n"


Formatter = Callable[["Event"], bytes]


def formatter(form: str | None, *, raw: bool, as_json: bool, value: str = "auto") -> Formatter:
    """How events are written; at most one of the options may be given."""
    if (form is not None) + raw + as_json > 1:
        raise ConfigError("choose one of --format, --raw and --json")
    if value not in VALUE_FORMS:
        raise ConfigError(f"--value is one of {', '.join(VALUE_FORMS)}, not {value!r}")
    if as_json:
        return lambda event: json_line(event_record(event, value))
    if raw:
        return lambda event: value_bytes(event.value) + b"\n"
    return _line if form is None else _compiled(form)


def formatter_of(chosen: EventFormat, as_json: bool) -> Formatter:
    """The function that turns an event into bytes to print, as the options say."""
    return formatter(chosen.form, raw=chosen.raw, as_json=as_json, value=chosen.value)


def _line(event: Event) -> bytes:
    where = f"{event.partition}@{event.offset}" + (f".{event.index}" if event.index else "")
    key = b"-" if event.key is None else shown(_key_bytes(event))
    head = f"{where}  {time_text(event.timestamp_ns // 1_000_000 * 1_000_000)}  ".encode()
    headers = "".join(f"  {name}: {text}" for name, text in event.headers.items())
    tail = shown(headers.encode("utf-8", "surrogateescape"))
    value = b"(no value)" if event.value is None else shown(value_bytes(event.value))
    return head + key + b"  " + value + tail + b"\n"


def _key_bytes(event: Event) -> bytes:
    return (event.key or "").encode("utf-8", "surrogateescape")


def _headers_text(event: Event) -> bytes:
    pairs = [f"{name}={value}" for name, value in event.headers.items()]
    return ",".join(pairs).encode("utf-8", "surrogateescape")


_FIELDS: Final[Mapping[bytes, Formatter]] = {
    b"t": lambda event: event.topic.encode(),
    b"p": lambda event: b"%d" % event.partition,
    b"o": lambda event: b"%d" % event.offset,
    b"k": _key_bytes,
    b"K": lambda event: b"%d" % (-1 if event.key is None else len(_key_bytes(event))),
    b"s": lambda event: value_bytes(event.value),
    b"S": lambda event: b"%d" % (-1 if event.value is None else len(value_bytes(event.value))),
    b"T": lambda event: b"%d" % (event.timestamp_ns // 1_000_000),
    b"h": _headers_text,
    b"i": lambda event: (event.id or "").encode("utf-8", "surrogateescape"),
    b"%": lambda event: b"%",
}


def _compiled(form: str) -> Formatter:
    """A format like kcat's, as a function; an unknown field is refused."""
    text = form.encode()
    pieces: list[bytes | Formatter] = []
    end = 0
    for found in _PIECE.finditer(text):
        pieces.append(text[end : found.start()])
        end = found.end()
        field, escape = found[1], found[2]
        if field is not None:
            if field not in _FIELDS:
                raise ConfigError(f"--format: there is no %{field.decode()}. {FORMAT_HELP}")
            pieces.append(_FIELDS[field])
        elif escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
        elif len(escape) == 3:
            pieces.append(bytes([int(escape[1:], 16)]))
        else:
            raise ConfigError(f"--format: there is no \\{escape.decode()}. {FORMAT_HELP}")
    pieces.append(text[end:])

    def write(event: Event) -> bytes:
        return b"".join(p if isinstance(p, bytes) else p(event) for p in pieces)

    return write
