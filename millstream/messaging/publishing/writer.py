"""Exactly-once writers: named, fenced, and resumed where they stopped."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from millstream.closing import AsyncClosing
from millstream.errors import ConfigError, ConnectionClosed, MillstreamError, Unconfirmed
from millstream.events.fence import check_note, fence_subject
from millstream.events.packs.pack import EncodedPack
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns, RowBuffer, batches_of, enveloped
from millstream.events.subject import check_name, key_bytes
from millstream.events.value_type import ValueType
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.publishing.target import PackTarget

__all__ = ["Writer"]

LANES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a frame that wait for more, with the input position of each."""

    batch: pa.RecordBatch
    positions: pa.Array

    def slice(self, start: int, count: int | None = None) -> _Rows:
        return _Rows(self.batch.slice(start, count), self.positions.slice(start, count))

    def upto(self, position: int) -> int:
        """How many are at or before a position."""
        return int(pc.sum(pc.less_equal(self.positions, position)).as_py() or 0)

    def joined(self, more: _Rows) -> _Rows:
        return _Rows(
            pa.concat_batches([self.batch, more.batch]),
            pa.concat_arrays([self.positions, more.positions]),
        )


class _Lane:
    """One fence with what waits for it. At most one unit is in flight and one is being encoded."""

    def __init__(self, fence: FencedLane, value_type: ValueType | None) -> None:
        self.fence = fence
        self.buffer = RowBuffer(value_type)
        self.positions: list[int] = []  # input position of each event in the buffer
        self.tail: _Rows | None = None  # rows before those: too few for a pack
        self.stored_before = 0  # the position stored before this writer was opened
        self.store: asyncio.Task[None] | None = None
        self.turn = asyncio.Lock()  # keeps packs in order when lingering and writing meet

    async def idle(self) -> None:
        if self.store is not None:
            await asyncio.shield(self.store)
            self.store = None


class Writer(AsyncClosing):
    """Writes each event exactly once, no matter how often it is killed and restarted.

    Every event has a position, a number that grows along the input (a line number, an offset).
    After a restart everything up to `position` is stored; events that are passed again are
    recognised by their position and skipped. Opening a second writer of the same name fences
    the first one out. Events of one key are stored in the order of writing.
    """

    def __init__(self, target: PackTarget, name: str, packing: Packing, lanes: int = 1) -> None:
        check_name("writer", name)
        if not 1 <= lanes <= LANES_MAX:
            raise ConfigError(f"lanes {lanes!r}: choose 1 to {LANES_MAX} for each partition")
        self.name = name
        self.skipped = 0  # events that were stored before a restart
        self._target = target
        self._packing = packing
        self._max_events = packing.max_events
        self._lanes: list[_Lane] = []
        self._lanes_each = lanes
        self._lane_count = lanes * target.shape.partitions
        self._given = 0  # position of the last event that was given
        self._buffered = 0  # position up to which every event is in its lane's buffer, or stored
        self._note: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lingering: asyncio.Task[None] | None = None
        self._error: MillstreamError | None = None
        self._closed = False

    async def open(self) -> Self:
        """Claim every lane: from now on no older writer of this name can store anything."""
        target = self._target
        target.jetstream.connection.outlets.add(self)
        for partition, prefix in zip(target.partitions, target.shape.prefixes, strict=True):
            for number in range(self._lanes_each):
                subject = fence_subject(prefix, self.name, number)
                fence = FencedLane(
                    target.jetstream,
                    target.publisher,
                    partition.stream,
                    subject,
                    self.name,
                    target.acks,
                )
                self._lanes.append(_Lane(fence, target.value_type))
        await asyncio.gather(*(lane.fence.claim() for lane in self._lanes))
        for lane in self._lanes:
            lane.stored_before = lane.fence.state.position
        return self

    async def _enter(self) -> None:
        await self.open()

    async def _leave(self, error: BaseException | None) -> None:
        if error is None:
            await self.close()
        else:
            await self.abandon()

    @property
    def position(self) -> int:
        """Everything up to here, inclusive, is stored; 0: nothing yet."""
        return min(lane.fence.state.position for lane in self._lanes)

    @property
    def note(self) -> str:
        """The note that was stored with `position`."""
        return min((lane.fence.state for lane in self._lanes), key=lambda s: s.position).note

    def set_note(self, note: str) -> None:
        """Text of your own, stored with the position from now on: at most 1 KiB, one line."""
        self._note = check_note(note)

    # -- writing --------------------------------------------------------------------------

    async def write(
        self,
        value: Any,
        key: str | bytes | None = None,
        *,
        position: int,
        headers: Mapping[str, str] | None = None,
        timestamp: datetime | int | None = None,
        id: str | None = None,
    ) -> None:
        """Add an event; it is stored when its pack is full, after `linger`, or by `flush`."""
        if self._closed or self._error is not None or position <= self._given or not self._lanes:
            self._advance(position, position)  # raises the error for the reason
        self._given = position
        number = 0 if self._lane_count == 1 else self._lane_number(key, position)
        lane = self._lanes[number]
        if position <= lane.stored_before:
            self.skipped += 1
            self._buffered = position
            return
        if headers is None and timestamp is None and id is None:
            lane.buffer.add(value, key)
        else:
            lane.buffer.add_event(value, key, headers, timestamp, id)
        positions = lane.positions
        positions.append(position)
        self._buffered = position
        if len(positions) >= self._max_events or lane.buffer.bytes >= self._packing.max_bytes:
            await self._seal(lane)
        elif self._timer is None:
            self._start_timer()

    async def write_batch(
        self, frame: Any, *, position: int, columns: Columns | None = None
    ) -> None:
        """Add the rows of a frame; the last row has `position`, and each row before it one less.

        Like single events they are stored when packs are full, after `linger`, or by `flush`.
        """
        batches = list(batches_of(frame))
        total = sum(batch.num_rows for batch in batches)
        if not total:
            return
        self._advance(position - total + 1, position)
        first = position - total + 1
        for batch in batches:
            rows = enveloped(batch, columns or Columns(), self._target.value_type)
            # Several lanes: few enough rows to sort a lot while the packs before it are in flight.
            lot = rows.num_rows if self._lane_count == 1 else self._lane_count * self._max_events
            for start in range(0, rows.num_rows, lot):
                parts = self._by_lane(rows.slice(start, lot), first + start)
                # Lanes side by side, each in its own order.
                try:
                    await asyncio.gather(*(self._write_part(lane, part) for lane, part in parts))
                except asyncio.CancelledError:
                    self._interrupted()
                    raise
            first += rows.num_rows
        self._buffered = position
        if any(lane.tail is not None for lane in self._lanes):
            self._start_timer()

    async def _write_part(self, lane: _Lane, part: _Rows) -> None:
        old = part.upto(lane.stored_before)
        self.skipped += old
        if old == part.batch.num_rows:
            return
        if lane.positions:
            await self._seal(lane)
        async with lane.turn:
            await self._send_full(lane, part.slice(old))

    async def _send_full(self, lane: _Lane, rows: _Rows) -> None:
        """Send what fills packs; the rest waits for more."""
        size, tail = self._max_events, lane.tail
        lots = [rows]
        if tail is not None and tail.batch.schema.equals(rows.batch.schema):
            missing = size - tail.batch.num_rows
            lots = [tail.joined(rows.slice(0, missing)), rows.slice(missing)]
        elif tail is not None:
            lots = [tail, rows]
        pieces = [
            piece
            for lot in lots
            if lot.batch.num_rows
            for piece in self._target.split(lot.batch, self._packing)
        ]
        positions = pa.concat_arrays([lot.positions for lot in lots])
        lane.tail = None
        if pieces[-1].num_rows < size:
            last = pieces.pop()
            lane.tail = _Rows(last, positions.slice(len(positions) - last.num_rows))
        await self._send(lane, pieces, lambda done: positions[done - 1].as_py())

    def _advance(self, first: int, last: int) -> None:
        self._check()
        if first <= self._given:
            raise ConfigError(
                f"position {first} after {self._given}: positions must grow from event to event"
            )
        self._given = last

    # -- storing --------------------------------------------------------------------------

    async def flush(self) -> None:
        """Return when everything written so far is stored and `position` includes it."""
        self._check()
        for lane in self._lanes:
            await self._seal(lane)
        for lane in self._lanes:
            async with lane.turn:
                await lane.idle()
                self._check_error()
                waiting = lane.positions or lane.tail is not None  # written since
                if not waiting and lane.fence.state.position < self._buffered:
                    self._start_store(lane, [], self._buffered)
                    await lane.idle()
                    self._check_error()

    async def close(self) -> None:
        """Flush, then take no more."""
        if not self._closed:
            await self.flush()
            await self.abandon()

    async def abandon(self) -> None:
        """Stop without storing what is still buffered; it was never acknowledged."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [lane.store for lane in self._lanes if lane.store is not None]
        if self._lingering is not None:
            tasks.append(self._lingering)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _seal(self, lane: _Lane) -> None:
        """Encode what is buffered as packs and send them."""
        async with lane.turn:
            if lane.tail is not None:
                tail, lane.tail = lane.tail, None
                await self._send(lane, [tail.batch], lambda done: tail.positions[done - 1].as_py())
            if not lane.positions:
                return
            positions, lane.positions = lane.positions, []
            positions[-1] = self._buffered  # nothing at or before this is left for this lane
            try:
                batch = lane.buffer.build(lane.buffer.drain())
                pieces = self._target.split(batch, self._packing)
            except MillstreamError as error:
                self._error = error
                raise
            await self._send(lane, pieces, lambda done: positions[done - 1])

    async def _send(
        self, lane: _Lane, pieces: Sequence[pa.RecordBatch], position_of: Callable[[int], int]
    ) -> None:
        """Send a pack for each piece; `position_of` gives the lane's position after some rows."""
        done, left = 0, len(pieces)
        try:
            for piece in pieces:
                done += piece.num_rows
                pack = self._target.encode(piece, self._packing)
                await lane.idle()
                self._check_error()
                self._start_store(lane, [pack], position_of(done))
                left -= 1
                await asyncio.sleep(0)  # it is sent now, and stored while the next one is encoded
        except MillstreamError as error:
            self._error = self._error or error
            raise
        except asyncio.CancelledError:
            if left:
                self._interrupted()
            raise

    def _interrupted(self) -> None:
        """A call was cancelled while it had events that are in no buffer any more.

        Going on would store a position after them.
        """
        self._error = self._error or Unconfirmed(
            f"a call of writer '{self.name}' was cancelled before its events were stored: open "
            f"the writer again and continue from its position"
        )

    def _start_store(self, lane: _Lane, packs: Sequence[EncodedPack], position: int) -> None:
        """Store in a task of its own: a cancelled caller must not leave it unknown."""
        store = self._store(lane, packs, position)
        lane.store = asyncio.get_running_loop().create_task(store)

    async def _store(self, lane: _Lane, packs: Sequence[EncodedPack], position: int) -> None:
        try:
            await lane.fence.store(packs, position, self._note)
        except MillstreamError as error:
            self._error = error

    def _start_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._packing.linger, self._linger)

    def _linger(self) -> None:
        self._timer = None
        if self._lingering is None or self._lingering.done():
            self._lingering = asyncio.get_running_loop().create_task(self._seal_all())
        else:
            self._start_timer()

    async def _seal_all(self) -> None:
        try:
            for lane in self._lanes:
                await self._seal(lane)
        except MillstreamError as error:
            self._error = error

    def _check(self) -> None:
        if self._closed:
            raise ConnectionClosed(f"writer '{self.name}' is closed")
        if not self._lanes:
            raise ConfigError("open the writer first: async with topic.writer(...) as writer")
        self._check_error()

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- lanes ----------------------------------------------------------------------------

    def _lane_number(self, key: str | bytes | None, position: int) -> int:
        """The lane of an event: by key, or by position, so that it is the same after a restart."""
        value = position if key is None else zlib.crc32(key_bytes(key))
        partitions = self._target.shape.partitions
        partition, lane = value % partitions, value // partitions % self._lanes_each
        return partition * self._lanes_each + lane

    def _by_lane(self, rows: pa.RecordBatch, first: int) -> Iterator[tuple[_Lane, _Rows]]:
        """The rows of each lane, in their order, with their positions."""
        if self._lane_count == 1:
            yield self._lanes[0], _Rows(rows, _counted(first, rows.num_rows))
            return
        numbers = self._lane_numbers(rows, first)
        for number in sorted(numbers.unique().to_pylist()):
            chosen = pc.indices_nonzero(pc.equal(numbers, number))
            positions = pc.add(chosen.cast(pa.int64()), first)
            yield self._lanes[number], _Rows(rows.take(chosen), positions)

    def _lane_numbers(self, rows: pa.RecordBatch, first: int) -> pa.Array:
        """The lane of each row; found once for each key, however many rows it has."""
        if "key" not in rows.schema.names:
            positions = range(first, first + rows.num_rows)
            return pa.array([self._lane_number(None, at) for at in positions], pa.int32())
        keys = rows.column("key").dictionary_encode()
        known = [self._lane_number(key, 0) for key in keys.dictionary.to_pylist()]
        numbers = pa.array(known, pa.int32()).take(keys.indices)
        if not numbers.null_count:
            return numbers
        chosen = [
            self._lane_number(None, first + at) if number is None else number
            for at, number in enumerate(numbers.to_pylist())
        ]
        return pa.array(chosen, pa.int32())


def _counted(first: int, count: int) -> pa.Array:
    """`first` and the numbers after it, without a Python number for each."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), start=first - 1)
