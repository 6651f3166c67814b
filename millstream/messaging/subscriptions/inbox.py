"""The inbox of one member of a subscription: fetches ahead and keeps what waits under its lease."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from millstream.deadline import Deadline
from millstream.errors import ConnectError, RequestTimeout
from millstream.events.classify import OWN_MARK, is_for_another, kind_of
from millstream.events.event import Partition
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.events.unpack import open_pack
from millstream.messaging.subscriptions.delivery import Delivery, PackDelivery, PlainDelivery
from millstream.messaging.subscriptions.leases import Leases, PackLease, StoreDeadLetter
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Prefetch, PullConsumer, Signal
from millstream.wire.message import RawMessage

__all__ = ["Inbox"]

_log = logging.getLogger("millstream.messaging")

TAKE_MESSAGES: Final = 256
# Requested ahead; fewer where deliveries are counted, because an event that was fetched and never
# seen by the application counts as delivered when the process dies.
PREFETCH: Final = 1000
PREFETCH_COUNTED: Final = 100
# A subscription that is moved to before its first start is deleted and created again.
MADE_AGAIN_SECONDS: Final = 1.0
# A broker that runs answers within milliseconds; one that is stalled must not keep a program from
# ending.
ARRIVED_SECONDS: Final = 5.0


class Inbox:
    """Deliveries that were fetched and not handed out. Internal: applications use Subscription.

    The blocking twin takes from `ready` in its own thread.
    """

    def __init__(
        self,
        jetstream: JetStream,
        name: str,
        settings: SubscriptionSettings,
        partitions: Sequence[Partition],
        store_dead_letter: StoreDeadLetter,
    ) -> None:
        self.ready: deque[Delivery] = deque()
        # Messages of each partition to fetch in total; None: no limit. For tools that take a few
        # and leave: nothing is fetched that is not handed out.
        self.fetch_at_most: int | None = None
        self.closed = False
        self._jetstream = jetstream
        self._name = name
        self._settings = settings
        self._partitions = partitions
        self._keys = frozenset(settings.keys)
        self._signal = Signal()
        self.leases: Leases[Delivery] = Leases(
            jetstream.connection, settings, store_dead_letter, self._signal
        )
        self._consumers: list[tuple[Partition, PullConsumer]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.readers = 0  # loops that have an event in hand, and calls of `run`
        self.draining: asyncio.Event | None = None  # set when the last reader is done

    async def refill(self, timeout: float | None = None) -> bool:
        """Have at least one delivery ready; False when closed or the time is up."""
        deadline = None if timeout is None else Deadline(timeout)
        self._start()
        while not self.closed:
            for partition, consumer in self._consumers:
                if partition.learn is not None:
                    await partition.learn(consumer.peek())
            if not self.closed:  # it may be by now
                self._collect()
            if self.ready:
                return True
            if not await self._signal.wait(None if deadline is None else deadline.left()):
                return False
        return False

    async def close(self) -> None:
        """Stop fetching; what was not handed out is given back to the other members."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.leases.give_back(self._waiting(leave=True))
        try:
            try:
                await self._arrived()
            finally:
                stopped = [consumer.stop() for _, consumer in self._consumers]
                self.leases.give_back([late.reply for messages in stopped for late in messages])
            await self.leases.finish()
        finally:
            self._signal.set()  # also when this is cancelled: readers would wait forever

    async def _arrived(self) -> None:
        """Wait for what the server had sent before it knew that this member leaves."""
        connection = self._jetstream.connection
        if self._consumers and connection.connected:
            try:
                await connection.flush(ARRIVED_SECONDS)
            except (ConnectError, RequestTimeout) as error:
                _log.info("messages in flight are redelivered when their leases end: %s", error)

    # -- readers --------------------------------------------------------------------------

    def in_hand(self, change: int) -> None:
        """Count the readers that have an event in hand; `idle` waits for them."""
        self.readers += change
        if self.draining is not None and not self.readers:
            self.draining.set()

    async def idle(self, timeout: float | None) -> None:
        """Wait until no reader has an event in hand; TimeoutError after `timeout` seconds."""
        if self.draining is None or self.draining.is_set():  # else another call waits for it
            self.draining = asyncio.Event()
        self.in_hand(0)
        async with asyncio.timeout(timeout):
            await self.draining.wait()

    # -- filling --------------------------------------------------------------------------

    def _start(self) -> None:
        if self._consumers or self.closed:
            return
        settings = self._settings
        ahead = PREFETCH if settings.max_deliver is None else PREFETCH_COUNTED
        rules = Prefetch(
            messages=min(ahead, settings.max_in_flight),
            total=self.fetch_at_most,
            made_again=MADE_AGAIN_SECONDS,
        )
        for partition in self._partitions:
            consumer = PullConsumer(
                self._jetstream, partition.stream, self._name, rules, self._signal
            )
            self._consumers.append((partition, consumer))
        if settings.ack != "none":
            self._renew()

    def _collect(self) -> None:
        leases = self.leases
        self.ready.extend(leases.retries)
        leases.retries.clear()
        add = self.ready.append if self._settings.max_deliver is None else self._add
        for partition, consumer in self._consumers:
            at = partition.prefix_size
            for raw in consumer.take_now(TAKE_MESSAGES):
                subject, reply, headers, _ = raw
                if subject[at : at + 1] != b"_" and headers.find(OWN_MARK) < 0:
                    add(PlainDelivery(leases, partition, raw))  # as nearly all are
                    continue
                kind = kind_of(subject, headers, at)
                if kind.redriven and is_for_another(headers, self._name):
                    leases.ack(reply)
                elif kind.is_pack:
                    self._add_pack(partition, raw)
                elif kind.is_plain:
                    add(PlainDelivery(leases, partition, raw))
                else:
                    leases.ack(reply)

    def _add(self, delivery: Delivery) -> None:
        limit = self._settings.max_deliver
        if limit is not None and delivery.attempt > limit:
            delivery.terminate(f"not settled in {limit} deliveries")
        else:
            self.ready.append(delivery)

    def _add_pack(self, partition: Partition, raw: RawMessage) -> None:
        try:
            message = open_pack(partition, raw)
            rows = partition.rows(message.pack) if partition.rows else message.pack.events()
        except DECODE_FAILURES as error:
            broken = PlainDelivery(self.leases, partition, raw)
            broken.terminate(reason_of(error))
            return
        lease = PackLease(message, raw.reply)
        deliveries = [
            PackDelivery(self.leases, lease, index, row) for index, row in enumerate(rows)
        ]
        wanted = [d for d in deliveries if not self._keys or d.key in self._keys]
        if not wanted:
            self.leases.ack(raw.reply)
            return
        self.leases.start_pack(lease)
        for delivery in deliveries:
            if not self._keys or delivery.key in self._keys:
                self._add(delivery)
            else:
                delivery.ack()

    # -- leases ---------------------------------------------------------------------------

    def _renew(self) -> None:
        """Renew what waits here and what makes progress, twice within the time of a lease."""
        self.leases.renew(self._waiting(leave=False))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.ack_wait / 2, self._renew)

    def _waiting(self, leave: bool) -> list[bytes]:
        """Ack addresses of the messages that were fetched and not handed out."""
        ready = self.ready.copy()  # a copy: the blocking twin takes from it in its own thread
        replies = [d.raw.reply for d in ready if isinstance(d, PlainDelivery)]
        packs = {d.lease.reply for d in ready if isinstance(d, PackDelivery)}
        for _, consumer in self._consumers:
            replies.extend(m.reply for m in (consumer.leave() if leave else consumer.peek()))
        if leave:
            self.ready.clear()
        return [*replies, *packs]
