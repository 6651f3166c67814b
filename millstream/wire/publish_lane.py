"""Acknowledged publishing with many messages in flight: bounded, resent, in order unless resent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from millstream.errors import (
    ConnectionClosed,
    MillstreamError,
    NoResponders,
    PermissionDenied,
    Unconfirmed,
)
from millstream.wire.api import RETRY, PubAck, error_from
from millstream.wire.connection import Connection
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import hpub, pub, status_of, unique_token

__all__ = ["PublishLane", "Watcher"]

T = TypeVar("T")

# The server drops in silence when it is overloaded; a message without an answer is sent again
# after this long, the same bytes, so that its id makes the second copy a duplicate.
RESEND_SECONDS: Final = 2.0
# While a stream has no leader every try is refused at once; this keeps the tries apart.
REFUSED_PAUSE_SECONDS: Final = 0.1
_TICK_SECONDS: Final = 0.1

_decode_ack = msgspec.json.Decoder(PubAck).decode


class Watcher(Protocol):
    """Told at once when one of its messages is answered, stored (None) or not (the error)."""

    def settled(self, place: int, error: Exception | None) -> None: ...


class _InFlight:
    """A message sent and not yet answered."""

    __slots__ = (
        "due",  # loop time at which it is sent again
        "frame",
        "future",
        "give_up",  # loop time at which it counts as unconfirmed
        "make",  # what the future gives, from the ack
        "place",
        "refused",  # the last try found nobody listening: certainly not stored
        "subject",
        "watcher",
    )
    future: asyncio.Future[Any]
    frame: bytes
    subject: bytes
    make: Callable[[PubAck], Any]
    watcher: Watcher | None
    place: int
    due: float
    give_up: float
    refused: bool


class PublishLane:
    """Publishes and matches acks. A message is sent again until it is answered or its time is up.

    Give every message a `Nats-Msg-Id` header: a resent copy is then recognised by the server
    (within the stream's duplicate window) and its ack says `duplicate`.
    """

    def __init__(self, connection: Connection, window: int = 1024) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._window = window
        self._low = window - max(1, window // 4)  # wake a waiting sender for several at once
        prefix = f"{connection.settings.inbox_prefix}.{unique_token()}"
        self._prefix = f"{prefix}.".encode()
        self._prefix_size = len(self._prefix)
        self._in_flight: dict[bytes, _InFlight] = {}
        self._counter = 0
        self._room: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.resent = 0
        self._interest = connection.subscribe(f"{prefix}.*", self._answer)
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

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """Whether the window is used up; then `await room()` before publishing more."""
        return len(self._in_flight) >= self._window or self._connection.congested

    async def room(self) -> None:
        """Return when the window has room."""
        while len(self._in_flight) >= self._window:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)
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
        watcher: Watcher | None = None,
        place: int = 0,
    ) -> asyncio.Future[T]:
        """Send a message; the future gives `make(ack)`, or why it is not stored.

        `watcher` is told as well, without a turn of the event loop, with the `place` given here.
        """
        subject, headers, payload = message
        connection = self._connection
        connection.check_size(len(headers) + len(payload))
        self._counter += 1
        token = b"%x" % self._counter
        reply = self._prefix + token
        frame = hpub(subject, reply, headers, payload) if headers else pub(subject, reply, payload)
        loop = self._loop
        now = loop.time()
        entry = _InFlight()
        entry.future = future = loop.create_future()
        entry.frame, entry.subject = frame, subject
        entry.make, entry.watcher, entry.place = make, watcher, place
        entry.due, entry.give_up, entry.refused = now + RESEND_SECONDS, now + timeout, False
        in_flight = self._in_flight
        alone = not in_flight
        in_flight[token] = entry
        if self._timer is None:
            self._timer = loop.call_later(_TICK_SECONDS, self._tick)
        if not connection.connected:
            connection.check_open()  # it is sent when the connection is back
        elif alone:
            connection.send_now(frame)
        else:
            connection.send(frame)
        return future

    # -- answers --------------------------------------------------------------------------

    def _answer(self, subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        token = subject[self._prefix_size :]
        message = self._in_flight.get(token)
        if message is None:
            return
        if not payload:
            if status_of(headers)[0] == 503:
                message.refused = True
                self._try_later(message)
            return
        try:
            ack = _decode_ack(payload)
        except msgspec.DecodeError as error:
            self._settle(token, message, None, MillstreamError(f"not an ack: {error}"))
            return
        if ack.error is None:
            self._settle(token, message, ack, None)
        elif ack.error.err_code in RETRY:
            self._try_later(message)
        else:
            self._settle(token, message, None, error_from(ack.error))

    def _settle(
        self, token: bytes, message: _InFlight, ack: PubAck | None, error: Exception | None
    ) -> None:
        del self._in_flight[token]
        future = message.future
        if not future.done():
            if ack is not None:
                future.set_result(message.make(ack))
            elif error is not None:
                future.set_exception(error)
                if message.watcher is not None:
                    future.exception()  # the watcher knows; a future nobody awaits is no mistake
        if message.watcher is not None:
            message.watcher.settled(message.place, error)
        if self._room is not None or self._idle is not None:
            self._wake()

    def _wake(self) -> None:
        left = len(self._in_flight)
        if self._room is not None and left <= self._low:
            self._room.set_result(None)
            self._room = None
        if self._idle is not None and not left:
            self._idle.set_result(None)
            self._idle = None

    def _try_later(self, message: _InFlight) -> None:
        message.due = min(message.due, self._loop.time() + REFUSED_PAUSE_SECONDS)

    # -- no answers -----------------------------------------------------------------------

    def _tick(self) -> None:
        """Send again what is due, give up what is over, and come back while anything is left."""
        self._timer = None
        connected = self._connection.connected
        now = self._loop.time()
        for token, message in list(self._in_flight.items()):
            if message.future.cancelled():
                self._settle(token, message, None, None)
            elif now >= message.give_up:
                self._settle(token, message, None, self._given_up(message))
            elif connected and now >= message.due:
                message.due = now + RESEND_SECONDS
                message.refused = False
                self.resent += 1
                self._connection.send(message.frame)
        if self._in_flight:
            self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)

    def _given_up(self, message: _InFlight) -> Exception:
        subject = message.subject.decode("utf-8", "replace")
        if message.refused:
            return NoResponders(subject)
        return Unconfirmed(
            f"no ack for '{subject}' in time: it may or may not be stored. "
            f"Publishing it again with the same id is safe"
        )

    def _resend_all(self) -> None:
        due = self._loop.time() + RESEND_SECONDS
        for message in self._in_flight.values():
            message.due = due
            self._connection.send(message.frame)
        self.resent += len(self._in_flight)

    def _denied(self, denied: PermissionDenied) -> None:
        for token, message in list(self._in_flight.items()):
            if message.subject.decode("utf-8", "replace") == denied.subject:
                self._settle(token, message, None, denied)

    def _closed(self) -> None:
        self._fail_all(ConnectionClosed("the connection was closed before the ack arrived"))

    def _fail_all(self, error: MillstreamError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for token, message in list(self._in_flight.items()):
            self._settle(token, message, None, error)
