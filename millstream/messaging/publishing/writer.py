"""Exactly-once writers: named, fenced, and resumed where they stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

import pyarrow as pa

from millstream.closing import AsyncClosing
from millstream.errors import ConfigError, ConnectionClosed, MillstreamError, Unconfirmed
from millstream.events.fence import check_note, fence_subject
from millstream.events.packs.pack import EncodedPack
from millstream.events.packs.packing import Packing
from millstream.events.positions import Position, Positions, as_position, order_of
from millstream.events.row_buffer import Columns, batches_of, enveloped
from millstream.events.subject import check_name
from millstream.messaging.publishing.ahead_lane import AheadLane
from millstream.messaging.publishing.target import PackTarget
from millstream.messaging.publishing.writer_lane import Lane, LaneRows, Notes, Spread

__all__ = ["Writer"]

LANES_MAX: Final = 64
_NO_PAIR: Final = (-1, -1)  # before every pair


class Writer(AsyncClosing):
    """Writes each event exactly once, no matter how often it is killed and restarted.

    Every event has a position, a number that grows along the input (a line number, an offset), or
    a pair (major, minor) that grows like a word: the number of a commit, and that of the change
    in it. After a restart everything up to `position` is stored; events that are passed
    again are recognised by their position and skipped. Opening a second writer of the same name
    fences the first one out. Events of one key are stored in the order of writing.
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
        self._lanes: list[Lane] = []
        self._spread = Spread(target.shape.partitions, lanes)
        self._kind: type = type(None)  # of positions: int or tuple, when there is one
        self._given: Any = 0  # position of the last event that was given
        # Position up to which every event is in its lane's buffer, or stored.
        self._buffered: Position = 0
        self._notes = Notes()
        self._next_note: str | None = None  # of the next event
        self._timer: asyncio.TimerHandle | None = None
        self._lingering: asyncio.Task[None] | None = None
        self._error: MillstreamError | None = None
        self._closed = False

    async def open(self) -> Self:
        """Claim every lane: from now on no older writer of this name can store anything."""
        target = self._target
        target.jetstream.connection.outlets.add(self)
        share = max(1, self._packing.max_in_flight // self._spread.count)
        for partition, prefix in zip(target.partitions, target.shape.prefixes, strict=True):
            for number in range(self._spread.lanes):
                subject = fence_subject(prefix, self.name, number)
                fence = AheadLane(target, partition.stream, subject, self.name, share)
                self._lanes.append(Lane(fence, target.value_type))
        await asyncio.gather(*(lane.fence.claim() for lane in self._lanes))
        for lane in self._lanes:
            lane.stored_before = lane.fence.state.place
            if lane.stored_before:
                self._set_kind(lane.stored_before)
        return self

    async def _enter(self) -> None:
        await self.open()

    async def _leave(self, error: BaseException | None) -> None:
        if error is None:
            await self.close()
        else:
            await self.abandon()

    @property
    def position(self) -> Any:  # an int or a pair: the caller knows which of them it writes
        """Everything up to here, inclusive, is stored: a number or a pair, as it was given.

        0 while nothing is stored, whichever of the two is written then.
        """
        return min((lane.fence.state.place for lane in self._lanes), key=order_of)

    @property
    def note(self) -> str:
        """The note of the last position up to `position` that was given one; "" without any."""
        edge, found, note = order_of(self.position), (-1, -1), ""
        for state in [lane.fence.state for lane in self._lanes]:
            # A note that was stored by an earlier version belongs to the position beside it.
            place = order_of(state.place if state.noted is None else state.noted)
            known = bool(state.note) or state.noted is not None
            if known and found < place <= edge:
                found, note = place, state.note
        return note

    def set_note(self, note: str) -> None:
        """Text of your own for the next event's position: at most 1 KiB, one line.

        Like `note=` of that event. It is stored with the event, never before it.
        """
        self._next_note = check_note(note)

    # -- writing --------------------------------------------------------------------------

    async def write(
        self,
        value: Any,
        key: str | bytes | None = None,
        *,
        position: Position,
        headers: Mapping[str, str] | None = None,
        timestamp: datetime | int | None = None,
        id: str | None = None,
        note: str | None = None,
    ) -> None:
        """Add an event; it is stored when its pack is full, after `linger`, or by `flush`.

        `note` is text of your own about this position (see `note`), at most 1 KiB and one line.
        """
        if (
            self._closed
            or self._error is not None
            or type(position) is not self._kind
            or position <= self._given
        ):
            position = self._checked(position)  # raises the error for the reason
        self._given = position
        number = 0 if self._spread.count == 1 else self._spread.lane(key, position)
        lane = self._lanes[number]
        if position <= lane.stored_before:  # type: ignore[operator]  # of one kind
            self.skipped += 1
            self._buffered = position
            if note is not None or self._next_note is not None:
                self._note_at(position, note)
            return
        if headers is None and timestamp is None and id is None:
            lane.buffer.add(value, key)
        else:
            lane.buffer.add_event(value, key, headers, timestamp, id)
        positions = lane.positions
        positions.append(position)
        self._buffered = position
        if note is not None or self._next_note is not None:
            self._note_at(position, note)
        if len(positions) >= self._max_events or lane.buffer.bytes >= self._packing.max_bytes:
            await self._seal(lane)
        elif self._timer is None:
            self._start_timer()

    async def write_batch(
        self,
        frame: Any,
        *,
        position: Position | None = None,
        positions: Any = None,
        columns: Columns | None = None,
        note: str | None = None,
        whole: bool = False,
    ) -> None:
        """Add the rows of a frame, each with a position of its own.

        With `position` the last row has it, and each row before it one less (of a pair: one less
        in its minor part). `positions` gives one for each row: the name of a column of whole
        numbers, or an Arrow array of them; for pairs two of these, `positions=("lsn", "number")`.
        Columns that are named are not part of the value. `note` belongs to the last row.

        Like single events they are stored when packs are full, after `linger`, or by `flush`. With
        `whole` the rows of one batch are one unit in each lane: all of them are stored in one step,
        with their position and note, or none is.
        """
        if (position is None) == (positions is None):
            raise ConfigError("give the position of the last row, or positions: one for each row")
        table = pa.Table.from_batches(batches) if (batches := list(batches_of(frame))) else None
        if table is None or not table.num_rows:
            return
        if positions is None:
            places = Positions.up_to(as_position(position), table.num_rows)
        else:
            places = Positions.given(positions, table)
        first, last = self._checked(places.at(0)), places.at(len(places) - 1)
        if self._next_note is not None:
            self._note_at(first, None)
        if note is not None:
            self._note_at(last, note)
        self._given = last
        names, done = _names(positions), 0
        try:
            for batch in batches:
                rows = enveloped(batch, columns or Columns(), self._target.value_type, names)
                await self._write_rows(rows, places.slice(done, rows.num_rows), whole)
                done += rows.num_rows
        except BaseException:
            self._notes.withdraw(first)
            raise
        self._buffered = last
        if any(lane.tail is not None for lane in self._lanes):
            self._start_timer()

    async def _write_rows(self, rows: pa.RecordBatch, places: Positions, whole: bool) -> None:
        # Several lanes: few enough rows to sort a lot while the packs before it are in flight.
        count = self._spread.count
        lot = rows.num_rows if count == 1 or whole else count * self._max_events
        for start in range(0, rows.num_rows, max(1, lot)):
            parts = self._spread.parts(rows.slice(start, lot), places.slice(start, lot))
            # Lanes side by side, each in its own order.
            try:
                await asyncio.gather(
                    *(self._write_part(self._lanes[number], part, whole) for number, part in parts)
                )
            except asyncio.CancelledError:
                self._interrupted()
                raise

    async def advance(self, position: Position, note: str | None = None) -> None:
        """Store a position without an event, and its note; returns when they are stored.

        Everything that was written before is stored too. For an input that has nothing to write
        up to a position (a heartbeat), or that ends a part of its work there (a snapshot). After a
        restart a position that is stored already changes nothing; one before the last event of
        this writer is refused, and that event's own position may get a note.
        """
        position = self._checked(position, again=True)
        if note is not None or self._next_note is not None:
            self._note_at(position, note)
        self._given = self._buffered = position
        await self.flush()

    async def _write_part(self, lane: Lane, part: LaneRows, whole: bool) -> None:
        old = part.positions.upto(lane.stored_before)
        self.skipped += old
        if old == part.batch.num_rows:
            return
        if lane.positions or (whole and lane.tail is not None):
            await self._seal(lane)
        async with lane.turn:
            if whole:
                await self._send_unit(lane, part.slice(old))
            else:
                await self._send_full(lane, part.slice(old))

    async def _send_unit(self, lane: Lane, rows: LaneRows) -> None:
        """Send rows as packs that are stored in one step."""
        try:
            pieces = self._target.split(rows.batch, self._packing)
            packs = [self._target.encode(piece, self._packing) for piece in pieces]
        except MillstreamError as error:
            self._error = self._error or error
            raise
        await lane.idle()
        self._check_error()
        self._start_store(lane, packs, rows.positions.at(rows.batch.num_rows - 1))
        await asyncio.sleep(0)  # it is sent now, and stored while the next one is encoded

    async def _send_full(self, lane: Lane, rows: LaneRows) -> None:
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
        positions = Positions.joined([lot.positions for lot in lots])
        lane.tail = None
        if pieces[-1].num_rows < size:
            last = pieces.pop()
            lane.tail = LaneRows(last, positions.slice(len(positions) - last.num_rows))
        await self._send(lane, pieces, lambda done: positions.at(done - 1))

    def _checked(self, given: Any, again: bool = False) -> Position:
        """The position if it may come next; `again`: it may be the last one once more."""
        self._check()
        position = as_position(given)
        self._set_kind(position)
        if order_of(position) < order_of(self._given) or (position == self._given and not again):
            raise ConfigError(
                f"position {position} after {self._given}: positions must grow from event to event"
            )
        return position

    def _set_kind(self, position: Position) -> None:
        """Refuse a number among pairs and a pair among numbers: they have no order."""
        kind = type(position)
        if self._kind is kind:
            return
        if self._kind is not type(None):
            words = {int: "numbers", tuple: "pairs (major, minor)"}
            raise ConfigError(
                f"position {position}: the positions of writer '{self.name}' are "
                f"{words[self._kind]}, and the two kinds have no order. Go on with them, or use "
                f"a writer of another name"
            )
        self._kind = kind
        if kind is tuple:  # "nothing so far", comparable to pairs
            self._given = self._given or _NO_PAIR
            for lane in self._lanes:
                lane.stored_before = lane.stored_before or _NO_PAIR

    def _note_at(self, position: Position, note: str | None) -> None:
        """Bind a note, or the one that was set for the next event, to a position."""
        chosen = self._next_note if note is None else check_note(note)
        self._next_note = None
        self._notes.add(position, chosen or "")
        if self._notes.many:
            busy = [lane.fence.state.place for lane in self._lanes if lane.busy]
            self._notes.forget(min([*busy, self._buffered], key=order_of))

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
                if not waiting and self._is_behind(lane):
                    self._start_store(lane, [], self._buffered)
                    await lane.idle()
                    self._check_error()

    def _is_behind(self, lane: Lane) -> bool:
        """Whether a lane does not say yet what is stored: its position, or the note of it."""
        stored = order_of(lane.fence.state.place)
        if stored != order_of(self._buffered):
            return stored < order_of(self._buffered)
        note = self._note_for(lane, self._buffered)
        return note is not None and note != (lane.fence.state.noted, lane.fence.state.note)

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
        tasks = [store for lane in self._lanes for store in lane.stores]
        if self._lingering is not None:
            tasks.append(self._lingering)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _seal(self, lane: Lane) -> None:
        """Encode what is buffered as packs and send them."""
        async with lane.turn:
            if lane.tail is not None:
                tail, lane.tail = lane.tail, None
                await self._send(lane, [tail.batch], lambda done: tail.positions.at(done - 1))
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
        self, lane: Lane, pieces: Sequence[pa.RecordBatch], position_of: Callable[[int], Position]
    ) -> None:
        """Send a pack for each piece; `position_of` gives the lane's position after some rows."""
        done, left = 0, len(pieces)
        try:
            for piece in pieces:
                done += piece.num_rows
                pack = self._target.encode(piece, self._packing)
                await lane.room()
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

    def _start_store(self, lane: Lane, packs: Sequence[EncodedPack], position: Position) -> None:
        """Store in a task of its own: a cancelled caller must not leave it unknown."""
        store = self._store(lane, packs, position, self._note_for(lane, position))
        lane.stores.append(asyncio.get_running_loop().create_task(store))

    async def _store(
        self,
        lane: Lane,
        packs: Sequence[EncodedPack],
        position: Position,
        found: tuple[Position, str] | None,
    ) -> None:
        noted, note = found or (None, None)
        try:
            await lane.fence.store(packs, position, note, noted)
        except MillstreamError as error:
            self._error = self._error or error

    def _note_for(self, lane: Lane, position: Position) -> tuple[Position, str] | None:
        """The note that a lane stores with a position; None: the one it has stays."""
        found, state = self._notes.at(position), lane.fence.state
        if found is None or (
            state.noted is not None and order_of(found[0]) < order_of(state.noted)
        ):
            return None  # after a restart the lane may be ahead of what is given again
        return found

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


def _names(positions: Any) -> list[str]:
    """The columns among what a caller gave as positions."""
    parts = positions if isinstance(positions, tuple | list) else [positions]
    return [part for part in parts if isinstance(part, str)]
