"""The headers of many messages at once, found by comparing words of eight bytes.

Only for headers as Millstream's own clients write them (`Name: value`); where one is not found that
way, the caller parses the block of that message.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np

from millstream.spark.source.blocks import Words, starts_with
from millstream.spark.source.frames import Frames

__all__ = ["HeaderLines", "numbers_at"]

_DIGITS_MAX: Final = 18  # of a number that surely fits 64 bits


class HeaderLines:
    """The lines of the header blocks of some messages."""

    def __init__(self, frames: Frames) -> None:
        self._count = len(frames)
        blocks = frames.cut(frames.head, frames.body)
        offsets, data = blocks.buffers()[1:]
        ends: Any = np.frombuffer(offsets, np.int32)[1 : self._count + 1] if self._count else []
        text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        self.words = Words(text)
        # Every line but the first of a block, the status, follows a line end.
        self._starts = np.flatnonzero(text == 10) + 1
        self._ends = np.asarray(ends, np.int64)
        self._first = self.words.at(self._starts)
        self._found: dict[str, tuple[Any, Any, Any]] = {}
        self.text = text

    @cached_property
    def _message(self) -> Any:
        """The number of the message of each line."""
        before = np.searchsorted(self._starts, self._ends)
        counts = np.diff(before, prepend=0, append=len(self._starts))
        return np.repeat(np.arange(self._count + 1), counts)

    def find(self, name: str) -> tuple[Any, Any, Any]:
        """The messages that have a header, and where the value of each starts and ends.

        Of a repeated header the first counts.
        """
        if name not in self._found:
            self._found[name] = self._find(f"{name}: ".encode())
        return self._found[name]

    def _find(self, mark: bytes) -> tuple[Any, Any, Any]:
        lines = np.flatnonzero(starts_with(self._first, mark))
        if not len(lines):
            return lines, lines, lines
        lines = lines[self.words.match(self._starts[lines], mark)]
        messages = self._message[lines]
        repeated = np.flatnonzero(messages[1:] == messages[:-1]) + 1
        if len(repeated):
            lines, messages = np.delete(lines, repeated), np.delete(messages, repeated)
        ends = self._starts[np.minimum(lines + 1, len(self._starts) - 1)] - 2
        return messages, self._starts[lines] + len(mark), ends

    def has(self, name: str) -> Any:
        """Whether each message has a header."""
        found = np.zeros(self._count, bool)
        found[self.find(name)[0]] = True
        return found

    def texts(self, name: str) -> dict[int, str]:
        """The values of a header by message."""
        messages, starts, ends = self.find(name)
        data = self.text
        positions = zip(messages.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return {
            message: data[start:end].tobytes().strip().decode("utf-8", "surrogateescape")
            for message, start, end in positions
        }


def numbers_at(block: Any, positions: Any) -> tuple[Any, Any]:
    """The number at each position, and where it ends; where there is none, that is the position."""
    value = np.zeros(len(positions), np.int64)
    at = np.array(positions)
    active = np.ones(len(positions), bool)
    for _ in range(_DIGITS_MAX):
        digit = block[at] - np.uint8(48)  # anything but a digit wraps to more than 9
        active &= digit < 10
        if not active.any():
            break
        value = np.where(active, value * 10 + digit, value)
        at = at + active
    return value, at
