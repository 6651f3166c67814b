"""The upper limit of a source and a sink in Python: ready batches, and a sink that drops them.

No broker, no decompression and no decoding takes part, so what is left is Spark's own cost. Spark's
processes import this module too: it loads nothing that they do not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from bench.trade import trade_frame

__all__ = ["ReadySource"]


class ReadySource(DataSource):
    """Trades as a source, with the options `columns` (DDL), `rows`, `tasks` and `batchRows`.

    As a sink it counts rows; its option `rows` is how many it must get.
    """

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "ready"

    def schema(self) -> str:
        """The columns: some of `key`, `value` with the fields of a trade, and `timestamp`."""
        return self.options["columns"]

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read of all rows."""
        return _BatchReader(self._ready(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """All rows as one micro-batch."""
        return _StreamReader(self._ready(schema))

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """The sink of a streaming query."""
        return _Dropped(int(self.options["rows"]))

    def _ready(self, schema: StructType) -> _Ready:
        rows, tasks, batch_rows = (
            int(self.options[name]) for name in ("rows", "tasks", "batchRows")
        )
        return _Ready(tuple(schema.names), rows, tasks, batch_rows)


@dataclass(frozen=True)
class _Ready:
    """What is handed out; travels to the workers, so it holds no batch."""

    columns: tuple[str, ...]
    rows: int
    tasks: int
    batch_rows: int

    def partitions(self, start: int, end: int) -> list[InputPartition]:
        """A count of rows for each task."""
        bounds = [start + (end - start) * number // self.tasks for number in range(self.tasks + 1)]
        return [InputPartition(high - low) for low, high in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task: the same batch again and again, the last one shorter."""
        batch = _batch(self.batch_rows).select(list(self.columns))
        for done in range(0, partition.value, self.batch_rows):
            left = partition.value - done
            yield batch if left >= self.batch_rows else batch.slice(0, left)


@cache  # a worker serves many tasks: only its first one makes the batch
def _batch(rows: int) -> pa.RecordBatch:
    trades = trade_frame(rows)
    value = pa.StructArray.from_arrays(trades.columns, fields=list(trades.schema))
    key, timestamp = trades["symbol"].cast(pa.binary()), trades["at"]
    return pa.record_batch({"key": key, "value": value, "timestamp": timestamp})


class _BatchReader(DataSourceReader):
    def __init__(self, ready: _Ready) -> None:
        self._ready = ready

    def partitions(self) -> list[InputPartition]:
        return self._ready.partitions(0, self._ready.rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._ready.read(partition)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Not the simple kind of reader: that one reads in the driver's process, not in tasks."""

    def __init__(self, ready: _Ready) -> None:
        self._ready = ready

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"rows": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing is added while a query runs."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return {"rows": self._ready.rows}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return self._ready.partitions(start["rows"], end["rows"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._ready.read(partition)


@dataclass
class _Count(WriterCommitMessage):
    rows: int


class _Dropped(DataSourceStreamArrowWriter):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _Count(sum(batch.num_rows for batch in iterator))

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        found = sum(message.rows for message in messages if isinstance(message, _Count))
        if found != self._rows:
            raise RuntimeError(f"{found} of {self._rows} rows came to the sink")
