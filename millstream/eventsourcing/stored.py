"""The library's records as events of a topic: one plain message each.

An event's key is its originator, its value the state as the library's mapper wrote it. Headers hold
the rest, so that any client can read it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from eventsourcing.persistence import DataError, InternalError, Notification, StoredEvent

from millstream.events.event import Event

__all__ = [
    "NOTHING",
    "TOPIC_HEADER",
    "OriginatorHead",
    "event_behind",
    "head_of",
    "headers_of",
    "is_event",
    "key_of",
    "notification_of",
    "position_of",
    "stored_of",
    "tracking_headers",
    "tracking_key",
    "version_of",
]

TOPIC_HEADER: Final = "Event-Topic"  # the library's name of the event's class
VERSION_HEADER: Final = "Event-Version"
# All versions from this one up to its own are stored: the lower ones need not be looked up.
RUN_HEADER: Final = "Event-Run"
HIGHEST_HEADER: Final = "Event-Highest"  # where an earlier event has a higher version
ID_TYPE_HEADER: Final = "Event-Id-Type"  # "text"; left out for a UUID
OFFSET_HEADER: Final = "Event-Offset"  # of a snapshot: where the event of its version is stored
TRACKING_HEADER: Final = "Tracking-Id"
TRACKING_PREFIX: Final = "tracking:"


@dataclass(frozen=True, slots=True)
class OriginatorHead:
    """The last event of an originator, and what it says about the versions before it."""

    offset: int  # 0: there is none
    version: int
    run: int  # versions run..version are all stored
    highest: int

    def holds(self, version: int) -> bool | None:
        """Whether a version is stored; None: only reading them all can tell."""
        if self.offset == 0 or version > self.highest:
            return False
        return True if self.run <= version <= self.version else None

    def ends_at(self, version: int) -> bool:
        """Whether all later versions are stored after this event."""
        return self.offset > 0 and self.version == self.highest == version

    def then(self, version: int, offset: int) -> OriginatorHead:
        """The head after one more event."""
        if self.offset == 0:
            return OriginatorHead(offset, version, version, version)
        run = self.run if version == self.version + 1 else version
        return OriginatorHead(offset, version, run, max(version, self.highest))


NOTHING: Final = OriginatorHead(0, 0, 0, 0)


def key_of(originator_id: UUID | str) -> str:
    """The key of an aggregate's events."""
    key = str(originator_id)
    if key.startswith(TRACKING_PREFIX):
        raise DataError(
            f"the originator id {key[:100]!r} starts with '{TRACKING_PREFIX}', which is reserved "
            f"for tracking records. Choose another id"
        )
    return key


def tracking_key(application_name: str) -> str:
    """The key of the positions reached in another application's events."""
    return TRACKING_PREFIX + application_name


def headers_of(
    stored: StoredEvent, head: OriginatorHead, taken_of: OriginatorHead | None = None
) -> dict[str, str]:
    """The headers of an event; `head` is the state after it.

    Those of a snapshot say where the event is that it was taken of, if `taken_of` is that one.
    """
    headers = {
        TOPIC_HEADER: stored.topic,
        VERSION_HEADER: str(stored.originator_version),
        RUN_HEADER: str(head.run),
    }
    if head.highest > head.version:
        headers[HIGHEST_HEADER] = str(head.highest)
    if not isinstance(stored.originator_id, UUID):
        headers[ID_TYPE_HEADER] = "text"
    if taken_of is not None and taken_of.ends_at(stored.originator_version):
        headers[OFFSET_HEADER] = str(taken_of.offset)
    return headers


def tracking_headers(notification_id: int) -> dict[str, str]:
    """The headers of a tracking record."""
    return {TRACKING_HEADER: str(notification_id)}


def is_event(event: Event) -> bool:
    """Whether it is an event of an aggregate, not a tracking record or another client's."""
    return TOPIC_HEADER in event.headers


def head_of(event: Event | None) -> OriginatorHead:
    """What the last event of an originator says."""
    if event is None:
        return NOTHING
    headers = event.headers
    version = _number(event, headers, VERSION_HEADER)
    run = _number(event, headers, RUN_HEADER)
    highest = _number(event, headers, HIGHEST_HEADER) if HIGHEST_HEADER in headers else version
    return OriginatorHead(event.offset, version, run, highest)


def event_behind(snapshot: Event) -> OriginatorHead | None:
    """The event that a snapshot was taken of, if its message says where that is."""
    headers = snapshot.headers
    if OFFSET_HEADER not in headers:
        return None
    version = version_of(snapshot)
    offset = _number(snapshot, headers, OFFSET_HEADER)
    return OriginatorHead(offset, version, version, version)


def version_of(event: Event) -> int:
    """The version of an event."""
    return _number(event, event.headers, VERSION_HEADER)


def position_of(event: Event) -> int:
    """The notification id that a tracking record holds."""
    return _number(event, event.headers, TRACKING_HEADER)


def stored_of(event: Event) -> StoredEvent:
    """The library's form of an event."""
    headers = event.headers
    return StoredEvent(
        originator_id=_originator(event, headers),
        originator_version=_number(event, headers, VERSION_HEADER),
        topic=headers[TOPIC_HEADER],
        state=bytes(event.value),
    )


def notification_of(event: Event) -> Notification:
    """The library's form of an event with its offset."""
    headers = event.headers
    return Notification(
        id=event.offset,
        originator_id=_originator(event, headers),
        originator_version=_number(event, headers, VERSION_HEADER),
        topic=headers[TOPIC_HEADER],
        state=bytes(event.value),
    )


def _originator(event: Event, headers: Mapping[str, str]) -> UUID | str:
    key = event.key or ""
    if headers.get(ID_TYPE_HEADER) == "text":
        return key
    try:
        return UUID(key)
    except ValueError as error:
        raise _foreign(event, f"its key {key[:100]!r} is no UUID") from error


def _number(event: Event, headers: Mapping[str, str], name: str) -> int:
    try:
        return int(headers[name])
    except (KeyError, ValueError) as error:
        raise _foreign(event, f"its header {name} is {headers.get(name)!r}") from error


def _foreign(event: Event, why: str) -> InternalError:
    return InternalError(
        f"'{event.topic}', offset {event.offset}: {why}. Another client has written to the topic; "
        f"purge that message"
    )
