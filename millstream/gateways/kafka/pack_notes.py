"""What the headers of a stored message say for offsets, times and producers. Pure.

The gateway's own packs have two headers more than others: `Mill-Kafka-Batches`, the batches of
idempotent producers in them, and `Mill-Times`, the smallest and largest time of their events.
Both count only on the gateway's own subject, which is fenced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from millstream.events.classify import FOR_MARK, PACK_MARK, kind_of
from millstream.events.event import TIME_HEADER, event_ns
from millstream.events.packs.packing import PACK_EVENTS_MAX
from millstream.events.subject import PACK_TOKEN
from millstream.gateways.kafka.offset_index import NO_EVENTS, UNKNOWN
from millstream.gateways.kafka.producer_state import SentBatch
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.protocol import HEADERS_END, parse_headers

__all__ = [
    "BATCHES_HEADER",
    "TIMES_HEADER",
    "WRITER",
    "BatchNote",
    "MessageNotes",
    "PackNotes",
    "batches_text",
    "times_text",
]

WRITER: Final = "kafka"  # the name of the gateway's fence in every partition
BATCHES_HEADER: Final = "Mill-Kafka-Batches"
TIMES_HEADER: Final = "Mill-Times"

_COUNT: Final = re.compile(rb"\r\nMill-Count: (0|[1-9][0-9]{0,6})\r\n")
_NOTE: Final = rb"[0-9]{1,19}:[0-9]{1,5}:[0-9]{1,10}:[0-9]{1,10}:-?[0-9]{1,9}"
_BATCHES: Final = re.compile(rb"\r\nMill-Kafka-Batches: (%b(?:;%b)*)\r\n" % (_NOTE, _NOTE))
_TIMES: Final = re.compile(rb"\r\nMill-Times: (-?[0-9]{1,17}):(-?[0-9]{1,17})\r\n")
_PLACE: Final = re.compile(rb"\r\nMill-Position: ([0-9]{1,18})/([0-9]{1,18})\r\n")
_TIME_MARK: Final = b"\r\nMill-Time: "


class BatchNote(NamedTuple):
    """A batch in a pack, and its first row; below 0: it began in a pack before this one."""

    batch: SentBatch
    row: int


class PackNotes(NamedTuple):
    """What is known of a pack without its payload."""

    events: int
    max_ms: int = UNKNOWN
    batches: tuple[BatchNote, ...] = ()
    # What the gateway knew when it stored the pack: an offset, and the message that begins with it.
    place: tuple[int, int] | None = None


def batches_text(notes: Iterable[BatchNote]) -> str:
    """The batches of a pack as a header.

    >>> batches_text([BatchNote(SentBatch(7, 0, 10, 19), 0), BatchNote(SentBatch(8, 1, 0, 4), 10)])
    '7:0:10:19:0;8:1:0:4:10'
    """
    return ";".join("{}:{}:{}:{}:{}".format(*batch, index) for batch, index in notes)


def times_text(min_ms: int, max_ms: int) -> str:
    """The times of a pack as a header."""
    return f"{min_ms}:{max_ms}"


class MessageNotes:
    """Reads the headers of the messages of one partition."""

    def __init__(self, prefix: str) -> None:
        self._prefix_size = len(prefix.encode()) + 1
        self._packs = f"{prefix}.{PACK_TOKEN}.".encode()
        self._own = self._packs + WRITER.encode()
        self._own_part = self._own + b"."

    def pack(self, raw: RawMessage) -> PackNotes | None:
        """A pack whose events have offsets; None: the message takes one, whatever it is."""
        subject, _, headers, _ = raw
        if (
            not subject.startswith(self._packs)
            or headers.find(PACK_MARK) < 0
            or headers.find(FOR_MARK) >= 0
            or not headers.endswith(HEADERS_END)
        ):
            return None
        found = _COUNT.search(headers)
        if found is None or (count := int(found[1])) > PACK_EVENTS_MAX:
            return None  # no reader accepts it
        if subject != self._own:
            own_part = subject.startswith(self._own_part)
            return PackNotes(count, _max_ms(headers) if own_part else UNKNOWN)
        return PackNotes(count, _max_ms(headers), _batches(headers), _place(headers))

    def plain_ms(self, raw: RawMessage) -> int:
        """The event time of a message that is no pack; NO_EVENTS if readers do not get it."""
        subject, reply, headers, _ = raw
        kind = kind_of(subject, headers, self._prefix_size)
        if not kind.is_plain or kind.redriven:
            return NO_EVENTS
        stored = parse_ack_address(reply).timestamp_ns
        if headers.find(_TIME_MARK) >= 0:
            stored = event_ns(parse_headers(headers).get(TIME_HEADER), stored)
        return stored // 1_000_000


def _max_ms(headers: bytes) -> int:
    found = _TIMES.search(headers)
    return UNKNOWN if found is None else int(found[2])


def _place(headers: bytes) -> tuple[int, int] | None:
    found = _PLACE.search(headers)
    return None if found is None else (int(found[1]), int(found[2]))


def _batches(headers: bytes) -> tuple[BatchNote, ...]:
    found = _BATCHES.search(headers)
    if found is None:
        return ()
    notes = []
    for entry in found[1].split(b";"):
        producer, epoch, first, last, index = map(int, entry.split(b":"))
        notes.append(BatchNote(SentBatch(producer, epoch, first, last), index))
    return tuple(notes)
