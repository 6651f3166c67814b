"""Where guarantees are measured: brokers and a cluster, and what work costs them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.effort import Effort
from bench.harness import Figures
from bench.trade import Trade
from millstream.broker import Broker, Cluster
from millstream.broker.folder import node_folders
from millstream.broker.health import node_address
from millstream.broker.monitoring import ask_server
from millstream.messaging import Topic
from millstream.mill import Mill, connect
from millstream.testing import running_broker, running_cluster
from millstream.wire.protocol import unique_token

__all__ = ["STORAGES", "Meter", "Site", "open_site"]

NODES = 3
SETTLE_SECONDS = 0.1  # until a server that does not sync has written its files


@dataclass(frozen=True, slots=True)
class Storage:
    """Where an ack says that an event is."""

    durability: str
    replicas: int = 1


STORAGES = {
    "memory": Storage("memory"),
    "periodic": Storage("periodic"),
    "fsync": Storage("fsync"),
    "replicated": Storage("periodic", NODES),
    "replicated, fsync": Storage("fsync", NODES),
}


@dataclass(frozen=True, slots=True)
class Site:
    """A running broker or cluster, and a connection to it."""

    name: str
    server: Broker | Cluster
    mill: Mill
    replicas: int

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def pids(self) -> list[int]:
        """Its server processes."""
        if isinstance(self.server, Cluster):
            return [self.server.pid(name) for name in self.server.nodes]
        return [self.server.pid]

    async def topic(self, schema: object = Trade) -> Topic:
        """A new topic, on every node."""
        return await self.mill.create_topic(
            f"t-{unique_token(8)}", schema=schema, replicas=self.replicas
        )

    def stored(self) -> int:
        """Bytes of all copies of all events, without the log with which nodes agree on them."""
        files = Path(self.server.data).rglob("*.blk")
        return sum(file.stat().st_size for file in files if "_js_" not in file.parts)

    def sent(self) -> int:
        """Bytes of messages that all servers got and sent; between two nodes they count twice."""
        total = 0
        for folder in node_folders(self.server.data):
            address = node_address(folder)
            status, body = ask_server(address.monitor, "/varz")
            if status != 200:
                raise RuntimeError(f"node {address.name} does not answer: {body}")
            found = json.loads(body)
            total += found["in_bytes"] + found["out_bytes"]
        return total


async def open_site(stack: ExitStack, name: str) -> Site:
    """Start what the storage needs, for as long as the stack is open."""
    storage = STORAGES[name]
    server: Broker | Cluster
    if storage.replicas > 1:
        server = stack.enter_context(running_cluster(NODES, durability=storage.durability))
    else:
        server = stack.enter_context(running_broker(durability=storage.durability))
    return Site(name, server, await connect(server.url), storage.replicas)


class Meter:
    """Counts from its creation to `done`: rate, CPU, bytes stored and sent."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stored, self._sent = site.stored(), site.sent()
        self._effort = Effort(*site.pids)

    async def done(self, events: int) -> Figures:
        """The figures of one event."""
        figures = self._effort.done(events)
        sent = self._site.sent() - self._sent
        await asyncio.sleep(SETTLE_SECONDS)
        stored = self._site.stored() - self._stored
        return {**figures, "disk": stored / events, "wire": sent / events}
