"""The states of all aggregates as of a time, folded in parallel, are those of the SDK."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import millstream
from millstream.errors import AggregateNotFound
from millstream.event_store.events import Clock
from millstream.spark import event_upcasters, states_as_of
from tests.spark.conftest import Account as Broker
from tests.spark.conftest import Lake
from tests.spark.event_store import accounts
from tests.spark.event_store.accounts import EVENTS, Account, Opened, Withdrawn
from tests.spark.event_store.store_kit import BASE, IDS, Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = dict[str, tuple[int, datetime, dict[str, Any]]]


@pytest.fixture
def store(account: Broker) -> Store:
    return Store(account)


def sequential(store: Store, at: datetime, clock: Clock) -> Rows:
    """Every aggregate as the SDK loads it."""

    async def work(mill: millstream.Mill) -> Rows:
        opened = await mill.event_store(store.name, Account, events=EVENTS, **store.how)
        found: Rows = {}
        for id in [*IDS, "gone"]:
            try:
                loaded = await opened.load(id, at=at, clock=clock)
            except AggregateNotFound:
                continue
            assert loaded.timestamp is not None
            time = loaded.timestamp.astimezone().replace(tzinfo=None)
            found[id] = (loaded.version, time, asdict(loaded.state))
        return found

    found: Rows = store.broker.run(work)
    return found


def in_spark(lake: Lake, at: datetime, clock: Clock, **options: Any) -> Rows:
    given = {"asOf": at.isoformat(), "asOfClock": clock, **options}
    found = lake.read(eventStore="accounts", **given).collect()
    rows = {r.aggregate: (r.version, r.timestamp, r.state.asDict(recursive=True)) for r in found}
    assert len(rows) == len(found)
    return rows


def test_states_as_of_random_times_are_those_of_a_sequential_fold(lake: Lake, store: Store) -> None:
    chance = random.Random(7)
    old: Any = dataclass(type("Deposited", (), {"__annotations__": {"cents": str}}))
    upcasters = {("Deposited", 1): lambda event: {"amount": int(event["cents"]) // 100}}
    store.append("a1", old("1200"), classes=[Opened, old, Withdrawn], timestamp=BASE)
    store.how = {"upcasters": upcasters}
    store.append_randomly(8, 50)
    store.append("gone", Opened("eve"))
    store.delete("gone")
    stored = [event.stored for event in store.events()]
    text = event_upcasters(upcasters)
    seen = set[int]()
    clocks: list[tuple[Clock, list[datetime]]] = [
        ("stored", [stored[0] - timedelta(seconds=1), *chance.sample(stored, 2), stored[-1]]),
        ("event", [BASE + timedelta(minutes=chance.randint(0, 1000)), datetime.now(UTC)]),
    ]
    for clock, times in clocks:
        for at in times:
            expected = sequential(store, at, clock)
            tasks = chance.choice([1, 3])
            assert in_spark(lake, at, clock, minPartitions=tasks, upcasters=text) == expected
            seen.add(len(expected))
    assert len(seen) > 1


def test_several_partitions_are_folded_by_one_task_each_or_more(lake: Lake, store: Store) -> None:
    store.append_randomly(9, 30, partitions=3)
    now = datetime.now(UTC)
    expected = sequential(store, now, "stored")
    assert in_spark(lake, now, "stored") == expected
    assert in_spark(lake, now, "stored", minPartitions=7) == expected
    only = lake.read(eventStore="accounts", asOf=now.isoformat()).select("aggregate")
    assert {row.aggregate for row in only.collect()} == set(expected)


def test_classes_of_a_notebook_and_a_fold_function(
    spark: SparkSession, lake: Lake, store: Store
) -> None:
    @dataclass
    class Total:
        events: int = 0
        amounts: list[int] = field(default_factory=list)

    @dataclass
    class Deposited:
        amount: int

    def fold(state: Total, event: Any) -> Total:
        amounts = [event.amount] if isinstance(event, Deposited) else []
        return Total(state.events + 1, state.amounts + amounts)

    classes = [Opened, Deposited, Withdrawn]
    store.append("a1", Opened("ann"), Deposited(9), Withdrawn(10), classes=classes)
    store.append("b", Deposited(7), classes=classes)
    found = states_as_of(
        spark, "accounts", Total, datetime.now(UTC), events=classes, fold=fold, url=lake.url
    )
    assert {row.aggregate: row.state.asDict(recursive=True) for row in found.collect()} == {
        "a1": {"events": 3, "amounts": [9]},
        "b": {"events": 1, "amounts": [7]},
    }


def test_a_class_that_does_not_fit_the_store_is_refused(
    spark: SparkSession, lake: Lake, store: Store
) -> None:
    store.open()
    other: Any = dataclass(type("Opened", (), {"__annotations__": {"name": str}}))
    with pytest.raises(Exception, match="has other fields than every version of event 'Opened'"):
        states_as_of(
            spark,
            "accounts",
            Account,
            BASE,
            events=[other, accounts.Deposited, Withdrawn],
            url=lake.url,
        )
    assert lake.read(eventStore="accounts", asOf="0").collect() == []
