"""A driver of its own, to be killed: copies one topic to another until it is stopped.

python copy_topic.py URL MASTER CHECKPOINT [--mode staged] [--once] [--shuffle] [--group-id ID]
"""

from __future__ import annotations

import argparse

from millstream.spark import session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("master")
    parser.add_argument("checkpoint")
    parser.add_argument("--mode", default="direct")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--group-id", help="for a source that is an interest topic")
    chosen = parser.parse_args()
    conf = {
        "spark.task.maxFailures": "8",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    spark = session("copy", master=chosen.master, quick=True, conf=conf)
    frame = (
        spark.readStream.format("millstream")
        .options(url=chosen.url, subscribe="source", startingOffsets="earliest")
        .options(maxOffsetsPerTrigger="100", minPartitions="2")
        .options(**({} if chosen.group_id is None else {"groupId": chosen.group_id}))
        .load()
        .select("key", "value")
    )
    if chosen.shuffle:
        frame = frame.repartition(3, "key")
    writer = (
        frame.writeStream.format("millstream")
        .options(url=chosen.url, topic="target", commitMode=chosen.mode)
        .option("checkpointLocation", chosen.checkpoint)
    )
    if chosen.once:
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
