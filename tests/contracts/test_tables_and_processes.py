"""What tables, processes and identities promise, on both kinds of connection."""

from __future__ import annotations

from typing import Any

import pytest

from millstream import NewEvent
from millstream.errors import ConfigError, HistoryGone, WrongSequence


async def test_a_table_holds_the_latest_value_and_refuses_a_stale_writer(mill: Any) -> None:
    table = await mill.create_table("stock")
    first = await table.put("tea", b"5")
    assert await table.put("tea", b"6", revision=first) > first
    with pytest.raises(WrongSequence):
        await table.put("tea", b"7", revision=first)
    await table.put_many({"milk": b"1", "salt": b"2"})
    await table.delete("salt")
    assert await table.as_dict() == {"tea": b"6", "milk": b"1"}
    assert sorted([entry.key async for entry in table.entries()]) == ["milk", "tea"]
    assert await table.get("salt") is None
    assert table.topic.name == "stock"


async def test_a_table_is_read_as_it_was_or_says_that_it_is_forgotten(mill: Any) -> None:
    table = await mill.create_table("stock", history=2)
    await table.put("tea", b"5")
    first = (await table.get("tea")).timestamp
    await table.put("tea", b"6")
    await table.put("milk", b"1")
    past = await table.at(first)
    assert (past.name, past.time) == ("stock", first)
    assert (await past.get("tea")).value == b"5"
    assert await past.get("milk") is None
    assert [entry.key async for entry in past.entries()] == ["tea"]
    assert await past.as_dict() == {"tea": b"5"}
    await table.delete("tea")
    with pytest.raises(HistoryGone):
        await past.get("tea")


async def test_a_process_applies_a_function_once_to_each_event(mill: Any) -> None:
    numbers = await mill.create_topic("numbers")
    squares = await mill.create_topic("squares")
    await numbers.publish_many([NewEvent(b"%d" % n) for n in range(20)])

    def square(event: Any) -> Any:
        yield b"%d" % int(event.value) ** 2

    for _ in range(2):
        await mill.process(numbers, squares, square).run(once=True)
    assert [int(event.value) async for event in squares.read()] == [n * n for n in range(20)]


async def test_a_process_keeps_tables_and_writes_to_several_targets(mill: Any) -> None:
    one, two = await mill.create_topic("one"), await mill.create_topic("two")
    totals, last = await mill.create_table("totals"), await mill.create_table("last")
    large = await mill.create_topic("large")
    for topic in (one, two):
        await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 2}") for n in range(10)])

    def add(event: Any, tables: Any) -> Any:
        total = int(tables["sums"].get(event.key, b"0")) + int(event.value)
        tables["sums"][event.key] = b"%d" % total
        yield NewEvent(event.value, event.key, topic="last")
        if total > 30:
            yield NewEvent(b"%d" % total, event.key, topic="large")

    for _ in range(2):
        process = mill.process([one, two], [last, large], add, name="p", tables={"sums": totals})
        await process.run(once=True)
    assert await totals.as_dict() == {"k0": b"40", "k1": b"50"}
    assert await last.as_dict() == {"k0": b"8", "k1": b"9"}
    assert sorted([int(event.value) async for event in large.read()])[-1] == 50
    (info,) = await mill.processes()
    assert (info.name, info.source, info.target) == ("p", "one, two", "totals, last, large")
    with pytest.raises(ConfigError, match="is the state of process 'p'"):
        await mill.process(one, totals, add, name="q").run(once=True)


async def test_a_claimed_id_is_held_and_released(mill: Any) -> None:
    async with await mill.claim("till-7") as identity:
        assert (identity.client_id, identity.held) == ("till-7", True)
        assert mill.identity.client_id == "till-7"
        identity.check()
    assert identity.held is False
