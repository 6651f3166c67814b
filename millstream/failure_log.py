"""An application's own functions: what can be one, and its failures in the log.

A failure is one line, at a limited rate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from millstream.errors import ConfigError

__all__ = ["FailureLog", "check_handler"]

# What a person can read. A function that fails on every event would fill the disk otherwise.
LINES_AT_ONCE: Final = 100
LINES_PER_SECOND: Final = 10.0


class FailureLog:
    """Warns of the failures of one handler, with traceback; beyond the rate they are counted."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lines = float(LINES_AT_ONCE)  # that may be written now
        self._since = clock()
        self._left_out = 0

    def warn(self, error: BaseException | None, text: str, *values: object) -> None:
        """Write a line, and the traceback of the error if there is one."""
        now = self._clock()
        self._lines += (now - self._since) * LINES_PER_SECOND
        self._lines, self._since = min(self._lines, float(LINES_AT_ONCE)), now
        if self._lines < 1:
            self._left_out += 1
            return
        self._lines -= 1
        if self._left_out:
            text, values = f"{text} (%d failures before were not logged)", (*values, self._left_out)
            self._left_out = 0
        self._log.warning(text, *values, exc_info=error)


def check_handler(handler: object) -> None:
    """Refuse what cannot be called before it fails on every event, again and again."""
    if not callable(handler):
        found = getattr(handler, "__name__", None)  # of a coroutine: the function that was called
        passed = f"pass {found} instead of {found}(...)" if found else "pass a function"
        raise ConfigError(f"a handler must be a function, found {type(handler).__name__}: {passed}")
