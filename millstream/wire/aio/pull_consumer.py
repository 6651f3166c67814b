"""Pulling from a JetStream consumer: always asks ahead, for a bounded number."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    ConnectError,
    ConnectionClosed,
    MillstreamError,
    NoResponders,
    RequestTimeout,
    SubscriptionNotFound,
)
from millstream.wire.aio.connection import Connection, Interest
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import NANOSECONDS, RETRY
from millstream.wire.message import HEADER_BYTES_MAX, RawMessage
from millstream.wire.protocol import Frame, parse_headers, status_of, unique_token

__all__ = ["Prefetch", "PullConsumer", "Signal"]

_log = logging.getLogger("millstream.wire")

RETRY_SECONDS: Final = 0.25
HEARTBEATS_MISSED_MAX: Final = 2
# Meaning of the server's status texts; it has one code (409) for all of them.
_GONE: Final = ("consumer deleted", "consumer is push based")
_AGAIN_AT_ONCE: Final = ("message size exceeds maxbytes", "batch completed")
_AGAIN_SOON: Final = ("exceeded maxwaiting", "leadership change", "server shutdown")
_ACK_PREFIX: Final = b"$JS.ACK."
# As calling the named tuple would, but faster: this runs for every message.
_new: Final = tuple.__new__


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How much is asked for ahead: on its way, or arrived and not taken."""

    messages: int = 1000
    bytes: int = 16 * 1024 * 1024  # at least one largest message is always asked for
    expires: float = 30.0  # seconds until the server answers an unfilled request
    heartbeat: float = 5.0  # seconds between signs of life while nothing comes, or fewer
    total: int | None = None  # messages to ask for in total; None: no limit
    made_again: float = 0.0  # seconds in which a deleted consumer may be created again


class Signal:
    """Wakes the readers of several consumers; `set` is remembered until the next `wait`."""

    __slots__ = ("_loop", "_set", "_waiters")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[bool]] = []
        self._set = False

    def set(self) -> None:
        if not self._waiters:
            self._set = True
            return
        for waiter in self._waiters:
            _finish(waiter, True)
        self._waiters.clear()

    async def wait(self, timeout: float | None = None) -> bool:
        """Return when it is set (True) or the time is up (False)."""
        if self._set:
            self._set = False
            return True
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.append(waiter)
        timer = None
        if timeout is not None:
            timer = self._loop.call_later(timeout, _finish, waiter, False)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.set()  # woken and cancelled together: wake the next reader instead
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)


def _finish(waiter: asyncio.Future[bool], was_set: bool) -> None:
    if not waiter.done():
        waiter.set_result(was_set)


class PullConsumer:
    """Delivers the messages of one consumer into a bounded buffer, across reconnects.

    After a lost request, a lost connection or a new leader it only asks again. It fails (then
    `take_now` raises) when the consumer is gone or the connection is closed permanently.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        consumer: str,
        prefetch: Prefetch,
        signal: Signal,
        disposable: bool = False,
    ) -> None:
        self._jetstream = jetstream
        self._connection: Connection = jetstream.connection
        self._loop = asyncio.get_running_loop()
        self._stream, self._consumer = stream, consumer
        self._prefetch = prefetch
        self._disposable = disposable  # in doubt it fails: its owner creates another consumer
        self._buffer: deque[RawMessage] = deque()
        self._asked = 0  # messages requested and not delivered yet
        self._delivered = 0
        self._signal = signal
        self._error: MillstreamError | None = None
        self._stopped = False
        self._last_sign = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None
        self._next = f"{jetstream.prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode()
        self._late: list[RawMessage] = []
        self._before: Interest | None = None  # in what was asked for before `start_over`
        self._open_inbox()
        self._connection.on_connected.append(self._ask_again)
        self._connection.on_closed.append(self._closed)
        self._ask()
        self._watch()

    def _open_inbox(self) -> None:
        inbox = f"{self._connection.settings.inbox_prefix}.{unique_token()}"
        self._inbox = inbox.encode()
        take = partial(self._take, self._inbox)
        self._interest = self._connection.subscribe_runs(inbox, take)

    # -- for the reader -------------------------------------------------------------------

    def take_now(self, at_most: int) -> list[RawMessage]:
        """Up to `at_most` messages that have arrived; raises when none will come any more."""
        buffer = self._buffer
        if not buffer and self._error is not None:
            raise self._error
        if len(buffer) <= at_most:
            taken = list(buffer)
            buffer.clear()
        else:
            taken = [buffer.popleft() for _ in range(at_most)]
        if self._asked + len(buffer) <= self._prefetch.messages // 2:
            self._ask()
        return taken

    def peek(self) -> list[RawMessage]:
        """The messages that have arrived and are not taken."""
        return list(self._buffer)

    def start_over(self) -> list[RawMessage]:
        """Ask again, and only then take messages; gives what was delivered and not taken.

        What the server had sent before may still arrive: `take_late` gives that.
        """
        left = list(self._buffer)
        self._buffer.clear()
        self._delivered -= len(left)
        if self._before is not None:
            self._connection.unsubscribe(self._before)
        self._before = self._interest
        self._connection.stop_interest(self._before)
        self._open_inbox()
        self._ask_again()
        return left

    def take_late(self) -> list[RawMessage]:
        """What was asked for before `start_over` and arrived after it."""
        late, self._late = self._late, []
        return late

    def leave(self) -> list[RawMessage]:
        """Ask for no more; gives what was delivered and not taken.

        What the server has sent already still arrives: `stop` gives that.
        """
        if not self._stopped:
            self._stopped = True
            self._connection.stop_interest(self._interest)
            if self._ask_again in self._connection.on_connected:
                self._connection.on_connected.remove(self._ask_again)
                self._connection.on_closed.remove(self._closed)
            if self._timer is not None:
                self._timer.cancel()
            if self._checking is not None:
                self._checking.cancel()
            self._signal.set()
        left = list(self._buffer)
        self._buffer.clear()
        return left

    def stop(self) -> list[RawMessage]:
        """Ask for no more and take no more; gives what was delivered and not taken."""
        left = self.leave()
        self._connection.unsubscribe(self._interest)
        if self._before is not None:
            self._connection.unsubscribe(self._before)
        return left

    # -- asking ---------------------------------------------------------------------------

    def _ask(self) -> None:
        if self._stopped or self._error is not None or not self._connection.connected:
            return
        rules = self._prefetch
        count = rules.messages - self._asked - len(self._buffer)
        if rules.total is not None:
            count = min(count, rules.total - self._asked - self._delivered)
        if count <= 0:
            return
        largest = self._connection.info.max_payload + HEADER_BYTES_MAX
        request = {
            "batch": count,
            "max_bytes": max(rules.bytes, largest),
            "expires": int(rules.expires * NANOSECONDS),
            "idle_heartbeat": int(min(rules.heartbeat, rules.expires / 2) * NANOSECONDS),
        }
        self._asked += count
        self._connection.publish(self._next, msgspec.json.encode(request), self._inbox)

    def _ask_again(self) -> None:
        """Forget what was asked for: after a reconnect or a silence it will not come."""
        self._asked = 0
        self._last_sign = self._loop.time()
        self._ask()

    def _ask_later(self) -> None:
        self._asked = 0
        self._loop.call_later(RETRY_SECONDS, self._ask)

    # -- what arrives ---------------------------------------------------------------------

    def _take(self, inbox: bytes, run: list[Frame]) -> None:
        """Put messages of the stream into the buffer, and handle the statuses between them."""
        # Any of them: while messages flow, the server sends no heartbeats.
        self._last_sign = self._loop.time()
        messages = [_new(RawMessage, frame) for frame in run if frame[1][:8] == _ACK_PREFIX]
        if inbox is not self._inbox:
            self._late.extend(messages)
            return
        count = len(messages)
        if count:
            self._buffer.extend(messages)
            self._delivered += count
            self._asked = max(0, self._asked - count)
            self._signal.set()
        if count < len(run) and not self._stopped:
            for _, reply, headers, _ in run:
                if not reply.startswith(_ACK_PREFIX):
                    self._status(headers)

    def _status(self, headers: bytes) -> None:
        code, text = status_of(headers)
        if code == 100:
            return
        if code in (404, 408):
            self._ended(headers)
        elif code == 409:
            self._conflict(text.lower(), headers)
        elif code == 503:
            self._check_exists()
        elif code == 423:
            self._ask_later()
        else:
            self._fail(ApiError(code, 0, f"pulling from '{self._consumer}': {text}"))

    def _ended(self, headers: bytes) -> None:
        unfilled = parse_headers(headers).get("Nats-Pending-Messages", "0")
        self._asked = max(0, self._asked - int(unfilled))
        self._ask()

    def _conflict(self, text: str, headers: bytes) -> None:
        if text.startswith(_GONE):
            gone = SubscriptionNotFound(409, 10014, f"the subscription '{self._consumer}': {text}")
            if self._prefetch.made_again:
                self._check_exists(gone)
            else:
                self._fail(gone)
        elif text.startswith(_AGAIN_AT_ONCE):
            self._ended(headers)
        elif text.startswith(_AGAIN_SOON):
            self._ask_later()
        else:
            self._fail(ApiError(409, 0, f"pulling from '{self._consumer}': {text}"))

    def _check_exists(self, gone: SubscriptionNotFound | None = None) -> None:
        """Nobody listens: either there is no leader for a moment, or the consumer is gone."""
        if self._disposable:
            self._fail(ApiError(503, 0, f"no sign of life of '{self._consumer}'"))
            return
        if self._checking is None or self._checking.done():
            self._checking = self._loop.create_task(self._look_it_up(gone))

    async def _look_it_up(self, gone: SubscriptionNotFound | None) -> None:
        self._asked = 0
        again = Deadline(self._prefetch.made_again)
        while True:
            late = (
                again.passed
            )  # before asking: the answer of a stalled server is about this moment
            try:
                await self._jetstream.consumer_info(self._stream, self._consumer)
            except SubscriptionNotFound as error:
                if late:
                    self._fail(gone or error)
                    return
                await asyncio.sleep(again.left(at_most=RETRY_SECONDS / 5))
                continue
            except (NoResponders, RequestTimeout, ConnectError) as error:
                _log.info("waiting for the leader of %s: %s", self._consumer, error)
            except ApiError as error:
                if error.err_code not in RETRY:
                    self._fail(error)
                    return
                _log.info("waiting for the leader of %s: %s", self._consumer, error)
            break
        self._loop.call_later(0 if gone else RETRY_SECONDS, self._ask)

    def _watch(self) -> None:
        """Ask again when the server has been silent for too long."""
        if self._stopped:
            return
        heartbeat = self._prefetch.heartbeat
        self._timer = self._loop.call_later(heartbeat, self._watch)
        silent = self._loop.time() - self._last_sign
        if self._buffer or not self._asked:
            self._last_sign = self._loop.time()
        elif silent > heartbeat * HEARTBEATS_MISSED_MAX and self._connection.connected:
            _log.info("no sign of life from %s for %.1f s", self._consumer, silent)
            self._last_sign = self._loop.time()
            self._check_exists()

    def _fail(self, error: MillstreamError) -> None:
        if self._error is None:
            self._error = error
        self._signal.set()

    def _closed(self) -> None:
        self._fail(ConnectionClosed("the connection was closed"))
