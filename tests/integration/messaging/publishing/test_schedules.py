"""Schedules: events that the broker stores by itself, and what becomes of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import Broker, BrokerSettings
from millstream.errors import ConfigError, Unfit
from millstream.messaging import PublishOptions, Topic
from millstream.mill import Mill
from tests.integration.messaging.topic_kit import eventually


@dataclass
class Reading:
    celsius: int


LATER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


async def first(topic: Topic, count: int, after: int = 0) -> list[millstream.Event]:
    """The first events that are stored after a moment."""
    found: list[millstream.Event] = []
    async with asyncio.timeout(60):
        async for event in topic.read(follow=True):
            if event.timestamp_ns > after:
                found.append(event)
            if len(found) == count:
                return found
    raise AssertionError


async def test_a_recurring_schedule_stores_ordinary_events_until_it_is_cancelled(
    mill: Mill,
) -> None:
    topic = await mill.create_topic("t", schedules=True, partitions=3, max_age="1h")
    made = await topic.schedules.set("beat", {"n": 1}, "k", headers={"own": "x"}, every="1s")
    assert (made.name, made.rule, made.key, made.value) == ("beat", "@every 1s", "k", b'{"n":1}')
    assert made.next is None
    events = await first(topic, 3)
    # Each is an event of its own: no id makes one a duplicate of another.
    assert [(e.key, e.json(), e.headers["own"], e.id) for e in events] == [
        ("k", {"n": 1}, "x", None)
    ] * 3
    assert len({event.offset for event in events}) == 3
    assert {event.partition for event in events} == {made.partition}
    assert events[0].timestamp_ns < events[1].timestamp_ns
    due = await topic.schedules.get("beat")
    assert due is not None
    assert due.next is not None
    assert await topic.schedules.cancel("beat")
    assert not await topic.schedules.cancel("beat")
    assert await topic.schedules.list() == []


async def test_a_schedule_is_replaced_listed_and_moved_between_partitions(mill: Mill) -> None:
    topic = await mill.create_topic("t", schedules=True, partitions=4)
    await topic.schedules.set("a", b"1", "k", at=LATER)
    await topic.schedules.set("a", b"2", "other", cron="0 3 * * *", time_zone="Europe/Berlin")
    await topic.schedules.set("b", None, at=LATER)
    once = PublishOptions(deliver_at=LATER)
    await topic.publish(b"later", "k", id="one.time", options=once)
    listed = await topic.schedules.list()
    assert [(s.name, s.rule, s.time_zone, s.key, s.value, s.once) for s in listed] == [
        ("a", "0 0 3 * * *", "Europe/Berlin", "other", b"2", False),
        ("b", f"@at {LATER:%Y-%m-%dT%H:%M:%SZ}", None, None, None, True),
        ("one.time", f"@at {LATER:%Y-%m-%dT%H:%M:%SZ}", None, "k", b"later", True),
    ]
    assert [s.next for s in listed] == [None, LATER, LATER]
    assert len(await topic.schedules.list(limit=2)) == 2
    # The records themselves are no events, for nobody.
    assert [event async for event in topic.read()] == []
    assert await topic.schedules.cancel("one.time")
    assert [s.name for s in await topic.schedules.list()] == ["a", "b"]
    assert [event async for event in topic.read()] == []


async def test_a_schedule_of_a_typed_topic_is_checked_when_it_is_set(mill: Mill) -> None:
    topic = await mill.create_topic("typed", schema=Reading, schedules=True)
    await topic.schedules.set("s", Reading(5), "k", every=1)
    (event,) = await first(await mill.topic("typed", type=Reading), 1)
    assert event.value == Reading(5)
    with pytest.raises(Unfit):
        await topic.schedules.set("s", {"celsius": "warm"}, "k", every=1)


async def test_a_schedule_that_would_not_last_is_refused(mill: Mill) -> None:
    kinds: list[tuple[dict[str, Any], str]] = [
        ({}, "create it with schedules=True"),
        ({"schedules": True, "retention": "workqueue"}, "retention workqueue"),
        ({"schedules": True, "max_messages": 5}, "has max_messages"),
        ({"schedules": True, "max_age": "1h", "message_ttl": False}, "set message_ttl"),
    ]
    for number, (settings, reason) in enumerate(kinds):
        topic = await mill.create_topic(f"t{number}", **settings)
        with pytest.raises(ConfigError, match=reason):
            await topic.schedules.set("s", b"x", every="1m")
    topic = await mill.create_topic("good", schedules=True)
    with pytest.raises(ConfigError, match="does not accept '99 99"):
        await topic.schedules.set("s", b"x", cron="99 99 * * * *")
    with pytest.raises(ConfigError, match="time zone 'Europe/Nowhere'"):
        await topic.schedules.set("s", b"x", cron="0 3 * * *", time_zone="Europe/Nowhere")
    assert await topic.schedules.list() == []


async def test_the_ttl_of_a_scheduled_event_counts_from_when_it_is_due(mill: Mill) -> None:
    topic = await mill.create_topic("t", schedules=True)
    due = datetime.now(UTC) + timedelta(seconds=2.5)
    await topic.publish(b"x", "k", options=PublishOptions(deliver_at=due, ttl=1))
    (event,) = await first(topic, 1)  # it was not removed after one second
    assert event.timestamp >= due - timedelta(milliseconds=50)
    await eventually(lambda: topic.last("k"), None)


async def test_an_event_that_the_topic_would_lose_before_it_is_due_is_refused(mill: Mill) -> None:
    once = PublishOptions(deliver_at=LATER)
    for retention in ("workqueue", "interest"):
        topic = await mill.create_topic(retention, schedules=True, retention=retention)
        with pytest.raises(ConfigError, match=f"deliver_at: this topic has retention {retention}"):
            await topic.publish(b"x", options=once)
    topic = await mill.create_topic("short", schedules=True, max_age="1h")
    with pytest.raises(ConfigError, match="is later than the topic's max_age, 1h"):
        await topic.publish(b"x", options=once)
    soon = datetime.now(UTC) + timedelta(minutes=30)
    await topic.publish(b"x", id="soon", options=PublishOptions(deliver_at=soon))
    await topic.schedules.set("later", b"x", at=LATER)
    assert [schedule.name for schedule in await topic.schedules.list()] == ["later", "soon"]


async def test_a_schedule_itself_is_no_event_for_any_reader(mill: Mill) -> None:
    topic = await mill.create_topic("t", schedules=True)
    await topic.schedules.set("s", b"record", "k", at=LATER)
    await topic.publish(b"record", "k", options=PublishOptions(deliver_at=LATER))
    await topic.publish(b"event", "k")
    found: list[object] = []
    async with asyncio.timeout(60):
        async with topic.subscribe("sub") as subscription:
            async for delivery in subscription:
                found.append(delivery.value)
                delivery.ack()
                break
        async with topic.group("g") as group:

            async def handle(event: millstream.Event) -> None:
                found.append(event.value)
                await group.stop()

            await group.run(handle)
    last = await topic.last("k")
    assert last is not None
    assert [*found, last.value] == [b"event"] * 3
    assert [event.value async for event in topic.read()] == [b"event"]
    reports = [report async for report in topic.admin.verify()]
    assert (reports[-1].events, reports[-1].flaw_count) == (1, 0)
    assert (await mill.count_events("t")).events == 1


async def test_after_a_restart_what_was_missed_is_stored_once(tmp_path: Path) -> None:
    with Broker(BrokerSettings(data=tmp_path)) as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.create_topic("t", schedules=True)
            await topic.schedules.set("often", b"x", "often", every=1)
            await topic.schedules.set("rare", b"x", "rare", every="1h")
            await first(topic, 1)
        broker.stop()
        stopped = time.time_ns()
        await asyncio.sleep(3.2)  # it would have been due three times
        broker.start()
        async with millstream.connect(broker.url) as mill:
            topic = await mill.topic("t")
            one, another = await first(topic, 2, after=stopped)
            # One for all that were missed, and then the next one in its time.
            assert another.timestamp_ns - one.timestamp_ns > 500_000_000
            assert {one.key, another.key} == {"often"}
            assert {s.name for s in await topic.schedules.list()} == {"often", "rare"}
