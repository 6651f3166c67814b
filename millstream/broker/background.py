"""Brokers that outlive the process that started them: `millstream up`, `down`, `status`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.broker.config import BrokerSettings
from millstream.broker.health import Health

__all__ = [
    "NodeState",
    "State",
    "down",
    "kill_node",
    "read_health",
    "read_state",
    "start_node",
    "up",
]


@dataclass(frozen=True, slots=True)
class NodeState:
    """One server of a running broker."""

    name: str
    url: str
    monitor: str  # http://127.0.0.1:port
    pid: int  # of the keeper: signal this one to stop the node
    server_pid: int
    folder: Path
    log: Path
    running: bool


@dataclass(frozen=True, slots=True)
class State:
    """A broker on a data folder, as written in its state file; holds no secrets."""

    url: str  # all nodes, with commas between
    pid: int  # keeper of the first running node
    data: Path
    nodes: tuple[NodeState, ...]
    started: str  # ISO 8601, UTC
    durability: str
    secured: bool
    tls: bool
    standby: bool = False  # True: nothing started yet, waiting for the folder to become free


def up(
    settings: BrokerSettings, *, nodes: int = 1, standby: bool = False, timeout: float = 30.0
) -> State:
    """Start a broker in the background and return when it is ready (or standing by)."""
    raise NotImplementedError


def down(data: Path, *, timeout: float = 30.0) -> State:
    """Stop the broker on this folder, its waiting standbys first; returns what was stopped."""
    raise NotImplementedError


def read_state(data: Path) -> State:
    """The broker that runs on this folder; raises NotRunning when there is none."""
    raise NotImplementedError


def read_health(data: Path) -> Health:
    """Health of the broker that runs on this folder."""
    raise NotImplementedError


def kill_node(data: Path, name: str) -> None:
    """Kill one node as a crash would (SIGKILL)."""
    raise NotImplementedError


def start_node(data: Path, name: str, *, timeout: float = 30.0) -> State:
    """Start one node again that was killed or stopped."""
    raise NotImplementedError
