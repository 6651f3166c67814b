"""Whole transactions from the topics of several tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream import Mill
from millstream.cdc.model import Column
from millstream.cdc.whole_transactions import Transaction, transactions
from millstream.errors import CaptureError, ConfigError, DataLoss
from millstream.schemas import types as t
from tests.integration.cdc.change_topics import ChangeTopic, delete, insert, update

COLUMNS = [Column("id", t.Int()), Column("text", t.String())]
TOPICS = ["orders", "items"]


@pytest.fixture
async def orders(mill: Mill) -> AsyncIterator[ChangeTopic]:
    made = await ChangeTopic.create(mill, "orders", COLUMNS)
    yield made
    await made.close()


@pytest.fixture
async def items(mill: Mill) -> AsyncIterator[ChangeTopic]:
    made = await ChangeTopic.create(mill, "items", COLUMNS)
    yield made
    await made.close()


async def advance(commit: int, *topics: ChangeTopic) -> None:
    """What the heartbeat of a capture does."""
    for topic in topics:
        await topic.writer.advance((commit, 0))


async def ready(mill: Mill, **choices: Any) -> list[Transaction]:
    found = transactions(mill, TOPICS, capture="test", follow=False, **choices)
    return [one async for one in found]


def summary(found: list[Transaction]) -> list[tuple[int, list[tuple[str, str, str | None]]]]:
    return [(one.commit, [(r.table, r.op, r.key) for r in one.rows]) for one in found]


async def test_a_transaction_over_two_topics_comes_whole_and_in_order(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    await items.write([insert({"id": 7, "text": "b"})], commit=10, first=2, total=3)
    await orders.write([insert({"id": 1, "text": "a"})], commit=10, first=1, total=3)
    await orders.write([update({"id": 1, "text": "c"})], commit=10, first=3, total=3)
    await items.write([update({"id": 7, "text": "d"})], commit=12)
    await orders.write([insert({"id": 2, "text": "e"})], commit=11)
    await advance(13, orders, items)
    found = await ready(mill)
    assert summary(found) == [
        (
            10,
            [("public.orders", "c", "1"), ("public.items", "c", "7"), ("public.orders", "u", "1")],
        ),
        (11, [("public.orders", "c", "2")]),
        (12, [("public.items", "u", "7")]),
    ]
    assert all(one.complete for one in found)
    assert found[0].rows[2].after == {"id": 1, "text": "c"}
    assert (found[0].id, found[0].total) == ("tx10", 3)


async def test_nothing_is_delivered_before_every_topic_is_written_past_it(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    await orders.write([insert({"id": 1, "text": "a"})], commit=10)
    assert await ready(mill) == []  # items may have an earlier one
    await advance(10, items)
    assert [one.commit for one in await ready(mill)] == [10]


async def test_a_transaction_with_rows_elsewhere_comes_once_no_topic_can_bring_more(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    await orders.write([insert({"id": 1, "text": "a"})], commit=10, total=2)
    await advance(10, items)
    assert await ready(mill) == []
    await advance(11, orders, items)
    (found,) = await ready(mill)
    assert (found.total, len(found.rows), found.complete) == (2, 1, False)


async def test_a_deletion_waits_for_the_other_half_of_a_change_of_key(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    await orders.write([delete({"id": 1})], commit=10)
    await advance(11, items)
    assert await ready(mill) == []
    await advance(11, orders)
    assert summary(await ready(mill)) == [(10, [("public.orders", "d", "1")])]


async def test_reading_goes_on_where_it_stopped(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    for commit in range(1, 30):
        topic = orders if commit % 2 else items
        await topic.write([insert({"id": commit, "text": "x"})] * 3, commit=commit)
        if commit % 5 == 0:
            await advance(commit, orders if topic is items else items)
    await advance(30, orders, items)
    whole = await ready(mill)
    assert [one.commit for one in whole] == list(range(1, 30))
    for stop in (0, 1, 7, 28):
        rest = await ready(mill, start=whole[stop].resume)
        assert summary(rest) == summary(whole[stop + 1 :])


async def test_new_transactions_arrive_while_following(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    found = transactions(mill, TOPICS, capture="test")
    first = asyncio.create_task(anext(found))
    await orders.write([insert({"id": 1, "text": "a"})], commit=5)
    await advance(6, items)
    async with asyncio.timeout(30):
        assert (await first).commit == 5
        await items.write([insert({"id": 1, "text": "a"})], commit=7)
        await advance(8, orders)
        assert (await anext(found)).commit == 7
    await found.aclose()


async def test_a_transaction_larger_than_the_limit_is_refused(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    rows = [insert({"id": number, "text": "x"}) for number in range(50)]
    await orders.write(rows, commit=10, total=51)
    with pytest.raises(CaptureError, match=r"more than 40 rows are held.*raise max_rows"):
        await ready(mill, max_rows=40)


async def test_a_topic_that_the_capture_does_not_write_is_refused(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    with pytest.raises(ConfigError, match=r"'orders' was never written by capture 'other'"):
        await anext(transactions(mill, TOPICS, capture="other"))


async def test_a_topic_that_was_created_again_is_noticed(
    mill: Mill, orders: ChangeTopic, items: ChangeTopic
) -> None:
    await orders.write([insert({"id": 1, "text": "a"})], commit=5)
    await advance(6, orders, items)
    (found,) = await ready(mill)
    await mill.delete_topic("items")
    again = await ChangeTopic.create(mill, "items", COLUMNS)
    with pytest.raises(DataLoss, match="'items/0' was deleted and created again"):
        await ready(mill, start=found.resume)
    await again.close()
