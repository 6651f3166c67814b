"""What is missing at a PostgreSQL for a capture, found without changing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millstream.cdc.model import Finding
from millstream.cdc.postgres.catalog import (
    ROOTS_VERSION,
    Catalog,
    TableFacts,
    read_catalog,
    slot_name,
)
from millstream.cdc.postgres.table_checks import check_table
from millstream.cdc.postgres.types import quoted
from millstream.nearest import did_you_mean, near_names

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from millstream.cdc.settings import CaptureSettings

__all__ = ["check"]

VERSION_MIN: Final = 120_000
_KEEP_VERSION: Final = 130_000  # max_slot_wal_keep_size, wal_status
_FILTER_VERSION: Final = 150_000  # column lists and row filters of publications
_PLUGIN: Final = "pgoutput"
_NAMED_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class _Server:
    """Facts about the server and this role on it."""

    version: int
    settings: dict[str, str]
    role: str
    may_replicate: bool
    may_create: bool  # publications in this database
    in_recovery: bool
    encoding: str
    database: str
    slots: int
    senders: int


async def check(connection: AsyncConnection[Any], settings: CaptureSettings) -> list[Finding]:
    """Every finding about the server, the role, the slot, the publication and each table."""
    slot = publication = slot_name(settings)
    version = connection.info.server_version
    if version < VERSION_MIN:
        text = f"PostgreSQL {version // 10_000} is too old: a capture needs 12 or newer"
        return [Finding("server", False, text, "upgrade the server")]
    server = await _read_server(connection)
    catalog = await read_catalog(connection, settings)
    slot_row = await _slot_row(connection, slot)
    return [
        *_server_findings(server),
        *_room_findings(server, slot_row is not None),
        *_role_findings(server),
        *_slot_findings(server, slot, slot_row),
        *_budget_findings(server, settings),
        *await _publication_findings(connection, server, catalog.tables, publication),
        *_selection_findings(catalog, settings),
        *(one for table in catalog.tables for one in check_table(table, settings, server.role)),
    ]


# -- the server ---------------------------------------------------------------------------

_SERVER: Final = """
SELECT current_user, r.rolreplication OR r.rolsuper OR EXISTS (
           SELECT FROM pg_roles AS g WHERE g.rolname = 'rds_replication'
           AND pg_has_role(g.oid, 'MEMBER')),
       has_database_privilege(current_database(), 'CREATE'), pg_is_in_recovery(),
       getdatabaseencoding(), current_database(),
       (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_stat_replication)
FROM pg_roles AS r WHERE r.rolname = current_user
"""
_SETTINGS: Final = (
    *("wal_level", "max_replication_slots", "max_wal_senders", "max_slot_wal_keep_size"),
)


async def _read_server(connection: AsyncConnection[Any]) -> _Server:
    named = await connection.execute(
        "SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", (list(_SETTINGS),)
    )
    settings = dict(await named.fetchall())
    rows = await (await connection.execute(_SERVER)).fetchall()
    return _Server(connection.info.server_version, settings, *rows[0])


def _server_findings(server: _Server) -> Iterator[Finding]:
    yield Finding("server", True, f"PostgreSQL {server.version // 10_000}")
    if server.in_recovery:
        text = "this server is a standby: a capture needs the primary"
        yield Finding("server", False, text, "connect to the primary")
    level = server.settings.get("wal_level", "")
    if level == "logical":
        yield Finding("wal_level", True, "logical")
    else:
        yield Finding(
            "wal_level",
            False,
            f"it is {level}; a capture needs logical",
            "ALTER SYSTEM SET wal_level = 'logical'; then restart the server "
            "(on Amazon RDS set rds.logical_replication = 1)",
        )
    if server.encoding == "SQL_ASCII":
        text = "SQL_ASCII: texts that are not UTF-8 will stop the capture"
        yield Finding("encoding", False, text, fatal=False)


def _room_findings(server: _Server, has_slot: bool) -> Iterator[Finding]:
    # A snapshot has a slot of its own for a while, and a connection to hold it.
    needs = {"max_replication_slots": 1 if has_slot else 2, "max_wal_senders": 2}
    used = {"max_replication_slots": server.slots, "max_wal_senders": server.senders}
    for name, need in needs.items():
        most = int(server.settings.get(name, "0"))
        text = f"{used[name]} of {most} in use, {need} needed"
        if most - used[name] >= need:
            yield Finding(name, True, text)
        else:
            fix = f"ALTER SYSTEM SET {name} = {used[name] + need}; then restart the server"
            yield Finding(name, False, text, fix)


def _role_findings(server: _Server) -> Iterator[Finding]:
    subject = f"role {server.role}"
    if server.may_replicate:
        yield Finding(subject, True, "may replicate")
    else:
        yield Finding(
            subject,
            False,
            "it has not the right to replicate",
            f"ALTER ROLE {quoted(server.role)} REPLICATION; "
            f"(on Amazon RDS: GRANT rds_replication TO {quoted(server.role)};)",
        )


def _budget_findings(server: _Server, settings: CaptureSettings) -> Iterator[Finding]:
    name, budget = "max_slot_wal_keep_size", settings.log_budget // 2**20
    if server.version < _KEEP_VERSION:
        text = "before PostgreSQL 13 a stopped capture can fill the disk of the server with log"
        yield Finding(name, False, text, "watch the lag of the capture", fatal=False)
        return
    kept = int(server.settings.get(name, "-1"))  # MB
    fix = f"ALTER SYSTEM SET {name} = '{budget}MB'; SELECT pg_reload_conf();"
    if kept < 0:
        text = "not limited: a stopped capture can fill the disk of the server with log"
        yield Finding(name, False, text, fix, fatal=False)
    elif kept < budget:
        text = f"{kept} MB is less than log_budget ({budget} MB): the slot can be lost"
        yield Finding(name, False, text, fix, fatal=False)
    else:
        yield Finding(name, True, f"{kept} MB")


# -- the slot -----------------------------------------------------------------------------


async def _slot_row(connection: AsyncConnection[Any], slot: str) -> tuple[Any, ...] | None:
    # wal_status is not there before PostgreSQL 13; a row as JSON has it or not.
    cursor = await connection.execute(
        "SELECT s.plugin, s.database, s.active_pid, to_jsonb(s) ->> 'wal_status', s.slot_type"
        " FROM pg_replication_slots AS s WHERE s.slot_name = %s",
        (slot,),
    )
    return await cursor.fetchone()


def _slot_findings(server: _Server, slot: str, row: tuple[Any, ...] | None) -> Iterator[Finding]:
    subject = f"slot {slot}"
    if row is None:
        yield Finding(subject, True, "does not exist yet; it will be created")
        return
    plugin, database, pid, status, kind = row
    if kind != "logical" or plugin != _PLUGIN or database != server.database:
        text = f"it exists for something else ({kind}, {plugin or 'no plugin'}, {database})"
        yield Finding(subject, False, text, "give the capture another name")
    elif status == "lost":
        yield Finding(
            subject,
            False,
            "the server has removed log that the capture had not read: changes are missing",
            "'millstream cdc reset --yes', then 'millstream cdc run': a new snapshot",
        )
    elif pid is not None:
        text = f"in use by the server's process {pid}: a capture of this name is running"
        fix = f"stop the other one, or SELECT pg_terminate_backend({pid});"
        # Not fatal: after a crash the server notices only after a while that nobody reads.
        yield Finding(subject, False, text, fix, fatal=False)
    elif status == "unreserved":
        text = "the server is about to remove log that the capture has not read"
        yield Finding(subject, False, text, "start the capture now", fatal=False)
    else:
        yield Finding(subject, True, "exists and is free")


# -- the publication ----------------------------------------------------------------------


async def _publication_findings(
    connection: AsyncConnection[Any],
    server: _Server,
    tables: Sequence[TableFacts],
    publication: str,
) -> list[Finding]:
    subject = f"publication {publication}"
    cursor = await connection.execute(
        "SELECT pg_has_role(p.pubowner, 'USAGE'), p.puballtables,"
        " p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate,"
        " coalesce((to_jsonb(p) ->> 'pubviaroot')::bool, false)"
        " FROM pg_publication AS p WHERE p.pubname = %s",
        (publication,),
    )
    row = await cursor.fetchone()
    if row is None:
        return [_to_be_created(server, tables, publication)]
    is_owner, all_tables, every_kind, via_root = row
    found = []
    name = quoted(publication)
    if not every_kind:
        fix = f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate');"
        found.append(Finding(subject, False, "it leaves out some kinds of changes", fix))
    roots = [table for table in tables if table.kind == "p"]
    if roots and not via_root:
        text = "it sends changes of partitions by their own names"
        fix = f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true);"
        found.append(Finding(subject, False, text, fix))
    published = await _published(connection, server, publication)
    missing = [table for table in tables if table.full_name not in published]
    if missing and not (all_tables and roots and not via_root):
        fix = f"ALTER PUBLICATION {name} ADD TABLE {_listed(missing)};"
        names = _names(missing)
        if is_owner and all(table.is_owner for table in missing):
            found.append(Finding(subject, True, f"will be extended by {names}"))
        else:
            text = f"it lacks {names}, and the role {server.role} may not add them"
            found.append(Finding(subject, False, text, f"{fix} as the owner of the tables"))
    limited = [full for full, whole in published.items() if not whole]
    limited = [full for full in limited if any(table.full_name == full for table in tables)]
    if limited:
        text = f"it has a row filter or a list of columns for {', '.join(limited[:_NAMED_MAX])}"
        fix = "publish whole tables; leave columns out by the table's settings"
        found.append(Finding(subject, False, text, fix))
    return found or [Finding(subject, True, "exists and has every table")]


def _to_be_created(server: _Server, tables: Sequence[TableFacts], publication: str) -> Finding:
    subject = f"publication {publication}"
    foreign = [table for table in tables if not table.is_owner]
    if server.may_create and not foreign:
        return Finding(subject, True, "does not exist yet; it will be created")
    via_root = " WITH (publish_via_partition_root = true)" if _has_roots(server) else ""
    why = (
        f"it does not own {_names(foreign)}"
        if foreign
        else f"it may not create anything in the database {server.database}"
    )
    return Finding(
        subject,
        False,
        f"it does not exist, and the role {server.role} cannot create it: {why}",
        f"as the owner of the tables: CREATE PUBLICATION {quoted(publication)} FOR TABLE "
        f"{_listed(tables)}{via_root};",
    )


def _has_roots(server: _Server) -> bool:
    return server.version >= ROOTS_VERSION


async def _published(
    connection: AsyncConnection[Any], server: _Server, publication: str
) -> dict[str, bool]:
    """The tables of a publication by full name, and whether they are published completely."""
    whole = "true"
    if server.version >= _FILTER_VERSION:
        whole = (
            "t.rowfilter IS NULL AND (t.attnames IS NULL OR cardinality(t.attnames) >= ("
            "SELECT count(*) FROM pg_attribute AS a WHERE a.attrelid = format('%%I.%%I',"
            " t.schemaname, t.tablename)::regclass AND a.attnum > 0 AND NOT a.attisdropped"
            " AND a.attgenerated = ''))"
        )
    cursor = await connection.execute(
        f"SELECT t.schemaname || '.' || t.tablename, {whole}"
        " FROM pg_publication_tables AS t WHERE t.pubname = %s",
        (publication,),
    )
    return dict(await cursor.fetchall())


def _listed(tables: Sequence[TableFacts]) -> str:
    return ", ".join(table.sql_name for table in tables)


def _names(tables: Sequence[TableFacts]) -> str:
    more = f" and {len(tables) - _NAMED_MAX} more" if len(tables) > _NAMED_MAX else ""
    return ", ".join(table.full_name for table in tables[:_NAMED_MAX]) + more


# -- which tables -------------------------------------------------------------------------


def _selection_findings(catalog: Catalog, settings: CaptureSettings) -> Iterator[Finding]:
    for one in catalog.left_out:
        harmless = "view" in one.reason or "generated" in one.reason
        yield Finding(one.name, harmless, f"not captured: {one.reason}", fatal=False)
    names = [table.full_name for table in catalog.tables]
    known = [*names, *catalog.other_names]
    if not names:
        patterns = ", ".join(settings.tables)
        near = [name for one in settings.tables for name in near_names(one, known)]
        fix = f"did you mean {', '.join(dict.fromkeys(near))}?" if near else _some(known)
        yield Finding("tables", False, f"no table can be captured by: {patterns}", fix)
    wanted = {*settings.table, *(outbox.table for outbox in settings.outbox)} - set(names)
    for name in sorted(wanted):
        text = "there are settings for it, but no such table is captured"
        yield Finding(f"table {name}", False, text, did_you_mean(name, known) or _some(known))


def _some(known: Sequence[str]) -> str:
    return f"the database has {', '.join(known[:_NAMED_MAX])}" if known else "create a table"
