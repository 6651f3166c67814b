"""Durable subscriptions: shared by members, at least once, under leases."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import islice
from typing import Final

from millstream.closing import AsyncClosing
from millstream.deadline import Deadline
from millstream.errors import ConfigError, ConnectError, MillstreamError, RequestTimeout
from millstream.events.event import Partition, place_of
from millstream.failure_log import check_handler
from millstream.messaging.dead_letters.store import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.subscriptions.admin import Subscriptions
from millstream.messaging.subscriptions.delivery import Delivery, PlainDelivery
from millstream.messaging.subscriptions.inbox import Inbox
from millstream.messaging.subscriptions.rate_limit import RateLimit
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.jetstream import JetStream

__all__ = ["Handler", "Reject", "Subscription", "join_subscription"]

_log = logging.getLogger("millstream.messaging")

CONCURRENCY_MAX: Final = 10_000

Handler = Callable[[Delivery], Awaitable[None] | None]


class Reject(MillstreamError):
    """Raise it in a handler to make the event a dead letter without further attempts."""


class Subscription(AsyncClosing):
    """One member of a durable subscription. At least once: redelivered until acked.

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
        self.inbox = Inbox(jetstream, name, settings, partitions, dead_letters)
        self._limit = RateLimit(settings.member_rate_limit) if settings.member_rate_limit else None
        jetstream.connection.intakes.add(self)

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop; events that were fetched and not handed out go to the other members immediately."""
        await self.inbox.close()

    async def drain(self, timeout: float | None = None) -> None:
        """Close, then wait until running handlers and reading loops have ended.

        RequestTimeout when they have not after `timeout` seconds (None: no limit).
        """
        await self.close()
        try:
            await self.inbox.idle(timeout)
        except TimeoutError as error:
            hint = ": handlers were still running when the time was up"
            raise RequestTimeout(self.name, timeout or 0, hint) from error

    @property
    def settled(self) -> int:
        """How many messages this member has settled."""
        return self.inbox.leases.settled

    # -- receiving ------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Deliveries one by one, until the subscription is closed."""
        inbox, limit = self.inbox, self._limit
        ready = inbox.ready
        while True:
            while ready:
                if limit is not None:
                    await limit.wait()
                    if not ready:
                        break  # it was closed, or another reader was faster
                delivery = inbox.take()
                if delivery is None:
                    break
                inbox.readers += 1  # `in_hand` without the call: this runs for every event
                try:
                    yield delivery
                finally:
                    inbox.readers -= 1
                    if inbox.draining is not None:
                        inbox.in_hand(0)
            if not await inbox.refill():
                return

    async def pull(self, at_most: int = 100, timeout: float | None = 5.0) -> list[Delivery]:
        """Up to `at_most` deliveries: those already fetched, else the first to arrive in time."""
        if at_most < 1:
            raise ConfigError(f"at_most {at_most!r}: ask for at least one")
        inbox, ready = self.inbox, self.inbox.ready
        deadline = None if timeout is None else Deadline(timeout)
        while ready or await inbox.refill(None if deadline is None else deadline.left()):
            count = min(at_most, len(ready))
            if self._limit is not None:
                await self._limit.wait(count)
            taken = list(islice(iter(inbox.take, None), count))
            if taken:
                return taken
        return []

    async def run(self, handler: Handler, concurrency: int = 1) -> None:
        """Call the handler for every event until the subscription is closed.

        When the handler returns, the event is acked; when it raises, nacked with the error as the
        reason (`Reject` makes it a dead letter immediately), and the log has a warning with the
        traceback. With `concurrency` 1 events are handled in the order of delivery. While a handler
        runs, its lease is renewed. Plain functions run in a thread.
        """
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise ConfigError(f"concurrency {concurrency!r}: choose 1 to {CONCURRENCY_MAX:,}")
        check_handler(handler)
        call = handler if inspect.iscoroutinefunction(handler) else _in_thread(handler)
        self.inbox.in_hand(1)
        try:
            await self._run(call, asyncio.Semaphore(concurrency))
        finally:
            self.inbox.in_hand(-1)

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
        copies = self.inbox.leases.copies
        address = delivery.address if isinstance(delivery, PlainDelivery) else None
        if address is not None:  # packs know it themselves
            copies.handling(address)
        try:
            try:
                await call(delivery)
            except Reject as rejected:
                self._log_failure(delivery, rejected)
                delivery.terminate(str(rejected) or "rejected")
            except Exception as error:
                self._log_failure(delivery, error)
                delivery.nack(reason=f"{type(error).__name__}: {error}")
            else:
                delivery.ack()
        except ConnectError as error:
            _log.warning(
                "%s was handled but not settled and will be redelivered: %s",
                *(place_of(delivery), error),
            )
        finally:
            renewal.cancel()
            if address is not None:
                copies.handled(address)
            slots.release()

    async def _keep(self, delivery: Delivery) -> None:
        while True:
            await asyncio.sleep(self.settings.ack_wait / 2)
            try:
                delivery.extend()
            except ConnectError as error:
                _log.info("the lease of %s was not renewed: %s", place_of(delivery), error)

    def _log_failure(self, delivery: Delivery, error: Exception) -> None:
        settings, attempt = self.settings, delivery.attempt
        of_all = "" if settings.max_deliver is None else f" of {settings.max_deliver}"
        if settings.ack == "none":
            then = "it is not delivered again, because ack is 'none'"
        elif isinstance(error, Reject) or attempt >= (settings.max_deliver or attempt + 1):
            then = f"it becomes a dead letter in '{self.inbox.dead_letter_topic}'"
        else:
            then = f"the next attempt is due in {settings.delay_after(attempt):g} s"
        self.inbox.failures.warn(
            error,
            "subscription '%s': the handler failed on %s, attempt %d%s; %s",
            *(self.name, place_of(delivery), attempt, of_all, then),
        )


async def join_subscription(
    topic: TopicHandle,
    subscriptions: Subscriptions,
    name: str,
    settings: SubscriptionSettings | None,
) -> Subscription:
    """Become a member of a subscription, which is created if it does not exist."""
    agreed = await subscriptions.create(name, settings)
    dead = agreed.dead_letter or default_dead_letter_topic(topic.shape.topic, name)
    store = DeadLetterStore(topic.jetstream, topic.publisher, dead, name)
    return Subscription(topic.jetstream, name, agreed, topic.partitions, store)


def _in_thread(handler: Handler) -> Callable[[Delivery], Awaitable[None]]:
    async def call(delivery: Delivery) -> None:
        result = await asyncio.to_thread(handler, delivery)
        if inspect.isawaitable(result):  # an object that is called by `async def`
            await result

    return call
