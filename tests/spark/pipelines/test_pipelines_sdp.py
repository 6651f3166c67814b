"""Projects of Spark Declarative Pipelines through our runner, and topics inside the stock one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream.errors import ConfigError, PipelineInvalid
from millstream.pipelines import open_project
from millstream.pipelines.loader import load
from tests.spark.cluster_kit import spark_home
from tests.spark.pipelines.project_kit import Kit, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

SPEC = """
name: sdp
storage: file:///tmp/unused
libraries:
  - glob:
      include: transformations/**
"""
PYTHON = """
from pyspark import pipelines as dp
from pyspark.sql import functions as f

@dp.temporary_view
def lines():
    source = spark.readStream.format("millstream").option("url", URL)
    source = source.option("subscribe", "lines").option("startingOffsets", "earliest")
    return source.load().select(f.col("value").cast("string").alias("text"))

@dp.table
def words():
    return spark.readStream.table("lines").select(f.explode(f.split("text", " ")).alias("word"))

@dp.materialized_view
def counts():
    return spark.read.table("words").groupBy("word").agg(f.count("*").alias("times"))

dp.create_streaming_table("merged")

@dp.append_flow(target="merged")
def first():
    return spark.readStream.table("words")

@dp.append_flow(target="merged")
def second():
    return spark.readStream.table("long_words")

dp.create_sink("out", "millstream", {"url": URL, "topic": "out"})

@dp.append_flow(target="out")
def to_out():
    return spark.readStream.table("words").select(f.col("word").alias("value"))
"""
SQL = """
-- words of more than two letters; a ';' in a comment does not end the statement
CREATE STREAMING TABLE long_words AS SELECT word FROM STREAM words WHERE length(word) > 2;
"""


def write(folder: Path, url: str, python: str = PYTHON) -> None:
    (folder / "spark-pipeline.yml").write_text(SPEC)
    code = folder / "transformations"
    code.mkdir()
    (code / "a.py").write_text(python.replace("URL", repr(url)))
    (code / "b.sql").write_text(SQL)


def texts(account: Account, topic: str) -> list[Any]:
    try:
        return sorted(value["word"] for value in account.values(topic))
    except LookupError:
        return []


def test_decorators_and_sql_run_continuously_and_no_row_of_two_flows_is_lost(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    account.topic("lines")
    account.topic("out")
    account.publish("lines", [b"to be or not"])
    write(tmp_path, account.url)
    kit = Kit(spark, account, tmp_path)
    words = sorted(["to", "be", "or", "not", "to", "sleep"])

    def counts() -> dict[str, int]:
        frame = spark.read.parquet(str(tmp_path / "data" / "counts"))
        return {row["word"]: row["times"] for row in frame.collect()}

    with kit.running() as runner:
        wait_for(lambda: texts(account, "merged") == sorted(["to", "be", "or", "not", "not"]))
        account.publish("lines", [b"to sleep"])
        wait_for(lambda: texts(account, "merged") == sorted([*words, "not", "sleep"]))
        wait_for(lambda: len(account.values("out")) == len(words))
        wait_for(lambda: runner.status("")["flows"][1]["rows_in"] == len(words))
    assert runner.project.name == "sdp"
    assert texts(account, "words") == words
    assert texts(account, "long_words") == ["not", "sleep"]
    assert sorted(value.decode() for value in account.values("out")) == words
    assert counts() == {"to": 2, "be": 1, "or": 1, "not": 1, "sleep": 1}
    assert {("lines", "words"), ("words", "long_words"), ("long_words", "merged")} <= (
        kit.graph().edges
    )


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("1 / 0", "a.py does not load: ZeroDivisionError"),
        (
            "from pyspark import pipelines as dp\n"
            "@dp.table(name='a.b')\ndef f(): return spark.readStream.table('x')",
            "several parts",
        ),
        (
            "from pyspark import pipelines as dp\n"
            "dp.create_streaming_table('t')\n"
            "dp.create_auto_cdc_flow('t', 'words', ['word'], 'word')",
            "create_auto_cdc_flow for 't' is not supported",
        ),
    ],
)
def test_unsupported_declarations_are_refused_with_the_reason(
    account: Account, tmp_path: Path, python: str, message: str
) -> None:
    write(tmp_path, account.url, python)
    with pytest.raises(PipelineInvalid, match=message):
        load(open_project(tmp_path))


def test_a_materialized_view_over_another_is_refused_with_the_reason(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    account.topic("lines")
    account.topic("out")
    over = """
@dp.materialized_view
def often():
    return spark.read.table("counts").where("times > 1")
"""
    write(tmp_path, account.url, PYTHON + over)
    with pytest.raises(PipelineInvalid, match=r"'counts' .* is a materialized view"):
        Kit(spark, account, tmp_path).graph()


def test_an_unknown_setting_of_the_spec_is_refused(account: Account, tmp_path: Path) -> None:
    write(tmp_path, account.url)
    (tmp_path / "spark-pipeline.yml").write_text(SPEC + "nmae: x\n")
    with pytest.raises(ConfigError, match="no setting 'nmae'"):
        open_project(tmp_path)


STOCK = """
from pyspark import pipelines as dp
from pyspark.sql import functions as f

@dp.table
def lines():
    source = spark.readStream.format("millstream").option("url", URL)
    return source.option("subscribe", "lines").option("startingOffsets", "earliest").load()

dp.create_sink("out", "millstream", {"url": URL, "topic": "out"})

@dp.append_flow(target="out")
def to_out():
    source = spark.readStream.format("millstream").option("url", URL)
    source = source.option("subscribe", "lines").option("startingOffsets", "earliest")
    return source.load().select("key", f.upper(f.col("value").cast("string")).alias("value"))
"""


@pytest.mark.long
def test_a_topic_is_source_and_sink_inside_stock_spark_pipelines(
    account: Account, tmp_path: Path
) -> None:
    account.topic("lines")
    account.topic("out")
    account.publish("lines", [b"one", b"two"])
    storage = tmp_path / "storage"
    storage.mkdir()
    write(tmp_path, account.url, STOCK)
    (tmp_path / "transformations" / "b.sql").unlink()
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.replace("/tmp/unused", str(storage)))
    binary = Path(sys.executable).parent / "spark-pipelines"
    done = subprocess.run(
        [
            str(binary),
            "run",
            "--spec",
            str(tmp_path / "spark-pipeline.yml"),
            "--conf",
            f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}",
        ],
        cwd=tmp_path,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))},
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": spark_home(),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(value.decode() for value in account.values("out")) == ["ONE", "TWO"]
