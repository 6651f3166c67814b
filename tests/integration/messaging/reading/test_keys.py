"""Reading the events of some keys: through the index of subjects, with packs or without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

import millstream
from millstream.errors import DataLoss
from millstream.events.event import Partition
from millstream.events.packs.packing import Packing
from millstream.messaging import NewEvent, Start, Topic
from millstream.messaging.reading import by_key, replay
from millstream.mill import Mill
from millstream.testing import running_broker
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ConsumerConfig, ConsumerInfo
from tests.integration.messaging.event_kit import until_reading, values

KEYS = [f"k{n}" for n in range(5)]


@pytest.fixture
def filters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many filters each consumer has that is created from now on."""
    seen: list[int] = []
    create = JetStream.create_consumer

    async def counted(
        self: JetStream, stream: str, config: ConsumerConfig, **rest: Any
    ) -> ConsumerInfo:
        seen.append(len(config.filter_subjects or [config.filter_subject]))
        return await create(self, stream, config, **rest)

    monkeypatch.setattr(JetStream, "create_consumer", counted)
    return seen


async def fill(topic: Topic, count: int = 60) -> None:
    await topic.publish_many(NewEvent(b"%d" % n, KEYS[n % 5]) for n in range(count))


async def mixed(topic: Topic) -> None:
    """Plain events and packs in turns, with the same keys."""
    for lot in range(8):
        await fill(topic, 15)
        async with topic.producer(Packing(max_events=7)) as producer:
            for n in range(20):
                await producer.send(b"packed %d.%d" % (lot, n), KEYS[n % 5])


async def expected(topic: Topic, keys: list[str], **choices: Any) -> list[tuple[int, int, int]]:
    return [event.position async for event in topic.read(**choices) if event.key in keys]


async def positions(topic: Topic, **choices: Any) -> list[tuple[int, int, int]]:
    return [event.position async for event in topic.read(**choices)]


@pytest.mark.parametrize("settings", [{"packs": False}, {"history": 100}, {}], ids=str)
async def test_a_key_without_packs_is_read_by_one_filter(
    mill: Mill, filters: list[int], settings: dict[str, Any]
) -> None:
    topic = await mill.create_topic("log", **settings)
    await fill(topic)
    assert await values(topic, keys=["k1"]) == [b"%d" % n for n in range(1, 60, 5)]
    assert await values(topic, keys=["k1", "k4"]) == [
        b"%d" % n for n in range(60) if n % 5 in (1, 4)
    ]
    assert await values(topic, keys=["none"]) == []
    assert await values(topic, keys=["k1"], start=Start.at_offset(8), end=20) == [
        b"11",
        b"16",
    ]
    rows = [
        value
        async for batch in topic.batches(keys=["k2"])
        for value in batch.column("value").to_pylist()
    ]
    assert rows == [b"%d" % n for n in range(2, 60, 5)]
    assert set(filters) <= {1}


async def test_a_key_with_more_events_than_one_answer_is_read_on(
    mill: Mill, monkeypatch: pytest.MonkeyPatch, filters: list[int]
) -> None:
    monkeypatch.setattr(by_key, "SHORT_MESSAGES", 3)
    topic = await mill.create_topic("log", packs=False)
    await fill(topic, 500)
    assert await values(topic, keys=["k1"]) == [b"%d" % n for n in range(1, 500, 5)]
    wanted = [b"%d" % n for n in range(500) if n % 5 in (0, 3)]
    assert await values(topic, keys=["k0", "k3"]) == wanted
    assert filters == [1, 1, 1]


@pytest.mark.parametrize("short", [2, 500])
async def test_keys_in_packs_and_beside_them_are_read_in_order(
    mill: Mill, monkeypatch: pytest.MonkeyPatch, filters: list[int], short: int
) -> None:
    monkeypatch.setattr(by_key, "SHORT_MESSAGES", short)
    topic = await mill.create_topic("log", partitions=2)
    await mixed(topic)
    dice = random.Random(7)
    for _ in range(12):
        keys = dice.sample(KEYS, dice.randint(1, 4))
        choices: dict[str, Any] = {"partitions": [dice.randrange(2)]}
        if dice.random() < 0.6:
            choices["start"] = Start.at_offset(dice.randint(1, 60))
            choices["end"] = dice.randint(1, 90)
        filters.clear()
        found = await positions(topic, keys=keys, **choices)
        assert set(filters) <= {1}
        assert found == await expected(topic, keys, **choices)
        batches = [
            place
            async for batch in topic.batches(keys=keys, **choices)
            for place in zip(
                *(batch.column(name).to_pylist() for name in ("partition", "offset", "index")),
                strict=True,
            )
        ]
        assert batches == found


async def test_many_keys_are_read_by_one_consumer(mill: Mill, filters: list[int]) -> None:
    topic = await mill.create_topic("log")
    many = [f"m{n}" for n in range(by_key.KEYS_MAX + 8)]
    await topic.publish_many(NewEvent(key.encode(), key) for key in [*many, "other"] * 3)
    assert await values(topic, keys=many) == [key.encode() for key in many * 3]
    assert filters == [len(many)]


async def test_a_pack_that_is_stored_after_the_end_was_fixed_is_not_read(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await mill.create_topic("log")
    await fill(topic, 10)
    ask = replay.holds_packs

    async def between(jetstream: JetStream, partition: Partition) -> bool:
        async with topic.producer() as producer:
            await producer.send(b"late", "k1")
        return await ask(jetstream, partition)

    monkeypatch.setattr(replay, "holds_packs", between)
    assert await values(topic, keys=["k1"]) == [b"1", b"6"]
    monkeypatch.undo()
    assert await values(topic, keys=["k1"]) == [b"1", b"6", b"late"]


async def _follow(topic: Topic, count: int) -> list[bytes]:
    found: list[bytes] = []
    async for event in topic.read(keys=["k1"], follow=True):
        found.append(event.value)
        if len(found) == count:
            break
    return found


async def test_a_reader_that_follows_gets_packs_that_come_later(mill: Mill) -> None:
    topic = await mill.create_topic("log")
    await fill(topic, 10)
    following = asyncio.create_task(_follow(topic, 4))
    await until_reading(topic)
    async with topic.producer() as producer:
        await producer.send(b"packed", "k1")
        await producer.send(b"of another", "k2")
    await topic.publish(b"plain", "k1")
    assert await asyncio.wait_for(following, 20) == [b"1", b"6", b"packed", b"plain"]


async def test_following_a_topic_that_takes_no_packs_needs_one_filter(
    mill: Mill, filters: list[int]
) -> None:
    topic = await mill.create_topic("log", packs=False)
    await fill(topic, 10)
    assert await asyncio.wait_for(_follow(topic, 2), 20) == [b"1", b"6"]
    assert filters == [1]


async def test_a_mirror_of_a_topic_with_packs_shows_those_of_a_key(mill: Mill) -> None:
    topic = await mill.create_topic("log")
    await mixed(topic)
    copy = await mill.create_topic("copy", mirror="log")
    wanted = await expected(topic, ["k3"])

    async def copied() -> AsyncIterator[None]:
        while (await copy.info()).partitions[0].messages < (await topic.info()).partitions[
            0
        ].messages:
            yield
            await asyncio.sleep(0.02)

    async with asyncio.timeout(20):
        async for _ in copied():
            pass
    assert await positions(copy, keys=["k3"]) == wanted


async def test_a_key_with_an_event_that_cannot_be_read_is_a_loss() -> None:
    """The broker finds the damage when it reads, and gives what comes after it."""
    async with running_broker() as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.create_topic("log", packs=False)
            await topic.publish_many(NewEvent(b"value %d;" % n, f"k{n % 5}") for n in range(40))
            await topic.publish(b"value alone;", "alone")
        await asyncio.to_thread(broker.stop)
        (block,) = broker.data.rglob("streams/log/msgs/*.blk")
        content = bytearray(block.read_bytes())
        for value in (b"value 21;", b"value alone;"):
            content[content.index(value) + 2] ^= 4
        block.write_bytes(content)
        await asyncio.to_thread(broker.start)
        async with millstream.connect(broker.url) as mill, asyncio.timeout(60):
            topic = await mill.topic("log")
            for keys in (["k1"], ["k2", "alone"]):
                with pytest.raises(DataLoss, match="cannot read one of them"):
                    await values(topic, keys=keys)
            assert await values(topic, keys=["k2", "none"]) == [
                b"value %d;" % n for n in range(2, 40, 5)
            ]
