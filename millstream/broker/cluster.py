"""Several embedded servers on this machine as one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from millstream.broker.binary import find_binary
from millstream.broker.config import DEFAULT_ACCOUNT, BrokerSettings, Role
from millstream.broker.credentials import Credentials, read_credentials
from millstream.broker.folder import node_folders, state_file
from millstream.broker.gateway_processes import await_gateways
from millstream.broker.health import Health, broker_health, node_address
from millstream.broker.keys import resolve_key
from millstream.broker.launch import (
    StartOptions,
    launch_from_folder,
    node_names,
    start_again,
    start_nodes,
)
from millstream.broker.reload import reload_nodes
from millstream.broker.server_process import ServerNode
from millstream.closing import Closing
from millstream.deadline import Deadline
from millstream.errors import ConfigError, NotRunning

__all__ = ["Cluster"]


class Cluster(Closing):
    """A local cluster; its nodes are named n1, n2, ... and can be killed and restarted by name.

    Like a `Broker`, it stops when this process ends, even if it is killed.
    """

    def __init__(self, settings: BrokerSettings | None = None, *, nodes: int = 3) -> None:
        self.settings = settings or BrokerSettings()
        if nodes < 2:
            raise ConfigError(f"a cluster needs two nodes or more, not {nodes}; use Broker for one")
        self.nodes = node_names(self.settings, nodes)
        self._nodes: dict[str, ServerNode] = {}

    def __repr__(self) -> str:
        running = [name for name, node in self._nodes.items() if node.running]
        return f"<Cluster on {self.data}: {', '.join(running) or 'not running'}>"

    @property
    def data(self) -> Path:
        """The folder with the data of its nodes."""
        return self.settings.data

    @property
    def url(self) -> str:
        """The addresses of all nodes, separated by commas."""
        return ",".join(self.node_url(name) for name in self.nodes)

    @property
    def running(self) -> bool:
        """Whether every node runs."""
        return bool(self._nodes) and all(node.running for node in self._nodes.values())

    def node_url(self, name: str) -> str:
        """The address of one node."""
        return self._node(name).url

    def server_name(self, name: str) -> str:
        """The name of a node's server, as health reports and stream leaders show it."""
        return f"{self.settings.name}-{self._node(name).name}"

    def pid(self, name: str) -> int:
        """Process id of one node's nats-server."""
        return self._node(name).server_pid

    def start(self, *, timeout: float = 30.0) -> Self:
        """Start every node; return when all are healthy and a leader is elected."""
        if self._nodes:
            for name in self.nodes:
                if not self._nodes[name].running:
                    self.restart(name, timeout=timeout)
            return self
        deadline = Deadline(timeout)
        started = start_nodes(self.settings, self.nodes, StartOptions(timeout=timeout))
        self._nodes = {node.name: node for node in started}
        await_gateways(tuple(node.folder for node in started), deadline.left())
        return self

    def stop(self, node: str | None = None, *, grace: float = 10.0) -> None:
        """Stop one node, or all, gracefully."""
        if node is not None:
            self._node(node).stop(grace)
            return
        for one in self._nodes.values():
            one.ask_to_stop(grace)
        for one in self._nodes.values():
            one.stop(grace)
        self._nodes = {}
        state_file(self.data).unlink(missing_ok=True)

    def kill(self, node: str) -> None:
        """Kill a node (SIGKILL), as in a crash."""
        self._node(node).kill()

    def restart(self, node: str, *, timeout: float = 30.0) -> None:
        """Start a node again on its own ports and data; a running one is stopped first."""
        old = self._node(node)
        old.stop(grace=10.0)
        key = resolve_key(self.settings, node_folders(self.data))
        launch = launch_from_folder(old.folder, find_binary(), key, StartOptions(timeout=timeout))
        self._nodes[node] = start_again(old.folder, launch)

    def reload(self, settings: BrokerSettings, *, timeout: float = 10.0) -> None:
        """Apply new settings to every node without dropping connections."""
        folders = tuple(self._node(name).folder for name in self.nodes)
        reload_nodes(folders, settings, timeout)
        self.settings = settings

    def health(self) -> Health:
        """Health of every node; one that does not answer is not ok."""
        if not self._nodes:
            raise NotRunning(str(self.data))
        addresses = [node_address(node.folder) for node in self._nodes.values()]
        return broker_health(str(self.settings.durability), addresses)

    def credentials(
        self, role: Role | str = Role.APP, account: str = DEFAULT_ACCOUNT
    ) -> Credentials:
        """The generated user of that role and account (`auth=True`), or the "system" user."""
        return read_credentials(self.data, role, account)

    def _node(self, name: str) -> ServerNode:
        if not self._nodes:
            raise NotRunning(str(self.data))
        if name not in self._nodes:
            raise ConfigError(f"there is no node '{name}'; the nodes are {', '.join(self.nodes)}")
        return self._nodes[name]

    def _enter(self) -> None:
        self.start()

    def _leave(self, error: BaseException | None) -> None:
        self.stop()
