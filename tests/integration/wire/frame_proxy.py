"""A proxy in front of the broker that sees complete NATS frames, and drops those a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

WITH_PAYLOAD = (b"PUB", b"HPUB", b"MSG", b"HMSG")


def passes(_frame: bytes) -> bool:
    return True


async def at_once(_frame: bytes) -> None:
    """Hold nothing back."""


class FrameProxy:
    """Passes frames on if `to_server` or `to_client` says so; counts what a test looks for."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.to_server: Callable[[bytes], bool] = passes
        self.to_client: Callable[[bytes], bool] = passes
        # Awaited before a frame is passed on to the server: what happens in it comes first there.
        self.before_server: Callable[[bytes], Awaitable[None]] = at_once
        self.pause = 0.0  # seconds before each message: a slow network
        self.connections = 0

    def cut(self) -> None:
        """Break every connection, as a network would."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers |= {writer, back}
        for source, target, before, rule in (
            (
                reader,
                back,
                lambda frame: self.before_server(frame),
                lambda frame: self.to_server(frame),
            ),
            (there, writer, at_once, lambda frame: self.to_client(frame)),
        ):
            task = asyncio.create_task(self._pump(source, target, before, rule))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        before: Callable[[bytes], Awaitable[None]],
        rule: Callable[[bytes], bool],
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await source.readuntil(b"\r\n"):
                words = line.split()
                if words and words[0] in WITH_PAYLOAD:
                    line += await source.readexactly(int(words[-1]) + 2)
                    await asyncio.sleep(self.pause)
                await before(line)
                if rule(line):
                    target.write(line)
                    await target.drain()
        target.transport.abort()
        self._writers.discard(target)

    async def close(self) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def frame_proxy(url: str) -> AsyncIterator[tuple[FrameProxy, str]]:
    """A proxy before the server of a url, and the url that leads through it."""
    port = urlsplit(url).port
    if port is None:
        raise ValueError(f"no port in {url}")
    proxy = FrameProxy(port)
    limit = 64 * 1024 * 1024
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=limit)
    own = server.sockets[0].getsockname()[1]
    try:
        yield proxy, url.replace(f":{port}", f":{own}")
    finally:
        server.close()
        await proxy.close()
