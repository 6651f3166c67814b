"""What happens to deliveries after they are handed out: settling, retries, burial, renewal."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from millstream.deadline import Deadline
from millstream.errors import ConnectError, MillstreamError, NoResponders, RequestTimeout
from millstream.events.event import Event
from millstream.messaging.subscriptions.delivery import ACK, Delivery, PackLease
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.protocol import pub

__all__ = ["Leases"]

_log = logging.getLogger("millstream.messaging")

EXTEND: Final = b"+WPI"
# An ack that meets an election is lost in silence, so one try waits only this long.
ATTEMPT_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.05
# Dead letters that are being stored at the same time; more wait for their turn.
BURIALS_MAX: Final = 64

StoreDeadLetter = Callable[[Event, str, int], Awaitable[None]]


class Leases:
    """Settles the deliveries of one subscription's member."""

    def __init__(
        self,
        connection: Connection,
        settings: SubscriptionSettings,
        store_dead_letter: StoreDeadLetter,
        signal: Signal,
    ) -> None:
        self.settings = settings
        self._connection = connection
        self._store_dead_letter = store_dead_letter
        self._signal = signal
        self._loop = asyncio.get_running_loop()
        self._packs: set[PackLease] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(BURIALS_MAX)
        self.retries: deque[Delivery] = deque()  # events of packs whose next attempt is due
        self.settled = 0

    # -- called by deliveries -------------------------------------------------------------

    def ack(self, reply: bytes) -> None:
        """`settle` with the usual word."""
        self.settled += 1
        self._connection.send(b"PUB %b 4\r\n+ACK\r\n" % reply)

    def settle(self, reply: bytes, word: bytes) -> None:
        self.settled += 1
        self._connection.send(pub(reply, b"", word))

    async def settle_sync(self, reply: bytes, word: bytes) -> None:
        """Settle and wait for the broker's word; asked again when that is lost: twice is once."""
        self.settled += 1
        connection = self._connection
        deadline = Deadline(connection.settings.request_timeout)
        while True:
            attempt = deadline.left(at_most=ATTEMPT_SECONDS)
            try:
                await connection.request(reply.decode(), word, timeout=attempt, asks_again=True)
                return
            except (RequestTimeout, NoResponders, ConnectError):
                connection.check_open()
                if deadline.passed:
                    raise
            await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))

    def extend(self, reply: bytes) -> None:
        self._connection.send(pub(reply, b"", EXTEND))

    def again(self, delivery: Delivery, seconds: float) -> None:
        """Hand out an event of a pack again after a while, alone."""
        timer: asyncio.TimerHandle

        def due() -> None:
            self._timers.discard(timer)
            self.retries.append(delivery)
            self._signal.set()

        timer = self._loop.call_later(seconds, due)
        self._timers.add(timer)

    def bury(self, delivery: Delivery, reason: str) -> None:
        """Store a dead letter, then settle the event; if that fails the event comes again."""
        task = self._loop.create_task(self._bury(delivery, reason))
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        async with self._gate:
            try:
                await self._store_dead_letter(delivery, reason, delivery.attempt)
            except MillstreamError as error:
                _log.warning("dead letter not stored, %r will come again: %s", delivery, error)
            else:
                delivery.buried()

    # -- packs ----------------------------------------------------------------------------

    def begin(self, lease: PackLease) -> None:
        self._packs.add(lease)

    def end(self, lease: PackLease) -> None:
        self._packs.discard(lease)
        self.settle(lease.reply, ACK)

    async def end_sync(self, lease: PackLease) -> None:
        self._packs.discard(lease)
        await self.settle_sync(lease.reply, ACK)

    # -- called by the subscription -------------------------------------------------------

    def give_back(self, waiting: list[bytes]) -> None:
        """Have messages that were not handed out delivered to others, now rather than later."""
        if self._connection.closed:
            return  # their leases run out
        try:
            for reply in waiting:
                self.settle(reply, b"-NAK")
        except ConnectError as error:
            _log.info("messages not handed out come again when their leases end: %s", error)

    def renew(self, waiting: list[bytes]) -> None:
        """Renew the leases of messages not handed out yet and of packs that make progress.

        A pack none of whose events was settled since the last time is left to run out, so that
        another member gets it when this one hangs.
        """
        if not self._connection.connected:
            return
        alive = [lease for lease in self._packs if lease.progress or lease.waiting]
        for lease in self._packs:
            lease.progress = False
        try:
            for reply in (*waiting, *(lease.reply for lease in alive)):
                self.extend(reply)
        except ConnectError as error:
            _log.info("leases not renewed: %s", error)

    async def finish(self) -> None:
        """Wait for dead letters that are being stored; retries in memory are left to the server."""
        for timer in self._timers:
            timer.cancel()
        if self._burials:
            await asyncio.gather(*self._burials, return_exceptions=True)
