"""Which version of a projection is active: one record for each, changed by compare-and-set.

The tables of a version are topics of their own (`balances-v2`), so two versions run side by side,
and to swap them is to change one number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from millstream.errors import (
    ConfigError,
    DataLoss,
    ProjectionNotFound,
    TopicNotFound,
    WrongSequence,
)
from millstream.messaging import TopicSettings
from millstream.nearest import propose
from millstream.tables import Table

__all__ = ["PROJECTIONS_TABLE", "ProjectionRecord", "ProjectionRecords", "table_name"]

PROJECTIONS_TABLE: Final = "mill-projections"
TRIES_MAX: Final = 50  # each lost race means that another process has changed a record

_SETTINGS: Final = TopicSettings(history=1, description="Projections and their active versions")


@dataclass(frozen=True, slots=True)
class ProjectionRecord:
    """A projection: what it reads, its active version, and the tables of each version."""

    name: str
    source: str  # the event store or topic that it reads
    active: int
    versions: dict[int, tuple[str, ...]] = field(default_factory=dict)  # names of tables

    def tables(self, version: int | None = None) -> dict[str, str]:
        """The topics of the tables of a version, by the names of the tables; None: the active."""
        chosen = self.active if version is None else version
        return {name: table_name(name, chosen) for name in self.versions.get(chosen, ())}


def table_name(name: str, version: int) -> str:
    """The topic of a table of one version.

    >>> table_name("balances", 2)
    'balances-v2'
    """
    return f"{name}-v{version}"


_RECORD: Final = msgspec.json.Decoder(ProjectionRecord)
Change = Callable[[ProjectionRecord | None], ProjectionRecord]


class ProjectionRecords:
    """The records of all projections."""

    def __init__(
        self,
        open_table: Callable[[str], Awaitable[Table]],
        create_table: Callable[[str, TopicSettings], Awaitable[Table]],
    ) -> None:
        self._open = open_table
        self._create = create_table
        self._table: Table | None = None

    async def all(self) -> list[ProjectionRecord]:
        """Every projection, by name."""
        table = await self._found()
        if table is None:
            return []
        found = [_read(entry.value) async for entry in table.entries()]
        return sorted(found, key=lambda record: record.name)

    async def find(self, name: str) -> ProjectionRecord | None:
        """A projection; None when there is none of that name."""
        table = await self._found()
        entry = None if table is None else await table.get(name)
        return None if entry is None else _read(entry.value)

    async def get(self, name: str) -> ProjectionRecord:
        """A projection; ProjectionNotFound when there is none of that name."""
        found = await self.find(name)
        if found is None:
            missing = ProjectionNotFound(name)
            propose(missing, name, [record.name for record in await self.all()])
            raise missing
        return found

    async def change(self, name: str, change: Change) -> ProjectionRecord:
        """Replace a record by what a function makes of it, if it has not changed meanwhile."""
        table = await self._found() or await self._create(PROJECTIONS_TABLE, _SETTINGS)
        self._table = table
        for _ in range(TRIES_MAX):
            entry = await table.get(name)
            before = None if entry is None else _read(entry.value)
            after = change(before)
            if after == before:
                return after
            revision = await table.revision(name) if entry is None else entry.revision
            try:
                await table.put(name, msgspec.json.encode(after), revision=revision)
                return after
            except WrongSequence:
                continue
        raise DataLoss(f"the record of projection '{name}' is changed by others all the time")

    async def _found(self) -> Table | None:
        if self._table is None:
            try:
                self._table = await self._open(PROJECTIONS_TABLE)
            except TopicNotFound:
                return None
        return self._table


def declared(
    record: ProjectionRecord | None, name: str, source: str, version: int, tables: Sequence[str]
) -> ProjectionRecord:
    """The record with a version in it; the first one is active at once."""
    if record is None:
        return ProjectionRecord(name, source, version, {version: tuple(tables)})
    if record.source != source:
        raise ConfigError(
            f"projection '{name}' reads '{record.source}', not '{source}'. Use another name"
        )
    known = record.versions.get(version, tuple(tables))
    if set(known) != set(tables):
        raise ConfigError(
            f"version {version} of projection '{name}' has the tables {', '.join(known)}, not "
            f"{', '.join(tables)}. Give it another version"
        )
    return replace(record, versions={**record.versions, version: tuple(tables)})


def _read(text: bytes) -> ProjectionRecord:
    try:
        return _RECORD.decode(text)
    except msgspec.MsgspecError as error:
        raise DataLoss(
            f"a record of '{PROJECTIONS_TABLE}' is not readable: {error}. Check the disk"
        ) from error
