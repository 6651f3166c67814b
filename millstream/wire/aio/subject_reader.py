"""Some messages with one round trip: all of one subject, the last of some, those at sequences.

A consumer needs a request for itself, one for its messages and one for the state of the stream. One
direct request brings up to a thousand messages of a subject, and says whether there are more;
several requests that are sent together bring a message each. In every case of doubt (a lost
connection, a silence, too many messages, damaged headers, a stream or a user without direct
requests) the answer is None, and the caller reads in the usual way.

The server lets a mirror answer in its origin's name, whatever the mirror's settings say, and a
mirror may lag: what it says is the last message, or says is not there, counts as doubt.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from millstream.errors import ConnectError, ConnectionClosed, NoResponders, PermissionDenied
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import NANOSECONDS
from millstream.wire.message import RawMessage, stored_ns_of
from millstream.wire.protocol import parse_headers, status_of, unique_token

__all__ = ["read_last", "read_sequences", "read_subject"]

MESSAGES_MAX: Final = 1000
BYTES_MAX: Final = 8 * 1024 * 1024
# Between two messages; the usual way has more patience.
SILENCE_SECONDS: Final = 2.0
# What the server adds to a message's own headers, which end before it without an empty line.
_ADDED: Final = re.compile(
    rb"Nats-Stream: ([^\r\n]*)\r\n"
    rb"Nats-Subject: ([^\r\n]*)\r\n"
    rb"Nats-Sequence: ([0-9]+)\r\n"
    rb"Nats-Time-Stamp: ([^\r\n]*)\r\n"
    rb"(?:Nats-Num-Pending: [0-9]+\r\n)?"
    rb"(?:Nats-Last-Sequence: [0-9]+\r\n)?"
    rb"(?:Nats-UpTo-Sequence: [0-9]+\r\n)?"
    rb"\r\n"
)
_STREAM: Final = b"\r\nNats-Stream: "
_NO_HEADERS: Final = b"NATS/1.0\r\n"


class _Messages:
    """Messages of a stream in the form of delivered ones; those of a mirror count if `of_copy`."""

    def __init__(self, stream: str, of_copy: bool = False) -> None:
        self._stream = None if of_copy else stream.encode()
        self._address = f"$JS.ACK.{stream}.direct.1.".encode()
        self._minutes: dict[bytes, int] = {}

    def read(self, headers: bytes, payload: bytes, number: int) -> RawMessage | None:
        """The message in an answer; None: a word of the server, damaged, or a mirror's message."""
        at = headers.rfind(_STREAM) + 2
        found = _ADDED.fullmatch(headers, at) if at > 1 else None
        # A message's own headers end with a line; if not, they were damaged.
        if found is None or headers.find(b"\r\n\r\n", 0, at) >= 0:
            return None
        own = headers[:at]
        block = b"" if own == _NO_HEADERS else own + b"\r\n"
        stream, subject, sequence, time = found.groups()
        if self._stream not in (None, stream):
            return None
        reply = b"%b%b.%d.%d.0" % (self._address, sequence, number, self._stored_ns(time))
        return RawMessage(subject, reply, block, payload)

    def _stored_ns(self, time: bytes) -> int:
        """Nanoseconds of a time; most messages of an answer are of the same few minutes."""
        minute, second, rest = time[:16], time[17:19], time[19:]
        known = self._minutes.get(minute)
        if known is None:
            known = self._minutes[minute] = stored_ns_of(minute.decode() + ":00Z")
        if rest[:1] != b"." or rest[-1:] != b"Z":
            return stored_ns_of(time.decode())
        return known + int(second) * NANOSECONDS + int(rest[1:-1].ljust(9, b"0"))


class _Answer:
    """The messages of an answer, as they come, and how it ended."""

    def __init__(self, stream: str) -> None:
        self.messages: list[RawMessage] = []
        self.complete = False
        self._sure = True
        self._form = _Messages(stream)
        self._ended = asyncio.Event()

    def take(self, _subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        message = self._form.read(headers, payload, len(self.messages) + 1)
        if message is not None:
            self.messages.append(message)
            return
        self.complete = True
        self._sure = self._sure and _pending(headers) == 0
        self._ended.set()

    async def end(self) -> bool:
        """Wait for the end; False when nothing comes any more, or it is not certain."""
        while not self.complete:
            before = len(self.messages)
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._ended.wait()
            except TimeoutError:
                if len(self.messages) == before:
                    return False
        return self._sure


def _pending(headers: bytes) -> int | None:
    """How many messages follow after an answer; None: it is not the end of one that is certain.

    Where there is no message at all, the server does not say whether it was a mirror that looked.
    """
    if status_of(headers)[0] != 204:
        return None
    text = parse_headers(headers).get("Nats-Num-Pending", "")
    return int(text) if text.isascii() and text.isdigit() else None


async def read_subject(
    jetstream: JetStream, stream: str, subject: str, start: int = 1
) -> list[RawMessage] | None:
    """The messages on a subject from a sequence on, up to now, in order; None: use another way.

    Also None if there are none. Only for a stream with one copy: any answers, also one that lags.
    """
    connection = jetstream.connection
    if not connection.connected:
        return None
    inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
    answer = _Answer(stream)
    ask = {
        "seq": start,
        "next_by_subj": subject,
        "batch": MESSAGES_MAX,
        "max_bytes": max(BYTES_MAX, connection.info.max_payload * 2),
    }
    verb = f"{jetstream.prefix}.DIRECT.GET.{stream}"
    try:
        interest = connection.subscribe(inbox, answer.take)
    except ConnectionClosed:
        return None
    try:
        connection.publish(verb.encode(), msgspec.json.encode(ask), inbox.encode())
        return answer.messages if await answer.end() else None
    finally:
        connection.unsubscribe(interest)


async def read_sequences(
    jetstream: JetStream, stream: str, sequences: Sequence[int]
) -> list[RawMessage] | None:
    """The messages at some sequences, in their order; None: one is not there, or use another way.

    Copies and mirrors may answer one each; one that lags makes it None. Only for messages that are
    not large together: the server cuts off a client that it holds 64 MiB for.
    """
    asks = [(stream, {"seq": sequence}) for sequence in sequences]
    found = await _read_each(jetstream, asks, of_copy=True)
    if found is None:
        return None
    messages = [message for message in found if message is not None]
    return messages if len(messages) == len(found) else None


async def read_last(
    jetstream: JetStream, subjects: Sequence[tuple[str, str]]
) -> list[RawMessage | None] | None:
    """The last messages on some subjects, each given with its stream; None: use another way.

    For streams with one copy, or where a message that is not the last does no harm. A subject
    without a message may have one that only the leader knows.
    """
    asks = [(stream, {"last_by_subj": subject}) for stream, subject in subjects]
    return await _read_each(jetstream, asks)


async def _read_each(
    jetstream: JetStream, asks: Sequence[tuple[str, Mapping[str, Any]]], of_copy: bool = False
) -> list[RawMessage | None] | None:
    """The messages that direct requests name, all sent together; None for those that are not there.

    Instead of the list None: an answer did not come, or is not certain.
    """
    connection = jetstream.connection
    if not connection.connected:
        return None
    forms = {stream: _Messages(stream, of_copy) for stream, _ in asks}
    waiting = [
        connection.ask(
            f"{jetstream.prefix}.DIRECT.GET.{stream}",
            msgspec.json.encode(ask),
            asks_again=True,
            together=True,
        )
        for stream, ask in asks
    ]
    found: list[RawMessage | None] = []
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            for number, ((stream, _), answer) in enumerate(zip(asks, waiting, strict=True), 1):
                headers, payload = await answer
                message = forms[stream].read(headers, payload, number)
                if message is None and status_of(headers)[0] != 404:
                    return None
                found.append(message)
    except (TimeoutError, NoResponders, ConnectError, PermissionDenied):
        return None
    finally:
        for answer in waiting:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # or it would be logged that nobody has seen it
    return found
