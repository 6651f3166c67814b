"""A log that has become shorter is reported, whatever cut it, and nothing else is."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import millstream
from millstream import NewEvent
from millstream.broker import Broker, Encryption, LogLoss
from millstream.testing import running_broker

COUNT = 300


def flip(data: Path, part: float) -> None:
    """Change one byte of the only block of `log`: its first, its last, or one in a value.

    Not any byte in the middle: the length of a message's headers is not covered by the server's
    checksum, so that a change there is not noticed when it starts.
    """
    (block,) = data.rglob("streams/log/msgs/*.blk")
    content = bytearray(block.read_bytes())
    at = int(len(content) * part)
    if 0.0 < part < 0.9:
        at = content.index(b"value ", at)
    content[at] ^= 4
    block.write_bytes(content)


async def fill(broker: Broker, count: int = COUNT) -> None:
    async with millstream.connect(broker.url) as mill:
        names = {info.name for info in await mill.topics()}
        topic = await (mill.topic("log") if "log" in names else mill.create_topic("log"))
        await topic.publish_many(NewEvent(b"value %d" % n, f"k{n % 7}") for n in range(count))


async def again(broker: Broker, between: Callable[[], None], kill: bool) -> tuple[LogLoss, ...]:
    """Stop or kill, change the files, start; the losses that are reported then."""
    await asyncio.to_thread(broker.kill if kill else broker.stop)
    await asyncio.to_thread(between)
    await asyncio.to_thread(broker.start)
    health = await asyncio.to_thread(broker.health)
    return health.losses


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
async def test_a_flipped_byte_in_the_log_of_a_killed_broker_is_reported_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: float
) -> None:
    """flipped-byte, seed 113: the server cut the log at the damage, and nothing reported it."""
    async with running_broker(data=tmp_path) as broker:
        await fill(broker)
        with caplog.at_level(logging.WARNING, logger="millstream.broker"):
            (loss,) = await again(broker, lambda: flip(tmp_path, part), kill=True)
        assert loss.cut
        assert (loss.account, loss.stream) == ("main", "log")
        assert loss.last < COUNT
        assert loss.text in caplog.text
        assert loss.text in broker.log.read_text()
        assert await again(broker, lambda: None, kill=False) == (loss,), "told until it is deleted"
        async with millstream.connect(broker.url) as mill:
            await mill.delete_topic("log")
        await fill(broker)
        assert await again(broker, lambda: None, kill=False) == ()


async def test_events_before_a_checkpoint_are_reported_as_lost_for_certain(tmp_path: Path) -> None:
    """flipped-byte: without a checkpoint, damage and a torn write look alike."""
    async with running_broker(data=tmp_path) as broker:
        await fill(broker)
        checkpoints = tmp_path / "nodes" / "n1" / "log-ends.json"
        deadline = time.monotonic() + 120
        while not checkpoints.exists() or f'"last": {COUNT}' not in checkpoints.read_text():
            assert time.monotonic() < deadline, "the keeper saved no checkpoint"
            await asyncio.sleep(0.05)
        (loss,) = await again(broker, lambda: flip(tmp_path, 0.5), kill=True)
        assert (loss.marked, loss.cut) == (COUNT, True)
        assert f"{COUNT} was seen at {loss.marked_at}" in loss.text


async def test_an_older_copy_of_the_store_is_reported(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    async with running_broker(data=data) as broker:
        await fill(broker)
        store = data / "nodes" / "n1" / "store"
        assert await again(broker, lambda: _copy(store, copy), kill=False) == ()
        await fill(broker, 20)
        (loss,) = await again(broker, lambda: _copy(copy, store), kill=False)
        assert (loss.last, loss.marked, loss.cut) == (COUNT, COUNT + 20, False)


async def test_a_server_that_is_delayed_while_it_stops_leaves_a_checkpoint(
    tmp_path: Path,
) -> None:
    async with running_broker(data=tmp_path) as broker:
        await fill(broker)
        server = broker.pid
        os.kill(server, signal.SIGSTOP)
        goes_on = threading.Timer(1.0, os.kill, (server, signal.SIGCONT))
        goes_on.start()
        await asyncio.to_thread(broker.stop)
        goes_on.join()
        checkpoints = await asyncio.to_thread((tmp_path / "nodes/n1/log-ends.json").read_text)
        assert f'"last": {COUNT}' in checkpoints


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
async def test_complete_logs_are_not_reported(tmp_path: Path, kill: bool) -> None:
    """Expired, purged, recreated, compacted and memory streams have lost nothing."""
    async with running_broker(data=tmp_path) as broker:
        await fill(broker)
        async with millstream.connect(broker.url) as mill:
            old = await mill.create_topic("old", max_age=1.0)
            await old.publish_many(NewEvent(b"x" * 100) for _ in range(50))
            purged = await mill.create_topic("purged")
            await purged.publish_many(NewEvent(b"x" * 100) for _ in range(50))
            await purged.admin.purge()
            short = await mill.create_topic("memory", storage="memory")
            await short.publish(b"x")
            table = await mill.create_table("state")
            for number in range(200):
                await table.put(f"k{number % 3}", b"%d" % number)
        assert await again(broker, lambda: None, kill) == ()
        async with millstream.connect(broker.url) as mill:
            await mill.delete_topic("log")
        await fill(broker, 5)
        assert await again(broker, lambda: time.sleep(1.1), kill) == ()


def _tear(data: Path, cut: int, torn: int, index: bool = True) -> None:
    (block,) = data.rglob("streams/log/msgs/*.blk")
    content = block.read_bytes()
    if not index:
        block.with_name("index.db").unlink()
    block.write_bytes(content[: len(content) - cut] + os.urandom(torn))


async def test_a_torn_write_to_an_encrypted_log_is_no_loss(tmp_path: Path) -> None:
    """A kill interrupts a write about once in 70 times, and every reader stopped then."""
    async with running_broker(data=tmp_path, encryption=Encryption()) as broker:
        await fill(broker)
        (cut,) = await again(broker, lambda: _tear(tmp_path, 0, 500), kill=True)
        assert (cut.last, cut.lost) == (COUNT, None)
        assert await asyncio.to_thread(lambda: broker.health().ok)
        async with millstream.connect(broker.url) as mill:
            topic = await mill.topic("log")
            assert len([event async for event in topic.read()]) == COUNT
            receipt = await topic.publish(b"next")
            assert receipt.offset == COUNT + 1
        await asyncio.to_thread(broker.restart)  # a checkpoint has seen all of it
        *_, loss = await again(broker, lambda: _tear(tmp_path, 500, 0, index=False), kill=True)
        assert loss.lost is not None
        assert loss.lost[0] == loss.last + 1
        assert loss.lost[1] >= COUNT + 1
