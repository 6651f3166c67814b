"""From messages of an event store to record batches: one row for each event.

Works on columns of messages and of lines; Python handles single ones only if something about them
is unusual. What is read is what `event_store.messages` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream.errors import Undecodable
from millstream.event_store.format import (
    CAUSATION_HEADER,
    CORRELATION_HEADER,
    STORED_HEADER,
    VERSIONS_HEADER,
    join_lines,
    read_versions,
    split_lines,
)
from millstream.event_store.ids import id_of
from millstream.events.classify import (
    FOR_HEADER,
    MARKER_HEADER,
    NULL_HEADER,
    PACK_HEADER,
    check_whole,
)
from millstream.events.event import TIME_HEADER, event_ns
from millstream.events.undecodable import reason_of
from millstream.spark.source.columns import user_headers
from millstream.spark.source.event_columns import KnownEvents
from millstream.spark.source.event_lines import EventLines, joined_payloads, joined_texts
from millstream.spark.source.event_schema import event_columns
from millstream.spark.source.frames import Frames
from millstream.spark.source.header_lines import HeaderLines, numbers_at
from millstream.spark.source.offsets import PartitionState
from millstream.spark.source.values import fitted
from millstream.wire.protocol import HEADERS_END, parse_headers

__all__ = ["EventRows"]

_UNDERSCORE: Final = 95
_ESCAPE: Final = 61  # before a character that a subject cannot have
_TIME: Final = pa.timestamp("us", "UTC")
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_FOREIGN: Final = "it was not written by an event store"
_DELETED: Final = "Deleted"


class EventRows:
    """Turns the messages of one partition of a store into record batches of one schema."""

    def __init__(
        self, schema: pa.Schema, partition: PartitionState, known: KnownEvents, undecodable: str
    ) -> None:
        self.schema = schema
        self.dropped = 0
        self.first_dropped = ""
        self._partition = partition
        self._known = known
        self._events = event_columns(known.snapshot)
        self._policy = undecodable
        self._prefix_size = 0 if partition.prefix is None else len(partition.prefix.encode()) + 1

    def of(self, frames: Frames) -> Iterator[pa.RecordBatch]:
        """The rows of some messages, in order."""
        messages = Appends(frames, self._prefix_size)
        if not messages.count:
            return
        lines = messages.lines(self._known)
        rows = _Rows(messages, lines, self._known)
        columns = {
            field.name: rows.events_column(self._events[field.name], field.type)
            for field in self.schema
            if field.name in self._events
        }
        if rows.reasons and self._policy == "fail":
            row = min(rows.reasons)
            where = (int(rows.offsets()[row]), int(rows.index[row]))
            raise Undecodable(*self._partition.topic_partition, *where, rows.reasons[row])
        arrays = []
        for field in self.schema:
            if field.name in columns:
                arrays.append(columns[field.name])
            elif field.name == "partition":
                number = pa.scalar(self._partition.partition, pa.int32())
                arrays.append(pa.repeat(number, rows.count))
            else:
                arrays.append(fitted(_MAKE[field.name](rows), field.type))
        batch = (
            pa.RecordBatch.from_arrays(arrays, schema=self.schema)
            if arrays
            else pa.RecordBatch.from_struct_array(pa.array([{}] * rows.count, pa.struct([])))
        )
        yield self._without_dropped(batch, rows)

    def _without_dropped(self, batch: pa.RecordBatch, rows: _Rows) -> pa.RecordBatch:
        if not rows.reasons or self._policy != "drop":
            return batch
        self.dropped += len(rows.reasons)
        row = min(rows.reasons)
        offset = int(rows.offsets()[row])
        self.first_dropped = self.first_dropped or f"offset {offset}: {rows.reasons[row]}"
        keep = np.ones(rows.count, bool)
        keep[list(rows.reasons)] = False
        return batch.filter(pa.array(keep))


def _damaged(frames: Frames, prefix_size: int) -> Any:
    """Which messages have a subject without a key, or headers without an end."""
    short = frames.subject_end <= frames.subject + prefix_size
    has_headers = frames.body > frames.head
    whole = frames.ends_with(frames.body, HEADERS_END)
    whole &= frames.body - frames.head >= len(HEADERS_END)
    return short | (has_headers & ~whole)


class Appends:
    """The appends and ends of aggregates among some messages, without copies for others."""

    def __init__(self, frames: Frames, prefix_size: int) -> None:
        key = frames.subject + prefix_size
        # A damaged subject may end before its key.
        letter = frames.byte(np.minimum(key, frames.subject_end))
        own = (letter == _UNDERSCORE) & (frames.subject_end > key + 1) & (prefix_size > 0)
        headers = HeaderLines(frames)
        # As `open_append` does: a whole message without versions is not of the store.
        known = headers.has(VERSIONS_HEADER) | headers.has(PACK_HEADER)
        damaged = _damaged(frames, prefix_size)
        skipped = own | headers.has(FOR_HEADER) | (~known & ~damaged)
        if skipped.any():
            frames = frames.some(~skipped)
            damaged = damaged[~skipped]
            headers = HeaderLines(frames)
        self.frames = frames
        self.headers = headers
        self.count = len(frames)
        self.reasons: dict[int, str] = {}  # why a message cannot be read
        self._prefix_size = prefix_size
        self.first = np.zeros(self.count, np.int64)  # versions of the aggregate
        self.last = np.zeros(self.count, np.int64)
        self._find_versions()
        self.ends = headers.has(NULL_HEADER) | headers.has(MARKER_HEADER)
        for number in np.flatnonzero(headers.has(PACK_HEADER)).tolist():
            self.reasons[number] = _FOREIGN
        self._check_whole(damaged)
        for number in np.flatnonzero(self.ends & (self.first != self.last)).tolist():
            self._miscounted(number, 0)

    def _check_whole(self, damaged: Any) -> None:
        for number in np.flatnonzero(damaged).tolist():
            subject, _, headers, _ = self.frames.message(number)
            try:
                check_whole(subject, headers, self._prefix_size)
            except ValueError as error:
                self.reasons[number] = reason_of(error)

    def _find_versions(self) -> None:
        block = self.headers.words.block
        messages, starts, ends = self.headers.find(VERSIONS_HEADER)
        first, at = numbers_at(block, starts)
        last, end = numbers_at(block, at + 1)
        sure = (block[at] == ord("-")) & (end == ends) & (at > starts) & (end > at + 1)
        sure &= (first >= 1) & (first <= last)
        self.first[messages[sure]], self.last[messages[sure]] = first[sure], last[sure]
        unsure = np.ones(self.count, bool)
        unsure[messages[sure]] = False
        for number in np.flatnonzero(unsure).tolist():
            found = parse_headers(self.frames.headers_of(number))
            try:
                if VERSIONS_HEADER not in found:
                    raise ValueError(_FOREIGN)
                self.first[number], self.last[number] = read_versions(found)
            except ValueError as error:
                self.reasons[number] = reason_of(error)

    def _miscounted(self, number: int, count: int) -> None:
        first, last = int(self.first[number]), int(self.last[number])
        reason = f"it has {count} events and says versions {first} to {last}"
        self.reasons.setdefault(number, reason)

    def lines(self, known: KnownEvents) -> EventLines:
        """The events of the messages; which messages cannot be read is known then."""
        hidden = self.ends.copy()
        hidden[list(self.reasons)] = True
        shown = np.flatnonzero(~hidden)
        frames = self.frames if len(shown) == self.count else self.frames.some(shown)
        block, ends = joined_payloads(frames)
        lines = EventLines(block, ends, known.tags)
        unusual = lines.messages_with_unknown_tags()
        if len(unusual):
            payloads = frames.cut(frames.body, frames.end).to_pylist()
            for number in unusual.tolist():
                payloads[number] = self._usual(int(shown[number]), payloads[number], known)
            lines = EventLines(*joined_texts(payloads), known.tags)
        wrong = lines.counts != self.last[shown] - self.first[shown] + 1
        for number in np.flatnonzero(wrong).tolist():
            self._miscounted(int(shown[number]), int(lines.counts[number]))
        lines.place(shown, self.reasons)
        return lines

    def _usual(self, number: int, payload: bytes, known: KnownEvents) -> bytes:
        """A payload as a store writes it, with tags that are known from now on."""
        try:
            found = split_lines(payload)
        except ValueError as error:
            self.reasons[number] = reason_of(error)
            return b""
        for tag in {tag for tag, _ in found}:
            known.learn(tag)
        return join_lines(found)

    # -- columns of messages ------------------------------------------------------------------

    def aggregates(self) -> pa.Array:
        frames = self.frames
        tokens = frames.cut(frames.subject + self._prefix_size, frames.subject_end)
        if (np.frombuffer(tokens.buffers()[2], np.uint8) == _ESCAPE).any():
            texts = (token.decode("utf-8", "surrogateescape") for token in tokens.to_pylist())
            ids = (id_of(text).encode("utf-8", "surrogateescape") for text in texts)
            return pa.array(ids, pa.binary())
        return tokens

    @cached_property
    def nanoseconds(self) -> Any:
        """When each append was stored first."""
        stored = self.frames.nanoseconds()
        for number, text in self.headers.texts(STORED_HEADER).items():
            stored[number] = event_ns(text, int(stored[number]))
        return stored

    @cached_property
    def sequences(self) -> Any:
        """The offset of each message."""
        return self.frames.sequences()

    def stored_micros(self) -> Any:
        return self.nanoseconds // 1000

    def event_micros(self) -> Any:
        """Event times; where none was given, the time of storing."""
        stored = self.nanoseconds
        times = stored // 1000
        for number, text in self.headers.texts(TIME_HEADER).items():
            times[number] = event_ns(text, int(stored[number])) // 1000
        return times

    def texts(self, name: str) -> pa.Array:
        found = self.headers.texts(name)
        texts = [found.get(number) for number in range(self.count)] if found else None
        return pa.nulls(self.count, pa.string()) if texts is None else _text_column(texts)


def _text_column(texts: list[str | None]) -> pa.Array:
    data = [None if t is None else t.encode("utf-8", "surrogateescape") for t in texts]
    return fitted(pa.array(data, pa.binary()), pa.string())


class _Rows:
    """The rows of some messages: one for each event, end of an aggregate, or unreadable message."""

    def __init__(self, messages: Appends, lines: EventLines, known: KnownEvents) -> None:
        self._messages = messages
        self._lines = lines
        self._known = known
        per_message = np.ones(messages.count, np.int64)
        per_message[lines.messages] = lines.counts_of_messages
        self.message = np.repeat(np.arange(messages.count), per_message)
        self.count = len(self.message)
        starts = np.cumsum(per_message) - per_message
        self._simple = self.count == messages.count
        self.index = np.arange(self.count) - starts[self.message]
        self.reasons = {int(starts[n]): reason for n, reason in messages.reasons.items()}
        # Where the row of each line is.
        has_lines = np.zeros(messages.count, bool)
        has_lines[lines.messages] = True
        self._row_of_line = np.flatnonzero(has_lines[self.message])
        for number in np.flatnonzero(lines.tag < 0).tolist():
            tag = lines.tag_text(number)
            reason = known.learn(tag) or _FOREIGN
            self.reasons[int(self._row_of_line[number])] = reason

    def spread(self, column: pa.Array) -> pa.Array:
        """A column of messages as one of rows."""
        return column if self._simple else column.take(pa.array(self.message))

    def offsets(self) -> Any:
        return self._messages.sequences[self.message]

    def versions(self) -> pa.Array:
        first = self._messages.first[self.message]
        return pa.array(first + self.index, mask=first == 0)

    def names(self) -> pa.Array:
        codes = np.full(self.count, -1)
        codes[self._row_of_line] = self._lines.tag
        ends = self._messages.ends[self.message]
        codes[ends] = len(self._known.names)
        codes[[row for row in self.reasons if self._messages.first[self.message[row]] == 0]] = -1
        names = pa.array([*self._known.names, _DELETED], pa.string())
        return names.take(pa.array(codes, mask=codes < 0))

    def aggregates(self) -> pa.Array:
        return self.spread(self._messages.aggregates())

    def times(self) -> pa.Array:
        return self.spread(pa.array(self._messages.event_micros()).cast(_TIME))

    def stored(self) -> pa.Array:
        return self.spread(pa.array(self._messages.stored_micros()).cast(_TIME))

    def texts(self, name: str) -> pa.Array:
        return self.spread(self._messages.texts(name))

    def headers(self) -> pa.Array:
        frames = self._messages.frames
        found = [user_headers(frames.headers_of(n)) for n in range(len(frames))]
        return self.spread(pa.array(found, _HEADERS))

    def reason_column(self) -> pa.Array:
        return pa.array([self.reasons.get(row) for row in range(self.count)], pa.string())

    def events_column(self, name: str, wanted: pa.DataType) -> pa.Array:
        """The events of one type, null in the rows of others."""
        columns = self._known.columns(name)
        parts: list[pa.Array] = []
        places: list[Any] = []  # the rows of each part
        for number, other in enumerate(self._known.names):
            if other != name:
                continue
            chosen = np.flatnonzero(self._lines.tag == number)
            if not len(chosen):
                continue
            texts = self._lines.bodies(chosen)
            version = self._known.versions[number]
            read, reasons = columns.column_and_reasons(version, texts, len(chosen))
            rows = self._row_of_line[chosen]
            self.reasons.update({int(rows[n]): reason for n, reason in reasons.items()})
            parts.append(fitted(read, wanted))
            places.append(rows)
        if not parts:
            return pa.nulls(self.count, wanted)
        if len(parts) == 1 and len(parts[0]) == self.count:
            return parts[0]
        place = np.full(self.count, -1)  # of each row's event among those that were read
        rows = np.concatenate(places)
        place[rows] = np.arange(len(rows))
        return pa.concat_arrays(parts).take(pa.array(place, mask=place < 0))


_MAKE: Final[dict[str, Callable[[_Rows], pa.Array]]] = {
    "aggregate": _Rows.aggregates,
    "version": _Rows.versions,
    "event": _Rows.names,
    "timestamp": _Rows.times,
    "stored": _Rows.stored,
    "offset": lambda rows: pa.array(rows.offsets()),
    "index": lambda rows: pa.array(rows.index),
    "correlation_id": lambda rows: rows.texts(CORRELATION_HEADER),
    "causation_id": lambda rows: rows.texts(CAUSATION_HEADER),
    "headers": _Rows.headers,
    "reason": _Rows.reason_column,
}
