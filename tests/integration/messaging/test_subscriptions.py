"""Durable subscriptions: who gets what, from where on, and what settling means."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

import millstream
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    SubscriptionConflict,
    SubscriptionNotFound,
)
from millstream.messaging import (
    Delivery,
    Lag,
    NewEvent,
    Reject,
    Start,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from tests.integration.messaging.conftest import Until
from tests.integration.messaging.sdk import ack, nothing, take
from tests.integration.messaging.topic_tools import eventually

QUICK = SubscriptionSettings(backoff=(0.05,))


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as mill:
        yield mill


@pytest.fixture
async def topic(mill: Mill) -> Topic:
    return await mill.create_topic("orders")


async def fill(topic: Topic, count: int, first: int = 0) -> list[bytes]:
    """Events 0, 1, ... with the keys k0, k1, k2 in turn."""
    numbers = range(first, first + count)
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in numbers])
    return [b"%d" % n for n in numbers]


# -- who gets what ------------------------------------------------------------------------


async def test_members_of_one_subscription_share_the_events(
    topic: Topic, millstream_url: str
) -> None:
    wanted = await fill(topic, 300)
    shared = SubscriptionSettings(max_in_flight=40)
    async with millstream.connect(millstream_url) as second:
        members = [
            await topic.subscribe("s", shared),
            await (await second.topic("orders")).subscribe("s", shared),
        ]
        seen: list[list[bytes]] = [[], []]

        async def work(number: int) -> None:
            async for delivery in members[number]:
                seen[number].append(delivery.value)
                await asyncio.sleep(0)
                delivery.ack()
                if len(seen[0]) + len(seen[1]) == 300:
                    await asyncio.gather(*(member.close() for member in members))

        await asyncio.gather(work(0), work(1))
    assert Counter(seen[0] + seen[1]) == Counter(wanted)
    assert min(len(seen[0]), len(seen[1])) > 30


async def test_each_subscription_gets_every_event(topic: Topic) -> None:
    wanted = await fill(topic, 50)
    for name in ("a", "b"):
        async with await topic.subscribe(name) as member:
            assert ack(await take(member, 50)) == wanted


async def test_events_of_a_partition_come_in_order(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=3)
    await fill(topic, 90)
    async with await topic.subscribe("s") as member:
        taken = await take(member, 90)
    for partition in range(3):
        offsets = [d.offset for d in taken if d.partition == partition]
        assert offsets == sorted(offsets)
    assert len({d.position for d in taken}) == 90


async def test_a_subscription_goes_on_where_its_last_member_stopped(topic: Topic) -> None:
    wanted = await fill(topic, 10)
    async with await topic.subscribe("s") as member:
        assert ack(await take(member, 4)) == wanted[:4]
    async with await topic.subscribe("s") as member:
        assert sorted(ack(await take(member, 6)), key=int) == wanted[4:]


async def test_what_was_fetched_and_not_handed_out_goes_to_the_others_at_once(
    topic: Topic,
) -> None:
    wanted = await fill(topic, 100)
    first = await topic.subscribe("s", SubscriptionSettings(ack_wait=30))
    ack(await take(first, 1))
    async with await topic.subscribe("s") as second:
        await first.close()
        await first.close()
        assert sorted(ack(await take(second, 99, 5.0)), key=int) == wanted[1:]


# -- from where on ------------------------------------------------------------------------


async def test_a_subscription_starts_where_it_was_told(topic: Topic) -> None:
    await fill(topic, 4)
    await asyncio.sleep(0.01)
    moment = datetime.now(UTC)
    await fill(topic, 4, first=4)
    starts = {
        "all": (Start.ALL, [0, 1, 2, 3, 4, 5, 6, 7]),
        "last": (Start.LAST, [7]),
        "per-key": (Start.LAST_PER_KEY, [5, 6, 7]),
        "offset": (Start.at_offset(3), [2, 3, 4, 5, 6, 7]),
        "beyond": (Start.at_offset(9), []),
        "time": (Start.at_time(moment), [4, 5, 6, 7]),
        "new": (Start.NEW, []),
    }
    members = {
        name: await topic.subscribe(name, SubscriptionSettings(start=start))
        for name, (start, _) in starts.items()
    }
    await topic.publish(b"8")
    for name, (_, wanted) in starts.items():
        async with members[name] as member:
            taken = await take(member, len(wanted) + 1)
            assert ack(taken) == [b"%d" % n for n in [*wanted, 8]], name
            await nothing(member, 0.05)
    with pytest.raises(ConfigError):
        Start.at_offset(0)
    with pytest.raises(ConfigError, match="time zone"):
        Start.at_time(datetime(2026, 1, 1))  # noqa: DTZ001


async def test_events_are_chosen_by_key_also_inside_packs(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=2)
    await fill(topic, 9)
    async with topic.producer() as producer:
        for number in range(9, 18):
            await producer.send(b"%d" % number, f"k{number % 3}")
    settings = SubscriptionSettings(keys=("k1", "other.key"))
    async with await topic.subscribe("s", settings) as member:
        taken = await take(member, 6)
        assert sorted(ack(taken), key=int) == [b"%d" % n for n in range(1, 18, 3)]
        await nothing(member, 0.1)
    await eventually(lambda: topic.lag("s"), Lag(0, 0.0))


async def test_messages_are_chosen_by_subject(mill: Mill, topic: Topic) -> None:
    await fill(topic, 6)
    settings = SubscriptionSettings(subjects=("orders.k1", "orders.k2"))
    async with await topic.subscribe("s", settings) as member:
        assert ack(await take(member, 4)) == [b"1", b"2", b"4", b"5"]
        await nothing(member, 0.1)
    await mill.jetstream.create_stream({"name": "F", "subjects": ["f.>"]})
    foreign = await mill.topic("F")
    for subject in ("f.a.1", "f.b.1", "f.a.2"):
        await mill.publish_acked(subject, subject)
    async with await foreign.subscribe("s", SubscriptionSettings(subjects=("f.a.*",))) as member:
        assert [(d.subject, d.key) for d in await take(member, 2)] == [
            ("f.a.1", None),
            ("f.a.2", None),
        ]
    with pytest.raises(ConfigError, match="no keys"):
        await foreign.subscribe("k", SubscriptionSettings(keys=("a",)))


# -- settling -----------------------------------------------------------------------------


async def test_an_acknowledged_event_is_not_delivered_again(topic: Topic) -> None:
    await fill(topic, 2)
    async with await topic.subscribe("s", SubscriptionSettings(ack_wait=0.2)) as member:
        one, two = await take(member, 2)
        one.ack()
        one.nack()  # the first one counts
        await two.ack_sync()
        await nothing(member, 0.4)
        assert member.settled == 2


async def test_an_unsettled_event_is_delivered_again_after_its_lease(topic: Topic) -> None:
    await fill(topic, 1)
    async with await topic.subscribe("s", SubscriptionSettings(ack_wait=0.2)) as member:
        [first] = await take(member, 1)
        began = asyncio.get_running_loop().time()
        [second] = await take(member, 1)
        took = asyncio.get_running_loop().time() - began
        assert (first.attempt, second.attempt) == (1, 2)
        assert 0.1 < took < 1.5
        second.ack()


async def test_an_extended_lease_holds_longer(topic: Topic) -> None:
    await fill(topic, 1)
    async with await topic.subscribe("s", SubscriptionSettings(ack_wait=0.3)) as member:
        [delivery] = await take(member, 1)
        for _ in range(5):
            await asyncio.sleep(0.15)
            delivery.extend()
        await nothing(member, 0.1)
        delivery.ack()
        delivery.extend()
        await nothing(member, 0.4)


async def test_events_that_wait_in_the_member_keep_their_lease(topic: Topic) -> None:
    await fill(topic, 5)
    async with await topic.subscribe("s", SubscriptionSettings(ack_wait=0.2)) as member:
        ack(await take(member, 1))
        await asyncio.sleep(0.7)
        assert [d.attempt for d in await take(member, 4)] == [1, 1, 1, 1]


async def test_a_refused_event_comes_again_after_the_delay(topic: Topic) -> None:
    await fill(topic, 1)
    loop = asyncio.get_running_loop()
    settings = SubscriptionSettings(backoff=(0.1, 0.3))
    async with await topic.subscribe("s", settings) as member:
        gaps = []
        for delay in (None, None, None, 0.0):
            [delivery] = await take(member, 1)
            delivery.nack(delay)
            gaps.append(loop.time())
        [delivery] = await take(member, 1)
        gaps.append(loop.time())
        assert delivery.attempt == 5
        delivery.ack()
    waits = [b - a for a, b in pairwise(gaps)]
    for wait, (least, most) in zip(
        waits, [(0.1, 0.28), (0.3, 0.7), (0.3, 0.7), (0, 0.15)], strict=True
    ):
        assert least - 0.01 <= wait < most + 0.3, waits


async def test_ack_all_covers_what_came_before(topic: Topic) -> None:
    await fill(topic, 10)
    settings = SubscriptionSettings(ack="all", ack_wait=0.3)
    async with await topic.subscribe("s", settings) as member:
        taken = await take(member, 10)
        await taken[6].ack_sync()
        again = await take(member, 3)
        assert sorted((d.value, d.attempt) for d in again) == [
            (b"7", 2),
            (b"8", 2),
            (b"9", 2),
        ]


async def test_without_acks_each_event_comes_once(topic: Topic) -> None:
    wanted = await fill(topic, 20)
    async with await topic.subscribe("s", SubscriptionSettings(ack="none")) as member:
        assert [d.value for d in await take(member, 20)] == wanted
        await nothing(member, 0.1)
    with pytest.raises(ConfigError, match="max_deliver"):
        SubscriptionSettings(ack="none", max_deliver=3)


# -- dead letters -------------------------------------------------------------------------


async def test_deliveries_used_up_make_a_dead_letter(topic: Topic) -> None:
    await fill(topic, 2)
    settings = replace(QUICK, max_deliver=3)
    async with await topic.subscribe("s", settings) as member:
        attempts: list[tuple[bytes, int]] = []
        while len(attempts) < 4:
            for delivery in await take(member, 1):
                if delivery.value == b"1":
                    delivery.ack()
                else:
                    delivery.nack(reason="no luck")
                attempts.append((delivery.value, delivery.attempt))
        await nothing(member)
    assert sorted(attempts) == [(b"0", 1), (b"0", 2), (b"0", 3), (b"1", 1)]
    [letter] = await (await topic.dead_letters("s")).list()
    assert (letter.value, letter.cause, letter.attempts) == (b"0", "no luck", 3)
    assert (await topic.lag("s")).messages == 0


async def test_an_event_nobody_settles_becomes_a_dead_letter(topic: Topic) -> None:
    await fill(topic, 1)
    settings = SubscriptionSettings(ack_wait=0.1, max_deliver=2)
    async with await topic.subscribe("s", settings) as member:
        assert [d.attempt for d in await take(member, 1)] == [1]
        assert [d.attempt for d in await take(member, 1)] == [2]
        await nothing(member, 0.4)
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))
    [letter] = await (await topic.dead_letters("s")).list()
    assert letter.cause == "not settled in 2 deliveries"


async def test_a_terminated_event_is_a_dead_letter_with_its_reason(topic: Topic) -> None:
    await fill(topic, 1)
    async with await topic.subscribe("s", SubscriptionSettings(dead_letter="graves")) as member:
        [delivery] = await take(member, 1)
        delivery.terminate("not\nfor us \u20ac" + "x" * 2000)
        delivery.ack()
    queue = await topic.dead_letters("s")
    assert queue.name == "graves"
    [letter] = await queue.list()
    assert letter.cause.startswith("not for us \u20acxxx")
    assert len(letter.cause) == 1000


# -- one event of a pack ------------------------------------------------------------------


async def test_a_bad_event_of_a_pack_is_retried_and_buried_alone(topic: Topic) -> None:
    async with topic.producer() as producer:
        for number in range(100):
            await producer.send(b"%d" % number, f"k{number % 5}", id=f"i{number}")
    settings = replace(QUICK, max_deliver=3, ack_wait=1.0)
    seen: Counter[bytes] = Counter()
    async with await topic.subscribe("s", settings) as member:

        async def handle(delivery: Delivery) -> None:
            seen[delivery.value] += 1
            if delivery.value == b"41":
                raise ValueError("bad")
            if delivery.value == b"42" and delivery.attempt < 3:
                raise ValueError("unlucky")

        running = asyncio.create_task(member.run(handle, concurrency=8))
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))
        await member.close()
        await running
    assert [seen[b"%d" % n] for n in range(100)] == [1] * 41 + [3, 3] + [1] * 57
    [letter] = await (await topic.dead_letters("s")).list()
    assert (letter.value, letter.key, letter.id) == (b"41", "k1", "i41")
    assert (letter.cause, letter.attempts) == ("ValueError: bad", 3)


async def test_a_pack_is_acknowledged_with_its_last_event(topic: Topic) -> None:
    async with topic.producer() as producer:
        for number in range(3):
            await producer.send(b"%d" % number)
    async with await topic.subscribe("s", SubscriptionSettings(ack_wait=0.3)) as member:
        one, two, three = await take(member, 3)
        assert (one.offset, [d.index for d in (one, two, three)]) == (1, [0, 1, 2])
        one.ack()
        await two.ack_sync()
        assert (await topic.lag("s")).messages == 1
        await three.ack_sync()
        assert (await topic.lag("s")).messages == 0
        await nothing(member, 0.5)


# -- limits -------------------------------------------------------------------------------


async def test_no_more_events_are_in_flight_than_allowed(topic: Topic) -> None:
    await fill(topic, 50)
    async with await topic.subscribe("s", SubscriptionSettings(max_in_flight=7)) as member:
        first = await take(member, 7)
        await nothing(member)
        ack(first[:3])
        assert len(await take(member, 3)) == 3
        await nothing(member)


async def test_a_rate_limit_paces_a_member(topic: Topic) -> None:
    await fill(topic, 75)
    loop = asyncio.get_running_loop()
    async with await topic.subscribe("s", SubscriptionSettings(rate_limit=50)) as member:
        began = loop.time()
        seen = 0
        async for delivery in member:
            delivery.ack()
            seen += 1
            if seen == 75:
                break
        took = loop.time() - began
    assert 0.45 <= took < 2.0  # one second's worth at once, the rest at the rate


async def test_closing_a_paced_member_ends_its_reader(topic: Topic) -> None:
    await fill(topic, 10)
    member = await topic.subscribe("s", SubscriptionSettings(rate_limit=2))
    seen = []

    async def read() -> None:
        async for delivery in member:
            seen.append(delivery.value)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.1)
    await member.close()
    await asyncio.wait_for(reading, 2)
    assert len(seen) < 10


async def test_a_pull_gives_what_is_there_and_waits_no_longer_than_told(topic: Topic) -> None:
    loop = asyncio.get_running_loop()
    async with await topic.subscribe("s") as member:
        began = loop.time()
        assert await member.pull(10, 0.2) == []
        assert 0.19 <= loop.time() - began < 1.0
        await fill(topic, 3)
        assert [d.value for d in await take(member, 3)] == [b"0", b"1", b"2"]
        await fill(topic, 30, first=3)
        assert len(await member.pull(5)) <= 5
        with pytest.raises(ConfigError):
            await member.pull(0)


async def test_several_readers_of_one_member_share_its_events(topic: Topic) -> None:
    member = await topic.subscribe("s")
    seen: list[bytes] = []

    async def read() -> None:
        async for delivery in member:
            seen.append(delivery.value)
            delivery.ack()
            await asyncio.sleep(0)

    readers = [asyncio.create_task(read()) for _ in range(3)]
    wanted = []
    for round_ in range(5):
        wanted += await fill(topic, 20, first=20 * round_)
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))
    await member.close()
    await asyncio.wait_for(asyncio.gather(*readers), 2)
    assert sorted(seen, key=int) == wanted


# -- handlers -----------------------------------------------------------------------------


async def test_a_handler_is_called_for_each_event_and_its_errors_mean_again(topic: Topic) -> None:
    await fill(topic, 30)
    seen: Counter[bytes] = Counter()
    running = most = 0

    async def handle(delivery: Delivery) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen[delivery.value] += 1
        await asyncio.sleep(0.005)
        running -= 1
        if delivery.value == b"7" and delivery.attempt == 1:
            raise ValueError("once")
        if delivery.value == b"8":
            raise Reject("never")

    async with await topic.subscribe("s", QUICK) as member:
        task = asyncio.create_task(member.run(handle, concurrency=5))
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))
        await member.close()
        await asyncio.wait_for(task, 2)
    assert most == 5
    assert seen == Counter({b"%d" % n: 2 if n == 7 else 1 for n in range(30)})
    [letter] = await (await topic.dead_letters("s")).list()
    assert (letter.value, letter.cause) == (b"8", "never")


async def test_one_handler_at_a_time_keeps_the_order(topic: Topic) -> None:
    wanted = await fill(topic, 50)
    seen: list[bytes] = []

    def handle(delivery: Delivery) -> None:  # a plain function runs in a thread
        seen.append(delivery.value)

    async with await topic.subscribe("s") as member:
        task = asyncio.create_task(member.run(handle))
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))
        await member.close()
        await task
    assert seen == wanted


async def test_a_handler_that_takes_longer_than_the_lease_is_called_once(topic: Topic) -> None:
    await fill(topic, 2)
    calls = []

    async def slow(delivery: Delivery) -> None:
        calls.append(delivery.value)
        await asyncio.sleep(0.7)

    async with await topic.subscribe("s", SubscriptionSettings(ack_wait=0.2)) as member:
        task = asyncio.create_task(member.run(slow))
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))
        await member.close()
        await task
    assert calls == [b"0", b"1"]


async def test_a_run_whose_subscription_is_deleted_ends_with_that_error(topic: Topic) -> None:
    async with await topic.subscribe("s") as member:
        task = asyncio.create_task(member.run(lambda _delivery: None))
        await eventually(lambda: _waiting(topic), True)
        await topic.delete_subscription("s")
        with pytest.raises(SubscriptionNotFound, match="deleted"):
            await asyncio.wait_for(task, 5)


async def _waiting(topic: Topic) -> bool:
    return (await topic.subscription_info("s")).waiting_members > 0


async def test_a_reader_of_a_closed_connection_is_told(millstream_url: str) -> None:
    mill = await millstream.connect(millstream_url)
    topic = await mill.create_topic("orders")
    member = await topic.subscribe("s")
    reading = asyncio.create_task(member.pull(1, None))
    await asyncio.sleep(0.05)
    await mill.close()
    with pytest.raises(ConnectionClosed):
        await reading
    await member.close()


# -- administration -----------------------------------------------------------------------


async def test_a_paused_subscription_delivers_nothing_until_it_is_resumed(topic: Topic) -> None:
    async with await topic.subscribe("s") as member:
        await topic.pause("s")
        await fill(topic, 2)
        await nothing(member)
        assert (await topic.subscription_info("s")).paused
        await topic.resume("s")
        assert ack(await take(member, 2)) == [b"0", b"1"]
        until = await topic.pause("s", 0.3)
        await fill(topic, 1, first=2)
        [delivery] = await take(member, 1)
        assert datetime.now(UTC) >= until - timedelta(milliseconds=20)
        delivery.ack()
        assert not (await topic.subscription_info("s")).paused
    await topic.pause("s")
    await fill(topic, 1, first=3)
    await topic.resume("s")
    async with await topic.subscribe("s") as member:
        assert [d.attempt for d in await take(member, 1)] == [1]  # resuming delivers to nobody


@pytest.mark.parametrize("running", [False, True], ids=["between members", "under a member"])
async def test_a_subscription_is_moved_to_an_offset_a_time_all_and_new(
    topic: Topic, running: bool
) -> None:
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
        await topic.seek("s", place)
        if not running:
            member = await topic.subscribe("s")
        taken = await take(member, len(wanted))
        assert [int(value) for value in ack(taken)] == wanted, place
        await nothing(member, 0.05)
    await topic.publish(b"10")
    assert ack(await take(member, 1)) == [b"10"]
    await member.close()
    with pytest.raises(ConfigError):
        await topic.seek("s", Start.LAST_PER_KEY)


async def test_lag_counts_what_is_not_settled_and_how_old_it_is(topic: Topic) -> None:
    async with await topic.subscribe("s") as member:
        assert await topic.lag("s") == Lag(0, 0.0)
        await fill(topic, 5)
        await asyncio.sleep(0.2)
        await fill(topic, 5, first=5)
        lag = await topic.lag("s")
        assert lag.messages == 10
        assert 0.2 <= lag.seconds < 5
        taken = await take(member, 10)
        assert (await topic.lag("s")).messages == 10  # delivered is not settled
        ack(taken[:5])
        await eventually(lambda: _messages(topic), 5)
        assert (await topic.lag("s")).seconds < lag.seconds + 0.2
        ack(taken[5:])
        await eventually(lambda: topic.lag("s"), Lag(0, 0.0))


async def _messages(topic: Topic) -> int:
    return (await topic.lag("s")).messages


async def test_lag_in_seconds_is_that_of_the_subscription_s_own_events(topic: Topic) -> None:
    await topic.publish(b"old", "other")
    await asyncio.sleep(0.3)
    settings = SubscriptionSettings(subjects=("orders.mine",))
    async with await topic.subscribe("s", settings):
        await topic.publish(b"new", "mine")
        lag = await topic.lag("s")
        assert lag.messages == 1
        assert lag.seconds < 0.3


async def test_a_conflict_names_what_differs_and_what_to_do(topic: Topic) -> None:
    settings = SubscriptionSettings(ack_wait=5, max_deliver=3, keys=("a",), backoff=(1, 2))
    await (await topic.subscribe("s", settings)).close()
    await (await topic.subscribe("s", settings)).close()
    assert (await topic.subscribe("s")).settings == settings
    with pytest.raises(SubscriptionConflict) as caught:
        await topic.subscribe("s", replace(settings, ack_wait=6, max_deliver=None))
    text = str(caught.value)
    assert "ack_wait: wanted 6, found 5.0" in text
    assert "max_deliver: wanted None, found 3" in text
    assert "edit_subscription" in text
    assert "backoff" not in text


async def test_every_setting_survives_the_way_to_the_server(topic: Topic) -> None:
    settings = SubscriptionSettings(
        start=Start.at_offset(5),
        subjects=("orders.a", "orders.b"),
        ack="all",
        ack_wait=2.5,
        backoff=(0.5, 1.5),
        max_deliver=4,
        max_in_flight=17,
        rate_limit=2.5,
        dead_letter="graves",
        inactive_after=3600,
        description="why",
    )
    await topic.subscribe("s", settings)
    assert (await topic.subscription_info("s")).settings == settings


async def test_settings_are_changed_and_the_place_is_kept(topic: Topic) -> None:
    await fill(topic, 4)
    async with await topic.subscribe("s") as member:
        ack(await take(member, 2))
    changed = await topic.edit_subscription("s", ack_wait=7.0, max_deliver=9)
    assert (changed.ack_wait, changed.max_deliver) == (7.0, 9)
    async with await topic.subscribe("s") as member:
        assert member.settings == changed
        assert sorted(ack(await take(member, 2))) == [b"2", b"3"]
    with pytest.raises(ConfigError, match="unknown"):
        await topic.edit_subscription("s", colour="red")
    with pytest.raises(SubscriptionNotFound):
        await topic.edit_subscription("other", ack_wait=1.0)


async def test_subscriptions_are_listed_and_deleted(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=2)
    await fill(topic, 6)
    for name in ("b", "a"):
        await (await topic.subscribe(name)).close()
    infos = await topic.subscriptions()
    assert [(info.name, info.pending, len(info.places)) for info in infos] == [
        ("a", 6, 2),
        ("b", 6, 2),
    ]
    await topic.delete_subscription("a")
    assert [info.name for info in await topic.subscriptions()] == ["b"]
    with pytest.raises(SubscriptionNotFound):
        await topic.delete_subscription("a")


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": ("a",), "subjects": ("b",)},
        {"subjects": ("a..b",)},
        {"ack": "maybe"},
        {"ack_wait": 0},
        {"max_deliver": 0},
        {"max_in_flight": 0},
        {"rate_limit": 0},
        {"backoff": (-1.0,)},
        {"dead_letter": "a.b"},
    ],
)
def test_wrong_settings_are_refused_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SubscriptionSettings(**wrong)


async def test_drain_waits_for_handlers_and_for_what_they_publish(
    millstream_url: str, until: Until
) -> None:
    mill = await millstream.connect(millstream_url)
    topic = await mill.create_topic("orders")
    results = await mill.create_topic("results")
    await fill(topic, 20)
    started: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        started.append(delivery.value)
        await asyncio.sleep(0.1)
        await results.publish(delivery.value)

    member = await topic.subscribe("s")
    task = asyncio.create_task(member.run(handle, concurrency=4))
    await until(lambda: len(started) >= 4)
    await mill.drain()
    await task
    async with millstream.connect(millstream_url) as other:
        stored = [event.value async for event in (await other.topic("results")).read()]
        assert sorted(stored, key=int) == sorted(started, key=int)
        lag = await (await other.topic("orders")).lag("s")
        assert lag.messages == 20 - len(started)
