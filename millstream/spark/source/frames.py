"""Messages as they came over the socket, by place: nothing is made for each one of them.

A window of plain messages is one block of bytes; arrays say where in it each message's subject,
reply, headers and payload are, and columns are cut out of it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream.wire.message import RawMessage
from millstream.wire.sync.connection import BlockingConnection
from millstream.wire.sync.range import Window, read_windows

__all__ = ["Frames", "read_frames"]

Places = Any  # numpy.ndarray of int64
_ACK: Final = b"$JS.ACK."
_MARK: Final = b" $JS.ACK."
_TAIL: Final = 512  # bytes: a status or a ping that ends what the server sent is shorter
_DIGITS_MAX: Final = 20  # of the largest number in an ack address: nanoseconds since 1970
_LINE_MIN: Final = 8  # bytes of the control line of a message, at least


class Frames:
    """The messages of a window. `order` chooses some of them, in their order."""

    __slots__ = ("body", "data", "end", "head", "reply", "reply_end", "subject", "subject_end")

    def __init__(self, data: bytes, places: tuple[Places, ...]) -> None:
        self.data = data
        self.subject, self.subject_end, self.reply, self.reply_end = places[:4]
        self.head, self.body, self.end = places[4:]

    def __len__(self) -> int:
        return len(self.subject)

    def some(self, order: Any) -> Frames:
        """Some of the messages: a slice, or an array of numbers or of choices."""
        places = (self.subject, self.subject_end, self.reply, self.reply_end)
        more = (self.head, self.body, self.end)
        return Frames(self.data, tuple(place[order] for place in (*places, *more)))

    def first(self, count: int) -> Frames:
        """The first so many messages."""
        return self.some(slice(0, count))

    def reply_of(self, number: int) -> bytes:
        """The address of a message's ack."""
        return self.data[self.reply[number] : self.reply_end[number]]

    def headers_of(self, number: int) -> bytes:
        """The header block of a message, empty when it has none."""
        return self.data[self.head[number] : self.body[number]]

    def message(self, number: int) -> RawMessage:
        """One message as other readers know it."""
        data = self.data
        return RawMessage(
            data[self.subject[number] : self.subject_end[number]],
            self.reply_of(number),
            self.headers_of(number),
            data[self.body[number] : self.end[number]],
        )

    # -- columns --------------------------------------------------------------------------

    def cut(self, start: Places, end: Places) -> pa.Array:
        """The bytes from `start` to `end` of each message as a binary column."""
        count = len(start)
        if not count:
            return pa.array([], pa.binary())
        # What lies between two cuts is an element too, so that the whole block is one array.
        offsets = np.empty(2 * count, np.int32)
        offsets[0::2], offsets[1::2] = start, end
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        pieces = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
        return pieces.take(pa.array(np.arange(0, 2 * count, 2)))

    def byte(self, at: Places) -> Any:
        """The byte at a place of each message."""
        return np.frombuffer(self.data, np.uint8)[at]

    def sequences(self) -> Any:
        """The stream sequence of each message."""
        return self._number(3)

    def nanoseconds(self) -> Any:
        """When each message was stored."""
        return self._number(1)

    def _number(self, place: int) -> Any:
        """A number of each ack address, counted from its end."""
        block = np.frombuffer(self.data, np.uint8)
        value, at = _digits(block, self.reply_end)
        for _ in range(place):
            value, at = _digits(block, at)
        return value


def _digits(block: Any, end: Places) -> tuple[Any, Places]:
    """The decimal number in front of each place, and where the character before it is."""
    at = end - 1
    value = np.zeros(len(end), np.int64)
    power = 1
    active = np.ones(len(end), bool)
    for _ in range(_DIGITS_MAX):
        digit = block[at] - np.uint8(48)  # anything but a digit wraps to more than 9
        active &= digit < 10
        if not active.any():
            break
        value += np.where(active, digit.astype(np.int64) * power, 0)
        at = at - active
        power = min(power * 10, 10**18)
    return value, at


# -- from the socket ------------------------------------------------------------------------


class FrameCollector:
    """Collects a window's bytes and looks into them when enough seem to be there."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._found: list[Frames] = []
        self._sid = b""
        self._wanted = 0
        self._marks = 0
        self._tail = b""
        self.count = 0

    def begin(self, sid: bytes, wanted: int) -> None:
        """A new window: messages of one subscription, so many at most."""
        self._chunks, self._found, self._tail = [], [], b""
        self._sid, self._wanted, self._marks, self.count = sid, wanted, 0, 0

    def feed(self, data: bytes, others: Callable[[bytes], None]) -> None:
        """Take bytes that arrived; what is not a message of the window goes to `others`."""
        self._chunks.append(data)
        short = len(_MARK) - 1
        self._marks += data.count(_MARK) + (self._tail[-short:] + data[:short]).count(_MARK)
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        # A status ends a window, a ping wants an answer; a payload that looks like one of them
        # only means that we look too early.
        if self._marks >= self._wanted or b"NATS/1.0 " in self._tail or b"PING\r\n" in self._tail:
            self._look(others)

    def add(self, message: RawMessage) -> None:
        """Take a message that the connection's own parser cut."""
        sizes = np.cumsum([0, *map(len, message)])
        subject, reply, head, body, end = (sizes[place : place + 1] for place in range(5))
        places = (subject, reply, reply, head, head, body, end)
        self._found.append(Frames(b"".join(message), places))
        self.count += 1

    def _look(self, others: Callable[[bytes], None]) -> None:
        block = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        frames, used = scan(block, self._sid, others)
        if len(frames):
            self._found.append(frames)
            self.count += len(frames)
        self._chunks = [block[used:]] if used < len(block) else []
        self._marks = self.count + sum(chunk.count(_MARK) for chunk in self._chunks)

    def end(self) -> tuple[Frames, bytes]:
        """The window, and the bytes of a frame that is not complete."""
        rest = b"".join(self._chunks)
        self._chunks = []
        return joined(self._found), rest


def joined(parts: list[Frames]) -> Frames:
    """Several runs of messages as one."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Frames(b"", (np.zeros(0, np.int64),) * 7)
    names = ("subject", "subject_end", "reply", "reply_end", "head", "body", "end")
    shifts = np.cumsum([0, *(len(part.data) for part in parts[:-1])])
    places = tuple(
        np.concatenate([getattr(p, name) + s for p, s in zip(parts, shifts, strict=True)])
        for name in names
    )
    return Frames(b"".join(part.data for part in parts), places)


def scan(data: bytes, sid: bytes, others: Callable[[bytes], None]) -> tuple[Frames, int]:
    """The complete messages of a subscription in some bytes, and how many bytes are used.

    Everything that begins a line and looks like a message is a candidate. One is a message if the
    one before it ends where it begins; the first byte begins a frame. So a payload that contains
    what looks like a message deceives nobody.
    """
    block = np.frombuffer(data, np.uint8)
    lines = np.flatnonzero(block == 10)
    if not len(lines):
        return joined([]), 0
    starts = np.concatenate([np.zeros(1, np.int64), lines[:-1] + 1])
    first = block[starts]
    kind_h = first == 72
    likely = ((first == 77) | kind_h) & (lines - starts > _LINE_MIN)
    starts, eol, kind_h = starts[likely], lines[likely] - 1, kind_h[likely]
    size, at = _digits(block, eol)
    headers = np.zeros(len(size), np.int64)
    if kind_h.any():
        headers[kind_h], at[kind_h] = _digits(block, at[kind_h])
    after = eol + 2 + size + 2
    chosen, used = _chain(data, starts, after, others)
    starts, eol, at = starts[chosen], eol[chosen], at[chosen]
    head, body, end = eol + 2, eol + 2 + headers[chosen], after[chosen] - 2
    spaces = np.flatnonzero(block == 32)
    subject = starts + 4 + kind_h[chosen]
    number = np.searchsorted(spaces, subject)
    last = len(spaces) - 1
    subject_end, sid_end = spaces[np.minimum(number, last)], spaces[np.minimum(number + 1, last)]
    frames = Frames(data, (subject, subject_end, sid_end + 1, at, head, body, end))
    return _own(frames, block, sid, sid_end, others), used


def _chain(
    data: bytes, starts: Places, after: Places, others: Callable[[bytes], None]
) -> tuple[Any, int]:
    """Which candidates are frames, each beginning where the one before it ended."""
    total = len(data)
    breaks = np.flatnonzero(after[:-1] != starts[1:]) if len(starts) else np.zeros(0, np.int64)
    if len(starts) and starts[0] == 0 and not len(breaks) and after[-1] == total:
        return slice(0, len(starts)), total
    runs: list[Places] = [np.zeros(0, np.int64)]
    place = 0
    while place < total:
        number = int(np.searchsorted(starts, place))
        if number < len(starts) and starts[number] == place:
            if after[number] > total:
                break
            run = int(np.searchsorted(breaks, number))
            last = int(breaks[run]) if run < len(breaks) else len(starts) - 1
            if after[last] > total:
                last -= 1
            runs.append(np.arange(number, last + 1))
            place = int(after[last])
            continue
        line = data.find(b"\r\n", place)
        if line < 0:
            break
        others(data[place : line + 2])
        place = line + 2
    return np.concatenate(runs), place


def _own(
    frames: Frames, block: Any, sid: bytes, sid_end: Places, others: Callable[[bytes], None]
) -> Frames:
    """The messages that were delivered to the subscription; every other goes to `others`."""
    right = sid_end - frames.subject_end - 1 == len(sid)
    for offset, letter in enumerate(sid):
        right &= block[np.minimum(frames.subject_end + 1 + offset, len(block) - 1)] == letter
    for offset, letter in enumerate(_ACK):
        right &= block[np.minimum(frames.reply + offset, len(block) - 1)] == letter
    if right.all():
        return frames
    for number in np.flatnonzero(~right):
        start = frames.data.rfind(b"\n", 0, int(frames.subject[number])) + 1
        others(frames.data[start : int(frames.end[number]) + 2])
    return frames.some(right)


def read_frames(
    connection: BlockingConnection,
    stream: str,
    start: int,
    end: int,
    subjects: tuple[str, ...] = (),
    window: Window | None = None,
) -> Iterator[Frames]:
    """The messages with sequences in [start, end), as `read_range` gives them, by place."""
    return read_windows(
        connection, stream, start, end, subjects, window, collector=FrameCollector()
    )
