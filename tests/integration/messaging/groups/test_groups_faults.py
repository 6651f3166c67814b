"""Ordered groups when things break: killed and frozen members, a killed and a frozen broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millstream.broker import Broker
from millstream.deadline import Deadline
from millstream.errors import NoResponders, RequestTimeout
from millstream.messaging.groups.group import GroupEvent
from millstream.messaging.groups.records import MemberRecord, PartitionRecord
from millstream.messaging.groups.store import GroupStore
from millstream.settings import ConnectionSettings, Reconnect
from millstream.testing import running_broker, running_cluster
from millstream.wire.aio.connection import Connection
from tests.integration.messaging.groups.group_kit import (
    QUICK,
    SHORT_LEASE,
    Kit,
    Recorder,
    Run,
    check_order,
    declare_dead,
    until,
    until_position,
    until_settled,
)

WORKER = Path(__file__).with_name("group_worker.py")
LEASE = 1.0  # of members whose lease shall run out
LONG = 30.0  # of the others: it does not, however long their process is stalled


class Processes:
    """Members in processes of their own, and what they noted."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._file = folder / "notes"
        self._file.touch()
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, lease: float, deadly: str = "-") -> subprocess.Popen[bytes]:
        arguments = [self._url, str(self._file), str(lease), "0.002", deadly]
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
        # What follows the last end of a line is being written just now.
        for line in self._file.read_text().split("\n")[:-1]:
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
    quick = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
    urls = tuple(url.split(","))
    connection = Connection(ConnectionSettings(urls, reconnect=quick, request_timeout=20.0))
    await connection.open()
    stack.push_async_callback(connection.close)
    kit = Kit(connection, partitions, stack)
    await kit.declare(replicas)
    return kit


@pytest.fixture
async def kit(millstream_url: str, stack: AsyncExitStack) -> Kit:
    return await make_kit(millstream_url, stack)


async def owned(kit: Kit) -> dict[str, list[int]]:
    """The partitions of each owner."""
    found: dict[str, list[int]] = defaultdict(list)
    if await kit.admin.names():
        for part in (await kit.admin.info("billing")).partitions:
            if part.owner:
                found[part.owner].append(part.partition)
    return found


async def until_owners(kit: Kit, count: int) -> None:
    """Wait until this many members share all partitions evenly."""
    deadline = Deadline(25)
    each = [len(kit.partitions) // count] * count
    while sorted(map(len, (found := await owned(kit)).values())) != each:
        assert not deadline.passed, f"there are not {count} owners: {dict(found)}"
        await asyncio.sleep(0.01)


class Feed:
    """Publishes one event of every key, repeatedly, until it is stopped."""

    def __init__(self, kit: Kit, keys: int) -> None:
        self.rounds = 0  # that are stored
        self._kit, self._keys = kit, keys
        self._ending = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._ending:
            await self._kit.publish((f"k{key}", self.rounds) for key in range(self._keys))
            self.rounds += 1
            await asyncio.sleep(0.02)

    async def end(self) -> int:
        """How many rounds there were."""
        self._ending = True
        await self._task
        return self.rounds


async def test_a_killed_members_partitions_are_taken_over_and_no_others_pause(
    kit: Kit, processes: Processes
) -> None:
    """kill -9 in the middle: order strict, nothing lost, untouched partitions keep their epoch."""
    victims = [processes.start(LONG) for _ in range(3)]
    await until_owners(kit, 3)
    feed = Feed(kit, keys=30)
    await until(lambda: len(processes.done()) > 300)
    before = {part.partition: part for part in (await kit.admin.info("billing")).partitions}
    dead = before[0].owner or ""
    victim = next(p for p in victims if f"-{p.pid}-" in dead)
    victim.kill()
    keys = [f"k{key}" for key in range(30)]
    living = {key for key in keys if before[kit.partition_of(key)].owner != dead}
    later = feed.rounds + 1  # the one after it is published when the member is dead
    await until(lambda: {(key, later) for key in living} <= processes.done())
    assert dead in await owned(kit), "the others went on before it was missed"
    await let_lease_run_out(kit, dead)
    await until_owners(kit, 2)
    rounds = await feed.end()
    await until(lambda: len(processes.done()) == 30 * rounds)
    after = {part.partition: part for part in (await kit.admin.info("billing")).partitions}
    for number, part in before.items():
        moved = part.owner == dead
        assert after[number].epoch == part.epoch + moved
    runs = [run for run, _ in processes.runs()]
    check_order(runs, 30, rounds, repeats=True)
    check_order([run for run in runs if run.key in living], len(living), rounds)


async def let_lease_run_out(kit: Kit, member: str) -> None:
    """As if the member had died with a short lease."""
    store = GroupStore(kit.jetstream, kit.publisher, "orders", "billing")
    found = await store.member(member)
    assert found is not None
    record = msgspec.structs.replace(found.record, lease=0.5)
    await store.put_member(member, record, found.revision, 20.0)
    store.nudge()


async def test_the_lease_of_the_dead_member_counts_not_that_of_the_observer(
    kit: Kit,
) -> None:
    store = GroupStore(kit.jetstream, kit.publisher, "orders", "billing")
    await store.declare(1)
    await store.put_member("short", MemberRecord(name="short", lease=0.5), 0, 20.0)
    owned_by_it = PartitionRecord(position=(1, 0), owner="short", epoch=1)
    await store.put_partition(0, owned_by_it, 0, 20.0)
    group = await kit.member(Recorder(), replace(QUICK, lease=600.0))
    await until(lambda: group.partitions == tuple(range(6)))


async def test_a_frozen_member_hands_out_nothing_more_when_it_wakes_up(
    kit: Kit, processes: Processes
) -> None:
    """It may end the handlers it was in; their epoch is the old one. Then it is a new member."""
    frozen, other = processes.start(LEASE), processes.start(LONG)
    await until_owners(kit, 2)
    feed = Feed(kit, keys=20)
    await until(lambda: len(processes.done()) > 200)
    os.kill(frozen.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    await until_owners(kit, 1)
    enough = len(processes.done()) + 400
    await until(lambda: len(processes.done()) > enough)
    woken = time.monotonic()
    os.kill(frozen.pid, signal.SIGCONT)
    await until_owners(kit, 2)
    again = time.monotonic()

    def runs_of(process: int) -> list[Run]:
        return [run for run, owner in processes.runs() if owner == process]

    await until(lambda: any(run.start > again for run in runs_of(frozen.pid)), what="it works")
    rounds = await feed.end()
    await until(lambda: len(processes.done()) == 20 * rounds)
    mine = runs_of(frozen.pid)
    assert not any(stopped + 0.1 < run.start < woken for run in mine)
    late = late_runs(kit, [*mine, *runs_of(other.pid)])
    assert len(late) <= 1, "at most the one whose handler it was about to call"
    # A handler takes 2 ms; if one took long, its process did not run meanwhile.
    limit = LEASE / 3
    mine = [replace(run, frozen=(run.end or 0) - run.start > limit) for run in mine]
    checked = [run for run in [*mine, *runs_of(other.pid)] if run not in late]
    check_order(checked, 20, rounds, repeats=True)
    assert other.poll() is None


def late_runs(kit: Kit, runs: list[Run]) -> list[Run]:
    """Those that started under an epoch that had ended."""
    latest: dict[int, int] = defaultdict(int)  # epoch by partition
    late = []
    for run in sorted(runs, key=lambda run: run.start):
        partition = kit.partition_of(run.key)
        if run.epoch < latest[partition]:
            late.append(run)
        latest[partition] = max(latest[partition], run.epoch)
    return late


async def test_an_event_that_kills_its_process_is_found_and_its_key_parked(
    kit: Kit, processes: Processes
) -> None:
    deadly = "k3"
    await kit.publish((f"k{key}", number) for number in range(20) for key in range(12))
    started = 0
    deadline = Deadline(120)
    while not await is_parked(kit, deadly):
        assert not deadline.passed
        if not any(process.poll() is None for process in processes.all):
            processes.start(LEASE, deadly)
            started += 1
        await asyncio.sleep(0.02)
    assert started <= 6, "two deaths to notice, two to be sure, and perhaps one more"
    await until(lambda: len(processes.done()) == 11 * 20)
    check_order([run for run, _ in processes.runs() if run.key != deadly], 11, 20, repeats=True)
    deadline = Deadline(20)
    while True:
        dead = await kit.dead_letters()
        if len(dead) == 20 or deadline.passed:
            break
        await asyncio.sleep(0.01)
    assert [int(event.value) for event in dead] == list(range(20))
    assert {event.key for event in dead} == {deadly}
    assert processes.all[-1].poll() is None


async def is_parked(kit: Kit, key: str) -> bool:
    if not await kit.admin.names():
        return False
    return key in {parked.key for parked in await kit.admin.parked("billing")}


async def test_a_group_continues_after_the_broker_was_killed(stack: AsyncExitStack) -> None:
    """No member is declared dead: owners keep their partitions, and nothing is lost."""
    broker = await stack.enter_async_context(running_broker())
    kit = await make_kit(broker.url, stack)
    record = Recorder(seconds=0.001)
    members = [await kit.member(record), await kit.member(record)]
    await until_settled(members, [3, 3])
    epochs = [part.epoch for part in (await kit.admin.info("billing")).partitions]
    feed = Feed(kit, keys=20)
    await until(lambda: len(record.done) > 200)
    await asyncio.to_thread(restart, broker)
    rounds = await go_on(feed, record)
    check_order(record.runs, 20, rounds, repeats=True)
    assert [part.epoch for part in (await kit.admin.info("billing")).partitions] == epochs


async def go_on(feed: Feed, record: Recorder) -> int:
    """Have some more rounds published and all events handled; how many rounds there were."""
    enough = feed.rounds + 10
    await until(lambda: feed.rounds >= enough, seconds=60)
    rounds = await feed.end()
    everything = {(f"k{key}", number) for key in range(20) for number in range(rounds)}
    await until(lambda: {(run.key, run.number) for run in record.done} == everything, seconds=60)
    return rounds


async def test_a_group_continues_when_the_leader_of_its_records_is_killed(
    stack: AsyncExitStack,
) -> None:
    """For some seconds no member can renew its lease; then all continue, and nothing is lost."""
    cluster = await stack.enter_async_context(running_cluster(3))
    kit = await make_kit(cluster.url, stack, partitions=3, replicas=3)
    record = Recorder(seconds=0.001)
    members = [await kit.member(record, SHORT_LEASE) for _ in range(3)]
    await until(lambda: [len(member.partitions) for member in members] == [1, 1, 1])
    feed = Feed(kit, keys=20)
    await until(lambda: len(record.done) > 200)
    leader = await new_leader(kit, "")
    node = next(name for name in cluster.nodes if cluster.server_name(name) == leader)
    await asyncio.to_thread(cluster.kill, node)
    await new_leader(kit, leader)
    rounds = await go_on(feed, record)
    check_order(record.runs, 20, rounds, repeats=True)


async def new_leader(kit: Kit, before: str) -> str:
    """The server that leads the records, when it is another one than before."""
    deadline = Deadline(60)
    while True:
        with contextlib.suppress(RequestTimeout, NoResponders):
            records = await kit.jetstream.stream_info("mill-groups")
            assert records.config["num_replicas"] == 3
            leader = (records.cluster and records.cluster.leader) or ""
            if leader not in ("", before):
                return leader
        assert not deadline.passed, f"still {before} leads"
        await asyncio.sleep(0.02)


def restart(broker: Broker) -> None:
    broker.kill()
    broker.start()


async def test_without_the_broker_handlers_are_cancelled_before_the_lease_is_over(
    stack: AsyncExitStack,
) -> None:
    """A frozen broker: the member cannot renew, stops by its own clock, and later continues."""
    broker = await stack.enter_async_context(running_broker())
    kit = await make_kit(broker.url, stack, partitions=1)
    record = Recorder()
    record.gate = {"a": asyncio.Event()}
    await kit.member(record, SHORT_LEASE)
    await kit.publish([("a", 0)])
    await until(lambda: "a" in record.started)
    pid = broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        # Time in which this process runs: while it is stalled it can cancel nothing.
        ticks = 0
        while not record.runs:
            await asyncio.sleep(0.01)
            ticks += 1
            assert ticks * 0.01 < SHORT_LEASE.lease
        assert record.runs[0].end is None
        record.open_gate("a")
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: record.numbers("a") == [0])
    assert len({run.epoch for run in record.runs}) == 1, "nobody else had taken over"


async def test_an_event_handled_alone_is_not_repeated_if_recording_it_was_interrupted(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """After deaths events are handed out one by one; the broker freezes when the first is done."""
    broker = await stack.enter_async_context(running_broker())
    kit = await make_kit(broker.url, stack, partitions=1)
    store = GroupStore(kit.jetstream, kit.publisher, "orders", "billing")
    await store.declare(1)
    await store.put_partition(0, PartitionRecord(position=(1, 0), deaths=2), 0, 20.0)
    await kit.publish([("a", 0), ("b", 0)])
    handled: list[str | None] = []
    pid = broker.pid
    assert pid is not None

    async def handler(event: GroupEvent) -> None:
        handled.append(event.key)
        if len(handled) == 1:
            os.kill(pid, signal.SIGSTOP)

    await kit.member(handler, SHORT_LEASE)
    try:
        await until(lambda: bool(handled))
        await until(lambda: "handlers are cancelled" in caplog.text)
    finally:
        os.kill(pid, signal.SIGCONT)
    await until_position(kit, (3, 0))
    assert handled == ["a", "b"]


async def test_a_member_that_rejoins_waits_for_an_unreachable_broker(
    stack: AsyncExitStack,
) -> None:
    """Declared dead, and then the broker dies for longer than an answer may take."""
    broker = await stack.enter_async_context(running_broker())
    kit = await make_kit(broker.url, stack, partitions=1)
    began, go_on, handled = threading.Event(), threading.Event(), list[int]()

    def handler(event: GroupEvent) -> None:  # in a thread: it holds up the new beginning
        began.set()
        assert go_on.wait(60)
        handled.append(event.epoch)

    group = await kit.member(handler, replace(QUICK, lease=6.0))  # it renews every second
    stack.callback(go_on.set)
    await kit.publish([("a", 0)])
    await until(began.is_set)
    before, connection = group.member_id, kit.jetstream.connection
    await declare_dead(group)
    await until(lambda: group._member is not None and not group._member._joined)
    await asyncio.to_thread(broker.kill)
    connection.settings = replace(connection.settings, request_timeout=0.2)
    go_on.set()
    await until(lambda: group.member_id != before)
    await asyncio.sleep(1.0)  # several times what a first join may take
    connection.settings = replace(connection.settings, request_timeout=20.0)
    await asyncio.to_thread(broker.start)
    await kit.publish([("a", 1)])
    await until(lambda: handled[-2:] == [2, 2], seconds=60)
