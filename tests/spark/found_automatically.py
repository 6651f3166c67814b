"""A program that uses only the name of the format, and prints what it read.

Run by `spark-submit`, by plain Python, and (with the argument `connect`) as a client of Spark
Connect.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main(url: str, kind: str, folder: str) -> None:
    """Copy a topic in a stream, then read the copy."""
    builder = SparkSession.builder
    if kind == "connect":
        builder = builder.remote("local[1]")
    elif kind == "plain":
        builder = builder.master("local[1]")
    spark = builder.getOrCreate()
    stream = spark.readStream.format("millstream").options(url=url, subscribe="source")
    rows = stream.option("startingOffsets", "earliest").load().select("key", "value")
    sink = rows.writeStream.format("millstream").options(url=url, topic=f"copy-{kind}")
    query = sink.option("checkpointLocation", folder).trigger(availableNow=True).start()
    query.awaitTermination()
    frame = spark.read.format("millstream").options(url=url, subscribe=f"copy-{kind}").load()
    values = sorted(bytes(row.value).decode() for row in frame.collect())
    sys.stdout.write(f"\nfound {type(spark).__module__} {' '.join(values)}\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
