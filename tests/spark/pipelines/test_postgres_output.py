"""Rows of a pipeline in a table of a real PostgreSQL: exactly once, whatever is repeated."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream.errors import PipelineInvalid, SinkError
from millstream.messaging import NewEvent
from millstream.pipelines import Pipeline, loading, open_project, postgres
from millstream.pipelines.loader import load
from millstream.pipelines.postgres import address_of
from millstream.pipelines.postgres_batches import PostgresBatches
from millstream.pipelines.postgres_table import prepared_table
from millstream.settings import Secret
from tests.postgres import Database
from tests.spark.changes_kit import Change, Writing
from tests.spark.conftest import forget_commit, last_batch
from tests.spark.pipelines.project_kit import HEAD, PAGE, Kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

EXAMPLE = """
@mp.postgres(table="copies", key="id")
def copies():
    return mp.read_changes("items").select("id", "name", "note", "_deleted", "_unchanged")


@mp.postgres(table="log")
def log():
    changes = mp.read_changes("items", before=True)
    return changes.select("id", "_op", "_commit", "_time", f.col("_before.name").alias("old"))
"""


def rows_of(database: Database, table: str) -> dict[int, tuple[Any, ...]]:
    return {row[0]: row[1:] for row in database.rows(f"SELECT id, name, note FROM {table}")}


def expected(writing: Writing) -> dict[int, tuple[Any, ...]]:
    return {id: (row["name"], row["note"]) for id, row in writing.rows.items()}


def random_changes(chance: random.Random, writing: Writing, count: int) -> list[Change]:
    """Changes of some rows, as a database could send them."""
    known, made = set(writing.rows), []
    for number in range(count):
        id = chance.randrange(12)
        text = f"{number}-{chance.random()}"
        if id not in known:
            known.add(id)
            made.append(Change("c", id, {"name": text, "note": text}))
        elif chance.random() < 0.25:
            known.discard(id)
            made.append(Change("d", id, old={"name": "old"}))
        elif chance.random() < 0.5:
            made.append(Change("u", id, {"name": text}, unchanged=["note"]))
        else:
            made.append(Change("u", id, {"name": text, "note": None}))
    return made


def test_changes_are_upserted_and_logged_once_whatever_is_repeated(
    spark: SparkSession,
    account: Account,
    tmp_path: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLSTREAM_POSTGRES", database.url)
    kit, chance = Kit(spark, account, tmp_path), random.Random(3)
    writing = Writing(account.url)
    writing.create(partitions=2)
    writing.write(*random_changes(chance, writing, 40))
    kit.write(HEAD + EXAMPLE)
    kit.once()
    assert rows_of(database, "copies") == expected(writing)

    # The driver dies between the database's commit and that of Spark: the batch runs again.
    for flow in ("copies", "log"):
        checkpoint = tmp_path / ".pipeline" / "checkpoints" / flow
        forget_commit(checkpoint, last_batch(checkpoint))
    noted = "SELECT batch, stored FROM millstream_batches"
    before = database.rows(noted)
    kit.once()
    assert database.rows(noted) == before
    writing.write(*random_changes(chance, writing, 30))
    kit.once()
    assert rows_of(database, "copies") == expected(writing)
    logged = database.rows("SELECT id, _op, _commit, _time, old FROM log ORDER BY _commit")
    assert [int(row[2]) for row in logged] == list(range(1, 71))
    assert {row[4] for row in logged if row[1] == "d"} == {"old"}
    left = "SELECT relname FROM pg_class WHERE relname LIKE 'millstream_stage%'"
    assert database.rows(left) == []
    for file in (tmp_path / ".pipeline").rglob("*"):
        assert not file.is_file() or b"postgresql://" not in file.read_bytes()


class Batches:
    """Batches of one query, stored by hand, as foreachBatch does it."""

    def __init__(self, spark: SparkSession, database: Database, key: tuple[str, ...]) -> None:
        import pyarrow as pa

        self.spark = spark
        types = [("id", pa.int64()), ("name", pa.string())]
        address = Secret(database.url)
        table = prepared_table(address, "out", "target", pa.schema(types), key)
        self.to = PostgresBatches("out", table, ("id", "name"), key, address)

    def store(self, number: int, rows: list[tuple[int, str]], query: str = "q") -> None:
        frame = self.spark.createDataFrame(rows, "id BIGINT, name STRING").coalesce(1)
        self.to.store(frame, query, number)


def test_a_batch_that_is_stored_is_skipped_and_one_that_failed_leaves_nothing(
    spark: SparkSession,
    database: Database,
) -> None:
    keyed = Batches(spark, database, ("id",))
    keyed.store(0, [(1, "a"), (2, "b"), (1, "c")])
    keyed.store(0, [(1, "never")])
    assert sorted(database.rows("SELECT * FROM target")) == [(1, "c"), (2, "b")]
    database.execute("ALTER TABLE target ADD CHECK (name <> 'bad')")
    with pytest.raises(SinkError, match="violates check constraint"):
        keyed.store(1, [(3, "good"), (4, "bad")])
    assert len(database.rows("SELECT FROM target")) == 2
    keyed.store(1, [(3, "good"), (4, "fixed")])  # removes the staging table that was left
    assert len(database.rows("SELECT FROM target")) == 4
    keyed.store(0, [(5, "another query")], query="q2")
    noted = database.rows("SELECT query, batch FROM millstream_batches ORDER BY query")
    assert noted == [("q", 1), ("q2", 0)]
    with pytest.raises(Exception, match="null in the column 'id' of its key"):
        keyed.store(2, [(None, "x")])  # type: ignore[list-item]

    # Rows of an attempt of a task that Spark does not count are not stored.
    stage = keyed.to._begin("q", 7)
    assert stage is not None
    columns = "id, name, millstream_task, millstream_attempt, millstream_chunk, millstream_deleted"
    database.execute(
        f"INSERT INTO {stage} ({columns}) VALUES (7, 'lost', 0, 3, 0, false)",
        f"INSERT INTO {stage} ({columns}) VALUES (7, 'won', 0, 4, 0, false)",
    )
    from pyspark.sql import Row

    done = [Row(attempt=4, chunks=1, rows=1, deleted=0, partial=0)]
    keyed.to._complete("q", 7, stage, done)
    assert database.rows("SELECT name FROM target WHERE id = 7") == [("won",)]


def test_a_table_that_does_not_fit_the_rows_is_refused_before_anything_starts(
    spark: SparkSession,
    account: Account,
    tmp_path: Path,
    database: Database,
) -> None:
    account.topic("lines")
    kit = Kit(spark, account, tmp_path)
    flow = f"""
@mp.postgres(table="t", key="id", url={database.url!r})
def out():
    return mp.read("lines").selectExpr("offset AS id", "string(value) AS name")
"""
    kit.write(HEAD + flow)
    for statement, reason in (
        ("CREATE TABLE t (id int PRIMARY KEY, name text)", "'id' is integer in table t"),
        ("CREATE TABLE t (id bigint, name text)", "no unique index"),
        ("CREATE TABLE t (id bigint PRIMARY KEY)", 'ADD COLUMN "name" text'),
    ):
        database.execute("DROP TABLE IF EXISTS t", statement)
        with pytest.raises(Exception, match=reason):
            kit.once()
    database.execute("DROP TABLE t")
    account.publish("lines", [NewEvent(b"x")])
    kit.once()
    assert database.rows("SELECT id, name FROM t") == [(1, "x")]
    assert "url" not in str(kit.graph().as_dict())


def some_rows() -> None:
    """A function that could return rows."""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "complete", "key": "id"}, "choose append or update"),
        ({"mode": "update"}, "needs a key"),
        ({"delete_when": "x"}, "needs a key"),
        ({"url": "jdbc:postgresql://ann:secret@db/shop"}, r"not an address.*mp\.sink"),
        ({"url": "mysql://ann:secret@db/shop"}, "not an address"),
        ({"table": "a.b.c"}, "schema.table"),
        ({"table": "millstream_batches"}, "own"),
        ({"key": ("id", "id")}, "must name columns"),
    ],
)
def test_bad_options_are_refused_when_the_pipeline_is_loaded(
    options: dict[str, Any], reason: str
) -> None:
    with loading(Pipeline("p")), pytest.raises(PipelineInvalid, match=reason) as caught:
        postgres(**options)(some_rows)
    assert "secret" not in str(caught.value)


def test_the_address_is_shown_nowhere_and_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "millstream.toml").write_text("[pipeline]\nname = 'p'\n")
    code = "@mp.postgres(key='id', url='postgresql://ann:hush@db/x')\ndef a(): ...\n"
    code += "@mp.postgres()\ndef b(): ...\n"
    (tmp_path / "p.py").write_text(HEAD + code)
    outputs = load(open_project(tmp_path)).outputs
    assert "hush" not in repr(outputs)
    assert address_of(outputs["a"]).reveal() == "postgresql://ann:hush@db/x"
    monkeypatch.delenv("MILLSTREAM_POSTGRES", raising=False)
    with pytest.raises(PipelineInvalid, match="MILLSTREAM_POSTGRES"):
        address_of(outputs["b"])
    monkeypatch.setenv("MILLSTREAM_POSTGRES", "host=db password=hush")
    assert address_of(outputs["b"]) == Secret("host=db password=hush")


def test_the_page_has_the_example_that_is_tested_here() -> None:
    assert textwrap.indent(EXAMPLE, "    ") in PAGE


def test_pipelines_without_postgres_do_not_load_its_libraries() -> None:
    code = "import sys, millstream.pipelines.queries as q; print('psycopg' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
