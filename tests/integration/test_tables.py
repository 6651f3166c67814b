"""Tables on a real broker: conditional writes, deletions, watching, and nothing missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

import millstream
from millstream import Mill, TopicSettings
from millstream.broker import Broker
from millstream.deadline import Deadline
from millstream.errors import ConfigError, MillstreamError, WrongSequence
from millstream.settings import Reconnect
from millstream.tables import Change, Table
from millstream.testing import running_broker


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as mill:
        yield mill


@pytest.fixture(params=[1, 3], ids=["one partition", "three partitions"])
async def table(mill: Mill, request: pytest.FixtureRequest) -> Table:
    return await mill.create_table("stock", partitions=request.param)


# -- values -------------------------------------------------------------------------------


async def test_a_key_has_the_value_that_was_put_last(table: Table) -> None:
    first = await table.put("apples", b"3")
    second = await table.put("apples", b"4")
    await table.put("pears", b"1")
    entry = await table.get("apples")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("apples", b"4", second)
    assert second > first
    assert await table.get("plums") is None
    assert await table.as_dict() == {"apples": b"4", "pears": b"1"}
    assert [entry.key async for entry in table.entries(["pears", "plums", "pears"])] == ["pears"]


async def test_a_deleted_key_is_gone_for_every_reader(mill: Mill, table: Table) -> None:
    await table.put("apples", b"3")
    gone = await table.delete("apples")
    assert await table.get("apples") is None
    assert await table.revision("apples") == gone
    assert await table.as_dict() == {}
    again = await mill.table("stock")
    assert await again.as_dict() == {}
    with pytest.raises(ConfigError, match="None means deleted"):
        await table.put("apples", None)


async def test_many_keys_are_put_together(table: Table) -> None:
    revisions = await table.put_many({f"k{number}": b"%d" % number for number in range(100)})
    assert len(revisions) == 100
    assert await table.as_dict() == {f"k{number}": b"%d" % number for number in range(100)}
    entry = await table.get("k42")
    assert entry is not None
    assert entry.revision == revisions["k42"]


async def test_keys_may_be_any_text(table: Table) -> None:
    keys = ["", "a.b", "*", "_x", "schlüssel", "with space", ">", "topic/orders"]
    for key in keys:
        await table.put(key, key.encode())
    assert await table.as_dict() == {key: key.encode() for key in keys}


async def test_only_a_topic_with_a_history_is_a_table(mill: Mill) -> None:
    await mill.create_topic("log")
    with pytest.raises(ConfigError, match="not a table"):
        await mill.table("log")
    with pytest.raises(ConfigError, match="set a history"):
        await mill.create_table("other", TopicSettings(partitions=2))
    table = await mill.create_table("stock")
    with pytest.raises(ConfigError, match="cannot tell keys apart"):
        table.topic.producer()


# -- conditional writes -------------------------------------------------------------------


async def test_a_conditional_write_needs_the_latest_revision(table: Table) -> None:
    first = await table.put("k", b"1", revision=0)
    with pytest.raises(WrongSequence):
        await table.put("k", b"2", revision=0)
    second = await table.put("k", b"2", revision=first)
    with pytest.raises(WrongSequence):
        await table.delete("k", revision=first)
    third = await table.delete("k", revision=second)
    with pytest.raises(WrongSequence):
        await table.put("k", b"4", revision=0)  # it had a value once
    await table.put("k", b"4", revision=third)


async def test_of_many_clients_that_create_a_key_one_succeeds(
    mill: Mill, millstream_url: str
) -> None:
    await mill.create_table("locks")
    async with millstream.connect(millstream_url, request_timeout=30) as other:
        tables = [await mill.table("locks"), await other.table("locks")]

        async def take(number: int) -> int | None:
            try:
                await tables[number % 2].put("lock", b"%d" % number, revision=0)
            except WrongSequence:
                return None
            return number

        results = await asyncio.gather(*(take(number) for number in range(40)))
    [winner] = [number for number in results if number is not None]
    entry = await tables[0].get("lock")
    assert entry is not None
    assert int(entry.value) == winner


async def increment(table: Table, key: str, links: list[tuple[int, int]]) -> None:
    """Add one while others do the same; record the step from revision to revision."""
    while True:
        entry = await table.get(key)
        before, number = (0, 0) if entry is None else (entry.revision, int(entry.value))
        try:
            after = await table.put(key, b"%d" % (number + 1), revision=before)
        except WrongSequence:
            continue
        links.append((before, after))
        return


def check_chain(links: list[tuple[int, int]]) -> None:
    """Every successful write directly follows another one: the writes have one order."""
    assert len({before for before, _ in links}) == len(links)
    follows = dict(links)
    revision = 0
    for _ in links:
        revision = follows[revision]


async def test_concurrent_increments_are_all_counted(mill: Mill, millstream_url: str) -> None:
    await mill.create_table("counters", partitions=2)
    links: list[tuple[int, int]] = []
    async with (
        millstream.connect(millstream_url, request_timeout=30) as second,
        millstream.connect(millstream_url, request_timeout=30) as third,
    ):
        tables = [await one.table("counters") for one in (mill, second, third)]

        async def worker(table: Table) -> None:
            for _ in range(15):
                await increment(table, "hits", links)

        await asyncio.gather(*(worker(table) for table in tables for _ in range(2)))
    entry = await tables[0].get("hits")
    assert entry is not None
    assert int(entry.value) == 90 == len(links)
    check_chain(links)


async def test_a_killed_broker_breaks_no_promise_of_a_conditional_write() -> None:
    """What was acknowledged is counted once; what was not is counted once or not at all."""
    with running_broker() as broker:
        quick = Reconnect(wait=0.02, wait_max=0.1)
        async with millstream.connect(broker.url, reconnect=quick) as mill:
            table = await mill.create_table("counters")
            links: list[tuple[int, int]] = []
            unknown = 0
            stop = asyncio.Event()

            async def worker() -> None:
                nonlocal unknown
                while not stop.is_set():
                    try:
                        await increment(table, "hits", links)
                    except MillstreamError:
                        unknown += 1

            working = [asyncio.create_task(worker()) for _ in range(3)]
            for goal in (30, 60):
                deadline = Deadline(60)
                while len(links) < goal:
                    assert not deadline.passed
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(_kill_and_restart, broker)
            stop.set()
            await asyncio.gather(*working)
            entry = await table.get("hits")
            assert entry is not None
            assert len(links) <= int(entry.value) <= len(links) + unknown + len(working) * 2
            assert len({before for before, _ in links}) == len(links)


def _kill_and_restart(broker: Broker) -> None:
    broker.kill()
    broker.start()


# -- reading while it is written ----------------------------------------------------------


async def test_a_key_that_exists_the_whole_time_is_never_missing(
    mill: Mill, table: Table, millstream_url: str
) -> None:
    """Also one whose value is replaced again and again before it is read."""
    keys = [f"k{number}" for number in range(60)]
    await table.put_many(dict.fromkeys(keys, b"0"))
    stop = asyncio.Event()
    async with millstream.connect(millstream_url, request_timeout=30) as other:
        busy = await other.table("stock")

        async def write(mine: list[str]) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                await busy.put_many(dict.fromkeys(mine, b"%d" % number))

        writing = [asyncio.create_task(write(keys[start::3])) for start in range(3)]
        try:
            for _ in range(15):
                found = [entry.key async for entry in table.entries()]
                assert sorted(found) == sorted(keys)
        finally:
            stop.set()
            await asyncio.gather(*writing)


async def test_watching_gives_the_current_values_and_then_every_change(
    mill: Mill, table: Table
) -> None:
    await table.put("a", b"1")
    await table.put("b", b"1")
    await table.delete("b")
    seen: list[Change] = []

    async def watch() -> None:
        async for change in table.changes():
            seen.append(change)

    watching = asyncio.create_task(watch())
    await _until(lambda: len(seen) == 2)
    assert {change.key: change.value for change in seen} == {"a": b"1", "b": None}
    written: list[int] = []
    for number in range(2, 30):
        written.append(await table.put("a", b"%d" % number))
        if number % 10 == 0:
            written.append(await table.delete("c"))
        # A value that is replaced before the broker has sent it is skipped.
        await _until(lambda: len(seen) == 2 + len(written))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    values = [change.value for change in seen if change.key == "a"]
    assert values == [b"%d" % number for number in range(1, 30)]
    revisions = [change.revision for change in seen if change.key == "a"]
    assert revisions == sorted(revisions)
    assert [change.deleted for change in seen if change.key == "c"] == [True, True]


async def test_watching_can_be_for_some_keys(table: Table) -> None:
    for key in ("a", "b", "c"):
        await table.put(key, b"1")
    found = []
    async for change in table.changes(["a", "c"]):
        found.append(change.key)
        if len(found) == 2:
            await table.put("b", b"2")
            await table.put("c", b"2")
        if len(found) == 3:
            break
    assert sorted(found[:2]) == ["a", "c"]
    assert found[2] == "c"


async def test_an_expired_key_is_seen_as_deleted(mill: Mill) -> None:
    table = await mill.create_table("sessions", max_age="1s", marker_ttl="1m")
    await table.put("ada", b"1")
    async for change in table.changes():
        if change.deleted:
            assert change.key == "ada"
            break
    assert await table.get("ada") is None
    assert await table.as_dict() == {}


async def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.passed
        await asyncio.sleep(0.005)
