"""Replay: any range of a topic, by offset or time, without touching subscriptions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from nats.aio.client import Client as Peer

import millstream
from millstream.errors import ConfigError, RequestTimeout, TopicNotFound
from millstream.messaging import Delivery, Event, NewEvent, ReadPlan, Start, Topic
from millstream.messaging.topics.admin import Purge
from millstream.mill import Mill
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ConsumerConfig, ConsumerInfo
from tests.integration.messaging.event_kit import read, take, until_reading, values
from tests.integration.messaging.topic_kit import eventually, put


async def fill(topic: Topic, count: int, first: int = 0) -> None:
    numbers = range(first, first + count)
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in numbers])


def numbers(*found: int) -> list[bytes]:
    return [b"%d" % number for number in found]


async def test_a_range_is_read_by_offset(topic: Topic) -> None:
    await fill(topic, 10)
    assert await values(topic) == numbers(*range(10))
    assert await values(topic, start=Start.at_offset(4)) == numbers(*range(3, 10))
    assert await values(topic, start=Start.at_offset(4), end=7) == numbers(3, 4, 5)
    assert await values(topic, end=3) == numbers(0, 1)
    assert await values(topic, start=Start.at_offset(4), end=4) == []
    assert await values(topic, start=Start.at_offset(50)) == []
    assert await values(topic, end=50) == numbers(*range(10))
    assert await values(topic, start=Start.LAST) == numbers(9)
    assert await values(topic, start=Start.LAST_PER_KEY) == numbers(7, 8, 9)
    assert await values(topic, start=Start.NEW) == []


async def test_a_range_is_read_by_time(topic: Topic) -> None:
    moments = []
    for part in range(3):
        await asyncio.sleep(0.01)
        moments.append(datetime.now(UTC))
        await fill(topic, 3, first=3 * part)
    await asyncio.sleep(0.01)
    after = datetime.now(UTC)
    assert await values(topic, start=Start.at_time(moments[1])) == numbers(*range(3, 9))
    assert await values(topic, end=moments[1]) == numbers(0, 1, 2)
    between = await values(topic, start=Start.at_time(moments[1]), end=moments[2])
    assert between == numbers(3, 4, 5)
    assert await values(topic, start=Start.at_time(after)) == []
    assert await values(topic, end=moments[0]) == []


async def test_a_range_is_read_again_exactly_the_same(topic: Topic) -> None:
    await fill(topic, 500)
    plan = ReadPlan(start=Start.at_offset(100), end=400)

    async def once() -> list[tuple[object, ...]]:
        return [(e.position, e.value, e.timestamp_ns) async for e in topic.read(plan)]

    first = await once()
    await fill(topic, 10, first=500)
    assert len(first) == 300
    assert await once() == first


async def test_reading_affects_no_subscription_and_leaves_nothing_behind(
    mill: Mill, topic: Topic
) -> None:
    await fill(topic, 5)
    await (await topic.subscribe("s")).close()
    before = await topic.subscriptions.info("s")
    await values(topic)
    reader = topic.read()
    assert await anext(reader)
    await reader.aclose()  # type: ignore[attr-defined]
    assert await topic.subscriptions.info("s") == before

    async def consumers() -> list[str]:
        return [info.name for info in await mill.jetstream.consumers("orders")]

    await eventually(consumers, ["s"])


async def test_gaps_are_skipped(topic: Topic) -> None:
    await fill(topic, 30)
    for offset in (1, 2, 5, 6, 7, 29, 30):
        await topic._jetstream.delete_message("orders", offset)
    left = [n for n in range(1, 31) if n not in (1, 2, 5, 6, 7, 29, 30)]
    assert [event.offset for event in await read(topic)] == left
    assert [e.offset for e in await read(topic, start=Start.at_offset(5), end=9)] == [8]
    assert await read(topic, start=Start.at_offset(29), end=31) == []
    await topic.admin.purge(Purge(before=20))
    assert [event.offset for event in await read(topic, end=22)] == [20, 21]
    await topic.admin.purge()
    assert await read(topic) == []


async def test_keys_are_read_alone_also_from_packs_and_partitions(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=3)
    await fill(topic, 9)
    async with topic.producer() as producer:
        for number in range(9, 18):
            await producer.send(b"%d" % number, f"k{number % 3}")
    found = await values(topic, keys=["k1"])
    assert found == numbers(*range(1, 18, 3))
    both = await values(topic, keys=["k0", "k2"])
    assert sorted(both, key=int) == numbers(*(n for n in range(18) if n % 3 != 1))
    assert await values(topic, keys=["none"]) == []
    part = await topic.last("k1")
    assert part is not None
    assert {e.partition for e in await read(topic, partitions=[part.partition])} == {part.partition}


async def test_events_without_a_key_are_read_by_subject(topic: Topic) -> None:
    await fill(topic, 6)
    assert await values(topic, subjects=["orders.k0", "orders.k2"]) == numbers(0, 2, 3, 5)
    with pytest.raises(ConfigError):
        topic.read(keys=["a"], subjects=["b"])


async def test_following_continues_with_events_stored_later(topic: Topic) -> None:
    await fill(topic, 3)
    reader = topic.read(follow=True, start=Start.at_offset(2))
    seen: list[bytes] = []

    async def follow() -> None:
        async for event in reader:
            seen.append(event.value)
            if event.value == b"9":
                return

    following = asyncio.create_task(follow())
    for number in range(3, 10):
        await fill(topic, 1, first=number)
        await asyncio.sleep(0.005)
    await asyncio.wait_for(following, 20)
    await reader.aclose()  # type: ignore[attr-defined]
    assert seen == numbers(*range(1, 10))
    with pytest.raises(ConfigError, match="forever"):
        topic.read(follow=True, end=5)


async def test_following_new_events_leaves_out_the_old(topic: Topic) -> None:
    await fill(topic, 3)
    reader = topic.read(follow=True, start=Start.NEW)
    following = asyncio.ensure_future(anext(reader))
    await until_reading(topic)
    await fill(topic, 1, first=3)
    event: Event = await asyncio.wait_for(following, 20)
    assert event.value == b"3"
    await reader.aclose()  # type: ignore[attr-defined]


async def test_any_stream_is_read_and_subscribed_as_it_is(mill: Mill, peer: Peer) -> None:
    stream = peer.jetstream()
    await stream.add_stream(name="FOREIGN", subjects=["f.>", "g"])
    for subject, value in (("f.a.b", b"1"), ("g", b"2"), ("f._x", b"3")):
        await stream.publish(subject, value, headers={"h": subject})
    topic = await mill.topic("FOREIGN")
    found = [(e.subject, e.value, e.key, dict(e.headers), e.offset) for e in await read(topic)]
    assert found == [
        ("f.a.b", b"1", None, {"h": "f.a.b"}, 1),
        ("g", b"2", None, {"h": "g"}, 2),
        ("f._x", b"3", None, {"h": "f._x"}, 3),
    ]
    assert await values(topic, subjects=["f.>"]) == [b"1", b"3"]
    async with topic.subscribe("s") as member:
        taken: list[Delivery] = []
        while len(taken) < 3:
            taken += [delivery for delivery in await member.pull() if delivery.ack() is None]
        assert [delivery.value for delivery in taken] == [b"1", b"2", b"3"]
    with pytest.raises(ConfigError, match="no keys"):
        await values(topic, keys=["a"])
    with pytest.raises(ConfigError, match="no keys"):
        await topic.last("a")


async def test_millstreams_own_messages_are_not_events(mill: Mill, topic: Topic) -> None:
    await put(mill.connection, "orders._redrive.queue", b"note")
    await put(mill.connection, "orders._", b"keyless")
    await put(mill.connection, "orders._schedule.x", b"later")
    await put(mill.connection, "orders.=5Fx", b"event")
    assert [(e.key, e.value) for e in await read(topic)] == [(None, b"keyless"), ("_x", b"event")]
    assert await topic.get(1) == []
    async with topic.subscribe("s") as member:
        assert [d.value for d in await take(member, 2)] == [b"keyless", b"event"]
    async with topic.subscribe("last", millstream.SubscriptionSettings(start=Start.LAST)):
        pass


async def test_reading_a_missing_topic_is_an_error_not_an_empty_range(
    mill: Mill, topic: Topic
) -> None:
    with pytest.raises(TopicNotFound):
        await mill.topic("nowhere")
    await mill.delete_topic("orders")
    with pytest.raises(TopicNotFound):
        await read(topic)


async def test_a_slow_reader_gets_everything(topic: Topic) -> None:
    await fill(topic, 1000)
    seen = 0
    async for _event in topic.read():
        seen += 1
        if seen % 250 == 0:
            await asyncio.sleep(0.05)
    assert seen == 1000


async def test_a_range_larger_than_any_window_is_complete(mill: Mill) -> None:
    topic = await mill.create_topic("large", storage="memory")
    payload = b"x" * 200_000
    await topic.publish_many([payload + b"%d" % n for n in range(200)])  # 40 MB
    found = [event.value[200_000:] async for event in topic.read()]
    assert found == numbers(*range(200))


async def test_a_consumer_without_an_answer_is_created_under_another_name(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster that has given it to a server which has just died: it is never answered."""
    await fill(topic, 10)
    create, asked = JetStream.create_consumer, list[str]()

    async def first_is_lost(
        jetstream: JetStream, stream: str, config: ConsumerConfig, action: str = "", **rest: Any
    ) -> ConsumerInfo:
        asked.append(config.name or "")
        if len(asked) == 1:
            raise RequestTimeout(stream, 3.0)
        return await create(jetstream, stream, config, action, **rest)

    monkeypatch.setattr(JetStream, "create_consumer", first_is_lost)
    assert await values(topic) == numbers(*range(10))
    assert len(set(asked)) == 2
