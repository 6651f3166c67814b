"""Members whose process is stopped for longer than a lease, as a closed laptop does it.

The server gives what they had to others, or to them again when they wake up. They handle nothing
twice, and what was handled is no dead letter.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

import millstream
from millstream.messaging import Delivery, Lag, NewEvent, SubscriptionSettings, Topic
from millstream.mill import Mill
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.event_kit import ack, take
from tests.integration.messaging.processes import line, python
from tests.integration.messaging.topic_kit import done_with, eventually

LEASE = 0.5
STOPPED = 4.5 * LEASE  # seconds; enough for more deliveries than an event has
SETTINGS = SubscriptionSettings(ack_wait=LEASE, max_deliver=3, backoff=(0.05,))

MEMBER = """
import time
import millstream.blocking

def about(delivery):
    say(f"{delivery.value.decode()} {delivery.attempt}")

async def handle(delivery):
    about(delivery)
    await asyncio.sleep(0.05)
    if delivery.value == b"bad":
        raise ValueError("no luck")

async def main(url, how):
    async with millstream.connect(url) as mill:
        topic = await mill.topic("orders")
        async with topic.subscribe("s") as member:
            if how == "iterate":
                async for delivery in member:
                    about(delivery)
                    await asyncio.sleep(0.05)
                    delivery.ack()
            elif how == "pull":
                while True:
                    for delivery in await member.pull(3):
                        about(delivery)
                        delivery.ack()
            else:
                await member.run(handle, int(how))

def blocking(url):
    with millstream.blocking.connect(url) as mill:
        with mill.topic("orders").subscribe("s") as member:
            for delivery in member:
                about(delivery)
                time.sleep(0.05)
                delivery.ack()

if sys.argv[2] == "blocking":
    blocking(sys.argv[1])
else:
    asyncio.run(main(*sys.argv[1:]))
"""


async def subscribed(mill: Mill) -> Topic:
    topic = await mill.create_topic("orders")
    await (await topic.subscribe("s", SETTINGS)).close()
    return topic


async def member_waits(topic: Topic) -> None:
    async def waits() -> bool:
        return (await topic.subscriptions.info("s")).waiting_members > 0

    await eventually(waits, True)


async def asleep(process: asyncio.subprocess.Process) -> None:
    await asyncio.sleep(STOPPED)
    process.send_signal(signal.SIGCONT)


async def said(topic: Topic, process: asyncio.subprocess.Process, first: str = "") -> list[str]:
    """All that a member says once it is done with everything, in any order."""
    await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
    await topic.publish(b"end")  # what comes late comes before it
    lines = [first] if first else []
    while (text := await line(process)) != "end 1":
        lines.append(text)
    return sorted(lines)


@pytest.mark.parametrize("how", ["1", "iterate", "blocking"])
async def test_events_that_wait_in_the_socket_of_a_stopped_process_are_handled_once(
    mill: Mill, millstream_url: str, how: str
) -> None:
    topic = await subscribed(mill)
    async with python(MEMBER, millstream_url, how) as process:
        await member_waits(topic)
        process.send_signal(signal.SIGSTOP)
        await topic.publish_many([b"a", b"b"])
        await asleep(process)
        assert await said(topic, process) == ["a 1", "b 1"]
    assert await (await topic.dead_letters("s")).list() == []


@pytest.mark.parametrize(
    ("how", "packed"),
    [(how, False) for how in ("1", "3", "pull", "blocking")] + [("3", True), ("iterate", True)],
)
async def test_events_in_hand_and_in_the_memory_of_a_stopped_process_are_handled_once(
    mill: Mill, millstream_url: str, how: str, packed: bool
) -> None:
    topic = await subscribed(mill)
    values = [b"%d" % number for number in range(8)]
    if packed:
        async with topic.producer() as producer:
            for value in values:
                await producer.send(value)
    else:
        await topic.publish_many(values)
    async with python(MEMBER, millstream_url, how) as process:
        first = await line(process)
        process.send_signal(signal.SIGSTOP)
        await asleep(process)
        wanted = sorted(f"{value.decode()} 1" for value in values)
        assert await said(topic, process, first) == wanted
    assert await (await topic.dead_letters("s")).list() == []


async def test_what_others_did_meanwhile_is_not_done_again(mill: Mill, millstream_url: str) -> None:
    topic = await subscribed(mill)
    async with python(MEMBER, millstream_url, "1") as process:
        await member_waits(topic)
        process.send_signal(signal.SIGSTOP)
        values = [b"%d" % number for number in range(20)]
        await topic.publish_many(values)
        async with topic.subscribe("s") as other:
            deliveries = await take(other, 20)
            assert sorted(ack(deliveries)) == sorted(values)
            await done_with(topic, other, LEASE)
        process.send_signal(signal.SIGCONT)
        assert await said(topic, process) == []
    assert await (await topic.dead_letters("s")).list() == []


async def test_an_event_has_all_its_attempts_after_a_pause(mill: Mill, millstream_url: str) -> None:
    topic = await subscribed(mill)
    async with python(MEMBER, millstream_url, "1") as process:
        await member_waits(topic)
        process.send_signal(signal.SIGSTOP)
        await topic.publish(b"bad")
        await asleep(process)
        assert await said(topic, process) == ["bad 1", "bad 2", "bad 3"]
    [letter] = await (await topic.dead_letters("s")).list()
    assert (letter.cause, letter.attempts) == ("ValueError: no luck", 3)


async def test_an_event_whose_handling_takes_longer_than_its_lease_is_handled_once(
    mill: Mill,
) -> None:
    """No pause, only a handler that is slow and does not extend the lease."""
    topic = await mill.create_topic("orders")
    settings = SubscriptionSettings(ack_wait=0.2, max_deliver=3)
    await topic.publish(b"slow")
    handled: list[tuple[bytes, int]] = []
    async with topic.subscribe("s", settings) as member:
        async for delivery in member:
            handled.append((delivery.value, delivery.attempt))
            if delivery.value == b"end":
                delivery.ack()
                break
            await asyncio.sleep(0.9)
            delivery.ack()
            await topic.publish(b"end")  # its copies were sent before
        await done_with(topic, member, 0.4)
    assert handled == [(b"slow", 1), (b"end", 1)]
    assert await (await topic.dead_letters("s")).list() == []


async def test_what_was_waited_for_without_a_connection_is_handled_once(
    mill: Mill, millstream_url: str
) -> None:
    topic = await subscribed(mill)
    await topic.publish_many([NewEvent(b"%d" % number) for number in range(5)])
    async with proxy(millstream_url) as (cut, url), millstream.connect(url) as away:
        member = await (await away.topic("orders")).subscribe("s")
        handled: list[bytes] = []

        async def handle(delivery: Delivery) -> None:
            handled.append(delivery.value)
            if len(handled) == 1:
                cut.refusing = True
                cut.cut()
                await asyncio.sleep(STOPPED)
                cut.refusing = False

        running = asyncio.create_task(member.run(handle))
        await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
        await member.close()
        await running
    assert sorted(handled) == [b"%d" % number for number in range(5)]
    assert await (await topic.dead_letters("s")).list() == []
