"""Messages as they go over the wire: to publish, delivered, stored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

__all__ = ["HEADER_BYTES_MAX", "OutgoingMessage", "RawMessage", "StoredMessage", "stored_ns_of"]

# The largest header block of a message. A pull must leave room for one largest message with its
# headers, or the server answers it with nothing.
HEADER_BYTES_MAX: Final = 64 * 1024 + 4 * 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class OutgoingMessage(NamedTuple):
    """Subject, header block (may be empty) and payload of a message to publish."""

    subject: bytes
    headers: bytes
    payload: bytes | memoryview


class RawMessage(NamedTuple):
    """A delivered message, nothing parsed yet. `reply` is the address of its ack."""

    subject: bytes
    reply: bytes
    headers: bytes
    payload: bytes


class StoredMessage(msgspec.Struct, frozen=True):
    """One message as the stream holds it."""

    subject: str
    sequence: int
    headers: bytes
    payload: bytes
    time: str


def stored_ns_of(time: str) -> int:
    """Nanoseconds since 1970 of a time as the server writes it; a datetime would truncate it.

    >>> stored_ns_of("1970-01-01T00:00:01.000000007Z"), stored_ns_of("1970-01-01T01:00:00+01:00")
    (1000000007, 0)
    """
    whole, dot, rest = time.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    past = datetime.fromisoformat(whole + rest[digits:]) - _EPOCH
    fraction = int(rest[:digits][:9].ljust(9, "0")) if dot else 0
    return (past.days * 86_400 + past.seconds) * 1_000_000_000 + fraction
