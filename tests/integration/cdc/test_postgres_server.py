"""The PostgreSQL that tests use: killed, it keeps what it committed."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.postgres import Database, running_postgres
from tools import postgres_server as tool


def test_every_test_has_a_database_of_its_own(postgres: Database) -> None:
    postgres.execute("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    assert postgres.rows("SELECT id FROM t") == [(1,)]
    assert postgres.rows("SHOW wal_level") == [("logical",)]


def test_a_database_is_removed_though_it_has_a_slot(postgres: Database) -> None:
    url = postgres.server.create_database("left")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('left', 'pgoutput')")
        postgres.server.drop_database("left")
    assert postgres.rows("SELECT 1 FROM pg_database WHERE datname = 'left'") == []


def test_a_killed_server_keeps_what_it_committed() -> None:
    with running_postgres() as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE t (id int)")
            connection.execute("INSERT INTO t VALUES (1)")
            server.kill()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        assert not server.running
        port = server.port
        server.start()
        assert server.port == port
        with server.connect() as connection:
            assert connection.execute("SELECT id FROM t").fetchall() == [(1,)]
        server.stop()
        server.start()


def test_without_postgresql_a_test_is_skipped_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool, "PROGRAMS", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="make system-deps"), running_postgres():
        pytest.fail("started")
