"""Kafka as a peer of bench/: what is said when it cannot run, and how its figures are put."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from bench import jars, kafka_peer, peers_spark
from bench.effort import Effort, cpu_seconds
from bench.harness import Figures, PeerAbsent, Result, Skipped, race, select
from bench.peers import RATE_AND_CPU
from bench.trade import trade_frame, trades

LIBRARY = jars.Library("org.example", "thing", "1.0", alone=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jars, "CACHE", tmp_path)
    return tmp_path


@pytest.mark.parametrize("missing", ["java", "mvn"])
def test_without_java_or_maven_the_word_names_what_is_missing(
    missing: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else "/bin/x")
    with pytest.raises(PeerAbsent, match=f"'{missing}' is not installed"):
        jars.fetched("thing-1.0", [LIBRARY])
    assert not list(cache.iterdir())


def test_without_the_client_the_word_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(PeerAbsent, match=r"pip install 'millstream\[bench\]'"):
        kafka_peer.KafkaServer()


def test_jars_are_fetched_once_and_a_failure_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    runs: list[str] = []

    def maven(command: list[str], cwd: str, **_: object) -> subprocess.CompletedProcess[str]:
        runs.append(Path(cwd, "pom.xml").read_text())
        if len(runs) == 1:
            return subprocess.CompletedProcess(command, 1, "no such artifact", "")
        Path(cwd, "jars").mkdir()
        Path(cwd, "jars", "thing.jar").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", maven)
    with pytest.raises(PeerAbsent, match="no such artifact"):
        jars.fetched("thing-1.0", [LIBRARY])
    assert not list(cache.iterdir())
    folder = jars.fetched("thing-1.0", [LIBRARY])
    assert jars.fetched("thing-1.0", [LIBRARY]) == folder
    assert [file.name for file in folder.iterdir()] == ["thing.jar"]
    assert len(runs) == 2
    assert "<artifactId>thing</artifactId><version>1.0</version><exclusions>" in runs[1]


def test_each_row_has_our_figure_and_the_peers() -> None:
    def works(rate: float) -> Figures:
        return {"rate": rate, "cpu": 1.0}

    def absent() -> Figures:
        raise PeerAbsent("not here")

    contestants = {"a": lambda: works(30.0), "b": absent, "p": lambda: works(10.0), "q": absent}
    pairs = [("row a", "a", "p"), ("row b", "b", "p"), ("row c", "a", "q")]
    with asyncio.Runner() as runner:
        results = list(race(RATE_AND_CPU, contestants, pairs, 1, runner))
    assert results == [
        Result("row a", 30.0, "events/s", "p", 10.0, 3.0),
        Result("row a, CPU of all processes", 1.0, "us/event", "p", 1.0, 1.0),
        Skipped("row b", "not here"),
        Skipped("row c against q", "not here"),
        Result("row c", 30.0, "events/s"),
        Result("row c, CPU of all processes", 1.0, "us/event"),
    ]


def test_objects_and_columns_are_the_same_trades() -> None:
    rows = trade_frame(100).to_pylist()
    assert [vars(trade) for trade in trades(100)] == rows


def test_effort_counts_this_process_and_servers_that_may_be_gone() -> None:
    effort = Effort(2**22 + 1)  # no process has this number
    assert sum(range(100_000)) > 0
    figures = effort.done(10)
    assert figures["rate"] > 0
    assert figures["client"] >= 0
    assert figures["server"] == 0
    assert cpu_seconds([]) == 0


@pytest.fixture
def selection() -> Iterator[None]:
    yield
    select([])


@pytest.mark.usefixtures("selection")
def test_only_selects_the_rows_of_the_limits_and_nothing_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without pyspark, rows that are wanted are reported and nothing is started for them.
    monkeypatch.setattr(peers_spark, "find_spec", lambda _: None)
    limits = [name for name in (*peers_spark.READING, *peers_spark.COPYING) if "limit of" in name]
    assert len(limits) == 4
    for text in (*limits, f"{limits[-1]}, CPU of all processes", "python source"):
        select([text])
        assert [item.name for item in peers_spark.rows(PeerAbsent("x"), quick=True)] == ["Spark"]
    select(["limit of something else"])
    assert not list(peers_spark.rows(PeerAbsent("x"), quick=True))


@pytest.mark.parametrize(("tasks", "counts"), [(1, [1001]), (2, [500, 501]), (3, [333, 334, 334])])
def test_the_ready_source_hands_out_the_rows_that_were_asked_for(
    tasks: int, counts: list[int]
) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    from bench.spark_ready import ReadySource

    value = pa.struct(list(trade_frame(1).schema))
    schema = from_arrow_schema(pa.schema({"key": pa.binary(), "value": value}))
    source = ReadySource({"rows": "1001", "tasks": str(tasks), "batchRows": "200"})
    batch, stream = source.reader(schema), source.streamReader(schema)
    end = stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
    plans = [batch.partitions(), stream.partitions(stream.initialOffset(), end)]
    for reader, plan in zip((batch, stream), plans, strict=True):
        travelled = pickle.loads(pickle.dumps(reader))
        found = [list(travelled.read(part)) for part in plan]
        assert [sum(one.num_rows for one in batches) for batches in found] == counts
        assert all(one.num_rows == 200 for batches in found for one in batches[:-1])
        assert all(one.schema == to_arrow_schema(schema, timezone="UTC") for one in found[0])
        assert found[0][0]["value"].to_pylist() == trade_frame(200).to_pylist()
        assert found[0][0]["key"][0].as_py() == b"SYM000"
    assert not sum(part.value for part in stream.partitions(end, end))


def test_the_ready_sink_says_how_many_rows_did_not_come() -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.types import StructType

    from bench.spark_ready import ReadySource

    writer = ReadySource({"rows": "300"}).streamWriter(StructType(), overwrite=False)
    written = [writer.write(iter([trade_frame(100)])) for _ in range(3)]
    writer.commit([*written, None], 0)
    with pytest.raises(RuntimeError, match="200 of 300 rows"):
        writer.commit([*written[:2], None], 0)
