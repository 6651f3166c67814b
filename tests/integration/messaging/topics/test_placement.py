"""Partitions and their leaders are spread over the nodes of a real cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

import millstream
from millstream.broker import Cluster, Role
from millstream.deadline import Deadline
from millstream.messaging import TopicInfo
from millstream.mill import Mill
from millstream.testing import running_cluster

PATIENCE = 60.0


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


async def test_partitions_of_one_copy_are_spread_although_the_nodes_have_unequal_room(
    cluster: Cluster, role: Role
) -> None:
    async with millstream.connect(url_of(cluster, role), request_timeout=PATIENCE) as mill:
        # What it reserves leaves its node with less room than the others, by far more than bytes.
        await mill.create_topic(f"large-{role}", max_bytes=50_000_000)
        topic = await mill.create_topic(f"spread-{role}", partitions=9)
        assert led(await topic.info()) == [3, 3, 3]
        await mill.create_topic(f"spread-{role}", partitions=9)  # the same settings: no conflict
        seven = await mill.create_topic(f"seven-{role}", partitions=7)
        assert led(await seven.info()) == [2, 2, 3]
        # A node without a client of the account answers too.
        receipts = [await topic.publish(b"x", key=str(number)) for number in range(9)]
        assert {receipt.durability for receipt in receipts} == {"fsync"}


async def test_leaders_of_replicated_partitions_are_spread(cluster: Cluster) -> None:
    async with millstream.connect(url_of(cluster, Role.ADMIN), request_timeout=PATIENCE) as mill:
        topic = await mill.create_topic("replicated", partitions=9, replicas=3)
        assert led(await topic.info()) == [3, 3, 3]
        shown = {stream.name: stream for stream in cluster.health().streams}
        names = sorted(map(cluster.server_name, cluster.nodes))
        for part in (await topic.info()).partitions:
            assert list(shown[part.stream].nodes) == names


async def test_a_user_without_permission_to_move_leaders_creates_topics(
    cluster: Cluster,
) -> None:
    async with millstream.connect(url_of(cluster, Role.APP), request_timeout=PATIENCE) as mill:
        topic = await mill.create_topic("by-app", partitions=6, replicas=3)
        assert sum(led(await topic.info())) == 6
        receipt = await topic.publish(b"x")
        assert receipt.durability == "replicated"


async def test_spread_partitions_can_get_replicas_on_the_other_nodes(cluster: Cluster) -> None:
    async with millstream.connect(url_of(cluster, Role.ADMIN), request_timeout=PATIENCE) as mill:
        topic = await mill.create_topic("growing", partitions=3)
        assert led(await topic.info()) == [1, 1, 1]
        info = await mill.edit_topic("growing", replicas=3)
        assert info.settings.replicas == 3
        assert all("placement" not in part.config for part in info.partitions)


async def test_leaders_move_back_to_a_node_that_was_down(cluster: Cluster) -> None:
    async with millstream.connect(url_of(cluster, Role.ADMIN), request_timeout=PATIENCE) as mill:
        topic = await mill.create_topic("balanced", partitions=6, replicas=3)
        node = cluster.nodes[0]
        await asyncio.to_thread(cluster.stop, node)
        # Created meanwhile: on the nodes that are up.
        two = await mill.create_topic("two", partitions=4)
        assert led(await two.info()) == [2, 2]
        await until_led_by(mill, "balanced", nodes=2)
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
