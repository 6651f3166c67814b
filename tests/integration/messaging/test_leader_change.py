"""A cluster whose leaders change, on request and by a crash, under publishers and readers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

import millstream
from millstream.broker import Cluster
from millstream.deadline import Deadline
from millstream.errors import MillstreamError, RequestTimeout
from millstream.messaging import Delivery, Event, Lag, NewEvent, SubscriptionSettings, Topic
from millstream.mill import Mill
from millstream.settings import Reconnect
from millstream.testing import running_cluster
from tests.integration.messaging.event_kit import values
from tests.integration.messaging.topic_kit import eventually

NODES = ("n1", "n2", "n3")
QUICK = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(durability="periodic") as cluster:
        yield cluster


@pytest.fixture
async def mill(cluster: Cluster) -> AsyncIterator[Mill]:
    async with millstream.connect(cluster.url, reconnect=QUICK, request_timeout=60.0) as mill:
        yield mill


async def leader(mill: Mill, stream: str) -> str:
    """The server that leads a stream; while there is none it is waited for."""
    deadline = Deadline(60)
    while True:
        info = await mill.jetstream.stream_info(stream)
        if info.cluster and info.cluster.leader:
            return info.cluster.leader
        assert not deadline.passed, f"{stream} has no leader"
        await asyncio.sleep(0.02)


def node_of(cluster: Cluster, server: str) -> str:
    return next(n for n in NODES if cluster.server_name(n) == server)


def durability_of(topic: Topic) -> Callable[[], Awaitable[str]]:
    async def durability() -> str:
        return topic.durability

    return durability


async def work(
    topic: Topic, count: int, disturb: asyncio.Task[None]
) -> tuple[Counter[bytes], list[bytes]]:
    """Publish and handle events while something happens; what was handled, and what is stored."""
    seen: Counter[bytes] = Counter()

    async def handle(delivery: Delivery) -> None:
        seen[delivery.value] += 1

    member = await topic.subscribe("s", SubscriptionSettings(ack_wait=2.0))
    running = asyncio.create_task(member.run(handle, concurrency=8))
    async with topic.event_producer(max_in_flight=64) as producer:
        number = 0
        while number < count or not disturb.done():
            await producer.send(b"%d" % number, f"k{number % 5}")
            number += 1
            await asyncio.sleep(0.002)
    await disturb

    async def handled() -> int:
        return len(seen)

    # The server that reports the lag may see the last events a moment later.
    await eventually(handled, number, 60)
    await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0), 60)
    await member.close()
    await running
    stored = await values(topic)
    assert Counter(stored) == Counter(b"%d" % n for n in range(number))
    return seen, stored


async def test_a_leader_that_steps_down_is_not_noticed(mill: Mill) -> None:
    topic = await mill.create_topic("steady", replicas=3)
    leaders = set()

    async def step_down() -> None:
        for _ in range(3):
            await asyncio.sleep(0.2)
            leaders.add(before := await leader(mill, "steady"))
            await mill.jetstream.ask("STREAM.LEADER.STEPDOWN.steady")
            await mill.jetstream.ask("CONSUMER.LEADER.STEPDOWN.steady.s")
            # Not forever: the lead may have moved on and come back unseen.
            seen, patience = before, Deadline(5)
            while seen == before and not patience.passed:
                await asyncio.sleep(0.02)
                seen = await leader(mill, "steady")
            leaders.add(seen)

    await (await topic.subscribe("s", SubscriptionSettings(ack_wait=2.0))).close()
    seen, stored = await work(topic, 300, asyncio.create_task(step_down()))
    assert set(seen) == set(stored)
    assert len(leaders) > 1
    assert mill.connection.reconnects == 0


async def test_a_leader_that_is_killed_loses_nothing(cluster: Cluster, mill: Mill) -> None:
    topic = await mill.create_topic("robust", replicas=3)
    await topic.publish_many([NewEvent(b"x", "k")])
    await topic.admin.purge()

    async def kill() -> None:
        await asyncio.sleep(0.3)
        node = node_of(cluster, await leader(mill, "robust"))
        await asyncio.to_thread(cluster.kill, node)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(cluster.restart, node)

    seen, stored = await work(topic, 300, asyncio.create_task(kill()))
    assert set(seen) == set(stored)
    # `unknown` from the reconnect until the cluster has elected a leader that can answer.
    await eventually(durability_of(topic), "replicated", 60)


async def test_what_an_ack_means_is_asked_until_a_cluster_without_a_majority_has_one(
    cluster: Cluster, mill: Mill
) -> None:
    await mill.create_topic("asked", replicas=3)
    impatient = millstream.connect(cluster.url, reconnect=QUICK, request_timeout=0.5)
    async with impatient as other:
        topic = await patient(lambda: other.topic("asked"))
        for node in NODES:
            await asyncio.to_thread(cluster.kill, node)
        first, *others = NODES
        starting = [asyncio.create_task(asyncio.to_thread(cluster.restart, first))]
        await eventually(durability_of(topic), "unknown", 60)
        # The one server that is up cannot answer: nobody may lead without a majority.
        with pytest.raises(MillstreamError):
            await topic.admin.refresh_durability()
        for node in others:
            starting.append(asyncio.create_task(asyncio.to_thread(cluster.restart, node)))
        await asyncio.gather(*starting)
        await eventually(durability_of(topic), "replicated", 60)


async def patient(call: Callable[[], Awaitable[Topic]]) -> Topic:
    """The answer to a call that may not be answered immediately."""
    deadline = Deadline(60)
    while True:
        try:
            return await call()
        except RequestTimeout:
            assert not deadline.passed
            await asyncio.sleep(0.02)


async def reader_elsewhere(mill: Mill, topic: Topic) -> tuple[AsyncIterator[Event], str]:
    """A reader that follows, with its consumer on another server than the one we talk to."""
    while True:
        reader = topic.read(follow=True)
        await anext(reader)
        found = await mill.jetstream.consumers(topic.name)
        servers = {info.cluster.leader if info.cluster else "" for info in found}
        # More than one: after a silence the reader has started again.
        if len(found) == 1 and not servers & {"", mill.connection.info.server_name}:
            return reader, servers.pop() or ""
        await reader.aclose()  # type: ignore[attr-defined]
        while await mill.jetstream.consumers(topic.name):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_reader_continues_when_the_server_of_its_consumer_is_killed(
    cluster: Cluster, mill: Mill
) -> None:
    """Its consumer is not replicated: it is gone with the server, without any notice."""
    topic = await mill.create_topic("followed", replicas=3)
    await topic.publish(b"0")
    async with asyncio.timeout(120):
        reader, server = await reader_elsewhere(mill, topic)
        node = node_of(cluster, server)
        await asyncio.to_thread(cluster.kill, node)
        try:
            await topic.publish_many([NewEvent(b"%d" % n) for n in range(1, 20)])
            got = [(await anext(reader)).value for _ in range(1, 20)]
        finally:
            await asyncio.to_thread(cluster.restart, node)
    assert got == [b"%d" % n for n in range(1, 20)]
    assert mill.connection.reconnects == 0
