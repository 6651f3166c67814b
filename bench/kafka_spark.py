"""Spark's own Kafka source, and its Real-time Mode, through the gateway and with Kafka."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from bench.harness import (
    OURS,
    Figures,
    PeerAbsent,
    Result,
    Skipped,
    peers_wanted,
    raced,
    spread,
    take_turns,
    wanted,
)
from bench.kafka_peer import KAFKA
from bench.kafka_sides import CPU, RATE, Row, Side, Stage
from bench.peers_spark_start import connector_jars
from bench.spark import echo
from millstream.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["rows"]

VALUE = bytes(range(100))
FRAME = 100_000  # records that are sent at once
READ = "Spark's Kafka source, batch read"
STREAM = "Spark's Kafka source, streaming query"
REAL_TIME = "Spark Real-time Mode topic to topic"
MICRO_BATCH = "our source and sink, micro-batches"
LONG_BATCH = "1 minute"  # of Real-time Mode, which has batches too, but does not wait for them
START_SECONDS = 120.0
ECHO_SECONDS = 30.0
LATENCIES = {"p50": f"{REAL_TIME}, p50", "p99": f"{REAL_TIME}, p99"}


@dataclass(frozen=True, slots=True)
class _Sizes:
    records: int
    rounds: int
    echoes: int  # records through a query in Real-time Mode
    batches: int  # the same through micro-batches
    turns: int  # queries


FULL = _Sizes(1_000_000, rounds=5, echoes=1_000, batches=60, turns=3)
QUICK = _Sizes(300_000, rounds=2, echoes=200, batches=20, turns=2)


def rows(stage: Stage, broker: Broker, quick: bool) -> Iterator[Result | Skipped]:
    """Every row with Spark; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    cpu = [row + text for row in (READ, STREAM) for text, _ in CPU.values()]
    if not wanted(READ, STREAM, *LATENCIES.values(), *cpu):
        return
    if find_spec("pyspark") is None:
        yield Skipped("Spark", "pyspark is not installed: pip install 'millstream[spark]'")
        return
    try:
        jars = connector_jars()
    except PeerAbsent as error:
        yield Skipped("Spark's Kafka source", str(error))
        return
    with _session(jars) as spark:
        yield from _reading(spark, stage, sizes)
        yield from _real_time(spark, stage, broker, sizes)


@contextmanager
def _session(jars: str) -> Iterator[SparkSession]:
    from millstream.spark import session

    conf = {"spark.driver.memory": "2g", "spark.jars": jars}
    spark = session("bench", master="local[2]", conf=conf)
    # A query in Real-time Mode is interrupted at its end, which Spark logs as errors.
    spark.sparkContext.setLogLevel("FATAL")
    try:
        yield spark
    finally:
        spark.stop()


def _source(reader: Any, side: Side, topic: str) -> DataFrame:
    options = {"kafka.bootstrap.servers": side.bootstrap, "subscribe": topic}
    frame: DataFrame = reader.format("kafka").options(**options, startingOffsets="earliest").load()
    return frame


def _reading(spark: SparkSession, stage: Stage, sizes: _Sizes) -> Iterator[Result | Skipped]:
    topics: dict[str, str] = {}

    def filled(side: Side) -> str:
        if side.name not in topics:
            topic = topics[side.name] = side.make_topic(1)
            for _ in range(sizes.records // FRAME):
                keys = [f"key-{number % 350:03d}" for number in range(FRAME)]
                side.clients.send(side.clients.producer(), topic, [VALUE] * FRAME, keys)
        return topics[side.name]

    def batch(side: Side) -> Figures:
        topic = filled(side)
        load = stage.load(side)
        frame = _source(spark.read, side, topic)
        (found,) = frame.selectExpr("count(*)", "sum(length(value))").collect()
        _check(side, found[0], sizes.records)
        return load.done(sizes.records)

    def stream(side: Side) -> Figures:
        """One query that reads what is there; its sink does nothing."""
        topic = filled(side)
        with tempfile.TemporaryDirectory() as folder:
            load = stage.load(side)
            writer = _source(spark.readStream, side, topic).writeStream.format("noop")
            writer = writer.option("checkpointLocation", folder).trigger(availableNow=True)
            query = writer.start()
            query.awaitTermination()
            figures = load.done(sizes.records)
            work = [one for one in query.recentProgress if one["numInputRows"]]
        _check(side, sum(one["numInputRows"] for one in work), sizes.records)
        seconds = sum(one["durationMs"]["addBatch"] for one in work) / 1000
        return {**figures, "rate": sizes.records / seconds}

    for name, work in ((READ, batch), (STREAM, stream)):
        row = Row(name, {**RATE, **CPU}, sizes.records, sizes.rounds, filled)
        yield from stage.beside(row, work)


def _check(side: Side, found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"{side.name}: Spark read {found} of {expected} records")


def _real_time(
    spark: SparkSession, stage: Stage, broker: Broker, sizes: _Sizes
) -> Iterator[Result | Skipped]:
    """The latency of single records through Real-time Mode, and through our micro-batches."""
    if not wanted(*LATENCIES.values()):
        return

    def through(side: Side) -> Callable[[], Figures]:
        return lambda: _echo(spark, side, sizes.echoes)

    def micro_batches() -> Figures:
        name = f"echo-{time.monotonic_ns()}"
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(
                echo(spark, broker.url, name, folder, sizes.batches, time.perf_counter())
            )
        return {"p50": found["p50"], "p99": found["p99"]}

    works = {OURS: through(stage.ours)}
    if peers_wanted():
        works[MICRO_BATCH] = micro_batches
    if not isinstance(stage.kafka, PeerAbsent):
        works[KAFKA] = through(stage.kafka)
    taken = take_turns(works, sizes.turns)
    own = taken.pop(OURS)
    if isinstance(own, PeerAbsent):
        yield Skipped(REAL_TIME, str(own))
        return
    for figure, row in LATENCIES.items():
        mine = [one[figure] for one in own]
        if not taken:
            yield Result(row, median(mine), "ms", spread=spread(mine))
        for peer, theirs in taken.items():
            if not isinstance(theirs, PeerAbsent):
                others = [one[figure] for one in theirs]
                yield raced(row, "ms", mine, peer, others, better="lower")


def _echo(spark: SparkSession, side: Side, count: int) -> Figures:
    """Records one after the other through a query in Real-time Mode, from topic to topic."""
    given, target = side.make_topic(1), side.make_topic(1)
    producer = side.clients.producer(**{"linger.ms": 0})
    consumer = side.clients.consumer(target)
    consumer.assign(side.clients.start_of(target))
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        frame = _source(spark.readStream, side, given).select("key", "value")
        options = {"kafka.bootstrap.servers": side.bootstrap, "topic": target}
        writer: Any = frame.writeStream.format("kafka").options(**options).outputMode("update")
        query = writer.option("checkpointLocation", folder).trigger(realTime=LONG_BATCH).start()
        try:
            _through(producer, consumer, given, START_SECONDS)
            for _ in range(count):
                times.append(_through(producer, consumer, given, ECHO_SECONDS))
        except TimeoutError as error:
            raise RuntimeError(f"{side.name}, Real-time Mode: {query.exception()}") from error
        finally:
            query.stop()
            consumer.close()

    warm = times[len(times) // 5 :]
    return {"p50": median(warm) * 1000, "p99": quantiles(warm, n=100)[98] * 1000}


def _through(producer: Any, consumer: Any, topic: str, limit: float) -> float:
    """Seconds from the send of a record until it is read at the other end."""
    began = time.perf_counter()
    producer.produce(topic, VALUE)
    producer.poll(0)
    message = consumer.poll(limit)
    seconds = time.perf_counter() - began
    if message is None or message.error():
        raise TimeoutError(f"{topic}: {message and message.error()}")
    return seconds
