"""Which offsets the messages of a partition have, and which event times. Pure.

Kafka numbers records without gaps; a stream numbers messages, and a pack is one message with many
events. So the offset of an event is

    (sequence - 1) + sum over the packs before it of (count - 1) + index in its pack

A plain message takes one offset, also when it is deleted or none that readers of events get; an
empty pack (a writer's claim) takes none. From one place on offsets may be raised (`skip_to`): what
was lost before its count was noted might have had them.

The index is a list of units in order: a pack, or up to 512 other messages in a row. Of each it has
the first sequence, the first offset and the largest event time: 24 bytes.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

__all__ = ["NO_EVENTS", "RUN_MAX", "UNKNOWN", "IndexPart", "OffsetIndex"]

RUN_MAX: Final = 512  # messages of one run
# Instead of a unit's largest time. Unknown counts as later than any time, until it is looked up.
UNKNOWN: Final = 2**63 - 1
NO_EVENTS: Final = -(2**63)
# Removed at the head only when so many are: moving the rest costs something.
_TRIM_MIN: Final = 1024


class IndexPart(NamedTuple):
    """A part of an index as it is kept: some units, from a sequence up to before another."""

    first_sequence: int
    next_sequence: int
    units: int
    body: bytes  # the differences of the three columns, compressed


class OffsetIndex:
    """The offsets of all messages from `first_sequence` up to before `next_sequence`."""

    def __init__(self, first_sequence: int = 1, first_offset: int = 0) -> None:
        self.next_sequence = first_sequence
        self.end_offset = first_offset  # that the next message begins with
        self._sequences = array("q")
        self._offsets = array("q")
        self._times = array("q")
        self._run_open = False  # the last unit is a run that takes more messages
        self.first_sequence = first_sequence  # the first whose offset is known

    def __len__(self) -> int:
        """How many units it has."""
        return len(self._sequences)

    # -- growing --------------------------------------------------------------------------

    def add_pack(self, count: int, max_ms: int = UNKNOWN) -> int:
        """The next message is a pack; returns the offset of its first event."""
        base = self._begin(max_ms if count else NO_EVENTS)
        self._run_open = False
        self.next_sequence += 1
        self.end_offset += count
        return base

    def add_plain(self, time_ms: int) -> int:
        """The next message is no pack; `time_ms` is NO_EVENTS if readers do not get it."""
        base = self.end_offset
        if not self._run_open or self.next_sequence - self._sequences[-1] >= RUN_MAX:
            self._begin(time_ms)
            self._run_open = True
        elif time_ms > self._times[-1]:
            self._times[-1] = time_ms
        self.next_sequence += 1
        self.end_offset += 1
        return base

    def add_run(self, up_to: int, max_ms: int = UNKNOWN) -> None:
        """The messages before the sequence `up_to` are no packs, or are missing."""
        left = up_to - self.next_sequence
        while left > 0:
            size = min(left, RUN_MAX)
            self._begin(max_ms)
            self.next_sequence += size
            self.end_offset += size
            left -= size
        self._run_open = False

    def skip_to(self, offset: int) -> None:
        """The next message begins with this offset, or a later one that it has anyway."""
        if offset > self.end_offset:
            self.end_offset = offset
            self._run_open = False

    def lower(self, sequence: int, by: int) -> None:
        """The offsets from a message on, which begins a unit, are smaller by so many."""
        for at in range(bisect_left(self._sequences, sequence), len(self)):
            self._offsets[at] -= by
        self.end_offset -= by

    def _begin(self, time_ms: int) -> int:
        self._sequences.append(self.next_sequence)
        self._offsets.append(self.end_offset)
        self._times.append(time_ms)
        return self.end_offset

    # -- looking up -----------------------------------------------------------------------

    def base_offset(self, sequence: int) -> int:
        """The offset that a message begins with; `next_sequence` has one, too."""
        if sequence >= self.next_sequence:
            if sequence > self.next_sequence:
                raise LookupError(f"sequence {sequence} is not known yet")
            return self.end_offset
        at = bisect_right(self._sequences, sequence) - 1
        if at < 0:
            raise LookupError(f"sequence {sequence} is before the first, {self.first_sequence}")
        return self._offsets[at] + sequence - self._sequences[at]

    def sequence_of(self, offset: int) -> int:
        """The message that holds an offset, or else the one before the gap that it is in."""
        if offset >= self.end_offset:
            return self.next_sequence
        at = bisect_right(self._offsets, offset) - 1
        if at < 0:
            return self.first_sequence
        first = self._sequences[at]
        return min(first + offset - self._offsets[at], self._after(at) - 1)

    def span_of(self, sequence: int) -> tuple[int, int]:
        """The offset that a message begins with, and the one that the next begins with."""
        return self.base_offset(sequence), self.base_offset(sequence + 1)

    def _after(self, at: int) -> int:
        """The first sequence after a unit."""
        return self._sequences[at + 1] if at + 1 < len(self._sequences) else self.next_sequence

    # -- times ----------------------------------------------------------------------------

    def next_unit(self, time_ms: int, after: int) -> tuple[int, int, bool] | None:
        """The first unit, from the sequence `after` on, with an event at or after a time.

        Its first sequence, the one after it, and whether its times are known; None: there is none.
        """
        at = max(0, bisect_right(self._sequences, after) - 1)
        found = self._first_at_least(at, time_ms)
        if found is None:
            return None
        start, stop = self._sequences[found], self._after(found)
        return max(start, after), stop, self._times[found] != UNKNOWN

    def _first_at_least(self, at: int, time_ms: int) -> int | None:
        # A view of the array must not live when it grows.
        later = np.frombuffer(self._times, np.int64)[at:] >= time_ms
        if not later.any():
            return None
        return at + int(later.argmax())

    def latest_unit(self, after: int) -> tuple[int, int, bool] | None:
        """The first unit with the largest time, or one whose times are unknown, as above."""
        at = max(0, bisect_right(self._sequences, after) - 1)
        if at >= len(self._times):
            return None
        found = at + int(np.frombuffer(self._times, np.int64)[at:].argmax())
        if self._times[found] == NO_EVENTS:
            return None
        start, stop = self._sequences[found], self._after(found)
        return max(start, after), stop, self._times[found] != UNKNOWN

    def set_time(self, sequence: int, stop: int, max_ms: int) -> None:
        """Note the largest time of the unit of a sequence, which was read up to before `stop`.

        A unit that has grown since it was looked up keeps what it has, unless that is less.
        """
        at = bisect_right(self._sequences, sequence) - 1
        if at < 0:
            return
        if self._after(at) == stop:
            self._times[at] = max_ms
        elif self._times[at] != UNKNOWN:
            self._times[at] = max(self._times[at], max_ms)

    # -- the head -------------------------------------------------------------------------

    def trim(self, first_sequence: int) -> None:
        """Forget units that end before a sequence; some of them may stay for a while."""
        gone = bisect_right(self._sequences, first_sequence) - 1
        if gone < _TRIM_MIN or gone * 2 < len(self._sequences):
            return
        del self._sequences[:gone], self._offsets[:gone], self._times[:gone]
        self.first_sequence = self._sequences[0]

    def cut(self, sequence: int) -> None:
        """Forget the messages from a sequence on: they are lost. What comes next begins there."""
        if sequence >= self.next_sequence:
            return
        kept = bisect_left(self._sequences, sequence)
        self.end_offset = self.base_offset(sequence) if sequence >= self.first_sequence else 0
        del self._sequences[kept:], self._offsets[kept:], self._times[kept:]
        self.next_sequence = sequence
        self.first_sequence = min(self.first_sequence, sequence)
        self._run_open = False

    # -- keeping it -----------------------------------------------------------------------

    def part(self, first_sequence: int, count: int) -> IndexPart:
        """Up to `count` units from a sequence on, to be kept.

        The last unit of the index may still grow: it is not in a part that is kept for good.
        """
        start = bisect_left(self._sequences, first_sequence)
        stop = min(start + count, len(self))
        columns = [c[start:stop] for c in (self._sequences, self._offsets, self._times)]
        if stop == start:
            return IndexPart(self.next_sequence, self.next_sequence, 0, b"")
        # Differences may be too large for 64 bits: they wrap here and when they are added up.
        deltas = [np.diff(np.frombuffer(c, np.int64), prepend=np.int64(0)) for c in columns]
        body = zlib.compress(b"".join(delta.tobytes() for delta in deltas), 1)
        return IndexPart(columns[0][0], self._after(stop - 1), stop - start, body)

    def units_from(self, sequence: int) -> int:
        """How many units begin at a sequence or after it."""
        return len(self) - bisect_left(self._sequences, sequence)

    @classmethod
    def restored(
        cls, parts: Iterable[IndexPart], next_sequence: int, end_offset: int
    ) -> OffsetIndex:
        """The index that was kept in parts; ValueError if they do not fit together."""
        index = cls(next_sequence, end_offset)
        columns = (index._sequences, index._offsets, index._times)
        for part in parts:
            raw = zlib.decompress(part.body) if part.units else b""
            if len(raw) != part.units * 24:
                raise ValueError(f"a part of the index has {len(raw)} bytes for {part.units} units")
            deltas = np.frombuffer(raw, np.int64).reshape(3, part.units)
            for column, own in zip(columns, deltas, strict=True):
                column.frombytes(np.cumsum(own, dtype=np.int64).tobytes())
        _check_order(index._sequences, next_sequence, 1)
        _check_order(index._offsets, end_offset, 0)
        if index._sequences:
            index.first_sequence = index._sequences[0]
        return index


def _check_order(column: array[int], end: int, step_min: int) -> None:
    steps = np.diff(np.frombuffer(column, np.int64), append=np.int64(end))
    if len(steps) and steps.min() < step_min:
        raise ValueError("the parts of the index are not in order")
