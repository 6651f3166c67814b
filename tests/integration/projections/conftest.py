"""A connection to an account of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import millstream
from millstream import Mill


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as connected:
        yield connected
