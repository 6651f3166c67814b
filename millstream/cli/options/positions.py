"""Positions in a topic as people type them. Pure but for the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.cli.options.times import moment
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime

    from millstream.messaging import Start

__all__ = ["POSITION_HELP", "Position", "parse_position"]

POSITION_HELP: Final = (
    "beginning, end, an offset, -N (the last N of each partition), keys (the last of each key), "
    "or @TIME (2026-01-31T12:00Z, or 10m: ten minutes ago)"
)
_NAMES: Final = {
    "beginning": "beginning",
    "start": "beginning",
    "all": "beginning",
    "end": "end",
    "new": "end",
    "keys": "keys",
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading starts or ends; exactly one of the fields is set."""

    name: str | None = None  # "beginning", "end" or "keys"
    offset: int | None = None
    last: int | None = None  # this many before the end of each partition
    time: datetime | None = None

    def start(self, last_offset: int) -> Start:
        """Where to start in a partition with this last offset."""
        from millstream.messaging import Start

        if self.time is not None:
            return Start.at_time(self.time)
        if self.offset is not None:
            return Start.at_offset(self.offset)
        if self.last is not None:
            return Start.at_offset(max(1, last_offset - self.last + 1))
        if self.name == "end":
            return Start.at_offset(last_offset + 1)
        return Start.LAST_PER_KEY if self.name == "keys" else Start.ALL

    @property
    def differs(self) -> bool:
        """Whether it is another offset in each partition."""
        return self.last is not None or self.name == "end"


def parse_position(text: str) -> Position:
    """A position in a topic.

    >>> parse_position("-5"), parse_position("17").offset, parse_position("end").name
    (Position(name=None, offset=None, last=5, time=None), 17, 'end')
    """
    if text in _NAMES:
        return Position(name=_NAMES[text])
    if text.startswith("@"):
        return Position(time=moment(text[1:]))
    if re.fullmatch(r"-\d+", text):
        return Position(last=int(text[1:]))
    if text.isdigit() and int(text) > 0:
        return Position(offset=int(text))
    raise ConfigError(f"not a position in a topic: {text!r}. Write {POSITION_HELP}")
