"""What an event store promises, said once and tried on both of its kinds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import pytest

from millstream import ANY, NEW, Append, NamedEvent, Personal, StoredEvent, blocking
from millstream.errors import AggregateDeleted, AggregateNotFound, ConfigError, VersionConflict
from tests.contracts.test_messaging import take
from tests.integration.event_store.bank import (
    EVENTS,
    Account,
    Deposited,
    Opened,
    Overdrawn,
    Withdrawn,
)


@dataclass(frozen=True)
class Registered:
    name: Annotated[str, Personal(erased="?")]


@pytest.fixture
async def store(mill: Any) -> Any:
    return await mill.event_store("accounts", Account, events=EVENTS, storage="memory")


async def test_appends_are_loaded_at_any_version(store: Any) -> None:
    assert (store.name, store.topic.name) == ("accounts", "accounts")
    first = await store.append("a1", [Opened("ann"), Deposited(5)], NEW, correlation_id="c")
    assert (first.first_version, first.version, first.duplicate) == (1, 2, False)
    await store.append("a1", [Withdrawn(2)], 2)
    loaded = await store.load("a1")
    assert (loaded.state, loaded.version) == (Account("ann", 3, [5, -2]), 3)
    assert (await store.load("a1", 2)).state.balance == 5
    assert (await store.load("a1", datetime.now(UTC), clock="event")).version == 3
    assert (await store.load_or_new("a2")).version == 0
    with pytest.raises(AggregateNotFound):
        await store.load("a2")


async def test_a_conflict_keeps_its_facts(store: Any) -> None:
    await store.append("a1", [Opened("ann")])
    with pytest.raises(VersionConflict) as found:
        await store.append("a1", [Deposited(2)], NEW)
    assert (found.value.id, found.value.actual) == ("a1", 1)


async def test_events_come_in_both_directions_and_from_all_aggregates(store: Any) -> None:
    await store.append("x.1", [Opened("ann"), Deposited(1)])
    await store.append("y.1", [Opened("ben")])
    assert [event.version async for event in store.events("x.1", backward=True)] == [2, 1]
    assert [event.id async for event in store.all()] == ["x.1", "x.1", "y.1"]
    assert [event.data async for event in store.all(category="y")] == [Opened("ben")]
    assert len(await take(store.all(follow=True), 3)) == 3
    assert [event.version for event in await take(store.events("x.1", follow=True), 2)] == [1, 2]
    assert [event.version async for event in store.events("x.1", follow=True, limit=1)] == [1]
    with pytest.raises(ConfigError, match="backward and follow"):
        await take(store.events("x.1", follow=True, backward=True), 1)


async def test_stores_are_listed(store: Any, mill: Any) -> None:
    await mill.create_topic("orders")
    await store.append("a1", [Opened("ann"), Deposited(1)])
    (found,) = await mill.event_stores()
    assert (found.name, found.aggregates, found.appends) == ("accounts", 1, 1)
    assert found.events == ("Opened", "Deposited", "Withdrawn")
    assert found.state == "tests.integration.event_store.bank:Account"


async def test_several_appends_and_boundaries(store: Any) -> None:
    receipts = await store.append_all(
        [Append("x.1", [Opened("ann")], NEW), Append("x.2", [Opened("ben")], NEW)]
    )
    assert [receipt.version for receipt in receipts] == [1, 1]
    query = await store.query("x.*")
    assert [event.id for event in query.events] == ["x.1", "x.2"]
    await store.append("x.3", [Opened("cem")], query.unchanged)
    with pytest.raises(VersionConflict):
        await store.append("x.4", [Opened("dan")], query.unchanged)


async def test_a_change_appends_what_its_commands_decide(store: Any) -> None:
    change = store.change("a1", correlation_id="c")
    async with change as account:
        account.open("ann")
        account.deposit(5)
        assert account.balance == 5
    assert (change.result.version, change.result.state) == (2, Account("ann", 5, [5]))
    assert [event.correlation_id async for event in store.events("a1")] == ["c", "c"]

    async def overdraw() -> None:
        async with store.change("a1") as account:
            account.deposit(1)
            account.withdraw(7)

    with pytest.raises(Overdrawn):
        await overdraw()
    assert (await store.load("a1")).version == 2
    with pytest.raises(ConfigError, match="tries 0"):
        store.change("a1", tries=0)


async def test_a_change_that_was_slower_is_repeated_or_refused(store: Any, mill: Any) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Opened("ann"), Deposited(5)])
    async with store.change("a1") as account:
        await other.append("a1", [Withdrawn(4)])
        account.deposit(1)
    assert (await store.load("a1")).state.balance == 2

    async def withdraw_if_enough() -> None:
        async with store.change("a1") as account:
            if account.balance >= 2:
                await other.append("a1", [Withdrawn(1)])
                account.withdraw(1)

    async def deposit_at_once() -> None:
        async with store.change("a1", tries=1) as account:
            await other.append("a1", [Deposited(1)])
            account.deposit(1)

    with pytest.raises(VersionConflict) as found:
        await withdraw_if_enough()
    assert found.value.actual == 5
    with pytest.raises(VersionConflict):
        await deposit_at_once()
    assert (await store.load("a1")).version == 6


async def test_update_calls_its_function_again_on_conflict(store: Any, mill: Any) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    seen: list[int] = []

    def pay(account: Account) -> Deposited | None:
        seen.append(account.balance)
        return None if account.balance >= 10 else Deposited(10 - account.balance)

    await other.append("a1", [Deposited(3)])
    done = await store.update("a1", pay, causation_id="bill")
    assert (done.version, done.state.balance) == (2, 10)
    assert (await store.update("a1", pay)).version == 2  # nothing to append
    assert seen == [3, 10]
    with pytest.raises(ConfigError, match="which is no event"):
        await store.update("a1", lambda account: "ten")


async def test_a_subscription_delivers_appends(store: Any) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)], ANY, headers={"from": "web"})
    async with store.subscribe("mail") as subscription:
        (delivery,) = await take(subscription, 1)
        events = await store.events_in(delivery)
        await delivery.ack_sync()
    assert [(event.id, event.version, event.data) for event in events] == [
        ("a1", 1, Opened("ann")),
        ("a1", 2, Deposited(5)),
    ]
    (stored,) = [event async for event in store.topic.read()]
    assert len(await store.events_in(stored)) == 2


async def test_a_snapshot_is_stored_and_used(store: Any, mill: Any) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)])
    assert await store.snapshot("a1") == 2
    assert [entry.key async for entry in (await mill.table("accounts-snapshots")).entries()]
    await store.append("a1", [Deposited(1)])
    assert (await store.load("a1")).state == Account("ann", 6, [5, 1])


async def test_a_store_without_classes_gives_dicts(store: Any, mill: Any) -> None:
    await store.append("a1", [Deposited(5)])
    plain = await mill.event_store("accounts")
    (event,) = [event async for event in plain.events("a1")]
    assert (event.name, event.data) == ("Deposited", {"amount": 5})
    assert (await plain.append("a1", [NamedEvent("Deposited", {"amount": 6})], 1)).version == 2
    assert (await store.load("a1")).state.balance == 11
    with pytest.raises(ConfigError, match="without a class of states"):
        await plain.load("a1")


async def test_aggregates_are_deleted_and_archived(store: Any) -> None:
    for id in ("a1", "a2", "a3"):
        await store.append(id, [Opened(id)])
    await store.delete("a1", 1)
    await store.delete("a2", reusable=True)
    await store.archive("a3")
    with pytest.raises(AggregateDeleted):
        await store.load("a1")
    assert (await store.append("a2", [Deposited(1)], NEW)).version == 1
    assert (await store.load("a3")).state.owner == "a3"
    with pytest.raises(AggregateNotFound):
        await store.delete("a4")


async def test_a_person_is_erased(mill: Any) -> None:
    store = await mill.event_store("people", events=[Registered])
    await store.append("p1", [Registered("ann")])
    assert await store.erase("p1")
    assert not await store.erase("p1")
    assert [event.data async for event in store.events("p1")] == [Registered("?")]


@dataclass
class Balance:
    amount: int


def balances(event: StoredEvent, rows: Any) -> None:
    if isinstance(event.data, Deposited):
        rows[event.id] = Balance(rows.get(event.id, Balance(0)).amount + event.data.amount)


def doubled(event: StoredEvent, rows: Any) -> None:
    balances(event, rows)
    balances(event, rows)


async def test_a_projection_is_built_compared_and_swapped(store: Any, mill: Any) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)])
    old = await mill.projection("balances", store, balances, schema=Balance)
    assert (old.name, old.version) == ("balances", 1)
    assert await old.run(once=True)
    view = await mill.view("balances", Balance)
    assert await view.as_dict() == {"a1": Balance(5)}
    new = await mill.projection("balances", store, doubled, schema=Balance, version=2)
    assert await new.rebuild() == 0
    (row,) = [row async for row in new.diff()]
    assert (row.key, row.active, row.other) == ("a1", {"amount": 5}, {"amount": 10})
    assert await new.swap() == 1
    assert await new.is_active()
    assert await view.get("a1") == Balance(10)
    assert (await (await new.table()).get("a1")).value == {"amount": 10}
    await new.drop(1)
    assert [list(record.versions) for record in await mill.projections()] == [[2]]


# -- plain code only ----------------------------------------------------------------------


class Careful(Account):
    """An account whose commands note the thread that they run in."""

    def deposit(self, amount: int) -> Deposited:
        threads.append(threading.current_thread())
        return super().deposit(amount)


threads: list[threading.Thread] = []


def test_commands_run_in_the_callers_thread_also_when_they_are_repeated(
    millstream_url: str,
) -> None:
    threads.clear()
    with blocking.connect(millstream_url) as mill:
        store = mill.event_store("accounts", Careful, events=EVENTS)
        other = mill.event_store("accounts", Account, events=EVENTS)
        with store.change("a1") as account:
            other.append("a1", [Deposited(1)])
            account.deposit(2)
        assert store.load("a1").state.balance == 3
    assert threads == [threading.current_thread()] * 2


def test_a_function_of_update_may_make_blocking_calls(millstream_url: str) -> None:
    with blocking.connect(millstream_url) as mill:
        store = mill.event_store("accounts", Account, events=EVENTS)
        store.append("a1", [Deposited(3)])
        done = store.update("a2", lambda _: Deposited(store.load("a1").state.balance))
        assert done.state.balance == 3

        async def decide(account: Account) -> Deposited:
            return Deposited(1)

        with pytest.raises(ConfigError, match="is an async function"):
            store.update("a2", decide)
