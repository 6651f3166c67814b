"""Connections to an own, empty account of the session's broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

import millstream
from millstream import Mill

Connect = Callable[[], Awaitable[Mill]]


@pytest.fixture
async def connect(millstream_url: str) -> AsyncIterator[Connect]:
    """Opens connections to the test's account, and closes them."""
    async with AsyncExitStack() as stack:

        async def open_one() -> Mill:
            return await stack.enter_async_context(millstream.connect(millstream_url))

        yield open_one


@pytest.fixture
async def mill(connect: Connect) -> Mill:
    """A connection to the test's own account."""
    return await connect()
