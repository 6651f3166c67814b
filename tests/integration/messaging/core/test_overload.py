"""Ten times more messages than are read: what each policy does, and that the books balance.

`produced` is counted by the publishing side, `taken` by the reading side, both outside of the
subscriber whose counters are checked against them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from millstream.broker import Limits
from millstream.deadline import Deadline
from millstream.errors import ConfigError, NoMessage
from millstream.messaging.core import paced_publisher as pacing
from millstream.messaging.core.message import Message, publish
from millstream.messaging.core.overload import Overload, SubscriberSettings
from millstream.messaging.core.paced_publisher import PacedPublisher
from millstream.messaging.core.request import request
from millstream.messaging.core.subscriber import Subscriber
from millstream.testing import running_broker
from millstream.wire.aio.connection import Connection
from tests.books import balanced

Connect = Callable[..., Awaitable[Connection]]
Until = Callable[..., Awaitable[None]]

ROUNDS = 40
PRODUCED_A_ROUND = 500
TAKEN_A_ROUND = 50


async def overload(
    sender: Connection, subscriber: Subscriber, taken: list[int]
) -> tuple[int, list[int]]:
    """Produce ten times what is taken; how many were produced, and the books of every round."""
    produced, faults = 0, []
    for _ in range(ROUNDS):
        for _ in range(PRODUCED_A_ROUND):
            await publish(sender, "flood", str(produced))
            produced += 1
        await sender.flush()
        await subscriber.flush()
        for _ in range(TAKEN_A_ROUND):
            taken.append(int((await subscriber.next(5)).text))
        counters = subscriber.counters
        if produced != len(taken) + counters.dropped + counters.pending:
            faults.append(produced)
    return produced, faults


@pytest.mark.parametrize("policy", [Overload.DROP_NEW, Overload.DROP_OLD])
async def test_ten_times_overload_is_counted_to_the_last_message(
    connection: Connection, other: Connection, policy: Overload
) -> None:
    settings = SubscriberSettings(overload=policy, messages_max=300)
    taken: list[int] = []
    async with Subscriber(connection, "flood", settings) as subscriber:
        produced, faults = await overload(other, subscriber, taken)
        counters = subscriber.counters
        assert not faults
        assert counters.received == produced == ROUNDS * PRODUCED_A_ROUND
        assert counters.delivered == len(taken) == ROUNDS * TAKEN_A_ROUND
        assert counters.pending == 300 - TAKEN_A_ROUND
        assert counters.dropped == produced - len(taken) - counters.pending
        assert balanced(counters)
        assert counters.interruptions == 0
        rest = [int((await subscriber.next(5)).text) for _ in range(counters.pending)]
    assert taken + rest == sorted(set(taken + rest)), "in order, none twice"
    if policy is Overload.DROP_NEW:
        assert taken[:300] == list(range(300)), "what came first was kept"
    else:
        assert rest[-1] == produced - 1, "what came last was kept"
        assert taken[0] == PRODUCED_A_ROUND - 300


@pytest.mark.parametrize("policy", [Overload.DROP_NEW, Overload.DROP_OLD])
async def test_bytes_are_a_limit_as_well(connection: Connection, policy: Overload) -> None:
    settings = SubscriberSettings(overload=policy, bytes_max=1000)
    async with Subscriber(connection, "b", settings) as subscriber:
        for _ in range(10):
            await publish(connection, "b", b"x" * 300)
        await subscriber.flush()
        counters = subscriber.counters
        assert (counters.pending, counters.pending_bytes, counters.dropped) == (3, 900, 7)
        while subscriber.counters.pending:
            await subscriber.next()
        await publish(connection, "b", b"x" * 5000)  # alone it always fits
        assert len((await subscriber.next(5)).data) == 5000
        assert subscriber.counters.pending_bytes == 0


async def test_each_dropped_message_can_be_inspected(connection: Connection) -> None:
    dropped: list[str] = []

    def look(message: Message) -> None:
        dropped.append(message.text)

    settings = SubscriberSettings(overload=Overload.DROP_OLD, messages_max=2, on_drop=look)
    async with Subscriber(connection, "look", settings) as subscriber:
        for number in range(5):
            await publish(connection, "look", str(number))
        await subscriber.flush()
        assert [(await subscriber.next()).text for _ in range(2)] == ["3", "4"]
    assert dropped == ["0", "1", "2"]


async def test_block_loses_nothing_under_ten_times_overload(
    connection: Connection, other: Connection
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=300, block_seconds=9)
    produced, taken = 0, []
    async with Subscriber(connection, "flood", settings) as subscriber:
        for _ in range(ROUNDS):
            for _ in range(PRODUCED_A_ROUND):
                await publish(other, "flood", str(produced))
                produced += 1
            await other.flush()
            for _ in range(TAKEN_A_ROUND):
                taken.append(int((await subscriber.next(5)).text))
            counters = subscriber.counters
            assert balanced(counters)
            assert counters.delivered == len(taken)
            assert counters.pending_bytes < 300 * 5 + 256 * 1024
        assert counters.received < produced, "the rest is held back, not read and not lost"
        while len(taken) < produced:
            taken.append(int((await subscriber.next(5)).text))
        counters = subscriber.counters
    assert taken == list(range(produced))
    assert (counters.received, counters.delivered) == (produced, produced)
    assert (counters.dropped, counters.pending, counters.interruptions) == (0, 0, 0)
    assert counters.blocked_seconds > 0


async def test_block_drops_and_counts_after_its_time(
    connection: Connection, other: Connection
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=100, block_seconds=0.3)
    produced = 20_000
    async with Subscriber(connection, "flood", settings) as subscriber:
        deadline = Deadline(5)
        for number in range(produced):
            await publish(other, "flood", str(number))
        await other.flush()
        await subscriber.flush()  # its PONG comes after all messages
        assert 5 - deadline.left() >= 0.3, "it was held before anything was dropped"
        counters = subscriber.counters
        assert counters.dropped > 0
        assert counters.blocked_seconds >= 0.3
        assert produced == 0 + counters.dropped + counters.pending
        pending = counters.pending
        taken = [int((await subscriber.next()).text) for _ in range(pending)]
        assert taken == list(range(pending))
        # Empty again, it takes everything again.
        for number in range(50):
            await publish(other, "flood", str(number))
        again = [int((await subscriber.next(5)).text) for _ in range(50)]
        assert again == list(range(50))
        assert subscriber.counters.dropped == counters.dropped
        assert produced + 50 == len(taken) + len(again) + subscriber.counters.dropped


async def test_a_blocking_subscriber_does_not_delay_others(
    connection: Connection, other: Connection, until: Until
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=10, block_seconds=9)
    async with (
        Subscriber(connection, "flood", settings) as blocking,
        Subscriber(connection, "flood") as plain,
        Subscriber(connection, "ask", handler=lambda message: message.respond(b"here")),
    ):
        for _ in range(5000):
            await publish(other, "flood", b"x" * 1000)
        await until(lambda: blocking.counters.blocked_seconds > 0)
        assert (await request(other, "ask", timeout=8)).data == b"here"
        await other.flush()
        await plain.flush()
        assert plain.counters.received == 5000
        assert blocking.counters.received < 5000


async def test_a_drained_blocking_subscriber_gets_what_was_held_back(
    connection: Connection, other: Connection
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=10, block_seconds=9)
    subscriber = await Subscriber(connection, "flood", settings)
    for number in range(3000):
        await publish(other, "flood", str(number))
    await other.flush()
    draining = asyncio.create_task(subscriber.drain(30))
    assert [int(message.text) async for message in subscriber] == list(range(3000))
    await draining
    assert subscriber.counters.dropped == 0


async def test_a_disconnect_by_the_server_is_counted_and_the_subscriber_continues(
    connect: Connect, until: Until
) -> None:
    limits = Limits(max_payload=256 * 1024)
    raw = 'max_pending: 1MB\nwrite_deadline: "500ms"\n'
    async with running_broker(limits=limits, raw=raw) as broker:
        connection, sender = await connect(broker.url), await connect(broker.url)
        settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=10, block_seconds=9)
        async with Subscriber(connection, "flood", settings) as subscriber:
            for _ in range(400):
                await publish(sender, "flood", b"x" * 100_000)
            await sender.flush(20)

            deadline = Deadline(60)
            while not subscriber.counters.interruptions:  # seen once it reads again
                assert not deadline.passed
                with contextlib.suppress(NoMessage):
                    await subscriber.next(0.1)
            assert subscriber.counters.received < 400
            await subscriber.flush()
            before = subscriber.counters.received
            await publish(sender, "flood", b"after")
            await until(lambda: subscriber.counters.received > before)
            assert balanced(subscriber.counters)


async def slow_reader(subscriber: Subscriber, taken: list[int], pause: float) -> None:
    async for message in subscriber:
        taken.append(int(message.text))
        if len(taken) % 20 == 0:
            await asyncio.sleep(pause)


async def test_a_paced_sender_waits_for_the_slowest_blocking_subscriber(
    connection: Connection, other: Connection, until: Until
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=200, block_seconds=9)
    quick: list[int] = []
    slow: list[int] = []
    furthest = 0
    async with (
        Subscriber(connection, "paced.*", settings) as first,
        Subscriber(connection, "paced.>", settings) as second,
    ):
        readers = [
            asyncio.create_task(slow_reader(first, quick, 0.0)),
            asyncio.create_task(slow_reader(second, slow, 0.01)),
        ]
        async with PacedPublisher(other, "paced.a", window_messages=100) as paced:
            await paced.settle()
            await until(lambda: len(paced._members) == 2)
            for number in range(3000):
                await paced.publish(str(number))
                furthest = max(furthest, number - len(slow))
        assert paced.published == 3000
        assert paced.held_seconds > 0.5
        assert paced.unanswered == 0
        for subscriber in (first, second):
            assert subscriber.counters.received == 3000, "settled: all has arrived"
            await subscriber.drain()
        await asyncio.gather(*readers)
        dropped = first.counters.dropped, second.counters.dropped
    # The window, the room of the subscriber, and one window more of which the answer was awaited.
    assert furthest <= 200 + 2 * 100
    assert quick == slow == list(range(3000))
    assert dropped == (0, 0)


async def test_a_paced_sender_continues_when_a_subscriber_stops_blocking(
    connection: Connection, other: Connection
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK, messages_max=50, block_seconds=0.2)
    async with Subscriber(connection, "stuck", settings) as subscriber:
        async with PacedPublisher(other, "stuck", window_messages=100) as paced:
            for number in range(50_000):
                await paced.publish(str(number))
        counters = subscriber.counters
    assert counters.blocked_seconds >= 0.2
    assert paced.unanswered == 0
    assert counters.dropped > 0
    assert paced.published == counters.delivered + counters.dropped + counters.pending


async def test_a_paced_sender_waits_once_for_a_subscriber_that_died(
    connect: Connect, other: Connection, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SubscriberSettings(overload=Overload.BLOCK)
    async with (
        Subscriber(other, "mortal", settings) as living,
        Subscriber(await connect(), "mortal", settings) as dying,
        PacedPublisher(other, "mortal", window_messages=10) as paced,
    ):
        for _ in range(100):
            await paced.publish()
        await paced.settle()
        assert paced.unanswered == 0
        await until(lambda: len(paced._members) == 2)
        dying._source.pause_reading()  # as if its process had stopped
        monkeypatch.setattr(pacing, "HOLD_SECONDS", 0.3)
        while not paced.unanswered:
            await paced.publish()
        monkeypatch.undo()  # the living one may take its time, the dead one is not waited for
        for _ in range(100):
            await paced.publish()
        await paced.settle()
        assert paced.unanswered == 1
        assert paced.held_seconds >= 0.3
        await living.flush()
        assert living.counters.received == paced.published
        dying._source.resume_reading()


async def test_a_paced_sender_without_blocking_subscribers_never_waits(
    connection: Connection, other: Connection
) -> None:
    async with Subscriber(connection, "free") as subscriber:
        async with PacedPublisher(other, "free", window_messages=20) as paced:
            for number in range(2000):
                await paced.publish(str(number))
        await subscriber.flush()
        assert subscriber.counters.received == 2000, "and it sees no question among the messages"
        assert (await subscriber.next()).text == "0"
    assert paced.unanswered == 0
    assert not other.on_closed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"messages_max": 0}, "buffer a message"),
        ({"bytes_max": 0}, "buffer a message"),
        ({"block_seconds": 10}, "server cuts off"),
        ({"block_seconds": 0}, "server cuts off"),
        ({"concurrency": 0}, "concurrency"),
        ({"overload": "explode"}, "drop_new, drop_old, block"),
        ({"queue": "a b"}, "queue"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SubscriberSettings(**change)  # type: ignore[arg-type]
