"""Subscribers of core subjects: messages one by one or to a handler, with bounded buffers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from millstream.closing import AsyncClosing
from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosed,
    MillstreamError,
    NoMessage,
    PermissionDenied,
    RequestTimeout,
    SubscriberClosed,
)
from millstream.events.subject import check_subject
from millstream.failure_log import FailureLog, check_handler
from millstream.messaging.core.message import Message
from millstream.messaging.core.overload import Counters, Overload, SubscriberSettings
from millstream.wire.aio.connection import Connection, Interest

__all__ = ["FLOW_PREFIX", "MessageHandler", "Subscriber"]

_log = logging.getLogger("millstream.messaging")

# A reader that always finds a message must yield to other tasks now and then; a power of two.
YIELD_MESSAGES: Final = 256
# Where senders that wait for blocking subscribers ask whether they may continue.
FLOW_PREFIX: Final = "$MILL.FLOW"

MessageHandler = Callable[[Message], Awaitable[None] | None]


class Subscriber(AsyncClosing):
    """Messages of a subject (wildcards `*` and `>`), at most once, in order of each publisher.

    Iterate (`async with subscriber: async for message in subscriber`), take single ones with
    `next`, or give a handler. After a reconnect the subscription continues automatically;
    messages published in between are lost. A subject this user may not read raises
    PermissionDenied.
    """

    def __init__(
        self,
        connection: Connection,
        subject: str,
        settings: SubscriberSettings | None = None,
        handler: MessageHandler | None = None,
    ) -> None:
        self.subject = check_subject(subject, wildcards=True)
        if handler is not None:
            check_handler(handler)
        self.settings = settings or SubscriberSettings()
        self._connection = connection  # for replies
        self._source = connection  # where messages come from; a separate one when it may block
        self._handler = handler
        self._interests: list[Interest] = []
        self._buffer: deque[Message] = deque()
        self._bytes = 0
        self._messages_max = self.settings.messages_max
        self._bytes_max = self.settings.bytes_max
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._workers: list[asyncio.Task[None]] = []
        self._state = "new"  # then "open", then "ended": no more messages are added
        self._error: MillstreamError | None = None  # why it ended, if not on purpose
        self._held: _Hold | None = None  # set while the buffer of a `block` subscriber is full
        self._received = self._delivered = self._dropped = 0
        self._failed = self._interruptions = 0
        self._failures = FailureLog(_log)
        self._blocked_seconds = 0.0

    # -- life -----------------------------------------------------------------------------

    async def open(self) -> Self:
        """Subscribe; when this returns, everything published from now on is received."""
        self.start()
        try:
            if self.settings.overload is Overload.BLOCK:
                await self._open_own_connection()
                self._listen()
            await self._source.flush()
        except BaseException:
            await self.close()
            raise
        if self._error is not None:
            await self.close()
            raise self._error
        return self

    def start(self) -> None:
        """Subscribe without waiting for the server's reply, for code that cannot wait."""
        if self._state != "new":
            raise ConfigError(
                f"the subscriber of '{self.subject}' was opened before; use a new one"
            )
        self._loop = asyncio.get_running_loop()
        self._state = "open"
        self._connection.intakes.add(self)
        if self.settings.overload is not Overload.BLOCK:
            self._listen()
        if self._handler is not None:
            self._workers = [
                self._loop.create_task(self._work(self._handler))
                for _ in range(self.settings.concurrency)
            ]

    async def _open_own_connection(self) -> None:
        """Blocking must not delay the acks and replies of the rest of the program."""
        base = self._connection.settings
        settings = replace(
            base,
            name=f"{base.name} (blocking subscriber of {self.subject})",
            # While it does not read it sees no PONG either: the connection is not lost.
            ping_interval=max(base.ping_interval, 2 * self.settings.block_seconds),
        )
        own = Connection(settings)
        await own.open()
        self._source = own

    def _listen(self) -> None:
        source = self._source
        source.on_denied.append(self._denied)
        source.on_disconnected.append(self._interrupted)
        source.on_closed.append(self._source_closed)
        self._interests.append(source.subscribe(self.subject, self._take, self.settings.queue))
        if self.settings.overload is Overload.BLOCK:
            asked = f"{FLOW_PREFIX}.{self.subject}"
            self._interests.append(source.subscribe(asked, self._answer_sender))

    async def drain(self, timeout: float | None = None) -> None:
        """Stop receiving without losing pending messages: the reader gets them, then the end.

        With a handler this waits until it has handled everything; messages left after `timeout`
        seconds count as dropped, and RequestTimeout is raised.
        """
        if self._state != "open":
            return
        seconds = self._source.settings.request_timeout if timeout is None else timeout
        deadline = Deadline(seconds)
        try:
            for interest in self._interests:
                self._source.stop_interest(interest)
            await self._source.flush(deadline.left())
        except RequestTimeout as error:
            if self._workers:
                await self.close()
            hint = ": the server did not answer"
            raise RequestTimeout(self.subject, seconds, hint) from error
        finally:
            self._end_intake()
            await self._close_own_connection()
        if self._workers:
            await asyncio.wait(self._workers, timeout=deadline.left())
            if any(not worker.done() for worker in self._workers):
                await self.close()
                raise RequestTimeout(self.subject, seconds, ": handlers were still running")

    async def close(self) -> None:
        """Stop now; pending messages count as dropped and running handlers are cancelled."""
        self._end_intake()
        self._dropped += len(self._buffer)
        self._buffer.clear()
        self._bytes = 0
        current = asyncio.current_task()
        others = [worker for worker in self._workers if worker is not current]
        for worker in others:
            worker.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._close_own_connection()

    async def _close_own_connection(self) -> None:
        if self._source is not self._connection:
            await self._source.close()

    def _end_intake(self, error: MillstreamError | None = None) -> None:
        if self._state == "ended":
            return
        if self._state == "open":
            self._release()
            source = self._source
            for listeners, ours in (
                (source.on_denied, self._denied),
                (source.on_disconnected, self._interrupted),
                (source.on_closed, self._source_closed),
            ):
                if ours in listeners:
                    listeners.remove(ours)  # type: ignore[arg-type]
            for interest in self._interests:
                source.unsubscribe(interest)
        self._state = "ended"
        self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything the server had for this subscriber is received."""
        await self._source.flush(timeout)

    async def _enter(self) -> None:
        if self._state != "open":
            await self.open()

    async def _leave(self, error: BaseException | None) -> None:
        try:
            if self._handler is not None and error is None and not self._source.closed:
                await self.drain()
        finally:
            await self.close()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.open().__await__()

    # -- intake: called by the connection, must not raise ---------------------------------

    def _take(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._received += 1
        message = Message(self._connection, subject, reply, headers, data)
        buffer = self._buffer
        size = len(data) + len(headers)
        if (
            len(buffer) >= self._messages_max or self._bytes + size > self._bytes_max
        ) and not self._make_room(message, size):
            return
        buffer.append(message)
        self._bytes += size
        if self._waiters:
            self._wake_one()

    def _make_room(self, message: Message, size: int) -> bool:
        """Handle a full buffer; whether the message is added to it."""
        buffer, overload = self._buffer, self.settings.overload
        if not buffer:
            return True
        if overload is Overload.DROP_OLD:
            while buffer and (
                len(buffer) >= self._messages_max or self._bytes + size > self._bytes_max
            ):
                oldest = buffer.popleft()
                self._bytes -= oldest.size
                self._drop(oldest)
            return True
        if overload is Overload.BLOCK:
            hold = self._held or self._hold()
            if not hold.given_up:
                return True  # the rest of one read: at most 256 KiB
        self._drop(message)
        return False

    def _drop(self, message: Message) -> None:
        self._dropped += 1
        if self.settings.on_drop is not None:
            try:
                self.settings.on_drop(message)
            except Exception as error:
                text = "on_drop of the subscriber of '%s' failed"
                self._failures.warn(error, text, self.subject)

    def _hold(self) -> _Hold:
        self._source.pause_reading()
        since = self._loop.time()
        timer = self._loop.call_at(since + self.settings.block_seconds, self._give_up_holding)
        self._held = _Hold(since, timer)
        return self._held

    def _give_up_holding(self) -> None:
        hold = self._held
        if hold is not None:
            hold.given_up = True
            self._blocked_seconds += self._loop.time() - hold.since
            _log.warning(
                "the subscriber of '%s' was full for %g s and drops messages now",
                self.subject,
                self.settings.block_seconds,
            )
            self._source.resume_reading()

    def _release(self) -> None:
        hold, self._held = self._held, None
        if hold is not None and not hold.given_up:
            hold.timer.cancel()
            self._blocked_seconds += self._loop.time() - hold.since
            self._source.resume_reading()

    def _answer_sender(self, _subject: bytes, reply: bytes, _headers: bytes, _data: bytes) -> None:
        """A paced sender's request, which arrives after its messages: all of them fitted."""
        if reply and not self._source.closed:
            self._source.publish(reply, self._source.inbox.encode())

    def _denied(self, denied: PermissionDenied) -> None:
        ours = denied.subject == self.subject and denied.queue == self.settings.queue
        if ours and denied.operation.startswith("subscribe"):
            self._end_intake(denied)

    def _interrupted(self) -> None:
        self._interruptions += 1

    def _source_closed(self) -> None:
        self._end_intake(
            ConnectionClosed(f"the connection of the subscriber of '{self.subject}' was closed")
        )

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    # -- reading --------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._delivered % YIELD_MESSAGES == YIELD_MESSAGES - 1:
            await asyncio.sleep(0)
        buffer = self._buffer
        if not buffer:
            await self._wait()
        message = buffer.popleft()
        self._delivered += 1
        self._bytes -= len(message.data) + len(message._block)
        if self._held is not None:
            self._release_if_half_empty()
        return message

    async def _wait(self) -> None:
        """Return when there is a message; raise when there will be none."""
        while not self._buffer:
            if self._state == "ended":
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            if self._state == "new":
                raise ConfigError(
                    f"the subscriber of '{self.subject}' is not open: use `async with` or `await`"
                )
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif self._buffer:
                    self._wake_one()  # it was woken for a message that another reader took
                raise

    def _release_if_half_empty(self) -> None:
        if len(self._buffer) <= self._messages_max // 2 and self._bytes <= self._bytes_max // 2:
            self._release()

    async def next(self, timeout: float | None = None) -> Message:
        """The next message; NoMessage after `timeout` seconds without one (None: no limit)."""
        try:
            if timeout is None or self._buffer:
                return await self.__anext__()
            async with asyncio.timeout(timeout):
                return await self.__anext__()
        except StopAsyncIteration:
            raise SubscriberClosed(self.subject) from None
        except TimeoutError as error:
            raise NoMessage(self.subject, timeout or 0) from error

    async def _work(self, handler: MessageHandler) -> None:
        """One of the tasks that call the handler; an error in it is logged and counted."""
        try:
            async for message in self:
                try:
                    result = handler(message)
                    if inspect.isawaitable(result):
                        await result
                except Exception as error:
                    self._failed += 1
                    self._failures.warn(error, "the handler of '%s' failed", self.subject)
        except (ConnectError, PermissionDenied) as error:
            _log.error("the subscriber of '%s' ends: %s", self.subject, error)

    # -- counting -------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """A consistent count of everything that arrived so far."""
        blocked = self._blocked_seconds
        if self._held is not None and not self._held.given_up:
            blocked += self._loop.time() - self._held.since
        return Counters(
            received=self._received,
            delivered=self._delivered,
            dropped=self._dropped,
            pending=len(self._buffer),
            pending_bytes=self._bytes,
            failed=self._failed,
            interruptions=self._interruptions,
            blocked_seconds=blocked,
        )

    @property
    def pending(self) -> int:
        """Messages that were received and not handed out."""
        return len(self._buffer)

    @property
    def error(self) -> MillstreamError | None:
        """Why the subscriber ended, when it was not closed or drained."""
        return self._error

    def __repr__(self) -> str:
        return f"Subscriber({self.subject!r}, {self._state}, {len(self._buffer)} pending)"


@dataclass(slots=True)
class _Hold:
    """The time in which a blocking subscriber does not read."""

    since: float  # loop time
    timer: asyncio.TimerHandle
    given_up: bool = False  # it took too long: read again and drop
