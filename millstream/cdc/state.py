"""What a capture keeps in the broker besides its events: the table `cdc-state`.

How far each topic is stands in the topic itself, with its writer. Here is what must be known before
the first event is written, and what is too long for a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from millstream.mill import Mill
from millstream.tables import Table

__all__ = ["STATE_TABLE", "CaptureRecord", "Interval", "States", "TableRecord"]

STATE_TABLE: Final = "cdc-state"


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """A capture that has begun."""

    identity: str  # of the database: positions of another one mean something else
    format: str


@dataclass(frozen=True, slots=True)
class Interval:
    """Rows with keys after `edge` were read from a snapshot at `point`, up to the next interval.

    Every attempt of an interrupted snapshot begins one.
    """

    edge: list[str] | None  # None: from the first row on
    point: int


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A captured table."""

    topic: str
    key: list[str]
    columns: dict[str, int]  # name -> what the database knows it by when it is renamed
    base: int = 0  # commit position of the events of the snapshot; before all changes after it
    intervals: list[Interval] = field(default_factory=list)
    identity: int = 0  # of the table, as the database knows it; 0: by its name only
    # Last keys of the latest batches, too long for a note, by the rows stored with them.
    edges: dict[str, list[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TableRecord:
        """From what `to_json` gave."""
        intervals = [Interval(**one) for one in data["intervals"]]
        return cls(**{**data, "intervals": intervals})


class States:
    """The records of one capture."""

    def __init__(self, records: Table, capture: str) -> None:
        self._records, self._capture = records, capture

    @classmethod
    async def opened(cls, mill: Mill, capture: str) -> Self:
        """Those of a capture; the table is created if it is missing."""
        return cls(await mill.create_table(STATE_TABLE), capture)

    async def capture(self) -> CaptureRecord | None:
        """The record of the capture; None: it has not begun."""
        entry = await self._records.get(self._capture)
        return None if entry is None else CaptureRecord(**entry.json())

    async def put_capture(self, record: CaptureRecord) -> None:
        """Store the record of the capture."""
        await self._records.put(self._capture, asdict(record))

    async def table(self, name: str) -> TableRecord | None:
        """The record of a table; None: it has not begun."""
        entry = await self._records.get(self._key(name))
        return None if entry is None else TableRecord.from_json(entry.json())

    async def put_table(self, name: str, record: TableRecord) -> None:
        """Store the record of a table."""
        await self._records.put(self._key(name), record.to_json())

    async def tables(self) -> dict[str, TableRecord]:
        """All tables that the capture has, or had."""
        prefix = self._key("")
        return {
            entry.key.removeprefix(prefix): TableRecord.from_json(entry.json())
            async for entry in self._records.entries()
            if entry.key.startswith(prefix)
        }

    async def forget(self, tables: Sequence[str], capture: bool) -> None:
        """Remove records: the next run begins with a new snapshot."""
        for name in tables:
            await self._records.delete(self._key(name))
        if capture:
            await self._records.delete(self._capture)

    def _key(self, table: str) -> str:
        return f"{self._capture}/{table}"
