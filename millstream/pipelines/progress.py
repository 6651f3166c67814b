"""The numbers of a flow, computed from Spark's progress reports. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.spark.source.offsets import TopicPartition, from_json, lag

__all__ = ["OUTPUT_METRIC", "Numbers", "note_checkpoint", "note_latest", "note_progress"]

# Name of the metric that counts the rows a flow writes.
OUTPUT_METRIC: Final = "millstream_output"
_NO_WATERMARK: Final = "1970-01-01T00:00:00.000Z"


@dataclass(slots=True)
class Numbers:
    """The numbers of one flow since its process started."""

    batch: int | None = None  # the last batch that was completed
    rows_in: int = 0
    rows_out: int = 0
    rows_in_per_second: float = 0.0
    rows_out_per_second: float = 0.0
    batch_seconds: float = 0.0  # how long the last batch with rows took
    lag_messages: int | None = None  # stored but not read yet; a pack is one message
    lag_events: int | None = None  # the same in events, estimated from the packs read so far
    lag_seconds: float | None = None  # how long the oldest of them has waited, at most
    lag_time: str | None = None  # when the broker was last asked where the topics end
    watermark: str | None = None
    state_rows: int = 0
    state_bytes: int = 0
    late_rows: int = 0  # dropped because they were older than the watermark
    messages_in: int = field(default=0)  # messages that the rows came from, if known
    ends: list[dict[str, Any]] = field(default_factory=list)  # how far each source was read


def note_progress(numbers: Numbers, report: Mapping[str, Any], now: datetime) -> None:
    """Add one progress report (Spark's JSON, as a dict) to the numbers."""
    rows = int(report.get("numInputRows") or 0)
    seconds = float((report.get("durationMs") or {}).get("triggerExecution") or 0) / 1000
    out = _rows_out(report)
    numbers.batch = report.get("batchId", numbers.batch)
    numbers.rows_in += rows
    numbers.rows_out += out
    numbers.rows_in_per_second = float(report.get("inputRowsPerSecond") or 0.0)
    numbers.rows_out_per_second = out / seconds if seconds else 0.0
    if rows:
        numbers.batch_seconds = seconds
    watermark = (report.get("eventTime") or {}).get("watermark")
    if watermark and watermark != _NO_WATERMARK:
        numbers.watermark = watermark
    operators = report.get("stateOperators") or []
    if operators:
        numbers.state_rows = sum(int(item.get("numRowsTotal") or 0) for item in operators)
        numbers.state_bytes = sum(int(item.get("memoryUsedBytes") or 0) for item in operators)
        numbers.late_rows += sum(
            int(item.get("numRowsDroppedByWatermark") or 0) for item in operators
        )
    _note_lag(numbers, report.get("sources") or [], now)


def note_checkpoint(numbers: Numbers, offsets: Sequence[str]) -> None:
    """Take over how far a flow had read earlier: Spark reports it only when there are new rows."""
    for text in offsets:
        end = _offset(text)
        try:
            if end is not None and from_json(end):
                numbers.ends.append(end)
        except ConfigError:
            continue  # another Spark source


def _rows_out(report: Mapping[str, Any]) -> int:
    sink = (report.get("sink") or {}).get("numOutputRows")
    if isinstance(sink, int) and sink >= 0:
        return sink
    counted = (report.get("observedMetrics") or {}).get(OUTPUT_METRIC) or {}
    return int(counted.get("rows") or 0)


def _note_lag(numbers: Numbers, sources: list[Mapping[str, Any]], now: datetime) -> None:
    ends: list[dict[str, Any]] = []
    latest: dict[TopicPartition, int] = {}
    for source in sources:
        end, newest = _offset(source.get("endOffset")), _offset(source.get("latestOffset"))
        if end is None:
            continue
        try:
            start = _offset(source.get("startOffset"))
            if start is not None:
                numbers.messages_in += lag(start, end)
            for where, position in from_json(newest or end).items():
                latest[where] = max(position.next, latest.get(where, 0))
        except ConfigError:
            continue  # another Spark source, with offsets of its own
        ends.append(end)
    if ends:
        numbers.ends = ends
        note_latest(numbers, latest, now)


def note_latest(numbers: Numbers, latest: Mapping[TopicPartition, int], now: datetime) -> None:
    """Measure the lag against the partitions' ends as they are now: the next offset of each."""
    messages = 0
    ages: list[float] = []
    for end in numbers.ends:
        for where, position in from_json(end).items():
            waiting_here = max(0, latest.get(where, position.next) - position.next)
            messages += waiting_here
            if waiting_here and position.last_time:
                ages.append(_age(position.last_time, now))
    per_message = max(1.0, numbers.rows_in / numbers.messages_in if numbers.messages_in else 1.0)
    numbers.lag_messages = messages
    numbers.lag_events = round(messages * per_message)
    numbers.lag_seconds = max(ages, default=0.0) if messages else 0.0


def _offset(given: object) -> dict[str, Any] | None:
    """An offset as Spark reports it: JSON, or a string of JSON."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return given if isinstance(given, dict) else None


def _age(time: str, now: datetime) -> float:
    """Seconds since a server's time, which has nanoseconds."""
    text = time.rstrip("Z")
    whole, _, part = text.partition(".")
    moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    fraction = float(f"0.{part}") if part else 0.0
    return max(0.0, (now - moment).total_seconds() - fraction)
