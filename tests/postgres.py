"""A real PostgreSQL for tests; they are skipped where it is not installed.

    async def test_rows_are_captured(postgres: Database, millstream_url: str) -> None:
        with postgres.connect() as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY)")

A conftest.py that imports the fixtures `postgres_server` and `postgres` makes them usable in its
folder. Tests that kill or stop the server take one of their own: `with running_postgres() as s`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tools import postgres_server as tool
from tools.postgres_server import Postgres

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["Database", "Postgres", "postgres", "postgres_server", "running_postgres"]

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """A database for one test only."""

    server: Postgres
    name: str

    @property
    def url(self) -> str:
        return self.server.url_of(self.name)

    def connect(self, **options: Any) -> Connection[Any]:
        """A connection of a superuser that commits by itself, unless options say otherwise."""
        return self.server.connect(self.name, **options)

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self.connect() as connection:
            return connection.execute(query).fetchall()


@contextmanager
def running_postgres(**settings: object) -> Iterator[Postgres]:
    """A new PostgreSQL with such settings, removed afterwards; skips where there is none."""
    try:
        with tool.running_postgres(**settings) as server:
            yield server
    except tool.PostgresAbsent as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One server for the session. Tests must not stop it."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: Postgres) -> Iterator[Database]:
    """A new, empty database, for this test only."""
    database = Database(postgres_server, f"test{next(_numbers)}")
    postgres_server.create_database(database.name)
    yield database
    postgres_server.drop_database(database.name)
