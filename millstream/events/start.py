"""Where reading starts, for subscriptions and replays."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from millstream.errors import ConfigError

__all__ = ["Start"]


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading starts: ALL, NEW, LAST, LAST_PER_KEY, `at_offset(n)` or `at_time(t)`."""

    policy: str = "all"  # the server's name for it
    offset: int = 0
    time: datetime | None = None

    ALL: ClassVar[Start]
    NEW: ClassVar[Start]
    LAST: ClassVar[Start]
    LAST_PER_KEY: ClassVar[Start]

    @classmethod
    def at_offset(cls, offset: int) -> Start:
        """Start with the event of this offset, or the first one after it."""
        if offset < 1:
            raise ConfigError(f"offset {offset}: offsets start at 1")
        return cls("by_start_sequence", offset)

    @classmethod
    def at_time(cls, time: datetime) -> Start:
        """Start with the first event stored at or after this time."""
        if time.tzinfo is None:
            raise ConfigError(f"time {time!r} has no time zone: add one, for example datetime.UTC")
        return cls("by_start_time", 0, time.astimezone(UTC))

    @staticmethod
    def checked(value: object) -> Start:
        """The value of a setting if it is a Start; else a ConfigError that says how to write it."""
        if isinstance(value, Start):
            return value
        raise ConfigError(
            f"start: {value!r} is not a Start. Write Start.ALL, Start.NEW, Start.LAST, "
            f"Start.at_offset(5) or Start.at_time(datetime)"
        )

    @property
    def rfc3339(self) -> str | None:
        """The start time as the server reads it; None without one."""
        return None if self.time is None else self.time.isoformat().replace("+00:00", "Z")


Start.ALL = Start()
Start.NEW = Start("new")
Start.LAST = Start("last")
Start.LAST_PER_KEY = Start("last_per_subject")
