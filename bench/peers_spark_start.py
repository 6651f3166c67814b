"""Spark beside Kafka: the start of a session, and the latency of single events.

Each contestant is a process of its own, which starts a session and a query that copies events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.harness import PeerAbsent, Result, Skipped, raced, spread, take_turns, wanted
from bench.jars import Library, fetched
from bench.kafka_peer import KAFKA, KafkaServer, kafka_client
from bench.spark import CHILD_SECONDS, echo, echo_figures
from millstream.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["connector_jars", "start_and_latency", "start_wanted"]

CONNECTOR = "4.2.0"  # the newest on Maven Central; it runs in Spark 4.3
JARS = (
    Library("org.apache.spark", "spark-sql-kafka-0-10_2.13", CONNECTOR, alone=True),
    Library("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0", alone=True),
    Library("org.apache.kafka", "kafka-clients", "3.9.2", alone=True),
    Library("org.apache.commons", "commons-pool2", "2.12.0", alone=True),
)
START = "Spark session start and first event through"
LATENCY = "Spark end-to-end latency"
ROUND_TRIPS = {"p50": f"{LATENCY}, p50", "p99": f"{LATENCY}, p99"}
# The contestants: ours and Kafka's in the session of this package; Kafka's in the session that
# PySpark gives by itself; and the least that any source and sink in Python need.
OURS = "ours"
PEER = f"{KAFKA}, fetch.max.wait.ms=5"
STOCK = f"{KAFKA}, session of PySpark"
READY = "a source and a sink in Python that do nothing, no broker"


def start_wanted() -> bool:
    """Whether one of these measurements is to be made."""
    return wanted(START, *ROUND_TRIPS.values())


def connector_jars() -> str:
    """The files of Kafka's connector for Spark; PeerAbsent if they cannot be fetched."""
    folder = fetched(f"spark-kafka-{CONNECTOR}", JARS)
    return ",".join(str(file) for file in sorted(folder.glob("*.jar")))


def start_and_latency(
    broker: Broker, kafka: KafkaServer | PeerAbsent, starts: int, echoes: int
) -> Iterator[Result | Skipped]:
    """Seconds until the first event is through, then the latency of `echoes` events."""
    address = "" if isinstance(kafka, PeerAbsent) else kafka.bootstrap

    def beside(kind: str) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            if isinstance(kafka, PeerAbsent):
                raise PeerAbsent(str(kafka))
            return _child_figures(kind, address, echoes)

        return run

    works: dict[str, Callable[[], dict[str, Any]]] = {
        OURS: lambda: _child_figures(OURS, broker.url, echoes),
        PEER: beside("kafka"),
        STOCK: beside("stock"),
        READY: lambda: _child_figures("ready", broker.url, echoes),
    }
    taken = take_turns(works, starts)
    own = taken.pop(OURS)
    if isinstance(own, PeerAbsent):
        raise own
    for other, found in taken.items():
        if isinstance(found, PeerAbsent):
            yield Skipped(f"{START} against {other}", str(found))
        else:
            times = [one["start"] for one in own], [one["start"] for one in found]
            yield raced(START, "s", times[0], other, times[1], better="lower")
    theirs = taken[PEER]
    for field, name in ROUND_TRIPS.items():
        mine = [one[field] for one in own]
        if isinstance(theirs, PeerAbsent):
            yield Result(name, sorted(mine)[len(mine) // 2], "ms", spread=spread(mine))
        else:
            yield raced(name, "ms", mine, PEER, [one[field] for one in theirs], better="lower")
    if not isinstance(theirs, PeerAbsent):
        for step in own[0]["steps"]:
            both = ([one["steps"][step] for one in side] for side in (own, theirs))
            yield raced(f"{LATENCY}, {step}", "ms", next(both), PEER, next(both), better="lower")


def _child_figures(kind: str, address: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.peers_spark_start", kind, address, str(count)]
    child = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        command, capture_output=True, text=True, env=child, check=False, timeout=CHILD_SECONDS
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(kind: str, address: str, count: int) -> dict[str, Any]:
    """Start a session and a copying query, then time messages through it."""
    began = time.perf_counter()
    name = f"echo-{time.monotonic_ns()}"
    spark = _session(kind)
    with tempfile.TemporaryDirectory() as folder:
        if kind == OURS:
            return asyncio.run(echo(spark, address, name, folder, count, began))
        if kind == "ready":
            return _ready(spark, folder, began)
        return _kafka_echo(spark, address, name, folder, count, began)


def _session(kind: str) -> SparkSession:
    jars = {} if kind in (OURS, "ready") else {"spark.jars": connector_jars()}
    if kind == "stock":
        from pyspark.sql import SparkSession

        builder: Any = SparkSession.builder
        settings = {**jars, "spark.ui.enabled": "false"}  # ours starts none either
        stock: SparkSession = builder.master("local[2]").config(map=settings).getOrCreate()
        return stock
    from millstream.spark import session

    return session("bench", master="local[2]", conf=jars)


def _ready(spark: SparkSession, folder: str, began: float) -> dict[str, Any]:
    """One row through a query whose source and sink ask nobody and do nothing."""
    from bench.spark_ready import ReadySource

    spark.dataSource.register(ReadySource)
    options = {"columns": "key BINARY", "rows": "1", "tasks": "1", "batchRows": "1"}
    frame = spark.readStream.format("ready").options(**options).load()
    writer = frame.writeStream.format("ready").option("rows", "1")
    query = writer.option("checkpointLocation", folder).start()
    while not any(one["numInputRows"] for one in query.recentProgress):
        error = query.exception()
        if error is not None:
            raise error
        time.sleep(0.01)
    start = time.perf_counter() - began
    query.stop()
    return {"start": start}


def _kafka_echo(
    spark: SparkSession, bootstrap: str, name: str, folder: str, count: int, began: float
) -> dict[str, Any]:
    client = kafka_client()
    producer = client.Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all"})
    settings = {"bootstrap.servers": bootstrap, "group.id": name, "fetch.wait.max.ms": 5}
    consumer = client.Consumer({**settings, "auto.offset.reset": "earliest"})

    def send(value: bytes) -> None:
        producer.produce(f"{name}-in", value)
        producer.flush(30)

    send(b"first")  # it creates the topic
    producer.list_topics(f"{name}-out", timeout=10)
    frame = (
        spark.readStream.format("kafka")
        .options(subscribe=f"{name}-in", startingOffsets="earliest")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("kafka.fetch.max.wait.ms", 5)
        .load()
    )
    query = (
        frame.select("key", "value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .options(topic=f"{name}-out", checkpointLocation=folder)
        .start()
    )
    consumer.assign([client.TopicPartition(f"{name}-out", 0, client.OFFSET_BEGINNING)])
    times: list[float] = []
    start = 0.0
    sent_at = time.perf_counter()
    while len(times) < count:
        message = consumer.poll(1.0)
        if message is None or message.error():
            continue
        if start:
            times.append(time.perf_counter() - sent_at)
        else:
            start = time.perf_counter() - began
        sent_at = time.perf_counter()
        send(b"%d" % len(times))
    progress = [p for p in query.recentProgress if p["numInputRows"]][-count:]
    query.stop()
    consumer.close()
    return echo_figures(start, times, progress)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[OURS, "kafka", "stock", "ready"])
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    sys.stdout.write(f"\n{json.dumps(_child(given.kind, given.address, given.count))}\n")
