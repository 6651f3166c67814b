"""Many short texts in one block of bytes: compared and cut out all at once."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["Words", "cut"]

_WORD: Final = 8


class Words:
    """Compares the bytes at many positions of a block with a text."""

    def __init__(self, block: Any) -> None:
        """`block`: bytes as an array of uint8."""
        self.block = np.concatenate([block, np.zeros(_WORD, np.uint8)])
        self._words = np.ndarray(len(block) + 1, "<u8", self.block, strides=(1,))

    def match(self, positions: Any, text: bytes) -> Any:
        """Whether the text is at each of the positions."""
        found = np.ones(len(positions), bool)
        last = len(self._words) - 1
        for start in range(0, len(text), _WORD):
            part = text[start : start + _WORD]
            words = self._words[np.minimum(positions + start, last)]
            mask = np.uint64((1 << 8 * len(part)) - 1)
            found &= (words & mask) == np.uint64(int.from_bytes(part, "little"))
        return found


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
