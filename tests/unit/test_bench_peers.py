"""Kafka as a peer of bench/: what is said when it cannot run, and how its figures are put."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import jars, kafka_peer
from bench.effort import Effort, cpu_seconds
from bench.harness import Figures, PeerAbsent, Result, Skipped, race
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
