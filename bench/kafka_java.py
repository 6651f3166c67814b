"""Kafka's own performance programs in Java, and what they print."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from bench.harness import Figures, Result, Skipped
from bench.kafka_sides import CPU, RATE, Row, Side, Stage
from bench.kafka_tools import Tools

__all__ = ["consume", "latency", "produce"]

VALUE_BYTES = 100
# Only the lines about the whole have percentiles.
PRODUCED = re.compile(
    r"(\d+) (steady state )?records sent, ([\d.]+) records/sec .*?([\d.]+) ms avg latency.*50th"
)
AVERAGE = re.compile(r"Avg latency: ([\d.]+) ms")
PERCENTILES = re.compile(r"50th = (\d+), 99th = (\d+), 99.9th = (\d+)")
PRODUCED_NAMES = {
    **RATE,
    "warm": (", after the first quarter", "records/s"),
    "latency": (", average latency", "ms"),
    **CPU,
}
CONSUMED_NAMES = {
    **RATE,
    "whole": (", with joining the group", "records/s"),
    **CPU,
}
LATENCY_NAMES = {
    "p50": (", p50", "ms"),
    "p99": (", p99", "ms"),
    "average": (", average", "ms"),
    **CPU,
}


def produce(
    stage: Stage, tools: Tools, kept: str, count: int, rounds: int
) -> Iterator[Result | Skipped]:
    """ProducerPerformance with the defaults of Java's producer: idempotent, batches of 16 KiB."""
    topics: dict[str, str] = {}

    def work(side: Side) -> Figures:
        topic = _own(topics, side)
        words = ("--topic", topic, "--num-records", str(count), "--record-size", str(VALUE_BYTES))
        more = ("--throughput", "-1", "--warmup-records", str(count // 4))
        load = stage.load(side)
        done = tools.run(
            "ProducerPerformance", "--bootstrap-server", side.bootstrap, *words, *more, fast=True
        )
        return {**load.done(count), **produced(done.stdout, count)}

    row = Row(f"Java ProducerPerformance, {kept}", PRODUCED_NAMES, count, rounds)
    yield from stage.beside(row, work)


def _own(topics: dict[str, str], side: Side) -> str:
    """The topic of this side, the same one in every round."""
    if side.name not in topics:
        topics[side.name] = side.make_topic(1)
    return topics[side.name]


def produced(text: str, count: int) -> Figures:
    """Figures of what ProducerPerformance printed: of all records, and without the first ones."""
    figures: Figures = {}
    for sent, warm, rate, average in PRODUCED.findall(text):
        if warm:
            figures["warm"] = float(rate)
        elif int(sent) == count:
            figures |= {"rate": float(rate), "latency": float(average)}
    if "rate" not in figures:
        raise RuntimeError(f"ProducerPerformance did not send {count} records: {text[-500:]}")
    return figures


def consume(
    stage: Stage, tools: Tools, topic_of: Callable[[Side], str], count: int, rounds: int
) -> Iterator[Result | Skipped]:
    """ConsumerPerformance, a group of its own, over topics that are filled."""

    def work(side: Side) -> Figures:
        words = ("--topic", topic_of(side), "--num-records", str(count), "--timeout", "60000")
        load = stage.load(side)
        done = tools.run(
            "ConsumerPerformance", "--bootstrap-server", side.bootstrap, *words, fast=True
        )
        return {**load.done(count), **consumed(done.stdout, count)}

    row = Row("Java ConsumerPerformance", CONSUMED_NAMES, count, rounds, topic_of)
    yield from stage.beside(row, work)


def consumed(text: str, count: int) -> Figures:
    """Figures of what ConsumerPerformance printed: names and values with commas between."""
    lines = [line.split(",") for line in text.splitlines() if line.count(",") > 8]
    if len(lines) < 2:
        raise RuntimeError(f"ConsumerPerformance printed no figures: {text[-500:]}")
    names = [name.strip() for name in lines[0]]
    row = dict(zip(names, (value.strip() for value in lines[-1]), strict=True))
    if int(row["data.consumed.in.nMsg"]) < count:
        raise RuntimeError(f"ConsumerPerformance read {row['data.consumed.in.nMsg']} of {count}")
    return {"rate": float(row["fetch.nMsg.sec"]), "whole": float(row["nMsg.sec"])}


def latency(
    stage: Stage, tools: Tools, kept: str, count: int, rounds: int
) -> Iterator[Result | Skipped]:
    """EndToEndLatency: one record at a time, from the send until it is read.

    It cuts its percentiles to whole milliseconds; the average has all its digits.
    """
    topics: dict[str, str] = {}

    def work(side: Side) -> Figures:
        topic = _own(topics, side)
        words = ("--topic", topic, "--num-records", str(count), "--record-size", str(VALUE_BYTES))
        load = stage.load(side)
        done = tools.run(
            *("EndToEndLatency", "--bootstrap-server", side.bootstrap, "--producer-acks", "all"),
            *words,
            fast=True,
        )
        return {**load.done(count), **end_to_end(done.stdout)}

    row = Row(f"Java EndToEndLatency, {kept}", LATENCY_NAMES, count, rounds)
    yield from stage.beside(row, work)


def end_to_end(text: str) -> Figures:
    """Figures of what EndToEndLatency printed, in milliseconds."""
    average, parts = AVERAGE.search(text), PERCENTILES.search(text)
    if average is None or parts is None:
        raise RuntimeError(f"EndToEndLatency printed no figures: {text[-500:]}")
    return {"average": float(average[1]), "p50": float(parts[1]), "p99": float(parts[2])}
