"""From messages to record batches, in exactly the columns and types that Spark expects."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import Undecodable
from millstream.events.classify import (
    KIND_MARKS,
    OWN_MARK,
    Kind,
    check_whole,
    kind_of,
)
from millstream.events.escapes import escaped
from millstream.events.event import (
    KEY_HEADER,
    RESERVED_PREFIXES,
    SCHEMA_HEADER,
    TIME_HEADER,
    event_ns,
)
from millstream.events.packs.pack import Pack, decode
from millstream.events.subject import KEYLESS_TOKEN, key_bytes, key_of_token
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.spark.source.frames import Frames
from millstream.spark.source.offsets import PartitionState
from millstream.spark.source.values import Decoded, ValueDecoder, fitted
from millstream.wire.api import AckAddress, parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.protocol import HEADERS_END, parse_header_items, parse_headers

__all__ = ["RowBatches", "kinds_of", "user_headers"]

_UNDERSCORE: Final = 95
# As regular expressions, because one of several marks is found in one pass.
_KIND_MARK: Final = "|".join(mark.decode() for mark in KIND_MARKS)
_ANY_MARK: Final = f"{OWN_MARK.decode()}|{_KIND_MARK}"
_KEYLESS: Final = KEYLESS_TOKEN.encode()
_TIME: Final = pa.timestamp("us", "UTC")
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def kinds_of(frames: Frames, prefix_size: int) -> dict[int, Kind]:
    """The kinds of messages by number; one that is missing is an event without our headers.

    The same kinds as those of `kind_of`, which is called only if the headers can make a difference.
    """
    kinds: dict[int, Kind] = {}
    if prefix_size:
        key = frames.subject + prefix_size
        # A damaged subject may end before its key.
        first = frames.byte(np.minimum(key, frames.subject_end))
        own = (first == _UNDERSCORE) & (frames.subject_end > key + 1)
        kinds = dict.fromkeys(np.flatnonzero(own).tolist(), Kind.OWN)
        keyless = np.flatnonzero(frames.subject_end <= key)
        kinds.update(dict.fromkeys(keyless.tolist(), Kind.DAMAGED))
    with_headers = np.flatnonzero(frames.body > frames.head)
    if not len(with_headers):
        return kinds
    head, body = frames.head[with_headers], frames.body[with_headers]
    whole = frames.ends_with(body, HEADERS_END) & (body - head >= len(HEADERS_END))
    kinds.update(dict.fromkeys(with_headers[~whole].tolist(), Kind.DAMAGED))
    blocks = frames.cut(head, body)
    found = pc.match_substring_regex(blocks, _ANY_MARK)
    marked = with_headers[found.to_numpy(zero_copy_only=False)]
    if not len(marked):
        return kinds
    special = pc.match_substring_regex(blocks.filter(found), _KIND_MARK)
    for number in marked.tolist():
        kinds.setdefault(number, Kind.EVENT)
    for number in marked[special.to_numpy(zero_copy_only=False)].tolist():
        subject, _, headers, _ = frames.message(number)
        kinds[number] = kind_of(subject, headers, prefix_size)
    return kinds


class RowBatches:
    """Turns the messages of one partition into record batches of one schema."""

    def __init__(
        self, schema: pa.Schema, partition: PartitionState, values: ValueDecoder, undecodable: str
    ) -> None:
        self.schema = schema
        self.dropped = 0
        self.first_dropped = ""
        self._partition = partition
        self._values = values
        self._policy = undecodable
        prefix = partition.prefix
        self._prefix_size = 0 if prefix is None else len(prefix.encode()) + 1
        self._wanted = set(schema.names)

    def of(self, frames: Frames) -> Iterator[pa.RecordBatch]:
        """The rows of some messages, in order; Millstream's own messages are left out.

        Packs are opened one by one as their rows are needed: the rows of a window may take many
        times the memory of the compressed packs.
        """
        kinds = kinds_of(frames, self._prefix_size)
        keep = np.ones(len(frames), bool)
        # A copy that was redriven for one subscription has been read here before.
        keep[[n for n, kind in kinds.items() if kind.redriven or not kind.is_plain]] = False
        marked = sorted(n for n in kinds if keep[n])
        start = 0
        for number in sorted(n for n, kind in kinds.items() if kind.is_pack and not kind.redriven):
            yield from self._plain(frames, keep, kinds, marked, slice(start, number))
            yield from self._pack(frames.message(number))
            start = number + 1
        yield from self._plain(frames, keep, kinds, marked, slice(start, len(frames)))

    # -- plain messages -------------------------------------------------------------------

    def _plain(
        self, frames: Frames, keep: Any, kinds: dict[int, Kind], marked: list[int], part: slice
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the messages in `part` that are kept; `marked` are those with our headers."""
        order = part.start + np.flatnonzero(keep[part])
        if not len(order):
            return
        marked = marked[bisect_left(marked, part.start) : bisect_left(marked, part.stop)]
        rows_marked = np.searchsorted(order, marked).tolist()
        headers = {
            row: parse_headers(frames.headers_of(number))
            for row, number in zip(rows_marked, marked, strict=True)
        }
        deleted = [
            row
            for row, number in zip(rows_marked, marked, strict=True)
            if kinds[number] is Kind.DELETION
        ]
        chosen = frames if len(order) == len(frames) else frames.some(order)
        rows = _PlainRows(chosen, self._prefix_size, headers, deleted)
        decoded = None
        if self._wanted & {"value", "reason"}:
            decoded = self._values.plain(rows.payloads(), rows.schema_ids())
        make: dict[str, Callable[[], Any]] = {
            "key": rows.keys,
            "offset": lambda: pa.array(rows.offsets()),
            "timestamp": lambda: pa.array(rows.micros()).cast(_TIME),
            "subject": rows.subjects,
            "index": lambda: pa.repeat(pa.scalar(0, pa.int32()), rows.count),
            "headers": lambda: pa.array(rows.headers(), _HEADERS),
        }
        yield self._assembled(rows.count, make, decoded, lambda n: (int(rows.offsets()[n]), 0))

    # -- packs ----------------------------------------------------------------------------

    def _pack(self, message: RawMessage) -> Iterator[pa.RecordBatch]:
        address = parse_ack_address(message.reply)
        sequence = address.sequence
        try:
            check_whole(message.subject, message.headers, self._prefix_size)
            pack = decode(parse_headers(message.headers), message.payload)
        except DECODE_FAILURES as error:
            yield from self._invalid_pack(message, address, error)
            return
        count = pack.count
        if not count:
            return
        decoded = None
        if self._wanted & {"value", "reason"}:
            decoded = self._values.packed(pack.column("value"), pack.schema_id)
        make: dict[str, Callable[[], Any]] = {
            "key": lambda: pack.column("key"),
            "offset": lambda: pa.repeat(pa.scalar(sequence, pa.int64()), count),
            "timestamp": lambda: _times(pack, address.timestamp_ns // 1000),
            "subject": lambda: pa.repeat(pa.scalar(message.subject, pa.binary()), count),
            "index": lambda: pa.array(range(count), pa.int32()),
            "headers": lambda: pack.column("headers"),
        }
        yield self._assembled(count, make, decoded, lambda n: (sequence, n))

    def _invalid_pack(
        self, message: RawMessage, address: AckAddress, error: Exception
    ) -> Iterator[pa.RecordBatch]:
        """One row for a pack that cannot be opened, if the option `undecodable` is `null`."""
        sequence = address.sequence
        reason = reason_of(error)
        if self._policy == "fail":
            raise self._error(sequence, 0, reason) from error
        if self._policy == "drop":
            self._drop(1, sequence, reason)
            return
        time = address.timestamp_ns // 1000
        make: dict[str, Callable[[], Any]] = {
            "key": lambda: pa.nulls(1, pa.binary()),
            "offset": lambda: pa.array([sequence], pa.int64()),
            "timestamp": lambda: pa.array([time], pa.int64()).cast(_TIME),
            "subject": lambda: pa.array([message.subject], pa.binary()),
            "index": lambda: pa.array([0], pa.int32()),
            "headers": lambda: pa.nulls(1, _HEADERS),
        }
        value = None
        if "value" in self._wanted:
            value = pa.nulls(1, self.schema.field("value").type)
        yield self._assembled(1, make, Decoded(value, [reason]), lambda _: (sequence, 0))

    # -- both -----------------------------------------------------------------------------

    def _assembled(
        self,
        count: int,
        make: dict[str, Callable[[], Any]],
        decoded: Decoded | None,
        position: Callable[[int], tuple[int, int]],  # offset and index of a row
    ) -> pa.RecordBatch:
        if decoded is not None and decoded.reasons is not None and self._policy == "fail":
            number = next(n for n, reason in enumerate(decoded.reasons) if reason)
            raise self._error(*position(number), decoded.reasons[number] or "")
        arrays = []
        for field in self.schema:
            if field.name == "value":
                array = decoded.array if decoded is not None else None
            elif field.name == "reason":
                reasons = decoded.reasons if decoded is not None else None
                array = pa.array(reasons or [None] * count, pa.string())
            elif field.name == "topic":
                array = pa.repeat(pa.scalar(self._partition.topic, pa.string()), count)
            elif field.name == "partition":
                array = pa.repeat(pa.scalar(self._partition.partition, pa.int32()), count)
            else:
                array = make[field.name]()
            arrays.append(fitted(array, field.type))
        batch = (
            pa.RecordBatch.from_arrays(arrays, schema=self.schema)
            if arrays
            else pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
        )
        return self._without_dropped(batch, decoded, position)

    def _without_dropped(
        self, batch: pa.RecordBatch, decoded: Decoded | None, position: Callable[[int], Any]
    ) -> pa.RecordBatch:
        if decoded is None or decoded.reasons is None or self._policy != "drop":
            return batch
        keep = [reason is None for reason in decoded.reasons]
        number = keep.index(False)
        self._drop(keep.count(False), position(number)[0], decoded.reasons[number] or "")
        return batch.filter(pa.array(keep))

    def _drop(self, count: int, sequence: int, reason: str) -> None:
        self.dropped += count
        self.first_dropped = self.first_dropped or f"offset {sequence}: {reason}"

    def _error(self, sequence: int, index: int, reason: str) -> Undecodable:
        topic, number = self._partition.topic_partition
        return Undecodable(topic, number, sequence, index, reason)


def _times(pack: Pack, stored_micros: int) -> pa.Array:
    """The events' own times; those without one have the time at which the pack was stored."""
    stored = pa.scalar(stored_micros, pa.int64()).cast(_TIME)
    if "timestamp" not in pack.schema.names:
        return pa.repeat(stored, pack.count)
    times = pack.column("timestamp")
    return pc.fill_null(times, stored) if times.null_count else times


class _PlainRows:
    """The columns of plain messages. Only header blocks with headers of ours are parsed."""

    def __init__(
        self, frames: Frames, prefix_size: int, own: dict[int, dict[str, str]], deleted: list[int]
    ) -> None:
        self._frames = frames
        self._prefix_size = prefix_size
        self._own = own  # headers by row, where there are some of ours
        self._deleted = deleted  # rows without a value
        self.count = len(frames)

    def payloads(self) -> pa.Array:
        values = self._frames.cut(self._frames.body, self._frames.end)
        if not self._deleted:
            return values
        deleted = np.zeros(self.count, bool)
        deleted[self._deleted] = True
        return pc.if_else(pa.array(deleted), pa.scalar(None, pa.binary()), values)

    def schema_ids(self) -> list[str | None] | None:
        ids: list[str | None] | None = None
        for number, headers in self._own.items():
            if SCHEMA_HEADER in headers:
                ids = ids or [None] * self.count
                ids[number] = headers[SCHEMA_HEADER]
        return ids

    def keys(self) -> pa.Array:
        """The key in the last token of each subject."""
        if self._prefix_size:
            frames = self._frames
            tokens = frames.cut(frames.subject + self._prefix_size, frames.subject_end)
        else:
            tokens = pa.nulls(self.count, pa.binary())
        named = {n: own[KEY_HEADER] for n, own in self._own.items() if KEY_HEADER in own}
        escaped = self._prefix_size and pc.any(pc.match_substring(tokens, b"=")).as_py()
        if not escaped and not named:
            none = pc.equal(tokens, pa.scalar(_KEYLESS, pa.binary()))
            return pc.if_else(none, pa.scalar(None, pa.binary()), tokens)
        keys = [None if token is None else _key(token) for token in tokens.to_pylist()]
        for number, text in named.items():
            keys[number] = _key(key_bytes(text))
        return pa.array(keys, pa.binary())

    def offsets(self) -> Any:
        return self._frames.sequences()

    def micros(self) -> Any:
        stored = self._frames.nanoseconds()
        times = stored // 1000
        for number, headers in self._own.items():
            # Only microseconds of the years 1 to 9999 fit 64 bits.
            times[number] = event_ns(headers.get(TIME_HEADER), int(stored[number])) // 1000
        return times

    def subjects(self) -> pa.Array:
        return self._frames.cut(self._frames.subject, self._frames.subject_end)

    def headers(self) -> list[list[tuple[str, bytes]] | None]:
        return [user_headers(self._frames.headers_of(n)) for n in range(self.count)]


def _key(token: bytes) -> bytes | None:
    if b"=" in token or token == b"_":
        key = key_of_token(token)
        return None if key is None else key_bytes(key)
    return token


def user_headers(block: bytes) -> list[tuple[str, bytes]] | None:
    """The user's own headers of a block; None if there are none."""
    if not block:
        return None
    pairs = [
        (escaped(name), value.encode("utf-8", "surrogateescape"))
        for name, value in parse_header_items(block)
        if not name.startswith(RESERVED_PREFIXES)
    ]
    return pairs or None
