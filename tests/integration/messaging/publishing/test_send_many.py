"""Lists of events through a producer of packs: stored like those sent one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import millstream
from millstream.errors import ConfigError, ConnectionClosed, PartlyStored, Unfit
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.mill import Mill
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.event_kit import read, values
from tests.integration.messaging.topic_kit import eventually

SMALL = Packing(max_events=10, linger=30)


@dataclass(frozen=True, slots=True)
class Trade:
    symbol: str
    number: int
    at: datetime = datetime(2026, 1, 2, tzinfo=UTC)


def trades(count: int, start: int = 0) -> list[Trade]:
    return [Trade(f"s{n % 7}", n) for n in range(start, start + count)]


async def typed(mill: Mill, partitions: int) -> Topic:
    name = f"trades-{partitions}"
    await mill.create_topic(name, schema=Trade, partitions=partitions)
    return await mill.topic(name, Trade)


def by_key(events: list[Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for event in events:
        found.setdefault(event.key, []).append(event.value)
    return found


@pytest.mark.parametrize("partitions", [1, 3])
async def test_events_of_a_key_keep_their_order_however_they_are_sent(
    mill: Mill, partitions: int
) -> None:
    topic = await typed(mill, partitions)
    sent = trades(250)
    async with topic.producer(SMALL) as producer:
        await producer.send_many(sent[:3], key="symbol")
        for trade in sent[3:8]:
            await producer.send(trade, trade.symbol)
        await producer.send_many(sent[8:101], [trade.symbol.encode() for trade in sent[8:101]])
        rows = pa.table({"symbol": [t.symbol for t in sent[101:120]],
                         "number": [t.number for t in sent[101:120]],
                         "at": [t.at for t in sent[101:120]]})  # fmt: skip
        await producer.send_batch(rows, Columns(key="symbol"))
        await producer.send(sent[120], sent[120].symbol, headers={"a": "b"})
        await producer.send_many((trade for trade in sent[121:180]), key="symbol")
        await producer.send_many([], key="symbol")
        await producer.send_many(tuple(sent[180:]), (trade.symbol for trade in sent[180:]))
        assert producer.counters.produced == 250
    assert producer.counters.stored == 250
    events = await read(topic)
    assert by_key(events) == {f"s{k}": [t for t in sent if t.symbol == f"s{k}"] for k in range(7)}
    if partitions > 1:
        single = {key: topic.producer()._partition(key) for key in by_key(events)}
        assert {event.key: event.partition for event in events} == single
    # Packs are full, except where a frame or the end came.
    assert (await topic.info()).messages <= 250 // 10 + 4 * partitions


async def test_values_without_a_schema_are_taken_as_by_send(mill: Mill) -> None:
    topic = await mill.create_topic("plain")
    given: list[Any] = [b"bytes", "text", {"id": "a", "n": 1}, [1, 2], None, bytearray(b"b")]
    async with topic.producer() as producer:
        await producer.send_many(given, ["k"] * 6)
        for value in given:
            await producer.send(value, "k")
        await producer.send_many([{"id": "a"}, {"id": 7}, {"id": None}], key="id")
    events = await read(topic)
    first, second = events[:6], events[6:12]
    assert [(e.key, e.value, dict(e.headers)) for e in first] == [
        (e.key, e.value, dict(e.headers)) for e in second
    ]
    assert first[2].json() == {"id": "a", "n": 1}
    assert [event.key for event in events[12:]] == ["a", "7", None]


async def test_large_values_are_cut_into_packs_that_fit(topic: Topic) -> None:
    async with topic.producer(Packing(max_bytes=32 * 1024)) as producer:
        await producer.send_many([bytes([n]) * 10_000 for n in range(30)])
    assert await values(topic) == [bytes([n]) * 10_000 for n in range(30)]
    assert (await topic.info()).messages >= 10


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_value_that_does_not_fit_is_named_and_the_others_are_stored(
    mill: Mill, partitions: int
) -> None:
    topic = await typed(mill, partitions)
    sent: list[Any] = list(trades(30))
    sent[4] = Trade("s1", "x")  # type: ignore[arg-type]
    sent[11] = Trade("long" * 300, 11)  # its key is too long
    sent[25] = {"number": 5}
    producer = topic.producer(SMALL)
    await producer.send(sent[0], "s0")
    await producer.send_many(sent[1:], key="symbol")
    with pytest.raises(PartlyStored) as caught:
        await producer.flush()
    assert (caught.value.total, sorted(caught.value.failed)) == (30, [4, 11, 25])
    found = [caught.value.failed[index] for index in (4, 11, 25)]
    assert [(type(error), error.field) for error in found if isinstance(error, Unfit)] == [
        (Unfit, "number"), (Unfit, "symbol"), (Unfit, "symbol")
    ]  # fmt: skip
    stored = sorted(value.number for value in await values(topic))
    assert stored == [n for n in range(30) if n not in (4, 11, 25)]
    await producer.close()
    assert (producer.counters.stored, producer.counters.refused) == (27, 3)


async def test_nothing_is_taken_of_a_list_whose_keys_are_wrong(mill: Mill) -> None:
    topic = await typed(mill, 1)
    async with topic.producer(SMALL) as producer:
        for keys, key in ((["a"] * 24, None), (["a"] * 24 + [5], None), (None, "at"), (None, "no")):
            with pytest.raises(ConfigError):
                await producer.send_many(trades(25), keys, key=key)  # type: ignore[arg-type]
        assert producer.counters.produced == 0
        await producer.send_many(trades(1), key="number")
    assert [event.key for event in await read(topic)] == ["0"]
    with pytest.raises(ConnectionClosed):
        await producer.send_many([])


async def test_a_list_is_stored_after_it_has_lingered(mill: Mill) -> None:
    topic = await typed(mill, 1)
    async with topic.producer(Packing(linger=0.05)) as producer:
        await producer.send_many(trades(3), key="symbol")
        await eventually(lambda: values(topic), trades(3))
        for trade in trades(2, 3):  # and so are single events after it
            await producer.send(trade)
        await eventually(lambda: values(topic), trades(5))


async def test_a_list_waits_while_too_many_packs_are_in_flight_and_may_be_cancelled(
    millstream_url: str,
) -> None:
    async with proxy(millstream_url) as (line, url), millstream.connect(url) as mill:
        topic = await typed(mill, 1)
        producer = topic.producer(Packing(max_events=10, max_in_flight=2, linger=30))
        line.freeze()
        read_so_far = 0

        def endless() -> Iterator[Trade]:
            nonlocal read_so_far
            while True:
                read_so_far += 1
                yield Trade("s", read_so_far)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(producer.send_many(endless(), key="symbol"), 0.3)
        assert read_so_far == 30  # the third pack waits
        with pytest.raises(TimeoutError):  # it stays the next one, also when others wait too
            await asyncio.wait_for(producer.send_many(trades(25, 31), key="symbol"), 0.3)
        line.thaw()
        await producer.close()
        found = [value.number for value in await values(topic)]
        counters = producer.counters
        assert found[:30] == list(range(1, 31))
        # Of the second list the first lot was taken before the wait, none of it is lost.
        assert found[30:] == list(range(31, 41))
        assert (counters.produced, counters.stored, counters.waiting) == (40, 40, 0)


async def test_a_cancelled_send_loses_nothing(millstream_url: str) -> None:
    async with proxy(millstream_url) as (line, url), millstream.connect(url) as mill:
        topic = await typed(mill, 1)
        producer = topic.producer(Packing(max_events=5, max_in_flight=1, linger=30))
        line.freeze()
        for trade in trades(9):
            await producer.send(trade)
        with pytest.raises(TimeoutError):  # its pack is full and cannot be sent
            await asyncio.wait_for(producer.send(trades(1, 9)[0]), 0.2)
        line.thaw()
        await producer.send(trades(1, 10)[0])
        await producer.close()
        assert await values(topic) == trades(11)
