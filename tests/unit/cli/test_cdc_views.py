"""How captures are shown: lines, a bar for each snapshot, lag, and what was applied."""

from __future__ import annotations

import json
import sys

import pytest

from millstream.cdc.model import CaptureLag, Finding
from millstream.cdc.sink.apply import Applied
from millstream.cdc.sink.topic_positions import TopicPosition
from millstream.cdc.status import CaptureState, CaptureStatus, TableStatus
from millstream.cli.views.cdc import (
    CaptureLines,
    applied_record,
    applied_text,
    finding_record,
    lag_text,
    show_findings,
    show_status,
    shown_live,
)

BEHIND = CaptureLag(bytes=2048, seconds=1.25, kept_bytes=3 * 1024**2, budget_bytes=10 * 1024**3)


def status(state: CaptureState = "snapshot", rows: int = 0, events: int = 0) -> CaptureStatus:
    table = TableStatus("public.orders", "orders", "snapshot", rows, 1000, events, "12:1")
    if state == "streaming":
        table.state = "streaming"
    return CaptureStatus("shop", state, "postgresql://***@db", "now", [table], BEHIND)


def test_a_status_is_the_same_after_its_way_as_json() -> None:
    one = status(events=3)
    sent = json.loads(json.dumps(one.to_json()))
    assert CaptureStatus.from_json(sent) == one
    newer = {**sent, "more": 1, "lag": {**sent["lag"], "more": 1}}
    newer["tables"] = [{**newer["tables"][0], "more": 1}]
    assert CaptureStatus.from_json(newer) == one


def test_lag_is_said_in_what_is_known() -> None:
    text = "lag: 2.0 KiB of log behind, 1.2 s behind, the source keeps 3.0 MiB of 10.0 GiB of log"
    assert lag_text(BEHIND) == f"{text} for it"
    assert lag_text(CaptureLag()) == "lag: not known"


def test_lines_are_written_when_something_is_new_and_not_too_often() -> None:
    lines: list[str] = []
    show = CaptureLines(lines.append, pause=3600)
    for one in (status("checking"), status(rows=5), status(rows=6), status("streaming", 7)):
        show(one)
    assert [line.partition(";")[0] for line in lines] == [
        "shop: checking",
        "shop: snapshot, 5 rows of snapshots",
        "shop: streaming, 7 rows of snapshots",
    ]
    often: list[str] = []
    show = CaptureLines(often.append, pause=0)
    for events in (1, 1, 2):
        show(status("streaming", 7, events))
    assert len(often) == 2
    assert "2 changes" in often[1]


def test_a_terminal_has_a_bar_for_each_snapshot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with shown_live(quiet=False, as_json=False) as watch:
        for one in (status("checking"), status(rows=500), status("streaming", 1000, 3)):
            watch(one)
    shown = capsys.readouterr().out
    assert "snapshot of public.orders" in shown
    assert "1000/1000" in shown


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_live(quiet=False, as_json=True) as watch:
        watch(status())
    with shown_live(quiet=True, as_json=False) as watch:
        watch(status())
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["tables"][0]["topic"] == "orders"


def test_alarms_and_errors_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    one = status(rows=500)
    one.alarms, one.error = ["the log is nearly full"], "it is away"
    show_status(one)
    shown = capsys.readouterr().out
    assert "ALARM: the log is nearly full" in shown
    assert "last error: it is away" in shown
    assert "500 of about 1,000" in shown


def test_findings_have_their_fix_below(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Finding("a", True, "fine", "not shown"),
        Finding("b", False, "missing", "ALTER"),
        Finding("c", False, "odd", fatal=False),
    ]
    show_findings(found)
    assert capsys.readouterr().out == (
        "ok       a: fine\nMISSING  b: missing\n         -> ALTER\nwarning  c: odd\n"
    )
    assert [finding_record(one)["result"] for one in found] == ["ok", "error", "warning"]


def test_what_was_applied_is_counted() -> None:
    done = Applied(5, 4, 2, 0, 1, {0: TopicPosition(7, 3)})
    assert applied_text("orders", done) == (
        "orders: applied 5 events, 4 rows in 2 transactions, 1 retries"
    )
    assert applied_record("orders", done)["next"] == {"0": {"offset": 7, "index": 3}}
