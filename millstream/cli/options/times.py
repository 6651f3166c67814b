"""Times as people type them, and as they are printed. Pure but for the clock."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from millstream.deadline import now_ns
from millstream.errors import ConfigError
from millstream.settings import parse_duration

__all__ = ["moment", "nanoseconds", "time_text"]

_FRACTION: Final = re.compile(r"\.(\d{1,9})\d*")


def moment(text: str, *, local: bool = False) -> datetime:
    """A date with its zone, or a duration before now; `local`: without a zone it is local time."""
    from millstream.events.event import datetime_of

    if re.fullmatch(r"\d+(\.\d+)?", text):
        raise ConfigError(f"not a time: {text!r}. Add a unit (10m: ten minutes ago) or give a date")
    try:
        return datetime_of(now_ns()) - timedelta(seconds=parse_duration(text))
    except (ConfigError, OverflowError):
        pass
    return datetime_of(nanoseconds(_with_zone(text) if local else text))


def _with_zone(text: str) -> str:
    """The text of a time with this computer's zone, if it has none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return text  # the message about it says how to write one
    return text if time.tzinfo is not None else time.astimezone().isoformat()


def nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 of an ISO 8601 time; it must have a time zone.

    >>> nanoseconds("1970-01-01T00:00:01.000000001Z")
    1000000001
    """
    from millstream.events.event import nanoseconds_of

    found = _FRACTION.search(text)
    to_seconds = _FRACTION.sub("", text, count=1) if found else text
    try:
        time = datetime.fromisoformat(to_seconds)
    except ValueError:
        raise ConfigError(
            f"not a time: {text!r}. Write it like 2026-01-31T12:00:00Z, or as a duration: 10m"
        ) from None
    if time.tzinfo is None:
        raise ConfigError(f"the time {text!r} has no time zone. Add Z for UTC, or +01:00")
    return nanoseconds_of(time) + (int(found[1].ljust(9, "0")) if found else 0)


def time_text(nanoseconds: int) -> str:
    """An event time in UTC, exact to the nanosecond, without trailing zeros.

    >>> time_text(1000000001), time_text(0), time_text(1_500_000_000)
    ('1970-01-01T00:00:01.000000001Z', '1970-01-01T00:00:00Z', '1970-01-01T00:00:01.5Z')
    """
    from millstream.events.event import datetime_of

    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    to_seconds = datetime_of(seconds * 1_000_000_000).replace(tzinfo=None).isoformat()
    return f"{to_seconds}{fraction}Z"
