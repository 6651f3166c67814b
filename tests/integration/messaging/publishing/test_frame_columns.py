"""Frames with headers, with a struct as the value, and batches that are stored in one step."""

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


@dataclass
class Order:
    """A row of a table."""

    id: int
    city: str


async def rows_of(topic: Topic) -> list[dict[str, Any]]:
    return [row async for batch in topic.batches() for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "headers",
    [
        pa.array([[("a", "1"), ("b", "2")], None], pa.map_(pa.string(), pa.string())),
        pa.array(
            [[{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], None],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
    ],
)
async def test_a_column_of_a_frame_has_the_headers(mill: Mill, headers: pa.Array) -> None:
    topic = await mill.create_topic("log", schema=Order)
    frame = pa.table({"id": [1, 2], "city": ["x", "y"], "h": headers})
    async with topic.writer("w") as writer:
        await writer.write_batch(frame, position=2, columns=Columns(key="city", headers="h"))
    events = [event async for event in topic.read()]
    assert [dict(event.headers) for event in events] == [{"a": "1", "b": "2"}, {}]
    assert [event.value for event in events] == [Order(1, "x"), Order(2, "y")]


async def test_headers_of_another_type_are_refused_by_name(mill: Mill) -> None:
    topic = await mill.create_topic("log", schema=Order)
    frame = pa.table({"id": [1], "city": ["x"], "h": [5]})
    async with topic.producer() as producer:
        with pytest.raises(Unfit, match="'h'"):
            await producer.send_batch(frame, Columns(headers="h"))


async def test_a_struct_column_is_the_value_and_nothing_else_is(mill: Mill) -> None:
    topic = await mill.create_topic("log", schema=Order)
    value = pa.array([{"id": 1, "city": "x"}, None, {"id": 3, "city": "z"}])
    frame = pa.table({"v": value, "k": ["a", "b", "c"], "gone": [False, True, False]})
    async with topic.writer("w") as writer:
        await writer.write_batch(
            frame, position=3, columns=Columns(value="v", key="k", tombstone="gone")
        )
    assert [(row["key"], row["value"]) for row in await rows_of(topic)] == [
        (b"a", {"id": 1, "city": "x"}), (b"b", None), (b"c", {"id": 3, "city": "z"}),
    ]  # fmt: skip


async def test_a_whole_batch_is_stored_in_one_step_with_its_position_and_note(mill: Mill) -> None:
    topic = await mill.create_topic("log", schema=Order)
    frame = pa.table({"id": range(1000), "city": ["x"] * 1000})
    seen = set()
    async with topic.writer("w", Packing(max_events=10)) as writer:  # 100 packs
        await writer.write_batch(frame.slice(0, 5), position=5)
        await writer.write_batch(frame, position=1005, note="all", whole=True)
        while 1005 not in seen:
            seen.add(len(await rows_of(topic)))
            if len(seen) < 2:
                await writer.flush()
    assert seen <= {0, 5, 1005}
    async with topic.writer("w", Packing(max_events=10)) as writer:
        assert (writer.position, writer.note) == (1005, "all")
        await writer.write_batch(frame, position=1005, whole=True)
        assert writer.skipped == 1000
    assert [row["value"]["id"] for row in await rows_of(topic)] == [*range(5), *range(1000)]


async def test_an_abandoned_whole_batch_left_nothing_or_everything(mill: Mill) -> None:
    topic = await mill.create_topic("log", schema=Order)
    frame = pa.table({"id": range(2000), "city": ["x"] * 2000})
    writer = await topic.writer("w", Packing(max_events=20)).open()
    await writer.write_batch(frame, position=2000, whole=True)
    async with topic.writer("w") as other:  # fences the first one out
        assert other.position in (0, 2000)
        stored = other.position
    await writer.abandon()
    assert len(await rows_of(topic)) == stored
