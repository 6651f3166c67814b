"""The events of a plan, one by one or in lists."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from millstream.events.event import Event, Partition
from millstream.events.event_list import EventList, GatheredEvents
from millstream.events.pack_event import PackEvent
from millstream.events.start import Start
from millstream.events.undecodable import Report
from millstream.events.unpack import event_lists_of, events_of
from millstream.messaging.reading.last_per_key import check_follow, last_messages
from millstream.messaging.reading.replay import ReadPlan, end_of, holds_packs, read_messages
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.message import RawMessage

__all__ = ["read_event_lists", "read_events"]

_T = TypeVar("_T", Event, EventList)
LIST_EVENTS: Final = 1000  # in a list of the last events of a topic with packs


@dataclass(frozen=True, slots=True)
class _Form(Generic[_T]):
    """How events are handed out."""

    decode: Callable[
        [Partition, list[RawMessage], frozenset[str], Report | None],
        Iterable[_T],
    ]
    gather: Callable[[Partition, list[Event]], Iterable[_T]]


async def read_events(
    jetstream: JetStream, partitions: Sequence[Partition], plan: ReadPlan
) -> AsyncGenerator[Event, None]:
    """The events of a plan, in order within each partition; each exactly once."""
    form = _Form(events_of, _one_by_one)
    async with aclosing(_groups(jetstream, partitions, plan, form)) as groups:
        async for events in groups:
            for event in events:
                yield event


async def read_event_lists(
    jetstream: JetStream, partitions: Sequence[Partition], plan: ReadPlan
) -> AsyncGenerator[EventList, None]:
    """The same in lists: the events of one pack, or single ones next to each other."""
    form = _Form(event_lists_of, _in_lists)
    async with aclosing(_groups(jetstream, partitions, plan, form)) as groups:
        async for lists in groups:
            for events in lists:
                yield events


async def _groups(
    jetstream: JetStream, partitions: Sequence[Partition], plan: ReadPlan, form: _Form[_T]
) -> AsyncGenerator[Iterable[_T], None]:
    """What is decoded of the messages that arrived together."""
    report, keys = plan.report(), frozenset(plan.keys)
    if plan.start == Start.LAST_PER_KEY:
        if not plan.follow:
            for partition in plan.chosen(partitions):
                async with aclosing(_last(jetstream, partition, plan, form)) as last:
                    async for group in last:
                        yield group
            return
        await check_follow(jetstream, plan.chosen(partitions))
    async with aclosing(read_messages(jetstream, partitions, plan)) as found:
        async for partition, messages in found:
            yield form.decode(partition, messages, keys, report)


async def _last(
    jetstream: JetStream, partition: Partition, plan: ReadPlan, form: _Form[_T]
) -> AsyncGenerator[Iterable[_T], None]:
    """The last event of each key."""
    report, keys = plan.report(), frozenset(plan.keys)
    end = await end_of(jetstream, partition, plan.end)
    if not await holds_packs(jetstream, partition):
        async with aclosing(last_messages(jetstream, partition, plan, end)) as groups:
            async for messages in groups:
                yield form.decode(partition, messages, keys, report)
        return
    latest: dict[str | None, Event] = {}
    everything = replace(plan, start=Start.ALL, end=end)
    async with aclosing(read_messages(jetstream, [partition], everything)) as found:
        async for _, messages in found:
            newest: dict[str | None, Event] = {}
            for event in events_of(partition, messages, keys, report):
                newest.pop(event.key, None)  # the new one takes its turn in order
                newest[event.key] = event
            for key, event in newest.items():
                latest.pop(key, None)
                latest[key] = event.alone() if isinstance(event, PackEvent) else event
    yield form.gather(partition, list(latest.values()))


def _one_by_one(_: Partition, events: list[Event]) -> Iterable[Event]:
    return events


def _in_lists(partition: Partition, events: list[Event]) -> Iterable[EventList]:
    for first in range(0, len(events), LIST_EVENTS):
        yield GatheredEvents(partition, events[first : first + LIST_EVENTS])
