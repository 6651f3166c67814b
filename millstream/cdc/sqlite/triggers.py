"""What a capture creates in a SQLite database: a table of changes, and triggers that fill it. Pure.

A change is a row `(seq, ts, shape, op, old, new)`. `seq` is the position of the change: it is
`AUTOINCREMENT`, so a number is never used again, and SQLite has one writer at a time, so its order
is that of the commits. `old` and `new` are JSON arrays of the columns that `shape` names, in which
a real is {"r": "1.5e+00"} and a blob {"b": "0102"}: JSON alone keeps neither them nor large
integers exactly.

`INSERT OR REPLACE` fires no trigger for the rows that it replaces, unless an application has
switched on recursive_triggers. A row with the same key needs none: its new version follows. A row
that is in the way by another unique column would vanish unseen. So for tables with such columns
the rows that may be replaced are noted before the statement, and those of them that are gone after
it are recorded as deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.cdc.sqlite.types import Value

__all__ = [
    "CREATE_TABLES",
    "KEY_COLUMNS",
    "Definition",
    "Names",
    "drop_statements",
    "quoted",
    "read_row",
    "row_json",
    "trigger_statements",
]

KEY_COLUMNS: Final = 8  # of one key; more belong to no real table
# Milliseconds since 1970. `unixepoch('subsec')` would do, but is younger than many a SQLite.
NOW: Final = "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
# SQLite's limit for the depth of an expression is 1,000; a||b||c is as deep as it is long.
_JOINED_AT_ONCE: Final = 50
_EVENTS: Final = ("insert", "update", "delete", "before_insert", "before_update")


def quoted(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class Names:
    """What the objects of a capture are called in the database."""

    capture: str

    @property
    def changes(self) -> str:
        return f"_millstream_changes_{self.capture}"

    @property
    def shapes(self) -> str:
        return f"_millstream_shapes_{self.capture}"

    @property
    def replaced(self) -> str:
        return f"_millstream_replaced_{self.capture}"

    def trigger(self, table: str, event: str) -> str:
        return f"_millstream_{self.capture}_{event}_{table}"


CREATE_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS {changes} (seq INTEGER PRIMARY KEY AUTOINCREMENT, "
    "ts INTEGER NOT NULL, shape INTEGER NOT NULL, op TEXT NOT NULL, old TEXT, new TEXT)",
    # What the columns of a change are; `active` is 0 for tables that are no longer captured.
    'CREATE TABLE IF NOT EXISTS {shapes} (id INTEGER PRIMARY KEY AUTOINCREMENT, "table" TEXT '
    "NOT NULL, definition TEXT NOT NULL, active INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS {replaced} (shape INTEGER NOT NULL, old TEXT NOT NULL, "
    + ", ".join(f"k{i}" for i in range(KEY_COLUMNS))
    + ")",
)


@dataclass(frozen=True, slots=True)
class Definition:
    """The columns of a table as its triggers record them."""

    table: str
    columns: tuple[tuple[str, str], ...]  # name and declared type
    key: tuple[str, ...]
    # Sets of columns that are unique, each with its collation: a row may be replaced by them.
    unique: tuple[tuple[tuple[str, str], ...], ...] = ()

    def to_json(self) -> str:
        """As it is kept in the database."""
        return json.dumps({"columns": self.columns, "key": self.key, "unique": self.unique})

    @classmethod
    def from_json(cls, table: str, text: str) -> Definition:
        """Back from `to_json`."""
        found = json.loads(text)
        return cls(
            table,
            tuple((name, declared) for name, declared in found["columns"]),
            tuple(found["key"]),
            tuple(tuple((name, how) for name, how in one) for one in found["unique"]),
        )


def row_json(prefix: str, columns: Sequence[str]) -> str:
    """The expression that writes columns of a row (NEW, OLD or a table) as a JSON array."""
    parts = [_value_json(f"{prefix}.{quoted(name)}") for name in columns]
    joined = _balanced([f"({part})" for part in parts])
    return f"('[' || {joined} || ']')"


def _balanced(parts: list[str]) -> str:
    separator = " || ',' || "
    while len(parts) > _JOINED_AT_ONCE:
        parts = [
            f"({separator.join(parts[i : i + _JOINED_AT_ONCE])})"
            for i in range(0, len(parts), _JOINED_AT_ONCE)
        ]
    return separator.join(parts)


def _value_json(value: str) -> str:
    # 20 digits bring every real back exactly; hex and printf need no JSON inside JSON.
    return (
        f"CASE typeof({value}) WHEN 'null' THEN 'null' WHEN 'integer' THEN {value} "
        f"WHEN 'real' THEN '{{\"r\":\"' || printf('%!.20e', {value}) || '\"}}' "
        f"WHEN 'blob' THEN '{{\"b\":\"' || hex({value}) || '\"}}' ELSE json_quote({value}) END"
    )


def read_row(text: str) -> list[Value]:
    """The values that `row_json` has written."""
    return [_read_value(value) if type(value) is dict else value for value in json.loads(text)]


def _read_value(tagged: dict[str, str]) -> Value:
    return float(tagged["r"]) if "r" in tagged else bytes.fromhex(tagged["b"])


# -- triggers -----------------------------------------------------------------------------


def trigger_statements(names: Names, definition: Definition, shape: int) -> dict[str, str]:
    """The statements that create the triggers of a table, by the triggers' names."""
    table = definition.table
    columns = [name for name, _ in definition.columns]
    old, new = row_json("OLD", columns), row_json("NEW", columns)
    into = f"INSERT INTO {quoted(names.changes)}(ts, shape, op, old, new)"
    record = {
        "insert": [f"{into} VALUES ({NOW}, {shape}, 'c', NULL, {new})"],
        "update": [f"{into} VALUES ({NOW}, {shape}, 'u', {old}, {new})"],
        "delete": [f"{into} VALUES ({NOW}, {shape}, 'd', {old}, NULL)"],
    }
    before: dict[str, list[str]] = {}
    when = ""
    if definition.unique:
        replaced = _Replaced(names, definition, shape)
        gone = list(replaced.record_gone(into))
        record["insert"][:0] = gone
        record["update"][:0] = [replaced.forget("OLD"), *gone]
        record["delete"].append(replaced.forget("OLD"))
        before = {
            "insert": [replaced.forget_all(), replaced.note(columns)],
            "update": [replaced.forget_all(), replaced.note(columns, other_than="OLD")],
        }
        touched = sorted({name for one in definition.unique for name, _ in one})
        differs = " OR ".join(f"OLD.{quoted(n)} IS NOT NEW.{quoted(n)}" for n in touched)
        when = f" WHEN {differs}"
    found = {
        names.trigger(table, event): _trigger(names, table, event, "AFTER", body)
        for event, body in record.items()
    }
    for event, body in before.items():
        name = names.trigger(table, f"before_{event}")
        condition = when if event == "update" else ""
        found[name] = (
            f"CREATE TRIGGER {quoted(name)} BEFORE {event.upper()} ON {quoted(table)}{condition} "
            f"BEGIN {'; '.join(body)}; END"
        )
    return found


def _trigger(names: Names, table: str, event: str, moment: str, body: Sequence[str]) -> str:
    name = names.trigger(table, event)
    return (
        f"CREATE TRIGGER {quoted(name)} {moment} {event.upper()} ON {quoted(table)} "
        f"BEGIN {'; '.join(body)}; END"
    )


def drop_statements(names: Names, table: str) -> Iterator[str]:
    """The statements that drop the triggers of a table, whichever of them exist."""
    for event in _EVENTS:
        yield f"DROP TRIGGER IF EXISTS {quoted(names.trigger(table, event))}"


class _Replaced:
    """Statements about the rows of a table that another row may replace."""

    def __init__(self, names: Names, definition: Definition, shape: int) -> None:
        self._notes = quoted(names.replaced)
        self._definition = definition
        self._shape = shape
        self._key = [quoted(name) for name in definition.key]

    def forget_all(self) -> str:
        return f"DELETE FROM {self._notes} WHERE shape = {self._shape}"

    def forget(self, row: str) -> str:
        same = " AND ".join(f"k{i} IS {row}.{name}" for i, name in enumerate(self._key))
        return f"DELETE FROM {self._notes} WHERE shape = {self._shape} AND {same}"

    def note(self, columns: Sequence[str], other_than: str = "") -> str:
        table = quoted(self._definition.table)
        keys = ", ".join(f"k{i}" for i in range(len(self._key)))
        values = ", ".join(f"{table}.{name}" for name in self._key)
        in_the_way = " OR ".join(
            "("
            + " AND ".join(
                f"{table}.{quoted(name)} = NEW.{quoted(name)} COLLATE {collation}"
                for name, collation in one
            )
            + ")"
            for one in self._definition.unique
        )
        other = ""
        if other_than:
            same = " AND ".join(f"{table}.{name} IS {other_than}.{name}" for name in self._key)
            other = f" AND NOT ({same})"
        return (
            f"INSERT INTO {self._notes}(shape, old, {keys}) "
            f"SELECT {self._shape}, {row_json(table, columns)}, {values} FROM {table} "
            f"WHERE ({in_the_way}){other}"
        )

    def record_gone(self, into: str) -> Iterator[str]:
        table = quoted(self._definition.table)
        # The first comparison finds the row by its index, whose collation may be another one.
        same = " AND ".join(
            f"{table}.{name} = r.k{i} AND {table}.{name} = r.k{i} COLLATE BINARY"
            for i, name in enumerate(self._key)
        )
        yield (
            f"{into} SELECT {NOW}, {self._shape}, 'd', r.old, NULL FROM {self._notes} AS r "
            f"WHERE r.shape = {self._shape} AND NOT EXISTS (SELECT 1 FROM {table} WHERE {same})"
        )
        yield self.forget_all()
