"""Deliveries: events under a lease, to be settled one by one, also inside a pack."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final

from millstream.events.event import NOT_DECODED, Event, Partition, PlainEvent
from millstream.events.unpack import PackEvent, PackMessage
from millstream.wire.message import RawMessage

if TYPE_CHECKING:
    from millstream.messaging.subscriptions.leases import Leases

__all__ = ["Delivery", "PackDelivery", "PackLease", "PlainDelivery"]

ACK: Final = b"+ACK"
TERMINATE: Final = b"+TERM"


class Delivery(Event):
    """An event under a lease. Settle it with `ack`, `nack` or `terminate`; the first one counts.

    Left unsettled, it is delivered again when the lease (the subscription's `ack_wait`) is over.
    The settling calls only queue their message; `ack_sync` waits until the broker has taken it.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def attempt(self) -> int:
        """How many times it has been delivered, this one included."""

    @abstractmethod
    def ack(self) -> None:
        """Done: it will not be delivered again."""

    @abstractmethod
    async def ack_sync(self) -> None:
        """Done, and return only when the broker has confirmed it (the double ack)."""

    @abstractmethod
    def nack(self, delay: float | None = None, reason: str = "nack") -> None:
        """Deliver it again after `delay` seconds; None: as the subscription's backoff says.

        When its deliveries are used up it becomes a dead letter instead, with this reason.
        """

    @abstractmethod
    def extend(self) -> None:
        """Begin the lease anew."""

    @abstractmethod
    def terminate(self, reason: str = "terminated") -> None:
        """Never deliver it again: it becomes a dead letter now."""

    @abstractmethod
    def buried(self) -> None:
        """Called when its dead letter is stored: now the event may go."""


class PlainDelivery(PlainEvent, Delivery):
    """A delivered event that is one message."""

    __slots__ = ("_leases", "_settled")

    def __init__(self, leases: Leases, partition: Partition, raw: RawMessage) -> None:
        self._address = None  # as PlainEvent does, without another call: this is for every event
        self._partition = partition
        self._value = NOT_DECODED
        self.raw = raw
        self._leases = leases
        self._settled = False

    @property
    def attempt(self) -> int:
        return self.address.delivered

    def ack(self) -> None:
        if not self._settled:
            self._settled = True
            self._leases.ack(self.raw.reply)

    async def ack_sync(self) -> None:
        if not self._settled:
            self._settled = True
            await self._leases.settle_sync(self.raw.reply, ACK)

    def nack(self, delay: float | None = None, reason: str = "nack") -> None:
        if self._settled:
            return
        self._settled = True
        settings = self._leases.settings
        if settings.max_deliver is not None and self.attempt >= settings.max_deliver:
            self._leases.bury(self, reason)
        else:
            seconds = settings.delay_after(self.attempt) if delay is None else delay
            self._leases.settle(self.raw.reply, b'-NAK {"delay": %d}' % int(seconds * 1e9))

    def extend(self) -> None:
        if not self._settled:
            self._leases.extend(self.raw.reply)

    def terminate(self, reason: str = "terminated") -> None:
        if not self._settled:
            self._settled = True
            self._leases.bury(self, reason)

    def buried(self) -> None:
        self._leases.settle(self.raw.reply, TERMINATE)


class PackLease:
    """The one lease that the events of a pack share; it ends when the last of them is settled."""

    __slots__ = ("_failures", "_left", "message", "progress", "reply")

    def __init__(self, message: PackMessage, reply: bytes) -> None:
        self.message = message
        self.reply = reply
        self._left = message.pack.count
        self._failures: dict[int, int] = {}  # failed attempts by event, of this lease
        self.progress = True  # an event was settled since the lease was renewed

    def settled(self) -> bool:
        """One event less; whether it was the last."""
        self._left -= 1
        self.progress = True
        return self._left == 0

    @property
    def waiting(self) -> bool:
        """Whether an event of the pack waits for its next attempt."""
        return bool(self._failures)

    def attempt_of(self, index: int) -> int:
        return self.message.address.delivered + self._failures.get(index, 0)

    def failed(self, index: int) -> None:
        self._failures[index] = self._failures.get(index, 0) + 1
        self.progress = True


class PackDelivery(PackEvent, Delivery):
    """A delivered event of a pack: retried or buried alone, its neighbours are not repeated."""

    __slots__ = ("_lease", "_leases", "_settled")

    def __init__(self, leases: Leases, lease: PackLease, index: int, row: tuple[Any, ...]) -> None:
        PackEvent.__init__(self, lease.message, index, row)
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
                await self._leases.end_sync(self._lease)

    def nack(self, delay: float | None = None, reason: str = "nack") -> None:
        if self._settled:
            return
        self._settled = True
        settings = self._leases.settings
        attempt = self.attempt
        if settings.max_deliver is not None and attempt >= settings.max_deliver:
            self._leases.bury(self, reason)
            return
        self._lease.failed(self._index)
        seconds = settings.delay_after(attempt) if delay is None else delay
        row = (self._key, self._time_ns, self._headers, self._id, self._value)
        again = PackDelivery(self._leases, self._lease, self._index, row)
        self._leases.again(again, seconds)

    def extend(self) -> None:
        if not self._settled:
            self._leases.extend(self._lease.reply)

    def terminate(self, reason: str = "terminated") -> None:
        if not self._settled:
            self._settled = True
            self._leases.bury(self, reason)

    def buried(self) -> None:
        self._done()

    def _done(self) -> None:
        if self._lease.settled():
            self._leases.end(self._lease)
