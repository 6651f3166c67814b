"""Batches as they go to clients, kept for readers near the end. Bounded, for all partitions.

Readers near the end get what was just produced, byte for byte, without a look at the broker.
Batches that were made of stored events are kept as well: the next reader of them may be close
behind. What is deleted in the middle of a topic is noticed by nobody, so nothing is kept for long.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

__all__ = ["BatchCache", "CachedRun"]

AGE_MAX: Final = 60.0  # seconds
_ENTRY_COST: Final = 400  # bytes that an entry takes besides its batches

Piece = bytes | bytearray | memoryview


class CachedRun(NamedTuple):
    """The batches of one message, or of several plain ones in a row."""

    next_sequence: int  # of the message after them
    next_offset: int  # that it begins with
    last_offset: int  # of the last event in the batches; -1: there is none
    pieces: tuple[Piece, ...]  # numbered; joined they are what a Fetch gets
    size: int


class BatchCache:
    """Runs by partition and first sequence; the one that was used least recently goes first."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.size = 0
        self.hits = self.misses = 0
        self._clock = clock
        self._runs: OrderedDict[tuple[Hashable, int], tuple[CachedRun, float]] = OrderedDict()

    def get(self, partition: Hashable, sequence: int) -> CachedRun | None:
        """The run that begins with this message."""
        key = (partition, sequence)
        found = self._runs.get(key)
        if found is None:
            self.misses += 1
            return None
        run, kept_at = found
        if self._clock() - kept_at > AGE_MAX:
            self._drop(key)
            self.misses += 1
            return None
        self._runs.move_to_end(key)
        self.hits += 1
        return run

    def put(self, partition: Hashable, sequence: int, run: CachedRun) -> None:
        """Keep a run, if it is not larger than everything may be."""
        key = (partition, sequence)
        self._drop(key)
        if run.size + _ENTRY_COST > self.limit:
            return
        self._runs[key] = (run, self._clock())
        self.size += run.size + _ENTRY_COST
        while self.size > self.limit:
            self._drop(next(iter(self._runs)))

    def forget(self, partition: Hashable) -> None:
        """Nothing of a partition is kept any more."""
        for key in [key for key in self._runs if key[0] == partition]:
            self._drop(key)

    def _drop(self, key: tuple[Hashable, int]) -> None:
        found = self._runs.pop(key, None)
        if found is not None:
            self.size -= found[0].size + _ENTRY_COST
