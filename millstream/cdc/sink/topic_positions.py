"""How far a topic is applied: what is stored in the database with the rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "LogState",
    "Place",
    "Places",
    "StoredPlace",
    "covers",
    "furthest",
    "is_even",
    "nearest_of",
]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The next event of a partition to apply: everything before it is applied."""

    offset: int = 1
    index: int = 0
    last_time: int = 0  # when the message before `offset` was stored, ns since 1970; 0: not known

    @property
    def key(self) -> tuple[int, int]:
        """What places are compared by."""
        return self.offset, self.index


@dataclass(frozen=True, slots=True)
class LogState:
    """A partition as it is in the broker now."""

    created: str
    first: int  # offset of the oldest message that exists, or `next`
    next: int  # offset that the next message gets


Places: TypeAlias = Mapping[int, Place]  # by partition


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A row of the table of positions."""

    partition: int
    worker: int
    workers: int
    place: Place
    log: str  # when the stream was created: another time is another log
    target: str  # the table that it belongs to


def nearest_of(stored: list[StoredPlace]) -> dict[int, Place]:
    """Where to read from: the first place of each partition that some worker has not applied."""
    found: dict[int, Place] = {}
    for one in stored:
        known = found.get(one.partition)
        if known is None or one.place.key < known.key:
            found[one.partition] = one.place
    return found


def furthest(stored: list[StoredPlace]) -> dict[int, Place]:
    """From where on no worker has applied anything, by partition."""
    found: dict[int, Place] = {}
    for one in stored:
        known = found.get(one.partition)
        if known is None or one.place.key > known.key:
            found[one.partition] = one.place
    return found


def covers(reached: Places, wanted: Places) -> bool:
    """Whether every partition is read at least as far as wanted."""
    return all(reached[number].key >= place.key for number, place in wanted.items())


def is_even(stored: list[StoredPlace]) -> bool:
    """Whether all workers are at the same place."""
    return nearest_of(stored) == furthest(stored)
