"""A cluster whose nodes are down gives short lists; nothing takes them for complete ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

import millstream
from millstream.broker import Cluster
from millstream.deadline import Deadline
from millstream.errors import ApiError, IncompleteList, RequestTimeout, TopicNotFound
from millstream.messaging import Topic
from millstream.mill import Mill
from millstream.settings import ConnectionSettings
from millstream.testing import running_cluster
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.streams import list_streams

PATIENCE = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


@dataclass
class Order:
    id: int


async def node_of(cluster: Cluster, topic: Topic) -> str:
    """The node that keeps a topic of one copy."""
    (part,) = (await topic.info()).partitions
    return next(name for name in cluster.nodes if cluster.server_name(name) == part.leader)


async def refused(call: Callable[[], Awaitable[object]]) -> IncompleteList:
    """The error of a call that must not succeed; others mean that a new leader is elected."""
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        with suppress(RequestTimeout):
            try:
                found = await call()
            except IncompleteList as error:
                return error
            raise AssertionError(f"a short list was taken for complete: {found}")
    raise AssertionError(f"no answer within {PATIENCE:g} s")


async def test_a_list_without_a_stopped_node_s_streams_is_an_error_until_it_is_back(
    cluster: Cluster,
) -> None:
    async with (
        millstream.connect(cluster.url, request_timeout=1) as mill,
        millstream.connect(cluster.url, request_timeout=PATIENCE) as patient,
    ):
        await patient.create_topic("safe", replicas=3)
        one = await patient.create_topic("one")
        await one.publish(b"kept")
        await one.subscriptions.create("billing")
        node = await node_of(cluster, one)
        await asyncio.to_thread(cluster.stop, node)

        assert (await refused(mill.topics)).missing == {"one": ""}
        error = await refused(lambda: asyncio.to_thread(blocking_list, cluster.url))
        assert "one" in error.missing

        waiting = asyncio.create_task(patient.topics())
        await asyncio.to_thread(cluster.restart, node)
        found = {info.name: info.messages for info in await waiting}
        assert found["one"] == 1
        assert "safe" in found
        names = [item.name for item in await one.subscriptions.list()]
        assert names == ["billing"]


def blocking_list(url: str) -> list[str]:
    """What `subscribePattern` of the Spark source looks through."""
    with BlockingConnection(ConnectionSettings(urls=tuple(url.split(",")))) as connection:
        found = list_streams(BlockingJetStream(connection), timeout=1)
    return [info.config["name"] for info in found]


@pytest.mark.long
async def test_a_schema_is_not_forgotten_while_the_mirror_s_node_does_not_answer(
    cluster: Cluster,
) -> None:
    async with (
        millstream.connect(cluster.url, request_timeout=6) as mill,
        millstream.connect(cluster.url, request_timeout=PATIENCE) as patient,
    ):
        orders = await patient.create_topic("orders", schema=Order, replicas=3)
        await orders.publish(Order(1))
        copy = await patient.create_topic("copy", mirror="orders", replicas=1)
        async for _ in copy.read(follow=True):
            break
        node = await node_of(cluster, copy)
        await asyncio.to_thread(cluster.kill, node)

        assert "copy" in (await refused(lambda: mill.delete_topic("orders"))).missing
        assert [event.value async for event in orders.read()] == [Order(1)]

        # Stopped, not silent: the other nodes know that `copy` is a mirror.
        await asyncio.to_thread(cluster.restart, node)
        await patient.topics()
        await asyncio.to_thread(cluster.stop, node)
        await patient.delete_topic("orders")
        assert await patient.schemas.find("orders") is not None
        await asyncio.to_thread(cluster.restart, node)
        copy = await patient.topic("copy", Order)
        assert [event.value async for event in copy.read()] == [Order(1)]


async def test_a_topic_whose_nodes_are_down_can_be_deleted(cluster: Cluster) -> None:
    async with millstream.connect(cluster.url, request_timeout=PATIENCE) as mill:
        gone = await mill.create_topic("gone", schema=Order)
        node = await node_of(cluster, gone)
        await asyncio.to_thread(cluster.stop, node)
        try:
            await offline(mill, "gone")
            await mill.delete_topic("gone")
            with pytest.raises(TopicNotFound):
                await mill.topic("gone")
            assert await mill.schemas.find("gone") is None
        finally:
            await asyncio.to_thread(cluster.restart, node)


async def offline(mill: Mill, topic: str) -> None:
    """Wait until the other nodes know that all nodes of a topic are down."""
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        try:
            await mill.topic(topic)
        except ApiError as error:
            if "offline" in str(error):
                return
    raise AssertionError(f"'{topic}' is not offline")
