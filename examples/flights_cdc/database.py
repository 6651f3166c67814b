"""The database of the example: its tables, the application that changes them, and the answers.

Everything here is plain SQL: an application knows nothing of the capture.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from psycopg import AsyncConnection

from examples.flights.data import Tables

Connection = AsyncConnection[Any]

TABLES = """
CREATE TABLE airlines (carrier text PRIMARY KEY, name text NOT NULL);
CREATE TABLE airports (faa text PRIMARY KEY, name text, lat float8, lon float8);
CREATE TABLE planes (tailnum text PRIMARY KEY, year int, manufacturer text, model text, seats int);
CREATE TABLE service (
    tailnum text PRIMARY KEY,
    status text NOT NULL DEFAULT 'ready',
    hours numeric(7, 1) NOT NULL DEFAULT 0,
    since timestamptz NOT NULL DEFAULT now()
);
CREATE SCHEMA results; -- written by the pipeline
CREATE SCHEMA earlier; -- copies of tables, for the comparison at the end
"""
FLIGHTS = """
CREATE TEMPORARY TABLE flights (
    id bigint, time timestamptz, carrier text, tailnum text, dest text, late boolean
)
"""
MERGERS = (
    "UPDATE airlines SET name = 'American Airlines Inc.' WHERE carrier = 'US'",
    "UPDATE airlines SET name = 'Southwest Airlines Co.' WHERE carrier = 'FL'",
    "UPDATE planes SET seats = seats + 6 WHERE manufacturer = 'EMBRAER'",
    "DELETE FROM planes WHERE year < 1985",
)
PAUSE = 0.05  # seconds between two transactions of the application


async def fill(db: Connection, tables: Tables) -> None:
    """Create the tables with the rows of the package, and put all larger planes in service."""
    await db.execute(TABLES)
    for name, (_, rows) in tables.items():
        await copy(db, name, rows)
    await db.execute("INSERT INTO service (tailnum) SELECT tailnum FROM planes WHERE seats > 50")


async def copy(db: Connection, table: str, rows: pa.Table) -> None:
    """Add rows to a table that has the same columns."""
    columns = ", ".join(rows.column_names)
    async with db.cursor().copy(f"COPY {table} ({columns}) FROM STDIN") as to:
        for row in rows.to_pylist():
            await to.write_row(list(row.values()))


# -- the application ------------------------------------------------------------------------


@dataclass
class Done:
    """What the application has done."""

    transactions: int = 0
    undone: int = 0


async def keep_in_service(
    db: Connection, planes: list[str], done: Done, stop: asyncio.Event
) -> None:
    """Change, add and remove rows of `service` until the event is set; undo some of it."""
    chance = random.Random(2013)
    while not stop.is_set():
        some = chance.sample(planes, 8)
        try:
            async with db.transaction():
                await _change(db, some, chance)
                if chance.random() < 0.2:
                    raise Undone
            done.transactions += 1
        except Undone:
            done.undone += 1
        await asyncio.sleep(PAUSE)


class Undone(Exception):
    """A transaction is rolled back."""


async def _change(db: Connection, planes: list[str], chance: random.Random) -> None:
    changed, added, removed = planes[:5], planes[5:7], planes[7]
    status = chance.choice(["ready", "in check", "grounded"])
    await db.execute(
        "UPDATE service SET status = %s, hours = hours + %s, since = now() WHERE tailnum = ANY(%s)",
        (status, chance.randrange(100) / 10, changed),
    )
    await db.execute(
        "INSERT INTO service (tailnum) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING", (added,)
    )
    await db.execute("DELETE FROM service WHERE tailnum = %s", (removed,))


async def merge_airlines(db: Connection) -> None:
    """Change airlines and planes in one transaction, after a copy of what they were."""
    await db.execute("CREATE TABLE earlier.airlines AS TABLE airlines")
    await db.execute("CREATE TABLE earlier.planes AS TABLE planes")
    async with db.transaction():
        for statement in MERGERS:
            await db.execute(statement)


# -- the answers ----------------------------------------------------------------------------

DEPARTURES = "id, time, carrier, airline, tailnum, model, seats, dest, destination"
FLEET = "tailnum, flights, airport, status, hours, since"
EXPECTED = {
    f"SELECT {DEPARTURES} FROM results.departures": f"""
    WITH all_airlines AS (
        SELECT true AS late, * FROM airlines UNION ALL SELECT false, * FROM earlier.airlines
    ), all_planes AS (
        SELECT true AS late, * FROM planes UNION ALL SELECT false, * FROM earlier.planes
    ), named AS (
        SELECT f.*, a.name AS airline, p.model, p.seats, d.name AS destination
        FROM flights f
        LEFT JOIN all_airlines a USING (late, carrier)
        LEFT JOIN all_planes p USING (late, tailnum)
        LEFT JOIN airports d ON d.faa = f.dest
    )
    SELECT {DEPARTURES} FROM named""",
    f"SELECT {FLEET} FROM results.fleet": f"""
    WITH landings AS (
        SELECT DISTINCT ON (tailnum) tailnum, dest AS airport,
            count(*) OVER (PARTITION BY tailnum) AS flights
        FROM flights ORDER BY tailnum, time DESC, id DESC
    )
    SELECT {FLEET} FROM landings JOIN service USING (tailnum)""",
}
SHOWN = """
SELECT d.airline, count(*) AS departures, sum(d.seats) AS seats,
    count(DISTINCT d.tailnum) FILTER (WHERE f.status = 'ready') AS ready,
    count(DISTINCT d.tailnum) FILTER (WHERE f.status <> 'ready') AS "not ready"
FROM results.departures d LEFT JOIN results.fleet f USING (tailnum)
GROUP BY d.airline ORDER BY departures DESC, d.airline LIMIT 8
"""


@dataclass(frozen=True)
class Verdict:
    """A table of the pipeline, compared with the same query in SQL."""

    table: str
    rows: int
    missing: int
    wrong: int  # rows that should not be there, also those that are there twice

    @property
    def right(self) -> bool:
        return self.rows > 0 and not self.missing and not self.wrong


async def add_flights(db: Connection, flights: pa.Table, late: list[bool]) -> None:
    """Give this connection the flights that were sent, for the comparison."""
    rows = flights.select(["id", "time", "carrier", "tailnum", "dest"])
    await db.execute(FLIGHTS)
    await copy(db, "flights", rows.append_column("late", pa.array(late)))


async def compared(db: Connection) -> list[Verdict]:
    """The pipeline's tables, as they are now."""
    verdicts = []
    for found, expected in EXPECTED.items():
        rows = await _count(db, found)
        missing = await _count(db, f"({expected}) EXCEPT ALL ({found})")
        wrong = await _count(db, f"({found}) EXCEPT ALL ({expected})")
        verdicts.append(Verdict(found.rpartition(" ")[2], rows, missing, wrong))
    return verdicts


async def _count(db: Connection, query: str) -> int:
    cursor = await db.execute(f"SELECT count(*) FROM ({query}) AS counted")
    row = await cursor.fetchone()
    return int(row[0]) if row else 0
