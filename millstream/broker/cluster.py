"""Several embedded servers on this machine as one cluster."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from millstream.broker.config import BrokerSettings
from millstream.broker.health import Health

__all__ = ["Cluster"]


class Cluster:
    """A local cluster; nodes are called n1, n2, ... and can be killed and restarted by name."""

    def __init__(self, settings: BrokerSettings | None = None, *, nodes: int = 3) -> None:
        self.settings = settings or BrokerSettings()

    url: str  # every node, with commas between
    nodes: tuple[str, ...]

    def start(self, *, timeout: float = 30.0) -> Self:
        """Start every node; ready means each healthy and a leader elected."""
        raise NotImplementedError

    def stop(self, node: str | None = None) -> None:
        """Stop one node gently, or all."""
        raise NotImplementedError

    def kill(self, node: str) -> None:
        """Kill a node as a crash would (SIGKILL)."""
        raise NotImplementedError

    def restart(self, node: str, *, timeout: float = 30.0) -> None:
        """Start a node again on its own ports and data."""
        raise NotImplementedError

    def health(self) -> Health:
        """Health of every node."""
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
