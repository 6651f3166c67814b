"""NATS frames to and from bytes: pure, shared by the asynchronous and the blocking client."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final

from millstream.errors import ConfigError, ConnectError

__all__ = [
    "EMPTY_HEADERS",
    "HEADERS_END",
    "PING",
    "PONG",
    "Frame",
    "Handler",
    "Headers",
    "Parser",
    "ProtocolError",
    "RunHandler",
    "encode_headers",
    "encode_subject",
    "hpub",
    "parse_header_items",
    "parse_headers",
    "pub",
    "status_of",
    "sub",
    "unique_token",
    "unsub",
]

PING: Final = b"PING\r\n"
PONG: Final = b"PONG\r\n"
EMPTY_HEADERS: Final = b""
HEADERS_END: Final = b"\r\n\r\n"  # of a block of headers: the end of a line, and an empty line

# A control line holds two subjects, a sid and sizes; INFO is longer because it lists the cluster.
CONTROL_LINE_BYTES_MAX: Final = 1024 * 1024
# The server's own hard limit for a payload (its max_pending).
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024

_SIZE_DIGITS_MAX: Final = 19  # of a 64-bit number; a longer one is no size
# Making a number of bytes costs more than finding it; most messages are small.
_SMALL: Final = {b"%d" % n: n for n in range(2048)}
_HEADER_LINE: Final = b"NATS/1.0"
_TOKEN_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Headers = Mapping[str, str]
# Called with subject, reply subject, raw header block and payload of one message.
Handler = Callable[[bytes, bytes, bytes, bytes], None]
Frame = tuple[bytes, bytes, bytes, bytes]  # the same four
# Called with messages of one subscription that came one after the other: at least one.
RunHandler = Callable[[list[Frame]], None]


class ProtocolError(ConnectError):
    """The server sent bytes that are not the NATS protocol; the connection cannot go on."""


# Above this a frame is joined: formatting guesses its size and copies when it guessed too low.
LARGE_BYTES: Final = 4096


def unique_token(length: int = 22) -> str:
    """A random subject token; 22 letters carry 130 bits, so two never meet."""
    count, letters = len(_TOKEN_LETTERS), list[str]()
    number = secrets.randbelow(count**length)  # once: the system is asked for every random number
    for _ in range(length):
        number, letter = divmod(number, count)
        letters.append(_TOKEN_LETTERS[letter])
    return "".join(letters)


def pub(subject: bytes, reply: bytes, payload: bytes | memoryview) -> bytes:
    """The frame that publishes a message without headers; an empty reply is left out."""
    payload = bytes(payload)
    if reply:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


def hpub(subject: bytes, reply: bytes, headers: bytes, payload: bytes | memoryview) -> bytes:
    """The frame that publishes a message with a header block."""
    size = len(headers)
    total = size + len(payload)
    if total > LARGE_BYTES:
        back = b"%b " % reply if reply else b""
        head = b"HPUB %b %b%d %d\r\n" % (subject, back, size, total)
        return b"".join((head, headers, payload, b"\r\n"))
    payload = bytes(payload)
    if reply:
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, total, headers, payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, size, total, headers, payload)


def sub(subject: bytes, queue: bytes, sid: bytes) -> bytes:
    """The frame that subscribes, as a member of a queue group if one is given."""
    if queue:
        return b"SUB %b %b %b\r\n" % (subject, queue, sid)
    return b"SUB %b %b\r\n" % (subject, sid)


def unsub(sid: bytes, after: int = 0) -> bytes:
    """The frame that ends a subscription, now or after `after` messages."""
    if after:
        return b"UNSUB %b %d\r\n" % (sid, after)
    return b"UNSUB %b\r\n" % sid


def encode_subject(subject: str) -> bytes:
    """The subject as bytes; one that would break the protocol line is refused."""
    try:
        data = subject.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"subject {subject!r} cannot be encoded as UTF-8") from error
    if data and (b" " in data or b"\r" in data or b"\n" in data or b"\t" in data or b"\0" in data):
        raise ConfigError(f"subject {subject!r} contains a space or a control character")
    return data


def encode_headers(items: Headers | Iterable[tuple[str, str]], *, foreign: bool = False) -> bytes:
    """The header block of a message; names and values that would break the block are refused.

    Names are ASCII without spaces, as all clients can read them; with `foreign` they may be
    anything that another client has stored.
    """
    pairs = items.items() if isinstance(items, Mapping) else items
    lines = [_HEADER_LINE]
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"header {name!r}: name and value must be text, found {value!r}")
        if not (_is_clear(name) or (foreign and not any(c in name for c in ":\r\n"))):
            wanted = "no colons and line ends" if foreign else "visible ASCII without colons"
            raise ConfigError(f"header name {name!r}: needs {wanted}")
        if "\r" in value or "\n" in value:
            raise ConfigError(f"header {name!r}: its value contains a line end")
        try:
            lines.append(f"{name}: {value}".encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as error:
            raise ConfigError(f"header {name!r}: a lone surrogate is not text") from error
    if len(lines) == 1:
        return EMPTY_HEADERS
    return b"\r\n".join(lines) + HEADERS_END


@lru_cache(maxsize=128)  # the same few are written again and again
def _is_clear(name: str) -> bool:
    return bool(name) and name.isascii() and not any(c in name for c in ": \t\r\n")


def parse_header_items(block: bytes) -> list[tuple[str, str]]:
    """All headers of a block in their order, repeated ones included."""
    items = []
    for line in block.split(b"\r\n")[1:]:
        if not line:
            continue
        name, _, value = line.partition(b":")
        items.append((name.decode("utf-8", "surrogateescape"), _text(value)))
    return items


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers of a block by name; the first of a repeated one counts, as in Go's client."""
    headers: dict[str, str] = {}
    for name, value in parse_header_items(block):
        headers.setdefault(name, value)
    return headers


def status_of(block: bytes) -> tuple[int, str]:
    """The status code and text in the first line of a header block; (0, "") when there is none."""
    line = block[len(_HEADER_LINE) : block.find(b"\r\n")].strip()
    if not line:
        return 0, ""
    code, _, text = line.partition(b" ")
    # Anybody can put this line into a message: only what the server would write is a status.
    return (int(code), _text(text)) if len(code) == 3 and code.isdigit() else (0, "")


def _text(value: bytes) -> str:
    return value.strip().decode("utf-8", "surrogateescape")


class Parser:
    """Cuts a byte stream into frames and hands each to its handler, as soon as it is complete.

    `handlers` maps a subscription id to the function called for each of its messages, `runs` to
    one that takes neighbours among them in one call; `on_control` gets every other line (INFO,
    PING, PONG, +OK, -ERR). Messages for an unknown id are dropped: they were under way when the
    subscription ended.
    """

    __slots__ = ("_chunks", "_have", "_need", "handlers", "on_control", "runs")

    def __init__(
        self,
        handlers: dict[bytes, Handler],
        on_control: Callable[[bytes, bytes], None],
        runs: dict[bytes, RunHandler] | None = None,
    ) -> None:
        self.handlers = handlers
        self.runs = {} if runs is None else runs
        self.on_control = on_control
        self._chunks: list[bytes] = []  # bytes of a frame that is not complete yet
        self._have = 0  # how many those are
        self._need = 0  # how many it takes before parsing makes sense again

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._chunks)
            self._chunks.clear()
        used, need = self._frames(data)
        if used < len(data):
            rest = data[used:] if used else data
            self._chunks.append(rest)
            self._have, self._need = len(rest), need

    def take(self) -> bytes:
        """The bytes of a frame that is not complete yet; from now on they are the caller's."""
        rest = b"".join(self._chunks)
        self._chunks.clear()
        return rest

    def _frames(self, data: bytes) -> tuple[int, int]:
        """Handle every complete frame; how many bytes that used, and how many the next needs.

        One long function on purpose: this runs for every message, and a Python call for each part
        of a frame would cost more than the part. Common forms come first.
        """
        handlers, runs, find, small = self.handlers, self.runs, data.find, _SMALL.get
        run: list[Frame] = []
        taker: RunHandler | None = None  # whose messages `run` holds
        pos, end = 0, len(data)
        try:
            while pos < end:
                eol = find(b"\r\n", pos)
                if eol < 0:
                    if end - pos > CONTROL_LINE_BYTES_MAX:
                        raise ProtocolError(f"a control line of over {end - pos} bytes")
                    return pos, 0
                words = data[pos:eol].split(b" ")
                op = words[0]
                if op == b"HMSG" and len(words) == 6:
                    _, subject, sid, reply, first, last = words
                    header_size = small(first) or _number(first)
                elif op == b"MSG" and len(words) == 4:
                    _, subject, sid, last = words
                    reply, header_size = b"", 0
                elif op == b"MSG" and len(words) == 5:
                    _, subject, sid, reply, last = words
                    header_size = 0
                elif op == b"HMSG" and len(words) == 5:
                    _, subject, sid, first, last = words
                    reply, header_size = b"", _number(first)
                elif op[:1] == b"M" or op[:1] == b"H":
                    raise ProtocolError(f"not a message: {data[pos:eol][:200]!r}")
                else:
                    if run:
                        _hand_over(run, taker)
                    self.on_control(op, data[pos + len(op) + 1 : eol])
                    pos = eol + 2
                    continue
                start = eol + 2
                stop = start + (small(last) or _number(last))
                if stop + 2 > end:
                    if stop - pos > FRAME_BYTES_MAX:
                        raise ProtocolError(f"a message of {stop - start} bytes")
                    return pos, stop + 2 - pos
                body = start + header_size
                if body > stop:
                    raise ProtocolError(f"not a message: {data[pos:eol][:200]!r}")
                pos = stop + 2
                wanted = runs.get(sid)
                if wanted is None or wanted is not taker:
                    if run:
                        _hand_over(run, taker)
                    taker = wanted
                headers = data[start:body] if header_size else EMPTY_HEADERS
                if taker is not None:
                    run.append((subject, reply, headers, data[body:stop]))
                elif sid in handlers:
                    handlers[sid](subject, reply, headers, data[body:stop])
            return pos, 0
        finally:
            if run:
                _hand_over(run, taker)


def _hand_over(run: list[Frame], taker: RunHandler | None) -> None:
    """Give the messages of a run to their handler; the list is empty when it is called."""
    frames = run[:]
    run.clear()
    if taker is not None:
        taker(frames)


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _SIZE_DIGITS_MAX:
        raise ProtocolError(f"not the size of a message: {digits[:200]!r}")
    return int(digits)
