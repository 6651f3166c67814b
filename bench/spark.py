"""Spark: typed packs against JSON values and Parquet, plain messages, the sink, latency, start.

Everything but latency and start is measured in one warm session on two cores; those two need a
process of their own for each contestant, because their settings are those of the JVM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import millstream
from bench.harness import OURS, Result, Skipped, peers_wanted, raced, spread, take_turns, wanted
from bench.spark_floor import drain_rate
from bench.spark_memory import forget_peaks, largest_peak
from bench.trade import Trade, trade_frame
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns
from millstream.messaging import NewEvent
from millstream.testing import running_broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_OF_A_FRAME = 100_000
ROWS_OF_A_PACK = 10_000
PAYLOAD = b"x" * 100
ARCHIVE_SECONDS = 61  # from then on a new archive of Java's classes is used
STARTING = (
    "session start and first streaming query",
    "latency topic to topic, p50",
    "latency topic to topic, p99",
)
CHILD_SECONDS = 300  # one that takes longer hangs


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How much is read and written, and how many times."""

    rows: int  # as typed packs and as Parquet
    texts: int  # of them as JSON values: they take five times as long
    messages: int  # plain ones
    many: int  # rows of the longest read, for the memory of a worker
    rounds: int
    starts: int  # timed sessions of each kind
    echoes: int  # messages through each of them


FULL = _Sizes(4_000_000, 1_000_000, 500_000, 10_000_000, rounds=4, starts=2, echoes=60)
QUICK = _Sizes(1_000_000, 300_000, 200_000, 10_000_000, rounds=2, starts=1, echoes=20)


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every figure of the Spark table; sizes shrink with `quick`."""
    try:
        from millstream.spark import session
    except ImportError as error:
        yield Skipped("spark", str(error))
        return
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder, running_broker(durability="fsync") as broker:
        yield from _start_and_latency(broker.url, sizes)
        asyncio.run(_fill(broker.url, Path(folder), sizes))
        spark = session("bench", master="local[2]", conf={"spark.driver.memory": "2g"})
        try:
            stage = _Stage(spark, broker.url, Path(folder), sizes)
            yield from stage.reading()
            yield from stage.plain()
            yield from stage.sink()
            yield from stage.memory()
        finally:
            spark.stop()


async def _fill(url: str, folder: Path, sizes: _Sizes) -> None:
    """The same rows as typed packs, as JSON values in packs, and as Parquet; and plain messages."""
    frame = trade_frame(ROWS_OF_A_FRAME)
    texts = [json.dumps(row, default=str).encode() for row in frame.to_pylist()]
    values = pa.record_batch({"value": pa.array(texts, pa.binary())})
    packs = Packing(max_events=ROWS_OF_A_PACK, compression="zstd", max_in_flight=4)
    async with millstream.connect(url) as mill:
        typed = await mill.create_topic("trades", schema=Trade)
        many = await mill.create_topic("many", schema=Trade, storage="memory")
        for topic, rows in ((typed, sizes.rows), (many, sizes.many)):
            async with topic.producer(packs) as producer:
                for _ in range(rows // ROWS_OF_A_FRAME):
                    await producer.send_batch(frame)
        plain = await mill.create_topic("trades-json")
        async with plain.producer(packs) as producer:
            for _ in range(sizes.texts // ROWS_OF_A_FRAME):
                await producer.send_batch(values, Columns(value="value"))
        single = await mill.create_topic("single", storage="memory")
        await single.publish_many(NewEvent(PAYLOAD, f"k{n % 100}") for n in range(sizes.messages))
        await mill.create_topic("copy", schema=Trade)
    with pq.ParquetWriter(folder / "trades.parquet", frame.schema) as writer:
        for _ in range(sizes.rows // ROWS_OF_A_FRAME):
            writer.write_batch(frame)


class _Stage:
    """One warm session and the data."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, sizes: _Sizes) -> None:
        self.spark, self.url, self.folder, self.sizes = spark, url, folder, sizes

    def _read(self, **options: Any) -> DataFrame:
        reader = self.spark.read.format("millstream").option("url", self.url)
        return reader.options(**options).load()

    def _rate(self, count: int, work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        work()
        return count / (time.perf_counter() - began)

    def _turns(
        self, name: str, ours: Callable[[], float], peers: dict[str, Callable[[], float]]
    ) -> Iterator[Result]:
        if not wanted(name):
            return
        others = peers if peers_wanted() else {}
        figures = take_turns({OURS: ours, **others}, self.sizes.rounds)
        own = figures.pop(OURS)
        if isinstance(own, list) and not others:
            yield Result(name, statistics.median(own), "rows/s", spread=spread(own))
        for peer, taken in figures.items():
            if isinstance(own, list) and isinstance(taken, list):
                yield raced(name, "rows/s", own, peer, taken)

    def reading(self) -> Iterator[Result]:
        """Aggregate all rows by symbol and venue, every column read."""

        def total(frame: DataFrame) -> None:
            found = frame.groupBy("symbol", "venue").agg(
                {"price": "sum", "quantity": "max", "at": "max"}
            )
            if len(found.collect()) != 350:
                raise RuntimeError("rows are missing")

        def packs() -> float:
            frame = self._read(subscribe="trades", columns="value")
            return self._rate(self.sizes.rows, lambda: total(frame.selectExpr("value.*")))

        def parsed() -> float:
            frame = self._read(subscribe="trades-json", columns="value")
            ddl = "symbol STRING, venue STRING, quantity BIGINT, price DOUBLE, at TIMESTAMP"
            rows = frame.selectExpr(f"from_json(string(value), '{ddl}') AS v").selectExpr("v.*")
            return self._rate(self.sizes.texts, lambda: total(rows))

        def parquet() -> float:
            frame = self.spark.read.parquet(str(self.folder / "trades.parquet"))
            return self._rate(self.sizes.rows, lambda: total(frame))

        peers = {"from_json of the same rows": parsed, "parquet": parquet}
        yield from self._turns("typed packs, read and aggregate", packs, peers)

        def summed(columns: str) -> Callable[[], float]:
            def run() -> float:
                frame = self._read(subscribe="trades", columns=columns)
                query = frame.selectExpr("sum(value.price * value.quantity)")
                return self._rate(self.sizes.rows, query.collect)

            return run

        chosen = summed("value.price,value.quantity")
        yield from self._turns("2 of 5 columns", chosen, {"all 5 columns": summed("value")})

    def plain(self) -> Iterator[Result]:
        """Count plain messages of 100 bytes."""
        messages = self.sizes.messages

        def ours() -> float:
            frame = self._read(subscribe="single", columns="value", minPartitions=2)
            return self._rate(messages, lambda: frame.selectExpr("count(value)").collect())

        def floor() -> float:
            return drain_rate(self.url, "single", messages)

        yield from self._turns("plain messages, read and count", ours, {"bare socket": floor})

    def sink(self) -> Iterator[Result]:
        """Copy typed packs to another topic, exactly once, on a server that syncs every ack."""
        name = "sink, typed packs read and written, exactly once, fsync"
        if not wanted(name):
            return
        rates = []
        for number in range(3):
            query = (
                self.spark.readStream.format("millstream")
                .options(url=self.url, subscribe="trades", startingOffsets="earliest")
                .options(columns="value", minPartitions=2)
                .load()
                .writeStream.format("millstream")
                .options(url=self.url, topic="copy")
                .option("checkpointLocation", str(self.folder / f"sink-{number}"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            work = [p for p in query.recentProgress if p["numInputRows"]]
            seconds = sum(p["durationMs"]["addBatch"] for p in work) / 1000
            rates.append(sum(p["numInputRows"] for p in work) / seconds)
        # During the first one the JVM compiles the code.
        warm = rates[1:]
        yield Result(name, statistics.median(warm), "rows/s", spread=spread(warm))

    def memory(self) -> Iterator[Result]:
        """The largest Python worker while one task reads some rows, and ten times as many."""
        for name, topic, column, last in (
            ("rows of packs", "many", "value.price", self.sizes.many // ROWS_OF_A_PACK),
            ("plain messages", "single", "value", self.sizes.messages),
        ):
            count = self.sizes.many if topic == "many" else last
            title = f"worker memory, {_short(count)} over {_short(count // 10)} {name}"
            if not wanted(title):
                continue
            peaks = []
            for end in (last // 10, last):
                frame = self._read(
                    subscribe=topic, columns="value", minPartitions=1,
                    maxRecordsPerPartition=last + 1,
                    endingOffsets=json.dumps({topic: {"0": end + 1}}),
                )  # fmt: skip
                forget_peaks()
                found = frame.selectExpr(f"count({column})").collect()[0][0]
                if found != count * end // last:
                    raise RuntimeError(f"{found} rows of {count * end // last}")
                peaks.append(largest_peak())
            few, many = peaks
            yield Result(title, many, "MiB", f"{_short(count // 10)} {name}", few, few / many)


def _short(count: int) -> str:
    return f"{count // 1_000_000}M" if count % 1_000_000 == 0 else f"{count // 1000}k"


# -- start and latency: a process for each contestant -----------------------------------------


def _start_and_latency(url: str, sizes: _Sizes) -> Iterator[Result | Skipped]:
    if not wanted(*STARTING):
        return
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "stock": []}

    def one(kind: str, count: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.spark", kind, url, str(count)]
        # Without PYSPARK_PYTHON a session in a virtual environment does not start.
        child = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(Path.cwd())}
        done = subprocess.run(
            command, capture_output=True, text=True, env=child, check=False, timeout=CHILD_SECONDS
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    if not one("ours", 1)["archived"]:  # it created an archive of classes, for later sessions
        time.sleep(ARCHIVE_SECONDS)
    for number in range(sizes.starts):
        for kind in ("ours", "stock") if number % 2 else ("stock", "ours"):
            if kind == "ours" or peers_wanted():
                results[kind].append(one(kind, sizes.echoes))
    for name, unit, field in zip(STARTING, ("s", "ms", "ms"), ("start", "p50", "p99"), strict=True):
        ours, stock = ([run[field] for run in results[kind]] for kind in ("ours", "stock"))
        if stock:
            yield raced(name, unit, ours, "stock settings", stock, better="lower")
        else:
            yield Result(name, statistics.median(ours), unit, spread=spread(ours))
    for step, value in results["ours"][-1]["steps"].items():
        yield Result(f"  of a batch: {step}", value, "ms")


def _child(kind: str, url: str, count: int) -> None:
    """One contestant: start a session and a copying query, then time messages through it."""
    from pyspark.sql import SparkSession

    began = time.perf_counter()
    if kind == "ours":
        from millstream.spark import session

        spark = session("bench", master="local[2]")
    else:
        builder = SparkSession.builder.appName("bench").master("local[2]")
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    name = f"echo-{kind}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(echo(spark, url, name, folder, count, began))
    options = spark.sparkContext.getConf().get("spark.driver.extraJavaOptions") or ""
    outcome["archived"] = "-XX:SharedArchiveFile" in options
    spark.stop()
    sys.stdout.write(f"\n{json.dumps(outcome)}\n")


async def echo(
    spark: SparkSession, url: str, name: str, folder: str, count: int, began: float
) -> dict[str, Any]:
    async with millstream.connect(url) as mill:
        given = await mill.create_topic(f"{name}-in")
        target = await mill.create_topic(f"{name}-out")
        query = (
            spark.readStream.format("millstream")
            .options(url=url, subscribe=given.name, startingOffsets="earliest")
            .load()
            .select("key", "value")
            .writeStream.format("millstream")
            .options(url=url, topic=target.name)
            .option("checkpointLocation", folder)
            .start()
        )
        times: list[float] = []
        start = 0.0
        sent = -1
        await given.publish(b"first")
        sent_at = time.perf_counter()
        async for event in target.read(follow=True):
            if event.value == b"first":
                start = time.perf_counter() - began
            else:
                times.append(time.perf_counter() - sent_at)
            sent += 1
            if sent == count:
                break
            sent_at = time.perf_counter()
            await given.publish(b"%d" % sent)
        progress = [p for p in query.recentProgress if p["numInputRows"]][-count:]
        query.stop()
    return echo_figures(start, times, progress)


def echo_figures(start: float, times: list[float], progress: list[Any]) -> dict[str, Any]:
    """Seconds to the first event, latencies in milliseconds, and what the steps of a batch took."""
    warm = sorted(times[len(times) // 5 :])
    steps = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets")
    return {
        "start": start,
        "p50": statistics.median(warm) * 1000,
        "p99": warm[min(len(warm) - 1, int(len(warm) * 0.99))] * 1000,
        "steps": {
            step: statistics.median(p["durationMs"].get(step, 0) for p in progress)
            for step in steps
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ours", "stock"])
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    _child(given.kind, given.url, given.count)
