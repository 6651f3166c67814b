"""SQL files of Spark Declarative Pipelines: read as Spark reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millstream.errors import PipelineInvalid
from millstream.pipelines import Pipeline
from millstream.pipelines.sdp import declare_sql
from millstream.pipelines.sql import Statement, query_of, read_sql
from tests.spark.pipelines.project_kit import Kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

FILE = Path("folder/b.sql")


def one(text: str) -> Statement:
    (found,) = read_sql(text, FILE)
    return found


def row(text: str) -> dict[str, object]:
    """The single row of a statement's query."""
    (found,) = query_of(one(text)).collect()
    return found.asDict()


@pytest.mark.usefixtures("spark")
def test_each_kind_of_statement_is_read_with_its_name_target_and_line() -> None:
    found = read_sql(
        """-- first
CREATE STREAMING TABLE plain;
CREATE STREAMING TABLE IF NOT EXISTS `my-table` (a INT) COMMENT 'x' AS SELECT 1 AS a;
create
  materialized view m as select 1;
CREATE OR REPLACE TEMPORARY VIEW v AS SELECT 1; CREATE FLOW f AS INSERT INTO `my-table` BY NAME
WITH x AS (SELECT 1 AS a) SELECT * FROM x
""",
        FILE,
    )
    assert [(item.kind, item.name, item.target, item.has_query, item.where) for item in found] == [
        ("streaming table", "plain", "plain", False, "b.sql:2"),
        ("streaming table", "my-table", "my-table", True, "b.sql:3"),
        ("materialized view", "m", "m", True, "b.sql:4"),
        ("temporary view", "v", "v", True, "b.sql:6"),
        ("flow", "f", "my-table", True, "b.sql:6"),
    ]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "text",
    [
        "CREATE MATERIALIZED VIEW m COMMENT 'counts as select' AS SELECT 7 AS a",
        "CREATE STREAMING TABLE m COMMENT 'it''s; as select' AS SELECT 7 AS a",
        'CREATE STREAMING TABLE m COMMENT "say \\"as select\\"" AS SELECT 7 AS a',
        "CREATE STREAMING TABLE m -- as select 1\nAS /* as select ; */ SELECT 7 AS a -- as select",
        "/* CREATE STREAMING TABLE n AS SELECT 1; /* inside */ ; */ CREATE STREAMING TABLE m\n"
        "AS SELECT 7 AS a;\n-- the end; of the file",
        "CREATE TEMPORARY VIEW m AS\n(SELECT 7 AS a)",
        "CREATE STREAMING TABLE m AS VALUES (7) AS t(a)",
        "CREATE FLOW m AS INSERT INTO t BY NAME SELECT 7 AS a ORDER BY a LIMIT 1",
        "CREATE FLOW m COMMENT 'as insert into x select' AS INSERT INTO t BY NAME\nSELECT 7 AS a",
    ],
)
def test_the_query_is_the_one_that_spark_finds(text: str) -> None:
    assert one(text).name == "m"
    assert row(text) == {"a": 7}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("quoted", "value"),
    [("'a;b'", "a;b"), ("'it\\'s; -- x'", "it's; -- x"), ('"/* ; "', "/* ; "), ("'é😀;'", "é😀;")],
)
def test_semicolons_quotes_and_comment_marks_in_a_string_are_text(quoted: str, value: str) -> None:
    text = f"CREATE STREAMING TABLE a AS SELECT {quoted} AS `x;y`;\nCREATE STREAMING TABLE b;"
    first, second = read_sql(text, FILE)
    assert (first.name, second.name, second.where) == ("a", "b", "b.sql:2")
    assert query_of(first).collect()[0].asDict() == {"x;y": value}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("text", ["", "\n\n", "-- nothing; here", ";;\n;", "/* a ; */ -- b\n"])
def test_a_file_without_a_statement_declares_nothing(text: str) -> None:
    assert read_sql(text, FILE) == []


TABLE = "CREATE STREAMING TABLE t;\n\n"


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CREATE OR REFRESH STREAMING TABLE u", "b.sql:3: Syntax error at or near 'REFRESH'."),
        ("CREATE STREAMING TABLE u AS\n  SELEC 1", "b.sql:4: Syntax error at or near 'SELEC'."),
        ("CREATE STREAMING TABLE my table", "b.sql:3: Syntax error at or near 'table'."),
        ("CREATE STREAMING TABLE u AS SELECT 'x", "b.sql:3: Syntax error at or near '''."),
        ("CREATE STREAMING TABLE u\n/* open", "b.sql:3: Found an unclosed bracketed comment"),
        ("CREATE TEMPORARY VIEW v", "b.sql:3: Syntax error at or near end of input."),
        ("-- x\nSELECT 1", "b.sql:4: only CREATE STREAMING TABLE, .* not: -- x SELECT 1"),
        ("CREATE VIEW v AS SELECT 1", "b.sql:3: only CREATE"),
        ("CREATE GLOBAL TEMPORARY VIEW v AS SELECT 1", "b.sql:3: only CREATE"),
        ("SET a.b = c", "b.sql:3: only CREATE"),
        ("CREATE STREAMING TABLE a.b.c", "b.sql:3: the name 'a.b.c' has several parts"),
        ("CREATE STREAMING TABLE `my table` AS SELECT 1", "b.sql:3: table name 'my table': use"),
        ("CREATE FLOW f AS INSERT INTO t SELECT 1", "b.sql:3: write a flow as .* BY NAME"),
        ("CREATE FLOW f AS INSERT OVERWRITE t SELECT 1", "b.sql:3: write a flow as"),
        ("CREATE FLOW f AS INSERT INTO a.t BY NAME SELECT 1", "'a.t' has several parts"),
        (
            "CREATE FLOW f AS AUTO CDC INTO t FROM STREAM(s) KEYS (id) SEQUENCE BY time",
            "b.sql:3: AUTO CDC",
        ),
        (
            "CREATE STREAMING TABLE u FLOW AUTO CDC FROM STREAM(s) KEYS (id) SEQUENCE BY time",
            "b.sql:3: AUTO CDC",
        ),
        ("CREATE STREAMING TABLE t", "'t' is declared twice: b.sql:1 and b.sql:3"),
    ],
)
def test_what_is_wrong_is_refused_with_the_file_and_the_line(text: str, message: str) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        declare_sql(Pipeline(), TABLE + text, FILE)


SPEC = "name: sql\nlibraries:\n  - glob:\n      include: '*.sql'\n"
PROJECT = """
CREATE TEMPORARY VIEW `the-lines` COMMENT 'what came; as select' AS
  SELECT cast(value AS STRING) AS text FROM STREAM lines;
-- Words; one row for each.
CREATE STREAMING TABLE `all-words` AS
  SELECT explode(split(text, ';')) AS word FROM STREAM `the-lines`;
CREATE STREAMING TABLE marked;
CREATE FLOW `mark-them` AS INSERT INTO marked BY NAME
  WITH w AS (SELECT * FROM STREAM `all-words`) SELECT concat(word, ';') AS word FROM w;
"""


def write(folder: Path, lines: str) -> None:
    (folder / "spark-pipeline.yml").write_text(SPEC)
    (folder / "a.sql").write_text(PROJECT.replace("STREAM lines", f"STREAM {lines}"))


def test_a_project_in_sql_runs_with_quoted_names(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    account.topic("lines")
    account.publish("lines", [b"to;be", b"or"])
    write(tmp_path, "source")
    spark.readStream.format("millstream").option("url", account.url).option(
        "subscribe", "lines"
    ).option("startingOffsets", "earliest").load().createOrReplaceTempView("source")
    try:
        Kit(spark, account, tmp_path).once()
    finally:
        spark.catalog.dropTempView("source")
    assert sorted(value["word"] for value in account.values("all-words")) == ["be", "or", "to"]
    assert sorted(value["word"] for value in account.values("marked")) == ["be;", "or;", "to;"]


ANSI = """
[pipeline.spark]
"spark.sql.ansi.enabled" = true
"spark.sql.ansi.doubleQuotedIdentifiers" = true
"""
LIST = """
import sys
from pyspark import SparkContext
from millstream.cli.app import app

app(["pipeline", "ls", sys.argv[1], "--json"], standalone_mode=False)
assert SparkContext._active_spark_context is None
"""


def listed(folder: Path) -> subprocess.CompletedProcess[str]:
    """`millstream pipeline ls` in a process of its own, which must start no session."""
    return subprocess.run(
        [sys.executable, "-c", LIST, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_project_in_sql_is_listed_without_a_session(tmp_path: Path) -> None:
    write(tmp_path, "lines")
    # A setting that changes the syntax holds without a session too.
    (tmp_path / "millstream.toml").write_text(ANSI)
    sql = tmp_path / "a.sql"
    sql.write_text(sql.read_text().replace("TABLE marked", 'TABLE "marked"'))
    done = listed(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    flows = json.loads(done.stdout)["flows"]
    assert [(flow["flow"], flow["to"], flow["declared"]) for flow in flows] == [
        ("all-words", "all-words", "a.sql:5"),
        ("mark-them", "marked", "a.sql:8"),
    ]
    (tmp_path / "a.sql").write_text("CREATE OR REFRESH STREAMING TABLE t AS SELECT 1")
    done = listed(tmp_path)
    assert "a.sql:1: Syntax error at or near 'REFRESH'" in done.stderr
