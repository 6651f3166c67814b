"""A work queue can be looked into: reading takes nothing from it, and its subscription gets all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import millstream
from millstream import Mill, Topic
from millstream.errors import RequestTimeout
from millstream.events.packs.packing import Packing
from millstream.events.start import Start
from millstream.messaging.reading.verify import Verification
from millstream.testing import running_cluster
from millstream.wire.aio import atomic
from millstream.wire.api import PubAck
from tests.integration.messaging.event_kit import ack, take, values


@pytest.fixture
async def jobs(mill: Mill) -> Topic:
    topic = await mill.create_topic("jobs", retention="workqueue")
    for number in range(5):
        await topic.publish(b"%d" % number, f"k{number % 2}")
    async with topic.producer(Packing(max_events=2)) as producer:
        for number in range(5, 9):
            await producer.send(b"%d" % number, f"k{number % 2}")
    return topic


ALL = [b"%d" % number for number in range(9)]


async def verified(topic: Topic) -> Verification:
    return [report async for report in topic.admin.verify()][-1]


async def test_reading_a_work_queue_takes_nothing_from_it(jobs: Topic) -> None:
    assert await values(jobs) == ALL
    assert await values(jobs, start=Start.at_offset(2), end=4) == ALL[1:3]
    assert await values(jobs, keys=["k1"]) == ALL[1::2]
    assert await values(jobs, start=Start.LAST_PER_KEY) == [b"7", b"8"]
    assert await values(jobs, start=Start.LAST) == [b"7", b"8"]
    assert sum([batch.num_rows async for batch in jobs.batches()]) == len(ALL)
    async with jobs.subscribe("s") as member:
        assert ack(await take(member, len(ALL))) == ALL


async def test_an_event_of_a_work_queue_has_the_same_time_for_every_reader(jobs: Topic) -> None:
    read = [(event.offset, event.timestamp_ns) async for event in jobs.read()]
    async with jobs.subscribe("s") as member:
        taken = [(one.offset, one.timestamp_ns) for one in await take(member, len(ALL))]
    assert read == taken


async def test_reads_of_a_work_queue_leave_nothing_behind(mill: Mill, jobs: Topic) -> None:
    listeners = len(mill.connection.on_connected)
    for _ in range(3):
        assert await values(jobs) == ALL
    assert len(mill.connection.on_connected) == listeners


async def test_following_a_work_queue_sees_what_is_published_later(jobs: Topic) -> None:
    seen = []
    async with asyncio.timeout(60), jobs.subscribe("s") as member:
        async for event in jobs.read(follow=True):
            seen.append(event.value)
            if event.value == ALL[-1]:
                ack(await take(member, len(ALL)))
                await jobs.publish(b"later")
            if event.value == b"later":
                break
    assert seen == [*ALL, b"later"]


async def test_a_work_queue_is_verified_though_subscriptions_take_from_it(jobs: Topic) -> None:
    report = await verified(jobs)
    assert (report.sound, report.events, report.packs) == (True, 9, 2)
    async with jobs.subscribe("s") as member:
        deliveries = await take(member, len(ALL))
        for delivery in deliveries:
            if delivery.value in (b"1", b"5", b"6"):  # one of the packs is gone
                await delivery.ack_sync()
        report = await verified(jobs)
        assert report.sound, report.flaws
        assert report.events == 6


async def test_packs_that_an_interest_topic_removed_are_no_gap(mill: Mill) -> None:
    topic = await mill.create_topic("t")
    async with topic.writer("w", Packing(max_events=1)) as writer:
        for number in range(4):
            await writer.write(b"%d" % number, "k", position=number + 1)
    async with topic.subscribe("s") as member:
        deliveries = await take(member, 4)
        await mill.edit_topic("t", retention="interest")
        await deliveries[1].ack_sync()  # a pack between two others of its writer
        report = await verified(topic)
    assert (report.sound, report.events, report.writers) == (True, 3, 1), report.flaws


async def test_a_foreign_work_queue_without_direct_requests_can_be_read(mill: Mill) -> None:
    config = {"name": "raw", "subjects": ["raw.>"], "retention": "workqueue"}
    await mill.jetstream.create_stream(config)
    for number in range(5):
        await mill.publish_acked(f"raw.{number % 2}", b"%d" % number)
    topic = await mill.topic("raw")
    assert await values(topic) == ALL[:5]
    assert await values(topic, subjects=["raw.1"]) == [b"1", b"3"]


async def test_an_atomic_batch_on_a_work_queue_is_found_when_its_answer_was_lost(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await mill.create_topic("jobs", retention="workqueue")
    real = atomic._attempt

    async def unanswered(*about: Any) -> PubAck:
        await real(*about)
        raise RequestTimeout("jobs", 1.0)

    monkeypatch.setattr(atomic, "_attempt", unanswered)
    receipts = await topic.publish_atomic([b"1", b"2"])
    assert [receipt.offset for receipt in receipts] == [1, 2]
    assert await values(topic) == [b"1", b"2"]


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_replicated_topics_of_every_retention_can_be_read(retention: str) -> None:
    """The server wants a consumer there to have the stream's replicas."""
    async with (
        running_cluster(3) as cluster,
        millstream.connect(cluster.url, connect_timeout=60.0, request_timeout=60.0) as mill,
    ):
        topic = await mill.create_topic("t", retention=retention, replicas=3)
        await topic.subscriptions.create("s")
        for number in range(5):
            await topic.publish(b"%d" % number)
        assert await values(topic) == ALL[:5]
