"""Publishes the year as live events, in the order of their time and many times faster."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from examples.flights import data
from millstream import Mill
from millstream.events.row_buffer import Columns

TICK = 0.25  # seconds between two packs of each topic
WRITER = "replay"


@dataclass
class Progress:
    """How far the replay is."""

    flights: int = 0
    weather: int = 0
    clock: str = ""  # the day that is being replayed
    done: bool = False
    speed: float = field(default=0.0)  # seconds of 2013 in one second


async def declare(mill: Mill, tables: data.Tables) -> None:
    """Create the topics with their schemas, and the tables with their rows."""
    await mill.create_topic("flights", schema=data.FLIGHT)
    await mill.create_topic("weather", schema=data.WEATHER)
    for name, (key, rows) in tables.items():
        table = await mill.create_table(name, schema=rows.schema)
        await table.put_many({row[key]: row for row in rows.to_pylist()})


async def replay(mill: Mill, year: data.Year, seconds: float, progress: Progress) -> None:
    """Publish everything within about `seconds`; exactly once, even if it is started again."""
    first = year.flights["time"][0].as_py()
    last = year.flights["time"][-1].as_py()
    length = max(1.0, (last - first).total_seconds())
    progress.speed = length / seconds
    flights, weather = await mill.topic("flights"), await mill.topic("weather")
    start = time.monotonic()
    async with flights.writer(WRITER) as fly, weather.writer(WRITER) as blow:
        while not progress.done:
            passed = min(1.0, (time.monotonic() - start) / seconds)
            now = pa.scalar(first + (last - first) * passed, data.TIME)
            progress.clock = f"{now.as_py():%d %B %Y}"
            complete = passed >= 1.0
            upto = len(year.weather) if complete else _count(year.weather["hour"], now)
            rows = year.weather.slice(progress.weather, upto - progress.weather)
            if rows.num_rows:
                await blow.write_batch(rows, position=upto, columns=Columns(key="origin"))
            progress.weather = upto
            upto = len(year.flights) if complete else _count(year.flights["time"], now)
            rows = year.flights.slice(progress.flights, upto - progress.flights)
            if rows.num_rows:
                await fly.write_batch(rows, position=upto, columns=Columns(key="origin"))
            progress.flights = upto
            if complete:
                progress.done = True
            else:
                await asyncio.sleep(TICK)


async def end(mill: Mill, year: data.Year) -> None:
    """Publish one event after the year in each topic, so that its last hours are complete."""
    flights, weather = await mill.topic("flights"), await mill.topic("weather")
    async with flights.writer(WRITER) as fly, weather.writer(WRITER) as blow:
        await blow.write_batch(data.last_weather(), position=len(year.weather) + 1)
        await fly.write_batch(data.last_flight(), position=len(year.flights) + 1)


def _count(times: pa.ChunkedArray, now: pa.Scalar) -> int:
    return int(pc.sum(pc.less_equal(times, now)).as_py() or 0)
