"""Tables of PostgreSQL captured, joined in Spark with a stream, and the results written back.

`python -m examples.flights_cdc`: starts a PostgreSQL, a broker and a pipeline in a temporary
folder, and removes them at the end. It needs PostgreSQL (`make system-deps`), Java, and the extras
`cdc`, `spark` and `demo`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from psycopg import AsyncConnection

import millstream
from examples.flights import data
from examples.flights.demo import Pipeline
from examples.flights_cdc import database as db
from millstream import Broker, BrokerSettings, Columns, Mill
from millstream.cdc import Capture, CaptureSettings, open_source
from tools.postgres_server import PostgresAbsent, running_postgres

PROJECT = Path(__file__).parent / "pipeline"
CAPTURE = "flights"
PATIENCE = 300.0  # seconds for any step, on a busy machine
AT_ONCE = 60  # flights that are sent together
PAUSE = 0.1  # seconds between them
INTERRUPTED = 130  # the exit code after Ctrl-C
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:4.0f} s] {text}", flush=True)


async def run(url: str, folder: Path, days: int) -> bool:
    """Run all parts side by side; whether the results are right."""
    tables = await asyncio.to_thread(data.load_tables)
    async with await AsyncConnection.connect(url, autocommit=True) as connection:
        await db.fill(connection, tables)
        say("PostgreSQL has the tables airlines, airports, planes and service")
        with Broker(BrokerSettings(data=folder / "broker", port=0)) as broker:
            async with millstream.connect(broker.url) as mill:
                await mill.create_topic("flights", schema=data.FLIGHT)
                pipeline = prepared(folder, broker.url, url)
                async with captured(mill, url) as (capture, capturing):
                    play = Play(mill, connection, capture, capturing, pipeline)
                    try:
                        return await play.all(tables, days)
                    finally:
                        pipeline.close()


@asynccontextmanager
async def captured(mill: Mill, url: str) -> AsyncIterator[tuple[Capture, asyncio.Task[None]]]:
    """Capture all tables in the schema `public`, beside what is done in here."""
    settings = CaptureSettings(name=CAPTURE, source=url, tables=("public.*",))
    capture = Capture(mill, open_source(settings), settings)
    stop = asyncio.Event()
    capturing = asyncio.create_task(capture.run(stop))
    try:
        yield capture, capturing
    finally:
        stop.set()
        await capturing


def prepared(folder: Path, broker: str, url: str) -> Pipeline:
    """The pipeline, in a folder and a process of its own."""
    project = folder / "pipeline"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__", ".pipeline"))
    # What Spark leaves behind when it is killed is removed with the folder.
    temporary = {
        "TMPDIR": str(folder),
        "SPARK_LOCAL_DIRS": str(folder),
        "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={folder}",
    }
    return Pipeline(project, broker, PATIENCE, MILLSTREAM_POSTGRES=url, **temporary)


@dataclass
class Play:
    """What happens, step by step."""

    mill: Mill
    connection: db.Connection
    capture: Capture
    capturing: asyncio.Task[None]
    pipeline: Pipeline

    async def all(self, tables: data.Tables, days: int) -> bool:
        """Fly before and after a change of airlines and planes, and compare the results."""
        await self._until("the tables are captured", self._streams)
        rows = {table.topic: table.snapshot_rows for table in self.capture.status().tables}
        say("captured: " + ", ".join(f"{count:,} {topic}" for topic, count in rows.items()))
        self.pipeline.start()  # not before the topics that it reads exist
        say("Spark starts")
        flights = (await asyncio.to_thread(data.load, days, tables)).flights
        await self._until("the pipeline runs", self._runs)
        half = len(flights) // 2
        async with self._application(flights) as done:
            await self._fly(flights, 0, half)
            await self._until("these flights are joined", lambda: self._joined(half))
            say(f"{half:,} flights are joined; now airlines get other names, and planes more seats")
            await db.merge_airlines(self.connection)
            await self._caught_up()
            await self._fly(flights, half, len(flights))
        await db.add_flights(self.connection, flights, [n >= half for n in range(len(flights))])
        say(
            f"all flights are sent; meanwhile an application had {done.transactions} transactions, "
            f"and {done.undone} that were rolled back"
        )
        with suppress(TimeoutError):  # what differs is shown
            await self._until("the results are complete", self._right)
        await asyncio.to_thread(self.pipeline.stop)
        say("the pipeline has stopped")
        return await self._show()

    @asynccontextmanager
    async def _application(self, flights: pa.Table) -> AsyncIterator[db.Done]:
        """An application that works with the table `service` beside what is done in here."""
        planes = sorted(set(flights["tailnum"].drop_null().to_pylist()))
        done, stop = db.Done(), asyncio.Event()
        dsn = self.connection.info.dsn
        async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
            working = asyncio.create_task(db.keep_in_service(connection, planes, done, stop))
            try:
                yield done
            finally:
                stop.set()
                await working

    async def _fly(self, flights: pa.Table, start: int, end: int) -> None:
        """Send flights, a few at a time."""
        topic = await self.mill.topic("flights")
        async with topic.writer("airports") as writer:
            for first in range(start, end, AT_ONCE):
                upto = min(first + AT_ONCE, end)
                rows = flights.slice(first, upto - first)
                await writer.write_batch(rows, position=upto, columns=Columns(key="origin"))
                await asyncio.sleep(PAUSE)

    # -- waiting --------------------------------------------------------------------------

    async def _until(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for something, as long as all parts run."""
        deadline = time.monotonic() + PATIENCE
        while not await condition():
            self.pipeline.check_alive()
            if self.capturing.done():
                await self.capturing  # raises what ended it
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes too long until {what}")
            await asyncio.sleep(0.5)

    async def _streams(self) -> bool:
        return self.capture.status().state == "streaming"

    async def _runs(self) -> bool:
        return self.pipeline.runs()

    async def _caught_up(self) -> None:
        """Wait until everything that is committed so far is in the topics."""
        cursor = await self.connection.execute("SELECT pg_current_wal_lsn()")
        (now,) = await cursor.fetchone() or ("0/0",)
        # A capture confirms to PostgreSQL what is stored.
        slot = "SELECT FROM pg_replication_slots WHERE slot_name = %s AND confirmed_flush_lsn >= %s"

        async def confirmed() -> bool:
            found = await self.connection.execute(slot, (f"millstream_{CAPTURE}", now))
            return found.rowcount == 1

        await self._until("the changes are captured", confirmed)

    async def _joined(self, flights: int) -> bool:
        cursor = await self.connection.execute("SELECT count(*) FROM results.departures")
        return await cursor.fetchone() == (flights,)

    async def _right(self) -> bool:
        return all(verdict.right for verdict in await db.compared(self.connection))

    # -- the result -----------------------------------------------------------------------

    async def _show(self) -> bool:
        cursor = await self.connection.execute(db.SHOWN)
        names = [column.name for column in cursor.description or ()]
        print(f"\n{names[0]:28}" + "".join(f"{name:>12}" for name in names[1:]))
        for airline, *numbers in await cursor.fetchall():
            print(f"{airline or '':28}" + "".join(f"{number or 0:12,}" for number in numbers))
        print("\nThe tables in PostgreSQL, compared with the same queries in SQL:")
        verdicts = await db.compared(self.connection)
        for one in verdicts:
            print(f"{one.table:28}{one.rows:7,} rows, {one.missing} missing, {one.wrong} wrong")
        return all(verdict.right for verdict in verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.flights_cdc", description=__doc__)
    parser.add_argument("--days", type=int, default=4, help="days of flights (default: 4)")
    days = parser.parse_args().days
    if not 1 <= days <= 30:
        parser.error("--days must be 1 to 30")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with TemporaryDirectory(prefix="flights-cdc-") as folder, running_postgres() as server:
            say("PostgreSQL runs")
            right = asyncio.run(run(server.url, Path(folder), days))
    except (PostgresAbsent, TimeoutError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        say("Stopped on request; nothing is left running.")
        sys.exit(INTERRUPTED)
    if not right:
        sys.exit("The results differ.")
    say("Done; everything is removed.")


if __name__ == "__main__":
    main()
