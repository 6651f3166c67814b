"""One Fetch: what the partitions have now, or as soon as one of them has something."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.deadline import Deadline
from millstream.errors import MillstreamError
from millstream.gateways.kafka.batch_cache import Piece
from millstream.gateways.kafka.partition_log import OutOfRange, PartitionLog
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.wire.aio.pull_consumer import Signal

__all__ = ["Fetch", "Wanted"]

_log = logging.getLogger("millstream.gateways.kafka")


@dataclass(slots=True)
class Wanted:
    """A partition of a Fetch: what is asked, and what is found."""

    topic: str
    partition: int
    offset: int
    log: PartitionLog | None
    error: ErrorCode
    max_bytes: int = 0
    records: Sequence[Piece] = ()
    size: int = 0  # of the records


class Fetch:
    """Reads until there are `min_bytes`, an error, or the time is up."""

    def __init__(self, wanted: Sequence[Wanted], min_bytes: int, max_bytes: int) -> None:
        self._wanted = wanted
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._changed = Signal()

    async def run(self, max_seconds: float) -> None:
        """Fill in what is found."""
        logs = {id(one.log): one.log for one in self._wanted if one.log is not None}
        for log in logs.values():
            log.watch(self._changed.set)
        try:
            deadline = Deadline(max_seconds)
            while not (await self._read() or deadline.passed):
                await self._changed.wait(deadline.left())
        finally:
            for log in logs.values():
                log.unwatch(self._changed.set)

    async def _read(self) -> bool:
        """Whether there is enough to answer."""
        total = 0
        for one in self._wanted:
            one.records, one.size = (), 0
            if one.log is not None and total < self._max_bytes:
                await self._read_one(one, min(one.max_bytes, self._max_bytes - total))
                total += one.size
        failed = any(one.error is not ErrorCode.none for one in self._wanted)
        return failed or total >= self._min_bytes

    async def _read_one(self, one: Wanted, max_bytes: int) -> None:
        log = one.log
        if log is None:
            return
        if log.failed:
            one.error = ErrorCode.not_leader_or_follower  # the next request opens it again
            return
        if one.offset == log.end_offset:
            return
        try:
            one.records = await log.read(one.offset, max_bytes)
            one.size = sum(map(len, one.records))
        except OutOfRange:
            one.error = ErrorCode.offset_out_of_range
        except MillstreamError as error:
            _log.warning("reading %s/%d: %s", one.topic, one.partition, error)
            one.error = ErrorCode.kafka_storage_error
