"""Deletions in frames: a column says which rows are events without a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import Unfit
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.mill import Mill

GONE = [False, True, None, True, False]
KEYS = ["a", "b", "c", "d", "e"]


@dataclass
class Order:
    """A row of a table."""

    id: int
    city: str


async def stored(topic: Topic) -> dict[str | None, Any]:
    return {event.key: event.value async for event in topic.read()}


async def columns_of(topic: Topic) -> dict[bytes, Any]:
    return {
        row["key"]: row["value"] async for batch in topic.batches() for row in batch.to_pylist()
    }


@pytest.mark.parametrize("by", ["producer", "writer"])
async def test_marked_rows_of_a_frame_of_bytes_are_deletions(mill: Mill, by: str) -> None:
    topic = await mill.create_topic("log")
    frame = pa.table({"key": KEYS, "value": [b"1", b"2", b"3", None, b"5"], "gone": GONE})
    columns = Columns(key="key", value="value", tombstone="gone")
    if by == "producer":
        async with topic.producer() as producer:
            await producer.send_batch(frame, columns)
    else:
        async with topic.writer("w") as writer:
            await writer.write_batch(frame, position=5, columns=columns)
    assert await stored(topic) == {"a": b"1", "b": None, "c": b"3", "d": None, "e": b"5"}
    assert (await columns_of(topic))[b"b"] is None


@pytest.mark.parametrize("by", ["producer", "writer"])
async def test_marked_rows_of_a_typed_frame_are_deletions_whatever_they_hold(
    mill: Mill, by: str
) -> None:
    topic = await mill.create_topic("log", schema=Order)
    # A deleted row has its key and nothing else that the schema demands.
    frame = pa.table({"id": [1, None, 3, None, 5], "city": KEYS, "gone": GONE})
    columns = Columns(key="city", tombstone="gone")
    if by == "producer":
        async with topic.producer(Packing(max_events=2)) as producer:
            await producer.send_batch(frame, columns)
    else:
        async with topic.writer("w", Packing(max_events=2)) as writer:
            await writer.write_batch(frame, position=5, columns=columns)
    assert await stored(topic) == {
        "a": Order(1, "a"),
        "b": None,
        "c": Order(3, "c"),
        "d": None,
        "e": Order(5, "e"),
    }
    found = await columns_of(topic)
    assert found[b"b"] is None
    assert found[b"e"] == {"id": 5, "city": "e"}


async def test_a_row_that_is_not_marked_has_to_fit(mill: Mill) -> None:
    topic = await mill.create_topic("log", schema=Order)
    columns = Columns(key="city", tombstone="gone")
    async with topic.producer() as producer:
        frame = pa.table({"id": [None, 2], "city": ["a", "b"], "gone": [None, True]})
        with pytest.raises(Unfit):
            await producer.send_batch(frame, columns)
        wrong = pa.table({"id": [1], "city": ["a"], "gone": ["yes"]})
        with pytest.raises(Unfit, match="a boolean column that is true for deletions"):
            await producer.send_batch(wrong, columns)
        none = pa.table({"id": [1], "city": ["a"], "gone": pa.nulls(1)})
        await producer.send_batch(none, columns)
    assert await stored(topic) == {"a": Order(1, "a")}
