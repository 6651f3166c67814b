"""What the tests of ordered groups share: a topic, members, and the check of what was handled."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from millstream.deadline import Deadline
from millstream.errors import WrongSequence
from millstream.events.event import Event, NewEvent, Partition
from millstream.events.subject import partition_of
from millstream.messaging import Client
from millstream.messaging.groups.admin import GroupAdmin
from millstream.messaging.groups.group import Group
from millstream.messaging.groups.settings import GroupSettings
from millstream.messaging.groups.workers import GroupHandler
from millstream.messaging.reading.events import read_events
from millstream.messaging.reading.replay import ReadPlan
from millstream.messaging.topics.choices import Retention
from millstream.messaging.topics.settings import TopicSettings
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher

# The lease is for tests in which none runs out, however long a process is stalled.
QUICK = GroupSettings(lease=30.0, commit_every=0.05, backoff=(0.02,), max_attempts=3)
# For tests that need a lease to run out; then nothing may depend on how often that happens.
SHORT_LEASE = replace(QUICK, lease=1.0)


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a handler."""

    key: str
    number: int
    epoch: int
    start: float
    end: float | None  # None: it was cancelled
    frozen: bool = False  # its process stood still meanwhile: nothing is promised about its end


class Kit:
    """One topic and the members of its groups, over one connection."""

    def __init__(self, connection: Connection, count: int, stack: AsyncExitStack) -> None:
        self.jetstream = JetStream(connection)
        self.publisher = StreamPublisher(connection)
        self._count = count
        self.partitions: list[Partition] = []
        self._client = Client(connection)
        self._stack = stack

    async def declare(self, replicas: int = 1, retention: Retention = Retention.LIMITS) -> None:
        settings = TopicSettings(partitions=self._count, replicas=replicas, retention=retention)
        self._topic = await self._client.create_topic("orders", settings)
        info = await self._topic.info()
        self.partitions = [
            Partition(part.stream, "orders", part.number, part.prefix) for part in info.partitions
        ]

    @property
    def admin(self) -> GroupAdmin:
        return GroupAdmin(self.jetstream, self.publisher, "orders", self.partitions)

    async def publish(self, events: Iterable[tuple[str | None, int]]) -> None:
        """Store events: key and number."""
        await self._topic.publish_many(NewEvent(str(number), key) for key, number in events)

    def partition_of(self, key: str) -> int:
        return partition_of(key, len(self.partitions))

    async def member(
        self, handler: GroupHandler, settings: GroupSettings = QUICK, name: str = "billing"
    ) -> Group:
        """A member that runs until the end of the test."""
        group = Group(self.jetstream, self.publisher, "orders", self.partitions, name, settings)
        await group.open()
        task = asyncio.create_task(group.run(handler))

        async def end() -> None:
            try:
                await asyncio.wait_for(group.stop(), 5)
            except TimeoutError:  # a failed test left a handler waiting
                task.cancel()
            await asyncio.gather(task, return_exceptions=task.cancelling() > 0)

        self._stack.push_async_callback(end)
        return group

    async def dead_letters(self, name: str = "orders-billing-dead") -> list[Event]:
        partitions = [Partition(name, name, 0, name)]
        return [event async for event in read_events(self.jetstream, partitions, ReadPlan())]


class Recorder:
    """A handler that records every call, and can be made to fail or to wait."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.runs: list[Run] = []
        self.started: list[str] = []  # keys, one for every call
        self.seconds = seconds
        self.gate: dict[str, asyncio.Event] = {}  # keys whose handler waits
        self.poison: set[str] = set()  # keys whose handler fails

    async def __call__(self, event: Any) -> None:
        start = asyncio.get_running_loop().time()
        self.started.append(event.key)
        end = None
        try:
            if event.key in self.gate:
                await self.gate[event.key].wait()
            elif self.seconds:
                await asyncio.sleep(self.seconds)
            if event.key in self.poison:
                raise ValueError(f"cannot handle {event.key}")
            end = asyncio.get_running_loop().time()
        finally:
            run = Run(event.key, int(event.value), event.epoch, start, end)
            self.runs.append(run)

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.end is not None]

    def open_gate(self, key: str) -> None:
        """Let the waiting handler continue; later ones do not wait."""
        self.gate.pop(key).set()

    def numbers(self, key: str) -> list[int]:
        return [run.number for run in self.done if run.key == key]


async def until(condition: Any, seconds: float = 20.0, what: str = "") -> None:
    """Wait for something that happens on its own."""
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.passed, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.005)


def check_order(runs: Sequence[Run], keys: int, each: int, repeats: bool = False) -> None:
    """Nothing lost; each key in order and one at a time; a new owner may repeat, never skip."""
    by_key: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_key[run.key].append(run)
    assert len(by_key) == keys
    for key, mine in by_key.items():
        mine.sort(key=lambda run: run.start)
        if not repeats:
            assert [run.number for run in mine] == list(range(each)), key
        assert {run.number for run in mine if run.end is not None} == set(range(each)), key
        reached, last = -1, mine[0]
        for run in mine:
            assert run.number <= reached + 1, f"{key}: {run.number} was handled before its turn"
            assert run.epoch >= last.epoch, f"{key}: an older owner came later"
            if run is not last:
                ended = last.end is None or last.end <= run.start
                assert ended or last.frozen, f"{key}: two at a time"
                if run.epoch == last.epoch and last.end is not None:
                    assert run.number == last.number + 1, f"{key}: repeated by the same owner"
            reached, last = max(reached, run.number), run


def numbered(keys: int, each: int) -> list[tuple[str | None, int]]:
    return [(f"k{key}", number) for number in range(each) for key in range(keys)]


async def declare_dead(group: Group) -> None:
    """End the record of a member, as another one does that misses its renewals."""
    store, member, ended = group._store, group.member_id, False
    while not ended:
        found = await store.member(member)
        assert found is not None
        with contextlib.suppress(WrongSequence):  # it has renewed meanwhile
            await store.end_member(member, found.revision, 5.0)
            ended = True


async def until_position(kit: Kit, position: tuple[int, int]) -> None:
    deadline = Deadline(20)
    while (found := (await kit.admin.info("billing")).partitions[0].position) != position:
        assert not deadline.passed, f"the position is {found}, not {position}"
        await asyncio.sleep(0.01)


async def until_settled(members: Sequence[Group], sizes: Sequence[int]) -> None:
    """Wait until the members have this many partitions each, in any order, and none will move."""
    running = [group._member for group in members if group._member is not None]
    deadline = Deadline(20)

    def shares() -> list[tuple[int, ...]]:
        """None while anything moves."""
        quiet = not any(member._releases for member in running)
        return [group.partitions for group in members] if quiet else []

    while True:
        await until(lambda: sorted(map(len, shares())) == sorted(sizes))
        found = shares()
        for member in running:  # decisions based on an older snapshot are done then
            async with member._balancing:
                pass
        if shares() == found:
            return
        assert not deadline.passed, f"partitions move all the time: {shares()}"
