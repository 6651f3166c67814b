"""Failures are logged at a limited rate, and those left out are counted."""

from __future__ import annotations

import logging

import pytest

from millstream.errors import ConfigError
from millstream.failure_log import FailureLog, check_handler


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


async def test_a_handler_that_cannot_be_called_is_refused() -> None:
    async def handle() -> None:
        return None

    check_handler(handle)
    coroutine = handle()
    with pytest.raises(ConfigError, match=r"found coroutine: pass handle instead of handle\("):
        check_handler(coroutine)
    await coroutine
    with pytest.raises(ConfigError, match=r"must be a function, found NoneType: pass a function$"):
        check_handler(None)
