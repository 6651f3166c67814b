"""Loading: states now, after a version, as of a time; changes; snapshots."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millstream import NEW, EventStore, Mill
from millstream.errors import AggregateNotFound, ConfigError, VersionConflict
from tests.integration.event_store.bank import (
    EVENTS,
    Account,
    Deposited,
    Opened,
    Overdrawn,
    Withdrawn,
)


async def test_a_state_is_the_fold_of_its_events(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)], NEW)
    await store.append("a1", [Withdrawn(2)], 2)
    loaded = await store.load("a1")
    assert loaded.state == Account("ann", 3, [5, -2])
    assert loaded.version == 3
    assert (await store.load("a1", at=2)).state.balance == 5
    with pytest.raises(AggregateNotFound, match="its last version is 3"):
        await store.load("a1", at=4)
    with pytest.raises(AggregateNotFound, match="no events of 'a2'"):
        await store.load("a2")


async def test_past_states_by_both_clocks(store: EventStore) -> None:
    day = datetime(2020, 1, 1, tzinfo=UTC)
    for number in range(5):
        await store.append("a1", [Deposited(1)], timestamp=day + timedelta(days=number))
    events = [event async for event in store.events("a1")]
    for number, event in enumerate(events):
        at = event.stored
        if number + 1 < len(events) and at == events[number + 1].stored:
            continue  # two in one microsecond
        assert (await store.load("a1", at=at)).version == number + 1
        loaded = await store.load("a1", at=day + timedelta(days=number), clock="event")
        assert loaded.version == number + 1
    with pytest.raises(AggregateNotFound, match="as of 2019"):
        await store.load("a1", at=day - timedelta(days=1), clock="event")
    with pytest.raises(AggregateNotFound):
        await store.load("a1", at=day)  # nothing was stored then


async def test_events_forward_and_backward(store: EventStore) -> None:
    for number in range(1, 11):
        await store.append("a1", [Deposited(number)])
    assert [e.data.amount async for e in store.events("a1", limit=3)] == [1, 2, 3]
    assert [e.data.amount async for e in store.events("a1", start=9)] == [9, 10]
    assert [e.data.amount async for e in store.events("a1", backward=True, limit=2)] == [10, 9]
    assert [e.version async for e in store.events("a1", backward=True)] == list(range(10, 0, -1))
    assert [e async for e in store.events("a2")] == []


async def test_all_events_by_category(store: EventStore) -> None:
    for id in ("savings.1", "giro.1", "savings.2", "savings.1"):
        await store.append(id, [Deposited(1)])
    assert [e.id async for e in store.all()] == ["savings.1", "giro.1", "savings.2", "savings.1"]
    assert [e.id async for e in store.all(category="giro")] == ["giro.1"]
    versions = [e.version async for e in store.all(category="savings")]
    assert versions == [1, 1, 2]


async def test_a_subscription_delivers_appends(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)], NEW)
    async with store.subscribe("mail") as subscription:
        async for delivery in subscription:
            events = await store.events_in(delivery)
            delivery.ack()
            break
    assert [(e.version, e.data) for e in events] == [(1, Opened("ann")), (2, Deposited(5))]


async def test_any_id_can_be_used(store: EventStore) -> None:
    ids = ["ann@example.org", "a b", "..", "_x", "ä/ö", "a.b.c", "*", ">", "x" * 500]
    for id in ids:
        await store.append(id, [Deposited(len(id))], NEW)
    for id in ids:
        assert (await store.load(id)).state.balance == len(id)
    assert [e.id async for e in store.all()] == ids


# -- changes --------------------------------------------------------------------------------


async def test_a_change_appends_what_its_commands_decide(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.open("ann")
        account.deposit(5)
        assert account.balance == 5
    assert (await store.load("a1")).state == Account("ann", 5, [5])


async def test_nothing_of_a_failed_change_is_stored(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.deposit(5)

    async def overdraw() -> None:
        async with store.change("a1") as account:
            account.deposit(1)
            account.withdraw(7)

    with pytest.raises(Overdrawn):
        await overdraw()
    assert (await store.load("a1")).version == 1
    with pytest.raises(ConfigError, match="only events change a state"):
        async with store.change("a1") as account:
            account.balance = 100
    async with store.change("a1"):
        pass  # no command: nothing to append
    assert (await store.load("a1")).version == 1


async def test_changes_that_meet_are_repeated_on_the_newer_state(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(6)]

    async def pay(store: EventStore) -> None:
        for _ in range(5):
            async with store.change("a1", tries=100) as account:
                account.deposit(1)

    await asyncio.gather(*map(pay, stores))
    loaded = await stores[0].load("a1")
    assert (loaded.version, loaded.state.balance) == (30, 30)


async def test_a_repeated_change_is_checked_by_its_commands(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Deposited(5)], NEW)
    other = await mill.event_store("accounts", Account, events=EVENTS)

    async def withdraw_too_late() -> None:
        async with store.change("a1") as account:
            account.withdraw(4)
            await other.append("a1", [Withdrawn(4)], 1)

    with pytest.raises(Overdrawn):
        await withdraw_too_late()
    assert (await store.load("a1")).state.balance == 1


async def test_a_change_that_has_read_what_is_no_longer_true_is_a_conflict(
    store: EventStore, mill: Mill
) -> None:
    await store.append("a1", [Deposited(5)], NEW)
    other = await mill.event_store("accounts", Account, events=EVENTS)

    async def decide_by_the_balance() -> None:
        async with store.change("a1") as account:
            if account.balance == 5:
                account.deposit(100)
            await other.append("a1", [Withdrawn(4)], 1)

    with pytest.raises(VersionConflict):
        await decide_by_the_balance()
    assert (await store.load("a1")).state.balance == 1
    async with store.change("a1") as account:
        if account.owner == "":
            account.open("ann")
        await other.append("a1", [Deposited(1)])  # changes something that was not read
    assert (await store.load("a1")).state == Account("ann", 2, [5, -4, 1])


async def test_update_runs_its_function_again_on_conflict(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(5)]

    def double(account: Account) -> Any:
        return Deposited(account.balance or 1)

    await asyncio.gather(*(store.update("a1", double, tries=100) for store in stores))
    assert (await stores[0].load("a1")).state.balance == 16
    with pytest.raises(ConfigError, match="returned 7"):
        await stores[0].update("a1", lambda account: 7)
    assert (await stores[0].update("a1", lambda account: None)).version == 5


# -- snapshots ------------------------------------------------------------------------------


async def test_loading_continues_after_a_snapshot(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, snapshot_every=10)
    for _ in range(25):
        await store.update("a1", lambda account: account.deposit(1))
    table = await mill.table("accounts-snapshots")
    entry = await table.get("a1")
    assert entry is not None
    assert entry.json()["version"] == 20
    # It is used: a wrong state in it shows.
    forged = {**entry.json(), "state": {"owner": "", "balance": 1000, "history": []}}
    await table.put("a1", forged)
    assert (await store.load("a1")).state.balance == 1005
    assert (await store.load("a1", at=12)).state.balance == 12  # it is newer than that


@dataclass
class Richer:
    balance: int = 0
    count: int = 0

    def apply(self, event: Any) -> None:
        if isinstance(event, Deposited):
            self.balance += event.amount
            self.count += 1


async def test_snapshots_of_another_schema_or_version_are_ignored(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Deposited(5)] * 3, NEW)
    assert await store.snapshot("a1") == 3
    other = await mill.event_store("accounts", Richer, events=EVENTS)
    assert (await other.load("a1")).state == Richer(15, 3)
    table = await mill.table("accounts-snapshots")
    entry = await table.get("a1")
    assert entry is not None
    await table.put("a1", {**entry.json(), "state": {"owner": "", "balance": 0, "history": []}})
    assert (await store.load("a1")).state.balance == 0
    later = await mill.event_store("accounts", Account, events=EVENTS, snapshot_version=2)
    assert (await later.load("a1")).state.balance == 15
    for wrong in (
        b"not a snapshot",
        {**entry.json(), "offset": 900},
        {**entry.json(), "version": 9},
    ):
        await table.put("a1", wrong)
        assert (await store.load("a1")).state.balance == 15


async def test_snapshots_of_a_store_that_was_created_again_are_not_used(mill: Mill) -> None:
    for amount in (5, 7):
        store = await mill.event_store("accounts", Account, events=EVENTS)
        await store.append("a1", [Deposited(amount)] * 3, NEW)
        if amount == 5:
            await store.snapshot("a1")
            await mill.jetstream.delete_stream("accounts")  # by another tool
    assert (await mill.topic("accounts-snapshots")).name
    assert (await store.load("a1")).state.balance == 21
