"""The rows of a projection do not depend on how messages were read and where commits were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest

from millstream import Event, EventStore, Mill, StoredEvent
from millstream.errors import ProcessFailed
from millstream.messaging.processing import table_worker
from millstream.projections.projection import Projection
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened

Rows = MutableMapping[str, Any]
APPENDS = 150


@dataclass
class Seen:
    version: int = 0
    amount: int = 0
    text: str = ""


@dataclass
class Listed:
    versions: list[int]


class Broken(Exception):
    """Raised by the function of a test."""


def note(event: StoredEvent, tables: dict[str, Rows]) -> None:
    """Add up amounts; change rows without assigning them, and fail in the middle of appends."""
    seen, listed = tables["seen"], tables["listed"]
    row, versions = seen.get(event.id) or Seen(), listed.get(event.id) or Listed([])
    amount = event.data.amount if isinstance(event.data, Deposited) else 0
    row.amount += amount
    row.version, row.text = event.version, "ä" if amount % 7 == 0 else "a"
    versions.versions.append(event.version)
    if amount % 3 == 2:  # only changed: no effect
        return
    seen[event.id], listed[event.id] = row, versions
    row.amount += 1000  # after it was assigned: no effect
    versions.versions.append(-1)
    if amount % 10 == 0:
        del seen[event.id]
        seen[event.id] = Seen()
    if amount % 20 == 10:
        raise Broken


@pytest.fixture
async def store(mill: Mill) -> EventStore:
    store = await mill.event_store("accounts", Account, events=EVENTS)
    for number in range(5):
        await store.append(f"a{number}", [Opened("ann")])
    for number in range(1, APPENDS + 1):
        # Some have headers of their own: they are not read together with the others.
        headers = {"own": "x"} if number % 11 == 0 else None
        events = [Deposited(number), Deposited(1)][: 1 + number % 2]
        await store.append(f"a{number % 5}", events, headers=headers)
    return store


async def expected(store: EventStore) -> dict[str, dict[str, Any]]:
    """What the function makes of the events, one append after the other, with copies of rows."""
    seen, listed = dict[str, Seen](), dict[str, list[int]]()
    append: list[StoredEvent] = []

    def finish() -> None:
        before = dict(seen), {key: [*versions] for key, versions in listed.items()}
        for event in append:
            amount = event.data.amount if isinstance(event.data, Deposited) else 0
            row = seen.get(event.id) or Seen()
            if amount % 3 != 2:
                text = "ä" if amount % 7 == 0 else "a"
                seen[event.id] = Seen(event.version, row.amount + amount, text)
                listed.setdefault(event.id, []).append(event.version)
                if amount % 10 == 0:
                    seen[event.id] = Seen()
                if amount % 20 == 10:
                    seen.clear()
                    seen.update(before[0])
                    listed.clear()
                    listed.update(before[1])
                    break
        append.clear()

    async for event in store.all():
        if append and event.offset != append[-1].offset:
            finish()
        append.append(event)
    finish()
    return {"seen": seen, "listed": {key: Listed(v) for key, v in listed.items()}}


async def project(mill: Mill, store: EventStore, **settings: Any) -> Projection:
    tables = {"seen": Seen, "listed": Listed}
    return await mill.projection("p", store, note, tables=tables, **settings)


async def found(mill: Mill) -> dict[str, dict[str, Any]]:
    seen, listed = await mill.view("p", Seen), await mill.view("p", Listed)
    return {"seen": await seen.as_dict("seen"), "listed": await listed.as_dict("listed")}


@pytest.mark.parametrize("rows", [1, 7, 20_000])
async def test_rows_are_the_same_wherever_commits_are(
    mill: Mill, store: EventStore, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(table_worker, "COMMIT_ROWS", rows)
    projection = await project(mill, store, on_error="dead_letter")
    await projection.rebuild()
    assert await found(mill) == await expected(store)
    dead = [event async for event in (await mill.topic("accounts-p-v1-dead")).read()]
    assert len(dead) == len([n for n in range(1, APPENDS + 1) if n % 20 == 10 and n % 3 != 2])


async def test_each_append_is_handled_once_when_the_function_fails_and_runs_again(
    mill: Mill, store: EventStore
) -> None:
    counts: Counter[tuple[str, int]] = Counter()
    broken = {("a3", 9), ("a1", 30)}

    def count(event: StoredEvent, rows: Rows) -> None:
        row = rows.get("all") or Seen()
        row.amount += 1
        rows["all"] = row
        counts[event.id, event.version] += 1
        if (event.id, event.version) in broken:
            broken.remove((event.id, event.version))
            raise Broken

    for _ in range(2):
        projection = await mill.projection("c", store, count, schema=Seen)
        with pytest.raises(ProcessFailed, match="Broken"):
            await projection.rebuild()
    await (await mill.projection("c", store, count, schema=Seen)).rebuild()
    total = len([event async for event in store.all()])
    assert (await (await mill.view("c", Seen)).get("all")).amount == total
    assert len(counts) == total
    # Again: what the two that failed have, at most two events each.
    assert sum(counts.values()) <= total + 4


async def test_nothing_is_handled_after_the_event_that_stops_a_process(mill: Mill) -> None:
    source, table = await mill.create_topic("in"), await mill.create_table("rows")
    for number in range(20):
        await source.publish(b"%d" % number)

    def stop(event: Event, tables: dict[str, Rows]) -> None:
        tables["rows"]["last"] = event.value
        if event.value in (b"4", b"11"):
            process.stop()

    for last, handled in ((b"4", 5), (b"11", 7), (b"19", 8)):
        process = mill.process(source, [], stop, tables=[table], name="p")
        await process.run(once=True)
        assert await table.as_dict() == {"last": last}
        assert process.handled == handled
