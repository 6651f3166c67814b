"""What `check` says about a MySQL or MariaDB server. It only reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from millstream import errors
from millstream.cdc.model import Finding
from millstream.cdc.mysql.catalog import (
    MARIADB,
    ServerTable,
    log_files,
    log_status,
    rows_of,
    table_of,
    tables_of,
)
from millstream.cdc.settings import CaptureSettings
from millstream.schemas.extras import needed

__all__ = ["findings_about"]

_DAY: Final = 86_400
_WANTED: Final = {
    "binlog_format": ("ROW", "SET GLOBAL binlog_format = 'ROW'"),
    "binlog_row_image": ("FULL", "SET GLOBAL binlog_row_image = 'FULL'"),
    # Before the changes are made: older parts of the log stay without names.
    "binlog_row_metadata": ("FULL", "SET GLOBAL binlog_row_metadata = 'FULL'"),
    "binlog_transaction_compression": ("OFF", "SET GLOBAL binlog_transaction_compression = 'OFF'"),
    "log_bin_compress": ("OFF", "SET GLOBAL log_bin_compress = 'OFF'"),
    "binlog_row_value_options": ("", "SET GLOBAL binlog_row_value_options = ''"),
}
_MUST_EXIST: Final = ("binlog_format", "binlog_row_image", "binlog_row_metadata")


def findings_about(connection: Any, database: str, settings: CaptureSettings) -> list[Finding]:
    """Everything that a capture needs, and whether it is there."""
    variables = {
        str(row["Variable_name"]).lower(): str(row["Value"])
        for row in rows_of(connection, "SHOW GLOBAL VARIABLES")
    }
    if variables.get("log_bin", "OFF") != "ON":
        fix = "start the server with log_bin = binlog and server_id = 1 in its settings file"
        return [Finding("log_bin", False, "the server writes no log of changes", fix)]
    found = [Finding("log_bin", True, "on")]
    found += _settings_of_log(variables)
    found += _grants(connection, MARIADB in variables.get("version", "").lower())
    found += _expiry(variables)
    if settings.outbox:
        found.append(
            Finding(
                "outbox",
                False,
                "the server keeps no position in its log for a capture, so events of an outbox "
                "could be lost when a capture ends unexpectedly",
                "capture the outbox as a table, or use PostgreSQL or SQLite",
            )
        )
    tables = tables_of(connection, database, settings)
    if not tables:
        patterns = ", ".join(settings.tables)
        text = f"no table of database '{database}' fits the patterns {patterns}"
        found.append(Finding("tables", False, text, "name tables that exist"))
    for table in tables:
        found += _about_table(table, database, settings)
        found += _may_read(connection, database, table.name)
    return found


def _settings_of_log(variables: dict[str, str]) -> Iterator[Finding]:
    for name, (wanted, fix) in _WANTED.items():
        value = variables.get(name)
        if value is None and name not in _MUST_EXIST:
            continue
        if value is None:
            text = "the server is too old to write the names of columns into its log"
            yield Finding(name, False, text, "MySQL 8.0.14 or MariaDB 10.5, or newer")
        elif value.upper() == wanted:
            yield Finding(name, True, value or "not set")
        else:
            text = f"it is {value}, a capture needs {wanted or 'nothing'}"
            yield Finding(name, False, text, f"{fix}; new sessions of the application follow it")


def _grants(connection: Any, mariadb: bool) -> Iterator[Finding]:
    pymysql = needed("pymysql", "cdc")
    grants = [
        str(next(iter(row.values()))).upper()
        for row in rows_of(connection, "SHOW GRANTS FOR CURRENT_USER")
    ]
    everywhere = [text for text in grants if " ON *.* TO " in text]
    client = "BINLOG MONITOR" if mariadb else "REPLICATION CLIENT"
    fix = f"GRANT REPLICATION SLAVE, {client} ON *.* TO CURRENT_USER"
    if any("ALL PRIVILEGES" in text or "REPLICATION SLAVE" in text for text in everywhere):
        yield Finding("grant REPLICATION SLAVE", True, "granted")
    else:
        text = "the user may not read the log"
        yield Finding("grant REPLICATION SLAVE", False, text, fix)
    try:
        status = log_status(connection)
        log_files(connection)
    except pymysql.MySQLError as error:
        text = f"the user may not ask where the log ends: {error.args[-1]}"
        yield Finding(f"grant {client}", False, text, fix)
    else:
        where = f"{status[0]}:{status[1]}" if status else "nowhere"
        yield Finding(f"grant {client}", True, f"granted; the log ends at {where}")
    if not mariadb and not any("ALL PRIVILEGES" in t or "RELOAD" in t for t in everywhere):
        yield Finding(
            "grant RELOAD",
            False,
            "the snapshot needs FLUSH TABLES WITH READ LOCK for an instant, which the user may not",
            "GRANT RELOAD ON *.* TO CURRENT_USER; where a provider does not allow that, capture "
            "with snapshot = false",
            fatal=False,
        )


def _may_read(connection: Any, database: str, table: str) -> Iterator[Finding]:
    pymysql = needed("pymysql", "cdc")
    full = f"`{database.replace('`', '``')}`.`{table.replace('`', '``')}`"
    try:
        rows_of(connection, f"SELECT 1 FROM {full} LIMIT 0".replace("%", "%%"))
    except pymysql.MySQLError as error:
        text = f"the user may not read it: {error.args[-1]}"
        fix = f"GRANT SELECT ON `{database}`.* TO CURRENT_USER"
        yield Finding(f"table {database}.{table}", False, text, fix)


def _expiry(variables: dict[str, str]) -> Iterator[Finding]:
    seconds = float(variables.get("binlog_expire_logs_seconds") or 0)
    seconds = seconds or float(variables.get("expire_logs_days") or 0) * _DAY
    if not seconds:
        yield Finding("log expiry", True, "the server deletes no part of its log by age")
        return
    text = f"the server deletes its log after {seconds / _DAY:.3g} days"
    yield Finding(
        "log expiry",
        seconds >= _DAY,
        f"{text}; a capture that is stopped for longer must begin again",
        "" if seconds >= _DAY else "SET GLOBAL binlog_expire_logs_seconds = 604800",
        fatal=False,
    )


def _about_table(table: ServerTable, database: str, settings: CaptureSettings) -> Iterator[Finding]:
    full = f"{database}.{table.name}"
    subject = f"table {full}"
    try:
        shape, _ = table_of(table, database, settings.settings_of(full))
    except errors.ConfigError as error:
        yield Finding(subject, False, str(error), f'tables = ["!{table.name}"]')
        return
    yield Finding(subject, True, f"key: {', '.join(shape.key)}")
    if table.cascades:
        yield Finding(
            subject,
            False,
            f"its foreign key {table.cascades[0]} lets the server change or delete rows of it "
            f"without a line in the log (ON DELETE or ON UPDATE CASCADE, SET NULL)",
            f"make it RESTRICT and delete the rows in the application, or leave the table out: "
            f'tables = ["!{table.name}"]',
        )
    if table.engine.upper() not in ("INNODB", "ROCKSDB"):
        yield Finding(
            subject,
            False,
            f"its engine {table.engine} has no transactions: a snapshot may show changes that "
            f"arrive again afterwards",
            f"ALTER TABLE {table.name} ENGINE = InnoDB",
            fatal=False,
        )
