"""Rows and positions are one: neither is stored without the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millstream import Mill
from millstream.cdc.model import Column
from millstream.cdc.sink.apply import apply
from millstream.cdc.sink.postgres import CREATION_LOCK
from millstream.errors import SinkError
from millstream.schemas import types as t
from tests.integration.cdc.apply_targets import PostgresTarget, SqliteTarget, Target
from tests.integration.cdc.change_topics import ChangeTopic, insert
from tests.postgres import Postgres

REFUSE = {
    "postgres": [
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'refused'; END $$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON millstream_positions FOR EACH ROW "
        'WHEN (NEW."offset" <> OLD."offset") EXECUTE FUNCTION refuse()',
    ],
    "sqlite": [
        'CREATE TRIGGER refuse BEFORE UPDATE ON millstream_positions WHEN NEW."offset" <> '
        "OLD.\"offset\" BEGIN SELECT RAISE(ABORT, 'refused'); END",
    ],
}


@pytest.fixture
async def source(mill: Mill) -> AsyncIterator[ChangeTopic]:
    made = await ChangeTopic.create(mill, "orders", [Column("id", t.Int())])
    await made.write([insert({"id": 1})])
    yield made
    await made.close()


@pytest.fixture(params=["postgres", "sqlite"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "sqlite":
        return SqliteTarget(tmp_path / "target.db")
    server: Postgres = request.getfixturevalue("postgres_server")
    return PostgresTarget(server)


async def once(mill: Mill, target: Target, **choices: Any) -> None:
    await apply(mill, "orders", target.url, key=["id"], follow=False, **choices)


async def test_no_row_is_stored_whose_position_is_not(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await once(mill, target)
    await asyncio.to_thread(target.execute, *REFUSE[target.kind])
    await source.write([insert({"id": 2})])
    with pytest.raises(SinkError, match="refused"):
        await once(mill, target)
    assert await asyncio.to_thread(target.query, "SELECT id FROM orders") == [(1,)]
    on = " ON millstream_positions" if target.kind == "postgres" else ""
    await asyncio.to_thread(target.execute, f"DROP TRIGGER refuse{on}")
    await once(mill, target)
    assert await asyncio.to_thread(target.query, "SELECT id FROM orders") == [(1,), (2,)]


async def test_two_that_begin_at_once_wait_for_each_other(
    mill: Mill, source: ChangeTopic, postgres_server: Postgres
) -> None:
    other, target = PostgresTarget(postgres_server), PostgresTarget(postgres_server)
    await once(mill, other)
    ((schema,),) = await asyncio.to_thread(other.query, "SELECT current_schema()")

    def begin() -> psycopg.Connection[Any]:
        """The first step of another one, which has not committed yet."""
        connection = psycopg.connect(target.url)
        connection.execute(f"SELECT pg_advisory_xact_lock({CREATION_LOCK})".encode())
        table = f"{schema}.millstream_positions"
        connection.execute(
            f"CREATE TABLE millstream_positions (LIKE {table} INCLUDING ALL)".encode()
        )
        return connection

    first = await asyncio.to_thread(begin)
    second = asyncio.create_task(once(mill, target))
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'millstream apply' "
        "AND wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(60):
        while await asyncio.to_thread(target.query, waiting) != [(1,)]:
            if second.done():
                await second
            await asyncio.sleep(0.02)
    await asyncio.to_thread(first.commit)
    await asyncio.to_thread(first.close)
    await second
    assert await asyncio.to_thread(target.query, "SELECT id FROM orders") == [(1,)]
