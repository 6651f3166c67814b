"""`read_many` gives the events of `read`, in lists: the same choices, order and errors."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import millstream.blocking
from millstream import EventList, Mill, NewEvent, Start, Topic
from millstream.errors import ConfigError
from millstream.events.event import Event
from millstream.events.packs.packing import Packing
from tests.integration.messaging.topic_kit import eventually

LAST = Start.LAST_PER_KEY


@dataclasses.dataclass(frozen=True)
class Trade:
    symbol: str
    size: int
    at: datetime


def seen(event: Event) -> Any:
    times = event.timestamp_ns, event.timestamp
    return event.position, event.key, event.value, times, event.id, dict(event.headers)


async def mixed(mill: Mill, partitions: int = 1, schema: type | None = None) -> Topic:
    """Single events, packs, single events; of several keys."""
    topic = await mill.create_topic("mixed", partitions=partitions, schema=schema)
    began = datetime(2026, 1, 1, tzinfo=UTC)

    def value(n: int) -> Any:
        return b"%d" % n if schema is None else Trade(f"s{n % 5}", n, began + timedelta(days=n))

    await topic.publish_many([NewEvent(value(n), f"k{n % 5}") for n in range(30)])
    async with topic.producer(Packing(max_events=100)) as producer:
        for n in range(30, 400):
            await producer.send(value(n), f"k{n % 5}")
    await topic.publish_many([NewEvent(value(n), f"k{n % 5}", id=f"i{n}") for n in range(400, 420)])
    return topic


async def both(topic: Topic, **choices: Any) -> list[EventList]:
    """The lists of a plan, which must be the events that are read one by one."""
    lists = [events async for events in topic.read_many(**choices)]
    one_by_one = [seen(event) async for event in topic.read(**choices)]
    by_partition: dict[int, list[Any]] = {}
    for events in lists:
        assert len(events) > 0
        assert {event.partition for event in events} == {events.partition}
        assert events.values == [event.value for event in events]
        assert events.keys == [event.key for event in events]
        assert events.offsets == [event.offset for event in events]
        assert events.timestamps == [event.timestamp for event in events]
        by_partition.setdefault(events.partition, []).extend(map(seen, events))
    for number, found in by_partition.items():
        assert found == [event for event in one_by_one if event[0][0] == number]
    assert sum(map(len, lists)) == len(one_by_one)
    return lists


@pytest.mark.parametrize("schema", [None, Trade])
@pytest.mark.parametrize("partitions", [1, 3])
async def test_the_lists_hold_what_is_read_one_by_one(
    mill: Mill, partitions: int, schema: type | None
) -> None:
    topic = await mixed(mill, partitions, schema)
    assert sum(map(len, await both(topic))) == 420
    for choices in (
        {"keys": ["k1", "k3"]},
        {"keys": "none"},
        {"start": Start.at_offset(5), "end": 33},
        {"start": Start.LAST},
        {"start": Start.NEW},
        {"start": LAST},
        {"start": LAST, "keys": ["k2"]},
        {"partitions": [0]},
    ):
        await both(topic, **choices)
    subjects = [f"mixed.{'0.' if partitions > 1 else ''}k1"]
    await both(topic, subjects=subjects)


async def test_a_list_is_one_pack_or_the_single_events_between_packs(mill: Mill) -> None:
    topic = await mixed(mill)
    lists = await both(topic)
    for events in lists:
        packed = {event.offset for event in events if event.index > 0}
        assert len(packed) <= 1
        assert not packed or len(set(events.offsets)) == 1
    # The last ones of keys in packs come from anywhere.
    [last] = await both(topic, start=LAST)
    assert sorted(last.values) == [b"415", b"416", b"417", b"418", b"419"]


async def test_following_gives_lists_of_what_is_stored_later(mill: Mill) -> None:
    topic = await mixed(mill)
    found: list[Any] = []

    async def follow() -> None:
        async for events in topic.read_many(start=Start.at_offset(20), follow=True):
            found.extend(events.values)
            if found[-1] == b"end":
                return

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        await topic.publish(b"more")
        await topic.publish(b"end")
    assert found == [e.value async for e in topic.read(start=Start.at_offset(20))]
    with pytest.raises(ConfigError, match="nonsense"):
        topic.read_many(nonsense=True)


async def test_a_reader_that_stops_early_leaves_no_consumer(mill: Mill) -> None:
    topic = await mixed(mill)

    async def consumers() -> list[str]:
        return [info.name for info in await mill.jetstream.consumers("mixed")]

    readings: list[Any] = [topic.read_many(follow=True), topic.read(follow=True)]
    for reading in readings:
        async for _ in reading:
            assert len(await consumers()) == 1
            break
        await reading.aclose()
        await eventually(consumers, [])
    async for _ in topic.read_many(follow=True):
        break
    await eventually(consumers, [])


async def test_the_blocking_client_gives_the_same_lists(mill: Mill, millstream_url: str) -> None:
    topic = await mixed(mill, schema=Trade)
    choices: list[dict[str, Any]] = [{}, {"keys": ["k1"]}, {"start": LAST}]
    for chosen in choices:
        expected = [event.value async for event in topic.read(**chosen)]

        def blocking(chosen: dict[str, Any] = chosen) -> list[Any]:
            with millstream.blocking.connect(millstream_url) as other:
                lists = list(other.topic("mixed", type=Trade).read_many(**chosen))
            return [value for events in lists for value in events.values]

        assert await asyncio.to_thread(blocking) == expected
