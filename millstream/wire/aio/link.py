"""One TCP or TLS connection to one server, from handshake to loss."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from millstream.deadline import Deadline
from millstream.errors import AuthenticationFailed, ConnectError, ConnectFailed, ConnectionClosed
from millstream.settings import ConnectionSettings
from millstream.wire.handshake import (
    ServerAddress,
    ServerInfo,
    connect_line,
    is_authentication_error,
    parse_info,
)
from millstream.wire.protocol import PING, PONG, Handler, Parser, RunHandler
from millstream.wire.tls import check_tls, no_answer, open_failure, tls_context

__all__ = ["BrokenLinks", "Link", "LinkOwner", "open_link"]

_log = logging.getLogger("millstream.wire")

# Above this many unsent bytes the writer is asked to wait; two of the largest packs fit.
WRITE_BUFFER_BYTES_MAX: Final = 16 * 1024 * 1024
PINGS_UNANSWERED_MAX: Final = 2
# Read at most this much in one go. More would be allocated from the system each time, and its
# pages touched again: that costs more than another read (a fifth of a lone message's time).
READ_BYTES_MAX: Final = 64 * 1024


# A server that sends what cannot be read is left, and tried again, but not for ever: what it sends
# may be a message that is damaged on its disk.
BROKEN_LINKS_MAX: Final = 10
BROKEN_LINKS_SECONDS: Final = 60.0


class BrokenLinks:
    """Counts the links of a connection that were dropped because of what came over them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._when: deque[float] = deque(maxlen=BROKEN_LINKS_MAX)

    def add(self, link: Link) -> ConnectionClosed | None:
        """Count a lost link, if it was dropped; the error that ends the connection, or None."""
        if link.dropped_for is None:
            return None
        self._when.append(self._clock())
        if (
            len(self._when) < BROKEN_LINKS_MAX
            or self._when[-1] - self._when[0] > BROKEN_LINKS_SECONDS
        ):
            return None
        return ConnectionClosed(
            f"{BROKEN_LINKS_MAX} times within {BROKEN_LINKS_SECONDS:g} s, what the server sent "
            f"could not be handled: {link.dropped_for}. A message that is damaged on its disk can "
            f"be the cause"
        )


class LinkOwner(Protocol):
    """What a link reports to the connection that uses it."""

    def link_lost(self, link: Link, error: Exception | None) -> None: ...

    def link_congested(self, link: Link, congested: bool) -> None: ...

    def link_info(self, info: ServerInfo) -> None: ...

    def link_error(self, text: str) -> None: ...


class Link(asyncio.BufferedProtocol):
    """A socket with its parser; reports when it is lost and when it cannot take more."""

    def __init__(
        self, handlers: dict[bytes, Handler], runs: dict[bytes, RunHandler], owner: LinkOwner
    ) -> None:
        self._owner = owner
        self._parser = Parser(handlers, self._control, runs)
        self._buffer = memoryview(bytearray(READ_BYTES_MAX))
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.Future[ServerInfo] = self._loop.create_future()
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._heard = False  # anything since the last look
        self._resume: asyncio.Future[None] | None = None
        self._handshake_error: Exception | None = None
        self.transport: asyncio.Transport | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()  # done: the socket is closed
        self.info = ServerInfo()
        self.established = False
        self.lost = False
        self.dropped_for: Exception | None = None  # what came over it could not be handled

    # -- asyncio.BufferedProtocol ---------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        self._heard = True
        try:
            self._parser.feed(bytes(self._buffer[:size]))
        except Exception as error:  # a broken frame or handler: nothing after it can be trusted
            _log.exception("the connection is dropped: %s", error)
            self.dropped_for = error
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._gone.set_result(None)
        reason = self._handshake_error or ConnectFailed(
            f"the server closed the connection{_because(error)}"
        )
        reason.__cause__ = error
        if not self._greeting.done():
            self._greeting.set_exception(reason)
            self._greeting.exception()  # seen: it is raised where the handshake waits
        self.resume_writing()
        while self._pongs:
            pong = self._pongs.popleft()
            if not pong.done():
                pong.set_exception(reason)
                pong.exception()
        if self.established:
            self._owner.link_lost(self, error)

    def pause_writing(self) -> None:
        if self._resume is None:
            self._resume = self._loop.create_future()
            self._owner.link_congested(self, True)

    def resume_writing(self) -> None:
        if self._resume is not None:
            if not self._resume.done():
                self._resume.set_result(None)
            self._resume = None
            self._owner.link_congested(self, False)

    # -- for the connection ---------------------------------------------------------------

    async def writable(self) -> None:
        """Return when the socket takes more bytes (or is lost)."""
        while self._resume is not None:
            await asyncio.shield(self._resume)

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.lost:
            self.transport.write(data)

    def read(self, wanted: bool) -> None:
        """Read from the socket, or leave what arrives in it."""
        if self.transport is None or self.lost or self.transport.is_reading() == wanted:
            return
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def ping(self) -> asyncio.Future[None]:
        """Send a ping; the future is done when its pong arrives."""
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self.write(PING)
        return pong

    def check_life(self) -> bool:
        """Ping the server; False when it has answered no ping and sent nothing else for a while.

        Messages count: behind many of them a pong may take long.
        """
        heard, self._heard = self._heard, False
        if len(self._pongs) < PINGS_UNANSWERED_MAX:
            self.ping()
            return True
        return heard

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        """Start to close: the bytes written so far are sent first, and TLS ends."""
        if self.transport is not None:
            self.transport.close()

    async def wait_closed(self, timeout: float) -> None:
        """Return when the socket is closed; what is not sent by then is dropped.

        A program whose event loop ended earlier would lose the rest of the bytes and leave the
        socket open.
        """
        if self.transport is None:
            return
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self.abort()
            await self._gone  # after an abort it takes a few turns of the event loop

    # -- control lines --------------------------------------------------------------------

    def _control(self, op: bytes, rest: bytes) -> None:
        if op == b"PING":
            self.write(PONG)
        elif op == b"PONG":
            if self._pongs:
                pong = self._pongs.popleft()
                if not pong.done():
                    pong.set_result(None)
        elif op == b"INFO":
            self.info = parse_info(rest)
            if not self._greeting.done():
                self._greeting.set_result(self.info)
            elif self.established:
                self._owner.link_info(self.info)
        elif op == b"-ERR":
            self._server_error(rest.decode("utf-8", "replace").strip().strip("'"))

    def _server_error(self, text: str) -> None:
        if not self.established and is_authentication_error(text):
            self._handshake_error = AuthenticationFailed(
                f"the server refused the credentials: {text}. "
                f"Check user, password, token or key (NATS_USER, NATS_PASSWORD, ...)"
            )
        elif not self.established:
            self._handshake_error = ConnectFailed(f"the server refused the connection: {text}")
        else:
            self._owner.link_error(text)

    async def greeting(self) -> ServerInfo:
        return await asyncio.shield(self._greeting)


def _because(error: Exception | None) -> str:
    return f": {error}" if error else ""


async def open_link(
    address: ServerAddress,
    settings: ConnectionSettings,
    make_link: Callable[[], Link],
    deadline: Deadline,
) -> Link:
    """Connect, secure, introduce ourselves; an established link, or an error and nothing left."""
    loop = asyncio.get_running_loop()
    link = make_link()
    wants_tls = address.tls or settings.tls is not None
    first: ssl.SSLContext | None = None
    try:
        async with asyncio.timeout(deadline.left()):
            if settings.tls is not None and settings.tls.handshake_first:
                first = await _context(settings)
            await loop.create_connection(lambda: link, address.host, address.port, ssl=first)
            info = await link.greeting()
            if first is None and (wants_tls or info.tls_required):
                check_tls(address, settings.tls, info)
                await _upgrade(link, await _context(settings), address.host)
            link.write(await _introduction(info, settings, address))
            await link.ping()
    except TimeoutError as error:
        link.abort()
        raise no_answer(address, settings.tls, link.info, deadline.seconds) from error
    except (ConnectError, OSError) as error:
        link.abort()
        failure = open_failure(error, address, settings.tls, link.info)
        if failure is error:
            raise
        raise failure from error
    except BaseException:
        link.abort()
        raise
    if link.lost:
        raise ConnectFailed(f"{address} closed the connection during the handshake")
    link.established = True
    return link


async def _introduction(
    info: ServerInfo, settings: ConnectionSettings, address: ServerAddress
) -> bytes:
    """The CONNECT line; a creds file and a library for keys are read off the event loop."""
    if settings.creds or settings.nkey_seed:
        return await asyncio.to_thread(connect_line, info, settings, address)
    return connect_line(info, settings, address)


async def _context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Whom to trust; the files are read off the event loop."""
    return await asyncio.to_thread(tls_context, settings.tls)


async def _upgrade(link: Link, context: ssl.SSLContext, host: str) -> None:
    loop = asyncio.get_running_loop()
    transport = link.transport and await loop.start_tls(
        link.transport, link, context, server_hostname=host
    )
    if transport is None:
        raise ConnectFailed("the connection was lost during the TLS handshake")
    link.connection_made(transport)
