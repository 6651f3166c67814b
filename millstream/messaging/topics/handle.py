"""What the parts of an open topic share: connection, publisher, partitions, values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.events.encoding import TopicShape
from millstream.events.event import Partition
from millstream.events.value_type import ValueType
from millstream.messaging.topics.info import TopicInfo
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher

__all__ = ["TopicHandle"]


@dataclass(frozen=True, slots=True)
class TopicHandle:
    """An open topic, as its readers, publishers and subscriptions use it."""

    jetstream: JetStream
    publisher: StreamPublisher
    shape: TopicShape
    partitions: Sequence[Partition]
    value_type: ValueType | None

    @classmethod
    def of(
        cls,
        jetstream: JetStream,
        publisher: StreamPublisher,
        info: TopicInfo,
        value_type: ValueType | None,
    ) -> TopicHandle:
        """The handle of a topic that was looked up."""
        shape = TopicShape(info.name, [part.prefix or info.name for part in info.partitions])
        partitions = [
            Partition(part.stream, info.name, part.number, part.prefix, value_type)
            for part in info.partitions
        ]
        return cls(jetstream, publisher, shape, partitions, value_type)
