"""Aggregates that end: deleted, deleted to begin again, archived."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from millstream import NEW, EventStore, Mill, Unchanged
from millstream.errors import AggregateDeleted, AggregateNotFound, ConfigError, VersionConflict
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened
from tests.integration.event_store.kit import publish_raw


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


@pytest.mark.parametrize("expected", [NEW, Unchanged("a1", 0)])
async def test_a_deletion_can_expect_a_version_and_nothing_else(
    store: EventStore, expected: Any
) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    with pytest.raises(ConfigError, match="give a version, or ANY"):
        await store.delete("a1", expected)
    assert (await store.load("a1")).version == 1


async def test_an_archived_aggregate_can_be_deleted(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    await store.archive("a1")
    await store.delete("a1")
    with pytest.raises(AggregateDeleted):
        await store.load("a1")
    assert (await (await mill.topic("accounts-archive")).info()).messages == 0


async def test_an_archived_id_that_began_again_is_archived_again(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5), Deposited(6)], NEW)
    await store.archive("a1")
    await store.delete("a1", reusable=True)
    await store.append("a1", [Opened("ben"), Deposited(100)], NEW)
    await store.archive("a1")
    assert (await store.load("a1")).state == Account("ben", 100, [100])


async def test_a_deleted_store_takes_what_belongs_to_it_along(
    store: EventStore, mill: Mill
) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5), Deposited(6)], NEW)
    await store.append("a2", [Opened("ann")], NEW)
    await store.snapshot("a2")
    await store.archive("a1")
    await mill.delete_topic("accounts")
    assert [info.name for info in await mill.topics() if info.name.startswith("accounts")] == []
    again = await mill.event_store("accounts", Account, events=EVENTS)
    await again.append("a1", [Opened("ben"), Deposited(100)], NEW)
    await again.archive("a1")
    assert (await again.load("a1")).state == Account("ben", 100, [100])


async def test_appends_without_an_id_are_archived_each(store: EventStore, mill: Mill) -> None:
    for n in (1, 2):  # by another program, which writes the format of a store
        event = b'{"Deposited":{"amount":%d}}' % n
        await publish_raw(mill, "accounts.a1", event, {"Mill-Versions": f"{n}-{n}"})
    assert (await store.load("a1")).state.history == [1, 2]
    await store.archive("a1")
    assert (await store.load("a1")).state.history == [1, 2]


async def test_two_may_archive_an_aggregate_at_the_same_time(store: EventStore, mill: Mill) -> None:
    for n in range(20):
        await store.append("a1", [Deposited(n)])
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await asyncio.gather(store.archive("a1"), other.archive("a1"))
    assert (await store.load("a1")).state.history == list(range(20))
    assert (await (await mill.topic("accounts-archive")).info()).messages == 20


async def test_a_load_during_a_deletion_gives_the_whole_state_or_none(store: EventStore) -> None:
    for round in range(8):
        for _ in range(20):
            await store.append("a1", [Deposited(1)])
        loads = [asyncio.create_task(store.load("a1")) for _ in range(4)]
        for _ in range(4 * round):  # further into the loads each time
            await asyncio.sleep(0)
        await store.delete("a1", reusable=True)
        for found in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(found, BaseException):
                assert isinstance(found, AggregateNotFound), found
            else:
                assert (found.version, len(found.state.history)) == (20, 20)
