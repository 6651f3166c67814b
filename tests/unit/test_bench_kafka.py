"""`python -m bench kafka`: what its programs print is understood, and what the rows say."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench import kafka, kafka_java, kafka_sides, kafka_spark
from bench.__main__ import families
from bench.harness import OURS, Figures, PeerAbsent, Result, Skipped, select
from bench.kafka_peer import KAFKA
from bench.kafka_sides import CPU, RATE, Load, Row, Side, Stage

PRODUCED = """\
Warmup first 10000 records. Steady state results will print after the complete test summary.
40000 records sent, 7000.5 records/sec (0.67 MB/sec), 99.9 ms avg latency, 656.0 ms max latency.
50000 records sent, 31426.775613 records/sec (3.00 MB/sec), 361.07 ms avg latency, 656.00 ms max \
latency, 364 ms 50th, 502 ms 95th, 515 ms 99th, 516 ms 99.9th.
40000 steady state records sent, 45248.868778 records/sec (4.32 MB/sec), 400.46 ms avg latency, \
516.00 ms max latency, 377 ms 50th, 504 ms 95th, 515 ms 99th, 516 ms 99.9th.
"""
CONSUMED = """\
start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, \
rebalance.time.ms, fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec
2026-11-18 19:59:10:811, 2026-11-18 19:59:11:865, 4.7684, 4.5241, 50000, 47438.3302, 768, 286, \
16.6726, 174825.1748
"""
LATENCY = """\
0\t62.503778
Avg latency: 5.7393 ms
Percentiles: 50th = 5, 99th = 19, 99.9th = 62
"""


class NoClients:
    bootstrap = "127.0.0.1:1"


def side(
    name: str,
    steps: Callable[[], dict[str, float]] = dict,
    processes: dict[str, Callable[[], int]] | None = None,
) -> Side:
    clients: Any = NoClients()
    return Side(name, clients, lambda _: "topic", processes or {}, lambda: None, steps)


@pytest.fixture(autouse=True)
def selection() -> Iterator[None]:
    yield
    select([])


def test_the_family_is_known_by_its_name() -> None:
    assert "Kafka gateway" in families()["kafka"]


def test_figures_of_the_producer_program_are_those_of_the_whole() -> None:
    figures = kafka_java.produced(PRODUCED, 50_000)
    assert figures == {"rate": 31426.775613, "latency": 361.07, "warm": 45248.868778}
    with pytest.raises(RuntimeError, match="did not send 40000"):
        kafka_java.produced(PRODUCED, 40_000)


def test_figures_of_the_consumer_program_need_all_records() -> None:
    figures = kafka_java.consumed(CONSUMED, 50_000)
    assert figures == {"rate": 174825.1748, "whole": 47438.3302}
    with pytest.raises(RuntimeError, match="read 50000 of 60000"):
        kafka_java.consumed(CONSUMED, 60_000)
    with pytest.raises(RuntimeError, match="no figures: WARNING"):
        kafka_java.consumed("WARNING: Exiting before consuming", 1)


def test_figures_of_the_latency_program() -> None:
    assert kafka_java.end_to_end(LATENCY) == {"average": 5.7393, "p50": 5.0, "p99": 19.0}
    with pytest.raises(RuntimeError, match="no figures: poll"):
        kafka_java.end_to_end("poll() timed out before finding a result")


def test_figures_that_only_the_gateway_has_stand_alone() -> None:
    own: list[Figures] = [{"rate": 30.0, "server": 2.0, "gateway": 1.5}]
    theirs: list[Figures] = [{"rate": 10.0, "server": 1.0, "kafka": 1.0}]
    row = Row("row", {**RATE, **CPU}, 1, 1)
    assert list(kafka_sides.figures_of(row, own, theirs)) == [
        Result("row", 30.0, "records/s", KAFKA, 10.0, 3.0),
        Result("row, CPU of the server", 2.0, "us/record", KAFKA, 1.0, 0.5),
        Result("row, CPU of the gateway", 1.5, "us/record"),
    ]
    assert [one.peer for one in kafka_sides.figures_of(row, own, [])] == [None] * 3


def test_both_take_turns_and_the_steps_of_the_gateway_are_divided_by_all_records() -> None:
    turns: list[str] = []
    books = iter([{"decode": 1.0, "idle": 7.0}, {"decode": 4.0, "pack": 3.0, "idle": 7.0}])

    def work(one: Side) -> Figures:
        turns.append(one.name)
        return {"rate": 1.0 if one.name == OURS else 2.0}

    stage = Stage(side(OURS, lambda: next(books)), side(KAFKA))
    prepared: list[str] = []
    row = Row("row", RATE, 100, 2, lambda one: prepared.append(one.name))
    found = list(stage.beside(row, work))
    assert prepared == [OURS, KAFKA]
    assert turns == [OURS, KAFKA, KAFKA, OURS, OURS, KAFKA]
    assert found == [
        Result(
            *("row", 1.0, "records/s", KAFKA, 2.0, 0.5),
            *((1.0, 1.0), (2.0, 2.0), (0.5, 0.5)),
        ),
        Result("row, step of the gateway: decode", 3.0 / 300 * 1e6, "us/record"),
        Result("row, step of the gateway: pack", 3.0 / 300 * 1e6, "us/record"),
    ]


def test_steps_of_a_gateway_that_was_started_again_count_from_its_start() -> None:
    books = iter([{"decode": 1.0}, {"decode": 2.0}])
    stage = Stage(side(OURS, lambda: next(books)), PeerAbsent("no Kafka"))
    row = Row("row", RATE, 2_000_000, 3, restarts=True)
    *_, step = stage.beside(row, lambda _: {"rate": 1.0})
    assert step == Result("row, step of the gateway: decode", 1.0, "us/record")


def test_without_kafka_and_without_steps_our_figures_are_left() -> None:
    def silent() -> dict[str, float]:
        raise PeerAbsent("gateway status: 2: no such command")

    stage = Stage(side(OURS, silent), PeerAbsent("no Kafka"))
    assert list(stage.beside(Row("row", RATE, 10, 1), lambda _: {"rate": 5.0})) == [
        Result("row", 5.0, "records/s"),
        Skipped("row, step of the gateway", "gateway status: 2: no such command"),
    ]


def test_rows_that_are_not_wanted_do_not_run() -> None:
    def never(_: Side) -> Figures:
        raise AssertionError

    stage = Stage(side(OURS), PeerAbsent("no Kafka"))
    select(["another"])
    assert not list(stage.beside(Row("row", {**RATE, **CPU}, 1, 1), never))
    broker: Any = None
    assert not list(kafka_spark.rows(stage, broker, quick=True))


def test_steps_are_added_over_all_processes_of_the_gateway() -> None:
    steps = {"decode": {"cpu_seconds": 1.5, "times": 3}, "odd": 4}
    one = {"name": "gateway-1", "books": {"requests": 7, "steps": steps}}
    assert kafka_sides.added_steps([one, one, "text"]) == {"decode": 3.0}
    assert kafka_sides.added_steps({"steps": "none"}) == {}


@pytest.mark.parametrize(
    ("code", "output", "why"),
    [
        (2, "", "gateway status: 2: no such command"),
        (0, "no gateways\n", "gave no JSON"),
    ],
)
def test_a_gateway_that_does_not_say_its_steps_is_no_error_of_the_bench(
    code: int, output: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([""], code, output, "no such command")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(PeerAbsent, match=why):
        kafka_sides.gateway_steps("nats://127.0.0.1:1")


def test_load_counts_servers_apart_from_the_client() -> None:
    gone = 2**22 + 1  # no process has this number
    processes: dict[str, Callable[[], int]] = {"gateway": lambda: gone, "broker": lambda: 0}
    load = Load(side(OURS, processes=processes), {gone})
    assert sum(range(100_000)) > 0
    figures = load.done(10)
    assert figures["rate"] > 0
    assert figures["client"] >= 0
    assert figures["server"] == figures["gateway"] == 0
    assert "broker" not in figures


def test_everybody_sends_the_same_records() -> None:
    first, second = kafka._Records(1_500), kafka._Records(1_500)
    assert first.values == second.values
    assert {len(value) for value in first.values} == {kafka.VALUE_BYTES}
    assert len(first.keys) == len(first.values)
    assert first.values[0] == first.values[kafka.DIFFERENT]


def test_without_the_client_the_family_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise PeerAbsent("confluent-kafka is not installed")

    monkeypatch.setattr(kafka, "kafka_client", missing)
    assert list(kafka.measure(quick=True)) == [Skipped("kafka", "confluent-kafka is not installed")]
