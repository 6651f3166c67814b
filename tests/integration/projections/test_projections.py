"""Projections: exactly once, several tables, rebuilt beside the running one, compared, swapped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest

import millstream
from millstream import EventStore, Mill, RowDiff, StoredEvent
from millstream.errors import (
    AggregateNotFound,
    ConfigError,
    MillstreamError,
    NotCaughtUp,
    ProcessFailed,
    ProjectionNotFound,
)
from millstream.projections import projection as projection_module
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened, Withdrawn


@dataclass
class Balance:
    owner: str = ""
    amount: int = 0


Rows = MutableMapping[str, Any]


def balances(event: StoredEvent, rows: Rows) -> None:
    row = rows.get(event.id) or Balance()
    match event.data:
        case Opened(owner):
            row.owner = owner
        case Deposited(amount):
            row.amount += amount
        case Withdrawn(amount):
            row.amount -= amount
        case millstream.Deleted():
            rows.pop(event.id, None)  # its events may be gone before they were read
            return
    rows[event.id] = row


def without_fees(event: StoredEvent, rows: Rows) -> None:
    """The same with another rule: withdrawals of 1 are fees, which are not counted."""
    if not isinstance(event.data, Withdrawn) or event.data.amount != 1:
        balances(event, rows)


@pytest.fixture
async def store(mill: Mill) -> EventStore:
    found = await mill.event_store("accounts", Account, events=EVENTS)
    await found.append("a1", [Opened("ann"), Deposited(5)])
    await found.append("a2", [Opened("ben"), Deposited(7), Withdrawn(1)])
    await found.append("a3", [Opened("cem")])
    await found.delete("a3")
    return found


async def test_a_projection_keeps_a_table_up_to_date(mill: Mill, store: EventStore) -> None:
    projection = await mill.projection("balances", store, balances, schema=Balance)
    assert await projection.run(once=True)
    view = await mill.view("balances")
    assert await view.as_dict() == {
        "a1": {"owner": "ann", "amount": 5},
        "a2": {"owner": "ben", "amount": 6},
    }
    running = asyncio.create_task(projection.run())
    await store.append("a1", [Deposited(10)])
    async for change in (await view.table()).changes(["a1"]):
        if change.value["amount"] == 15:
            break
    projection.stop()
    assert await running
    again = await mill.projection("balances", store, balances, schema=Balance)
    await again.run(once=True)  # nothing is counted twice
    assert (await view.get("a1"))["amount"] == 15
    assert [record.active for record in await mill.projections()] == [1]


async def test_a_new_version_is_built_compared_and_swapped(
    mill: Mill, store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection_module, "LOOK_SECONDS", 0.05)  # the test waits for it
    old = await mill.projection("balances", store, balances, schema=Balance)
    await old.run(once=True)
    running = asyncio.create_task(old.run())
    new = await mill.projection("balances", store, without_fees, schema=Balance, version=2)
    view = await mill.view("balances", Balance)
    with pytest.raises(NotCaughtUp):
        await new.swap()
    assert await new.rebuild() == 0
    assert (await view.get("a2")).amount == 6  # readers see the old one
    differences = [row async for row in new.diff()]
    assert differences == [
        RowDiff("balances", "a2", {"owner": "ben", "amount": 6}, {"owner": "ben", "amount": 7})
    ]
    await store.append("a1", [Deposited(1)])
    assert await new.swap() == 1
    assert await new.is_active()
    assert (await view.get("a2")).amount == 7
    assert not await running  # the old one notices that it was replaced
    await new.run(once=True)
    assert (await view.get("a1")).amount == 6
    with pytest.raises(ConfigError, match="is the active one"):
        await new.drop(2)
    await new.drop(1)
    assert [record.versions for record in await mill.projections()] == [{2: ("balances",)}]
    with pytest.raises(ConfigError, match="no version 1; it has 2"):
        _ = [row async for row in new.diff(against=1)]


async def test_rows_that_one_version_has_not_reached_are_no_difference(
    mill: Mill, store: EventStore
) -> None:
    old = await mill.projection("balances", store, balances, schema=Balance)
    new = await mill.projection("balances", store, balances, schema=Balance, version=2)
    await new.rebuild()
    running = asyncio.create_task(old.run())  # it starts while they are compared
    assert [row async for row in new.diff()] == []
    old.stop()
    await running


async def test_several_tables_change_together(mill: Mill, store: EventStore) -> None:
    def both(event: StoredEvent, tables: Mapping[str, Rows]) -> None:
        if isinstance(event.data, Deposited | Withdrawn):
            sign = 1 if isinstance(event.data, Deposited) else -1
            for table, key in (("by-account", event.id), ("total", "all")):
                found = tables[table].get(key)
                before = 0 if found is None else int(found)
                tables[table][key] = str(before + sign * event.data.amount).encode()

    projection = await mill.projection(
        "sums", store, both, tables={"by-account": None, "total": None}
    )
    await projection.run(once=True)
    view = await mill.view("sums")
    assert await view.as_dict("by-account") == {"a1": b"5", "a2": b"6"}
    assert await view.get("all", "total") == b"11"
    with pytest.raises(ConfigError, match="has the tables by-account, total"):
        await view.get("all")
    first = await view.table("by-account")
    await view.table("total")
    assert await view.table("by-account") is first  # both stay open


async def test_a_topic_can_be_projected_too(mill: Mill) -> None:
    topic = await mill.create_topic("clicks")
    for name in ("home", "cart", "home"):
        await topic.publish(name.encode(), key="ann")

    def count(event: millstream.Event, rows: Rows) -> None:
        page = event.value.decode()
        rows[page] = str(int(rows.get(page, b"0")) + 1).encode()

    projection = await mill.projection("pages", topic, count)
    await projection.run(once=True)
    assert await (await mill.view("pages")).as_dict() == {"home": b"2", "cart": b"1"}


async def test_an_event_type_that_is_registered_while_it_runs_is_read(
    mill: Mill, store: EventStore
) -> None:
    seen: list[Any] = []
    projection = await mill.projection("seen", store, lambda event, rows: seen.append(event.data))

    @dataclass(frozen=True)
    class Renamed:
        owner: str

    more = await mill.event_store("accounts", Account, events=[*EVENTS, Renamed])
    await more.append("a1", [Renamed("anna")])
    await projection.run(once=True)
    assert seen[-1] == {"owner": "anna"}


async def test_what_cannot_be_a_projection_is_refused(mill: Mill, store: EventStore) -> None:
    async def waits(event: StoredEvent, rows: Rows) -> None: ...

    def slow(event: StoredEvent, rows: Rows) -> Any:
        return waits(event, rows)

    with pytest.raises(ConfigError, match="write a plain function"):
        await mill.projection("slow", store, waits)
    projection = await mill.projection("slow", store, slow)
    with pytest.raises(ProcessFailed, match="write a plain function"):
        await projection.run(once=True)
    with pytest.raises(ProjectionNotFound, match="Did you mean 'slow'"):
        await mill.view("slo")
    topic = await mill.create_topic("other")
    with pytest.raises(ConfigError, match="reads 'accounts', not 'other'"):
        await mill.projection("slow", topic, slow, version=5)
    with pytest.raises(ConfigError, match="has the tables slow, not other"):
        await mill.projection("slow", store, slow, tables={"other": None})
    (record,) = await mill.projections()
    assert record.versions == {1: ("slow",)}  # nothing was written
    with pytest.raises(ConfigError, match="version 0"):
        await mill.projection("slow", store, slow, version=0)
    with pytest.raises(ConfigError, match="unknown setting 'comit_every'"):
        await mill.projection("slow", store, slow, comit_every=1)
    with pytest.raises(AggregateNotFound):
        await store.load("slow")


async def test_a_function_that_returns_something_is_refused_for_every_source(
    mill: Mill, store: EventStore
) -> None:
    topic = await mill.create_topic("plain")
    await topic.publish(b"1", key="a")
    sources: list[EventStore | millstream.Topic] = [topic, store]
    for number, source in enumerate(sources):
        projection = await mill.projection(f"p{number}", source, lambda event, rows: 5)
        with pytest.raises(ProcessFailed, match="returned 5: it changes its tables"):
            await projection.run(once=True)


async def test_an_asynchronous_function_is_noticed_at_an_event_of_a_new_type(mill: Mill) -> None:
    """Such an event is read in another way than those of known types."""

    @dataclass(frozen=True)
    class Later:
        x: int = 0

    async def slow(event: StoredEvent, rows: Rows) -> None: ...

    await mill.event_store("accounts", events=EVENTS)
    plain = await mill.event_store("accounts")
    later = await mill.event_store("accounts", events=[Later])
    await later.append("a1", [Later(1)])
    projection = await mill.projection("p", plain, lambda event, rows: slow(event, rows))
    with pytest.raises(ProcessFailed, match="write a plain function"):
        await projection.run(once=True)


async def test_the_events_of_an_append_are_counted_all_or_none(
    mill: Mill, store: EventStore
) -> None:
    def fails(event: StoredEvent, rows: Rows) -> None:
        balances(event, rows)
        if event.data == Deposited(13):
            raise ValueError("unlucky")

    await store.append("a1", [Deposited(20), Deposited(13), Deposited(30)])
    await store.append("a1", [Deposited(40)])
    projection = await mill.projection(
        "balances", store, fails, schema=Balance, on_error="dead_letter"
    )
    await projection.run(once=True)
    assert (await (await mill.view("balances", Balance)).get("a1")).amount == 45


async def test_a_store_with_partitions_is_projected_as_a_whole(mill: Mill) -> None:
    def total(event: StoredEvent, rows: Rows) -> None:
        balances(event, rows)
        rows["total"] = Balance("", (rows.get("total") or Balance()).amount + 1)

    store = await mill.event_store("accounts", Account, events=EVENTS, partitions=3)
    for number in range(12):
        await store.append(f"a{number}", [Deposited(number)])
    projection = await mill.projection("balances", store, total, schema=Balance)
    await projection.run(once=True)
    rows = await (await mill.view("balances", Balance)).as_dict()
    assert rows.pop("total").amount == 12
    assert {id: row.amount for id, row in rows.items()} == {f"a{n}": n for n in range(12)}


async def test_two_projections_do_not_share_a_table(mill: Mill, store: EventStore) -> None:
    first = await mill.projection("balances", store, balances, schema=Balance)
    await first.run(once=True)
    second = await mill.projection(
        "other", store, lambda event, tables: None, tables={"balances": Balance}
    )
    with pytest.raises(MillstreamError, match="balances-v1"):
        await second.run(once=True)
    assert (await (await mill.view("balances", Balance)).get("a1")).amount == 5


async def test_two_processes_of_one_version_count_each_event_once(
    mill: Mill, millstream_url: str, store: EventStore
) -> None:
    async with millstream.connect(millstream_url) as second:
        other = await second.event_store("accounts", Account, events=EVENTS)
        both = [
            await mill.projection("balances", store, balances, schema=Balance),
            await second.projection("balances", other, balances, schema=Balance),
        ]
        running = [asyncio.create_task(one.run()) for one in both]
        for number in range(60):
            await store.append(f"b{number % 7}", [Deposited(1)])
        await store.append("end", [Deposited(1)])
        async with asyncio.timeout(60):
            async for change in (await (await mill.view("balances")).table()).changes(["end"]):
                if change.value is not None:
                    break
        for one in both:
            one.stop()
        await asyncio.gather(*running, return_exceptions=True)  # one of them was fenced off
    last = await mill.projection("balances", store, balances, schema=Balance)
    await last.run(once=True)  # nothing is left, and nothing comes after this
    rows = await (await mill.view("balances", Balance)).as_dict()
    assert sum(row.amount for id, row in rows.items() if id.startswith("b")) == 60


async def test_a_dropped_version_is_built_again_from_the_beginning(
    mill: Mill, store: EventStore
) -> None:
    old = await mill.projection("balances", store, balances, schema=Balance)
    await old.run(once=True)
    new = await mill.projection("balances", store, balances, schema=Balance, version=2)
    await new.rebuild()
    await old.drop(2)
    new = await mill.projection("balances", store, without_fees, schema=Balance, version=2)
    await new.rebuild()
    rows = await (await new.table()).as_dict()
    assert {id: row["amount"] for id, row in rows.items()} == {"a1": 5, "a2": 7}


async def test_a_version_that_is_dropped_while_it_runs_ends_with_an_error(
    mill: Mill, store: EventStore
) -> None:
    old = await mill.projection("balances", store, balances, schema=Balance)
    await old.run(once=True)
    new = await mill.projection("balances", store, balances, schema=Balance, version=2)
    await new.rebuild()
    running = asyncio.create_task(new.run())
    await old.drop(2)
    await store.append("a1", [Deposited(1)])
    with pytest.raises(MillstreamError):
        await asyncio.wait_for(running, 60)
    assert [info.name for info in await mill.topics() if info.name == "balances-v2"] == []


async def test_an_older_version_is_swapped_in_again_while_the_newer_one_goes_on(
    mill: Mill, store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection_module, "LOOK_SECONDS", 0.01)
    old = await mill.projection("balances", store, balances, schema=Balance)
    await old.run(once=True)
    new = await mill.projection("balances", store, without_fees, schema=Balance, version=2)
    await new.rebuild()
    assert await new.swap() == 1
    view = await mill.view("balances", Balance)
    assert (await view.get("a2")).amount == 7
    running = asyncio.create_task(new.run())
    await old.rebuild()
    assert await old.swap() == 2
    assert (await view.get("a2")).amount == 6
    # The newer one is kept up to date, ready to be swapped in again.
    done, _ = await asyncio.wait({running}, timeout=0.5)  # it has looked many times
    assert not done
    await store.append("a2", [Deposited(10)])
    async with asyncio.timeout(60):
        async for change in (await new.table()).changes(["a2"]):
            if change.value["amount"] == 17:
                break
    new.stop()
    assert await running
    assert (await view.get("a2")).amount == 6  # nobody runs the older one
