"""A connection that lasts: reconnects automatically, keeps its subscriptions, sends requests.

Own code and not a client library because of what was measured (bench/messaging.py prints it):
publishers and readers need all frames of a chunk together and a write that passes no queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol
from weakref import WeakSet

from millstream.deadline import Deadline
from millstream.errors import (
    ConnectError,
    ConnectionClosed,
    NoResponders,
    PayloadTooLarge,
    PermissionDenied,
    RequestTimeout,
)
from millstream.failure_log import FailureLog
from millstream.settings import ConnectionSettings
from millstream.wire.aio.link import BrokenLinks, Link, open_link
from millstream.wire.handshake import ServerAddress, ServerInfo, denied_subject, parse_address
from millstream.wire.protocol import (
    EMPTY_HEADERS,
    Handler,
    RunHandler,
    encode_subject,
    hpub,
    pub,
    status_of,
    sub,
    unique_token,
    unsub,
)
from millstream.wire.tls import worst_of

__all__ = ["Connection", "Drainable", "Interest", "Outlet"]

_log = logging.getLogger("millstream.wire")

# Small writes of one turn of the event loop are joined, up to this size.
COALESCE_BYTES_MAX: Final = 256 * 1024
# Each connection attempt gets this share of time, so that one dead server does not eat it all.
ATTEMPT_SECONDS_MAX: Final = 2.0
# How long a connection that closes waits for its last bytes to leave and for TLS to end.
CLOSE_SECONDS: Final = 5.0
# An attempt to reconnect that is late by more than this: the process or its machine was paused.
PAUSED_SECONDS: Final = 5.0


@dataclass(slots=True)
class Interest:
    """One SUB on the server, sent again after every reconnect."""

    sid: bytes
    subject: bytes
    queue: bytes


class Drainable(Protocol):
    """What can drain: takes nothing new, finishes what it has, within the seconds given."""

    async def drain(self, timeout: float | None = None) -> None: ...


class Outlet(Protocol):
    """What buffers messages to send, and has sent them all when it is closed."""

    async def close(self) -> None: ...


class Connection:
    """A NATS connection of one event loop. What it sends itself is delivered at most once."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._seeds = [parse_address(url) for url in settings.urls]
        self._discovered: list[ServerAddress] = []
        self._handlers: dict[bytes, Handler] = {}
        self._runs: dict[bytes, RunHandler] = {}
        self._interests: dict[bytes, Interest] = {}
        self._link: Link | None = None
        self._address: ServerAddress | None = None
        self.info = ServerInfo()  # what the server (the last one) reported about itself
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_planned = False
        self._closed: ConnectError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected = asyncio.Event()
        self._sid = 0
        self._token = 0
        self.inbox = f"{settings.inbox_prefix}.{unique_token()}"
        self._reply_prefix = f"{self.inbox}.".encode()
        self._replies: dict[bytes, tuple[asyncio.Future[tuple[bytes, bytes]], str]] = {}
        self._impatient: set[asyncio.Future[tuple[bytes, bytes]]] = set()  # whose callers ask again
        self.on_connected: list[Callable[[], None]] = []  # again, and subscriptions are back
        self.on_disconnected: list[Callable[[], None]] = []
        self._outages = FailureLog(_log)
        self.on_denied: list[Callable[[PermissionDenied], None]] = []
        self.on_closed: list[Callable[[], None]] = []
        # These drain before it closes: first what takes messages, then what collects some to send.
        self.intakes: WeakSet[Drainable] = WeakSet()
        self.outlets: WeakSet[Outlet] = WeakSet()
        self.reconnects = 0
        self._broken_links = BrokenLinks()
        self.congested = False  # the socket is full: `await writable()` before sending more
        self._reading = True

    # -- life -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the first server that answers, within the connect timeout."""
        self._loop = asyncio.get_running_loop()
        deadline = Deadline(self.settings.connect_timeout)
        self.subscribe(f"{self.inbox}.*", self._reply)
        if not self._adopt(*await self._any_server(deadline)):
            self._spawn(self._reconnect())
        self._spawn(self._watch())

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Send what is buffered, then close. Afterwards every call raises ConnectionClosed."""
        if self._closed is not None:
            return
        self._flush()
        link, self._link = self._link, None
        self._end(ConnectionClosed("the connection was closed"))
        if link is not None:
            link.close()
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if link is not None:
                await link.wait_closed(timeout)
        except BaseException:  # cancelled
            if link is not None:
                link.abort()
            raise

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def closed(self) -> bool:
        return self._closed is not None

    @property
    def url(self) -> str:
        return str(self._address) if self._address else self.settings.urls[0]

    async def wait_connected(self, deadline: Deadline) -> None:
        """Return when there is a connection; raise when it is closed or the time is up."""
        self.check_open()
        if self._link is not None:
            return
        try:
            async with asyncio.timeout(deadline.left()):
                await self._connected.wait()
        except TimeoutError as error:
            raise RequestTimeout(self.url, deadline.seconds, ": not connected") from error
        self.check_open()

    def check_open(self) -> None:
        if self._closed is not None:
            raise ConnectionClosed(str(self._closed)) from self._closed

    # -- sending --------------------------------------------------------------------------

    def publish(
        self, subject: bytes, payload: bytes, reply: bytes = b"", headers: bytes = EMPTY_HEADERS
    ) -> None:
        """Send a core message, at most once; kept in a bounded buffer while disconnected."""
        self.check_size(len(headers) + len(payload))
        if headers:
            self.send(hpub(subject, reply, headers, payload))
        else:
            self.send(pub(subject, reply, payload))

    def check_size(self, size: int) -> None:
        if size > self.info.max_payload:
            raise PayloadTooLarge(size, self.info.max_payload)

    def send(self, frame: bytes) -> None:
        """Queue a frame; the frames of one turn of the event loop leave in one write."""
        if self._link is None:
            self._check_buffer(len(frame))  # it is sent when the connection is back
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= COALESCE_BYTES_MAX:
            self._flush()
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _check_buffer(self, size: int) -> None:
        self.check_open()
        limit = self.settings.reconnect.buffer_bytes
        if self._out_bytes + size > limit:
            raise ConnectError(
                f"disconnected from {self.url} and the buffer of {limit:,} bytes is full"
            )

    def send_now(self, frame: bytes) -> None:
        """Send a frame without waiting for others to join it: for a lone awaited message."""
        if self._link is not None and not self._out:
            self._link.write(frame)
        else:
            self.send(frame)
            self._flush()

    async def writable(self) -> None:
        """Return when the socket takes more bytes, or is lost."""
        if self._link is not None:
            await self._link.writable()

    @property
    def buffered_bytes(self) -> int:
        """Bytes sent in this turn of the event loop that have not gone to the socket yet."""
        return self._out_bytes

    def pause_reading(self) -> None:
        """Leave what arrives in the socket, so that the server feels it; PONGs wait there too."""
        self._reading = False
        if self._link is not None:
            self._link.read(False)

    def resume_reading(self) -> None:
        """Read again."""
        self._reading = True
        if self._link is not None:
            self._link.read(True)

    async def flush(self, timeout: float | None = None) -> None:
        """Return when the server has handled everything sent so far."""
        deadline = Deadline(self.settings.request_timeout if timeout is None else timeout)
        await self.wait_connected(deadline)
        self._flush()
        link = self._link
        if link is None:
            raise ConnectError(f"the connection to {self.url} was lost while flushing")
        try:
            async with asyncio.timeout(deadline.left()):
                await link.ping()
        except TimeoutError as error:
            raise RequestTimeout(self.url, deadline.seconds, ": the flush is not done") from error

    def _flush(self) -> None:
        self._flush_planned = False
        link = self._link
        if link is None or not self._out:
            return
        out = self._out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self._out_bytes = 0
        link.write(data)

    # -- subscribing and requests ---------------------------------------------------------

    def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Interest:
        """Have `handler` called for every message; it must not raise and must not block."""
        interest = self._interest(subject, queue)
        self._handlers[interest.sid] = handler
        return interest

    def subscribe_runs(self, subject: str, handler: RunHandler) -> Interest:
        """Like `subscribe`, for handlers that take messages in batches."""
        interest = self._interest(subject, "")
        self._runs[interest.sid] = handler
        return interest

    def _interest(self, subject: str, queue: str) -> Interest:
        self.check_open()
        self._sid += 1
        interest = Interest(b"%d" % self._sid, encode_subject(subject), encode_subject(queue))
        self._interests[interest.sid] = interest
        if self._link is not None:
            self.send(sub(interest.subject, interest.queue, interest.sid))
        return interest

    def stop_interest(self, interest: Interest) -> None:
        """Tell the server to send no more; messages under way are still handled."""
        if self._interests.pop(interest.sid, None) is not None and self._link is not None:
            self.send(unsub(interest.sid))

    def unsubscribe(self, interest: Interest) -> None:
        """End a subscription immediately."""
        self._handlers.pop(interest.sid, None)
        self._runs.pop(interest.sid, None)
        if self._closed is None:
            self.stop_interest(interest)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = EMPTY_HEADERS,
        timeout: float | None = None,
        *,
        asks_again: bool = False,
    ) -> tuple[bytes, bytes]:
        """Send a request; header block and payload of the first answer. Later ones are dropped.

        A caller that asks again does not wait for an answer that was lost with the connection: it
        gets a ConnectError.
        """
        deadline = Deadline(self.settings.request_timeout if timeout is None else timeout)
        await self.wait_connected(deadline)
        future = self.ask(subject, payload, headers, asks_again=asks_again)
        timer = self._loop.call_later(deadline.left(), self._request_timeout, future)
        try:
            return await future
        except TimeoutError as error:
            raise RequestTimeout(subject, deadline.seconds) from error
        finally:
            timer.cancel()

    def ask(
        self, subject: str, payload: bytes, headers: bytes = EMPTY_HEADERS,
        *, asks_again: bool, together: bool = False,
    ) -> asyncio.Future[tuple[bytes, bytes]]:  # fmt: skip
        """Send a request, alone or together with others in one write; the future of its answer."""
        self.check_size(len(headers) + len(payload))
        to = encode_subject(subject)
        self._token += 1
        token = b"%d" % self._token
        reply = self._reply_prefix + token
        send = self.send if together else self.send_now
        send(hpub(to, reply, headers, payload) if headers else pub(to, reply, payload))
        future: asyncio.Future[tuple[bytes, bytes]] = self._loop.create_future()
        future.add_done_callback(partial(self._asked, token))
        self._replies[token] = (future, subject)
        if asks_again:
            self._impatient.add(future)
        return future

    def _asked(self, token: bytes, future: asyncio.Future[tuple[bytes, bytes]]) -> None:
        self._replies.pop(token, None)
        self._impatient.discard(future)

    @staticmethod
    def _request_timeout(future: asyncio.Future[tuple[bytes, bytes]]) -> None:
        if not future.done():
            future.set_exception(TimeoutError())

    def _reply(self, subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        future, asked = self._replies.get(subject[len(self._reply_prefix) :], (None, ""))
        if future is None or future.done():
            return
        if not payload and status_of(headers)[0] == 503:
            future.set_exception(NoResponders(asked))
        else:
            future.set_result((headers, payload))

    # -- what a link reports --------------------------------------------------------------

    def link_info(self, info: ServerInfo) -> None:
        self.info = info
        self._discover(info)

    def link_error(self, text: str) -> None:
        denied = denied_subject(text, self.settings, self._address)
        if denied is None:
            _log.warning("the server says: %s", text)
            return
        for future, subject in list(self._replies.values()):
            if subject == denied.subject and not future.done():
                future.set_exception(denied)
        for report in list(self.on_denied):
            report(denied)

    def link_congested(self, link: Link, congested: bool) -> None:
        if link is self._link:
            self.congested = congested

    def link_lost(self, link: Link, error: Exception | None) -> None:
        if link is not self._link:
            return
        self._link = None
        self._connected.clear()
        if self._closed is not None:
            return
        reason = f": {error}" if error else ""
        self._outages.warn(None, "the connection to %s was lost%s", self.url, reason)
        for future in self._impatient:
            if not future.done():
                future.set_exception(ConnectError(f"the connection to {self.url} was lost"))
        for report in list(self.on_disconnected):
            report()
        if (closed := self._broken_links.add(link)) is not None:
            self._end(closed)
        else:
            self._spawn(self._reconnect())

    # -- connecting -----------------------------------------------------------------------

    def _adopt(self, link: Link, address: ServerAddress) -> bool:
        """Continue over this link; False if it was lost again in the meantime."""
        if link.lost:
            return False
        self._link, self._address, self.info = link, address, link.info
        self._discover(link.info)
        frames = [sub(i.subject, i.queue, i.sid) for i in self._interests.values()]
        link.write(b"".join(frames))
        if not self._reading:
            link.read(False)
        self._flush()
        self._connected.set()
        return True

    def _discover(self, info: ServerInfo) -> None:
        known = {(a.host, a.port) for a in self._seeds}
        found = [parse_address(url) for url in info.connect_urls]
        self._discovered = [a for a in found if (a.host, a.port) not in known]

    async def _any_server(self, deadline: Deadline) -> tuple[Link, ServerAddress]:
        """One round over all known servers, the seeds first, each with a share of the time."""
        seeds, others = self._seeds, random.sample(self._discovered, len(self._discovered))
        errors: list[ConnectError] = []
        for address in [*seeds, *others]:
            share = Deadline(deadline.left(at_most=ATTEMPT_SECONDS_MAX if len(seeds) > 1 else None))
            try:
                link = await open_link(
                    address, self.settings, lambda: Link(self._handlers, self._runs, self), share
                )
                return link, address
            except ConnectError as error:
                errors.append(error)
        raise worst_of(errors)

    async def _reconnect(self) -> None:
        rules = self.settings.reconnect
        give_up = Deadline(rules.give_up_after)
        wait = rules.wait
        while True:
            due = Deadline(self.settings.connect_timeout + wait + PAUSED_SECONDS)
            try:
                left = give_up.left(at_most=self.settings.connect_timeout)
                link, address = await self._any_server(Deadline(left))
            except ConnectError as error:
                if give_up.passed and not due.passed:
                    reason = f"gave up reconnecting after {rules.give_up_after:g} s: {error}"
                    self._end(ConnectionClosed(reason))
                    return
                # Jitter, so that a thousand clients do not come back in the same moment.
                await asyncio.sleep(give_up.left(at_most=wait * (0.5 + random.random() / 2)))
                wait = min(wait * 2, rules.wait_max)
                if due.passed:
                    give_up = Deadline(rules.give_up_after)
                continue
            if not self._adopt(link, address):
                continue
            self.reconnects += 1
            _log.info("connected again, to %s", self.url)
            for report in list(self.on_connected):
                report()
            return

    async def _watch(self) -> None:
        """Ping an idle server; one that does not answer twice counts as lost."""
        while True:
            await asyncio.sleep(self.settings.ping_interval)
            link = self._link
            # While reading is paused, pongs wait in the socket.
            if link is not None and self._reading and not link.check_life():
                link.abort()

    def _end(self, error: ConnectError) -> None:
        self._closed = error
        link, self._link, self.congested = self._link, None, False
        if link is not None:
            link.abort()
        self._connected.set()  # wakes those who wait; they see that it is closed
        for future, _ in list(self._replies.values()):
            if not future.done():
                future.set_exception(ConnectionClosed(str(error)))
        for report in list(self.on_closed):
            report()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the connection ends: %s", error, exc_info=error)
            if self._closed is None:
                self._end(ConnectionClosed(f"the connection failed: {error}"))
