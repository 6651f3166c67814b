"""What the settings of a topic do to its events, on a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.deadline import Deadline
from millstream.errors import ApiError, LimitReached
from millstream.messaging.topics.admin import Purge, declare, edit, open_topic, purge
from millstream.messaging.topics.settings import TopicSettings
from millstream.settings import ConnectionSettings
from millstream.testing import running_broker
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ConsumerConfig
from millstream.wire.protocol import encode_headers, parse_headers
from tests.integration.messaging.topic_kit import eventually, offsets, put


@pytest.fixture
def js(connection: Connection) -> JetStream:
    return JetStream(connection)


async def test_the_oldest_events_are_dropped_above_the_message_limit(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(max_messages=3))
    for _ in range(5):
        await put(js.connection, "t.a")
    assert await offsets(js, "t") == [3, 4, 5]


async def test_the_oldest_events_are_dropped_above_the_byte_limit(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(max_bytes="4KiB"))
    for _ in range(5):
        await put(js.connection, "t.a", b"x" * 1000)
    assert await offsets(js, "t") == [3, 4, 5]


async def test_events_are_dropped_above_the_age_limit(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(max_age="200ms"))
    assert await put(js.connection, "t.a") == 1

    async def left() -> int:
        return (await open_topic(js, "t")).messages

    await eventually(left, 0)


async def test_an_event_is_dropped_when_its_ttl_ends(js: JetStream) -> None:
    info = await declare(js, "t")
    await put(js.connection, "t.a", headers={"Nats-TTL": info.settings.ttl_text(1)})
    await put(js.connection, "t.b")
    await eventually(lambda: offsets(js, "t"), [2])


async def test_the_last_event_of_a_key_leaves_a_marker(js: JetStream) -> None:
    info = await declare(js, "t", TopicSettings(history=1, marker_ttl="1m"))
    await put(js.connection, "t.a", headers={"Nats-TTL": info.settings.ttl_text(1)})

    async def reason() -> str | None:
        last = await js.get_message("t", {"last_by_subj": "t.a"})
        return parse_headers(last.headers).get("Nats-Marker-Reason") if last is not None else None

    await eventually(reason, "MaxAge")


async def test_each_key_keeps_its_newest_events(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(history=2))
    for key in ("a", "b", "a", "a", "c"):
        await put(js.connection, f"t.{key}")
    assert await offsets(js, "t") == [2, 3, 4, 5]


async def test_a_full_topic_that_discards_new_events_refuses_them(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(discard="new", max_messages=2))
    await put(js.connection, "t.a")
    await put(js.connection, "t.a")
    with pytest.raises(LimitReached, match="maximum messages exceeded"):
        await put(js.connection, "t.b")
    await edit(js, "t", {"max_messages": 3})
    assert await put(js.connection, "t.b") == 3


async def test_a_full_key_refuses_its_next_event_and_others_do_not(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(discard="new", discard_new_per_key=True, history=1))
    await put(js.connection, "t.a")
    with pytest.raises(LimitReached, match="maximum messages per subject exceeded"):
        await put(js.connection, "t.a")
    assert await put(js.connection, "t.b") == 2


async def test_an_event_above_the_size_limit_is_refused(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(max_message_size="1KiB"))
    with pytest.raises(ApiError, match="larger than max_message_size of the topic"):
        await put(js.connection, "t.a", b"x" * 1100)
    assert await put(js.connection, "t.a", b"x" * 1000) == 1


async def take(js: JetStream, stream: str, consumer: str) -> None:
    """Fetch one message and acknowledge it."""
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    got: list[bytes] = []
    inbox = f"{js.connection.inbox}x"
    interest = js.connection.subscribe(inbox, lambda _subject, reply, *_: got.append(reply))
    js.connection.publish(pull.encode(), b"", inbox.encode())

    async def arrived() -> int:
        return len(got)

    await eventually(arrived, 1)
    js.connection.unsubscribe(interest)
    await js.connection.request(got[0].decode(), b"+ACK")


async def test_a_work_queue_keeps_an_event_until_it_is_acked(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(retention="workqueue"))
    await put(js.connection, "t.a")
    await put(js.connection, "t.b")
    worker = ConsumerConfig(durable_name="w", ack_policy="explicit")
    await js.create_consumer("t", worker)
    await take(js, "t", "w")
    await eventually(lambda: offsets(js, "t"), [2])
    with pytest.raises(ApiError):  # a second one would take from the first
        await js.create_consumer("t", ConsumerConfig(durable_name="v", ack_policy="explicit"))


async def test_interest_keeps_an_event_while_a_subscription_wants_it(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(retention="interest"))
    await put(js.connection, "t.nobody")
    assert (await open_topic(js, "t")).messages == 0
    for name in ("one", "two"):
        config = ConsumerConfig(durable_name=name, ack_policy="explicit")
        await js.create_consumer("t", config)
    await put(js.connection, "t.a")
    await take(js, "t", "one")
    assert (await open_topic(js, "t")).messages == 1
    await take(js, "t", "two")

    async def left() -> int:
        return (await open_topic(js, "t")).messages

    await eventually(left, 0)


async def test_deny_delete_and_deny_purge_keep_events(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(deny_delete=True, deny_purge=True))
    await put(js.connection, "t.a")
    with pytest.raises(ApiError, match="message delete not permitted"):
        await js.delete_message("t", 1)
    with pytest.raises(ApiError, match="stream purge not permitted"):
        await purge(js, "t", Purge())
    with pytest.raises(ApiError, match="cannot be changed: events were promised"):
        await edit(js, "t", {"deny_delete": False})
    with pytest.raises(ApiError, match="rollup"):
        await put(js.connection, "t.a", headers={"Nats-Rollup": "sub"})
    assert await offsets(js, "t") == [1]


async def test_a_rollup_replaces_the_earlier_events_of_a_key_where_it_is_allowed(
    js: JetStream,
) -> None:
    await declare(js, "t", TopicSettings(rollup=True))
    for key in ("a", "b", "a"):
        await put(js.connection, f"t.{key}")
    await put(js.connection, "t.a", headers={"Nats-Rollup": "sub"})
    assert await offsets(js, "t") == [2, 4]
    assert (await declare(js, "t")).settings.rollup is True  # it was not asked for, and may stay
    await edit(js, "t", {"rollup": False})
    for which in ("sub", "all"):
        with pytest.raises(ApiError, match="rollup not permitted"):
            await put(js.connection, "t.a", headers={"Nats-Rollup": which})
    assert await offsets(js, "t") == [2, 4]


async def test_a_second_event_with_the_same_id_is_stored_only_after_the_window(
    js: JetStream,
) -> None:
    await declare(js, "t", TopicSettings(duplicate_window="300ms"))
    window = Deadline(0.3)
    first = await put(js.connection, "t.a", headers={"Nats-Msg-Id": "7"})
    second = await put(js.connection, "t.a", headers={"Nats-Msg-Id": "7"})
    assert second == first or window.passed

    async def again() -> bool:
        return await put(js.connection, "t.a", headers={"Nats-Msg-Id": "7"}) > first

    await eventually(again, True)


async def test_an_atomic_batch_and_a_scheduled_event_are_stored(js: JetStream) -> None:
    await declare(js, "t", TopicSettings(schedules=True))
    first = {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"}
    js.connection.publish(b"t.a", b"1", headers=encode_headers(first))
    last = {**first, "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}
    assert await put(js.connection, "t.b", headers=last) == 2
    due = {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": "t.later"}
    await put(js.connection, "t._schedule.1", headers=due)

    async def appeared() -> bool:
        return await js.get_message("t", {"last_by_subj": "t.later"}) is not None

    await eventually(appeared, True)


async def test_compressed_files_are_smaller(tmp_path: Path) -> None:
    async with running_broker(data=tmp_path / "data") as broker:
        connection = Connection(ConnectionSettings(urls=(broker.url,)))
        await connection.open()
        try:
            js = JetStream(connection)
            for name, kind in (("plain", "none"), ("packed", "s2")):
                await declare(js, name, TopicSettings(compression=kind))
                for _ in range(40):  # more than one file, the newest is not compressed
                    await put(connection, f"{name}.a", b"the same again " * 20_000)
        finally:
            await connection.close()
        await asyncio.to_thread(broker.stop)

        def size(name: str) -> int:
            files = (tmp_path / "data").rglob(f"{name}/msgs/*.blk")
            return sum(file.stat().st_size for file in files)

        assert 0 < size("packed") < size("plain") * 0.8


async def test_a_topic_in_memory_is_gone_after_a_restart_and_one_in_files_is_not(
    tmp_path: Path,
) -> None:
    async with running_broker(data=tmp_path / "data") as broker:
        connection = Connection(ConnectionSettings(urls=(broker.url,)))
        await connection.open()
        try:
            js = JetStream(connection)
            for name in ("memory", "file"):
                await declare(js, name, TopicSettings(storage=name))
                await put(connection, f"{name}.a")
            await asyncio.to_thread(broker.restart)

            async def kept() -> dict[str, int]:
                return {info.config["name"]: info.state.messages for info in await js.streams()}

            await eventually(kept, {"file": 1})
        finally:
            await connection.close()
