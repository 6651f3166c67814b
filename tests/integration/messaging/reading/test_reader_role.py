"""A user who may only look reads topics all the same, and can change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millstream import connect
from millstream.broker import Role, User
from millstream.errors import PermissionDenied
from millstream.messaging import Client, NewEvent, Start
from millstream.settings import Secret
from millstream.testing import running_broker

USERS = (
    User("boss", Secret("b"), role=Role.ADMIN),
    User("eyes", Secret("e"), role=Role.READER),
)


@pytest.fixture
async def both() -> AsyncIterator[tuple[Client, Client]]:
    """An admin and a reader of the same account."""
    async with running_broker(users=USERS) as broker:
        url = broker.url
        async with (
            connect(url, user="boss", password="b") as admin,
            connect(url, user="eyes", password="e") as reader,
        ):
            yield admin, reader


async def test_a_reader_reads_ranges_keys_and_what_comes(both: tuple[Client, Client]) -> None:
    admin, reader = both
    topic = await admin.create_topic("log", partitions=2)
    await topic.publish_many(NewEvent(b"%d" % n, f"k{n % 3}") for n in range(2500))
    seen = await reader.topic("log")
    values = [event.value async for event in seen.read()]
    assert sorted(map(int, values)) == list(range(2500))
    of_one = [int(event.value) async for event in seen.read(keys=["k1"])]
    assert of_one == list(range(1, 2500, 3))
    two = [int(event.value) async for event in seen.read(keys=["k1", "k2"])]
    assert sorted(two) == sorted(n for n in range(2500) if n % 3)
    last = [e.offset async for e in seen.read(start=Start.at_offset(5), end=8, partitions=[1])]
    assert last == [5, 6, 7]

    async def next_one() -> bytes:
        async for event in seen.read(start=Start.NEW, follow=True):
            return bytes(event.value)
        raise AssertionError

    waiting = asyncio.create_task(next_one())
    while not waiting.done():
        await topic.publish(b"fresh", "k0")
        await asyncio.sleep(0.05)
    assert waiting.result() == b"fresh"


async def test_a_reader_cannot_publish_or_subscribe(both: tuple[Client, Client]) -> None:
    admin, reader = both
    await admin.create_topic("log")
    seen = await reader.topic("log")
    with pytest.raises(PermissionDenied, match=r"publish to 'log\._'"):
        await seen.publish(b"no")
    with pytest.raises(PermissionDenied):
        await seen.subscribe("s")
