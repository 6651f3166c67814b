"""The partitions that may hold the events of a key.

Every client of Millstream puts a key in the partition that `partition_of` gives. Clients of Kafka
may choose others. The gateway notes that in the settings of the topic, also while it is open here,
so they are looked at again from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from millstream.events.event import Partition
from millstream.events.subject import partition_of
from millstream.messaging.topics.stream_config import from_stream_config
from millstream.wire.aio.jetstream import JetStream

__all__ = ["KeyPlaces"]

# How long settings that were looked up are relied on.
LOOK_SECONDS: Final = 5.0


class KeyPlaces:
    """Where the keys of an open topic are."""

    def __init__(
        self, jetstream: JetStream, partitions: Sequence[Partition], at_home: bool
    ) -> None:
        self._jetstream = jetstream
        self._partitions = partitions
        self._at_home = at_home
        self._look_at: float | None = None  # when to look at the settings again, by the loop's time

    async def of(self, key: str) -> Sequence[Partition]:
        """The partitions that may hold a key."""
        if not await self.at_home():
            return self._partitions
        return (self._partitions[partition_of(key, len(self._partitions))],)

    async def at_home(self) -> bool:
        """Whether each key is in the partition that `partition_of` gives; once False, always."""
        if not self._at_home or len(self._partitions) == 1:
            return self._at_home
        now = asyncio.get_running_loop().time()
        if self._look_at is None or now >= self._look_at:
            info = await self._jetstream.stream_info(self._partitions[0].stream)
            self._at_home = from_stream_config(info.config).keys_at_home
            self._look_at = now + LOOK_SECONDS
        return self._at_home
