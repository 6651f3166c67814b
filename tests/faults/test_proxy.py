"""The proxy injects the faults it is asked for, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.proxy import Proxy
from tests.faults.supervisor import until

SECONDS = 30  # for what must arrive
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo() -> AsyncIterator[Proxy]:
    """A proxy in front of a server that echoes its input."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with Proxy("127.0.0.1", port) as proxy:
            yield proxy
    finally:
        server.close()


@asynccontextmanager
async def client(proxy: Proxy) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        yield reader, writer
    finally:
        writer.close()


async def answered(streams: Streams, data: bytes, seconds: float) -> bool:
    streams[1].write(data)
    try:
        async with asyncio.timeout(seconds):
            return await streams[0].readexactly(len(data)) == data
    except TimeoutError:
        return False


async def test_a_stall_holds_bytes_back_and_loses_none() -> None:
    async with echo() as proxy, client(proxy) as streams:
        proxy.stall()
        assert not await answered(streams, b"waits", 0.1)
        proxy.heal()
        async with asyncio.timeout(SECONDS):
            assert await streams[0].readexactly(5) == b"waits"


async def test_a_delay_lasts_as_long_as_configured() -> None:
    async with echo() as proxy, client(proxy) as streams:
        proxy.delay = 0.1
        started = asyncio.get_running_loop().time()
        assert await answered(streams, b"late", SECONDS)
        assert asyncio.get_running_loop().time() - started >= 0.2


async def test_dropped_bytes_end_the_connection() -> None:
    async with echo() as proxy, client(proxy) as streams:
        proxy.dropping = True
        assert not await answered(streams, b"gone", 0.1)
        assert await until(lambda: proxy.dropped == 4, SECONDS)
        proxy.heal()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await streams[0].readexactly(1)


async def test_a_cut_ends_every_connection_and_refusing_keeps_new_ones_out() -> None:
    async with echo() as proxy, client(proxy) as streams:
        proxy.refusing = True
        proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await streams[0].readexactly(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        proxy.heal()
        async with client(proxy) as fresh:
            assert await answered(fresh, b"again", SECONDS)


async def test_a_half_close_towards_the_client_ends_its_input() -> None:
    async with echo() as proxy, client(proxy) as streams:
        proxy.half_close(towards_server=False)
        async with asyncio.timeout(SECONDS):
            assert await streams[0].read(1) == b""


async def test_a_proxy_without_a_target_refuses_connections() -> None:
    async with echo() as one, echo() as two:
        one.target = None
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        one.target = two.target
        async with client(one) as streams:
            assert await answered(streams, b"there", SECONDS)
