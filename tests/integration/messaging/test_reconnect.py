"""The broker is killed and restarted: everything continues automatically, without loss."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import millstream
from millstream.broker import Broker
from millstream.errors import ConnectError, ConnectionClosed, RequestTimeout, Unconfirmed
from millstream.messaging import (
    Delivery,
    Lag,
    NewEvent,
    PublishOptions,
    Start,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from millstream.settings import Reconnect
from millstream.testing import running_broker
from millstream.wire.aio import connection
from tests.integration.messaging.conftest import Until
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.event_kit import read, until_reading, values
from tests.integration.messaging.topic_kit import eventually

QUICK = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
PATIENT = 60.0  # seconds for an answer: it takes as long as the broker needs to come back


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """One broker for all tests; what is stored is left on the disk when it is killed."""
    with running_broker(durability="periodic") as broker:
        yield broker


@pytest.fixture
async def mill(broker: Broker) -> AsyncIterator[Mill]:
    if not broker.running:
        await asyncio.to_thread(broker.start)
    async with millstream.connect(broker.url, reconnect=QUICK, request_timeout=PATIENT) as mill:
        yield mill


@pytest.fixture
async def topic(mill: Mill, request: pytest.FixtureRequest) -> Topic:
    """A topic named after its test: the broker is shared."""
    name = request.node.name.split("[")[0].replace("_", "-")[:100]
    return await mill.create_topic(name)


async def crash(broker: Broker, pause: float = 0.1) -> None:
    """Kill the broker, and start it again after a while."""
    await asyncio.to_thread(broker.kill)
    await asyncio.sleep(pause)
    await asyncio.to_thread(broker.start)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


# -- publishing ---------------------------------------------------------------------------


async def test_of_many_events_in_flight_each_is_stored_once(
    broker: Broker, mill: Mill, topic: Topic
) -> None:
    receipts: list[asyncio.Future[Any]] = []
    crashing: asyncio.Task[None] | None = None
    async with topic.event_producer(max_in_flight=500) as producer:
        while len(receipts) < 6000 or not mill.connection.reconnects:
            number = len(receipts)
            receipts.append(await producer.send(b"%d" % number, f"k{number % 10}"))
            if number == 2000:
                crashing = asyncio.create_task(crash(broker))
            elif number > 6000:
                await asyncio.sleep(0.001)  # the crash takes its time
    assert crashing is not None
    await crashing
    expected = numbers(len(receipts))
    offsets = [receipt.result().offset for receipt in receipts]
    events = await read(topic)
    assert Counter(event.value for event in events) == Counter(expected)
    by_offset = {event.offset: event.value for event in events}
    assert [by_offset[offset] for offset in offsets] == expected


async def test_one_awaited_event_at_a_time_keeps_its_order(broker: Broker, topic: Topic) -> None:
    crashing = asyncio.create_task(crash(broker))
    for number in range(300):
        await topic.publish(b"%d" % number, "k")
        await asyncio.sleep(0.001)
    await crashing
    assert await values(topic) == numbers(300)


async def test_atomic_batches_are_complete_and_stored_once(broker: Broker, topic: Topic) -> None:
    crashing = asyncio.create_task(crash(broker))
    stored = []
    for number in range(40):
        batch = [NewEvent(b"%d.%d" % (number, n), "k") for n in range(5)]
        stored.append(await topic.publish_atomic(batch, timeout=PATIENT))
    await crashing
    found = await read(topic)
    assert [event.value for event in found] == [
        b"%d.%d" % (number, n) for number in range(40) for n in range(5)
    ]
    assert [event.offset for event in found] == [r.offset for batch in stored for r in batch]


async def test_packs_of_a_producer_are_stored_once(broker: Broker, topic: Topic) -> None:
    crashing = asyncio.create_task(crash(broker))
    async with topic.producer() as producer:
        for number in range(20_000):
            await producer.send(b"%d" % number, "k")
            if number % 100 == 0:
                await asyncio.sleep(0.002)
    await crashing
    assert Counter(await values(topic)) == Counter(numbers(20_000))


async def test_a_publish_is_given_up_when_its_time_is_over(broker: Broker, topic: Topic) -> None:
    await asyncio.to_thread(broker.kill)
    try:
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unconfirmed, match="same id is safe"):
            await topic.publish(b"x", id="one", options=PublishOptions(timeout=0.3))
        assert 0.25 < asyncio.get_running_loop().time() - began < 10
    finally:
        await asyncio.to_thread(broker.start)
    receipt = await topic.publish(b"x", id="one")
    assert await values(topic) == [b"x"]
    assert receipt.offset == 1


# -- reading ------------------------------------------------------------------------------


async def test_a_subscription_continues_and_misses_nothing(broker: Broker, topic: Topic) -> None:
    seen: Counter[bytes] = Counter()

    async def handle(delivery: Delivery) -> None:
        seen[delivery.value] += 1
        await asyncio.sleep(0.001)

    member = await topic.subscribe("s", SubscriptionSettings(ack_wait=1.0))
    running = asyncio.create_task(member.run(handle, concurrency=4))
    await topic.publish_many(numbers(500))
    await crash(broker)
    await topic.publish_many([b"%d" % n for n in range(500, 700)])
    await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0), 60)
    await member.close()
    await running
    assert set(seen) == set(numbers(700))  # some may come twice, see the promises


async def test_a_pull_loop_continues_and_misses_nothing(broker: Broker, topic: Topic) -> None:
    await topic.publish_many(numbers(400))
    seen: Counter[bytes] = Counter()
    crashing: asyncio.Task[None] | None = None
    async with topic.subscribe("s", SubscriptionSettings(ack_wait=1.0)) as member:
        while len(seen) < 400:
            for delivery in await member.pull(20, timeout=0.5):
                seen[delivery.value] += 1
                await delivery.ack_sync()
            if crashing is None and len(seen) >= 100:
                crashing = asyncio.create_task(crash(broker))
    assert crashing is not None
    await crashing
    assert set(seen) == set(numbers(400))


async def test_a_range_is_read_to_its_end_each_event_once(broker: Broker, topic: Topic) -> None:
    await topic.publish_many(numbers(12_000))
    seen: list[bytes] = []
    crashing: asyncio.Task[None] | None = None
    async for event in topic.read():
        seen.append(event.value)
        if len(seen) == 500:
            crashing = asyncio.create_task(crash(broker))
        if len(seen) % 50 == 0:
            await asyncio.sleep(0.002)
    assert crashing is not None
    await crashing
    assert seen == numbers(12_000)


@pytest.mark.parametrize("start", [Start.ALL, Start.NEW], ids=["all", "new"])
async def test_following_continues_with_each_event_once(
    broker: Broker, topic: Topic, start: Start
) -> None:
    await topic.admin.purge()
    old = [] if start is Start.NEW else [b"old"]
    await topic.publish(b"old")
    reader = topic.read(start=start, follow=True)
    seen: list[bytes] = []

    async def follow() -> None:
        async for event in reader:
            seen.append(event.value)
            if event.value == b"199":
                return

    following = asyncio.create_task(follow())
    await until_reading(topic)
    crashing = asyncio.create_task(crash(broker))
    for number in range(200):
        await topic.publish(b"%d" % number)
        await asyncio.sleep(0.002)
    await crashing
    await asyncio.wait_for(following, 60)
    await reader.aclose()  # type: ignore[attr-defined]
    assert seen == old + numbers(200)


# -- limits and endings -------------------------------------------------------------------


async def test_reconnecting_is_given_up_after_the_time_set(broker: Broker) -> None:
    rules = Reconnect(wait=0.02, wait_max=0.05, give_up_after=0.4)
    mill = await millstream.connect(broker.url, reconnect=rules)
    topic = await mill.create_topic("given-up")
    member = await topic.subscribe("s")
    reading = asyncio.create_task(member.pull(1, None))
    await asyncio.to_thread(broker.kill)
    try:
        with pytest.raises(ConnectionClosed, match=r"0\.4 s|was closed"):
            await asyncio.wait_for(topic.publish(b"x"), 30)
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(reading, 30)
        with pytest.raises(ConnectionClosed, match=r"gave up reconnecting after 0\.4 s"):
            await topic.publish(b"x")
        await member.close()
        await mill.close()
    finally:
        await asyncio.to_thread(broker.start)


async def test_a_process_that_was_paused_reconnects_afterwards(
    broker: Broker, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time ran out while it could not try, as in a machine that was paused."""
    monkeypatch.setattr(connection, "PAUSED_SECONDS", 0.0)
    rules = Reconnect(wait=0.02, wait_max=0.05, give_up_after=5)
    async with millstream.connect(broker.url, reconnect=rules, connect_timeout=2) as mill:
        topic = await mill.create_topic("paused")
        await asyncio.to_thread(broker.kill)
        await until(lambda: not mill.connected)
        broker.start()
        time.sleep(6)  # noqa: ASYNC251  # the whole event loop waits
        await topic.publish(b"x")
        assert await values(topic) == [b"x"]


async def test_a_request_waits_for_the_connection_no_longer_than_its_time(
    broker: Broker, mill: Mill, topic: Topic
) -> None:
    await asyncio.to_thread(broker.kill)
    try:
        with pytest.raises(RequestTimeout):
            await mill.request("nobody", timeout=0.2)
    finally:
        await asyncio.to_thread(broker.start)
    await topic.info()


async def test_core_messages_are_kept_up_to_the_limit_while_disconnected(
    broker: Broker, until: Until
) -> None:
    rules = Reconnect(wait=0.02, wait_max=0.05, buffer_bytes=1000)
    async with (
        millstream.connect(broker.url, reconnect=rules) as mill,
        mill.subscribe("kept.>") as subscriber,
    ):
        await asyncio.to_thread(broker.kill)
        await until(lambda: not mill.connected)
        await mill.publish("kept.1", b"x" * 500)
        with pytest.raises(ConnectError, match="1,000 bytes is full"):
            await mill.publish("kept.2", b"x" * 500)
        await asyncio.to_thread(broker.start)
        message = await subscriber.next(timeout=PATIENT)
        assert message.subject == "kept.1"


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "with events in flight"])
async def test_closing_while_the_broker_is_unreachable_neither_hangs_nor_raises(
    broker: Broker, in_flight: bool
) -> None:
    mill = await millstream.connect(
        broker.url, client_id=f"closing-{in_flight}", reconnect=QUICK, request_timeout=PATIENT
    )
    topic = await mill.create_topic("closing")
    member = await topic.subscribe("s")
    subscriber = await mill.subscribe("x").open()
    await asyncio.to_thread(broker.kill)
    try:
        options = PublishOptions(timeout=PATIENT)
        publish = topic.publish(b"x", options=options) if in_flight else None
        pending = publish and asyncio.create_task(publish)
        await asyncio.sleep(0)  # it is in flight then
        began = asyncio.get_running_loop().time()
        await mill.close(0.5)
        assert asyncio.get_running_loop().time() - began < PATIENT / 3
        if pending is not None:
            with pytest.raises(ConnectionClosed):
                await pending
        await member.close()
        await subscriber.close()
    finally:
        await asyncio.to_thread(broker.start)


async def test_draining_while_the_broker_is_unreachable_ends_within_the_timeout(
    broker: Broker,
) -> None:
    mill = await millstream.connect(broker.url, reconnect=QUICK, request_timeout=PATIENT)
    topic = await mill.create_topic("closing")
    member = await topic.subscribe("s")
    running = asyncio.create_task(member.run(lambda _delivery: None))
    await mill.subscribe("x").open()
    await asyncio.to_thread(broker.kill)
    try:
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(RequestTimeout):
            await mill.drain(timeout=0.5)
        assert asyncio.get_running_loop().time() - began < PATIENT / 3
        assert mill.connection.closed
        await asyncio.wait_for(running, 20)
    finally:
        await asyncio.to_thread(broker.start)


# -- only the connection is lost ----------------------------------------------------------


@asynccontextmanager
async def through_proxy(broker: Broker, **changes: Any) -> AsyncIterator[tuple[Any, Mill]]:
    if not broker.running:
        await asyncio.to_thread(broker.start)
    async with (
        proxy(broker.url) as (line, url),
        millstream.connect(url, reconnect=QUICK, request_timeout=PATIENT, **changes) as mill,
    ):
        yield line, mill


async def test_cut_connections_lose_and_repeat_nothing_that_is_stored(
    broker: Broker, until: Until
) -> None:
    async with through_proxy(broker) as (line, mill):
        topic = await mill.create_topic("cut")
        seen: Counter[bytes] = Counter()

        async def handle(delivery: Delivery) -> None:
            seen[delivery.value] += 1

        member = await topic.subscribe("s", SubscriptionSettings(ack_wait=1.0))
        running = asyncio.create_task(member.run(handle, concurrency=4))
        publishing = [asyncio.create_task(topic.publish(b"%d" % n)) for n in range(1000)]
        for cuts in range(1, 6):
            await asyncio.sleep(0.03)
            line.cut()
            await until(lambda cuts=cuts: mill.connection.reconnects >= cuts)
        await asyncio.gather(*publishing)
        assert Counter(await values(topic)) == Counter(numbers(1000))
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0), 60)
        await member.close()
        await running
        assert set(seen) == set(numbers(1000))
        assert line.connections >= 6


async def test_a_server_that_says_nothing_counts_as_lost(broker: Broker, until: Until) -> None:
    async with through_proxy(broker, ping_interval=0.1) as (line, mill):
        topic = await mill.create_topic("silent")
        await topic.publish(b"1")
        line.freeze()
        pending = asyncio.create_task(topic.publish(b"2"))
        await until(lambda: not mill.connected)
        line.thaw()
        await pending
        assert await values(topic) == [b"1", b"2"]


async def test_a_range_read_across_a_lost_connection_is_complete(
    broker: Broker, until: Until
) -> None:
    async with through_proxy(broker) as (line, mill):
        topic = await mill.create_topic("cut-range")
        await topic.publish_many(numbers(8000))
        seen, cuts = [], 0
        async for event in topic.read():
            seen.append(event.value)
            if len(seen) % 1500 == 0:
                # The last cut is over: one of a connection that is not there does nothing.
                await until(lambda cuts=cuts: mill.connection.reconnects >= cuts)
                line.cut()
                cuts += 1
            if len(seen) % 100 == 0:
                await asyncio.sleep(0.001)
        assert seen == numbers(8000)
        assert cuts == 5


async def test_an_outage_is_one_warning_and_its_end_is_logged(
    broker: Broker, mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    """With default logging a worker that waits for its broker says so, once."""
    connected = asyncio.Event()
    mill.connection.on_connected.append(connected.set)
    with caplog.at_level("INFO", "millstream.wire"):
        await crash(broker, pause=0.5)  # long enough for several attempts
        async with asyncio.timeout(60):
            await connected.wait()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    lost = [line for line in lines if "was lost" in line[1]]
    assert [level for level, _ in lost] == ["WARNING"]
    assert ("INFO", f"connected again, to {broker.url}") in lines
