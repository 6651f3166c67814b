"""Upgrades: a rolling restart of a cluster under load, and data that an older server wrote.

Older servers come from `make old-servers`, which `make test-all` calls; tests that need one are
skipped without it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import millstream
from millstream import SubscriptionSettings, Topic
from millstream.broker import Cluster, Health
from millstream.testing import running_broker, running_cluster
from tests.integration.broker.clients import PATIENCE, client, wait_until, wait_until_async

OLD_SERVERS = Path(__file__).parents[3] / ".old-servers"
# The oldest that a data folder of Millstream can have been written by, and those before it whose
# streams somebody may bring along.
OLDER = "2.15.0"
FOREIGN = ["2.14.6", "2.12.8", "2.10.26"]
HANDLED_BEFORE = 40


def old_server(version: str) -> Path:
    binary = OLD_SERVERS / version / "bin" / "nats-server"
    if not binary.exists():
        pytest.skip(f"nats-server {version} is not here: make old-servers")
    return binary


def healthy(cluster: Cluster) -> Health | None:
    health = cluster.health()
    return health if health.ok else None


class Load:
    """One producer that waits for every ack, and one subscription that handles every event."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.acked: list[str] = []
        self.handled: list[str] = []
        self.ending = False

    async def produce(self) -> None:
        number = 0
        while not self.ending:
            # The client sends it again until a server answers; so long as it is one call, the id
            # of the event is the same and it is stored once.
            await self.topic.publish(f"event {number}", key=f"key-{number % 5}")
            self.acked.append(f"event {number}")
            number += 1

    async def handle(self) -> None:
        # A delivery that a stopping node still sent may be lost: short leases, to see it again.
        async with self.topic.subscribe("billing", SubscriptionSettings(ack_wait=2.0)) as billing:
            async for event in billing:
                self.handled.append(event.value.decode())
                event.ack()

    async def more(self) -> None:
        """Return when a hundred more events are stored: the load is real all the time."""
        wanted = len(self.acked) + 100
        await wait_until_async(lambda: len(self.acked) >= wanted)

    async def all_handled(self) -> None:
        await wait_until_async(lambda: len(set(self.handled)) == len(self.acked))


@asynccontextmanager
async def under_load(topic: Topic) -> AsyncIterator[Load]:
    load = Load(topic)
    async with asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(load.produce())
        handling = tasks.create_task(load.handle())
        yield load
        load.ending = True
        await producing
        await load.all_handled()
        handling.cancel()


async def restart_one_by_one(cluster: Cluster) -> Load:
    async with millstream.connect(cluster.url) as mill:
        topic = await mill.create_topic("orders", replicas=3, partitions=2)
        async with under_load(topic) as load:
            for node in cluster.nodes:
                await load.more()
                await asyncio.to_thread(cluster.restart, node, timeout=PATIENCE)
                await asyncio.to_thread(wait_until, lambda: healthy(cluster))
            await load.more()
        stored = [event.value.decode() async for event in topic.read()]
    assert sorted(stored) == sorted(load.acked), "each acked event is stored once"
    assert set(load.handled) == set(load.acked)
    return load


async def test_a_rolling_restart_under_load_loses_and_repeats_nothing() -> None:
    with running_cluster() as cluster:
        await restart_one_by_one(cluster)


@pytest.mark.long
async def test_a_rolling_upgrade_under_load_loses_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NATS_SERVER_BIN", str(old_server(OLDER)))
    with running_cluster() as cluster:
        assert {node.version for node in cluster.health().nodes} == {OLDER}
        monkeypatch.delenv("NATS_SERVER_BIN")
        await restart_one_by_one(cluster)
        assert OLDER not in {node.version for node in cluster.health().nodes}


@pytest.mark.long
async def test_a_data_folder_of_an_older_server_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NATS_SERVER_BIN", str(old_server(OLDER)))
    with running_broker(data=tmp_path) as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.create_topic("orders", partitions=2)
            async with topic.producer() as producer:
                for number in range(1000):
                    await producer.send(f"packed {number}", key=f"key-{number % 5}")
            async with topic.writer("import") as writer:
                await writer.write("written 1", key="a", position=1)
    monkeypatch.delenv("NATS_SERVER_BIN")
    with running_broker(data=tmp_path) as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.topic("orders")
            async with topic.writer("import") as writer:
                assert writer.position == 1
                await writer.write("written 2", key="a", position=2)
            values = [event.value.decode() async for event in topic.read()]
            async for report in topic.admin.verify():
                verified = report
    assert sorted(values) == sorted(
        [f"packed {number}" for number in range(1000)] + ["written 1", "written 2"]
    )
    assert verified.sound


@contextmanager
def plain_server(binary: Path, store: Path, ports: Path) -> Iterator[str]:
    """An old nats-server as somebody runs it without Millstream."""
    arguments = ["-a", "127.0.0.1", "-p", "-1", "-js", "-sd", str(store)]
    with subprocess.Popen(
        [str(binary), *arguments, "--ports_file_dir", str(ports)], stderr=subprocess.DEVNULL
    ) as process:
        try:
            file = ports / f"nats-server_{process.pid}.ports"
            wait_until(file.exists)
            yield wait_until(lambda: _address(file))
        finally:
            process.terminate()


def _address(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text())["nats"][0])
    except ValueError:  # it is being written
        return None


@pytest.mark.long
@pytest.mark.parametrize("version", FOREIGN)
async def test_streams_of_an_older_server_are_taken_over(version: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with plain_server(old_server(version), store, tmp_path) as url:
        async with client(url) as connection:
            jetstream = connection.jetstream()
            await jetstream.add_stream(name="orders", subjects=["orders.>"])
            for number in range(100):
                await jetstream.publish(f"orders.{number % 5}", b"%d" % number)
            pulling = await jetstream.pull_subscribe("orders.>", "billing")
            for message in await pulling.fetch(HANDLED_BEFORE, timeout=PATIENCE):
                await message.ack_sync(timeout=PATIENCE)
    # As docs/UPGRADE.md says.
    mine = tmp_path / "data/nodes/n1/store/jetstream/main"
    shutil.copytree(store / "jetstream/$G", mine)
    with running_broker(data=tmp_path / "data") as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.topic("orders")
            assert [int(event.value) async for event in topic.read()] == list(range(100))
            async with topic.subscribe("billing") as billing:
                event = await anext(aiter(billing))
                assert int(event.value) == HANDLED_BEFORE, "it goes on where it was"
            assert (await mill.publish_acked("orders.5", b"100")).offset == 101
