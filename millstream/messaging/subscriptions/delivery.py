"""Deliveries: events under a lease, settled one by one, also inside a pack."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

from millstream.events.event import NOT_DECODED, Event, Partition, PlainEvent
from millstream.events.pack_event import PackEvent
from millstream.messaging.subscriptions.leases import Leases, PackLease
from millstream.wire.message import RawMessage

__all__ = ["Delivery", "PackDelivery", "PlainDelivery"]


class Delivery(Event):
    """An event under a lease. Settle it with `ack`, `nack` or `terminate`; the first one counts.

    If it is not settled, it is redelivered when the lease (the subscription's `ack_wait`) ends.
    These calls only queue their message; `ack_sync` waits until the broker has confirmed it.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def attempt(self) -> int:
        """Which attempt to handle it this is, from 1: deliveries that were never seen do not count.

        What only other members had, counts: they may have died of it.
        """

    @abstractmethod
    def ack(self) -> None:
        """Confirm that it is handled; it will not be redelivered."""

    @abstractmethod
    async def ack_sync(self) -> None:
        """Ack, and return only when the broker has confirmed it."""

    @abstractmethod
    def nack(self, delay: float | None = None, reason: str = "nack") -> None:
        """Have it redelivered after `delay` seconds; None: after the subscription's backoff.

        After the last of `max_deliver` attempts it becomes a dead letter with this reason instead.
        """

    @abstractmethod
    def extend(self) -> None:
        """Extend the lease (restarts `ack_wait`)."""

    @abstractmethod
    def terminate(self, reason: str = "terminated") -> None:
        """Give up: it becomes a dead letter now and is not redelivered."""


class PlainDelivery(PlainEvent, Delivery):
    """A delivered event that is one message."""

    __slots__ = ("_attempt", "_leases", "_settled")

    def __init__(
        self, leases: Leases[Delivery], partition: Partition, raw: RawMessage, attempt: int = 1
    ) -> None:
        self._address = None  # as PlainEvent does, without another call: this runs for every event
        self._partition = partition
        self._value = NOT_DECODED
        self.raw = raw
        self._leases = leases
        self._attempt = attempt
        self._settled = False

    @property
    def attempt(self) -> int:
        return self._attempt

    def ack(self) -> None:
        if not self._settled:
            self._settled = True
            self._leases.ack(self.raw.reply)

    async def ack_sync(self) -> None:
        if not self._settled:
            self._settled = True
            await self._leases.ack_sync(self.raw.reply)

    def nack(self, delay: float | None = None, reason: str = "nack") -> None:
        if self._settled:
            return
        self._settled = True
        settings = self._leases.settings
        if settings.max_deliver is not None and self.attempt >= settings.max_deliver:
            self._dead_letter(reason)
        else:
            seconds = settings.delay_after(self.attempt) if delay is None else delay
            self._leases.nack(self.raw.reply, seconds)

    def extend(self) -> None:
        if not self._settled:
            self._leases.extend(self.raw.reply)

    def terminate(self, reason: str = "terminated") -> None:
        if not self._settled:
            self._settled = True
            self._dead_letter(reason)

    def _dead_letter(self, reason: str) -> None:
        stored = partial(self._leases.terminate, self.raw.reply)
        self._leases.dead_letter(self, reason, self.attempt, stored)


class PackDelivery(PackEvent, Delivery):
    """A delivered event of a pack: retried or dead-lettered on its own."""

    __slots__ = ("_lease", "_leases", "_settled")

    def __init__(self, leases: Leases[Delivery], lease: PackLease, index: int, value: Any) -> None:
        self._message = lease.message  # as PackEvent does, without another call
        self._index = index
        self._value = value
        self._leases = leases
        self._lease = lease
        self._settled = False

    @property
    def attempt(self) -> int:
        return self._lease.attempt_of(self._index)

    @property
    def lease(self) -> PackLease:
        return self._lease

    def ack(self) -> None:
        if not self._settled:
            self._settled = True
            self._done()

    async def ack_sync(self) -> None:
        if not self._settled:
            self._settled = True
            if self._lease.settled():
                await self._leases.end_pack_sync(self._lease)

    def nack(self, delay: float | None = None, reason: str = "nack") -> None:
        if self._settled:
            return
        self._settled = True
        settings = self._leases.settings
        attempt = self.attempt
        if settings.max_deliver is not None and attempt >= settings.max_deliver:
            self._dead_letter(reason)
            return
        self._lease.failed(self._index)
        seconds = settings.delay_after(attempt) if delay is None else delay
        again = PackDelivery(self._leases, self._lease, self._index, self._value)
        self._leases.retry(again, seconds)

    def extend(self) -> None:
        if not self._settled:
            self._leases.extend(self._lease.reply)

    def terminate(self, reason: str = "terminated") -> None:
        if not self._settled:
            self._settled = True
            self._dead_letter(reason)

    def _dead_letter(self, reason: str) -> None:
        self._leases.dead_letter(self, reason, self.attempt, self._done)

    def _done(self) -> None:
        if self._lease.settled():
            self._leases.end_pack(self._lease)
