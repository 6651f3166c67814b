"""Readers of a topic that gets an event now and then: each message is a sign of life.

While messages flow, the server sends no heartbeats. A reader that waits for those takes a living
consumer for dead, again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

import millstream
from millstream.deadline import Deadline
from millstream.errors import ApiError
from millstream.messaging import Topic
from millstream.messaging.groups import holding
from millstream.messaging.subscriptions import inbox
from millstream.mill import Mill
from millstream.wire.aio import direct_reader
from millstream.wire.aio.direct_reader import DirectReader
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.pull_consumer import Prefetch, Signal
from millstream.wire.range_cursor import Range
from tests.integration.messaging.topic_kit import eventually
from tests.integration.wire.frame_proxy import frame_proxy

HEARTBEAT = 0.5
STEADY = HEARTBEAT * 4  # twice as long as a silence after which a consumer counts as dead

S = TypeVar("S")


async def before_and_after(
    topic: Topic, handled: Callable[[], int], look: Callable[[], Awaitable[S]]
) -> tuple[S, S]:
    """What is seen before and after a steady trickle, in which no event was late.

    When a process stood still for a moment, a reader may rightly be in doubt: then it starts anew.
    """
    loop = asyncio.get_running_loop()
    limit = Deadline(60)
    before, start = None, 0.0
    while before is None or loop.time() < start + STEADY:
        assert not limit.passed, "the machine stands still again and again"
        last, count = loop.time(), handled()
        await topic.publish(b"drop")
        while handled() == count:
            assert not limit.passed, "it was not delivered"
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        if before is None or loop.time() - last > HEARTBEAT:
            before, start = await look(), loop.time()
    return before, await look()


async def consumers(mill: Mill, stream: str) -> set[str]:
    return {info.name for info in await mill.jetstream.consumers(stream)}


async def test_a_group_keeps_its_consumer_under_a_trickle(
    mill: Mill, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "READ_AHEAD", replace(holding.READ_AHEAD, heartbeat=HEARTBEAT))
    async with topic.group("g") as group:
        running = asyncio.create_task(group.run(lambda _: None))
        before, after = await before_and_after(
            topic, lambda: group.handled, lambda: consumers(mill, topic.name)
        )
        assert before == after
        assert len(after) == 1
        await group.stop()
        await running


async def test_a_subscription_keeps_its_pull_under_a_trickle(
    mill: Mill, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "Prefetch", lambda **rules: Prefetch(**rules, heartbeat=HEARTBEAT))

    async def pulls() -> int:
        return (await mill.jetstream.consumer_info(topic.name, "s")).num_waiting

    async with topic.subscribe("s") as member:
        running = asyncio.create_task(member.run(lambda _: None))
        before, after = await before_and_after(topic, lambda: member.settled, pulls)
        assert after <= before
        await member.close()
        await running


async def test_a_reader_keeps_its_consumer_under_a_trickle(mill: Mill, topic: Topic) -> None:
    prefetch = Prefetch(heartbeat=HEARTBEAT)
    reader = OrderedConsumer(mill.jetstream, topic.name, Range(), prefetch=prefetch)
    await reader.open()
    count = 0

    def taken() -> int:
        nonlocal count
        count += len(reader.take_now(100))
        return count

    before, after = await before_and_after(topic, taken, lambda: consumers(mill, topic.name))
    assert before == after
    reader.close()


async def test_a_reader_that_doubts_its_consumer_removes_it(mill: Mill, topic: Topic) -> None:
    reader = OrderedConsumer(mill.jetstream, topic.name, Range())
    await reader.open()
    [first] = await consumers(mill, topic.name)
    assert reader._pull is not None
    reader._pull._fail(ApiError(503, 0, "no sign of life"))
    assert reader.take_now(1) == []  # it opens another one

    async def names() -> tuple[int, bool]:
        found = await consumers(mill, topic.name)
        return len(found), first in found

    await eventually(names, (1, False))
    reader.close()


async def test_a_slow_batch_of_direct_reads_is_waited_for_while_messages_come(
    mill: Mill, topic: Topic, millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_reader, "ANSWER_SECONDS", 0.4)
    count = 8
    await topic.publish_many(b"%d" % number for number in range(count))
    async with (
        frame_proxy(millstream_url) as (proxy, url),
        millstream.connect(url) as slow,
    ):
        reader = DirectReader(slow.jetstream, topic.name, Range(1, count + 1), Signal())
        await reader.open()
        proxy.pause = 0.1
        taken = 0
        while not reader.done:
            await reader.signal.wait()
            taken += len(reader.take_now(count))
        assert taken == count
        proxy.pause = 0.0
        reader.close()
