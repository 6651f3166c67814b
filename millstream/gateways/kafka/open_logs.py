"""The partitions that are open: each once, and closed before it is opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from millstream.gateways.kafka.kafka_topic import KafkaTopic, UnknownTopic

if TYPE_CHECKING:
    from millstream.gateways.kafka.partition_log import PartitionLog

__all__ = ["MakeLog", "OpenLogs"]

_log = logging.getLogger("millstream.gateways.kafka")

MakeLog = Callable[[KafkaTopic, int], "Awaitable[PartitionLog]"]
_Key = tuple[str, int]  # Kafka's name of the topic, and the partition


@dataclass(frozen=True, slots=True)
class _Open:
    """A partition that is open, or is being opened."""

    id: UUID  # of its topic
    task: asyncio.Task[PartitionLog]

    @property
    def log(self) -> PartitionLog | None:
        task = self.task
        done = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if done else None

    def usable(self, log: PartitionLog | None) -> bool:
        """Whether it, with this log, need not be opened again."""
        return not self.task.done() if log is None else not log.failed


class OpenLogs:
    """Opens partitions when they are asked for. There are no more than the broker has."""

    def __init__(self, make_log: MakeLog) -> None:
        self._make_log = make_log
        self._logs: dict[str, dict[int, _Open]] = {}  # by topic and partition
        self._closing: dict[_Key, asyncio.Task[None]] = {}
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._logs.values()))

    @property
    def names(self) -> list[str]:
        """The topics that have open partitions."""
        return list(self._logs)

    async def get(self, topic: KafkaTopic, index: int) -> PartitionLog:
        """An open partition; UnknownTopic if it is closed again while it is being opened."""
        key = topic.name, index
        if self._closed:
            raise UnknownTopic(topic.name)
        opened = self._logs.get(topic.name, {}).get(index)
        log = None if opened is None else opened.log
        if opened is not None and (opened.id != topic.id or not opened.usable(log)):
            self._drop(key)
            opened = log = None
        if opened is None:
            task = asyncio.get_running_loop().create_task(self._open(topic, index))
            task.add_done_callback(_seen)
            opened = self._logs.setdefault(topic.name, {})[index] = _Open(topic.id, task)
        if log is None:
            try:
                log = await asyncio.shield(opened.task)
            except asyncio.CancelledError:
                if opened.task.cancelled():  # by `close`
                    raise UnknownTopic(topic.name) from None
                raise
            if self._logs.get(topic.name, {}).get(index) is not opened:
                raise UnknownTopic(topic.name)
        return log

    def opened(self, name: str, index: int) -> PartitionLog | None:
        """A partition if it is open now."""
        found = self._logs.get(name, {}).get(index)
        return None if found is None else found.log

    def drop(self, name: str, keep: UUID | None = None) -> None:
        """Close what is open of a topic, unless it is of this one."""
        for index, opened in list(self._logs.get(name, {}).items()):
            if opened.id != keep:
                self._drop((name, index))

    async def wait_closed(self, name: str) -> None:
        """Return when what was dropped of a topic is closed."""
        closing = [task for key, task in self._closing.items() if key[0] == name]
        if closing:
            await asyncio.wait(closing)

    async def close(self) -> None:
        """Close all; none can be opened any more."""
        self._closed = True
        for name, logs in list(self._logs.items()):
            for opened in logs.values():
                opened.task.cancel()  # if it is not open yet
            self.drop(name)
        while self._closing:
            await asyncio.wait(list(self._closing.values()))

    async def _open(self, topic: KafkaTopic, index: int) -> PartitionLog:
        before = self._closing.get((topic.name, index))
        if before is not None:  # they have the same checkpoint
            await asyncio.wait([before])
        return await self._make_log(topic, index)

    def _drop(self, key: _Key) -> None:
        name, index = key
        opened, before = self._logs[name].pop(index), self._closing.get(key)
        if not self._logs[name]:
            del self._logs[name]
        task = asyncio.get_running_loop().create_task(_close(key, opened, before))
        self._closing[key] = task

        def closed(task: asyncio.Task[None]) -> None:
            if self._closing.get(key) is task:
                del self._closing[key]

        task.add_done_callback(closed)


async def _close(key: _Key, opened: _Open, before: asyncio.Task[None] | None) -> None:
    if before is not None:
        await asyncio.wait([before])
    await asyncio.wait([opened.task])
    log = opened.log
    if log is None:
        return  # it was not opened; who waits for it has the error
    try:
        await log.close()
    except Exception as error:
        _log.warning("partition %d of '%s' was not closed cleanly: %s", key[1], key[0], error)


def _seen(task: asyncio.Task[PartitionLog]) -> None:
    """The error of a task that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()
