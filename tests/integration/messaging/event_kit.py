"""Helpers for tests of topics and subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from millstream.deadline import Deadline
from millstream.messaging import Delivery, Event, Subscription, Topic


async def read(topic: Topic, **choices: Any) -> list[Event]:
    """The events of a range."""
    return [event async for event in topic.read(**choices)]


async def values(topic: Topic, **choices: Any) -> list[Any]:
    """The values of a range."""
    return [event.value async for event in topic.read(**choices)]


async def until_reading(topic: Topic) -> None:
    """Wait until a reader has its position: it gets everything stored from now on."""
    deadline = Deadline(20)
    while not await topic._jetstream.consumers(topic.name):
        assert not deadline.passed, "nobody reads"
        await asyncio.sleep(0.01)


async def take(member: Subscription, count: int, seconds: float = 20.0) -> list[Delivery]:
    """The next `count` deliveries, unsettled; fails when they do not come."""
    taken: list[Delivery] = []
    while len(taken) < count:
        more = await member.pull(count - len(taken), seconds)
        assert more, f"only {len(taken)} of {count} deliveries within {seconds:g} s"
        taken.extend(more)
    return taken


async def nothing(member: Subscription, seconds: float = 0.25) -> None:
    """Nothing is delivered for a while."""
    more = await member.pull(10, seconds)
    assert not more, f"unexpected: {[(d.value, d.attempt) for d in more]}"


def ack(deliveries: Iterable[Delivery]) -> list[Any]:
    """Acknowledge, and give the values."""
    seen = []
    for delivery in deliveries:
        seen.append(delivery.value)
        delivery.ack()
    return seen
