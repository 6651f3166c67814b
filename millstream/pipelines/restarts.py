"""When a failing flow is tried again, and when it is given up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Restarts"]

FIRST_SECONDS: Final = 1.0
# A broker or database that is away for a while is back by then; longer waits only add to the lag.
MOST_SECONDS: Final = 60.0


@dataclass(slots=True)
class Restarts:
    """Counts failures that follow each other; a completed batch in between begins anew.

    >>> restarts = Restarts(limit=2)
    >>> restarts.failed(), restarts.failed(), restarts.failed()
    (1.0, 2.0, None)
    """

    limit: int  # failures one after the other that are answered with a restart
    in_row: int = 0
    total: int = 0  # restarts since the process started

    def failed(self) -> float | None:
        """Seconds to wait before the next try; None: given up."""
        self.in_row += 1
        if self.in_row > self.limit:
            return None
        self.total += 1
        return float(min(MOST_SECONDS, FIRST_SECONDS * 2 ** min(self.in_row - 1, 10)))

    def succeeded(self) -> None:
        """A batch was completed: what failed before is over."""
        self.in_row = 0
