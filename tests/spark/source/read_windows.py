"""Reads a topic as a worker does and prints the peak of its memory.

Its arguments: URL, topic, messages of a window, and numbers. For each N of these the first N
messages are read, in a process that holds nothing else.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructType

from millstream.spark.datasource import MillstreamDataSource
from millstream.spark.source import range_reader as reader_module
from millstream.wire.sync.window import Window


def main(url: str, topic: str, messages: int, ends: list[int]) -> None:
    """One line of JSON: for each end the rows and the peaks in bytes, of Arrow and of Python."""
    # Small windows, so that few messages fill many of them.
    setattr(reader_module, "WINDOW", Window(messages=messages))  # noqa: B010
    found = []
    for end in ends:
        options = {
            "url": url,
            "subscribe": topic,
            "columns": "value",
            "endingOffsets": json.dumps({topic: {"0": end + 1}}),
            "maxRecordsPerPartition": "1000000",
            "minPartitions": "1",
        }
        reader = MillstreamDataSource(options).reader(StructType().add("value", BinaryType()))
        (task,) = reader.partitions()
        rows = 0
        most = 0
        tracemalloc.start()
        batches: Any = reader.read(task)
        for batch in batches:
            rows += batch.num_rows
            most = max(most, pa.total_allocated_bytes())
        found.append({"rows": rows, "arrow": most, "python": tracemalloc.get_traced_memory()[1]})
        tracemalloc.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(end) for end in sys.argv[4:]])
