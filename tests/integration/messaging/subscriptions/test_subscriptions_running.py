"""Members at work: limits, pulls, several readers, handlers and how they end."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import millstream
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    SubscriptionNotFound,
)
from millstream.messaging import (
    Delivery,
    Lag,
    NewEvent,
    Reject,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from tests.integration.messaging.conftest import Until
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.event_kit import ack, nothing, take
from tests.integration.messaging.topic_kit import eventually

QUICK = SubscriptionSettings(backoff=(0.05,))


async def fill(topic: Topic, count: int, first: int = 0) -> list[bytes]:
    """Events 0, 1, ... with the keys k0, k1, k2 in turn."""
    numbers = range(first, first + count)
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in numbers])
    return [b"%d" % n for n in numbers]


async def test_no_more_events_are_in_flight_than_allowed(topic: Topic) -> None:
    await fill(topic, 50)
    async with topic.subscribe("s", SubscriptionSettings(max_in_flight=7)) as member:
        first = await take(member, 7)
        await nothing(member)
        ack(first[:3])
        assert len(await take(member, 3)) == 3
        await nothing(member)


async def test_a_rate_limit_paces_a_member(topic: Topic) -> None:
    await fill(topic, 75)
    loop = asyncio.get_running_loop()
    async with topic.subscribe("s", SubscriptionSettings(member_rate_limit=50)) as member:
        began = loop.time()
        seen = 0
        async for delivery in member:
            delivery.ack()
            seen += 1
            if seen == 75:
                break
        took = loop.time() - began
    assert 0.45 <= took < 20  # one second's worth immediately, the rest at the rate


async def test_closing_a_paced_member_ends_its_reader(topic: Topic, until: Until) -> None:
    await fill(topic, 10)
    member = await topic.subscribe("s", SubscriptionSettings(member_rate_limit=2))
    seen = []

    async def read() -> None:
        async for delivery in member:
            seen.append(delivery.value)

    reading = asyncio.create_task(read())
    await until(lambda: len(seen) >= 2)  # one second's worth immediately, then it waits
    await member.close()
    await asyncio.wait_for(reading, 15)
    assert len(seen) < 10


async def test_a_pull_gives_what_is_available_and_waits_no_longer_than_its_timeout(
    topic: Topic,
) -> None:
    loop = asyncio.get_running_loop()
    async with topic.subscribe("s") as member:
        patient = asyncio.create_task(member.pull(10, 60))
        began = loop.time()
        assert await member.pull(10, 0.2) == []
        assert loop.time() - began >= 0.19
        assert not patient.done()
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)
        await fill(topic, 3)
        assert [d.value for d in await take(member, 3)] == [b"0", b"1", b"2"]
        await fill(topic, 30, first=3)
        assert len(await member.pull(5)) <= 5
        with pytest.raises(ConfigError):
            await member.pull(0)


async def test_several_readers_of_one_member_share_its_events(topic: Topic, until: Until) -> None:
    member = await topic.subscribe("s")
    seen: list[bytes] = []

    async def read() -> None:
        async for delivery in member:
            seen.append(delivery.value)
            delivery.ack()
            await asyncio.sleep(0)

    readers = [asyncio.create_task(read()) for _ in range(3)]
    wanted: list[bytes] = []
    for goal in range(20, 101, 20):
        wanted += await fill(topic, 20, first=len(wanted))
        await until(lambda goal=goal: len(seen) >= goal)
    await member.close()
    await asyncio.wait_for(asyncio.gather(*readers), 15)
    assert sorted(seen, key=int) == wanted


# -- handlers -----------------------------------------------------------------------------


async def test_a_handler_is_called_for_each_event_and_its_errors_cause_retries(
    topic: Topic,
) -> None:
    await fill(topic, 30)
    seen: Counter[bytes] = Counter()
    running = most = 0
    busy = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen[delivery.value] += 1
        if running == 5:
            busy.set()
        await busy.wait()
        await asyncio.sleep(0.005)
        running -= 1
        if delivery.value == b"7" and delivery.attempt == 1:
            raise ValueError("once")
        if delivery.value == b"8":
            raise Reject("never")

    async with topic.subscribe("s", QUICK) as member:
        task = asyncio.create_task(member.run(handle, concurrency=5))
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
        await member.close()
        await asyncio.wait_for(task, 15)
    assert most == 5
    assert seen == Counter({b"%d" % n: 2 if n == 7 else 1 for n in range(30)})
    [letter] = await (await topic.dead_letters("s")).list()
    assert (letter.value, letter.cause) == (b"8", "never")


async def test_one_handler_at_a_time_keeps_the_order(topic: Topic) -> None:
    wanted = await fill(topic, 50)
    seen: list[bytes] = []

    def handle(delivery: Delivery) -> None:  # a plain function runs in a thread
        seen.append(delivery.value)

    async with topic.subscribe("s") as member:
        task = asyncio.create_task(member.run(handle))
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
        await member.close()
        await task
    assert seen == wanted


async def test_a_handler_that_takes_longer_than_the_lease_is_called_once(topic: Topic) -> None:
    await fill(topic, 2)
    calls = []

    async def slow(delivery: Delivery) -> None:
        calls.append(delivery.value)
        if delivery.value == b"0":
            await asyncio.sleep(6.7)

    # It is renewed after half its time; the other half is for a process that is stalled.
    async with topic.subscribe("s", SubscriptionSettings(ack_wait=6.5)) as member:
        task = asyncio.create_task(member.run(slow))
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
        await member.close()
        await task
    assert calls == [b"0", b"1"]


async def test_a_run_whose_subscription_is_deleted_ends_with_that_error(topic: Topic) -> None:
    async with topic.subscribe("s") as member:
        task = asyncio.create_task(member.run(lambda _delivery: None))
        await eventually(lambda: _waiting(topic), True)
        await topic.subscriptions.delete("s")
        with pytest.raises(SubscriptionNotFound, match="deleted"):
            await asyncio.wait_for(task, 30)


async def _waiting(topic: Topic) -> bool:
    return (await topic.subscriptions.info("s")).waiting_members > 0


async def test_reading_from_a_closed_connection_raises(millstream_url: str) -> None:
    mill = await millstream.connect(millstream_url)
    topic = await mill.create_topic("orders")
    member = await topic.subscribe("s")
    reading = asyncio.create_task(member.pull(1, None))
    await asyncio.sleep(0.05)
    await mill.close()
    with pytest.raises(ConnectionClosed):
        await reading
    await member.close()


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
        rest = await other.topic("orders")

        async def left() -> int:
            return (await rest.subscriptions.lag("s")).messages

        await eventually(left, 20 - len(started))


async def test_events_in_flight_to_a_member_that_closes_go_to_the_others(
    mill: Mill, topic: Topic, millstream_url: str
) -> None:
    async with proxy(millstream_url) as (line, url), millstream.connect(url) as far:
        leaving = await (await far.topic("orders")).subscribe("s")
        reading = asyncio.create_task(leaving.pull(10, None))
        await eventually(lambda: _waiting(topic), True)
        line.freeze()
        wanted = await fill(topic, 10)
        await eventually(lambda: _in_flight(topic), 10)
        closing = asyncio.create_task(leaving.close())
        await asyncio.sleep(0.1)
        line.thaw()
        await closing
        assert await reading == []
        async with topic.subscribe("s") as staying:
            # Long before the leases are over.
            assert sorted(ack(await take(staying, 10)), key=int) == wanted


async def _in_flight(topic: Topic) -> int:
    return (await topic.subscriptions.info("s")).in_flight
