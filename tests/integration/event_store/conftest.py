"""A connection to an account of the test's own, and a store in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import millstream
from millstream import EventStore, Mill
from millstream.settings import Reconnect
from tests.integration.event_store.bank import EVENTS, Account


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    quick = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
    async with millstream.connect(millstream_url, reconnect=quick) as connected:
        yield connected


@pytest.fixture
async def store(mill: Mill) -> EventStore:
    return await mill.event_store("accounts", Account, events=EVENTS)
