"""Stored messages of one partition as Kafka's record batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.events.classify import kind_of
from millstream.events.event import Partition, PlainEvent
from millstream.events.packs.pack import Pack
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import open_pack
from millstream.failure_log import FailureLog
from millstream.gateways.kafka.batch_cache import BatchCache, CachedRun, Piece
from millstream.gateways.kafka.batch_heads import empty_batch
from millstream.gateways.kafka.offset_index import NO_EVENTS
from millstream.gateways.kafka.partition_offsets import PartitionOffsets
from millstream.gateways.kafka.records import from_events, from_pack
from millstream.gateways.overload import Books
from millstream.wire.aio.direct_reader import NO_RESPONDERS, direct_batch
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import parse_ack_address
from millstream.wire.direct import DirectMessage
from millstream.wire.message import RawMessage

if TYPE_CHECKING:
    from millstream.gateways.values import TopicValues

__all__ = ["OutOfRange", "PartitionReader"]

_log = logging.getLogger("millstream.gateways.kafka")

MESSAGES_AT_ONCE: Final = 1000
# At least so much is read at once: what a client does not take is in the cache when it asks again.
READ_BYTES: Final = 1024 * 1024


class OutOfRange(Exception):
    """An offset that the log does not have, or has no more."""


@dataclass(slots=True)
class _Found:
    """Messages that were read, and up to where nothing else is."""

    messages: list[RawMessage]
    next_sequence: int


class PartitionReader:
    """Reads a partition from any offset on."""

    def __init__(
        self,
        jetstream: JetStream,
        partition: Partition,
        offsets: PartitionOffsets,
        values: TopicValues | None,
        cache: BatchCache,
        books: Books,
    ) -> None:
        self._jetstream = jetstream
        self._partition = partition
        self._offsets = offsets
        self._values = values
        self._cache = cache
        self._books = books
        self._failures = FailureLog(_log)

    async def read(self, offset: int, max_bytes: int) -> list[Piece]:
        """Whole batches from the one that has this offset on: at least one, if there is any.

        They are in pieces, to be joined.
        """
        offsets = self._offsets
        await offsets.look_at_head()
        end_offset = offsets.end_offset
        if not offsets.start_offset <= offset <= end_offset:
            raise OutOfRange
        if offset == end_offset:
            return []
        pieces: list[Piece] = []
        size = 0
        sequence = max(offsets.index.sequence_of(offset), offsets.first_sequence)
        told = reached = offset  # up to where the batches tell of offsets; up to where was read
        while reached < end_offset:
            run = self._cache.get(offsets.stream, sequence)
            if run is None and not pieces:
                run = await self._load(sequence, max_bytes)
            if run is None or (pieces and size + run.size > max_bytes):
                break
            if run.last_offset >= offset:
                pieces.extend(run.pieces)
                size += run.size
                told = run.last_offset + 1
            sequence, reached = run.next_sequence, max(reached, run.next_offset)
        if reached > told:
            # What follows is deleted, or nothing that readers get. Without a batch that says so,
            # clients would wait there for ever.
            pieces.append(empty_batch(told, reached - 1, offsets.leader_epoch))
        return pieces

    async def messages(self, sequence: int, stop: int) -> list[RawMessage]:
        """The messages from a sequence on, up to before another one."""
        found: list[RawMessage] = []
        while sequence < stop:
            part = await self._ask(sequence, MESSAGES_AT_ONCE, READ_BYTES)
            found.extend(raw for raw in part.messages if _sequence(raw) < stop)
            if part.next_sequence <= sequence:
                break
            sequence = part.next_sequence
        return found

    def times(self, raw: RawMessage) -> tuple[int, list[int]]:
        """The offset of a message's first event, and the times of its events in milliseconds."""
        address = parse_ack_address(raw.reply)
        base = self._offsets.index.base_offset(address.sequence)
        if self._offsets.notes.pack(raw) is None:
            plain = self._offsets.notes.plain_ms(raw)
            return base, [] if plain == NO_EVENTS else [plain]
        try:
            pack = open_pack(self._partition, raw).pack
        except DECODE_FAILURES:
            return base, []
        stored = address.timestamp_ns // 1_000_000
        if "timestamp" not in pack.schema.names:
            return base, [stored] * pack.count
        micros = pack.column("timestamp").view(pa.int64()).fill_null(stored * 1000)
        times: list[int] = (micros.to_numpy(zero_copy_only=False) // 1000).tolist()
        return base, times

    # -- from the broker ------------------------------------------------------------------

    async def _load(self, sequence: int, max_bytes: int) -> CachedRun | None:
        """Read from a message on, keep all of it; the first run of it. None: try again later."""
        offsets = self._offsets
        found = await self._ask(sequence, MESSAGES_AT_ONCE, max(max_bytes, READ_BYTES))
        if found.next_sequence <= sequence:
            return None
        if self._values is not None:
            await self._values.learn(found.messages)
        first: CachedRun | None = None
        for begin, stop, messages in self._parts(found, sequence):
            with self._books.step("fetch: events to records"):
                run = self._run(begin, stop, messages)
            first = first or run
            self._cache.put(offsets.stream, begin, run)
            await asyncio.sleep(0)  # others come in between: a pack takes milliseconds
        return first

    async def _ask(self, sequence: int, count: int, max_bytes: int) -> _Found:
        """Messages from a sequence on; those that are missing up to there are deleted."""
        end = self._offsets.index.next_sequence
        largest = self._jetstream.connection.info.max_payload
        ask = {"seq": sequence, "batch": count, "max_bytes": max(max_bytes, largest)}
        found, state = await direct_batch(self._jetstream, self._offsets.stream, ask)
        own = [one for one in found if one.stream == self._offsets.stream]
        if state.get("Status") == NO_RESPONDERS or not own or own[0].sequence > sequence:
            # This copy may lag, or the stream allows no direct requests: the leader knows.
            next_one = await self._jetstream.get_message(
                self._offsets.stream, {"seq": sequence, "next_by_subj": ">"}
            )
            if next_one is None or next_one.sequence > sequence:
                await self._offsets.look_at_head(0)
                if sequence < self._offsets.first_sequence:
                    raise OutOfRange  # retention was faster than this reader
            if next_one is None:
                return _Found([], end)
            if not own or own[0].sequence != next_one.sequence:
                own = [DirectMessage.of_leader(self._offsets.stream, next_one)]
        raw = [one.as_delivered(number) for number, one in enumerate(own, 1)]
        known = [one for one in raw if _sequence(one) < end]
        if len(known) < len(raw):
            return _Found(known, end)
        return _Found(known, own[-1].sequence + 1)

    # -- to record batches ----------------------------------------------------------------

    def _parts(
        self, found: _Found, sequence: int
    ) -> Iterator[tuple[int, int, Sequence[RawMessage]]]:
        """Where runs begin and end, without a gap between, and their messages: a pack, or plain."""
        plain: list[RawMessage] = []
        begin = sequence
        for raw in found.messages:
            if self._offsets.notes.pack(raw) is None:
                plain.append(raw)
                continue
            number = _sequence(raw)
            if number > begin:
                yield begin, number, plain
            yield number, number + 1, [raw]
            plain, begin = [], number + 1
        if found.next_sequence > begin:
            yield begin, found.next_sequence, plain

    def _run(self, begin: int, stop: int, messages: Sequence[RawMessage]) -> CachedRun:
        is_pack = len(messages) == 1 and self._offsets.notes.pack(messages[0]) is not None
        if is_pack:
            pieces, last = self._of_pack(messages[0], begin)
        else:
            pieces, last = self._of_plain(messages)
        size = sum(map(len, pieces))
        return CachedRun(stop, self._offsets.index.base_offset(stop), last, pieces, size)

    def _of_plain(self, messages: Sequence[RawMessage]) -> tuple[tuple[Piece, ...], int]:
        """Batches of plain messages, and the offset of the last event."""
        partition, index = self._partition, self._offsets.index
        events = []
        for raw in messages:
            kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
            if kind.is_plain and not kind.redriven:
                events.append((index.base_offset(_sequence(raw)), PlainEvent(partition, raw)))
        if not events:
            return (), -1
        try:
            return (self._batch(events),), events[-1][0]
        except DECODE_FAILURES:
            return self._one_by_one(events)

    def _one_by_one(
        self, events: Sequence[tuple[int, PlainEvent]]
    ) -> tuple[tuple[Piece, ...], int]:
        pieces: list[Piece] = []
        last = -1
        for offset, event in events:
            try:
                pieces.append(self._batch([(offset, event)]))
                last = offset
            except DECODE_FAILURES as error:
                self._left_out(offset, error)
        return tuple(pieces), last

    def _batch(self, events: Sequence[tuple[int, PlainEvent]]) -> Piece:
        values = None if self._values is None else self._values.event_values
        return from_events(events, values, self._offsets.leader_epoch)

    def _of_pack(self, raw: RawMessage, sequence: int) -> tuple[tuple[Piece, ...], int]:
        base = self._offsets.index.base_offset(sequence)
        try:
            pack = open_pack(self._partition, raw).pack
            if not pack.count:
                return (), -1
            stored = parse_ack_address(raw.reply).timestamp_ns // 1_000_000
            pieces = from_pack(pack, base, stored, self._made(pack), self._offsets.leader_epoch)
        except DECODE_FAILURES as error:
            self._left_out(base, error)
            return (), -1
        return pieces, base + pack.count - 1

    def _made(self, pack: Pack) -> Callable[[pa.Array], list[bytes | None]] | None:
        return None if self._values is None else self._values.pack_values(pack)

    def _left_out(self, offset: int, error: Exception) -> None:
        where = f"{self._offsets.stream} offset {offset}"
        self._failures.warn(None, "%s cannot be read and is left out: %s", where, error)


def _sequence(raw: RawMessage) -> int:
    return parse_ack_address(raw.reply).sequence
