"""The events in the payloads of an event store's messages: one line each, found without parsing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from millstream.spark.source.blocks import Words, cut
from millstream.spark.source.frames import Frames

__all__ = ["EventLines", "joined_payloads", "joined_texts"]

_LF: Final = 10
_CR: Final = 13
_CLOSING: Final = b"}}"
_OPENING: Final = b'{"'
_UNKNOWN: Final = -1


def joined_payloads(frames: Frames) -> tuple[Any, Any]:
    """All payloads in one block, each followed by a line end, and where each of them ends."""
    count = len(frames)
    if not count:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64)
    data = np.frombuffer(frames.data, np.uint8)
    # On the wire a payload is followed by a line end already.
    after = np.minimum(frames.end, len(data) - 2)
    if ((after == frames.end) & (data[after] == _CR) & (data[after + 1] == _LF)).all():
        column = frames.cut(frames.body, frames.end + 2)
        offsets, block = column.buffers()[1:]
        ends = np.frombuffer(offsets, np.int32)[1 : count + 1].astype(np.int64)
        return np.frombuffer(block, np.uint8)[: ends[-1]], ends
    return joined_texts(frames.cut(frames.body, frames.end).to_pylist())


def joined_texts(payloads: Sequence[bytes]) -> tuple[Any, Any]:
    """The same of payloads that are objects."""
    block = b"".join(payload + b"\n" for payload in payloads)
    ends = np.cumsum([len(payload) + 1 for payload in payloads], dtype=np.int64)
    return np.frombuffer(block, np.uint8), ends


class EventLines:
    """The lines of a block of payloads, each with the number of its tag."""

    def __init__(self, block: Any, ends: Any, tags: Sequence[str]) -> None:
        """`ends`: where each payload's part of the block ends; `tags`: the known ones."""
        breaks = np.flatnonzero(block == _LF)
        self.counts = np.diff(np.searchsorted(breaks, ends), prepend=0)  # lines of each message
        self._words = words = Words(block)
        text = words.block
        start = np.concatenate([np.zeros(1, np.int64), breaks[:-1] + 1]) if len(breaks) else breaks
        end = breaks - (text[np.maximum(breaks - 1, 0)] == _CR)
        regular = words.match(np.maximum(end - len(_CLOSING), 0), _CLOSING)
        regular &= end - start > len(_OPENING)
        self.tag = np.full(len(start), _UNKNOWN)
        self._body = start.copy()
        left = np.flatnonzero(regular)
        for number, tag in enumerate(tags):
            if not len(left):
                break
            mark = b'%b%b":{' % (_OPENING, tag.encode())
            found = words.match(start[left], mark)
            chosen = left[found]
            self.tag[chosen] = number
            self._body[chosen] += len(mark) - 1
            left = left[~found]
        self._end = end
        # The bracket that closes a line becomes the line end of its body.
        text[end[self.tag != _UNKNOWN] - 1] = _LF
        self.messages = np.arange(len(self.counts))  # the numbers of the messages, see `place`
        self.counts_of_messages = self.counts

    def messages_with_unknown_tags(self) -> Any:
        """The payloads, by number, that have a line whose tag is not known."""
        payload_of_line = np.repeat(np.arange(len(self.counts)), self.counts)
        return np.unique(payload_of_line[self.tag == _UNKNOWN])

    def place(self, messages: Any, without: Collection[int]) -> None:
        """Say which message each payload is of; the lines of some messages are left out."""
        keep = np.ones(len(messages), bool)
        if without:
            keep = ~np.isin(messages, list(without))
            lines = np.repeat(keep, self.counts)
            self.tag, self._body, self._end = self.tag[lines], self._body[lines], self._end[lines]
        self.messages, self.counts_of_messages = messages[keep], self.counts[keep]

    def tag_text(self, line: int) -> str:
        """The tag of a line that is not known, as `join_lines` wrote it."""
        text = self._words.block[self._body[line] : self._end[line]].tobytes()
        return text[len(_OPENING) :].partition(b'"')[0].decode("utf-8", "replace")

    def bodies(self, lines: Any) -> bytes:
        """The JSON of some lines, which have known tags and are in order, each with a line end."""
        if not len(lines):
            return b""
        chosen = cut(self._words.block, self._body[lines], self._end[lines])
        offsets, data = chosen.buffers()[1:]
        size = int(np.frombuffer(offsets, np.int32)[len(lines)])
        found: bytes = data.slice(0, size).to_pybytes()
        return found
