"""The demo on a sample: two days of real flights, the pipeline killed once, no row different."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.flights.demo import Plan, Show, run


@pytest.mark.timeout(600)
async def test_the_flights_demo_loses_doubles_and_changes_nothing(tmp_path: Path) -> None:
    last: list[Show] = []
    plan = Plan(tmp_path, days=2, seconds=6, patience=400)
    verdicts = await run(plan, lambda show: last.append(show))
    assert [verdict.right for verdict in verdicts] == [True] * 4, verdicts
    flights = len(last[-1].year.flights)
    assert flights > 1000
    assert verdicts[0].events_out == verdicts[1].events_out == flights
    assert any("SIGKILL" in note for note in last[-1].notes)
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 4
