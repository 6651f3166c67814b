"""Fetches the items of an asynchronous iterator ahead of a reader in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, Generic, TypeVar

__all__ = ["AHEAD_ITEMS", "Pump"]

T = TypeVar("T")

# Items that wait for the reader. A thread switch costs about 50 us, so 0.1 us for each item; and
# for a reader that stops early no more than this is fetched for nothing.
AHEAD_ITEMS: Final = 512


class Pump(Generic[T]):
    """Runs on the loop: collects items of an iterator until `ahead` of them wait."""

    def __init__(self, items: AsyncIterator[T], ahead: int) -> None:
        self._iterator = items
        self._ahead = ahead
        self._items: list[T] = []
        self._filled = asyncio.Event()  # there are items to take, or it ended
        self._space = asyncio.Event()
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            async for item in self._iterator:
                self._items.append(item)
                # The reader wakes up when this task waits next, and then takes all items.
                if len(self._items) == 1:
                    self._filled.set()
                if len(self._items) >= self._ahead:
                    self._space.clear()
                    await self._space.wait()
        finally:
            try:
                if isinstance(self._iterator, AsyncGenerator):
                    await self._iterator.aclose()
            finally:
                self._ended = True
                self._filled.set()

    async def take(self) -> list[T]:
        """The items collected so far, waiting for the first; none at the end."""
        await self._filled.wait()
        items, self._items = self._items, []
        if not items:
            await self._task  # raises the error that ended it
            return []
        if not self._ended:
            self._filled.clear()
        self._space.set()
        return items

    def stop(self) -> None:
        """The reader is gone: stop, and ignore errors."""
        self._task.cancel()
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
