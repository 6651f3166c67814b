"""Measures what the pictures of docs/PERFORMANCE.md show, and draws them.

    python -m bench pictures [--quick] [--folder docs]

Every point is a median of rounds in which all points of a picture take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.chart import Line, chart, short
from bench.harness import PeerAbsent, take_turns
from bench.trade import Trade, trade_frame, trades
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.mill import Mill, connect
from millstream.testing import running_broker
from millstream.wire.protocol import unique_token

Point = tuple[float, float]
Measure = Callable[[], Awaitable[Point]]

IN_FLIGHT = (1, 4, 16, 64, 256, 1024)
TOGETHER = (1, 10, 100, 1_000, 5_000, 20_000)
SIZES = (10, 100, 1_000, 10_000, 100_000)
PACKS = (10, 100, 1_000, 5_000, 20_000)
PACK_BYTES = 8 * 1024 * 1024  # so that the number of events is what limits a pack
ROUND_SECONDS = 0.3
ROUNDS, QUICK_ROUNDS = 3, 1
RATE = "events a second"


class _Stage:
    """One broker that syncs every ack, and one connection."""

    def __init__(self, mill: Mill, seconds: float) -> None:
        self.mill, self.seconds = mill, seconds
        self.objects = trades(100_000)
        self.frame = trade_frame(100_000)

    @classmethod
    async def open(cls, url: str, seconds: float) -> _Stage:
        return cls(await connect(url), seconds)

    async def topic(self, schema: object = Trade) -> Topic:
        name = f"t-{unique_token(8)}"
        if schema is None:
            return await self.mill.create_topic(name)
        return await self.mill.create_topic(name, schema=schema)


async def _until(seconds: float, step: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    """Repeat a step for some time: how many events it did, and the seconds that took."""
    began, events = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not events:
        events += await step()
    return events, time.perf_counter() - began


# -- throughput against latency ---------------------------------------------------------------


def _single_in_flight(stage: _Stage, topic: Topic, count: int) -> Measure:
    async def run() -> Point:
        times: list[float] = []
        values = iter(stage.objects)

        async def one_after_the_other() -> None:
            while time.perf_counter() < end:
                trade, began = next(values), time.perf_counter()
                await topic.publish(trade, trade.symbol)
                times.append(time.perf_counter() - began)

        began = time.perf_counter()
        end = began + stage.seconds
        await asyncio.gather(*(one_after_the_other() for _ in range(count)))
        return median(times) * 1000, len(times) / (time.perf_counter() - began)

    return run


def _many_then_flush(stage: _Stage, topic: Topic, count: int) -> Measure:
    async def run() -> Point:
        times: list[float] = []
        async with topic.producer() as producer:

            async def step() -> int:
                began = time.perf_counter()
                await producer.send_many(stage.objects[:count], key="symbol")
                await producer.flush()
                times.append(time.perf_counter() - began)
                return count

            events, seconds = await _until(stage.seconds, step)
        return median(times) * 1000, events / seconds

    return run


# -- throughput against the size of an event and of a pack ------------------------------------


def _of_size(stage: _Stage, topic: Topic, size: int, packed: bool) -> Measure:
    value = b"x" * size
    lot = max(1, min(1_000, 2_000_000 // size))

    async def run() -> Point:
        packing = Packing(max_bytes=1024 * 1024)
        producer: Any = topic.producer(packing) if packed else topic.event_producer()
        async with producer:

            async def step() -> int:
                for _ in range(lot):
                    await producer.send(value, "k")
                return lot

            began = time.perf_counter()
            events, _ = await _until(stage.seconds, step)
        return float(size), events / (time.perf_counter() - began)

    return run


def _of_pack(stage: _Stage, topic: Topic, count: int, arrow: bool) -> Measure:
    async def run() -> Point:
        packing = Packing(max_events=count, max_bytes=PACK_BYTES)
        began = time.perf_counter()
        async with topic.producer(packing) as producer:

            async def step() -> int:
                # Small packs are slow: fewer of them are enough for a figure.
                lot = min(count * 100, len(stage.objects))
                if arrow:
                    await producer.send_batch(stage.frame.slice(0, lot), Columns(key="symbol"))
                else:
                    await producer.send_many(stage.objects[:lot], key="symbol")
                return lot

            events, _ = await _until(stage.seconds, step)
        return float(count), events / (time.perf_counter() - began)

    return run


# -- drawing ----------------------------------------------------------------------------------


def _lines(works: dict[str, dict[str, Measure]], rounds: int, runner: asyncio.Runner) -> list[Line]:
    """The points of all lines, taken in turns."""
    flat = {(name, label): work for name, of in works.items() for label, work in of.items()}
    taken: dict[str, list[Point] | PeerAbsent] = take_turns(
        {"\n".join(pair): work for pair, work in flat.items()}, rounds, runner
    )
    drawn = []
    for name, of in works.items():
        points = []
        for label in of:
            found = taken[f"{name}\n{label}"]
            if isinstance(found, PeerAbsent):
                raise found
            points.append((median(p[0] for p in found), median(p[1] for p in found)))
        drawn.append(Line(name, points, list(of)))
    return drawn


def measured(url: str, quick: bool) -> dict[str, dict[str, Any]]:
    """Every picture: its title, axes and lines."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with asyncio.Runner() as runner:
        stage = runner.run(_Stage.open(url, ROUND_SECONDS / (2 if quick else 1)))
        typed, plain = runner.run(stage.topic()), runner.run(stage.topic(None))

        found = {
            "latency": (
                "Throughput against latency, fsync before every ack",
                "milliseconds until it is stored, median",
                {
                    "single events, so many in flight": {
                        str(n): _single_in_flight(stage, typed, n) for n in IN_FLIGHT
                    },
                    "lists of so many events, then flush": {
                        short(n): _many_then_flush(stage, typed, n) for n in TOGETHER
                    },
                },
            ),
            "event-size": (
                "Throughput against the size of an event, fsync",
                "bytes of an event",
                {
                    "packs": {short(n): _of_size(stage, plain, n, True) for n in SIZES},
                    "single events, 1,024 in flight": {
                        short(n): _of_size(stage, plain, n, False) for n in SIZES
                    },
                },
            ),
            "pack-size": (
                "Throughput against the size of a pack, fsync",
                "events in a pack",
                {
                    "Arrow batches": {short(n): _of_pack(stage, typed, n, True) for n in PACKS},
                    "lists of objects": {short(n): _of_pack(stage, typed, n, False) for n in PACKS},
                },
            ),
        }
        try:
            return {
                name: {
                    "title": title,
                    "across": across,
                    "up": RATE,
                    "lines": _lines(works, rounds, runner),
                }
                for name, (title, across, works) in found.items()
            }
        finally:
            runner.run(stage.mill.close())


def drawn(picture: dict[str, Any]) -> str:
    """The SVG of a picture; points have a label where the axis does not say what they are."""
    lines = picture["lines"]
    if picture["title"].startswith("Throughput against the size"):
        lines = [Line(line.name, line.points) for line in lines]
    return chart(picture["title"], picture["across"], picture["up"], lines)


def main(arguments: list[str]) -> int:
    """Measure, and write docs/performance-*.svg; the figures go to stdout as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench pictures")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="default: docs")
    chosen = parser.parse_args(arguments)
    with running_broker(durability="fsync") as broker:
        pictures = measured(broker.url, chosen.quick)
    for name, picture in pictures.items():
        file = chosen.folder / f"performance-{name}.svg"
        file.write_text(drawn(picture), encoding="utf-8")
        lines = [asdict(line) for line in picture["lines"]]
        sys.stdout.write(json.dumps({"name": name, **picture, "lines": lines}) + "\n")
    return 0
