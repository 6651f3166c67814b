"""Topics and tables of a process that keeps state, and what must be in them at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from millstream import Mill, NewEvent, Table, Topic
from millstream.events.packs.packing import Packing


@dataclass
class Total:
    """What is known of a key."""

    count: int
    sum: int


async def fill(topic: Topic, first: int, last: int) -> None:
    """Numbers with keys, as plain messages and in packs."""
    middle = (first + last) // 2
    await topic.publish_many(
        [NewEvent(b"%d" % number, f"k{number % 7}") for number in range(first, middle)]
    )
    async with topic.producer(Packing(max_events=7, linger=0.01)) as producer:
        for number in range(middle, last):
            await producer.send(b"%d" % number, f"k{number % 7}")


async def create(mill: Mill) -> tuple[Topic, Table, Table, Topic]:
    source = await mill.create_topic("in", partitions=3)
    await mill.create_table("totals", schema=Total)
    totals = await mill.table("totals")  # whose values are dicts
    words = await mill.create_table("words", partitions=2)
    return source, totals, words, await mill.create_topic("out", partitions=2)


async def check_totals(source: Topic, totals: Table) -> None:
    """The table is the fold of everything that is stored in the input."""
    expected: dict[str, dict[str, int]] = {}
    async for event in source.read():
        row = expected.setdefault(event.key or "", {"count": 0, "sum": 0})
        row["count"] += 1
        row["sum"] += int(event.value)
    assert await totals.as_dict() == expected


async def check_all(source: Topic, totals: Table, words: Table, out: Topic) -> None:
    """Each output once, and all of them from the same calls that changed the tables."""
    await check_totals(source, totals)
    numbers: Counter[int] = Counter()
    counts: dict[str, list[int]] = {}
    last: dict[str, str] = {}
    async for event in out.read():
        number, word, place = event.value.decode().split()
        numbers[int(number)] += 1
        counts.setdefault(event.key or "", []).append(int(place))
        last[event.key or ""] = word
    wanted = [int(event.value) async for event in source.read()]
    assert sorted(numbers.elements()) == sorted(wanted)
    assert all(places == list(range(1, len(places) + 1)) for places in counts.values())
    assert {key: word.decode() for key, word in (await words.as_dict()).items()} == last
