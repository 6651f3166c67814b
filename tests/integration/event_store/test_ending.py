"""Aggregates that end: deleted, deleted to begin again, archived."""

from __future__ import annotations

from datetime import timedelta

import pytest

from millstream import NEW, EventStore, Mill
from millstream.errors import AggregateDeleted, AggregateNotFound, VersionConflict
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened


async def test_a_deleted_aggregate_is_gone_and_takes_no_more_events(
    store: EventStore, mill: Mill
) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    await store.append("a1", [Deposited(5)])
    await store.snapshot("a1")
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await other.load("a1")
    with pytest.raises(VersionConflict):
        await store.delete("a1", expected=1)
    await store.delete("a1", expected=2)
    for some in (store, other):
        with pytest.raises(AggregateDeleted):
            await some.load("a1")
        for expected in (2, 3, NEW):
            with pytest.raises((AggregateDeleted, VersionConflict)):
                await some.append("a1", [Deposited(1)], expected)
        with pytest.raises(AggregateDeleted):
            await some.append("a1", [Deposited(1)])
    (end,) = [event async for event in store.all()]
    assert (end.id, end.version, end.name, end.deleted) == ("a1", 3, "Deleted", True)
    await store.delete("a1")  # nothing left to do
    with pytest.raises(AggregateNotFound):
        await store.delete("nobody")


async def test_an_id_can_begin_again_if_that_is_allowed(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)], NEW)
    await store.append("a2", [Opened("ben")], NEW)
    await store.delete("a1", reusable=True)
    with pytest.raises(AggregateNotFound):
        await store.load("a1")
    assert (await store.append("a1", [Opened("cem")], NEW)).version == 1
    assert (await store.load("a1")).state == Account("cem")
    assert (await store.load("a2")).state == Account("ben")


async def test_an_archived_aggregate_can_be_read_and_not_changed(
    store: EventStore, mill: Mill
) -> None:
    for amount in range(1, 6):
        await store.append("a.1", [Deposited(amount)], headers={"n": str(amount)})
    await store.append("a.2", [Deposited(7)])
    before = [event async for event in store.events("a.1")]
    await store.archive("a.1")
    await store.archive("a.1")  # nothing left to do
    after = [event async for event in store.events("a.1")]
    assert [(e.version, e.data, e.stored_ns, e.headers) for e in after] == [
        (e.version, e.data, e.stored_ns, e.headers) for e in before
    ]
    other = await mill.event_store("accounts", Account, events=EVENTS)
    assert (await other.load("a.1")).state.history == [1, 2, 3, 4, 5]
    middle = before[2].stored + timedelta(microseconds=1)
    assert (await other.load("a.1", at=middle)).version >= 3
    with pytest.raises(AggregateDeleted):
        await other.append("a.1", [Deposited(1)])
    assert [(e.id, e.name) async for e in store.all()] == [("a.2", "Deposited"), ("a.1", "Deleted")]
    ends = [e async for e in store.all() if e.deleted]
    assert ends[0].data.archived_to == "accounts-archive"


async def test_an_interrupted_archiving_is_completed(store: EventStore, mill: Mill) -> None:
    """As if the process had died after the copies, before the end was stored."""
    for amount in range(1, 4):
        await store.append("a1", [Deposited(amount)])
    await store._ending._copy("a1")
    await store.append("a1", [Deposited(4)])
    await store.archive("a1")
    assert (await store.load("a1")).state.history == [1, 2, 3, 4]
    assert (await (await mill.topic("accounts-archive")).info()).messages == 4
