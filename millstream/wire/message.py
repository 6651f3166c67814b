"""Messages as they go over the wire: to publish, delivered, stored."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

__all__ = ["HEADER_BYTES_MAX", "OutgoingMessage", "RawMessage", "StoredMessage"]

# The largest header block of a message. A pull must leave room for one largest message with its
# headers, or the server answers it with nothing.
HEADER_BYTES_MAX: Final = 64 * 1024 + 4 * 1024


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
