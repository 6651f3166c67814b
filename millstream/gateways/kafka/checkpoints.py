"""What is known of a partition's offsets, kept in a table: it outlives the messages.

When retention removes packs, their counts are gone, and with them the offsets of what follows. So
the index is kept: full parts of it once, each under a key of its own, and the rest, with what is
known of producers, in a checkpoint that is replaced by compare-and-set.

A checkpoint also reserves offsets: none at or after `reserved` was ever handed out. If messages
that came after the checkpoint are lost before a gateway counts them again, what follows continues
there: offsets may be skipped, and none ever names two events. `close` gives the rest back.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

import msgspec

from millstream.errors import DataLoss, WrongSequence
from millstream.gateways.kafka.offset_index import IndexPart, OffsetIndex
from millstream.gateways.kafka.own_tables import own_table
from millstream.gateways.kafka.producer_state import KeptProducer, ProducerStates
from millstream.mill import Mill
from millstream.tables import Table

__all__ = ["OFFSETS_TABLE", "Checkpoint", "Checkpoints", "Overtaken", "PartitionCheckpoints"]

OFFSETS_TABLE: Final = "kafka-offsets"
PART_UNITS: Final = 4096  # units of the index that are kept together, once


class Overtaken(Exception):
    """Somebody else has replaced the checkpoint since it was read."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What is known of a partition up to before a sequence."""

    created: str  # when the stream was: another one of the same name starts again
    next_sequence: int
    end_offset: int
    reserved: int  # offsets from here on were never handed out
    start_offset: int  # where the log begins at least
    leader_epoch: int
    parts: list[tuple[int, int, int]]  # kept under their own keys: first, next sequence, units
    tail: IndexPart  # the units after them
    producers: list[KeptProducer]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Checkpoint).decode
_encode_part = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(IndexPart).decode


class Checkpoints:
    """The table that all partitions' checkpoints are kept in."""

    def __init__(self, mill: Mill) -> None:
        self._mill = mill
        self._table: Table | None = None
        self._lock = asyncio.Lock()

    async def table(self) -> Table:
        """The table, which is created when it is first needed."""
        async with self._lock:
            if self._table is None:
                self._table = await own_table(self._mill, OFFSETS_TABLE)
            return self._table

    def of(self, stream: str) -> PartitionCheckpoints:
        """Those of the partition that a stream holds."""
        return PartitionCheckpoints(self, stream)


class PartitionCheckpoints:
    """Reads and replaces the checkpoint of one partition."""

    def __init__(self, store: Checkpoints, stream: str) -> None:
        self._store = store
        self._stream = stream
        self._revision = 0
        self._parts: list[tuple[int, int, int]] = []

    async def load(self) -> Checkpoint | None:
        """The checkpoint as it is now; None: there is none."""
        table = await self._store.table()
        entry = await table.get(self._stream)
        if entry is None:
            self._revision, self._parts = await table.revision(self._stream), []
            return None
        try:
            found = _decode(zlib.decompress(entry.value))
        except (zlib.error, msgspec.DecodeError) as error:
            raise self._damaged(f"it cannot be read: {error}") from error
        self._revision, self._parts = entry.revision, list(found.parts)
        return found

    async def index(self, checkpoint: Checkpoint) -> OffsetIndex:
        """The index of a checkpoint that was loaded."""
        table = await self._store.table()
        parts = []
        for first, _, _ in checkpoint.parts:
            entry = await table.get(self._part_key(first))
            if entry is None:
                raise self._damaged(f"the part from sequence {first} on is missing")
            parts.append(_decode_part(entry.value))
        try:
            return OffsetIndex.restored(
                [*parts, checkpoint.tail], checkpoint.next_sequence, checkpoint.end_offset
            )
        except (ValueError, zlib.error, msgspec.DecodeError) as error:
            raise self._damaged(str(error)) from error

    async def save(
        self,
        index: OffsetIndex,
        producers: ProducerStates,
        *,
        created: str,
        reserved: int,
        start_offset: int,
        first_sequence: int,
        leader_epoch: int,
    ) -> None:
        """Replace the checkpoint by one of the index as it is now; Overtaken: somebody else did.

        What was kept of messages before `first_sequence` is removed.
        """
        done = self._parts[-1][1] if self._parts else index.first_sequence
        fresh = []
        # The last unit may still grow: it is never in a part that is kept for good.
        while index.units_from(done) > PART_UNITS:
            fresh.append(index.part(done, PART_UNITS))
            done = fresh[-1].next_sequence
        kept = [part for part in self._parts if part[1] > first_sequence]
        gone = self._parts[: len(self._parts) - len(kept)]
        checkpoint = Checkpoint(
            created,
            index.next_sequence,
            index.end_offset,
            reserved,
            start_offset,
            leader_epoch,
            [*kept, *(part[:3] for part in fresh)],
            index.part(done, PART_UNITS),
            list(producers.kept()),
        )
        value = zlib.compress(_encode(checkpoint), 1)  # before anything is awaited
        table = await self._store.table()
        for part in fresh:
            await table.put(self._part_key(part.first_sequence), _encode_part(part))
        try:
            self._revision = await table.put(self._stream, value, revision=self._revision)
        except WrongSequence as error:
            raise Overtaken from error
        self._parts = list(checkpoint.parts)
        for first, _, _ in gone:
            await table.delete(self._part_key(first))

    async def discard(self) -> None:
        """Forget the parts of a checkpoint that was loaded: they are of another stream."""
        table = await self._store.table()
        for first, _, _ in self._parts:
            await table.delete(self._part_key(first))
        self._parts = []

    def _part_key(self, first_sequence: int) -> str:
        return f"{self._stream}/{first_sequence}"

    def _damaged(self, why: str) -> DataLoss:
        return DataLoss(
            f"the checkpoint of stream '{self._stream}' in table '{OFFSETS_TABLE}': {why}. Restore "
            f"the table from a backup; without it, events might get offsets that others had"
        )
