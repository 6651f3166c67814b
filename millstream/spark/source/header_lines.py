"""The headers of many messages at once, found by comparing words of eight bytes.

Only for headers as Millstream's own clients write them (`Name: value`); where one is not found that
way, the caller parses the block of that message.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.spark.source.blocks import Words
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
        self._first = self.words.block[self._starts]
        self.text = text

    def find(self, name: str) -> tuple[Any, Any, Any]:
        """The messages that have a header, and where the value of each starts and ends.

        Of a repeated header the first counts.
        """
        mark = f"{name}: ".encode()
        likely = self._starts[self._first == mark[0]]
        starts = likely[self.words.match(likely, mark)]
        messages = np.searchsorted(self._ends, starts, side="right")
        messages, firsts = np.unique(messages, return_index=True)
        starts = starts[firsts]
        number = np.searchsorted(self._starts, starts, side="right")
        ends = self._starts[np.minimum(number, len(self._starts) - 1)] - 2
        return messages, starts + len(mark), ends

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
