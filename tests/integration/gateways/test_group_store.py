"""Groups and offsets in a table of a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import millstream
from millstream import Mill
from millstream.errors import DataLoss, MillstreamError
from millstream.gateways.kafka.group_members import StoredGroup, StoredMember
from millstream.gateways.kafka.group_store import (
    GROUPS_TABLE,
    ROW_SIZE,
    Committed,
    GroupTable,
    GroupTakenOver,
    TopicPartition,
)
from millstream.tables import Table

ID = b"i" * 16
RECORD = StoredGroup(
    3,
    "consumer",
    "range",
    "m1",
    True,
    [StoredMember("m1", "c", "/h", 10.0, 60.0, [("range", b"\0")], b"all", "static")],
)


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as mill:
        yield mill


@pytest.fixture
async def store(mill: Mill) -> GroupTable:
    return await opened(mill)


async def opened(mill: Mill) -> GroupTable:
    """A store as another process has it."""
    store = GroupTable(mill)
    await store.start()
    return store


async def messages(mill: Mill) -> int:
    """How many values were ever written."""
    topic = await mill.topic(GROUPS_TABLE)
    info = await topic.info()
    return max(part.last_offset for part in info.partitions)


def part(number: int, topic: str = "t") -> TopicPartition:
    return TopicPartition(topic, number)


async def test_what_was_kept_is_loaded_by_another_process(mill: Mill, store: GroupTable) -> None:
    name = "a group/with. odd = characters 群"
    kept = store.new(name)
    offset = Committed(42, 7, "a note", 1_750_000_000_000, ID)
    await kept.put(RECORD)
    await kept.commit({part(0): offset, part(1): offset._replace(offset=1)})
    await store.new("other").commit({part(0): Committed(9)})
    found = await (await opened(mill)).load_all()
    assert set(found) == {name, "other"}
    assert found[name].record == RECORD
    assert found[name].offsets == {part(0): offset, part(1): offset._replace(offset=1)}
    assert found["other"].offsets == {part(0): Committed(9)}
    assert found["other"].record == StoredGroup()
    one = await store.load(name)
    assert (one.record, one.offsets) == (RECORD, found[name].offsets)
    assert (await store.load("nobody")).offsets == {}


async def test_offsets_are_seen_once_they_are_stored(store: GroupTable) -> None:
    kept = store.new("g")
    waiting = kept.commit({part(0): Committed(1)})
    assert kept.offsets == {}
    await waiting
    assert kept.offsets == {part(0): Committed(1)}
    await kept.commit({part(0): None, part(1): Committed(2)})
    assert kept.offsets == {part(1): Committed(2)}
    assert (await store.load("g")).offsets == {part(1): Committed(2)}


async def test_commits_at_the_same_time_are_few_writes(mill: Mill, store: GroupTable) -> None:
    kept = store.new("g")
    await kept.commit({part(0): Committed(0)})
    before = await messages(mill)
    await asyncio.gather(
        *(kept.commit({part(n % 10): Committed(n)}) for n in range(500)),
        kept.put(RECORD),
    )
    assert await messages(mill) - before <= 4
    assert (await store.load("g")).offsets == {part(n): Committed(490 + n) for n in range(10)}


async def test_many_offsets_are_in_several_rows(mill: Mill, store: GroupTable) -> None:
    kept = store.new("g")
    count = 3 * ROW_SIZE + 5
    await kept.commit({part(n): Committed(n) for n in range(count)})
    assert await messages(mill) == 4
    await kept.commit({part(n): None for n in range(0, count, 2)})
    again = {part(n, "other"): Committed(n) for n in range(0, count, 2)}
    await kept.commit(again)
    assert await messages(mill) == 4 + 4 + 4  # what was freed is used again
    rest = {part(n): Committed(n) for n in range(1, count, 2)}
    assert (await store.load("g")).offsets == rest | again
    (found,) = (await (await opened(mill)).load_all()).values()
    assert found.offsets == rest | again


async def test_a_group_that_is_deleted_is_gone_and_can_be_made_again(
    mill: Mill, store: GroupTable
) -> None:
    kept = store.new("g")
    await kept.put(RECORD)
    await kept.commit({part(n): Committed(n) for n in range(2 * ROW_SIZE)})
    await kept.delete()
    assert not kept.is_stored
    assert await store.load_all() == {}
    again = store.new("g")
    await again.commit({part(0): Committed(5)})
    await again.put(RECORD)
    found = (await (await opened(mill)).load_all())["g"]
    assert (found.record, found.offsets) == (RECORD, {part(0): Committed(5)})


async def test_a_process_that_was_overtaken_overwrites_nothing(
    mill: Mill, store: GroupTable
) -> None:
    stale = store.new("g")
    await stale.put(RECORD)
    await stale.commit({part(0): Committed(1)})
    fresh = await (await opened(mill)).load("g")
    await fresh.commit({part(0): Committed(2)})
    await fresh.put(StoredGroup(4))
    with pytest.raises(GroupTakenOver):
        await stale.commit({part(0): Committed(1)})
    with pytest.raises(GroupTakenOver):
        await stale.put(RECORD)
    with pytest.raises(GroupTakenOver):
        await stale.delete()
    with pytest.raises(GroupTakenOver):
        await store.new("g").commit({part(0): Committed(7)})
    found = await store.load("g")
    assert (found.record, found.offsets) == (StoredGroup(4), {part(0): Committed(2)})
    await found.commit({part(0): Committed(3)})


async def test_a_write_of_which_it_is_unknown_if_it_was_stored_is_found_out(
    store: GroupTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.new("g")
    await kept.commit({part(0): Committed(1)})
    put = Table.put

    async def lost_answer(table: Table, key: str, value: bytes, *, revision: int) -> int:
        await put(table, key, value, revision=revision)
        raise MillstreamError("the answer is lost")

    async def lost_request(table: Table, key: str, value: bytes, *, revision: int) -> int:
        raise MillstreamError("the request is lost")

    for lost in (lost_answer, lost_request):
        monkeypatch.setattr(Table, "put", lost)
        with pytest.raises(MillstreamError, match="is lost"):
            await kept.commit({part(0): Committed(2)})
        assert kept.offsets[part(0)] == Committed(1)
        monkeypatch.setattr(Table, "put", put)
        await kept.commit({part(1): Committed(3)})
        assert (await store.load("g")).offsets == kept.offsets
        assert kept.offsets == {part(0): Committed(1), part(1): Committed(3)}


async def test_a_request_that_arrives_late_does_not_overtake_its_own_process(
    store: GroupTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.new("g")
    await kept.commit({part(0): Committed(1)})
    put = Table.put
    late: list[bytes] = []

    async def slow(table: Table, key: str, value: bytes, *, revision: int) -> int:
        if late:  # what was given up arrives just before
            await put(table, key, late.pop(), revision=revision)
            monkeypatch.setattr(Table, "put", put)
            return await put(table, key, value, revision=revision)
        late.append(value)
        raise MillstreamError("no answer in time")

    monkeypatch.setattr(Table, "put", slow)
    with pytest.raises(MillstreamError, match="in time"):
        await kept.commit({part(0): Committed(2)})
    await kept.commit({part(0): Committed(3)})
    assert (await store.load("g")).offsets == {part(0): Committed(3)}


async def test_those_who_wait_may_go_away(store: GroupTable) -> None:
    kept = store.new("g")
    waiting = asyncio.ensure_future(kept.commit({part(0): Committed(1)}))
    await asyncio.sleep(0)
    waiting.cancel()
    await kept.drain()
    assert kept.offsets == {part(0): Committed(1)}


async def test_a_damaged_value_is_named(mill: Mill, store: GroupTable) -> None:
    table = await mill.table(GROUPS_TABLE)
    await table.put("o/0/g", b"\xff?")
    with pytest.raises(DataLoss, match="'o/0/g' of table 'kafka-groups'"):
        await store.load_all()
    await table.put("o/0/g", b"\x90")
    await table.put("something", b"else")
    await table.put("g/g", b"\xff?")
    with pytest.raises(DataLoss, match="'g/g'"):
        await store.load_all()
