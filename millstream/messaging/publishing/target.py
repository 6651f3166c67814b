"""The topic that packs are written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.events.encoding import TopicShape
from millstream.events.event import Partition
from millstream.events.value_type import ValueType
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher

__all__ = ["PackTarget"]


@dataclass(frozen=True, slots=True)
class PackTarget:
    """The topic that a producer of packs, a writer or a process stores packs in."""

    jetstream: JetStream
    publisher: StreamPublisher
    shape: TopicShape
    partitions: Sequence[Partition]
    value_type: ValueType | None

    @property
    def schema_id(self) -> str | None:
        """The id of the schema version that is written; None: values are bytes."""
        return None if self.value_type is None else self.value_type.schema_id

    @property
    def max_payload(self) -> int:
        """The largest message, in bytes, that the server accepts."""
        return self.jetstream.connection.info.max_payload
