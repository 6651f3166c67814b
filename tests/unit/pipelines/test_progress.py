"""Numbers from Spark's reports; restarts; the reason in an error."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from millstream.pipelines.progress import (
    OUTPUT_METRIC,
    Numbers,
    note_checkpoint,
    note_latest,
    note_progress,
)
from millstream.pipelines.restarts import Restarts
from millstream.pipelines.spark_errors import reason_of

NOW = datetime(2026, 1, 1, 12, 0, 10, tzinfo=UTC)


def offset(following: int, last: str = "") -> str:
    entry: dict[str, Any] = {"next": following, "log": "x"}
    if last:
        entry["last"] = last
    return json.dumps({"orders": {"0": entry}})


def report(**changes: Any) -> dict[str, Any]:
    return {
        "batchId": 7,
        "numInputRows": 500,
        "inputRowsPerSecond": 250.0,
        "durationMs": {"triggerExecution": 2000},
        "sink": {"numOutputRows": 100},
        "sources": [
            {
                "startOffset": offset(1),
                "endOffset": offset(6, "2026-01-01T12:00:00.500000001Z"),
                "latestOffset": offset(9),
            }
        ],
        **changes,
    }


def test_rates_lag_and_state_are_taken_from_a_report() -> None:
    numbers = Numbers()
    state = [{"numRowsTotal": 3, "memoryUsedBytes": 9, "numRowsDroppedByWatermark": 2}]
    watermark = {"watermark": "2026-01-01T11:00:00.000Z"}
    note_progress(numbers, report(stateOperators=state, eventTime=watermark), NOW)
    assert (numbers.batch, numbers.rows_in, numbers.rows_out) == (7, 500, 100)
    assert (numbers.rows_in_per_second, numbers.rows_out_per_second) == (250.0, 50.0)
    # 5 messages had 500 rows, so 3 waiting messages are about 300 events.
    assert (numbers.lag_messages, numbers.lag_events) == (3, 300)
    assert numbers.lag_seconds == pytest.approx(9.5, abs=0.01)
    assert numbers.watermark == "2026-01-01T11:00:00.000Z"
    assert (numbers.state_rows, numbers.state_bytes, numbers.late_rows) == (3, 9, 2)


def test_a_flow_that_has_caught_up_has_no_lag() -> None:
    numbers = Numbers()
    source = {"startOffset": offset(1), "endOffset": offset(9), "latestOffset": offset(9)}
    note_progress(numbers, report(sources=[source]), NOW)
    assert (numbers.lag_messages, numbers.lag_events, numbers.lag_seconds) == (0, 0, 0.0)


def test_a_flow_without_new_rows_since_its_start_has_a_lag_too() -> None:
    numbers = Numbers()
    note_checkpoint(numbers, [offset(6, "2026-01-01T12:00:00Z"), "-", '{"logOffset": 3}'])
    note_latest(numbers, {("orders", 0): 6}, NOW)
    assert (numbers.lag_messages, numbers.lag_events, numbers.lag_seconds) == (0, 0, 0.0)
    note_latest(numbers, {("orders", 0): 8}, NOW)
    assert (numbers.lag_messages, numbers.lag_seconds) == (2, 10.0)


def test_the_lag_grows_while_a_batch_runs_and_spark_reports_nothing() -> None:
    numbers = Numbers()
    note_progress(numbers, report(), NOW)
    note_latest(numbers, {("orders", 0): 26, ("elsewhere", 0): 99}, NOW)
    assert (numbers.lag_messages, numbers.lag_events) == (20, 2000)
    note_latest(numbers, {("orders", 0): 6}, NOW)
    assert (numbers.lag_messages, numbers.lag_seconds) == (0, 0.0)


def test_rows_out_are_counted_if_the_sink_does_not_report_them() -> None:
    numbers = Numbers()
    observed = {OUTPUT_METRIC: {"rows": 4}}
    note_progress(numbers, report(sink={"numOutputRows": -1}, observedMetrics=observed), NOW)
    assert numbers.rows_out == 4


def test_another_spark_source_has_no_lag() -> None:
    numbers = Numbers()
    source = {"startOffset": "3", "endOffset": {"logOffset": 4}, "latestOffset": {"logOffset": 5}}
    note_progress(numbers, report(sources=[source]), NOW)
    assert numbers.lag_messages is None


def test_an_idle_report_keeps_the_numbers() -> None:
    numbers = Numbers()
    note_progress(numbers, report(), NOW)
    note_progress(numbers, {"batchId": 8, "numInputRows": 0, "sources": []}, NOW)
    assert (numbers.rows_in, numbers.rows_in_per_second, numbers.lag_messages) == (500, 0.0, 3)


def test_pauses_grow_to_a_limit_and_a_completed_batch_resets_them() -> None:
    restarts = Restarts(limit=9)
    pauses = [restarts.failed() for _ in range(9)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert restarts.failed() is None
    restarts.succeeded()
    assert restarts.failed() == 1
    assert restarts.total == 10


def test_a_flow_without_restarts_is_given_up_immediately() -> None:
    assert Restarts(limit=0).failed() is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("boom", "boom"),
        (
            "[STREAM_FAILED] Query x terminated: Job aborted\nTraceback\n"
            '  File "a.py", line 3, in f\npkg.errors.DataLoss: it is gone\n'
            "=== Streaming Query ===\nIdentifier: orders [id = 1]\n",
            "pkg.errors.DataLoss: it is gone",
        ),
        ("[STREAM_FAILED] Query x terminated\n\tat org.x.Y", "Query x terminated"),
        ("", ""),
    ],
)
def test_the_sentence_of_an_error_is_found(text: str, reason: str) -> None:
    assert reason_of(text) == reason
