"""The producer of packs: many events in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import (
    Columns,
    RowBuffer,
    Rows,
    batches_of,
    by_partition,
    enveloped,
)
from millstream.events.subject import PACK_TOKEN
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
        self._order = [asyncio.Lock() for _ in range(count)]  # packs are sent in their order
        self._turn = 0
        self._packs = 0
        self._in_flight = 0
        self._room: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lingering: asyncio.Task[None] | None = None
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
        return ProducerCounters(
            self._taken,
            self._stored,
            self._refused_ever,
            self._unconfirmed,
            self._taken - answered,
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
        if self._closed:
            raise ConnectionClosed("the producer is closed")
        partition = 0 if len(self._buffers) == 1 else self._partition(key)
        buffer = self._buffers[partition]
        if headers is None and timestamp is None and id is None:
            buffer.add(value, key)
        else:
            buffer.add_event(value, key, headers, timestamp, id)
        self._indexes[partition].append(self._taken)
        self._taken += 1
        if len(buffer) >= self._packing.max_events or buffer.bytes >= self._packing.max_bytes:
            await self._seal(partition)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._packing.linger, self._linger)

    async def send_batch(self, frame: Any, columns: Columns | None = None) -> None:
        """Take the rows of an Arrow batch or table, or of a pandas or Polars frame."""
        if self._closed:
            raise ConnectionClosed("the producer is closed")
        for batch in batches_of(frame):
            if not batch.num_rows:
                continue
            rows = enveloped(batch, columns or Columns(), self._target.value_type)
            first, self._taken = self._taken, self._taken + batch.num_rows
            self._turn = (self._turn + 1) % len(self._buffers)
            for partition, part in by_partition(rows, len(self._buffers), self._turn):
                await self._seal(partition)
                async with self._order[partition]:
                    await self._send(partition, part, first)

    def _partition(self, key: str | bytes | None) -> int:
        return self._target.shape.route(key)[0]

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
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._lingering is not None:
            await asyncio.gather(self._lingering, return_exceptions=True)
        await self.flush()

    async def _seal(self, partition: int) -> None:
        """Encode what is buffered for a partition as packs and send them."""
        async with self._order[partition]:
            buffer = self._buffers[partition]
            if not len(buffer):
                return
            rows, indexes = buffer.drain(), self._indexes[partition]
            self._indexes[partition] = []
            try:
                parts = [(buffer.build(rows), indexes[0])]
            except Unfit:
                parts = self._fit_parts(buffer, rows, indexes)
            for batch, first in parts:
                await self._send(partition, batch, first)

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

    async def _send(self, partition: int, batch: pa.RecordBatch, first: int) -> None:
        publisher = self._target.publisher
        try:
            await self._target.acks.check()
        except MillstreamError as error:
            self._refuse(first, batch.num_rows, error)
            return
        for piece in self._target.split(batch, self._packing):
            pack = self._target.encode(piece, self._packing)
            while self._in_flight >= self._packing.max_in_flight:
                await self._wait()
            if publisher.full:
                await publisher.wait_for_space()
            self._packs += 1
            pairs = [(ID_HEADER, f"{self._name}-{self._packs}")]
            message = pack.message(self._subjects[partition], pairs)
            self._in_flight += 1
            future = publisher.publish(message, self._seconds, _same, self._blocks)
            future.add_done_callback(partial(self._settled, first, piece.num_rows, partition))
            first += piece.num_rows

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

    async def _seal_all(self) -> None:
        for partition in range(len(self._buffers)):
            await self._seal(partition)
