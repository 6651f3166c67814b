"""The Kafka gateway beside a real Kafka: the same clients, the same records, in turns.

Each server syncs to disk before it answers, or neither does. The gateway's broker and Kafka are on
the same disk. CPU is that of the clients, of the gateway, of its broker and of Kafka; programs in
Java count with their start.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import kafka_java, kafka_spark
from bench.harness import Figures, PeerAbsent, Result, Skipped, peers_wanted
from bench.kafka_clients import kafka_client
from bench.kafka_gateway import Gateway
from bench.kafka_peer import KAFKA, KafkaServer
from bench.kafka_sides import CPU, RATE, Names, Row, Side, Stage, gateway_side, kafka_side
from bench.kafka_tools import Tools
from millstream.testing import running_broker

VALUE_BYTES = 100
DIFFERENT = 1_000  # values; all others are copies of them
KEYS = 350
WARM_TURNS = 3
CONSUMED_AT_ONCE = 10_000
SECONDS = 10.0  # without any record: then something is broken
CONSUMED: Names = {**RATE, "first": (", until the first records", "ms"), **CPU}
LATENCY: Names = {"p50": (", p50", "us"), "p99": (", p99", "us"), **CPU}


@dataclass(frozen=True, slots=True)
class _Sizes:
    records: int  # by confluent-kafka
    java: int  # by the programs in Java: enough that their compiler has settled
    single: int  # one after the other, for latency
    rounds: int


FULL = _Sizes(500_000, 1_000_000, 3_000, rounds=5)
QUICK = _Sizes(100_000, 200_000, 500, rounds=3)


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every row of the gateway beside Kafka; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    with ExitStack() as stack:
        try:
            kafka_client()
            records = _Records(sizes.records)
        except PeerAbsent as error:
            yield Skipped("kafka", str(error))
            return
        server: KafkaServer | PeerAbsent
        try:
            if not peers_wanted():
                raise PeerAbsent("no peers were asked for")
            server = stack.enter_context(KafkaServer())
            _warm(kafka_side(server, fsync=False), records)
        except PeerAbsent as error:
            yield Skipped(KAFKA, str(error))
            server = error
        for durability in ("fsync", "periodic"):
            with ExitStack() as on:
                broker = on.enter_context(running_broker(durability=durability))
                folder = Path(on.enter_context(tempfile.TemporaryDirectory()))
                gateway = on.enter_context(Gateway(broker.url, folder))
                fsync = durability == "fsync"
                peer = (
                    kafka_side(server, fsync=fsync) if isinstance(server, KafkaServer) else server
                )
                stage = Stage(gateway_side(gateway, broker), peer)
                yield from _rows(stage, records, sizes, fsync=fsync)
                if fsync:
                    yield from kafka_spark.rows(stage, broker, quick)


class _Records:
    """The same values and keys for everybody."""

    def __init__(self, count: int) -> None:
        source = random.Random(1)
        values = [source.randbytes(VALUE_BYTES) for _ in range(DIFFERENT)]
        self.values = [values[n % DIFFERENT] for n in range(count)]
        self.keys = [f"key-{n % KEYS:03d}" for n in range(count)]


def _rows(
    stage: Stage, records: _Records, sizes: _Sizes, *, fsync: bool
) -> Iterator[Result | Skipped]:
    kept = "fsync" if fsync else "no fsync"
    rounds = sizes.rounds
    tools: Tools | None = None
    try:
        tools = Tools()
    except PeerAbsent as error:
        yield Skipped(f"Kafka's programs in Java, {kept}", str(error))
    yield from _produce(stage, records, kept, rounds)
    yield from _latency(stage, kept, sizes)
    if tools:
        yield from kafka_java.produce(stage, tools, kept, sizes.java, rounds)
        yield from kafka_java.latency(stage, tools, kept, sizes.single, rounds)
    if not fsync:
        return
    yield from _consume(stage, records, rounds)
    if tools:
        filled = _Filled(records, sizes.java // sizes.records)
        yield from kafka_java.consume(stage, tools, filled.topic, sizes.java, rounds)


def _warm(side: Side, records: _Records) -> None:
    """So much work that Java has compiled its code before anything is measured."""
    topic = side.make_topic(1)
    for _ in range(WARM_TURNS):
        side.clients.send(side.clients.producer(), topic, records.values, records.keys)
        _read(side, topic, len(records.values))


def _produce(stage: Stage, records: _Records, kept: str, rounds: int) -> Iterator[Result | Skipped]:
    topics: dict[str, str] = {}

    def work(side: Side) -> Figures:
        if side.name not in topics:
            topics[side.name] = side.make_topic(1)
        producer = side.clients.producer()
        load = stage.load(side)
        side.clients.send(producer, topics[side.name], records.values, records.keys)
        return load.done(len(records.values))

    row = Row(f"confluent-kafka produce, {kept}", {**RATE, **CPU}, len(records.values), rounds)
    yield from stage.beside(row, work)


class _Filled:
    """A topic on each side that has all records, some times over."""

    def __init__(self, records: _Records, times: int) -> None:
        self._records, self._times = records, times
        self._topics: dict[str, str] = {}

    def topic(self, side: Side) -> str:
        """Its name; it is filled when somebody first asks."""
        if side.name not in self._topics:
            topic = self._topics[side.name] = side.make_topic(1)
            for _ in range(self._times):
                values, keys = self._records.values, self._records.keys
                side.clients.send(side.clients.producer(), topic, values, keys)
        return self._topics[side.name]


def _consume(stage: Stage, records: _Records, rounds: int) -> Iterator[Result | Skipped]:
    """Read what was just produced; then the same after the gateway was started again.

    Kafka is not started again: its records are in the page cache of the system either way.
    """
    count = len(records.values)
    filled = _Filled(records, 1)

    def cached(side: Side) -> Figures:
        topic = filled.topic(side)
        load = stage.load(side)
        first = _read(side, topic, count)
        return {**load.done(count), "first": first * 1000}

    def cold(side: Side) -> Figures:
        filled.topic(side)
        side.restart()
        return cached(side)

    row = Row("confluent-kafka consume, near the end", CONSUMED, count, rounds, filled.topic)
    yield from stage.beside(row, cached)
    name = "confluent-kafka consume, from the start after a restart"
    yield from stage.beside(Row(name, CONSUMED, count, rounds, filled.topic, restarts=True), cold)


def _read(side: Side, topic: str, count: int) -> float:
    """Read all of them; the seconds until the first ones came."""
    consumer, got, first = side.clients.consumer(topic), 0, 0.0
    began = time.perf_counter()
    try:
        consumer.assign(side.clients.start_of(topic))
        while got < count:
            messages = consumer.consume(CONSUMED_AT_ONCE, SECONDS)
            if not messages:
                raise RuntimeError(f"{side.name}: nothing came after {got} of {count} records")
            for message in (messages[0], messages[-1]):  # all of them would take as long as reading
                if message.error():
                    raise RuntimeError(f"{side.name}: {message.error()}")
            got += len(messages)
            first = first or time.perf_counter() - began
        return first
    finally:
        consumer.close()


def _latency(stage: Stage, kept: str, sizes: _Sizes) -> Iterator[Result | Skipped]:
    """One record at a time, from its send until it is read, in one process."""
    topics: dict[str, str] = {}

    def work(side: Side) -> Figures:
        if side.name not in topics:
            topics[side.name] = side.make_topic(1)
        topic = topics[side.name]
        producer = side.clients.producer(**{"linger.ms": 0})
        consumer = side.clients.consumer(topic, **{"fetch.wait.max.ms": 500})
        times = []
        try:
            consumer.assign(side.clients.end_of(topic))
            _echo(producer, consumer, topic)  # the consumer has found its position
            load = stage.load(side)
            for _ in range(sizes.single):
                times.append(_echo(producer, consumer, topic) * 1e6)
            found = load.done(sizes.single)
        finally:
            consumer.close()
        return {**found, "p50": median(times), "p99": quantiles(times, n=100)[98]}

    name = f"confluent-kafka end-to-end latency, {kept}"
    yield from stage.beside(Row(name, LATENCY, sizes.single, sizes.rounds), work)


def _echo(producer: Any, consumer: Any, topic: str) -> float:
    """Seconds from the send of a record until it is read."""
    began = time.perf_counter()
    producer.produce(topic, b"x" * VALUE_BYTES)
    producer.poll(0)
    message = consumer.poll(SECONDS)
    seconds = time.perf_counter() - began
    if message is None or message.error():
        raise RuntimeError(f"{topic}: a record was not read: {message and message.error()}")
    producer.poll(0)
    return seconds
