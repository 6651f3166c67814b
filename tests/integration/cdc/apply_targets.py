"""Databases that topics are applied to: PostgreSQL and SQLite, looked at in the same way."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg

from tests.postgres import Postgres

__all__ = ["PostgresTarget", "SqliteTarget", "Target"]

_numbers = itertools.count(1)


class PostgresTarget:
    """A schema of its own in a database of PostgreSQL: quicker than a database."""

    kind = "postgres"

    def __init__(self, server: Postgres) -> None:
        name = f"sink{next(_numbers)}"
        with server.connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        self.url = f"{server.url}?options=-csearch_path%3D{name}"

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(statement.encode()).fetchall()

    def plain(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """A row as a query gives it."""
        return tuple(row.values())


class SqliteTarget:
    """A file of SQLite."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self._path, self.url = path, f"sqlite:///{path}"

    def execute(self, *statements: str) -> None:
        with sqlite3.connect(self._path) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self._path)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def plain(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(_sqlite(value) for value in row.values())


Target = PostgresTarget | SqliteTarget


def _sqlite(value: Any) -> Any:
    if isinstance(value, datetime):
        text = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return f"{text:%Y-%m-%d %H:%M:%S.%f}" + ("Z" if value.tzinfo else "")
    if isinstance(value, list | dict):
        return json.dumps(value, separators=(",", ":"))
    return str(value) if isinstance(value, Decimal | date) else value
