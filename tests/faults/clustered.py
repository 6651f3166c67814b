"""Scenarios on a cluster of three: nodes and leaders are killed, frozen and isolated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from millstream.broker import BrokerSettings, Cluster
from millstream.errors import MillstreamError
from tests.faults import nemesis, network
from tests.faults.checker import Findings, check_deliveries, check_publishes, check_writer
from tests.faults.history import History
from tests.faults.linearizable import check_table
from tests.faults.nemesis import BROKER, CLIENTS, Step, haunt
from tests.faults.scenarios import Scenario, sound_log
from tests.faults.supervisor import START_SECONDS, Node, Orders, Stage, until

__all__ = ["CLUSTERED", "LEADERS", "PARTITIONED", "PARTITIONS", "LocalNode"]

SETTLE_SECONDS: Final = 60.0  # for a leader after the last fault


@dataclass
class LocalNode:
    """A node of a local cluster."""

    cluster: Cluster
    name: str
    patience: float = START_SECONDS  # until all its replicas are current; it works before that

    @property
    def pid(self) -> int:
        return self.cluster.pid(self.name)

    @property
    def server_name(self) -> str:
        return self.cluster.server_name(self.name)

    def kill(self) -> None:
        self.cluster.kill(self.name)

    def stop(self) -> None:
        self.cluster.stop(self.name, grace=10.0)

    def start(self) -> None:
        self.cluster.restart(self.name, timeout=self.patience)


@asynccontextmanager
async def local_stage(orders: Orders) -> AsyncIterator[Stage]:
    """Three nodes on this machine."""
    orders.folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(BrokerSettings(data=orders.folder / "data"), nodes=3)
    await asyncio.to_thread(cluster.start, timeout=START_SECONDS)
    try:
        nodes: list[Node] = [LocalNode(cluster, name) for name in cluster.nodes]
        url, history = cluster.url, History(orders.folder, "nemesis")
        stage = Stage(orders, nodes, url, lambda: url, history)
        try:
            yield stage
        finally:
            for node in nodes:
                _thaw(node)
            await stage.close()
    finally:
        await asyncio.to_thread(cluster.stop, grace=5.0)


@asynccontextmanager
async def networked_stage(orders: Orders) -> AsyncIterator[Stage]:
    """Three nodes in network namespaces."""
    orders.folder.mkdir(parents=True, exist_ok=True)
    async with network.networked(orders.folder) as nodes:
        login = f"{network.USER}:{network.PASSWORD}"
        url = ",".join(f"nats://{login}@{node.address}:{network.PORT}" for node in nodes)
        stage = Stage(orders, list(nodes), url, lambda: url, History(orders.folder, "nemesis"))
        try:
            await until(lambda: _answers(stage), SETTLE_SECONDS)
            yield stage
        finally:
            for node in nodes:
                _thaw(node)
            await stage.close()


async def _answers(stage: Stage) -> bool:
    try:
        async with stage.mill() as mill:
            await mill.create_topic("ready", replicas=3)  # needs every node
            await mill.delete_topic("ready")
            return True
    except MillstreamError:
        return False


def _thaw(node: Node) -> None:
    try:
        os.kill(node.pid, signal.SIGCONT)
    except (ProcessLookupError, MillstreamError):
        return


async def _leader(stage: Stage, step: Step) -> Node:
    """The node that leads a partition; any node while there is no leader."""
    try:
        async with stage.mill() as mill:
            names = [info.name for info in await mill.topics() if not info.name.startswith("_")]
            info = await (await mill.topic(sorted(names)[0])).info()
            leader = info.partitions[int(step.pick * len(info.partitions))].leader
    except MillstreamError:
        leader = None
    for node in stage.nodes:
        if getattr(node, "server_name", None) == leader:
            return node
    return stage.nodes[int(step.pick * len(stage.nodes))]


async def _kill_leader(stage: Stage, step: Step) -> None:
    await nemesis.kill(await _leader(stage, step), step.length)


async def _freeze_leader(stage: Stage, step: Step) -> None:
    await nemesis.freeze(await _leader(stage, step), step.length + 2.0)


async def _isolate(stage: Stage, node: Node, length: float) -> None:
    nodes = [one for one in stage.nodes if isinstance(one, network.NetworkNode)]
    if isinstance(node, network.NetworkNode):
        others = [one for one in nodes if one is not node]
        await asyncio.to_thread(network.isolate, node, others)
        await asyncio.sleep(length)
        await asyncio.to_thread(network.heal, nodes)


async def _isolate_node(stage: Stage, step: Step) -> None:
    node = stage.nodes[int(step.pick * len(stage.nodes))]
    await _isolate(stage, node, 2.0 + step.length * 3)


async def _isolate_leader(stage: Stage, step: Step) -> None:
    await _isolate(stage, await _leader(stage, step), 2.0 + step.length * 3)


nemesis.FAULTS.update(
    {
        "kill leader": _kill_leader,
        "freeze leader": _freeze_leader,
        "isolate node": _isolate_node,
        "isolate leader": _isolate_leader,
    }
)

LEADERS: Final = ("kill leader", "freeze leader")
PARTITIONS: Final = ("isolate node", "isolate leader")


async def _events(stage: Stage, faults: tuple[str, ...]) -> Findings:
    """Publishes, packs and a subscription, everything with three replicas."""
    async with stage.mill() as mill:
        await mill.create_topic("events", replicas=3)
        await mill.create_topic("packs", replicas=3)
    await stage.worker("p0", "produce", topic="events", keys=8, pace=0.01)
    await stage.worker("c0", "consume", topic="events")
    await stage.worker("w0", "write", topic="packs", writer="w", keys=5, pace=0.02, lanes=1)
    await haunt(stage, faults, stage.orders.seconds)
    await asyncio.gather(stage.end("produce"), stage.end("write"))
    await until(lambda: _led(stage), SETTLE_SECONDS)
    stored = await sound_log(stage, "events")
    packs = await sound_log(stage, "packs")
    await until(lambda: check_deliveries(stage.records(), stored).sound)
    await stage.end("consume")
    records = stage.records()
    findings = stage.findings.add(check_publishes(records, stored))
    findings.add(check_deliveries(records, stored))
    return findings.add(check_writer(records, packs))


async def _led(stage: Stage) -> bool:
    try:
        async with stage.mill() as mill:
            info = await (await mill.topic("events")).info()
            return all(part.leader for part in info.partitions)
    except MillstreamError:
        return False


async def _table(stage: Stage, faults: tuple[str, ...]) -> Findings:
    """A table with three replicas under compare-and-set."""
    async with stage.mill() as mill:
        await mill.create_table("state", replicas=3)
    for number in range(3):
        await stage.worker(f"t{number}", "table", table="state", keys=4, pace=0.03)
    await haunt(stage, faults, stage.orders.seconds)
    await stage.end("table")
    return stage.findings.add(check_table(stage.records(), copies=len(stage.nodes)))


async def cluster(orders: Orders) -> Findings:
    """Three replicas; nodes and leaders are killed, restarted and frozen."""
    async with local_stage(orders) as stage:
        return await _events(stage, (*BROKER, *LEADERS, *CLIENTS))


async def cluster_tables(orders: Orders) -> Findings:
    """A table with three replicas; nodes and leaders are killed, restarted and frozen."""
    async with local_stage(orders) as stage:
        return await _table(stage, (*BROKER, *LEADERS))


async def partitions(orders: Orders) -> Findings:
    """Three replicas; nodes and leaders are isolated from their peers, not from clients."""
    async with networked_stage(orders) as stage:
        return await _events(stage, (*PARTITIONS, "kill leader"))


async def partition_tables(orders: Orders) -> Findings:
    """A table with three replicas, its leader isolated while clients still reach it."""
    async with networked_stage(orders) as stage:
        return await _table(stage, PARTITIONS)


CLUSTERED: Final[dict[str, Scenario]] = {"cluster": cluster, "cluster-tables": cluster_tables}
PARTITIONED: Final[dict[str, Scenario]] = {
    "partitions": partitions,
    "partition-tables": partition_tables,
}
