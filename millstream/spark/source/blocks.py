"""Many short texts in one block of bytes: compared and cut out all at once."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["Words", "cut", "starts_with"]

_WORD: Final = 8
_BEHIND: Final = 64  # bytes after a block that may be looked at


class Words:
    """Compares the bytes at many positions of a block with a text."""

    def __init__(self, block: Any) -> None:
        """`block`: bytes as an array of uint8."""
        self.block = np.concatenate([block, np.zeros(_BEHIND + _WORD, np.uint8)])
        self._words = np.ndarray(len(block) + _BEHIND + 1, "<u8", self.block, strides=(1,))

    def match(self, positions: Any, text: bytes) -> Any:
        """Whether the text is at each of the positions, which are not after the block's end."""
        found = starts_with(self.at(positions), text)
        for start in range(_WORD, len(text), _WORD):
            if not found.any():
                break
            # The last word may overlap the one before it: a complete one needs no mask.
            first = min(start, len(text) - _WORD)
            at = positions + first
            if first > _BEHIND:
                at = np.minimum(at, len(self._words) - 1)
            found &= starts_with(self.at(at), text[first:])
        return found

    def at(self, positions: Any) -> Any:
        """The eight bytes at each of the positions."""
        return self._words[positions]


def starts_with(words: Any, text: bytes) -> Any:
    """Whether words start with a text, of which the first eight bytes count."""
    part = text[:_WORD]
    if len(part) < _WORD:
        words = words & np.uint64((1 << 8 * len(part)) - 1)
    return words == np.uint64(int.from_bytes(part, "little"))


def cut(block: Any, start: Any, end: Any) -> pa.Array:
    """The bytes from each `start` to its `end` as a binary column; they are in order."""
    count = len(start)
    if not count:
        return pa.array([], pa.binary())
    # What is between two of them is an element too, so that the complete block is one array.
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2], offsets[1::2] = start, end
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block)]
    elements = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
    return elements.take(pa.array(np.arange(0, 2 * count, 2)))
