"""The last event of each key, now and before a moment, checked against reading everything."""

from __future__ import annotations

import gc
from datetime import datetime
from typing import Any

import pytest

import millstream.blocking
from millstream import Mill, NewEvent, Start, Topic
from millstream.errors import ConfigError
from millstream.events.packs.pack import Pack
from millstream.events.packs.packing import Packing
from millstream.messaging.reading import last_per_key

LAST = Start.LAST_PER_KEY


async def expected(topic: Topic, end: int | datetime | None) -> dict[Any, Any]:
    """What reading everything up to the end leaves of each key."""
    return {event.key: event.value async for event in topic.read(end=end)}


async def found(topic: Topic, **choices: Any) -> dict[Any, Any]:
    events = [event async for event in topic.read(start=LAST, **choices)]
    latest = {event.key: event.value for event in events}
    assert len(latest) == len(events), "a key came twice"
    return latest


async def in_batches(topic: Topic, **choices: Any) -> dict[Any, Any]:
    rows = [
        (None if row["key"] is None else row["key"].decode(), row["value"])
        async for batch in topic.batches(start=LAST, **choices)
        for row in batch.to_pylist()
    ]
    assert len(dict(rows)) == len(rows), "a key came twice"
    return dict(rows)


async def test_a_key_that_changed_after_the_end_has_the_event_before_it(topic: Topic) -> None:
    for number in range(40):
        await topic.publish(b"%d" % number, f"k{number % 7}")
    await topic.publish(None, "k1")
    await topic.publish(b"keyless")
    await topic.publish(b"new", "later")
    for end in (1, 2, 8, 39, 41, 42, 43, 44, 1000, None):
        wanted = await expected(topic, end)
        assert await found(topic, end=end) == wanted, end
        assert await in_batches(topic, end=end) == wanted, end
    moment = (await topic.get(9))[0].timestamp
    assert await found(topic, end=moment) == await expected(topic, moment)
    assert await found(topic, end=20, keys=["k1", "later"]) == {"k1": b"15"}


async def test_it_is_the_same_with_the_blocking_client(millstream_url: str) -> None:
    with millstream.blocking.connect(millstream_url) as mill:
        topic = mill.create_topic("orders")
        for number in range(9):
            topic.publish(b"%d" % number, f"k{number % 3}")
        assert {e.key: e.value for e in topic.read(start=LAST, end=5)} == {
            "k0": b"3",
            "k1": b"1",
            "k2": b"2",
        }


@pytest.mark.parametrize("partitions", [1, 3])
async def test_events_in_packs_count(mill: Mill, partitions: int) -> None:
    topic = await mill.create_topic("packed", partitions=partitions)
    for turn in range(3):
        await topic.publish_many(NewEvent(b"plain%d" % turn, f"k{n}") for n in range(5))
        async with topic.producer() as producer:
            for number in range(20):
                await producer.send(b"%d.%d" % (turn, number), f"k{number % 8}")
    await topic.publish(b"last", "k0")
    for end in (None, 1, 2, 4, 8, 13):
        wanted = await expected(topic, end)
        assert await found(topic, end=end) == wanted, end
        assert await in_batches(topic, end=end) == wanted, end
    with pytest.raises(ConfigError, match="holds packs"):
        await found(topic, follow=True)


async def test_the_packs_of_events_that_wait_are_not_kept(mill: Mill) -> None:
    """Else a topic of any size would be in memory for one key in each pack."""
    topic = await mill.create_topic("packed")
    async with topic.producer(Packing(max_events=2)) as producer:
        for number in range(20):
            await producer.send(b"first", f"k{number}")
            await producer.send(b"second", "other")
    before = packs_in_memory()
    events = [event async for event in topic.read(start=Start.LAST_PER_KEY)]
    assert len(events) == 21
    assert packs_in_memory() <= before


def packs_in_memory() -> int:
    gc.collect()
    return sum(isinstance(thing, Pack) for thing in gc.get_objects())


async def test_more_rows_than_are_held_at_once(mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.messaging.reading.batches.LAST_ROWS", 10)
    topic = await mill.create_topic("packed")
    async with topic.producer() as producer:
        for number in range(100):
            await producer.send(b"%d" % number, f"k{number % 30}")
            if number % 9 == 0:
                await producer.flush()
    assert await in_batches(topic) == await expected(topic, None)


async def test_many_keys_that_changed_after_the_end(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_per_key, "ASK_SUBJECTS", 300)
    topic = await mill.create_topic("many")
    await topic.publish_many(NewEvent(b"old", f"k{n}") for n in range(1500))
    await topic.publish_many(NewEvent(b"new", f"k{n}") for n in range(1500))
    assert await found(topic, end=1501) == {f"k{n}": b"old" for n in range(1500)}


async def test_answers_that_are_cut_by_their_size_are_continued(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await mill.create_topic("large")
    value = b"x" * 500_000
    for key in range(12):  # more than one answer holds
        await topic.publish(value, f"k{key}")
    await topic.publish_many(NewEvent(b"new", f"k{n}") for n in range(12))
    monkeypatch.setattr(last_per_key, "ANSWER_BYTES", 0)  # twice the largest message
    assert await found(topic, end=13) == {f"k{n}": value for n in range(12)}


async def test_a_topic_whose_copies_may_not_answer_is_read_up_to_the_end(mill: Mill) -> None:
    topic = await mill.create_topic("leader", direct=False)
    for number in range(40):
        await topic.publish(b"%d" % number, f"k{number % 7}")
    for end in (1, 8, 20, None):
        assert await found(topic, end=end) == await expected(topic, end)


async def test_a_table_has_the_values_that_are_still_stored(mill: Mill) -> None:
    table = await mill.create_table("prices")
    await table.put_many({"a": b"1", "b": b"1"})
    await table.put("a", b"2")
    # A table keeps one value of each key: the first of `a` is gone.
    assert await found(table.topic, end=3) == {"b": b"1"}
    assert await found(table.topic) == {"a": b"2", "b": b"1"}
    assert [entry.value async for entry in table.entries(["b", "a", "none"])] == [b"1", b"2"]
