"""Keys that clients of Kafka put in other partitions than the SDK does."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from millstream.errors import ConfigError, HistoryGone
from millstream.events.subject import key_token, partition_of
from millstream.gateways.kafka.partitioners import murmur2_partitions
from millstream.messaging import PublishOptions, Topic
from millstream.messaging.reading import key_places
from millstream.messaging.topics.admin import Purge
from millstream.mill import Mill
from millstream.wire.aio.connection import Connection
from tests.integration.messaging.topic_kit import put

PARTITIONS = 4
KEYS = [f"k{number}" for number in range(20)]


def java_partition(key: str) -> int:
    """Where the Java client puts a key."""
    return int(murmur2_partitions(pa.array([key.encode()]), PARTITIONS)[0])


# Keys whose partitions are not the same, and one of them.
MOVED = [key for key in KEYS if java_partition(key) != partition_of(key, PARTITIONS)]
KEY = MOVED[0]


async def put_as_java(connection: Connection, topic: str, key: str, value: bytes) -> int:
    return await put(connection, f"{topic}.{java_partition(key)}.{key_token(key)}", value)


async def written_by_java(mill: Mill, connection: Connection, topic: str) -> None:
    """Each key once, and the setting that the gateway makes."""
    for key in KEYS:
        await put_as_java(connection, topic, key, key.encode())
    await mill.edit_topic(topic, partitioner="murmur2")


@pytest.fixture
async def moved(mill: Mill, connection: Connection) -> Topic:
    """A topic that the Java client wrote."""
    await mill.create_topic("moved", partitions=PARTITIONS)
    await written_by_java(mill, connection, "moved")
    return await mill.topic("moved")


def test_some_keys_are_in_another_partition() -> None:
    assert len(MOVED) > 10


async def test_the_last_event_of_a_key_is_found_in_any_partition(moved: Topic) -> None:
    found = [await moved.last(key) for key in KEYS]
    assert [event and event.value for event in found] == [key.encode() for key in KEYS]
    assert await moved.last("none") is None


async def test_the_event_that_was_stored_last_counts(moved: Topic, connection: Connection) -> None:
    await moved.publish(b"later", KEY)
    event = await moved.last(KEY)
    assert event is not None
    assert (event.value, event.partition) == (b"later", partition_of(KEY, PARTITIONS))
    await put_as_java(connection, "moved", KEY, b"latest")
    event = await moved.last(KEY)
    assert event is not None
    assert (event.value, event.partition) == (b"latest", java_partition(KEY))


async def test_the_last_events_of_all_and_of_some_keys(moved: Topic) -> None:
    await moved.publish(b"later", KEY)
    wanted = {key: key.encode() for key in KEYS} | {KEY: b"later"}
    found = [(event.key, event.value) async for event in moved.latest()]
    assert len(found) == len(KEYS)
    assert dict(found) == wanted
    some = [(event.key, event.value) async for event in moved.latest([*MOVED, "none", KEY])]
    assert len(some) == len(MOVED)
    assert dict(some) == {key: wanted[key] for key in MOVED}


async def test_keys_are_read_from_all_partitions(moved: Topic) -> None:
    await moved.publish(b"later", KEY)
    events = [event.value async for event in moved.read(keys=MOVED)]
    assert sorted(events) == sorted([b"later", *(key.encode() for key in MOVED)])
    batches = [batch async for batch in moved.batches(keys=[KEY])]
    values = [value for batch in batches for value in batch.column("value").to_pylist()]
    assert sorted(values) == sorted([KEY.encode(), b"later"])


async def test_a_topic_that_is_open_sees_the_setting(
    mill: Mill, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_places, "LOOK_SECONDS", 0.0)
    topic = await mill.create_topic("moved", partitions=PARTITIONS)
    assert await topic.last(KEY) is None
    await written_by_java(mill, connection, "moved")
    event = await topic.last(KEY)
    assert event is not None
    assert event.value == KEY.encode()


async def test_a_key_is_purged_in_all_partitions(moved: Topic) -> None:
    await moved.publish(b"later", KEY)
    assert await moved.admin.purge(Purge(key=KEY)) == 2
    assert await moved.last(KEY) is None


# -- tables -------------------------------------------------------------------------------


async def test_a_table_has_the_values_of_all_partitions(mill: Mill, connection: Connection) -> None:
    await mill.create_table("stock", partitions=PARTITIONS)
    await written_by_java(mill, connection, "stock")
    table = await mill.table("stock")
    entry = await table.get(KEY)
    assert entry is not None
    assert entry.value == KEY.encode()
    await table.put(KEY, b"later")
    assert await table.as_dict() == {key: key.encode() for key in KEYS} | {KEY: b"later"}
    await put_as_java(connection, "stock", KEY, b"latest")
    assert [entry.value async for entry in table.entries([KEY])] == [b"latest"]
    await table.delete(KEY)
    assert await table.get(KEY) is None
    assert KEY not in await table.as_dict()


async def test_a_conditional_write_is_refused(mill: Mill, connection: Connection) -> None:
    await mill.create_table("stock", partitions=PARTITIONS)
    await written_by_java(mill, connection, "stock")
    table = await mill.table("stock")
    # The broker would look in the key's own partition, where it never had a value.
    with pytest.raises(ConfigError, match="clients of Kafka"):
        await table.put(KEY, b"x", revision=0)
    with pytest.raises(ConfigError, match="clients of Kafka"):
        await table.topic.publish(b"x", KEY, options=PublishOptions(expected_last=0))


async def test_a_table_of_the_past_looks_in_all_partitions(
    mill: Mill, connection: Connection
) -> None:
    await mill.create_table("stock", history=2, partitions=PARTITIONS)
    await written_by_java(mill, connection, "stock")
    table = await mill.table("stock")
    await table.put(KEY, b"later")
    stored = await table.get(KEY)
    assert stored is not None
    past = await table.at(stored.timestamp)
    await put_as_java(connection, "stock", KEY, b"latest")
    entry = await past.get(KEY)
    assert entry is not None
    assert entry.value == b"later"
    assert await past.as_dict() == {key: key.encode() for key in KEYS} | {KEY: b"later"}
    entry = await (await table.at(datetime.now(UTC))).get(KEY)
    assert entry is not None
    assert entry.value == b"latest"
    # What this partition had at that time is gone: it may have been the later value.
    for value in (b"1", b"2"):
        await table.put(KEY, value)
    with pytest.raises(HistoryGone):
        await past.get(KEY)
    with pytest.raises(HistoryGone):
        await past.as_dict()
