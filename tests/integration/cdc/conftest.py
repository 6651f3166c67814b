"""A database of the test's own, on a PostgreSQL that the session shares, and a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import millstream
from millstream import Mill
from millstream.settings import Reconnect
from tests.mariadb import mariadb, mariadb_server
from tests.postgres import postgres, postgres_server

__all__ = ["mariadb", "mariadb_server", "postgres", "postgres_server"]


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    quick = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
    async with millstream.connect(millstream_url, reconnect=quick) as connected:
        yield connected
