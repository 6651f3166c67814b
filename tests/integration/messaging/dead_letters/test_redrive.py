"""Dead letters brought back to their topics, in order and exactly once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

import millstream
from millstream.errors import (
    DeadLetterNotFound,
    RedriveTaken,
    SubscriptionNotFound,
    TopicNotFound,
)
from millstream.events.unpack import events_in
from millstream.messaging import (
    DeadLetterFilter,
    DeadLetterQueue,
    Event,
    GroupEvent,
    NewEvent,
    ReadPlan,
    RedriveReport,
    Reject,
    Subscription,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from tests.integration.messaging.event_kit import ack, nothing, take
from tests.integration.messaging.processes import killed, python
from tests.integration.messaging.topic_kit import eventually


async def bury(topic: Topic, count: int, subscription: str = "billing") -> DeadLetterQueue:
    """Make the next `count` events dead letters of a subscription."""
    async with topic.subscribe(subscription) as member:
        async for delivery in member:
            delivery.terminate(f"bad {delivery.key}")
            count -= 1
            if not count:
                break
    return await topic.dead_letters(subscription)


async def taken(member: Subscription, count: int) -> list[Any]:
    """The next `count` deliveries, acknowledged; nothing comes after them for a while."""
    found = await take(member, count)
    ack(found)
    await nothing(member, 0.1)
    return found


async def kept(topic: Topic, start: int = 1) -> list[Event]:
    """All that is stored, also what was redriven for one subscription."""
    plan = ReadPlan(start=millstream.Start.at_offset(start))
    return [
        event
        async for source, messages in topic.admin.read_messages(plan)
        for raw in messages
        for event in events_in(source, raw)
    ]


async def stored(topic: Topic, start: int = 1) -> list[Any]:
    return [event.value for event in await kept(topic, start)]


async def test_redriven_events_go_back_to_their_topic_as_they_were(topic: Topic) -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    await topic.publish(b"v", "k.1", headers={"a": "b"}, timestamp=moment, id="id-1")
    await topic.publish(None, "k.1")
    await topic.publish(b"keyless")
    queue = await bury(topic, 3)
    report = await queue.redrive()
    assert (report.redriven, report.recovered) == (3, 0)
    assert await queue.list() == []
    await bury(topic, 3)
    events = await kept(topic, 4)
    assert [(event.key, event.value) for event in events] == [
        ("k.1", b"v"),
        ("k.1", None),
        (None, b"keyless"),
    ]
    first = events[0]
    assert (first.id, first.timestamp, dict(first.headers)) == ("id-1", moment, {"a": "b"})
    assert first.subject == "orders._for.billing.k=2E1"
    await queue.redrive(to_all=True)  # they were redriven, and dead-lettered again
    again = [event async for event in topic.read(start=millstream.Start.at_offset(7))]
    assert [(event.key, event.value) for event in again] == [
        ("k.1", b"v"),
        ("k.1", None),
        (None, b"keyless"),
    ]
    assert (again[0].id, again[0].timestamp, again[0].subject) == ("id-1", moment, "orders.k=2E1")


async def test_only_the_subscription_that_dead_lettered_the_event_gets_it_again(
    topic: Topic,
) -> None:
    await topic.publish(b"v", "k")
    async with topic.subscribe("audit") as audit:
        await taken(audit, 1)
        queue = await bury(topic, 1)
        await queue.redrive()
        await topic.publish(b"next", "k")
        assert [d.value for d in await taken(audit, 1)] == [b"next"]
        queue = await bury(topic, 2)
        assert [letter.value for letter in await queue.list()] == [b"v", b"next"]
        assert [letter.redrives for letter in await queue.list()] == [1, 0]
        await queue.redrive(to_all=True)
        assert [d.value for d in await taken(audit, 2)] == [b"v", b"next"]


async def test_a_dry_run_counts_and_changes_nothing(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 2}") for n in range(4)])
    queue = await bury(topic, 4)
    before = await queue.list()
    report = await queue.redrive(DeadLetterFilter(keys=("k1",)), dry_run=True)
    assert report.redriven == 2
    assert await queue.list() == before
    assert len(await stored(topic)) == 4


async def test_a_chosen_part_is_redriven_and_the_rest_stays(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 2}") for n in range(6)])
    queue = await bury(topic, 6)
    assert (await queue.redrive(DeadLetterFilter(keys=("k1",), limit=2))).redriven == 2
    assert [letter.value for letter in await queue.list()] == [b"0", b"2", b"4", b"5"]
    assert (await queue.redrive()).redriven == 4
    assert (await stored(topic, 7)) == [b"1", b"3", b"0", b"2", b"4", b"5"]


async def test_events_of_a_key_are_redriven_in_their_order(
    mill: Mill,
) -> None:
    topic = await mill.create_topic("many", partitions=3)
    events = [NewEvent(b"%d" % n, f"k{n % 7}") for n in range(70)]
    await topic.publish_many(events)
    async with topic.subscribe("billing") as member:
        deliveries: list[Any] = []
        while len(deliveries) < 70:
            deliveries.extend(await member.pull())
        for delivery in reversed(deliveries):
            delivery.terminate("bad")
    queue = await topic.dead_letters("billing")
    letters = await queue.list()
    assert [letter.value for letter in letters] == [d.value for d in reversed(deliveries)]
    assert (await queue.redrive()).redriven == 70
    by_key: dict[str | None, list[int]] = {}
    places: dict[str | None, set[int]] = {}
    for event in await kept(topic):
        by_key.setdefault(event.key, []).append(int(event.value))
        places.setdefault(event.key, set()).add(event.partition)
    for number in range(7):
        wanted = list(range(number, 70, 7))
        assert by_key[f"k{number}"] == wanted + wanted
        assert len(places[f"k{number}"]) == 1


async def test_events_of_packs_are_listed_edited_and_redriven_alone(topic: Topic) -> None:
    async with topic.producer() as producer:
        for number in range(4):
            await producer.send(b"%d" % number, "k", headers={"n": str(number)}, id=f"id-{number}")
    async with topic.subscribe("billing") as member:
        for delivery in await member.pull(4):
            if delivery.value in (b"1", b"2"):
                delivery.terminate("bad")
            else:
                delivery.ack()
    queue = await topic.dead_letters("billing")
    first, second = await queue.list()
    assert (first.value, first.key, first.id, dict(first.headers)) == (
        b"1",
        "k",
        "id-1",
        {"n": "1"},
    )
    assert (first.origin_offset, first.origin_index, second.origin_index) == (1, 1, 2)
    edited = await queue.edit(second.offset, value="two", headers={"fixed": "yes"})
    assert (edited.value, dict(edited.headers), edited.id) == (b"two", {"fixed": "yes"}, "id-2")
    assert (await queue.redrive()).redriven == 2
    async with topic.subscribe("billing") as member:
        again = await taken(member, 2)
    assert [(d.value, d.key, d.id, d.offset > 1) for d in again] == [
        (b"1", "k", "id-1", True),
        (b"two", "k", "id-2", True),
    ]


async def test_a_damaged_pack_becomes_a_letter_that_does_not_stop_the_others(
    mill: Mill, topic: Topic
) -> None:
    headers = {"Mill-Pack": "1", "Mill-Count": "1", "Mill-Checksum": "00000000"}
    await mill.publish_acked("orders._pack.w", b"rubbish", headers)
    await topic.publish(b"v", "k")
    async with topic.subscribe("billing") as member:
        [delivery] = await member.pull()
        delivery.ack()
    queue = await topic.dead_letters("billing")
    [letter] = await queue.list()
    assert letter.value == b"rubbish"
    assert letter.cause.startswith("not a valid pack")
    dead = await mill.topic(queue.name)
    assert [event.value async for event in dead.read()] == [b"rubbish"]
    await queue.redrive()
    async with topic.subscribe("billing") as member:

        async def redrives() -> list[int]:
            await nothing(member, 0.1)  # still damaged: dead-lettered again
            return [letter.redrives for letter in await queue.list()]

        await eventually(redrives, [1])


async def test_subscriptions_that_share_a_dead_letter_topic_keep_their_own_letters(
    topic: Topic,
) -> None:
    shared = SubscriptionSettings(dead_letter="graveyard")
    for name in ("a", "b"):
        await (await topic.subscribe(name, shared)).close()
    await topic.publish(b"v")
    await bury(topic, 1, "a")
    queue = await bury(topic, 1, "b")
    assert [letter.subscription for letter in await queue.list()] == ["a", "b"]
    assert (await queue.redrive(DeadLetterFilter(subscription="b"))).redriven == 1
    async with topic.subscribe("a") as a, await topic.subscribe("b") as b:
        await taken(b, 1)
        await nothing(a)


async def test_an_existing_dead_letter_topic_is_used_with_its_settings(
    mill: Mill, topic: Topic
) -> None:
    await mill.create_topic("orders-billing-dead", max_age="30d", prefix="dead.orders")
    await topic.publish(b"v")
    queue = await bury(topic, 1)
    assert [letter.value for letter in await queue.list()] == [b"v"]
    assert (await queue.redrive()).redriven == 1


async def test_what_cannot_be_redriven_says_why(mill: Mill, topic: Topic) -> None:
    await topic.publish(b"v")
    queue = await bury(topic, 1)
    await mill.delete_topic("orders")
    with pytest.raises(TopicNotFound):
        await queue.redrive()
    assert len(await queue.list()) == 1


async def test_events_of_a_foreign_stream_go_back_to_their_subjects(mill: Mill) -> None:
    await mill.jetstream.create_stream({"name": "FOREIGN", "subjects": ["f.*.x"]})
    await mill.publish_acked("f.a.x", b"v")
    topic = await mill.topic("FOREIGN")
    queue = await bury(topic, 1)
    assert (await queue.redrive()).redriven == 1
    events = await kept(topic)
    assert [(event.subject, event.value) for event in events] == [("f.a.x", b"v")] * 2
    assert [event.offset async for event in topic.read()] == [1]
    async with topic.subscribe("billing") as member:
        assert [d.offset for d in await taken(member, 1)] == [2]


async def test_events_of_a_work_queue_come_back_while_members_run(mill: Mill) -> None:
    topic = await mill.create_topic("jobs", retention="workqueue")
    await topic.publish_many([b"%d" % n for n in range(20)])
    queue = await bury(topic, 20)
    async with topic.subscribe("billing") as member:
        reading = asyncio.create_task(taken(member, 20))
        assert (await queue.redrive()).redriven == 20
        assert [d.value for d in await reading] == [b"%d" % n for n in range(20)]


async def test_a_redrive_removes_its_records(mill: Mill, topic: Topic) -> None:
    await topic.publish_many([b"%d" % n for n in range(5)])
    queue = await bury(topic, 5)
    await queue.redrive()
    state = (await mill.jetstream.stream_info("orders")).state
    assert (state.messages, state.num_subjects) == (10, 2)  # the events' own, the redriven ones'


REDRIVE = """
from millstream.messaging.dead_letters import redrive
from millstream.wire.aio.jetstream import JetStream

async def main():
    url, stage = sys.argv[1:]
    begun = deleted = 0
    real = JetStream.delete_message

    async def delete(self, stream, sequence, erase=False):
        nonlocal begun, deleted
        letter = stream.endswith("-dead")
        begun += letter
        if begun > int(stage):
            while deleted < int(stage):
                await asyncio.sleep(0.005)
            die()
        await real(self, stream, sequence, erase)
        deleted += letter

    async def batch(*_):
        die()

    if stage == "claimed":
        redrive.publish_batch = batch
    else:
        JetStream.delete_message = delete
    async with millstream.connect(url) as mill:
        topic = await mill.topic("orders")
        await (await topic.dead_letters("billing")).redrive()

asyncio.run(main())
"""


@pytest.mark.parametrize("stage", ["claimed", "0", "3"])
async def test_a_redrive_killed_in_the_middle_is_finished_by_the_next_one(
    topic: Topic, millstream_url: str, stage: str
) -> None:
    """Killed before anything is stored, before the first letter is removed, and after the third."""
    values = [b"%d" % n for n in range(10)]
    await topic.publish_many([NewEvent(value, "k") for value in values])
    queue = await bury(topic, 10)
    async with python(REDRIVE, millstream_url, stage) as process:
        await killed(process)
    done = 0 if stage == "claimed" else 10
    assert len(await stored(topic, 11)) == done
    left = await queue.list()
    assert len(left) == (7 if stage == "3" else 10)
    if done:
        with pytest.raises(DeadLetterNotFound, match="redriven"):
            await queue.edit(left[-1].offset, value=b"too late")
    report = await queue.redrive()
    assert (report.redriven, report.recovered) == (10 - done, len(left) if done else 0)
    assert await stored(topic, 11) == values
    assert await queue.list() == []
    async with topic.subscribe("billing") as member:
        assert [d.value for d in await taken(member, 10)] == values


async def test_two_concurrent_redrives_store_each_event_once(topic: Topic) -> None:
    values = [b"%d" % n for n in range(50)]
    await topic.publish_many([NewEvent(value, "k") for value in values])
    queue = await bury(topic, 50)
    results = await asyncio.gather(*(queue.redrive() for _ in range(4)), return_exceptions=True)
    assert all(isinstance(result, RedriveTaken | RedriveReport) for result in results), results
    await queue.redrive()
    assert await stored(topic, 51) == values
    assert await queue.list() == []


async def test_a_note_of_an_older_queue_removes_no_letter_of_a_new_one(
    mill: Mill, topic: Topic, millstream_url: str
) -> None:
    await topic.publish(b"old")
    await bury(topic, 1)
    async with python(REDRIVE, millstream_url, "0") as process:
        await killed(process)  # the note says that letter 1 is done
    await mill.delete_topic("orders-billing-dead")
    async with topic.subscribe("billing") as member:
        await taken(member, 1)
    await topic.publish(b"new")
    queue = await bury(topic, 1)
    assert [letter.offset for letter in await queue.list()] == [1]
    assert (await queue.redrive()).redriven == 1
    assert (await stored(topic))[-1] == b"new"


async def test_an_event_dead_lettered_by_a_group_is_redriven_to_that_group_only(
    topic: Topic,
) -> None:
    await topic.publish(b"v", "k")
    calls: list[tuple[str, bytes]] = []
    bad = True

    async def refuse(event: GroupEvent) -> None:
        calls.append(("refusing", event.value))
        if bad:
            raise Reject("not yet")

    async def accept(event: GroupEvent) -> None:
        calls.append(("accepting", event.value))

    async with topic.group("refusing") as one, topic.group("accepting") as two:
        running = [asyncio.create_task(one.run(refuse)), asyncio.create_task(two.run(accept))]
        await eventually(lambda: buried(topic), 1)
        await eventually(lambda: called(calls), 2)
        bad = False
        queue = await topic.dead_letters("refusing")
        assert (await queue.redrive()).redriven == 1
        await topic.publish(b"end", "k")
        await eventually(lambda: called(calls), 5)
        await asyncio.gather(one.stop(), two.stop())
        await asyncio.gather(*running)
    assert [value for name, value in calls if name == "refusing"] == [b"v", b"v", b"end"]
    assert [value for name, value in calls if name == "accepting"] == [b"v", b"end"]


async def buried(topic: Topic) -> int:
    try:
        return len(await (await topic.dead_letters("refusing")).list())
    except SubscriptionNotFound:
        return 0


async def called(calls: list[tuple[str, bytes]]) -> int:
    return len(calls)


async def test_an_expired_key_stays_deleted_as_a_dead_letter_and_when_it_is_redriven(
    mill: Mill,
) -> None:
    topic = await mill.create_topic("sessions", history=1, marker_ttl="1m")
    await topic.publish(b"v", "ada", options=millstream.PublishOptions(ttl=1))
    async with await topic.subscribe("billing") as member:
        async for delivery in member:
            if delivery.value is not None:
                delivery.ack()
                continue
            delivery.terminate("expired")
            break
    queue = await topic.dead_letters("billing")
    assert [letter.value for letter in await queue.list()] == [None]
    await queue.redrive()
    async with await topic.subscribe("billing") as member:
        (redriven,) = await taken(member, 1)
    assert (redriven.key, redriven.value) == ("ada", None)
