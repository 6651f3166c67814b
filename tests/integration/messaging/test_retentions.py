"""What every reader promises on each retention, with members that are killed in mid-work.

On topics with limits and interest every acknowledged event is handled, by subscriptions, groups
and processes; on a work queue by subscriptions, and readers by position are refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest

import millstream
from millstream import Event, Mill, NewEvent, Topic
from millstream.errors import ConfigError, SubscriptionConflict
from millstream.events.start import Start
from millstream.messaging import Lag, Subscription, SubscriptionSettings
from millstream.messaging.groups.admin import GroupAdmin
from millstream.messaging.groups.group import GroupEvent, GroupSettings
from millstream.messaging.process import ProcessSettings
from millstream.settings import Reconnect
from millstream.testing import running_broker
from millstream.wire.aio.jetstream import JetStream
from tests.integration.messaging.event_kit import ack, take
from tests.integration.messaging.processes import killed, line, python
from tests.integration.messaging.topic_kit import eventually

KEEPING = ("limits", "interest")  # retentions that a reader by position can read
EVENTS = 24
KILLED_AT = 5  # a child dies in the handler of this event
QUICK = GroupSettings(lease=1.0, commit_every=0.05)

SUBSCRIBER = """
async def main():
    url, last = sys.argv[1], int(sys.argv[2])
    async with millstream.connect(url) as mill:
        member = await (await mill.topic("t")).subscribe("s")
        count = 0
        async for delivery in member:
            count += 1
            if count == last:
                die()
            delivery.ack()
            say(delivery.value.decode())

asyncio.run(main())
"""

MEMBER = """
from millstream.messaging.groups.group import GroupSettings

async def main():
    url, last = sys.argv[1], int(sys.argv[2])
    count = 0

    async def handle(event):
        nonlocal count
        count += 1
        if count == last:
            die()
        say(event.value.decode())

    async with millstream.connect(url) as mill:
        topic = await mill.topic("t")
        async with topic.group("g", GroupSettings(lease=1.0, commit_every=0.05)) as group:
            await group.run(handle)

asyncio.run(main())
"""

PROCESSOR = """
from millstream.messaging.process import ProcessSettings

async def main():
    url, last = sys.argv[1], int(sys.argv[2])
    count = 0

    async def double(event):
        nonlocal count
        count += 1
        if count == last:
            die()
        say(event.value.decode())
        await asyncio.sleep(0.02)
        return event.value * 2

    async with millstream.connect(url) as mill:
        source, target = await mill.topic("t"), await mill.topic("out")
        settings = ProcessSettings("p", commit_every=0.01)
        await mill.process(source, target, double, settings).run()

asyncio.run(main())
"""


async def publish(topic: Topic, numbers: Iterable[int]) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in numbers])


async def handled_by_children(program: str, url: str, topic: Topic, wanted: set[int]) -> set[int]:
    """What killed children handled, while the second half of the events is published."""
    seen: set[int] = set()
    for _ in range(2):
        async with python(program, url, str(KILLED_AT)) as child:
            seen |= {int(await line(child)) for _ in range(KILLED_AT - 1)}
            await killed(child)
    await publish(topic, range(EVENTS // 2, EVENTS))
    async with python(program, url, "-1") as child:
        while seen != wanted:
            seen.add(int(await line(child)))
    return seen


async def stored(topic: Topic) -> int:
    return (await topic.info()).messages


async def kept_for(topic: Topic, reader: str) -> int:
    """Events that an interest topic keeps for a reader; consumers of killed ones keep some too."""
    return (await topic.subscriptions.lag(f"hold-{reader}")).messages


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_a_subscription_handles_every_event_though_its_members_are_killed(
    mill: Mill, millstream_url: str, retention: str
) -> None:
    topic = await mill.create_topic("t", retention=retention)
    await topic.subscriptions.create("s", SubscriptionSettings(ack_wait=1.0))
    await publish(topic, range(EVENTS // 2))
    wanted = set(range(EVENTS))
    assert await handled_by_children(SUBSCRIBER, millstream_url, topic, wanted) == wanted
    if retention != "limits":
        async with topic.subscribe("s") as member:
            await eventually(lambda: left(topic, member), 0)


async def left(topic: Topic, member: Subscription) -> int:
    """What is stored after the events that killed children had not acked."""
    ack(await member.pull(EVENTS, 0.1))
    return await stored(topic)


@pytest.mark.parametrize("retention", KEEPING)
async def test_a_group_handles_every_event_though_its_members_are_killed(
    mill: Mill, millstream_url: str, retention: str
) -> None:
    topic = await mill.create_topic("t", retention=retention)
    await topic.group("g", QUICK).open()
    await publish(topic, range(EVENTS // 2))  # while no member runs
    wanted = set(range(EVENTS))
    assert await handled_by_children(MEMBER, millstream_url, topic, wanted) == wanted
    if retention == "interest":
        await drained_by_group(topic)
    else:
        assert await stored(topic) == EVENTS


async def drained_by_group(topic: Topic) -> None:
    """A last member finishes; then the topic keeps nothing for the group."""

    async def nothing(event: GroupEvent) -> None:
        pass

    group = topic.group("g", QUICK)
    running = asyncio.create_task(group.run(nothing))
    await eventually(lambda: kept_for(topic, "group-g"), 0)
    await group.stop()
    await running


@pytest.mark.parametrize("retention", KEEPING)
async def test_a_process_handles_every_event_exactly_once_though_it_is_killed(
    mill: Mill, millstream_url: str, retention: str
) -> None:
    topic = await mill.create_topic("t", retention=retention)
    target = await mill.create_topic("out")
    settings = ProcessSettings("p", commit_every=0.01)
    await mill.process(topic, target, double, settings).run(once=True)  # it exists from here on
    await publish(topic, range(EVENTS // 2))
    wanted = set(range(EVENTS))
    assert await handled_by_children(PROCESSOR, millstream_url, topic, wanted) == wanted
    await mill.process(topic, target, double, settings).run(once=True)
    outputs = [event.value async for event in target.read()]
    assert sorted(outputs) == sorted(b"%d" % n * 2 for n in wanted)
    if retention == "interest":
        assert await kept_for(topic, "process-p") == 0
    else:
        assert await stored(topic) == EVENTS


def double(event: Event) -> bytes:
    return bytes(event.value * 2)


async def test_readers_by_position_refuse_a_work_queue_at_once(mill: Mill) -> None:
    topic = await mill.create_topic("t", retention="workqueue")
    target = await mill.create_topic("out")
    await topic.publish(b"1", "k")
    with pytest.raises(ConfigError, match=r"group 'g': 't' is a work queue.*topic\.subscribe"):
        await topic.group("g").open()
    with pytest.raises(ConfigError, match="process 'p': 't' is a work queue"):
        await mill.process(topic, target, double, ProcessSettings("p")).run()
    assert await stored(topic) == 1
    assert await stored(target) == 0


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_exactly_once_writers_refuse_topics_that_do_not_keep_their_fence(
    mill: Mill, retention: str
) -> None:
    source = await mill.create_topic("t")
    target = await mill.create_topic("out", retention=retention)
    with pytest.raises(ConfigError, match=f"'out' has retention {retention}.*retention limits"):
        target.writer("w")
    with pytest.raises(ConfigError, match=f"'out' has retention {retention}"):
        mill.process(source, target, double, ProcessSettings("p"))


async def test_an_interest_topic_keeps_its_events_for_a_group_until_it_is_deleted(
    mill: Mill,
) -> None:
    topic = await mill.create_topic("t", retention="interest", partitions=2)
    await topic.group("g", GroupSettings(start=Start.NEW)).open()
    await publish(topic, range(10))
    assert await stored(topic) == 10
    admin = GroupAdmin(mill.jetstream, topic._stream_publisher, "t", topic._partitions)
    await admin.delete("g")
    assert await stored(topic) == 0
    await admin.seek("g", Start.NEW)  # creates it again
    await publish(topic, range(10, 20))
    assert await stored(topic) == 10


async def test_a_group_that_goes_back_keeps_what_a_subscription_still_keeps(mill: Mill) -> None:
    topic = await mill.create_topic("t", retention="interest")
    other = await topic.subscribe("s")
    await topic.group("g", QUICK).open()
    await publish(topic, range(10))
    await drained_by_group(topic)
    admin = GroupAdmin(mill.jetstream, topic._stream_publisher, "t", topic._partitions)
    await admin.seek("g", Start.at_offset(4))
    ack(await take(other, 10))
    await eventually(lambda: topic.subscriptions.lag("s"), Lag(0, 0.0))
    assert await stored(topic) == await kept_for(topic, "group-g") == 7
    await other.close()


async def test_a_deleted_hold_is_reported_and_made_again(
    mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await mill.create_topic("t", retention="interest")
    await topic.group("g", QUICK).open()
    await topic.subscriptions.delete("hold-group-g")
    await topic.publish(b"lost", "k")
    assert await stored(topic) == 0
    with caplog.at_level(logging.WARNING):
        await topic.group("g", QUICK).open()
    assert "keeps events for group 'g' is missing" in caplog.text
    await topic.publish(b"kept", "k")
    assert await stored(topic) == 1


async def test_a_topic_that_becomes_an_interest_topic_keeps_events_for_its_groups(
    mill: Mill,
) -> None:
    topic = await mill.create_topic("t")
    await publish(topic, range(5))
    await topic.group("g", QUICK).open()
    await mill.edit_topic("t", retention="interest")
    await publish(topic, range(5, 10))
    assert await stored(topic) == 10
    seen: set[bytes] = set()
    group = topic.group("g", QUICK)

    async def note(event: GroupEvent) -> None:
        seen.add(event.value)
        if len(seen) == 10:
            await group.stop()

    async with asyncio.timeout(60):
        await group.run(note)
    assert await kept_for(topic, "group-g") == 0


async def test_a_subscription_with_the_name_of_a_hold_is_not_taken_for_it(mill: Mill) -> None:
    topic = await mill.create_topic("t", retention="interest")
    await topic.subscriptions.create("hold-group-g")
    with pytest.raises(SubscriptionConflict, match="group 'g' needs that name"):
        await topic.group("g").open()


async def test_an_interest_topic_keeps_events_for_a_group_over_a_killed_broker() -> None:
    """The server may forget that the hold was moved, which only keeps more."""
    with running_broker() as broker:
        quick = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
        async with millstream.connect(broker.url, reconnect=quick) as mill:
            topic = await mill.create_topic("t", retention="interest")
            seen: set[bytes] = set()

            async def note(event: GroupEvent) -> None:
                seen.add(event.value)

            group = topic.group("g", QUICK)
            await group.open()
            running = asyncio.create_task(group.run(note))
            for number in range(3):
                await publish(topic, range(number * 10, number * 10 + 10))
                broker.kill()
                await asyncio.to_thread(broker.start)
            wanted = {b"%d" % n for n in range(30)}
            await eventually(lambda: asyncio.sleep(0, len(wanted - seen)), 0)
            await eventually(lambda: kept_for(topic, "group-g"), 0)
            await group.stop()
            await running


async def test_a_process_survives_a_broker_that_stalls_when_it_lets_events_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = JetStream.ask
    asked: list[str] = []
    with running_broker() as broker:
        pid = broker.pid
        assert pid is not None

        async def ask(self: JetStream, verb: str, body: object = None, *about: Any) -> bytes:
            """The first move and the request after it meet a stalled server."""
            if "hold-process-p" not in verb or len(asked) == 2:
                return await real(self, verb, body, *about)
            asked.append(verb)
            os.kill(pid, signal.SIGSTOP)
            try:
                return await real(self, verb, body, 0.2)
            finally:
                os.kill(pid, signal.SIGCONT)

        async with millstream.connect(broker.url) as mill:
            topic = await mill.create_topic("t", retention="interest")
            target = await mill.create_topic("out")
            settings = ProcessSettings("p", commit_every=0.01)
            await mill.process(topic, target, double, settings).run(once=True)
            process = mill.process(topic, target, double, settings)
            running = asyncio.create_task(process.run())
            await publish(topic, [1])
            await eventually(lambda: kept_for(topic, "process-p"), 0)
            monkeypatch.setattr(JetStream, "ask", ask)
            await publish(topic, [2, 3])
            await eventually(lambda: asyncio.sleep(0, process.produced), 3)
            await publish(topic, [4])
            await eventually(lambda: asyncio.sleep(0, process.produced), 4)
            process.stop()
            await running
            assert [verb.split(".")[1] for verb in asked] == ["RESET", "INFO"]
            assert await kept_for(topic, "process-p") == 0
