"""Members of a consumer group, what they ask and get, and how a group is stored. Pure."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from millstream.gateways.kafka.protocol import ErrorCode

__all__ = [
    "CONSUMER",
    "ID_BYTES_MAX",
    "Caller",
    "ConsumerMember",
    "Effect",
    "GroupAnswer",
    "GroupBounds",
    "GroupState",
    "JoinAsk",
    "Joined",
    "JoinedMember",
    "PauseWatch",
    "Protocol",
    "Store",
    "StoredGroup",
    "StoredMember",
    "SyncAsk",
    "Synced",
    "common_protocols",
    "join_refusal",
    "same_topics",
    "subscription_of",
    "voted_protocol",
]

CONSUMER: Final = "consumer"  # the protocol type whose metadata names topics
ID_BYTES_MAX: Final = 512
TOPICS_MAX: Final = 10_000  # of a subscription that is looked into
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")


class GroupState(StrEnum):
    """The states of a group, as Kafka's tools name them."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """What a group may be; times in seconds."""

    # How long the first members of an empty group wait for others. Kafka waits 3 s; without waiting
    # they are together after the first heartbeat, which is not later. And kafka-python loses a join
    # that takes longer than one `poll`: its heartbeats stay off, or its leader joins for ever.
    initial_delay: float = 0.0
    min_session: float = 6.0
    max_session: float = 1800.0
    max_groups: int = 10_000
    max_members: int = 1000
    max_member_bytes: int = 1024 * 1024  # metadata of all protocols of one member
    max_group_bytes: int = 2 * 1024 * 1024  # of all members; also of all assignments
    max_note_bytes: int = 4096  # what a client may keep with an offset
    offsets_retention: float = 7 * 24 * 3600.0  # of groups that nobody uses
    cleanup_interval: float = 600.0


class Protocol(NamedTuple):
    """One way of assigning partitions that a member knows, and what it says about itself."""

    name: str
    metadata: bytes


class JoinAsk(NamedTuple):
    """What a member asks for when it joins."""

    member_id: str  # "": it has none yet
    new_id: str  # what it is called then
    instance: str | None  # the name of a static member, which survives its restart
    client_id: str
    client_host: str
    session: float
    rebalance: float
    protocol_type: str
    protocols: tuple[Protocol, ...]
    requires_id: bool  # whether its version can be asked to join again with its new id
    may_skip: bool = False  # whether its version knows a leader that is to assign nothing


class Caller(NamedTuple):
    """Who a member says that it is."""

    member_id: str
    generation: int
    instance: str | None = None


class SyncAsk(NamedTuple):
    """A member asks for its assignment; the leader brings those of all."""

    who: Caller
    protocol_type: str | None  # None: its version does not say
    protocol: str | None
    assignments: Mapping[str, bytes]


class JoinedMember(NamedTuple):
    """A member, as the leader sees it."""

    member_id: str
    instance: str | None
    metadata: bytes


class Joined(NamedTuple):
    """The answer to a join."""

    error: ErrorCode
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()  # only for the leader
    skip: bool = False  # the leader is to assign nothing


class Synced(NamedTuple):
    """The answer to a sync."""

    error: ErrorCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@dataclass(slots=True)
class ConsumerMember:
    """A member of a group, and the requests of it that wait."""

    id: str
    instance: str | None
    client_id: str
    client_host: str
    session: float
    rebalance: float
    protocols: tuple[Protocol, ...] = field(repr=False)
    deadline: float  # of the session; counts unless a request waits
    assignment: bytes = field(default=b"", repr=False)
    join: Hashable | None = None
    sync: Hashable | None = None
    commits: int = 0  # that are being stored
    knows_id: bool = False  # if not, it cannot come back after its connection is lost
    must_sync: bool = False

    @classmethod
    def made(cls, member_id: str, ask: JoinAsk, now: float) -> ConsumerMember:
        """The member that asks, under an id."""
        return cls(
            member_id,
            ask.instance,
            ask.client_id,
            ask.client_host,
            ask.session,
            ask.rebalance,
            ask.protocols,
            now + ask.session,
            knows_id=ask.member_id != "",
        )

    @classmethod
    def restored(cls, record: StoredMember, now: float) -> ConsumerMember:
        """A member as it was stored."""
        return cls(
            record.id,
            record.instance,
            record.client_id,
            record.client_host,
            record.session,
            record.rebalance,
            tuple(Protocol(name, metadata) for name, metadata in record.protocols),
            now + record.session,
            record.assignment,
            knows_id=True,
        )

    def record(self, assignment: bytes) -> StoredMember:
        """The member, to be stored."""
        return StoredMember(
            self.id,
            self.client_id,
            self.client_host,
            self.session,
            self.rebalance,
            [(name, metadata) for name, metadata in self.protocols],
            assignment,
            self.instance,
        )

    @property
    def waits(self) -> bool:
        """Whether a request of it waits: as long as it does, the member is there."""
        return self.join is not None or self.sync is not None or self.commits > 0

    @property
    def size(self) -> int:
        return sum(len(protocol.metadata) for protocol in self.protocols)

    def metadata(self, protocol: str | None) -> bytes:
        """What it says for a protocol."""
        return next((one.metadata for one in self.protocols if one.name == protocol), b"")

    def take(self, ask: JoinAsk) -> None:
        """Be as it asks now."""
        self.client_id, self.client_host = ask.client_id, ask.client_host
        self.session, self.rebalance = ask.session, ask.rebalance
        self.protocols = ask.protocols


class StoredMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member, stored."""

    id: str
    client_id: str
    client_host: str
    session: float
    rebalance: float
    protocols: list[tuple[str, bytes]]
    assignment: bytes = b""
    instance: str | None = None


class StoredGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group, stored: enough for its members to continue with another process."""

    generation: int = 0
    protocol_type: str = ""  # "": only clients without membership have used it
    protocol: str | None = None
    leader: str | None = None
    stable: bool = False
    members: list[StoredMember] = []
    empty_since_ms: int = 0  # by the wall clock; 0: it has members, or never had any


class GroupAnswer(NamedTuple):
    """The answer to a request that waits."""

    token: Hashable
    result: Joined | Synced


class Store(NamedTuple):
    """A record to store; `ConsumerGroup.stored` is called with the number afterwards."""

    number: int
    record: StoredGroup


Effect = GroupAnswer | Store


class PauseWatch:
    """Notices that this process was paused, so that nobody is blamed for it.

    >>> watch = PauseWatch(1.0)
    >>> watch.seen(10.0), watch.seen(10.5), watch.seen(17.5), watch.seen(17.6)
    (0.0, 0.0, 7.0, 0.0)
    """

    __slots__ = ("_last", "_longest")

    def __init__(self, longest: float) -> None:
        self._longest = longest  # between two calls of `seen` when all is well
        self._last: float | None = None

    def seen(self, now: float) -> float:
        """The seconds since the last call, if there were more than there can be; else 0."""
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        return gap if gap > self._longest else 0.0

    def rest(self) -> None:
        """Nothing is watched until the next call of `seen`."""
        self._last = None


def join_refusal(ask: JoinAsk, limits: GroupBounds) -> ErrorCode:
    """Why a join is refused whatever the group is; `none` if it is not."""
    if not limits.min_session <= ask.session <= limits.max_session:
        return ErrorCode.invalid_session_timeout
    if not ask.protocol_type or not ask.protocols:
        return ErrorCode.inconsistent_group_protocol
    ids = (ask.member_id, ask.instance or "", ask.protocol_type, *(p.name for p in ask.protocols))
    if any(len(text.encode()) > ID_BYTES_MAX for text in ids):
        return ErrorCode.invalid_request
    if sum(len(protocol.metadata) for protocol in ask.protocols) > limits.max_member_bytes:
        return ErrorCode.invalid_request
    return ErrorCode.none


def common_protocols(members: Iterable[ConsumerMember]) -> set[str]:
    """The names of the protocols that all members know."""
    names = [{protocol.name for protocol in member.protocols} for member in members]
    return set.intersection(*names) if names else set()


def voted_protocol(members: Sequence[ConsumerMember]) -> str:
    """The protocol of a generation: each member votes for its first that all know."""
    common = common_protocols(members)
    votes: dict[str, int] = {}
    for member in members:
        choice = next(one.name for one in member.protocols if one.name in common)
        votes[choice] = votes.get(choice, 0) + 1
    return max(votes, key=lambda name: votes[name])


def subscription_of(metadata: bytes) -> frozenset[str] | None:
    """The topics that a consumer's metadata names; None if it cannot be read.

    What follows them (the partitions that it has, data of the assignor) changes without the member
    wanting anything else.
    """
    try:
        (count,) = _INT.unpack_from(metadata, _SHORT.size)
        if count > TOPICS_MAX:
            return None
        at = _SHORT.size + _INT.size
        topics: set[str] = set()
        for _ in range(count):
            (size,) = _SHORT.unpack_from(metadata, at)
            at += _SHORT.size
            if size < 0 or at + size > len(metadata):
                return None
            topics.add(metadata[at : at + size].decode())
            at += size
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)


def same_topics(one: Sequence[Protocol], other: Sequence[Protocol]) -> bool:
    """Whether a consumer that knew one and now knows the other wants the same topics."""
    return [(name, _wanted(metadata)) for name, metadata in one] == [
        (name, _wanted(metadata)) for name, metadata in other
    ]


def _wanted(metadata: bytes) -> frozenset[str] | bytes:
    topics = subscription_of(metadata)
    return metadata if topics is None else topics
