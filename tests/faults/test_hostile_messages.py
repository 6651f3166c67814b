"""Every header that has a meaning, with odd values: each reader hands out all the other events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import millstream
import millstream.blocking
from millstream import Mill, NewEvent, ProcessSettings, SubscriptionSettings, Topic
from millstream.errors import Undecodable
from millstream.messaging.groups.group import GroupSettings
from millstream.tables import Table
from tests.hostile import Hostile, store
from tests.integration.cli.messaging_commands import Commands
from tests.integration.messaging.topic_kit import eventually

SECONDS = 60.0


@dataclasses.dataclass
class Reading:
    sensor: int


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=SECONDS) as connected:
        yield connected


async def stored(mill: Mill, **settings: Any) -> tuple[Topic, list[int], list[int]]:
    """A topic, the offsets of its events, and those of the messages that cannot be decoded."""
    topic = await mill.create_topic("odd", **settings)
    messages = await store(mill, "odd")
    typed = "schema" in settings

    def bad(one: Hostile) -> bool:
        return one.unreadable or (typed and one.bad_schema)

    numbered = list(enumerate(messages, 1))
    events = [n for n, one in numbered if one.is_event and not bad(one)]
    return topic, [*events, len(messages) + 1], [n for n, one in numbered if bad(one)]


@pytest.mark.parametrize("settings", [{}, {"schema": Reading}], ids=["bytes", "typed"])
async def test_readers(mill: Mill, millstream_url: str, settings: dict[str, Any]) -> None:
    topic, events, bad = await stored(mill, **settings)
    errors: list[Undecodable] = []
    found = [event async for event in topic.read(undecodable=errors.append)]
    assert [event.offset for event in found] == events
    assert [error.offset for error in errors] == bad
    for event in found:
        _ = event.timestamp, event.id, repr(event), event.subject, event.headers
    errors.clear()
    offsets = [
        offset
        async for batch in topic.batches(undecodable=errors.append)
        for offset in batch.column("offset").to_pylist()
    ]
    assert (offsets, [error.offset for error in errors]) == (events, bad)
    with pytest.raises(Undecodable) as raised:
        [batch async for batch in topic.batches()]
    assert raised.value.offset == bad[0]
    latest = [event.offset async for event in topic.latest(undecodable="drop")]
    assert set(latest) == set(events)
    for offset in events:
        assert [event.offset for event in await topic.get(offset)] == [offset]
    with millstream.blocking.connect(millstream_url) as blocking:
        again = blocking.topic("odd").read(undecodable="drop")
        assert [event.offset for event in await asyncio.to_thread(list, again)] == events


async def test_a_table(mill: Mill) -> None:
    topic, events, bad = await stored(mill, schema=Reading, history=1)
    table = Table(topic)
    errors: list[Undecodable] = []
    entries = [entry.revision async for entry in table.entries(undecodable=errors.append)]
    deleted = [e.offset async for e in topic.read(undecodable="drop") if e.value is None]
    assert sorted(entries) == [offset for offset in events if offset not in deleted]
    # Packs have no key of their own, so a table has none.
    assert {error.offset for error in errors} <= set(bad)
    with pytest.raises(Undecodable):
        await table.as_dict()


async def test_a_subscription_and_its_dead_letters(mill: Mill) -> None:
    topic, events, bad = await stored(mill)
    settings = SubscriptionSettings(max_deliver=1)
    found: list[int] = []
    async with topic.subscribe("s", settings) as member:
        async for delivery in member:
            found.append(delivery.offset)
            delivery.terminate("given up")
            if delivery.offset == events[-1]:
                break
    assert found == events
    queue = await topic.dead_letters("s")
    letters = {letter.origin_offset: letter.cause for letter in await queue.list()}
    assert sorted(letters) == sorted([*events, *bad])
    assert {letters[offset] for offset in events} == {"given up"}
    assert all(letters[offset].startswith(("not a valid pack", "damaged")) for offset in bad)
    await queue.redrive()
    redriven: list[bytes] = []
    async with topic.subscribe("s", settings) as member:
        while len(redriven) < len(events):
            for delivery in await member.pull(1000, SECONDS):
                redriven.append(delivery.subject.encode("utf-8", "surrogateescape"))
                delivery.ack()
    assert len(redriven) == len(events)


async def test_a_group(mill: Mill) -> None:
    topic, events, bad = await stored(mill)
    found: set[int] = set()
    done = asyncio.Event()

    async def handle(event: Any) -> None:
        found.add(event.offset)
        if event.offset == events[-1]:
            done.set()
        else:
            raise ValueError("refused")

    async def letters() -> set[int]:
        queue = await topic.dead_letters("g")
        return {letter.origin_offset for letter in await queue.list()}

    settings = GroupSettings(max_attempts=1)
    async with topic.group("g", settings) as group:
        running = asyncio.create_task(group.run(handle))
        await asyncio.wait_for(done.wait(), SECONDS)
        await eventually(letters, {*events[:-1], *bad})  # keys are handled side by side
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert found == set(events)


async def test_a_process(mill: Mill) -> None:
    topic, events, bad = await stored(mill)
    target = await mill.create_topic("copy", partitions=2)

    def copy(event: Any) -> NewEvent:
        headers = {**event.headers, "at": str(event.offset)}
        return NewEvent(event.value, event.key, headers, event.timestamp_ns, event.id)

    settings = ProcessSettings("p", on_error="dead_letter")
    await mill.process(topic, target, copy, settings).run(once=True)
    letters = await (await topic.dead_letters("p")).list()
    lost = {letter.origin_offset: letter.cause for letter in letters}
    # A key that is too long for a topic is the only thing that cannot be written.
    assert set(bad) <= set(lost)
    assert all("keys have at most" in lost[offset] for offset in lost.keys() - set(bad))
    written = {int(event.headers["at"]): event async for event in target.read()}
    assert sorted(written) == [offset for offset in events if offset not in lost]
    for event in [event async for event in topic.read(undecodable="drop")]:
        if event.offset in written:
            same = written[event.offset]
            assert (same.key, same.value, same.id) == (event.key, event.value, event.id)
            assert {n: v for n, v in same.headers.items() if n != "at"} == event.headers


async def test_verify_counts_what_cannot_be_read(mill: Mill) -> None:
    topic, events, bad = await stored(mill)
    report = [report async for report in topic.admin.verify()][-1]
    assert report.events == len(events)
    flaws = {flaw.offset for flaw in report.flaws if flaw.kind in ("checksum", "damaged")}
    assert flaws == set(bad)


async def test_commands(mill: Mill, millstream_url: str, tmp_path: Path) -> None:
    _, events, bad = await stored(mill)
    run = Commands(millstream_url)
    tail = ("topic", "tail", "odd", "-o", "beginning", "-e")
    for form in (["--json"], [], ["--raw"], ["-f", "%t %k %h %i %T %s\\n"]):
        printed, errors = await asyncio.to_thread(run.partly, *tail, *form)
        assert errors.count("left out: odd/0, offset") == len(bad)
        if form == ["--json"]:
            assert [json.loads(line)["offset"] for line in printed.splitlines()] == events
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        file = str(tmp_path / name)
        printed, _ = await asyncio.to_thread(run.partly, "export", "odd", file, "--json")
        report = json.loads(printed)
        assert report["events"] + report["left_out"] == len(events) + len(bad)
        # One time is beyond Parquet's nanoseconds, one key is empty.
        assert report["left_out"] - len(bad) == {"a.jsonl": 0, "a.csv": 1, "a.parquet": 1}[name]
