"""What a database does for `apply`: rows and positions in one transaction. Blocking.

A session is one connection. Its statements are those of both databases; `postgres` and `sqlite`
have what differs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from millstream.cdc.sink.fold import RowEvents, fold
from millstream.cdc.sink.sql import quoted, quoted_table
from millstream.cdc.sink.topic_positions import (
    LogState,
    StoredPosition,
    TopicPosition,
    TopicPositions,
)
from millstream.errors import ConfigError, RowRefused, SinkError, SinkTakenOver
from millstream.schemas import types as t

__all__ = ["POSITIONS", "Begun", "DatabaseLost", "FoundTable", "RefusedRow", "Session", "SinkPlan"]

_log = logging.getLogger("millstream.cdc")

POSITIONS: Final = "millstream_positions"


class DatabaseLost(Exception):
    """Internal: the database cannot be reached or has no time; what was not committed is undone."""


class RefusedRow(Exception):
    """Internal: the database refused a statement for what is in the rows."""


class FoundTable(Protocol):
    """A table as it is in the database."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Types by name."""

    @property
    def primary_key(self) -> tuple[str, ...]:
        """Its columns."""

    def check_key(self, key: Sequence[str]) -> None:
        """Refuse a key that no unique index has."""


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """What is applied to which table."""

    name: str
    topic: str
    table: str
    key: tuple[str, ...]  # empty: the primary key of the table
    owner: str  # a token that nobody else has
    create: bool = True  # the table, and columns that it lacks
    take: bool = True  # the positions from whoever has them; False: they are ours already

    @property
    def positions(self) -> str:
        """The table of positions, beside the target."""
        schema, dot, _ = self.table.rpartition(".")
        return quoted_table(f"{schema}{dot}{POSITIONS}")


@dataclass(frozen=True, slots=True)
class Begun:
    """What was found in the database."""

    stored: list[StoredPosition]
    key: tuple[str, ...]


class Session(ABC):
    """One connection to the target. Every method is one transaction."""

    def __init__(self, plan: SinkPlan) -> None:
        self.plan = plan
        self._mine = 'name = ? AND topic = ? AND "owner" = ?'
        self._me = (plan.name, plan.topic, plan.owner)
        self._found: FoundTable | None = None
        self._key: tuple[str, ...] = ()

    # -- what differs ---------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Connect."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect, whatever state it is in."""

    @abstractmethod
    def _run(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Execute a statement with `?` for values; returns its cursor."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[None]:
        """A context manager: commits at the end, undoes everything on an error."""

    @abstractmethod
    def _savepoint(self) -> AbstractContextManager[None]:
        """A part of a transaction: on an error only it is undone, a refused row is a Refusal."""

    @abstractmethod
    def _lock_creation(self) -> None:
        """Let nobody else create the table of positions until the end of the transaction."""

    @abstractmethod
    def _find(self, table: str) -> FoundTable | None:
        """A table as it is now."""

    @abstractmethod
    def _type_of(self, type_: t.Type) -> str:
        """The type of a new column."""

    @abstractmethod
    def _fits(self, type_: t.Type, found: str) -> bool:
        """Whether a column can take values of a type."""

    @abstractmethod
    def _write(self, table: FoundTable, events: RowEvents, key: tuple[str, ...]) -> None:
        """Upsert and delete rows; each key is there once."""

    @abstractmethod
    def _empty_table(self) -> None:
        """Remove all rows of the target."""

    # -- beginning ------------------------------------------------------------------------

    def _alone(self) -> None:  # noqa: B027  # a transaction that is alone needs nothing
        """Keep others from beginning until this transaction ends."""

    def begin(self, row: t.Record, logs: Mapping[int, LogState], workers: int) -> Begun:
        """Take the positions over and make the table ready: all or nothing."""
        plan = self.plan
        with self._transaction():
            self._alone()
            if self._find(self._positions_name) is None:
                self._lock_creation()
                self._run(self._positions_table())
            if plan.take:
                who = (plan.owner, plan.name, plan.topic)
                self._run(
                    f'UPDATE {plan.positions} SET "owner" = ? WHERE name = ? AND topic = ?', who
                )
            stored = self._stored()
            table = self._find(plan.table)
            self._check_target(stored, table)
            key = plan.key or (table.primary_key if table is not None else ())
            table = self._ready(table, row, key)
            table.check_key(key)
            count = stored[0].workers if stored else workers
            known = {(one.partition, one.worker) for one in stored}
            for partition, log in logs.items():
                first = TopicPosition(log.first)
                for worker in range(count):
                    if (partition, worker) not in known:
                        self._insert(
                            StoredPosition(partition, worker, count, first, log.created, "")
                        )
            found = self._stored()
        self._found, self._key = table, key
        return Begun(found, key)

    def join(self, first: Session) -> None:
        """Work beside the session that began."""
        self._found, self._key = first._found, first._key

    @property
    def _positions_name(self) -> str:
        schema, dot, _ = self.plan.table.rpartition(".")
        return f"{schema}{dot}{POSITIONS}"

    def _positions_table(self) -> str:
        return (
            f"CREATE TABLE IF NOT EXISTS {self.plan.positions} (name text NOT NULL, "
            f'topic text NOT NULL, "partition" integer NOT NULL, worker integer NOT NULL, '
            f'workers integer NOT NULL, "offset" bigint NOT NULL, "index" integer NOT NULL, '
            f"last_time bigint NOT NULL, log text NOT NULL, target text NOT NULL, "
            f'"owner" text NOT NULL, PRIMARY KEY (name, topic, "partition", worker))'
        )

    def _stored(self) -> list[StoredPosition]:
        rows = self._run(
            f'SELECT "partition", worker, workers, "offset", "index", last_time, log, target, '
            f'"owner" FROM {self.plan.positions} WHERE name = ? AND topic = ? '
            f'ORDER BY "partition", worker',
            self._me[:2],
        ).fetchall()
        if any(row[8] != self.plan.owner for row in rows):
            raise self._taken_over()
        return [
            StoredPosition(row[0], row[1], row[2], TopicPosition(*row[3:6]), row[6], row[7])
            for row in rows
        ]

    def _check_target(self, stored: list[StoredPosition], table: FoundTable | None) -> None:
        plan = self.plan
        if not stored:
            return
        other = next((one.target for one in stored if one.target != plan.table), None)
        if other is not None:
            raise ConfigError(
                f"apply '{plan.name}' of topic '{plan.topic}' belongs to table {other}, and not to "
                f"{plan.table}. Use another name for this table"
            )
        if table is None:
            raise SinkError(
                f"table {plan.table} does not exist, but '{plan.name}' has applied topic "
                f"'{plan.topic}' to it before. To begin again: {self._forget_text()}"
            )

    def _forget_text(self) -> str:
        plan = self.plan
        return f"DELETE FROM {plan.positions} WHERE name = '{plan.name}'"

    def _insert(self, one: StoredPosition) -> None:
        plan, at = self.plan, one.position
        values = (plan.name, plan.topic, one.partition, one.worker, one.workers)
        where = (
            at.offset,
            at.index,
            at.last_time,
            one.log,
            plan.table,
            plan.owner,
        )
        marks = ", ".join("?" * (len(values) + len(where)))
        self._run(
            f'INSERT INTO {plan.positions} (name, topic, "partition", worker, workers, "offset", '
            f'"index", last_time, log, target, "owner") VALUES ({marks})',
            (*values, *where),
        )

    # -- the table ------------------------------------------------------------------------

    @property
    def _table(self) -> FoundTable:
        if self._found is None:
            raise SinkError("begin first")
        return self._found

    def follow(self, row: t.Record) -> None:
        """Let the table have the columns of another version of the schema."""
        with self._transaction():
            self._hold()
            self._found = self._ready(self._find(self.plan.table), row, self._key)

    def _ready(self, table: FoundTable | None, row: t.Record, key: tuple[str, ...]) -> FoundTable:
        """The table with a column for each field, created or checked."""
        name = self.plan.table
        if table is None:
            self._create(row, key)
        else:
            missing = [field for field in row.fields if field.name not in table.columns]
            for field in row.fields:
                found = table.columns.get(field.name)
                if found is not None and not self._fits(field.type, found):
                    raise ConfigError(
                        f"table {name}, column '{field.name}': it is {found}, and the values in "
                        f"topic '{self.plan.topic}' are {t.kind(t.strip(field.type)[0])}, which "
                        f"need {self._type_of(field.type)}. Change the column, or use another table"
                    )
            for field in missing:
                self._add(field)
            if not missing:
                return table
        made = self._find(name)
        if made is None:
            raise SinkError(f"table {name} is gone: something else dropped it")
        return made

    def _create(self, row: t.Record, key: tuple[str, ...]) -> None:
        plan = self.plan
        if not plan.create:
            raise ConfigError(f"table {plan.table} does not exist: create it, or set create=True")
        names = [field.name for field in row.fields]
        unknown = next((name for name in key if name not in names), None)
        if not key or unknown is not None:
            found = f"there is no column '{unknown}'" if key else "none are known"
            raise ConfigError(
                f"table {plan.table} needs key columns, and {found}. Give some of the columns of "
                f"topic '{plan.topic}': key=[...] out of {', '.join(names)}"
            )
        parts = [
            f"{quoted(f.name)} {self._type_of(f.type)}" + (" NOT NULL" if f.name in key else "")
            for f in row.fields
        ]
        columns = ", ".join(quoted(name) for name in key)
        self._run(
            f"CREATE TABLE {quoted_table(plan.table)} ({', '.join(parts)}, PRIMARY KEY ({columns}))"
        )

    def _add(self, field: t.Field) -> None:
        plan, kind = self.plan, self._type_of(field.type)
        if not plan.create:
            raise ConfigError(
                f"table {plan.table} has no column '{field.name}', which topic '{plan.topic}' "
                f"has. Add it: ALTER TABLE {quoted_table(plan.table)} ADD COLUMN "
                f"{quoted(field.name)} {kind}; or set create=True"
            )
        self._run(f"ALTER TABLE {quoted_table(plan.table)} ADD COLUMN {quoted(field.name)} {kind}")
        _log.info("table %s: column '%s' %s was added", plan.table, field.name, kind)

    # -- rows and positions ---------------------------------------------------------------

    def apply(self, worker: int, positions: TopicPositions, events: RowEvents | None) -> int:
        """Apply events and store how far this worker is, in one transaction; returns the rows."""
        with self._transaction():
            self._move(positions, worker)
            return 0 if events is None else self._write_folded(events)

    def _write_folded(self, events: RowEvents) -> int:
        """Write the last state of each key; if that is refused, smaller parts one after the other.

        Rows that exchange unique values, one after the other, are accepted only in their order.
        What is refused on its own in that order is the row that is to blame.
        """
        folded = fold(events, self._key)
        try:
            with self._savepoint():
                self._write(self._table, folded, self._key)
            return len(folded)
        except RefusedRow as refusal:
            if len(events) == 1:
                key = {name: events.rows.column(name)[0].as_py() for name in self._key}
                where = events.where(0)
                raise RowRefused(self.plan.table, key, where, str(refusal)) from refusal
        half = len(events) // 2
        return self._write_folded(events.slice(0, half)) + self._write_folded(events.slice(half))

    def empty(self, positions: TopicPositions) -> None:
        """Remove all rows, and store that every worker is here."""
        with self._transaction():
            self._move(positions)
            self._empty_table()

    def rebase(
        self, workers: int, positions: TopicPositions, logs: Mapping[int, str]
    ) -> list[StoredPosition]:
        """Go on with another number of workers; all of the old ones are at these positions."""
        with self._transaction():
            self._hold()
            self._run(f"DELETE FROM {self.plan.positions} WHERE {self._mine}", self._me)
            for partition, position in positions.items():
                for worker in range(workers):
                    one = StoredPosition(partition, worker, workers, position, logs[partition], "")
                    self._insert(one)
            return self._stored()

    def restart(self, partition: int, log: str, position: TopicPosition) -> list[StoredPosition]:
        """A partition goes on elsewhere: the log that was applied is not there any more."""
        with self._transaction():
            self._hold()
            self._run(
                f'UPDATE {self.plan.positions} SET log = ? WHERE {self._mine} AND "partition" = ?',
                (log, *self._me, partition),
            )
            self._move({partition: position})
            return self._stored()

    def _move(self, positions: TopicPositions, worker: int | None = None) -> None:
        """Store positions, of one worker or of all; refused if another process has taken over."""
        for partition, position in positions.items():
            values = (position.offset, position.index, position.last_time, *self._me, partition)
            one = "" if worker is None else " AND worker = ?"
            done = self._run(
                f'UPDATE {self.plan.positions} SET "offset" = ?, "index" = ?, last_time = ? '
                f'WHERE {self._mine} AND "partition" = ?{one}',
                values if worker is None else (*values, worker),
            ).rowcount
            if done < 1:
                raise self._taken_over()

    def _hold(self) -> None:
        done = self._run(
            f'UPDATE {self.plan.positions} SET "owner" = "owner" WHERE {self._mine}', self._me
        ).rowcount
        if done < 1:
            raise self._taken_over()

    def _taken_over(self) -> SinkTakenOver:
        return SinkTakenOver(self.plan.name, self.plan.topic, self.plan.table)
