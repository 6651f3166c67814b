"""When a failing flow is restarted, and when it stays stopped. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Restarts"]

FIRST_SECONDS: Final = 1.0
# An outage of a broker or database is usually shorter; longer waits only add to the lag.
MOST_SECONDS: Final = 60.0


@dataclass(slots=True)
class Restarts:
    """Counts failures in a row; a completed batch resets the count.

    >>> restarts = Restarts(limit=2)
    >>> restarts.failed(), restarts.failed(), restarts.failed()
    (1.0, 2.0, None)

    A failure with a mark is one that the same rows cause again. With the same mark twice in a row
    it is final: Spark has also retried the task each time.

    >>> restarts = Restarts(limit=5)
    >>> restarts.failed("1 / 0 in batch 7"), restarts.failed("1 / 0 in batch 7")
    (1.0, None)
    """

    limit: int  # restarts in a row before the flow is given up
    in_row: int = 0
    total: int = 0  # restarts since the process started
    mark: str | None = None  # of the last failure

    def failed(self, mark: str | None = None) -> float | None:
        """Seconds to wait before the restart; None: do not restart the flow."""
        again = mark is not None and mark == self.mark
        self.mark = mark
        self.in_row += 1
        if again or self.in_row > self.limit:
            return None
        self.total += 1
        return float(min(MOST_SECONDS, FIRST_SECONDS * 2 ** min(self.in_row - 1, 10)))

    def succeeded(self) -> None:
        """A batch was completed: failures before it no longer count."""
        self.in_row, self.mark = 0, None
