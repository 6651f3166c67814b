"""Writing a table: upserts and deletes by key, as plain messages beside a fence.

A table keeps the last message of each key, so its rows cannot be packs. A task's rows are stored in
atomic groups whose last message is the fence. An attempt that finds its batch complete stores
nothing; one that finds it started writes its rows again: the same keys get the same values, so the
table is right, and its followers may see a change twice. Of two attempts that write side by side
the one that started last goes on: the other fails when its next group is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from millstream.errors import ConfigError, FencedOut, Unfit
from millstream.events.classify import NULL_HEADER
from millstream.events.event import SCHEMA_HEADER
from millstream.events.fence import fence_subject
from millstream.events.fence_writer import RACES_MAX
from millstream.events.subject import key_token
from millstream.spark.broker_access import connection_to
from millstream.spark.sink.chain import Fence, Note
from millstream.spark.sink.sink_rows import enveloped, partitioned
from millstream.spark.sink.targets import Target
from millstream.spark.sink.task_sink import TaskRows
from millstream.wire.batch import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers

__all__ = ["write_table"]

GROUP_ROWS: Final = BATCH_MESSAGES_MAX - 1  # one message of a group is the fence
GROUP_BYTES: Final = BATCH_BYTES_MAX // 4


class _Values:
    """Rows of the column `value` as payloads in the table's wire format."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._encode: Callable[[Any], bytes] | None = None
        if target.schema is not None:
            from millstream.schemas import Conformer, RowReader, make_codec

            schema = target.schema.latest
            self._conformer = Conformer(schema.record)
            self._rows = RowReader(schema.record)
            self._encode = make_codec(schema, target.schema.format).encode

    def payloads(self, column: pa.Array) -> Iterator[bytes | None]:
        target = self._target
        if self._encode is None:
            if pa.types.is_struct(column.type):
                raise ConfigError(
                    f"table '{target.topic}' has no schema, so its values are bytes or text: "
                    f"write to_json(value) AS value, or declare the table with a schema"
                )
            yield from column.cast(pa.binary()).to_pylist()
            return
        if not pa.types.is_struct(column.type):
            raise ConfigError(
                f"table '{target.topic}' has a schema: give the value as a struct of its fields, "
                f"struct(...) AS value, not as {column.type}"
            )
        present = column.is_valid().to_pylist()
        rows = iter(self._rows.read(self._conformer.conform(column.drop_null())))
        for has_value in present:
            yield self._encode(next(rows)) if has_value else None


class _Group:
    """Messages of one partition that are stored together."""

    def __init__(self, fence: Fence, batch: int) -> None:
        self._fence = fence
        self._batch = batch
        self._state = fence.begin()
        self._note = Note(batch)
        self._messages: list[OutgoingMessage] = []
        self._bytes = 0

    @property
    def complete(self) -> bool:
        return self._state.position > self._batch

    def add(self, message: OutgoingMessage) -> None:
        size = len(message.payload) + len(message.headers)
        if len(self._messages) >= GROUP_ROWS or self._bytes + size > GROUP_BYTES:
            self.store(final=False)
        self._messages.append(message)
        self._bytes += size

    def store(self, final: bool) -> None:
        messages, self._messages, self._bytes = self._messages, [], 0
        note = self._note
        crc = note.crc
        for message in messages:
            crc = zlib.crc32(message.payload, zlib.crc32(message.subject + message.headers, crc))
        self._note = Note(self._batch, note.unit + 1, note.rows + len(messages), crc)
        for _ in range(RACES_MAX):
            if self.complete:
                return
            position = self._batch + 1 if final else self._batch
            offer = self._fence.offer(self._state.next(position, str(self._note)), [], messages)
            if offer.is_stored:
                self._state = offer.state
                return
            self._state = self._fence.begin()
            if note.unit and not self.complete:
                break  # another attempt writes older values of our keys again: it has to finish
        raise FencedOut(self._fence.writer)


def write_table(rows: TaskRows, batches: Iterable[pa.RecordBatch], writer: str, batch: int) -> int:
    """Store a task's upserts and deletes; returns the number of rows."""
    target = rows.target
    if target is None or not target.is_table:
        raise ConfigError(
            f"'{rows.options.topic}' keeps every event, so it is not a table: write to it with "
            f"the option 'topic'"
        )
    if not target.atomic:
        raise ConfigError(f"table '{target.topic}' must allow atomic batches to be written to")
    values = _Values(target)
    groups: dict[int, _Group] = {}
    total = 0
    for given in batches:
        total += given.num_rows
        if given.column("key").null_count:
            raise Unfit("key", "a key in every row of a table", "null")
        payloads = pa.array(list(values.payloads(given.column("value"))), pa.binary())
        column = given.schema.get_field_index("value")
        events = enveloped(given.set_column(column, "value", payloads).select(["key", "value"]))
        for number, some in partitioned(events, None, target.partitions, rows.task):
            if number not in groups:
                subject = fence_subject(target.prefixes[number], writer)
                connection = connection_to(rows.settings)
                fence = Fence(connection, target.streams[number], subject, writer)
                groups[number] = _Group(fence, batch)
            for message in _messages(target, number, some):
                groups[number].add(message)
    for number in sorted(groups):
        groups[number].store(final=True)
    return total


def _messages(target: Target, number: int, rows: pa.RecordBatch) -> Iterator[OutgoingMessage]:
    prefix = target.prefixes[number]
    pairs = [] if target.schema is None else [(SCHEMA_HEADER, target.schema.latest_id)]
    block, gone = encode_headers(pairs), encode_headers([*pairs, (NULL_HEADER, "1")])
    keys, values = rows.column("key").to_pylist(), rows.column("value").to_pylist()
    for key, value in zip(keys, values, strict=True):
        subject = f"{prefix}.{key_token(key)}".encode()
        yield OutgoingMessage(subject, gone if value is None else block, value or b"")
