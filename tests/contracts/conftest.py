"""Both kinds of connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import millstream
from millstream import blocking
from tests.contracts.faces import Face


@pytest.fixture(params=["asynchronous", "blocking"])
async def mill(request: pytest.FixtureRequest, millstream_url: str) -> AsyncIterator[Any]:
    if request.param == "asynchronous":
        async with millstream.connect(millstream_url) as connected:
            yield connected
    else:
        twin = await asyncio.to_thread(blocking.connect, millstream_url)
        async with Face(twin) as face:
            yield face
