"""Loading: states now, after a version, as of a time; snapshots; what goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from millstream import NEW, EventStore, Mill
from millstream.errors import AggregateNotFound, DataLoss
from millstream.settings import LOST_METADATA
from millstream.wire.aio import subject_reader
from tests.integration.event_store.bank import (
    EVENTS,
    Account,
    Deposited,
    Opened,
    Withdrawn,
)
from tests.integration.messaging.topic_kit import eventually


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
    await store.append("savings", [Deposited(1)])  # an id of one part
    await store.append("savings2.1", [Deposited(1)])
    assert [e.id async for e in store.all(category="savings")][3:] == ["savings"]


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


async def test_a_load_that_is_cancelled_leaves_nothing_at_the_broker(
    store: EventStore, mill: Mill
) -> None:
    for _ in range(100):
        await store.append("a1", [Deposited(1)])
    began = time.monotonic()
    await store.load("a1")
    whole = time.monotonic() - began
    for part in range(40):  # further into the load each time
        task = asyncio.create_task(store.load("a1"))
        await asyncio.wait({task}, timeout=whole * part / 40)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def consumers() -> int:
        return (await mill.jetstream.stream_info("accounts")).state.consumer_count

    await eventually(consumers, 0)
    assert (await store.load("a1")).version == 100


async def test_an_aggregate_of_more_messages_than_one_reading_takes_is_loaded(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(60):
        await store.append("a1", [Deposited(n)])
        await store.append("a2", [Deposited(1)])
    monkeypatch.setattr(subject_reader, "MESSAGES_MAX", 50)
    assert (await store.load("a1")).state.history == list(range(60))


async def test_a_state_is_not_made_of_a_log_that_has_lost_events(
    store: EventStore, mill: Mill
) -> None:
    """The lost ones may have been of any aggregate, also of one that has an append only."""
    await store.append("a1", [Deposited(1)])
    for number in range(3):
        await store.append("a2", [Deposited(number)])
    await store.snapshot("a2")
    config = dict((await mill.jetstream.stream_info("accounts")).config)
    lost = [{"first": 4, "last": 9, "found": "2026-11-17T00:00:00Z"}]
    config["metadata"] = {**config["metadata"], LOST_METADATA: msgspec.json.encode(lost).decode()}
    await mill.jetstream.update_stream(config)
    again = await mill.event_store("accounts", Account, events=EVENTS)
    for id in ("a1", "a2", "a3"):
        with pytest.raises(DataLoss):
            await again.load(id)


@pytest.mark.long
async def test_a_program_that_is_busy_while_it_loads_a_large_aggregate_stays_connected(
    store: EventStore, mill: Mill
) -> None:
    """It is more than the 64 MB that the broker holds for a client that does not read."""
    for n in range(15):
        await store.append("a1", [Opened(str(n) + "x" * 7_000_000)])
    before = mill.connection.reconnects
    task = asyncio.create_task(store.load("a1"))
    while not (await mill.jetstream.stream_info("accounts")).state.consumer_count:
        assert not task.done()
    time.sleep(3)  # noqa: ASYNC251  the program is busy
    assert (await task).state.owner.startswith("14x")
    assert mill.connection.reconnects == before


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
