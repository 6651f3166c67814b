"""Ordered groups when things break: killed and frozen members, a killed and a frozen broker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from millstream.broker import Broker
from millstream.settings import ConnectionSettings, Reconnect
from millstream.testing import running_broker, running_cluster
from millstream.wire.connection import Connection
from tests.integration.messaging.group_kit import QUICK, Kit, Recorder, Run, check_order, until

WORKER = Path(__file__).with_name("group_worker.py")
LEASE = 1.0


class Processes:
    """Members in processes of their own, and what they noted."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._file = folder / "notes"
        self._file.touch()
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, seconds: float = 0.002, deadly: str = "-") -> subprocess.Popen[bytes]:
        arguments = [self._url, str(self._file), str(LEASE), str(seconds), deadly]
        process = subprocess.Popen([sys.executable, str(WORKER), *arguments])
        self.all.append(process)
        return process

    def clean_up(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()

    def runs(self) -> list[tuple[Run, int]]:
        """Every call of a handler, with the process it ran in."""
        started: dict[tuple[str, ...], tuple[float, int]] = {}
        found = []
        for line in self._file.read_text().splitlines():
            word, key, number, epoch, moment, process = line.split()
            name = (key, number, epoch, process)
            if word == "start":
                started[name] = (float(moment), int(process))
            else:
                start, _ = started.pop(name)
                run = Run(key, int(number), int(epoch), start, float(moment))
                found.append((run, int(process)))
        for (key, number, epoch, _), (start, pid) in started.items():
            found.append((Run(key, int(number), int(epoch), start, None), pid))
        return found

    def done(self) -> set[tuple[str, int]]:
        return {(run.key, run.number) for run, _ in self.runs() if run.end is not None}


@pytest.fixture
def processes(millstream_url: str, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(millstream_url, tmp_path)
    yield processes
    processes.clean_up()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def make_kit(url: str, stack: AsyncExitStack, partitions: int = 6, replicas: int = 1) -> Kit:
    quick = Reconnect(wait=0.02, wait_max=0.1, give_up_after=30)
    connection = Connection(ConnectionSettings(urls=tuple(url.split(",")), reconnect=quick))
    await connection.open()
    stack.push_async_callback(connection.close)
    kit = Kit(connection, partitions, stack)
    await kit.declare(replicas)
    return kit


@pytest.fixture
async def kit(millstream_url: str, stack: AsyncExitStack) -> Kit:
    return await make_kit(millstream_url, stack)


async def members_of(kit: Kit) -> int:
    if not await kit.admin.names():
        return 0
    info = await kit.admin.info("billing")
    return len({part.owner for part in info.partitions if part.owner})


async def until_owners(kit: Kit, count: int) -> None:
    for _ in range(1500):
        if await members_of(kit) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"there are not {count} owners")


async def feed(kit: Kit, keys: int, each: int, pause: float) -> None:
    for number in range(each):
        await kit.publish((f"k{key}", number) for key in range(keys))
        await asyncio.sleep(pause)


async def test_a_killed_members_partitions_are_taken_over_and_no_others_pause(
    kit: Kit, processes: Processes
) -> None:
    """kill -9 in the middle: order strict, nothing lost, untouched partitions keep their epoch."""
    victims = [processes.start() for _ in range(3)]
    await until_owners(kit, 3)
    feeding = asyncio.create_task(feed(kit, keys=30, each=100, pause=0.02))
    await until(lambda: len(processes.done()) > 300)
    before = {part.partition: part for part in (await kit.admin.info("billing")).partitions}
    owner_of_0 = before[0].owner
    victim = next(p for p in victims if f"-{p.pid}-" in (owner_of_0 or ""))
    victim.kill()
    killed = time.monotonic()
    await until_owners(kit, 2)
    taken_over = time.monotonic() - killed
    assert taken_over < 3 * LEASE
    await feeding
    await until(lambda: len(processes.done()) == 3000)
    after = {part.partition: part for part in (await kit.admin.info("billing")).partitions}
    for number, part in before.items():
        moved = part.owner == owner_of_0
        assert after[number].epoch == part.epoch + moved
    runs = processes.runs()
    check_order([run for run, _ in runs], 30, 100, repeats=True)
    living = [r for r, _ in runs if before[kit.partition_of(r.key)].owner != owner_of_0]
    check_order(living, len({run.key for run in living}), 100)
    pause = longest_pause([run.start for run in living if run.start < killed + taken_over], killed)
    assert pause < LEASE / 2, "the others went on meanwhile"


def longest_pause(starts: list[float], since: float) -> float:
    times = sorted(start for start in starts if start >= since)
    return max(b - a for a, b in zip([since, *times], times, strict=False))


async def test_a_frozen_member_hands_out_nothing_more_when_it_wakes_up(
    kit: Kit, processes: Processes
) -> None:
    """It may end the handlers it was in; their epoch is the old one. Then it is a new member."""
    frozen, other = processes.start(), processes.start()
    await until_owners(kit, 2)
    feeding = asyncio.create_task(feed(kit, keys=20, each=120, pause=0.02))
    await until(lambda: len(processes.done()) > 200)
    os.kill(frozen.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    await until_owners(kit, 1)
    await until(lambda: len(processes.done()) > 600)
    woken = time.monotonic()
    os.kill(frozen.pid, signal.SIGCONT)
    await until_owners(kit, 2)
    await feeding
    await until(lambda: len(processes.done()) == 20 * 120)
    runs = []
    for run, process in processes.runs():
        in_it = process == frozen.pid and run.start < woken and (run.end or woken) >= woken
        runs.append(Run(run.key, run.number, run.epoch, run.start, None) if in_it else run)
    check_order(runs, 20, 120, repeats=True)
    mine = [run for run, process in processes.runs() if process == frozen.pid]
    assert any(run.start > woken for run in mine), "it works again"
    assert not any(stopped + 0.1 < run.start < woken for run in mine)
    assert other.poll() is None


async def test_an_event_that_kills_its_process_is_found_and_its_key_parked(
    kit: Kit, processes: Processes
) -> None:
    deadly = "k3"
    await kit.publish((f"k{key}", number) for number in range(20) for key in range(12))
    started = 0
    deadline = time.monotonic() + 40
    while not await is_parked(kit, deadly):
        assert time.monotonic() < deadline
        if not any(process.poll() is None for process in processes.all):
            processes.start(deadly=deadly)
            started += 1
        await asyncio.sleep(0.02)
    assert started <= 6, "two deaths to notice, two to be sure, and perhaps one more"
    await until(lambda: len(processes.done()) == 11 * 20)
    check_order([run for run, _ in processes.runs() if run.key != deadly], 11, 20, repeats=True)
    for _ in range(500):
        dead = await kit.dead_letters()
        if len(dead) == 20:
            break
        await asyncio.sleep(0.01)
    assert [int(event.value) for event in dead] == list(range(20))
    assert {event.key for event in dead} == {deadly}
    assert processes.all[-1].poll() is None


async def is_parked(kit: Kit, key: str) -> bool:
    if not await kit.admin.names():
        return False
    return key in {parked.key for parked in await kit.admin.parked("billing")}


async def test_a_group_goes_on_when_the_broker_was_killed(stack: AsyncExitStack) -> None:
    """Nobody is declared dead for it: owners keep their partitions, and nothing is lost."""
    broker = await stack.enter_async_context(running_broker())
    kit = await make_kit(broker.url, stack)
    record = Recorder(seconds=0.001)
    members = [await kit.member(record), await kit.member(record)]
    await until(lambda: [len(member.partitions) for member in members] == [3, 3])
    epochs = [part.epoch for part in (await kit.admin.info("billing")).partitions]
    feeding = asyncio.create_task(feed(kit, keys=20, each=60, pause=0.02))
    await until(lambda: len(record.done) > 200)
    await asyncio.to_thread(restart, broker)
    await feeding
    await until(lambda: len({(run.key, run.number) for run in record.done}) == 20 * 60, seconds=20)
    check_order(record.runs, 20, 60, repeats=True)
    assert [part.epoch for part in (await kit.admin.info("billing")).partitions] == epochs


async def test_a_group_goes_on_when_the_leader_of_its_records_is_killed(
    stack: AsyncExitStack,
) -> None:
    """For some seconds nobody can renew a lease; then all go on, and nothing is lost."""
    cluster = await stack.enter_async_context(running_cluster(3))
    kit = await make_kit(cluster.url, stack, partitions=3, replicas=3)
    record = Recorder(seconds=0.001)
    members = [await kit.member(record) for _ in range(3)]
    await until(lambda: [len(member.partitions) for member in members] == [1, 1, 1])
    records = await kit.jetstream.stream_info("mill-groups")
    assert records.config["num_replicas"] == 3
    assert records.cluster is not None
    leader = records.cluster.leader
    feeding = asyncio.create_task(feed(kit, keys=20, each=40, pause=0.02))
    await until(lambda: len(record.done) > 200)
    node = next(name for name in cluster.nodes if cluster.server_name(name) == leader)
    await asyncio.to_thread(cluster.kill, node)
    await feeding
    await until(lambda: len({(run.key, run.number) for run in record.done}) == 20 * 40, seconds=40)
    check_order(record.runs, 20, 40, repeats=True)


def restart(broker: Broker) -> None:
    broker.kill()
    broker.start()


async def test_without_the_broker_handlers_are_cancelled_before_the_lease_is_over(
    stack: AsyncExitStack,
) -> None:
    """A frozen broker: the member cannot renew, stops by its own clock, and later goes on."""
    broker = await stack.enter_async_context(running_broker())
    kit = await make_kit(broker.url, stack, partitions=1)
    record = Recorder()
    record.gate = {"a": asyncio.Event()}
    group = await kit.member(record, QUICK)
    await kit.publish([("a", 0)])
    await until(lambda: group._member is not None and bool(group._member.context.workers._running))
    pid = broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        await until(lambda: bool(record.runs), seconds=5)
        assert time.monotonic() - began < QUICK.lease
        assert record.runs[0].end is None
    finally:
        os.kill(pid, signal.SIGCONT)
    record.gate.clear()
    await until(lambda: record.numbers("a") == [0])
    assert [run.epoch for run in record.runs] == [1, 1], "nobody else had taken over"
