"""One connection with requests that have their length before them.

Idle connections hold no buffer: what arrives is first read into one that all connections share,
because it is looked at before anything else is read. Only the rest of a large request is read into
memory of its own. The length is checked, and room for the request taken, before that memory is.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, Final

from millstream.failure_log import FailureLog
from millstream.gateways.overload import Books, Budget, Closed
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.transport import FrameHandler, MakeHandler, Piece

__all__ = ["FramedConnection", "Shared"]

_log = logging.getLogger("millstream.gateways")

SCRATCH_BYTES: Final = 64 * 1024
UNSENT_MAX: Final = 64 * 1024  # bytes of answers; with more the client counts as not reading
READ_SLOWEST: Final = 64 * 1024  # bytes that a client must read within the write timeout
JOINED_MAX: Final = 64 * 1024  # bytes of an answer that are copied so as to be written at once
REQUEST_COST: Final = 2048  # bytes that a request takes besides its own: tasks, decoded fields

_LENGTH: Final = struct.Struct(">i")

# Why a connection is not read, as bits.
_BY_HANDLER: Final = 1
_UNSENT: Final = 2  # the client does not read
_OWN_BYTES: Final = 4  # the requests of this connection are too large together
_ALL_BYTES: Final = 8  # those of all are
_STOPPING: Final = 16


class Shared:
    """What the connections of a listener share."""

    def __init__(self, settings: GatewaySettings, make_handler: MakeHandler, books: Books) -> None:
        self.settings = settings
        self.make_handler = make_handler
        self.books = books
        self.budget = Budget(settings.max_bytes)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.now = 0.0  # seconds that this process was running, see Listener
        self.opening = 0  # connections that were accepted and are not made yet
        self.connections: set[FramedConnection] = set()
        self.arriving: set[FramedConnection] = set()  # with a part of a request
        self.unsent: set[FramedConnection] = set()  # with answers that the client has not read
        self.stopping = False
        self._gone = asyncio.Event()  # a connection was closed
        self.failures = FailureLog(_log)
        self.loop = asyncio.get_running_loop()

    async def none_open(self) -> None:
        """Wait until all connections are closed."""
        while self.connections:
            self._gone.clear()
            await self._gone.wait()

    def forget(self, connection: FramedConnection) -> None:
        """It is closed."""
        for group in (self.connections, self.arriving, self.unsent):
            group.discard(connection)
        self._gone.set()


class FramedConnection(asyncio.BufferedProtocol):
    """Reads requests, hands them to its handler, writes answers; see `Transport`."""

    __slots__ = (
        "_charged",
        "_flushed",
        "_frame",
        "_granted",
        "_handler",
        "_have",
        "_held",
        "_opening",
        "_paused",
        "_requests",
        "_sent",
        "_shared",
        "_since",
        "_transport",
        "_unread",
        "_why",
        "max_frame",
        "when_writable",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._transport: Any = None
        self._handler: FrameHandler | None = None  # None: not open, or lost
        self._frame: bytearray | None = None  # a request of which a part has arrived
        self._have = 0  # bytes of it
        self._unread = b""  # arrived, and not looked at yet
        self._paused = 0
        self._held = 0  # bytes of requests in progress, with their cost
        self._granted = False  # it has waited for room, and has it now
        self._requests = 0  # in progress
        self._sent = 0  # bytes of answers so far
        self._charged = 0  # bytes of answers that are not sent yet, as counted
        self._flushed = 0  # bytes that the client had read at `_since`
        self._since = shared.now  # when it last did something, or began what takes long
        self._why: Closed | None = None  # set when it is being closed
        self._opening = True
        shared.opening += 1
        self.max_frame = shared.settings.max_frame
        self.when_writable: Callable[[], None] | None = None

    # -- for the protocol: see `Transport` ----------------------------------------------------

    @property
    def peer(self) -> str:
        """The client's address."""
        return self._address(with_port=True)

    @property
    def host(self) -> str:
        """The client's host."""
        return self._address(with_port=False)

    @property
    def writable(self) -> bool:
        """Whether the client reads what it is sent."""
        return not self._paused & _UNSENT

    @property
    def room(self) -> int:
        """Bytes that answers may take at the moment."""
        return self._shared.budget.room

    def send(self, *pieces: Piece, frees: int = 0) -> None:
        """Write an answer."""
        if self._handler is None:
            return
        if self._why is None:
            size = sum(map(len, pieces))
            self._sent += size
            self._shared.books.bytes_out += size
            if len(pieces) > 1 and size <= JOINED_MAX:
                self._transport.write(b"".join(pieces))
            else:
                for piece in pieces:
                    self._transport.write(piece)
            if self._charged or self._transport.get_write_buffer_size():
                self._count_unsent()
        if frees:
            self.release(frees)

    def release(self, size: int) -> None:
        """A request is done."""
        if self._handler is None:
            return
        self._requests -= 1
        self._shared.books.in_flight -= 1
        self._since = self._shared.now
        self._give_back(size + REQUEST_COST)
        if self._paused & _STOPPING and not self._requests:
            self._end(Closed.STOPPED)

    def pause(self) -> None:
        """Take no more requests."""
        self._stop_reading(_BY_HANDLER)

    def resume(self) -> None:
        """Take requests again."""
        self._read_again(_BY_HANDLER)

    def close(self, reason: str) -> None:
        """Close it, because of what the client sent."""
        if self._why is None and self._handler is not None:
            self._shared.failures.warn(None, "%s: closed: %s", self.peer, reason)
        self._end(Closed.PROTOCOL)

    # -- for the listener ---------------------------------------------------------------------

    def opened(self) -> None:
        """It is not being opened any more: it is open, or will never be."""
        if self._opening:
            self._opening = False
            self._shared.opening -= 1

    def stop(self) -> None:
        """Take no more requests, and close when those in progress are answered."""
        self._stop_reading(_STOPPING)
        if not self._requests:
            self._end(Closed.STOPPED)

    def abort(self, why: Closed) -> None:
        """Close without writing what is left."""
        if self._transport is not None:
            self._why = self._why or why
            self._transport.abort()

    def is_late(self, now: float) -> bool:
        """Whether a request takes too long to arrive."""
        if self._paused:  # by us
            self._since = now
        return now - self._since > self._shared.settings.frame_timeout

    def is_stuck(self, now: float) -> bool:
        """Whether the client does not read, or too little."""
        size = self._count_unsent()
        if not size and self.writable:
            self._shared.unsent.discard(self)
            return False
        flushed = self._sent - size
        if flushed - self._flushed >= READ_SLOWEST:
            self._flushed, self._since = flushed, now
        return now - self._since > self._shared.settings.write_timeout

    def is_idle(self, now: float) -> bool:
        """Whether nothing has happened for long."""
        return not self._requests and now - self._since > self._shared.settings.idle_timeout

    def granted(self, size: int) -> None:
        """There is room for the request that waits; see `Budget`."""
        self._held += size
        self._granted = True
        self._read_again(_ALL_BYTES)

    # -- called by asyncio --------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """It is open."""
        shared = self._shared
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_MAX)
        self.opened()
        shared.connections.add(self)
        shared.books.open += 1
        try:
            self._handler = shared.make_handler(self)
        except Exception as error:
            shared.failures.warn(error, "%s: a connection was not set up", self.peer)
            self.abort(Closed.FAILED)
            return
        if shared.stopping:
            self.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        shared, handler = self._shared, self._handler
        why = self._why or (Closed.CLIENT if exc is None else Closed.LOST)
        shared.books.closed[why] += 1
        shared.books.open -= 1
        shared.books.in_flight -= self._requests
        shared.forget(self)
        self._handler, self._why, self._frame, self._unread = None, why, None, b""
        self.when_writable = None
        shared.budget.leave(self)
        shared.budget.give(self._held + self._charged)
        if handler is not None:
            try:
                handler.lost(str(why))
            except Exception as error:
                shared.failures.warn(error, "the end of a connection was not handled")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to."""
        if self._frame is not None:
            return memoryview(self._frame)[self._have :]
        # While requests wait for room, only the length of the next one is read.
        return self._shared.scratch[: _LENGTH.size if self._shared.budget.waiting else None]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived there."""
        self._shared.books.bytes_in += nbytes
        if self._frame is None:
            data: memoryview | bytes = self._shared.scratch[:nbytes]
            if self._unread:
                data = self._unread + bytes(data)
                self._unread = b""
            self._read(data)
            return
        self._have += nbytes
        if self._have == len(self._frame):
            data = bytes(self._frame)
            self._frame = None
            self._shared.arriving.discard(self)
            self._hand_over(data)

    def pause_writing(self) -> None:
        """The client does not read, or not as fast as it is sent answers."""
        if self._handler is not None:
            self._count_unsent()
            self._stop_reading(_UNSENT)

    def resume_writing(self) -> None:
        """It has read most of it."""
        if self._why is not None:
            return
        self._count_unsent()
        self._read_again(_UNSENT)
        if self.when_writable is not None:
            try:
                self.when_writable()
            except Exception as error:
                self._fail(error)

    # -- requests -----------------------------------------------------------------------------

    def _read(self, data: memoryview | bytes) -> None:
        """Hand over the requests in what has arrived, and keep the rest."""
        at, end = 0, len(data)
        while self._why is None:
            if self._paused or end - at < _LENGTH.size:
                self._keep(bytes(data[at:]))
                return
            (size,) = _LENGTH.unpack_from(data, at)
            if not 0 < size <= self.max_frame:
                self._refuse(size)
                return
            if not self._has_room(size + REQUEST_COST):
                self._keep(bytes(data[at:]))
                return
            at += _LENGTH.size
            if end - at >= size:
                self._hand_over(bytes(data[at : at + size]))
                at += size
                continue
            self._frame = bytearray(size)
            self._have = end - at
            self._frame[: self._have] = data[at:]
            self._wait_for_more()
            return

    def _keep(self, rest: bytes) -> None:
        self._unread = rest
        if rest:
            self._wait_for_more()
        else:
            self._shared.arriving.discard(self)

    def _wait_for_more(self) -> None:
        if self not in self._shared.arriving:
            self._shared.arriving.add(self)
            self._since = self._shared.now

    def _has_room(self, size: int) -> bool:
        """Take room for a request; else the connection is not read until there is some."""
        shared = self._shared
        if self._granted:
            self._granted = False
            return True
        if self._held and self._held + size > shared.settings.max_connection_bytes:
            shared.books.waited += 1
            self._stop_reading(_OWN_BYTES)
            return False
        if not shared.budget.take(size, self):
            shared.books.waited += 1
            self._stop_reading(_ALL_BYTES)
            return False
        self._held += size
        return True

    def _give_back(self, size: int) -> None:
        self._held -= size
        self._shared.budget.give(size)
        self._read_again(_OWN_BYTES)

    def _hand_over(self, data: bytes) -> None:
        shared, handler = self._shared, self._handler
        if handler is None:
            return
        self._requests += 1
        self._since = shared.now
        shared.books.requests += 1
        shared.books.in_flight += 1
        try:
            handler.frame(data)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._shared.failures.warn(error, "%s: closed, because a request failed", self.peer)
        self._end(Closed.FAILED)

    def _refuse(self, size: int) -> None:
        large = size > 0
        limit = f"the limit is {self.max_frame:,}" if large else "it must be above 0"
        text = "%s: closed: the length of a request is %d bytes, %s"
        self._shared.failures.warn(None, text, self.peer, size, limit)
        self._end(Closed.TOO_LARGE if large else Closed.BAD_LENGTH)

    # -- reading, writing, closing ------------------------------------------------------------

    def _stop_reading(self, why: int) -> None:
        if not self._paused and self._transport is not None:
            self._transport.pause_reading()
        self._paused |= why

    def _read_again(self, why: int) -> None:
        if self._paused & why:
            self._paused &= ~why
            if not self._paused:
                self._shared.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Look at what has arrived before the pause, then read more."""
        if self._paused or self._why is not None or self._handler is None:
            return
        self._since = self._shared.now
        if self._unread and self._frame is None:
            data, self._unread = self._unread, b""
            self._read(data)
        if not self._paused and self._why is None:
            self._transport.resume_reading()

    def _count_unsent(self) -> int:
        """Count answers that the client has not read, and watch it; how many bytes they are."""
        size: int = 0 if self._handler is None else self._transport.get_write_buffer_size()
        change, self._charged = size - self._charged, size
        if change > 0:
            self._shared.budget.force(change)
        elif change < 0:
            self._shared.budget.give(-change)
        if size and self not in self._shared.unsent:
            self._shared.unsent.add(self)
            self._flushed, self._since = self._sent - size, self._shared.now
        return size

    def _end(self, why: Closed) -> None:
        """Close it when what was sent is written."""
        if self._why is None and self._transport is not None:
            self._why = why
            self._shared.arriving.discard(self)
            self._count_unsent()  # closed by force if the client does not read
            self._transport.close()

    def _address(self, *, with_port: bool) -> str:
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        if not name:
            return "unknown"
        host, port = name[0], name[1]
        if not with_port:
            return str(host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
