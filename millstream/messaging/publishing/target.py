"""The topic that packs are written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from millstream.events.encoding import TopicShape
from millstream.events.event import Partition
from millstream.events.packs.pack import EncodedPack, encode, split
from millstream.events.packs.packing import Packing
from millstream.events.value_type import ValueType
from millstream.messaging.publishing.acks import Acks
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher

__all__ = ["PackTarget"]

# After a pack that was not worth compressing, this many are not tried.
_PAUSE_PACKS: Final = 15


class _Trials:
    """Whether the next pack is worth a try: what a topic holds is mostly of one kind."""

    __slots__ = ("_pause",)

    def __init__(self) -> None:
        self._pause = 0

    def due(self) -> bool:
        if self._pause:
            self._pause -= 1
            return False
        return True

    def failed(self) -> None:
        self._pause = _PAUSE_PACKS


@dataclass(frozen=True, slots=True)
class PackTarget:
    """The topic that a producer of packs, a writer or a process stores packs in."""

    jetstream: JetStream
    publisher: StreamPublisher
    shape: TopicShape
    partitions: Sequence[Partition]
    value_type: ValueType | None
    acks: Acks
    replicas: int = 1
    _trials: _Trials = field(default_factory=_Trials)  # of compression

    def split(self, batch: pa.RecordBatch, packing: Packing) -> list[pa.RecordBatch]:
        """The batch in pieces that each fit one pack."""
        max_payload = self.jetstream.connection.info.max_payload
        size = min(packing.max_bytes, max_payload)
        alone = max_payload if packing.large_alone else size
        return split(batch, packing.max_events, size, max_alone=alone)

    def encode(self, piece: pa.RecordBatch, packing: Packing) -> EncodedPack:
        """A piece as a pack of the topic's schema version."""
        schema_id = None if self.value_type is None else self.value_type.schema_id
        return self.encode_version(piece, packing, schema_id)

    def encode_version(
        self, piece: pa.RecordBatch, packing: Packing, schema_id: str | None
    ) -> EncodedPack:
        """A piece as a pack of any version of the schema."""
        compression = packing.compression
        if compression == "auto" and not self._trials.due():
            compression = "none"
        pack = encode(piece, schema_id=schema_id, compression=compression)
        if pack.incompressible:
            self._trials.failed()
        return pack
