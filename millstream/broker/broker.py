"""One embedded server that lives and dies with this process."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from millstream.broker.config import DEFAULT_ACCOUNT, BrokerSettings, Role
from millstream.broker.credentials import Credentials, read_credentials
from millstream.broker.folder import read_json
from millstream.broker.health import Health, NodeAddress, broker_health
from millstream.broker.launch import Start, node_names, start_nodes
from millstream.broker.reload import reload_nodes
from millstream.broker.server_process import Node
from millstream.closing import Closing
from millstream.errors import NotRunning

__all__ = ["Broker"]


class Broker(Closing):
    """A durable broker on this machine; it stops when this process ends, however it ends.

    >>> with Broker(BrokerSettings(data=folder)) as broker:     # doctest: +SKIP
    ...     print(broker.url)
    """

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.settings = settings or BrokerSettings()
        self._node: Node | None = None

    def __repr__(self) -> str:
        state = self.url if self.running else "not running"
        return f"<Broker on {self.data}: {state}>"

    @property
    def data(self) -> Path:
        return self.settings.data

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        return self._node is not None and self._node.running

    @property
    def standing_by(self) -> bool:
        """Whether it waits for another owner of the folder to go."""
        return self._node is not None and self._node.waiting

    @property
    def url(self) -> str:
        """Where clients connect; the same after a restart."""
        return self._started.url

    @property
    def monitor(self) -> str:
        """The server's monitoring address, http on loopback."""
        return self._started.monitor

    @property
    def pid(self) -> int:
        """Process id of nats-server."""
        return self._started.server_pid

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper between this process and the server."""
        return self._started.keeper_pid

    @property
    def log(self) -> Path:
        """The file that the server's output goes to."""
        return self._started.folder.log

    @property
    def _started(self) -> Node:
        if self._node is None:
            raise NotRunning(str(self.data))
        return self._node

    def start(self, *, timeout: float = 30.0, standby: bool = False) -> Self:
        """Start and wait until it is ready; on failure nothing is left running.

        With `standby`, a folder that another broker owns is waited for: the call returns at once,
        `await_takeover` says when this broker has taken over.
        """
        if self.running or self.standing_by:
            return self
        self.stop()  # whatever is left of one that ended by itself
        names = node_names(self.settings, 1)
        (self._node,) = start_nodes(self.settings, names, Start(timeout=timeout, standby=standby))
        return self

    def await_takeover(self, timeout: float) -> bool:
        """Whether a standby has become the owner of the folder within the timeout."""
        return not self.standing_by or self._started.await_takeover(timeout)

    def stop(self, *, grace: float = 10.0) -> None:
        """Stop gently; after `grace` seconds by force."""
        if self._node is not None:
            self._node.stop(grace)

    def kill(self) -> None:
        """Kill the server as a crash would (SIGKILL)."""
        self._started.kill()

    def restart(self, *, timeout: float = 30.0) -> None:
        """Stop and start on the same ports."""
        self.stop()
        self.start(timeout=timeout)

    def reload(self, settings: BrokerSettings, *, timeout: float = 10.0) -> None:
        """Apply new settings without dropping connections; ConfigError leaves the old ones."""
        if not self.running:
            raise NotRunning(str(self.data))
        reload_nodes((self._started.folder,), settings, timeout)
        self.settings = settings

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the server is gone; False when the timeout passed first."""
        return self._started.wait(timeout)

    def health(self) -> Health:
        """What the server says about itself."""
        folder = self._started.folder
        store = Path(read_json(folder.plan).get("store", folder.store))
        address = NodeAddress(folder.name, self.monitor, store, folder.ends)
        return broker_health(str(self.settings.durability), [address])

    def credentials(
        self, role: Role | str = Role.APP, account: str = DEFAULT_ACCOUNT
    ) -> Credentials:
        """The generated user of that role and account (`auth=True`), or the "system" user."""
        return read_credentials(self.data, role, account)

    def _enter(self) -> None:
        self.start()

    def _leave(self, error: BaseException | None) -> None:
        self.stop()
