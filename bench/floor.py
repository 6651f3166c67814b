"""The floor: the same semantics with nothing but a socket, for what the server itself allows.

Frames are encoded beforehand and acks are only counted, so no client can be faster; two flavours,
because a program that waits in `recv` is another thing than one that waits in an event loop. Both
read into small buffers: what `recv` allocates above 128 KiB is mapped again for every read.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from urllib.parse import urlsplit

from millstream.wire.protocol import hpub, unique_token

__all__ = ["RawProtocol", "RawSocket", "frames_with_ids", "open_raw_protocol"]

_CONNECT = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
_ACK = re.compile(rb'"seq":\d+')
_READ_BYTES = 64 * 1024


def frames_with_ids(subject: str, reply: str, count: int, payload: bytes) -> list[bytes]:
    """Messages as a careful publisher sends them.

    Each has an id that makes a retry harmless and an address of its own that says whose ack it is.
    """
    word, to = unique_token(16), subject.encode()
    return [
        hpub(
            *(to, f"{reply}.{n:x}".encode()),
            *(f"NATS/1.0\r\nNats-Msg-Id: {word}{n:x}\r\n\r\n".encode(), payload),
        )
        for n in range(count)
    ]


def _subscribe(inbox: str) -> bytes:
    return f"SUB {inbox} 1\r\nSUB {inbox}.* 2\r\nPING\r\n".encode()


class RawSocket:
    """A blocking socket that speaks just enough to publish and to count acks."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._socket = socket.create_connection((at.hostname or "", at.port or 4222))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.recv(65536)
        self.inbox = f"_INBOX.{unique_token()}"
        self._socket.sendall(_CONNECT + _subscribe(self.inbox))
        while b"PONG\r\n" not in self._socket.recv(65536):
            pass

    def close(self) -> None:
        self._socket.close()

    def publish_rate(self, frames: list[bytes], window: int) -> float:
        """Messages a second with at most `window` without an ack."""
        sent = acked = 0
        tail = b""
        few = max(1, window // 4)  # so that writes are few and large, not many and small
        began = time.perf_counter()
        while acked < len(frames):
            room = min(window - (sent - acked), len(frames) - sent)
            if room >= min(few, len(frames) - sent) > 0:
                self._socket.sendall(b"".join(frames[sent : sent + room]))
                sent += room
            data = tail + self._socket.recv(_READ_BYTES)
            keep = max(data.rfind(b"MSG "), 0)  # the last frame may be cut
            acked += len(_ACK.findall(data, 0, keep))
            tail = data[keep:]
            if sent - acked == 1 and _ACK.search(tail) and tail.endswith(b"\r\n"):
                acked += 1
                tail = b""
        return len(frames) / (time.perf_counter() - began)

    def bytes_rate(self, frames: list[bytes], window: int) -> float:
        """Like `publish_rate`, in bytes a second."""
        return self.publish_rate(frames, window) * sum(map(len, frames)) / len(frames)

    def latencies(self, frames: list[bytes]) -> list[float]:
        """Seconds from sending to ack, one message at a time."""
        times = []
        for frame in frames:
            began = time.perf_counter()
            self._socket.sendall(frame)
            self._socket.recv(_READ_BYTES)
            times.append(time.perf_counter() - began)
        return times


class RawProtocol(asyncio.BufferedProtocol):
    """The same inside an event loop: the least that an `await` costs."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[None] | None = None
        self.inbox = f"_INBOX.{unique_token()}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(_CONNECT + _subscribe(self.inbox))

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        if not self.ready.done():
            if b"PONG\r\n" in bytes(self._buffer[:size]):
                self.ready.set_result(None)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    async def latencies(self, frames: list[bytes]) -> list[float]:
        loop = asyncio.get_running_loop()
        times = []
        for frame in frames:
            began = time.perf_counter()
            self._answer = loop.create_future()
            self.transport.write(frame)
            await self._answer
            times.append(time.perf_counter() - began)
        return times


async def open_raw_protocol(url: str) -> RawProtocol:
    at = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(RawProtocol, at.hostname or "", at.port or 4222)
    await protocol.ready
    return protocol
