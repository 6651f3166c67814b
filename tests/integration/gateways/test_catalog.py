"""Topics as Kafka's clients find them, and their open partitions, on a real broker."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from millstream.deadline import Deadline
from millstream.gateways.kafka import catalog as catalog_module
from millstream.gateways.kafka.catalog import UnknownTopic
from millstream.gateways.kafka.kafka_topic import TopicRefused
from millstream.messaging import TopicSettings
from millstream.messaging.topics import admin
from millstream.mill import Mill
from millstream.wire.aio.jetstream import JetStream
from tests.integration.gateways.topic_wire import (
    FakeLog,
    Kafka,
    MakeKafka,
    kafka,
    make,
    mill,
    native,
)

__all__ = ["kafka", "make", "mill", "native"]


# -- finding ------------------------------------------------------------------------------


async def test_a_topic_of_a_native_client_is_found_at_once(make: MakeKafka, native: Mill) -> None:
    kafka = make()
    assert await kafka.catalog.find("orders") is None
    await native.create_topic("orders", partitions=3)
    deadline = Deadline(60.0)
    while (found := await kafka.catalog.find("orders")) is None:
        assert not deadline.passed
        await asyncio.sleep(0.01)
    assert (found.name, found.topic, found.partitions) == ("orders", "orders", 3)
    assert found.streams == ("orders-0", "orders-1", "orders-2")
    assert found.subjects.prefixes == ("orders.0", "orders.1", "orders.2")
    assert found.max_message_bytes == 1_048_588


async def test_what_many_ask_for_is_looked_up_once(
    make: MakeKafka, native: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = make(fresh_seconds=600.0)
    await native.create_topic("orders")
    asked: list[str] = []
    info = JetStream.stream_info

    async def counted(self: JetStream, name: str, timeout: float | None = None) -> Any:
        asked.append(name)
        return await info(self, name, timeout)

    monkeypatch.setattr(JetStream, "stream_info", counted)
    found = await asyncio.gather(*(kafka.catalog.find("orders") for _ in range(50)))
    assert len(set(map(id, found))) == 1
    assert await kafka.catalog.find("orders") is found[0]
    assert sorted(asked) == ["orders", "orders-0"]


async def test_a_topic_that_was_made_again_has_another_id(kafka: Kafka, native: Mill) -> None:
    await native.create_topic("orders", partitions=2)
    first = await kafka.catalog.find("orders")
    assert first is not None
    old = await kafka.catalog.log("orders", 0)
    assert await kafka.catalog.log("orders", 0) is old
    again = await kafka.catalog.find("orders")
    assert again is not None
    assert again.id == first.id
    await native.delete_topic("orders")
    assert await kafka.catalog.find("orders") is None
    with pytest.raises(UnknownTopic):
        await kafka.catalog.log("orders", 0)
    await native.create_topic("orders", partitions=2)
    new = await kafka.catalog.log("orders", 0)
    assert new is not old
    assert [log.closed for log in kafka.logs] == [1, 0]
    found = await kafka.catalog.find("orders")
    assert found is not None
    assert found.id != first.id


async def test_a_partition_is_opened_once_and_again_when_it_failed(
    kafka: Kafka, native: Mill
) -> None:
    await native.create_topic("orders", partitions=2)
    opened = await asyncio.gather(*(kafka.catalog.log("orders", 1) for _ in range(20)))
    assert len(set(map(id, opened))) == 1
    assert kafka.catalog.leader_epoch("orders", 1) == 3
    assert kafka.catalog.leader_epoch("orders", 0) == 0
    for index in (-1, 2):
        with pytest.raises(UnknownTopic):
            await kafka.catalog.log("orders", index)
    cast(FakeLog, opened[0]).failed = True
    assert await kafka.catalog.log("orders", 1) is not opened[0]
    assert [log.closed for log in kafka.logs] == [1, 0]
    await kafka.catalog.close()
    assert [log.closed for log in kafka.logs] == [1, 1]
    with pytest.raises(UnknownTopic):
        await kafka.catalog.log("orders", 1)


async def test_partitions_of_a_deleted_topic_are_closed_though_nobody_asks(
    kafka: Kafka, native: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "SWEEP_SECONDS", 0.01)
    await native.create_topic("orders")
    await kafka.catalog.log("orders", 0)
    await native.delete_topic("orders")
    deadline = Deadline(60.0)
    while not kafka.logs[0].closed and not deadline.passed:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert [log.closed for log in kafka.logs] == [1]


async def test_only_what_clients_can_read_is_seen(kafka: Kafka, native: Mill) -> None:
    await native.create_topic("log")
    await native.create_topic("queue", retention="workqueue")
    await native.create_topic("wanted", retention="interest")
    await native.create_topic("copy", mirror="log")
    await native.create_table("stock")
    await native.create_table("kafka-offsets")
    await native.create_table("mill-own")
    await native.jetstream.create_stream({"name": "foreign", "subjects": ["f.>"]})
    await native.create_topic("parts", partitions=2)
    await native.create_topic("broken", partitions=2)
    await native.jetstream.delete_stream("broken-1")
    assert await kafka.names() == ["copy", "log", "parts", "stock"]
    for name in ("queue", "wanted", "kafka-offsets", "mill-own", "foreign", "parts-0", "broken"):
        assert await kafka.catalog.find(name) is None
    values = await kafka.values("stock")
    assert values["cleanup.policy"] == "compact"


async def test_many_names_are_looked_up_together(kafka: Kafka, native: Mill) -> None:
    for number in range(3):
        await native.create_topic(f"t{number}")
    names = [f"t{number}" for number in range(1000)]
    found = await kafka.catalog.find_many(names)
    assert sorted(found) == ["t0", "t1", "t2"]


async def test_what_is_remembered_is_bounded(make: MakeKafka, native: Mill) -> None:
    kafka = make(topics_max=2)
    for number in range(4):
        await native.create_topic(f"t{number}")
        assert await kafka.catalog.find(f"t{number}") is not None
    assert len(kafka.catalog._known) == 2


# -- the partitioner ----------------------------------------------------------------------


async def test_the_partitioner_is_recorded_beside_other_changes(kafka: Kafka, native: Mill) -> None:
    await native.create_topic("orders", partitions=3)
    await asyncio.gather(
        kafka.catalog.record_partitioner("orders", "murmur2"),
        kafka.alter("orders", retention_ms="5000", segment_ms="77"),
        kafka.catalog.record_partitioner("orders", "murmur2"),
    )
    info = await (await native.topic("orders")).info()
    assert (info.settings.partitioner, info.uneven) == ("murmur2", False)
    values = await kafka.values("orders")
    assert (values["retention.ms"], values["segment.ms"]) == ("5000", "77")
    await kafka.catalog.record_partitioner("orders", "any")
    await kafka.catalog.record_partitioner("orders", "murmur2")  # what is known is not unlearned
    assert (await native.topic("orders")).settings.partitioner == "any"
    await kafka.catalog.record_partitioner("none", "any")


async def test_a_partitioner_that_another_client_overwrote_is_recorded_again(
    kafka: Kafka, native: Mill
) -> None:
    await native.create_topic("orders", partitions=2)
    await kafka.catalog.record_partitioner("orders", "murmur2")
    await admin.edit(native.jetstream, "orders", {"partitioner": None})
    deadline = Deadline(60.0)
    while (await native.topic("orders")).settings.partitioner is None:
        assert not deadline.passed
        await kafka.catalog.find("orders")
        await asyncio.sleep(0.01)
    # It belongs to this topic, not to one that has its name later.
    await native.delete_topic("orders")
    await native.create_topic("orders", partitions=2)
    for _ in range(5):
        await kafka.catalog.find("orders")
    assert (await native.topic("orders")).settings.partitioner is None


async def test_a_topic_is_not_opened_while_it_is_deleted(kafka: Kafka, native: Mill) -> None:
    await kafka.create("orders")
    topic = await kafka.catalog.find("orders")
    assert topic is not None
    await kafka.catalog.log("orders", 0)
    deleting = asyncio.create_task(kafka.catalog.delete(topic))
    while not deleting.done():
        try:
            await kafka.catalog.log("orders", 0)
        except UnknownTopic:
            assert kafka.open_logs == 0
        await asyncio.sleep(0)
    await deleting
    assert kafka.open_logs == 0
    assert all(log.closed == 1 for log in kafka.logs)
    with pytest.raises(TopicRefused):
        await kafka.catalog.delete(topic)
    with pytest.raises(TopicRefused):
        await kafka.catalog.create("a b", TopicSettings())


async def test_a_topic_is_deleted_while_a_partition_records_how_keys_were_sent(
    kafka: Kafka, native: Mill
) -> None:
    await kafka.create("orders")
    topic = await kafka.catalog.find("orders")
    assert topic is not None
    await kafka.catalog.log("orders", 0)
    deleting = asyncio.create_task(kafka.catalog.delete(topic))
    # It begins after the deletion did, and the partition is not closed before it has ended.
    recording = asyncio.create_task(kafka.catalog.record_partitioner("orders", "murmur2"))
    kafka.logs[0].recording = recording
    async with asyncio.timeout(20):
        await asyncio.gather(deleting, recording)
    assert kafka.logs[0].closed == 1
    assert await kafka.catalog.find("orders") is None
