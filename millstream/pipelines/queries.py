"""One flow as one streaming query: its sink, output mode, trigger and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from millstream.errors import PipelineInvalid
from millstream.nearest import near_names
from millstream.pipelines.declare import SNAPSHOT, Flow, Output
from millstream.pipelines.outputs import stored_columns
from millstream.pipelines.postgres import TABLE, address_of
from millstream.pipelines.progress import OUTPUT_METRIC

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["QueryPlan", "start_query"]

# Our own option of a JDBC sink: the column that identifies the batch.
BATCH_COLUMN: Final = "batchColumn"
JDBC_NEEDS: Final = ("url", "dbtable")
# Options of Spark that look like ours. Others may be the driver's, so an unknown one is no mistake.
JDBC_ALIKE: Final = ("batchsize", "partitionColumn")


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """What a flow's query needs besides its rows."""

    name: str  # of the query
    folder: Path  # of the project; paths of files are relative to it
    checkpoint: str
    trigger: float  # seconds between batches
    once: bool  # read what is available, then end
    options: Mapping[str, str]  # of every Millstream sink


def start_query(rows: DataFrame, flow: Flow, output: Output, plan: QueryPlan) -> StreamingQuery:
    """Start the query of a flow; it runs in the background from then on."""
    from pyspark.sql import functions as sf

    if not rows.isStreaming:
        raise PipelineInvalid(
            f"the flow '{flow.name}' ({flow.where}) reads no stream, so nothing would ever change: "
            f"read a topic with read(...), a table's changes with read_changes(...), or an event "
            f"store with read_events(...)"
        )
    counted = rows.observe(OUTPUT_METRIC, sf.count(sf.lit(1)).alias("rows"))
    writer = counted.writeStream.queryName(plan.name)
    writer = writer.option("checkpointLocation", plan.checkpoint).outputMode(flow.mode)
    if plan.once:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(plan.trigger * 1000)} milliseconds")
    if output.kind == "postgres":
        return writer.foreachBatch(_postgres(rows, output)).start()
    return _to(writer, flow, output, plan).start()


def _to(writer: DataStreamWriter, flow: Flow, output: Output, plan: QueryPlan) -> DataStreamWriter:
    if output.kind == "files":
        path = str(plan.folder / output.options["path"])
        if output.format == SNAPSHOT:
            return writer.foreachBatch(_snapshot(path))
        writer = writer.format(output.format).options(**{**output.options, "path": path})
        return writer.partitionBy(*output.key) if output.key else writer
    if output.kind == "sink":
        if output.format == "jdbc":
            return writer.foreachBatch(_jdbc(output))
        return writer.format(output.format).options(**output.options)
    if flow.mode == "append":
        return writer.format("millstream").options(**plan.options, **{output.kind: output.name})
    # Python sinks only take appended rows; changed rows and complete results need foreachBatch.
    return writer.foreachBatch(_changes(flow, output, plan.options))


def _snapshot(path: str) -> Callable[[DataFrame, int], None]:
    """Replace the previous result by the complete new one."""

    def write(batch: DataFrame, _: int) -> None:
        batch.write.mode("overwrite").parquet(path)

    return write


def _changes(
    flow: Flow, output: Output, options: Mapping[str, str]
) -> Callable[[DataFrame, int], None]:
    given = {**options, output.kind: output.name, "writerName": flow.name}

    def write(batch: DataFrame, _: int) -> None:
        batch.write.format("millstream").options(**given).mode("append").save()

    return write


def _postgres(rows: DataFrame, output: Output) -> Callable[[DataFrame, int], None]:
    # Loaded only where it is used: it needs the libraries of an extra.
    from millstream.pipelines.postgres_batches import PostgresBatches
    from millstream.pipelines.postgres_table import prepared_table

    columns, address = stored_columns(rows.schema), address_of(output)
    # Looked at again for each start of the flow: it may have been changed in between.
    table = prepared_table(address, output.name, output.options[TABLE], columns, output.key)
    return PostgresBatches(output.name, table, tuple(columns.names), output.key, address)


def _jdbc(output: Output) -> Callable[[DataFrame, int], None]:
    """Write each batch in one transaction; with `batchColumn`, a stored batch is skipped.

    Without it, a batch that was stored just before the process died is stored again.
    """
    given = dict(output.options)
    column = given.pop(BATCH_COLUMN, None)
    missing = [name for name in JDBC_NEEDS if name not in given]
    if missing:
        raise PipelineInvalid(f"the jdbc sink '{output.name}' needs the option '{missing[0]}'")
    for name in given:  # the driver would ignore it, and batches be stored twice after a crash
        if near_names(name, (BATCH_COLUMN, *JDBC_ALIKE), most=1) == [BATCH_COLUMN]:
            raise PipelineInvalid(
                f"the jdbc sink '{output.name}' has the option '{name}': "
                f"did you mean '{BATCH_COLUMN}'?"
            )

    def write(batch: DataFrame, number: int) -> None:
        from pyspark.sql import functions as sf

        if column is not None:
            mark = _batch_mark(batch, number)
            if _has_batch(batch.sparkSession, given, column, mark):
                return
            batch = batch.withColumn(column, sf.lit(mark).cast("bigint"))
        # One task is one transaction: all rows of the batch, or none.
        batch.coalesce(1).write.format("jdbc").options(**given).mode("append").save()

    return write


def _batch_mark(batch: DataFrame, number: int) -> int:
    """A positive BIGINT for a batch of this query.

    Batches are numbered from 0 in every flow, and again after a reset: the number alone would let
    rows pass for those of another flow, or of before the reset, and they would not be stored.
    """
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    return crc32(str(query).encode()) << 31 | number


def _has_batch(spark: Any, options: Mapping[str, str], column: str, mark: int) -> bool:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        stored = spark.read.format("jdbc").options(**options).load()
    except (PySparkException, Py4JError):
        return False  # the first batch creates the table; other errors show when it is written
    if column not in stored.columns and column.upper() in stored.columns:
        column = column.upper()
    return not stored.where(stored[column] == mark).limit(1).isEmpty()
