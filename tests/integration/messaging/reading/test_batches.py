"""Topics as Arrow batches: packs and plain messages mixed, without copying what is in packs."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import millstream
from millstream import Mill, NewEvent, ReadPlan, Start, Topic
from millstream.errors import ConfigError, Undecodable
from millstream.events.packs.packing import Packing
from millstream.messaging.reading.batches import COLUMNS, batches_of_messages
from millstream.schemas import declare

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


@dataclasses.dataclass
class Reading:
    sensor: int
    place: str
    heat: float = 0.5


@dataclasses.dataclass
class Wider:
    sensor: int
    place: str
    heat: float = 0.5
    note: str = "none"


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as mill:
        yield mill


async def batches(topic: Topic, **choices: Any) -> list[pa.RecordBatch]:
    return [batch async for batch in topic.batches(**choices)]


async def mixed(topic: Topic) -> None:
    """Plain, packed, plain; some with everything an event may have."""
    await topic.publish(Reading(1, "roof"), "a", headers={"h": "v"}, timestamp=MOMENT, id="one")
    await topic.publish(Reading(2, "cellar"))
    async with topic.producer(Packing(max_events=3)) as producer:
        await producer.send(Reading(3, "roof"), "a", timestamp=MOMENT, headers={"x": "y"}, id="3")
        for number in range(4, 9):
            await producer.send(Reading(number, "yard", float(number)), "b")
    await topic.publish(None, "a")


async def test_batches_hold_the_same_events_as_reading_one_by_one(mill: Mill) -> None:
    topic = await mill.create_topic("readings", schema=Reading, partitions=2)
    await mixed(topic)
    found = {}
    for batch in await batches(topic):
        assert batch.schema.names == list(COLUMNS)
        for row in batch.to_pylist():
            found[row["partition"], row["offset"], row["index"]] = row
    events = [event async for event in topic.read()]
    assert found.keys() == {event.position for event in events}
    for event in events:
        row = found[event.position]
        assert row["key"] == (None if event.key is None else event.key.encode())
        assert row["timestamp"] == event.timestamp
        assert row["id"] == event.id
        assert {h["key"]: h["value"].decode() for h in row["headers"] or ()} == dict(event.headers)
        value = None if row["value"] is None else Reading(**row["value"])
        assert value == event.value


async def test_every_batch_has_one_and_the_same_schema(mill: Mill) -> None:
    topic = await mill.create_topic("readings", schema=Reading)
    await mixed(topic)
    await mill.schemas.evolve("readings", declare(Wider, name="Reading"))
    newer = await mill.topic("readings")
    await newer.publish({"sensor": 9, "place": "roof", "note": "late"})
    async with newer.producer() as producer:
        await producer.send({"sensor": 10, "place": "roof", "note": "late"})
    for reader, fields in ((topic, 3), (newer, 4)):
        found = await batches(reader)
        assert len({str(batch.schema) for batch in found}) == 1
        assert found[0].schema.field("value").type.num_fields == fields
        sensors = [row["sensor"] for b in found for row in b.column("value").to_pylist() if row]
        assert sensors == list(range(1, 11))
    notes = [r["note"] for b in await batches(newer) for r in b.column("value").to_pylist() if r]
    assert notes == ["none"] * 8 + ["late"] * 2


async def test_columns_of_a_pack_are_views_of_the_message(mill: Mill) -> None:
    """Also when the pack is of an older version: the columns both versions have are not copied."""
    topic = await mill.create_topic("readings", schema=Reading)
    async with topic.producer(Packing(compression="none")) as producer:
        for number in range(1000):
            await producer.send(Reading(number, f"place {number}", 1.5), f"k{number}")
    await mill.schemas.evolve("readings", declare(Wider, name="Reading"))
    for reader in (topic, await mill.topic("readings")):
        async for source, messages in reader.admin.read_messages(ReadPlan()):
            [raw] = messages
            [batch] = batches_of_messages(source, messages, reader.value_type)
            whole = pa.py_buffer(raw.payload)
            inside = range(whole.address, whole.address + whole.size)
            value = batch.column("value")
            columns = [batch.column("key"), *(value.field(name) for name in range(3))]
            for column in columns:
                for buffer in column.buffers():
                    assert buffer is None or buffer.address in inside


async def test_a_topic_without_a_schema_gives_bytes(mill: Mill) -> None:
    topic = await mill.create_topic("raw")
    await topic.publish(b"one", "k")
    await topic.publish(None, "k")
    async with topic.producer() as producer:
        await producer.send(b"two")
    found = await batches(topic)
    assert {batch.schema.field("value").type for batch in found} == {pa.binary()}
    values = [value for batch in found for value in batch.column("value").to_pylist()]
    assert values == [b"one", None, b"two"]


async def test_a_plan_chooses_ranges_partitions_and_keys(mill: Mill) -> None:
    topic = await mill.create_topic("raw", partitions=2)
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 4}") for n in range(40)])
    async with topic.producer(Packing(max_events=5)) as producer:
        for number in range(40, 80):
            await producer.send(b"%d" % number, f"k{number % 4}")
    wanted = await batches(topic, keys=["k1", "k3"])
    numbers = sorted(int(value) for b in wanted for value in b.column("value").to_pylist())
    assert numbers == [number for number in range(80) if number % 2]
    some = await batches(topic, partitions=[1], start=Start.at_offset(3), end=5)
    offsets = [offset for b in some for offset in b.column("offset").to_pylist()]
    assert offsets == [3, 4]
    assert {p for b in some for p in b.column("partition").to_pylist()} == {1}
    with pytest.raises(ConfigError, match="unknown setting 'colour'"):
        topic.batches(colour="red")
    async for batch in topic.batches(follow=True):
        assert batch.num_rows > 0
        break


async def test_an_unreadable_value_is_named_by_its_offset(mill: Mill) -> None:
    topic = await mill.create_topic("readings", schema=Reading)
    await topic.publish(Reading(1, "roof"))
    await mill.publish_acked("readings.x", b"nonsense")
    with pytest.raises(Undecodable, match=r"readings/0, offset 2, index 0: .* JSON"):
        await batches(topic)
    assert len(await batches(topic, start=Start.at_offset(3))) == 0
