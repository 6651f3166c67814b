"""Fetches the items of an asynchronous iterator ahead of a reader in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, Generic, TypeVar

__all__ = ["AHEAD_ITEMS", "Pump"]

T = TypeVar("T")

# Items that wait for the reader. A hop between threads costs some 50 us, so a tenth of one each;
# and a reader that stops early has had no more than this fetched in vain.
AHEAD_ITEMS: Final = 512


class Pump(Generic[T]):
    """Runs on the loop: collects what the source gives without waiting, and waits for room."""

    def __init__(self, source: AsyncIterator[T], ahead: int) -> None:
        self._source = source
        self._ahead = ahead
        self._items: list[T] = []
        self._filled = asyncio.Event()  # there is something to take, or the end
        self._room = asyncio.Event()
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            async for item in self._source:
                self._items.append(item)
                # The reader wakes up when this task waits next, and so takes all there is.
                if len(self._items) == 1:
                    self._filled.set()
                if len(self._items) >= self._ahead:
                    self._room.clear()
                    await self._room.wait()
        finally:
            try:
                if isinstance(self._source, AsyncGenerator):
                    await self._source.aclose()
            finally:
                self._ended = True
                self._filled.set()

    async def take(self) -> list[T]:
        """The items that are here, waiting for the first; none at the end of the source."""
        await self._filled.wait()
        items, self._items = self._items, []
        if not items:
            await self._task  # raises what ended the source
            return []
        if not self._ended:
            self._filled.clear()
        self._room.set()
        return items

    def stop(self) -> None:
        """The reader is gone, and what ends the source now is nobody's business."""
        self._task.cancel()
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
