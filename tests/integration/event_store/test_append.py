"""Appends: expected versions, conflicts, several aggregates, boundaries, repeated appends."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from millstream import ANY, NEW, Append, EventStore, Mill, Unchanged
from millstream.errors import (
    AggregateDeleted,
    ConfigError,
    PayloadTooLarge,
    UnknownEvent,
    VersionConflict,
)
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened, Withdrawn
from tests.integration.event_store.kit import forget_ids


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
    await forget_ids(mill, "accounts")
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


async def test_an_id_that_began_again_takes_appends_of_those_who_knew_its_end(
    store: EventStore, mill: Mill
) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    for id in ("a1", "a2"):
        await store.append(id, [Opened("ann")], NEW)
        await other.delete(id)
        with pytest.raises(AggregateDeleted):  # remembered here from now on
            await store.append(id, [Deposited(1)])
        await other.delete(id, reusable=True)
        await other.append(id, [Opened("ben")], NEW)
    assert (await store.append("a1", [Deposited(1)])).version == 2
    (receipt,) = await store.append_all([Append("a2", [Deposited(1)])])
    assert receipt.version == 2


async def test_a_boundary_may_be_later_than_its_last_event(store: EventStore) -> None:
    await store.append("course-1.ann", [Opened("ann")])
    seen = (await store.append("course-2.ann", [Opened("ann")])).offset  # of another pattern
    unchanged = Unchanged("course-1.*", seen)
    assert (await store.append("course-1.ben", [Opened("ben")], unchanged)).version == 1
    with pytest.raises(VersionConflict):
        await store.append("course-1.cem", [Opened("cem")], unchanged)


async def test_of_many_decisions_over_the_same_aggregates_one_succeeds(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(6)]
    await stores[0].append("course-1.ann", [Opened("ann")])
    query = await stores[0].query("course-1.*")
    results = await asyncio.gather(
        *(s.append(f"course-1.{n}", [Opened("x")], query.unchanged) for n, s in enumerate(stores)),
        return_exceptions=True,
    )
    assert len([r for r in results if isinstance(r, VersionConflict)]) == len(stores) - 1
    assert len((await stores[0].query("course-1.*")).events) == 2


async def test_a_boundary_is_refused_in_a_store_with_partitions(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, partitions=2)
    with pytest.raises(ConfigError, match=r"has 2 partitions.*Unchanged.*in one"):
        await store.append("c1.0", [Deposited(9)], Unchanged("c1.*", 0))
    assert (await store.topic.info()).messages == 0


async def test_appends_together_have_ids_all_of_them_or_none(store: EventStore) -> None:
    mixed = [Append("a1", [Deposited(1)], append_id="x"), Append("a2", [Deposited(1)])]
    with pytest.raises(ConfigError, match="give all appends an append_id, or none"):
        await store.append_all(mixed)
    assert (await store.topic.info()).messages == 0


@pytest.mark.parametrize("value", ["a\r\nNats-Rollup: all", " x ", "", 5])
@pytest.mark.parametrize("what", ["append_id", "correlation_id", "causation_id"])
async def test_an_id_that_would_not_be_read_back_is_refused(
    store: EventStore, what: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"{what}.*text in one line, without spaces at its ends"):
        await store.append("a1", [Deposited(1)], **{what: value})
    assert (await store.topic.info()).messages == 0


async def test_an_append_is_recognised_by_an_id_of_any_text(store: EventStore, mill: Mill) -> None:
    ids = ["ä ö", "x" * 200, "a/b: c"]
    for id in ids:
        await store.append("a1", [Deposited(1)], append_id=id)
    await forget_ids(mill, "accounts")
    for id in ids:
        assert (await store.append("a1", [Deposited(1)], append_id=id)).duplicate
    assert [event.append_id async for event in store.events("a1")] == ids


async def test_an_append_that_is_too_large_is_refused(store: EventStore) -> None:
    with pytest.raises(PayloadTooLarge, match="bytes"):
        await store.append("a1", [Opened("x" * 9_000_000)])
    assert (await store.topic.info()).messages == 0
