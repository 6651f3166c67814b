"""A connection whose server does not keep up or goes away: against a fake server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from millstream.errors import ConnectionClosed
from millstream.settings import ConnectionSettings, Reconnect
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.link import READ_BYTES_MAX, WRITE_BUFFER_BYTES_MAX

INFO = b'INFO {"server_id":"A","version":"2.15.1","max_payload":67108864,"headers":true}\r\n'


class LazyServer:
    """Greets, answers the first ping, then reads only when it should."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(INFO)
        while line := await reader.readline():
            if line == b"PING\r\n":
                break
        writer.write(b"PONG\r\n")
        await self.reads.wait()
        while await reader.read(1 << 20):
            pass


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, LazyServer]]:
    lazy = LazyServer()
    server = await asyncio.start_server(lazy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = replace(
        ConnectionSettings(),
        urls=(f"nats://127.0.0.1:{port}",),
        reconnect=Reconnect(give_up_after=60.0),
    )
    connection = Connection(settings)
    await connection.open()
    try:
        yield connection, lazy
    finally:
        await connection.close()
        server.close()
        for writer in lazy.writers:
            writer.transport.abort()
        lazy.reads.set()


def overfill(connection: Connection) -> None:
    """Send more than the sockets and the buffer take."""
    frame = b"PUB a 1048576\r\n" + b"x" * 1048576 + b"\r\n"
    for _ in range(2 * WRITE_BUFFER_BYTES_MAX // len(frame) + 16):
        connection.send(frame)


async def test_a_server_that_does_not_read_congests_until_it_reads() -> None:
    async with connected() as (connection, lazy):
        overfill(connection)
        assert connection.congested
        waiting = asyncio.create_task(connection.writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        lazy.reads.set()
        async with asyncio.timeout(30):
            await waiting
        connection.check_open()
        assert connection.congested is False


async def test_a_lost_link_does_not_stay_congested() -> None:
    async with connected() as (connection, lazy):
        overfill(connection)
        waiting = asyncio.create_task(connection.writable())
        await asyncio.sleep(0)
        lazy.writers[0].transport.abort()
        async with asyncio.timeout(30):
            await waiting
        assert not connection.congested


async def test_a_closed_connection_is_not_congested_and_keeps_nothing() -> None:
    async with connected() as (connection, _):
        overfill(connection)
        await connection.close()
        assert not connection.congested
        for _ in range(3):
            with pytest.raises(ConnectionClosed):
                connection.send(b"PUB a 1\r\nx\r\n")
        assert connection.buffered_bytes == 0


async def test_messages_larger_than_one_read_arrive_complete() -> None:
    found: list[bytes] = []
    arrived = asyncio.Event()
    sizes = [1, READ_BYTES_MAX - 1, READ_BYTES_MAX, 3 * READ_BYTES_MAX + 7, 0]

    def take(run: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
        found.extend(payload for _, _, _, payload in run)
        if len(found) == len(sizes):
            arrived.set()

    async with connected() as (connection, lazy):
        interest = connection.subscribe_runs("a", take)
        for size in sizes:
            payload = bytes(size % 256 for _ in range(size))
            lazy.writers[0].write(b"MSG a %b %d\r\n%b\r\n" % (interest.sid, size, payload))
        async with asyncio.timeout(30):
            await arrived.wait()
    assert [len(payload) for payload in found] == sizes
    assert all(set(payload) <= {len(payload) % 256} for payload in found)
