"""What PostgreSQL's catalog says about tables, and the shapes in which they are captured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.cdc.model import Column, TableShape
from millstream.cdc.patterns import is_wanted
from millstream.cdc.postgres.pgoutput import Relation
from millstream.cdc.postgres.types import TypeFacts, quoted, type_of
from millstream.nearest import one_of
from millstream.schemas import types as t

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from millstream.cdc.settings import CaptureSettings, TableSettings

__all__ = [
    "Catalog",
    "ColumnFacts",
    "IndexFacts",
    "NotCaptured",
    "TableFacts",
    "from_item",
    "read_catalog",
    "read_relation_facts",
    "shape_of_relation",
    "shape_of_table",
    "slot_name",
]

ROOTS_VERSION: Final = 130_000  # since then a partitioned table can be published as one
_NESTED_MAX: Final = 16  # types within types
_DEFAULT, _FULL, _INDEX = "d", "f", "i"  # relreplident; "n" is nothing

_NOT_IN_NAMES: Final = re.compile(r"[\x00-\x1f\x7f.]")

_NOT_CAPTURED: Final = {
    "v": "a view has no changes of its own; capture its tables",
    "m": "a materialized view has no changes of its own; capture its tables",
    "f": "the changes of a foreign table are in another server's log; capture them there",
}
_NOT_LOGGED: Final = {
    "u": "an unlogged table is not in the log: ALTER TABLE ... SET LOGGED",
    "t": "a temporary table is not in the log",
}


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """A column of a table."""

    number: int  # attnum
    name: str
    type_oid: int
    typmod: int
    source_type: str  # "numeric(10,2)"
    not_null: bool = False
    toastable: bool = False  # values may be stored apart, and are then not logged if unchanged
    generated: bool = False


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """A unique index of whole rows: without an expression or a condition."""

    name: str
    columns: tuple[str, ...]
    primary: bool = False
    is_identity: bool = False
    deferrable: bool = False


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A table as the catalog has it."""

    oid: int
    namespace: str
    name: str
    kind: str = "r"  # relkind: "r" a table, "p" a partitioned one
    identity: str = _DEFAULT  # relreplident
    columns: tuple[ColumnFacts, ...] = ()
    indexes: tuple[IndexFacts, ...] = ()
    rows: int = -1  # as estimated; -1: not known
    partitions: tuple[tuple[str, str], ...] = ()  # names for statements, and their relreplident
    may_select: bool = True
    may_use: bool = True  # its schema
    is_owner: bool = True
    filtered: bool = False  # by row level security, for this role
    types: Mapping[int, TypeFacts] = field(default_factory=dict, repr=False)

    @property
    def full_name(self) -> str:
        """Such as "public.orders"."""
        return f"{self.namespace}.{self.name}"

    @property
    def sql_name(self) -> str:
        """For a statement."""
        return f"{quoted(self.namespace)}.{quoted(self.name)}"

    @property
    def primary_key(self) -> tuple[str, ...]:
        """Columns of the primary key, in its order; empty: there is none."""
        return next((index.columns for index in self.indexes if index.primary), ())

    @property
    def identity_columns(self) -> tuple[str, ...] | None:
        """Columns that old rows have in the log; None: all of them."""
        if self.identity == _FULL:
            return None
        if self.identity == _DEFAULT:
            return self.primary_key
        found = (i.columns for i in self.indexes if i.is_identity and self.identity == _INDEX)
        return next(found, ())

    def key_of(self, settings: TableSettings) -> tuple[str, ...]:
        """The key of its events: the settings', or the primary key, or the identity's index."""
        return settings.key or self.primary_key or self.identity_columns or ()


@dataclass(frozen=True, slots=True)
class NotCaptured:
    """A table that the patterns mean but that cannot be captured, or a column of one."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """What the database has of what is wanted."""

    version: int  # such as 150018
    tables: tuple[TableFacts, ...]
    left_out: tuple[NotCaptured, ...]
    other_names: tuple[str, ...]  # of tables that are not wanted, for proposals


def slot_name(settings: CaptureSettings) -> str:
    """The name of a capture's replication slot, and of its publication."""
    return f"millstream_{settings.name}"


# -- reading ------------------------------------------------------------------------------

_TABLES: Final = """
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident,
       coalesce((SELECT sum(greatest(p.reltuples, 0)) FROM pg_partition_tree(c.oid) AS parts
                 JOIN pg_class AS p ON p.oid = parts.relid WHERE parts.isleaf),
                c.reltuples)::int8,
       CASE WHEN c.relispartition THEN pg_partition_root(c.oid)::oid::int8 ELSE 0 END,
       has_table_privilege(c.oid, 'SELECT'), pg_has_role(c.relowner, 'USAGE'),
       row_security_active(c.oid), has_schema_privilege(n.oid, 'USAGE'),
       ARRAY(SELECT ARRAY[format('%%s.%%I', p.relnamespace::regnamespace, p.relname),
                           p.relreplident::text]
             FROM pg_partition_tree(c.oid) AS parts JOIN pg_class AS p ON p.oid = parts.relid
             WHERE parts.isleaf AND c.relkind = 'p' ORDER BY p.oid)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind = ANY ('{r,p,v,m,f}') AND n.nspname <> 'information_schema'
  AND n.nspname !~ '^pg_' AND (%(oid)s::int8 IS NULL OR c.oid = %(oid)s::int8)
ORDER BY n.nspname, c.relname
"""

# A value of at most 24 bytes is never stored apart: its pointer would not be smaller.
_COLUMNS: Final = """
SELECT a.attrelid::int8, a.attnum, a.attname, a.atttypid::int8, a.atttypmod,
       format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated <> '',
       a.attlen = -1 AND a.attstorage <> 'p'
       AND EXISTS (SELECT FROM pg_class AS c WHERE c.reltoastrelid <> 0 AND (c.oid = a.attrelid
                   OR c.oid IN (SELECT relid FROM pg_partition_tree(a.attrelid))))
       AND NOT (a.atttypid IN (1042, 1043) AND a.atttypmod > 4 AND 24 >= 4 + (a.atttypmod - 4)
                * pg_encoding_max_length(pg_char_to_encoding(getdatabaseencoding())))
       AND NOT (a.atttypid = 1700 AND a.atttypmod > 4 AND ((a.atttypmod - 4) >> 16) <= 24)
FROM pg_attribute AS a
WHERE a.attrelid = ANY (%(oids)s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""

_INDEXES: Final = """
SELECT i.indrelid::int8, c.relname, i.indisprimary, i.indisreplident, NOT i.indimmediate,
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY AS k (number, at)
             JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number
             WHERE k.at <= i.indnkeyatts ORDER BY k.at)
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE i.indrelid = ANY (%(oids)s) AND i.indisunique AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
ORDER BY i.indrelid, i.indisprimary DESC, c.relname
"""

# An array is what its items' type calls its array; oidvector and the like are not.
_TYPES: Final = """
SELECT t.oid::int8, t.typname, t.typtype, t.typdelim,
       ARRAY(SELECT e.enumlabel::text FROM pg_enum AS e WHERE e.enumtypid = t.oid
             ORDER BY e.enumsortorder),
       CASE WHEN EXISTS (SELECT FROM pg_type AS i WHERE i.oid = t.typelem AND i.typarray = t.oid)
            THEN t.typelem::int8 ELSE 0 END,
       t.typbasetype::int8, t.typtypmod
FROM pg_type AS t WHERE t.oid = ANY (%(oids)s)
"""


async def read_catalog(connection: AsyncConnection[Any], settings: CaptureSettings) -> Catalog:
    """All tables that a capture means, outbox tables included, and what is said about them.

    Tables of the system are never captured; a partition is captured as its root if that is wanted.
    """
    version = connection.info.server_version
    outboxes = {outbox.table for outbox in settings.outbox}
    wanted, left_out, others = {}, [], []
    for row in await _rows(connection, _TABLES, oid=None):
        oid, namespace, name, kind, persistence = row[:5]
        full_name = f"{namespace}.{name}"
        if not (is_wanted(settings.tables, namespace, name) or full_name in outboxes):
            others.append(full_name)
            continue
        reason = _NOT_LOGGED.get(persistence) or _NOT_CAPTURED.get(kind)
        if kind == "p" and version < ROOTS_VERSION:
            reason = "before PostgreSQL 13 only the partitions can be captured, as own tables"
        if reason is None:
            wanted[oid] = row
        else:
            left_out.append(NotCaptured(full_name, reason))
    # Its root has its changes.
    own = {oid: row for oid, row in wanted.items() if row[7] not in wanted}
    tables, empty = await _facts(connection, own), []
    for table in tables:
        if all(column.generated for column in table.columns):
            empty.append(table)
            left_out.append(NotCaptured(table.full_name, "it has no columns that the log has"))
        left_out += [
            NotCaptured(f"{table.full_name}.{c.name}", "generated columns are not in the log")
            for c in table.columns
            if c.generated
        ]
    full = tuple(table for table in tables if table not in empty)
    return Catalog(version, full, tuple(left_out), tuple(others))


async def read_relation_facts(connection: AsyncConnection[Any], relation: Relation) -> TableFacts:
    """What the catalog says now about a table of the stream, and about all types it has there.

    The stream may be behind: the table may have other columns by now, or be gone.
    """
    rows = await _rows(connection, _TABLES, oid=relation.oid)
    found = await _facts(connection, {row[0]: row for row in rows})
    facts = found[0] if found else TableFacts(relation.oid, relation.namespace, relation.name)
    types = await _read_types(connection, {column.type_oid for column in relation.columns})
    merged = {**facts.types, **types}
    formats = await _rows(
        connection,
        "SELECT format_type(o::oid, m) FROM unnest(%(oids)s::int8[], %(mods)s::int4[])"
        " WITH ORDINALITY AS given (o, m, at) ORDER BY at",
        oids=[column.type_oid for column in relation.columns],
        mods=[column.typmod for column in relation.columns],
    )
    now = {column.name: column for column in facts.columns}
    columns = tuple(
        _column_of_stream(now.get(column.name), column.name, column.type_oid, column.typmod, text)
        for column, (text,) in zip(relation.columns, formats, strict=True)
    )
    return TableFacts(
        *(relation.oid, relation.namespace, relation.name, facts.kind, relation.identity),
        *(columns, facts.indexes, facts.rows),
        types=merged,
    )


def _column_of_stream(
    now: ColumnFacts | None, name: str, oid: int, typmod: int, text: str
) -> ColumnFacts:
    if now is not None and (now.type_oid, now.typmod) == (oid, typmod):
        return now
    return ColumnFacts(now.number if now is not None else 0, name, oid, typmod, text)


async def _rows(
    connection: AsyncConnection[Any], query: str, **values: object
) -> list[tuple[Any, ...]]:
    cursor = await connection.execute(query, values)
    return await cursor.fetchall()


async def _facts(
    connection: AsyncConnection[Any], tables: Mapping[int, Sequence[Any]]
) -> list[TableFacts]:
    """All facts of these tables, by their rows of _TABLES."""
    oids = list(tables)
    columns: dict[int, list[ColumnFacts]] = {oid: [] for oid in oids}
    for table, number, name, type_oid, typmod, text, not_null, generated, apart in await _rows(
        connection, _COLUMNS, oids=oids
    ):
        facts = ColumnFacts(number, name, type_oid, typmod, text, not_null, apart, generated)
        columns[table].append(facts)
    indexes: dict[int, list[IndexFacts]] = {oid: [] for oid in oids}
    for table, name, primary, identity, deferrable, names in await _rows(
        connection, _INDEXES, oids=oids
    ):
        indexes[table].append(IndexFacts(name, tuple(names), primary, identity, deferrable))
    used = {column.type_oid for found in columns.values() for column in found}
    types = await _read_types(connection, used)
    return [
        TableFacts(
            *(oid, row[1], row[2], row[3], row[5], tuple(columns[oid]), tuple(indexes[oid])),
            rows=row[6],
            may_select=row[8],
            is_owner=row[9],
            filtered=row[10],
            may_use=row[11],
            partitions=tuple(map(tuple, row[12])),
            types=types,
        )
        for oid, row in tables.items()
    ]


async def _read_types(
    connection: AsyncConnection[Any], oids: Iterable[int]
) -> dict[int, TypeFacts]:
    """Facts of these types and of those within them."""
    found: dict[int, TypeFacts] = {}
    missing = set(oids)
    for _ in range(_NESTED_MAX):
        if not missing:
            break
        for oid, name, kind, separator, labels, item, base, base_typmod in await _rows(
            connection, _TYPES, oids=list(missing)
        ):
            found[oid] = TypeFacts(
                oid, name, kind, tuple(labels), item, separator, base, base_typmod
            )
        inner = {oid for facts in found.values() for oid in (facts.item, facts.base) if oid}
        missing = inner - found.keys()
    return found


# -- shapes -------------------------------------------------------------------------------


def from_item(table: TableFacts) -> str:
    """What a snapshot selects from: all partitions, but no tables that inherit from it."""
    return table.sql_name if table.kind == "p" else f"ONLY {table.sql_name}"


def shape_of_table(table: TableFacts, settings: TableSettings) -> TableShape:
    """A table of the catalog as it is captured; refuses settings with columns that it lacks."""
    every = [column.name for column in table.columns]
    sent = [column.name for column in table.columns if not column.generated]
    for what in ("columns", "exclude", "key", "text", "mask"):
        names = every if what == "exclude" else sent
        for name in getattr(settings, what):
            if name not in names:
                raise errors.ConfigError(
                    f"table {table.full_name}: {what} has '{name}', which is no column of it that "
                    f"can be captured: {one_of(name, names, 'column')}"
                )
    estimate = table.rows if table.rows >= 0 else None
    return replace(_shape(table, settings), estimate=estimate, identity=table.oid)


def shape_of_relation(relation: Relation, table: TableFacts, settings: TableSettings) -> TableShape:
    """A table as it is captured from the stream; `table` is from `read_relation_facts`.

    Columns are those of the stream, which may be behind the catalog. Columns of settings that it
    does not have are passed over: they were dropped or are not there yet.
    """
    names = {column.name for column in relation.columns}
    shape = _shape(table, settings)
    key = shape.key
    if not key or not names.issuperset(key):
        flagged = [column.name for column in relation.columns if column.is_key]
        if settings.key or relation.identity not in (_DEFAULT, _INDEX):
            flagged = []
        if key and not flagged:
            gone = next(name for name in key if name not in names)
            raise errors.BreakingChange(
                table.full_name, gone, "a column of the key was dropped or renamed"
            )
        key = tuple(flagged)
    return TableShape(shape.namespace, shape.name, shape.columns, key)


def _shape(table: TableFacts, settings: TableSettings) -> TableShape:
    key = table.key_of(settings)
    columns = []
    for facts in table.columns:
        if facts.generated or not _is_captured(facts.name, settings):
            if facts.name in key:
                raise errors.ConfigError(
                    f"table {table.full_name}: the column '{facts.name}' is part of its key and "
                    f"must be captured. Set another 'key' for the table, or do not leave it out"
                )
            continue
        columns.append(_column(table, facts, settings))
    if not columns:
        raise errors.ConfigError(
            f"table {table.full_name}: its settings leave out every column. "
            f"Leave out the table instead: tables = [..., '!{table.full_name}']"
        )
    return TableShape(table.namespace, table.name, tuple(columns), key)


def _is_captured(name: str, settings: TableSettings) -> bool:
    return (not settings.columns or name in settings.columns) and name not in settings.exclude


def _column(table: TableFacts, facts: ColumnFacts, settings: TableSettings) -> Column:
    if _NOT_IN_NAMES.search(facts.name):
        raise errors.ConfigError(
            f"table {table.full_name}: the column {facts.name!r} has a dot or a control character "
            f"in its name, which no field of a schema may have. Leave it out: "
            f"exclude = [{facts.name!r}]"
        )
    type_: t.Type = t.String()
    if facts.name not in settings.text:
        type_ = type_of(facts.type_oid, facts.typmod, table.types)
    return Column(facts.name, type_, facts.source_type, facts.number)
