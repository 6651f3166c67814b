"""Reading item by item, with one thread switch for many items."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from millstream.blocking.generated.delivery import Delivery
from millstream.blocking.generated.message import Message
from millstream.blocking.loop import LoopThread
from millstream.blocking.pump import Pump
from millstream.blocking.twin import ContextTwin, Twin
from millstream.errors import ConnectionClosed
from millstream.events.event import Event, Partition
from millstream.events.event_list import EventList
from millstream.events.start import Start
from millstream.events.unpack import event_lists_of, events_of
from millstream.messaging import topic as async_topic
from millstream.messaging.core import message as async_message
from millstream.messaging.core import subscriber as async_subscriber
from millstream.messaging.core.overload import Counters
from millstream.messaging.reading.replay import ReadPlan, plan_of
from millstream.messaging.subscriptions import subscription as async_subscription
from millstream.wire.message import RawMessage

__all__ = ["DeliveryReading", "Following", "MessageReading", "TopicReading"]

# Messages taken in one go; fewer where the buffer is small, because messages taken cannot be
# dropped in favour of newer ones.
TAKE_MESSAGES: Final = 256


# When this many deliveries are left more are fetched, so that the reader does not wait.
LOW_DELIVERIES: Final = 128
# Groups of messages fetched ahead of the reader; each has at most a thousand.
AHEAD_GROUPS: Final = 2
AHEAD_EVENTS: Final = 1000


class TopicReading(Twin):
    """Reads a topic. Messages arrive in groups and are decoded in the reader's thread."""

    __slots__ = ()

    _inner: async_topic.Topic

    def read(self, plan: ReadPlan | None = None, **choices: Any) -> Iterator[Event]:
        """Events of a range, in order within each partition; subscriptions are not affected.

        `read()` gives everything stored now; `read(start=Start.at_offset(5), end=10)`,
        `read(follow=True)`, `read(keys=["a"])`: see ReadPlan. `read(start=Start.LAST_PER_KEY,
        end=moment)` gives the last event of each key before that moment, if it is still stored.
        Events redriven for one subscription are left out, here and in `batches`: they were read
        before. A message that cannot be decoded raises Undecodable after the events before it;
        `undecodable="drop"` continues without it.
        """
        wanted = plan_of(plan, choices)
        if wanted.start == Start.LAST_PER_KEY:
            return self._loop.iterate(self._inner.read(wanted), AHEAD_EVENTS)
        groups = self._loop.iterate(self._inner.admin.read_messages(wanted), AHEAD_GROUPS)
        return chain.from_iterable(_events(groups, wanted))

    def read_many(self, plan: ReadPlan | None = None, **choices: Any) -> Iterator[EventList]:
        """Like `read`, but in lists: `for value in events.values` is the fastest way to objects.

        A list has the events of one pack, or up to a thousand single ones that are next to each
        other; its parts (`values`, `keys`, `offsets`, `timestamps`) are made when asked for.
        With `undecodable="drop"`, or a function, values are checked before a list is handed out.
        """
        wanted = plan_of(plan, choices)
        if wanted.start == Start.LAST_PER_KEY:
            return self._loop.iterate(self._inner.read_many(wanted), AHEAD_GROUPS)
        groups = self._loop.iterate(self._inner.admin.read_messages(wanted), AHEAD_GROUPS)
        keys, report = frozenset(wanted.keys), wanted.report()
        return chain.from_iterable(
            event_lists_of(partition, messages, keys, report) for partition, messages in groups
        )


def _events(
    groups: Iterator[tuple[Partition, list[RawMessage]]], plan: ReadPlan
) -> Iterator[Iterator[Event]]:
    keys, report = frozenset(plan.keys), plan.report()
    for partition, messages in groups:
        yield events_of(partition, messages, keys, report)


class Following(Iterator[Event]):
    """Reads a topic like `topic.read`, until `stop` is called, from whatever thread."""

    def __init__(self, topic: TopicReading, plan: ReadPlan) -> None:
        self._loop, self._plan, self._stopped = topic._loop, plan, False
        messages = topic._inner.admin.read_messages(plan)
        self._pump = self._loop.invoke(Pump, messages, AHEAD_GROUPS)
        self._events = chain.from_iterable(_events(self._groups(), plan))

    def _groups(self) -> Iterator[tuple[Partition, list[RawMessage]]]:
        while not self._stopped and (chunk := self._loop.call(self._pump.take())):
            yield from chunk

    def __next__(self) -> Event:
        if not self._stopped:
            try:
                return next(self._events)
            except ConnectionClosed:
                if not self._stopped:
                    raise
        raise StopIteration

    def stop(self) -> None:
        """End it; a thread that waits for the next event gets no more."""
        self._stopped = True
        with contextlib.suppress(ConnectionClosed):  # the process ends
            self._loop.post(self._pump.stop)


class DeliveryReading(ContextTwin):
    """Iterates a subscription, which renews the leases of waiting deliveries."""

    __slots__ = ()

    _inner: async_subscription.Subscription

    def __iter__(self) -> Iterator[Delivery]:
        """Deliveries one by one, until the subscription is closed."""
        loop, inbox = self._loop, self._inner.inbox
        ready = inbox.ready
        paced = self._inner.settings.member_rate_limit is not None
        holding = False  # `drain` waits for readers that have events in hand
        try:
            while True:
                held, holding = holding, False
                holding = loop.call(self._more(held))
                if not holding:
                    return
                while ready:
                    if len(ready) == LOW_DELIVERIES:
                        loop.post(self._fetch_more)
                    if paced or inbox.in_doubt:
                        yield from self._one_by_one()
                        continue
                    try:
                        delivery = ready.popleft()
                    except IndexError:  # another thread was faster
                        break
                    yield Delivery(loop, delivery)
        finally:
            if holding:
                with contextlib.suppress(ConnectionClosed):  # the process ends
                    loop.post(self._inner.inbox.in_hand, -1)

    async def _more(self, holding: bool) -> bool:
        if holding:
            self._inner.inbox.in_hand(-1)
        found = await self._inner.inbox.refill()
        if found:
            self._inner.inbox.in_hand(1)
        return found

    def _fetch_more(self) -> None:
        task = asyncio.get_running_loop().create_task(self._inner.inbox.refill(0))
        task.add_done_callback(_ignore)

    def _one_by_one(self) -> Iterator[Delivery]:
        for delivery in self._loop.call(self._inner.pull(1)):
            yield Delivery(self._loop, delivery)


def _ignore(task: asyncio.Task[bool]) -> None:
    """The reader's own call raises the same error."""
    if not task.cancelled():
        task.exception()


class MessageReading(ContextTwin):
    """Iterates the messages of a subject; the counters include what was taken ahead."""

    __slots__ = ("_lost", "_most", "_taken")

    _inner: async_subscriber.Subscriber

    def __init__(self, loop: LoopThread, inner: async_subscriber.Subscriber) -> None:
        super().__init__(loop, inner)
        self._taken: deque[async_message.Message] = deque()
        self._lost = 0  # messages taken and dropped when it was closed
        self._most = max(1, min(TAKE_MESSAGES, inner.settings.messages_max // 4))

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, until the subscriber is closed or drained."""
        loop, taken = self._loop, self._taken
        while True:
            while taken:
                try:
                    message = taken.popleft()
                except IndexError:  # another thread was faster
                    break
                yield Message(loop, message)
            if not loop.call(self._take()):
                return

    async def _take(self) -> bool:
        inner = self._inner
        if self._taken:
            return True
        try:
            self._taken.append(await anext(inner))
        except StopAsyncIteration:
            return bool(self._taken)
        for _ in range(self._most - 1):
            if not inner.pending:
                break
            self._taken.append(await anext(inner))
        return True

    def next(self, timeout: float | None = None) -> Message:
        """The next message; NoMessage after `timeout` seconds without one (None: no limit)."""
        try:
            return Message(self._loop, self._taken.popleft())
        except IndexError:
            return Message(self._loop, self._loop.call(self._inner.next(timeout)))

    @property
    def counters(self) -> Counters:
        """A consistent count of everything that arrived so far."""
        return self._loop.invoke(self._count)

    def _count(self) -> Counters:
        waiting = list(self._taken)
        found = self._inner.counters
        return replace(
            found,
            delivered=found.delivered - len(waiting) - self._lost,
            dropped=found.dropped + self._lost,
            pending=found.pending + len(waiting),
            pending_bytes=found.pending_bytes + sum(message.size for message in waiting),
        )

    def close(self) -> None:
        """Stop now; pending messages count as dropped and running handlers are cancelled."""
        self._loop.call(self._inner.close())
        self._drop()

    def _leave(self, error: BaseException | None) -> None:
        try:
            super()._leave(error)
        finally:
            self._drop()

    def _drop(self) -> None:
        while self._taken:
            self._taken.popleft()
            self._lost += 1
