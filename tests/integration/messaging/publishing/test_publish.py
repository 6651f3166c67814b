"""Publishing events: what is stored, what a receipt says, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.aio.client import Client as Peer

import millstream
from millstream.errors import (
    ApiError,
    ConfigError,
    ConnectionClosed,
    LimitReached,
    NoResponders,
    PartlyStored,
    PayloadTooLarge,
    Unconfirmed,
    WrongSequence,
)
from millstream.events.event import Event
from millstream.messaging import NewEvent, PublishOptions, Topic
from millstream.mill import Mill
from millstream.testing import running_broker
from tests.integration.messaging.conftest import Until
from tests.integration.messaging.event_kit import read, values
from tests.integration.messaging.topic_kit import eventually


async def test_an_event_is_read_as_it_was_published(topic: Topic) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    await topic.publish(b"\x00v", "a key", headers={"a": "ü"}, timestamp=moment, id="id 1")
    [event] = await read(topic)
    assert (event.value, event.key, dict(event.headers)) == (b"\x00v", "a key", {"a": "ü"})
    assert (event.timestamp, event.id) == (moment, "id 1")
    assert (event.topic, event.position, event.subject) == ("orders", (0, 1, 0), "orders.a=20key")


async def test_omitted_fields_are_none_or_the_time_of_storing(topic: Topic) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    await topic.publish("text")
    await topic.publish(None, "k")
    plain, empty = await read(topic)
    assert (plain.value, plain.key, dict(plain.headers)) == (b"text", None, {})
    assert before < plain.timestamp < datetime.now(UTC) + timedelta(seconds=1)
    assert plain.id  # made, so that a second copy is recognised
    assert (empty.value, empty.key) == (None, "k")


@pytest.mark.parametrize(
    "key", ["", "a.b", "_x", "*", ">", "ä/ö", "=41", b"\xff\x00", "x" * 1024, "a b\r\nc"]
)
async def test_any_key_comes_back(topic: Topic, key: str | bytes) -> None:
    await topic.publish(b"v", key)
    [event] = await read(topic)
    expected = key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")
    assert event.key == expected
    last = await topic.last(expected)
    assert last is not None
    assert last.offset == 1


async def test_nanoseconds_of_event_time_are_kept(topic: Topic) -> None:
    await topic.publish(b"v", timestamp=1_700_000_000_123_456_789)
    [event] = await read(topic)
    [again] = await topic.get(1)
    assert event.timestamp_ns == again.timestamp_ns == 1_700_000_000_123_456_789


async def test_a_looked_up_event_is_the_one_that_is_read(topic: Topic) -> None:
    await topic.publish(b"v", "k", headers={"a": "b"})

    def facts(event: Event) -> tuple[Any, ...]:
        return event.value, event.key, dict(event.headers), event.timestamp_ns, event.position

    [event] = await read(topic)
    [found] = await topic.get(1)
    last = await topic.last("k")
    assert last is not None
    assert facts(event) == facts(found) == facts(last)
    assert await topic.get(2) == []
    assert await topic.last("other") is None


async def test_a_receipt_has_offset_duplicate_and_durability(topic: Topic) -> None:
    first = await topic.publish(b"a", "k", id="one")
    again = await topic.publish(b"b", "k", id="one")
    other = await topic.publish(b"c", "k")
    assert first == ("orders", 0, 1, False, "fsync")
    assert again == ("orders", 0, 1, True, "fsync")
    assert other.offset == 2
    assert await values(topic) == [b"a", b"c"]


async def test_a_key_stays_in_its_partition_and_in_order(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=4)
    events = [NewEvent(b"%d" % n, f"k{n % 13}") for n in range(130)]
    receipts = await topic.publish_many(events)
    assert {r.partition for r in receipts} == {0, 1, 2, 3}
    for number, receipt in enumerate(receipts):
        assert receipt.partition == zlib.crc32(b"k%d" % (number % 13)) % 4
    by_key: dict[str | None, list[int]] = {}
    for event in await read(topic):
        assert event.partition == zlib.crc32((event.key or "").encode()) % 4
        by_key.setdefault(event.key, []).append(int(event.value))
    assert by_key == {f"k{n}": list(range(n, 130, 13)) for n in range(13)}


async def test_events_without_a_key_are_spread_evenly(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=4)
    receipts = await topic.publish_many([b"x"] * 40)
    assert [sum(r.partition == p for r in receipts) for p in range(4)] == [10] * 4


async def test_many_events_have_receipts_in_the_order_given(topic: Topic) -> None:
    receipts = await topic.publish_many([b"%d" % n for n in range(3000)])
    assert [r.offset for r in receipts] == list(range(1, 3001))
    assert await values(topic) == [b"%d" % n for n in range(3000)]


async def test_refused_events_of_many_are_named_and_the_others_stored(accounts: Topic) -> None:
    await accounts.publish(b"0", "a")
    wrong = PublishOptions(expected_last=7)
    events = [NewEvent(b"1"), NewEvent(b"2", "a", options=wrong), NewEvent(b"3"), NewEvent(4)]
    with pytest.raises(PartlyStored) as caught:
        await accounts.publish_many(events)
    assert (caught.value.total, sorted(caught.value.failed)) == (4, [1, 3])
    assert isinstance(caught.value.failed[1], WrongSequence)
    assert isinstance(caught.value.failed[3], ConfigError)
    assert await values(accounts) == [b"0", b"1", b"3"]


async def test_the_events_of_an_atomic_batch_are_stored_next_to_each_other(topic: Topic) -> None:
    async def busily() -> None:
        await topic.publish_many([b"other"] * 300)

    busy = asyncio.create_task(busily())
    for number in range(5):
        events = [NewEvent(b"%d.%d" % (number, n), "k", headers={"n": str(n)}) for n in range(10)]
        receipts = await topic.publish_atomic(events)
        first = receipts[0].offset
        assert [r.offset for r in receipts] == list(range(first, first + 10))
        found = await read(topic, start=millstream.Start.at_offset(first), end=first + 10)
        assert [event.value for event in found] == [b"%d.%d" % (number, n) for n in range(10)]
        assert dict(found[3].headers) == {"n": "3"}
    await busy


async def test_nothing_of_an_atomic_batch_is_stored_when_one_event_is_refused(
    accounts: Topic,
) -> None:
    await accounts.publish(b"0", "k", id="used")
    with pytest.raises(WrongSequence):
        await accounts.publish_atomic(
            [b"1", NewEvent(b"2", "k", options=PublishOptions(expected_last=9)), b"3"]
        )
    with pytest.raises(ApiError, match="duplicate"):
        await accounts.publish_atomic([b"1", NewEvent(b"2", id="used")])
    with pytest.raises(ConfigError):
        await accounts.publish_atomic([b"1", 2])
    assert await values(accounts) == [b"0"]
    receipts = await accounts.publish_atomic(
        [NewEvent(b"1", "k", options=PublishOptions(expected_last=1)), b"2"]
    )
    assert [r.offset for r in receipts] == [2, 3]


async def test_an_atomic_batch_beyond_a_limit_is_refused_before_it_is_sent(mill: Mill) -> None:
    topic = await mill.create_topic("many", partitions=2)
    assert await topic.publish_atomic([]) == []
    with pytest.raises(ConfigError, match=r"1 to 1,000"):
        await topic.publish_atomic([NewEvent(b"", "k")] * 1001)
    with pytest.raises(ConfigError, match="one partition"):
        await topic.publish_atomic([NewEvent(b"", f"k{n}") for n in range(10)])
    with pytest.raises(ConfigError, match="at most"):
        await topic.publish_atomic([NewEvent(b"x" * 7_000_000, "k")] * 10)
    assert len(await topic.publish_atomic([NewEvent(b"%d" % n, "k") for n in range(1000)])) == 1000
    single = await mill.create_topic("single", atomic=False)
    with pytest.raises(ApiError, match="atomic=True"):
        await single.publish_atomic([b"1", b"2"])


async def test_an_event_expected_to_follow_another_is_stored_only_then(accounts: Topic) -> None:
    def after(offset: int) -> PublishOptions:
        return PublishOptions(expected_last=offset)

    await accounts.publish(b"1", "a", options=after(0))
    await accounts.publish(b"2", "b")
    with pytest.raises(WrongSequence):
        await accounts.publish(b"x", "a", options=after(0))
    with pytest.raises(WrongSequence):
        await accounts.publish(b"x", "a", options=after(2))
    await accounts.publish(b"3", "a", options=after(1))
    assert await values(accounts) == [b"1", b"2", b"3"]


async def test_one_of_many_writers_that_expect_the_same_offset_wins(accounts: Topic) -> None:
    async def write(number: int) -> int:
        options = PublishOptions(expected_last=0)
        return (await accounts.publish(b"%d" % number, "a", options=options)).offset

    results = await asyncio.gather(*map(write, range(20)), return_exceptions=True)
    assert [r for r in results if not isinstance(r, WrongSequence)] == [1]


async def test_a_scheduled_event_appears_in_time_with_key_headers_and_value(mill: Mill) -> None:
    topic = await mill.create_topic("alarms", schedules=True, packs=False)
    await topic.publish(b"now", "k")
    at = datetime.now(UTC) + timedelta(seconds=1)
    for moment, value in ((at + timedelta(hours=1), b"much later"), (at, b"later")):
        options = PublishOptions(deliver_at=moment)
        await topic.publish(value, "k", headers={"a": "b"}, options=options)
    await eventually(lambda: values(topic), [b"now", b"later"])
    found = (await read(topic))[1]
    assert (found.key, dict(found.headers)) == ("k", {"a": "b"})
    assert found.timestamp >= at - timedelta(milliseconds=50)
    vague = PublishOptions(deliver_at=datetime(2027, 1, 1))  # noqa: DTZ001
    with pytest.raises(ConfigError, match="time zone"):
        await topic.publish(b"x", options=vague)
    both = PublishOptions(deliver_at=at, expected_last=0)
    with pytest.raises(ConfigError, match="combined"):
        await topic.publish(b"x", options=both)


async def test_what_a_topic_would_not_honor_is_refused_by_every_way_to_publish(
    mill: Mill,
) -> None:
    topic = await mill.create_topic("short", max_age="1m")
    later = PublishOptions(deliver_at=datetime.now(UTC) + timedelta(hours=1))
    for options, says in (
        (later, "schedules=True"),
        (PublishOptions(ttl=90), "max_age, 1m"),
        (PublishOptions(expected_last=0), "packs=False"),
    ):
        event = NewEvent(b"x", "k", options=options)
        with pytest.raises(ConfigError, match=says):
            await topic.publish(b"x", "k", options=options)
        with pytest.raises(ConfigError, match=says):
            await topic.publish_atomic([event])
        with pytest.raises(PartlyStored) as caught:
            await topic.publish_many([event])
        assert says in str(caught.value.failed[0])
        async with topic.event_producer() as producer:
            with pytest.raises(ConfigError, match=says):
                await producer.send(b"x", "k", options=options)
    assert (await topic.info()).messages == 0


async def test_an_event_with_a_time_to_live_is_gone_after_it(topic: Topic) -> None:
    short = await topic.publish(b"short", options=PublishOptions(ttl=1))
    long = await topic.publish(b"long")
    assert (short.offset, long.offset) == (1, 2)
    await eventually(lambda: values(topic), [b"long"])
    with pytest.raises(ConfigError, match="one second"):
        await topic.publish(b"x", options=PublishOptions(ttl=0.5))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"value": 3}, "a dict or a list"),
        ({"value": b"", "key": "x" * 1025}, "at most"),
        ({"value": b"", "headers": {"Nats-Msg-Id": "x"}}, "reserved"),
        ({"value": b"", "headers": {"Mill-Time": "1"}}, "reserved"),
        ({"value": b"", "headers": {"a": "x" * 70_000}}, "headers of"),
        ({"value": b"", "headers": {"a:b": "c"}}, "header name"),
        ({"value": b"", "headers": {"a": "c\nd"}}, "line end"),
        ({"value": b"", "timestamp": datetime(2026, 1, 1)}, "time zone"),  # noqa: DTZ001
        ({"value": b"", "id": "a\r\nb"}, "line end"),
    ],
)
async def test_invalid_events_are_refused_immediately(
    topic: Topic, wrong: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await topic.publish(**wrong)
    assert await values(topic) == []


async def test_a_value_above_the_servers_limit_is_refused_and_the_connection_survives(
    mill: Mill, topic: Topic
) -> None:
    limit = mill.connection.info.max_payload
    with pytest.raises(PayloadTooLarge) as caught:
        await topic.publish(b"x" * (limit + 1))
    assert caught.value.limit == limit
    await topic.publish(b"x" * (limit - 200))
    assert mill.connection.reconnects == 0


async def test_a_full_topic_that_keeps_the_old_refuses_the_new(mill: Mill) -> None:
    topic = await mill.create_topic("small", discard="new", max_messages=2)
    await topic.publish_many([b"1", b"2"])
    with pytest.raises(LimitReached, match="maximum messages"):
        await topic.publish(b"3")
    assert await values(topic) == [b"1", b"2"]


async def test_publishing_to_a_deleted_topic_is_an_error(mill: Mill, topic: Topic) -> None:
    await mill.delete_topic("orders")

    async def published() -> type[Exception] | None:
        try:
            await topic.publish(b"x", options=PublishOptions(timeout=0.3))
        except (NoResponders, Unconfirmed) as error:
            return type(error)  # unconfirmed: the server was too slow to say it
        return None

    await eventually(published, NoResponders)


async def test_a_publish_that_may_not_wait_gives_up_before_others() -> None:
    with running_broker() as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.create_topic("orders")
            assert broker.pid is not None
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                patient = asyncio.create_task(topic.publish(b"1"))
                with pytest.raises(Unconfirmed):
                    await topic.publish(b"2", options=PublishOptions(timeout=0))
                assert not patient.done()
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            await patient


async def test_publishing_on_a_closed_connection_is_an_error(millstream_url: str) -> None:
    mill = await millstream.connect(millstream_url)
    topic = await mill.create_topic("orders")
    pending = asyncio.gather(*(topic.publish(b"%d" % n) for n in range(100)))
    await asyncio.sleep(0)
    await mill.close()
    await mill.close()
    assert [r.offset for r in await pending] == list(range(1, 101))  # close waits for acks
    with pytest.raises(ConnectionClosed):
        await topic.publish(b"x")


async def test_another_client_reads_and_writes_the_same_topic(topic: Topic, peer: Peer) -> None:
    await topic.publish(b"ours", "k 1", headers={"a": "b"}, id="one")
    stream = peer.jetstream()
    found = await stream.get_msg("orders", 1)
    assert (found.subject, found.data) == ("orders.k=201", b"ours")
    assert found.headers == {"Nats-Msg-Id": "one", "a": "b"}
    ack = await stream.publish("orders.k2", b"theirs", headers={"c": "d"})
    assert ack.seq == 2
    theirs = (await read(topic))[1]
    assert (theirs.key, theirs.value, dict(theirs.headers)) == ("k2", b"theirs", {"c": "d"})


async def test_copies_and_foreign_streams_refuse_events(mill: Mill, topic: Topic) -> None:
    copy = await mill.create_topic("copy", mirror=millstream.Origin("orders"))
    await mill.jetstream.create_stream({"name": "F", "subjects": ["f.>"]})
    foreign = await mill.topic("F")
    for one in (copy, foreign):
        with pytest.raises(ConfigError, match="takes no events"):
            await one.publish(b"x")
    receipt = await mill.publish_acked("f.a", b"v", {"h": "i"}, id="one")
    again = await mill.publish_acked("f.a", b"v", id="one")
    assert (receipt.offset, receipt.duplicate, again.duplicate) == (1, False, True)


async def test_a_cancelled_publish_leaves_the_publisher_intact(
    mill: Mill, topic: Topic, until: Until
) -> None:
    task = asyncio.create_task(topic.publish(b"1"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await topic.publish(b"2")
    await until(lambda: not mill._publisher.in_flight)
    assert (await values(topic))[-1] == b"2"
