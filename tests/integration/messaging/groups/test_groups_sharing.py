"""Partitions that move between the members of a group are always somebody's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from millstream.deadline import Deadline
from millstream.messaging.groups.holding import Holding
from millstream.messaging.topics.choices import Retention
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.interest_hold import InterestHold
from tests.integration.messaging.groups.group_kit import Kit, Recorder, until, until_settled

KEYS = [f"k{n}" for n in range(20)]


@pytest.fixture
async def kit(connection: Connection) -> AsyncIterator[Kit]:
    """A topic of two partitions that keeps events while a group has not handled them."""
    async with AsyncExitStack() as stack:
        kit = Kit(connection, 2, stack)
        await kit.declare(retention=Retention.INTEREST)
        yield kit


async def test_a_commit_during_a_release_does_not_make_the_partition_ours_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by `groups`, seed 912010: nobody took such a partition any more."""
    record = Recorder()
    first = await kit.member(record)
    await until_settled([first], [2])
    rounds, owners = 0, list[str]()
    commit, move = Holding.commit, InterestHold.move

    async def counted(holding: Holding, release: bool = False) -> bool:
        nonlocal rounds
        done = await commit(holding, release)
        rounds += not release
        return done

    async def slow(hold: InterestHold, position: int) -> None:
        if first._member is not None and asyncio.current_task() in first._member._releases:
            seen = rounds
            await until(lambda: rounds >= seen + 4, what="two rounds of commits, or more")
            stored = await first._store.partitions()
            owners.extend(record.record.owner for record in stored.values())
        await move(hold, position)

    monkeypatch.setattr(Holding, "commit", counted)
    monkeypatch.setattr(InterestHold, "move", slow)
    second = await kit.member(record)
    await until_settled([first, second], [1, 1])
    # While it was released, one was nobody's or already the second's.
    assert owners.count(first.member_id) == 1
    await kit.publish((key, 0) for key in KEYS)
    await until(lambda: sorted(run.key for run in record.done) == sorted(KEYS))


async def test_a_partition_that_a_member_owns_without_knowing_it_is_freed(kit: Kit) -> None:
    record = Recorder()
    first = await kit.member(record)
    await until_settled([first], [2])
    second = await kit.member(record)
    await until_settled([first, second], [1, 1])
    # As if the first had taken that of the second too, and the answer had been lost.
    [number] = second.partitions
    stored = (await first._store.partitions())[number]
    taken = msgspec.structs.replace(
        stored.record, owner=first.member_id, epoch=stored.record.epoch + 1
    )
    revision = await first._store.put_partition(number, taken, stored.revision, 5.0)
    first._store.nudge()
    deadline = Deadline(20)
    while (found := (await first._store.partitions())[number]).record.owner != second.member_id:
        assert not deadline.passed, f"still owned by {found.record.owner!r}"
        await asyncio.sleep(0.01)
    assert found.revision > revision
    await kit.publish((key, 0) for key in KEYS)
    await until(lambda: {run.key for run in record.done} == set(KEYS))
