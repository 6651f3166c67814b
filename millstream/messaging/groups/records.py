"""What a group keeps in the broker: a record for each partition and one for each member. Pure.

A position is (offset, index): the next event to be handled; everything before it is done. The
record of a partition also says what is done after its position: all below `high` except `open`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from millstream.errors import MillstreamError

__all__ = [
    "MemberRecord",
    "ParkedAt",
    "PartitionProgress",
    "PartitionRecord",
    "Position",
    "decode_record",
]

Position = tuple[int, int]

VERSION: Final = 1
# Unfinished events listed in a record; what a dead owner had done after them is repeated.
OPEN_MAX: Final = 500

T = TypeVar("T", "PartitionRecord", "MemberRecord")


class ParkedAt(msgspec.Struct, frozen=True, array_like=True):
    """The event for which a key was parked, and when (ns since 1970)."""

    offset: int
    index: int
    since_ns: int


class PartitionRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The owner of a partition and its progress; changed only by compare-and-set."""

    position: Position  # everything before is done
    owner: str = ""  # the member's id; "": free
    epoch: int = 0  # grows with every owner: the fencing token
    high: Position = (0, 0)  # below it everything is done, except `open`
    open: tuple[Position, ...] = ()
    parked: dict[str, ParkedAt] = {}  # by key token
    mark: tuple[int, int] = (0, 0)  # offset and time (ns) of the last message read: a fingerprint
    deaths: int = 0  # owners in a row that died without progress
    trying: Position | None = None  # handed out alone, to see whether it kills the process
    strikes: int = 0  # owners that died while it was tried
    version: int = VERSION


class MemberRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A member's lease; every renewal is a new revision."""

    name: str  # as the application calls it
    lease: float  # seconds: the member is dead when the record is unchanged for this long
    since_ns: int = 0
    leaving: bool = False  # it finishes what it has and takes nothing more
    version: int = VERSION


def decode_record(payload: bytes, kind: type[T]) -> T:
    """A record from its JSON; a newer version is refused."""
    try:
        record = msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MillstreamError(f"a group's record is not readable: {error}") from error
    if record.version > VERSION:
        raise MillstreamError(
            f"the group's records have version {record.version}; this Millstream reads up to "
            f"{VERSION}. Upgrade all members"
        )
    return record


class PartitionProgress:
    """Which events of a partition are done, from the record of the last owner on."""

    __slots__ = ("_before", "_frontier", "_open", "_reopened")

    def __init__(self, record: PartitionRecord) -> None:
        self._before = record
        self._reopened = frozenset(record.open)
        self._frontier = record.position  # everything before it was read or done
        self._open: dict[Position, None] = {}  # read and not done, in the order of reading

    def __len__(self) -> int:
        return len(self._open)

    def wants(self, position: Position) -> bool:
        """Whether an event that is read now is still to be handled."""
        if position < self._before.position:
            return False
        return position >= self._before.high or position in self._reopened

    def add(self, position: Position) -> None:
        """The event is handled from now on."""
        self._open[position] = None

    def read_up_to(self, frontier: Position) -> None:
        """Everything before was read."""
        if frontier > self._frontier:
            self._frontier = frontier

    def done(self, position: Position) -> None:
        del self._open[position]

    def state(self) -> tuple[Position, Position, tuple[Position, ...]]:
        """What to commit: position, high and open."""
        found = list(self._open)
        high = self._frontier
        if high < self._before.high:  # not everything the last owner knew is read again yet
            high = self._before.high
            found += [at for at in self._before.open if at >= self._frontier]
        if len(found) > OPEN_MAX:
            high, found = found[OPEN_MAX], found[:OPEN_MAX]
        return (found[0] if found else high), high, tuple(found)
