"""Spark beside Kafka: reading and copying, in turns in one warm session that has both sources."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

import millstream
from bench.effort import cpu_seconds, family_of
from bench.harness import Figures, PeerAbsent, Result, Skipped, Work, race, wanted
from bench.kafka_peer import KAFKA, KafkaServer
from bench.peers_spark_start import connector_jars, start_and_latency, start_wanted
from bench.trade import Trade, trade_frame, trades
from millstream.broker import Broker
from millstream.events.row_buffer import Columns
from millstream.testing import running_broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["rows"]

FRAME = 100_000
GROUPS = 350  # symbols at venues
DDL = "symbol STRING, venue STRING, quantity BIGINT, price DOUBLE, at TIMESTAMP"
VALUE = f"value STRUCT<{DDL}>"  # as Spark reads our typed topic
DEFAULT = f"key BINARY, {VALUE}, timestamp TIMESTAMP"  # the same with no options
READY_DEFAULT, READY_VALUE = "ready, no options", "ready, columns=value"
TASKS = 2  # one for each core of the session
TUNED = {
    "minPartitions": TASKS,
    "kafka.max.partition.fetch.bytes": 16 * 1024 * 1024,
    "kafka.fetch.max.bytes": 64 * 1024 * 1024,
    "kafka.max.poll.records": 50_000,
}
OURS_TUNED = {"columns": "value", "minPartitions": TASKS}
CPU = ", CPU of all processes"
RATES = {"rate": ("", "rows/s"), "cpu": (CPU, "us/row")}
COPIED = {
    "rate": ("", "rows/s"),
    "whole": (", with the start of the query", "rows/s"),
    "cpu": (CPU, "us/row"),
}
READING = (
    "Spark read with no options",
    "Spark aggregate, tuned",
    "Spark aggregate, no options",
    "Spark aggregate, limit of a Python source (batches are ready, no broker)",
    "Spark read with no options, limit of a Python source (batches are ready, no broker)",
)
COPY_LIMIT = (
    "Spark topic to topic, limit of a Python source and sink (batches are ready, no broker)"
)
COPYING = (
    "Spark topic to topic, key and value",
    "Spark topic to topic, value",
    "Spark topic to topic, key and value, tuned",
    COPY_LIMIT,
    f"{COPY_LIMIT}, tuned",
)
# Spark measures every row for it before a Python sink gets it; see docs/SPARK.md.
SIZE_LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
NO_SIZE_LIMIT = str(2**31 - 1)


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int
    rounds: int
    starts: int
    echoes: int
    partitions: tuple[int, ...]


FULL = _Sizes(2_000_000, rounds=5, starts=5, echoes=60, partitions=(1, 4))
QUICK = _Sizes(500_000, rounds=2, starts=1, echoes=20, partitions=(1,))


def rows(kafka: KafkaServer | PeerAbsent, quick: bool) -> Iterator[Result | Skipped]:
    """Every Spark row; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    names = [f"{name}, {_parts(count)}" for name in READING for count in sizes.partitions]
    starting = start_wanted()
    working = wanted(*names, *(name + text for name in COPYING for text, _ in COPIED.values()))
    if not starting and not working:
        return
    if find_spec("pyspark") is None:
        yield Skipped("Spark", "pyspark is not installed: pip install 'millstream[spark]'")
        return
    try:
        jars = connector_jars() if isinstance(kafka, KafkaServer) else ""
    except PeerAbsent as error:
        yield Skipped(f"Spark with {KAFKA}", str(error))
        kafka, jars = error, ""
    with running_broker(durability="fsync") as broker:
        if starting:
            yield from start_and_latency(broker, kafka, sizes.starts, sizes.echoes)
        if working:
            with _session(jars) as spark:
                stage = _Stage(spark, broker, kafka, sizes)
                for count in sizes.partitions:
                    yield from stage.reading(count)
                yield from stage.copying()


@contextmanager
def _session(jars: str) -> Iterator[SparkSession]:
    from millstream.spark import session

    conf = {"spark.driver.memory": "2g", **({"spark.jars": jars} if jars else {})}
    spark = session("bench", master="local[2]", conf=conf)
    try:
        yield spark
    finally:
        spark.stop()


def _parts(count: int) -> str:
    return f"{count} partition{'s' if count > 1 else ''}"


class _Stage:
    """One warm session with both sources, and the rows in both systems."""

    def __init__(
        self,
        spark: SparkSession,
        broker: Broker,
        kafka: KafkaServer | PeerAbsent,
        sizes: _Sizes,
    ) -> None:
        self.spark, self.broker, self._kafka, self.sizes = spark, broker, kafka, sizes
        self._own: set[str] = set()  # our filled topics
        self._topics: dict[str, str] = {}  # Kafka's, by what they are for
        self._knows_ready = False

    @property
    def kafka(self) -> KafkaServer:
        if isinstance(self._kafka, PeerAbsent):
            raise PeerAbsent(str(self._kafka))
        return self._kafka

    def _measured(self, work: Callable[[], Figures | None], server: int) -> Figures:
        """Rows a second, and the CPU of this process, Spark's and the server."""
        before = self._cpu(server)
        began = time.perf_counter()
        found = work() or {}
        seconds = time.perf_counter() - began
        cpu = self._cpu(server) - before
        whole = self.sizes.rows / seconds
        return {"rate": whole, "whole": whole, "cpu": cpu / self.sizes.rows * 1e6, **found}

    def _cpu(self, server: int) -> float:
        servers = {self.broker.pid}
        if isinstance(self._kafka, KafkaServer):
            servers.add(self._kafka.pid)
        return cpu_seconds({*family_of(os.getpid())} - servers | {server})

    def _ready(self, how: str, columns: str, tasks: int) -> DataFrame:
        """The same rows from a source that has nothing to do; no server takes part."""
        # Here, because pyspark may not be installed.
        from bench.spark_ready import ReadySource
        from millstream.spark.source.range_reader import BATCH_ROWS

        if not self._knows_ready:
            self.spark.dataSource.register(ReadySource)
            self._knows_ready = True
        reader: Any = getattr(self.spark, how).format("ready").options(columns=columns, tasks=tasks)
        frame: DataFrame = reader.options(rows=self.sizes.rows, batchRows=BATCH_ROWS).load()
        return frame

    # -- reading ---------------------------------------------------------------------------

    def reading(self, partitions: int) -> Iterator[Result | Skipped]:
        """Aggregate all rows by symbol and venue, every field read."""
        text = _parts(partitions)
        default, tuned, plain, limit, default_limit = names = [
            f"{name}, {text}" for name in READING
        ]
        if not wanted(*names):
            return
        name = asyncio.run(self._fill(partitions))
        only_value, no_options = "columns=value", "no options"
        theirs_tuned = f"{KAFKA}, from_json, tuned"
        theirs_plain = f"{KAFKA}, from_json, no options"

        def ours(options: dict[str, Any]) -> Work:
            def run() -> Figures:
                reader = self.spark.read.format("millstream").options(url=self.broker.url)
                frame = reader.options(subscribe=name, **options).load()
                rows = frame.selectExpr("value.*")
                return self._measured(lambda: _total(rows), self.broker.pid)

            return run

        def kafka(options: dict[str, Any]) -> Work:
            def run() -> Figures:
                server = self.kafka
                topic = self._filled(partitions)
                rows = _parsed(self._kafka_reader("read", topic, options).load())
                return self._measured(lambda: _total(rows), server.pid)

            return run

        def ready(columns: str, tasks: int) -> Work:
            def run() -> Figures:
                rows = self._ready("read", columns, tasks).selectExpr("value.*")
                return self._measured(lambda: _total(rows), os.getpid())

            return run

        works: dict[str, Work] = {
            no_options: ours({}),
            only_value: ours({"columns": "value"}),
            "tuned": ours(OURS_TUNED),
            "limit": ready(VALUE, max(partitions, TASKS)),
            READY_VALUE: ready(VALUE, partitions),
            READY_DEFAULT: ready(DEFAULT, partitions),
            theirs_tuned: kafka(TUNED),
            theirs_plain: kafka({}),
        }
        pairs = [
            (default, no_options, only_value),
            (tuned, "tuned", theirs_tuned),
            (plain, no_options, theirs_plain),
            (limit, "limit", theirs_tuned),
            (default_limit, READY_DEFAULT, READY_VALUE),
        ]
        yield from race(RATES, works, pairs, self.sizes.rounds)

    async def _fill(self, partitions: int) -> str:
        name, frame = f"trades-{partitions}", trade_frame(FRAME)
        if name in self._own:
            return name
        self._own.add(name)
        async with millstream.connect(self.broker.url) as mill:
            topic = await mill.create_topic(name, schema=Trade, partitions=partitions)
            async with topic.producer() as producer:
                for _ in range(self.sizes.rows // FRAME):
                    await producer.send_batch(frame, Columns(key="symbol"))
        return name

    def _filled(self, partitions: int) -> str:
        """Kafka's topic with the same rows."""
        name = f"trades-{partitions}"
        if name not in self._topics:
            topic = self.kafka.create_topic(fsync=False, partitions=partitions)
            objects, encode = trades(FRAME), msgspec.json.Encoder().encode
            values, keys = [encode(one) for one in objects], [one.symbol for one in objects]
            for _ in range(self.sizes.rows // FRAME):
                self.kafka.send(self.kafka.producer(), topic, values, keys)
            self._topics[name] = topic
        return self._topics[name]

    def _kafka_reader(self, how: str, topic: str, options: dict[str, Any]) -> Any:
        reader: Any = getattr(self.spark, how).format("kafka").options(subscribe=topic, **options)
        reader = reader.option("kafka.bootstrap.servers", self.kafka.bootstrap)
        return reader.option("startingOffsets", "earliest")

    # -- copying ---------------------------------------------------------------------------

    def copying(self) -> Iterator[Result | Skipped]:
        """Topic to topic: ours exactly once with fsync, Kafka's at least once without."""
        if not wanted(*(name + text for name in COPYING for text, _ in COPIED.values())):
            return
        given = asyncio.run(self._fill(1))
        asyncio.run(self._target())

        def ours(columns: str, tuned: bool = False) -> Work:
            def copy() -> Figures:
                reader = self.spark.readStream.format("millstream").options(url=self.broker.url)
                reader = reader.options(subscribe=given, startingOffsets="earliest")
                frame = reader.options(columns=columns, minPartitions=TASKS).load()
                return self._copied(frame, "millstream", url=self.broker.url, topic="copy")

            return self._sized(copy, self.broker.pid, tuned)

        def ready(tuned: bool) -> Work:
            def copy() -> Figures:
                frame = self._ready("readStream", f"key BINARY, {VALUE}", TASKS)
                return self._copied(frame, "ready", rows=str(self.sizes.rows))

            return self._sized(copy, os.getpid(), tuned)

        def kafka() -> Figures:
            server, topic = self.kafka, self._filled(1)
            if "copy" not in self._topics:
                self._topics["copy"] = server.create_topic(fsync=False)
            options = {"kafka.bootstrap.servers": server.bootstrap, "topic": self._topics["copy"]}

            def copy() -> Figures:
                frame = self._kafka_reader("readStream", topic, TUNED).load()
                return self._copied(frame.select("key", "value"), "kafka", **options)

            return self._measured(copy, server.pid)

        peer = f"{KAFKA}, at least once, no fsync"
        own = (
            *(ours("key,value"), ours("value"), ours("key,value", tuned=True)),
            *(ready(tuned=False), ready(tuned=True)),
        )
        works: dict[str, Work] = {**dict(zip(COPYING, own, strict=True)), peer: kafka}
        pairs = [(name, name, peer) for name in COPYING]
        yield from race(COPIED, works, pairs, self.sizes.rounds)

    def _sized(self, copy: Callable[[], Figures], server: int, tuned: bool) -> Work:
        """A copy that is measured, without the size limit of batches if it is tuned."""

        def run() -> Figures:
            if not tuned:
                return self._measured(copy, server)
            self.spark.conf.set(SIZE_LIMIT, NO_SIZE_LIMIT)
            try:
                return self._measured(copy, server)
            finally:
                self.spark.conf.unset(SIZE_LIMIT)

        return run

    async def _target(self) -> None:
        async with millstream.connect(self.broker.url) as mill:
            await mill.create_topic("copy", schema=Trade)

    def _copied(self, frame: DataFrame, sink: str, **options: str) -> Figures:
        """One query that copies what is there; its rate without its start and end."""
        with tempfile.TemporaryDirectory() as folder:
            writer = frame.writeStream.format(sink).options(**options)
            writer = writer.option("checkpointLocation", folder).trigger(availableNow=True)
            query = writer.start()
            query.awaitTermination()
            work = [p for p in query.recentProgress if p["numInputRows"]]
        copied = sum(p["numInputRows"] for p in work)
        if copied != self.sizes.rows:
            raise RuntimeError(f"copied {copied} of {self.sizes.rows} rows")
        return {"rate": copied / sum(p["durationMs"]["addBatch"] for p in work) * 1000}


def _parsed(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(f"from_json(string(value), '{DDL}') AS v").selectExpr("v.*")


def _total(frame: DataFrame) -> None:
    found = frame.groupBy("symbol", "venue").agg({"price": "sum", "quantity": "max", "at": "max"})
    if len(found.collect()) != GROUPS:
        raise RuntimeError("rows are missing")
