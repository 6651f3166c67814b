"""The inbox of one member of a subscription: fetches ahead and keeps what waits under its lease."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from millstream.deadline import Deadline, lease_clock
from millstream.errors import (
    ApiError,
    ConnectError,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
)
from millstream.events.classify import OWN_MARK, is_for_another, kind_of
from millstream.events.event import Event, Partition, place_of
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.events.unpack import open_pack
from millstream.failure_log import FailureLog
from millstream.messaging.dead_letters.store import DeadLetterStore
from millstream.messaging.subscriptions.delivery import Delivery, PackDelivery, PlainDelivery
from millstream.messaging.subscriptions.leases import Leases, PackLease
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Prefetch, PullConsumer, Signal
from millstream.wire.api import parse_ack_address
from millstream.wire.lost import check, lost_ranges
from millstream.wire.message import RawMessage
from millstream.wire.protocol import HEADERS_END

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
# For an answer whether events were lost, also when a reader waits for less.
CHECK_SECONDS_MIN: Final = 1.0
# A request for messages ends before the leases of those that were sent last: a process that stands
# still gets no second copy of what it has, which would only use up deliveries.
PULL_SHARE: Final = 0.4
PULL_SECONDS_MIN: Final = 0.25
PULL_SECONDS_MAX: Final = 30.0
# Renewals after which a pack that was interrupted is not expected here any more.
INTERRUPTED_RENEWALS: Final = 4


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
        dead_letters: DeadLetterStore,
    ) -> None:
        self.ready: deque[Delivery] = deque()
        # Messages of each partition to fetch in total; None: no limit. For tools that take a few
        # and leave: nothing is fetched that is not handed out.
        self.fetch_at_most: int | None = None
        self.closed = False
        self._jetstream = jetstream
        self._name = name
        self._settings = settings
        self.dead_letter_topic = dead_letters.topic
        self.failures = FailureLog(_log)
        self._partitions = partitions
        # How the ack addresses of first deliveries begin, where the server adds no domain to them.
        self._first = {p.number: f"$JS.ACK.{p.stream}.{name}.1.".encode() for p in partitions}
        self._streams = {partition.number: partition.stream for partition in partitions}
        self._keys = frozenset(settings.keys)
        self._signal = Signal()
        self.leases: Leases[Delivery] = Leases(
            jetstream.connection, settings, dead_letters.store, self._is_settled, self._signal
        )
        self._consumers: list[tuple[Partition, PullConsumer]] = []
        self._timer: asyncio.TimerHandle | None = None
        # On the lease clock: until then the leases of all that waits here are valid.
        self._sure_until = float("inf")
        self._copies: dict[int, PlainDelivery] = {}  # by id: those of `ready` delivered before
        self._interrupted: dict[tuple[str, int], tuple[PackLease, list[PackDelivery]]] = {}
        self._renewals = 0  # since the interruption
        self._check_loss = True  # the broker may have noted a loss since
        jetstream.connection.on_connected.append(self._reconnected)
        self.readers = 0  # loops that have an event in hand, and calls of `run`
        self.draining: asyncio.Event | None = None  # set when the last reader is done

    def take(self) -> Delivery | None:
        """The next delivery whose lease is valid; None: there is none here."""
        if lease_clock() > self._sure_until:
            self._start_over()
        ready = self.ready
        try:
            while True:
                delivery = ready.popleft()
                if not self._copies or self._is_wanted(delivery):
                    return delivery
        except IndexError:  # also when another thread was faster
            return None

    @property
    def in_doubt(self) -> bool:
        """Whether some of `ready` may have to be dropped, which `take` does on the loop."""
        return bool(self._copies) or lease_clock() > self._sure_until

    async def refill(self, timeout: float | None = None) -> bool:
        """Have at least one delivery ready; False when closed or the time is up."""
        deadline = None if timeout is None else Deadline(timeout)
        self._start()
        while not self.closed:
            if self._check_loss:
                await self._check_losses(None if deadline is None else deadline.left())
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

    def _reconnected(self) -> None:
        self._check_loss = True  # it may have been restarted
        self._signal.set()

    async def _check_losses(self, left: float | None) -> None:
        """DataLoss if the broker has lost events that the subscription has not settled."""
        patience = None if left is None else max(CHECK_SECONDS_MIN, left)
        if self._settings.fail_on_data_loss:
            for partition in self._partitions:
                try:
                    config = (await self._jetstream.stream_info(partition.stream, patience)).config
                    if lost_ranges(config):
                        info = await self._jetstream.consumer_info(partition.stream, self._name)
                        check(config, info.ack_floor.stream_seq + 1)
                except PermissionDenied:
                    continue  # a user that may not ask gets no warning
                except (ApiError, ConnectError, NoResponders, RequestTimeout) as error:
                    self._jetstream.connection.check_open()
                    _log.debug("losses of %s are looked for later: %s", partition.stream, error)
                    return  # a broker that is away delivers nothing
        self._check_loss = False

    async def close(self) -> None:
        """Stop fetching; what was not handed out is given back to the other members."""
        if self.closed:
            return
        self.closed = True
        if self._connection_closed in self._jetstream.connection.on_closed:
            self._jetstream.connection.on_closed.remove(self._connection_closed)
        if self._timer is not None:
            self._timer.cancel()
        if self._reconnected in self._jetstream.connection.on_connected:
            self._jetstream.connection.on_connected.remove(self._reconnected)
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

    def _connection_closed(self) -> None:
        """Hand out nothing more: it could not be settled, and others get it."""
        self._waiting(leave=True)
        self._signal.set()

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
        lasting = max(PULL_SECONDS_MIN, settings.ack_wait * PULL_SHARE)
        rules = Prefetch(
            messages=min(ahead, settings.max_in_flight),
            expires=min(lasting, PULL_SECONDS_MAX),
            total=self.fetch_at_most,
            made_again=MADE_AGAIN_SECONDS,
        )
        for partition in self._partitions:
            consumer = PullConsumer(
                self._jetstream, partition.stream, self._name, rules, self._signal
            )
            self._consumers.append((partition, consumer))
        self._jetstream.connection.on_closed.append(self._connection_closed)
        if settings.ack != "none":
            self._sure_until = lease_clock() + settings.ack_wait
            self._renew()

    def _collect(self) -> None:
        leases = self.leases
        while leases.retries:
            self._add_retry(leases.retries.popleft())
        add = self.ready.append
        for partition, consumer in self._consumers:
            at = partition.prefix_size
            first = self._first[partition.number]
            for raw in consumer.take_late():
                leases.copies.dropped(parse_ack_address(raw.reply))
            for raw in consumer.take_now(TAKE_MESSAGES):
                subject, reply, headers, _ = raw
                if not reply.startswith(first):
                    self._collect_copy(partition, raw)
                elif (
                    subject[at : at + 1] not in (b"_", b"")
                    and headers.find(OWN_MARK) < 0
                    and (not headers or headers.endswith(HEADERS_END))
                ):
                    add(PlainDelivery(leases, partition, raw))  # as nearly all are
                else:
                    self._sort(partition, raw)

    def _collect_copy(self, partition: Partition, raw: RawMessage) -> None:
        """A message that was delivered before, here or to another member."""
        copies, address = self.leases.copies, parse_ack_address(raw.reply)
        interrupted = self._interrupted.pop((address.stream, address.sequence), None)
        if copies.is_settled(address):
            self.leases.ack(raw.reply)  # again: the first ack may be lost
        elif copies.is_handled_now(address):
            copies.dropped(address)
        elif interrupted is not None:
            lease, waiting = interrupted
            copies.dropped(address)
            self.leases.pack_again(lease, raw.reply)
            self.ready.extend(waiting)
        else:
            self._sort(partition, raw, copies.attempt(address), address.delivered > 1)

    def _sort(
        self, partition: Partition, raw: RawMessage, attempt: int = 1, is_copy: bool = False
    ) -> None:
        """Hand out a message as what it is; ack what is not for this subscription."""
        subject, reply, headers, _ = raw
        kind = kind_of(subject, headers, partition.prefix_size)
        if kind.redriven and is_for_another(headers, self._name):
            self.leases.ack(reply)
        elif kind.is_pack:
            self._add_pack(partition, raw, attempt)
        elif kind.is_plain:
            delivery = PlainDelivery(self.leases, partition, raw, attempt)
            if self._add(delivery) and is_copy:
                self._copies[id(delivery)] = delivery
        else:
            self.leases.ack(reply)

    def _add(self, delivery: Delivery) -> bool:
        """Hand out a delivery; False when it had all of its attempts."""
        limit = self._settings.max_deliver
        if limit is None or delivery.attempt <= limit:
            self.ready.append(delivery)
            return True
        self._give_up(delivery, f"not settled in {limit} deliveries")
        return False

    def _give_up(self, delivery: Delivery, reason: str) -> None:
        """Make a dead letter of an event that no handler here has seen."""
        self.failures.warn(
            None,
            "subscription '%s': %s becomes a dead letter in '%s', attempt %d: %s",
            *(self._name, place_of(delivery), self.dead_letter_topic, delivery.attempt, reason),
        )
        delivery.terminate(reason)

    async def _is_settled(self, event: Event) -> bool:
        """Whether a member that had the event before has settled it, however late."""
        stream = self._streams[event.partition]
        try:
            info = await self._jetstream.consumer_info(stream, self._name)
        except PermissionDenied:
            return False
        return info.ack_floor.stream_seq >= event.offset

    def _add_retry(self, delivery: Delivery) -> None:
        """Hand out an event of a pack, or have it wait for the pack's next copy."""
        if isinstance(delivery, PackDelivery) and delivery.lease.over:
            if delivery.lease.key in self._interrupted:
                self._interrupted[delivery.lease.key][1].append(delivery)
        else:
            self.ready.append(delivery)

    def _is_wanted(self, delivery: Delivery) -> bool:
        """Whether nobody here settled or handles what was delivered again while it waited."""
        copy = self._copies.pop(id(delivery), None)
        if copy is None:
            return True
        copies = self.leases.copies
        if copies.is_handled_now(copy.address):
            copies.dropped(copy.address)
            return False
        return not copies.is_settled(copy.address)

    def _add_pack(self, partition: Partition, raw: RawMessage, attempt: int) -> None:
        try:
            message = open_pack(partition, raw)
            values = message.values()
        except DECODE_FAILURES as error:
            self._give_up(PlainDelivery(self.leases, partition, raw, attempt), reason_of(error))
            return
        lease = PackLease(message, raw.reply, attempt)
        deliveries = [
            PackDelivery(self.leases, lease, index, value) for index, value in enumerate(values)
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
        now, span = lease_clock(), self._settings.ack_wait
        connected = self._jetstream.connection.connected
        waiting = self._waiting(leave=False)
        if now > self._sure_until:
            self._start_over()
        elif connected:
            self.leases.renew(waiting)
            self._sure_until = now + span
        elif not waiting:
            self._sure_until = now + span  # what comes when the connection is back is new
        if connected:  # else acks wait to be sent, and copies may come before they are handled
            self.leases.copies.forget_old()
        self._renewals += 1
        if self._interrupted and self._renewals > INTERRUPTED_RENEWALS:
            self._forget_interrupted()
        self._timer = asyncio.get_running_loop().call_later(span / 2, self._renew)

    def _start_over(self) -> None:
        """The process was paused, or had no connection, for longer than a lease.

        What waits here belongs to others by now, or comes again: it is dropped. What is asked for
        from now on is new. Events of packs wait for the next copy of their pack, because others of
        the same pack may be in hand.
        """
        _log.warning(
            "subscription %s: leases were not renewed in time; what waited is fetched again",
            self._name,
        )
        self._forget_interrupted()
        for lease in self.leases.packs_over():
            self._interrupted[lease.key] = lease, []
        self._renewals = 0
        dropped: list[bytes] = []
        for delivery in self._empty_ready():
            if isinstance(delivery, PlainDelivery):
                dropped.append(delivery.raw.reply)
            else:
                self._add_retry(delivery)
        self._copies.clear()
        for _, consumer in self._consumers:
            dropped.extend(raw.reply for raw in consumer.start_over())
        for reply in dropped:
            self.leases.copies.dropped(parse_ack_address(reply))
        self._sure_until = lease_clock() + self._settings.ack_wait

    def _empty_ready(self) -> list[Delivery]:
        """All that waits; one by one, because the blocking twin takes from it in its own thread."""
        found: list[Delivery] = []
        try:
            while True:
                found.append(self.ready.popleft())
        except IndexError:
            return found

    def _forget_interrupted(self) -> None:
        for lease, _ in self._interrupted.values():
            self.leases.drop_pack(lease)
        self._interrupted.clear()

    def _waiting(self, leave: bool) -> list[bytes]:
        """Ack addresses of the messages that were fetched and not handed out."""
        ready = self.ready.copy()  # a copy: the blocking twin takes from it in its own thread
        replies = [d.raw.reply for d in ready if isinstance(d, PlainDelivery)]
        packs = {d.lease.reply for d in ready if isinstance(d, PackDelivery)}
        for _, consumer in self._consumers:
            replies.extend(m.reply for m in (consumer.leave() if leave else consumer.peek()))
        if leave:
            self.ready.clear()
            self._copies.clear()
        return [*replies, *packs]
