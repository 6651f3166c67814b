"""A flipped bit in one record can send the restore of its stream into a loop that takes memory.

Found by flipping every bit of the headers of some records after a clean stop: each bit from the
fourth byte of a record's sequence on, in any record but the first, does it.
"""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path

import pytest

import millstream
from millstream import NewEvent
from millstream.broker import Broker, BrokerSettings, Encryption, Limits
from millstream.errors import ConfigError, StartFailed

LIMIT = 192 * 1024 * 1024
COUNT = 60
SEQUENCE_BYTE = 4 + 5  # in a record: after its length, the sixth byte of its sequence


def flip_sequence(stream: Path) -> None:
    """Flip one bit in the sequence of the second record of a stream, or flip it back."""
    block = stream / "msgs" / "1.blk"
    content = bytearray(block.read_bytes())
    second = struct.unpack_from("<I", content)[0] & 0x7FFFFFFF
    content[second + SEQUENCE_BYTE] ^= 4
    block.write_bytes(content)


async def fill(broker: Broker, *topics: str) -> None:
    async with millstream.connect(broker.url) as mill:
        for name in topics:
            topic = await mill.create_topic(name)
            await topic.publish_many([NewEvent(b"value %d" % n) for n in range(COUNT)])


async def counts(broker: Broker) -> dict[str, int]:
    """How many events can be read, by topic."""
    async with millstream.connect(broker.url) as mill:
        topics = [await mill.topic(info.name) for info in await mill.topics()]
        return {topic.name: len([event async for event in topic.read()]) for topic in topics}


def test_a_restore_that_does_not_end_is_stopped_and_its_stream_can_be_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(BrokerSettings(data=tmp_path, limits=Limits(max_server_memory=LIMIT)))
    with broker:
        asyncio.run(fill(broker, "broken", "whole"))
    (home,) = tmp_path.rglob("streams/broken")
    files = sorted(path.name for path in home.glob("msgs/*"))
    flip_sequence(home)

    with pytest.raises(StartFailed, match="restored the stream 'broken' of account 'main'"):
        broker.start()
    assert not broker.running
    with pytest.raises(ConfigError, match=r"is not there. Choose one of: main/broken"):
        broker.start(set_aside=("other",))

    with broker.start(set_aside=("main/broken",)):
        assert asyncio.run(counts(broker)) == {"whole": COUNT}
    # It is reported at every start until it is brought back, as the report says.
    caplog.clear()
    with broker:
        found = re.search(r"files are in (\S+)\. .* move that folder to (\S+);", caplog.text)
    assert found is not None, caplog.text
    kept = Path(found[1])
    assert Path(found[2]) == home
    assert sorted(path.name for path in kept.glob("msgs/*")) == files
    flip_sequence(kept)
    kept.rename(home)
    with broker:
        assert asyncio.run(counts(broker)) == {"broken": COUNT, "whole": COUNT}


def test_a_server_that_takes_too_much_memory_is_stopped(tmp_path: Path) -> None:
    limits = Limits(max_server_memory=1024 * 1024)
    with pytest.raises(StartFailed, match=r"took more than 1 MiB of memory \(max_server_memory\)"):
        Broker(BrokerSettings(data=tmp_path, limits=limits)).start()


@pytest.mark.parametrize("crash", [False, True])
def test_a_stream_that_the_server_cannot_read_keeps_its_files(tmp_path: Path, crash: bool) -> None:
    """It deleted them, and the broker started as if there had never been such a stream."""
    broker = Broker(BrokerSettings(data=tmp_path))
    broker.start()
    asyncio.run(fill(broker, "broken", "whole"))
    if crash:
        broker.kill()
    else:
        broker.stop()
    (home,) = tmp_path.rglob("streams/broken")
    (home / "msgs" / "index.db").unlink(missing_ok=True)
    block, away = home / "msgs" / "1.blk", tmp_path / "away"
    block.rename(away)
    block.mkdir()  # an error when it is read, as that of a disk
    files = sorted(path.relative_to(home) for path in home.rglob("*"))
    for _ in range(2):
        with pytest.raises(StartFailed, match=r"cannot read the stream 'broken' .*--set-aside"):
            broker.start()
        assert sorted(path.relative_to(home) for path in home.rglob("*")) == files
    assert not list(tmp_path.rglob("kept*")), "the second names are gone"
    with broker.start(set_aside=("broken",)):
        assert asyncio.run(counts(broker)) == {"whole": COUNT}
    (aside,) = tmp_path.rglob("set-aside/*/*/*/broken")
    aside.rename(home)
    block.rmdir()
    away.rename(block)
    with broker:
        assert asyncio.run(counts(broker)) == {"broken": COUNT, "whole": COUNT}
        assert broker.health().losses == ()


def test_a_new_file_without_its_key_does_not_cost_an_encrypted_stream(tmp_path: Path) -> None:
    """A kill between the two made the server delete the stream."""
    broker = Broker(BrokerSettings(data=tmp_path, encryption=Encryption()))
    with broker:
        asyncio.run(fill(broker, "log"))
        broker.kill()
        (home,) = tmp_path.rglob("streams/log")
        (home / "msgs" / "2.blk").touch()
        (home / "msgs" / "2.key.tmp").write_bytes(bytes(64))
        broker.start()
        assert asyncio.run(counts(broker)) == {"log": COUNT}
        assert broker.health().losses == ()
