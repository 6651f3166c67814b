"""Connections to an own account of the session's broker, and a second client library as peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import nats
import pytest
from nats.aio.client import Client

import millstream
from millstream.deadline import Deadline
from millstream.messaging import Topic
from millstream.mill import Mill
from millstream.settings import ConnectionSettings, Reconnect
from millstream.wire.aio.connection import Connection

Connect = Callable[..., Awaitable[Connection]]
Until = Callable[..., Awaitable[None]]

# Quick to come back, because tests restart the broker and wait for it.
QUICK = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)


@pytest.fixture
async def connect(millstream_url: str) -> AsyncIterator[Connect]:
    """Opens connections, to the test's own account by default, and closes them."""
    async with AsyncExitStack() as stack:

        async def open_one(url: str = millstream_url, **changes: Any) -> Connection:
            base = ConnectionSettings(urls=(url,), reconnect=QUICK)
            connection = Connection(replace(base, **changes))
            await connection.open()
            stack.push_async_callback(connection.close)
            return connection

        yield open_one


@pytest.fixture
async def connection(connect: Connect) -> Connection:
    """A connection to the test's own account."""
    return await connect()


@pytest.fixture
async def other(connect: Connect) -> Connection:
    """A second connection to the same account."""
    return await connect()


@pytest.fixture
async def peer(millstream_url: str) -> AsyncIterator[Client]:
    """A client of another library on the same account."""
    client = await nats.connect(millstream_url)
    yield client
    await client.close()


@pytest.fixture
def until() -> Until:
    """Waits for a condition, at most `seconds`; fails with its name when it does not come."""

    async def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = Deadline(seconds)
        while not condition():
            assert not deadline.passed, f"not within {seconds:g} s: {condition}"
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    """What application code holds, on the test's own account."""
    async with millstream.connect(millstream_url) as mill:
        yield mill


@pytest.fixture
async def topic(mill: Mill) -> Topic:
    """A topic `orders` of one partition."""
    return await mill.create_topic("orders")


@pytest.fixture
async def accounts(mill: Mill) -> Topic:
    """A topic that takes no packs, so an event may name the one that it follows."""
    return await mill.create_topic("accounts", packs=False)
