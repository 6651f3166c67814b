"""The event store: appends, loads, rebuilds of a view, memory, with `eventsourcing` as a peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.eventsourcing_peer import (
    append_events,
    postgres_recorder,
    postgres_server,
    sqlite_recorder,
)
from bench.harness import OURS, Contestant, Result, Skipped, against
from bench.spark_floor import drain_rate
from bench.store_fill import EVENTS, Account, Deposited, Filler, one_each
from millstream import NEW, EventStore, Mill, StoredEvent, connect
from millstream.broker import Broker
from millstream.messaging import Topic
from millstream.testing import running_broker
from millstream.wire.protocol import unique_token

EVENT = Deposited(5, "salary of November, as agreed")
AT_ONCE = 64
PARTITIONS = 4
TURNS_OF_A_LOAD = 30  # of one round
LONG = "long"  # the aggregate with many events and a snapshot
LONG_EVENTS = 10_000
PROBE_EVENTS = 100
TAIL = 10  # appends after a snapshot
SPARK_TASKS = 2  # that read at once
# Before every round of every contestant: a server still writes for a while after its own.
SETTLE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class _Sizes:
    appends: int  # of one writer, in one round
    each: int  # appends to each of many aggregates, in one round
    aggregates: tuple[int, ...]
    single: int  # events to rebuild a view from, one an append
    several: int  # the same, five an append
    rounds: int


FULL = _Sizes(300, 12, (10_000, 100_000, 1_000_000), 1_000_000, 10_000_000, 7)
QUICK = _Sizes(100, 6, (1_000, 10_000), 100_000, 300_000, 3)


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every figure of the event store's table; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    with ExitStack() as stack:
        peers = _Peers(stack)
        with running_broker(durability="fsync") as broker, asyncio.Runner() as runner:
            stage = runner.run(_Stage.open(broker.url))
            try:
                yield from _append(stage, peers, sizes, runner)
                yield from _append_to_many(stage, peers, sizes, runner)
            finally:
                runner.run(stage.mill.close())
    with running_broker(durability="periodic") as broker, asyncio.Runner() as runner:
        yield from _load(broker, sizes, runner)
        yield from _rebuild(broker, sizes, runner)


class _Peers:
    """The library `eventsourcing` on databases that are opened when they are first needed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._port: int | None = None
        self._opened: dict[str, Any] = {}

    def sqlite(self) -> Any:
        """On SQLite, every transaction synced."""
        return self._once("sqlite", sqlite_recorder)

    def postgres(self, connections: int) -> Any:
        """On PostgreSQL, every transaction synced."""
        if self._port is None:
            self._port = self._stack.enter_context(postgres_server())
        port = self._port
        return self._once(f"postgres-{connections}", lambda: postgres_recorder(port, connections))

    def _once(self, name: str, open_: Callable[[], AbstractContextManager[Any]]) -> Any:
        if name not in self._opened:
            self._opened[name] = self._stack.enter_context(open_())
        return self._opened[name]


class _Stage:
    """A store and a plain topic on one server."""

    def __init__(self, mill: Mill, store: EventStore, spread: EventStore, topic: Topic) -> None:
        self.mill, self.store, self.spread, self.topic = mill, store, spread, topic

    @classmethod
    async def open(cls, url: str) -> _Stage:
        mill = await connect(url)
        store = await mill.event_store("accounts", Account, events=EVENTS)
        spread = await mill.event_store("spread", Account, events=EVENTS, partitions=PARTITIONS)
        return cls(mill, store, spread, await mill.create_topic("plain", packs=False))


class _Cpu:
    """CPU time of this process a piece of work, from the same rounds: medians, the first left out.

    On a machine that others use too it says more than the clock.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._figures: dict[str, list[float]] = {}

    def timed(self, who: str, count: int, work: Callable[[], Awaitable[None]]) -> Contestant:
        """A contestant whose figure is pieces a second."""

        async def run() -> float:
            await asyncio.sleep(SETTLE_SECONDS)
            began, busy = time.perf_counter(), time.process_time()
            await work()
            self._figures.setdefault(who, []).append((time.process_time() - busy) / count * 1e6)
            return count / (time.perf_counter() - began)

        return run

    def results(self, name: str) -> Iterator[Result]:
        medians = {who: median(figures[1:]) for who, figures in self._figures.items()}
        value = medians.pop(OURS)
        for peer, other in medians.items():
            yield Result(
                f"{name}: CPU of the client", value, self._unit, peer, other, other / value
            )
        if not medians:
            yield Result(f"{name}: CPU of the client", value, self._unit)


def _peer(recorder: Callable[[], Any], aggregates: int, each: int, threads: int = 1) -> Contestant:
    """Appends a second of the library on one of its databases."""

    def run() -> float:
        opened = recorder()
        time.sleep(SETTLE_SECONDS)
        return append_events(opened, aggregates, each, threads).per_second

    return run


# -- appends --------------------------------------------------------------------------------


def _append(
    stage: _Stage, peers: _Peers, sizes: _Sizes, runner: asyncio.Runner
) -> Iterator[Result | Skipped]:
    count, cpu = sizes.appends, _Cpu("us/append")

    async def ours() -> None:
        id, append = unique_token(12), stage.store.append
        await append(id, [EVENT], NEW)
        for version in range(1, count):
            await append(id, [EVENT], version)

    ((tag, body),) = runner.run(stage.store.types.encode_all([EVENT], "any"))
    payload = b'{"%b":%b}' % (tag.encode(), body)  # as the store writes it

    async def plain() -> None:
        key, publish = unique_token(12), stage.topic.publish
        for _ in range(count):
            await publish(payload, key)

    databases: dict[str, Contestant] = {
        "eventsourcing on SQLite": _peer(peers.sqlite, 1, count),
        "eventsourcing on PostgreSQL": _peer(lambda: peers.postgres(1), 1, count),
    }
    name, rounds = "append, expected version, fsync, awaited", sizes.rounds
    publish: dict[str, Contestant] = {
        "one plain publish": cpu.timed("one plain publish", count, plain)
    }
    # The databases on their own: the disk is not at rest after them.
    for others in (publish, databases):
        yield from against(
            name, "appends/s", cpu.timed(OURS, count, ours), others,
            quick=False, runner=runner, rounds=rounds,
        )  # fmt: skip
    yield from cpu.results(name)


def _append_to_many(
    stage: _Stage, peers: _Peers, sizes: _Sizes, runner: asyncio.Runner
) -> Iterator[Result | Skipped]:
    each, count, cpu = sizes.each, sizes.each * AT_ONCE, _Cpu("us/append")

    async def one(store: EventStore, id: str) -> None:
        await store.append(id, [EVENT], NEW)
        for version in range(1, each):
            await store.append(id, [EVENT], version)

    def ours(store: EventStore) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            word = unique_token(12)
            await asyncio.gather(*(one(store, f"{word}-{number}") for number in range(AT_ONCE)))

        return run

    def theirs(threads: int) -> Contestant:
        return _peer(lambda: peers.postgres(threads), AT_ONCE, each, threads)

    name = f"appends, {AT_ONCE} aggregates at once, fsync"
    # Fewer threads fight less for its lock on the table, more wait together for one sync.
    choices = {
        f"eventsourcing on PostgreSQL, {threads} threads": theirs(threads)
        for threads in (1, 4, 16, AT_ONCE)
    }
    # The server syncs the messages of a partition one by one, and partitions side by side.
    choices["millstream, 1 partition"] = cpu.timed("1 partition", count, ours(stage.store))
    yield from against(
        f"{name}, {PARTITIONS} partitions", "appends/s",
        cpu.timed(OURS, count, ours(stage.spread)), choices,
        quick=False, runner=runner, rounds=sizes.rounds,
    )  # fmt: skip
    yield from cpu.results(name)


# -- loads ----------------------------------------------------------------------------------


def _load(broker: Broker, sizes: _Sizes, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """Loads of some aggregates while the number of the others grows, then memory."""
    empty = _resident(broker.pid)
    stage = runner.run(_Stage.open(broker.url))
    filler = Filler(broker.url, _prefix(stage.store))
    after = filler.fill(((LONG, version) for version in range(1, LONG_EVENTS + 1)), 1)
    before = 0
    for size in sizes.aggregates:
        runner.run(_fill_up_to(stage.store, filler, before, size, after))
        before = size
        for name, id in (
            (f"load of {PROBE_EVENTS} events in a row", f"row-{size}"),
            (f"load of {PROBE_EVENTS} events in a row, ten an append", f"tens-{size}"),
            (f"load of {PROBE_EVENTS} events all over the log", f"probe-{size}"),
            (f"load of {PROBE_EVENTS} events all over the log with a snapshot", f"kept-{size}"),
            ("load of one event", f"account-{size // 2}"),
            (f"load of {LONG_EVENTS:,} events with a snapshot", LONG),
        ):
            peers = {"one request's round trip": _latency(_requests(stage, id))}
            if "snapshot" not in name:
                offsets = runner.run(_offsets(stage.store, id))
                peers["its messages, not decoded"] = _latency(_messages(stage, offsets))
            yield from against(
                f"{name} among {size:,} aggregates", "us", _latency(_loads(stage.store, id)), peers,
                quick=False, better="lower", runner=runner, rounds=sizes.rounds,
            )  # fmt: skip
        after = runner.run(_next_offset(stage.store))
    name = f"memory of the server at {before:,} aggregates"
    yield Result(f"{name}, written just now", _resident(broker.pid) - empty, "MiB")
    runner.run(stage.mill.close())
    broker.restart()
    yield Result(f"{name}, after a restart", _resident(broker.pid) - empty, "MiB")
    stage = runner.run(_Stage.open(broker.url))
    runner.run(stage.store.load(LONG))
    yield Result(f"{name}, after a restart and a load", _resident(broker.pid) - empty, "MiB")
    runner.run(stage.mill.close())


async def _fill_up_to(
    store: EventStore, filler: Filler, before: int, size: int, offset: int
) -> None:
    """More aggregates, and those that are loaded among them; two of these have a snapshot.

    After a snapshot follow ten appends.
    """
    every = (size - before) // PROBE_EVENTS
    probes = (f"probe-{size}", f"kept-{size}")
    cut = before + every * (PROBE_EVENTS - TAIL)
    fill = filler.fill
    offset = await asyncio.to_thread(
        fill, one_each(range(before, cut), probes, every), offset
    )  # fmt: skip
    await store.snapshot(f"kept-{size}")
    rest = one_each(range(cut, size), probes, every, PROBE_EVENTS - TAIL + 1)
    offset = await asyncio.to_thread(fill, rest, offset)
    row = ((f"row-{size}", version) for version in range(1, PROBE_EVENTS + 1))
    offset = await asyncio.to_thread(fill, row, offset)
    tens = ((f"tens-{size}", version) for version in range(1, PROBE_EVENTS, 10))
    await asyncio.to_thread(fill, tens, offset, 10)
    version = await store.snapshot(LONG)
    for following in range(version, version + TAIL):
        await store.append(LONG, [EVENT], following)


async def _next_offset(store: EventStore) -> int:
    stream = store.topic.handle.partitions[0].stream
    return (await store.topic.handle.jetstream.stream_info(stream)).state.last_seq + 1


async def _offsets(store: EventStore, id: str) -> list[int]:
    """Where the appends of an aggregate are."""
    return sorted({event.offset async for event in store.events(id)})


def _prefix(store: EventStore) -> str:
    return store.topic.handle.partitions[0].prefix or store.name


def _loads(store: EventStore, id: str) -> Callable[[], Awaitable[object]]:
    return lambda: store.load(id)


def _requests(stage: _Stage, id: str) -> Callable[[], Awaitable[object]]:
    ask = {"last_by_subj": f"{_prefix(stage.store)}.{id}"}
    stream = stage.store.topic.handle.partitions[0].stream
    return lambda: stage.mill.jetstream.get_message(stream, ask)


def _messages(stage: _Stage, offsets: Sequence[int]) -> Callable[[], Awaitable[object]]:
    """The messages at some offsets, asked for at once and only counted: nothing can be less."""
    jetstream = stage.mill.jetstream
    verb = f"{jetstream.prefix}.DIRECT.GET.{stage.store.topic.handle.partitions[0].stream}".encode()
    asks = [b'{"seq":%d}' % offset for offset in offsets]

    async def read() -> None:
        connection, inbox = jetstream.connection, f"_INBOX.{unique_token()}"
        arrived, left = asyncio.Event(), len(asks)

        def take(*_: bytes) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                arrived.set()

        interest, reply = connection.subscribe(inbox, take), inbox.encode()
        for ask in asks:
            connection.publish(verb, ask, reply)
        async with asyncio.timeout(10):
            await arrived.wait()
        connection.unsubscribe(interest)

    return read


def _latency(work: Callable[[], Awaitable[object]]) -> Contestant:
    """A contestant whose figure is the median time of one call, in microseconds."""

    async def run() -> float:
        taken = []
        for _ in range(TURNS_OF_A_LOAD):
            began = time.perf_counter()
            await work()
            taken.append((time.perf_counter() - began) * 1e6)
        return median(taken)

    return run


def _resident(pid: int) -> float:
    """MiB that a process holds in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


# -- rebuilding a view ----------------------------------------------------------------------


def _rebuild(broker: Broker, sizes: _Sizes, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """The sum of each aggregate from all events, one or five an append; then the same in Spark."""

    async def open_one(name: str) -> tuple[Mill, EventStore]:
        mill = await connect(broker.url)
        return mill, await mill.event_store(name, Account, events=EVENTS)

    for events, total in ((1, sizes.single), (5, sizes.several)):
        name = f"view-{events}"
        mill, store = runner.run(open_one(name))
        # Ten appends to each aggregate.
        appends = (
            (f"account-{number}", 1 + turn * events)
            for number in range(total // events // 10)
            for turn in range(10)
        )
        Filler(broker.url, _prefix(store)).fill(appends, 1, events)
        yield from _rebuild_in_sdk(mill, store, events, sizes, runner)
        runner.run(mill.close())
    yield from _rebuild_in_spark(broker.url, 1, sizes.single)
    yield from _rebuild_in_spark(broker.url, 5, sizes.several)


@dataclass
class Total:
    """A row of the view: what the accounts of one branch have."""

    amount: int = 0


def _add(event: StoredEvent, rows: MutableMapping[str, Any]) -> None:
    branch = event.id[-3:]
    row = rows.get(branch) or Total()
    if isinstance(event.data, Deposited):
        row.amount += event.data.amount
    rows[branch] = row


def _rebuild_in_sdk(
    mill: Mill, store: EventStore, events: int, sizes: _Sizes, runner: asyncio.Runner
) -> Iterator[Result | Skipped]:
    total = sizes.single if events == 1 else sizes.several
    cpu = _Cpu("us/event")

    async def summed() -> None:
        sums: dict[str, int] = {}
        count = 0
        async for event in store.all():
            data = event.data
            if isinstance(data, Deposited):
                sums[event.id] = sums.get(event.id, 0) + data.amount
            count += 1
        if count != total or sum(sums.values()) != 5 * total:
            raise RuntimeError(f"read {count} of {total} events")

    async def built() -> None:
        """As a projection: rows in a table, exactly once."""
        name = f"view-{unique_token(8).lower()}"
        projection = await mill.projection(name, store, _add, schema=Total)
        await projection.rebuild()
        rows = await (await mill.view(name, Total)).as_dict()
        if sum(row.amount for row in rows.values()) != 5 * total:
            raise RuntimeError("the view is wrong")

    async def bare() -> None:
        count = 0
        async for event in store.topic.read():
            count += event.offset > 0
        if count != total // events:
            raise RuntimeError(f"read {count} of {total // events} messages")

    name = f"projection over {total:,} events, {events} an append, in the SDK"
    peers = {
        "a sum in memory": cpu.timed("a sum in memory", total, summed),
        "reading the messages": cpu.timed("reading the messages", total, bare),
    }
    rounds = 1 if total > 1_000_000 else min(3, sizes.rounds)
    work = cpu.timed(OURS, total, built)
    yield from against(name, "events/s", work, peers, quick=False, runner=runner, rounds=rounds)
    yield from cpu.results(name)


def _rebuild_in_spark(url: str, events: int, total: int) -> Iterator[Result | Skipped]:
    """Against what the server delivers at most to as many readers, who only count messages."""
    name = f"view-{events}"  # of the store, and of the stream of its only partition
    what = f"view of {total:,} events, {events} an append, in Spark"
    try:
        from pyspark.errors import PySparkException

        from millstream.spark import session
    except ImportError as error:
        yield Skipped(what, str(error))
        return
    spark = session("bench", master=f"local[{SPARK_TASKS}]", conf={"spark.driver.memory": "2g"})
    try:
        frame = (
            spark.read.format("millstream")
            .options(url=url, eventStore=name, minPartitions=SPARK_TASKS)
            .options(columns="aggregate,Deposited.amount")
            .load()
        )
        amounts = frame.selectExpr("aggregate", "Deposited.amount AS amount")
        view = amounts.groupBy("aggregate").sum("amount")

        def ours() -> float:
            began = time.perf_counter()
            found = view.selectExpr("sum(`sum(amount)`)").collect()[0][0]
            if found != 5 * total:
                raise RuntimeError(f"the sum is {found}, not {5 * total}")
            return total / (time.perf_counter() - began)

        def delivered() -> float:
            return events * drain_rate(url, name, total // events, SPARK_TASKS)

        peers: dict[str, Contestant] = {"raw delivery by the server": delivered}
        yield from against(what, "events/s", ours, peers, quick=False, rounds=3)
    except PySparkException as error:
        yield Skipped(what, " ".join(str(error).split())[:200])
    finally:
        spark.stop()
