"""The table of a `@postgres` output, created or checked, and the one that notes its batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

from millstream.cdc.sink.fitting import fits_postgres
from millstream.cdc.sink.postgres_rows import PostgresTable, find_table
from millstream.cdc.sink.sql import columns_of, postgres_type, quoted, quoted_table
from millstream.errors import PipelineInvalid, SinkError
from millstream.schemas import from_arrow
from millstream.schemas.extras import needed
from millstream.settings import Secret

__all__ = ["connected", "prepared_table", "stage_prefix", "table_beside"]

CONNECT_SECONDS: Final = 10
SILENCE_MS: Final = 30_000  # a server that vanished without a word is noticed after this long
LOCK_MS: Final = 60_000  # for a lock that another process holds
BATCHES: Final = "millstream_batches"  # query and number of the last batch that is stored
# Held while tables are created: two flows may do so at once, and "IF NOT EXISTS" does not wait.
_CREATING: Final = "SELECT pg_advisory_xact_lock(hashtext('millstream_batches'))"


@contextmanager
def connected(address: Secret, output: str) -> Iterator[Any]:
    """A connection that commits at the end; not if an error is raised."""
    psycopg = needed("psycopg", "cdc")
    try:
        options = psycopg.conninfo.conninfo_to_dict(address.reveal())
    except psycopg.ProgrammingError:
        # The reason may repeat a part of the address, and that may be a password.
        raise PipelineInvalid(
            f"'{output}': its url is not an address of PostgreSQL; write it like "
            f"postgresql://user@host/database"
        ) from None
    options.setdefault("connect_timeout", CONNECT_SECONDS)
    options.setdefault("tcp_user_timeout", SILENCE_MS)
    options.setdefault("application_name", "millstream pipeline")
    try:
        # Nothing is prepared on the server, so that a pool between us does no harm.
        with psycopg.connect(**options, prepare_threshold=None) as connection:
            connection.execute(f"SET lock_timeout = {LOCK_MS}")
            connection.commit()
            yield connection
    except psycopg.Error as error:
        raise SinkError(f"'{output}': PostgreSQL says: {_message(error)}") from error


def _message(error: Any) -> str:
    """What the database says, without the row, which may be confidential."""
    text = error.diag.message_primary or str(error).strip()
    return f"{text} ({error.diag.sqlstate})" if error.diag.sqlstate else text


def table_beside(table: str, name: str) -> str:
    """A table of this name in the schema of another table."""
    return ".".join([*table.split(".")[:-1], name])


def stage_prefix(query: str) -> str:
    """How the names of the staging tables of a query begin."""
    return f"millstream_stage_{hashlib.sha256(query.encode()).hexdigest()[:20]}_"


def prepared_table(
    address: Secret, output: str, table: str, rows: pa.Schema, key: Sequence[str]
) -> PostgresTable:
    """The table, created with the columns of the rows if it does not exist, else checked."""
    with connected(address, output) as connection:
        connection.execute(_CREATING)
        batches = quoted_table(table_beside(table, BATCHES))
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {batches} "
            f"(query text PRIMARY KEY, batch bigint NOT NULL, stored timestamptz)"
        )
        found = find_table(connection, table)
        if found is None:
            connection.execute(_creation(table, rows, key))
            found = find_table(connection, table)
        connection.commit()
    if found is None:
        raise SinkError(f"'{output}': table {table} was created and is not visible")
    _check(output, found, rows, key)
    return found


def _creation(table: str, rows: pa.Schema, key: Sequence[str]) -> str:
    columns = [f"{quoted(field.name)} {postgres_type(field.type)}" for field in rows]
    if key:
        columns.append(f"PRIMARY KEY ({columns_of(key)})")
    return f"CREATE TABLE {quoted_table(table)} ({', '.join(columns)})"


def _check(output: str, table: PostgresTable, rows: pa.Schema, key: Sequence[str]) -> None:
    if key:
        table.check_key(key)
    types = {field.name: field.type for field in from_arrow(rows).fields}
    for field in rows:
        name, wanted = field.name, postgres_type(field.type)
        if name not in table.columns:
            raise PipelineInvalid(
                f"'{output}': the rows have the column '{name}', and table {table.name} has not. "
                f"Add it: ALTER TABLE {quoted_table(table.name)} ADD COLUMN {quoted(name)} "
                f"{wanted}; or leave it out with drop('{name}')"
            )
        if name in table.computed:
            raise PipelineInvalid(
                f"'{output}': table {table.name} computes the column '{name}' itself. Leave it "
                f"out with drop('{name}')"
            )
        if not fits_postgres(types[name], table.columns[name]):
            raise PipelineInvalid(
                f"'{output}': column '{name}' is {table.columns[name]} in table {table.name}, "
                f"which does not hold all values of the rows ({wanted}). Convert it with cast, or "
                f"change the table"
            )
