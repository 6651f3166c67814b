"""The price of each guarantee: rate, latency, CPU and bytes of an event, by storage.

The event is a trade of about 100 bytes as JSON. Latency is that of one event at a time: until its
ack, or (core subject, process, Spark) until the other side has it. Bytes on the wire are those of
messages into and out of all servers, bytes on disk those of all copies.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from bench.effort import cpu_seconds, family_of
from bench.harness import Figures, PeerAbsent, Result, Skipped, spread, take_turns, wanted
from bench.qos_site import STORAGES, Meter, Site, open_site
from bench.spark import echo
from bench.trade import Trade, trade_frame, trades
from millstream.events.row_buffer import Columns
from millstream.messaging import NewEvent, SubscriberSettings
from millstream.mill import connect
from millstream.wire.protocol import unique_token

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIGURES = {
    "rate": ("rate", "events/s"),
    "p50": ("latency, p50", "us"),
    "p99": ("latency, p99", "us"),
    "client": ("CPU of the client", "us/event"),
    "server": ("CPU of the servers", "us/event"),
    "disk": ("on disk", "B/event"),
    "wire": ("on the wire", "B/event"),
}
SUBJECT = "qos.bench"  # no topic stores it
ROOM = 1 << 30
NO_STORAGE = "no storage"
SPARK = "Spark, topic to topic, exactly once"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Events of a round, by how fast they are, and events one at a time."""

    single: int
    single_synced: int
    packed: int
    spark: int
    awaited: int
    echoes: int
    rounds: int
    storages: tuple[str, ...]
    spark_storages: tuple[str, ...]


FULL = _Sizes(
    *(20_000, 3_000, 100_000, 500_000, 300, 15, 3),
    storages=tuple(STORAGES),
    spark_storages=tuple(STORAGES),
)
QUICK = _Sizes(
    *(10_000, 1_000, 50_000, 200_000, 100, 8, 1),
    storages=("memory", "periodic", "fsync", "replicated"),
    spark_storages=("fsync",),
)
Cell = Callable[["_Stage", Site], Awaitable[Figures]]


class _Stage:
    """The events, and how many of them are used."""

    def __init__(self, sizes: _Sizes) -> None:
        self.sizes = sizes
        self.objects = trades(sizes.packed)

    def one_by_one(self, site: Site) -> list[Trade]:
        """Fewer where every event is synced or agreed on by itself."""
        slow = site.name in ("fsync", "replicated", "replicated, fsync")
        return self.objects[: self.sizes.single_synced if slow else self.sizes.single]

    async def awaited(self, work: Callable[[Trade], Awaitable[Any]], count: int = 0) -> Figures:
        """Latencies of one event at a time, in microseconds."""
        times = []
        for trade in self.objects[: count or self.sizes.awaited]:
            began = time.perf_counter()
            await work(trade)
            times.append((time.perf_counter() - began) * 1e6)
        return {"p50": median(times), "p99": quantiles(times, n=100, method="inclusive")[98]}


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every guarantee with every storage, in turns; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    cells = {
        f"{title}, {storage}": (cell, storage)
        for title, cell in CELLS.items()
        for storage in ((NO_STORAGE,) if cell is _core else sizes.storages)
    }
    chosen = {name: found for name, found in cells.items() if _chosen(name)}
    spark = [name for name in sizes.spark_storages if _chosen(f"{SPARK}, {name}")]
    needed = {"memory" if storage == NO_STORAGE else storage for _, storage in chosen.values()}
    with ExitStack() as stack, asyncio.Runner() as runner:
        stage = _Stage(sizes)
        sites = {
            name: runner.run(open_site(stack, name))
            for name in STORAGES
            if name in needed | set(spark)
        }
        try:
            works = {}
            for name, (cell, storage) in chosen.items():
                site = sites["memory" if storage == NO_STORAGE else storage]
                works[name] = _bound(cell, stage, site)
            yield from _results(take_turns(works, sizes.rounds, runner))
            if spark:
                yield from _spark_cells([sites[name] for name in spark], stage, runner)
        finally:
            for site in sites.values():
                runner.run(site.mill.close())


def _chosen(name: str) -> bool:
    return wanted(*(f"{name}: {text}" for text, _ in FIGURES.values()))


def _bound(cell: Cell, stage: _Stage, site: Site) -> Callable[[], Awaitable[Figures]]:
    async def run() -> Figures:
        return await cell(stage, site)

    return run


def _results(taken: dict[str, list[Figures] | PeerAbsent]) -> Iterator[Result | Skipped]:
    for name, rounds in taken.items():
        if isinstance(rounds, PeerAbsent):
            yield Skipped(name, str(rounds))
            continue
        for figure, (text, unit) in FIGURES.items():
            values = [one[figure] for one in rounds]
            yield Result(f"{name}: {text}", median(values), unit, spread=spread(values))


# -- the guarantees ---------------------------------------------------------------------------


async def _core(stage: _Stage, site: Site) -> Figures:
    """Publish and subscribe, nothing stored; the other side is another connection."""
    encode = msgspec.json.Encoder().encode
    values = [encode(trade) for trade in stage.one_by_one(site)]
    settings = SubscriberSettings(messages_max=len(values), bytes_max=ROOM)
    other = await connect(site.url)
    try:
        async with other.subscribe(SUBJECT, settings) as subscriber:
            arrived = aiter(subscriber)

            async def there_and_back(trade: Trade) -> None:
                await site.mill.publish(SUBJECT, encode(trade))
                await anext(arrived)

            latency = await stage.awaited(there_and_back)
            meter = Meter(site)

            async def read() -> None:
                for _ in values:
                    await anext(arrived)

            reading = asyncio.create_task(read())
            for value in values:
                await site.mill.publish(SUBJECT, value)
            await reading
            return {**latency, **await meter.done(len(values))}
    finally:
        await other.close()


async def _single(stage: _Stage, site: Site) -> Figures:
    """One message for each event, each with its ack, many in flight."""
    topic, events = await site.topic(), stage.one_by_one(site)
    latency = await stage.awaited(lambda trade: topic.publish(trade, trade.symbol))
    meter = Meter(site)
    async with topic.event_producer() as producer:
        for trade in events:
            await producer.send(trade, trade.symbol)
    return {**latency, **await meter.done(len(events))}


async def _packs(stage: _Stage, site: Site) -> Figures:
    topic = await site.topic()
    async with topic.producer() as producer:

        async def send(trade: Trade) -> None:
            await producer.send(trade, trade.symbol)
            await producer.flush()

        latency = await stage.awaited(send)
    meter = Meter(site)
    async with topic.producer() as producer:
        for trade in stage.objects:
            await producer.send(trade, trade.symbol)
    return {**latency, **await meter.done(len(stage.objects))}


async def _written(stage: _Stage, site: Site) -> Figures:
    topic = await site.topic()
    async with topic.writer("slow") as writer:
        positions = iter(range(1, ROOM))

        async def write(trade: Trade) -> None:
            await writer.write(trade, trade.symbol, position=next(positions))
            await writer.flush()

        latency = await stage.awaited(write)
    meter = Meter(site)
    async with topic.writer("fast") as writer:
        for position, trade in enumerate(stage.objects, start=1):
            await writer.write(trade, trade.symbol, position=position)
    return {**latency, **await meter.done(len(stage.objects))}


async def _processed(stage: _Stage, site: Site) -> Figures:
    source, target = await site.topic(), await site.topic()
    events = stage.objects[: stage.sizes.packed // 2]
    async with source.producer() as producer:
        for trade in events:
            await producer.send(trade, trade.symbol)
    process = source.process(target, lambda event: NewEvent(event.value, event.key))
    meter = Meter(site)
    await process.run(once=True)
    figures = await meter.done(len(events))
    running = asyncio.create_task(process.run())
    arrived = aiter(target.read(follow=True))
    for _ in events:
        await anext(arrived)

    async def through(trade: Trade) -> None:
        await source.publish(trade, trade.symbol)
        await anext(arrived)

    try:
        await through(events[0])  # it is running once this is through
        latency = await stage.awaited(through, stage.sizes.echoes)
    finally:
        process.stop()
        await running
    return {**latency, **figures}


CELLS: dict[str, Cell] = {
    "core subject, at most once": _core,
    "acked single, at least once": _single,
    "pack producer, at least once": _packs,
    "writer, exactly once": _written,
    "process, topic to topic, exactly once": _processed,
}


# -- Spark ------------------------------------------------------------------------------------


def _spark_cells(
    sites: list[Site], stage: _Stage, runner: asyncio.Runner
) -> Iterator[Result | Skipped]:
    if find_spec("pyspark") is None:
        yield Skipped(SPARK, "pyspark is not installed: pip install 'millstream[spark]'")
        return
    from millstream.spark import session

    spark = session("bench", master="local[2]")
    try:
        works = {
            f"{SPARK}, {site.name}": _bound(
                lambda stage, site: _through_spark(spark, stage, site), stage, site
            )
            for site in sites
        }
        yield from _results(take_turns(works, 1, runner))
    finally:
        spark.stop()


async def _through_spark(spark: SparkSession, stage: _Stage, site: Site) -> Figures:
    count, frame = stage.sizes.spark, trade_frame(50_000)
    source, target = await site.topic(), await site.topic()
    async with source.producer() as producer:
        for _ in range(count // frame.num_rows):
            await producer.send_batch(frame, Columns(key="symbol"))

    def cpu() -> float:
        return cpu_seconds(set(family_of(os.getpid())) - set(site.pids))

    meter, before = Meter(site), cpu()
    with tempfile.TemporaryDirectory() as folder:
        query = (
            spark.readStream.format("millstream")
            .options(url=site.url, subscribe=source.name, startingOffsets="earliest")
            .options(columns="key,value", minPartitions=2)
            .load()
            .writeStream.format("millstream")
            .options(url=site.url, topic=target.name, checkpointLocation=folder)
            .trigger(availableNow=True)
            .start()
        )
        await asyncio.to_thread(query.awaitTermination)
        figures = await meter.done(count)
        work = [p for p in query.recentProgress if p["numInputRows"]]
    if sum(p["numInputRows"] for p in work) != count:
        raise RuntimeError("rows are missing")
    figures["client"] = (cpu() - before) / count * 1e6
    figures["rate"] = count / sum(p["durationMs"]["addBatch"] for p in work) * 1000
    with tempfile.TemporaryDirectory() as folder:
        began, name = time.perf_counter(), f"echo-{unique_token(6)}"
        found = await echo(spark, site.url, name, folder, stage.sizes.echoes, began)
    return {**figures, "p50": found["p50"] * 1000, "p99": found["p99"] * 1000}


def as_table(title: str, results: Iterable[Result]) -> Table:
    """One row for each guarantee and storage."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("guarantee and storage", no_wrap=True)
    for text, unit in FIGURES.values():
        table.add_column(f"{text}\n{unit}", justify="right")
    cells: dict[str, dict[str, float]] = {}
    for result in results:
        name, _, text = result.name.rpartition(": ")
        cells.setdefault(name, {})[text] = result.value
    for name, found in cells.items():
        table.add_row(name, *(_short(found.get(text)) for text, _ in FIGURES.values()))
    return table


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
