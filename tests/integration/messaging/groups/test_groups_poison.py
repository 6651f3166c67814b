"""Ordered groups and events that cannot be handled: retries, parking, dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from millstream.errors import Unconfirmed
from millstream.messaging.groups.group import GroupEvent
from millstream.messaging.groups.records import PartitionRecord
from millstream.messaging.groups.store import GroupStore
from millstream.messaging.subscriptions.subscription import Reject
from millstream.wire.aio.connection import Connection
from tests.integration.messaging.groups.group_kit import (
    QUICK,
    Kit,
    Recorder,
    check_order,
    numbered,
    until,
    until_position,
)


@pytest.fixture
async def single(connection: Connection) -> AsyncIterator[Kit]:
    """A topic of one partition."""
    async with AsyncExitStack() as stack:
        kit = Kit(connection, 1, stack)
        await kit.declare()
        yield kit


async def test_a_poison_event_parks_its_key_and_nothing_else(single: Kit) -> None:
    record = Recorder()
    record.poison = {"k3"}
    await single.publish(numbered(keys=10, each=20))
    group = await single.member(record)
    await until(lambda: len(record.done) == 9 * 20)
    check_order(record.done, 9, 20)
    await until_position(single, (201, 0))
    dead: list[Any] = list(await single.dead_letters())
    assert [int(event.value) for event in dead] == list(range(20)), "in order"
    assert {event.key for event in dead} == {"k3"}
    causes = [dict(event.all_headers)["Mill-Dead-Cause"] for event in dead]
    assert causes[0] == "ValueError: cannot handle k3"
    assert set(causes[1:]) == {"its key has been parked since offset 4.0"}
    attempts = [dict(event.all_headers)["Mill-Dead-Attempts"] for event in dead]
    assert attempts == ["3"] + ["0"] * 19
    assert [run.number for run in record.runs if run.key == "k3"] == [0, 0, 0], "three attempts"
    (parked,) = await group.parked()
    assert (parked.key, parked.partition, parked.offset, parked.index) == ("k3", 0, 4, 0)


async def test_while_a_key_waits_for_its_next_attempt_the_others_continue(single: Kit) -> None:
    record = Recorder()
    record.poison = {"k0"}
    await single.publish(numbered(keys=5, each=10))
    group = await single.member(record, replace(QUICK, backoff=(30.0,)))
    await until(lambda: len(record.done) == 40)
    assert len(record.runs) == 41, "one failed try, the next in 30 seconds"
    await group.stop()
    info = await single.admin.info("billing")
    assert info.partitions[0].position == (1, 0), "not done, so not passed"
    assert info.lag.messages == 10


async def test_events_finished_after_a_waiting_one_are_not_repeated(single: Kit) -> None:
    record = Recorder()
    record.poison = {"k0"}
    await single.publish(numbered(keys=5, each=10))
    group = await single.member(record, replace(QUICK, backoff=(30.0,)))
    await until(lambda: len(record.done) == 40)
    await group.stop()
    record.poison.clear()
    await single.member(record)
    await until(lambda: len(record.done) == 50)
    check_order(record.done, 5, 10)


async def test_an_event_that_succeeds_at_last_is_followed_by_those_that_waited(single: Kit) -> None:
    await single.publish(numbered(keys=2, each=5))
    attempts: list[tuple[str | None, int, int]] = []

    async def handler(event: GroupEvent) -> None:
        attempts.append((event.key, int(event.value), event.attempt))
        if event.key == "k1" and event.attempt < 3:
            raise ValueError("not yet")

    await single.member(handler)
    await until(lambda: len(attempts) == 5 + 15)
    mine = [(number, attempt) for key, number, attempt in attempts if key == "k1"]
    assert mine == [(number, attempt) for number in range(5) for attempt in (1, 2, 3)]
    assert await single.admin.parked("billing") == []


async def test_an_unparked_key_is_handled_again(single: Kit) -> None:
    record = Recorder()
    record.poison = {"k1"}
    await single.publish(numbered(keys=2, each=3))
    group = await single.member(record)
    await until_position(single, (7, 0))
    record.poison.clear()
    assert await group.unpark("k1")
    assert not await group.unpark("k1")
    await until_unparked(single)
    await single.publish([("k1", 3), ("k0", 3), ("k1", 4)])
    await until(lambda: record.numbers("k1") == [3, 4])
    assert record.numbers("k0") == [0, 1, 2, 3]
    assert len(await single.dead_letters()) == 3


async def until_unparked(kit: Kit) -> None:
    """The owner has written its record since: it knows."""
    position = (await kit.admin.info("billing")).partitions[0].position
    await kit.publish([("other", 0)])
    await until_position(kit, (position[0] + 1, 0))
    assert await kit.admin.parked("billing") == []


async def test_a_parked_key_stays_parked_for_the_next_owner(single: Kit) -> None:
    record = Recorder()
    record.poison = {"k1"}
    await single.publish(numbered(keys=2, each=2))
    group = await single.member(record)
    await until_position(single, (5, 0))
    await group.stop()
    record.poison.clear()
    await single.publish([("k1", 2), ("k0", 2)])
    await single.member(record)
    await until(lambda: record.numbers("k0") == [0, 1, 2])
    await until_position(single, (7, 0))
    assert record.numbers("k1") == []
    assert [int(event.value) for event in await single.dead_letters()] == [0, 1, 2]


async def test_reject_dead_letters_one_event_and_its_key_continues(single: Kit) -> None:
    seen: list[int] = []

    async def handler(event: GroupEvent) -> None:
        seen.append(int(event.value))
        if event.value == b"1":
            raise Reject("not for us")

    await single.publish([("a", number) for number in range(4)])
    await single.member(handler)
    await until(lambda: seen == [0, 1, 2, 3])
    await until_position(single, (5, 0))
    (dead,) = await single.dead_letters()
    headers = dict(dead.all_headers)  # type: ignore[attr-defined]
    assert (headers["Mill-Dead-Cause"], headers["Mill-Dead-Attempts"]) == ("not for us", "1")
    assert await single.admin.parked("billing") == []


async def test_a_poison_event_without_a_key_goes_alone(single: Kit) -> None:
    done: list[int] = []

    async def handler(event: GroupEvent) -> None:
        if event.value == b"1":
            raise ValueError("broken")
        done.append(int(event.value))

    await single.publish([(None, number) for number in range(5)])
    await single.member(handler)
    await until_position(single, (6, 0))
    assert sorted(done) == [0, 2, 3, 4]
    assert [int(event.value) for event in await single.dead_letters()] == [1]
    assert await single.admin.parked("billing") == []


async def test_a_failing_key_with_too_many_waiting_events_is_parked_early(single: Kit) -> None:
    record = Recorder()
    record.poison = {"hot"}
    await single.publish([("hot", number) for number in range(30)] + [("k", 0)])
    settings = replace(QUICK, backoff=(30.0,), key_buffer=10)
    await single.member(record, settings)
    await until_position(single, (32, 0))
    assert [run.number for run in record.runs if run.key == "hot"] == [0], "one try, not three"
    assert [int(event.value) for event in await single.dead_letters()] == list(range(30))


async def test_failing_keys_that_fill_the_buffer_are_parked_early(single: Kit) -> None:
    """The buffer holds 20 events; four failing keys would block the fifth for 30 seconds."""
    record = Recorder()
    record.poison = {"k0", "k1", "k2", "k3"}
    await single.publish(numbered(keys=5, each=10))
    settings = replace(QUICK, backoff=(30.0,), buffer=20, key_buffer=20)
    await single.member(record, settings)
    await until(lambda: record.numbers("k4") == list(range(10)))
    assert 1 <= len(await single.admin.parked("billing")) <= 4


async def test_when_too_many_keys_are_parked_no_more_events_are_dead_lettered(single: Kit) -> None:
    """Then it is the handler that is broken, not the events."""
    record = Recorder()
    record.poison = {"k0", "k1", "k2"}
    await single.publish(numbered(keys=4, each=2))
    settings = replace(QUICK, max_parked=2, max_attempts=2, concurrency=1)
    await single.member(record, settings)
    await until(lambda: sum(run.key == "k2" for run in record.runs) > 5)
    assert {parked.key for parked in await single.admin.parked("billing")} == {"k0", "k1"}
    record.poison.clear()
    await until(lambda: record.numbers("k2") == record.numbers("k3") == [0, 1])


async def test_a_takeover_whose_answer_was_lost_still_knows_which_event_kills(
    single: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third owner in a row that dies in the same event is the last one."""
    store = GroupStore(single.jetstream, single.publisher, "orders", "billing")
    await store.declare(1)
    dead = PartitionRecord(
        position=(1, 0), owner="gone", epoch=4, deaths=3, trying=(1, 0), strikes=1
    )
    await store.put_partition(0, dead, 0, 20.0)
    await single.publish([("a", 0), ("b", 0)])
    stored = GroupStore.put_partition
    unanswered: list[PartitionRecord] = []

    async def put(store: GroupStore, number: int, record: PartitionRecord, *rest: Any) -> int:
        revision = await stored(store, number, record, *rest)
        if not unanswered:
            unanswered.append(record)
            raise Unconfirmed("the answer was lost")
        return revision

    monkeypatch.setattr(GroupStore, "put_partition", put)
    record = Recorder()
    await single.member(record)
    await until_position(single, (3, 0))
    assert record.started == ["b"]
    assert [event.key for event in await single.dead_letters()] == ["a"]
