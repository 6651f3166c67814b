"""A receipt of an interest topic says whether the event is kept, and never more than is known."""

from __future__ import annotations

import pytest

from millstream import Mill, NewEvent, Topic
from millstream.errors import ConfigError, NotKept, PartlyStored, Unconfirmed
from millstream.events.event import PublishOptions
from millstream.messaging import SubscriptionSettings
from tests.integration.cli.messaging_commands import Commands
from tests.integration.messaging.event_kit import take

WANTED = PublishOptions(require_interest=True)


@pytest.fixture
async def topic(mill: Mill) -> Topic:
    return await mill.create_topic("t", retention="interest", partitions=2)


async def stored(topic: Topic) -> int:
    return (await topic.info()).messages


async def test_an_event_that_nobody_wants_is_not_reported_as_stored(topic: Topic) -> None:
    assert (await topic.publish(b"1", "k")).durability == "none"
    receipts = await topic.publish_many([b"2", b"3"])
    receipts += await topic.publish_atomic([NewEvent(b"4", "k"), NewEvent(b"5", "k")])
    assert {receipt.durability for receipt in receipts} == {"none"}
    assert await stored(topic) == 0


async def test_an_event_that_somebody_wants_has_the_durability_of_the_topic(topic: Topic) -> None:
    await topic.publish(b"nobody", "k")
    await topic.subscriptions.create("s")
    assert (await topic.publish(b"1", "k")).durability == "fsync"  # it is there: looked up
    receipts = await topic.publish_many([b"2", b"3"])
    assert [receipt.durability for receipt in receipts] == ["fsync", "fsync"]
    assert await stored(topic) == 3


async def test_an_event_that_was_handled_before_its_receipt_was_kept(topic: Topic) -> None:
    """Its subscription existed all the time, so the event cannot have been dropped."""
    async with topic.subscribe("s") as member:
        await topic.publish(b"1", "k")
        (delivery,) = await take(member, 1)
        await delivery.ack_sync()
        check = topic._interest
        assert check is not None
        before = await check.before()
        event = NewEvent(b"2", "k")
        receipt = await topic._publisher.publish_event(event)
        assert receipt.durability == "unknown"  # the ack alone does not say
        (delivery,) = await take(member, 1)
        await delivery.ack_sync()
        (receipt,) = await check.checked(before, [event], [receipt], ["fsync", "fsync"])
    assert receipt.durability == "fsync"
    assert await stored(topic) == 0


async def test_what_nobody_knows_is_not_stated(topic: Topic) -> None:
    """A subscription comes while an event is published, which is gone when it is looked up."""
    check = topic._interest
    assert check is not None
    before = await check.before()
    event = NewEvent(b"1", "k", options=WANTED)
    receipt = await topic._publisher.publish_event(event)
    await topic.subscriptions.create("s")
    (found,) = await check.checked(before, [event], [receipt], ["fsync", "fsync"])
    assert found.durability == "unknown"


async def test_filters_of_subscriptions_count(topic: Topic) -> None:
    await topic.subscriptions.create("s", SubscriptionSettings(keys=("a",)))
    receipts = await topic.publish_many([NewEvent(b"1", "a"), NewEvent(b"2", "b")])
    assert [receipt.durability for receipt in receipts] == ["fsync", "none"]
    assert await stored(topic) == 1


async def test_a_group_and_a_process_want_events(mill: Mill, topic: Topic) -> None:
    await topic.group("g").open()
    assert (await topic.publish(b"1", "k", options=WANTED)).durability == "fsync"


async def test_require_interest_makes_a_dropped_event_an_error(topic: Topic) -> None:
    with pytest.raises(NotKept, match="none wants this one") as caught:
        await topic.publish(b"1", "k", options=WANTED)
    assert caught.value.topic == "t"
    await topic.subscriptions.create("s", SubscriptionSettings(keys=("a",)))
    events = [NewEvent(b"1", "a", options=WANTED), NewEvent(b"2", "b", options=WANTED)]
    with pytest.raises(PartlyStored) as partly:
        await topic.publish_many(events)
    assert {index: type(error) for index, error in partly.value.failed.items()} == {1: NotKept}
    with pytest.raises(PartlyStored):
        await topic.publish_atomic([NewEvent(b"2", "b", options=WANTED)])
    async with topic.event_producer() as producer:
        with pytest.raises(ConfigError, match="publish or publish_many"):
            await producer.send(b"1", "k", options=WANTED)


async def test_a_repeated_id_is_not_taken_for_kept(topic: Topic) -> None:
    """The first event of that id was dropped; the subscription came later."""
    await topic.publish(b"1", "k", id="one")
    await topic.subscriptions.create("s")
    await topic.publish(b"2", "k")  # the subscription is known from here on
    again = await topic.publish(b"1", "k", id="one")
    assert (again.duplicate, again.durability) == (True, "unknown")
    with pytest.raises(Unconfirmed, match="unknown whether"):
        await topic.publish(b"1", "k", id="one", options=WANTED)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_other_retentions_keep_events_without_a_subscription(
    mill: Mill, retention: str
) -> None:
    topic = await mill.create_topic("other", retention=retention)
    assert (await topic.publish(b"1", "k", options=WANTED)).durability == "fsync"
    assert await stored(topic) == 1


def test_the_command_says_that_an_event_is_not_kept(millstream_url: str) -> None:
    run = Commands(millstream_url)
    run("topic", "create", "t", "--retention", "interest")
    assert "Not kept: 1 of 1 event, because nobody subscribes" in run("pub", "-t", "t", "hello")
    assert run.json("pub", "-t", "t", "hello")["durability"] == "none"
    assert "is not kept" in run.error("pub", "-t", "t", "hello", "--require-interest")
    run("subscription", "create", "t", "s")
    assert "Stored" in run("pub", "-t", "t", "hello", "--require-interest")
