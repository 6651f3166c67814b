"""One embedded server that lives and dies with this process."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from millstream.broker.beside import KAFKA
from millstream.broker.config import DEFAULT_ACCOUNT, BrokerSettings, Role
from millstream.broker.credentials import Credentials, read_credentials
from millstream.broker.gateway_processes import await_gateways, gateways_of
from millstream.broker.health import Health, broker_health, node_address
from millstream.broker.launch import StartOptions, node_names, start_nodes
from millstream.broker.reload import reload_nodes
from millstream.broker.server_process import ServerNode
from millstream.closing import Closing
from millstream.deadline import Deadline
from millstream.errors import NotRunning

__all__ = ["Broker"]


class Broker(Closing):
    """A durable broker on this machine; it stops when this process ends, even if it is killed.

    >>> with Broker(BrokerSettings(data=folder)) as broker:     # doctest: +SKIP
    ...     print(broker.url)
    """

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.settings = settings or BrokerSettings()
        self._node: ServerNode | None = None

    def __repr__(self) -> str:
        state = self.url if self.running else "not running"
        return f"<Broker on {self.data}: {state}>"

    @property
    def data(self) -> Path:
        """The folder with its data."""
        return self.settings.data

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        return self._node is not None and self._node.running

    @property
    def standing_by(self) -> bool:
        """Whether it waits for the folder's current owner to stop."""
        return self._node is not None and self._node.waiting

    @property
    def url(self) -> str:
        """The address for clients; the same after a restart."""
        return self._started.url

    @property
    def monitor(self) -> str:
        """The server's monitoring address, http on loopback; empty if it has none."""
        return self._started.monitor

    @property
    def kafka(self) -> str:
        """Where Kafka clients connect (host:port); empty while no Kafka gateway of it listens."""
        found = {one.protocol: one.advertised for one in gateways_of(self._started.folder)}
        return found.get(KAFKA, "")

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
        """The file with the server's output."""
        return self._started.folder.log

    @property
    def _started(self) -> ServerNode:
        if self._node is None:
            raise NotRunning(str(self.data))
        return self._node

    def start(
        self, *, timeout: float = 30.0, standby: bool = False, set_aside: tuple[str, ...] = ()
    ) -> Self:
        """Start and wait until it is ready; on failure nothing is left running.

        It also waits for its gateway, if it has one. A gateway that does not listen in time is
        tried again and again, and is no failure.

        `set_aside` names streams to start without, as STREAM or ACCOUNT/STREAM: their files are
        kept in the folder `set-aside` of the data folder.

        With `standby`, the call waits in the background for a folder that another broker owns: it
        returns immediately, and `await_takeover` reports when this broker has taken over.
        """
        if self.running or self.standing_by:
            return self
        self.stop()  # clean up after a server that ended on its own
        names, deadline = node_names(self.settings, 1), Deadline(timeout)
        (self._node,) = start_nodes(
            self.settings,
            names,
            StartOptions(timeout=timeout, standby=standby, set_aside=set_aside),
        )
        if not self.standing_by:
            await_gateways((self._node.folder,), deadline.left())
        return self

    def await_takeover(self, timeout: float) -> bool:
        """Whether this standby became the owner of the folder within the timeout."""
        return not self.standing_by or self._started.await_takeover(timeout)

    def stop(self, *, grace: float = 10.0) -> None:
        """Stop gracefully; after `grace` seconds, kill it."""
        if self._node is not None:
            self._node.stop(grace)

    def kill(self) -> None:
        """Kill the server (SIGKILL), as in a crash."""
        self._started.kill()

    def restart(self, *, timeout: float = 30.0) -> None:
        """Stop, then start on the same ports."""
        self.stop()
        self.start(timeout=timeout)

    def reload(self, settings: BrokerSettings, *, timeout: float = 10.0) -> None:
        """Apply new settings without dropping connections; a ConfigError keeps the old ones."""
        if not self.running:
            raise NotRunning(str(self.data))
        reload_nodes((self._started.folder,), settings, timeout)
        self.settings = settings

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the server has ended; False if the timeout passed first."""
        return self._started.wait(timeout)

    def health(self) -> Health:
        """The server's health report."""
        address = node_address(self._started.folder)
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
