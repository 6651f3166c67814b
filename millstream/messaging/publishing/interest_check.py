"""Whether somebody wanted an event of an interest topic when it was published.

The broker acknowledges such an event in any case and keeps it only if a consumer wants its subject;
the ack does not say which. What can be said for certain:

1. A consumer that existed before the event was sent and still exists after its ack wanted it: the
   event was stored.
2. If there was none before and there is none after, nobody wants it: it is not kept.
3. Otherwise a consumer came or went meanwhile: the event is looked up. If it is there, it is kept;
   if not, it was handled or never stored, and which of the two is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from millstream.errors import MillstreamError, NotKept, Unconfirmed
from millstream.events.event import Durability, NewEvent, Receipt
from millstream.messaging.topics.handle import TopicHandle
from millstream.messaging.topics.lookup import side_by_side
from millstream.wire.direct import matches

__all__ = ["InterestCheck", "error_of"]


class _Consumer(NamedTuple):
    """One that wants messages of these subjects (empty: all); a namesake was created later."""

    name: str
    created: str
    filters: tuple[str, ...]

    def wants(self, subject: str) -> bool:
        return not self.filters or any(matches(pattern, subject) for pattern in self.filters)


Consumers = frozenset[_Consumer] | None  # None: unknown
_WORD: Final[dict[bool | None, Durability]] = {False: "none", None: "unknown"}


class InterestCheck:
    """Corrects the receipts of an interest topic; one request for each call and partition."""

    def __init__(self, topic: TopicHandle) -> None:
        self._topic = topic
        self._known: list[Consumers] | None = None

    async def before(self) -> list[Consumers]:
        """Who wants events of each partition: to be asked before something is sent."""
        if self._known is None:
            self._known = await side_by_side(self._consumers, range(len(self._topic.partitions)))
        return list(self._known)

    async def checked(
        self,
        before: Sequence[Consumers],
        events: Sequence[NewEvent],
        receipts: Sequence[Receipt],
        durabilities: Sequence[Durability],
    ) -> list[Receipt]:
        """The receipts with what is known about each event: its durability, none or unknown."""
        numbers = sorted({receipt.partition for receipt in receipts})
        found = await side_by_side(self._consumers, numbers)
        after = dict(zip(numbers, found, strict=True))
        if self._known is not None:
            for number, consumers in after.items():
                self._known[number] = consumers

        kept = [
            self._kept(event, receipt, before[receipt.partition], after[receipt.partition])
            for event, receipt in zip(events, receipts, strict=True)
        ]
        doubtful = [index for index, known in enumerate(kept) if known is None]
        answers = await side_by_side(lambda index: self._exists(receipts[index]), doubtful)
        for index, exists in zip(doubtful, answers, strict=True):
            kept[index] = exists
        return [
            receipt._replace(durability=durabilities[receipt.partition] if known else _WORD[known])
            for receipt, known in zip(receipts, kept, strict=True)
        ]

    def _kept(
        self, event: NewEvent, receipt: Receipt, before: Consumers, after: Consumers
    ) -> bool | None:
        """Whether an event is kept, from who wanted it; None: that does not show it."""
        if before is None or after is None:
            return None
        if receipt.duplicate and event.id is not None:
            return None  # an id of the caller may be that of an event stored long before
        subject = self._topic.shape.subject_of(event, receipt.partition)
        wanted = {consumer for consumer in before if consumer.wants(subject)}
        wants = {consumer for consumer in after if consumer.wants(subject)}
        if wanted & wants:
            return True
        return None if wanted | wants else False

    async def _exists(self, receipt: Receipt) -> bool | None:
        """Whether the event is stored; None: unknown, it may have been handled."""
        stream = self._topic.partitions[receipt.partition].stream
        try:
            found = await self._topic.jetstream.get_message(stream, {"seq": receipt.offset})
        except MillstreamError:
            return None
        return None if found is None else True

    async def _consumers(self, number: int) -> Consumers:
        stream = self._topic.partitions[number].stream
        try:
            found = await self._topic.jetstream.consumers(stream)
        except MillstreamError:
            return None  # not allowed, or not answered
        return frozenset(_Consumer(info.name, info.created, info.config.filters) for info in found)


def error_of(event: NewEvent, receipt: Receipt) -> MillstreamError | None:
    """Why an event that must not be dropped is not known to be kept; None: it is, or may be."""
    if event.options is None or not event.options.require_interest:
        return None
    if receipt.durability == "none":
        return NotKept(receipt.topic, receipt.partition, receipt.offset)
    if receipt.durability != "unknown":
        return None
    return Unconfirmed(
        f"it is unknown whether the event at offset {receipt.offset} of '{receipt.topic}', "
        f"partition {receipt.partition}, is kept: subscriptions came or went while it was "
        f"published, or its id had been used before"
    )
