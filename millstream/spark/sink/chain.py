"""Exactly once from a Spark task: its rows for one partition as a chain of units under one fence.

A task of a streaming query writes under a name made of the query's id and the task's number, so a
partition has one fence for each task of a query, however many batches there are. The fence's
position is the number of complete batches. No task claims the fence: two attempts of the same task
(a retry, a speculative twin, an older driver) race for the same next sequence; the one that is
rejected reads the fence again and finds its work done.

1. Read the last pack on the fence. If its position is beyond this batch, an earlier attempt stored
   the batch: count the rows and store nothing.
2. If there is none, store an empty pack first, so that data is never sent with expectation 0.
3. Store the rows: one unit if they fit (one pack, or several in one atomic batch whose last message
   is the fence), otherwise a chain of units. Only the position of the last one completes the batch.
4. If an earlier attempt stopped in the middle of a chain, build its units again without storing
   them, compare count and checksum with the fence, and continue after them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from millstream.errors import FencedOut, MillstreamError, RowsMoved
from millstream.events.fence import FenceState, check_not_cut
from millstream.events.fence_writer import (
    RACES_MAX,
    Answer,
    FenceWriter,
    Offer,
    Outcome,
    ReadLast,
    Request,
    Steps,
)
from millstream.events.packs.pack import EncodedPack
from millstream.spark.broker_access import PATIENCE_SECONDS
from millstream.wire.batch import BATCH_MESSAGES_MAX
from millstream.wire.message import OutgoingMessage
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.publish import publish_fenced_batch, publish_one
from millstream.wire.sync.streams import get_message

__all__ = ["Chain", "Fence", "Note", "UnitLimits"]

T = TypeVar("T")
_NOTE = re.compile(r"batch=(\d+) unit=(\d+) rows=(\d+) crc=([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class UnitLimits:
    """How much is stored together."""

    messages: int = BATCH_MESSAGES_MAX - 1
    bytes: int = 32 * 1024 * 1024  # held in memory until stored; the server's limit is 64 MiB


@dataclass(frozen=True, slots=True)
class Note:
    """What a fence records about the batch that is being written."""

    batch: int
    unit: int = 0  # units of this batch that are stored
    rows: int = 0  # events in them
    crc: int = 0  # over their packs, in order

    def __str__(self) -> str:
        return f"batch={self.batch} unit={self.unit} rows={self.rows} crc={self.crc:08x}"

    @classmethod
    def read(cls, text: str) -> Note | None:
        found = _NOTE.fullmatch(text)
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), int(found[3]), int(found[4], 16))


class Fence:
    """The subject that one task of a query owns in a partition.

    `FenceWriter` decides; this asks the broker for it.
    """

    def __init__(
        self, connection: BlockingConnection, stream: str, subject: str, writer: str
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._fence = FenceWriter(subject, writer)

    @property
    def writer(self) -> str:
        return self._fence.writer

    def begin(self) -> FenceState:
        """The state to continue from; a fence that is new gets its first, empty pack."""
        return self._run(self._fence.begin())

    def offer(
        self,
        wanted: FenceState,
        packs: Sequence[EncodedPack],
        beside: Sequence[OutgoingMessage] = (),
    ) -> Offer:
        """Store packs, all or none, as what follows `wanted.sequence`.

        `beside` are plain messages that are stored together with them, before them.
        """
        offer = self._run(self._fence.offer(wanted, packs, beside))
        if not offer.is_stored:
            check_not_cut(self.writer, wanted, offer.state)  # or the units before would be missing
        return offer

    def _run(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    answer = self._ask(request)
                except MillstreamError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _ask(self, request: Request) -> Answer:
        if isinstance(request, ReadLast):
            jetstream = BlockingJetStream(self._connection)
            ask = {"last_by_subj": request.subject}
            return get_message(jetstream, self._stream, ask, PATIENCE_SECONDS)
        messages = request.messages
        if len(messages) == 1:
            return publish_one(self._connection, messages[0], PATIENCE_SECONDS)
        return publish_fenced_batch(self._connection, messages, PATIENCE_SECONDS)


class Chain:
    """The rows of one task and batch for one partition, stored once."""

    def __init__(self, fence: Fence, batch: int, limits: UnitLimits) -> None:
        self._fence = fence
        self._batch = batch
        self._limits = limits
        self._state: FenceState | None = None
        self._packs: list[EncodedPack] = []
        self._bytes = 0
        self._made = Note(batch)  # what this attempt has built so far
        self._found: Note | None = None  # what an earlier attempt stored of this batch
        self._complete = False  # an earlier attempt stored all of it
        self.stored_rows = 0  # by this attempt, and acked
        self.known_rows = 0  # of the batch, known to be stored, by any attempt

    def add(self, pack: EncodedPack) -> None:
        """Take the next pack; a full unit is stored."""
        limits = self._limits
        if self._packs and (
            len(self._packs) >= limits.messages or self._bytes + pack.size > limits.bytes
        ):
            self._seal(final=False)
        self._packs.append(pack)
        self._bytes += pack.size

    def is_complete(self) -> bool:
        """Whether an earlier attempt stored all of this batch."""
        if self._state is None:
            self._read_fence()
        return self._complete

    @property
    def report(self) -> str:
        """What is stored of the batch, in words."""
        state = self._state or FenceState()
        return f"{self.known_rows:,} rows, the last at offset {state.sequence}"

    def finish(self) -> None:
        """Store the rest; after this the batch is complete for this task and partition."""
        self._seal(final=True)
        note = self._found
        if self._complete and note is not None and self._made.rows != note.rows:
            raise self._moved(note)

    def _read_fence(self) -> None:
        state = self._fence.begin()
        self._state = state
        self._complete = state.position > self._batch
        note = Note.read(state.note)
        self._found = note if note is not None and note.batch == self._batch else None
        if self._found is not None:
            self.known_rows = self._found.rows

    def _seal(self, final: bool) -> None:
        if self._state is None:
            self._read_fence()
        packs, self._packs, self._bytes = self._packs, [], 0
        made = self._made
        crc = made.crc
        for pack in packs:
            crc = zlib.crc32(memoryview(pack.payload), crc)
        rows = sum(pack.count for pack in packs)
        self._made = made = Note(self._batch, made.unit + 1, made.rows + rows, crc)
        for _ in range(RACES_MAX):
            if self._complete or self._stored_before(final):
                return
            offer = self._offer(packs, final)
            if offer.is_stored:
                self._state = offer.state
                self.known_rows = made.rows
                if offer.outcome is Outcome.STORED:
                    self.stored_rows += rows
                return
            self._read_fence()
        raise FencedOut(self._fence.writer)

    def _stored_before(self, final: bool) -> bool:
        """Whether the unit that was just built is in the chain of an earlier attempt."""
        found, made = self._found, self._made
        if found is None or made.unit > found.unit:
            return False
        same = (made.rows, made.crc) == (found.rows, found.crc)
        # The last unit of a batch cannot be in a chain that is not complete.
        if final or (made.unit == found.unit and not same):
            raise self._moved(found)
        return True

    def _offer(self, packs: list[EncodedPack], final: bool) -> Offer:
        state = self._state or FenceState()
        position = self._batch + 1 if final else self._batch
        return self._fence.offer(state.next(position, str(self._made)), packs)

    def _moved(self, found: Note) -> RowsMoved:
        return RowsMoved(self._fence.writer, self._batch, found.rows, self._made.rows)
