"""Stores for the tests of this folder: appends by the SDK, and by hand what it would not write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import millstream
from millstream.event_store.events import StoredEvent
from millstream.wire.protocol import encode_headers
from tests.spark.conftest import Account as Broker
from tests.spark.event_store.accounts import EVENTS, Account, Deposited, Opened, Withdrawn

IDS = ["a1", "b.2", "ä b", "_x", "course-1.bob", "c3", "d4", "e5"]
BASE = datetime(2026, 1, 1, tzinfo=UTC)


class Store:
    """A store on the tests' broker."""

    def __init__(self, broker: Broker, name: str = "accounts") -> None:
        self.broker, self.name = broker, name
        self.how: dict[str, Any] = {}  # for every time that it is opened

    def open(self) -> None:
        self.broker.run(
            lambda mill: mill.event_store(self.name, Account, events=EVENTS, **self.how)
        )

    def append(self, id: str, *events: Any, classes: Any = EVENTS, **how: Any) -> None:
        async def work(mill: millstream.Mill) -> None:
            store = await mill.event_store(self.name, Account, events=classes, **self.how)
            await store.append(id, list(events), **how)

        self.broker.run(work)

    def append_randomly(self, seed: int, count: int, **how: Any) -> None:
        """Appends of one to four events to a few aggregates, some with times of their own."""
        chance = random.Random(seed)

        async def work(mill: millstream.Mill) -> None:
            store = await mill.event_store(self.name, Account, events=EVENTS, **self.how, **how)
            for number in range(count):
                events = [_event(chance) for _ in range(chance.randint(1, 4))]
                about: dict[str, Any] = {}
                if chance.random() < 0.5:
                    about["timestamp"] = BASE + timedelta(minutes=chance.randint(0, 1000))
                if chance.random() < 0.3:
                    about["correlation_id"] = f"c{number}"
                    about["causation_id"] = "start"
                    about["headers"] = {"trace": str(number)}
                await store.append(chance.choice(IDS), events, **about)

        self.broker.run(work)

    def delete(self, id: str) -> None:
        async def work(mill: millstream.Mill) -> None:
            store = await mill.event_store(self.name, Account, events=EVENTS, **self.how)
            await store.delete(id)

        self.broker.run(work)

    def events(self) -> list[StoredEvent]:
        """All events as the SDK reads them."""

        async def work(mill: millstream.Mill) -> list[StoredEvent]:
            store = await mill.event_store(self.name, Account, events=EVENTS, **self.how)
            return [event async for event in store.all()]

        found: list[StoredEvent] = self.broker.run(work)
        return found

    def by_hand(self, id: str, headers: dict[str, str], payload: bytes) -> None:
        """A message that another program stored."""

        async def work(mill: millstream.Mill) -> None:
            block = encode_headers(headers) if headers else b""
            await mill.jetstream.connection.request(f"{self.name}.{id}", payload, block)

        self.broker.run(work)


def _event(chance: random.Random) -> Any:
    amount = chance.randint(0, 1000)
    return chance.choice(
        [
            Opened(f"öwner {amount}"),
            Deposited(amount),
            Deposited(amount, chance.choice(["EUR", "USD"]), ["x", "y"][: chance.randint(0, 2)]),
            Withdrawn(amount),
            Withdrawn(amount, '"quoted"\nnote'),
        ]
    )


def rows(events: Sequence[StoredEvent]) -> list[dict[str, Any]]:
    """The rows that Spark must show for events of the SDK."""
    found = []
    for event in events:
        row: dict[str, Any] = {
            "aggregate": event.id,
            "version": event.version,
            "event": event.name,
            "timestamp": _local(event.timestamp),
            "stored": _local(event.stored),
            "partition": event.partition,
            "offset": event.offset,
            "index": event.index,
            "correlation_id": event.correlation_id,
            "causation_id": event.causation_id,
            "Opened": None,
            "Deposited": None,
            "Withdrawn": None,
        }
        if not event.deleted:
            row[event.name] = asdict(event.data)
        found.append(row)
    return found


def _local(moment: datetime) -> datetime:
    """As Spark's rows have it."""
    return moment.astimezone().replace(tzinfo=None)


def collected(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Spark's rows in the order of the log."""
    plain = [row.asDict(recursive=True) for row in found]
    return sorted(plain, key=lambda row: (row["partition"], row["offset"], row["index"]))
