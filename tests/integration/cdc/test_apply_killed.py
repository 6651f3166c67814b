"""Apply under kills: of itself, and of the database."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from millstream import Mill
from millstream.cdc.model import Column
from millstream.cdc.sink.apply import Apply, apply
from millstream.errors import SinkError
from millstream.schemas import types as t
from tests.integration.cdc.apply_targets import PostgresTarget, SqliteTarget, Target
from tests.integration.cdc.change_topics import Change, ChangeTopic, delete, insert, update
from tests.postgres import Postgres, running_postgres

CHILD = Path(__file__).with_name("apply_child.py")
COLUMNS = [
    *(Column("id", t.Int()), Column("step", t.Int()), Column("text", t.String())),
    Column("big", t.String()),
]
# An event that is applied a second time, or after a later one, is refused by the table.
NEVER_BACK = """
    CREATE FUNCTION never_back() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.step <= OLD.step THEN RAISE 'step % after %', NEW.step, OLD.step; END IF;
        RETURN NEW;
    END $$
"""


@pytest.fixture
async def source(mill: Mill) -> AsyncIterator[ChangeTopic]:
    made = await ChangeTopic.create(mill, "orders", COLUMNS)
    yield made
    await made.close()


class Load:
    """Changes of a few keys: each has a step that grows, and some columns are not sent."""

    def __init__(self, source: ChangeTopic) -> None:
        self.source, self._step = source, 0
        self._random = random.Random(5)

    def _change(self) -> Change:
        self._step += 1
        key = self._random.randrange(400)
        row = {"id": key, "step": self._step, "text": f"text {self._step}", "big": None}
        if (key,) not in self._there:
            self._there.add((key,))
            return insert({**row, "big": f"big {self._step}"})
        kind = self._random.random()
        if kind < 0.1:
            self._there.discard((key,))
            return delete({"id": key})
        if kind < 0.4:
            return update(row, unchanged=["big"])
        return update({**row, "big": f"big {self._step}"})

    async def write(self, packs: int, each: int = 250) -> None:
        for _ in range(packs):
            self._there = set(self.source.rows)
            await self.source.write([self._change() for _ in range(each)])


async def rows_of(target: Target) -> list[tuple[Any, ...]]:
    query = "SELECT id, step, text, big FROM orders ORDER BY id"
    return await asyncio.to_thread(target.query, query)


async def check(mill: Mill, load: Load, target: Target, workers: int) -> None:
    """Apply the rest, and compare column by column."""
    await apply(mill, "orders", target.url, key=["id"], workers=workers, follow=False)
    wanted = sorted(tuple(row.values()) for row in load.source.rows.values())
    assert await rows_of(target) == wanted


@asynccontextmanager
async def child(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), *map(str, arguments), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def place_of(target: Target) -> int:
    with suppress(Exception):  # the table is not there yet
        query = 'SELECT sum("offset") / count(*) FROM millstream_positions'
        ((found,),) = await asyncio.to_thread(target.query, query)
        return int(found or 0)
    return 0


async def kill_while_it_works(process: asyncio.subprocess.Process, target: Target) -> None:
    """Kill a child some moments after it has begun to store."""
    before = await place_of(target)
    async with asyncio.timeout(120):
        while await place_of(target) <= before:
            if process.returncode is not None and process.stderr is not None:
                raise AssertionError((await process.stderr.read()).decode()[-2000:])
            await asyncio.sleep(0.005)
    await asyncio.sleep(random.random() * 0.2)
    process.kill()
    await process.wait()


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.long)])
async def test_a_table_of_postgresql_is_right_whenever_apply_is_killed(
    mill: Mill, millstream_url: str, source: ChangeTopic, postgres_server: Postgres, kills: int
) -> None:
    target, load = PostgresTarget(postgres_server), Load(source)
    await asyncio.to_thread(
        target.execute,
        "CREATE TABLE orders (id bigint PRIMARY KEY, step bigint, text text, big text)",
        NEVER_BACK,
        "CREATE TRIGGER back BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION never_back()",
    )
    for number in range(kills):
        await load.write(25)
        async with child(millstream_url, target.url, 1 + number % 3) as process:
            await kill_while_it_works(process, target)
    await check(mill, load, target, 2)


async def test_a_table_of_sqlite_is_right_whenever_apply_is_killed(
    mill: Mill, millstream_url: str, source: ChangeTopic, tmp_path: Path
) -> None:
    target, load = SqliteTarget(tmp_path / "target.db"), Load(source)
    await asyncio.to_thread(
        target.execute,
        "CREATE TABLE orders (id bigint PRIMARY KEY, step bigint, text text, big text)",
        "CREATE TRIGGER back BEFORE UPDATE ON orders WHEN NEW.step <= OLD.step "
        "BEGIN SELECT RAISE(ABORT, 'back'); END",
    )
    for _ in range(2):
        await load.write(20)
        async with child(millstream_url, target.url, 1) as process:
            await kill_while_it_works(process, target)
    await check(mill, load, target, 1)


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """One that may be killed."""
    with running_postgres() as server:
        yield server


async def test_a_database_that_was_killed_is_waited_for(
    mill: Mill, source: ChangeTopic, own_server: Postgres
) -> None:
    target, load, stop = PostgresTarget(own_server), Load(source), asyncio.Event()
    work = Apply(mill, "orders", target.url, key=["id"], workers=2, group_rows=300)
    running = asyncio.create_task(work.run(stop))

    async def until_applied(transactions: int) -> None:
        async with asyncio.timeout(120):
            while work.applied.transactions < transactions or await work.lag():
                if running.done():
                    running.result()
                if work.applied.transactions >= transactions > 0:
                    return
                await asyncio.sleep(0.005)

    for _ in range(2):
        before = work.applied.transactions
        await load.write(15)
        await until_applied(before + 1)
        await asyncio.to_thread(own_server.kill)
        await load.write(5)
        await asyncio.to_thread(own_server.start)
    await until_applied(0)
    stop.set()
    assert (await running).retries >= 1
    await check(mill, load, target, 2)


async def test_a_database_that_stays_away_ends_it_with_a_clear_error(
    mill: Mill, source: ChangeTopic
) -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    with pytest.raises(SinkError, match=r"could not be used for 0\.3 seconds") as caught:
        await apply(mill, "orders", url, key=["id"], retry_seconds=0.3)
    assert "secret" not in str(caught.value)
