"""Acknowledged publishing with many messages in flight: bounded, resent, in order unless resent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from millstream.errors import (
    ConnectionClosed,
    MillstreamError,
    NoGuard,
    NoResponders,
    PayloadTooLarge,
    PermissionDenied,
    Unconfirmed,
    WrongSequence,
)
from millstream.guarded import GUARD_SECONDS, entrance_of, entrance_topic
from millstream.wire.aio.connection import Connection
from millstream.wire.api import FULL, RETRY, PubAck, Refusal, publish_error
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import Frame, hpub, pub, status_of, unique_token

__all__ = ["StreamPublisher", "Watcher"]

T = TypeVar("T")

# An overloaded server drops messages silently; a message without an answer is sent again
# after this long, the same bytes, so that its id makes the second copy a duplicate.
RESEND_SECONDS: Final = 2.0
# While a stream has no leader every try is refused immediately; this keeps the tries apart.
REFUSED_PAUSE_SECONDS: Final = 0.1
# A message that waits for room is sent again this often at least.
FULL_PAUSE_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 0.1

# What `publish_bare` writes; the size of its header block, without the number that ends the id.
_BARE: Final = b"HPUB %b %b%b %d %d\r\nNATS/1.0\r\nNats-Msg-Id: %b%b\r\n\r\n%b\r\n"
_ID_BLOCK_BYTES: Final = len(b"NATS/1.0\r\nNats-Msg-Id: \r\n\r\n") + 16

_decode_ack = msgspec.json.Decoder(PubAck).decode
_now = time.monotonic  # faster than the loop's clock, and read for every message


class Watcher(Protocol):
    """Learns how its messages are answered, without a turn of the event loop."""

    def stored(self, count: int) -> None:
        """This many more are stored."""

    def failed(self, index: int, error: Exception) -> None:
        """The message of this number is not stored, or it is unknown whether it is."""

    def abandoned(self) -> None:
        """One is no longer waited for: its future was cancelled."""


class _InFlight(asyncio.Future[Any]):
    """A message sent and not yet answered; the future of what is made of its ack."""

    __slots__ = (
        "again",  # sent more than once: an earlier copy may have been stored
        "blocks",  # waits for room when the stream is full
        "due",  # time at which it is sent again
        "frame",
        "full",  # the last try was refused because there was no room
        "give_up",  # time at which it counts as unconfirmed
        "index",  # the watcher's number for it
        "make",  # what the future gives, from the ack
        "refused",  # the last try was answered, and not stored
        "sent",  # time of the first try
        "unsure",  # an earlier try did not: it may be stored all the same
        "watcher",
    )
    blocks: bool
    frame: bytes
    full: Refusal | None
    make: Callable[[PubAck], Any]
    watcher: Watcher | None
    index: int
    due: float
    give_up: float
    sent: float
    refused: bool
    unsure: bool
    again: bool

    def repeat(self, due: float) -> None:
        """It is sent again now, and is due once more at that time."""
        self.due = due
        self.unsure = self.unsure or not self.refused
        self.refused, self.again, self.full = False, True, None

    @property
    def waited(self) -> float:
        """Seconds since the first try."""
        return _now() - self.sent

    @property
    def subject(self) -> str:
        """What it was sent to, for the few that are not stored."""
        return self.frame.split(b" ", 2)[1].decode("utf-8", "replace")


class StreamPublisher:
    """Publishes and matches acks. A message is sent again until it is answered or its time is up.

    Give every message a `Nats-Msg-Id` header: a resent copy is then recognised by the server
    (within the stream's duplicate window) and its ack says `duplicate`.
    """

    def __init__(self, connection: Connection, window: int = 1024, *, guarded: bool = True) -> None:
        self._connection = connection
        self._guarded = guarded  # publishes through guards; only a guard itself does not
        self._loop = asyncio.get_running_loop()
        self._window = window
        self._low = window - max(1, window // 4)  # a waiting sender is woken for several
        prefix = f"{connection.settings.inbox_prefix}.{unique_token()}"
        self._prefix = f"{prefix}.".encode()
        self._prefix_size = len(self._prefix)
        self._word = unique_token(16).encode()  # what its ids start with
        self._in_flight: dict[bytes, _InFlight] = {}
        self._counter = 0
        self._space: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.resent = 0
        self._interest = connection.subscribe_runs(f"{prefix}.*", self._answers)
        connection.on_connected.append(self._resend_all)
        connection.on_denied.append(self._denied)
        connection.on_closed.append(self._closed)

    def close(self) -> None:
        """Stop; what is still in flight fails as unconfirmed."""
        connection = self._connection
        connection.unsubscribe(self._interest)
        connection.on_connected.remove(self._resend_all)
        connection.on_denied.remove(self._denied)
        connection.on_closed.remove(self._closed)
        self._fail_all(Unconfirmed("the publisher was closed before the ack arrived"))

    def new_id(self) -> str:
        """An id for a message that was given none: the publisher's random word and a counter."""
        self._counter += 1
        return f"{self._word.decode()}{self._counter:x}"

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """Whether the window is used up; then `await wait_for_space()` before publishing more."""
        return len(self._in_flight) >= self._window or self._connection.congested

    async def wait_for_space(self) -> None:
        """Return when the window has space for a message."""
        while len(self._in_flight) >= self._window:
            if self._space is None:
                self._space = self._loop.create_future()
            await asyncio.shield(self._space)
        if self._connection.congested:
            await self._connection.writable()

    async def settled(self) -> None:
        """Return when nothing is in flight any more."""
        while self._in_flight:
            if self._idle is None:
                self._idle = self._loop.create_future()
            await asyncio.shield(self._idle)

    def publish(
        self,
        message: OutgoingMessage,
        timeout: float,
        make: Callable[[PubAck], T],
        blocks: bool = False,
    ) -> asyncio.Future[T]:
        """Send a message; the future gives `make(ack)`, or why it is not stored.

        With `blocks` a message for which a stream has no room is sent again until it has.
        """
        subject, headers, payload = message
        if self._guarded:
            subject = entrance_of(subject)
        self._connection.check_size(len(headers) + len(payload))
        self._counter += 1
        token = b"%x" % self._counter
        reply = self._prefix + token
        frame = hpub(subject, reply, headers, payload) if headers else pub(subject, reply, payload)
        return self._send(token, frame, timeout, make, blocks)

    def publish_bare(
        self,
        subject: bytes,
        payload: bytes,
        timeout: float,
        make: Callable[[PubAck], T],
        blocks: bool = False,
    ) -> asyncio.Future[T]:
        """Like `publish` for a message without headers, to which the publisher gives an id."""
        self._counter = count = self._counter + 1
        token = b"%x" % count
        size = _ID_BLOCK_BYTES + len(token)
        total = size + len(payload)
        if total > self._connection.info.max_payload:
            raise PayloadTooLarge(total, self._connection.info.max_payload)
        reply, word = self._prefix, self._word
        frame = _BARE % (subject, reply, token, size, total, word, token, payload)
        return self._send(token, frame, timeout, make, blocks)

    def watch(self, sent: asyncio.Future[Any], watcher: Watcher, index: int) -> None:
        """Report the outcome of a message that was just sent to `watcher` too, as number `index`.

        Unlike a callback of the future this takes no turn of the event loop.
        """
        if isinstance(sent, _InFlight):
            sent.watcher, sent.index = watcher, index

    def _send(
        self,
        token: bytes,
        frame: bytes,
        timeout: float,
        make: Callable[[PubAck], T],
        blocks: bool,
    ) -> asyncio.Future[T]:
        connection, in_flight = self._connection, self._in_flight
        if not connection.connected:
            connection.check_open()  # it is sent when the connection is back
        elif in_flight:
            connection.send(frame)
        else:
            connection.send_now(frame)  # first: the rest is done while it is under way
        in_flight[token] = entry = _InFlight(loop=self._loop)
        now = _now()
        entry.sent = now
        entry.due = now + RESEND_SECONDS
        entry.give_up = now + timeout
        entry.refused = entry.unsure = entry.again = False
        entry.blocks, entry.full = blocks, None
        entry.frame = frame
        entry.make = make
        entry.watcher = None
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        return entry

    # -- answers --------------------------------------------------------------------------

    def _answers(self, run: list[Frame]) -> None:
        """Settle what is stored, here because there are many; everything else one by one."""
        in_flight, at = self._in_flight, self._prefix_size
        watcher: Watcher | None = None  # whose stored messages are counted
        count = 0
        for subject, _, headers, payload in run:
            token = subject[at:]
            message = in_flight.get(token)
            if message is None:
                continue
            try:
                ack = _decode_ack(payload)
            except msgspec.DecodeError as error:
                self._no_ack(token, message, headers, error if payload else None)
                continue
            if ack.error is not None:
                self._refused(token, message, ack.error)
                continue
            del in_flight[token]
            message.frame = b""  # the future may be kept for a long time
            if not message.done():
                message.set_result(message.make(ack))
            if message.watcher is not watcher:
                if watcher is not None:
                    watcher.stored(count)
                watcher, count = message.watcher, 0
            count += 1
        if watcher is not None and count:
            watcher.stored(count)
        if self._space is not None or self._idle is not None:
            self._wake()

    def _no_ack(
        self, token: bytes, message: _InFlight, headers: bytes, error: Exception | None
    ) -> None:
        if error is not None:
            self._fail(token, message, MillstreamError(f"not an ack: {error}"))
        elif status_of(headers)[0] == 503:
            message.refused = True
            topic = entrance_topic(message.subject)
            if topic is not None and not message.unsure and message.waited >= GUARD_SECONDS:
                self._fail(token, message, NoGuard(topic, message.subject))
            else:
                self._try_later(message)

    def _refused(self, token: bytes, message: _InFlight, refusal: Refusal) -> None:
        if refusal.err_code in RETRY:
            self._try_later(message)
        elif message.blocks and refusal.err_code in FULL and _now() < message.give_up:
            self._wait_for_room(message, refusal)
        else:
            error = publish_error(refusal)
            if isinstance(error, WrongSequence):
                error.sent_again = message.again
            self._fail(token, message, error)

    def _wait_for_room(self, message: _InFlight, refusal: Refusal) -> None:
        """The longer it waits, the rarer it is sent: there may be many that wait."""
        message.refused, message.full = True, refusal
        pause = min(FULL_PAUSE_SECONDS, REFUSED_PAUSE_SECONDS + message.waited / 8)
        due = _now() + pause
        # The last try must be answered in time, or it would be unknown what became of it.
        message.due = due if due + FULL_PAUSE_SECONDS < message.give_up else math.inf

    def _fail(self, token: bytes, message: _InFlight, error: Exception) -> None:
        del self._in_flight[token]
        message.frame = b""
        if not message.done():
            message.set_exception(error)
            if message.watcher is not None:
                message.exception()  # the watcher knows; a future that is not awaited is no error
        if message.watcher is not None:
            message.watcher.failed(message.index, error)
        self._wake()

    def _forget(self, token: bytes, message: _InFlight) -> None:
        """No caller waits for this one any more."""
        del self._in_flight[token]
        if message.watcher is not None:
            message.watcher.abandoned()
        self._wake()

    def _wake(self) -> None:
        left = len(self._in_flight)
        if self._space is not None and left <= self._low:
            self._space.set_result(None)
            self._space = None
        if self._idle is not None and not left:
            self._idle.set_result(None)
            self._idle = None

    def _try_later(self, message: _InFlight) -> None:
        message.due = min(message.due, _now() + REFUSED_PAUSE_SECONDS)

    # -- no answers -----------------------------------------------------------------------

    def _tick(self) -> None:
        """Send again what is due, fail what has timed out, and repeat while anything is left."""
        self._timer = None
        connected = self._connection.connected
        now = _now()
        for token, message in list(self._in_flight.items()):
            if message.cancelled():
                self._forget(token, message)
            elif now >= message.give_up:
                self._fail(token, message, self._given_up(message))
            elif connected and now >= message.due:
                message.repeat(now + RESEND_SECONDS)
                self.resent += 1
                self._connection.send(message.frame)
        if self._in_flight:
            self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)

    def _given_up(self, message: _InFlight) -> Exception:
        subject = message.subject
        if message.full is not None and not message.unsure:
            return publish_error(message.full)
        if message.refused and not message.unsure:
            topic = entrance_topic(subject)
            return NoResponders(subject) if topic is None else NoGuard(topic, subject)
        return Unconfirmed(
            f"no ack for '{subject}' in time: it may or may not be stored. "
            f"Publishing it again with the same id is safe"
        )

    def _resend_all(self) -> None:
        due = _now() + RESEND_SECONDS
        for message in self._in_flight.values():
            message.repeat(due)
            self._connection.send(message.frame)
        self.resent += len(self._in_flight)

    def _denied(self, denied: PermissionDenied) -> None:
        for token, message in list(self._in_flight.items()):
            if message.subject == denied.subject:
                self._fail(token, message, denied)

    def _closed(self) -> None:
        self._fail_all(ConnectionClosed("the connection was closed before the ack arrived"))

    def _fail_all(self, error: MillstreamError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for token, message in list(self._in_flight.items()):
            self._fail(token, message, error)
