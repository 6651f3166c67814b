"""Stores imported rows: with a fenced writer that stores each once, or in a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from millstream.closing import AsyncClosing
from millstream.errors import ConfigError
from millstream.messaging import NewEvent, Topic
from millstream.wire.protocol import unique_token

if TYPE_CHECKING:
    from millstream.messaging.publishing.writer import Writer

__all__ = ["RowWriter", "open_writer", "writer_name"]

Rows = Sequence[tuple[int, NewEvent]]  # the row's number, from 1, and its event


class RowWriter(AsyncClosing):
    """Stores groups of rows in the order in which they are given."""

    first = 1  # the first row that is not stored yet

    async def _leave(self, error: BaseException | None) -> None:
        return None

    @abstractmethod
    async def write(self, rows: Rows) -> int:
        """Store all of them; return how many had been stored before."""


def writer_name(name: str | None) -> str:
    """The writer of an import; without a name it cannot be continued."""
    if name is None:
        return f"import-{unique_token(16)}"
    return f"import-{blake2b(name.encode(), digest_size=8).hexdigest()}"


def open_writer(topic: Topic, name: str | None) -> RowWriter:
    """A fenced writer if the topic takes packs, else one for tables, where the last row counts."""
    if topic.settings.takes_packs:
        return FencedRows(topic, writer_name(name))
    if topic.settings.history is None:
        raise ConfigError(
            f"topic '{topic.name}' was created with packs=False, and an import writes packs, by "
            f"which it knows what is stored. Import into a topic that takes them; from there "
            f"'millstream topic replay' publishes single events"
        )
    return TableRows(topic)


class FencedRows(RowWriter):
    """Exactly once: the row's number is the position under the writer's fence."""

    def __init__(self, topic: Topic, name: str) -> None:
        self._writer: Writer = topic.writer(name)
        self._topic = topic.name
        self.first = 1

    async def _enter(self) -> None:
        await self._writer.open()
        stored = self._writer.position
        if not isinstance(stored, int):
            raise ConfigError(
                f"writer '{self._writer.name}' of topic '{self._topic}' has stored {stored}, a "
                f"pair of another program, and an import counts rows. Choose another writer name"
            )
        self.first = stored + 1

    async def _leave(self, error: BaseException | None) -> None:
        await self._writer.abandon()  # every group was flushed

    async def write(self, rows: Rows) -> int:
        writer, before = self._writer, self._writer.skipped
        for number, event in rows:
            await writer.write(
                event.value,
                event.key,
                position=number,
                headers=event.headers,
                timestamp=event.timestamp,
                id=event.id,
            )
        await writer.flush()
        return writer.skipped - before


class TableRows(RowWriter):
    """A table keeps the last value of each key, so rows given again change nothing."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    async def write(self, rows: Rows) -> int:
        await self._topic.publish_many(event for _, event in rows)
        return 0
