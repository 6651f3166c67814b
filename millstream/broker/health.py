"""What the server says about itself, as typed values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ConsumerHealth", "Health", "NodeHealth", "StreamHealth"]


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """One consumer (subscription) of a stream."""

    name: str
    pending: int  # messages not delivered yet
    ack_pending: int  # delivered, not acknowledged
    redelivered: int


@dataclass(frozen=True, slots=True)
class StreamHealth:
    """One stream (a partition of a topic)."""

    account: str
    name: str
    messages: int
    bytes: int
    first: int  # sequence of the oldest message
    last: int  # sequence of the newest
    replicas: int
    leader: str | None  # node that leads it; None on a single node or while there is none
    storage: str  # "file" or "memory"
    consumers: tuple[ConsumerHealth, ...]


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One server."""

    name: str
    ok: bool
    problem: str | None  # in one sentence, what to do included
    version: str
    uptime: float  # seconds
    memory: int  # resident bytes
    cpu: float  # percent of one core
    connections: int
    store_used: int  # bytes of streams on disk
    store_limit: int
    memory_store_used: int  # bytes of streams in memory
    memory_store_limit: int
    disk_free: int  # bytes free on the disk of the data folder
    streams: tuple[StreamHealth, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """The broker as a whole."""

    ok: bool
    durability: str
    nodes: tuple[NodeHealth, ...]
    meta_leader: str | None  # node that leads the cluster; None on a single node

    @property
    def streams(self) -> tuple[StreamHealth, ...]:
        """Every stream once, as its leader sees it."""
        raise NotImplementedError
