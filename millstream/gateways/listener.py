"""The server of a gateway: accepts connections, watches over them, stops gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import time
from typing import Final

from millstream.deadline import Deadline
from millstream.errors import ConfigError, MillstreamError, PortTaken
from millstream.gateways.framed import FramedConnection, Shared
from millstream.gateways.overload import Books, Closed, Refused
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.tls import BUFFER_BYTES, open_tls
from millstream.gateways.transport import FrameHandler, MakeHandler, Transport

__all__ = ["FrameHandler", "Listener", "MakeHandler", "Transport"]

_log = logging.getLogger("millstream.gateways")

BACKLOG: Final = 1024  # connections that the system holds until they are accepted
ACCEPTED_AT_ONCE: Final = 100
FILES_PAUSE: Final = 1.0  # seconds without accepting, when the process has no files left
HANDSHAKE_SECONDS: Final = 20.0
SHUTDOWN_SECONDS: Final = 2.0  # of TLS
OWN_FILES: Final = 256  # that the process has open besides connections
TICK: Final = 1.0  # seconds between looks at the connections
IDLE_LOOKS: Final = 8  # looks at idle connections within their timeout
# Of one connection that was lost before it was accepted; see accept(2).
_LOST: Final = (
    *(errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET),
    *(errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH, errno.ECONNABORTED),
)


class Listener:
    """Listens on the address of the settings and gives each connection a handler.

    Time in which the process did not run, or not often enough, does not count against clients: what
    they sent meanwhile has not been read.
    """

    def __init__(self, settings: GatewaySettings, make_handler: MakeHandler, books: Books) -> None:
        self.settings = settings
        self.books = books
        self.port = 0  # that it listens on
        self.max_connections = settings.max_connections
        self._tls = settings.tls_context()
        self._make_handler = make_handler
        self._sockets: list[socket.socket] = []
        self._encrypted = bytearray(BUFFER_BYTES)  # what TLS connections read, one by one
        self._opening: set[asyncio.Task[None]] = set()  # connections, until they are made
        self._watching: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """How many are open, or being opened."""
        return len(self._shared.connections) + self._shared.opening

    async def bind(self) -> None:
        """Take the port, without accepting connections yet; PortTaken if another process has it.

        Until `start` clients are refused, which is better than to let them wait.
        """
        self._shared = Shared(self.settings, self._make_handler, self.books)
        self.max_connections = _with_files(self.settings.max_connections)
        self._sockets = await self._bound()
        self.port = self._sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Accept connections."""
        if not self._sockets:
            await self.bind()
        for one in self._sockets:
            self._listen(one)
        for one in self._sockets:
            self._shared.loop.add_reader(one, self._accept, one)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, grace: float | None = None) -> None:
        """Accept and take nothing more; close connections when their requests are answered.

        After the grace period, by default that of the settings, the others are closed too.
        """
        if self._watching is None:  # at most bound
            for one in self._sockets:
                one.close()
            return
        deadline = Deadline(self.settings.stop_grace if grace is None else grace)
        self._shared.stopping = True
        for one in self._sockets:
            self._shared.loop.remove_reader(one)
            one.close()
        for connection in list(self._shared.connections):
            connection.stop()
        opening = [*self._opening]
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shared.none_open(), deadline.left())
        self._watching.cancel()
        for connection in list(self._shared.connections):
            connection.abort(Closed.STOPPED)
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._shared.none_open()
        self._watching = None

    # -- accepting ----------------------------------------------------------------------------

    async def _bound(self) -> list[socket.socket]:
        """A socket for each address of the host, all with the same port."""
        host, port = self.settings.host, self.settings.port
        try:
            found = await self._shared.loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise ConfigError(f"{host!r} is no address of this machine: {error}") from error
        opened: list[socket.socket] = []
        with contextlib.ExitStack() as undo:
            for family, address in dict.fromkeys((one[0], one[4]) for one in found):
                # By the protocol asyncio knows that it should not delay small answers.
                one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
                undo.callback(one.close)
                one.setblocking(False)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    one.bind((address[0], port, *address[2:]))
                except OSError as error:
                    raise _cannot_listen(f"{host}:{port}", error) from error
                port = one.getsockname()[1]
                opened.append(one)
            undo.pop_all()
        return opened

    def _listen(self, one: socket.socket) -> None:
        try:
            one.listen(BACKLOG)
        except OSError as error:  # another process was faster
            raise _cannot_listen(f"{self.settings.host}:{self.port}", error) from error

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _LOST:
                    continue
                # No files or no memory; whatever else it is, it would come again at once.
                self.books.refused[Refused.FILES] += 1
                self._shared.failures.warn(None, "no connections for %g s: %s", FILES_PAUSE, error)
                self._shared.loop.remove_reader(listening)
                self._shared.loop.call_later(FILES_PAUSE, self._accept_again, listening)
                return
            if self.connections >= self.max_connections:
                self.books.refused[Refused.CONNECTIONS] += 1
                text = "refused a connection: %d are open, the limit"
                self._shared.failures.warn(None, text, self.connections)
                client.close()
                continue
            client.setblocking(False)
            connection = FramedConnection(self._shared)
            task = self._shared.loop.create_task(self._open(connection, client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _accept_again(self, listening: socket.socket) -> None:
        if not self._shared.stopping:
            self._shared.loop.add_reader(listening, self._accept, listening)

    async def _open(self, connection: FramedConnection, client: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._shared.loop.connect_accepted_socket(lambda: connection, client)
            else:
                seconds = HANDSHAKE_SECONDS, SHUTDOWN_SECONDS
                await open_tls(connection, client, self._tls, self._encrypted, seconds)
            self.books.accepted += 1
        except (OSError, ssl.SSLError) as error:
            self.books.refused[Refused.TLS] += 1
            self._shared.failures.warn(None, "a connection was not opened: %s", error)
            client.close()
        finally:
            connection.opened()

    # -- watching -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at the connections now and then."""
        settings, shared = self.settings, self._shared
        tick = min(TICK, settings.frame_timeout / 4, settings.write_timeout / 4)
        idle_every = max(tick, settings.idle_timeout / IDLE_LOOKS)
        idle_at, before = idle_every, time.monotonic()
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            shared.now += min(now - before, 2 * tick)
            before = now
            idle = shared.now >= idle_at
            if idle:
                idle_at = shared.now + idle_every
            try:
                self._look(shared.now, idle=idle)
            except Exception as error:
                shared.failures.warn(error, "connections that take too long were not closed")

    def _look(self, now: float, *, idle: bool) -> None:
        """Close connections that take too long; looking at one may take it out of its set."""
        shared = self._shared
        for connection in [one for one in shared.arriving if one.is_late(now)]:
            connection.abort(Closed.SLOW_REQUEST)
        for connection in [one for one in list(shared.unsent) if one.is_stuck(now)]:
            connection.abort(Closed.NOT_READING)
        if idle:
            for connection in [one for one in shared.connections if one.is_idle(now)]:
                connection.abort(Closed.IDLE)


def _cannot_listen(address: str, error: OSError) -> MillstreamError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(address)
    return ConfigError(f"cannot listen on {address}: {error}")


def _with_files(wanted: int) -> int:
    """Let this process have that many connections; how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN_FILES
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= needed:
        return wanted
    possible = max(1, soft - OWN_FILES)
    _log.warning(
        "this process may open %d files, enough for %d connections and not for max_connections, "
        "%d: raise the limit (ulimit -n, LimitNOFILE=)",
        soft,
        possible,
        wanted,
    )
    return possible
