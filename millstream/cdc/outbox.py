"""The outbox pattern: new rows of a table become events of the topics that they name.

An application writes its events into the outbox in the transaction of its changes; here they are
published, each exactly once and in the order of their commits. Rows that were there before the
capture began are not published, and updates and deletions of rows mean nothing: an application may
delete a row as soon as it has written it.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.model import RowChanges, TableShape
from millstream.cdc.settings import CaptureSettings, OutboxSettings
from millstream.cdc.table_topic import PACKS, IsAfter, writer_name
from millstream.errors import BreakingChange, CaptureError, TopicNotFound
from millstream.events import changes as ch
from millstream.messaging.publishing.writer import Writer
from millstream.mill import Mill

__all__ = ["Outbox"]

TOPICS_MAX: Final = 1_000  # that one outbox may name


class Outbox:
    """Publishes the rows of one outbox table."""

    def __init__(
        self, mill: Mill, settings: CaptureSettings, outbox: OutboxSettings, shape: TableShape
    ) -> None:
        self._mill, self._outbox = mill, outbox
        self._name = f"{writer_name(settings.name)}-{shape.name}"
        self.table = shape.full_name
        self.events = 0
        self._writers: dict[str, Writer] = {}
        self._typed: dict[str, bool] = {}
        self.check(shape)

    def check(self, shape: TableShape) -> None:
        """Refuse a table without the columns that the settings name."""
        outbox, known = self._outbox, {column.name for column in shape.columns}
        wanted = (outbox.topic, outbox.key, outbox.value, outbox.headers, outbox.id)
        for name in wanted:
            if name is not None and name not in known:
                raise BreakingChange(
                    self.table,
                    name,
                    f"the outbox has no such column among {', '.join(sorted(known))}",
                    "Add it, or name another one in [[cdc.outbox]]",
                )

    async def write(self, changes: RowChanges, is_after: IsAfter) -> None:
        """Publish the new rows."""
        self.check(changes.table)
        new = changes.filter(pc.equal(changes.op, ch.CREATE))
        rows = pa.RecordBatch.from_struct_array(new.after).to_pylist() if len(new) else []
        positions = zip(new.commit.to_pylist(), new.place.to_pylist(), strict=True)
        for row, position in zip(rows, positions, strict=True):
            await self._publish(row, position)
        self.events += len(rows)

    async def _publish(self, row: dict[str, Any], position: tuple[int, int]) -> None:
        outbox = self._outbox
        topic = row[outbox.topic]
        if not topic:
            raise CaptureError(
                f"outbox {self.table}: a row at {position} names no topic in column "
                f"'{outbox.topic}'. Every row needs one: make the column NOT NULL"
            )
        writer = self._writers.get(topic) or await self._open(topic)
        value = row[outbox.value]
        if value is not None and self._typed[topic]:
            value = _parsed(value, self.table, outbox.value, position)
        key = row[outbox.key]
        headers = row[outbox.headers] if outbox.headers else None
        await writer.write(
            value,
            key if key is None or isinstance(key, bytes) else str(key),
            position=position,
            headers=None if headers is None else _headers(headers, self.table, position),
            id=None if outbox.id is None else str(row[outbox.id]),
        )

    async def _open(self, name: str) -> Writer:
        if len(self._writers) >= TOPICS_MAX:
            raise CaptureError(
                f"outbox {self.table} names more than {TOPICS_MAX:,} topics: use fewer topics and "
                f"more keys"
            )
        try:
            topic = await self._mill.topic(name)
        except TopicNotFound:
            topic = await self._mill.create_topic(name)
        self._typed[name] = topic.value_type is not None
        writer = topic.writer(self._name, PACKS)
        self._writers[name] = await writer.open()
        return writer

    @property
    def writers(self) -> list[Writer]:
        """Those of the topics that were named since this was opened."""
        return list(self._writers.values())

    async def close(self) -> None:
        """Leave what is not stored unstored: the source sends it again."""
        for writer in self._writers.values():
            await writer.abandon()


def _parsed(value: Any, table: str, column: str, position: tuple[int, int]) -> Any:
    """The value of a row for a topic with a schema."""
    try:
        return json.loads(value)
    except ValueError as error:
        raise CaptureError(
            f"outbox {table}: the row at {position} has no JSON in column '{column}', and its "
            f"topic has a schema: {error}"
        ) from error


def _headers(value: Any, table: str, position: tuple[int, int]) -> dict[str, str]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CaptureError(
            f"outbox {table}: the headers of the row at {position} are not a JSON object of texts"
        )
    return {str(name): str(text) for name, text in found.items()}
