"""PostgreSQL as the target of `apply`. Blocking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from millstream.cdc.sink.fitting import fits_postgres
from millstream.cdc.sink.fold import RowEvents
from millstream.cdc.sink.postgres_rows import PostgresTable, find_table, upsert_rows
from millstream.cdc.sink.sql import postgres_type_of, quoted_table
from millstream.cdc.sink.target import (
    POSITIONS,
    DatabaseLost,
    FoundTable,
    RefusedRow,
    Session,
    SinkPlan,
)
from millstream.errors import ConfigError
from millstream.schemas import types as t
from millstream.schemas.extras import needed
from millstream.settings import hide_password

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["PostgresSession"]

CONNECT_SECONDS: Final = 10
# A server that vanished without a word is noticed after this long.
SILENCE_MS: Final = 30_000
CREATION_LOCK: Final = 0x6D696C6C  # an advisory lock of our own: "mill"
LOCK_MS: Final = 60_000  # for a lock that another process holds


class PostgresSession(Session):
    """One connection to PostgreSQL."""

    def __init__(self, url: str, plan: SinkPlan) -> None:
        super().__init__(plan)
        self._url = url
        self._psycopg = needed("psycopg", "cdc")
        self._connection: Connection[Any] | None = None

    def open(self) -> None:
        """Connect."""
        psycopg = self._psycopg
        try:
            options = psycopg.conninfo.conninfo_to_dict(self._url)
        except psycopg.ProgrammingError as error:
            raise ConfigError(
                f"{hide_password(self._url)!r} is not an address of PostgreSQL: {error}"
            ) from None
        options.setdefault("connect_timeout", CONNECT_SECONDS)
        options.setdefault("tcp_user_timeout", SILENCE_MS)
        options.setdefault("application_name", "millstream apply")
        try:
            # Nothing is prepared on the server, so that a pool between us does no harm.
            self._connection = psycopg.connect(**options, prepare_threshold=None)
            self._connection.execute(f"SET lock_timeout = {LOCK_MS}")
            self._connection.commit()
        except psycopg.OperationalError as error:
            raise DatabaseLost(str(error).strip()) from error

    def close(self) -> None:
        """Disconnect, whatever state it is in."""
        if self._connection is not None:
            with suppress(self._psycopg.Error):
                self._connection.close()

    @property
    def _open(self) -> Connection[Any]:
        if self._connection is None:
            raise DatabaseLost("it is not connected")
        return self._connection

    def _run(self, statement: str, values: Sequence[Any] = ()) -> Any:
        # A statement without values is not searched for placeholders.
        if not values:
            return self._open.execute(statement)
        return self._open.execute(statement.replace("?", "%s"), values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        psycopg, connection = self._psycopg, self._open
        try:
            yield
            connection.commit()
        except BaseException as error:
            with suppress(psycopg.Error):
                connection.rollback()
            if isinstance(error, psycopg.Error):
                raise self._judged(error) from error
            raise

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        try:
            with self._open.transaction():
                yield
        except self._psycopg.Error as error:
            raise self._judged(error) from error

    def _judged(self, error: Any) -> DatabaseLost | RefusedRow:
        psycopg = self._psycopg
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return DatabaseLost(str(error).strip())
        return RefusedRow(_message(error))

    def _lock_creation(self) -> None:
        # Two that create a table at once fail, also with IF NOT EXISTS.
        self._open.execute(f"SELECT pg_advisory_xact_lock({CREATION_LOCK})")

    def _alone(self) -> None:
        # Two that create a table at once both find that it is missing, whatever IF NOT EXISTS says.
        self._run("SELECT pg_advisory_xact_lock(hashtext(?))", (POSITIONS,))

    def _find(self, table: str) -> FoundTable | None:
        return find_table(self._open, table)

    def _type_of(self, type_: t.Type) -> str:
        return postgres_type_of(type_)

    def _fits(self, type_: t.Type, found: str) -> bool:
        return fits_postgres(type_, found)

    def _write(self, table: FoundTable, events: RowEvents, key: tuple[str, ...]) -> None:
        if isinstance(table, PostgresTable):
            upsert_rows(self._open, table, events.rows, key, events.deleted, events.unchanged)

    def _empty_table(self) -> None:
        errors, target = self._psycopg.errors, quoted_table(self.plan.table)
        try:
            with self._open.transaction():  # a savepoint
                self._open.execute(f"TRUNCATE {target}")
        except (errors.FeatureNotSupported, errors.InsufficientPrivilege):
            # Other tables refer to it, or it is not ours.
            self._open.execute(f"DELETE FROM {target}")


def _message(error: Any) -> str:
    """What the database says, without the whole row, which may be long and confidential."""
    found = error.diag
    text = found.message_primary or str(error).strip()
    detail = found.message_detail or ""
    if detail and not detail.startswith("Failing row"):
        text = f"{text}: {detail}"
    return f"{text} ({found.sqlstate})" if found.sqlstate else text
