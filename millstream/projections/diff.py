"""The difference between two versions of a projection, row by row.

Both versions may be running. A row that one of them has changed and the other not yet is no
difference: rows that differ are read again for a while, and only those that still do are reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millstream.deadline import Deadline
from millstream.errors import ConfigError
from millstream.tables import Entry, Table

__all__ = ["RowDiff", "diff_tables"]

# Rows that are held back to be read again; more differences than this are not a race.
DOUBTFUL_MAX: Final = 1000
SETTLE_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class RowDiff:
    """A row that differs: its value in the active version and in the other; None: not there."""

    table: str
    key: str
    active: Any
    other: Any


async def diff_tables(name: str, active: Table, other: Table) -> AsyncIterator[RowDiff]:
    """The rows that differ between two tables."""
    # The smaller of the two is not known before; one is held in memory, as a process holds it.
    rows: dict[str, Any] = {}
    async for entry in active.entries():
        rows[entry.key] = entry.value
    doubtful: list[RowDiff] = []
    async for entry in other.entries():
        before = rows.pop(entry.key, None)
        if before != entry.value:
            doubtful.append(RowDiff(name, entry.key, before, entry.value))
    doubtful += [RowDiff(name, key, value, None) for key, value in rows.items()]
    doubtful.sort(key=lambda row: row.key)
    for row in doubtful[DOUBTFUL_MAX:]:
        yield row
    for row in await _settled(name, doubtful[:DOUBTFUL_MAX], active, other):
        yield row


async def _settled(
    name: str, rows: Sequence[RowDiff], active: Table, other: Table
) -> list[RowDiff]:
    """The rows that still differ after some time."""
    deadline = Deadline(SETTLE_SECONDS)
    left = list(rows)
    while left and not deadline.passed:
        await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))
        again = []
        for row in left:
            found = [_value(await table.get(row.key)) for table in (active, other)]
            if found[0] != found[1]:
                again.append(RowDiff(name, row.key, *found))
        left = again
    return left


def _value(entry: Entry | None) -> Any:
    return None if entry is None else entry.value


def same_tables(active: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The names of the tables that two versions share; a ConfigError when there are none."""
    names = [name for name in other if name in active]
    if not names:
        raise ConfigError(
            f"the versions have no table in common: {', '.join(active)} and {', '.join(other)}"
        )
    return names
