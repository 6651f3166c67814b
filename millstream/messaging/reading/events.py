"""The events of a plan, one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from millstream.events.event import Event, Partition
from millstream.events.start import Start
from millstream.events.unpack import PackEvent, events_of
from millstream.messaging.reading.last_per_key import check_follow, last_messages
from millstream.messaging.reading.replay import ReadPlan, end_of, holds_packs, read_messages
from millstream.wire.aio.jetstream import JetStream

__all__ = ["read_events"]


async def read_events(
    jetstream: JetStream, partitions: Sequence[Partition], plan: ReadPlan
) -> AsyncGenerator[Event, None]:
    """The events of a plan, in order within each partition; each exactly once."""
    report, keys = plan.report(), frozenset(plan.keys)
    if plan.start == Start.LAST_PER_KEY:
        if not plan.follow:
            for partition in plan.chosen(partitions):
                async for event in _last_events(jetstream, partition, plan):
                    yield event
            return
        await check_follow(jetstream, plan.chosen(partitions))
    async for partition, messages in read_messages(jetstream, partitions, plan):
        for event in events_of(partition, messages, keys, report):
            yield event


async def _last_events(
    jetstream: JetStream, partition: Partition, plan: ReadPlan
) -> AsyncGenerator[Event, None]:
    """The last event of each key."""
    report, keys = plan.report(), frozenset(plan.keys)
    end = await end_of(jetstream, partition, plan.end)
    if not await holds_packs(jetstream, partition):
        async for messages in last_messages(jetstream, partition, plan, end):
            for event in events_of(partition, messages, keys, report):
                yield event
        return
    latest: dict[str | None, Event] = {}
    everything = replace(plan, start=Start.ALL, end=end)
    async for _, messages in read_messages(jetstream, [partition], everything):
        found: dict[str | None, Event] = {}
        for event in events_of(partition, messages, keys, report):
            found.pop(event.key, None)  # the new one takes its turn in order
            found[event.key] = event
        for key, event in found.items():
            latest.pop(key, None)
            latest[key] = event.alone() if isinstance(event, PackEvent) else event
    for event in latest.values():
        yield event
