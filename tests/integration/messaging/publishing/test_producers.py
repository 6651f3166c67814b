"""Producers: many events in flight, back-pressure, and an end at which everything is stored."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

import millstream
from millstream.errors import ConfigError, ConnectionClosed, PartlyStored, WrongSequence
from millstream.events.packs.packing import Packing
from millstream.messaging import PublishOptions, Topic
from millstream.messaging.publishing.event_producer import EventProducer
from millstream.messaging.publishing.pack_producer import PackProducer
from millstream.mill import Mill
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.event_kit import read, values
from tests.integration.messaging.topic_kit import eventually


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


async def test_leaving_a_producer_waits_until_everything_is_stored(topic: Topic) -> None:
    async with topic.event_producer() as producer:
        futures = [await producer.send(b"%d" % n, f"k{n % 3}") for n in range(1000)]
        assert producer.sent == 1000
    assert [future.result().offset for future in futures] == list(range(1, 1001))
    assert await values(topic) == numbers(1000)
    with pytest.raises(ConnectionClosed):
        await producer.send(b"x")


async def test_a_producer_takes_every_option_of_publish(topic: Topic) -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    async with topic.event_producer() as producer:
        await producer.send(b"v", "k", headers={"a": "b"}, timestamp=moment, id="one")
        again = await producer.send(b"v", "k", id="one")
        assert (await again).duplicate
    [event] = await read(topic)
    assert (event.key, dict(event.headers), event.timestamp, event.id) == (
        "k",
        {"a": "b"},
        moment,
        "one",
    )


async def test_no_more_events_are_in_flight_than_allowed(millstream_url: str) -> None:
    async with (
        proxy(millstream_url) as (line, url),
        millstream.connect(url) as mill,
    ):
        topic = await mill.create_topic("orders")
        producer = topic.event_producer(max_in_flight=10)
        line.freeze()
        sent = 0

        async def send() -> None:
            nonlocal sent
            for number in range(100):
                await producer.send(b"%d" % number)
                sent += 1

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.2)
        assert sent == 10  # the eleventh waits for an ack
        line.thaw()
        await sending
        await producer.close()
        assert await values(topic) == numbers(100)
    with pytest.raises(ConfigError):
        topic.event_producer(max_in_flight=0)


async def test_refused_events_are_named_at_the_end(accounts: Topic) -> None:
    wrong = PublishOptions(expected_last=99)
    producer = accounts.event_producer()
    for number in range(5):
        await producer.send(b"%d" % number, "k", options=wrong if number in (1, 3) else None)
    with pytest.raises(PartlyStored) as caught:
        await producer.close()
    assert (caught.value.total, sorted(caught.value.failed)) == (5, [1, 3])
    assert isinstance(caught.value.failed[1], WrongSequence)
    assert await values(accounts) == [b"0", b"2", b"4"]


async def test_flush_stores_everything_so_far_and_the_producer_continues(
    topic: Topic,
) -> None:
    async with topic.event_producer() as producer:
        for number in range(50):
            await producer.send(b"%d" % number)
        await producer.flush()
        assert await values(topic) == numbers(50)
        await producer.send(b"50")
    assert await values(topic) == numbers(51)


async def test_an_error_in_the_block_is_not_hidden_by_refused_events(
    topic: Topic, accounts: Topic
) -> None:
    async def fail(producer: EventProducer | PackProducer, **about: Any) -> None:
        async with producer:
            await producer.send(b"1", "k", **about)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail(accounts.event_producer(), options=PublishOptions(expected_last=9))
    with pytest.raises(ZeroDivisionError):
        await fail(topic.producer())
    assert await values(topic) == [b"1"]


async def test_events_in_packs_come_back_one_by_one(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=2)
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    async with topic.producer(Packing(max_events=100)) as producer:
        for number in range(500):
            await producer.send(
                b"%d" % number, f"k{number % 4}", headers={"n": str(number)}, id=f"i{number}"
            )
        await producer.send(None, "gone", timestamp=moment)
    events = await read(topic)
    assert sorted(int(e.value) for e in events if e.value is not None) == list(range(500))
    for event in events:
        if event.value is None:
            assert (event.key, event.timestamp) == ("gone", moment)
        else:
            number = int(event.value)
            assert (event.key, event.id) == (f"k{number % 4}", f"i{number}")
            assert dict(event.headers) == {"n": str(number)}
    info = await topic.info()
    assert info.messages < 12  # packs of up to 100 events, not single messages
    one = events[0]
    assert (await topic.get(one.offset, one.partition))[0].position == one.position


async def test_a_pack_is_sent_after_it_has_lingered(topic: Topic) -> None:
    async with topic.producer(Packing(linger=0.05)) as producer:
        await producer.send(b"1")
        await producer.send(b"2")
        await eventually(lambda: values(topic), [b"1", b"2"])
        assert (await topic.info()).messages == 1


async def test_draining_a_connection_stores_what_producers_still_hold(millstream_url: str) -> None:
    mill = await millstream.connect(millstream_url)
    topic = await mill.create_topic("orders")
    packs = topic.producer(Packing(linger=30))
    single = topic.event_producer()
    for number in range(10):
        await packs.send(b"p%d" % number)
        await single.send(b"s%d" % number)
    await mill.drain()
    with pytest.raises(ConnectionClosed):
        await packs.send(b"x")
    async with millstream.connect(millstream_url) as other:
        stored = await values(await other.topic("orders"))
    assert sorted(stored) == sorted(
        [b"p%d" % n for n in range(10)] + [b"s%d" % n for n in range(10)]
    )


async def test_a_paced_publisher_is_opened_from_the_connection(mill: Mill) -> None:
    async with mill.subscribe("s") as subscriber, mill.paced("s", window_messages=10) as sender:
        for number in range(50):
            await sender.publish(b"%d" % number)
        assert [(await subscriber.next(15)).data for _ in range(50)] == numbers(50)
        assert sender.published == 50
