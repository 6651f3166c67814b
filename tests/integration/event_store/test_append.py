"""Appends: expected versions, conflicts, several aggregates, boundaries, repeated appends."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from millstream import ANY, NEW, Append, EventStore, Mill, Unchanged
from millstream.errors import ConfigError, UnknownEvent, VersionConflict
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened, Withdrawn


async def names_of(store: EventStore, id: str) -> list[tuple[int, str]]:
    return [(event.version, event.name) async for event in store.events(id)]


async def test_versions_count_from_one_for_each_aggregate(store: EventStore) -> None:
    first = await store.append("a1", [Opened("ann"), Deposited(5)], NEW)
    assert (first.first_version, first.version, first.duplicate) == (1, 2, False)
    second = await store.append("a1", [Withdrawn(2)], expected=2)
    assert (second.first_version, second.version) == (3, 3)
    assert (await store.append("a2", [Opened("ben")])).version == 1
    assert await names_of(store, "a1") == [(1, "Opened"), (2, "Deposited"), (3, "Withdrawn")]


async def test_one_append_is_one_message(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5), Deposited(6)], NEW)
    assert (await store.topic.info()).messages == 1


async def test_a_conflict_carries_the_actual_version(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await other.append("a1", [Deposited(1)], expected=1)
    for expected in (1, 7, NEW):
        with pytest.raises(VersionConflict) as found:
            await store.append("a1", [Deposited(2)], expected)
        assert (found.value.id, found.value.actual) == ("a1", 2)
    with pytest.raises(VersionConflict) as found:
        await store.append("nobody", [Deposited(2)], 3)
    assert found.value.actual == 0
    assert await names_of(store, "a1") == [(1, "Opened"), (2, "Deposited")]


async def test_of_many_writers_that_expect_one_version_one_succeeds(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(8)]
    for version in range(5):
        results = await asyncio.gather(
            *(s.append("a1", [Deposited(n)], version or NEW) for n, s in enumerate(stores)),
            return_exceptions=True,
        )
        conflicts = [r for r in results if isinstance(r, VersionConflict)]
        assert len(conflicts) == len(stores) - 1
        assert len(results) - len(conflicts) == 1


async def test_appends_to_any_version_are_all_stored(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(4)]
    await asyncio.gather(*(s.append("a1", [Deposited(1)], ANY) for s in stores for _ in range(5)))
    assert (await stores[0].load("a1")).version == 20


async def test_an_append_with_an_id_is_stored_once_however_often_it_is_repeated(
    store: EventStore, mill: Mill
) -> None:
    first = await store.append("a1", [Opened("ann")], NEW, append_id="open-1")
    await store.append("a1", [Deposited(1)], 1)
    # As a client does that never got the answer, in another process and after the time for which
    # the broker remembers ids.
    await mill.edit_topic("accounts", duplicate_window="100ms")
    for expected in (NEW, ANY):
        other = await mill.event_store("accounts", Account, events=EVENTS)
        again = await other.append("a1", [Opened("ann")], expected, append_id="open-1")
        assert again.duplicate
        assert (again.first_version, again.version, again.offset) == (1, 1, first.offset)
    late = await store.append("a1", [Deposited(2)], 2, append_id="pay-1")
    await store.append("a1", [Deposited(3)], 3)
    other = await mill.event_store("accounts", Account, events=EVENTS)
    assert (await other.append("a1", [Deposited(2)], 2, append_id="pay-1")).offset == late.offset
    with pytest.raises(VersionConflict):
        await other.append("a1", [Deposited(2)], 2, append_id="pay-2")
    assert (await store.load("a1")).version == 4


async def test_an_id_that_another_aggregate_has_used_is_refused(store: EventStore) -> None:
    await store.append("a1", [Opened("ann")], NEW, append_id="open-1")
    with pytest.raises(ConfigError, match="used for another aggregate"):
        await store.append("a2", [Opened("ann")], NEW, append_id="open-1")


async def test_several_aggregates_change_together_or_not_at_all(store: EventStore) -> None:
    await store.append("a1", [Opened("ann"), Deposited(5)], NEW)
    await store.append("a2", [Opened("ben")], NEW)
    receipts = await store.append_all(
        [
            Append("a1", [Withdrawn(5)], 2),
            Append("a2", [Deposited(5)]),
            Append("a3", [Opened("c")], NEW),
        ]
    )
    assert [(r.id, r.version) for r in receipts] == [("a1", 3), ("a2", 2), ("a3", 1)]
    with pytest.raises(VersionConflict) as found:
        await store.append_all([Append("a1", [Deposited(1)], 3), Append("a2", [Withdrawn(1)], 1)])
    assert (found.value.id, found.value.actual) == ("a2", 2)
    assert (await store.load("a1")).version == 3
    one = [
        Append("a1", [Deposited(1)], 3, append_id="t1"),
        Append("a2", [Withdrawn(1)], 2, append_id="t2"),
    ]
    await store.append_all(one)
    assert all(receipt.duplicate for receipt in await store.append_all(one))
    assert (await store.load("a1")).version == 4


async def test_a_decision_over_several_aggregates_holds_only_if_none_changed(
    store: EventStore,
) -> None:
    await store.append("course-1.ann", [Opened("ann")], NEW)
    await store.append("course-1.ben", [Opened("ben")], NEW)
    await store.append("course-2.ann", [Opened("ann")], NEW)
    query = await store.query("course-1.*")
    assert [event.id for event in query.events] == ["course-1.ann", "course-1.ben"]
    await store.append("course-2.ben", [Opened("ben")], NEW)  # another course
    await store.append("course-1.cem", [Opened("cem")], query.unchanged)
    with pytest.raises(VersionConflict):
        await store.append("course-1.dan", [Opened("dan")], query.unchanged)
    again = await store.query("course-1.*")
    assert len(again.events) == 3
    assert (await store.append("course-1.cem", [Deposited(1)], again.unchanged)).version == 2
    with pytest.raises(ConfigError, match="does not match"):
        await store.append("course-2.eva", [Opened("eva")], again.unchanged)


async def test_a_boundary_knows_what_others_have_appended(store: EventStore, mill: Mill) -> None:
    await store.append("c.ann", [Opened("ann")], NEW)  # remembered here
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await other.append("c.ann", [Deposited(1)], 1)
    query = await store.query("c.*")
    receipt = await store.append("c.ann", [Deposited(2)], query.unchanged)
    assert receipt.version == 3


async def test_times_headers_and_causes_are_kept(store: EventStore) -> None:
    when = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    await store.append(
        "a1",
        [Opened("ann")],
        headers={"source": "web"},
        timestamp=when,
        correlation_id="order-7",
        causation_id="click-3",
    )
    (event,) = [event async for event in store.events("a1")]
    assert event.timestamp == when
    assert event.stored.year >= 2026
    assert dict(event.headers) == {"source": "web"}
    assert (event.correlation_id, event.causation_id) == ("order-7", "click-3")


async def test_what_is_no_event_of_the_store_is_refused(store: EventStore) -> None:
    with pytest.raises(UnknownEvent, match="'Account' is not one of its events"):
        await store.append("a1", [Account()])
    with pytest.raises(ConfigError, match="give a list of events"):
        await store.append("a1", Deposited(1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 to 10,000 events"):
        await store.append("a1", [])
    with pytest.raises(ConfigError, match="id is text"):
        await store.append(7, [Deposited(1)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a version"):
        await store.append("a1", [Deposited(1)], -1)
    with pytest.raises(ConfigError, match="offset -1"):
        Unchanged("a.*", -1)
    assert (await store.topic.info()).messages == 0
