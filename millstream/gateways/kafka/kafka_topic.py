"""A topic as Kafka's clients see it, made from what the broker says of its streams. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid5

from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.topic_configs import max_message_bytes, timestamp_bounds
from millstream.gateways.kafka.topic_names import is_own, kafka_name_of
from millstream.gateways.rights import TopicSubjects
from millstream.messaging import TopicInfo
from millstream.messaging.topics.choices import Retention
from millstream.messaging.topics.info import topic_info
from millstream.messaging.topics.stream_config import identity_of
from millstream.wire.api import StreamInfo

__all__ = [
    "HIDDEN",
    "KafkaTopic",
    "TopicRefused",
    "UnknownTopic",
    "id_of",
    "kafka_topic",
    "taken",
]

# Tables that the gateway, and captures, keep their own records in.
HIDDEN: Final = frozenset({"kafka-offsets", "kafka-state", "kafka-groups", "cdc-state"})
_IDS: Final = UUID("6b0c3d0e-4f0e-4b43-9d0f-3c1c5c6c9a51")


class UnknownTopic(Exception):
    """There is no topic of this name, or no such partition."""


class TopicRefused(Exception):
    """What a client wants cannot be done; the text is for it."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A topic as Kafka's clients see it."""

    name: str  # Kafka's
    topic: str  # Millstream's
    id: UUID  # another one for a topic that was made again
    partitions: int
    streams: tuple[str, ...]  # by partition
    subjects: TopicSubjects
    info: TopicInfo  # its state is as old as the look-up
    max_message_bytes: int  # of a batch
    before_max_ms: int  # how far the time of a new event may be in the past
    after_max_ms: int  # and in the future


def kafka_topic(topic: str, streams: Sequence[StreamInfo]) -> KafkaTopic | None:
    """A topic, by Millstream's name, as Kafka's clients see it; None if they do not.

    Not seen are streams of others and topics that are not complete, what Millstream keeps its own
    records in, copies of foreign streams (no keys), and what is gone once somebody has read it.
    """
    if not streams:
        return None
    info = topic_info(topic, streams)
    settings, parts = info.settings, info.partitions
    prefixes = tuple(part.prefix for part in parts if part.prefix is not None)
    own = is_own(topic) or topic in HIDDEN
    if own or not info.managed or info.missing or len(prefixes) != len(parts):
        return None
    if settings.retention is not Retention.LIMITS:
        return None
    names = tuple(part.stream for part in parts)
    before, after = timestamp_bounds(settings)
    return KafkaTopic(
        name=kafka_name_of(topic, settings.kafka_name),
        topic=topic,
        id=id_of(topic, streams),
        partitions=len(parts),
        streams=names,
        subjects=TopicSubjects(names, prefixes),
        info=info,
        max_message_bytes=max_message_bytes(settings),
        before_max_ms=before,
        after_max_ms=after,
    )


def id_of(topic: str, streams: Sequence[StreamInfo]) -> UUID:
    """From the creation of its streams: a topic that is made again gets another one."""
    created = sorted((identity_of(info.config).partition, info.created) for info in streams)
    return uuid5(_IDS, f"{topic} {[time for _, time in created]}")


def taken(name: str, topic: str, streams: Sequence[StreamInfo]) -> TopicRefused:
    """Why a topic cannot be created where there is something already."""
    info = topic_info(topic, streams)
    other = kafka_name_of(topic, info.settings.kafka_name)
    if info.managed and other != name:
        text = f"Topic '{name}' collides with existing topics: {other}"
        return TopicRefused(ErrorCode.invalid_topic_exception, text)
    if not info.managed:
        text = f"Topic '{name}' collides with the JetStream stream '{topic}' of the broker"
        return TopicRefused(ErrorCode.invalid_topic_exception, text)
    text = f"Topic '{name}' already exists."
    if info.missing:
        text += " It is incomplete: delete it with 'millstream topic rm', or declare it again"
    elif kafka_topic(topic, streams) is None:
        text += (
            f" Clients of Kafka cannot see it: it has retention '{info.settings.retention}', or "
            f"is a copy of a stream that Millstream did not create"
        )
    return TopicRefused(ErrorCode.topic_already_exists, text)
