"""Writers with pairs as positions, notes bound to them, and positions without events."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import ConfigError
from millstream.events.packs.packing import Packing
from millstream.events.positions import Position, order_of
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.mill import Mill
from tests.integration.messaging.event_kit import values

SMALL = Packing(max_events=10, linger=60)
LSN = 2**63  # a place in a log: more than a signed number holds


def number(count: int) -> Position:
    return count


def pair(count: int) -> Position:
    """Three changes to a commit, and commits that are far apart."""
    return LSN + count // 3 * 1000, count % 3


async def test_pairs_order_like_words_and_survive_a_restart(mill: Mill) -> None:
    topic = await mill.create_topic("log", partitions=2)
    places: list[Position] = [(0, 0), (0, 1), (1, 0), (LSN, 7), (LSN, 2**40), (2**64 - 1, 0)]
    for stored in (3, 6):
        async with topic.writer("w", SMALL) as writer:
            for count, place in enumerate(places[:stored]):
                await writer.write(b"%d" % count, f"k{count}", position=place)
            await writer.flush()
            assert writer.position == places[stored - 1]
            assert writer.skipped == (0 if stored == 3 else 3)
    assert sorted(await values(topic)) == [b"%d" % n for n in range(6)]
    async with topic.writer("w") as writer:
        assert writer.position == (2**64 - 1, 0)
        await writer.write(b"0", "k0", position=(5, 0))  # stored long ago
        with pytest.raises(ConfigError, match="positions must grow"):
            await writer.write(b"x", position=(4, 9))


@pytest.mark.parametrize("first", [5, (5, 0)])
async def test_numbers_and_pairs_are_not_mixed(mill: Mill, first: Any) -> None:
    topic = await mill.create_topic("log")
    other: Any = (6, 0) if first == 5 else 6
    async with topic.writer("w") as writer:
        assert writer.position == 0
        await writer.write(b"1", position=first)
        with pytest.raises(ConfigError, match="the two kinds have no order"):
            await writer.write(b"2", position=other)
    async with topic.writer("w") as writer:
        assert writer.position == first
        with pytest.raises(ConfigError, match="use a writer of another name"):
            await writer.write(b"2", position=other)
        frame = pa.table({"value": [b"2"]})
        with pytest.raises(ConfigError, match="use a writer of another name"):
            await writer.write_batch(frame, position=other, columns=Columns(value="value"))
        with pytest.raises(ConfigError, match="use a writer of another name"):
            await writer.advance(other)
    assert await values(topic) == [b"1"]


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_frame_gives_the_positions_of_its_rows(mill: Mill, lanes: int) -> None:
    topic = await mill.create_topic("log", partitions=2)
    places = [pair(count) for count in range(200)]
    frame = pa.table(
        {
            "value": [b"%d" % n for n in range(200)],
            "lsn": pa.array([place[0] for place in places], pa.uint64()),  # type: ignore[index]
            "n": [place[1] for place in places],  # type: ignore[index]
        }
    )
    columns = Columns(value="value")
    async with topic.writer("w", SMALL, lanes) as writer:
        await writer.write_batch(frame.slice(0, 120), positions=("lsn", "n"), columns=columns)
    async with topic.writer("w", SMALL, lanes) as writer:
        assert writer.position == places[119]
        arrays = (frame.column("lsn"), frame.column("n"))
        await writer.write_batch(
            frame.slice(50), positions=(arrays[0].slice(50), arrays[1].slice(50)), columns=columns
        )
        await writer.flush()
        assert (writer.position, writer.skipped) == (places[199], 70)
    assert sorted(map(int, await values(topic))) == list(range(200))


async def test_a_position_of_a_frame_is_that_of_its_last_row(mill: Mill) -> None:
    topic = await mill.create_topic("log")
    frame = pa.table({"value": [b"a", b"b", b"c"]})
    columns = Columns(value="value")
    async with topic.writer("w") as writer:
        await writer.write(b"0", position=(7, 0))
        await writer.write_batch(frame, position=(7, 3), columns=columns)
        with pytest.raises(ConfigError, match="the first one would have -1"):
            await writer.write_batch(frame, position=(8, 1), columns=columns)
        both: dict[str, Any] = {"position": (9, 9), "positions": "value"}
        for wrong in ({}, both):
            with pytest.raises(ConfigError, match="give the position of the last row"):
                await writer.write_batch(frame, columns=columns, **wrong)
    assert await values(topic) == [b"0", b"a", b"b", b"c"]


async def test_a_pack_that_is_split_stores_no_note_before_its_event(mill: Mill) -> None:
    """Ten rows to a pack: the note of the last row is in the third pack only."""
    topic = await mill.create_topic("log")
    columns = Columns(value="value")

    def frame(first: int, last: int) -> pa.Table:
        return pa.table({"value": [b"%d" % n for n in range(first, last + 1)]})

    writer = await topic.writer("w", SMALL).open()
    await writer.write_batch(frame(1, 5), position=5, columns=columns, note="five")
    await writer.write_batch(frame(6, 25), position=25, columns=columns, note="twenty-five")
    await writer.abandon()  # as if it was killed: 21 to 25 were in no pack
    async with topic.writer("w", SMALL) as writer:
        assert (writer.position, writer.note) == (20, "five")
        await writer.write_batch(frame(1, 25), position=25, columns=columns, note="twenty-five")
        await writer.flush()
        assert (writer.position, writer.note) == (25, "twenty-five")
        await writer.write(b"26", position=26, note="")
        await writer.flush()
        assert (writer.position, writer.note) == (26, "")
    assert await values(topic) == [b"%d" % n for n in range(1, 27)]


async def test_a_note_that_is_set_belongs_to_the_next_event(mill: Mill) -> None:
    topic = await mill.create_topic("log")
    async with topic.writer("w", SMALL) as writer:
        await writer.write(b"1", position=1, note="one")
        writer.set_note("two")
        await writer.flush()
        assert (writer.position, writer.note) == (1, "one")
        await writer.write(b"2", position=2)
        await writer.write(b"3", position=3)
        await writer.flush()
        assert (writer.position, writer.note) == (3, "two")
        with pytest.raises(ConfigError, match="a writer's note has at most"):
            await writer.write(b"4", position=4, note="n" * 1025)


async def test_a_refused_frame_leaves_no_note(mill: Mill) -> None:
    topic = await mill.create_topic("log")
    async with topic.writer("w") as writer:
        with pytest.raises(ConfigError, match="no column 'missing'"):
            await writer.write_batch(
                pa.table({"value": [b"1"]}), position=1, columns=Columns(value="missing"), note="no"
            )
        await writer.write(b"2", position=2)
        await writer.flush()
        assert (writer.position, writer.note) == (2, "")


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("place", [number, pair], ids=["numbers", "pairs"])
async def test_a_position_is_stored_without_events(
    mill: Mill, lanes: int, place: Callable[[int], Position]
) -> None:
    topic = await mill.create_topic("log", partitions=2)
    writer = await topic.writer("w", SMALL, lanes).open()
    await writer.advance(place(1), "begin")
    await writer.write(b"2", "a", position=place(2))
    await writer.advance(place(5), "snapshot done")  # stores what was written before it, too
    assert (writer.position, writer.note) == (place(5), "snapshot done")
    await writer.advance(place(5))
    await writer.advance(place(5), "and more")
    with pytest.raises(ConfigError, match="positions must grow"):
        await writer.advance(place(4))
    await writer.abandon()
    assert await values(topic) == [b"2"]
    async with topic.writer("w", SMALL, lanes) as writer:
        assert (writer.position, writer.note) == (place(5), "and more")
        before = (await topic.info()).messages
        await writer.advance(place(3), "old news")  # stored long ago: nothing happens
        assert (writer.position, writer.note) == (place(5), "and more")
        assert (await topic.info()).messages == before
        await writer.advance(place(9))
        assert (writer.position, writer.note) == (place(9), "and more")


class Run:
    """A writer of random steps that is killed at random and goes on, beside what must hold."""

    def __init__(self, topic: Topic, place: Callable[[int], Position], lanes: int) -> None:
        self.topic, self.place, self.lanes = topic, place, lanes
        self.count = 300
        dice = random.Random(lanes)
        self.notes = {n: f"note {n}" for n in range(1, self.count + 1) if dice.random() < 0.1}
        self.silent = {n for n in range(1, self.count + 1) if dice.random() < 0.05}

    def value(self, n: int) -> bytes:
        return b"%d" % n

    def key(self, n: int) -> str | None:
        return None if n % 11 == 0 else f"k{n % 7}"

    def note_of(self, position: Position) -> str:
        known = [n for n in self.notes if order_of(self.place(n)) <= order_of(position)]
        return self.notes[max(known)] if known else ""

    def index_of(self, position: Position) -> int:
        if position == 0:
            return 0
        return next(n for n in range(1, self.count + 1) if self.place(n) == position)

    async def attempt(self, dice: random.Random, steps: int) -> int:
        """Some steps from where the writer stopped, or before that; then it is killed."""
        writer = await self.topic.writer("w", SMALL, self.lanes).open()
        assert writer.note == self.note_of(writer.position)
        n = max(0, self.index_of(writer.position) - dice.randrange(20)) + 1
        for _ in range(steps):
            if n > self.count:
                break
            n = await self.step(writer, dice, n)
            if dice.random() < 0.1:
                await writer.flush()
                assert order_of(writer.position) >= order_of(self.place(n - 1))
            assert writer.note == self.note_of(writer.position)
        await writer.abandon()
        return n

    async def step(self, writer: Any, dice: random.Random, n: int) -> int:
        if n in self.silent:
            await writer.advance(self.place(n), self.notes.get(n))
            return n + 1
        if dice.random() < 0.7:
            await writer.write(
                self.value(n), self.key(n), position=self.place(n), note=self.notes.get(n)
            )
            return n + 1
        last = n
        while last < self.count and last + 1 not in self.silent and last not in self.notes:
            last += 1
            if last - n > 25:
                break
        rows = range(n, last + 1)
        places = [self.place(row) for row in rows]
        frame = pa.table(
            {"value": [self.value(row) for row in rows], "key": [self.key(row) for row in rows]}
        )
        if isinstance(places[0], int):
            positions: Any = pa.array(places)
        else:
            positions = [pa.array(part, pa.uint64()) for part in zip(*places, strict=True)]
        await writer.write_batch(
            frame,
            positions=positions,
            columns=Columns(key="key", value="value"),
            note=self.notes.get(last),
        )
        return last + 1


@pytest.mark.parametrize("lanes", [1, 3])
async def test_numbers_and_pairs_store_the_same_whenever_a_writer_is_killed(
    mill: Mill, lanes: int
) -> None:
    stored = []
    for place in (number, pair):
        topic = await mill.create_topic(f"log-{place.__name__}", partitions=2)
        run = Run(topic, place, lanes)
        dice = random.Random(42)
        for _ in range(200):
            if await run.attempt(dice, dice.randrange(1, 40)) > run.count:
                break
        async with topic.writer("w", SMALL, lanes) as writer:  # all of it again, to the end
            for n in range(1, run.count + 1):
                if n not in run.silent:
                    note = run.notes.get(n)
                    await writer.write(run.value(n), run.key(n), position=place(n), note=note)
            await writer.advance(place(run.count))
            assert writer.position == place(run.count)
            assert writer.note == run.note_of(place(run.count))
        events = [(e.key, int(e.value)) async for e in topic.read()]
        wanted = [n for n in range(1, run.count + 1) if n not in run.silent]
        assert sorted(n for _, n in events) == wanted
        for key in {key for key, _ in events if key is not None}:
            of_key = [n for k, n in events if k == key]
            assert of_key == sorted(of_key)
        stored.append(sorted(events, key=lambda event: event[1]))
    assert stored[0] == stored[1]
