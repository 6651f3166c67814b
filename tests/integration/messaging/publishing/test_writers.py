"""Exactly-once writers: restarted, killed, doubled, fenced out; each event once and in order."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest

from millstream import connect
from millstream.broker import Broker
from millstream.deadline import Deadline
from millstream.errors import ConfigError, DataLoss, FencedOut, PayloadTooLarge
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import Columns
from millstream.messaging import Topic
from millstream.testing import running_broker
from tests.integration.messaging.publishing.writer_child import PACK
from tests.integration.messaging.topic_kit import eventually

CHILD = Path(__file__).with_name("writer_child.py")
SMALL = Packing(max_events=10, linger=0.01)


async def values(topic: Topic) -> list[int]:
    return [int(event.value) async for event in topic.read()]


async def check_each_once_in_order(topic: Topic, count: int) -> None:
    """Every number once, and growing within each key."""
    by_key: dict[str | None, list[int]] = defaultdict(list)
    async for event in topic.read():
        by_key[event.key].append(int(event.value))
    stored = sorted(number for numbers in by_key.values() for number in numbers)
    assert stored == list(range(1, count + 1))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


async def test_a_restarted_writer_resumes_where_it_stopped(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log", partitions=3)
        async with topic.writer("w", SMALL) as writer:
            assert writer.position == 0
            writer.set_note("first half")
            for number in range(1, 101):
                await writer.write(b"%d" % number, f"k{number % 7}", position=number)
        async with topic.writer("w", SMALL) as writer:
            assert (writer.position, writer.note) == (100, "first half")
            for number in range(1, 201):  # everything again, and more
                await writer.write(b"%d" % number, f"k{number % 7}", position=number)
            await writer.flush()
            assert writer.position == 200
            assert writer.skipped == 100
        await check_each_once_in_order(topic, 200)


async def test_the_fence_holds_after_the_duplicate_window(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log", duplicate_window="100ms")
        for _ in range(2):
            async with topic.writer("w", SMALL) as writer:
                for number in range(1, 31):
                    await writer.write(b"%d" % number, position=number)
            await asyncio.sleep(0.2)  # longer than the broker remembers ids
        assert await values(topic) == list(range(1, 31))


async def test_a_second_process_of_the_same_name_fences_the_first_one_out(
    millstream_url: str,
) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        first = await topic.writer("w", SMALL).open()
        await first.write(b"1", position=1)
        await first.flush()
        second = await topic.writer("w", SMALL).open()
        await second.write(b"2", position=2)
        await second.flush()
        await first.write(b"20", position=2)
        with pytest.raises(FencedOut, match="taken over"):
            await first.flush()
        with pytest.raises(FencedOut):  # and it stays out
            await first.write(b"3", position=3)
        await second.close()
        await first.abandon()
        assert await values(topic) == [1, 2]


async def test_a_refused_event_does_not_affect_its_neighbours(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        async with topic.writer("w") as writer:
            await writer.write(b"1", "k1", position=1)
            with pytest.raises(ConfigError, match="keys have at most"):
                await writer.write(b"2", "k" * 100_000, position=2)
            with pytest.raises(ConfigError, match="a lone surrogate"):
                await writer.write(b"3", "\ud800", position=3, headers={"a": "b"})
            await writer.write(b"4", "k4", position=4)
        stored = [(event.key, event.value) async for event in topic.read()]
        assert stored == [("k1", b"1"), ("k4", b"4")]


async def test_positions_must_grow(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        async with topic.writer("w") as writer:
            await writer.write(b"5", position=5)
            with pytest.raises(ConfigError, match="positions must grow"):
                await writer.write(b"5", position=5)


async def test_a_frame_given_again_is_stored_from_where_it_stopped(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log", partitions=2)
        numbers = [b"%d" % n for n in range(1, 1001)]
        frame = pa.table({"value": numbers, "k": [f"k{n % 9}" for n in range(1, 1001)]})
        columns = Columns(key="k", value="value")
        packing = Packing(max_events=100)
        async with topic.writer("w", packing) as writer:
            await writer.write_batch(frame.slice(0, 550), position=550, columns=columns)
        async with topic.writer("w", packing) as writer:
            await writer.write_batch(frame, position=1000, columns=columns)
            await writer.flush()
            assert writer.skipped == 550
            assert writer.position == 1000
        await check_each_once_in_order(topic, 1000)


@pytest.mark.parametrize("lanes", [1, 3])
async def test_small_frames_share_packs_and_keep_their_order(
    millstream_url: str, lanes: int
) -> None:
    """Frames of any size, single events between them, and a frame with another envelope."""
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        number = 0

        def frame(rows: int, *, ids: bool = False) -> pa.Table:
            numbers = range(number - rows + 1, number + 1)
            made = {"value": [b"%d" % n for n in numbers], "k": [f"k{n % 7}" for n in numbers]}
            return pa.table({**made, "i": [f"id{n}" for n in numbers]} if ids else made)

        columns = Columns(key="k", value="value")
        async with topic.writer("w", Packing(max_events=50, linger=60), lanes) as writer:
            for rows in (1, 3, 120, 7, 50, 19, 200):
                number += rows
                await writer.write_batch(frame(rows), position=number, columns=columns)

            async def full() -> bool:
                packs = (await topic.info()).messages - lanes  # without the claims
                return packs in range(400 // 50 - lanes - 1, 400 // 50 + 1)

            await eventually(full, True)
            number += 1
            await writer.write(b"%d" % number, f"k{number % 7}", position=number)
            number += 5
            with_ids = Columns(key="k", value="value", id="i")
            await writer.write_batch(frame(5, ids=True), position=number, columns=with_ids)
            await writer.flush()
            assert writer.position == number
        await check_each_once_in_order(topic, number)


async def test_a_frame_with_a_row_too_large_for_a_pack_is_refused_entirely(
    millstream_url: str,
) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        rows = [b"%d" % n for n in range(1, 51)]
        rows[40] = b"x" * 100_000
        columns = Columns(value="value")
        packing = Packing(max_events=10, max_bytes=16 * 1024)
        async with topic.writer("w", packing) as writer:
            with pytest.raises(PayloadTooLarge):
                await writer.write_batch(pa.table({"value": rows}), position=50, columns=columns)
            await writer.flush()
            assert (writer.position, await values(topic)) == (0, [])


async def test_a_frame_that_fills_no_pack_is_stored_when_it_has_lingered(
    millstream_url: str,
) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        frame = pa.table({"value": [b"1", b"2", b"3"]})
        async with topic.writer("w", Packing(linger=0.02)) as writer:
            await writer.write_batch(frame, position=3, columns=Columns(value="value"))
            deadline = Deadline(20)
            while await values(topic) != [1, 2, 3]:
                assert not deadline.passed
                await asyncio.sleep(0.01)


async def test_a_writer_notices_a_log_that_lost_what_was_acknowledged(
    millstream_url: str,
) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        writer = await topic.writer("w", SMALL).open()
        for number in range(1, 4):
            await writer.write(b"%d" % number, position=number)
            await writer.flush()
        last = (await topic.info()).partitions[0].last_offset
        await mill.jetstream.delete_message("log", last)  # as a damaged block would
        await writer.write(b"4", position=4)
        with pytest.raises(DataLoss, match="lost what was acknowledged"):
            await writer.flush()
        await writer.abandon()


async def spawn(url: str, count: int, most: int) -> asyncio.subprocess.Process:
    arguments = (str(CHILD), url, "log", str(count), str(most))
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.PIPE
    )


async def kill_when_stored(url: str, topic: Topic, count: int, more: int) -> None:
    """Kill a child when it has stored some packs more; it waits for that when it is quicker."""
    goal = (await topic.info()).messages + more
    child = await spawn(url, count, more * PACK)
    deadline = Deadline(60)
    while (await topic.info()).messages < goal:
        assert child.returncode is None
        assert not deadline.passed
        await asyncio.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    await child.communicate()
    assert child.returncode == -signal.SIGKILL


async def test_killed_at_random_points_each_event_is_stored_once(millstream_url: str) -> None:
    chance = random.Random(20261115)
    count = 10_000
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log", partitions=2)
        for _ in range(6):
            await kill_when_stored(millstream_url, topic, count, chance.randrange(5, 40))
        child = await spawn(millstream_url, count, count)
        _, words = await child.communicate()
        assert child.returncode == 0, words.decode()
        await check_each_once_in_order(topic, count)
        reports = [report async for report in topic.admin.verify()]
        assert reports[-1].sound, reports[-1].flaws


async def test_nothing_is_lost_when_the_broker_is_killed_at_random_points() -> None:
    chance = random.Random(7)
    count = 6_000

    async def killer(broker: Broker) -> int:
        for _ in range(3):
            await asyncio.sleep(0.1 + chance.random() * 0.3)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
        return 3

    async with running_broker() as broker, connect(broker.url) as mill:
        topic = await mill.create_topic("log")
        nemesis = asyncio.create_task(killer(broker))
        async with topic.writer("w", Packing(max_events=20, linger=0.01)) as writer:
            for number in range(1, count + 1):
                await writer.write(b"%d" % number, f"k{number % 5}", position=number)
                if number == count // 2:
                    await nemesis
        assert await nemesis == 3
        await check_each_once_in_order(topic, count)
