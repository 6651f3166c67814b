"""Consume, transform, produce: outputs are exactly f(inputs), whatever is killed and when."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import pytest

import millstream
from millstream import Event, Mill, NewEvent, Topic
from millstream.broker import Broker
from millstream.deadline import Deadline
from millstream.errors import ConfigError, DataLoss, FencedOut, LimitReached, ProcessFailed
from millstream.events.packs.packing import Packing
from millstream.messaging.process import ProcessSettings
from millstream.settings import Reconnect
from millstream.testing import running_broker
from tests.integration.messaging.process_child import SETTINGS, transform

CHILD = Path(__file__).with_name("process_child.py")


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as mill:
        yield mill


async def fill(topic: Topic, first: int, last: int) -> None:
    """Numbers with keys, as plain messages and in packs."""
    middle = (first + last) // 2
    await topic.publish_many(
        [NewEvent(b"%d" % number, f"k{number % 7}") for number in range(first, middle)]
    )
    async with topic.producer(Packing(max_events=7, linger=0.01)) as producer:
        for number in range(middle, last):
            await producer.send(b"%d" % number, f"k{number % 7}")


async def check_outputs(source: Topic, target: Topic) -> None:
    """What is stored is what the inputs give, each once, in the order of the input partition."""
    expected: list[bytes] = []
    async for event in source.read():
        expected.extend(output.value for output in transform(event))
    stored = [event async for event in target.read()]
    assert sorted(event.value for event in stored) == sorted(expected)
    index = {value: number for number, value in enumerate(expected)}
    for partition in range(target.partitions):
        for origin in range(source.partitions):
            start = b"%d." % origin
            seen = [
                index[e.value]
                for e in stored
                if e.partition == partition and e.value.startswith(start)
            ]
            assert seen == sorted(seen)


async def two_topics(mill: Mill) -> tuple[Topic, Topic]:
    source = await mill.create_topic("in", partitions=3)
    return source, await mill.create_topic("out", partitions=2, schedules=False)


# -- what it does -------------------------------------------------------------------------


async def test_outputs_are_the_function_of_the_inputs(mill: Mill) -> None:
    source, target = await two_topics(mill)
    await fill(source, 0, 200)
    process = mill.process(source, target, transform, SETTINGS)
    await process.run(once=True)
    await check_outputs(source, target)
    assert process.handled == 200
    again = mill.process(source, target, transform, SETTINGS)
    await again.run(once=True)
    assert (again.handled, again.produced) == (0, 0)


async def test_results_may_be_nothing_values_events_or_several_of_them(mill: Mill) -> None:
    source = await mill.create_topic("in")
    target = await mill.create_topic("out")

    async def make(event: Event) -> object:
        number = int(event.value)
        made = [None, b"bytes", "text", NewEvent(b"event", "k", headers={"h": "v"}), [b"a", b"b"]]
        return iter(()) if number == 5 else made[number]

    for number in range(6):
        await source.publish(b"%d" % number)
    await mill.process(source, target, make).run(once=True)
    events = [event async for event in target.read()]
    assert [event.value for event in events] == [b"bytes", b"text", b"event", b"a", b"b"]
    assert (events[2].key, dict(events[2].headers)) == ("k", {"h": "v"})


async def test_a_process_follows_until_it_is_stopped(mill: Mill) -> None:
    source, target = await two_topics(mill)
    process = mill.process(source, target, transform, SETTINGS)
    running = asyncio.create_task(process.run())
    await fill(source, 0, 40)
    deadline = Deadline(40)
    while process.handled < 40:
        assert not deadline.passed
        await asyncio.sleep(0.01)
    process.stop()
    await running
    await check_outputs(source, target)


async def test_partitions_can_be_shared_between_processes(mill: Mill) -> None:
    source, target = await two_topics(mill)
    await fill(source, 0, 100)
    shares = [ProcessSettings("p", partitions=(0, 2)), ProcessSettings("p", partitions=(1,))]
    work = [mill.process(source, target, transform, share) for share in shares]
    await asyncio.gather(*(process.run(once=True) for process in work))
    await check_outputs(source, target)
    assert sum(process.handled for process in work) == 100


async def test_a_second_process_fences_the_first_one_out(mill: Mill) -> None:
    source, target = await two_topics(mill)
    first = mill.process(source, target, transform, SETTINGS)
    running = asyncio.create_task(first.run())
    await fill(source, 0, 30)
    deadline = Deadline(40)
    while first.handled < 30:
        assert not deadline.passed
        await asyncio.sleep(0.01)
    second = asyncio.create_task(mill.process(source, target, transform, SETTINGS).run())
    await asyncio.sleep(0)
    number = 30
    while not running.done():
        assert not deadline.passed
        await fill(source, number, number + 10)
        number += 10
    with pytest.raises(FencedOut, match="taken over"):
        await running
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await mill.process(source, target, transform, SETTINGS).run(once=True)
    await check_outputs(source, target)


async def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="on_error"):
        ProcessSettings("p", on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="commit_every"):
        ProcessSettings("p", commit_every=0)
    with pytest.raises(ConfigError, match="process name"):
        ProcessSettings("a.b")


# -- what goes wrong ----------------------------------------------------------------------


def fragile(event: Event) -> bytes:
    if event.value == b"7":
        raise ValueError("seven is not welcome")
    return bytes(event.value)


async def test_a_failing_function_stops_the_process_where_it_failed(mill: Mill) -> None:
    source, target = await mill.create_topic("in"), await mill.create_topic("out")
    async with source.producer(Packing(max_events=4)) as producer:
        for number in range(12):
            await producer.send(b"%d" % number)
    with pytest.raises(ProcessFailed, match="seven is not welcome"):
        await mill.process(source, target, fragile, ProcessSettings("p")).run(once=True)
    fixed = mill.process(source, target, lambda event: event.value, ProcessSettings("p"))
    await fixed.run(once=True)
    assert [int(event.value) async for event in target.read()] == list(range(12))


async def test_a_failing_event_can_become_a_dead_letter(mill: Mill) -> None:
    source, target = await mill.create_topic("in"), await mill.create_topic("out")
    for number in range(5):
        await source.publish(b"%d" % number)
    async with source.producer() as producer:
        for number in range(5, 10):
            await producer.send(b"%d" % number)
    settings = ProcessSettings("p", on_error="dead_letter")
    await mill.process(source, target, fragile, settings).run(once=True)
    assert [int(e.value) async for e in target.read()] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    dead = await mill.topic("in-p-dead")
    assert [event.value async for event in dead.read()] == [b"7"]


async def test_an_output_that_cannot_be_stored_discards_its_siblings(mill: Mill) -> None:
    source = await mill.create_topic("in")
    target = await mill.create_topic("out", partitions=2)
    for number in range(6):
        await source.publish(b"%d" % number)

    def make(event: Event) -> list[NewEvent]:
        number = int(event.value)
        last: object = 3.5 if number == 2 else b"%d" % number
        return [NewEvent(event.value, "a"), NewEvent(last, "b"), NewEvent(event.value, "c")]

    settings = ProcessSettings("p", on_error="dead_letter")
    await mill.process(source, target, make, settings).run(once=True)
    stored = sorted([int(event.value) async for event in target.read()])
    assert stored == sorted([0, 1, 3, 4, 5] * 3)
    assert [e.value async for e in (await mill.topic("in-p-dead")).read()] == [b"2"]
    with pytest.raises(ProcessFailed, match="a dict or a list"):
        await mill.process(source, target, make, ProcessSettings("q")).run(once=True)


async def test_a_broken_pack_in_the_input_is_one_bad_event(mill: Mill) -> None:
    source, target = await mill.create_topic("in"), await mill.create_topic("out")
    await source.publish(b"1")
    headers = {"Mill-Pack": "1", "Mill-Count": "1", "Mill-Checksum": "00000000"}
    await mill.publish_acked("in._pack.x", b"broken", headers)
    await source.publish(b"2")
    with pytest.raises(ProcessFailed, match="not a valid pack"):
        await mill.process(source, target, fragile, ProcessSettings("p")).run(once=True)
    settings = ProcessSettings("p", on_error="dead_letter")
    await mill.process(source, target, fragile, settings).run(once=True)
    assert [event.value async for event in target.read()] == [b"1", b"2"]


async def test_a_recreated_input_is_data_loss_not_a_fresh_start(mill: Mill) -> None:
    source, target = await mill.create_topic("in"), await mill.create_topic("out")
    for number in range(5):
        await source.publish(b"%d" % number)
    await mill.process(source, target, fragile, ProcessSettings("p")).run(once=True)
    await mill.delete_topic("in")
    source = await mill.create_topic("in")
    with pytest.raises(DataLoss, match="last offset 0"):
        await mill.process(source, target, fragile, ProcessSettings("p")).run(once=True)
    for number in range(6):
        await source.publish(b"%d" % number)
    with pytest.raises(DataLoss, match="not what it read"):
        await mill.process(source, target, fragile, ProcessSettings("p")).run(once=True)
    assert len([event async for event in target.read()]) == 5


async def test_output_partitions_at_different_positions_catch_up(mill: Mill) -> None:
    """One partition took its outputs and the other one could not: the first must not get twice."""
    source, target = await two_topics(mill)
    await fill(source, 0, 300)
    full = (await mill.jetstream.stream_info("out-1")).config
    for limit in (3, 6, 9):
        await mill.jetstream.update_stream({**full, "max_msgs": limit, "discard": "new"})
        with pytest.raises(LimitReached):
            await mill.process(source, target, transform, SETTINGS).run(once=True)
    await mill.jetstream.update_stream(full)
    await mill.process(source, target, transform, SETTINGS).run(once=True)
    await check_outputs(source, target)


# -- crashes ------------------------------------------------------------------------------


async def _slowly(event: Event) -> list[NewEvent]:
    await asyncio.sleep(0)
    return transform(event)


async def test_a_process_cut_off_at_any_moment_leaves_nothing_half_done(
    millstream_url: str,
) -> None:
    """Cancelled at random moments on a connection that is cut before, 25 times."""
    chance = random.Random(4)
    async with millstream.connect(millstream_url) as mill:
        source, target = await two_topics(mill)
        await fill(source, 0, 1200)
        made = []
        for _ in range(25):
            other = await millstream.connect(millstream_url)
            parts = await other.topic("in"), await other.topic("out")
            process = other.process(*parts, _slowly, SETTINGS)
            running = asyncio.create_task(process.run(once=True))
            goal = chance.randrange(250)
            while (  # noqa: ASYNC110 (the process reports nothing while it works)
                process.handled < goal and not running.done()
            ):
                await asyncio.sleep(0)
            made.append(process.produced)
            if running.done():
                await running
                await other.close()
                break  # all is done
            await other.connection.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert sum(count > 0 for count in made) > 3, "it was never in the middle of its work"
        await mill.process(source, target, transform, SETTINGS).run(once=True)
        await check_outputs(source, target)


async def outputs_stored(target: Topic) -> int:
    return sum([1 async for _ in target.read()])


def child(url: str, how: str) -> Coroutine[None, None, asyncio.subprocess.Process]:
    return asyncio.create_subprocess_exec(sys.executable, str(CHILD), url, how)


async def kill_child_in_its_work(url: str, target: Topic, outputs: int) -> None:
    """Run the program and kill -9 it when it has stored this many more outputs."""
    goal = outputs + await outputs_stored(target)
    program = await child(url, "follow")
    deadline = Deadline(60)
    while await outputs_stored(target) < goal:
        assert program.returncode is None, "the program ended before it was killed"
        assert not deadline.passed
        await asyncio.sleep(0.02)
    program.kill()
    assert await program.wait() == -signal.SIGKILL


async def test_a_killed_program_stores_every_output_once(millstream_url: str) -> None:
    chance = random.Random(9)
    async with millstream.connect(millstream_url) as mill:
        source, target = await two_topics(mill)
        for number in range(5):
            # More than it does before it is killed, also if it did all there was before.
            await fill(source, 400 * number, 400 * (number + 1))
            await kill_child_in_its_work(millstream_url, target, chance.randrange(10, 250))
        last = await child(millstream_url, "once")
        async with asyncio.timeout(60):
            assert await last.wait() == 0
        await check_outputs(source, target)


async def test_a_killed_broker_neither_loses_nor_duplicates_outputs() -> None:
    with running_broker() as broker:
        quick = Reconnect(wait=0.02, wait_max=0.1)
        async with millstream.connect(broker.url, reconnect=quick, request_timeout=30) as mill:
            source, target = await two_topics(mill)
            await fill(source, 0, 600)
            process = mill.process(source, target, transform, SETTINGS)
            running = asyncio.create_task(process.run())
            for goal in (200,):
                await _handled(process, goal, running)
                await asyncio.to_thread(_kill_and_restart, broker)
            await _handled(process, 600, running)
            process.stop()
            await running
            await check_outputs(source, target)


def _kill_and_restart(broker: Broker) -> None:
    broker.kill()
    broker.start()


async def _handled(process: object, goal: int, running: asyncio.Task[None]) -> None:
    deadline = Deadline(60)
    while process.handled < goal:  # type: ignore[attr-defined]
        assert not deadline.passed
        if running.done():
            running.result()
        await asyncio.sleep(0.01)
