"""A TCP proxy between clients and a server that can inject faults.

Bytes are delayed, held back or thrown away, connections are cut or half-closed. Bytes are thrown
away as a network does it: those of a connection from some moment on, and then it ends; TCP never
delivers a stream with a gap, so neither does this.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Self

__all__ = ["DeafProxy", "Proxy"]

CHUNK: Final = 64 * 1024


class _Pair:
    """A client's connection and the matching one to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server

    def cut(self) -> None:
        for side in (self.client, self.server):
            if not side.is_closing():
                side.transport.abort()


class Proxy:
    """Listens on a port of its own and forwards everything to `host:port`, except during faults."""

    def __init__(self, host: str, port: int) -> None:
        self.target: tuple[str, int] | None = (host, port)  # None: there is no server
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.delay = 0.0  # seconds of delay for every chunk
        self._going = asyncio.Event()  # while it is not set, everything is held back
        self._going.set()
        self.dropping = False  # bytes are dropped; ends with `cut`
        self.refusing = False  # new connections are closed immediately
        self.port = 0
        self.bytes = 0
        self.dropped = 0

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
        self.refusing = True  # a connection that was accepted just now
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        return len(self._pairs)

    # -- faults ---------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset every connection."""
        for pair in list(self._pairs):
            pair.cut()

    def half_close(self, towards_server: bool) -> None:
        """End one direction of every connection; the other stays open."""
        for pair in list(self._pairs):
            side = pair.server if towards_server else pair.client
            with contextlib.suppress(OSError, RuntimeError):
                side.write_eof()

    def stall(self) -> None:
        """Hold everything back until `heal`."""
        self._going.clear()

    def heal(self) -> None:
        """Forward everything again; connections that have lost bytes are cut."""
        if self.dropping:
            self.cut()
        self.delay, self.dropping, self.refusing = 0.0, False, False
        self._going.set()

    # -- forwarding ----------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self.refusing or self.target is None:
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection(*self.target)
        except (OSError, asyncio.CancelledError):  # no answer, or the proxy ends
            writer.transport.abort()
            return
        pair = _Pair(writer, to_server)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._pass(reader, to_server), self._pass(from_server, writer))
        except (OSError, RuntimeError, asyncio.CancelledError):
            pass  # cut, written to after a half-close, or the proxy ends
        finally:
            pair.cut()
            self._pairs.discard(pair)

    async def admit(self, chunk: bytes, towards: asyncio.StreamWriter) -> None:
        """Return when bytes may pass; a proxy that inspects them overrides this."""
        await self._going.wait()
        if self.delay:
            await asyncio.sleep(self.delay)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            await self.admit(chunk, writer)
            if self.dropping:
                self.dropped += len(chunk)
                continue
            self.bytes += len(chunk)
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()


class DeafProxy(Proxy):
    """Forwards everything except some messages, by default acks of stored events, while deaf."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.holds = b'"seq":'
        self.held = asyncio.Event()  # set when something was held back
        self.hears = asyncio.Event()
        self.hears.set()

    async def admit(self, chunk: bytes, towards: asyncio.StreamWriter) -> None:
        if self.holds in chunk and not self.hears.is_set():
            self.held.set()
            await self.hears.wait()
