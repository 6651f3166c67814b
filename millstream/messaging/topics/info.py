"""Settings and state of a topic, as frozen values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from millstream.messaging.topics.settings import TopicSettings
from millstream.messaging.topics.stream_config import from_stream_config, identity_of
from millstream.wire.api import ClusterInfo, SourceInfo, StreamInfo
from millstream.wire.lost import LostRange, lost_ranges

__all__ = ["CopyState", "PartitionInfo", "Replica", "TopicInfo", "topic_info"]


@dataclass(frozen=True, slots=True)
class Replica:
    """One node, other than the leader, that keeps a replica of a partition."""

    node: str
    current: bool  # has everything the leader has
    offline: bool
    lag: int  # operations behind the leader


@dataclass(frozen=True, slots=True)
class CopyState:
    """How far a mirror or source is behind its origin."""

    stream: str  # of the origin
    lag: int  # messages that are not copied yet, as last reported
    heard: timedelta | None  # time since the origin last answered; None: never
    problem: str | None


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition; offsets are inclusive, an empty one has first_offset = last_offset + 1."""

    number: int
    stream: str
    prefix: str | None  # what its subjects start with; None: a foreign stream
    subjects: tuple[str, ...]  # empty for a copy
    first_offset: int
    last_offset: int
    messages: int  # a pack of many events is one
    bytes: int
    keys: int  # distinct subjects
    first_time: datetime | None  # when the oldest message was stored; None: it is empty
    last_time: datetime | None
    subscriptions: int
    leader: str | None = field(compare=False)  # node that leads it; None: none, or unknown
    replicas: tuple[Replica, ...]
    copies: tuple[CopyState, ...]  # one for a mirror, several for sources, by stream
    lost: tuple[LostRange, ...]  # what the broker found to be lost, accepted or not
    config: Mapping[str, Any] = field(compare=False)  # as the server has it


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic's settings and state."""

    name: str
    settings: TopicSettings
    partitions: tuple[PartitionInfo, ...]
    created: datetime
    managed: bool  # declared by Millstream; else a JetStream stream, opened as it is
    missing: tuple[int, ...] = ()  # partitions that do not exist: declare it again
    uneven: bool = False  # partitions have different settings: edit it again

    @property
    def messages(self) -> int:
        """Number of messages stored in all partitions; a pack of many events is one message."""
        return sum(part.messages for part in self.partitions)

    @property
    def bytes(self) -> int:
        """Bytes stored in all partitions."""
        return sum(part.bytes for part in self.partitions)

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions of the topic; each has one consumer per partition."""
        return max((part.subscriptions for part in self.partitions), default=0)

    @property
    def lag(self) -> int | None:
        """Number of messages not copied yet; None: the topic is not a copy."""
        if not self.settings.is_copy:
            return None
        return sum(copy.lag for part in self.partitions for copy in part.copies)

    @property
    def prefix(self) -> str | None:
        """What all its subjects start with; None for a foreign stream."""
        return self.settings.subject_prefix(self.name) if self.managed else None


def topic_info(name: str, streams: Sequence[StreamInfo]) -> TopicInfo:
    """The topic of these streams (those that exist, in any order)."""
    parts = sorted(streams, key=lambda info: identity_of(info.config).partition)
    settings = from_stream_config(parts[0].config)
    identity = identity_of(parts[0].config)
    created = _moment(parts[0].created) or datetime.fromtimestamp(0, UTC)
    if identity.topic != name:  # one partition of another topic, on its own
        alone = replace(_partition(parts[0]), number=0)
        settings = settings.changed({"partitions": 1}, check=False)
        return TopicInfo(name, settings, (alone,), created, managed=False)
    there = {identity_of(info.config).partition for info in parts}
    return TopicInfo(
        name=name,
        settings=settings,
        partitions=tuple(_partition(info) for info in parts),
        created=created,
        managed=identity.managed,
        missing=tuple(n for n in range(identity.partitions) if n not in there),
        uneven=any(from_stream_config(info.config) != settings for info in parts[1:]),
    )


def _partition(info: StreamInfo) -> PartitionInfo:
    config, state = info.config, info.state
    identity = identity_of(config)
    cluster = info.cluster or ClusterInfo()
    copies = [info.mirror] if info.mirror is not None else info.sources
    return PartitionInfo(
        number=identity.partition,
        stream=config["name"],
        prefix=identity.prefix,
        subjects=tuple(config.get("subjects") or ()),
        first_offset=max(state.first_seq, 1) if state.messages else state.last_seq + 1,
        last_offset=state.last_seq,
        messages=state.messages,
        bytes=state.bytes,
        keys=state.num_subjects,
        first_time=_moment(state.first_ts) if state.messages else None,
        last_time=_moment(state.last_ts) if state.messages else None,
        subscriptions=state.consumer_count,
        leader=cluster.leader or None,
        replicas=tuple(
            Replica(peer.name, peer.current, peer.offline, peer.lag) for peer in cluster.replicas
        ),
        copies=tuple(sorted(map(_copy, copies), key=lambda copy: copy.stream)),
        lost=lost_ranges(config),
        config=config,
    )


def _copy(source: SourceInfo) -> CopyState:
    heard = timedelta(microseconds=source.active / 1000) if source.active >= 0 else None
    problem = source.error.description if source.error is not None else None
    return CopyState(source.name, source.lag, heard, problem)


def _moment(text: str) -> datetime | None:
    """A time of the server; None for the year 1, which means never."""
    if not text or text.startswith("0001-"):
        return None
    return datetime.fromisoformat(text).astimezone(UTC)
