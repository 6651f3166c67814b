"""Whether a subscriber accounts for every message."""

from __future__ import annotations

from typing import Protocol


class Books(Protocol):
    """Counters of a subscriber, asynchronous or blocking."""

    @property
    def received(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def pending(self) -> int: ...


def balanced(counters: Books) -> bool:
    return counters.received == counters.delivered + counters.dropped + counters.pending
