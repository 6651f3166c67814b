"""A proxy before the broker whose connections can be cut, or go silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on, until told otherwise."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.refusing = False
        self.connections = 0
        self.port = 0

    async def count_open(self) -> int:
        """Sockets that are open now, on both sides."""
        return len(self._writers)

    def cut(self) -> None:
        """Break every connection, as a network would."""
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Pass nothing on, and say nothing."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers.add(writer)  # right away: a cut also breaks a connection that is being made
        self._start(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._behind)
        self._writers.add(back)
        self._start(self._pump(reader, back))
        self._start(self._pump(there, writer))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                target.write(data)
                await target.drain()
        target.transport.abort()
        self._writers.discard(target)

    async def close(self) -> None:
        self.refusing = True  # a connection that was accepted just now
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before the server of a url, and the url that leads through it."""
    parts = urlsplit(url)
    if parts.port is None:
        raise ValueError(f"no port in {url}")
    one = Proxy(parts.port)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one, url.replace(f":{parts.port}", f":{one.port}")
    finally:
        server.close()
        await one.close()
