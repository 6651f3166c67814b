"""What a source of changes does; `postgres`, `mysql` and `sqlite` are the implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pyarrow as pa

from millstream.cdc.model import CaptureLag, Finding, Received, TableShape

__all__ = ["CaptureSource", "SourceSnapshot"]


class SourceSnapshot(Protocol):
    """A consistent view of the source at one position, open for reading."""

    point: int  # commits before it are in the snapshot; those at or after it are not

    def rows(
        self, table: TableShape, after: Sequence[str] | None
    ) -> AsyncIterator[tuple[pa.RecordBatch, list[str]]]:
        """Rows in the order of the key, in batches of a bounded size; each with its last key.

        A batch has the columns of the shape in their Arrow types. `after` is the last key of an
        earlier, interrupted snapshot: the rows that follow it are wanted.
        """
        ...


class CaptureSource(Protocol):
    """A database whose changes are captured. Not for use by several tasks at once."""

    async def open(self) -> None:
        """Connect; raises if the database cannot be reached."""
        ...

    async def close(self) -> None:
        """Disconnect, whatever state it is in."""
        ...

    async def identity(self) -> str:
        """What tells this database from another: positions of another one mean something else."""
        ...

    async def check(self) -> list[Finding]:
        """What is missing for a capture, found without changing anything."""
        ...

    async def tables(self) -> list[TableShape]:
        """The captured tables as they are now."""
        ...

    async def prepare(self, tables: Sequence[TableShape]) -> bool:
        """Create what a capture needs at the source, if it is missing.

        True if its position in the log was created now: earlier changes cannot be received.
        """
        ...

    def snapshot(self) -> AbstractAsyncContextManager[SourceSnapshot]:
        """A view of the source as it is now."""
        ...

    def is_after(self, table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
        """Which keys (rows of key columns) are after `edge` in the order of snapshots."""
        ...

    def start_at(self, commit: int) -> None:
        """Commits up to this one are stored; for sources that do not keep a position."""
        ...

    def changes(self) -> AsyncIterator[Received]:
        """All changes since what was confirmed, for ever, with `Received` at least every second."""
        ...

    async def confirm(self, upto: int) -> None:
        """Everything up to a position is stored: the source need not keep it."""
        ...

    async def lag(self) -> CaptureLag:
        """How far the capture is behind; also while none is running."""
        ...

    async def reset(self) -> None:
        """Remove what `prepare` created."""
        ...
