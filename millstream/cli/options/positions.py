"""Moments and places in a topic as people type them. Pure but for the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from millstream.cli.options.reading import PLACE_HELP
from millstream.deadline import now_ns
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from millstream.messaging import Start

__all__ = ["Place", "moment", "nanoseconds", "place", "time_text"]

_WORDS: Final = {
    "beginning": "beginning",
    "start": "beginning",
    "all": "beginning",
    "end": "end",
    "new": "end",
    "keys": "keys",
}
_FRACTION: Final = re.compile(r"\.(\d{1,9})\d*")


@dataclass(frozen=True, slots=True)
class Place:
    """Where reading begins or ends; exactly one of the fields is set."""

    word: str | None = None  # "beginning", "end" or "keys"
    offset: int | None = None
    last: int | None = None  # so many before the end of each partition
    time: datetime | None = None

    def start(self, last_offset: int) -> Start:
        """The start of a partition whose last offset is this one."""
        from millstream.messaging import Start

        if self.time is not None:
            return Start.at_time(self.time)
        if self.offset is not None:
            return Start.at_offset(self.offset)
        if self.last is not None:
            return Start.at_offset(max(1, last_offset - self.last + 1))
        if self.word == "end":
            return Start.at_offset(last_offset + 1)
        return Start.LAST_PER_KEY if self.word == "keys" else Start.ALL

    @property
    def differs(self) -> bool:
        """Whether partitions have starts of their own."""
        return self.last is not None or self.word == "end"


def place(text: str) -> Place:
    """A place in a topic.

    >>> place("-5"), place("17").offset, place("end").word, place("@2026-01-31T12:00Z").time.year
    (Place(word=None, offset=None, last=5, time=None), 17, 'end', 2026)
    """
    if text in _WORDS:
        return Place(word=_WORDS[text])
    if text.startswith("@"):
        return Place(time=moment(text[1:]))
    if re.fullmatch(r"-\d+", text):
        return Place(last=int(text[1:]))
    if text.isdigit() and int(text) > 0:
        return Place(offset=int(text))
    raise ConfigError(f"not a place in a topic: {text!r}. Write {PLACE_HELP}")


def moment(text: str) -> datetime:
    """A date with its zone, or a duration before now."""
    from millstream.events.event import datetime_of

    if re.fullmatch(r"\d+(\.\d+)?", text):
        raise ConfigError(f"not a time: {text!r}. Add a unit (10m: ten minutes ago) or give a date")
    try:
        return datetime_of(now_ns()) - timedelta(seconds=parse_duration(text))
    except (ConfigError, OverflowError):
        pass
    return datetime_of(nanoseconds(text))


def nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 of an ISO 8601 time; it must say its zone.

    >>> nanoseconds("1970-01-01T00:00:01.000000001Z")
    1000000001
    """
    from millstream.events.event import nanoseconds_of

    found = _FRACTION.search(text)
    whole = _FRACTION.sub("", text, count=1) if found else text
    try:
        time = datetime.fromisoformat(whole)
    except ValueError:
        raise ConfigError(
            f"not a time: {text!r}. Write it like 2026-01-31T12:00:00Z, or 10m for ten minutes ago"
        ) from None
    if time.tzinfo is None:
        raise ConfigError(f"the time {text!r} does not say its zone. Add Z for UTC, or +01:00")
    return nanoseconds_of(time) + (int(found[1].ljust(9, "0")) if found else 0)


def time_text(nanoseconds: int) -> str:
    """An event time in UTC, exact to the nanosecond, without trailing zeros.

    >>> time_text(1000000001), time_text(0), time_text(1_500_000_000)
    ('1970-01-01T00:00:01.000000001Z', '1970-01-01T00:00:00Z', '1970-01-01T00:00:01.5Z')
    """
    from millstream.events.event import datetime_of

    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    whole = datetime_of(seconds * 1_000_000_000).replace(tzinfo=None).isoformat()
    return f"{whole}{fraction}Z"
