"""What a server says about the tables of a database; `tables_of` and `positions` block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millstream import errors
from millstream.cdc.model import Column, TableShape
from millstream.cdc.mysql.types import ColumnKind, kind_of
from millstream.cdc.patterns import is_wanted
from millstream.cdc.settings import CaptureSettings, TableSettings
from millstream.schemas import types as t
from millstream.schemas.extras import needed

__all__ = ["MARIADB", "ServerTable", "log_files", "log_status", "rows_of", "table_of", "tables_of"]

MARIADB: Final = "mariadb"
_PARSE_ERROR: Final = 1064  # code of the server for a statement that it does not know


@dataclass(frozen=True, slots=True)
class ServerTable:
    """A table as it is now, whether it can be captured or not."""

    name: str
    engine: str
    columns: tuple[Mapping[str, Any], ...]  # rows of information_schema
    primary: tuple[str, ...]
    uniques: tuple[tuple[str, ...], ...]  # columns of unique indexes without nulls
    cascades: tuple[str, ...]  # foreign keys by which the server changes rows without logging it


def rows_of(connection: Any, query: str, *values: object) -> list[dict[str, Any]]:
    """The rows of a query, by column."""
    cursors = needed("pymysql.cursors", "cdc")
    with connection.cursor(cursors.DictCursor) as cursor:
        cursor.execute(query, values)
        return list(cursor.fetchall())


def tables_of(connection: Any, database: str, settings: CaptureSettings) -> list[ServerTable]:
    """The tables that are meant, by name."""
    found = rows_of(
        connection,
        "SELECT TABLE_NAME AS name, ENGINE AS engine FROM information_schema.TABLES "
        "WHERE TABLE_SCHEMA = %s AND TABLE_TYPE = 'BASE TABLE' ORDER BY TABLE_NAME",
        database,
    )
    engines = {
        row["name"]: row["engine"] or ""
        for row in found
        if is_wanted(settings.tables, database, row["name"])
    }
    columns: dict[str, list[Mapping[str, Any]]] = {name: [] for name in engines}
    for row in rows_of(
        connection,
        "SELECT TABLE_NAME, COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, NUMERIC_PRECISION, "
        "NUMERIC_SCALE, CHARACTER_MAXIMUM_LENGTH, IS_NULLABLE FROM information_schema.COLUMNS "
        "WHERE TABLE_SCHEMA = %s ORDER BY TABLE_NAME, ORDINAL_POSITION",
        database,
    ):
        if row["TABLE_NAME"] in columns:
            columns[row["TABLE_NAME"]].append(row)
    indexes = _unique_indexes(connection, database)
    cascades = _cascades(connection, database)
    return [
        ServerTable(
            name,
            engine,
            tuple(columns[name]),
            indexes.get(name, {}).get("PRIMARY", ()),
            tuple(indexes.get(name, {}).values()),
            tuple(cascades.get(name, ())),
        )
        for name, engine in engines.items()
    ]


def _unique_indexes(connection: Any, database: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Columns of indexes in which every row is there once, by table and index."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    loose: set[tuple[str, str]] = set()
    for row in rows_of(
        connection,
        "SELECT TABLE_NAME AS t, INDEX_NAME AS i, COLUMN_NAME AS c, NULLABLE AS n, SUB_PART AS p "
        "FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = %s AND NON_UNIQUE = 0 "
        "ORDER BY TABLE_NAME, INDEX_NAME, SEQ_IN_INDEX",
        database,
    ):
        indexes = found.setdefault(row["t"], {})
        indexes[row["i"]] = (*indexes.get(row["i"], ()), row["c"])
        if row["n"] == "YES" or row["c"] is None or row["p"] is not None:
            loose.add((row["t"], row["i"]))
    for table, index in loose:
        del found[table][index]
    return found


def _cascades(connection: Any, database: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows_of(
        connection,
        "SELECT TABLE_NAME AS t, CONSTRAINT_NAME AS name, DELETE_RULE AS d, UPDATE_RULE AS u "
        "FROM information_schema.REFERENTIAL_CONSTRAINTS WHERE CONSTRAINT_SCHEMA = %s",
        database,
    ):
        if {row["d"], row["u"]} & {"CASCADE", "SET NULL", "SET DEFAULT"}:
            found.setdefault(row["t"], []).append(row["name"])
    return found


def table_of(
    table: ServerTable, database: str, own: TableSettings
) -> tuple[TableShape, list[ColumnKind]]:
    """A table as it is captured, with the kinds of its columns; else raises `ConfigError`."""
    full = f"{database}.{table.name}"
    by_name = {row["COLUMN_NAME"]: row for row in table.columns}
    for name in (*own.columns, *own.exclude, *own.key):
        if name not in by_name:
            raise errors.ConfigError(
                f"table {full} has no column '{name}'; it has {', '.join(by_name)}"
            )
    key = _key_of(table, full, own)
    columns, kinds = [], []
    for name, row in by_name.items():
        left_out = name in own.exclude or (own.columns and name not in own.columns)
        if left_out and name not in key:
            continue
        kind = kind_of(dict(row))
        if kind is None:
            raise errors.ConfigError(
                f"table {full}: column '{name}' is {row['COLUMN_TYPE']}, which cannot be "
                f'captured. Leave it out: exclude = ["{name}"]'
            )
        if name in key and not kind.as_key:
            raise errors.ConfigError(
                f"table {full}: column '{name}' of its key is {row['COLUMN_TYPE']}, which has no "
                f'exact text or order. Choose other unique columns: key = ["..."]'
            )
        as_text = name in own.text and name not in key
        type_ = t.String() if as_text else kind.type_in(name)
        columns.append(Column(name, type_, str(row["COLUMN_TYPE"])))
        kinds.append(kind)
    return TableShape(database, table.name, tuple(columns), key), kinds


def _key_of(table: ServerTable, full: str, own: TableSettings) -> tuple[str, ...]:
    key = own.key or table.primary
    if not key:
        raise errors.ConfigError(
            f"table {full} has no primary key, so nothing tells its rows apart. Give it one, or "
            f'name columns that are unique and NOT NULL: key = ["..."], or leave the table out: '
            f'tables = ["!{table.name}"]'
        )
    if not any(set(one) <= set(key) for one in table.uniques):
        raise errors.ConfigError(
            f"table {full}: no unique index of columns that are NOT NULL has the columns "
            f"{', '.join(key)} of its key, in full length. Create one, or choose other columns"
        )
    return tuple(key)


def log_status(connection: Any) -> tuple[str, int] | None:
    """The file and the position at which the log ends; None if there is none."""
    pymysql = needed("pymysql", "cdc")
    try:
        rows = rows_of(connection, "SHOW BINARY LOG STATUS")  # MySQL 8.2 and newer
    except pymysql.err.ProgrammingError as error:
        if error.args[0] != _PARSE_ERROR:
            raise
        rows = rows_of(connection, "SHOW MASTER STATUS")
    if not rows:
        return None
    return str(rows[0]["File"]), int(rows[0]["Position"])


def log_files(connection: Any) -> Sequence[tuple[str, int]]:
    """The files of the log that the server still has, with their sizes, in order."""
    rows = rows_of(connection, "SHOW BINARY LOGS")
    return [(str(row["Log_name"]), int(row["File_size"])) for row in rows]
