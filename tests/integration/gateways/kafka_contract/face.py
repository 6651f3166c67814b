"""One face for all clients of Kafka in Python, so that one behaviour runs with each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

__all__ = [
    "Admin",
    "Client",
    "Failure",
    "Got",
    "Member",
    "Place",
    "Record",
    "Where",
]

Header = tuple[str, bytes | None]
Where = int | str  # an offset, "earliest" or "latest"


@dataclass(frozen=True)
class Record:
    """What is produced."""

    value: bytes | None = b""
    key: bytes | None = None
    headers: Sequence[Header] = ()
    time_ms: int | None = None
    partition: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a producer says that a record is."""

    partition: int
    offset: int


@dataclass(frozen=True)
class Got:
    """What is consumed."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    time_ms: int

    def same_as(self, sent: Record) -> bool:
        """Whether it is the record that was sent."""
        headers = tuple((name, value) for name, value in sent.headers)
        return (
            (self.key, self.value, self.headers) == (sent.key, sent.value, headers)
            and sent.time_ms in (None, self.time_ms)
            and sent.partition in (None, self.partition)
        )


class Failure(Exception):
    """A request failed with a code of Kafka; -1 or less: the client itself refused or gave up."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass
class Settings:
    """Of a consumer, in words that all clients share."""

    reset: str = "earliest"  # latest, none
    group: str | None = None
    static_id: str | None = None
    fetch_bytes: int | None = None  # of a partition
    wait_ms: int | None = None  # of a long poll
    session_ms: int = 30_000
    more: Mapping[str, Any] = field(default_factory=dict)


class Member(Protocol):
    """A consumer, of a group or with partitions that were assigned to it."""

    def poll(self, seconds: float) -> list[Got]:
        """What is there, waiting at most so long for the first; raises Failure."""

    def assignment(self) -> list[int]:
        """The numbers of its partitions, sorted."""

    def seek(self, partition: int, offset: int) -> None: ...

    def position(self, partition: int) -> int: ...

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        """These offsets, or those up to which it has read."""

    def committed(self, partition: int) -> int | None: ...

    def close(self) -> None: ...


class Admin(Protocol):
    """Topics and groups are managed; a client that lacks a call raises NotImplementedError."""

    def create(self, topic: str, partitions: int = 1, copies: int = 1, **config: str) -> None: ...

    def delete(self, topic: str) -> None: ...

    def topics(self) -> list[str]: ...

    def partitions(self, topic: str) -> int: ...

    def grow(self, topic: str, partitions: int) -> None: ...

    def configs(self, topic: str) -> dict[str, str | None]: ...

    def alter(self, topic: str, config: Mapping[str, str | None]) -> None:
        """Set some; None puts one back to its default."""

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        """The new first offset."""

    def groups(self) -> list[str]: ...

    def group_state(self, group: str) -> tuple[str, int]:
        """Its state, and how many members it has."""

    def group_offsets(self, group: str, topic: str) -> dict[int, int]: ...

    def set_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None: ...

    def delete_group(self, group: str) -> None: ...

    def brokers(self) -> int: ...


class Client(Protocol):
    """One client library, connected to one server."""

    name: str
    codecs: Sequence[str]

    def produce(
        self,
        topic: str,
        records: Sequence[Record],
        *,
        codec: str = "none",
        acks: int = -1,
        idempotent: bool = False,
        max_bytes: int | None = None,
    ) -> list[Place]:
        """Send all and wait for all answers; raises Failure with the first error."""

    def reader(
        self, topic: str, starts: Mapping[int, Where], settings: Settings | None = None
    ) -> Member:
        """A consumer of these partitions, without a group."""

    def join(self, topic: str, settings: Settings) -> Member:
        """A member of a group."""

    def ends(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset, and the one that the next record will have."""

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int | None:
        """Of the first record of this time or later; None if there is none."""

    def admin(self) -> Admin: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


Make = Callable[[str], Client]
