"""A real MariaDB for tests; they are skipped where it is not installed.

    def test_rows_are_captured(mariadb: Database) -> None:
        mariadb.execute("CREATE TABLE t (id int PRIMARY KEY)")

A conftest.py that imports the fixtures `mariadb_server` and `mariadb` makes them usable in its
folder. Tests that kill or stop the server take one of their own: `with running_mariadb() as s`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tools import mariadb_server as tool
from tools.mariadb_server import Mariadb

if TYPE_CHECKING:
    from pymysql.connections import Connection

__all__ = ["Database", "Mariadb", "mariadb", "mariadb_server", "running_mariadb"]

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """A database for one test only."""

    server: Mariadb
    name: str

    @property
    def url(self) -> str:
        return self.server.url_of(self.name)

    def connect(self, **options: Any) -> Connection[Any]:
        """A connection that commits by itself, unless options say otherwise."""
        return self.server.connect(self.name, **options)

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own unless one begins a longer one."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


@contextmanager
def running_mariadb(**settings: object) -> Iterator[Mariadb]:
    """A new MariaDB with such settings, removed afterwards; skips where there is none."""
    try:
        with tool.running_mariadb(**settings) as server:
            yield server
    except tool.MariadbAbsent as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[Mariadb]:
    """One server for the session. Tests must not stop it."""
    with running_mariadb() as server:
        yield server


@pytest.fixture
def mariadb(mariadb_server: Mariadb) -> Iterator[Database]:
    """A new, empty database, for this test only."""
    name = f"test{next(_numbers)}"
    with closing(mariadb_server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        yield Database(mariadb_server, name)
        cursor.execute(f"DROP DATABASE {name}")
