"""Failures are logged at a limited rate, and those left out are counted."""

from __future__ import annotations

import logging

import pytest

from millstream.failure_log import FailureLog


def test_lines_beyond_the_rate_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = FailureLog(logging.getLogger("millstream.messaging"), lambda: now)
    for number in range(150):
        failures.warn(ValueError(number), "event %d failed", number)
    assert len(caplog.records) == 100
    now = 0.1
    failures.warn(None, "event %d failed", 150)
    failures.warn(None, "event %d failed", 151)
    assert len(caplog.records) == 101
    last = caplog.records[-1]
    assert last.getMessage() == "event 150 failed (50 failures before were not logged)"
    assert last.exc_info is None
    now = 1000.0
    for number in range(150):
        failures.warn(None, "event %d failed", number)
    assert len(caplog.records) == 201
    assert "1 failures before" in caplog.records[101].getMessage()
