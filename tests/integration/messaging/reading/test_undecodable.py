"""One bad message costs one event: it is named, and raised or left out as the reader chose."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import millstream.blocking
from millstream import Mill, Topic
from millstream.errors import ConfigError, RequestTimeout, Undecodable
from millstream.events.packs.packing import Packing
from millstream.tables import Table
from tests.integration.messaging.topic_kit import of_batches, of_lists, of_read

BAD_PACK = b"NATS/1.0\r\nMill-Pack: 9\r\n\r\n"


@dataclasses.dataclass
class Reading:
    sensor: int


async def bad_pack(mill: Mill, subject: str) -> None:
    await mill.connection.request(subject, b"rubbish", BAD_PACK)


async def good_and_bad(mill: Mill) -> Topic:
    """Offsets 1 and 2 are good, 3 is a pack of an unknown version, 4 and 5 are good."""
    topic = await mill.create_topic("orders")
    await topic.publish(b"1", "a")
    await topic.publish(b"2", "b")
    await bad_pack(mill, "orders.x")
    async with topic.producer() as producer:
        await producer.send(b"4", "a")
    await topic.publish(b"5", "b")
    return topic


Reader = Callable[..., Awaitable[None]]


@pytest.mark.parametrize("read", [of_read, of_lists, of_batches])
async def test_the_events_before_it_are_handed_out_then_it_is_raised(
    mill: Mill, read: Reader
) -> None:
    topic = await good_and_bad(mill)
    found: list[Any] = []
    with pytest.raises(Undecodable, match=r"orders/0, offset 3, index 0: .*'9'.*drop") as raised:
        await read(topic, found)
    assert found == [b"1", b"2"]
    error = raised.value
    assert (error.topic, error.partition, error.offset, error.index) == ("orders", 0, 3, 0)


@pytest.mark.parametrize("read", [of_read, of_lists, of_batches])
async def test_it_is_dropped_with_a_warning_or_given_to_a_function(
    mill: Mill, read: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await good_and_bad(mill)
    found: list[Any] = []
    with caplog.at_level(logging.WARNING, "millstream.messaging"):
        await read(topic, found, undecodable="drop")
    assert found == [b"1", b"2", b"4", b"5"]
    assert "orders/0, offset 3, index 0" in caplog.text
    bad: list[Undecodable] = []
    await read(topic, found, undecodable=bad.append)
    assert [error.offset for error in bad] == [3]
    with pytest.raises(ConfigError, match="choose fail, drop"):
        await read(topic, found, undecodable="ignore")


async def test_the_blocking_client_does_the_same(mill: Mill, millstream_url: str) -> None:
    await good_and_bad(mill)
    with millstream.blocking.connect(millstream_url) as blocking:
        topic = blocking.topic("orders")
        events = topic.read()
        assert [next(events).value, next(events).value] == [b"1", b"2"]
        with pytest.raises(Undecodable, match="offset 3"):
            next(events)
        assert [e.value for e in topic.read(undecodable="drop")] == [b"1", b"2", b"4", b"5"]


async def test_it_is_named_when_it_is_asked_for_by_offset_or_key(mill: Mill) -> None:
    topic = await good_and_bad(mill)
    with pytest.raises(Undecodable, match="orders/0, offset 3"):
        await topic.get(3)
    with pytest.raises(Undecodable, match="orders/0, offset 3"):
        await topic.last("x")
    assert [e.value async for e in topic.latest(undecodable="drop")] == [b"1", b"5"]


async def typed(mill: Mill) -> Topic:
    """Values that are not of the type: a plain one at offset 2, one of three in the pack at 3."""
    topic = await mill.create_topic("readings", schema=Reading)
    await topic.publish(Reading(1))
    await mill.publish_acked("readings.x", b"not json")
    raw = await mill.create_topic("raw")
    async with raw.producer(Packing(max_events=3)) as producer:
        for value in (b'{"sensor":3}', b"{}", b'{"sensor":5}'):
            await producer.send(value)
    [(_, [pack])] = [group async for group in raw.admin.read_messages(millstream.ReadPlan())]
    await mill.connection.request("readings._pack.w", pack.payload, pack.headers)
    await topic.publish(Reading(6))
    return topic


async def test_a_value_that_is_not_of_its_type_costs_one_event(mill: Mill) -> None:
    topic = await typed(mill)
    bad: list[Undecodable] = []
    events = [event async for event in topic.read(undecodable=bad.append)]
    assert [event.value.sensor for event in events] == [1, 3, 5, 6]
    assert [(error.offset, error.index) for error in bad] == [(2, 0), (3, 1)]
    lists = [events async for events in topic.read_many(undecodable=bad.append)]
    assert [[value.sensor for value in events.values] for events in lists] == [[1], [3, 5], [6]]
    assert [(error.offset, error.index) for error in bad[2:]] == [(2, 0), (3, 1)]
    with pytest.raises(Undecodable, match="readings/0, offset 3, index 1"):
        await of_lists(topic, [], start=millstream.Start.at_offset(3))
    batches = [batch async for batch in topic.batches(undecodable="drop")]
    assert [row["value"]["sensor"] for b in batches for row in b.to_pylist()] == [1, 3, 5, 6]
    found: list[Any] = []
    with pytest.raises(Undecodable, match="readings/0, offset 3, index 1"):
        await of_batches(topic, found, start=millstream.Start.at_offset(3))
    assert found == [{"sensor": 3}]


async def test_no_event_is_dropped_because_the_registry_does_not_answer(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await mill.create_topic("readings", schema=Reading)
    headers = {"Mill-Schema": "4711"}
    await mill.publish_acked("readings.x", b'{"sensor":1}', headers)

    async def silent(_: int) -> Any:
        raise RequestTimeout("$KV", 1.0)

    monkeypatch.setattr(topic.value_type, "_fetch", silent)
    with pytest.raises(RequestTimeout):
        await of_read(topic, [], undecodable="drop")


async def test_a_table_is_read_around_it(mill: Mill) -> None:
    topic = await mill.create_topic("prices", schema=Reading, history=1)
    table = Table(topic)
    await table.put("a", Reading(1))
    await mill.publish_acked("prices.b", b"not json")
    await bad_pack(mill, "prices.c")
    await table.put("d", Reading(4))
    with pytest.raises(Undecodable, match="prices/0, offset 2"):
        await table.as_dict()
    with pytest.raises(Undecodable, match="prices/0, offset 2"):
        await table.get("b")
    with pytest.raises(Undecodable, match="prices/0, offset 3"):
        await table.get("c")
    assert await table.as_dict(undecodable="drop") == {"a": Reading(1), "d": Reading(4)}
    changes = []
    async for change in table.changes(undecodable="drop"):
        changes.append(change.key)
        if change.key == "d":
            break
    assert changes == ["a", "d"]
