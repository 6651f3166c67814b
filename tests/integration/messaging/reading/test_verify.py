"""`verify` reports every gap: a deleted pack, a damaged block, a unit without its parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream import connect
from millstream.events.packs.packing import Packing
from millstream.messaging import Topic
from millstream.messaging.reading.verify import Verification
from millstream.testing import running_broker

SMALL = Packing(max_events=10)


async def verified(topic: Topic) -> Verification:
    return [report async for report in topic.admin.verify()][-1]


async def write(topic: Topic, first: int, last: int) -> None:
    async with topic.writer("w", SMALL) as writer:
        for number in range(first, last + 1):
            await writer.write(b"value %d" % number, "k", position=number)


async def test_an_intact_topic_has_no_flaws(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log", partitions=2)
        await write(topic, 1, 100)
        await write(topic, 101, 200)  # a second life of the writer
        await topic.publish(b"plain")
        report = await verified(topic)
        assert report.sound, report.flaws
        assert (report.events, report.writers, report.deleted) == (201, 2, 0)


async def test_a_missing_pack_is_named_by_the_one_that_followed_it(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log")
        await write(topic, 1, 100)
        await mill.jetstream.delete_message("log", 5)
        report = await verified(topic)
        assert [(flaw.offset, flaw.kind) for flaw in report.flaws] == [(6, "chain")]
        assert "offset 5" in report.flaws[0].text
        assert report.deleted == 1


async def test_expired_events_are_not_a_flaw(millstream_url: str) -> None:
    async with connect(millstream_url) as mill:
        topic = await mill.create_topic("log", max_messages=5)
        await write(topic, 1, 100)
        report = await verified(topic)
        assert report.sound, report.flaws
        assert report.packs == 5


async def test_a_flipped_byte_in_a_block_file_is_reported(tmp_path: Path) -> None:
    async with running_broker(data=tmp_path / "data") as broker:
        async with connect(broker.url) as mill:
            await write(await mill.create_topic("log"), 1, 200)
        await asyncio.to_thread(broker.stop)
        blocks = [p for p in (tmp_path / "data").rglob("*.blk") if b"value 100" in p.read_bytes()]
        assert len(blocks) == 1
        content = bytearray(blocks[0].read_bytes())
        content[content.index(b"value 100")] ^= 0xFF
        blocks[0].write_bytes(content)
        await asyncio.to_thread(broker.start)
        async with connect(broker.url) as mill:
            report = await verified(await mill.topic("log"))
            assert not report.sound
