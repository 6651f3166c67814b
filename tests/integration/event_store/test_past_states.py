"""The state at any past moment is the one that was seen then.

Every append is followed by a load, whose state is kept; afterwards the same aggregates are asked
for their states at many moments. The events have two versions: some were written by an older
program, with a class of the same name that had other fields.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import millstream
from millstream import EventStore, Mill
from millstream.errors import AggregateNotFound
from millstream.event_store.events import Clock
from millstream.testing import running_broker

PAST, FUTURE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2090, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
IDS = ("a1", "a2", "b.1")
ASKED = 16  # moments of each kind, for each example


@dataclass(frozen=True)
class Paid:
    """Version 2: an amount in cents, and its currency."""

    cents: int
    currency: str = "EUR"


@dataclass(frozen=True)
class Noted:
    """Version 2 has one more field, which needs no function."""

    text: str
    by: str = "nobody"


def older() -> dict[str, type]:
    """The classes of the older program."""

    @dataclass(frozen=True)
    class Paid:
        euros: int

    @dataclass(frozen=True)
    class Noted:
        text: str

    return {"Paid": Paid, "Noted": Noted}


OLDER = SimpleNamespace(**older())


@dataclass
class Account:
    cents: int = 0
    notes: list[str] = field(default_factory=list)

    def apply(self, event: Any) -> None:
        match event:
            case Paid(cents, currency):
                self.cents += cents
                self.notes.append(f"{cents} {currency}")
            case Noted(text, by):
                self.notes.append(f"{text} by {by}")


def to_cents(old: dict[str, Any]) -> dict[str, Any]:
    return {"cents": old["euros"] * 100, "currency": "EUR"}


class Seen(NamedTuple):
    """What a load has returned, live."""

    version: int
    state: Account


class Step(NamedTuple):
    """One append."""

    id: str
    old: bool  # by the older program
    amounts: list[int]
    day: int | None  # event time; None: none is given


def time_of(day: int) -> datetime:
    """Long before the events are stored, or long after."""
    return (FUTURE if day % 2 else PAST) + timedelta(days=day)


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(IDS),
        st.booleans(),
        st.lists(st.integers(0, 9), min_size=1, max_size=3),
        st.none() | st.integers(0, 20),
    ),
    min_size=12,
    max_size=30,
)


@dataclass
class Stores:
    old: EventStore
    new: EventStore
    snapshots: EventStore  # the same store, with snapshots


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_broker(durability="memory") as broker:
        yield broker.url


@asynccontextmanager
async def stores(mill: Mill, name: str, every: int) -> Any:
    newer: dict[str, Any] = {"events": [Paid, Noted], "upcasters": {("Paid", 1): to_cents}}
    old = await mill.event_store(name, events=[OLDER.Paid, OLDER.Noted])
    yield Stores(
        old,
        await mill.event_store(name, Account, **newer),
        await mill.event_store(name, Account, **newer, snapshot_every=every),
    )


def events_of(step: Step) -> list[Any]:
    if step.old:
        return [OLDER.Noted(str(n)) if n > 6 else OLDER.Paid(n) for n in step.amounts]
    return [Noted(str(n), "ann") if n > 6 else Paid(n * 100, "USD") for n in step.amounts]


async def live(it: Stores, todo: list[Step]) -> dict[str, list[Seen]]:
    """Append everything, and look at each aggregate after each of its appends."""
    seen: dict[str, list[Seen]] = defaultdict(list)
    for number, step in enumerate(todo):
        store = it.old if step.old else (it.new, it.snapshots)[number % 2]
        when = None if step.day is None else time_of(step.day)
        await store.append(step.id, events_of(step), timestamp=when)
        loaded = await it.snapshots.load(step.id)
        seen[step.id].append(Seen(loaded.version, loaded.state))
    return seen


async def state_at(store: EventStore, id: str, at: Any, clock: Clock = "stored") -> Any:
    try:
        loaded = await store.load(id, at, clock=clock)
    except AggregateNotFound:
        return None
    return loaded.version, loaded.state


def moments(times: list[datetime], chance: random.Random) -> Iterator[datetime]:
    """Before, at, just before and after, and between the times of storing."""
    first, last = min(times), max(times)
    yield from (first - timedelta(days=1), first - MICROSECOND, last + timedelta(days=1))
    for _ in range(ASKED):
        time = chance.choice(times)
        yield chance.choice(
            (time, time - MICROSECOND, time + MICROSECOND, first + (last - first) * chance.random())
        )


async def check_stored_clock(it: Stores, id: str, seen: list[Seen], chance: random.Random) -> None:
    """As of a time of storing: the last state that was seen for the appends until then."""
    events = [event async for event in it.new.events(id)]
    assert len(events) == seen[-1].version
    ends = {event.offset: event for event in events}  # the last event of each append
    times = [event.stored_ns for event in ends.values()]
    assert len(times) == len(seen)
    for at in moments([event.stored for event in ends.values()], chance):
        # All of its microsecond is included.
        at_ns = int((at - datetime(1970, 1, 1, tzinfo=UTC)) / MICROSECOND) * 1000 + 999
        count = bisect_right(times, at_ns)
        wanted = tuple(seen[count - 1]) if count else None
        for store in (it.new, it.snapshots):
            assert await state_at(store, id, at) == wanted, (id, at, count)


async def check_versions(it: Stores, id: str, seen: list[Seen], chance: random.Random) -> None:
    for one in chance.sample(seen, min(len(seen), 10)):
        for store in (it.new, it.snapshots):
            assert await state_at(store, id, one.version) == tuple(one)
    for store in (it.new, it.snapshots):
        assert await state_at(store, id, None) == tuple(seen[-1])
        assert await state_at(store, id, seen[-1].version + 1) is None


async def check_event_clock(it: Stores, id: str, todo: list[Step], chance: random.Random) -> None:
    """By the events' own time: a fold of those that were given this time or an earlier one.

    An event without a time has that of its storing: after all of the past, before the future.
    """
    own = [step for step in todo if step.id == id]
    for _ in range(ASKED // 4):
        day = time_of(chance.randrange(-2, 23)) + timedelta(hours=chance.choice((0, 0, 12)))
        state, version, last = Account(), 0, 0
        for step in own:
            version += len(step.amounts)
            given_time = datetime.now(UTC) if step.day is None else time_of(step.day)
            if given_time <= day:
                last = version
                for event in events_of(step):
                    state.apply(upcast(event))
        wanted = (last, state) if last else None
        for store in (it.new, it.snapshots):
            assert await state_at(store, id, day, "event") == wanted, (id, day)


def upcast(event: Any) -> Any:
    """An event as today's program sees it, said again without the store."""
    if isinstance(event, OLDER.Paid):
        return Paid(event.euros * 100)
    return Noted(event.text) if isinstance(event, OLDER.Noted) else event


@given(todo=steps, every=st.integers(1, 7), seed=st.integers(0, 2**32))
@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each attempt to shrink takes seconds
)
async def test_a_state_at_a_random_time_is_the_one_recorded_then(
    url: str, todo: list[Step], every: int, seed: int
) -> None:
    chance = random.Random(seed)
    async with millstream.connect(url) as mill:
        name = f"accounts-{len(await mill.topics())}"
        async with stores(mill, name, every) as it:
            seen = await live(it, todo)
            for id in seen:
                await check_stored_clock(it, id, seen[id], chance)
                await check_versions(it, id, seen[id], chance)
                await check_event_clock(it, id, todo, chance)
            # Replay of the whole log, in order, gives the states that were seen last.
            states: dict[str, Account] = defaultdict(Account)
            async for event in it.new.all():
                states[event.id].apply(event.data)
            assert states == {id: found[-1].state for id, found in seen.items()}
