"""A driver on a cluster with speculative attempts of slow tasks: runs each line of its input.

python speculate.py MASTER, then lines of JSON with url, kind, mode, folder and stall.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from millstream.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 400
ROWS_PER_BATCH = 10
VALUE_CHARS = 8192  # so that rows leave the buffers between Spark and its workers one by one
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1",
    "spark.speculation.minTaskRuntime": "50ms",
    "spark.speculation.efficiency.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_PER_BATCH),
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}


def reporting(folder: str, stall: bool) -> Callable[[Iterator[pa.RecordBatch]], Any]:
    """Rows as they are; files report which attempts exist.

    With `stall` the first attempt of task 0 stalls after half of its rows, and its twin waits until
    it may start.
    """
    half = ROWS // 2 // ROWS_PER_BATCH // 2

    def wait_for(name: str) -> None:
        limit = time.monotonic() + 240
        while not Path(folder, name).exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"file '{name}' was not created")
            time.sleep(0.02)

    def give(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        task, attempt = context.partitionId(), context.attemptNumber()
        for number, batch in enumerate(batches):
            if number == 0:
                Path(folder, f"{task}-{attempt}").touch()
            if stall and task == 0:
                if attempt == 0 and number == half:
                    wait_for("over")
                if attempt > 0 and number == 0:
                    wait_for("go")
            yield batch

    return give


def rows(frame: DataFrame, number: str, order: dict[str, Any]) -> DataFrame:
    columns = (f"concat('k', {number} % 7) AS key", f"rpad({number}, {VALUE_CHARS}, '.') AS value")
    give = reporting(order["folder"], order["stall"])
    return frame.selectExpr(*columns).mapInArrow(give, "key STRING, value STRING")


def write(spark: SparkSession, order: dict[str, Any]) -> None:
    url = order["url"]
    options = {"url": url, "topic": "target", "commitMode": order["mode"]}
    if order["stall"]:
        options["maxRowsPerPack"] = "2"
    if order["kind"] == "batch":
        frame = rows(spark.range(0, ROWS, numPartitions=2), "id", order)
        frame.write.format("millstream").options(**options).mode("append").save()
        return
    source = spark.readStream.format("millstream").options(url=url, subscribe="source")
    frame = rows(
        source.option("startingOffsets", "earliest").load(), "cast(value AS STRING)", order
    )
    writer = frame.writeStream.format("millstream").options(**options)
    writer = writer.option("checkpointLocation", str(Path(order["folder"], "checkpoint")))
    writer.trigger(availableNow=True).start().awaitTermination()


def main() -> None:
    spark = session("speculate", master=sys.argv[1], quick=True, conf=CONF)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            write(spark, order)
            answer = "done"
        except Exception as error:  # reported to the test, which knows what was expected
            answer = repr(error)
        Path(order["folder"], "over").touch()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    spark.stop()


if __name__ == "__main__":
    main()
