"""A full topic refuses events, or lets their producer wait; every event is accounted for."""

from __future__ import annotations

import asyncio

import pytest

import millstream.blocking
from millstream.errors import ConfigError, LimitReached, PartlyStored
from millstream.events.packs.packing import Packing
from millstream.messaging import PublishOptions, Topic
from millstream.messaging.publishing.counters import ProducerCounters
from millstream.mill import Mill
from tests.integration.messaging.conftest import Until

ROOM = 10


@pytest.fixture
async def small(mill: Mill) -> Topic:
    """A topic with room for ten messages."""
    return await mill.create_topic("small", discard="new", max_messages=ROOM)


async def fill(topic: Topic) -> None:
    await topic.publish_many([b"old"] * ROOM)


def accounted(counters: ProducerCounters) -> bool:
    parts = (counters.stored, counters.refused, counters.unconfirmed, counters.waiting)
    return counters.produced == sum(parts)


async def test_events_wait_for_room_and_are_all_stored(small: Topic, until: Until) -> None:
    producer = small.event_producer(5, overload="block", block_seconds=100)

    async def send() -> None:
        async with producer:
            for number in range(3 * ROOM):
                await producer.send(b"%d" % number, key="k")

    sending = asyncio.create_task(send())
    for full in (ROOM, 2 * ROOM):
        # Ten are stored, five wait for room, and the sender waits with the sixth.
        await until(
            lambda full=full: producer.counters == ProducerCounters(full + 5, full, 0, 0, 5)
        )
        await small.admin.purge()
    await sending
    assert producer.counters == ProducerCounters(3 * ROOM, 3 * ROOM, 0, 0, 0)
    assert (await small.info()).partitions[0].last_offset == 3 * ROOM  # none was stored twice


async def test_an_event_that_finds_no_room_in_time_is_refused(small: Topic) -> None:
    await fill(small)
    with pytest.raises(LimitReached, match="maximum messages exceeded"):
        await small.publish(b"new")
    with pytest.raises(LimitReached, match="maximum messages exceeded"):
        await small.publish(b"new", options=PublishOptions(overload="block", timeout=1.5))
    assert (await small.info()).messages == ROOM


async def test_a_single_publish_waits_for_room(small: Topic) -> None:
    await fill(small)
    options = PublishOptions(overload="block", timeout=100)
    waiting = asyncio.create_task(small.publish(b"new", options=options))
    assert not (await asyncio.wait([waiting], timeout=0.3))[0]
    await small.admin.purge()
    assert (await waiting).offset == ROOM + 1


async def test_stored_and_refused_events_add_up_to_those_produced(small: Topic) -> None:
    producer = small.event_producer(overload="block", block_seconds=1.5)
    for number in range(ROOM + 5):
        await producer.send(b"%d" % number)
        assert accounted(producer.counters)
    with pytest.raises(PartlyStored) as failed:
        await producer.close()
    assert producer.counters == ProducerCounters(ROOM + 5, ROOM, 5, 0, 0)
    assert failed.value.count == 5
    assert (await small.info()).messages == ROOM


async def test_packs_wait_for_room_too(mill: Mill, until: Until) -> None:
    topic = await mill.create_topic("packs", discard="new", max_messages=2)
    producer = topic.producer(Packing(max_events=4), overload="block", block_seconds=100)
    for number in range(12):  # three packs
        await producer.send(b"%d" % number)
    flushing = asyncio.create_task(producer.flush())
    await until(lambda: producer.counters == ProducerCounters(12, 8, 0, 0, 4))
    await topic.admin.purge()
    await flushing
    await producer.close()
    assert producer.counters == ProducerCounters(12, 12, 0, 0, 0)
    refusing = topic.producer(Packing(max_events=4))
    for number in range(12):
        await refusing.send(b"%d" % number)
    with pytest.raises(PartlyStored):
        await refusing.close()
    assert refusing.counters == ProducerCounters(12, 4, 8, 0, 0)


def test_the_blocking_producer_counts_and_waits_as_well(millstream_url: str) -> None:
    with millstream.blocking.connect(millstream_url) as mill:
        topic = mill.create_topic("small", discard="new", max_messages=ROOM)
        producer = topic.event_producer(overload="block", block_seconds=1.5)
        for number in range(ROOM + 2):
            producer.send(b"%d" % number)
        with pytest.raises(PartlyStored):
            producer.close()
        assert producer.counters == ProducerCounters(ROOM + 2, ROOM, 2, 0, 0)


async def test_a_wait_that_outlasts_the_memory_of_ids_is_refused(small: Topic) -> None:
    with pytest.raises(ConfigError, match="at most the duplicate window, 120 s"):
        small.event_producer(overload="block", block_seconds=121)
    with pytest.raises(ConfigError, match="at most the duplicate window, 120 s"):
        await small.publish(b"", options=PublishOptions(overload="block", timeout=1000))
    with pytest.raises(ConfigError, match="choose refuse or block"):
        small.producer(overload="drop")  # type: ignore[arg-type]
