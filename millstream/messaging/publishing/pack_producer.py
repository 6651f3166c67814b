"""The producer of packs: many events in one message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final

import pyarrow as pa

from millstream.closing import AsyncClosing
from millstream.errors import (
    ConnectionClosed,
    MillstreamError,
    PartlyStored,
    Unconfirmed,
    Unfit,
)
from millstream.events.event import ID_HEADER, FullTopic, Receipt
from millstream.events.lots import Lot, LotLimits, lots_of
from millstream.events.packs.pack import EncodedPack
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import (
    Columns,
    RowBuffer,
    Rows,
    batches_of,
    by_partition,
    enveloped,
)
from millstream.events.subject import KEY_BYTES_MAX, PACK_TOKEN
from millstream.messaging.publishing.counters import ProducerCounters
from millstream.messaging.publishing.target import PackTarget
from millstream.wire.api import PubAck
from millstream.wire.protocol import unique_token

__all__ = ["PackProducer"]

PUBLISH_SECONDS: Final = 30.0
# Refused packs that are kept for the error at the end; beyond this they are only counted.
FAILURES_KEPT: Final = 1000


def _same(ack: PubAck) -> PubAck:
    return ack


class PackProducer(AsyncClosing):
    """Collects events into packs and stores them, several packs in flight. At least once.

    Events wait `linger` seconds at most for others. Events of a key are stored in order, unless a
    pack had to be sent again. Leaving `async with` returns when everything is stored, except what
    PartlyStored names: events that do not fit the schema, packs that the broker refused.
    For exactly once use a writer.
    """

    def __init__(
        self,
        target: PackTarget,
        packing: Packing,
        overload: FullTopic = "refuse",
        block_seconds: float = PUBLISH_SECONDS,
    ) -> None:
        self._target = target
        self._packing = packing
        self._blocks = overload == "block"
        self._seconds = block_seconds if self._blocks else PUBLISH_SECONDS
        self._name = f"p{unique_token(12)}"
        count = target.shape.partitions
        self._buffers = [RowBuffer(target.value_type) for _ in range(count)]
        self._subjects = [f"{p}.{PACK_TOKEN}.{self._name}" for p in target.shape.prefixes]
        self._indexes: list[list[int]] = [[] for _ in range(count)]  # of events in the buffers
        # Pieces to be sent, with the index of their first event. Some are left when the caller that
        # waited to send them was cancelled; the next one sends them.
        self._ready: list[deque[tuple[pa.RecordBatch, int]]] = [deque() for _ in range(count)]
        self._order = [asyncio.Lock() for _ in range(count)]  # packs are sent in their order
        self._turn = 0
        self._packs = 0
        self._in_flight = 0
        self._room: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lingering: asyncio.Task[None] | None = None
        # Events that may still be added to the only buffer without anything else being due, and
        # how many they were at first: most events need no more.
        self._quick = self._quick_first = 0
        self._add_value = self._add_key = self._buffers[0].values.append
        self._taken = self._stored = self._refused_ever = self._unconfirmed = 0
        self._refused = 0
        self._failed: dict[int, MillstreamError] = {}
        self._closed = False
        self.last: Receipt | None = None  # of the last pack that was acknowledged
        target.jetstream.connection.outlets.add(self)

    async def _leave(self, error: BaseException | None) -> None:
        try:
            await self.close()
        except PartlyStored:
            if error is None:
                raise

    @property
    def counters(self) -> ProducerCounters:
        """What became of the events so far; those in packs to come are waiting."""
        answered = self._stored + self._refused_ever + self._unconfirmed
        taken = self._taken + self._quick_first - self._quick
        return ProducerCounters(
            taken,
            self._stored,
            self._refused_ever,
            self._unconfirmed,
            taken - answered,
        )

    # -- taking events --------------------------------------------------------------------

    async def send(
        self,
        value: Any,
        key: str | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: datetime | int | None = None,
        id: str | None = None,
    ) -> None:
        """Add an event; waits only while too many packs are in flight."""
        plain = headers is None and timestamp is None and id is None
        if (
            self._quick
            and plain
            and (key is None or (type(key) is str and key.isascii() and len(key) <= KEY_BYTES_MAX))
        ):
            self._quick -= 1
            self._add_value(value)
            self._add_key(key)
            return
        self._end_quick()
        self._check_open()
        partition = 0 if len(self._buffers) == 1 else self._partition(key)
        buffer = self._buffers[partition]
        if plain:
            buffer.add(value, key)
        else:
            buffer.add_event(value, key, headers, timestamp, id)
        self._indexes[partition].append(self._taken)
        self._taken += 1
        if self._is_full(buffer):
            await self._seal(partition)
            return
        self._start_timer()
        if len(self._buffers) == 1 and buffer.plain and self._target.value_type is not None:
            self._start_quick(buffer)

    async def send_many(
        self,
        values: Iterable[Any],
        keys: Iterable[str | bytes | None] | None = None,
        *,
        key: str | None = None,
    ) -> None:
        """Add many events, faster than one by one; waits while too many packs are in flight.

        `keys` has one for each value; or `key` names the field of the values that is their key:
        text, bytes, or a whole number, which becomes text. A list is checked first: after a
        ConfigError nothing of it was taken. Other iterables are taken and checked in lots of a
        pack's size. A value that does not fit the schema is treated as in `send`: the others are
        stored, and PartlyStored names it in the end.
        """
        self._check_open()
        count = len(self._buffers)
        limits = LotLimits(self._packing.max_events * count, self._packing.max_bytes)
        for lot in lots_of(values, keys, key, self._target.value_type, limits):
            self._check_open()
            self._end_quick()
            for partition in self._take(lot):
                while self._is_full(self._buffers[partition]):
                    await self._seal(partition, self._packing.max_events)
            self._start_timer()

    def _take(self, lot: Lot) -> list[int]:
        """Add a lot to the buffers, all of it before anything waits; the partitions it is in."""
        first, count = self._taken, len(self._buffers)
        if count == 1:
            self._buffers[0].add_lot(lot)
            self._taken += len(lot)
            self._indexes[0].extend(range(first, self._taken))
            return [0]
        keys = lot.real_keys()
        partition_of = {key: self._partition(key) for key in set(keys) if key is not None}
        numbers: list[list[int]] = [[] for _ in range(count)]  # of the events for each partition
        for number, key in enumerate(keys):
            partition = self._partition(None) if key is None else partition_of[key]
            numbers[partition].append(number)
        self._taken += len(lot)
        used = [partition for partition, chosen in enumerate(numbers) if chosen]
        for partition in used:
            self._buffers[partition].add_lot(lot.select(numbers[partition]))
            self._indexes[partition].extend(first + number for number in numbers[partition])
        return used

    async def send_batch(self, frame: Any, columns: Columns | None = None) -> None:
        """Take the rows of an Arrow batch or table, or of a pandas or Polars frame."""
        self._check_open()
        for batch in batches_of(frame):
            if not batch.num_rows:
                continue
            rows = enveloped(batch, columns or Columns(), self._target.value_type)
            self._end_quick()
            first, self._taken = self._taken, self._taken + batch.num_rows
            self._turn = (self._turn + 1) % len(self._buffers)
            parts = by_partition(rows, len(self._buffers), self._turn)
            for partition, part in parts:
                self._drain(partition)  # what was sent before comes first
                self._make_ready(partition, part, first)
            for partition, _ in parts:
                await self._send_ready(partition)

    def _partition(self, key: str | bytes | None) -> int:
        return self._target.shape.route(key)[0]

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionClosed("the producer is closed")

    def _is_full(self, buffer: RowBuffer) -> bool:
        return len(buffer) >= self._packing.max_events or buffer.bytes >= self._packing.max_bytes

    def _start_quick(self, buffer: RowBuffer) -> None:
        """Let `send` do no more than add events, until the next one would fill the pack."""
        self._quick = self._quick_first = self._packing.max_events - 1 - len(buffer)
        self._add_value, self._add_key = buffer.values.append, buffer.keys.append

    def _end_quick(self) -> None:
        """Count what `send` only added."""
        if self._quick_first:
            first, self._taken = self._taken, self._taken + self._quick_first - self._quick
            self._indexes[0].extend(range(first, self._taken))
            self._quick = self._quick_first = 0

    def _start_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._packing.linger, self._linger)

    # -- sending packs --------------------------------------------------------------------

    async def flush(self) -> None:
        """Return when everything taken so far is stored; PartlyStored names what is not."""
        for partition in range(len(self._buffers)):
            await self._seal(partition)
        while self._in_flight:
            await self._wait()
        if self._refused:
            count, failed = self._refused, self._failed
            self._refused, self._failed = 0, {}
            raise PartlyStored(self._taken, failed, count)
        await self._target.acks.check()

    async def close(self) -> None:
        """Flush, then take no more."""
        if self._closed:
            return
        self._end_quick()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._lingering is not None:
            await asyncio.gather(self._lingering, return_exceptions=True)
        await self.flush()

    async def _seal(self, partition: int, most: int | None = None) -> None:
        """Encode what is buffered for a partition as packs and send them; at most `most` events."""
        async with self._order[partition]:
            await self._send_in_order(partition)
            self._drain(partition, most)
            await self._send_in_order(partition)

    def _drain(self, partition: int, most: int | None = None) -> None:
        """Make what is buffered for a partition ready to be sent."""
        self._end_quick()
        buffer, indexes = self._buffers[partition], self._indexes[partition]
        if not len(buffer):
            return
        rows = buffer.drain(most)
        self._indexes[partition] = indexes[rows.count :]
        try:
            parts = [(buffer.build(rows), indexes[0])]
        except Unfit:
            parts = self._fit_parts(buffer, rows, indexes)
        for batch, first in parts:
            self._make_ready(partition, batch, first)

    def _make_ready(self, partition: int, batch: pa.RecordBatch, first: int) -> None:
        """Cut a batch into pieces that each fit a pack."""
        try:
            pieces = self._target.split(batch, self._packing)
        except MillstreamError as error:
            self._refuse(first, batch.num_rows, error)
            raise
        for piece in pieces:
            self._ready[partition].append((piece, first))
            first += piece.num_rows

    def _fit_parts(
        self, buffer: RowBuffer, rows: Rows, indexes: list[int]
    ) -> list[tuple[pa.RecordBatch, int]]:
        """The rows that fit, found by halving; each that does not is recorded as refused."""
        try:
            return [(buffer.build(rows), indexes[0])]
        except Unfit as unfit:
            if rows.count == 1:
                self._refuse(indexes[0], 1, unfit)
                return []
        left, right = rows.halves()
        return [
            *self._fit_parts(buffer, left, indexes[: left.count]),
            *self._fit_parts(buffer, right, indexes[left.count :]),
        ]

    async def _send_ready(self, partition: int) -> None:
        async with self._order[partition]:
            await self._send_in_order(partition)

    async def _send_in_order(self, partition: int) -> None:
        """Send what is ready, each piece as a pack; whoever calls this has the partition's lock."""
        ready, publisher = self._ready[partition], self._target.publisher
        while ready:
            piece, first = ready[0]
            try:
                await self._target.acks.check()
                pack = self._target.encode(piece, self._packing)
            except MillstreamError as error:
                ready.popleft()
                self._refuse(first, piece.num_rows, error)
                continue
            while self._in_flight >= self._packing.max_in_flight:
                await self._wait()
            if publisher.full:
                await publisher.wait_for_space()
            ready.popleft()  # from here on nothing waits until it is under way
            self._publish(partition, pack, first)
            await asyncio.sleep(0)  # it is sent now, and stored while the next one is encoded

    def _publish(self, partition: int, pack: EncodedPack, first: int) -> None:
        self._packs += 1
        pairs = [(ID_HEADER, f"{self._name}-{self._packs}")]
        message = pack.message(self._subjects[partition], pairs)
        try:
            publisher = self._target.publisher
            future = publisher.publish(message, self._seconds, _same, self._blocks)
        except MillstreamError as error:
            self._refuse(first, pack.count, error)
            raise
        self._in_flight += 1
        future.add_done_callback(partial(self._settled, first, pack.count, partition))

    def _settled(
        self, first: int, count: int, partition: int, done: asyncio.Future[PubAck]
    ) -> None:
        self._in_flight -= 1
        error = done.exception()
        if error is None:
            ack = done.result()
            self._stored += count
            topic = self._target.shape.topic
            durability = self._target.acks.stated[partition]
            self.last = Receipt(topic, partition, ack.seq, ack.duplicate, durability)
        elif isinstance(error, MillstreamError):
            self._refuse(first, count, error)
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    def _refuse(self, first: int, count: int, error: MillstreamError) -> None:
        self._refused += count
        if isinstance(error, Unconfirmed | ConnectionClosed):
            self._unconfirmed += count
        else:
            self._refused_ever += count
        if len(self._failed) < FAILURES_KEPT:
            self._failed[first] = error

    async def _wait(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    def _linger(self) -> None:
        self._timer = None
        if self._lingering is None or self._lingering.done():
            self._lingering = asyncio.get_running_loop().create_task(self._seal_all())
        else:
            self._start_timer()

    async def _seal_all(self) -> None:
        for partition in range(len(self._buffers)):
            await self._seal(partition)
