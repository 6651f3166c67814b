"""Writers that send units before the acks of those before them, over connections that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millstream import connect
from millstream.errors import FencedOut
from millstream.events.packs.packing import Packing
from millstream.messaging import Topic
from millstream.messaging.publishing.writer import Writer
from millstream.settings import ConnectionSettings, Reconnect
from millstream.wire.aio import publisher
from tests.integration.wire.frame_proxy import FrameProxy, frame_proxy

PACK = Packing(max_events=5, linger=60)
EVENTS = 300
AHEAD = b"Nats-Expected-Last-Msg-Id: "


@asynccontextmanager
async def behind_proxy(url: str) -> AsyncIterator[tuple[FrameProxy, Topic, Topic]]:
    """A slow proxy; a topic with one partition, as it is seen through the proxy and directly."""
    async with connect(url) as direct, frame_proxy(url) as (proxy, through):
        topic = await direct.create_topic("log")
        settings = ConnectionSettings(urls=(through,), reconnect=Reconnect(wait=0.02, wait_max=0.1))
        async with connect(settings=settings) as mill:
            proxy.pause = 0.002
            yield proxy, await mill.topic("log"), topic


async def write(writer: Writer, first: int) -> None:
    for number in range(first, EVENTS + 1):
        await writer.write(b"%d" % number, position=number)


async def check(topic: Topic, others: int = 0) -> None:
    """Every number once and in order, and the units are a chain."""
    numbers = [int(event.value) async for event in topic.read() if event.key is None]
    assert numbers == list(range(1, EVENTS + 1))
    report = [report async for report in topic.admin.verify()][-1]
    assert (report.flaws, report.events) == ([], EVENTS + others)


async def test_units_are_sent_before_the_acks_of_those_before_them(millstream_url: str) -> None:
    async with behind_proxy(millstream_url) as (proxy, topic, direct):
        ahead: list[bytes] = []

        def note(frame: bytes) -> bool:
            ahead.extend([frame] if AHEAD in frame else [])
            return True

        proxy.to_server = note
        async with topic.writer("w", PACK) as writer:
            await write(writer, 1)
            await writer.flush()
            assert writer.position == EVENTS
        assert len(ahead) > EVENTS // PACK.max_events // 2
        await check(direct)


@pytest.mark.parametrize("cut", [False, True])
async def test_acks_of_units_sent_ahead_are_lost(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 0.3)
    async with behind_proxy(millstream_url) as (proxy, topic, direct):
        ahead: list[bytes] = []
        lost: list[bytes] = []

        def note(frame: bytes) -> bool:
            ahead.extend([frame] if AHEAD in frame else [])
            return True

        def lose(frame: bytes) -> bool:
            if len(ahead) < 5 or len(lost) == 6 or b'"stream":"log"' not in frame:
                return True
            lost.append(frame)
            if cut and len(lost) % 3 == 1:
                proxy.cut()
            return False

        proxy.to_server, proxy.to_client = note, lose
        async with topic.writer("w", PACK) as writer:
            await write(writer, 1)
        assert lost
        await check(direct)


async def test_a_unit_that_is_lost_on_its_way_keeps_those_after_it_out(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused, and sent again after it."""
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 0.3)
    async with behind_proxy(millstream_url) as (proxy, topic, direct):
        seen: list[bytes] = []

        def lose_some(frame: bytes) -> bool:
            if AHEAD not in frame:
                return True
            seen.append(frame)
            return len(seen) not in (5, 25)

        proxy.to_server = lose_some
        async with topic.writer("w", PACK) as writer:
            await write(writer, 1)
        assert len(seen) > 25
        await check(direct)


async def test_other_clients_write_to_the_same_partition(millstream_url: str) -> None:
    """What was expected of a unit is then wrong: by one, or by more."""
    async with behind_proxy(millstream_url) as (proxy, topic, direct):
        ahead = others = 0
        refused: list[bytes] = []

        async def come_first(frame: bytes) -> None:
            nonlocal ahead, others
            if AHEAD not in frame:
                return
            ahead += 1
            if ahead % 3 == 2:  # now and then, so that units are sent ahead again
                for _ in range(ahead % 4 + 1):
                    await direct.publish(b"0", "other")
                    others += 1

        def note(frame: bytes) -> bool:
            refused.extend([frame] if b'"err_code":1007' in frame else [])
            return True

        proxy.before_server, proxy.to_client = come_first, note
        async with topic.writer("w", PACK) as writer:
            await write(writer, 1)
        assert refused
        await check(direct, others)


async def test_a_writer_with_units_on_their_way_is_fenced_out(millstream_url: str) -> None:
    async with behind_proxy(millstream_url) as (_, topic, direct):
        old = await topic.writer("w", PACK).open()
        writing = asyncio.create_task(write(old, 1))
        while old.position < EVENTS // 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        async with direct.writer("w", PACK) as new:
            stored = new.position
            with pytest.raises(FencedOut):
                await asyncio.gather(writing, old.flush())
            await old.abandon()
            assert old.position <= stored < EVENTS
            await write(new, stored + 1)
        await check(direct)
