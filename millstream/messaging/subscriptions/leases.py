"""What happens to messages after they are handed out: acks, retries, dead letters, renewal."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from millstream.deadline import Deadline
from millstream.errors import ConnectError, MillstreamError, NoResponders, RequestTimeout
from millstream.events.event import Event, place_of
from millstream.events.pack_event import PackMessage
from millstream.messaging.subscriptions.copies import Copies
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.protocol import pub

__all__ = ["Leases", "PackLease", "StoreDeadLetter"]

_log = logging.getLogger("millstream.messaging")

ACK: Final = b"+ACK"
NACK: Final = b"-NAK"
TERMINATE: Final = b"+TERM"
EXTEND: Final = b"+WPI"
# An ack that meets an election is lost without an answer, so one attempt waits only this long.
ATTEMPT_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.05
# Dead letters that are stored at the same time; more wait until one of them is done.
STORING_MAX: Final = 64

StoreDeadLetter = Callable[[Event, str, int], Awaitable[None]]
IsSettled = Callable[[Event], Awaitable[bool]]
D = TypeVar("D", bound=Event)


class PackLease:
    """The one lease that the events of a pack share; it ends when the last of them is settled."""

    __slots__ = ("_attempt", "_failures", "_left", "message", "over", "progress", "reply")

    def __init__(self, message: PackMessage, reply: bytes, attempt: int) -> None:
        self.message = message
        self.reply = reply
        self._attempt = attempt
        self._left = message.pack.count
        self._failures: dict[int, int] = {}  # failed attempts of each event during this lease
        self.progress = True  # an event was settled since the lease was renewed
        self.over = False  # not renewed in time: the pack belongs to whoever gets it next

    @property
    def key(self) -> tuple[str, int]:
        address = self.message.address
        return address.stream, address.sequence

    def settled(self) -> bool:
        """Count one more settled event; True if it was the last."""
        self._left -= 1
        self.progress = True
        return self._left == 0

    @property
    def waiting(self) -> bool:
        """Whether an event of the pack waits for its next attempt."""
        return bool(self._failures)

    def attempt_of(self, index: int) -> int:
        return self._attempt + self._failures.get(index, 0)

    def failed(self, index: int) -> None:
        self._failures[index] = self._failures.get(index, 0) + 1
        self.progress = True


class Leases(Generic[D]):
    """The leases of one member of a subscription. Knows messages by their ack addresses."""

    def __init__(
        self,
        connection: Connection,
        settings: SubscriptionSettings,
        store_dead_letter: StoreDeadLetter,
        is_settled: IsSettled,
        signal: Signal,
    ) -> None:
        self.settings = settings
        self._connection = connection
        self._store_dead_letter = store_dead_letter
        self._is_settled = is_settled
        self._signal = signal
        self.copies = Copies()
        self._loop = asyncio.get_running_loop()
        self._packs: set[PackLease] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._storing: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(STORING_MAX)
        self.retries: deque[D] = deque()  # events of packs whose next attempt is due
        self.settled = 0

    # -- one message ----------------------------------------------------------------------

    def ack(self, reply: bytes) -> None:
        self.settled += 1
        self.copies.settled(reply)
        self._connection.send(b"PUB %b 4\r\n+ACK\r\n" % reply)

    def nack(self, reply: bytes, seconds: float) -> None:
        """Have it delivered again after some seconds."""
        self._settle(reply, b'-NAK {"delay": %d}' % int(seconds * 1e9))

    def terminate(self, reply: bytes) -> None:
        """Have it never delivered again."""
        self.copies.settled(reply)
        self._settle(reply, TERMINATE)

    def _settle(self, reply: bytes, answer: bytes) -> None:
        self.settled += 1
        self._connection.send(pub(reply, b"", answer))

    async def ack_sync(self, reply: bytes) -> None:
        """Ack and wait for the broker's reply; repeated when that is lost, which does no harm."""
        self.settled += 1
        connection = self._connection
        deadline = Deadline(connection.settings.request_timeout)
        while True:
            attempt = deadline.left(at_most=ATTEMPT_SECONDS)
            try:
                await connection.request(reply.decode(), ACK, timeout=attempt, asks_again=True)
                self.copies.settled(reply)
                return
            except (RequestTimeout, NoResponders, ConnectError):
                connection.check_open()
                if deadline.passed:
                    raise
            await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))

    def extend(self, reply: bytes) -> None:
        """Restart its lease."""
        self._connection.send(pub(reply, b"", EXTEND))

    def retry(self, delivery: D, seconds: float) -> None:
        """Hand out an event of a pack again after some seconds, on its own."""
        timer: asyncio.TimerHandle

        def due() -> None:
            self._timers.discard(timer)
            self.retries.append(delivery)
            self._signal.set()

        timer = self._loop.call_later(seconds, due)
        self._timers.add(timer)

    def dead_letter(
        self, event: Event, reason: str, attempts: int, stored: Callable[[], None]
    ) -> None:
        """Store a dead letter, then call `stored`; if storing fails the event is redelivered."""
        work = self._dead_letter(event, reason, attempts, stored)
        task = self._loop.create_task(work)
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _dead_letter(
        self, event: Event, reason: str, attempts: int, stored: Callable[[], None]
    ) -> None:
        limit = self.settings.max_deliver or attempts
        async with self._slots:
            try:
                # Beyond the limit it was not handed out here: another member may be done with it.
                if attempts <= limit or not await self._is_settled(event):
                    await self._store_dead_letter(event, reason, min(attempts, limit))
            except MillstreamError as error:
                _log.warning(
                    "dead letter not stored, %s will be redelivered: %s", place_of(event), error
                )
            else:
                stored()

    # -- packs ----------------------------------------------------------------------------

    def start_pack(self, lease: PackLease) -> None:
        self._packs.add(lease)

    def packs_over(self) -> list[PackLease]:
        """The open packs, whose leases are over from now on."""
        for lease in self._packs:
            lease.over = True
        return list(self._packs)

    def pack_again(self, lease: PackLease, reply: bytes) -> None:
        """A pack whose lease was over was delivered here again."""
        lease.reply, lease.over, lease.progress = reply, False, True

    def drop_pack(self, lease: PackLease) -> None:
        self._packs.discard(lease)

    def end_pack(self, lease: PackLease) -> None:
        """Ack a pack, all of whose events are settled."""
        self._packs.discard(lease)
        self.ack(lease.reply)

    async def end_pack_sync(self, lease: PackLease) -> None:
        self._packs.discard(lease)
        await self.ack_sync(lease.reply)

    # -- all messages of the member -------------------------------------------------------

    def give_back(self, waiting: list[bytes]) -> None:
        """Have messages that were not handed out delivered to other members immediately."""
        if self._connection.closed:
            return  # their leases run out
        try:
            for reply in waiting:
                self._settle(reply, NACK)
        except ConnectError as error:
            _log.info("messages not handed out are redelivered when their leases end: %s", error)

    def renew(self, waiting: list[bytes]) -> None:
        """Renew the leases of messages not handed out yet and of packs that make progress.

        A pack is not renewed when none of its events was settled since the last time, so that
        another member gets it if this one hangs.
        """
        if not self._connection.connected:
            return
        alive = [
            lease for lease in self._packs if not lease.over and (lease.progress or lease.waiting)
        ]
        for lease in self._packs:
            lease.progress = False
        try:
            for reply in (*waiting, *(lease.reply for lease in alive)):
                self.extend(reply)
        except ConnectError as error:
            _log.info("leases not renewed: %s", error)

    async def finish(self) -> None:
        """Wait until dead letters are stored; retries in memory are left to the server."""
        for timer in self._timers:
            timer.cancel()
        if self._storing:
            await asyncio.gather(*self._storing, return_exceptions=True)
