"""Archives of streams: frames, heads and ends; the server itself is the judge in integration."""

from __future__ import annotations

import io
import json
import random

import pytest

from millstream.errors import BackupError
from millstream.wire import archive
from millstream.wire.archive import ArchiveEntry, Ending, Floor, Head, MessageDigest, opened


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "FRAME_BYTES", 5000)


def content_of(data: bytes) -> bytes:
    file = io.BytesIO(data)
    parts = []
    for frame in archive.frames(file, len(data)):
        if frame.has_content:
            file.seek(frame.start + 4)
            parts.append(archive.decoded(frame.kind, file.read(frame.size)))
    return b"".join(parts)


def document(name: str, value: object) -> bytes:
    return ArchiveEntry(name, 5, 0, b"", json.dumps(value).encode()).encoded()


def make(
    messages: list[ArchiveEntry], floors: dict[str, int], last: int, end: bytes = archive.END
) -> bytes:
    consumers = [
        document(
            f"consumers/{name}",
            {
                "config": {"num_replicas": 3},
                "state": {
                    "delivered": {"consumer_seq": at, "stream_seq": at},
                    "ack_floor": {"consumer_seq": at, "stream_seq": at},
                    "pending": {},
                },
            },
        )
        for name, at in floors.items()
    ]
    state = document(
        "state.json",
        {"messages": len(messages), "last_seq": last, "consumer_count": len(consumers)},
    )
    bodies = [message.encoded() for message in messages]
    content = b"".join((archive.MAGIC, state, *consumers, *bodies, end))
    return archive.STREAM_START + b"".join(archive.encoded(content))


MESSAGES = [ArchiveEntry(f"t.{n}", n, n, b"NATS/1.0\r\n\r\n", b"v" * 400) for n in range(1, 60)]


def digest_of(data: bytes, step: int = 1 << 20) -> str:
    digest = MessageDigest()
    for at in range(0, len(data), step):
        digest.feed(data[at : at + step])
    return digest.value


def test_a_compressed_block_is_decompressed() -> None:
    # "abcd", a copy of 6 bytes from 4 back, the same offset again for 5, and a long literal.
    long = bytes(range(70))
    body = bytes([85, 3 << 2]) + b"abcd" + bytes([0x01 | 2 << 2, 4])
    body += bytes([0x01 | 1 << 2, 0]) + bytes([60 << 2, 69]) + long
    plain = b"abcd" + b"abcdab" + b"cdabc" + long
    crc = archive._masked_crc(plain).to_bytes(4, "little")
    assert archive.decoded(archive.COMPRESSED, crc + body) == plain
    with pytest.raises(BackupError, match="checksum"):
        archive.decoded(archive.COMPRESSED, bytes(4) + body)
    with pytest.raises(BackupError, match="damaged"):
        archive.decoded(archive.COMPRESSED, crc + body[:20])


def test_the_crc_is_the_one_of_the_format() -> None:
    assert archive._crc(b"123456789") == 0xE3069283


def test_the_head_is_changed_and_the_messages_are_not() -> None:
    data = make(MESSAGES, {"a": 40, "b": 40, "late": 3}, 59)
    head = Head(100, {"a": Floor(10, 10), "b": Floor(50, 50)}, 1)
    changed = b"".join(opened(io.BytesIO(data), len(data), head))
    content = bytearray(content_of(changed))
    found = archive._head_of(content)
    assert found is not None
    assert json.loads(found.state.payload)["last_seq"] == 100
    consumers = {str(c.name): json.loads(c.payload) for c in found.consumers}
    assert sorted(consumers) == ["consumers/a", "consumers/b"]
    assert consumers["consumers/a"]["state"]["ack_floor"]["stream_seq"] == 10
    assert consumers["consumers/b"]["state"]["ack_floor"]["stream_seq"] == 40
    assert consumers["consumers/a"]["config"]["num_replicas"] == 0
    assert bytes(content[found.end :]) == b"".join(m.encoded() for m in MESSAGES) + archive.END
    assert digest_of(changed) == digest_of(data)


def test_an_empty_log_starts_after_its_end() -> None:
    data = make([], {}, 0)
    for added, first in ((0, 8), (3, None)):
        changed = b"".join(opened(io.BytesIO(data), len(data), Head(7, {}, 1, added)))
        found = archive._head_of(bytearray(content_of(changed)))
        assert found is not None
        state = json.loads(found.state.payload)
        assert (state["messages"], state["last_seq"]) == (added, 7)
        assert state.get("first_seq") == first


def test_messages_are_added_before_the_end_marker() -> None:
    file = io.BytesIO(data := make(MESSAGES[:50], {}, 59))
    ending = Ending(file, len(data))
    ending.cut()
    ending.add(MESSAGES[50:])
    ending.finish()
    whole = make(MESSAGES, {}, 59)
    content = bytearray(content_of(file.getvalue()))
    found = archive._head_of(content)
    assert found is not None
    assert bytes(content[found.end :]) == b"".join(m.encoded() for m in MESSAGES) + archive.END
    assert digest_of(file.getvalue(), 1000) == digest_of(whole)


def test_a_message_that_differs_changes_the_digest() -> None:
    random.seed(5)
    data = make(MESSAGES, {}, 59)
    for _ in range(3):
        changed = list(MESSAGES)
        number = random.randrange(len(MESSAGES))
        changed[number] = changed[number]._replace(time=99)
        assert digest_of(make(changed, {}, 59)) != digest_of(data)


def test_an_incomplete_archive_is_refused() -> None:
    data = make(MESSAGES, {}, 59)
    for short in (data[:-7], data[: len(data) // 2], data[:10], b""):
        with pytest.raises(BackupError, match="not complete"):
            Ending(io.BytesIO(short), len(short))
    unfinished = make(MESSAGES, {}, 59, end=b"")
    with pytest.raises(BackupError, match="no end marker"):
        Ending(io.BytesIO(unfinished), len(unfinished))
    with pytest.raises(BackupError, match="not complete"):
        digest_of(data[:-1])


def test_an_unknown_format_is_refused() -> None:
    data = archive.STREAM_START + b"".join(archive.encoded(b"meta.inf" + bytes(100)))
    with pytest.raises(BackupError, match="format that is not known"):
        list(opened(io.BytesIO(data), len(data), Head(1, {})))
