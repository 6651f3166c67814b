"""Where imported events go. One kind of writer now; others fit the same protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millstream.messaging import NewEvent, Topic

__all__ = ["EventWriter", "TopicWriter"]


class EventWriter(Protocol):
    """Stores groups of events in the order in which they are given."""

    async def write(self, events: Sequence[NewEvent]) -> int:
        """Return when all are stored; how many of them were there before."""
        ...


class TopicWriter:
    """At least once: every event is acknowledged, and its id makes repeats one while the topic
    remembers it (its duplicate window)."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    async def write(self, events: Sequence[NewEvent]) -> int:
        receipts = await self._topic.publish_many(events)
        return sum(receipt.duplicate for receipt in receipts)
