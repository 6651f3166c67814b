"""A user of the reader role reads topics and can change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millstream import connect
from millstream.broker import Role, User
from millstream.errors import PermissionDenied
from millstream.messaging import Client, NewEvent, ReadPlan, Start
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


async def test_a_reader_reads_ranges_keys_and_new_events(both: tuple[Client, Client]) -> None:
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


CHOICES = [
    ["log.a"],
    ["log.a", "log.b"],
    ["log.*.x", "log.b"],
    ["log.b", "log.c.>"],
    ["log.none", "log.nothing"],
]


@pytest.mark.parametrize("subjects", CHOICES, ids=lambda subjects: " ".join(subjects))
async def test_a_reader_gets_the_events_of_the_chosen_subjects_only(
    both: tuple[Client, Client], subjects: list[str]
) -> None:
    admin, reader = both
    await admin.create_topic("log")
    words = ["a", "b", "c.x", "c.y.z"]
    for number in range(1500):  # more than one answer of the server holds
        await admin.publish(f"log.{words[number % 4]}", b"%d" % number)
    await admin.publish_acked("log.b", b"last")
    found = []
    for client in (admin, reader):
        topic = await client.topic("log")
        events = [(e.subject, e.value) async for e in topic.read(subjects=subjects)]
        rows = [
            value
            async for batch in topic.batches(subjects=subjects)
            for value in batch.column("value").to_pylist()
        ]
        plan = ReadPlan(subjects=subjects)
        raw = [m.payload async for _, messages in topic.admin.read_messages(plan) for m in messages]
        assert rows == raw == [value for _, value in events]
        found.append(events)
    assert found[0] == found[1]
    assert bool(found[0]) == (subjects != CHOICES[-1])


async def test_a_reader_follows_the_chosen_subjects_only(both: tuple[Client, Client]) -> None:
    admin, reader = both
    await admin.create_topic("log")
    topic = await reader.topic("log")
    for number in range(3000):
        await admin.publish(f"log.{'abc'[number % 3]}", b"%d" % number)
    found: list[int] = []
    async for event in topic.read(subjects=["log.a", "log.b"], follow=True):
        found.append(int(event.value))
        if len(found) == 2000:
            break
    assert found == [n for n in range(3000) if n % 3 < 2]


async def test_a_reader_gets_the_last_event_of_each_key(both: tuple[Client, Client]) -> None:
    admin, reader = both
    log = await admin.create_topic("log")
    await log.publish_many(NewEvent(b"%d" % n, f"k{n % 700}") for n in range(2100))
    await log.publish(b"newest", "k3")
    topic = await reader.topic("log")
    wanted = {f"k{n}": b"%d" % (n + 1400) for n in range(700)} | {"k3": b"newest"}
    assert {e.key: e.value async for e in topic.latest()} == wanted
    for plan in (ReadPlan(start=Start.LAST_PER_KEY), ReadPlan(start=Start.LAST_PER_KEY, end=2001)):
        mine = [(e.offset, e.key, e.value) async for e in topic.read(plan)]
        assert mine == [(e.offset, e.key, e.value) async for e in log.read(plan)]
    before = {f"k{n}": b"%d" % (n + 1400 if n < 600 else n + 700) for n in range(700)}
    assert {key: value for _, key, value in mine} == before

    seen: list[bytes] = []
    async for event in topic.read(start=Start.LAST_PER_KEY, follow=True):
        seen.append(event.value)
        if len(seen) == 700:
            await log.publish(b"fresh", "k3")
        if event.value == b"fresh":
            break
    assert seen == [*(b"%d" % n for n in range(1400, 2100) if n != 1403), b"newest", b"fresh"]


async def test_a_message_with_forged_headers_of_the_server_is_read_as_it_is(
    both: tuple[Client, Client],
) -> None:
    """The server adds its own after them, so the last ones count."""
    admin, reader = both
    log = await admin.create_topic("log")
    await log.publish(b"1", "a")
    forged = (
        b"NATS/1.0 404 Not Found\r\nNats-Stream: other\r\nNats-Sequence: soon\r\n"
        b"Nats-Subject: log.\xff\r\nNats-Time-Stamp: never\r\n\r\n"
    )
    await admin.connection.request("log.b", b"2", forged)
    admin.connection.publish(b"log.b\xff", b"3")
    await admin.connection.flush(30)
    await log.publish(b"4", "a")
    topic = await reader.topic("log")
    seen = [(e.offset, e.key, e.value) async for e in topic.read()]
    assert seen == [(1, "a", b"1"), (2, "b", b"2"), (3, "b\udcff", b"3"), (4, "a", b"4")]
    assert seen == [(e.offset, e.key, e.value) async for e in log.read()]
