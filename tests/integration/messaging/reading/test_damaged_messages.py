"""The server's checksum does not cover all of a message: what that lets through is never served.

It leaves out the length of the headers and, in a message without headers, that of the subject. A
bit that flips there moves a border, so that some of the message is on the wrong side. Any client
can also store headers without an end.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
import millstream.blocking
from millstream import Mill, ReadPlan, Topic
from millstream.broker import Broker, BrokerSettings
from millstream.errors import ConnectionClosed, DataLoss, Undecodable
from millstream.events.fence import EPOCH_HEADER, NUMBER_HEADER, POSITION_HEADER
from millstream.messaging import DeadLetterFilter
from millstream.messaging.reading.verify import Verification
from millstream.wire.protocol import encode_headers, parse_header_items
from tests.integration.messaging.topic_kit import eventually, of_batches, of_read

VALUES = [b"value %d" % n for n in range(3)]
RECORD_HEAD = 22  # bytes: length, sequence, time, length of the subject
SUBJECT_LENGTH = 20
# Without an end: headers that lost some of it, that took some of the value, that are a stump.
BAD_HEADERS = (
    b"NATS/1.0\r\nNats-Msg-Id: 5",
    b"NATS/1.0\r\nA: 5\r\n\r\nval",
    b"NATS/1.0\r\nNa",
)


def flip_in_second(stream: Path, at: Callable[[bytes], int], bit: int) -> None:
    """Flip a bit of the second record of a stream, counted from the byte that `at` gives."""
    block = stream / "msgs" / "1.blk"
    content = bytearray(block.read_bytes())
    second = struct.unpack_from("<I", content)[0] & 0x7FFFFFFF
    content[second + at(bytes(content[second:])) + bit // 8] ^= 1 << bit % 8
    block.write_bytes(content)


def header_length(record: bytes) -> int:
    subject_size: int = struct.unpack_from("<H", record, SUBJECT_LENGTH)[0]
    return RECORD_HEAD + subject_size


def subject_length(_record: bytes) -> int:
    return SUBJECT_LENGTH


async def verified(topic: Topic) -> Verification:
    async for report in topic.admin.verify():
        last = report
    return last


def test_a_flipped_bit_in_the_length_of_the_headers_never_changes_an_event(tmp_path: Path) -> None:
    broker = Broker(BrokerSettings(data=tmp_path))
    bits = range(16)

    async def fill() -> None:
        async with millstream.connect(broker.url) as mill:
            for bit in bits:
                topic = await mill.create_topic(f"bit{bit}")
                for value in VALUES:
                    await topic.publish(value, "k")

    async def check() -> None:
        served = 0
        async with millstream.connect(broker.url) as mill:
            for bit in bits:
                topic = await mill.topic(f"bit{bit}")
                bad: list[Undecodable] = []
                found = [event.value async for event in topic.read(undecodable=bad.append)]
                assert found == [VALUES[0], VALUES[2]]
                assert [error.offset for error in bad] in ([], [2])
                assert not (await verified(topic)).sound
                served += len(bad)
        assert served >= 3, "this server no longer hands out such messages"

    with broker:
        asyncio.run(fill())
    for bit in bits:
        (home,) = tmp_path.rglob(f"streams/bit{bit}")
        flip_in_second(home, header_length, bit)
    with broker:
        asyncio.run(check())


def test_a_damaged_subject_is_named_and_one_with_a_space_does_not_keep_a_client_busy(
    tmp_path: Path,
) -> None:
    broker = Broker(BrokerSettings(data=tmp_path))
    bits = {"short": 3, "spaced": 4}  # 12 - 8 = 4 characters, and 13 + 16 = 29

    async def fill() -> None:
        async with millstream.connect(broker.url) as mill:
            for name in bits:
                await mill.create_topic(name)
                for _ in range(3):  # as plain NATS does it: without headers
                    await mill.connection.request(f"{name}.k12345", b"a value of several words")

    async def check() -> None:
        async with millstream.connect(broker.url) as mill:
            short = await mill.topic("short")
            with pytest.raises(Undecodable, match=r"short/0, offset 2.*subject b'shor' has no key"):
                [event async for event in short.read()]
            spaced = await mill.topic("spaced")
            with pytest.raises(ConnectionClosed, match="damaged on its disk"):
                [event async for event in spaced.read()]

    with broker:
        asyncio.run(fill())
    for name, bit in bits.items():
        (home,) = tmp_path.rglob(f"streams/{name}")
        flip_in_second(home, subject_length, bit)
    with broker:
        asyncio.run(check())


@pytest.fixture(params=["limits", "workqueue"])
async def damaged(mill: Mill, request: pytest.FixtureRequest) -> Topic:
    """Good events at the offsets 1 and 5, damaged ones between them."""
    topic = await mill.create_topic("orders", retention=request.param)
    await topic.publish(b"1", "a")
    for block in (*BAD_HEADERS[:2], b"NATS/1.0\r\nA: 5\r\n\r\nva"):
        await mill.connection.request("orders.x", b"ue", block)
    await topic.publish(b"5", "a")
    return topic


@pytest.mark.parametrize("read", [of_read, of_batches])
async def test_headers_without_an_end_cost_one_event(
    damaged: Topic, read: Callable[..., Awaitable[None]]
) -> None:
    found: list[Any] = []
    with pytest.raises(Undecodable, match="offset 2, index 0: damaged: its headers have no end"):
        await read(damaged, found)
    assert found == [b"1"]
    bad: list[Undecodable] = []
    await read(damaged, found, undecodable=bad.append)
    assert found == [b"1", b"1", b"5"]
    assert [error.offset for error in bad] == [2, 3, 4]


async def test_the_blocking_client_does_the_same(damaged: Topic, millstream_url: str) -> None:
    with millstream.blocking.connect(millstream_url) as blocking:
        bad: list[Undecodable] = []
        events = blocking.topic(damaged.name).read(undecodable=bad.append)
        assert [event.value for event in events] == [b"1", b"5"]
        assert [error.offset for error in bad] == [2, 3, 4]


async def test_it_becomes_a_dead_letter_that_keeps_every_byte_and_stays_damaged(mill: Mill) -> None:
    topic = await mill.create_topic("orders")
    for block in BAD_HEADERS:
        await mill.connection.request("orders.x", b"ue", block)
    await topic.publish(b"4", "a")
    async with topic.subscribe("all") as member:
        [delivery] = await member.pull()
        assert delivery.value == b"4"
        delivery.ack()
    queue = await topic.dead_letters("all")
    letters = await queue.list()
    assert [letter.value for letter in letters] == [block + b"ue" for block in BAD_HEADERS]
    assert {(letter.key, letter.id) for letter in letters} == {(None, None)}
    assert all("no end" in letter.cause for letter in letters)
    await queue.redrive()
    async with topic.subscribe("all") as member:

        async def redrives() -> list[int]:
            assert not await member.pull(timeout=0.1)
            return [letter.redrives for letter in await queue.list()]

        await eventually(redrives, [1, 1, 1])
        first, *_ = await queue.list()
        edited = await queue.edit(first.offset, value=b"whole")
        await queue.redrive(DeadLetterFilter(first=edited.offset))
        [delivery] = await member.pull()
        assert delivery.value == b"whole"
        delivery.ack()


async def test_a_damaged_dead_letter_is_not_redriven(mill: Mill) -> None:
    topic = await mill.create_topic("orders")
    await topic.publish(b"value", "a")
    async with topic.subscribe("all") as member:
        [delivery] = await member.pull()
        delivery.terminate("refused")
    queue = await topic.dead_letters("all")
    [letter] = await queue.list()
    block = letter.raw.headers.removesuffix(b"\r\n\r\n")
    await mill.connection.request("orders-all-dead.all.orders.0.9.0", b"\r\n\r\nvalue", block)
    with pytest.raises(DataLoss, match="damaged"):
        await queue.list()
    with pytest.raises(DataLoss, match="damaged"):
        await queue.redrive()
    assert [event.value async for event in topic.read()] == [b"value"]


async def test_a_writer_does_not_continue_from_a_damaged_position(mill: Mill) -> None:
    topic = await mill.create_topic("orders")
    async with topic.writer("w") as writer:
        await writer.write(b"1", position=1234)
    groups = [group async for _, group in topic.admin.read_messages(ReadPlan())]
    pack = groups[-1][-1]
    fields = dict(parse_header_items(pack.headers))
    # All that a position needs, and the end is missing.
    names = (EPOCH_HEADER, NUMBER_HEADER, POSITION_HEADER)
    block = encode_headers({name: fields[name] for name in names}).removesuffix(b"34\r\n\r\n")
    await mill.connection.request(pack.subject.decode(), b"34\r\n\r\n", block)
    with pytest.raises(DataLoss, match="no end"):
        await topic.writer("w").open()
