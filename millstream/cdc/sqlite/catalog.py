"""What a SQLite database says about its tables, and whether they can be captured.

The functions block; `SqliteSource` calls them in its own thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millstream import errors
from millstream.cdc.model import Column, Finding, TableShape
from millstream.cdc.patterns import is_wanted
from millstream.cdc.settings import CaptureSettings, TableSettings
from millstream.cdc.sqlite.triggers import KEY_COLUMNS, Definition, quoted
from millstream.cdc.sqlite.types import key_type_of, type_of
from millstream.schemas import types as t

__all__ = ["definition_of", "findings_about", "shape_of", "wanted_tables"]


@dataclass(frozen=True, slots=True)
class _Unique:
    """A unique index."""

    columns: tuple[tuple[str, str], ...]  # name and collation
    plain: bool  # neither of expressions nor of some rows only
    primary: bool


def wanted_tables(db: sqlite3.Connection, settings: CaptureSettings) -> list[str]:
    """The tables that are meant, by name; neither views nor virtual tables."""
    found = db.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' "
        "ESCAPE '\\' AND name NOT LIKE '\\_millstream\\_%' ESCAPE '\\' "
        "AND upper(coalesce(sql, '')) NOT LIKE 'CREATE VIRTUAL %' ORDER BY name"
    )
    outboxes = {one.table for one in settings.outbox}
    return [name for (name,) in found if name in outboxes or is_wanted(settings.tables, "", name)]


def definition_of(
    db: sqlite3.Connection, table: str, settings: TableSettings, *, running: bool = False
) -> Definition:
    """What the triggers of a table record; raises `ConfigError` if it cannot be captured.

    While a capture is `running`, a column that is left out may be dropped from the table.
    """
    rows = db.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
    columns = {
        name: (declared, bool(not_null), primary)
        for _, name, declared, not_null, _, primary, hidden in rows
        if hidden != 1
    }
    if not columns:
        raise errors.CaptureError(
            f"table '{table}' does not exist in the database any more. Leave it out of the "
            f"capture's tables, or start again: 'millstream cdc reset'"
        )
    named = (*settings.columns, *settings.key, *(() if running else settings.exclude))
    unknown = [name for name in named if name not in columns]
    if unknown:
        raise errors.ConfigError(
            f"table '{table}' has no column '{unknown[0]}'; it has {', '.join(columns)}"
        )
    uniques = _uniques(db, table)
    primary = tuple(
        name for name, (_, _, place) in sorted(columns.items(), key=lambda c: c[1][2]) if place
    )
    key = settings.key or primary
    _check_key(
        table, key, primary, uniques, {n for n, (_, not_null, _) in columns.items() if not_null}
    )
    for name in key:
        if key_type_of(columns[name][0]) is None:
            raise errors.ConfigError(
                f"table '{table}': column '{name}' of its key is {columns[name][0]}, which has no "
                f'exact text. Choose other unique columns: key = ["..."]'
            )
    chosen = [
        (name, declared)
        for name, (declared, _, _) in columns.items()
        if name in key
        or (name not in settings.exclude and (not settings.columns or name in settings.columns))
    ]
    return Definition(table, tuple(chosen), key, _replacing(uniques, key))


def _uniques(db: sqlite3.Connection, table: str) -> list[_Unique]:
    found = []
    for _, index, unique, origin, partial in db.execute(f"PRAGMA index_list({quoted(table)})"):
        if not unique:
            continue
        parts = db.execute(f"PRAGMA index_xinfo({quoted(index)})").fetchall()
        keys = [(cid, name, how) for _, cid, name, _, how, is_key in parts if is_key]
        expressions = any(cid < 0 for cid, _, _ in keys)
        columns = () if expressions else tuple((name, how) for _, name, how in keys)
        found.append(_Unique(columns, not expressions and not partial, origin == "pk"))
    return found


def _check_key(
    table: str,
    key: Sequence[str],
    primary: Sequence[str],
    uniques: Iterable[_Unique],
    not_null: set[str],
) -> None:
    if not key:
        raise errors.ConfigError(
            f"table '{table}' has no primary key, so nothing tells its rows apart. Give it one, "
            f'or name columns that are unique and NOT NULL: key = ["..."], or leave the table '
            f'out: tables = ["!{table}"]'
        )
    if len(key) > KEY_COLUMNS:
        raise errors.ConfigError(
            f"table '{table}': its key has {len(key)} columns; at most {KEY_COLUMNS} are possible. "
            f'Choose fewer that are unique: key = ["..."]'
        )
    if tuple(key) == tuple(primary):
        return
    sets = [set(primary)] if primary else []
    sets += [{name for name, _ in one.columns} for one in uniques if one.plain]
    if not any(one <= set(key) for one in sets):
        raise errors.ConfigError(
            f"table '{table}': no unique index has the columns {', '.join(key)} that are set as "
            f"its key. Create one, or choose other columns"
        )
    loose = [name for name in key if name not in not_null and name not in primary]
    if loose:
        raise errors.ConfigError(
            f"table '{table}': column '{loose[0]}' of its key may be null. Declare it NOT NULL, or "
            f"choose other columns"
        )


def _replacing(
    uniques: Iterable[_Unique], key: Sequence[str]
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Sets of unique columns by which a row can be replaced by one with another key."""
    return tuple(
        one.columns
        for one in uniques
        if one.columns and ({name for name, _ in one.columns} != set(key) or _folds(one.columns))
    )


def _folds(columns: Iterable[tuple[str, str]]) -> bool:
    """Whether two different texts may be the same to the index."""
    return any(collation.upper() != "BINARY" for _, collation in columns)


def shape_of(definition: Definition, settings: TableSettings) -> TableShape:
    """A table as it is captured with these settings."""
    columns = []
    for name, declared in definition.columns:
        if name in definition.key:
            type_ = key_type_of(declared) or t.String()
        elif name in settings.exclude or (settings.columns and name not in settings.columns):
            continue
        else:
            type_ = t.String() if name in settings.text else type_of(declared)
        columns.append(Column(name, type_, declared))
    return TableShape("", definition.table, tuple(columns), definition.key)


# -- check --------------------------------------------------------------------------------


def findings_about(db: sqlite3.Connection, settings: CaptureSettings) -> list[Finding]:
    """What `check` says about the database and its tables."""
    found = [_json_functions(db), _journal(db)]
    names = wanted_tables(db, settings)
    if not names:
        patterns = ", ".join(settings.tables)
        found.append(
            Finding(
                "tables",
                False,
                f"no table fits the patterns {patterns}",
                "name tables that exist; views and virtual tables cannot be captured",
            )
        )
    for name in names:
        try:
            definition = definition_of(db, name, settings.settings_of(name))
        except errors.ConfigError as error:
            found.append(Finding(f"table {name}", False, str(error), f'tables = ["!{name}"]'))
            continue
        found.append(Finding(f"table {name}", True, f"key: {', '.join(definition.key)}"))
        if any(not one.columns for one in _uniques(db, name)):
            found.append(
                Finding(
                    f"table {name}",
                    False,
                    "it has a unique index of expressions: a row that INSERT OR REPLACE removes "
                    "by it is not recorded as deleted",
                    "do not use OR REPLACE on this table, or PRAGMA recursive_triggers = ON in "
                    "every connection that does",
                    fatal=False,
                )
            )
    return found


def _json_functions(db: sqlite3.Connection) -> Finding:
    try:
        db.execute("SELECT json_quote('x')").fetchone()
    except sqlite3.OperationalError:
        return Finding(
            "json functions",
            False,
            f"SQLite {sqlite3.sqlite_version} has none here, and triggers need them",
            "use SQLite 3.38 or newer, in every process that writes to the database",
        )
    return Finding("json functions", True, f"SQLite {sqlite3.sqlite_version} has them")


def _journal(db: sqlite3.Connection) -> Finding:
    (mode,) = db.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        return Finding("journal_mode", True, "wal: readers and writers do not wait for each other")
    return Finding(
        "journal_mode",
        False,
        f"{mode}: writers wait while changes are read, and while the database is copied for the "
        f"snapshot",
        "PRAGMA journal_mode = WAL",
        fatal=False,
    )
