"""Durable subscriptions: which member gets which events, start positions, settling."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest

import millstream
from millstream.errors import (
    ConfigError,
)
from millstream.messaging import (
    Delivery,
    Lag,
    NewEvent,
    Start,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from millstream.wire.api import parse_ack_address
from tests.integration.messaging.event_kit import ack, nothing, take
from tests.integration.messaging.topic_kit import done_with, eventually, given_up

QUICK = SubscriptionSettings(backoff=(0.05,))


async def fill(topic: Topic, count: int, first: int = 0) -> list[bytes]:
    """Events 0, 1, ... with the keys k0, k1, k2 in turn."""
    numbers = range(first, first + count)
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in numbers])
    return [b"%d" % n for n in numbers]


# -- sharing ------------------------------------------------------------------------------


async def test_a_cancelled_subscribe_leaves_nothing_open(topic: Topic, mill: Mill) -> None:
    async def use() -> None:
        async with topic.subscribe("s"):
            pytest.fail("it was cancelled before it was open")

    task = asyncio.create_task(use())
    await asyncio.sleep(0)  # the first request is on its way
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not mill.connection.intakes


async def test_members_of_one_subscription_share_the_events(
    topic: Topic, millstream_url: str
) -> None:
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

        working = asyncio.gather(work(0), work(1))
        await eventually(lambda: waiting_members(topic), 2)
        wanted = await fill(topic, 300)
        await working
    assert Counter(seen[0] + seen[1]) == Counter(wanted)
    # Both waited, so of the 40 that may be in flight each is given half, however slow the other is.
    assert min(len(seen[0]), len(seen[1])) >= 20


async def waiting_members(topic: Topic) -> int:
    return (await topic.subscriptions.info("s")).waiting_members


async def test_each_subscription_gets_every_event(topic: Topic) -> None:
    wanted = await fill(topic, 50)
    for name in ("a", "b"):
        async with topic.subscribe(name) as member:
            assert ack(await take(member, 50)) == wanted


async def test_events_of_a_partition_come_in_order(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=3)
    await fill(topic, 90)
    async with topic.subscribe("s") as member:
        taken = await take(member, 90)
    for partition in range(3):
        offsets = [d.offset for d in taken if d.partition == partition]
        assert offsets == sorted(offsets)
    assert len({d.position for d in taken}) == 90


async def test_a_subscription_continues_where_its_last_member_stopped(topic: Topic) -> None:
    wanted = await fill(topic, 10)
    async with topic.subscribe("s") as member:
        assert ack(await take(member, 4)) == wanted[:4]
    async with topic.subscribe("s") as member:
        assert sorted(ack(await take(member, 6)), key=int) == wanted[4:]


async def test_fetched_events_of_a_closed_member_go_to_the_others_immediately(
    topic: Topic,
) -> None:
    wanted = await fill(topic, 100)
    first = await topic.subscribe("s", SubscriptionSettings(ack_wait=30))
    ack(await take(first, 1))
    async with topic.subscribe("s") as second:
        await first.close()
        await first.close()
        # Long before the lease is over.
        assert sorted(ack(await take(second, 99, 15.0)), key=int) == wanted[1:]


# -- from where on ------------------------------------------------------------------------


async def test_a_subscription_starts_where_its_settings_say(topic: Topic) -> None:
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
    async with topic.subscribe("s", settings) as member:
        taken = await take(member, 6)
        assert sorted(ack(taken), key=int) == [b"%d" % n for n in range(1, 18, 3)]
        await nothing(member, 0.1)
    await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))


async def test_messages_are_chosen_by_subject(mill: Mill, topic: Topic) -> None:
    await fill(topic, 6)
    settings = SubscriptionSettings(subjects=("orders.k1", "orders.k2"))
    async with topic.subscribe("s", settings) as member:
        assert ack(await take(member, 4)) == [b"1", b"2", b"4", b"5"]
        await nothing(member, 0.1)
    await mill.jetstream.create_stream({"name": "F", "subjects": ["f.>"]})
    foreign = await mill.topic("F")
    for subject in ("f.a.1", "f.b.1", "f.a.2"):
        await mill.publish_acked(subject, subject)
    async with foreign.subscribe("s", SubscriptionSettings(subjects=("f.a.*",))) as member:
        assert [(d.subject, d.key) for d in await take(member, 2)] == [
            ("f.a.1", None),
            ("f.a.2", None),
        ]
    with pytest.raises(ConfigError, match="no keys"):
        await foreign.subscribe("k", SubscriptionSettings(keys=("a",)))


# -- settling -----------------------------------------------------------------------------


async def test_an_acknowledged_event_is_not_delivered_again(topic: Topic) -> None:
    await fill(topic, 2)
    async with topic.subscribe("s", SubscriptionSettings(ack_wait=1.0)) as member:
        one, two = await take(member, 2)
        one.ack()
        one.nack()  # the first one counts
        await two.ack_sync()
        await done_with(topic, member, 1.3)
        assert member.settled == 2


async def test_an_unsettled_event_is_delivered_again_after_its_lease(topic: Topic) -> None:
    await fill(topic, 1)
    async with topic.subscribe("s", SubscriptionSettings(ack_wait=0.2)) as member:
        began = asyncio.get_running_loop().time()
        [first] = await take(member, 1)
        [second] = await take(member, 1)
        took = asyncio.get_running_loop().time() - began
        assert (first.attempt, second.attempt) == (1, 2)
        assert took > 0.1
        second.ack()


async def test_an_extended_lease_holds_longer(topic: Topic) -> None:
    await fill(topic, 1)
    loop = asyncio.get_running_loop()
    # As long as a process may be stalled between two extensions.
    async with topic.subscribe("s", SubscriptionSettings(ack_wait=3.5)) as member:
        [delivery] = await take(member, 1)
        began = loop.time()
        while loop.time() < began + 3.7:
            await asyncio.sleep(0.2)
            delivery.extend()
        await nothing(member, 0.1)
        delivery.ack()
        delivery.extend()
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
        assert member.settled == 1


async def test_events_that_wait_in_the_member_keep_their_lease(mill: Mill, topic: Topic) -> None:
    await fill(topic, 5)
    async with (
        mill.subscribe("$JS.ACK.orders.s.>") as said,
        await topic.subscribe("s", SubscriptionSettings(ack_wait=0.5)) as member,
    ):
        ack(await take(member, 1))
        renewed: Counter[int] = Counter()
        while any(renewed[offset] < 3 for offset in range(2, 6)):
            message = await said.next(15)
            address = parse_ack_address(message.subject.encode())
            renewed[address.sequence] += message.data == b"+WPI"
        assert [d.attempt for d in await take(member, 4)] == [1, 1, 1, 1]


async def test_a_nacked_event_is_redelivered_after_the_delay(topic: Topic) -> None:
    await fill(topic, 1)
    loop = asyncio.get_running_loop()
    settings = SubscriptionSettings(backoff=(0.1, 0.3))
    async with topic.subscribe("s", settings) as member:
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
    for wait, least in zip(waits, [0.1, 0.3, 0.3, 0], strict=True):
        assert wait >= least - 0.01, waits


async def test_ack_all_covers_what_came_before(topic: Topic) -> None:
    await fill(topic, 10)
    settings = replace(QUICK, ack="all")
    async with topic.subscribe("s", settings) as member:
        taken = await take(member, 10)
        await taken[6].ack_sync()
        assert (await topic.subscriptions.info("s")).in_flight == 3
        for delivery in taken:
            delivery.nack()
        again = await take(member, 3)
        assert sorted((d.value, d.attempt) for d in again) == [
            (b"7", 2),
            (b"8", 2),
            (b"9", 2),
        ]
        await nothing(member)


async def test_without_acks_each_event_comes_once(topic: Topic) -> None:
    wanted = await fill(topic, 20)
    async with topic.subscribe("s", SubscriptionSettings(ack="none")) as member:
        assert [d.value for d in await take(member, 20)] == wanted
        await nothing(member, 0.1)
    with pytest.raises(ConfigError, match="max_deliver"):
        SubscriptionSettings(ack="none", max_deliver=3)


# -- dead letters -------------------------------------------------------------------------


async def test_deliveries_used_up_make_a_dead_letter(topic: Topic) -> None:
    await fill(topic, 2)
    settings = replace(QUICK, max_deliver=3)
    async with topic.subscribe("s", settings) as member:
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
    await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))


async def test_an_event_that_is_never_settled_becomes_a_dead_letter(topic: Topic) -> None:
    await fill(topic, 1)
    settings = SubscriptionSettings(ack_wait=0.1, max_deliver=2)
    async with topic.subscribe("s", settings) as member:
        assert [d.attempt for d in await take(member, 1)] == [1]
        assert [d.attempt for d in await take(member, 1)] == [2]
        await given_up(topic, member)
    [letter] = await (await topic.dead_letters("s")).list()
    assert letter.cause == "not settled in 2 deliveries"


async def test_a_terminated_event_is_a_dead_letter_with_its_reason(topic: Topic) -> None:
    await fill(topic, 1)
    async with topic.subscribe("s", SubscriptionSettings(dead_letter="graves")) as member:
        [delivery] = await take(member, 1)
        delivery.terminate("not\nfor us \u20ac" + "x" * 2000)
        delivery.ack()
    queue = await topic.dead_letters("s")
    assert queue.name == "graves"
    [letter] = await queue.list()
    assert letter.cause.startswith("not for us \u20acxxx")
    assert len(letter.cause) == 1000


# -- one event of a pack ------------------------------------------------------------------


async def test_a_bad_event_of_a_pack_is_retried_and_dead_lettered_on_its_own(topic: Topic) -> None:
    async with topic.producer() as producer:
        for number in range(100):
            await producer.send(b"%d" % number, f"k{number % 5}", id=f"i{number}")
    settings = replace(QUICK, max_deliver=3)
    seen: Counter[bytes] = Counter()
    async with topic.subscribe("s", settings) as member:

        async def handle(delivery: Delivery) -> None:
            seen[delivery.value] += 1
            if delivery.value == b"41":
                raise ValueError("bad")
            if delivery.value == b"42" and delivery.attempt < 3:
                raise ValueError("unlucky")

        running = asyncio.create_task(member.run(handle, concurrency=8))
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
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
    async with topic.subscribe("s") as member:
        one, two, three = await take(member, 3)
        assert (one.offset, [d.index for d in (one, two, three)]) == (1, [0, 1, 2])
        one.ack()
        await two.ack_sync()
        assert (await topic.subscriptions.lag("s")).messages == 1
        await three.ack_sync()
        assert (
            await topic.subscriptions.lag("s")
        ).messages == 0  # nothing is left that could be redelivered
        await nothing(member)
