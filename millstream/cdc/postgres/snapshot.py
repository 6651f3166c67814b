"""Rows of tables as they were at one position of the log, read as Arrow batches by ADBC.

Nothing is locked and nothing is written at the source. Rows come in the order of the key, so that
another snapshot can continue after the last one that was stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.model import Column, TableShape
from millstream.cdc.postgres.types import (
    from_adbc,
    from_text,
    output_text,
    quoted,
    select_expression,
)
from millstream.closing import AsyncClosing
from millstream.errors import SourceUnreachable
from millstream.schemas import types as t

__all__ = ["PostgresSnapshot", "is_after"]

T = TypeVar("T")
_Rows: TypeAlias = tuple[pa.RecordBatch, list[str]]
BATCH_BYTES: Final = 1024 * 1024  # of rows that are read, and stored, together
_EDGE: Final = "_millstream_key_{}"
_ROW: Final = "_millstream_row"
# Types that are ordered by their text, byte by byte: Python and Arrow know no other collation.
_BY_TEXT: Final = (t.String, t.Enum, t.Uuid)


class PostgresSnapshot(AsyncClosing):
    """One read-only transaction, in a thread of its own: the driver blocks."""

    def __init__(
        self, conninfo: str, snapshot: str, point: int, from_items: Mapping[str, str]
    ) -> None:
        self.point = point
        self._from_items = from_items  # what to select from, by the full name of a table
        self._conninfo, self._snapshot = conninfo, snapshot
        self._thread = ThreadPoolExecutor(1, "millstream-snapshot")
        self._connection: Any = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        from adbc_driver_manager import Error

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Error as error:
            raise SourceUnreachable(f"the snapshot was interrupted: {error}") from error

    async def _enter(self) -> None:
        await self._in_thread(self._open)

    def _open(self) -> None:
        import adbc_driver_postgresql.dbapi as adbc

        self._connection = adbc.connect(self._conninfo)
        with self._connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{self._snapshot}'")

    async def _leave(self, error: BaseException | None) -> None:
        def close() -> None:
            if self._connection is not None:
                self._connection.close()

        try:
            await self._in_thread(close)  # after what the thread is doing
        except SourceUnreachable:
            if error is None:
                raise
        finally:
            self._thread.shutdown(wait=False)

    async def rows(
        self, table: TableShape, after: Sequence[str] | None
    ) -> AsyncIterator[tuple[pa.RecordBatch, list[str]]]:
        """Rows after a key, in the order of keys; each batch with its last key."""
        cursor, reader = await self._in_thread(lambda: self._select(table, after))
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(self._thread, _next_rows, table, reader)
        try:
            while (found := await self._arrived(coming)) is not None:
                # The next ones are read while these are stored.
                coming = loop.run_in_executor(self._thread, _next_rows, table, reader)
                yield found
        finally:
            await asyncio.wait([coming])
            coming.exception()  # seen, if nobody waits for it any more
            await self._in_thread(cursor.close)

    async def _arrived(self, coming: asyncio.Future[_Rows | None]) -> _Rows | None:
        from adbc_driver_manager import Error

        try:
            return await asyncio.shield(coming)
        except (Error, pa.ArrowException, OSError) as error:
            raise SourceUnreachable(f"the snapshot was interrupted: {error}") from error

    def _select(self, table: TableShape, after: Sequence[str] | None) -> tuple[Any, Any]:
        cursor = self._connection.cursor()
        cursor.adbc_statement.set_options(
            **{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)}
        )
        cursor.execute(statement(table, self._from_items[table.full_name], after))
        return cursor, cursor.fetch_record_batch()


def _next_rows(table: TableShape, reader: Any) -> _Rows | None:
    """The next rows in their types, and their last key; None at the end."""
    for batch in reader:
        if batch.num_rows:
            return _typed(table, batch), _last_key(table, batch)
    return None


# -- pure ---------------------------------------------------------------------------------


def statement(table: TableShape, from_item: str, after: Sequence[str] | None) -> str:
    """The SELECT of a snapshot."""
    keys = _key_columns(table)
    selected = [select_expression(column) for column in table.columns]
    selected += [
        f"{output_text(column)} AS {quoted(_EDGE.format(number))}"
        for number, column in enumerate(keys)
    ]
    order = ", ".join(map(_ordered, keys))
    where = ""
    if after is not None:
        texts = ", ".join(
            _literal(text)
            + ("" if isinstance(column.type, _BY_TEXT) else f"::{column.source_type}")
            for text, column in zip(after, keys, strict=True)
        )
        where = f" WHERE ({order}) > ({texts})"
    return f"SELECT {', '.join(selected)} FROM {from_item} AS {_ROW}{where} ORDER BY {order}"


def _key_columns(table: TableShape) -> list[Column]:
    columns = {column.name: column for column in table.columns}
    return [columns[name] for name in table.key]


def _ordered(column: Column) -> str:
    # Without the table, ORDER BY would mean the selected text of that name.
    name = f"{_ROW}.{quoted(column.name)}"
    if isinstance(column.type, t.Uuid):
        return name  # its own order is that of its text, and has an index
    return f'{output_text(column)} COLLATE "C"' if isinstance(column.type, _BY_TEXT) else name


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _typed(table: TableShape, batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [
        from_adbc(batch.column(i), c.type, f"{table.full_name}.{c.name}")
        for i, c in enumerate(table.columns)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(table.row_type)))


def _last_key(table: TableShape, batch: pa.RecordBatch) -> list[str]:
    first, last = len(table.columns), batch.num_rows - 1
    return [str(batch.column(first + i)[last].as_py()) for i in range(len(table.key))]


def is_after(table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
    """Which keys come after another, in the order of `statement`."""
    after, equal = None, None
    for column, text in zip(_key_columns(table), edge, strict=True):
        values = keys.column(column.name)
        limit = from_text(pa.array([text]), column.type, column.name)[0]
        greater, same = pc.greater(values, limit), pc.equal(values, limit)
        if after is None or equal is None:
            after, equal = greater, same
        else:
            after = pc.or_(after, pc.and_(equal, greater))
            equal = pc.and_(equal, same)
    return after
