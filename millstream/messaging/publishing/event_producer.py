"""A producer of plain events: many in flight, with back-pressure; closing it waits for all acks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from millstream.closing import AsyncClosing
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    MillstreamError,
    PartlyStored,
    Unconfirmed,
)
from millstream.events.event import PublishOptions, Receipt
from millstream.messaging.publishing.counters import ProducerCounters
from millstream.messaging.publishing.event_publisher import EventPublisher

__all__ = ["EventProducer"]

# Failures that are kept for the error at the end; beyond this they are only counted.
FAILURES_KEPT: Final = 1000


class EventProducer(AsyncClosing):
    """Publishes single events with many in flight. At least once; with ids, each stored once.

    `send` waits only while the window is full. Leaving `async with` waits for every ack; when
    events were refused, PartlyStored names them.
    """

    def __init__(self, publisher: EventPublisher, max_in_flight: int) -> None:
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight {max_in_flight!r}: must be 1 or more")
        self._publisher = publisher
        self._stream_publisher = publisher.stream_publisher
        self._acks = publisher.acks
        self._max = max_in_flight
        self._in_flight = 0
        self._room: asyncio.Future[None] | None = None
        self._wake_at = 0
        self._sent = self._stored = self._refused = self._unconfirmed = 0
        self._failed: dict[int, MillstreamError] = {}
        self._failures = 0
        self._closed = False

    async def _leave(self, error: BaseException | None) -> None:
        try:
            await self.close()
        except PartlyStored:
            if error is None:  # an error of the block itself is not hidden
                raise

    @property
    def sent(self) -> int:
        """Events sent so far, acknowledged or not."""
        return self._sent

    @property
    def counters(self) -> ProducerCounters:
        """What became of the events so far; those without an answer are waiting."""
        return ProducerCounters(
            self._sent, self._stored, self._refused, self._unconfirmed, self._in_flight
        )

    async def send(
        self,
        value: Any,
        key: str | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: datetime | int | None = None,
        id: str | None = None,
        options: PublishOptions | None = None,
    ) -> asyncio.Future[Receipt]:
        """Hand over an event; the future gives its receipt. Waits while the window is full."""
        if self._closed:
            raise ConnectionClosed("the producer is closed")
        if options is not None and options.require_interest and self._publisher.interest:
            raise ConfigError(
                "require_interest: an event producer does not wait to see who wants each event. "
                "Use publish or publish_many"
            )
        if self._acks.demanded:
            await self._acks.check()
        while self._in_flight >= self._max or self._stream_publisher.full:
            await self._wait()
        future = self._publisher.publish(value, key, headers, timestamp, id, options)
        self._stream_publisher.watch(future, self, self._sent)
        self._sent += 1
        self._in_flight += 1
        return future

    async def flush(self) -> None:
        """Return when every event sent so far is stored; PartlyStored when some are not."""
        while self._in_flight:
            await self._wait(all_of_them=True)
        if self._failures:
            failed, total, count = self._failed, self._sent, self._failures
            self._failed, self._failures = {}, 0
            raise PartlyStored(total, failed, count)
        await self._acks.check()

    async def close(self) -> None:
        """Flush, then take no more."""
        self._closed = True
        await self.flush()

    async def _wait(self, all_of_them: bool = False) -> None:
        if self._in_flight < self._max and not all_of_them:
            await self._stream_publisher.wait_for_space()
            return
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        self._wake_at = 0 if all_of_them else self._max - max(1, self._max // 4)
        await asyncio.shield(self._room)

    def stored(self, count: int) -> None:
        """Internal: called by the publisher when events are stored."""
        self._stored += count
        self._answered(count)

    def failed(self, index: int, error: Exception) -> None:
        """Internal: called by the publisher when an event is not stored, or may not be."""
        if isinstance(error, Unconfirmed | ConnectionClosed):
            self._unconfirmed += 1
        else:
            self._refused += 1
        self._failures += 1
        if len(self._failed) < FAILURES_KEPT and isinstance(error, MillstreamError):
            self._failed[index] = error
        self._answered(1)

    def abandoned(self) -> None:
        """Internal: called by the publisher when the future of an event was cancelled."""
        self._unconfirmed += 1
        self._answered(1)

    def _answered(self, count: int) -> None:
        self._in_flight -= count
        if self._room is not None and self._in_flight <= self._wake_at:
            self._room.set_result(None)
            self._room = None
