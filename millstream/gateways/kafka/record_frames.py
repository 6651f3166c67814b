"""The messages that carry records: requests of Produce, answers of Produce and Fetch. Pure.

They are read and written here and not by kio, for two reasons. What a Produce request names is
counted while it is read: its size is that of its records, but topics and partitions become
objects, so a large frame of nothing else would take twenty times its size, and seconds. And these
three are most of what a gateway does: a small answer takes kio's writer 60 us, this one 8, and
records are copied once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

__all__ = [
    "PARTS_MAX",
    "ProducePart",
    "ProduceRequest",
    "ProduceTopic",
    "fetch_answer",
    "produce_answer",
    "read_produce",
]

PARTS_MAX: Final = 20_000  # topics and partitions in one request
_HEADER: Final = 8  # api, version, correlation id
# The versions from which lengths are of variable size, and tagged fields may follow.
_PRODUCE_FLEXIBLE: Final = 9
_FETCH_FLEXIBLE: Final = 12
_ACKS_AND_TIMEOUT: Final = struct.Struct(">hi")
_INDEX: Final = struct.Struct(">i")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
# partition, error, base offset, time of storing
_PRODUCED: Final = struct.Struct(">ihqq")
# partition, error, end of the log, end of what is committed
_FETCHED: Final = struct.Struct(">ihqq")
# Later versions have the first offset of the log as well.
_PRODUCED_FROM: Final = struct.Struct(">ihqqq")
_FETCHED_FROM: Final = struct.Struct(">ihqqq")
_SMALL: Final = [bytes((size,)) for size in range(0x80)]  # sizes that are one byte
_MOST: Final = 0.9
_NO_TIME: Final = -1
_NULL: Final = -1

Piece = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ProducePart:
    """What is sent to one partition."""

    index: int
    records: bytes | memoryview | None


class ProduceTopic(NamedTuple):
    """What is sent to the partitions of one topic."""

    name: str
    partition_data: Sequence[ProducePart]


class ProduceRequest(NamedTuple):
    """A Produce request."""

    transactional_id: str | None
    acks: int
    topic_data: Sequence[ProduceTopic]


# -- reading ----------------------------------------------------------------------------------


def read_produce(frame: bytes, version: int) -> tuple[str | None, ProduceRequest]:
    """The client's name, and what it sends.

    ValueError when there are more than PARTS_MAX topics and partitions, or when lengths do not fit
    the frame.
    """
    walk = _Walk(frame, flexible=version >= _PRODUCE_FLEXIBLE)
    walk.take(_HEADER)
    client = walk.text(short=True)
    walk.skip_tags()
    transactional_id = walk.text()
    acks, _ = _ACKS_AND_TIMEOUT.unpack(walk.take(_ACKS_AND_TIMEOUT.size))
    topics = []
    for _ in range(walk.count()):
        name, parts = walk.text(), []
        for _ in range(walk.count()):
            (index,) = _INDEX.unpack(walk.take(_INDEX.size))
            parts.append(ProducePart(index, walk.records()))
            walk.skip_tags()
        walk.skip_tags()
        if name is None:
            raise ValueError("a topic without a name")
        topics.append(ProduceTopic(name, parts))
    walk.skip_tags()
    return client, ProduceRequest(transactional_id, acks, topics)


class _Walk:
    """Reads the fields of a frame one after the other."""

    def __init__(self, frame: bytes, *, flexible: bool) -> None:
        self._frame = frame
        self._end = len(frame)
        self._flexible = flexible
        self._at = 0
        self._parts = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        start = self._at
        self._at = end = start + size
        if end > self._end:
            raise ValueError(f"a length reaches beyond the {self._end:,} bytes of the frame")
        return self._frame[start:end]

    def text(self, *, short: bool = False) -> str | None:
        """A text; `short`: of the kind that is the same in all versions."""
        size = self._compact() - 1 if self._flexible and not short else self._fixed(2)
        return None if size < 0 else self.take(size).decode()

    def records(self) -> bytes | memoryview | None:
        """Records are copied, unless they are most of the frame, which stays with them then."""
        size = self._compact() - 1 if self._flexible else self._fixed(4)
        if size < 0:
            return None
        if size > self._end * _MOST:
            start = self._at
            self._skip(size)
            return memoryview(self._frame)[start : self._at]
        return self.take(size)

    def skip_tags(self) -> None:
        """Tagged fields, none of which means anything here."""
        count = self._compact() if self._flexible else 0
        for _ in range(self._added(count) if count else 0):
            self._compact()
            self._skip(self._compact())

    def count(self) -> int:
        """How many parts follow."""
        return self._added(self._compact() - 1 if self._flexible else self._fixed(4))

    def _added(self, parts: int) -> int:
        self._parts += max(parts, 0)
        if self._parts > PARTS_MAX:
            raise ValueError(f"more than {PARTS_MAX:,} topics and partitions in one request")
        return parts

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > self._end:
            raise ValueError(f"a length reaches beyond the {self._end:,} bytes of the frame")

    def _fixed(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big", signed=True)

    def _compact(self) -> int:
        found = 0
        for shift in range(0, 35, 7):
            at = self._at
            self._skip(1)
            byte = self._frame[at]
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise ValueError("a length of more than five bytes")


# -- writing ----------------------------------------------------------------------------------


def produce_answer(version: int, correlation_id: int, fields: Mapping[str, Any]) -> memoryview:
    """The frame of the answer to Produce; `fields` as for every other answer."""
    out = _Answer(correlation_id, flexible=version >= _PRODUCE_FLEXIBLE)
    out.count(fields["responses"])
    for topic in fields["responses"]:
        out.text(topic["name"])
        out.count(topic["partition_responses"])
        for part in topic["partition_responses"]:
            head = part["index"], part["error_code"], part["base_offset"], _NO_TIME
            if version >= 5:
                out.add(_PRODUCED_FROM.pack(*head, part["log_start_offset"]))
            else:
                out.add(_PRODUCED.pack(*head))
            if version >= 8:
                out.count(part["record_errors"])
                for wrong in part["record_errors"]:
                    out.add(_INT32.pack(wrong["batch_index"]))
                    out.text(wrong["batch_index_error_message"])
                    out.end()
                out.text(part["error_message"])
            out.end()
        out.end()
    out.add(_INT32.pack(0))  # throttle time
    out.end()
    return out.frame()


def fetch_answer(version: int, correlation_id: int, fields: Mapping[str, Any]) -> memoryview:
    """The frame of the answer to Fetch; the records of a partition are pieces to be joined."""
    out = _Answer(correlation_id, flexible=version >= _FETCH_FLEXIBLE)
    out.add(_INT32.pack(0))  # throttle time
    if version >= 7:
        out.add(_INT16.pack(fields["error_code"]))
        out.add(_INT32.pack(fields["session_id"]))
    out.count(fields["responses"])
    for topic in fields["responses"]:
        out.text(topic["topic"])
        out.count(topic["partitions"])
        for part in topic["partitions"]:
            head = part["partition_index"], part["error_code"], part["high_watermark"]
            if version >= 5:
                ends = part["last_stable_offset"], part["log_start_offset"]
                out.add(_FETCHED_FROM.pack(*head, *ends))
            else:
                out.add(_FETCHED.pack(*head, part["last_stable_offset"]))
            out.count(None)  # aborted transactions
            if version >= 11:
                out.add(_INT32.pack(part["preferred_read_replica"]))
            out.records(part["records"])
            out.end()
        out.end()
    out.end()
    return out.frame()


class _Answer:
    """Puts the fields of an answer together."""

    def __init__(self, correlation_id: int, *, flexible: bool) -> None:
        self._flexible = flexible
        self._pieces: list[Piece] = [b"", _INT32.pack(correlation_id)]
        self.add = self._pieces.append  # bytes as they are
        self.end()

    def end(self) -> None:
        """The end of a part, where tagged fields would be."""
        if self._flexible:
            self._pieces.append(b"\0")

    def count(self, parts: Sequence[Any] | None) -> None:
        """How many parts follow; null for None."""
        self._size(_NULL if parts is None else len(parts), _INT32)

    def text(self, text: str | None) -> None:
        """A text, or null."""
        data = b"" if text is None else text.encode()
        self._size(_NULL if text is None else len(data), _INT16)
        self._pieces.append(data)

    def records(self, pieces: Sequence[Piece]) -> None:
        """The batches of a partition."""
        self._size(sum(map(len, pieces)), _INT32)
        self._pieces.extend(pieces)

    def frame(self) -> memoryview:
        """The whole answer, with its length before it."""
        self._pieces[0] = _INT32.pack(sum(map(len, self._pieces)))
        return memoryview(b"".join(self._pieces))

    def _size(self, size: int, fixed: struct.Struct) -> None:
        if not self._flexible:
            self._pieces.append(fixed.pack(size))
            return
        left = size + 1
        if left < len(_SMALL):
            self._pieces.append(_SMALL[left])
            return
        found = bytearray()
        while left > 0x7F:
            found.append(left & 0x7F | 0x80)
            left >>= 7
        found.append(left)
        self._pieces.append(found)
