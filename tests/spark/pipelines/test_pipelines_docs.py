"""docs/PIPELINES.md: its project runs, its commands and settings exist."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.pipelines import open_project
from tests.spark.pipelines.project_kit import Kit, block

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

ORDER = pa.schema(
    [
        ("customer", pa.string()),
        ("amount", pa.int64()),
        ("paid", pa.bool_()),
        ("time", pa.timestamp("us", tz="UTC")),
    ]
)


def call(*words: str) -> Any:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done


def test_the_project_of_the_page_runs_with_the_commands_of_the_page(
    spark: SparkSession, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kit = Kit(spark, account, tmp_path)
    kit.write(block("python", "def large_orders"))
    account.topic("orders", schema=ORDER)
    time = datetime(2026, 3, 1, 12, tzinfo=UTC)
    rows = [("ann", 2000, True), ("ann", 10, True), ("ben", 5000, False)]
    orders = [
        {"customer": name, "amount": amount, "paid": paid, "time": time}
        for name, amount, paid in rows
    ]
    account.pack("orders", [(order, None) for order in orders])
    printed = {}
    for line in block("sh", "pipeline ls").splitlines():
        command, *words = shlex.split(line, comments=True)
        assert command == "millstream"
        call(*words, "--help")
        if words[1:] in (["run", "--once"], ["ls"], ["status"], ["graph", "--svg", "p.svg"]):
            server = ("--server", account.url) if words[1] in ("run", "graph") else ()
            printed[words[1]] = call(*words, *server).stdout
        elif words[1] == "reset":
            printed[words[1]] = call(*words, "--yes").stdout
    assert set(printed) == {"run", "ls", "status", "graph", "reset"}
    assert [value["amount"] for value in account.values("large_orders")] == [2000]
    assert kit.table("spending") == {"ann": {"customer": "ann", "spent": 2010}}
    lake = spark.read.parquet(str(tmp_path / "lake" / "orders"))
    assert lake.count() == 3
    assert (tmp_path / "lake" / "orders" / "day=2026-03-01").is_dir()
    assert "[[spending]]" in printed["graph"]
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert "Reset spending" in printed["reset"]
    listed = json.loads(call("pipeline", "ls", "--json").stdout)["flows"]
    assert [flow["flow"] for flow in listed] == ["large_orders", "spending", "archive"]


def test_the_settings_of_the_page_are_read(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(block("toml", "[pipeline]"))
    project = open_project(tmp_path)
    assert (project.name, project.trigger, project.restarts) == ("orders", 1.0, 5)
    assert project.master == "local[*]"
    assert project.checkpoints == "s3a://bucket/orders"
    assert project.spark == {"spark.driver.memory": "2g"}
