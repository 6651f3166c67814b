"""Positions in a writer's input: whole numbers, or pairs (major, minor) that order like words.

A pair is for inputs whose own numbers are not one for each event: that of a commit in a database
log, and that of the change within it. Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import ConfigError

__all__ = ["Position", "Positions", "as_position", "order_of", "spread_of"]

Position: TypeAlias = int | tuple[int, int]

_MOST: Final = 2**64 - 1  # of a position in a column, and of each part of a pair
_NUMBER: Final = pa.uint64()


def as_position(given: Any) -> Position:
    """A position in its plain form; a ConfigError if it is none.

    >>> as_position(7), as_position([3, 4])
    (7, (3, 4))
    """
    if isinstance(given, tuple | list):
        if len(given) == 2:
            major, minor = _whole(given[0]), _whole(given[1])
            if 0 <= major <= _MOST and 0 <= minor <= _MOST:
                return major, minor
        raise ConfigError(
            f"position {given!r:.100}: a pair is (major, minor), each from 0 to {_MOST}"
        )
    return _whole(given)


def _whole(given: Any) -> int:
    try:
        return int(operator.index(given))
    except TypeError as error:
        raise ConfigError(
            f"position {given!r:.100}: give a whole number, or a pair (major, minor)"
        ) from error


def order_of(position: Position) -> tuple[int, int]:
    """What positions are compared by; 0 (nothing is stored) is before every pair.

    >>> sorted([(2, 0), 0, (0, 0), (1, 9)], key=order_of)
    [0, (0, 0), (1, 9), (2, 0)]
    """
    return position if isinstance(position, tuple) else (position, -1)


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of rows, by column; without `minor` they are numbers."""

    major: pa.Array
    minor: pa.Array | None = None

    @classmethod
    def up_to(cls, last: Position, count: int) -> Positions:
        """Positions that count one by one up to the last: a pair counts in its minor part."""
        major, counts = last if isinstance(last, tuple) else (None, last)
        first = counts - count + 1
        if first < 0 or counts > _MOST:
            raise ConfigError(
                f"position {last} of the last of {count:,} rows: the first one would have "
                f"{first}, and rows of a frame have positions from 0 to {_MOST}"
            )
        ones = pa.repeat(pa.scalar(1, _NUMBER), count)
        # Numbers from `first` on, without a Python number for each; unsigned, so 0 is a case of
        # its own.
        column = pc.subtract(pc.cumulative_sum(ones, start=pa.scalar(first, _NUMBER)), ones)
        if major is None:
            return cls(column)
        return cls(pa.repeat(pa.scalar(major, _NUMBER), count), column)

    @classmethod
    def given(cls, columns: Any, frame: pa.Table) -> Positions:
        """Those that a caller names (columns of the frame) or gives (Arrow arrays)."""
        pair = isinstance(columns, tuple | list) and len(columns) == 2
        parts = columns if pair else [columns]
        found = cls(*(_column(part, frame) for part in parts))
        if not found.grow:
            raise ConfigError(
                "positions must grow from row to row: sort the frame by them, and give each row "
                "its own"
            )
        return found

    def __len__(self) -> int:
        return len(self.major)

    @property
    def grow(self) -> bool:
        """Whether each is greater than the one before it."""
        count = len(self) - 1
        if count < 1:
            return True
        before, after = self.slice(0, count), self.slice(1)
        greater = pc.greater(after.major, before.major)
        if before.minor is not None and after.minor is not None:
            same = pc.equal(after.major, before.major)
            later = pc.and_(same, pc.greater(after.minor, before.minor))
            greater = pc.or_(greater, later)
        return bool(pc.all(greater).as_py())

    def at(self, row: int) -> Position:
        """The position of a row."""
        major = int(self.major[row].as_py())
        return major if self.minor is None else (major, int(self.minor[row].as_py()))

    def upto(self, position: Position) -> int:
        """How many are at or before a position. They grow."""
        if self.minor is None:
            number = position if isinstance(position, int) else position[0]
            found = pc.less_equal(self.major, pa.scalar(min(number, _MOST), _NUMBER))
        else:
            major, minor = order_of(position)
            if minor < 0:
                return 0  # nothing is stored
            edge = pa.scalar(major, _NUMBER)
            here = pc.less_equal(self.minor, pa.scalar(minor, _NUMBER))
            found = pc.or_(pc.less(self.major, edge), pc.and_(pc.equal(self.major, edge), here))
        return int(pc.sum(found).as_py() or 0)

    def slice(self, start: int, count: int | None = None) -> Positions:
        minor = None if self.minor is None else self.minor.slice(start, count)
        return Positions(self.major.slice(start, count), minor)

    def take(self, rows: pa.Array) -> Positions:
        return Positions(
            self.major.take(rows), None if self.minor is None else self.minor.take(rows)
        )

    @staticmethod
    def joined(parts: Sequence[Positions]) -> Positions:
        """One after the other; all of one kind."""
        minors = [part.minor for part in parts if part.minor is not None]
        return Positions(
            pa.concat_arrays([part.major for part in parts]),
            pa.concat_arrays(minors) if minors else None,
        )

    def spread(self) -> pa.Array:
        """A number for each, as `spread_of` gives it."""
        return self.major if self.minor is None else pc.add(self.major, self.minor)


def spread_of(position: Position) -> int:
    """A number that neighbours do not share, by which events without a key are shared out."""
    return position if isinstance(position, int) else sum(position) & _MOST


def _column(part: Any, frame: pa.Table) -> pa.Array:
    """Whole numbers from 0 on, one for each row."""
    if isinstance(part, str):
        if part not in frame.schema.names:
            raise ConfigError(f"no column {part!r}; found {', '.join(frame.schema.names)}")
        part = frame.column(part)
    if isinstance(part, pa.ChunkedArray):
        part = part.combine_chunks()
    if not isinstance(part, pa.Array) or not pa.types.is_integer(part.type):
        raise ConfigError(
            f"positions {part!r:.100}: name a column of whole numbers or give an Arrow array of "
            f"them; for pairs two of either, (major, minor)"
        )
    if len(part) != frame.num_rows or part.null_count:
        raise ConfigError(
            f"{len(part) - part.null_count:,} positions for {frame.num_rows:,} rows: each row "
            f"needs one"
        )
    try:
        return part.cast(_NUMBER)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"positions from 0 to {_MOST}: {error}") from error
