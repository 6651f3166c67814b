"""Packs: typed events of about 100 bytes, fsync before every ack, one Python process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from bench.floor import RawSocket
from bench.harness import Contestant, PeerAbsent, Result, Skipped, against
from millstream.events.packs.pack import encode, envelope, split
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.mill import Mill, connect
from millstream.schemas import ColumnBuilder, declare
from millstream.testing import running_broker
from millstream.wire.protocol import hpub, unique_token

PACKING = Packing(max_events=5_000)
COLUMNS = Columns(key="symbol")
NAT_PAYLOAD = b"x" * 100


@dataclass(frozen=True, slots=True)
class Trade:
    """A typed event of about 100 bytes."""

    symbol: str
    venue: str
    account: str
    comment: str
    price: float
    size: int
    at: datetime


def trades(count: int) -> list[Trade]:
    now = datetime.now(UTC)
    return [
        Trade(
            f"SYM{n % 50}",
            "XNAS-MAIN",
            f"account-{n % 1000:012d}",
            f"order {n:020d}",
            100 + n * 0.5,
            n,
            now,
        )
        for n in range(count)
    ]


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every figure of the packs table."""
    with running_broker(durability="fsync") as broker, asyncio.Runner() as runner:
        stage = runner.run(_Stage.open(broker.url, 200_000 if quick else 1_000_000))
        try:
            yield from _arrow(stage, quick, runner)
            yield from _objects(stage, quick, runner)
            yield from _exactly_once(stage, quick, runner)
            yield from _reading(stage, quick, runner)
        finally:
            runner.run(stage.close())


class _Stage:
    """One server, one connection, the events to send."""

    def __init__(self, mill: Mill, topic: Topic, url: str, count: int) -> None:
        self.mill, self.topic, self.url, self.count = mill, topic, url, count
        self.objects = trades(50_000)
        self.batch: pa.RecordBatch = ColumnBuilder(declare(Trade).record).batch(self.objects)
        self.turns = count // len(self.objects)
        self.raw = RawSocket(url)

    @classmethod
    async def open(cls, url: str, count: int) -> _Stage:
        mill = await connect(url)
        return cls(mill, await cls.topic_for(mill), url, count)

    @staticmethod
    async def topic_for(mill: Mill) -> Topic:
        return await mill.create_topic(f"trades-{unique_token(6)}", schema=Trade)

    async def close(self) -> None:
        self.raw.close()
        await self.mill.close()


def _rate(count: int, began: float) -> float:
    return count / (time.perf_counter() - began)


async def _send_arrow(stage: _Stage) -> float:
    began = time.perf_counter()
    async with stage.topic.producer(PACKING) as producer:
        for _ in range(stage.turns):
            await producer.send_batch(stage.batch, COLUMNS)
    return _rate(stage.count, began)


async def _send_objects(stage: _Stage, turns: int) -> float:
    began = time.perf_counter()
    async with stage.topic.producer(PACKING) as producer:
        for _ in range(turns):
            for trade in stage.objects:
                await producer.send(trade, trade.symbol)
    return _rate(turns * len(stage.objects), began)


def _frames(stage: _Stage) -> list[bytes]:
    """The packs of one turn as a raw socket sends them, encoded beforehand."""
    batch = envelope(stage.batch, key=stage.batch.column("symbol"))
    subject = f"{stage.topic.name}._pack.raw"
    packs = [encode(piece, schema_id="1") for piece in split(batch, 5_000, PACKING.max_bytes)]
    messages = [pack.message(subject) for pack in packs]
    to = stage.raw.inbox.encode()
    return [hpub(message.subject, to, message.headers, message.payload) for message in messages]


def _raw_rate(stage: _Stage, frames: list[bytes], in_flight: int) -> float:
    events = stage.count / len(frames) / stage.turns
    return stage.raw.publish_rate(frames * stage.turns, in_flight) * events


def _arrow(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    frames = _frames(stage)
    size = sum(map(len, frames)) / stage.batch.num_rows
    yield Result("bytes of a typed event in a pack", size, "B")

    async def ours() -> float:
        return await _send_arrow(stage)

    def floor() -> float:
        return _raw_rate(stage, frames, PACKING.max_in_flight)

    yield from against(
        "producer fed with Arrow batches, fsync",
        "events/s",
        ours,
        {"raw socket, same bytes": floor},
        quick=quick,
        runner=runner,
    )


def _objects(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    turns = max(1, stage.turns // 5)

    async def ours() -> float:
        return await _send_objects(stage, turns)

    async def theirs() -> float:
        try:
            import nats
        except ImportError as error:
            raise PeerAbsent("nats-py is not installed: pip install nats-py") from error
        client = await nats.connect(stage.url)
        js: Any = client.jetstream(publish_async_max_pending=1024)
        count = 5_000
        began = time.perf_counter()
        for _ in range(count):
            await js.publish_async(f"{stage.topic.name}.k", NAT_PAYLOAD)
        await js.publish_async_completed()
        rate = _rate(count, began)
        await client.close()
        return rate

    yield from against(
        "producer fed with Python objects, fsync",
        "events/s",
        ours,
        {"nats-py publish_async, fsync": theirs},
        quick=quick,
        runner=runner,
    )


def _exactly_once(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    async def once(lanes: int) -> float:
        began = time.perf_counter()
        step = len(stage.objects)
        async with stage.topic.writer(f"w{unique_token(8)}", PACKING, lanes) as writer:
            for turn in range(1, stage.turns + 1):
                await writer.write_batch(stage.batch, position=turn * step, columns=COLUMNS)
        return _rate(stage.count, began)

    async def plain() -> float:
        return await _send_arrow(stage)

    async def one_fence() -> float:
        return await once(1)

    async def four_fences() -> float:
        return await once(4)

    turns = max(1, stage.turns // 5)

    async def objects_once() -> float:
        began, position = time.perf_counter(), 0
        async with stage.topic.writer(f"w{unique_token(8)}", PACKING) as writer:
            for _ in range(turns):
                for trade in stage.objects:
                    position += 1
                    await writer.write(trade, trade.symbol, position=position)
        return _rate(position, began)

    async def objects_plain() -> float:
        return await _send_objects(stage, turns)

    frames = _frames(stage)

    def raw_one_by_one() -> float:
        return _raw_rate(stage, frames, 1)

    # What one pack in flight costs by itself: a fence can be no faster than the last of these.
    arrow: dict[str, Contestant] = {
        "plain producer": plain,
        "raw socket, one in flight": raw_one_by_one,
    }
    for name, work, peers in (
        ("objects, one fence", objects_once, {"plain producer": objects_plain}),
        ("Arrow, one fence", one_fence, arrow),
        ("Arrow, four fences", four_fences, {"plain producer": plain}),
    ):
        yield from against(
            f"exactly-once writer fed with {name}, fsync",
            "events/s",
            work,
            peers,
            quick=quick,
            runner=runner,
        )


def _reading(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    count = stage.count

    async def fill() -> Topic:
        topic = await stage.topic_for(stage.mill)
        async with topic.producer(PACKING) as producer:
            for _ in range(stage.turns):
                await producer.send_batch(stage.batch, COLUMNS)
        return await stage.mill.topic(topic.name)

    topic = runner.run(fill())

    async def batches() -> float:
        began, got = time.perf_counter(), 0
        async for batch in topic.batches():
            got += batch.num_rows
        if got != count:
            raise RuntimeError(f"read {got} of {count} events")
        return _rate(got, began)

    async def objects() -> float:
        began, got = time.perf_counter(), 0
        goal = count // 4
        async for _ in topic.read():
            got += 1
            if got == goal:
                break
        return _rate(got, began)

    for name, work in (("Arrow batches", batches), ("Python objects", objects)):
        yield from against(
            f"read packs as {name}", "events/s", work, {}, quick=quick, runner=runner
        )
