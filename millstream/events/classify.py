"""What a stored message is: an event, a deletion, a pack, a redriven copy, or Millstream's own.

Every reader decides by `kind_of`. A reader of many messages may take the usual ones without it: a
message with neither `FOR_MARK` nor `PACK_MARK` in its headers is a plain event, with or without a
value, when it has a key that does not start with `_` and its headers end with `HEADERS_END`.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from millstream.wire.protocol import HEADERS_END

__all__ = [
    "FOR_HEADER",
    "FOR_MARK",
    "KIND_MARKS",
    "MARKER_HEADER",
    "NULL_HEADER",
    "OWN_MARK",
    "PACK_HEADER",
    "PACK_MARK",
    "Kind",
    "check_whole",
    "holds_pack",
    "is_deletion",
    "is_for_another",
    "is_own_subject",
    "kind_of",
]

NULL_HEADER: Final = "Mill-Null"  # the event has no value: in a table, its key is deleted
PACK_HEADER: Final = "Mill-Pack"  # the payload is many events
# The one subscription that an event was redriven for; all others have read it before.
FOR_HEADER: Final = "Mill-For"
# Set by the server when the last event of a key expired.
MARKER_HEADER: Final = "Nats-Marker-Reason"


def _mark(header: str) -> bytes:
    """How a header of this name appears in a header block."""
    return f"\r\n{header}: ".encode()


OWN_MARK: Final = b"\r\nMill-"  # there are headers of Millstream's in the block
PACK_MARK: Final = _mark(PACK_HEADER)
FOR_MARK: Final = _mark(FOR_HEADER)
_NULL_MARK: Final = _mark(NULL_HEADER)
_MARKER_MARK: Final = _mark(MARKER_HEADER)
# Without any of these in its headers, a message is an event or, by its subject, our own.
KIND_MARKS: Final = (PACK_MARK, FOR_MARK, _NULL_MARK, _MARKER_MARK)


class Kind(Enum):
    """What a message holds, and whether it was redriven for one subscription only."""

    EVENT = ("event", False)
    DELETION = ("deletion", False)  # an event without a value
    PACK = ("pack", False)
    REDRIVEN_EVENT = ("event", True)
    REDRIVEN_DELETION = ("deletion", True)
    REDRIVEN_PACK = ("pack", True)
    OWN = ("own record", False)  # of Millstream's own: no reader of events takes it
    DAMAGED = ("damaged", False)  # see `check_whole`: read like a pack that cannot be opened

    def __init__(self, holds: str, redriven: bool) -> None:
        self.redriven = redriven
        self.is_pack = holds in ("pack", "damaged")
        self.is_plain = holds in ("event", "deletion")  # one event, which is the whole message


_EVENT, _DELETION, _PACK, _OWN = Kind.EVENT, Kind.DELETION, Kind.PACK, Kind.OWN


def kind_of(subject: bytes, headers: bytes, prefix_size: int) -> Kind:
    """The kind of a message, by its subject and header block.

    `prefix_size` is the number of bytes before the key in the subject, or 0 in a foreign stream,
    whose subjects hold no keys.

    >>> kind_of(b"orders.7", b"", 7), kind_of(b"orders._writer.a", b"", 7)
    (<Kind.EVENT: ('event', False)>, <Kind.OWN: ('own record', False)>)
    """
    if len(subject) <= prefix_size or (headers and not headers.endswith(HEADERS_END)):
        return Kind.DAMAGED
    # `find`, because `in` tries its left side as a number first and takes two to three times as
    # long.
    find = headers.find
    pack = find(PACK_MARK) >= 0
    if find(FOR_MARK) >= 0:
        if pack:
            return Kind.REDRIVEN_PACK
        return Kind.REDRIVEN_DELETION if is_deletion(headers) else Kind.REDRIVEN_EVENT
    if pack:
        return _PACK
    if subject[prefix_size : prefix_size + 1] == b"_" and is_own_subject(subject, prefix_size):
        return _OWN
    return _DELETION if find(_NULL_MARK) >= 0 or find(_MARKER_MARK) >= 0 else _EVENT


def check_whole(subject: bytes, headers: bytes, prefix_size: int) -> None:
    """Raise ValueError for a damaged message, with the reason.

    The server's checksum covers neither the length of the headers nor, in a message without
    headers, that of the subject: a flipped bit there moves the border between them and the value,
    so some of the message is on the wrong side.
    """
    if kind_of(subject, headers, prefix_size) is Kind.DAMAGED:
        short = len(subject) <= prefix_size
        found = f"subject {subject!r:.80} has no key" if short else "headers have no end"
        raise ValueError(f"damaged: its {found}")


def is_own_subject(subject: bytes, prefix_size: int) -> bool:
    """Whether plain messages on a subject are Millstream's own: its key starts with `_`.

    The key `_` alone stands for events without a key.
    """
    key = subject[prefix_size:]
    return prefix_size > 0 and key != b"_" and key.startswith(b"_")


def is_deletion(headers: bytes) -> bool:
    """Whether a plain message is an event without a value: deleted by a client, or expired."""
    return headers.find(_NULL_MARK) >= 0 or headers.find(_MARKER_MARK) >= 0


def holds_pack(headers: bytes) -> bool:
    """Whether the payload of a message is a pack, redriven or not."""
    return headers.find(PACK_MARK) >= 0


def is_for_another(headers: bytes, subscription: str) -> bool:
    """Whether a message was redriven for another subscription than this one."""
    return (
        headers.find(FOR_MARK) >= 0
        and headers.endswith(HEADERS_END)  # if not, nothing in them is certain
        and headers.find(b"%b%b\r\n" % (FOR_MARK, subscription.encode())) < 0
    )
