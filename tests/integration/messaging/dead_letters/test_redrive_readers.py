"""An event redriven for one subscription is delivered to it only; others have read it before."""

from __future__ import annotations

from typing import Any

import pytest

import millstream
from millstream.errors import ConfigError, WrongSequence
from millstream.messaging import (
    DeadLetterQueue,
    Lag,
    NewEvent,
    PublishOptions,
    SubscriptionSettings,
    Topic,
)
from millstream.messaging.process import ProcessSettings
from millstream.messaging.topics.admin import Purge
from millstream.mill import Mill
from millstream.wire.api import ConsumerConfig
from tests.integration.messaging.dead_letters.test_redrive import bury, kept, taken
from tests.integration.messaging.topic_kit import eventually


async def redrive(topic: Topic, count: int, *, to_all: bool = False) -> DeadLetterQueue:
    """Let the next `count` events die in `billing`, and bring them back."""
    queue = await bury(topic, count)
    assert (await queue.redrive(to_all=to_all)).redriven == count
    return queue


async def read(topic: Topic, **choices: Any) -> list[Any]:
    return [event.value async for event in topic.read(**choices)]


async def batches(topic: Topic, **choices: Any) -> list[Any]:
    return [
        value
        async for batch in topic.batches(**choices)
        for value in batch.column("value").to_pylist()
    ]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
async def test_it_is_read_once_as_events_and_as_batches(topic: Topic, packed: bool) -> None:
    values = [b"0", b"1", b"2"]
    if packed:
        async with topic.producer() as producer:
            for value in values:
                await producer.send(value, "k")
    else:
        await topic.publish_many([NewEvent(value, "k") for value in values])
    await redrive(topic, 3)
    assert len(await kept(topic)) == 6
    assert await read(topic) == await batches(topic) == values
    assert await read(topic, keys=["k"]) == await batches(topic, keys=["k"]) == values
    assert await read(topic, subjects=["orders.>"]) == values
    report = [report async for report in topic.admin.verify()][-1]
    assert (report.sound, report.events) == (True, 3)
    await redrive(topic, 3, to_all=True)
    assert await read(topic) == await batches(topic) == values * 2
    report = [report async for report in topic.admin.verify()][-1]
    assert (report.sound, report.events) == (True, 6)


class Account:
    """An aggregate: the sum of a key's events, and the offset of the last one it has seen."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.balance = self.version = 0

    async def load(self) -> Account:
        async for event in self.topic.read(keys=["ann"]):
            self.balance += int(event.value)
            self.version = event.offset
        return self

    async def add(self, amount: int) -> None:
        options = PublishOptions(expected_last=self.version)
        receipt = await self.topic.publish(b"%d" % amount, "ann", options=options)
        self.balance, self.version = self.balance + amount, receipt.offset


async def test_an_aggregate_applies_it_once_and_can_still_be_changed(accounts: Topic) -> None:
    account = Account(accounts)
    await account.add(100)
    await account.add(-30)
    await redrive(accounts, 2)
    await account.add(5)  # what it knew before the redrive is still the last
    loaded = await Account(accounts).load()
    assert (loaded.balance, loaded.version) == (75, account.version)
    await loaded.add(1)
    with pytest.raises(WrongSequence):
        await account.add(1)
    async with accounts.subscribe("billing") as member:
        given = [(d.key, int(d.value)) for d in await taken(member, 4)]
    assert sorted(given) == [("ann", -30), ("ann", 1), ("ann", 5), ("ann", 100)]


async def test_a_table_keeps_its_values_when_an_older_one_is_redriven(mill: Mill) -> None:
    table = await mill.create_table("prices")
    topic = table.topic
    await table.put("tea", b"1")
    queue = await bury(topic, 1)
    revision = await table.put("tea", b"2")
    assert (await queue.redrive()).redriven == 1
    entry = await table.get("tea")
    assert entry is not None
    assert (entry.value, entry.revision, await table.revision("tea")) == (b"2", revision, revision)
    assert await table.as_dict() == {"tea": b"2"}
    async for change in table.changes():
        assert (change.value, change.revision) == (b"2", revision)
        break
    last = await topic.last("tea")
    assert last is not None
    assert (last.value, last.offset) == (b"2", revision)
    await table.put("tea", b"3", revision=revision)
    async with topic.subscribe("billing") as member:
        assert [(d.key, d.value) for d in await taken(member, 2)] == [
            ("tea", b"1"),
            ("tea", b"3"),
        ]


async def test_it_is_returned_by_get_with_its_offset(topic: Topic) -> None:
    await topic.publish(b"v", "k")
    await redrive(topic, 1)
    [copy] = (await kept(topic))[1:]
    [event] = await topic.get(copy.offset)
    assert (event.key, event.value, event.subject) == ("k", b"v", "orders._for.billing.k")


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("chosen", ["keys", "subjects"])
async def test_a_subscription_of_some_events_gets_them_back(
    mill: Mill, chosen: str, partitions: int
) -> None:
    topic = await mill.create_topic("orders", partitions=partitions)
    prefix = "orders" if partitions == 1 else "orders.*"
    settings = (
        SubscriptionSettings(keys=("a", "b"))
        if chosen == "keys"
        else SubscriptionSettings(subjects=(f"{prefix}.a", f"{prefix}.b"))
    )
    await (await topic.subscribe("billing", settings)).close()
    await topic.publish_many([NewEvent(key.encode(), key) for key in "abc"])
    await redrive(topic, 2)
    assert (await topic.subscriptions.info("billing")).settings == settings
    async with topic.subscribe("billing", settings) as member:
        assert sorted(d.key for d in await taken(member, 2)) == ["a", "b"]
    assert await topic.subscriptions.edit("billing", max_in_flight=7) is not None
    await eventually(lambda: topic.subscriptions.lag("billing"), Lag(0, 0.0))


async def test_filters_of_another_tool_that_exclude_it_are_refused(
    mill: Mill, topic: Topic
) -> None:
    config = ConsumerConfig(
        durable_name="billing", name="billing", ack_policy="explicit", filter_subject="orders.k"
    )
    await mill.jetstream.create_consumer("orders", config, "create")
    await topic.publish(b"v", "k")
    queue = await bury(topic, 1)
    with pytest.raises(ConfigError, match=r"orders\._for\.billing\.>.*subscriptions\.edit"):
        await queue.redrive()
    assert len(await queue.list()) == 1
    await topic.subscriptions.edit("billing")
    assert (await queue.redrive()).redriven == 1
    async with topic.subscribe("billing") as member:
        assert [d.value for d in await taken(member, 1)] == [b"v"]


async def test_a_process_receives_only_its_own_dead_letters_again(mill: Mill, topic: Topic) -> None:
    target = await mill.create_topic("out")
    settings = ProcessSettings("copying", on_error="dead_letter")
    bad = True

    def copy(event: millstream.Event) -> NewEvent:
        if bad and event.value == b"1":
            raise ValueError("not now")
        return NewEvent(event.value, event.key)

    await topic.publish_many([NewEvent(b"%d" % n, "k") for n in range(3)])
    await redrive(topic, 3)
    await mill.process(topic, target, copy, settings).run(once=True)
    bad = False
    queue = await topic.dead_letters("copying")
    assert (await queue.redrive()).redriven == 1
    await mill.process(topic, target, copy, settings).run(once=True)
    found = [(event.key, event.value) async for event in target.read()]
    assert found == [("k", b"0"), ("k", b"2"), ("k", b"1")]


async def test_purging_a_key_also_removes_its_redriven_events(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"a", "a"), NewEvent(b"b", "b")])
    await redrive(topic, 2)
    assert await topic.admin.purge(Purge(key="a")) == 2
    assert [event.key for event in await kept(topic)] == ["b", "b"]
