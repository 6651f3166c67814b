"""Erasing a person: in events, snapshots, archives and copies; by every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from millstream import NEW, Mill, NamedEvent, Personal
from millstream.errors import ConfigError


@dataclass(frozen=True)
class Registered:
    name: Annotated[str, Personal(erased="(erased)")]
    city: str


@dataclass(frozen=True)
class Invited:
    guest: str
    email: Annotated[str | None, Personal(of="guest")]


@dataclass(frozen=True)
class Plain:
    name: str
    city: str


@dataclass
class Customer:
    name: str = ""
    city: str = ""
    invited: str = ""

    def apply(self, event: Any) -> None:
        match event:
            case Registered():
                self.name, self.city = event.name, event.city
            case Invited():
                self.invited += f"<{event.email}>"


EVENTS = [Registered, Invited]


async def stored_bytes(mill: Mill, topic: str) -> bytes:
    found = [event async for event in (await mill.topic(topic, bytes)).read()]
    return b"\n".join(event.value for event in found if event.value is not None)


async def test_an_erased_person_is_unreadable_everywhere(mill: Mill) -> None:
    store = await mill.event_store("customers", Customer, events=EVENTS)
    await store.append("c1", [Registered("Ann Smith", "Bath")], NEW)
    await store.append("c1", [Invited("c2", "ben@example.org"), Invited("c3", None)])
    await store.append("c2", [Registered("Ben Jones", "York")], NEW)
    await store.snapshot("c1")
    await mill.create_topic("copy", mirror="customers")
    assert (await store.load("c1")).state == Customer(
        "Ann Smith", "Bath", "<ben@example.org><None>"
    )
    for topic in ("customers", "customers-snapshots"):
        found = await stored_bytes(mill, topic)
        assert b"Ann Smith" not in found
        assert b"ben@example.org" not in found
    other = await mill.event_store("customers", Customer, events=EVENTS)
    assert await store.erase("c2")
    assert not await store.erase("c2")
    for some in (store, other):
        assert (await some.load("c1")).state == Customer("Ann Smith", "Bath", "<><None>")
        assert (await some.load("c2")).state == Customer("(erased)", "York", "")
    async for event in (await mill.topic("copy", bytes)).read(follow=True):
        assert b"mill:enc:1:" in event.value
        break
    await store.append("c2", [Registered("Ben Again", "York")])  # with a new key
    assert (await store.load("c2")).state.name == "Ben Again"


async def test_a_snapshot_with_an_erased_person_is_made_again(mill: Mill) -> None:
    store = await mill.event_store("customers", Customer, events=EVENTS, snapshot_every=2)
    await store.append("c1", [Registered("Ann", "Bath"), Invited("c2", "ben@example.org")], NEW)
    await store.load("c1")  # stores a snapshot
    table = await mill.table("customers-snapshots")
    assert await table.get("c1") is not None
    await store.erase("c1")
    state = (await store.load("c1")).state
    assert state == Customer("(erased)", "Bath", "<ben@example.org>")
    assert (await store.load("c1")).state == state  # from the new snapshot


async def test_without_its_class_a_personal_field_is_revealed_too(mill: Mill) -> None:
    store = await mill.event_store("customers", Customer, events=EVENTS)
    await store.append("c1", [Registered("Ann", "Bath")], NEW)
    reader = await mill.event_store("customers")
    assert [e.data async for e in reader.events("c1")] == [{"name": "Ann", "city": "Bath"}]
    await reader.erase("c1")
    erased = {"name": "(erased)", "city": "Bath"}
    assert [e.data async for e in reader.events("c1")] == [erased]
    assert [e.data async for e in reader.all()] == [erased]


async def test_without_its_class_a_personal_field_is_sealed_too(mill: Mill) -> None:
    await mill.event_store("customers", Customer, events=EVENTS)
    writer = await mill.event_store("customers")
    await writer.append("c1", [NamedEvent("Registered", {"name": "Ann Smith", "city": "Bath"})])
    await writer.append("c1", [NamedEvent("Invited", {"guest": "c2", "email": "b@example.org"})])
    found = await stored_bytes(mill, "customers")
    assert b"Ann Smith" not in found
    assert b"b@example.org" not in found
    store = await mill.event_store("customers", Customer, events=EVENTS)
    assert (await store.load("c1")).state == Customer("Ann Smith", "Bath", "<b@example.org>")
    # A program with a class without the mark does not remove it for others.
    await mill.event_store("customers", events={"Registered": Plain})
    again = await mill.event_store("customers")
    await again.append("c2", [NamedEvent("Registered", {"name": "Ben Jones", "city": "York"})])
    assert b"Ben Jones" not in await stored_bytes(mill, "customers")


async def test_archived_events_are_erased_too(mill: Mill) -> None:
    store = await mill.event_store("customers", Customer, events=EVENTS)
    await store.append("c1", [Registered("Ann", "Bath")], NEW)
    await store.archive("c1")
    assert (await store.load("c1")).state.name == "Ann"
    await store.erase("c1")
    assert (await store.load("c1")).state.name == "(erased)"


async def test_only_text_can_be_personal(mill: Mill) -> None:
    @dataclass
    class Aged:
        years: Annotated[int, Personal()]

    with pytest.raises(ConfigError, match=r"Aged\.years: only text can be personal"):
        await mill.event_store("customers", Customer, events=[Aged])
