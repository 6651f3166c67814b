"""Durable subscriptions: shared by members, at least once, under leases."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from millstream.closing import AsyncClosing
from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    ConnectError,
    MillstreamError,
    PackError,
    RequestTimeout,
    SchemaError,
)
from millstream.events.classify import OWN_MARK, is_for_another, kind_of
from millstream.events.event import Partition
from millstream.events.unpack import open_pack
from millstream.messaging.dead_letters.store import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.subscriptions.admin import Subscriptions
from millstream.messaging.subscriptions.delivery import (
    Delivery,
    PackDelivery,
    PackLease,
    PlainDelivery,
)
from millstream.messaging.subscriptions.leases import Leases
from millstream.messaging.subscriptions.rate_limit import Pace
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.aio.pull_consumer import Prefetch, PullConsumer, Signal
from millstream.wire.message import RawMessage

__all__ = ["Handler", "Reject", "Subscription", "join_subscription"]

_log = logging.getLogger("millstream.messaging")

TAKE_MESSAGES: Final = 256
# Asked for ahead; fewer where deliveries are counted, because an event that was fetched and never
# seen by the application counts as delivered when the process dies.
PREFETCH: Final = 1000
PREFETCH_COUNTED: Final = 100
CONCURRENCY_MAX: Final = 10_000
# Moving a subscription to before its first start makes it anew under its members.
MADE_AGAIN_SECONDS: Final = 1.0
# A broker that is there says within milliseconds that nothing is under way; one that stands still
# must not keep a program from ending.
ARRIVED_SECONDS: Final = 5.0

Handler = Callable[[Delivery], Awaitable[None] | None]


class Reject(MillstreamError):
    """Raise it in a handler to make the event a dead letter without further tries."""


class Subscription(AsyncClosing):
    """One member of a durable subscription. At least once: every event is delivered until settled.

    Members of the same name share the events; order across members, and after a retry, is not
    kept (see groups for that). Use it as `async with`, then `async for`, `pull` or `run`.
    """

    def __init__(
        self,
        jetstream: JetStream,
        name: str,
        settings: SubscriptionSettings,
        partitions: Sequence[Partition],
        dead_letters: DeadLetterStore,
    ) -> None:
        self.name = name
        self.settings = settings
        self._jetstream = jetstream
        self._partitions = partitions
        self._signal = Signal()
        self._leases = Leases(jetstream.connection, settings, dead_letters.store, self._signal)
        self._lanes: list[tuple[Partition, PullConsumer]] = []
        self._ready: deque[Delivery] = deque()
        self._keys = frozenset(settings.keys)
        self._timer: asyncio.TimerHandle | None = None
        self._pace = Pace(settings.rate_limit) if settings.rate_limit else None
        self._closed = False
        self._readers = 0  # loops that have an event in hand, and calls of `run`
        self._idle: asyncio.Event | None = None  # there while a drain waits for the readers
        jetstream.connection.intakes.add(self)
        self.prefetch = PREFETCH if settings.max_deliver is None else PREFETCH_COUNTED
        # Messages of each partition to fetch in all; None: without end. For who takes a few and
        # leaves: nothing is fetched that is not handed out.
        self.fetch_at_most: int | None = None

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop; what was fetched and not handed out is given back to the other members at once."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._leases.give_back(self._waiting(leave=True))
        try:
            await self._arrived()
        finally:
            late = [message.reply for _, lane in self._lanes for message in lane.stop()]
            self._leases.give_back(late)
        await self._leases.finish()
        self._signal.set()

    async def drain(self, timeout: float | None = None) -> None:
        """Close, then wait until the handlers that run, or the loops that read, have ended.

        RequestTimeout when they have not after `timeout` seconds (None: wait for them).
        """
        await self.close()
        self._idle = asyncio.Event()
        self.in_hand(0)
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError as error:
            hint = ": handlers still ran, drain gave up"
            raise RequestTimeout(self.name, timeout or 0, hint) from error

    async def _arrived(self) -> None:
        """Wait for what the server had sent before it knew that this member leaves."""
        connection = self._jetstream.connection
        if self._lanes and connection.connected:
            try:
                await connection.flush(ARRIVED_SECONDS)
            except (ConnectError, RequestTimeout) as error:
                _log.info("messages under way come again when their leases end: %s", error)

    def in_hand(self, change: int) -> None:
        """Count the readers that have an event in hand; `drain` waits for them."""
        self._readers += change
        if self._idle is not None and not self._readers:
            self._idle.set()

    @property
    def settled(self) -> int:
        """How many messages this member has settled."""
        return self._leases.settled

    # -- receiving ------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Deliveries one by one, until the subscription is closed."""
        ready, pace = self._ready, self._pace
        while True:
            while ready:
                if pace is not None:
                    await pace.wait()
                    if not ready:
                        break  # it was closed, or another reader was faster
                self._readers += 1
                try:
                    yield ready.popleft()
                finally:
                    self._readers -= 1
                    if self._idle is not None:
                        self.in_hand(0)
            if not await self.refill():
                return

    @property
    def ready(self) -> deque[Delivery]:
        """Deliveries that are here and not handed out; other threads may `popleft` too."""
        return self._ready

    async def pull(self, at_most: int = 100, timeout: float | None = 5.0) -> list[Delivery]:
        """Up to `at_most` deliveries: what is here, or the first that come within the time."""
        if at_most < 1:
            raise ConfigError(f"at_most {at_most!r}: ask for at least one")
        if not self._ready and not await self.refill(timeout):
            return []
        count = min(at_most, len(self._ready))
        if self._pace is not None:
            await self._pace.wait(count)
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    async def run(self, handler: Handler, concurrency: int = 1) -> None:
        """Call the handler for every event until the subscription is closed.

        When it returns the event is acked; when it raises, nacked with the error as reason (with
        `Reject`: a dead letter at once). With `concurrency` 1 events are handled in the order of
        delivery. While a handler runs its lease is renewed. Plain functions run in a thread.
        """
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise ConfigError(f"concurrency {concurrency!r}: choose 1 to {CONCURRENCY_MAX:,}")
        call = handler if inspect.iscoroutinefunction(handler) else _in_thread(handler)
        self.in_hand(1)
        try:
            await self._run(call, asyncio.Semaphore(concurrency))
        finally:
            self.in_hand(-1)

    async def _run(
        self, call: Callable[[Delivery], Awaitable[None]], slots: asyncio.Semaphore
    ) -> None:
        failure: MillstreamError | None = None
        async with asyncio.TaskGroup() as tasks:
            await slots.acquire()
            try:
                async for delivery in self:
                    tasks.create_task(self._handle(call, delivery, slots))
                    await slots.acquire()
            except MillstreamError as error:
                failure = error  # raised when the handlers have ended, and not as a group of one
        if failure is not None:
            raise failure

    async def _handle(
        self,
        call: Callable[[Delivery], Awaitable[None]],
        delivery: Delivery,
        slots: asyncio.Semaphore,
    ) -> None:
        renewal = asyncio.get_running_loop().create_task(self._keep(delivery))
        try:
            try:
                await call(delivery)
            except Reject as rejected:
                delivery.terminate(str(rejected) or "rejected")
            except Exception as error:
                delivery.nack(reason=f"{type(error).__name__}: {error}")
            else:
                delivery.ack()
        except ConnectError as error:
            _log.warning("%r was handled but not settled, it will come again: %s", delivery, error)
        finally:
            renewal.cancel()
            slots.release()

    async def _keep(self, delivery: Delivery) -> None:
        while True:
            await asyncio.sleep(self.settings.ack_wait / 2)
            try:
                delivery.extend()
            except ConnectError as error:
                _log.info("the lease of %r was not renewed: %s", delivery, error)

    # -- filling --------------------------------------------------------------------------

    async def refill(self, timeout: float | None = None) -> bool:
        """Have at least one delivery ready; False when closed or the time is up."""
        deadline = None if timeout is None else Deadline(timeout)
        self._start()
        while not self._closed:
            for partition, lane in self._lanes:
                if partition.learn is not None:
                    await partition.learn(lane.peek())
            if not self._closed:  # it may be by now
                self._collect()
            if self._ready:
                return True
            if not await self._signal.wait(None if deadline is None else deadline.left()):
                return False
        return False

    def _start(self) -> None:
        if self._lanes or self._closed:
            return
        ahead = min(self.prefetch, self.settings.max_in_flight)
        rules = Prefetch(messages=ahead, total=self.fetch_at_most, made_again=MADE_AGAIN_SECONDS)
        for partition in self._partitions:
            lane = PullConsumer(self._jetstream, partition.stream, self.name, rules, self._signal)
            self._lanes.append((partition, lane))
        if self.settings.ack != "none":
            self._tick()

    def _collect(self) -> None:
        self._ready.extend(self._leases.retries)
        self._leases.retries.clear()
        leases = self._leases
        add = self._ready.append if self.settings.max_deliver is None else self._add
        for partition, lane in self._lanes:
            at = partition.prefix_size
            for raw in lane.take_now(TAKE_MESSAGES):
                subject, reply, headers, _ = raw
                if subject[at : at + 1] != b"_" and headers.find(OWN_MARK) < 0:
                    add(PlainDelivery(leases, partition, raw))  # as nearly all are
                    continue
                kind = kind_of(subject, headers, at)
                if kind.redriven and is_for_another(headers, self.name):
                    leases.ack(reply)
                elif kind.is_pack:
                    self._add_pack(partition, raw)
                elif kind.is_plain:
                    add(PlainDelivery(leases, partition, raw))
                else:
                    leases.ack(reply)

    def _add(self, delivery: Delivery) -> None:
        limit = self.settings.max_deliver
        if limit is not None and delivery.attempt > limit:
            delivery.terminate(f"not settled in {limit} deliveries")
        else:
            self._ready.append(delivery)

    def _add_pack(self, partition: Partition, raw: RawMessage) -> None:
        try:
            message = open_pack(partition, raw)
            rows = partition.rows(message.pack) if partition.rows else message.pack.events()
        except (PackError, SchemaError) as error:
            broken = PlainDelivery(self._leases, partition, raw)
            broken.terminate(f"not a sound pack: {error}")
            return
        lease = PackLease(message, raw.reply)
        deliveries = [
            PackDelivery(self._leases, lease, index, row) for index, row in enumerate(rows)
        ]
        wanted = [d for d in deliveries if not self._keys or d.key in self._keys]
        if not wanted:
            self._leases.ack(raw.reply)
            return
        self._leases.begin(lease)
        for delivery in deliveries:
            if not self._keys or delivery.key in self._keys:
                self._add(delivery)
            else:
                delivery.ack()

    # -- leases ---------------------------------------------------------------------------

    def _tick(self) -> None:
        """Twice a lease: renew what waits here and what makes progress."""
        self._leases.renew(self._waiting(leave=False))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.settings.ack_wait / 2, self._tick)

    def _waiting(self, leave: bool) -> list[bytes]:
        """Ack addresses of the messages that were fetched and not handed out."""
        ready = self._ready.copy()  # at once: the blocking twin takes from it in its own thread
        replies = [d.raw.reply for d in ready if isinstance(d, PlainDelivery)]
        packs = {d.lease.reply for d in ready if isinstance(d, PackDelivery)}
        for _, lane in self._lanes:
            replies.extend(m.reply for m in (lane.leave() if leave else lane.peek()))
        if leave:
            self._ready.clear()
        return [*replies, *packs]


async def join_subscription(
    jetstream: JetStream,
    publisher: StreamPublisher,
    partitions: Sequence[Partition],
    subscriptions: Subscriptions,
    name: str,
    settings: SubscriptionSettings | None,
) -> Subscription:
    """Become a member of a subscription, which is created if it does not exist."""
    agreed = await subscriptions.create(name, settings)
    dead = agreed.dead_letter or default_dead_letter_topic(partitions[0].topic, name)
    store = DeadLetterStore(jetstream, publisher, dead, name)
    return Subscription(jetstream, name, agreed, partitions, store)


def _in_thread(handler: Handler) -> Callable[[Delivery], Awaitable[None]]:
    async def call(delivery: Delivery) -> None:
        await asyncio.to_thread(handler, delivery)

    return call
