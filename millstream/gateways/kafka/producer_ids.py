"""Ids of idempotent producers: each is given out once, for ever."""

from __future__ import annotations

import asyncio
from typing import Final

from millstream.errors import PublishError, WrongSequence
from millstream.gateways.kafka.own_tables import own_table
from millstream.mill import Mill
from millstream.tables import Table

__all__ = ["STATE_TABLE", "ProducerIds"]

STATE_TABLE: Final = "kafka-state"
_KEY: Final = "producer-ids"
_BLOCK: Final = 1000  # ids that are reserved with one write; those left at a stop are skipped
_ATTEMPTS: Final = 20  # of a write that another gateway was faster with


class ProducerIds:
    """Gives out producer ids from blocks that are reserved in the broker by compare-and-set."""

    def __init__(self, mill: Mill) -> None:
        self._mill = mill
        self._table: Table | None = None
        self._lock = asyncio.Lock()
        self._next = self._end = 0

    async def new(self) -> int:
        """An id that no producer has or had."""
        async with self._lock:
            if self._next >= self._end:
                await self._reserve()
            self._next += 1
            return self._next - 1

    async def _reserve(self) -> None:
        if self._table is None:
            self._table = await own_table(self._mill, STATE_TABLE)
        for _ in range(_ATTEMPTS):
            entry = await self._table.get(_KEY)
            start = 1 if entry is None else int(entry.json()["next"])
            revision = 0 if entry is None else entry.revision
            try:
                await self._table.put(_KEY, {"next": start + _BLOCK}, revision=revision)
            except WrongSequence:
                continue
            self._next, self._end = start, start + _BLOCK
            return
        raise PublishError(
            f"no block of producer ids could be reserved in table '{STATE_TABLE}': other gateways "
            f"were faster {_ATTEMPTS} times. Try again"
        )
