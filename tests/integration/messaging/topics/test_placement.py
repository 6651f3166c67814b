"""Partitions and their leaders are spread over the nodes of a real cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest

import millstream
from millstream.broker import Cluster, Role
from millstream.deadline import Deadline
from millstream.errors import NotReplicated
from millstream.messaging import Topic, TopicInfo
from millstream.mill import Mill
from millstream.testing import running_cluster

PATIENCE = 60.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(auth=True) as running:
        yield running


def url_of(cluster: Cluster, role: Role) -> str:
    found = cluster.credentials(role)
    return cluster.url.replace("://", f"://{found.user}:{found.password.reveal()}@")


@pytest.fixture(params=[Role.ADMIN, Role.APP])
def role(request: pytest.FixtureRequest) -> Role:
    chosen: Role = request.param
    return chosen


def led(info: TopicInfo) -> list[int]:
    """How many partitions each node leads, the fewest first."""
    return sorted(Counter(part.leader for part in info.partitions).values())


async def accepted(ask: Callable[[], Awaitable[T]]) -> T:
    """On a busy machine the cluster may take a living node for offline for a moment: ask again."""
    deadline = Deadline(PATIENCE)
    while True:
        try:
            return await ask()
        except NotReplicated:
            assert not deadline.passed
            await asyncio.sleep(0.2)


async def created(mill: Mill, name: str, wanted: list[int], **settings: Any) -> Topic:
    """A new topic that is spread as wanted; if a node was left out for a moment, the next one."""
    deadline = Deadline(PATIENCE)
    for attempt in itertools.count():
        topic = await accepted(partial(mill.create_topic, f"{name}-{attempt}", **settings))
        found = led(await topic.info())
        if found == wanted:
            return topic
        assert not deadline.passed, found
        await asyncio.sleep(0.5)
    raise AssertionError("not reached")


async def test_partitions_of_one_copy_are_spread_although_the_nodes_have_unequal_room(
    cluster: Cluster, role: Role
) -> None:
    async with millstream.connect(url_of(cluster, role), request_timeout=PATIENCE) as mill:
        # What it reserves leaves its node with less room than the others, by far more than bytes.
        await mill.create_topic(f"large-{role}", max_bytes=50_000_000)
        topic = await created(mill, f"spread-{role}", [3, 3, 3], partitions=9)
        await mill.create_topic(topic.name, partitions=9)  # the same settings: no conflict
        await created(mill, f"seven-{role}", [2, 2, 3], partitions=7)
        # A node without a client of the account answers too.
        receipts = [await topic.publish(b"x", key=str(number)) for number in range(9)]
        assert {receipt.durability for receipt in receipts} == {"fsync"}


async def test_leaders_of_replicated_partitions_are_spread(cluster: Cluster) -> None:
    async with millstream.connect(url_of(cluster, Role.ADMIN), request_timeout=PATIENCE) as mill:
        topic = await created(mill, "replicated", [3, 3, 3], partitions=9, replicas=3)
        shown = {stream.name: stream for stream in cluster.health().streams}
        names = sorted(map(cluster.server_name, cluster.nodes))
        for part in (await topic.info()).partitions:
            assert list(shown[part.stream].nodes) == names


async def test_a_user_without_permission_to_move_leaders_creates_topics(
    cluster: Cluster,
) -> None:
    async with millstream.connect(url_of(cluster, Role.APP), request_timeout=PATIENCE) as mill:
        topic = await accepted(partial(mill.create_topic, "by-app", partitions=6, replicas=3))
        assert sum(led(await topic.info())) == 6
        receipt = await topic.publish(b"x")
        assert receipt.durability == "replicated"


async def test_spread_partitions_can_get_replicas_on_the_other_nodes(cluster: Cluster) -> None:
    async with millstream.connect(url_of(cluster, Role.ADMIN), request_timeout=PATIENCE) as mill:
        topic = await created(mill, "growing", [1, 1, 1], partitions=3)
        info = await accepted(partial(mill.edit_topic, topic.name, replicas=3))
        assert info.settings.replicas == 3
        assert all("placement" not in part.config for part in info.partitions)


async def test_leaders_move_back_to_a_node_that_was_down(cluster: Cluster) -> None:
    async with millstream.connect(url_of(cluster, Role.ADMIN), request_timeout=PATIENCE) as mill:
        topic = await created(mill, "balanced", [2, 2, 2], partitions=6, replicas=3)
        node = cluster.nodes[0]
        await asyncio.to_thread(cluster.stop, node)
        # Created meanwhile: on the nodes that are up.
        await created(mill, "two", [2, 2], partitions=4)
        await until_led_by(mill, topic.name, nodes=2)
        await asyncio.to_thread(cluster.restart, node)
        deadline = Deadline(PATIENCE)
        while led(await topic.info()) != [2, 2, 2]:  # its replicas catch up first
            assert not deadline.passed
            await topic.admin.balance()


async def until_led_by(mill: Mill, topic: str, nodes: int) -> None:
    deadline = Deadline(PATIENCE)
    while True:
        info = await (await mill.topic(topic)).info()
        if all(part.leader for part in info.partitions) and len(led(info)) == nodes:
            return
        assert not deadline.passed
        await asyncio.sleep(0.05)
