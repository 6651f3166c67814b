"""How far a topic is applied: what is stored in the database with the rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "LogState",
    "StoredPosition",
    "TopicPosition",
    "TopicPositions",
    "covers",
    "first_of",
    "is_even",
    "last_of",
]


@dataclass(frozen=True, slots=True, order=True)
class TopicPosition:
    """The next event of a partition to apply: everything before it is applied."""

    offset: int = 1
    index: int = 0
    last_time: int = 0  # when the message before `offset` was stored, ns since 1970; 0: not known

    @property
    def key(self) -> tuple[int, int]:
        """What positions are compared by."""
        return self.offset, self.index


@dataclass(frozen=True, slots=True)
class LogState:
    """A partition as it is in the broker now."""

    created: str
    first: int  # offset of the oldest message that exists, or `next`
    next: int  # offset that the next message gets


TopicPositions: TypeAlias = Mapping[int, TopicPosition]  # by partition


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """A row of the table of positions."""

    partition: int
    worker: int
    workers: int
    position: TopicPosition
    log: str  # when the stream was created: another time is another log
    target: str  # the table that it belongs to


def first_of(stored: list[StoredPosition]) -> dict[int, TopicPosition]:
    """Where to read from: the first position of each partition that some worker has not applied."""
    found: dict[int, TopicPosition] = {}
    for one in stored:
        known = found.get(one.partition)
        if known is None or one.position.key < known.key:
            found[one.partition] = one.position
    return found


def last_of(stored: list[StoredPosition]) -> dict[int, TopicPosition]:
    """From where on no worker has applied anything, by partition."""
    found: dict[int, TopicPosition] = {}
    for one in stored:
        known = found.get(one.partition)
        if known is None or one.position.key > known.key:
            found[one.partition] = one.position
    return found


def covers(reached: TopicPositions, wanted: TopicPositions) -> bool:
    """Whether every partition is read at least as far as wanted."""
    return all(reached[number].key >= position.key for number, position in wanted.items())


def is_even(stored: list[StoredPosition]) -> bool:
    """Whether all workers are at the same position."""
    return first_of(stored) == last_of(stored)
