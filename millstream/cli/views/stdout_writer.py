"""Writes to stdout from a coroutine: immediately while little comes, in bulk when much does."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from millstream.closing import AsyncClosing

__all__ = ["StdoutWriter"]

BULK_BYTES: Final = 64 * 1024  # what a pipe holds
LATEST_SECONDS: Final = 0.02  # too short for a person to notice


class StdoutWriter(AsyncClosing):
    """Writes in a thread, so that a slow reader of the pipe never stops the connection.

    Use it as `async with`. When the reader is gone (`| head`), the task that writes is stopped and
    BrokenPipeError is raised, also while it waits for the next event.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._later: asyncio.Task[None] | None = None
        self._error: OSError | None = None

    async def _leave(self, error: BaseException | None) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._error is None and self._parts:
            await self.flush()
        if self._error is not None:
            raise self._error

    async def write(self, line: bytes) -> None:
        """Add bytes to the output; the line end is the caller's."""
        if self._error is not None:
            raise self._error
        self._parts.append(line)
        self._size += len(line)
        if self._size >= BULK_BYTES:
            await self.flush()
        elif self._later is None or self._later.done():
            self._later = self._loop.create_task(self._flush_later())

    async def flush(self) -> None:
        """Return when everything written so far has been handed to the reader."""
        async with self._lock:
            text = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if text:
                await asyncio.to_thread(_put, text)

    async def _flush_later(self) -> None:
        await asyncio.sleep(LATEST_SECONDS)
        try:
            await self.flush()
        except OSError as error:
            self._error = error
            if self._owner is not None:
                self._owner.cancel()


def _put(text: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
