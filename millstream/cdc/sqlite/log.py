"""The log of changes that a capture keeps in a SQLite database, filled by triggers.

The methods block; `SqliteSource` calls them in its own thread. Every transaction that writes is
short, so that the application never waits for long.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from millstream import errors
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.sqlite.catalog import definition_of
from millstream.cdc.sqlite.triggers import (
    CREATE_TABLES,
    NOW,
    Definition,
    Names,
    drop_statements,
    quoted,
    read_row,
    row_json,
    trigger_statements,
)

__all__ = ["ChangeLog", "Kept", "LoggedChange", "reading", "writing"]

ROWS_AT_ONCE: Final = 5_000
BYTES_AT_ONCE: Final = 8 * 1024 * 1024
# More changes than this are not searched for the rows of a table that has got a column: then all
# of its rows are recorded again.
SEARCHED_CHANGES: Final = 200_000
_SAMPLE: Final = 200  # rows from which the size of the log is estimated


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """One row of the log."""

    seq: int
    time: int  # milliseconds since 1970
    shape: int
    op: str
    old: str | None
    new: str | None


@dataclass(frozen=True, slots=True)
class Kept:
    """How much there is in the log, and how much of it waits. Bytes are estimated."""

    bytes: int = 0
    waiting: int = 0  # changes that are not confirmed
    waiting_bytes: int = 0
    oldest: int | None = None  # of these, milliseconds since 1970


@contextmanager
def reading(db: sqlite3.Connection) -> Iterator[None]:
    """Reads see the database at one moment."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


@contextmanager
def writing(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction that has the write lock from its beginning: it cannot deadlock later."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


class ChangeLog:
    """The table of changes of one capture, and the triggers that fill it."""

    def __init__(self, db: sqlite3.Connection, settings: CaptureSettings) -> None:
        self._db = db
        self._settings = settings
        self._names = Names(settings.name)
        self._changes = quoted(self._names.changes)
        self._shapes = quoted(self._names.shapes)
        self._schema_version: int | None = None  # at which the triggers fitted their tables
        self._definitions: dict[int, tuple[Definition, bool]] = {}  # and whether it is captured

    @property
    def exists(self) -> bool:
        """Whether the capture has its tables in the database."""
        query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN (?, ?)"
        found = self._db.execute(query, (self._names.changes, self._names.shapes)).fetchone()
        return bool(found[0] == 2)

    # -- creating -------------------------------------------------------------------------

    def prepare(self, definitions: Sequence[Definition]) -> bool:
        """Create tables and triggers that are missing; whether the log was created now."""
        with writing(self._db):
            created = not self.exists
            for statement in CREATE_TABLES:
                self._db.execute(
                    statement.format(
                        changes=self._changes,
                        shapes=self._shapes,
                        replaced=quoted(self._names.replaced),
                    )
                )
            if created:
                self._number_from_now_on()
            active = self._active()
            for definition in definitions:
                known = active.pop(definition.table, None)
                self._follow(definition, known)
            for table, (shape, _) in active.items():
                self._end(table, shape)
            self._note_version()
        return created

    def _number_from_now_on(self) -> None:
        """Begin with a number that no earlier log has had, also one that was reset.

        Topics may have positions of an earlier log: they must be smaller. No SQLite makes 256
        changes a millisecond for as long as a log lives.
        """
        self._db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (self._names.changes,))
        self._db.execute(
            f"INSERT INTO sqlite_sequence(name, seq) VALUES (?, {NOW} * 256)",
            (self._names.changes,),
        )

    def _active(self) -> dict[str, tuple[int, Definition]]:
        """The shapes that triggers record at present, by table."""
        found = self._db.execute(f'SELECT id, "table", definition FROM {self._shapes} WHERE active')
        return {table: (shape, Definition.from_json(table, text)) for shape, table, text in found}

    def _follow(self, definition: Definition, known: tuple[int, Definition] | None) -> None:
        """Let the triggers of a table fit it."""
        table = definition.table
        if known is None:
            if self._was_captured(table):
                raise errors.SourceLost(
                    self._settings.name,
                    f"table '{table}' was left out of the capture for a while, so its changes of "
                    f"that time were not recorded",
                )
            self._begin(definition)
            return
        shape, recorded = known
        wanted = trigger_statements(self._names, recorded, shape)
        existing = dict(
            self._db.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ? "
                "COLLATE NOCASE",
                (table,),
            )
        )
        missing = [name for name in wanted if name not in existing]
        if missing:
            raise errors.SourceLost(
                self._settings.name,
                f"the trigger '{missing[0]}' of table '{table}' is gone (the table was dropped and "
                f"created again, or the trigger was dropped), so changes were not recorded",
            )
        same = definition == recorded
        if same and all(existing[name] == sql for name, sql in wanted.items()):
            return
        self._end(table, shape)
        new = self._begin(definition)
        had = {name for name, _ in recorded.columns}
        added = [name for name, _ in definition.columns if name not in had]
        if added:
            self._record_again(definition, new, added, shape, recorded)

    def _was_captured(self, table: str) -> bool:
        query = f'SELECT count(*) FROM {self._shapes} WHERE "table" = ?'
        return bool(self._db.execute(query, (table,)).fetchone()[0])

    def _begin(self, definition: Definition) -> int:
        cursor = self._db.execute(
            f'INSERT INTO {self._shapes}("table", definition, active) VALUES (?, ?, 1)',
            (definition.table, definition.to_json()),
        )
        shape = cursor.lastrowid
        if shape is None:
            raise errors.CaptureError("SQLite gave no number to a shape")
        for statement in drop_statements(self._names, definition.table):
            self._db.execute(statement)
        for statement in trigger_statements(self._names, definition, shape).values():
            self._db.execute(statement)
        return shape

    def _end(self, table: str, shape: int) -> None:
        for statement in drop_statements(self._names, table):
            self._db.execute(statement)
        self._db.execute(f"UPDATE {self._shapes} SET active = 0 WHERE id = ?", (shape,))

    def _record_again(
        self,
        definition: Definition,
        shape: int,
        added: Sequence[str],
        old_shape: int,
        recorded: Definition,
    ) -> None:
        """Record rows whose new columns have values that the old triggers did not know.

        They can only be rows of changes in the log: none of these was handed over after the table
        had got the columns.
        """
        table = quoted(definition.table)
        filled = " OR ".join(f"{quoted(name)} IS NOT NULL" for name in added)
        insert = (
            f"INSERT INTO {self._changes}(ts, shape, op, old, new) SELECT {NOW}, {shape}, 'u', "
            f"NULL, {row_json(table, [name for name, _ in definition.columns])} FROM {table} "
            f"WHERE ({filled})"
        )
        keys = self._changed_keys(old_shape, recorded)
        if keys is None or recorded.key != definition.key:
            self._db.execute(insert)
            return
        same = " AND ".join(
            f"{quoted(name)} = ?{i} AND {quoted(name)} = ?{i} COLLATE BINARY"
            for i, name in enumerate(definition.key, 1)
        )
        self._db.executemany(f"{insert} AND {same}", sorted(keys, key=repr))

    def _changed_keys(self, shape: int, recorded: Definition) -> set[tuple[object, ...]] | None:
        """Keys of rows in the log; None if there are too many changes to look."""
        names = [name for name, _ in recorded.columns]
        places = [names.index(name) for name in recorded.key]
        found = self._db.execute(
            f"SELECT new FROM {self._changes} WHERE shape = ? AND new IS NOT NULL LIMIT ?",
            (shape, SEARCHED_CHANGES),
        )
        keys: set[tuple[object, ...]] = set()
        count = 0
        for (text,) in found:
            row = read_row(text)
            keys.add(tuple(row[place] for place in places))
            count += 1
        return keys if count < SEARCHED_CHANGES else None

    def _note_version(self) -> None:
        """In the transaction that made the triggers fit."""
        (self._schema_version,) = self._db.execute("PRAGMA schema_version").fetchone()
        self._definitions = {}

    def refresh(self) -> None:
        """Let the triggers of all captured tables fit them, after the database's schema changed."""
        with writing(self._db):
            if not self.exists:
                raise errors.SourceLost(self._settings.name, "its table of changes is gone")
            for table, known in self._active().items():
                own = self._settings.settings_of(table)
                self._follow(definition_of(self._db, table, own, running=True), known)
            self._note_version()

    # -- reading --------------------------------------------------------------------------

    def first(self, stored: int) -> int:
        """The number of the last change before those in the log.

        `stored` is that of a change that is stored: with a smaller last one the database has gone
        back in time.
        """
        if not self.exists:
            raise errors.SourceLost(self._settings.name, "its table of changes is gone")
        last = self.last(self._db)
        if last < stored:
            raise errors.SourceLost(
                self._settings.name,
                f"the database is older than what is stored (its last change has the number "
                f"{last}, stored is {stored}): it was restored, or has lost commits",
            )
        (least,) = self._db.execute(f"SELECT min(seq) FROM {self._changes}").fetchone()
        return last if least is None else int(least) - 1

    def last(self, db: sqlite3.Connection) -> int:
        """The number of the last change that was ever recorded, in this database or a copy."""
        query = "SELECT seq FROM sqlite_sequence WHERE name = ?"
        found = db.execute(query, (self._names.changes,)).fetchone()
        return 0 if found is None else int(found[0])

    def read(self, after: int) -> tuple[list[LoggedChange], bool]:
        """Changes after a number, in order; and whether these are all that there are."""
        for _ in range(10):  # a schema that keeps changing is no reason to read for ever
            with reading(self._db):
                (version,) = self._db.execute("PRAGMA schema_version").fetchone()
                if version == self._schema_version:
                    return self._entries(after)
            self.refresh()
        raise errors.SourceUnreachable("the schema of the database changes all the time")

    def _entries(self, after: int) -> tuple[list[LoggedChange], bool]:
        found: list[LoggedChange] = []
        size = 0
        rows = self._db.execute(
            f"SELECT seq, ts, shape, op, old, new FROM {self._changes} WHERE seq > ? ORDER BY seq "
            f"LIMIT ?",
            (after, ROWS_AT_ONCE),
        )
        for row in rows:
            entry = LoggedChange(*row)
            found.append(entry)
            size += len(entry.old or "") + len(entry.new or "")
            if size > BYTES_AT_ONCE:
                rows.close()
                return found, False
        return found, len(found) < ROWS_AT_ONCE

    def definition(self, shape: int) -> tuple[Definition, bool]:
        """The columns of entries with this shape, and whether their table is still captured."""
        if shape not in self._definitions:
            captured = set(self._active())
            found = self._db.execute(f'SELECT id, "table", definition FROM {self._shapes}')
            self._definitions = {
                one: (Definition.from_json(table, text), table in captured)
                for one, table, text in found
            }
        return self._definitions[shape]

    # -- removing -------------------------------------------------------------------------

    def trim(self, upto: int) -> bool:
        """Delete some of the changes up to a number; whether all of them are deleted."""
        (least,) = self._db.execute(f"SELECT min(seq) FROM {self._changes}").fetchone()
        if least is None or least > upto:
            return True
        last = min(upto, least + ROWS_AT_ONCE - 1)
        with writing(self._db):
            self._db.execute(f"DELETE FROM {self._changes} WHERE seq <= ?", (last,))
        return bool(last == upto)

    def kept(self, confirmed: int) -> Kept:
        """How much there is; changes up to `confirmed` are there only until they are deleted."""
        if not self.exists:
            return Kept()
        least, most = self._db.execute(f"SELECT min(seq), max(seq) FROM {self._changes}").fetchone()
        if least is None:
            return Kept()
        (average,) = self._db.execute(
            f"SELECT avg(length(coalesce(old, '')) + length(coalesce(new, '')) + 32) FROM "
            f"(SELECT old, new FROM {self._changes} ORDER BY seq DESC LIMIT {_SAMPLE})"
        ).fetchone()
        oldest = self._db.execute(
            f"SELECT ts FROM {self._changes} WHERE seq > ? ORDER BY seq LIMIT 1", (confirmed,)
        ).fetchone()
        waiting = most - max(least - 1, confirmed)
        return Kept(
            int((most - least + 1) * average),
            waiting,
            int(waiting * average),
            None if oldest is None else oldest[0],
        )

    def drop(self) -> None:
        """Remove tables and triggers."""
        with writing(self._db):
            if self.exists:
                captured = self._db.execute(f'SELECT DISTINCT "table" FROM {self._shapes}')
                for (table,) in captured.fetchall():
                    for statement in drop_statements(self._names, table):
                        self._db.execute(statement)
            for table in (self._names.changes, self._names.shapes, self._names.replaced):
                self._db.execute(f"DROP TABLE IF EXISTS {quoted(table)}")
