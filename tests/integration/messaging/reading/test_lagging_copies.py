"""Reading a replicated topic while one of its copies lags: never less than the leader has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

import millstream
from millstream import NewEvent, Start, Topic
from millstream.broker import BrokerSettings, Cluster, Durability
from millstream.deadline import Deadline
from millstream.errors import NoResponders, RequestTimeout
from millstream.settings import ConnectionSettings
from millstream.wire.aio.direct_reader import DirectReader
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.range_cursor import Range
from millstream.wire.sync.connection import BlockingConnection
from millstream.wire.sync.range import read_range

COUNT = 1000
VALUE = b"." * 20_000  # so much that a node which comes back is busy for a while


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(BrokerSettings(data=tmp_path, durability=Durability.PERIODIC), nodes=3)
    await asyncio.to_thread(cluster.start, timeout=60.0)
    yield cluster
    await asyncio.to_thread(cluster.stop, grace=5.0)


async def replayed(topic: Topic, first: int) -> int:
    """As `topic.read`, `verify` and everything above them reads."""
    return len([event async for event in topic.read(start=Start.at_offset(first))])


async def read_by_spark(url: str, first: int) -> int:
    """As the tasks of Spark read."""

    def read() -> int:
        settings = ConnectionSettings(urls=tuple(url.split(",")))
        with BlockingConnection(settings) as connection:
            connection.open(Deadline(20.0))
            return sum(len(part) for part in read_range(connection, "log", first, first + COUNT))

    return await asyncio.to_thread(read)


async def looked_at(mill: millstream.Mill, first: int) -> int:
    """Read as a user that may not create consumers."""
    reader = DirectReader(mill.jetstream, "log", Range(first, first + COUNT), Signal())
    await reader.open()
    found = 0
    try:
        while not reader.done:
            taken = reader.take_now(COUNT)
            found += len(taken)
            if not taken and not reader.done:
                await reader.signal.wait(0.1)
    finally:
        reader.close()
    return found


async def all_or_an_error(reading: Awaitable[int]) -> int:
    """What was read; an error is in order too, as long as the node is not quite there."""
    try:
        return await reading
    except (RequestTimeout, NoResponders):
        return COUNT


async def test_every_way_of_reading_gives_all_of_a_range_while_a_copy_catches_up(
    cluster: Cluster,
) -> None:
    """cluster-power-periodic, seed 408: a reader ended where the copy it was given ended."""
    async with millstream.connect(cluster.url) as mill:
        topic = await mill.create_topic("log", replicas=3)
        first = 1
        for number in range(3):
            leader = (await topic.info()).partitions[0].leader
            followers = [n for n in cluster.nodes if cluster.server_name(n) != leader]
            lagging = followers[number % 2]
            await asyncio.to_thread(cluster.kill, lagging)
            await topic.publish_many(NewEvent(VALUE) for _ in range(COUNT))
            starting = asyncio.create_task(
                asyncio.to_thread(cluster.restart, lagging, timeout=60.0)
            )
            while True:
                last_look = starting.done()
                for reading in (
                    replayed(topic, first),
                    read_by_spark(cluster.url, first),
                    looked_at(mill, first),
                ):
                    assert await all_or_an_error(reading) == COUNT
                if last_look:
                    break
            await starting
            first += COUNT


async def test_a_range_ends_where_its_end_was_deleted_or_has_other_keys(cluster: Cluster) -> None:
    """The leader's answer ends a range too; asking for it must not make readers wait."""
    async with millstream.connect(cluster.url) as mill, asyncio.timeout(60):
        topic = await mill.create_topic("log", replicas=3)
        await topic.publish_many(NewEvent(b"%d" % n, f"k{n % 2}") for n in range(10))
        assert [e.offset async for e in topic.read(keys=["k0"])] == [1, 3, 5, 7, 9]
        await mill.jetstream.delete_message("log", 10)
        assert [e.offset async for e in topic.read()] == list(range(1, 10))
        await topic.admin.purge()
        assert [e async for e in topic.read()] == []
        assert await read_by_spark(cluster.url, 1) == 0
        assert await looked_at(mill, 1) == 0
