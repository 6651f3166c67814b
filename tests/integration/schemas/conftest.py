"""Connections to an empty account of the session's broker, one per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import millstream
from millstream import Mill

Connect = Callable[[], Awaitable[Mill]]
PATIENCE = 30  # seconds to wait for an answer; every test here gets one


@pytest.fixture
async def connect(millstream_url: str) -> AsyncIterator[Connect]:
    """Opens connections to the test's account, and closes them."""
    async with AsyncExitStack() as stack:

        async def open_one() -> Mill:
            opened = millstream.connect(millstream_url, request_timeout=PATIENCE)
            return await stack.enter_async_context(opened)

        yield open_one


@pytest.fixture
async def mill(connect: Connect) -> Mill:
    """A connection to the test's own account."""
    return await connect()


@pytest.fixture
async def peer(millstream_url: str) -> AsyncIterator[Client]:
    """Another library's connection to the same account."""
    client = await nats.connect(millstream_url, connect_timeout=PATIENCE)
    yield client
    await client.close()


@pytest.fixture
def js(peer: Client) -> JetStreamContext:
    """That library's JetStream context."""
    return peer.jetstream(timeout=PATIENCE)
