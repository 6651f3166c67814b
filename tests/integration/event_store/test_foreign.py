"""Messages of other programs on the subjects of a store: left out, and in nobody's way."""

from __future__ import annotations

import pytest

from millstream import NEW, EventStore, Mill
from millstream.errors import AggregateNotFound, ConfigError, Undecodable
from tests.integration.event_store.bank import Account, Deposited, Opened
from tests.integration.event_store.kit import publish_raw


@pytest.fixture
async def mixed(store: EventStore, mill: Mill) -> EventStore:
    """A store with messages that are not appends: alone, at the end of an aggregate, and within."""
    await store.append("a1", [Opened("ann")], NEW)
    await publish_raw(mill, "accounts.a1", b"junk")
    await store.append("a1", [Deposited(5)])
    await publish_raw(mill, "accounts.a2", b"junk", {"Source": "elsewhere"})
    await store.append("a3", [Deposited(1)], NEW)
    await publish_raw(mill, "accounts.a3", b'{"Deposited":{"amount":9}}')
    return store


async def test_readers_leave_them_out(mixed: EventStore) -> None:
    seen = [(e.id, e.version) async for e in mixed.all()]
    assert seen == [("a1", 1), ("a1", 2), ("a3", 1)]
    query = await mixed.query("*")
    assert [(e.id, e.version) for e in query.events] == seen
    assert [e.version async for e in mixed.events("a1")] == [1, 2]
    assert (await mixed.load("a1")).state == Account("ann", 5, [5])
    assert (await mixed.load("a3")).state.balance == 1
    with pytest.raises(AggregateNotFound):
        await mixed.load("a2")


async def test_appends_go_on_behind_them(mixed: EventStore) -> None:
    assert (await mixed.append("a2", [Opened("ben")])).version == 1
    assert (await mixed.append("a3", [Deposited(2)], 1)).version == 2
    async with mixed.change("a3") as account:
        account.deposit(3)
    assert (await mixed.load("a3")).state.history == [1, 2, 3]


async def test_a_new_aggregate_begins_behind_them(mixed: EventStore) -> None:
    assert (await mixed.append("a2", [Opened("ben")], NEW)).version == 1
    assert (await mixed.load("a2")).state == Account("ben")


async def test_an_aggregate_with_them_can_be_ended(mixed: EventStore) -> None:
    await mixed.delete("a2")  # nothing else is there
    await mixed.archive("a1")
    await mixed.delete("a3", reusable=True)
    assert (await mixed.load("a1")).state == Account("ann", 5, [5])
    for id in ("a2", "a3"):
        assert (await mixed.append(id, [Opened("ben")], NEW)).version == 1
    assert (await mixed.topic.info()).messages == 3  # and no junk


async def test_a_damaged_append_is_reported_with_its_offset(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Deposited(1)])
    await publish_raw(mill, "accounts.a1", b'{"Deposited":{"amount":2}}', {"Mill-Versions": "2-3"})
    with pytest.raises(Undecodable, match="1 events and says versions 2 to 3") as damaged:
        await store.load("a1")
    assert (damaged.value.topic, damaged.value.offset) == ("accounts", 2)


async def test_appends_that_cannot_be_decoded_can_be_left_out(
    store: EventStore, mill: Mill
) -> None:
    await store.append("a1", [Deposited(1)])
    two = b'{"Deposited":{"amount":2}}\n{"Deposited":{"amount":"?"}}'
    await publish_raw(mill, "accounts.a1", two, {"Mill-Versions": "2-3"})
    await publish_raw(mill, "accounts.a1", b"{", {"Mill-Versions": "4-4"})
    five = b'{"Deposited":{"amount":5}}'
    await publish_raw(mill, "accounts.a1", five, {"Mill-Versions": "5-5", "Mill-Previous": "3,1,1"})
    left_out: list[Undecodable] = []
    whole = [event.version async for event in store.all(undecodable=left_out.append)]
    assert whole == [1, 5]  # the append of two as a whole
    assert [(error.offset, error.index) for error in left_out] == [(2, 1), (3, 0)]
    assert [e.version async for e in store.events("a1", undecodable="drop")] == [1, 5]
    newest = store.events("a1", backward=True, limit=2, undecodable="drop")
    assert [event.version async for event in newest] == [5, 1]
    await publish_raw(mill, "accounts.a1", b"{", {"Mill-Versions": "6-6"})
    newest = store.events("a1", backward=True, limit=2, undecodable="drop")
    assert [event.version async for event in newest] == [5, 1]
    with pytest.raises(Undecodable):
        await store.load("a1")  # a state without them would be another one
    with pytest.raises(ConfigError, match="choose fail, drop"):
        [event async for event in store.all(undecodable="skip")]  # type: ignore[arg-type]
