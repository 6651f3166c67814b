"""Subscriptions whose members are killed: nothing is lost, not even a dead letter."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

import millstream
from millstream.messaging import NewEvent, SubscriptionSettings, Topic
from tests.integration.messaging.event_kit import ack, nothing, take
from tests.integration.messaging.processes import killed, line, python
from tests.integration.messaging.topic_kit import done_with, eventually, given_up

MEMBER = """
from millstream.messaging.dead_letters.store import DeadLetterStore

async def main():
    url, moment = sys.argv[1:]
    real = DeadLetterStore.store

    async def store(self, *about):
        if moment == "before":
            die()
        await real(self, *about)
        die()

    DeadLetterStore.store = store
    async with millstream.connect(url) as mill:
        topic = await mill.topic("orders")
        member = await topic.subscribe("s")
        async for delivery in member:
            say(f"{delivery.value.decode()} {delivery.attempt}")
            if moment == "handler":
                die()
            delivery.nack(reason="no luck")

asyncio.run(main())
"""


async def end_leases(topic: Topic, seconds: float) -> None:
    """Once the broker knows that the members are dead, have their events redelivered soon.

    Until then leases are long: a member that is stalled for a moment loses nothing.
    """

    async def members() -> int:
        return (await topic.subscriptions.info("s")).waiting_members

    await eventually(members, 0)
    await topic.subscriptions.edit("s", ack_wait=seconds)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_dead_letter_is_stored_once_when_the_process_dies_around_it(
    millstream_url: str, moment: str
) -> None:
    """Killed between the last delivery and the dead letter, and between that and the last ack."""
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        settings = SubscriptionSettings(max_deliver=2, backoff=(0.05,))
        await (await topic.subscribe("s", settings)).close()
        await topic.publish(b"poison", "k")
        async with python(MEMBER, millstream_url, moment) as process:
            assert await line(process) == "poison 1"
            assert await line(process) == "poison 2"
            await killed(process)
        queue = await topic.dead_letters("s")
        assert len(await queue.list()) == (moment == "after")
        await end_leases(topic, 0.2)
        async with topic.subscribe("s") as member:
            await given_up(topic, member)  # it is not handed out a third time
        [letter] = await queue.list()
        assert (letter.value, letter.key) == (b"poison", "k")
        cause = "no luck" if moment == "after" else "not settled in 2 deliveries"
        assert letter.cause == cause


async def test_an_event_that_kills_its_process_ends_as_a_dead_letter(millstream_url: str) -> None:
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        settings = SubscriptionSettings(max_deliver=2)
        await (await topic.subscribe("s", settings)).close()
        await topic.publish(b"poison")
        for attempt in (1, 2):
            async with python(MEMBER, millstream_url, "handler") as process:
                assert await line(process) == f"poison {attempt}"
                await killed(process)
            await end_leases(topic, 0.2)
        async with topic.subscribe("s") as member:
            await given_up(topic, member)
        [letter] = await (await topic.dead_letters("s")).list()
        assert letter.cause == "not settled in 2 deliveries"


async def test_events_of_a_killed_member_go_to_the_others(millstream_url: str) -> None:
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        await (await topic.subscribe("s")).close()
        values = [b"%d" % n for n in range(200)]
        await topic.publish_many([NewEvent(value) for value in values])
        async with python(MEMBER, millstream_url, "handler") as process:
            await line(process)
            await killed(process)
        await end_leases(topic, 3.5)
        async with topic.subscribe("s") as member:
            taken = await take(member, 200)
            assert Counter(ack(taken)) == Counter(values)
            assert max(delivery.attempt for delivery in taken) == 2
            await nothing(member, 0.1)


async def test_a_member_that_was_frozen_loses_its_events_to_others_and_harms_nothing(
    millstream_url: str,
) -> None:
    """A lease that ran out while its holder was stuck; its late ack settles the event once."""
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        settings = SubscriptionSettings(ack_wait=0.2)
        stuck = await topic.subscribe("s", replace(settings))
        await topic.publish(b"v")
        [held] = await take(stuck, 1)
        async with topic.subscribe("s") as other:
            deliveries = asyncio.create_task(take(other, 1))
            await asyncio.sleep(0.4)
            await stuck.close()
            [again] = await deliveries
            assert (held.attempt, again.attempt >= 2) == (1, True)
            held.ack()
            again.ack()
            await done_with(topic, other, 0.4)
