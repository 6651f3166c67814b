"""PostgreSQL, a broker, a capture and a sink, each of which can be killed and comes back."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import millstream
from millstream import Mill
from millstream.broker import Broker, BrokerSettings
from millstream.cdc.state import States
from millstream.errors import MillstreamError
from tests.faults import cdc_load
from tests.faults.cdc_checker import (
    Audited,
    Change,
    check_capture,
    check_copy,
    check_fold,
    fold,
    key_of,
)
from tests.faults.cdc_worker import CAPTURE, RECONNECT
from tests.faults.checker import Findings
from tests.faults.supervisor import REPOSITORY
from tools.postgres_server import Postgres, free_port, running_postgres

__all__ = ["Hopeless", "Plan", "Stage", "staged"]

SOURCE: Final = "source"
COPY: Final = "copy"
END_SECONDS: Final = 60.0  # for a process to end that was asked to
CATCH_UP_SECONDS: Final = 240.0  # for capture and sink after the last kill
START_SECONDS: Final = 60.0
BROKER_TRIES: Final = 20
BROKER_SECONDS: Final = 0.5  # between two of them
POLL: Final = 0.02
SHOWN: Final = 1500  # letters of what a process wrote before it failed
END_ID: Final = -1  # the last order
END_SHOP: Final = "the end"  # of the last item


CRASHES: Final = 3  # of one process; after that it is not started again


class Hopeless(Exception):
    """There is no point in going on; the findings say why."""


@dataclass(frozen=True)
class Plan:
    """What a run is to do."""

    seed: int
    kills: int
    rows: int  # before the capture begins
    snapshot_kills: int  # of the kills, while the snapshot is being read
    pause: float = 0.03  # seconds between two transactions of a worker
    fsync: bool = True  # of PostgreSQL; without it a killed one is back sooner

    def chance(self, purpose: str) -> random.Random:
        """Random numbers that depend on the seed and the purpose only."""
        return random.Random(f"{self.seed}.cdc.{purpose}")


class Worker:
    """A process that runs until it is killed; one that ends by itself is a problem."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, findings: Findings) -> None:
        self.name, self._command, self._findings = name, command, findings
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._crashes = 0

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it at once; and say so if it had ended before."""
        if self._process is None:
            return
        if self._process.poll() is not None:
            self._crashed()
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Ask it to end, and see that it does."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._findings.problem("stuck", f"{self.name} did not end in {END_SECONDS:g} s")
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            self._crashed()
        self._process = None

    def check(self) -> None:
        """Say so, and start it again, if it has ended."""
        if not self.alive:
            self._crashed()
            self.start()

    def _crashed(self) -> None:
        text = self._log.read_text(errors="replace")[-SHOWN:]
        code = None if self._process is None else self._process.returncode
        self._findings.problem("crashed", f"{self.name} ended with {code}: {text}")
        self._crashes += 1
        if self._crashes >= CRASHES:
            self._process = None
            raise Hopeless


@dataclass
class Stage:
    """Everything that runs, and what is found."""

    plan: Plan
    folder: Path
    postgres: Postgres
    broker: Broker
    findings: Findings = field(default_factory=Findings)
    _loaded: bool = False  # the load has ended

    def __post_init__(self) -> None:
        base = {"url": self.broker.url, "source": self.postgres.url_of(SOURCE)}
        worker = "tests.faults.cdc_worker"
        sink = json.dumps({**base, "target": self.postgres.url_of(COPY)})
        self.capture = self._worker("capture", worker, "capture", json.dumps(base))
        self.sink = self._worker("sink", worker, "sink", sink)
        self.load = self._worker(
            "load",
            *("tests.faults.cdc_load", self.postgres.url_of(SOURCE)),
            *("--seed", str(self.plan.seed), "--operations", "1000000"),
            *("--pause", str(self.plan.pause)),
        )

    def _worker(self, name: str, *command: str) -> Worker:
        return Worker(name, command, self.folder, self.findings)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.capture, self.sink, self.load

    def give_up(self, why: str) -> NoReturn:
        """Say why, and end the run."""
        self.findings.problem("stuck", why)
        raise Hopeless

    def note(self, text: str) -> None:
        """Into the run's own log, to be read beside those of the processes."""
        with (self.folder / "run.log").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    # -- kills ----------------------------------------------------------------------------

    def kill(self, target: str, down: float) -> None:
        """Kill one of them, leave it dead for a while, and start it again."""
        self.note(f"kill {target}, {down:.2f} s")
        thing: Any = getattr(self, target)
        thing.kill()
        time.sleep(down)
        if target == "broker":
            self._start_broker()
        else:
            thing.start()
        self.findings.counts[f"kill: {target}"] += 1

    def _start_broker(self) -> None:
        """On the same port, which another process may be trying out at this moment."""
        for left in reversed(range(BROKER_TRIES)):
            try:
                self.broker.start(timeout=START_SECONDS)
                return
            except MillstreamError:
                if not left:
                    raise
                time.sleep(BROKER_SECONDS)

    def check(self) -> None:
        """Whether those that nobody killed still run."""
        for worker in self.workers:
            if worker is not self.load or not self._loaded:
                worker.check()

    def confirmed(self) -> int:
        """The position up to which the capture has confirmed changes, once it streams."""
        from psycopg import OperationalError

        query = (
            "SELECT max(confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots"
            " WHERE database = %s AND NOT temporary"
        )
        try:
            with self.postgres.connect(SOURCE) as connection:
                row = connection.execute(query, (SOURCE,)).fetchone()
        except OperationalError:  # it is on its way back
            return 0
        return (row or (0,))[0] or 0

    # -- the end --------------------------------------------------------------------------

    def finish_load(self) -> None:
        """End the load, and write the last row of each table."""
        self._loaded = True
        self.load.end()
        with self.postgres.connect(SOURCE) as connection:
            connection.execute("INSERT INTO orders (id) VALUES (%s)", (END_ID,))
            connection.execute("INSERT INTO items (shop, place) VALUES (%s, 0)", (END_SHOP,))

    def rows(self, database: str, table: str) -> dict[str, dict[str, Any]]:
        """The rows of a table by their keys."""
        from psycopg.rows import dict_row

        key = cdc_load.KEYS[table]
        with self.postgres.connect(database, row_factory=dict_row) as connection:
            found = connection.execute(f"SELECT * FROM {table}").fetchall()
        return {key_of(row, key): row for row in found}

    def audit(self) -> list[Audited]:
        """What was committed."""
        query = (
            "SELECT tab, op, uid, version, xid::bigint, (lsn - '0/0')::bigint FROM audit"
            " ORDER BY number"
        )
        with self.postgres.connect(SOURCE) as connection:
            return [Audited(*row) for row in connection.execute(query)]

    async def check_everything(self) -> None:
        """Read all topics and tables, and compare them."""
        async with millstream.connect(self.broker.url, reconnect=RECONNECT) as mill:
            read = {table: await self._read(mill, table) for table in cdc_load.TABLES}
            states = await States.opened(mill, CAPTURE)
            points = [
                interval.point
                for record in (await states.tables()).values()
                for interval in record.intervals
            ]
        self.findings.counts["attempts of snapshots"] += len(points)
        folded = {}
        for table, changes in read.items():
            key = cdc_load.KEYS[table]
            folded[table] = fold(table, changes, key, self.findings, full=table == "items")
            check_fold(table, folded[table], self.rows(SOURCE, table), self.findings)
        check_capture(folded, self.audit(), max(points), self.findings)

    async def _read(self, mill: Mill, table: str) -> list[Change]:
        """All events of a topic, up to the last row that was written."""
        last = key_of({"id": END_ID, "shop": END_SHOP, "place": 0}, cdc_load.KEYS[table])
        topic = await mill.topic(table)
        changes: list[Change] = []
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                async for batch in topic.batches(follow=True):
                    columns = [batch.column(n).to_pylist() for n in ("partition", "key", "value")]
                    changes += [Change.of(*event) for event in zip(*columns, strict=True)]
                    if changes[-1].key == last:
                        break
        except TimeoutError:
            self.check()
            self.give_up(f"the capture did not catch up with {table}: {len(changes):,} events")
        return changes

    def check_sink(self) -> None:
        """Wait until the sink has the last rows; its tables are those of the source."""
        end = {"orders": f"id = {END_ID}", "items": f"shop = '{END_SHOP}'"}

        def arrived() -> bool:
            with self.postgres.connect(COPY) as connection:
                return all(
                    connection.execute(f"SELECT to_regclass('{table}')").fetchone() != (None,)
                    and connection.execute(f"SELECT 1 FROM {table} WHERE {end[table]}").fetchone()
                    for table in cdc_load.TABLES
                )

        self.wait_for(arrived, CATCH_UP_SECONDS, "the sink did not catch up")
        for table in cdc_load.TABLES:
            check_copy(table, self.rows(COPY, table), self.rows(SOURCE, table), self.findings)

    def wait_for(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Until it is true; a process that ends meanwhile is a problem, and so is a late one."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                self.give_up(otherwise)
            self.check()
            time.sleep(POLL)


@contextmanager
def staged(plan: Plan, folder: Path) -> Iterator[Stage]:
    """Start the servers, with the tables as they are before the capture."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_postgres(fsync="on" if plan.fsync else "off") as postgres:
        url = postgres.create_database(SOURCE)
        postgres.create_database(COPY)
        cdc_load.create_tables(url)
        cdc_load.fill(url, plan.rows, plan.seed)
        settings = BrokerSettings(data=folder / "broker", port=free_port())
        with Broker(settings) as broker:
            stage = Stage(plan, folder, postgres, broker)
            try:
                yield stage
            finally:
                for worker in stage.workers:
                    with suppress(Hopeless):
                        worker.kill()
