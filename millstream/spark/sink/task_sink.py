"""The worker's side of a sink: from record batches to packs by partition, stored under fences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.events.fence import fence_subject
from millstream.events.packs.pack import EncodedPack, encode, split
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import connection_to
from millstream.spark.options import SinkOptions
from millstream.spark.sink.chain import Chain, Fence, UnitLimits
from millstream.spark.sink.sink_rows import by_topic, enveloped, partitioned
from millstream.spark.sink.targets import Target, find_target

if TYPE_CHECKING:
    from millstream.schemas import Conformer

__all__ = ["Packer", "TaskRows", "chain_of", "write_chains"]

UNIT_BYTES_TOTAL = 64 * 1024 * 1024  # of all partitions of a topic, held by one worker
UNIT_BYTES_MIN = 4 * 1024 * 1024


class Packer:
    """Rows of one partition, collected until they fill a pack."""

    def __init__(
        self, target: Target, options: SinkOptions, give: Callable[[EncodedPack], None]
    ) -> None:
        self._max_bytes = min(options.pack_bytes, target.max_payload)
        self._options = options
        self._schema_id = target.schema.latest_id if target.schema is not None else None
        self._give = give
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0
        self.count = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows; full packs are passed on."""
        self.count += rows.num_rows
        start = 0
        while start < rows.num_rows:
            taken = min(rows.num_rows - start, self._options.pack_rows - self._rows)
            self._waiting.append(rows.slice(start, taken))
            self._rows += taken
            start += taken
            if self._rows >= self._options.pack_rows:
                self.flush()

    def flush(self) -> None:
        """Pass the rest on."""
        if not self._waiting:
            return
        waiting, self._waiting, self._rows = self._waiting, [], 0
        for rows in split(_one(waiting), self._options.pack_rows, self._max_bytes):
            pack = encode(rows, schema_id=self._schema_id, compression=self._options.compression)
            self._give(pack)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(_alike(batches)).combine_chunks()
    return table.to_batches()[0]


def _alike(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches with one schema: an envelope column that is all null is left out of some."""
    names = batches[0].schema.names
    if all(batch.schema.names == names for batch in batches):
        return batches
    from millstream.events.packs.envelope import complete

    return [complete(batch) for batch in batches]


@dataclass
class TaskRows:
    """Sorts the rows of a task by topic and partition and hands them to packers."""

    settings: ConnectionSettings
    options: SinkOptions
    target: Target | None  # the topic of the option; None: each row names its own
    task: int  # its number, which chooses the partition of rows without a key

    def __post_init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._conformers: dict[str, Conformer] = {}

    def target_of(self, topic: str) -> Target:
        if self.target is not None:
            return self.target
        known = self._targets.get(topic)
        if known is None:
            known = self._targets[topic] = find_target(self.settings, topic)
        return known

    def check(self, schema: pa.Schema) -> None:
        """Reject rows whose values cannot fit the topic, by their types alone."""
        if self.target is not None and not self.options.is_table:
            self._checked(self.target, pa.RecordBatch.from_pylist([], schema=schema))

    def distribute(
        self,
        batches: Iterable[pa.RecordBatch],
        packer_for: Callable[[Target, int], Packer],
    ) -> int:
        """Pass every row to its packer; returns the number of rows."""
        packers: dict[tuple[str, int], Packer] = {}
        total = 0
        for batch in batches:
            total += batch.num_rows
            for topic, part in by_topic(batch, self.options.topic):
                target = self.target_of(topic)
                chosen = part.column("partition") if "partition" in part.schema.names else None
                rows = enveloped(self._checked(target, part))
                for number, some in partitioned(rows, chosen, target.partitions, self.task):
                    key = (target.topic, number)
                    if key not in packers:
                        packers[key] = packer_for(target, number)
                    packers[key].add(some)
        for key in sorted(packers):
            packers[key].flush()
        return total

    def _checked(self, target: Target, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with values in the topic's type."""
        column = batch.schema.get_field_index("value")
        value = batch.column(column)
        typed = pa.types.is_struct(value.type)
        if target.is_table:
            raise ConfigError(
                f"'{target.topic}' is a table: write to it with the option 'table' instead of "
                f"'topic'"
            )
        if not target.takes_packs:
            raise ConfigError(
                f"topic '{target.topic}' was created with packs=False, and Spark writes packs: "
                f"write to a topic that takes them"
            )
        if target.schema is None:
            if typed:
                raise ConfigError(
                    f"topic '{target.topic}' has no schema, so its values are bytes or text: "
                    f"write to_json(value) AS value, or declare the topic with a schema"
                )
            return batch
        if not typed:
            raise ConfigError(
                f"topic '{target.topic}' has a schema: give the value as a struct of its fields, "
                f"struct(...) AS value, not as {value.type}"
            )
        conformer = self._conformers.get(target.topic)
        if conformer is None:
            from millstream.schemas import Conformer

            conformer = Conformer(target.schema.latest.record)
            self._conformers[target.topic] = conformer
        return batch.set_column(column, "value", conformer.conform(value))


def chain_of(
    settings: ConnectionSettings, target: Target, number: int, writer: str, batch: int
) -> Chain:
    """The chain of a writer and batch in one partition."""
    subject = fence_subject(target.prefixes[number], writer)
    fence = Fence(connection_to(settings), target.streams[number], subject, writer)
    share = max(UNIT_BYTES_MIN, UNIT_BYTES_TOTAL // target.partitions // 2)
    limits = UnitLimits(bytes=share) if target.atomic else UnitLimits(1, share)
    return Chain(fence, batch, limits)


def write_chains(rows: TaskRows, batches: Iterable[pa.RecordBatch], writer: str, batch: int) -> int:
    """Store a task's rows, one chain for each partition; returns the number of rows."""
    chains: list[Chain] = []

    def packer_for(target: Target, number: int) -> Packer:
        chain = chain_of(rows.settings, target, number, writer, batch)
        chains.append(chain)
        return Packer(target, rows.options, chain.add)

    total = rows.distribute(batches, packer_for)
    for chain in chains:
        chain.finish()
    return total
