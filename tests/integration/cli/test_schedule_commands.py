"""`millstream schedule`: set, list, show, remove."""

from __future__ import annotations

import pytest

from tests.integration.cli.messaging_commands import Commands


@pytest.fixture
def run(millstream_url: str) -> Commands:
    return Commands(millstream_url)


def test_a_schedule_is_set_replaced_listed_shown_and_removed(run: Commands) -> None:
    run("topic", "create", "jobs", "--schedules")
    once = run.json("schedule", "set", "jobs", "nightly", "x", "--at", "2099-01-02T03:04:05+01:00")
    assert once["next"] == "2099-01-02T02:04:05Z"
    cron = ("--cron", "0 3 * * *", "--time-zone", "Europe/Berlin")
    made = run.json("schedule", "set", "jobs", "nightly", "go", *cron, "-k", "b", "-H", "own: 1")
    assert made == {
        "name": "nightly",
        "rule": "0 0 3 * * *",
        "time_zone": "Europe/Berlin",
        "next": None,
        "key": "b",
        "value": "go",
        "headers": {"own": "1"},
        "partition": 0,
    }
    assert run.json("schedule", "ls", "jobs") == [made]
    assert run.json("schedule", "info", "jobs", "nightly") == made
    assert "0 0 3 * * *" in run("schedule", "ls", "jobs")
    assert "Europe/Berlin" in run("schedule", "info", "jobs", "nightly")
    assert "did you mean 'nightly'?" in run.error("schedule", "rm", "jobs", "nightli", "--yes")
    assert "Removed" in run("schedule", "rm", "jobs", "nightly", "--yes")
    assert run.json("schedule", "ls", "jobs") == []
    assert "no schedules" in run("schedule", "ls", "jobs")


def test_what_is_missing_is_said(run: Commands) -> None:
    run("topic", "create", "plain")
    says = run.error("schedule", "set", "plain", "s", "x", "--every", "1h")
    assert "topic edit plain --schedules" in says
    says = run.error("schedule", "set", "plain", "s", "x", "--at", "tomorrow")
    assert "2026-01-31T12:00:00Z, or as a duration: 10m" in says
    assert "one of --every, --cron and --at" in run.error("schedule", "set", "plain", "s", "x")
    assert "Use 'a-b'" in run.error("schedule", "set", "plain", "a.b", "x", "--every", "1h")
