"""Whether a table of PostgreSQL can be captured without harm to it, and completely. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from millstream.cdc.model import Finding
from millstream.cdc.postgres.catalog import TableFacts, shape_of_table
from millstream.cdc.postgres.types import quoted, type_of
from millstream.errors import ConfigError
from millstream.nearest import one_of
from millstream.schemas import types as t

if TYPE_CHECKING:
    from millstream.cdc.settings import CaptureSettings, TableSettings

__all__ = ["check_table"]

_NAMED_MAX: Final = 5  # columns that one finding lists


def check_table(table: TableFacts, settings: CaptureSettings, role: str) -> list[Finding]:
    """What is wrong with a table; one finding that all is well if nothing is."""
    own = settings.settings_of(table.full_name)
    unknown = list(_unknown_columns(table, own))
    if unknown:
        return unknown  # the rest would follow from them
    found = [
        *_rights(table, role),
        *_identity(table, own),
        *_key(table, own),
        *_masks(table, own),
        *_stored_apart(table, settings),
    ]
    try:
        shape_of_table(table, own)
    except ConfigError as error:
        found.append(_wrong(table, str(error)))
    if all(one.ok or not one.fatal for one in found):
        rows = f"about {table.rows:,} rows" if table.rows >= 0 else "rows not counted yet"
        key = ", ".join(table.key_of(own))
        found.insert(0, Finding(_subject(table), True, f"key {key}, {rows}"))
    return found


def _subject(table: TableFacts) -> str:
    return f"table {table.full_name}"


def _wrong(table: TableFacts, text: str, fix: str = "", fatal: bool = True) -> Finding:
    text = text.removeprefix(f"{_subject(table)}: ")
    return Finding(_subject(table), False, text, fix, fatal)


def _unknown_columns(table: TableFacts, own: TableSettings) -> Iterator[Finding]:
    names = [column.name for column in table.columns]
    generated = {column.name for column in table.columns if column.generated}
    for what in ("columns", "exclude", "key", "text", "mask"):
        for name in getattr(own, what):
            if name not in names:
                advice = one_of(name, names, "column")
                yield _wrong(table, f"{what} has '{name}', which is no column of it: {advice}")
            elif name in generated and what != "exclude":
                yield _wrong(
                    table,
                    f"{what} has '{name}', a generated column, which the log does not have",
                    f"remove '{name}' from {what}",
                )


def _rights(table: TableFacts, role: str) -> Iterator[Finding]:
    if not table.may_use:
        grant = f"GRANT USAGE ON SCHEMA {quoted(table.namespace)} TO {quoted(role)};"
        yield _wrong(table, f"the role {role} may not use the schema {table.namespace}", grant)
    if not table.may_select:
        grant = f"GRANT SELECT ON {table.sql_name} TO {quoted(role)};"
        yield _wrong(table, f"the role {role} may not read it", grant)
    if table.filtered:
        yield _wrong(
            table,
            f"row level security hides rows from the role {role}: the snapshot would lack them",
            f"ALTER ROLE {quoted(role)} BYPASSRLS;",
        )


def _identity(table: TableFacts, own: TableSettings) -> Iterator[Finding]:
    """A published table without an identity refuses every UPDATE and DELETE, of anybody."""
    harm = "once it is published, PostgreSQL refuses every UPDATE and DELETE of the application"
    if table.identity_columns == ():
        what = {
            "n": "its replica identity is nothing",
            "d": "it has no primary key",
        }.get(table.identity, "the index of its replica identity is gone")
        fix = _better_identity(table, own.key)
        if fix == _full_identity(table) and not table.key_of(own):
            fix = f"{_new_key(table)}, and run {fix}"
        yield _wrong(table, f"{what}: {harm}", fix)
    other = [name for name, identity in table.partitions if identity != table.identity]
    if other:
        to = {"f": "FULL", "d": "DEFAULT", "n": "NOTHING"}.get(table.identity, "USING INDEX ...")
        yield _wrong(
            table,
            f"{len(other)} of its partitions have another replica identity than it has, so "
            f"changes of some lack what others have: {_few(other)}",
            " ".join(f"ALTER TABLE {name} REPLICA IDENTITY {to};" for name in other[:_NAMED_MAX]),
        )


def _better_identity(table: TableFacts, key: tuple[str, ...] = ()) -> str:
    """The statement that gives the table an identity which includes the key."""
    not_null = {column.name for column in table.columns if column.not_null}
    for index in table.indexes:
        fits = not_null.issuperset(index.columns) and set(index.columns) >= set(key)
        if fits and not index.deferrable:
            identity = f"USING INDEX {quoted(index.name)}"
            if index.primary and table.identity != "d":
                identity = "DEFAULT"
            if not table.partitions:  # each partition has an index of its own name
                return f"ALTER TABLE {table.sql_name} REPLICA IDENTITY {identity};"
    return _full_identity(table)


def _full_identity(table: TableFacts) -> str:
    names = [table.sql_name, *(name for name, _ in table.partitions)]
    return " ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL;" for name in names)


def _new_key(table: TableFacts) -> str:
    return f"ALTER TABLE {table.sql_name} ADD PRIMARY KEY (...); or set 'key' for the table"


def _key(table: TableFacts, own: TableSettings) -> Iterator[Finding]:
    key = table.key_of(own)
    if not key:
        if table.identity_columns != ():  # else that was said already
            text = "it has no primary key: nothing says which changes are of the same row"
            yield _wrong(table, text, _new_key(table))
        return
    if not any(set(index.columns) <= set(key) for index in table.indexes):
        names = ", ".join(map(quoted, key))
        yield _wrong(
            table,
            f"nothing ensures that its key ({', '.join(key)}) is unique",
            f"CREATE UNIQUE INDEX ON {table.sql_name} ({names});",
        )
    nullable = [c.name for c in table.columns if c.name in key and not c.not_null]
    if nullable:
        yield _wrong(
            table,
            f"its key may be null: {_few(nullable)}",
            " ".join(
                f"ALTER TABLE {table.sql_name} ALTER COLUMN {quoted(name)} SET NOT NULL;"
                for name in nullable
            ),
        )
    for column in table.columns:
        if column.name not in key or column.name in own.text:
            continue
        # Snapshots continue after a key, so the server and we must order keys alike.
        if isinstance(type_of(column.type_oid, column.typmod, table.types), (t.Float, t.List)):
            yield _wrong(
                table,
                f"the column '{column.name}' of its key is {column.source_type}, which has no "
                f"order that all agree on",
                f"list '{column.name}' under 'text' in the table's settings",
            )
    identity = table.identity_columns
    if identity and not set(key) <= set(identity):
        yield _wrong(
            table,
            f"its replica identity ({', '.join(identity)}) lacks columns of its key "
            f"({', '.join(key)}): a deletion would not say which row is gone",
            _better_identity(table, key),
        )


def _masks(table: TableFacts, own: TableSettings) -> Iterator[Finding]:
    for name in own.mask:
        if name in table.key_of(own):
            yield _wrong(
                table,
                f"the mask of '{name}' cannot be applied: the column is part of the key",
                f"remove the mask of '{name}', or set another 'key' for the table",
            )


def _stored_apart(table: TableFacts, settings: CaptureSettings) -> Iterator[Finding]:
    """Large values (TOAST) that an UPDATE did not touch are not in the log."""
    own = settings.settings_of(table.full_name)
    key = table.key_of(own)
    columns = [
        column.name
        for column in table.columns
        if column.toastable and not column.generated and column.name not in key
        if (not own.columns or column.name in own.columns) and column.name not in own.exclude
    ]
    if not columns or table.identity_columns is None:
        return
    if settings.format == "rows":
        yield _wrong(
            table,
            f"large values that an UPDATE does not touch are not in the log, and format "
            f'"rows" has no way to say so: {_few(columns)}',
            f'{_full_identity(table)} or exclude the columns, or use format "changes"',
        )
    else:
        text = "large values that an UPDATE does not touch are listed in 'unchanged', not sent: "
        yield _wrong(table, text + _few(columns), _full_identity(table), fatal=False)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
