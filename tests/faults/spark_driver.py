"""A Spark driver to be killed: python -m tests.faults.spark_driver URL CHECKPOINT MODE

Follows `input`, joins each event with the label of its key in `labels`, and writes `output`. The
labels are broadcast: the join moves no event, so each key keeps its order.
"""

from __future__ import annotations

import sys

from pyspark.sql.functions import broadcast

from millstream.spark import session

URL, CHECKPOINT, MODE = sys.argv[1:]


def main() -> None:
    # Tasks are retried, as on a cluster: a killed Python worker is one failed task.
    conf = {"spark.driver.memory": "768m", "spark.sql.shuffle.partitions": "2"}
    spark = session("faults", master="local[2, 8]", quick=True, conf=conf)
    labels = (
        spark.read.format("millstream")
        .options(url=URL, subscribe="labels")
        .load()
        .selectExpr("key AS label_key", "value AS label")
    )
    events = (
        spark.readStream.format("millstream")
        .options(url=URL, subscribe="input", startingOffsets="earliest")
        .options(maxOffsetsPerTrigger="2000")
        .load()
    )
    joined = events.join(broadcast(labels), events["key"] == labels["label_key"]).selectExpr(
        "key", "concat(value, X'40', label) AS value"
    )
    query = (
        joined.writeStream.format("millstream")
        .options(url=URL, topic="output", commitMode=MODE)
        .option("checkpointLocation", CHECKPOINT)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
