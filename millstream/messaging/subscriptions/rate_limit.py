"""A rate limit: a maximum number of events per second."""

from __future__ import annotations

import asyncio

__all__ = ["RateLimit"]


class RateLimit:
    """Lets events pass at a fixed rate, with bursts of at most one second's worth."""

    __slots__ = ("_free_at", "_loop", "_rate")

    def __init__(self, per_second: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._rate = per_second
        self._free_at = self._loop.time() - 1.0  # a first second's worth is free

    async def wait(self, count: int = 1) -> None:
        """Return when `count` more events may pass."""
        now = self._loop.time()
        self._free_at = max(self._free_at, now - 1.0) + count / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
