"""Beside Apache Kafka: the same events, the same durability, in turns within one run.

Kafka is used in the way that is fastest from Python: confluent-kafka, msgspec, and settings that
fit the work. It is left out, with a word, where Java, Maven or confluent-kafka is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from bench import peers_spark
from bench.effort import Effort
from bench.harness import (
    Figures,
    PeerAbsent,
    Result,
    Skipped,
    Work,
    peers_wanted,
    race,
    raced,
    wanted,
)
from bench.kafka_peer import KAFKA, KafkaServer
from bench.trade import Trade, trade_frame, trades
from millstream.broker import Broker
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.mill import Mill, connect
from millstream.testing import running_broker
from millstream.wire.protocol import unique_token

TRANSACTION = 5_000  # events of a Kafka transaction, and of a pack
WARM_TURNS = 5
COLUMNS = Columns(key="symbol")
CPU = ", CPU of all processes"


@dataclass(frozen=True, slots=True)
class _Sizes:
    objects: int  # made and sent or read one by one
    rows: int  # as Arrow batches
    publishes: int
    rounds: int


FULL = _Sizes(400_000, 2_000_000, 2_000, rounds=5)
QUICK = _Sizes(100_000, 500_000, 500, rounds=3)


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every row beside Kafka; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    with ExitStack() as stack:
        kafka: KafkaServer | PeerAbsent
        try:
            if not peers_wanted():
                raise PeerAbsent("no peers were asked for")
            kafka = stack.enter_context(KafkaServer())
            _warm(kafka)
        except PeerAbsent as error:
            yield Skipped(KAFKA, str(error))
            kafka = error
        with asyncio.Runner() as runner:
            for durability in ("fsync", "periodic"):
                with running_broker(durability=durability) as broker:
                    stage = runner.run(_Stage.open(broker, kafka, sizes))
                    try:
                        yield from _rows(stage, durability == "fsync", runner)
                    finally:
                        runner.run(stage.close())
        yield from peers_spark.rows(kafka, quick)


def _warm(kafka: KafkaServer) -> None:
    """So much work that Java has compiled its code before anything is measured."""
    topic, objects = kafka.create_topic(fsync=False), trades(100_000)
    values, keys = [_encoder()(trade) for trade in objects], [trade.symbol for trade in objects]
    for _ in range(WARM_TURNS):
        kafka.send(kafka.producer(), topic, values, keys)
    consumer, got = kafka.consumer(topic), 0
    consumer.assign(kafka.start_of(topic))
    while got < WARM_TURNS * len(values):
        got += len(consumer.consume(10_000, 1.0))
    consumer.close()


def _rows(stage: _Stage, fsync: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    kept = "fsync" if fsync else "no fsync"
    yield from _produce(stage, kept, runner)
    yield from _produce_arrow(stage, kept, runner)
    yield from _publish(stage, kept, runner)
    if fsync:
        yield from _writer_arrow(stage, runner)
        yield from _exactly_once(stage, runner)
        yield from _read(stage, runner)
        yield from _disk(stage, runner)


class _Stage:
    """One of our brokers, Kafka or why it is absent, and the events."""

    def __init__(
        self, mill: Mill, broker: Broker, kafka: KafkaServer | PeerAbsent, sizes: _Sizes
    ) -> None:
        self.mill, self.broker, self.sizes = mill, broker, sizes
        self._kafka = kafka
        self.objects = trades(sizes.objects)
        self.keys = [trade.symbol for trade in self.objects]
        self.batch = trade_frame(100_000)

    @classmethod
    async def open(cls, broker: Broker, kafka: KafkaServer | PeerAbsent, sizes: _Sizes) -> _Stage:
        return cls(await connect(broker.url), broker, kafka, sizes)

    async def close(self) -> None:
        await self.mill.close()

    @property
    def kafka(self) -> KafkaServer:
        if isinstance(self._kafka, PeerAbsent):
            raise PeerAbsent(str(self._kafka))
        return self._kafka

    async def topic(self) -> Topic:
        return await self.mill.create_topic(f"trades-{unique_token(6)}", schema=Trade)

    def effort(self) -> Effort:
        """Ours: this process and the broker."""
        return Effort(self.broker.pid)


RATE_AND_CPU = {"rate": ("", "events/s"), "cpu": (CPU, "us/event")}


def _totals(figures: Figures) -> Figures:
    return {"rate": figures["rate"], "cpu": figures["client"] + figures["server"]}


def _method(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise PeerAbsent(f"this version has no {type(owner).__name__}.{name}")
    return found


def _encoder() -> Callable[[Any], bytes]:
    return msgspec.json.Encoder().encode


def _produce(stage: _Stage, kept: str, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    topic = runner.run(stage.topic())
    count = stage.sizes.objects
    theirs: list[str] = []

    async def one_by_one() -> Figures:
        effort = stage.effort()
        async with topic.producer() as producer:
            for trade in stage.objects:
                await producer.send(trade, trade.symbol)
        return _totals(effort.done(count))

    async def lists() -> Figures:
        effort = stage.effort()
        async with topic.producer() as producer:
            send_many = _method(producer, "send_many")
            for at in range(0, count, TRANSACTION):
                await send_many(stage.objects[at : at + TRANSACTION], key="symbol")
        return _totals(effort.done(count))

    def kafka() -> Figures:
        server = stage.kafka
        if not theirs:
            theirs.append(server.create_topic(fsync=kept == "fsync"))
        producer = server.producer()
        effort = Effort(server.pid)
        server.send(producer, theirs[0], map(_encoder(), stage.objects), stage.keys)
        return _totals(effort.done(count))

    row = f"produce objects, {kept}"
    peer = f"{KAFKA}, msgspec, linger 50 ms"
    works: dict[str, Work] = {"send": one_by_one, "send_many": lists, peer: kafka}
    pairs = [(f"{row}: {name}", name, peer) for name in ("send", "send_many")]
    yield from race(RATE_AND_CPU, works, pairs, stage.sizes.rounds, runner)


def _produce_arrow(stage: _Stage, kept: str, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    row = f"produce Arrow batches, {kept}"
    if not wanted(row):
        return
    topic = runner.run(stage.topic())
    theirs: list[str] = []
    values = [_encoder()(trade) for trade in stage.objects]

    async def ours() -> Figures:
        effort = stage.effort()
        async with topic.producer() as producer:
            for _ in range(stage.sizes.rows // stage.batch.num_rows):
                await producer.send_batch(stage.batch, COLUMNS)
        return _totals(effort.done(stage.sizes.rows))

    def kafka(encoded: bool) -> Figures:
        server = stage.kafka
        if not theirs:
            theirs.append(server.create_topic(fsync=kept == "fsync"))
        producer = server.producer()
        effort = Effort(server.pid)
        given = values if encoded else map(_encoder(), stage.objects)
        server.send(producer, theirs[0], given, stage.keys)
        return _totals(effort.done(stage.sizes.objects))

    objects, before = f"{KAFKA}, msgspec from objects", f"{KAFKA}, values encoded beforehand"
    works: dict[str, Work] = {
        "arrow": ours,
        objects: lambda: kafka(encoded=False),
        before: lambda: kafka(encoded=True),
    }
    pairs = [(row, "arrow", objects), (row, "arrow", before)]
    yield from race(RATE_AND_CPU, works, pairs, stage.sizes.rounds, runner)


def _publish(stage: _Stage, kept: str, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """One awaited publish at a time."""
    topic = runner.run(stage.topic())
    count = stage.sizes.publishes
    theirs: list[str] = []

    def figures(times: list[float]) -> Figures:
        return {"p50": median(times) * 1e6, "p99": quantiles(times, n=100)[98] * 1e6}

    async def ours() -> Figures:
        times = []
        for trade in stage.objects[:count]:
            began = time.perf_counter()
            await topic.publish(trade, trade.symbol)
            times.append(time.perf_counter() - began)
        return figures(times)

    def kafka() -> Figures:
        server = stage.kafka
        if not theirs:
            theirs.append(server.create_topic(fsync=kept == "fsync"))
        producer, encode = server.producer(**{"linger.ms": 0}), _encoder()
        times = []
        for trade in stage.objects[:count]:
            began = time.perf_counter()
            producer.produce(theirs[0], encode(trade), trade.symbol)
            if producer.flush(10):
                raise RuntimeError("Kafka did not store an event within 10 s")
            times.append(time.perf_counter() - began)
        return figures(times)

    row, peer = f"one awaited publish, {kept}", f"{KAFKA}, produce + flush, linger 0"
    names = {"p50": (", p50", "us"), "p99": (", p99", "us")}
    works: dict[str, Work] = {"publish": ours, peer: kafka}
    yield from race(names, works, [(row, "publish", peer)], stage.sizes.rounds + 2, runner)


def _writer_arrow(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    topic = runner.run(stage.topic())
    turns, step = stage.sizes.rows // stage.batch.num_rows, stage.batch.num_rows

    async def once() -> Figures:
        effort = stage.effort()
        async with topic.writer(f"w{unique_token(8)}") as writer:
            for turn in range(1, turns + 1):
                await writer.write_batch(stage.batch, position=turn * step, columns=COLUMNS)
        return _totals(effort.done(stage.sizes.rows))

    async def plain() -> Figures:
        effort = stage.effort()
        async with topic.producer() as producer:
            for _ in range(turns):
                await producer.send_batch(stage.batch, COLUMNS)
        return _totals(effort.done(stage.sizes.rows))

    works: dict[str, Work] = {"writer": once, "plain producer": plain}
    pairs = [("writer fed with Arrow, fsync", "writer", "plain producer")]
    yield from race(RATE_AND_CPU, works, pairs, stage.sizes.rounds, runner)


def _exactly_once(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    topic = runner.run(stage.topic())
    count = stage.sizes.objects
    theirs: list[Any] = []

    async def one_by_one() -> Figures:
        effort = stage.effort()
        async with topic.writer(f"w{unique_token(8)}") as writer:
            for position, trade in enumerate(stage.objects, start=1):
                await writer.write(trade, trade.symbol, position=position)
        return _totals(effort.done(count))

    def kafka() -> Figures:
        server = stage.kafka
        if not theirs:
            producer = server.producer(**{"transactional.id": "bench"})
            producer.init_transactions(60)
            theirs.extend((server.create_topic(fsync=True), producer))
        topic, producer = theirs
        encode, effort = _encoder(), Effort(server.pid)
        for at in range(0, count, TRANSACTION):
            producer.begin_transaction()
            for trade in stage.objects[at : at + TRANSACTION]:
                producer.produce(topic, encode(trade), trade.symbol)
            producer.commit_transaction(60)
        return _totals(effort.done(count))

    peer = f"{KAFKA}, transactions of {TRANSACTION:,}, msgspec"
    works: dict[str, Work] = {"write": one_by_one, peer: kafka}
    pairs = [("exactly once, objects, fsync: write", "write", peer)]
    yield from race(RATE_AND_CPU, works, pairs, stage.sizes.rounds, runner)


def _read(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    ways = {
        "read objects: read, typed": "typed",
        "read objects: read, dicts": "dicts",
        "read objects: read_many, typed": "lists of typed",
        "read objects: read_many, dicts": "lists of dicts",
        "read Arrow batches": "arrow",
    }
    if not wanted(*ways):
        return
    name = runner.run(_filled(stage))
    typed, plain = runner.run(stage.mill.topic(name, Trade)), runner.run(stage.mill.topic(name))
    count = stage.sizes.objects
    theirs: list[str] = []

    async def counted(
        read: Callable[[], AsyncIterator[Any]], size: Callable[[Any], int]
    ) -> Figures:
        effort, got = stage.effort(), 0
        async for item in read():
            got += size(item)
        if got != count:
            raise RuntimeError(f"read {got} of {count} events")
        return _totals(effort.done(count))

    def singly(topic: Topic) -> Work:
        async def run() -> Figures:
            effort, got = stage.effort(), 0
            async for event in topic.read():
                if event.value is not None:
                    got += 1
            if got != count:
                raise RuntimeError(f"read {got} of {count} events")
            return _totals(effort.done(count))

        return run

    def lists(topic: Topic) -> Work:
        return lambda: counted(_method(topic, "read_many"), lambda events: len(events.values))

    def kafka() -> Figures:
        server = stage.kafka
        if not theirs:
            theirs.append(server.create_topic(fsync=False))
            values = [_encoder()(trade) for trade in stage.objects]
            server.send(server.producer(), theirs[0], values, stage.keys)
        consumer = server.consumer(theirs[0])
        decode = msgspec.json.Decoder(Trade).decode
        try:
            effort, got = Effort(server.pid), 0
            consumer.assign(server.start_of(theirs[0]))
            while got < count:
                got += len([decode(message.value()) for message in consumer.consume(10_000, 1.0)])
            return _totals(effort.done(count))
        finally:
            consumer.close()

    peer = f"{KAFKA}, consume(10000), msgspec to a class"
    works: dict[str, Work] = {
        "typed": singly(typed),
        "dicts": singly(plain),
        "lists of typed": lists(typed),
        "lists of dicts": lists(plain),
        "arrow": lambda: counted(plain.batches, lambda batch: int(batch.num_rows)),
        peer: kafka,
    }
    pairs = [(row, way, peer) for row, way in ways.items()]
    yield from race(RATE_AND_CPU, works, pairs, stage.sizes.rounds, runner)


async def _filled(stage: _Stage) -> str:
    topic = await stage.topic()
    async with topic.producer() as producer:
        for trade in stage.objects:
            await producer.send(trade, trade.symbol)
    return topic.name


def _disk(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """Files of a topic for an event, with the default settings of both."""
    row = "disk, default settings"
    if not wanted(row):
        return
    count = stage.sizes.objects
    before = _files(stage.broker.data)
    runner.run(_filled(stage))
    ours = (_files(stage.broker.data) - before) / count
    try:
        server = stage.kafka
    except PeerAbsent as error:
        yield Skipped(f"{row} against {KAFKA}", str(error))
        yield Result(row, ours, "B/event")
        return
    topic = server.create_topic(fsync=True)
    server.send(server.producer(), topic, map(_encoder(), stage.objects), stage.keys)
    theirs = server.bytes_on_disk(topic) / count
    yield raced(row, "B/event", [ours], f"{KAFKA}, JSON", [theirs], better="lower")


def _files(folder: Path) -> int:
    """Bytes that the stored messages take."""
    return sum(file.stat().st_size for file in folder.rglob("*.blk"))
