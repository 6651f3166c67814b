"""`millstream pipeline` on real projects: run, status, compact, reset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.errors import ConfigError, FlowsFailed, PipelineBusy, PipelineInvalid
from millstream.pipelines import open_project
from millstream.pipelines.state_folder import StateFolder
from tests.spark.pipelines.project_kit import HEAD, Kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

PROJECT = (
    HEAD
    + """
@mp.view
def words():
    text = f.col("value").cast("string")
    return mp.read("lines").select(f.explode(f.split(text, " ")).alias("word"))

@mp.topic(key="word")
def stored():
    return mp.read("words")

@mp.table(key="word")
def counts():
    return mp.read("stored").groupBy("word").agg(f.count("*").alias("times"))

@mp.files(path="lake/words")
def lake():
    return mp.read("words")
"""
)
FILES = (
    HEAD
    + """
@mp.files(path="lake/words")
def lake():
    return mp.read("lines").select(f.col("value").cast("string").alias("word"))
"""
)
FOLLOWED = """
@mp.topic
def copied():
    return mp.read("lake").select(f.upper("word").alias("word"))
"""


@pytest.fixture
def kit(
    spark: SparkSession, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Kit:
    monkeypatch.chdir(tmp_path)
    account.topic("lines")
    made = Kit(spark, account, tmp_path)
    made.write(PROJECT)
    return made


def call(kit: Kit, *words: str) -> Any:
    """Run a command; its errors are raised."""
    server = ("--server", kit.account.url) if words[0] in ("run", "graph", "reset") else ()
    done = CliRunner().invoke(app, ["pipeline", *words, *server])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def words_of(kit: Kit, topic: str = "stored") -> list[str]:
    return sorted(value["word"] for value in kit.account.values(topic))


def counts(kit: Kit) -> dict[str, int]:
    return {key: value["times"] for key, value in kit.table("counts").items()}


def in_lake(kit: Kit) -> list[str]:
    frame = kit.spark.read.parquet(str(kit.folder / "lake" / "words"))
    return sorted(row["word"] for row in frame.collect())


def test_the_graph_is_shown_as_text_and_as_a_picture_and_nothing_is_created(
    kit: Kit,
) -> None:
    kit.write(PROJECT + FOLLOWED)
    drawn = call(kit, "graph", "--svg", "graph.svg").stdout
    assert "[[counts]]\n└─ [stored]\n   └─ (words)\n      └─ [lines]" in drawn
    assert "[copied]\n└─ {lake}\n   └─ (words)" in drawn
    picture = ElementTree.parse(kit.folder / "graph.svg")
    texts = [item.text for item in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"words", "lines", "stored", "counts", "lake", "copied"} <= set(texts)
    found = json.loads(call(kit, "graph", "--json").stdout)
    assert {"name": "lines", "kind": "topic", "outside": True} in found["nodes"]
    assert {(edge["from"], edge["to"]) for edge in found["edges"]} == {
        ("lines", "words"),
        ("words", "stored"),
        ("stored", "counts"),
        ("words", "lake"),
        ("lake", "copied"),
    }
    assert [info.name for info in kit.account.run(lambda mill: mill.topics())] == ["lines"]
    assert sorted(path.name for path in kit.folder.iterdir() if path.is_dir()) in (
        [],
        ["__pycache__"],
    )


def test_a_run_reports_states_rates_and_rows_and_status_keeps_them(kit: Kit) -> None:
    kit.lines("to be or", "not to be")
    reports = [
        json.loads(line) for line in call(kit, "run", "--once", "--json").stdout.splitlines()
    ]
    assert reports[-1]["state"] == "stopped"
    assert {flow["state"] for flow in reports[-1]["flows"]} == {"done"}
    assert counts(kit) == {"to": 2, "be": 2, "or": 1, "not": 1}
    assert in_lake(kit) == sorted(["to", "be", "or", "not", "to", "be"])

    found = json.loads(call(kit, "status", "--json").stdout)
    stored, counted, *_ = found["flows"]
    assert (stored["rows_in"], stored["rows_out"], stored["lag_events"]) == (2, 6, 0)
    assert stored["rows_in_per_second"] >= 0
    assert counted["state_rows"] == 4
    assert counted["state_bytes"] > 0
    listed = {flow["flow"]: flow for flow in json.loads(call(kit, "ls", "--json").stdout)["flows"]}
    assert {name: flow["state"] for name, flow in listed.items()} == dict.fromkeys(listed, "done")
    assert listed["stored"]["rows_out"] == 6


def test_a_failed_flow_ends_the_command_with_its_reason(kit: Kit) -> None:
    kit.write(
        HEAD
        + """
@f.udf("string")
def broken(text):
    raise ValueError("the mill stone broke")

@mp.topic
def bad():
    return mp.read("lines").select(broken(f.col("value").cast("string")).alias("word"))

@mp.topic
def after():
    return mp.read("bad")

@mp.topic
def good():
    return mp.read("lines").select(f.col("value").cast("string").alias("word"))
""",
        "restarts = 1\n",
    )
    kit.lines("a")
    with pytest.raises(FlowsFailed, match="'bad': ValueError: the mill stone broke"):
        call(kit, "run", "--once")
    assert words_of(kit, "good") == ["a"]
    done = CliRunner().invoke(app, ["pipeline", "status"])
    assert done.exit_code == 4
    assert "bad, at 2" in done.stdout
    status = StateFolder(open_project(kit.folder)).read_status() or {}
    flows = {flow["name"]: flow for flow in status["flows"]}
    assert [flows[name]["state"] for name in ("bad", "after", "good")] == [
        "failed",
        "skipped",
        "done",
    ]
    assert flows["bad"]["restarts"] == 1


def test_compact_merges_files_of_batches_and_the_pipeline_continues(kit: Kit) -> None:
    kit.write(FILES)
    for text in ("one", "two"):
        kit.lines(text)
        kit.once()
    folder = kit.folder / "lake" / "words"
    assert len(list(folder.glob("*.parquet"))) >= 2
    done = json.loads(call(kit, "compact", "lake/words", "--size", "1MiB", "--json").stdout)
    assert (done["files_after"], done["rows"]) == (1, 2)
    assert len(list(folder.glob("*.parquet"))) == 1
    assert in_lake(kit) == ["one", "two"]
    kit.lines("four")
    kit.once()
    assert in_lake(kit) == ["four", "one", "two"]
    assert "files became 1, 3 rows" in call(kit, "compact", "lake/words").stdout
    assert in_lake(kit) == ["four", "one", "two"]
    with pytest.raises(ConfigError, match="there is no folder"):
        call(kit, "compact", "lake/wrods")


@pytest.mark.long
def test_files_that_a_flow_reads_as_a_stream_are_not_merged(kit: Kit) -> None:
    kit.write(FILES + FOLLOWED)
    for text in ("one", "two"):
        kit.lines(text)
        kit.once()
    with pytest.raises(ConfigError, match=r"the flow 'copied' reads .* as a stream"):
        call(kit, "compact", "lake/words")
    assert words_of(kit, "copied") == ["ONE", "TWO"]


def test_reset_with_empty_outputs_starts_from_scratch_without_duplicates(kit: Kit) -> None:
    kit.lines("a b", "a")
    kit.once()
    done = json.loads(call(kit, "reset", "--empty-outputs", "--yes", "--json").stdout)
    assert sorted(done["emptied"]) == ["counts", "lake", "stored"]
    assert words_of(kit) == []
    assert kit.table("counts") == {}
    assert not (kit.folder / "lake" / "words").exists()
    kit.once()
    assert words_of(kit) == ["a", "a", "b"]
    assert counts(kit) == {"a": 2, "b": 1}
    assert in_lake(kit) == ["a", "a", "b"]


def test_reset_changes_nothing_while_the_pipeline_runs_or_the_broker_is_down(kit: Kit) -> None:
    state = StateFolder(open_project(kit.folder))
    checkpoint = Path(state.checkpoint("lake"))
    written = kit.folder / "lake" / "words" / "part-0.parquet"
    for path in (checkpoint / "metadata", written):
        path.parent.mkdir(parents=True)
        path.touch()
    with state.running(), pytest.raises(PipelineBusy):
        call(kit, "reset", "--empty-outputs", "--yes")
    away = ["pipeline", "reset", "--empty-outputs", "--yes", "--server", "nats://127.0.0.1:1"]
    assert CliRunner().invoke(app, away).exit_code != 0
    assert checkpoint.exists()
    assert written.exists()
    call(kit, "reset", "--empty-outputs", "--yes")
    assert not checkpoint.exists()
    assert not written.exists()


def test_a_sink_without_what_it_needs_is_refused_by_name(kit: Kit) -> None:
    kit.write(
        HEAD
        + "mp.sink('base', 'jdbc', url='jdbc:derby:x')\n"
        + "@mp.flow('base')\ndef rows(): return mp.read('lines')\n"
    )
    with pytest.raises(PipelineInvalid, match="the jdbc sink 'base' needs the option 'dbtable'"):
        call(kit, "run", "--once")
    kit.write(
        HEAD
        + "mp.sink('base', 'jdbc', url='jdbc:derby:x', dbtable='t', batchcolum='b', batchsize=9)\n"
        + "@mp.flow('base')\ndef rows(): return mp.read('lines')\n"
    )
    with pytest.raises(PipelineInvalid, match="option 'batchcolum': did you mean 'batchColumn'"):
        call(kit, "run", "--once")
