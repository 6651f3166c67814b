"""All messages of one subject, or those at some sequences, with one round trip where possible.

A consumer needs a request for itself, one for its messages and one for the state of the stream. One
direct request brings up to a thousand messages of a subject, and says whether there are more;
several that are sent together bring the messages at their sequences. In every case of doubt (a lost
connection, a silence, too many messages, damaged headers, a stream or a user without direct
requests) the answer is None, and the caller reads in the usual way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.errors import ConnectionClosed
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import NANOSECONDS, parse_ack_address
from millstream.wire.message import RawMessage, stored_ns_of
from millstream.wire.protocol import parse_headers, status_of, unique_token

__all__ = ["read_sequences", "read_subject"]

MESSAGES_MAX: Final = 1000
BYTES_MAX: Final = 8 * 1024 * 1024
# Between two messages; the usual way has more patience.
SILENCE_SECONDS: Final = 2.0
# What the server adds to a message's own headers, which end before it without an empty line.
_ADDED: Final = re.compile(
    rb"Nats-Stream: [^\r\n]*\r\n"
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


class _Answer:
    """The messages of an answer, as they come, and how it ended.

    It ends with a word of the server, or with the number of messages that were asked for.
    """

    def __init__(self, stream: str, expected: int | None = None) -> None:
        self.messages: list[RawMessage] = []
        self._expected = expected
        self.complete = False
        self.doubtful = False
        self._address = f"$JS.ACK.{stream}.direct.1.".encode()
        self._ended = asyncio.Event()
        self._minutes: dict[bytes, int] = {}

    def take(self, _subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        at = headers.rfind(_STREAM) + 2
        found = _ADDED.fullmatch(headers, at) if at > 1 else None
        if found is None:
            self.complete = True
            self.doubtful = self._expected is not None or _pending(headers) != 0
        else:
            own = headers[:at]
            # A message's own headers end with a line; if not, they were damaged.
            self.doubtful = self.doubtful or own.find(b"\r\n\r\n") >= 0
            block = b"" if own == _NO_HEADERS else own + b"\r\n"
            subject, sequence, time = found.groups()
            number = len(self.messages) + 1
            reply = b"%b%b.%d.%d.0" % (self._address, sequence, number, self._stored_ns(time))
            self.messages.append(RawMessage(subject, reply, block, payload))
            self.complete = number == self._expected
        if self.complete:
            self._ended.set()

    def _stored_ns(self, time: bytes) -> int:
        """Nanoseconds of a time; most messages of an answer are of the same few minutes."""
        minute, second, rest = time[:16], time[17:19], time[19:]
        known = self._minutes.get(minute)
        if known is None:
            known = self._minutes[minute] = stored_ns_of(minute.decode() + ":00Z")
        if rest[:1] != b"." or rest[-1:] != b"Z":
            return stored_ns_of(time.decode())
        return known + int(second) * NANOSECONDS + int(rest[1:-1].ljust(9, b"0"))

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
        return not self.doubtful


def _pending(headers: bytes) -> int | None:
    """How many messages follow after an answer; None: it is not an answer's end."""
    code = status_of(headers)[0]
    if code == 404:  # no message at all
        return 0
    if code != 204:
        return None
    text = parse_headers(headers).get("Nats-Num-Pending", "")
    return int(text) if text.isascii() and text.isdigit() else None


async def _ask(
    jetstream: JetStream, stream: str, asks: Sequence[object], expected: int | None = None
) -> list[RawMessage] | None:
    """Send direct requests together; all messages that answer them."""
    connection = jetstream.connection
    if not connection.connected:
        return None
    inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
    answer = _Answer(stream, expected)
    verb, reply = f"{jetstream.prefix}.DIRECT.GET.{stream}".encode(), inbox.encode()
    try:
        interest = connection.subscribe(inbox, answer.take)
    except ConnectionClosed:
        return None
    try:
        for ask in asks:
            connection.publish(verb, msgspec.json.encode(ask), reply)
        return answer.messages if await answer.end() else None
    finally:
        connection.unsubscribe(interest)


async def read_subject(
    jetstream: JetStream, stream: str, subject: str, start: int = 1
) -> list[RawMessage] | None:
    """The messages on a subject from a sequence on, up to now, in order; None: use another way.

    Only for a stream with one copy: any copy answers, also one that lags.
    """
    ask = {
        "seq": start,
        "next_by_subj": subject,
        "batch": MESSAGES_MAX,
        "max_bytes": max(BYTES_MAX, jetstream.connection.info.max_payload * 2),
    }
    return await _ask(jetstream, stream, [ask])


async def read_sequences(
    jetstream: JetStream, stream: str, sequences: Sequence[int]
) -> list[RawMessage] | None:
    """The messages at some sequences, in their order; None: one is not there, or use another way.

    Copies of a stream may answer one each; one that lags makes it None. Only for messages that are
    not large together: the server cuts off a client that it holds 64 MiB for.
    """
    asks = [{"seq": sequence} for sequence in sequences]
    messages = await _ask(jetstream, stream, asks, len(asks)) if asks else []
    if messages is None:
        return None
    found = {parse_ack_address(message.reply).sequence: message for message in messages}
    return [found[sequence] for sequence in sequences] if found.keys() >= set(sequences) else None
