"""One embedded server that lives and dies with this process."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from millstream.broker.config import DEFAULT_ACCOUNT, BrokerSettings, Role
from millstream.broker.credentials import Credentials
from millstream.broker.health import Health

__all__ = ["Broker"]


class Broker:
    """A durable broker on this machine; it stops when this process ends, however it ends.

    >>> with Broker(BrokerSettings(data=folder)) as broker:     # doctest: +SKIP
    ...     print(broker.url)
    """

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.settings = settings or BrokerSettings()

    url: str
    pid: int  # of nats-server
    keeper_pid: int
    data: Path
    log: Path
    running: bool

    def start(self, *, timeout: float = 30.0, standby: bool = False) -> Self:
        """Start and wait until it is ready; on failure nothing is left running."""
        raise NotImplementedError

    def stop(self, *, grace: float = 10.0) -> None:
        """Stop gently; after `grace` seconds by force."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the server as a crash would (SIGKILL)."""
        raise NotImplementedError

    def restart(self, *, timeout: float = 30.0) -> None:
        """Stop and start on the same ports."""
        raise NotImplementedError

    def reload(self, settings: BrokerSettings) -> None:
        """Apply new settings without dropping connections; ConfigError leaves the old ones."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the server is gone; False when the timeout passed first."""
        raise NotImplementedError

    def health(self) -> Health:
        """What the server says about itself."""
        raise NotImplementedError

    def credentials(self, role: Role = Role.APP, account: str = DEFAULT_ACCOUNT) -> Credentials:
        """The generated user of that role (`auth=True`)."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
