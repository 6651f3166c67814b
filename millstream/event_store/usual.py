"""Messages to events, the usual ones quickly. Pure.

Nearly every message of a store has the headers that an append writes, in their order, and events of
known types. `usual_events` reads such a message in one go. For any other one it gives None, and
`open_append` and `stored_events` read it: they define the result, and word every refusal.
"""

from __future__ import annotations

import re
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
from millstream.events.undecodable import DECODE_FAILURES
from millstream.schemas.values.fast_json import REFUSALS
from millstream.wire.message import RawMessage

__all__ = ["usual_events"]

# An id, versions, what the server has checked, and what the writer may have given. Without spaces
# in them, header values are what `parse_headers` makes of them.
_HEADERS: Final = re.compile(
    rb"NATS/1\.0\r\n"
    rb"%b: ([!-~]+)\r\n"
    rb"%b: ([1-9][0-9]{0,17})-([1-9][0-9]{0,17})\r\n"
    rb"(?:%b: [!-~]+\r\n)?"
    rb"(?:Nats-Expected-[A-Za-z-]+: [!-~]+\r\n)*"
    rb"(?:%b: (-?[0-9]{1,21})\r\n)?"
    rb"(?:%b: ([!-~]+)\r\n)?"
    rb"(?:%b: ([!-~]+)\r\n)?"
    rb"(?:Nats-Batch-[A-Za-z]+: [!-~]+\r\n)*"
    rb"\r\n"
    % tuple(
        name.encode()
        for name in (
            *(ID_HEADER, VERSIONS_HEADER, PREVIOUS_HEADER, TIME_HEADER),
            *(CORRELATION_HEADER, CAUSATION_HEADER),
        )
    )
)
_match: Final = _HEADERS.fullmatch
_ADDRESS_DOTS: Final = 8  # without a domain
_BRACE: Final = ord("}")
_FAILURES: Final = (*REFUSALS, *DECODE_FAILURES)


def usual_events(
    partition: Partition, raw: RawMessage, types: EventTypes
) -> list[StoredEvent] | None:
    """The events of a message as the store writes it; None when it is anything else."""
    subject, reply, headers, payload = raw
    found = _match(headers)
    if found is None or reply.count(b".") != _ADDRESS_DOTS or payload.find(SEALED_MARK) >= 0:
        return None  # sealed texts need keys, which have to be looked up
    append_id, first, last, time, correlation, causation = found.groups()
    _, offset_text, _, stored_text, _ = reply.rsplit(b".", 4)
    lines = payload.split(b"\n")
    events: list[StoredEvent] = []
    try:
        version = int(first)
        id = subject[partition.prefix_size :].decode("ascii")
        if not id or "=" in id or id[0] == "_" or len(lines) != int(last) - version + 1:
            return None
        offset, stored = int(offset_text), int(stored_text)
        event_time = stored if time is None else event_ns(time.decode(), stored)
        one = append_id.decode()
        whole = None if correlation is None else correlation.decode()
        cause = None if causation is None else causation.decode()
        openings, number = types.openings, partition.number
        for index, line in enumerate(lines):
            cut = line.find(b'":{', 2)
            reader = openings.get(line[:cut])
            if reader is None or line[-1] != _BRACE:
                return None
            name, schema, decode, make = reader
            data = decode(line[cut + 2 : -1])
            if make is not None:
                data = make(data)
            events.append(StoredEvent(
                id, version + index, name, data, schema, event_time, stored,
                number, offset, index, one, whole, cause,
            ))  # fmt: skip
    except _FAILURES:
        return None
    return events
