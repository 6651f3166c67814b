"""Subscriptions as objects: paused, moved, measured, changed, listed, deleted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millstream.deadline import now_ns
from millstream.errors import (
    ConfigError,
    SubscriptionConflict,
    SubscriptionNotFound,
)
from millstream.messaging import (
    Lag,
    NewEvent,
    Start,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from millstream.wire.aio import jetstream
from tests.integration.messaging.event_kit import ack, nothing, take
from tests.integration.messaging.topic_kit import eventually


async def fill(topic: Topic, count: int, first: int = 0) -> list[bytes]:
    """Events 0, 1, ... with the keys k0, k1, k2 in turn."""
    numbers = range(first, first + count)
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in numbers])
    return [b"%d" % n for n in numbers]


async def test_a_paused_subscription_delivers_nothing_until_it_is_resumed(topic: Topic) -> None:
    async with topic.subscribe("s") as member:
        await topic.subscriptions.pause("s")
        await fill(topic, 2)
        await nothing(member)
        assert (await topic.subscriptions.info("s")).paused
        await topic.subscriptions.resume("s")
        assert ack(await take(member, 2)) == [b"0", b"1"]
        until = await topic.subscriptions.pause("s", 0.3)
        await fill(topic, 1, first=2)
        [delivery] = await take(member, 1)
        assert datetime.now(UTC) >= until - timedelta(milliseconds=20)
        delivery.ack()
        assert not (await topic.subscriptions.info("s")).paused
    await topic.subscriptions.pause("s")
    await fill(topic, 1, first=3)
    await topic.subscriptions.resume("s")
    async with topic.subscribe("s") as member:
        assert [d.attempt for d in await take(member, 1)] == [1]  # resuming itself delivers nothing


@pytest.mark.parametrize("running", [False, True], ids=["between members", "under a member"])
async def test_a_subscription_is_moved_to_an_offset_a_time_all_and_new(
    topic: Topic, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asked a second time, because the answer is late, a running member is moved twice.
    monkeypatch.setattr(jetstream, "ATTEMPT_SECONDS", 60.0)
    await fill(topic, 5)
    await asyncio.sleep(0.01)
    moment = datetime.now(UTC)
    await fill(topic, 5, first=5)
    member = await topic.subscribe("s", SubscriptionSettings(start=Start.at_offset(4)))
    assert ack(await take(member, 7)) == [b"%d" % n for n in range(3, 10)]
    places: list[tuple[Start, list[int]]] = [
        (Start.at_offset(8), [7, 8, 9]),
        (Start.at_time(moment), [5, 6, 7, 8, 9]),
        (Start.ALL, list(range(10))),
        (Start.LAST, [9]),
        (Start.at_offset(2), list(range(1, 10))),
        (Start.NEW, []),
    ]
    for place, wanted in places:
        if not running:
            await member.close()
        await topic.subscriptions.seek("s", place)
        if not running:
            member = await topic.subscribe("s")
        taken = await take(member, len(wanted))
        assert [int(value) for value in ack(taken)] == wanted, place
        await nothing(member, 0.05)
    await topic.publish(b"10")
    assert ack(await take(member, 1)) == [b"10"]
    await member.close()
    with pytest.raises(ConfigError):
        await topic.subscriptions.seek("s", Start.LAST_PER_KEY)


async def test_lag_counts_what_is_not_settled_and_how_old_it_is(topic: Topic) -> None:
    async with topic.subscribe("s") as member:
        assert await topic.subscriptions.lag("s") == Lag(0, 0.0)
        began = now_ns()
        await fill(topic, 5)
        await asyncio.sleep(0.2)
        later = now_ns()
        await fill(topic, 5, first=5)
        await eventually(lambda: _messages(topic), 10)  # the server counts after it has acked
        lag = await topic.subscriptions.lag("s")
        assert 0.2 <= lag.seconds <= (now_ns() - began) / 1e9
        taken = await take(member, 10)
        assert (await topic.subscriptions.lag("s")).messages == 10  # delivered is not settled
        ack(taken[:5])
        await eventually(lambda: _messages(topic), 5)
        assert (await topic.subscriptions.lag("s")).seconds <= (now_ns() - later) / 1e9
        ack(taken[5:])
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))


async def _messages(topic: Topic) -> int:
    return (await topic.subscriptions.lag("s")).messages


async def test_lag_in_seconds_is_that_of_the_subscription_s_own_events(topic: Topic) -> None:
    await topic.publish(b"old", "other")
    await asyncio.sleep(0.3)
    settings = SubscriptionSettings(subjects=("orders.mine",))
    async with topic.subscribe("s", settings):
        await topic.publish(b"new", "mine")
        await eventually(lambda: _messages(topic), 1)
        lag = await topic.subscriptions.lag("s")
        [old] = await topic.get(1)
        assert lag.seconds < (now_ns() - old.timestamp_ns) / 1e9 - 0.25


async def test_a_conflict_names_what_differs_and_what_to_do(topic: Topic) -> None:
    settings = SubscriptionSettings(ack_wait=5, max_deliver=3, keys=("a",), backoff=(1, 2))
    await (await topic.subscribe("s", settings)).close()
    await (await topic.subscribe("s", settings)).close()
    assert (await topic.subscribe("s")).settings == settings
    with pytest.raises(SubscriptionConflict) as caught:
        await topic.subscribe("s", replace(settings, ack_wait=6, max_deliver=None))
    text = str(caught.value)
    assert "ack_wait: wanted 6.0, found 5.0" in text
    assert "max_deliver: wanted None, found 3" in text
    assert "topic.subscriptions.edit" in text
    assert "backoff" not in text


async def test_every_setting_survives_the_round_trip_to_the_server(topic: Topic) -> None:
    settings = SubscriptionSettings(
        start=Start.at_offset(5),
        subjects=("orders.a", "orders.b"),
        ack="all",
        ack_wait=2.5,
        backoff=(0.5, 1.5),
        max_deliver=4,
        max_in_flight=17,
        member_rate_limit=2.5,
        dead_letter="graves",
        inactive_after=3600,
        description="why",
    )
    await topic.subscribe("s", settings)
    assert (await topic.subscriptions.info("s")).settings == settings


async def test_settings_are_changed_and_the_position_is_kept(topic: Topic) -> None:
    await fill(topic, 4)
    async with topic.subscribe("s") as member:
        ack(await take(member, 2))
    changed = await topic.subscriptions.edit("s", ack_wait=7.0, max_deliver=9)
    assert (changed.ack_wait, changed.max_deliver) == (7.0, 9)
    async with topic.subscribe("s") as member:
        assert member.settings == changed
        assert sorted(ack(await take(member, 2))) == [b"2", b"3"]
    with pytest.raises(ConfigError, match="unknown"):
        await topic.subscriptions.edit("s", colour="red")
    with pytest.raises(SubscriptionNotFound):
        await topic.subscriptions.edit("other", ack_wait=1.0)


async def test_subscriptions_are_listed_and_deleted(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=2)
    await fill(topic, 6)
    for name in ("b", "a"):
        await (await topic.subscribe(name)).close()
    infos = await topic.subscriptions.list()
    assert [(info.name, info.pending, len(info.positions)) for info in infos] == [
        ("a", 6, 2),
        ("b", 6, 2),
    ]
    await topic.subscriptions.delete("a")
    assert [info.name for info in await topic.subscriptions.list()] == ["b"]
    with pytest.raises(SubscriptionNotFound):
        await topic.subscriptions.delete("a")


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": ("a",), "subjects": ("b",)},
        {"subjects": ("a..b",)},
        {"ack": "maybe"},
        {"ack_wait": 0},
        {"max_deliver": 0},
        {"max_in_flight": 0},
        {"member_rate_limit": 0},
        {"backoff": (-1.0,)},
        {"dead_letter": "a.b"},
    ],
)
def test_wrong_settings_are_refused_when_they_are_created(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SubscriptionSettings(**wrong)
