"""Topics applied to tables of PostgreSQL and SQLite."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from millstream import Mill
from millstream.cdc.model import Column
from millstream.cdc.sink.apply import Applied, Apply, apply
from millstream.errors import ConfigError, DataLoss, RowRefused, SinkError, SinkTakenOver
from millstream.messaging.topics.purging import Purge
from millstream.schemas import types as t
from tests.integration.cdc.apply_targets import PostgresTarget, SqliteTarget, Target
from tests.integration.cdc.change_topics import (
    Change,
    ChangeTopic,
    delete,
    insert,
    truncate,
    update,
)
from tests.postgres import Postgres

COLUMNS = [Column("id", t.Int()), Column("text", t.String()), Column("big", t.String())]


@pytest.fixture(params=["postgres", "sqlite"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "sqlite":
        return SqliteTarget(tmp_path / "target.db")
    found: PostgresTarget = request.getfixturevalue("server")
    return found


@pytest.fixture
def server(postgres_server: Postgres) -> PostgresTarget:
    return PostgresTarget(postgres_server)


@pytest.fixture
async def source(mill: Mill) -> AsyncIterator[ChangeTopic]:
    made = await ChangeTopic.create(mill, "orders", COLUMNS)
    yield made
    await made.close()


def row(number: int, text: str | None = "", big: str | None = "B") -> dict[str, Any]:
    return {"id": number, "text": text, "big": big}


async def once(mill: Mill, target: Target, **choices: Any) -> Applied:
    """Apply what is in the topic now."""
    choices = {"key": ["id"], **choices}
    return await apply(mill, "orders", target.url, follow=False, **choices)


async def same(source: ChangeTopic, target: Target) -> None:
    """The table has the rows of the source, column by column."""
    names = [column.name for column in source.shape.columns]
    wanted = sorted(target.plain({n: r.get(n) for n in names}) for r in source.rows.values())
    columns = ", ".join(f'"{name}"' for name in names)
    query = f'SELECT {columns} FROM "{source.name}" ORDER BY {source.shape.key[0]}'
    assert sorted(await asyncio.to_thread(target.query, query)) == wanted


# -- what is applied ----------------------------------------------------------------------


async def test_rows_are_upserted_and_deleted_and_nothing_twice(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1)), insert(row(2, None)), insert(row(3, 'a"b\\,\n'))])
    await source.write([update(row(1, "new")), delete({"id": 2}), insert(row(4))])
    first = await once(mill, target)
    assert (first.events, first.rows) == (6, 4)
    await same(source, target)
    await source.write([delete({"id": 4}), insert(row(4, "again")), delete({"id": 9})])
    second = await once(mill, target)
    assert second.events == 3
    await same(source, target)
    assert (await once(mill, target)).events == 0


EVERY_TYPE: dict[str, tuple[t.Type, Any]] = {
    "id": (t.Int(), 1),
    "small": (t.Int(16), -5),
    "huge": (t.Int(64, signed=False), 2**64 - 1),
    "exact": (t.Decimal(20, 4), Decimal("1234567890123456.7891")),
    "real": (t.Float(), 0.1),
    "flag": (t.Bool(), True),
    "text": (t.String(), 'é"\n\\N,'),
    "blank": (t.String(), ""),
    "bytes": (t.Binary(), b"\x00\xff\\"),
    "day": (t.Date(), date(1999, 12, 31)),
    "at": (t.Timestamp(), datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)),
    "wall": (t.Timestamp(utc=False), datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001
    "uid": (t.Uuid(), "0b4ebb18-5828-4f79-a68d-2e2c06d6eb4c"),
    "mood": (t.Enum("mood", ("sad", "ok")), "ok"),
    "numbers": (t.List(item=t.Nullable(of=t.Int(32))), [1, None, 3]),
    "words": (t.List(item=t.String()), ['a"', "", "NULL", "b\\,"]),
}
POSTGRES_TYPES = {
    "small": "smallint",
    "huge": "numeric(20,0)",
    "exact": "numeric(20,4)",
    "bytes": "bytea",
    "at": "timestamp with time zone",
    "wall": "timestamp without time zone",
    "uid": "uuid",
    "mood": "text",
    "numbers": "integer[]",
    "words": "text[]",
}


async def test_every_type_arrives_as_it_was_in_a_table_created_for_it(
    mill: Mill, target: Target
) -> None:
    columns = [Column(name, kind) for name, (kind, _) in EVERY_TYPE.items()]
    source = await ChangeTopic.create(mill, "orders", columns)
    full = {name: value for name, (_, value) in EVERY_TYPE.items()}
    await source.write([insert(full), insert({**dict.fromkeys(full), "id": 2})])
    await source.close()
    await once(mill, target)
    found = await asyncio.to_thread(target.query, "SELECT * FROM orders ORDER BY id")
    wanted = dict(full)
    if target.kind == "postgres":
        wanted |= {"uid": uuid.UUID(full["uid"]), "huge": Decimal(full["huge"])}
        types = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
        kinds = dict(
            await asyncio.to_thread(target.query, f"{types} WHERE attrelid = 'orders'::regclass")
        )
        assert POSTGRES_TYPES.items() <= kinds.items()
    else:
        wanted |= {"huge": str(full["huge"])}
    assert found[0] == target.plain(wanted)
    assert found[1] == target.plain({**dict.fromkeys(full), "id": 2})


async def test_columns_that_were_not_sent_keep_their_value(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(n, "a", f"big {n}")) for n in range(1, 5)])
    await once(mill, target)
    hidden = {"big": None}
    await source.write(
        [
            update({**row(1, "b"), **hidden}, unchanged=["big"]),  # the table has it
            update(row(2, "c", "second")),  # the group has it
            update({**row(2, "d"), **hidden}, unchanged=["big"]),
            insert(row(5, "e", "fifth")),
            update({**row(5, "f"), **hidden}, unchanged=["big"]),
            update({"id": 3, "text": None, "big": None}, unchanged=["text", "big"]),
            update({"id": 4, "text": None, "big": "other"}, unchanged=["text"]),
            update({"id": 4, "text": "own", "big": None}, unchanged=["big"]),
        ]
    )
    await once(mill, target)
    await same(source, target)
    assert source.rows[4,] == row(4, "own", "other")


async def test_an_update_without_a_column_needs_the_row_that_has_it(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    source.rows[1,] = row(1)  # the source has it, the topic does not
    await source.write([insert(row(2)), update({"id": 1, "text": "x"}, unchanged=["big"])])
    with pytest.raises(SinkError, match=r"key .*1.*without the column 'big'"):
        await once(mill, target)
    assert await asyncio.to_thread(target.query, "SELECT * FROM orders") == []


async def test_a_truncation_empties_the_table_in_its_place(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1)), insert(row(2)), truncate(), insert(row(3))])
    await source.write([truncate()])
    await source.write([insert(row(4)), insert(row(1, "again"))])
    assert (await once(mill, target)).truncations == 2
    await same(source, target)
    assert (await once(mill, target)).truncations == 0
    await same(source, target)


@pytest.mark.parametrize("key", [["id"], ["id", "text"]])
async def test_topics_of_rows_delete_by_the_key_of_the_event(
    mill: Mill, target: Target, key: list[str]
) -> None:
    source = await ChangeTopic.create(mill, "orders", COLUMNS, key, format="rows")
    await source.write([insert(row(1, "a")), insert(row(2, 'b"')), insert(row(3, "c"))])
    await source.write([delete({"id": 2, "text": 'b"'}), update(row(3, "c", "new"))])
    await once(mill, target, key=key)
    await same(source, target)
    await source.close()


async def test_a_table_of_millstream_is_applied_too(mill: Mill, target: Target) -> None:
    schema = t.Record(name="city", fields=(t.Field("id", t.String()), t.Field("size", t.Int())))
    table = await mill.create_table("orders", schema=schema)
    for name, size in [("bonn", 1), ("köln", 2), ("bonn", 3), ("ulm", 4)]:
        await table.put(name, {"id": name, "size": size})
    await table.delete("ulm")
    await once(mill, target)
    query = "SELECT id, size FROM orders ORDER BY size"
    assert await asyncio.to_thread(target.query, query) == [("köln", 2), ("bonn", 3)]
    await table.put("köln", {"id": "köln", "size": 9})
    await table.delete("bonn")
    await once(mill, target)
    assert await asyncio.to_thread(target.query, query) == [("köln", 9)]


# -- the table ----------------------------------------------------------------------------


async def test_a_column_of_a_later_version_is_added(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    stop = asyncio.Event()
    await source.write([insert(row(1))])
    running = asyncio.create_task(apply(mill, "orders", target.url, key=["id"], until=stop))
    await source.grow(Column("price", t.Decimal(10, 2)))
    await source.write([insert({**row(2), "price": Decimal("9.50")})])
    await _until(running, target, "SELECT count(*) FROM orders", 2)
    await source.grow(Column("tags", t.List(item=t.String())))
    await source.write([update({**row(1), "price": Decimal("1.00"), "tags": ["x"]})])
    await _until(running, target, "SELECT count(*) FROM orders WHERE price IS NOT NULL", 2)
    stop.set()
    await running
    await same(source, target)


async def test_without_create_a_missing_column_or_table_is_an_error(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    with pytest.raises(ConfigError, match=r"table orders does not exist"):
        await once(mill, target, create=False)
    await asyncio.to_thread(
        target.execute, "CREATE TABLE orders (id bigint PRIMARY KEY, text text)"
    )
    with pytest.raises(ConfigError, match=r"no column 'big'.*ADD COLUMN \"big\""):
        await once(mill, target, create=False)


async def test_a_column_of_another_type_is_an_error_that_names_it(
    mill: Mill, target: Target
) -> None:
    columns = [Column("id", t.Int()), Column("price", t.Decimal(20, 4))]
    source = await ChangeTopic.create(mill, "orders", columns)
    await source.close()
    await asyncio.to_thread(
        target.execute, "CREATE TABLE orders (id bigint PRIMARY KEY, price double precision)"
    )
    with pytest.raises(
        ConfigError, match=r"column 'price': it is double precision.*decimal\(20,4\)"
    ):
        await once(mill, target)


async def test_a_table_without_an_index_on_the_key_is_refused(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await asyncio.to_thread(target.execute, "CREATE TABLE orders (id bigint, text text, big text)")
    with pytest.raises(ConfigError, match="has no unique index on"):
        await once(mill, target)


async def test_the_key_is_that_of_the_table_or_has_to_be_given(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    with pytest.raises(ConfigError, match=r"needs key columns.*id, text, big"):
        await once(mill, target, key=())
    await asyncio.to_thread(target.execute, "CREATE TABLE orders (id bigint PRIMARY KEY)")
    await once(mill, target, key=())
    await same(source, target)


# -- positions ----------------------------------------------------------------------------


async def test_a_row_that_the_table_refuses_stops_with_its_key_and_stores_nothing(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await asyncio.to_thread(
        target.execute,
        "CREATE TABLE orders (id bigint PRIMARY KEY, text text, big text, CHECK (big <> 'bad'))",
    )
    await source.write([insert(row(n)) for n in range(300)])
    await once(mill, target)
    await source.write([insert(row(n, "", "bad" if n == 437 else "B")) for n in range(300, 600)])
    with pytest.raises(RowRefused, match=r"the row with id 437 .*[Cc]heck|CHECK") as caught:
        await once(mill, target)
    assert caught.value.key == {"id": 437}
    assert await asyncio.to_thread(target.query, "SELECT count(*) FROM orders") == [(300,)]
    await source.write([update(row(437, "", "good"))])
    await once(mill, target)  # the group has the better row now
    await same(source, target)


async def test_unique_values_may_be_exchanged_within_a_group(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await asyncio.to_thread(
        target.execute, "CREATE TABLE orders (id bigint PRIMARY KEY, text text UNIQUE, big text)"
    )
    await source.write([insert(row(n, f"text {n}")) for n in range(100)])
    await once(mill, target)
    await source.write(
        [update(row(41, "away")), update(row(42, "text 41")), update(row(41, "text 42"))]
    )
    await once(mill, target)
    await same(source, target)


async def test_a_second_one_of_the_same_name_takes_over(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    first = asyncio.create_task(apply(mill, "orders", target.url, key=["id"]))
    await _until(first, target, "SELECT count(*) FROM orders", 1)
    stop = asyncio.Event()
    owner = 'SELECT "owner" FROM millstream_positions'
    ((before,),) = await asyncio.to_thread(target.query, owner)
    second = asyncio.create_task(apply(mill, "orders", target.url, key=["id"], until=stop))
    others = f"SELECT count(*) FROM millstream_positions WHERE \"owner\" <> '{before}'"
    await _until(second, target, others, 1)
    await source.write([insert(row(2))])
    with pytest.raises(SinkTakenOver, match=r"apply 'orders' .* was taken over"):
        async with asyncio.timeout(30):
            await first
    await _until(second, target, "SELECT count(*) FROM orders", 2)
    stop.set()
    await second
    await same(source, target)


async def test_a_topic_that_was_created_again_is_noticed(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    await once(mill, target)
    await mill.delete_topic("orders")
    again = await ChangeTopic.create(mill, "orders", COLUMNS)
    await again.write([insert(row(2))])
    with pytest.raises(DataLoss, match=r"'orders/0' was deleted and created again"):
        await once(mill, target)
    await once(mill, target, fail_on_data_loss=False)
    query = "SELECT id FROM orders ORDER BY id"
    assert await asyncio.to_thread(target.query, query) == [(1,), (2,)]
    await again.close()


async def test_events_that_were_removed_before_they_were_applied_are_noticed(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    await once(mill, target)
    for number in range(2, 6):
        await source.write([insert(row(number))])
    topic = await mill.topic("orders")
    last = (await topic.info()).partitions[0].last_offset
    await topic.admin.purge(Purge(before=last))
    with pytest.raises(DataLoss, match=rf"lost the offsets \d+ to {last - 1} before they were"):
        await once(mill, target)


async def test_what_was_applied_may_be_removed(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    for commit in (2, 3):
        await source.writer.advance((commit, 0))  # a message without events
    await once(mill, target)
    topic = await mill.topic("orders")
    last = (await topic.info()).partitions[0].last_offset
    await topic.admin.purge(Purge(before=last))  # the last one is the fence of its writer
    await source.write([insert(row(2))], commit=4)
    await once(mill, target)
    await same(source, target)


async def test_a_position_belongs_to_its_table(
    mill: Mill, source: ChangeTopic, target: Target
) -> None:
    await source.write([insert(row(1))])
    await once(mill, target, name="mine")
    with pytest.raises(ConfigError, match=r"'mine' of topic 'orders' belongs to table orders"):
        await once(mill, target, name="mine", table="others")
    await asyncio.to_thread(target.execute, "DROP TABLE orders")
    with pytest.raises(SinkError, match=r"orders does not exist, but 'mine' has applied"):
        await once(mill, target, name="mine")


# -- workers ------------------------------------------------------------------------------


def _many(count: int, seed: int) -> list[Change]:
    """Changes of a few keys, many times."""
    found: list[Change] = []
    for number in range(count):
        key = (number * 7919 + seed) % 97
        if number % 13 == 5:
            found.append(delete({"id": key}))
        else:
            found.append(insert(row(key, f"{seed}.{number}")))
    return found


async def test_several_workers_make_the_same_table(
    mill: Mill, source: ChangeTopic, server: PostgresTarget
) -> None:
    for seed in range(6):
        await source.write(_many(500, seed))
    await source.write([truncate()])
    for seed in range(6):
        await source.write(_many(500, seed))
    done = await once(mill, server, workers=4, group_rows=700)
    assert done.events == 6000
    assert done.truncations == 1
    await same(source, server)


async def test_another_number_of_workers_goes_on_from_uneven_positions(
    mill: Mill, source: ChangeTopic, server: PostgresTarget
) -> None:
    await source.write(_many(500, 1))
    await once(mill, server, workers=3)
    places = 'SELECT min("offset") FROM millstream_positions'
    ((place,),) = await asyncio.to_thread(server.query, places)
    before = dict(source.rows)
    for seed in range(2, 5):
        await source.write(_many(500, seed))
    await once(mill, server, workers=3, group_rows=400)
    # As if worker 1 had been killed before its last transactions.
    mine = [n for n in range(97) if zlib.crc32(str(n).encode()) % 3 == 1]
    old = [f"({n}, '{before[n,]['text']}', 'B')" for n in mine if (n,) in before]
    await asyncio.to_thread(
        server.execute,
        f'UPDATE millstream_positions SET "offset" = {place}, last_time = 0 WHERE worker = 1',
        f"DELETE FROM orders WHERE id IN ({', '.join(map(str, mine))})",
        f"INSERT INTO orders VALUES {', '.join(old)}",
    )
    await source.write([insert(row(n, "last")) for n in mine[:5]])  # beyond all workers
    others = f"SELECT id, xmin FROM orders WHERE id NOT IN ({', '.join(map(str, mine))})"
    untouched = await asyncio.to_thread(server.query, others)
    await once(mill, server, workers=5)
    await same(source, server)
    assert await asyncio.to_thread(server.query, others) == untouched
    numbers = "SELECT worker, workers FROM millstream_positions ORDER BY worker"
    assert await asyncio.to_thread(server.query, numbers) == [(n, 5) for n in range(5)]
    await source.write(_many(500, 9))
    await once(mill, server, workers=1)
    assert await asyncio.to_thread(server.query, numbers) == [(0, 1)]
    await same(source, server)


async def test_sqlite_takes_one_worker(mill: Mill, source: ChangeTopic, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one transaction at a time"):
        Apply(mill, "orders", f"sqlite:///{tmp_path}/x.db", workers=2)


# -- helpers ------------------------------------------------------------------------------


async def _until(running: asyncio.Task[Any], target: Target, query: str, wanted: int) -> None:
    """Wait until a query gives a number."""
    found: Any = None
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while found != [(wanted,)]:
                if running.done():
                    running.result()
                try:
                    found = await asyncio.to_thread(target.query, query)
                except Exception as error:  # the table is not there yet
                    found = error
                await asyncio.sleep(0.02)
    assert found == [(wanted,)], query
