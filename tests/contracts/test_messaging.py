"""What the connection promises, said once and tried on both of its kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pyarrow as pa
import pytest

from millstream import Columns, NewEvent, Start, SubscriptionSettings, TopicSettings
from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    NoMessage,
    NoResponders,
    PartlyStored,
    ServiceError,
    SubscriptionConflict,
    SubscriptionNotFound,
    TopicConflict,
    TopicNotFound,
)
from millstream.messaging import GroupSettings, SubscriberSettings
from millstream.messaging.topics.admin import Purge
from tests.books import balanced

MEMORY = {"storage": "memory"}


async def take(items: AsyncIterator[Any], count: int) -> list[Any]:
    found = []
    async with asyncio.timeout(25):
        async for item in items:
            found.append(item)
            if len(found) == count:
                break
    return found


# -- settings as keywords -----------------------------------------------------------------


async def test_a_subscription_takes_its_settings_as_keywords(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    async with topic.subscribe("s", max_deliver=3, ack_wait="1m30s", keys="ann", backoff=2) as s:
        assert s.settings == SubscriptionSettings(
            max_deliver=3, ack_wait=90, keys=("ann",), backoff=(2,)
        )
    assert (await topic.subscriptions.edit("s", ack_wait="2s")).ack_wait == 2
    assert (await topic.subscriptions.create("t", max_deliver=2)).max_deliver == 2


async def test_an_unknown_keyword_names_the_near_one(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    calls: dict[str, Callable[[], Any]] = {
        "max_age": lambda: mill.create_topic("other", maxage="7d"),
        "schema": lambda: mill.create_topic("other", schemas=int),
        "max_bytes": lambda: mill.edit_topic("orders", max_byte=5),
        "history": lambda: mill.create_table("other", histori=1),
        "max_deliver": lambda: topic.subscribe("s", max_delivers=3).open(),
        "ack_wait": lambda: topic.subscriptions.create("s", ackwait=3),
        "backoff": lambda: topic.subscriptions.edit("s", backof=3),
        "concurrency": lambda: topic.group("g", concurency=3),
        "member_id": lambda: topic.group("g", memberid="m"),
        "on_error": lambda: topic.process(topic, print, onerror="stop"),
        "follow": lambda: topic.read(folow=True),
        "queue": lambda: mill.subscribe("a", queu="q"),
        "handler": lambda: mill.subscribe("a", handle=print),
        "heartbeat": lambda: mill.claim("me", heartbeats=1),
        "description": lambda: mill.service("s", "1.0.0", descripton="d"),
        "window_bytes": lambda: mill.paced("a", window_byte=4),
        "drop_constraints": lambda: mill.schemas.register("orders", int, drop_constraint=True),
    }
    for near, call in calls.items():
        with pytest.raises(
            ConfigError, match=f"unknown setting .*: did you mean '{near}'"
        ) as found:
            await call()
        assert isinstance(found.value, ValueError)


async def test_settings_and_keywords_together_are_refused(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    calls: list[Callable[[], Any]] = [
        lambda: topic.subscribe("s", SubscriptionSettings(), max_deliver=3).open(),
        lambda: mill.create_topic("other", TopicSettings(), replicas=1),
        lambda: topic.group("g", GroupSettings(), concurrency=1),
        lambda: mill.subscribe("a", SubscriberSettings(), queue="q"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="not both"):
            await call()
    with pytest.raises(ConfigError, match="dict is not SubscriptionSettings"):
        await topic.subscribe("s", {"max_deliver": 3}).open()


# -- topics -------------------------------------------------------------------------------


async def test_a_published_event_is_read_back_as_it_was(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    receipt = await topic.publish(b"tea", "ann", headers={"Trace": "1"}, timestamp=5, id="a-1")
    assert (receipt.topic, receipt.partition, receipt.offset) == ("orders", 0, 1)
    [event] = [event async for event in topic.read()]
    assert (event.value, event.key, event.id, event.timestamp_ns) == (b"tea", "ann", "a-1", 5)
    assert dict(event.headers) == {"Trace": "1"}


async def test_the_same_id_is_stored_once(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    first = await topic.publish(b"tea", id="a-1")
    again = await topic.publish(b"tea", id="a-1")
    assert (again.duplicate, again.offset) == (True, first.offset)


async def test_a_range_is_read_by_offset_and_key(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    events = [NewEvent(str(n).encode(), "ab"[n % 2]) for n in range(20)]
    receipts = await topic.publish_many(events)
    assert [receipt.offset for receipt in receipts] == list(range(1, 21))
    part = [event.value async for event in topic.read(start=Start.at_offset(5), end=10)]
    assert part == [b"4", b"5", b"6", b"7", b"8"]
    odd = [event.value async for event in topic.read(keys=["b"])]
    assert odd == [str(n).encode() for n in range(1, 20, 2)]


async def test_a_range_is_read_in_lists(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish_many([NewEvent(str(n).encode(), "ab"[n % 2]) for n in range(20)])
    lists = [events async for events in topic.read_many(start=Start.at_offset(5), keys=["b"])]
    assert [value for events in lists for value in events.values] == [
        str(n).encode() for n in range(5, 20, 2)
    ]
    assert [offset for events in lists for offset in events.offsets] == list(range(6, 21, 2))
    assert {(events.partition, *events.keys) for events in lists} == {(0, *"bbbbbbbb")}


async def test_following_gives_what_is_stored_later(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish(b"1")
    reading = asyncio.create_task(take(topic.read(follow=True), 2))
    await topic.publish(b"2")
    assert [event.value for event in await reading] == [b"1", b"2"]


async def test_an_unknown_choice_is_refused_at_the_call(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    with pytest.raises(ConfigError, match="nonsense"):
        topic.read(nonsense=1)


async def test_errors_keep_their_kind_and_facts(mill: Any) -> None:
    with pytest.raises(TopicNotFound, match="nothing"):
        await mill.topic("nothing")
    await mill.create_topic("orders", **MEMORY)
    with pytest.raises(TopicConflict, match="partitions"):
        await mill.create_topic("orders", partitions=2, **MEMORY)


async def test_a_producer_stores_everything_by_its_end(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    async with topic.producer() as producer:
        for n in range(3000):
            await producer.send(b"%d" % n)
    assert [event.value async for event in topic.read()] == [b"%d" % n for n in range(3000)]


async def test_a_producer_takes_lists(mill: Any) -> None:
    topic = await mill.create_topic("lists")
    async with topic.producer() as producer:
        await producer.send(b"0", "k")
        await producer.send_many([b"1", b"2"], ["k", "l"])
        await producer.send_many(({"id": "k", "n": n} for n in range(3)), key="id")
        await producer.send(b"3", "k")
        wrong: Any
        for wrong in (([b"4"], ["k", "l"]), (["4"], iter(["k", "l"])), ("text",), (b"4",), (5,),
                      (iter([]), ["k"])):  # fmt: skip
            with pytest.raises(ConfigError):
                await producer.send_many(*wrong)
    found = [(event.key, event.value) async for event in topic.read()]
    assert [key for key, _ in found] == ["k", "k", "l", "k", "k", "k", "k"]
    assert [value for _, value in found[:3]] == [b"0", b"1", b"2"]


async def test_a_producer_reads_a_generator_as_far_as_packs_can_be_sent(mill: Any) -> None:
    topic = await mill.create_topic("endless")

    def failing() -> Any:
        yield from (b"%d" % number for number in range(12_000))
        raise ZeroDivisionError

    async with topic.producer() as producer:
        with pytest.raises(ZeroDivisionError):
            await producer.send_many(failing(), (f"k{n % 3}" for n in range(20_000)))
    stored = len([event async for event in topic.read()])
    assert stored == 10_000  # what came before the lot that failed


async def test_an_event_producer_gives_a_receipt_for_each(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    async with topic.event_producer(max_in_flight=10) as producer:
        for n in range(50):
            await producer.send(b"%d" % n)
        await producer.flush()
        assert producer.sent == 50
    assert [event.offset async for event in topic.read()] == list(range(1, 51))


async def test_what_the_broker_refuses_is_named_at_the_end(mill: Any) -> None:
    topic = await mill.create_topic("orders", max_messages=3, discard="new", **MEMORY)
    producer = topic.event_producer()
    for n in range(5):
        await producer.send(b"%d" % n)
    with pytest.raises(PartlyStored) as raised:
        await producer.close()
    assert sorted(raised.value.failed) == [3, 4]


async def test_a_writer_continues_where_it_stopped_and_writes_nothing_twice(mill: Any) -> None:
    topic = await mill.create_topic("orders")
    async with topic.writer("importer") as writer:
        for n in range(1, 6):
            await writer.write(b"%d" % n, position=n)
        await writer.flush()
        assert writer.position == 5
    async with topic.writer("importer") as writer:
        assert writer.position == 5
        for n in range(4, 9):
            await writer.write(b"%d" % n, position=n)
        await writer.flush()
        assert writer.skipped == 2
    assert [event.value async for event in topic.read()] == [b"%d" % n for n in range(1, 9)]


async def test_a_writer_takes_pairs_notes_and_positions_without_events(mill: Any) -> None:
    topic = await mill.create_topic("orders")
    frame = pa.table({"value": [b"c", b"d"], "lsn": [20, 30], "n": [0, 0]})
    async with topic.writer("importer") as writer:
        await writer.write(b"a", position=(10, 0))
        await writer.write(b"b", position=(10, 1), note="two")
        await writer.flush()
        assert (writer.position, writer.note) == ((10, 1), "two")
        await writer.write_batch(
            frame, positions=("lsn", "n"), columns=Columns(value="value"), note="four"
        )
        await writer.advance((40, 0))
        assert (writer.position, writer.note) == ((40, 0), "four")
        with pytest.raises(ConfigError, match="positions must grow"):
            await writer.advance((39, 0))
    async with topic.writer("importer") as writer:
        assert writer.position == (40, 0)
        await writer.write_batch(frame, positions=("lsn", "n"), columns=Columns(value="value"))
        await writer.advance((41, 0), "heartbeat")
        assert (writer.note, writer.skipped) == ("heartbeat", 2)
    assert [event.value async for event in topic.read()] == [b"a", b"b", b"c", b"d"]


async def test_a_frame_marks_its_deletions(mill: Any) -> None:
    topic = await mill.create_topic("orders")
    frame = pa.table({"key": ["a", "b"], "value": [b"1", b"2"], "gone": [None, True]})
    async with topic.producer() as producer:
        await producer.send_batch(frame, Columns(key="key", value="value", tombstone="gone"))
    assert [(event.key, event.value) async for event in topic.read()] == [("a", b"1"), ("b", None)]


async def test_the_events_of_some_keys_are_read_with_packs_and_without(mill: Any) -> None:
    plain = await mill.create_topic("plain", packs=False)
    mixed = await mill.create_topic("mixed")
    for topic in (plain, mixed):
        await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in range(9)])
    async with mixed.producer() as producer:
        await producer.send(b"9", "k0")
        await producer.send(b"10", "k1")
    await mixed.publish(b"12", "k0")
    assert [e.value async for e in plain.read(keys=["k0"])] == [b"0", b"3", b"6"]
    assert [e.value async for e in mixed.read(keys=["k0"])] == [b"0", b"3", b"6", b"9", b"12"]
    some = [e.value async for e in plain.read(keys=["k2", "k1"], end=7)]
    assert some == [b"1", b"2", b"4", b"5"]
    rows = [v async for batch in mixed.batches(keys=["k1"]) for v in batch["value"].to_pylist()]
    assert rows == [b"1", b"4", b"7", b"10"]


# -- subscriptions ------------------------------------------------------------------------


async def test_acked_events_are_not_redelivered_and_others_are(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish_many([NewEvent(b"%d" % n) for n in range(10)])
    async with topic.subscribe("billing") as first:
        for delivery in await take(first, 10):
            assert delivery.attempt == 1
            if int(delivery.value) % 2:
                delivery.ack()
            else:
                delivery.nack(delay=0)
        again = await take(first, 5)
        assert sorted(int(d.value) for d in again) == [0, 2, 4, 6, 8]
        assert {d.attempt for d in again} == {2}
        for delivery in again:
            await delivery.ack_sync()
    await mill.flush()
    assert (await topic.subscriptions.lag("billing")).messages == 0


async def test_a_subscription_is_awaited_or_used_as_a_context(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish(b"tea")
    member = await topic.subscribe("billing")
    try:
        [delivery] = await member.pull(1)
        assert delivery.value == b"tea"
        await delivery.ack_sync()
    finally:
        await member.close()
    async with topic.subscribe("billing") as other:
        assert (other.name, await other.pull(1, timeout=0.05)) == ("billing", [])
    with pytest.raises(ConfigError, match="not a name"):
        async with topic.subscribe("not a name"):
            pass


async def test_subscriptions_are_managed_by_name(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish_many([b"1", b"2", b"3"])
    subscriptions = topic.subscriptions
    assert (await subscriptions.create("audit")).ack_wait == SubscriptionSettings().ack_wait
    assert (await subscriptions.create("billing", SubscriptionSettings(ack_wait=5))).ack_wait == 5
    with pytest.raises(SubscriptionConflict, match="ack_wait"):
        await subscriptions.create("billing", SubscriptionSettings(ack_wait=6))
    assert [info.name for info in await subscriptions.list()] == ["audit", "billing"]
    assert (await subscriptions.edit("billing", ack_wait=7)).ack_wait == 7
    assert (await subscriptions.info("billing")).settings.ack_wait == 7
    await subscriptions.seek("billing", Start.at_offset(3))
    assert (await subscriptions.lag("billing")).messages == 1
    assert await subscriptions.pause("billing") is not None
    assert (await subscriptions.info("billing")).paused
    await subscriptions.resume("billing")
    assert not (await subscriptions.info("billing")).paused
    assert await subscriptions.dead_letter_topic("billing") == "orders-billing-dead"
    await subscriptions.delete("audit")
    assert [info.name for info in await subscriptions.list()] == ["billing"]
    with pytest.raises(SubscriptionNotFound):
        await subscriptions.lag("audit")


async def test_a_topic_is_verified_and_purged(mill: Any) -> None:
    topic = await mill.create_topic("orders")
    async with topic.writer("importer") as writer:
        await writer.write(b"tea", position=1)
    await topic.publish(b"milk", "ann")
    reports = [report async for report in topic.admin.verify()]
    assert (reports[-1].events, reports[-1].sound) == (2, True)
    assert await topic.admin.purge(Purge(key="ann")) == 1
    assert [event.value async for event in topic.read()] == [b"tea"]


async def test_a_closed_member_gives_back_what_it_did_not_hand_out(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish_many([NewEvent(b"%d" % n) for n in range(20)])
    async with topic.subscribe("billing") as first:
        [delivery] = await take(first, 1)
        await delivery.ack_sync()
    async with topic.subscribe("billing") as second:
        rest = await take(second, 19)
    assert sorted(int(d.value) for d in rest) == list(range(1, 20))


async def test_a_pull_returns_what_is_available_and_waits_no_longer_than_its_timeout(
    mill: Any,
) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish_many([NewEvent(b"%d" % n) for n in range(3)])
    async with topic.subscribe("billing") as subscription:
        found: list[Any] = []
        deadline = Deadline(30)
        while len(found) < 3 and not deadline.passed:
            found += await subscription.pull(2, timeout=5)
        assert [int(d.value) for d in found] == [0, 1, 2]
        assert await subscription.pull(2, timeout=0.05) == []


async def test_a_handler_settles_by_returning_or_raising(mill: Any) -> None:
    topic = await mill.create_topic("orders", **MEMORY)
    await topic.publish_many([NewEvent(b"%d" % n) for n in range(5)])
    seen: list[tuple[int, int]] = []
    settings = SubscriptionSettings(backoff=(0.01,))
    async with topic.subscribe("billing", settings) as subscription:
        running = asyncio.create_task(subscription.run(_failing_once(seen)))
        await _until(lambda: len(seen) >= 6)
        await subscription.close()
        await running
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 1)]


def _failing_once(seen: list[tuple[int, int]]) -> Any:
    def handle(delivery: Any) -> None:
        seen.append((int(delivery.value), delivery.attempt))
        if seen[-1] == (3, 1):
            raise ValueError("not now")

    return handle


async def test_a_terminated_event_is_a_dead_letter_and_can_be_redriven(mill: Any) -> None:
    topic = await mill.create_topic("orders")
    await topic.publish(b"bad", "ann")
    async with topic.subscribe("billing") as subscription:
        [delivery] = await take(subscription, 1)
        delivery.terminate("not an order")
    queue = await topic.dead_letters("billing")
    [letter] = [letter async for letter in queue.letters()]
    assert letter.cause == "not an order"
    assert (await queue.redrive()).redriven == 1
    async with topic.subscribe("billing") as subscription:
        [delivery] = await take(subscription, 1)
        assert (delivery.value, delivery.key) == (b"bad", "ann")
    assert [event.offset async for event in topic.read()] == [1]  # others have read it before


# -- subjects -----------------------------------------------------------------------------


async def test_a_subscriber_gets_messages_in_order_and_counts_them(mill: Any) -> None:
    async with mill.subscribe("weather.*") as subscriber:
        for n in range(300):
            await mill.publish("weather.oslo", f"{n}", {"N": str(n)})
        await mill.flush()
        await subscriber.flush()
        first = await subscriber.next(timeout=5)
        assert (first.subject, first.text, first.headers["N"]) == ("weather.oslo", "0", "0")
        assert [m.text for m in await take(subscriber, 9)] == [f"{n}" for n in range(1, 10)]
        counters = subscriber.counters
        assert (counters.received, counters.delivered, counters.pending) == (300, 10, 290)
        assert balanced(counters)
    counters = subscriber.counters
    assert (counters.delivered, counters.dropped, counters.pending) == (10, 290, 0)


async def test_waiting_for_a_message_ends_in_time(mill: Any) -> None:
    async with mill.subscribe("weather.*") as subscriber:
        with pytest.raises(NoMessage):
            await subscriber.next(timeout=0.05)


async def test_a_handler_gets_the_messages(mill: Any) -> None:
    seen: list[str] = []
    async with mill.subscribe("weather.*", handler=lambda m: seen.append(m.text)):
        await mill.publish("weather.oslo", "rain")
        await _until(lambda: seen == ["rain"])


async def test_a_request_is_answered_by_a_service(mill: Any) -> None:
    service = mill.service("sums", "1.0.0")

    def add(message: Any) -> str:
        if not message.data:
            raise ServiceError("sums.add", "400", "nothing to add")
        return str(sum(map(int, message.text.split())))

    service.endpoint("sums.add")(add)
    async with service:
        assert (await mill.request("sums.add", "1 2 3")).text == "6"
        with pytest.raises(ServiceError, match="nothing to add"):
            await mill.request("sums.add")
        assert [m.text for m in await mill.gather("sums.add", "4 5", limit=1)] == ["9"]
        assert service.stats["endpoints"][0].num_requests == 3
    with pytest.raises(NoResponders):
        await mill.request("sums.add", "1", timeout=5)


async def test_a_message_is_answered_by_hand(mill: Any) -> None:
    async with mill.subscribe("ask", handler=lambda m: m.respond(m.text.upper())):
        assert (await mill.request("ask", "who")).text == "WHO"


async def _until(condition: Any) -> None:
    deadline = Deadline(30)
    while not condition():
        assert not deadline.passed
        await asyncio.sleep(0.005)
