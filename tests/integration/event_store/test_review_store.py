"""Attacks on the event store: each test states what should hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream import NEW, Append, EventStore, Mill, Unchanged
from millstream.errors import (
    AggregateDeleted,
    AggregateNotFound,
    ConfigError,
    MillstreamError,
    VersionConflict,
)
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened


async def test_archive_of_a_reused_id_keeps_the_new_events(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5), Deposited(6)], NEW)
    await store.archive("a1")
    await store.delete("a1", reusable=True)
    await store.append("a1", [Opened("ben"), Deposited(100)], NEW)
    await store.archive("a1")
    assert (await store.load("a1")).state == Account("ben", 100, [100])


async def test_archive_in_a_store_that_was_created_again(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5), Deposited(6)], NEW)
    await store.archive("a1")
    await mill.delete_topic("accounts")
    again = await mill.event_store("accounts", Account, events=EVENTS)
    await again.append("a1", [Opened("ben"), Deposited(100)], NEW)
    await again.archive("a1")
    assert (await again.load("a1")).state == Account("ben", 100, [100])


async def test_delete_topic_takes_the_companions_along(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    await store.append("a2", [Opened("ann")], NEW)
    await store.snapshot("a2")
    await store.archive("a1")
    await mill.delete_topic("accounts")
    assert [info.name for info in await mill.topics() if info.name.startswith("accounts")] == []


async def test_delete_of_an_archived_aggregate_removes_its_events(store: EventStore) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    await store.archive("a1")
    await store.delete("a1")
    with pytest.raises(AggregateDeleted):
        await store.load("a1")


async def test_archive_keeps_appends_without_an_id(store: EventStore, mill: Mill) -> None:
    for n in (1, 2):  # by another program
        headers = b"NATS/1.0\r\nMill-Versions: %d-%d\r\n\r\n" % (n, n)
        await mill.connection.request("accounts.a1", b'{"Deposited":{"amount":%d}}' % n, headers)
    assert (await store.load("a1")).state.history == [1, 2]
    await store.archive("a1")
    assert (await store.load("a1")).state.history == [1, 2]


async def test_two_archives_at_the_same_time(store: EventStore, mill: Mill) -> None:
    for n in range(30):
        await store.append("a1", [Deposited(n)])
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await asyncio.gather(store.archive("a1"), other.archive("a1"))
    assert (await store.load("a1")).version == 30


@pytest.mark.parametrize("expected", [NEW, Unchanged("a1", 0)])
async def test_delete_checks_every_expectation(store: EventStore, expected: Any) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    with pytest.raises((VersionConflict, ConfigError)):
        await store.delete("a1", expected)
    await store.load("a1")


async def test_a_deletion_does_not_take_what_came_after_it(store: EventStore, mill: Mill) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Opened("ann")], NEW)
    ending = store._ending
    end = ending._end

    async def slow(*args: Any) -> Any:
        found = await end(*args)
        await other.delete("a1", reusable=True)
        await other.append("a1", [Opened("ben")], NEW)
        return found

    ending._end = slow  # type: ignore[method-assign]
    await store.delete("a1", reusable=True)
    assert (await other.load("a1")).state.owner == "ben"


async def test_a_remembered_end_is_checked(store: EventStore, mill: Mill) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Opened("ann")], NEW)
    await other.delete("a1")
    with pytest.raises(AggregateDeleted):
        await store.append("a1", [Deposited(1)])
    await other.delete("a1", reusable=True)
    await other.append("a1", [Opened("ben")], NEW)
    assert (await store.append("a1", [Deposited(1)])).version == 2


async def test_a_remembered_end_is_checked_in_batches(store: EventStore, mill: Mill) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Opened("ann")], NEW)
    await other.delete("a1")
    with pytest.raises(AggregateDeleted):
        await store.append("a1", [Deposited(1)])
    await other.delete("a1", reusable=True)
    await other.append("a1", [Opened("ben")], NEW)
    assert (await store.append_all([Append("a1", [Deposited(1)])]))[0].version == 2


@pytest.mark.xfail(strict=True, reason="open: review M1")
async def test_unchanged_is_no_conflict_after_other_events(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("c1.ann", [Deposited(1)])
    other = await store.append("x.y", [Deposited(1)])  # of no interest to the pattern
    seen = max([event.offset async for event in store.all()])
    assert seen == other.offset
    await store.append("c1.ben", [Deposited(1)], Unchanged("c1.*", seen))


async def test_unchanged_in_a_store_with_partitions(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, partitions=8)
    offset = (await store.append("c1.0", [Deposited(1)])).offset
    for n in range(1, 9):  # some of them in other partitions
        await store.append(f"c1.{n}", [Deposited(1)])
    with pytest.raises(ConfigError, match="partition"):
        await store.append("c1.0", [Deposited(9)], Unchanged("c1.*", offset))


async def test_a_duplicate_does_not_make_a_wrong_state(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, snapshot_every=5)
    other = await mill.event_store("accounts", Account, events=EVENTS)
    for _ in range(3):
        await store.append("a1", [Deposited(1)])
    change = store.change("a1", append_id="job-1")
    async with change as account:
        await other.append("a1", [Deposited(1000)])
        await other.append("a1", [Deposited(5)], append_id="job-1")
        account.deposit(5)
    assert (await store.load("a1")).state.balance == 1008
    assert change.result is not None
    assert change.result.state.balance == 1008


async def test_a_change_with_an_id_is_stored_once_also_after_the_window(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, duplicate_window="100ms")
    for _ in range(2):
        async with store.change("a1", append_id="job-1") as account:
            account.deposit(5)
        await asyncio.sleep(0.5)
    assert (await store.load("a1")).state.balance == 5


async def test_a_repeated_change_returns_the_right_state(store: EventStore) -> None:
    for _ in range(2):
        result = await store.update("a1", lambda s: Deposited(5), append_id="job-1")
        assert (result.version, result.state.balance) == (1, 5)


async def test_append_all_needs_ids_for_all_or_none(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, duplicate_window="100ms")
    both = [Append("a1", [Deposited(1)], append_id="x"), Append("a2", [Deposited(1)])]
    with pytest.raises(ConfigError, match="append_id"):
        await store.append_all(both)
    with pytest.raises(AggregateNotFound):
        await store.load("a1")


@pytest.mark.parametrize("value", ["a\r\nNats-Rollup: all", 5, ""])
@pytest.mark.parametrize("what", ["append_id", "correlation_id", "causation_id"])
async def test_odd_ids_are_refused_clearly(store: EventStore, what: str, value: Any) -> None:
    try:
        await store.append("a1", [Deposited(1)], **{what: value})
    except MillstreamError:
        return
    events = [event async for event in store.events("a1")]
    assert getattr(events[0], what) == value


@pytest.mark.parametrize("id", ["ä ö", "x" * 200])
async def test_an_odd_append_id_is_recognised(mill: Mill, id: str) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, duplicate_window="100ms")
    await store.append("a1", [Deposited(1)], append_id=id)
    await asyncio.sleep(0.5)
    assert (await store.append("a1", [Deposited(1)], append_id=id)).duplicate


@pytest.mark.parametrize(
    "values",
    [
        {"max_bytes": 5000},
        {"max_bytes": 5000, "discard": "old"},
        {"max_age": "7d"},
        {"max_messages": 3},
        {"history": 1},
        {"retention": "workqueue"},
    ],
)
async def test_a_store_that_would_lose_events_is_refused(mill: Mill, values: Any) -> None:
    with pytest.raises(ConfigError, match=r"keeps every event|discard"):
        await mill.event_store("accounts", Account, events=EVENTS, **values)


@pytest.mark.parametrize("values", [{"history": 1}, {"max_age": "1h", "packs": False}])
async def test_a_topic_that_forgets_is_not_taken_for_a_store(mill: Mill, values: Any) -> None:
    await mill.create_topic("accounts", **values)
    with pytest.raises(ConfigError):
        await mill.event_store("accounts", Account, events=EVENTS)


@pytest.mark.parametrize(
    "values", [{"snapshot_every": "x"}, {"snapshot_version": None}, {"upcasters": [1]}]
)
async def test_wrong_settings_are_config_errors(mill: Mill, values: Any) -> None:
    with pytest.raises(ConfigError):
        await mill.event_store("accounts", Account, events=EVENTS, **values)


async def test_a_payload_that_is_too_large(store: EventStore) -> None:
    with pytest.raises(MillstreamError) as failed:
        await store.append("a1", [Opened("x" * 9_000_000)])
    assert "9,0" in str(failed.value) or "bytes" in str(failed.value)
    with pytest.raises(AggregateNotFound):
        await store.load("a1")


@pytest.mark.xfail(strict=True, reason="open: review M7")
async def test_category_includes_an_aggregate_of_one_part(store: EventStore) -> None:
    await store.append("account.1", [Deposited(1)])
    await store.append("account", [Deposited(1)])
    assert len([e async for e in store.all(category="account")]) == 2


# -- foreign messages ---------------------------------------------------------------------------


@pytest.mark.xfail(strict=True, reason="open: review S16")
@pytest.mark.parametrize("call", ["all", "delete", "append", "query"])
async def test_one_foreign_message(store: EventStore, mill: Mill, call: str) -> None:
    await store.append("a1", [Deposited(1)])
    await mill.connection.request("accounts.a2", b"junk")
    await store.append("a3", [Deposited(1)])
    if call == "all":
        assert {e.id async for e in store.all()} >= {"a1", "a3"}
    elif call == "delete":
        await store.delete("a2", reusable=True)
    elif call == "append":
        with pytest.raises(MillstreamError, match="a2"):
            await store.append("a2", [Deposited(1)])
    else:
        await store.query("*")
