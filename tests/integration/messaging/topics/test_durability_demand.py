"""A topic may demand a durability: it is created and written only where the server gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import Broker, BrokerSettings, Cluster, Durability
from millstream.errors import ConfigError, NotDurable, TopicConflict, TopicNotFound
from millstream.events.packs.packing import Packing
from millstream.mill import Mill
from millstream.settings import ConnectionSettings, Reconnect
from millstream.spark.sink.targets import find_target
from millstream.testing import running_broker

QUICK = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
PATIENCE = 60.0


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker with fsync; on the same data it gets the same port again."""
    broker = Broker(BrokerSettings(data=tmp_path / "data"))
    await asyncio.to_thread(broker.start)
    yield broker
    await asyncio.to_thread(broker.stop, grace=2.0)


async def weaken(broker: Broker) -> Broker:
    """The same broker, started again with less durability."""
    weaker = Broker(replace(broker.settings, durability=Durability.PERIODIC))
    await asyncio.to_thread(weaker.start)
    return weaker


async def test_a_demand_that_the_server_meets_is_stored_with_the_topic(broker: Broker) -> None:
    async with millstream.connect(broker.url) as mill:
        topic = await mill.create_topic("orders", durability="fsync")
        assert (await topic.publish(b"x")).durability == "fsync"
        assert (await mill.topic("orders")).settings.durability == "fsync"
        await mill.create_topic("orders", durability="fsync")
        with pytest.raises(TopicConflict, match="durability is 'fsync', wanted none"):
            await mill.create_topic("orders")
        await mill.edit_topic("orders", durability="periodic")
        assert (await mill.topic("orders")).settings.durability == "periodic"
        await mill.create_topic("plain")
        with pytest.raises(ConfigError, match="needs replicas"):
            await mill.edit_topic("plain", durability="replicated")
    await asyncio.to_thread(find_target, ConnectionSettings(urls=(broker.url,)), "orders")


async def test_a_server_that_gives_less_is_refused_and_nothing_is_created() -> None:
    async with (
        running_broker(durability="periodic") as broker,
        millstream.connect(broker.url) as mill,
    ):
        with pytest.raises(NotDurable, match=r"demands the durability 'fsync'.*gives 'periodic'"):
            await mill.create_topic("orders", durability="fsync")
        with pytest.raises(TopicNotFound):
            await mill.topic("orders")
        await mill.create_topic("orders", durability="periodic")
        with pytest.raises(NotDurable):
            await mill.edit_topic("orders", durability="fsync")
        assert (await mill.topic("orders")).settings.durability == "periodic"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"durability": "replicated"}, "needs replicas"),
        ({"durability": "fsync", "storage": "memory"}, "needs storage='file'"),
        ({"durability": "periodic", "early_ack": True}, "needs storage='file'"),
        ({"durability": "paper"}, "durability"),
        ({"durability": "fsync", "mirror": "other"}, "nothing is published to a copy"),
    ],
)
async def test_a_demand_that_the_settings_exclude_is_refused(
    mill: Mill, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        await mill.create_topic("orders", **settings)


async def test_producers_fail_when_the_server_they_reconnect_to_gives_less(
    broker: Broker,
) -> None:
    async with millstream.connect(broker.url, reconnect=QUICK, request_timeout=PATIENCE) as mill:
        topic = await mill.create_topic("orders", durability="fsync")
        free = await mill.create_topic("free")
        assert (await free.publish(b"x")).durability == "fsync"
        producer, packs = topic.event_producer(), topic.producer(Packing(max_events=1))
        writer = await topic.writer("w").open()
        await producer.send(b"1")
        await producer.flush()
        await asyncio.to_thread(broker.stop, grace=2.0)
        # Handed over while nobody knows how the next server stores.
        waiting = asyncio.create_task(topic.publish(b"2"))
        unbound = asyncio.create_task(free.publish(b"2"))
        await asyncio.sleep(0)
        weaker = await weaken(broker)
        try:
            with pytest.raises(NotDurable, match="gives 'periodic'"):
                await waiting
            assert (await unbound).durability in ("periodic", "unknown")  # never the old one
            with pytest.raises(NotDurable):
                await topic.publish(b"3")
            with pytest.raises(NotDurable):
                await topic.publish_many([b"3"])
            with pytest.raises(NotDurable):
                await producer.send(b"3")
            with pytest.raises(NotDurable):
                topic.producer()
            await packs.send(b"3")
            with pytest.raises(millstream.errors.PartlyStored, match="demands the durability"):
                await packs.flush()
            await writer.write(b"3", position=1)
            with pytest.raises(NotDurable):
                await writer.flush()
            await writer.abandon()
            # Reading is not refused, and what was acknowledged is there.
            values = [event.value async for event in topic.read()]
            assert values[0] == b"1"
            with pytest.raises(NotDurable):
                await asyncio.to_thread(
                    find_target, ConnectionSettings(urls=(weaker.url,)), "orders"
                )
        finally:
            await asyncio.to_thread(weaker.stop, grace=2.0)
        # The server does again what is demanded.
        await asyncio.to_thread(broker.start)
        await mill.flush()
        assert (await topic.publish(b"4")).durability == "fsync"


async def test_replicas_meet_both_demands_if_their_nodes_sync(millstream_cluster: Cluster) -> None:
    async with millstream.connect(millstream_cluster.url, request_timeout=PATIENCE) as mill:
        synced = await mill.create_topic("synced", replicas=3, durability="fsync")
        assert (await synced.publish(b"x")).durability == "replicated"
        copied = await mill.create_topic("copied", replicas=3, durability="replicated")
        assert (await copied.publish(b"x")).durability == "replicated"
        spread = await mill.create_topic("spread", partitions=3, durability="fsync")
        receipts = [await spread.publish(b"x", key=str(number)) for number in range(6)]
        assert {receipt.durability for receipt in receipts} == {"fsync"}
        urls = tuple(millstream_cluster.url.split(","))
        for name in ("synced", "copied", "spread"):
            target = await asyncio.to_thread(find_target, ConnectionSettings(urls=urls), name)
            assert target.demands
            await mill.delete_topic(name)
