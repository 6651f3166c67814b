"""A capture that runs beside a test, and what its topics hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from millstream import Mill
from millstream.cdc.capture import Capture
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.sources import open_source
from millstream.errors import SchemaNotFound, TopicNotFound
from tests.postgres import Database

__all__ = [
    "Running",
    "capturing",
    "events_of",
    "folded",
    "incompressible",
    "settings_for",
    "source_rows",
    "until",
]

SECONDS = 60.0


async def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Wait for a condition, which may be awaitable."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)
    raise AssertionError(what)


@dataclass
class Running:
    """A capture and its task."""

    mill: Mill
    capture: Capture
    task: asyncio.Task[None]

    async def streaming(self) -> None:
        """Wait until the snapshot is stored."""
        await until(lambda: self._state() == "streaming", "the capture streams")

    def _state(self) -> str:
        if self.task.done():
            self.task.result()
        return self.capture.status().state

    async def caught_up(self, topic: str, count: int) -> list[dict[str, Any]]:
        """Wait until a topic has so many events, and return them."""

        async def enough() -> list[dict[str, Any]]:
            if self.task.done():
                self.task.result()
            try:
                found = await events_of(self.mill, topic)
            except (TopicNotFound, SchemaNotFound):
                return []
            return found if len(found) >= count else []

        found: list[dict[str, Any]] = await until(enough, f"{topic} has {count} events")
        assert len(found) == count
        return found

    async def failed(self) -> BaseException:
        """Wait until it gives up, and return why."""
        async with asyncio.timeout(SECONDS):
            await asyncio.wait([self.task])
        error = self.task.exception()
        assert error is not None
        return error


@asynccontextmanager
async def capturing(mill: Mill, settings: CaptureSettings) -> AsyncIterator[Running]:
    """A capture that runs until the block ends; it is stopped as by 'cdc stop'."""
    capture, stop = Capture(mill, open_source(settings), settings), asyncio.Event()
    task = asyncio.create_task(capture.run(stop))
    try:
        yield Running(mill, capture, task)
    finally:
        stop.set()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # tests that expect one have looked at it


async def events_of(mill: Mill, topic: str) -> list[dict[str, Any]]:
    """All events as plain rows: key, value, headers, ..."""
    found: list[dict[str, Any]] = []
    async for batch in (await mill.topic(topic)).batches():
        found += batch.to_pylist()
    return found


def folded(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows that events of changes leave, by key."""
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        value = event["value"]
        if value["op"] == "t":
            rows.clear()
            continue
        key = event["key"].decode()
        if value["op"] == "d":
            rows.pop(key)
            continue
        row = dict(value["after"])
        for name in value["unchanged"] or ():
            row[name] = rows[key][name]
        rows[key] = row
    return rows


def settings_for(postgres: Database, **values: Any) -> CaptureSettings:
    return CaptureSettings(name="shop", source=postgres.url, **{"heartbeat": 0.5, **values})


def source_rows(postgres: Database, table: str, key: str = "id") -> dict[str, dict[str, Any]]:
    with postgres.connect() as connection:
        cursor = connection.execute(f"SELECT * FROM {table}")
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return {str(row[key]): row for row in rows}


def incompressible(size: int) -> str:
    """SQL for a text that is stored apart (TOAST)."""
    return f"(SELECT string_agg(md5(g::text), '') FROM generate_series(1, {size // 32}) g)"
