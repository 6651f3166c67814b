"""What the broker found to be lost in a stream, and whether reading continues over it. Pure.

The broker notes it in the stream's metadata. A reader that would read a lost message stops until an
operator has accepted the loss; the note stays as history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from millstream.errors import DataLoss
from millstream.settings import LOST_METADATA

__all__ = [
    "PARTITION_METADATA",
    "TOPIC_METADATA",
    "LostRange",
    "accepted",
    "check",
    "loss_text",
    "lost_ranges",
]

TOPIC_METADATA: Final = "millstream.topic"  # of a stream: the topic that it belongs to
PARTITION_METADATA: Final = "millstream.partition"


class _Accepted(msgspec.Struct):
    at: str = ""
    by: str = ""


class _Entry(msgspec.Struct, omit_defaults=True):
    """A lost range as the metadata has it."""

    first: int
    last: int
    found: str = ""
    used: bool = False
    accepted: _Accepted | None = None


@dataclass(frozen=True, slots=True)
class LostRange:
    """Offsets of one partition whose messages are lost."""

    first: int
    last: int  # inclusive
    found: str  # when the broker noticed it; ISO 8601, UTC
    used: bool = False  # new events have some of these offsets
    accepted: str | None = None  # when an operator accepted it; None: not yet
    accepted_by: str | None = None

    def concerns(self, start: int, end: int | None = None) -> bool:
        """Whether someone who reads the offsets [start, end) misses events."""
        return (start <= self.last or self.used) and (end is None or end > self.first)


def lost_ranges(config: Mapping[str, Any]) -> tuple[LostRange, ...]:
    """The losses that a stream's configuration notes, in the order they were found."""
    return tuple(
        LostRange(
            *(entry.first, entry.last, entry.found, entry.used),
            accepted=None if entry.accepted is None else entry.accepted.at,
            accepted_by=None if entry.accepted is None else entry.accepted.by,
        )
        for entry in _entries(config)
    )


def accepted(config: Mapping[str, Any], at: str, by: str) -> dict[str, Any]:
    """The configuration in which every loss is accepted."""
    entries = _entries(config)
    for entry in entries:
        entry.accepted = entry.accepted or _Accepted(at, by)
    metadata = {
        **(config.get("metadata") or {}),
        LOST_METADATA: msgspec.json.encode(entries).decode(),
    }
    return {**config, "metadata": metadata}


def check(config: Mapping[str, Any], start: int, end: int | None = None) -> None:
    """DataLoss if someone who reads the offsets [start, end) misses events that are lost."""
    text = loss_in(config, lost_ranges(config), start, end)
    if text is not None:
        raise DataLoss(text)


def loss_in(
    config: Mapping[str, Any], ranges: Iterable[LostRange], start: int, end: int | None = None
) -> str | None:
    """The first loss that is not accepted and concerns a reader of [start, end), in words."""
    for lost in ranges:
        if lost.accepted is None and lost.concerns(start, end):
            metadata = config.get("metadata") or {}
            topic = metadata.get(TOPIC_METADATA, config.get("name", ""))
            return loss_text(topic, metadata.get(PARTITION_METADATA, "0"), lost)
    return None


def loss_text(topic: str, partition: object, lost: LostRange) -> str:
    """A loss in words, with what to do."""
    used = ", and new events have some of these offsets" if lost.used else ""
    return (
        f"'{topic}', partition {partition}: the offsets {lost.first} to {lost.last} are lost, as "
        f"the broker found at {lost.found} (its disk is damaged or was replaced){used}. Restore "
        f"the events or have them sent again; then 'millstream topic accept-loss {topic}' lets "
        f"readers continue after them"
    )


def _entries(config: Mapping[str, Any]) -> list[_Entry]:
    noted = (config.get("metadata") or {}).get(LOST_METADATA)
    if not noted:
        return []
    try:
        return msgspec.json.decode(noted, type=list[_Entry])
    except msgspec.DecodeError as error:
        name = config.get("name", "")
        raise DataLoss(
            f"stream '{name}' has a note of lost events that is damaged: {error}"
        ) from error
