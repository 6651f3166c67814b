"""What runs over a connection ends with it: no handler is called whose outcome is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import millstream
from millstream.errors import ConnectionClosed
from millstream.messaging import GroupSettings, Topic
from millstream.mill import Mill

COUNT = 300


class Calls:
    """A handler that counts its calls; the first ones are awaited."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = asyncio.Event()

    async def __call__(self, event: Any) -> None:
        self.count += 1
        if self.count == 5:
            self.begun.set()
        await asyncio.sleep(0.001)


async def group(topic: Topic, calls: Calls) -> None:
    await topic.group("g", GroupSettings(concurrency=1, buffer=10, key_buffer=10)).run(calls)


async def subscription(topic: Topic, calls: Calls) -> None:
    await (await topic.subscribe("s")).run(calls)


async def iteration(topic: Topic, calls: Calls) -> None:
    async for delivery in await topic.subscribe("s"):
        await calls(delivery)


@pytest.mark.parametrize("work", [group, subscription, iteration])
async def test_no_handler_is_called_when_the_connection_is_closed(
    mill: Mill, topic: Topic, millstream_url: str, work: Callable[[Topic, Calls], Awaitable[None]]
) -> None:
    await topic.publish_many([b"x"] * COUNT)
    calls = Calls()
    async with millstream.connect(millstream_url) as own:
        running = asyncio.ensure_future(work(await own.topic(topic.name), calls))
        async with asyncio.timeout(60):
            await calls.begun.wait()
        await own.connection.close()
        called = calls.count
        assert called < COUNT
        with pytest.raises(ConnectionClosed):
            await running
    assert calls.count == called
