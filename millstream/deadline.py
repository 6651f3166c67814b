"""One time budget for a chain of calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from time import clock_gettime
from typing import Final

__all__ = ["Deadline", "lease_clock", "now_ns"]

_LEASE_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ns() -> int:
    """Wall-clock time in nanoseconds since 1970 (UTC): for event times, never for timeouts."""
    return time.time_ns()


def lease_clock() -> float:
    """Seconds that pass also while the machine sleeps, where the system has such a clock."""
    return clock_gettime(_LEASE_CLOCK)


class Deadline:
    """A time limit that is passed down a call chain; every wait uses what is left.

    >>> deadline = Deadline(2.5)
    >>> deadline.left() <= 2.5
    True
    >>> Deadline(0).passed
    True
    """

    __slots__ = ("_clock", "_end", "seconds")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds >= 0:  # also refuses NaN
            raise ValueError(f"a deadline needs zero seconds or more, not {seconds!r}")
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self, at_most: float | None = None) -> float:
        """Seconds left, never negative, and at most `at_most` when that is given."""
        left = max(0.0, self._end - self._clock())
        return left if at_most is None else min(left, at_most)

    @property
    def passed(self) -> bool:
        return self._clock() >= self._end

    def __repr__(self) -> str:
        return f"Deadline({self.left():.3f} s left of {self.seconds:g})"
