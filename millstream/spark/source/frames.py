"""Messages as the bytes that arrived, without a Python object for each of them.

A window of messages is one block of bytes; arrays hold where in it each message's subject, reply,
headers and payload start and end, and complete columns are cut out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream.spark.source.blocks import cut
from millstream.wire.message import RawMessage
from millstream.wire.sync.connection import BlockingConnection
from millstream.wire.sync.range import read_windows
from millstream.wire.sync.window import Window

__all__ = ["Frames", "read_frames"]

Bounds = Any  # numpy.ndarray of int64: where something starts or ends in the block
Lines = tuple[Bounds, Bounds, Any]  # start and end of control lines, and whether headers follow
_ACK: Final = b"$JS.ACK."
_MARK: Final = b" $JS.ACK."
_TAIL: Final = 512  # bytes: a status or a ping that ends what the server sent is shorter
_DIGITS_MAX: Final = 20  # of the largest number in an ack address: nanoseconds since 1970
# An ack address ends with its numbers; with this many dots another token follows them.
_DOTS_WITH_TOKEN: Final = 11
_LINE_MIN: Final = 8  # bytes of the control line of a message, at least
# Messages of this many bytes are found one by one: looking at all bytes at once takes longer.
LARGE: Final = 4096


class Frames:
    """The messages of a window."""

    __slots__ = ("body", "data", "end", "head", "reply", "reply_end", "subject", "subject_end")

    def __init__(self, data: bytes, bounds: tuple[Bounds, ...]) -> None:
        self.data = data
        self.subject, self.subject_end, self.reply, self.reply_end = bounds[:4]
        self.head, self.body, self.end = bounds[4:]

    def __len__(self) -> int:
        return len(self.subject)

    def some(self, order: Any) -> Frames:
        """Some of the messages: a slice, an array of their numbers, or a boolean mask."""
        addresses = (self.subject, self.subject_end, self.reply, self.reply_end)
        content = (self.head, self.body, self.end)
        return Frames(self.data, tuple(bound[order] for bound in (*addresses, *content)))

    def first(self, count: int) -> Frames:
        """The first `count` messages."""
        return self.some(slice(0, count))

    def reply_of(self, number: int) -> bytes:
        """The address of a message's ack."""
        return self.data[self.reply[number] : self.reply_end[number]]

    def headers_of(self, number: int) -> bytes:
        """The header block of a message, empty if it has none."""
        return self.data[self.head[number] : self.body[number]]

    def message(self, number: int) -> RawMessage:
        """One message as an object."""
        data = self.data
        return RawMessage(
            data[self.subject[number] : self.subject_end[number]],
            self.reply_of(number),
            self.headers_of(number),
            data[self.body[number] : self.end[number]],
        )

    # -- columns --------------------------------------------------------------------------

    def cut(self, start: Bounds, end: Bounds) -> pa.Array:
        """The bytes from `start` to `end` of each message as a binary column."""
        return cut(self.data, start, end)

    def byte(self, at: Bounds) -> Any:
        """One byte of each message."""
        return np.frombuffer(self.data, np.uint8)[at]

    def ends_with(self, end: Bounds, mark: bytes) -> Any:
        """Whether the bytes before each `end` are the mark."""
        block = np.frombuffer(self.data, np.uint8)
        found = np.ones(len(end), bool)
        for back, byte in enumerate(reversed(mark), 1):
            found &= block[end - back] == byte
        return found

    def sequences(self) -> Any:
        """The stream sequence of each message."""
        return self._number(3)

    def nanoseconds(self) -> Any:
        """When each message was stored."""
        return self._number(1)

    def _number(self, index: int) -> Any:
        """A number of each ack address, counted from the last; as `parse_ack_address` finds it."""
        block = np.frombuffer(self.data, np.uint8)
        end = self.reply_end
        # The messages of a window come from one consumer: all their addresses have one form.
        if len(self) and self.reply_of(0).count(b".") == _DOTS_WITH_TOKEN:
            end = _before_token(block, end)
        value, end = _digits(block, end)
        for _ in range(index):
            value, end = _digits(block, end)
        return value


def _digits(block: Any, end: Bounds) -> tuple[Any, Bounds]:
    """The decimal number that ends at each `end`, and where the character before it is."""
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


def _before_token(block: Any, end: Bounds) -> Bounds:
    """Where the dot before the last token of each subject is."""
    at = end - 1
    while (active := block[at] != ord(".")).any():
        at = at - active
    return at


# -- from the socket ------------------------------------------------------------------------


class FrameCollector:
    """Collects a window's bytes and scans them when enough seem to have arrived."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._found: list[Frames] = []
        self._sid = b""
        self._wanted = 0
        self._marks = 0
        self._tail = b""
        self.count = 0

    def begin(self, sid: bytes, wanted: int) -> None:
        """A new window: at most `wanted` messages of one subscription."""
        self._chunks, self._found, self._tail = [], [], b""
        self._sid, self._wanted, self._marks, self.count = sid, wanted, 0, 0

    def feed(self, data: bytes, others: Callable[[bytes], None]) -> None:
        """Take bytes that arrived; what is not a message of the window goes to `others`."""
        self._chunks.append(data)
        short = len(_MARK) - 1
        self._marks += data.count(_MARK) + (self._tail[-short:] + data[:short]).count(_MARK)
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        # A status ends a window, a ping must be answered; a payload that looks like one of them
        # only means that we scan too early.
        if self._marks >= self._wanted or b"NATS/1.0 " in self._tail or b"PING\r\n" in self._tail:
            self._scan(others)

    def add(self, message: RawMessage) -> None:
        """Take a message that the connection's own parser found."""
        sizes = np.cumsum([0, *map(len, message)])
        subject, reply, head, body, end = (sizes[n : n + 1] for n in range(5))
        bounds = (subject, reply, reply, head, head, body, end)
        self._found.append(Frames(b"".join(message), bounds))
        self.count += 1

    def _scan(self, others: Callable[[bytes], None]) -> None:
        block = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        large = len(block) >= LARGE * self._marks
        frames, used = scan(block, self._sid, others, large=large)
        if len(frames):
            self._found.append(frames)
            self.count += len(frames)
        self._chunks = [block[used:]] if used < len(block) else []
        self._marks = self.count + sum(chunk.count(_MARK) for chunk in self._chunks)

    def end(self) -> tuple[Frames, bytes]:
        """The window, and the bytes of an incomplete frame."""
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
    bounds = tuple(
        np.concatenate([getattr(p, name) + s for p, s in zip(parts, shifts, strict=True)])
        for name in names
    )
    return Frames(b"".join(part.data for part in parts), bounds)


def scan(
    data: bytes, sid: bytes, others: Callable[[bytes], None], *, large: bool
) -> tuple[Frames, int]:
    """The complete messages of a subscription in some bytes, and how many bytes are used.

    Every line that looks like the start of a message is a candidate. It is a message if the frame
    before it ends where it starts; the first byte starts a frame. So a payload that contains what
    looks like a message is not taken for one. `large` only says how they are found.
    """
    block = np.frombuffer(data, np.uint8)
    (starts, eol, kind_h), spaces = _large(data) if large else _small(block)
    size, at = _digits(block, eol)
    headers = np.zeros(len(size), np.int64)
    if kind_h.any():
        headers[kind_h], at[kind_h] = _digits(block, at[kind_h])
    after = eol + 2 + size + 2
    chosen, used = _chain(data, starts, after, others)
    starts, eol, at = starts[chosen], eol[chosen], at[chosen]
    head, body, end = eol + 2, eol + 2 + headers[chosen], after[chosen] - 2
    subject = starts + 4 + kind_h[chosen]
    number = np.searchsorted(spaces, subject)
    last = len(spaces) - 1
    subject_end, sid_end = spaces[np.minimum(number, last)], spaces[np.minimum(number + 1, last)]
    frames = Frames(data, (subject, subject_end, sid_end + 1, at, head, body, end))
    return _own(frames, block, sid, sid_end, others), used


def _small(block: Any) -> tuple[Lines, Bounds]:
    """The lines that look like the start of a message, and all spaces, by looking at every byte."""
    lines = np.flatnonzero(block == 10)
    starts = np.concatenate([np.zeros(1, np.int64), lines + 1])[:-1]
    # Two letters of MSG and HMSG, because a header line may start with the first: Mill-Time.
    first, second = block[starts], block[np.minimum(starts + 1, len(block) - 1)]
    kind_h = (first == 72) & (second == 77)
    likely = (((first == 77) & (second == 83)) | kind_h) & (lines - starts > _LINE_MIN)
    return (starts[likely], lines[likely] - 1, kind_h[likely]), np.flatnonzero(block == 32)


def _large(data: bytes) -> tuple[Lines, Bounds]:
    """The same, from one message to the next: payloads are not looked at."""
    lines: list[tuple[int, int, bool]] = []
    spaces: list[int] = []
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        line = data[at : end - 1]
        kind_h = line.startswith(b"HM")
        size = line[line.rfind(b" ") + 1 :]
        if (kind_h or line.startswith(b"MS")) and size.isdigit():
            lines.append((at, end - 1, kind_h))
            spaces += (at + number for number, byte in enumerate(line) if byte == 32)
            end += int(size) + 2
        at = end + 1
    starts, ends, kinds = zip(*lines, strict=True) if lines else ((), (), ())
    bounds = np.array(starts, np.int64), np.array(ends, np.int64), np.array(kinds, bool)
    return bounds, np.array(spaces, np.int64)


def _chain(
    data: bytes, starts: Bounds, after: Bounds, others: Callable[[bytes], None]
) -> tuple[Any, int]:
    """Which candidates are frames, each starting where the one before it ended."""
    total = len(data)
    breaks = np.flatnonzero(after[:-1] != starts[1:]) if len(starts) else np.zeros(0, np.int64)
    if len(starts) and starts[0] == 0 and not len(breaks) and after[-1] == total:
        return slice(0, len(starts)), total
    runs: list[Bounds] = [np.zeros(0, np.int64)]
    at = 0
    while at < total:
        number = int(np.searchsorted(starts, at))
        if number < len(starts) and starts[number] == at:
            if after[number] > total:
                break
            run = int(np.searchsorted(breaks, number))
            last = int(breaks[run]) if run < len(breaks) else len(starts) - 1
            if after[last] > total:
                last -= 1
            runs.append(np.arange(number, last + 1))
            at = int(after[last])
            continue
        line = data.find(b"\r\n", at)
        if line < 0:
            break
        others(data[at : line + 2])
        at = line + 2
    return np.concatenate(runs), at


def _own(
    frames: Frames, block: Any, sid: bytes, sid_end: Bounds, others: Callable[[bytes], None]
) -> Frames:
    """The messages that were delivered to the subscription; all others go to `others`."""
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
    """The messages with sequences in [start, end), the same ones as `read_range` gives."""
    return read_windows(
        connection, stream, start, end, subjects, window, collector=FrameCollector()
    )
