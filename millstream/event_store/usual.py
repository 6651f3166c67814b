"""Messages to events, the usual ones quickly. Pure.

Nearly every message of a store has the headers that an append writes, in their order, and events of
known types. `usual_events` reads such messages together: each step is one call for all of them, not
one for each. For any other one it gives None, and `open_append` and `stored_events` read it: they
define the result, and word every refusal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import StoredEvent
from millstream.event_store.format import (
    CAUSATION_HEADER,
    CORRELATION_HEADER,
    PREVIOUS_HEADER,
    VERSIONS_HEADER,
)
from millstream.event_store.privacy import SEALED_MARK
from millstream.events.event import ID_HEADER, TIME_HEADER, Partition, event_ns
from millstream.wire.message import RawMessage

__all__ = ["AT_ONCE", "usual_events"]

# How many messages are best read together: so few that most of their objects are gone again before
# the collector looks for garbage.
AT_ONCE: Final = 64

# An id, versions, what the server has checked, and what the writer may have given. Without spaces
# in them, header values are what `parse_headers` makes of them. Each block has a zero after it.
_HEADERS: Final = re.compile(
    rb"(?<![^\0])NATS/1\.0\r\n"
    rb"%b: ([!-~]++)\r\n"
    rb"%b: ([1-9][0-9]{0,17}+)-([1-9][0-9]{0,17}+)\r\n"
    rb"(?:%b: [!-~]++\r\n)?+"
    rb"(?:Nats-Expected-[A-Za-z-]++: [!-~]++\r\n)*+"
    rb"(?:%b: (-?[0-9]{1,21}+)\r\n)?+"
    rb"(?:%b: ([!-~]++)\r\n)?+"
    rb"(?:%b: ([!-~]++)\r\n)?+"
    rb"(?:Nats-Batch-[A-Za-z]++: [!-~]++\r\n)*+"
    rb"\r\n\0"
    % tuple(
        name.encode()
        for name in (
            *(ID_HEADER, VERSIONS_HEADER, PREVIOUS_HEADER, TIME_HEADER),
            *(CORRELATION_HEADER, CAUSATION_HEADER),
        )
    )
)
_find_all: Final = _HEADERS.findall


def usual_events(
    partition: Partition, messages: Sequence[RawMessage], types: EventTypes
) -> list[list[StoredEvent] | None]:
    """The events of each message that is as the store writes it; None for anything else."""
    if not messages:
        return []
    try:
        found = _read(partition, messages, types)
    except Exception:  # a class of events may raise anything
        found = None
    if found is not None:
        return [*found]
    if len(messages) == 1:
        return [None]
    # Without those with other headers or sealed texts, else in halves: the others stay together.
    chosen = [_looks_usual(raw) for raw in messages]
    if not all(chosen):
        some = [raw for raw, is_chosen in zip(messages, chosen, strict=True) if is_chosen]
        read = iter(usual_events(partition, some, types))
        return [next(read) if is_chosen else None for is_chosen in chosen]
    half = len(messages) // 2
    return [
        *usual_events(partition, messages[:half], types),
        *usual_events(partition, messages[half:], types),
    ]


def _looks_usual(raw: RawMessage) -> bool:
    is_sealed = raw.payload.find(SEALED_MARK) >= 0
    return not is_sealed and _HEADERS.fullmatch(raw.headers + b"\0") is not None


def _read(
    partition: Partition, messages: Sequence[RawMessage], types: EventTypes
) -> list[list[StoredEvent]] | None:
    """The events of each message; None if one of them is anything else."""
    subjects, replies, headers, payloads = zip(*messages, strict=True)
    blocks, ends = b"\0".join(headers) + b"\0", b"\n".join(payloads) + b"\n"
    # Sealed texts need keys, which have to be looked up.
    if blocks.count(b"\0") != len(messages) or ends.find(SEALED_MARK) >= 0:
        return None
    heads = _find_all(blocks)
    ids = _ids(partition, subjects)
    places = _places(replies)
    openings, number = types.openings, partition.number
    if ids is None or len(heads) != len(messages) or ends.count(b"\n") != ends.count(b"}\n"):
        return None
    found: list[list[StoredEvent]] = []
    for head, id, place, payload in zip(heads, ids, places, payloads, strict=True):
        append_id, first, last, time, correlation, causation = head
        offset_text, _, stored_text, _ = place.split(b".")
        offset, stored = int(offset_text), int(stored_text)
        version, lines = int(first), payload.split(b"\n")
        if len(lines) != (1 if first == last else int(last) - version + 1):
            return None
        event_time = event_ns(time.decode(), stored) if time else stored
        one = append_id.decode()
        whole = correlation.decode() if correlation else None
        cause = causation.decode() if causation else None
        events: list[StoredEvent] = []
        for index, line in enumerate(lines):
            cut = line.find(b'":{', 2)
            name, schema, decode, make = openings[line[:cut]]
            data = decode(line[cut + 2 : -1])
            if make is not None:
                data = make(data)
            events.append(StoredEvent(
                id, version + index, name, data, schema, event_time, stored,
                number, offset, index, one, whole, cause,
            ))  # fmt: skip
        found.append(events)
    return found


def _ids(partition: Partition, subjects: Sequence[bytes]) -> list[str] | None:
    """The ids of aggregates in subjects; None if one of them is none, or has escapes."""
    start = f"\n{partition.prefix}."
    text = "\n" + b"\n".join(subjects).decode("ascii")
    # A subject has no line breaks.
    if text.find("=") >= 0 or text.find(f"{start}_") >= 0 or not text.startswith(start):
        return None
    ids = text[len(start) :].split(start)
    return ids if "" not in ids else None


def _places(replies: Sequence[bytes]) -> list[bytes]:
    """The rest of addresses of acks that begin alike: offset, delivery, time and what follows."""
    # Without a domain, and delivered as often as the first of them.
    start = b"\n%b." % b".".join(replies[0].split(b".", 5)[:5])
    return (b"\n" + b"\n".join(replies)).removeprefix(start).split(start)
