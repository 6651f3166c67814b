"""Frames: the same messages that the connection's own parser finds, however bytes arrive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream.broker import Broker
from millstream.messaging import NewEvent
from millstream.settings import ConnectionSettings
from millstream.spark.source import frames as frames_module
from millstream.spark.source.frames import FrameCollector, read_frames
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.protocol import Parser, encode_headers
from millstream.wire.sync import range as blocking_range
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.range import _Reader, read_range
from millstream.wire.sync.window import Window
from tests.spark.conftest import Account

SID = b"12"
TRAPS = [
    b"",
    b"\r\n",
    b"x",
    b"a\r\nMSG t.k 12 $JS.ACK.t.c.1.1.1.1.1 3\r\nabc\r\n",
    b"\r\nHMSG t.k 12 $JS.ACK.t.c.1.1.1.1.1 3 9\r\nabc\r\nPING\r\n",
    b"NATS/1.0 404 No Messages",
    b"MSG 1\r\nH 2\r\n\n\n" * 5,
    b" $JS.ACK. " * 7,
    bytes(range(256)) * 3,
]


# Ack addresses: without and with domain and account, and with a token after the numbers.
ADDRESSES = [
    b"$JS.ACK.t.c.1.%d.%d.%d.%d",
    b"$JS.ACK.hub.AbC123.t.c.1.%d.%d.%d.%d",
    b"$JS.ACK._.AbC123.t.c.1.%d.%d.%d.%d.x7Q2k9",
]


def delivered(number: int, chance: random.Random, form: bytes) -> tuple[RawMessage, bytes]:
    """A message and its frame."""
    subject = b"t.k%d" % (number % 7)
    reply = form % (number * 3, number, 10**18 + number, 10**6 - number)
    headers = encode_headers({"A": "b", "Mill-Time": "5"}) if chance.random() < 0.3 else b""
    payload = chance.choice(TRAPS)
    size = len(headers) + len(payload)
    if headers:
        line = b"HMSG %b %b %b %d %d\r\n" % (subject, SID, reply, len(headers), size)
    else:
        line = b"MSG %b %b %b %d\r\n" % (subject, SID, reply, size)
    return RawMessage(subject, reply, headers, payload), line + headers + payload + b"\r\n"


OTHERS = [
    b"PING\r\n",
    b'INFO {"server_id": "MSG"}\r\n',
    b"+OK\r\n",
    b"MSG other.subject 7 3\r\nabc\r\n",
    b"MSG other.subject 7 some.reply 4\r\nMSG \r\n",
    b"HMSG _INBOX.x 12 18 18\r\nNATS/1.0 100 Idle\n\r\n",
]


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        size = chance.choice([1, 2, 9, 50, 400, 5000])
        yield data[start : start + size]
        start += size


@pytest.mark.parametrize("large", [0, frames_module.LARGE], ids=["one by one", "at once"])
@pytest.mark.parametrize("seed", range(40))
def test_every_message_is_found_and_everything_else_goes_to_the_parser(
    seed: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Messages of this many bytes are found in another way; those of this test are smaller.
    monkeypatch.setattr(frames_module, "LARGE", large)
    chance = random.Random(seed)
    wanted: list[RawMessage] = []
    rest: list[tuple[bytes, ...]] = []
    stream = b""
    for number in range(1, 80):
        if chance.random() < 0.15:
            stream += chance.choice(OTHERS)
        message, frame = delivered(number, chance, ADDRESSES[seed % 3])
        wanted.append(message)
        stream += frame
    everything: list[tuple[bytes, ...]] = []
    parser_for(everything, rest).feed(stream)
    assert [m for m in everything if m[1].startswith(b"$JS.ACK.")] == wanted

    collector = FrameCollector()
    collector.begin(SID, len(wanted))
    others: list[tuple[bytes, ...]] = []
    status: list[tuple[bytes, ...]] = []
    parser = parser_for(status, others)
    for piece in pieces(stream, chance):
        collector.feed(piece, parser.feed)
    frames, left = collector.end()
    assert [frames.message(n) for n in range(len(frames))] == wanted
    assert left == b""
    assert sorted(others) == sorted(rest)
    assert status == [m for m in everything if not m[1].startswith(b"$JS.ACK.")]
    addresses = [parse_ack_address(message.reply) for message in wanted]
    assert frames.sequences().tolist() == [address.sequence for address in addresses]
    assert frames.nanoseconds().tolist() == [address.timestamp_ns for address in addresses]
    assert frames.cut(frames.body, frames.end).to_pylist() == [m.payload for m in wanted]


def parser_for(own: list[tuple[bytes, ...]], other: list[tuple[bytes, ...]]) -> Parser:
    def keep(kept: list[tuple[bytes, ...]]) -> Callable[..., None]:
        return lambda *message: kept.append(message)

    return Parser({SID: keep(own), b"7": keep(other)}, keep(other))


def test_frames_and_messages_of_a_range_are_the_same(account: Account) -> None:
    account.topic("orders")
    events = [NewEvent(TRAPS[n % len(TRAPS)], f"k{n % 5}", {"n": str(n)}) for n in range(700)]
    account.publish("orders", [*events, *[b"plain"] * 500])
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        jetstream = BlockingJetStream(connection)
        for gone in (3, 4, 5, 399, 400, 1100):
            jetstream.ask("STREAM.MSG.DELETE.orders", {"seq": gone})
        for start, end, size in ((1, 1201, 100), (2, 400, 1000), (350, 401, 7), (1, 2, 1)):
            window = Window(messages=size)
            wanted = [m for some in read_range(connection, "orders", start, end) for m in some]
            found = [
                frames.message(number)
                for frames in read_frames(connection, "orders", start, end, (), window)
                for number in range(len(frames))
            ]
            assert [_stored(m) for m in found] == [_stored(m) for m in wanted]
            gone = sum(start <= n < end for n in (3, 4, 5, 399, 400, 1100))
            assert len(found) == end - start - gone


def _stored(message: RawMessage) -> tuple[bytes, int, bytes, bytes]:
    sequence = parse_ack_address(message.reply).sequence
    return message.subject, sequence, message.headers, message.payload


def test_large_and_small_messages_are_found(account: Account) -> None:
    sizes = [10, 9 * frames_module.LARGE] * 20 + [5] * 300 + [3 * frames_module.LARGE] * 30
    values = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    account.topic("orders")
    account.publish("orders", values)
    found: list[bytes] = []
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        for frames in read_frames(connection, "orders", 1, len(values) + 1):
            found += frames.cut(frames.body, frames.end).to_pylist()
    assert found == values


def test_frames_outlast_a_restart(millstream_broker: Broker) -> None:
    account = Account(millstream_broker.url)
    account.topic("orders")
    account.publish("orders", [b"%d" % n for n in range(3000)])
    found: list[bytes] = []
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        for frames in read_frames(connection, "orders", 1, 3001, (), Window(messages=500)):
            found += frames.cut(frames.body, frames.end).to_pylist()
            if len(found) == 1000:
                millstream_broker.restart()
    assert found == [b"%d" % n for n in range(3000)]


@pytest.mark.parametrize("read", [read_frames, read_range])
def test_a_late_status_of_a_window_does_not_end_the_next_one(
    account: Account, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Iterator[Any]]
) -> None:
    account.topic("orders")
    account.publish("orders", [b"%d" % n for n in range(50)])
    real = BlockingConnection.receive
    held: list[bytes] = []

    class Late:
        """A socket on which every status arrives late, after the next window was requested."""

        def __init__(self, link: Any) -> None:
            self._link = link

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

        def recv(self, size: int) -> bytes:
            if held:
                return held.pop()
            data: bytes = self._link.recv(size)
            at = data.rfind(b"HMSG _INBOX")
            if b"409 Batch Completed" in data[at:] and data.count(b"$JS.ACK."):
                held.append(data[at:])
                return data[:at]
            return data

    def receive(self: BlockingConnection, deadline: Any) -> bool:
        if not isinstance(self._socket, Late):
            self._socket = Late(self._socket)  # type: ignore[assignment]
        return real(self, deadline)

    opened: list[int] = []
    real_open = _Reader.open

    def counted(self: _Reader[Any]) -> None:
        opened.append(self.cursor.next_sequence)
        real_open(self)

    monkeypatch.setattr(BlockingConnection, "receive", receive)
    # A server that is slow is not one that forgot the window: only the latter is asked again.
    monkeypatch.setattr(blocking_range, "SILENCE_SECONDS", 60)
    monkeypatch.setattr(_Reader, "open", counted)
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        windows = [len(w) for w in read(connection, "orders", 1, 51, (), Window(messages=10))]
    assert windows == [10] * 5
    assert opened == [1]  # nothing had to be asked for again
