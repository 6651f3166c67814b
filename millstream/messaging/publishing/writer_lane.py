"""The parts of a writer: its lanes, the rows that wait in them, and the notes of its positions."""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.events.positions import Position, Positions, order_of, spread_of
from millstream.events.row_buffer import RowBuffer
from millstream.events.subject import key_bytes
from millstream.events.value_type import ValueType
from millstream.messaging.publishing.ahead_lane import AheadLane

__all__ = ["Lane", "LaneRows", "Notes", "Spread"]

NOTES_MAX: Final = 1024  # notes that are kept before those that no event needs are removed


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of a frame that wait for more, with the input position of each."""

    batch: pa.RecordBatch
    positions: Positions

    def slice(self, start: int, count: int | None = None) -> LaneRows:
        return LaneRows(self.batch.slice(start, count), self.positions.slice(start, count))

    def joined(self, more: LaneRows) -> LaneRows:
        return LaneRows(
            pa.concat_batches([self.batch, more.batch]),
            Positions.joined([self.positions, more.positions]),
        )


class Lane:
    """One fence with what waits for it: one unit is being encoded while others are in flight."""

    def __init__(self, fence: AheadLane, value_type: ValueType | None) -> None:
        self.fence = fence
        self.buffer = RowBuffer(value_type)
        self.positions: list[Position] = []  # input position of each event in the buffer
        self.tail: LaneRows | None = None  # rows before those: too few for a pack
        # What was stored before this writer was opened: before every position if nothing was.
        self.stored_before: Position = 0
        self.stores: deque[asyncio.Task[None]] = deque()  # of the units in flight
        self.turn = asyncio.Lock()  # keeps packs in order when lingering and writing meet

    async def idle(self) -> None:
        """Return when nothing is in flight."""
        while self.stores:
            await self._oldest()

    async def room(self) -> None:
        """Return when one more unit may be in flight."""
        while len(self.stores) >= self.fence.depth:
            await self._oldest()

    async def _oldest(self) -> None:
        oldest = self.stores[0]
        await asyncio.shield(oldest)
        if self.stores and self.stores[0] is oldest:
            self.stores.popleft()

    @property
    def busy(self) -> bool:
        """Whether anything waits here or is on its way."""
        stores = any(not store.done() for store in self.stores)
        return stores or self.turn.locked() or bool(self.positions) or self.tail is not None


class Notes:
    """The notes of positions that are given and perhaps not stored in every lane."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []  # growing
        self._notes: list[tuple[Position, str]] = []

    def add(self, position: Position, note: str) -> None:
        """The note of a position, which is no smaller than those before it."""
        place = order_of(position)
        if self._places and self._places[-1] == place:
            self._notes[-1] = position, note
            return
        self._places.append(place)
        self._notes.append((position, note))

    def at(self, position: Position) -> tuple[Position, str] | None:
        """The last note at or before a position, with its own; None: none was given."""
        found = bisect_right(self._places, order_of(position))
        return self._notes[found - 1] if found else None

    def forget(self, before: Position) -> None:
        """Keep what is needed for a position and those after it."""
        found = bisect_right(self._places, order_of(before))
        if found > 1:
            del self._places[: found - 1], self._notes[: found - 1]

    def withdraw(self, position: Position) -> None:
        """Remove the notes of a position and those after it: their events were refused."""
        found = bisect_left(self._places, order_of(position))
        del self._places[found:], self._notes[found:]

    @property
    def many(self) -> bool:
        return len(self._notes) > NOTES_MAX


@dataclass(frozen=True, slots=True)
class Spread:
    """Which lane an event goes to: by key, or by position, so that a restart finds the same."""

    partitions: int
    lanes: int  # of each partition

    @property
    def count(self) -> int:
        return self.partitions * self.lanes

    def lane(self, key: str | bytes | None, position: Position) -> int:
        """The number of an event's lane."""
        value = spread_of(position) if key is None else zlib.crc32(key_bytes(key))
        return value % self.partitions * self.lanes + value // self.partitions % self.lanes

    def parts(self, rows: pa.RecordBatch, positions: Positions) -> Iterator[tuple[int, LaneRows]]:
        """The rows of each lane, in their order, with their positions."""
        if self.count == 1:
            yield 0, LaneRows(rows, positions)
            return
        numbers = self._numbers(rows, positions)
        for number in sorted(numbers.unique().to_pylist()):
            chosen = pc.indices_nonzero(pc.equal(numbers, number))
            yield number, LaneRows(rows.take(chosen), positions.take(chosen))

    def _numbers(self, rows: pa.RecordBatch, positions: Positions) -> pa.Array:
        """The lane of each row; found once for each key, however many rows it has."""
        if "key" not in rows.schema.names:
            return self._by_position(positions)
        keys = rows.column("key").dictionary_encode()
        known = [self.lane(key, 0) for key in keys.dictionary.to_pylist()]
        numbers = pa.array(known, pa.uint64()).take(keys.indices)
        if not numbers.null_count:
            return numbers
        return pc.coalesce(numbers, self._by_position(positions))

    def _by_position(self, positions: Positions) -> pa.Array:
        value = positions.spread()
        partition = _rest(value, self.partitions)
        lane = _rest(pc.divide(value, _number(self.partitions)), self.lanes)
        return pc.add(pc.multiply(partition, _number(self.lanes)), lane)


def _rest(values: pa.Array, divisor: int) -> pa.Array:
    """What whole division leaves; Arrow has no function for it."""
    whole = pc.multiply(pc.divide(values, _number(divisor)), _number(divisor))
    return pc.subtract(values, whole)


def _number(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.uint64())
