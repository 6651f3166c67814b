"""Stores what clients produce to one partition: exactly once for idempotent producers.

Group commit: while packs are being stored, the batches of all clients gather for the next one.
Everything is written under one fence, so that a gateway that was taken over can store nothing more.
Before the first batch is judged, the fence is claimed and everything before the claim is counted:
then it is known of every batch whether it is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from millstream.errors import (
    ConfigError,
    DataLoss,
    FencedOut,
    MillstreamError,
    PayloadTooLarge,
    Unfit,
)
from millstream.events.fence import fence_subject
from millstream.events.packs.encode import EncodedPack, split
from millstream.events.packs.envelope import ENVELOPE, complete
from millstream.events.packs.packing import PACK_EVENTS_MAX, Packing
from millstream.failure_log import FailureLog
from millstream.gateways.kafka.batch_cache import BatchCache, CachedRun, Piece
from millstream.gateways.kafka.offset_index import UNKNOWN
from millstream.gateways.kafka.pack_notes import (
    BATCHES_HEADER,
    TIMES_HEADER,
    WRITER,
    BatchNote,
    PackNotes,
    batches_text,
    times_text,
)
from millstream.gateways.kafka.partition_offsets import PartitionOffsets
from millstream.gateways.kafka.producer_state import SentBatch, Verdict, last_sequence
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import (
    RawBatch,
    Records,
    read_records,
    with_base_offset,
)
from millstream.gateways.kafka.values import take
from millstream.gateways.overload import Books
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.publishing.target import PackTarget
from millstream.wire.batch import BATCH_BYTES_MAX

if TYPE_CHECKING:
    from millstream.gateways.values import TopicValues

__all__ = ["Appended", "PartitionWriter"]

_log = logging.getLogger("millstream.gateways.kafka")

CLOSE_SECONDS: Final = 1.0  # in which what was taken may still be stored
# Bytes of a pack beyond which nothing is added to it; a batch may be larger by itself.
GROUP_BYTES: Final = 4 * 1024 * 1024
GROUP_EVENTS: Final = 100_000
BATCHES_MAX: Final = 500  # in one pack; each is named in its headers
HEADERS_ROOM: Final = 40 * 1024  # of a pack, for that
# Bytes that may wait to be stored; more is refused, and clients send it again.
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
_PACKING: Final = Packing()
_AGAIN: Final = "the broker does not store at the moment; send it again"


class Appended(NamedTuple):
    """What became of a batch."""

    base_offset: int
    error: ErrorCode = ErrorCode.none
    text: str = ""
    record: int | None = None  # the record that was the reason


@dataclass(eq=False, slots=True)
class _Batch:
    """A batch that waits to be stored."""

    raw: RawBatch
    columns: pa.RecordBatch = field(repr=False)
    same: bool  # readers get what the client sent, byte for byte
    schema_id: str | None
    times: tuple[int, int] | None  # the smallest and the largest, if every record has one
    sent: SentBatch | None  # of an idempotent producer
    size: int
    done: asyncio.Future[Appended] = field(repr=False)
    copies: list[_Batch] = field(default_factory=list)  # that get the same answer
    alone: bool = False  # in a pack of its own


@dataclass(eq=False, slots=True)
class _Group:
    """Batches that are stored together, as one pack or, if one is large, as several."""

    batches: list[_Batch]
    packs: list[EncodedPack]
    notes: PackNotes


class PartitionWriter:
    """Takes batches, and answers when they are on disk."""

    def __init__(
        self,
        target: PackTarget,
        number: int,
        offsets: PartitionOffsets,
        values: TopicValues | None,
        cache: BatchCache,
        books: Books,
    ) -> None:
        self._target = target
        self._offsets = offsets
        self._values = values
        self._cache = cache
        self._books = books
        self._subject = fence_subject(target.shape.prefixes[number], WRITER)
        self._lane: FencedLane | None = None  # None: the fence has to be claimed first
        self._waiting: deque[_Batch] = deque()
        self._waiting_bytes = 0
        self._under_way: _Group | None = None
        self._failures = FailureLog(_log)
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    # -- taking batches -------------------------------------------------------------------

    async def append(
        self, raw: RawBatch, look_at: Callable[[Records], object]
    ) -> asyncio.Future[Appended]:
        """Take a batch to be stored; the future says where it is then.

        BadBatch if its records cannot be stored; `look_at` may raise it, too. Batches are stored in
        the order of the calls, if each is awaited before the next.
        """
        done: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        if self._takes_no_more():
            done.set_result(Appended(-1, ErrorCode.kafka_storage_error, _AGAIN))
            return done
        with self._books.step("produce: records to columns"):
            records = read_records([raw], max_bytes=BATCH_BYTES_MAX // 2)
            look_at(records)
        columns, same, schema_id = records.columns, records.same_as_sent, None
        times = records.times if records.all_timed else None
        if self._values is not None:
            columns, schema_id = await take(self._values, columns, [raw.head.count])
            same = False
            if self._takes_no_more():  # by now
                done.set_result(Appended(-1, ErrorCode.kafka_storage_error, _AGAIN))
                return done
        head = raw.head
        sent = None
        if head.producer_id >= 0:
            last = last_sequence(head.first_sequence, head.count)
            sent = SentBatch(head.producer_id, head.epoch, head.first_sequence, last)
        size = pa.ipc.get_record_batch_size(columns)
        self._waiting.append(_Batch(raw, columns, same, schema_id, times, sent, size, done))
        self._waiting_bytes += size
        self._work.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return done

    def _takes_no_more(self) -> bool:
        return self._closed or self._waiting_bytes > WAITING_BYTES_MAX

    async def close(self) -> None:
        """Store what was taken, if that does not take long, and take nothing more."""
        self._closed = True
        if self._task is not None:
            self._work.set()
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._refuse_all(ErrorCode.not_leader_or_follower, "the gateway stops")

    # -- storing them ---------------------------------------------------------------------

    async def _run(self) -> None:
        while self._waiting or not self._closed:
            if not self._waiting:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                await self._store_next()
            except Exception as error:
                if not isinstance(error, MillstreamError):
                    _log.exception("storing to '%s' failed", self._offsets.stream)
                self._give_up(error)

    async def _store_next(self) -> None:
        lane = self._lane or await self._claim()
        self._under_way = self._next_group()
        if self._under_way is None:
            return
        try:
            # The position is for those who count again what a checkpoint does not cover.
            state = await lane.store(self._under_way.packs, self._offsets.place)
        except DataLoss:
            if not await self._fence_gone(lane):
                raise
            self._wait_again(self._under_way)
            return
        await self._target.acks.check()  # the server may be another one by now
        await self._count(self._under_way, state.sequence)
        self._under_way = None

    async def _claim(self) -> FencedLane:
        target, stream = self._target, self._offsets.stream
        if self._offsets.failed is not None:
            raise self._offsets.failed  # the fence may be that of whoever took over
        lane = FencedLane(target.jetstream, target.publisher, stream, self._subject, WRITER)
        await target.acks.check()
        state = await lane.claim()
        await self._offsets.known(state.sequence)
        await self._offsets.covered(self._offsets.index.end_offset)  # copies are answered at once
        self._offsets.producers.forget_under_way()
        self._lane = lane
        return lane

    def _next_group(self) -> _Group | None:
        """The next batches that fit one pack; those that are copies, or refused, are answered."""
        chosen: list[_Batch] = []
        size = events = 0
        while self._waiting and len(chosen) < BATCHES_MAX:
            batch = self._waiting[0]
            if chosen and (
                size + batch.size > GROUP_BYTES
                or events + batch.columns.num_rows > GROUP_EVENTS
                or batch.schema_id != chosen[0].schema_id
                or not _same_values(batch.columns, chosen[0].columns)
                or batch.alone
                or chosen[0].alone
            ):
                break
            self._waiting.popleft()
            self._waiting_bytes -= batch.size
            if self._is_new(batch):
                chosen.append(batch)
                size += batch.size
                events += batch.columns.num_rows
        if not chosen:
            return None
        try:
            with self._books.step("produce: columns to packs"):
                return self._group(chosen)
        except Exception as error:
            if len(chosen) > 1:  # one of them is the reason: no reason to refuse the others
                for batch in reversed(chosen):
                    batch.alone = True
                    self._put_back(batch)
            elif isinstance(error, PayloadTooLarge | Unfit | ConfigError):
                self._refuse(chosen[0], ErrorCode.message_too_large, str(error))
            else:
                _log.exception("a batch for '%s' was not stored", self._offsets.stream)
                self._refuse(chosen[0], ErrorCode.kafka_storage_error, str(error))
            return None

    def _put_back(self, batch: _Batch) -> None:
        """It is judged again, before everything that waits."""
        if batch.sent is not None:
            self._offsets.producers.settle(batch.sent)
        self._waiting.appendleft(batch)
        self._waiting_bytes += batch.size

    def _is_new(self, batch: _Batch) -> bool:
        """Whether a batch has to be stored; else it is answered, now or with its first copy."""
        if batch.sent is None:
            return True
        producers = self._offsets.producers
        judged = producers.judge(batch.sent)
        if judged.verdict is Verdict.NEW:
            producers.accept(batch.sent, batch)
            return True
        if judged.verdict is Verdict.UNDER_WAY:
            first: _Batch = judged.answer
            first.copies.append(batch)
        else:
            _answer(batch, Appended(judged.offset, judged.error, judged.text))
        return False

    def _group(self, batches: list[_Batch]) -> _Group:
        columns = _joined([batch.columns for batch in batches])
        packs = self._packed(columns, batches[0].schema_id)
        start = columns.num_rows - packs[-1].count  # the last pack has the notes
        notes, row = [], -start
        for batch in batches:
            if batch.sent is not None:
                notes.append(BatchNote(batch.sent, row))
            row += batch.columns.num_rows
        if notes:
            packs[-1].headers[BATCHES_HEADER] = batches_text(notes)
        spans = [batch.times for batch in batches]
        known = [span for span in spans if span is not None]
        max_ms = UNKNOWN
        if len(known) == len(spans):
            max_ms = max(span[1] for span in known)
            text = times_text(min(span[0] for span in known), max_ms)
            for pack in packs:
                pack.headers[TIMES_HEADER] = text
        return _Group(batches, packs, PackNotes(packs[-1].count, max_ms, tuple(notes)))

    def _packed(self, columns: pa.RecordBatch, schema_id: str | None) -> list[EncodedPack]:
        largest = self._target.jetstream.connection.info.max_payload - HEADERS_ROOM
        encode = self._target.encode_version
        # To find where to split takes longer than to pack, and what is small nearly always fits.
        size = pa.ipc.get_record_batch_size(columns)
        if size < largest // 2 and columns.num_rows <= PACK_EVENTS_MAX:
            pack = encode(columns, _PACKING, schema_id)
            if pack.payload.size <= largest:
                return [pack]
        pieces = split(columns, PACK_EVENTS_MAX, largest)
        return [encode(piece, _PACKING, schema_id) for piece in pieces]

    async def _count(self, group: _Group, sequence: int) -> None:
        offsets = self._offsets
        alone = len(group.packs) == 1
        if not (alone and offsets.note_own(sequence, group.notes)):
            await offsets.known(sequence)  # others write to this partition, too
        last_base = offsets.index.base_offset(sequence)
        base = last_base + group.packs[-1].count - sum(pack.count for pack in group.packs)
        end = last_base + group.packs[-1].count
        await offsets.covered(end)
        if alone:
            self._keep(group, sequence, base, end)
        for batch in group.batches:
            if batch.sent is not None:
                offsets.producers.settle(batch.sent)
            _answer(batch, Appended(base))
            base += batch.columns.num_rows

    def _keep(self, group: _Group, sequence: int, base: int, end: int) -> None:
        """Hand the batches out as they came, to readers near the end."""
        if not all(batch.same for batch in group.batches):
            return
        pieces: list[Piece] = []
        for batch in group.batches:
            pieces.extend(with_base_offset(batch.raw.raw, base, self._offsets.leader_epoch))
            base += batch.columns.num_rows
        size = sum(map(len, pieces))
        run = CachedRun(sequence + 1, end, end - 1, tuple(pieces), size)
        self._cache.put(self._offsets.stream, sequence, run)

    # -- when something fails -------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        """Nothing is stored until the fence is claimed again; everything that waits is answered.

        What was under way may be stored or not. Whoever sends it again gets the right answer, since
        it is judged after the next claim.
        """
        self._lane = None
        if isinstance(error, FencedOut):
            self._offsets.fail(error)
        code = ErrorCode.kafka_storage_error  # clients try again, as they do after the other one
        if self._offsets.failed is not None:
            code = ErrorCode.not_leader_or_follower
        text = str(error)
        self._failures.warn(None, "'%s' did not store: %s", self._offsets.stream, text)
        self._refuse_all(code, text)

    def _refuse_all(self, code: ErrorCode, text: str) -> None:
        group, self._under_way = self._under_way, None
        for batch in [*([] if group is None else group.batches), *self._waiting]:
            self._refuse(batch, code, text)
        self._waiting.clear()
        self._waiting_bytes = 0

    async def _fence_gone(self, lane: FencedLane) -> bool:
        """Whether retention removed the last pack: then nothing is lost, and a new claim helps."""
        await self._offsets.look_at_head(0)
        return self._offsets.first_sequence > lane.state.sequence

    def _wait_again(self, group: _Group) -> None:
        """What was under way is stored after the next claim, before everything else."""
        self._lane = self._under_way = None
        for batch in reversed(group.batches):
            self._put_back(batch)

    def _refuse(self, batch: _Batch, code: ErrorCode, text: str) -> None:
        if batch.sent is not None:
            self._offsets.producers.settle(batch.sent)
        _answer(batch, Appended(-1, code, text))


def _answer(batch: _Batch, answer: Appended) -> None:
    for one in (batch, *batch.copies):
        if not one.done.done():  # else the client is gone
            one.done.set_result(answer)


def _same_values(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    kinds = (one.schema.field("value").type, other.schema.field("value").type)
    return bool(kinds[0].equals(kinds[1]))


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows: a pack of many small ones would be slow to read."""
    if len(batches) == 1:
        return batches[0]
    present = {name for batch in batches for name in batch.schema.names}
    names = [name for name in ENVELOPE if name in present]
    return pa.concat_batches([complete(batch).select(names) for batch in batches])
