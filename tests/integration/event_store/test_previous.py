"""Histories that are read from the last append back: each append says where those before it are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from millstream import ANY, NEW, Append, EventStore, Mill
from millstream.errors import Undecodable
from millstream.event_store import format, loading, reading
from millstream.event_store.format import PREVIOUS_HEADER, PREVIOUS_MAX, read_previous
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened
from tests.integration.event_store.kit import publish_raw


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker is asked for messages by their offsets only."""
    monkeypatch.setattr(loading, "FAR_OFFSETS", 0)

    async def refuse(*_: object) -> None:
        raise AssertionError("the broker was asked to search")

    monkeypatch.setattr(reading, "read_subject", refuse)


def no_search_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the broker was asked to search")

    monkeypatch.setattr(reading, "read_messages", refuse)


async def offsets_in(store: EventStore, id: str) -> list[list[int]]:
    """For each append of an aggregate, what it says of those before it."""
    subject = f"{store.topic.handle.partitions[0].prefix or store.name}.{id}"
    found: list[list[int]] = []
    sequence = 1
    while True:
        ask = {"seq": sequence, "next_by_subj": subject}
        message = await store.topic.handle.jetstream.get_message(store.name, ask)
        if message is None:
            return found
        headers = message.headers.decode().splitlines()
        texts = [line.split(": ")[1] for line in headers if line.startswith(PREVIOUS_HEADER)]
        found.append(read_previous("".join(texts)))
        sequence = message.sequence + 1


def latest(offsets: list[int]) -> Iterator[list[int]]:
    for count in range(len(offsets)):
        yield offsets[:count][-PREVIOUS_MAX:][::-1]


async def test_each_append_says_where_those_before_it_are(store: EventStore, mill: Mill) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    offsets = []
    for number in range(PREVIOUS_MAX + 5):
        await store.append(f"b{number}", [Deposited(1)])
        if number % 4 == 0:
            receipt = await other.append("a1", [Deposited(1), Deposited(2)])
        elif number % 4 == 1:
            (receipt,) = await store.append_all([Append("a1", [Deposited(3)], ANY)])
        elif number % 4 == 2:
            receipt = await other.append("a1", [Deposited(4)], (await other.load("a1")).version)
        else:
            query = await store.query("a1")
            receipt = await store.append("a1", [Deposited(5)], query.unchanged)
        offsets.append(receipt.offset)
    assert await offsets_in(store, "a1") == list(latest(offsets))


async def test_no_message_is_searched_for(
    store: EventStore, no_search: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.append("a1", [Opened("ann")], NEW)
    for number in range(2, 36):
        await store.append("b1", [Deposited(1)])
        await store.append("a1", [Deposited(number)], number - 1)
    no_search_at_all(monkeypatch)
    loaded = await store.load("a1")
    assert (loaded.version, loaded.state.balance) == (35, sum(range(2, 36)))
    assert (await store.load("a1", at=20)).state.balance == sum(range(2, 21))
    newest = [event.version async for event in store.events("a1", backward=True, limit=24)]
    assert newest == list(range(35, 11, -1))
    assert (await store.load("b1")).version == 34
    await store.snapshot("a1")
    for number in range(36, 40):
        await store.append("a1", [Deposited(number)], number - 1)
    assert (await store.load("a1")).state.balance == sum(range(2, 40))


async def test_the_newest_events_need_not_wait_for_an_old_one_that_is_damaged(
    store: EventStore, mill: Mill
) -> None:
    await publish_raw(
        mill, "accounts.a1", b'{"Deposited":{"amount":"?"}}', {"Mill-Versions": "1-1"}
    )
    for number in range(2, 30):
        await store.append("a1", [Deposited(number)])
    newest = [event.data.amount async for event in store.events("a1", backward=True, limit=3)]
    assert newest == [29, 28, 27]
    with pytest.raises(Undecodable):
        [event async for event in store.events("a1", backward=True, limit=29)]
    with pytest.raises(Undecodable):
        await store.load("a1")


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_not_where_it_should_be_is_searched_for(
    store: EventStore, mill: Mill, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, with all kinds of wrong offsets: the state is the one that is read forward."""
    monkeypatch.setattr(loading, "FAR_OFFSETS", 0)
    random_ = random.Random(seed)
    ids, versions, last = ["a1", "a2"], {"a1": 0, "a2": 0}, 0
    for number in range(1, 80):
        id = random_.choice(ids)
        count = random_.choice((1, 1, 3))
        first, versions[id] = versions[id] + 1, versions[id] + count
        if random_.random() < 0.6:
            receipt = await store.append(id, [Deposited(number)] * count, first - 1 or NEW)
            last = receipt.offset
        else:
            body = b"\n".join([b'{"Deposited":{"amount":%d}}' % number] * count)
            wrong = random_.choice(
                ["", "0", "-3", "x,1", "999999", f"{last},1,1", f"{last}", f"{last},0", "1" * 30]
            )
            headers = {"Mill-Versions": f"{first}-{versions[id]}", "Mill-Previous": wrong}
            await publish_raw(mill, f"accounts.{id}", body, headers)
            last += 1
        if random_.random() < 0.1:
            await publish_raw(mill, f"accounts.{id}", b"not an append")
            last += 1
        if random_.random() < 0.05:
            await store.snapshot(id)
    for id in ids:
        forward = [event async for event in store.events(id)]
        assert [event.version for event in forward] == list(range(1, versions[id] + 1))
        loaded = await store.load(id)
        assert loaded.state.history == [event.data.amount for event in forward]
        middle = versions[id] // 2
        assert (await store.load(id, at=middle)).state.history == loaded.state.history[:middle]
        for limit in (1, 7, 200):
            back = [event async for event in store.events(id, backward=True, limit=limit)]
            assert back == forward[::-1][:limit]


async def test_large_appends_are_not_read_together(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker would have to hold more than it does for a client that reads slowly."""
    monkeypatch.setattr(format, "LARGE_BYTES", 1000)
    large = Opened("x" * 1001)
    for event in (Opened("ann"), large, Deposited(1), large, large, Deposited(2), Deposited(3)):
        await store.append("a1", [event])
    said = [len(offsets) for offsets in await offsets_in(store, "a1")]
    assert said == [0, 1, 0, 1, 0, 0, 1]
    assert (await store.load("a1")).state.balance == 6
    # In all, only so many bytes are held.
    monkeypatch.setattr(reading, "BACK_BYTES_MAX", 100)
    for number in range(4, 40):
        await store.append("a2", [Deposited(number)])
    monkeypatch.setattr(loading, "FAR_OFFSETS", 0)
    assert (await store.load("a2")).state.history == list(range(4, 40))


async def test_a_history_of_a_deleted_and_new_aggregate_is_its_own(
    store: EventStore, no_search: None
) -> None:
    for _ in range(5):
        await store.append("a1", [Deposited(1)])
    await store.delete("a1", reusable=True)
    for number in range(3):
        await store.append("a1", [Deposited(10)], number or NEW)
    assert (await store.load("a1")).state.balance == 30
