"""Attacks on projections: each test states what should hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

import millstream
from millstream import EventStore, Mill
from millstream.errors import ConfigError, MillstreamError
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as connected:
        yield connected


@pytest.fixture
async def store(mill: Mill) -> EventStore:
    return await mill.event_store("accounts", Account, events=EVENTS)


@dataclass
class Count:
    n: int = 0


def counts(event: Any, rows: Any) -> None:
    row = rows.get(event.id) or Count()
    rows[event.id] = Count(row.n + 1)


def doubled(event: Any, rows: Any) -> None:
    row = rows.get(event.id) or Count()
    rows[event.id] = Count(row.n + 2)


async def test_another_source_leaves_the_record_alone(mill: Mill, store: EventStore) -> None:
    await mill.projection("counts", store, counts, schema=Count)
    other = await mill.event_store("others", Account, events=EVENTS)
    with pytest.raises(ConfigError):
        await mill.projection("counts", other, counts, schema=Count, version=5)
    (record,) = await mill.projections()
    assert set(record.versions) == {1}


async def test_two_projections_do_not_share_a_table(mill: Mill, store: EventStore) -> None:
    await store.append("a1", [Opened("ann")])
    one = await mill.projection("counts", store, counts, schema=Count)
    await one.run(once=True)
    with pytest.raises(MillstreamError):
        two = await mill.projection(
            "other", store, lambda e, t: counts(e, t["counts"]), tables={"counts": Count}
        )
        await two.run(once=True)
    assert (await (await mill.view("counts", Count)).get("a1")).n == 1


async def test_a_failure_in_an_append_takes_back_its_first_events(
    mill: Mill, store: EventStore
) -> None:
    def fails(event: Any, rows: Any) -> None:
        counts(event, rows)
        if event.data == Deposited(13):
            raise ValueError("unlucky")

    await store.append("a1", [Opened("ann"), Deposited(1)])
    await store.append("a1", [Deposited(2), Deposited(13), Deposited(3)])
    await store.append("a1", [Deposited(4)])
    found = await mill.projection("counts", store, fails, schema=Count, on_error="dead_letter")
    await found.run(once=True)
    assert (await (await mill.view("counts", Count)).get("a1")).n == 3


async def test_a_dropped_version_is_built_again(mill: Mill, store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(1)])
    one = await mill.projection("counts", store, counts, schema=Count)
    await one.run(once=True)
    two = await mill.projection("counts", store, counts, schema=Count, version=2)
    await two.rebuild()
    await one.drop(2)
    two = await mill.projection("counts", store, doubled, schema=Count, version=2)
    await two.rebuild()
    assert (await (await two.table()).as_dict())["a1"]["n"] == 4


async def test_drop_while_it_runs(mill: Mill, store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(1)])
    one = await mill.projection("counts", store, counts, schema=Count)
    await one.run(once=True)
    two = await mill.projection("counts", store, counts, schema=Count, version=2)
    running = asyncio.create_task(two.run())
    async with asyncio.timeout(10):
        while True:
            await asyncio.sleep(0.1)
            try:
                if await two.lag() == 0:
                    break
            except MillstreamError:
                continue
    await one.drop(2)
    await store.append("a1", [Deposited(1)])
    with pytest.raises(MillstreamError):
        async with asyncio.timeout(20):
            await running


async def test_two_of_the_same_version(mill: Mill, millstream_url: str, store: EventStore) -> None:
    async with millstream.connect(millstream_url) as second:
        other = await second.event_store("accounts", Account, events=EVENTS)
        one = await mill.projection("counts", store, counts, schema=Count)
        two = await second.projection("counts", other, counts, schema=Count)
        tasks = [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
        for n in range(300):
            await store.append(f"a{n % 7}", [Deposited(1)])
        async with asyncio.timeout(30):
            while True:
                rows = await (await mill.view("counts", Count)).as_dict()
                if sum(row.n for row in rows.values()) >= 300:
                    break
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        rows = await (await mill.view("counts", Count)).as_dict()
        assert sum(row.n for row in rows.values()) == 300
        for p in (one, two):
            p.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.xfail(strict=True, reason="open: review M16")
async def test_swap_back(mill: Mill, store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(1)])
    one = await mill.projection("counts", store, counts, schema=Count)
    await one.run(once=True)
    two = await mill.projection("counts", store, doubled, schema=Count, version=2)
    await two.rebuild()
    await two.swap()
    view = await mill.view("counts", Count)
    assert (await view.get("a1")).n == 4
    running = asyncio.create_task(two.run())
    await one.rebuild()
    await one.swap()
    assert (await view.get("a1")).n == 2
    async with asyncio.timeout(10):  # it was replaced as well
        assert await running is False


async def test_store_with_partitions(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, partitions=4)
    for n in range(40):
        await store.append(f"a{n}", [Deposited(1)])
    one = await mill.projection("counts", store, counts, schema=Count)
    await one.run(once=True)
    rows = await (await mill.view("counts", Count)).as_dict()
    assert len(rows) == 40


async def test_total_over_partitions(mill: Mill) -> None:
    def total(event: Any, rows: Any) -> None:
        rows["total"] = Count((rows.get("total") or Count()).n + 1)

    store = await mill.event_store("accounts", Account, events=EVENTS, partitions=4)
    for n in range(40):
        await store.append(f"a{n}", [Deposited(1)])
    try:
        one = await mill.projection("counts", store, total, schema=Count)
        await one.run(once=True)
    except MillstreamError:
        return
    assert (await (await mill.view("counts", Count)).get("total")).n == 40


async def test_view_of_two_tables_keeps_both_open(mill: Mill, store: EventStore) -> None:
    def both(event: Any, tables: Any) -> None:
        counts(event, tables["one"])
        counts(event, tables["two"])

    await store.append("a1", [Opened("ann")])
    found = await mill.projection("pair", store, both, tables={"one": Count, "two": Count})
    await found.run(once=True)
    view = await mill.view("pair", Count)
    first = await view.table("one")
    await view.table("two")
    assert await view.table("one") is first


async def test_an_async_lambda_and_a_type_that_is_new(mill: Mill, store: EventStore) -> None:
    @dataclass(frozen=True)
    class Later:
        x: int = 0

    async def slow(event: Any, rows: Any) -> None:
        counts(event, rows)

    plain = await mill.event_store("accounts")
    later = await mill.event_store("accounts", events=[Later])
    await later.append("a1", [Later(1)])
    found = await mill.projection("counts", plain, lambda e, t: slow(e, t), schema=Count)
    with pytest.raises(MillstreamError):
        await found.run(once=True)


@pytest.mark.xfail(strict=True, reason="open: review M14")
async def test_a_function_that_returns_a_value(mill: Mill, store: EventStore) -> None:
    topic = await mill.create_topic("plain")
    await topic.publish(b"1", key="a")

    def returns(event: Any, rows: Any) -> Any:
        rows["a"] = Count(1)
        return 5

    one = await mill.projection("one", topic, returns, schema=Count)
    await store.append("a1", [Opened("x")])
    two = await mill.projection("two", store, returns, schema=Count)
    results = []
    for p in (one, two):
        try:
            await p.run(once=True)
            results.append("fine")
        except MillstreamError as error:
            results.append(type(error).__name__)
    assert results[0] == results[1]


async def test_tables_of_a_version_are_not_swapped_for_others(
    mill: Mill, store: EventStore
) -> None:
    await mill.projection("p", store, counts, tables={"one": Count})
    with pytest.raises(ConfigError, match="one"):
        await mill.projection("p", store, counts, tables={"two": Count})
    (record,) = await mill.projections()
    assert record.versions[1] == ("one",)
